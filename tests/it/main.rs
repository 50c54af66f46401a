//! End to end: the real binary, real brokers and databases, a stub application.

mod absent;
mod engine;
mod support;

mod bytes;
mod cells;
mod configuration;
mod cost;
mod database;
mod demo;
mod docs;
mod duplicates;
mod failing;
#[cfg(feature = "failpoints")]
mod failpoints;
mod http;
mod http_answers;
mod http_routes;
mod http_signing;
mod http_tls;
mod identity;
mod kafka;
mod lifecycle;
mod matrix;
mod newcomer;
mod operator;
mod rabbitmq;
mod refusals;
mod telemetry;
