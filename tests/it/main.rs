//! End to end: the real binary, real brokers and databases, a stub application.

mod engine;
mod support;

mod database;
mod demo;
mod duplicates;
mod identity;
mod matrix;
