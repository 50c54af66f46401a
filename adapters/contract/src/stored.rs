//! How an envelope is kept in `inbox_parked`: the body in a column of its own, everything
//! else as one JSON document (version 1) with bytes in base64, the same on every database.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Envelope, Header, Origin};

type Text = String;

/// A stored envelope cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StoredEnvelopeError {
    /// Not the JSON that [`Envelope::to_stored`] writes.
    #[error("a stored envelope is not valid JSON of version 1")]
    Json(#[from] serde_json::Error),
    /// A field is not base64.
    #[error("a field of a stored envelope is not base64")]
    Base64(#[from] base64::DecodeError),
    /// Written by a newer version.
    #[error("a stored envelope has version {0}, this binary reads version 1")]
    Version(u32),
}

#[derive(Serialize, Deserialize)]
struct Stored {
    version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    property_id: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    producer: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    message_type: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    correlation_id: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    causation_id: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    traceparent: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tracestate: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    content_type: Option<Text>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    content_encoding: Option<Text>,
    headers: Vec<(Text, Option<Text>)>,
    origin: Origin,
}

fn encode(bytes: &Bytes) -> Text {
    STANDARD.encode(bytes)
}

fn encode_optional(bytes: &Option<Bytes>) -> Option<Text> {
    bytes.as_ref().map(encode)
}

fn decode(text: Text) -> Result<Bytes, base64::DecodeError> {
    STANDARD.decode(text).map(Bytes::from)
}

fn decode_optional(text: Option<Text>) -> Result<Option<Bytes>, base64::DecodeError> {
    text.map(decode).transpose()
}

impl Envelope {
    /// Everything but the body, as JSON.
    pub fn to_stored(&self) -> String {
        let stored = Stored {
            version: 1,
            property_id: encode_optional(&self.property_id),
            producer: encode_optional(&self.producer),
            message_type: encode_optional(&self.message_type),
            correlation_id: encode_optional(&self.correlation_id),
            causation_id: encode_optional(&self.causation_id),
            traceparent: encode_optional(&self.traceparent),
            tracestate: encode_optional(&self.tracestate),
            key: encode_optional(&self.key),
            content_type: encode_optional(&self.content_type),
            content_encoding: encode_optional(&self.content_encoding),
            headers: self
                .headers
                .iter()
                .map(|header| (encode(&header.name), encode_optional(&header.value)))
                .collect(),
            origin: self.origin.clone(),
        };
        serde_json::to_string(&stored).unwrap_or_else(|error| {
            unreachable!("strings, numbers and options always serialise: {error}")
        })
    }

    /// The inverse of [`Envelope::to_stored`], with the body from its own column.
    pub fn from_stored(json: &str, body: Option<Bytes>) -> Result<Self, StoredEnvelopeError> {
        let stored: Stored = serde_json::from_str(json)?;
        if stored.version != 1 {
            return Err(StoredEnvelopeError::Version(stored.version));
        }
        let headers = stored
            .headers
            .into_iter()
            .map(|(name, value)| Ok(Header { name: decode(name)?, value: decode_optional(value)? }))
            .collect::<Result<_, base64::DecodeError>>()?;
        Ok(Self {
            property_id: decode_optional(stored.property_id)?,
            producer: decode_optional(stored.producer)?,
            message_type: decode_optional(stored.message_type)?,
            correlation_id: decode_optional(stored.correlation_id)?,
            causation_id: decode_optional(stored.causation_id)?,
            traceparent: decode_optional(stored.traceparent)?,
            tracestate: decode_optional(stored.tracestate)?,
            key: decode_optional(stored.key)?,
            content_type: decode_optional(stored.content_type)?,
            content_encoding: decode_optional(stored.content_encoding)?,
            headers,
            body,
            origin: stored.origin,
        })
    }
}
