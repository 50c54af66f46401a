//! Message ids, consumer ids and fingerprints: the same bytes on every database.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

/// The longest message id that is stored as it came, in bytes.
pub const MESSAGE_ID_BYTES_MAX: usize = 512;
/// The longest consumer id, in bytes.
pub const CONSUMER_ID_BYTES_MAX: usize = 128;

const HASH_PREFIX: &str = "sha256:";
const GENERATED_PREFIX: &str = "generated:";

/// A consumer id is unfit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// Empty or white space alone.
    #[error("a consumer id must not be blank")]
    Blank,
    /// Longer than [`CONSUMER_ID_BYTES_MAX`].
    #[error("a consumer id has at most {CONSUMER_ID_BYTES_MAX} bytes, this one has {0}")]
    TooLong(usize),
    /// Has a control character.
    #[error("a consumer id must not contain control characters")]
    Control,
}

/// The logical subscriber; half of the deduplication key. Compared by bytes.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConsumerId(Arc<str>);

impl ConsumerId {
    /// Validates: not blank, at most [`CONSUMER_ID_BYTES_MAX`] bytes, no control characters.
    pub fn new(id: &str) -> Result<Self, IdentityError> {
        if id.trim().is_empty() {
            return Err(IdentityError::Blank);
        }
        if id.len() > CONSUMER_ID_BYTES_MAX {
            return Err(IdentityError::TooLong(id.len()));
        }
        if id.chars().any(char::is_control) {
            return Err(IdentityError::Control);
        }
        Ok(Self(id.into()))
    }

    /// The id.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ConsumerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for ConsumerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The identity that deduplication uses, in the form every database stores:
/// valid UTF-8, no NUL, 1 to [`MESSAGE_ID_BYTES_MAX`] bytes.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageId(Arc<str>);

impl MessageId {
    /// The id for these bytes; `None` where they are blank (empty or ASCII white space alone).
    ///
    /// Bytes that a column could not hold, that are too long, or that begin with
    /// `sha256:` or `generated:` become `sha256:<hex of SHA-256>`, so that no two byte-distinct ids meet.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return None;
        }
        match std::str::from_utf8(bytes) {
            Ok(text)
                if text.len() <= MESSAGE_ID_BYTES_MAX
                    && !text.contains('\0')
                    && !text.starts_with(HASH_PREFIX)
                    && !text.starts_with(GENERATED_PREFIX) =>
            {
                Some(Self(text.into()))
            }
            _ => Some(Self(format!("{HASH_PREFIX}{}", hex::encode(Sha256::digest(bytes))).into())),
        }
    }

    /// An id made here for a message that has none: `generated:<unique>`, which no publisher can
    /// set. Too long, it is hashed as a whole.
    pub fn generated(unique: &str) -> Self {
        let text = format!("{GENERATED_PREFIX}{unique}");
        if text.len() <= MESSAGE_ID_BYTES_MAX {
            return Self(text.into());
        }
        Self(format!("{HASH_PREFIX}{}", hex::encode(Sha256::digest(text))).into())
    }

    /// The id under which a conflicting copy is replayed: `<id>~<fingerprint>`, once only however
    /// often it is replayed. Too long, it is hashed as a whole.
    pub fn of_conflict(&self, fingerprint: &Fingerprint) -> Self {
        self.suffixed(fingerprint.as_str())
    }

    /// The id under which a processed message is replayed all the same: `<id>~<fresh>`.
    pub fn of_override(&self, fresh: uuid::Uuid) -> Self {
        self.suffixed(&fresh.to_string())
    }

    fn suffixed(&self, suffix: &str) -> Self {
        let suffix = format!("~{suffix}");
        if self.0.ends_with(&suffix) {
            return self.clone();
        }
        let text = format!("{}{suffix}", self.0);
        if text.len() <= MESSAGE_ID_BYTES_MAX {
            return Self(text.into());
        }
        Self(format!("{HASH_PREFIX}{}", hex::encode(Sha256::digest(text))).into())
    }

    /// An id as a store returned it: taken as it is.
    pub fn from_stored(text: &str) -> Self {
        Self(text.into())
    }

    /// The id.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The deduplication key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InboxKey {
    /// The logical subscriber.
    pub consumer_id: ConsumerId,
    /// The message.
    pub message_id: MessageId,
}

/// A hash that tells two contents of one id apart: the first 16 bytes of a SHA-256, as 32
/// lower-case hex digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(Arc<str>);

impl Fingerprint {
    /// The fingerprint of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(hex::encode(&Sha256::digest(bytes)[..16]).into())
    }

    /// A fingerprint as a store returned it; the empty string is none.
    pub fn from_stored(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| Self(text.into()))
    }

    /// 32 lower-case hex digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// True where both are known and differ; a missing one conflicts with nothing.
    pub fn conflict(left: Option<&Self>, right: Option<&Self>) -> bool {
        matches!((left, right), (Some(left), Some(right)) if left != right)
    }
}

/// `prefix` and `id` joined so that no two pairs meet: `<bytes of prefix>:<prefix><id>`.
pub fn length_prefixed(prefix: &[u8], id: &[u8]) -> Vec<u8> {
    let mut joined = format!("{}:", prefix.len()).into_bytes();
    joined.extend_from_slice(prefix);
    joined.extend_from_slice(id);
    joined
}
