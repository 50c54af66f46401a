//! The suites that every source, store and forwarder passes, and what tests share: servers, a fault proxy, a stub application.
