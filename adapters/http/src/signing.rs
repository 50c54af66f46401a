//! Signatures of the Standard Webhooks specification (symmetric, `v1`).
//!
//! What is signed is `<webhook-id>.<webhook-timestamp>.<body>`. A full stop in the id would make
//! another split of the same bytes possible, so it is percent-encoded there, beside all that
//! `Inbox-Message-Id` encodes: one decoding gives the same bytes.

use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use base64::{alphabet, engine::DecodePaddingMode};
use hmac::{Hmac, Mac};
use inboxd_contract::encode_percent;
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;

use crate::HttpConfigError;

const PREFIX: &str = "whsec_";
/// What the specification asks of a secret, decoded.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// Signs with every secret, in their order: a receiver takes a request if one signature fits.
#[derive(Clone)]
pub(crate) struct Signer(Vec<Hmac<Sha256>>);

/// The three headers' values.
pub(crate) struct Signed {
    pub(crate) id: String,
    pub(crate) timestamp: String,
    pub(crate) signature: String,
}

impl Signer {
    /// `None` where there is no secret.
    pub(crate) fn new(secrets: &[SecretString]) -> Result<Option<Self>, HttpConfigError> {
        let keys: Result<Vec<_>, _> = secrets
            .iter()
            .enumerate()
            .map(|(index, secret)| {
                key(secret.expose_secret())
                    .ok_or(HttpConfigError::SigningSecret { number: index + 1 })
            })
            .collect();
        Ok(Some(keys?).filter(|keys| !keys.is_empty()).map(Self))
    }

    /// Takes time in proportion to the body.
    pub(crate) fn sign(&self, message_id: &str, now: SystemTime, body: &[u8]) -> Signed {
        let id = encode_percent(message_id.as_bytes()).replace('.', "%2E");
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let timestamp = since.as_secs().to_string();
        let signatures: Vec<_> = self
            .0
            .iter()
            .map(|key| {
                let mut mac = key.clone();
                for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
                    mac.update(part);
                }
                format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
            })
            .collect();
        Signed { id, timestamp, signature: signatures.join(" ") }
    }
}

fn key(secret: &str) -> Option<Hmac<Sha256>> {
    let padding =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let bytes = GeneralPurpose::new(&alphabet::STANDARD, padding)
        .decode(secret.trim().strip_prefix(PREFIX)?)
        .ok()?;
    if !SECRET_BYTES.contains(&bytes.len()) {
        return None;
    }
    Hmac::new_from_slice(&bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the specification's own libraries.
    #[test]
    fn the_published_example_is_signed_as_published() {
        let secret = SecretString::from("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
        let signer = Signer::new(&[secret]).unwrap().unwrap();
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_614_265_330);
        let signed = signer.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", now, br#"{"test": 2432232314}"#);
        assert_eq!(signed.id, "msg_p5jXN8AQM9LWM0D4loKWxJek");
        assert_eq!(signed.timestamp, "1614265330");
        assert_eq!(signed.signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn bad_secrets_are_told_by_their_number_and_not_shown() {
        let good = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        for bad in ["MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_", "whsec_c2hvcnQ=", "whsec_%%%"] {
            let error = Signer::new(&[good.into(), bad.into()]).err().unwrap().to_string();
            assert!(error.contains("number 2"), "{error}");
            assert!(!error.contains("c2hvcnQ"), "{error}");
        }
        assert!(Signer::new(&[]).unwrap().is_none());
    }

    #[test]
    fn a_full_stop_of_an_id_cannot_move_the_split() {
        let signer = Signer::new(&["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".into()]);
        let signed = signer.unwrap().unwrap().sign("a.1 b", SystemTime::UNIX_EPOCH, b"");
        assert_eq!(signed.id, "a%2E1%20b");
    }
}
