//! The Kafka source against real brokers: the shared Kafka of `scripts/services`, own ones
//! where a test breaks its broker, and librdkafka's mock cluster.

mod conformance;
mod connections;
mod consume;
mod front;
mod groups;
mod inspect;
mod latest;
mod letters;
mod mock;
mod positions;
mod produce;
mod records;
mod support;
mod topics;
