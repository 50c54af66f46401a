//! HTTP forwarder.
