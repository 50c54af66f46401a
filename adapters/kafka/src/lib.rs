//! Kafka source.
