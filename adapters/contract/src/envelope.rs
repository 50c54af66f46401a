//! A delivery's content in broker-neutral form.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// One header of a message. Names and values are bytes as the publisher set
/// them; a name may occur more than once; order is kept. `None` is a null value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The name's bytes.
    pub name: Bytes,
    /// The value's bytes; for AMQP types that are not bytes, their documented text form.
    pub value: Option<Bytes>,
}

impl Header {
    /// A header from anything that gives bytes.
    pub fn new(name: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        Self { name: name.into(), value: Some(value.into()) }
    }
}

/// Where a delivery came from.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", rename_all_fields = "snake_case")]
pub enum Origin {
    /// A record of a Kafka topic.
    Kafka {
        /// The topic's name.
        topic: Arc<str>,
        /// The partition's number.
        partition: i32,
        /// The record's offset.
        offset: i64,
        /// Scope that makes (partition, offset) an identity: cluster id and topic id,
        /// or a stored epoch. Present only when the source was asked for it.
        position_scope: Option<Arc<str>>,
    },
    /// A message of a RabbitMQ queue.
    RabbitMq {
        /// The queue's name.
        queue: Arc<str>,
        /// The exchange it was published to; empty for the default exchange.
        exchange: Arc<str>,
        /// The routing key it was published with.
        routing_key: Arc<str>,
        /// The broker's `redelivered` flag: a hint, it decides nothing.
        redelivered: bool,
        /// `x-delivery-count` of a quorum queue.
        delivery_count: Option<u64>,
    },
    /// Made by a test or an embedded caller.
    Memory {
        /// The stream's name.
        stream: Arc<str>,
        /// The position within it.
        position: u64,
    },
}

impl Origin {
    /// A position that names this very copy and stays the same on redelivery
    /// (topic, partition, offset); `None` where the broker has none.
    pub fn position(&self) -> Option<String> {
        match self {
            Self::Kafka { .. } | Self::Memory { .. } => Some(self.to_string()),
            Self::RabbitMq { .. } => None,
        }
    }

    /// The broker's own word that this is a second hand-over, where it has one.
    pub fn redelivered(&self) -> Option<bool> {
        match self {
            Self::RabbitMq { redelivered, .. } => Some(*redelivered),
            Self::Kafka { .. } | Self::Memory { .. } => None,
        }
    }
}

/// The form of the `Inbox-Origin` header.
impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kafka { topic, partition, offset, .. } => {
                write!(f, "kafka:{topic}/{partition}/{offset}")
            }
            Self::RabbitMq { queue, .. } => write!(f, "rabbitmq:{queue}"),
            Self::Memory { stream, position } => write!(f, "memory:{stream}/{position}"),
        }
    }
}

/// A message as the engine sees it, whatever broker it came from. Cheap to share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// AMQP's message-id property, as bytes; `None` on Kafka.
    pub property_id: Option<Bytes>,
    /// Who produced it: AMQP app-id; `None` where unknown.
    pub producer: Option<Bytes>,
    /// Message type: AMQP's type property; `None` where unknown.
    pub message_type: Option<Bytes>,
    /// AMQP's correlation-id property or a header of that name.
    pub correlation_id: Option<Bytes>,
    /// A header `causation-id`.
    pub causation_id: Option<Bytes>,
    /// W3C traceparent as it came, valid or not.
    pub traceparent: Option<Bytes>,
    /// W3C tracestate as it came.
    pub tracestate: Option<Bytes>,
    /// Kafka's record key; `None` on RabbitMQ (the engine derives keys from configuration).
    pub key: Option<Bytes>,
    /// Content type as the publisher set it.
    pub content_type: Option<Bytes>,
    /// Content encoding as the publisher set it; the body is never decoded.
    pub content_encoding: Option<Bytes>,
    /// All headers, repeated ones in order.
    pub headers: Vec<Header>,
    /// The body; `None` is a tombstone, which is not the same as empty.
    pub body: Option<Bytes>,
    /// Where it came from.
    pub origin: Origin,
}

impl Envelope {
    /// An envelope with an origin and a body and nothing else.
    pub fn new(origin: Origin, body: Option<Bytes>) -> Self {
        Self {
            property_id: None,
            producer: None,
            message_type: None,
            correlation_id: None,
            causation_id: None,
            traceparent: None,
            tracestate: None,
            key: None,
            content_type: None,
            content_encoding: None,
            headers: Vec::new(),
            body,
            origin,
        }
    }

    /// The first value of a header, the name compared without regard to ASCII case.
    pub fn header(&self, name: &str) -> Option<&Bytes> {
        self.headers
            .iter()
            .find(|header| header.name.eq_ignore_ascii_case(name.as_bytes()))
            .and_then(|header| header.value.as_ref())
    }

    /// Fills what is carried in well-known headers (`traceparent`, `tracestate`,
    /// `content-type`, `correlation-id`, `causation-id`, `message-type`, `producer`) into
    /// fields that the broker's own properties left empty. Called by sources.
    pub fn fill_from_headers(&mut self) {
        for (field, name) in [
            (&mut self.traceparent, "traceparent"),
            (&mut self.tracestate, "tracestate"),
            (&mut self.content_type, "content-type"),
            (&mut self.content_encoding, "content-encoding"),
            (&mut self.correlation_id, "correlation-id"),
            (&mut self.causation_id, "causation-id"),
            (&mut self.message_type, "message-type"),
            (&mut self.producer, "producer"),
        ] {
            if field.is_none() {
                *field = self
                    .headers
                    .iter()
                    .find(|header| header.name.eq_ignore_ascii_case(name.as_bytes()))
                    .and_then(|header| header.value.clone());
            }
        }
    }

    /// The bytes that this envelope holds in memory, for the budget: contents, and what each
    /// header costs besides.
    pub fn bytes(&self) -> usize {
        let headers: usize = self
            .headers
            .iter()
            .map(|header| {
                size_of::<Header>()
                    + header.name.len()
                    + header.value.as_ref().map_or(0, Bytes::len)
            })
            .sum();
        self.body.as_ref().map_or(0, Bytes::len) + self.key.as_ref().map_or(0, Bytes::len) + headers
    }
}
