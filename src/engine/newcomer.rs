//! A newcomer's first queue may carry no ids at all: many client libraries set none.
//!
//! Until one delivery has carried an id, those without are held unsettled instead of becoming
//! dead letters; when it is clear that none will come, the subscription pauses with an error that
//! shows what one message did carry and which extractor would fit. Once an id was seen
//! (remembered beside the inbox, so also after a restart), or where `on_missing_id` is set
//! explicitly, the policy applies.
//!
//! Invariants: nothing that is held here is settled; what the broker took back is dropped.

use std::time::Duration;

use inboxd_contract::{Delivery, Envelope, ErrorCode, Fence, Origin};

use super::budget::{Budget, Permit};
use super::subscription::Shared;
use crate::telemetry::{SubscriptionMetrics, bounded};

/// With something held, this long without a further delivery means that no more comes.
pub(super) const QUIET: Duration = Duration::from_secs(5);
/// This many without an id, and none with one, are enough.
const HELD_MAX: usize = 20;
/// Names of headers and fields that are shown, and the longest of each that is, in bytes.
const NAMES_MAX: usize = 20;
const NAME_BYTES_MAX: usize = 64;
/// While paused, how often deliveries that the broker took back are let go.
const LOOK_EVERY: Duration = Duration::from_millis(250);

pub(super) struct Newcomer {
    /// The policy applies: nothing is held any more.
    settled: bool,
    /// That ids were seen is noted beside the inbox.
    noted: bool,
    held: Vec<(Delivery, Permit, Counted)>,
    held_max: usize,
    metrics: SubscriptionMetrics,
}

/// One delivery in the gauge of those held for want of an id, as long as it lives.
struct Counted(SubscriptionMetrics);

impl Counted {
    fn new(metrics: SubscriptionMetrics) -> Self {
        metrics.unidentified_held(1);
        Self(metrics)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.unidentified_held(-1);
    }
}

impl Newcomer {
    pub(super) fn new(shared: &Shared, unsettled_max: Option<usize>) -> Self {
        let is_explicit = shared.settings.identity.on_missing_is_explicit;
        Self {
            settled: is_explicit,
            noted: is_explicit,
            held: Vec::new(),
            held_max: unsettled_max.unwrap_or(HELD_MAX).clamp(1, HELD_MAX),
            metrics: shared.metrics.clone(),
        }
    }

    /// Reads whether an id was seen before. A database that is away is asked again.
    pub(super) async fn learn(&mut self, shared: &Shared) {
        while !self.settled {
            match shared.hub.store().note(&note_key(shared)).await {
                Ok(note) => {
                    self.settled = note.is_some();
                    self.noted = self.settled;
                    return;
                }
                Err(error) => {
                    tracing::warn!(code = %error.code(), %error, "the inbox cannot be read; trying again");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }

    pub(super) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// Holds a delivery without an id, or gives it back for the policy.
    pub(super) fn hold(
        &mut self,
        delivery: Delivery,
        permit: Permit,
    ) -> Option<(Delivery, Permit)> {
        if self.settled {
            return Some((delivery, permit));
        }
        tracing::debug!("held: no message of this subscription carried an id yet");
        self.held.push((delivery, permit, Counted::new(self.metrics.clone())));
        None
    }

    /// A delivery carried an id: from now on the policy applies, to what was held first.
    pub(super) async fn an_id_was_seen(&mut self, shared: &Shared) -> Vec<(Delivery, Permit)> {
        self.settled = true;
        if !self.noted {
            match shared.hub.store().note_once(&note_key(shared), "yes").await {
                Ok(_) => self.noted = true,
                // The next delivery with an id tries again.
                Err(error) => tracing::debug!(%error, "could not note that ids were seen"),
            }
        }
        self.held.drain(..).map(|(delivery, permit, _)| (delivery, permit)).collect()
    }

    /// No id was seen and no more deliveries are to be waited for.
    pub(super) fn must_pause(&mut self, budget: &Budget) -> bool {
        self.let_go();
        self.is_holding() && (self.held.len() >= self.held_max || budget.is_full())
    }

    /// Says what was found and holds, settling nothing, until the broker has taken everything
    /// back (`next`: the fence of one that is not among the held).
    pub(super) async fn pause(&mut self, shared: &Shared, next: Option<&Fence>) {
        self.let_go();
        let Some((delivery, ..)) = self.held.first() else { return };
        let reason = explain(self.held.len(), &delivery.envelope);
        let code = ErrorCode::IdsMissing;
        tracing::error!(%code, subscription = %shared.settings.name, reason, "paused");
        shared.metrics.paused(true);
        shared.health.set_paused(Some((code, reason)));
        while self.is_holding() && next.is_none_or(Fence::is_open) {
            tokio::time::sleep(LOOK_EVERY).await;
            self.let_go();
        }
        shared.metrics.paused(false);
        shared.health.set_paused(None);
    }

    /// What the broker took back is no longer held.
    fn let_go(&mut self) {
        self.held.retain(|(delivery, ..)| delivery.fence.is_open());
    }
}

fn note_key(shared: &Shared) -> String {
    format!("ids-seen:{}", shared.settings.consumer_id)
}

/// What one message carried, and which extractor would fit.
fn explain(held: usize, envelope: &Envelope) -> String {
    let headers: Vec<_> = envelope
        .headers
        .iter()
        .take(NAMES_MAX)
        .map(|header| bounded(&header.name, NAME_BYTES_MAX))
        .collect();
    let fields = body_fields(envelope);
    let mut fits = Vec::new();
    let names_an_id = |name: &str| {
        let name = name.to_ascii_lowercase().replace(['-', '_'], "");
        name == "id" || name == "eventid" || name == "messageid" || name == "uuid"
    };
    fits.extend(headers.iter().filter(|name| names_an_id(name)).map(|n| format!("header:{n}")));
    fits.extend(fields.iter().filter(|name| names_an_id(name)).map(|n| format!("json:/{n}")));
    if matches!(envelope.origin, Origin::Kafka { .. }) {
        fits.push("kafka-position".into());
    }
    fits.push("body-hash".into());
    format!(
        "{held} deliveries and none of them carries a message id, nothing was settled. One of them \
         ({origin}) has no message-id property; headers: [{headers}]; body: {bytes} bytes, content \
         type {content_type}, JSON fields: [{fields}]. Set message_id for this subscription, for \
         instance to [{fits}], or on_missing_id = \"forward\" to go without deduplication, \
         and restart",
        origin = envelope.origin,
        headers = headers.join(", "),
        bytes = envelope.body.as_ref().map_or(0, bytes::Bytes::len),
        content_type = envelope
            .content_type
            .as_deref()
            .map_or("none".into(), |bytes| bounded(bytes, NAME_BYTES_MAX)),
        fields = fields.join(", "),
        fits = fits.iter().map(|fit| format!("\"{fit}\"")).collect::<Vec<_>>().join(", "),
    )
}

fn body_fields(envelope: &Envelope) -> Vec<String> {
    let body = envelope.body.as_deref().unwrap_or_default();
    let parsed: Option<serde_json::Map<String, serde_json::Value>> =
        serde_json::from_slice(body).ok();
    let names = parsed.unwrap_or_default().into_iter().take(NAMES_MAX);
    names.map(|(name, _)| bounded(name.as_bytes(), NAME_BYTES_MAX)).collect()
}

#[cfg(test)]
mod tests {
    use inboxd_contract::Header;

    use super::*;

    #[test]
    fn what_a_publisher_named_is_shown_in_part_and_only_so_many() {
        let origin = Origin::RabbitMq {
            queue: "orders".into(),
            exchange: "".into(),
            routing_key: "orders".into(),
            redelivered: false,
            delivery_count: None,
        };
        let field = "f".repeat(100_000);
        let body = format!("{{\"event_id\": 1, \"{field}\": 1}}");
        let mut envelope = Envelope::new(origin, Some(body.into()));
        envelope.content_type = Some("c".repeat(100_000).into());
        for number in 0..100 {
            envelope.headers.push(Header::new(format!("{number}-{}", "é".repeat(50_000)), "x"));
        }
        let reason = explain(1, &envelope);
        assert!(reason.len() < 3_000, "{} bytes", reason.len());
        assert!(reason.contains("19-é") && !reason.contains("20-é"), "{reason}");
        assert!(reason.contains(&format!("[event_id, {}…]", &field[..NAME_BYTES_MAX])), "{reason}");
        assert!(reason.contains("\"json:/event_id\""), "{reason}");
    }
}
