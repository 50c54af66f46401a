//! The Kafka source: a member of a consumer group whose committed offsets never pass an
//! unsettled record.
//!
//! Purpose: [`KafkaSource`] hands records over as deliveries and commits, per partition, the
//! lowest unsettled offset. How it is built, from the outside in: `source` speaks with the
//! engine, `worker` is the thread that polls librdkafka always, `context` is what librdkafka
//! calls back (rebalances above all), `shared` is the lock between them, `partitions` and
//! `tracker` decide without I/O, `beginning` is where `start = latest` begins, `identity` finds out
//! what makes a position an identity,
//! `incarnation` notices topics that were made again.
//!
//! Invariants: see the modules. What must not be here: a seek (a released record is kept and
//! handed over again from memory; only a topic that was made again is set back), an unbounded
//! queue, a call of librdkafka without a bound.

mod beginning;
mod commit;
mod config;
mod context;
mod health;
mod horizon;
mod identity;
mod incarnation;
mod inspect;
mod letter_config;
mod letter_inspect;
mod letters;
mod partitions;
mod raw;
mod shared;
mod source;
mod stats;
mod tracker;
mod worker;

pub use config::{KafkaConfig, PropertyError, StartAt, check_property};
pub use horizon::redelivery_horizon;
pub use inspect::inspect;
pub use letter_config::{DeadLetterTopicConfig, check_dead_letter_property};
pub use letter_inspect::inspect_dead_letters;
pub use letters::DeadLetterTopic;
pub use shared::KafkaCounters;
pub use source::KafkaSource;
