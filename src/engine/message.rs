//! A message on its way to the application, whether the broker handed it over just now or it was
//! taken from `inbox_parked`, and until when work for it may be started.

use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{Envelope, Fence, Fingerprint, InboxKey, LaneId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::progress::Progress;
use crate::telemetry::{DeliveryTrace, TraceIds};

/// What is known of a message before the application is asked.
pub(super) struct Message {
    pub(super) key: InboxKey,
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) envelope: Arc<Envelope>,
    /// The lane's key.
    pub(super) lane: Option<Vec<u8>>,
    /// The lane as the database knows it: what a parked copy waits in and blocks.
    pub(super) lane_id: Option<LaneId>,
    /// In hand since then.
    pub(super) received_at: Instant,
    /// From its first reception until then.
    pub(super) first_before: Duration,
    pub(super) progress: Progress,
    /// What follows it, where something is exported.
    pub(super) trace: Option<DeliveryTrace>,
}

impl Message {
    /// What a log line about this message carries beside its key.
    pub(super) fn ids(&self) -> TraceIds {
        let own = self.trace.as_ref().and_then(DeliveryTrace::ids);
        own.unwrap_or_else(|| TraceIds::of_message(&self.envelope))
    }

    /// The lane's key, or the record's own where lanes have none.
    pub(super) fn ordering_key(&self) -> Option<&[u8]> {
        let lane = self.lane.as_deref().filter(|lane| !lane.is_empty());
        lane.or(self.envelope.key.as_deref())
    }

    /// How long ago it was received first.
    pub(super) fn first_ago(&self) -> Duration {
        self.first_before + self.received_at.elapsed()
    }
}

/// Until when something may be started, and recorded.
#[derive(Clone, Copy)]
pub(super) struct Gate<'a> {
    /// Of the delivery; a parked message has none.
    pub(super) fence: Option<&'a Fence>,
    pub(super) draining: &'a CancellationToken,
}

impl Gate<'_> {
    /// Nothing new may start.
    pub(super) fn is_stopped(self) -> bool {
        let is_closed = self.fence.is_some_and(|fence| !fence.is_open());
        (is_closed && !broken!(IgnoreFence)) || self.draining.is_cancelled()
    }

    async fn stopped(self) {
        match self.fence {
            Some(fence) => tokio::select! {
                biased;
                () = fence.closed() => {}
                () = self.draining.cancelled() => {}
            },
            None => self.draining.cancelled().await,
        }
    }

    /// `None` if work was stopped first. Only for futures that may be dropped.
    pub(super) async fn unless_stopped<T>(self, future: impl Future<Output = T>) -> Option<T> {
        if self.is_stopped() {
            return None;
        }
        tokio::select! {
            biased;
            value = future => Some(value),
            () = self.stopped() => None,
        }
    }

    /// `None` if the fence was lost first: from then on nothing but a completed row is recorded.
    pub(super) async fn unless_lost<T>(self, future: impl Future<Output = T>) -> Option<T> {
        let Some(fence) = self.fence else { return Some(future.await) };
        if fence.is_lost() {
            return None;
        }
        tokio::select! {
            biased;
            value = future => Some(value),
            () = fence.lost() => None,
        }
    }
}
