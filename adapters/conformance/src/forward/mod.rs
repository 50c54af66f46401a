//! The suite that every forwarder passes.
