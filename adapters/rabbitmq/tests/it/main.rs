//! RabbitMQ source against real servers.

mod conformance;
mod support;
