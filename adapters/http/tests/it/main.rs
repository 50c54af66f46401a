//! The HTTP forwarder: the conformance suite, and what only HTTP has.

mod bytes;
mod cloud_events;
mod conformance;
mod connection;
mod contract;
mod goaway;
mod health;
mod hostile;
mod inspect;
mod limits;
mod proxy;
mod response;
mod support;
mod tls;
mod trace;
