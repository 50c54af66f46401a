//! In-memory source, store and forwarder, driven by a fault plan.
