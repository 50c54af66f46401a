//! The suite that every target of dead letters passes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use inboxd_conformance::letters::{Abilities, LettersHarness, LettersPlace, SeenCopy, run};
use inboxd_contract::{DeadLetterTarget, LetterCopy, kept_name};
use inboxd_memory::{LetterFault, MemoryLetter, MemoryLetters};

const REFUSES_BYTES: usize = 1_000_000;

struct Harness;

struct Place {
    letters: MemoryLetters,
    away: Arc<AtomicBool>,
    unrouted: Arc<AtomicBool>,
}

#[async_trait]
impl LettersHarness for Harness {
    fn adapter(&self) -> &'static str {
        "memory"
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            tombstones: true,
            keys: true,
            routes: true,
            refuses_bytes: Some(REFUSES_BYTES),
            taken_names: &[],
            large_bytes: REFUSES_BYTES - 1,
            real: false,
        }
    }

    fn publish_timeout(&self) -> Duration {
        Duration::from_secs(1)
    }

    async fn fresh(&self) -> Box<dyn LettersPlace> {
        let (letters, away) = (MemoryLetters::new(), Arc::new(AtomicBool::new(false)));
        let unrouted = Arc::new(AtomicBool::new(false));
        let (is_away, is_unrouted) = (Arc::clone(&away), Arc::clone(&unrouted));
        letters.set_plan(move |letter| {
            let bytes = letter.envelope.body.as_ref().map_or(0, Bytes::len);
            let fault = match () {
                () if is_away.load(SeqCst) => Some(LetterFault::Away),
                () if bytes >= REFUSES_BYTES => Some(LetterFault::Refused),
                () => is_unrouted.load(SeqCst).then_some(LetterFault::Unrouted),
            };
            (Duration::ZERO, fault)
        });
        Box::new(Place { letters, away, unrouted })
    }
}

/// What a broker would have.
fn seen(letter: MemoryLetter) -> SeenCopy {
    let copy = LetterCopy {
        envelope: &letter.envelope,
        key: &letter.key,
        subscription: &letter.subscription,
        reason: letter.reason,
        attempts: letter.attempts,
        last_status: letter.last_status,
        last_error: letter.last_error.as_deref(),
        first_ago: letter.first_ago,
    };
    let own = letter.envelope.headers.iter().map(|header| {
        let name = kept_name(&header.name, |_| false).into_owned();
        (Bytes::from(name), header.value.clone())
    });
    let stamps = copy.stamps(SystemTime::now());
    let stamps = stamps.into_iter().map(|(name, value)| (Bytes::from(name), Some(value.into())));
    SeenCopy {
        key: letter.envelope.key.clone(),
        headers: own.chain(stamps).collect(),
        body: letter.envelope.body.clone(),
    }
}

#[async_trait]
impl LettersPlace for Place {
    fn target(&self) -> Arc<dyn DeadLetterTarget> {
        Arc::new(self.letters.clone())
    }

    async fn copies(&self) -> Vec<SeenCopy> {
        self.letters.letters().into_iter().map(seen).collect()
    }

    async fn set_reachable(&self, reachable: bool) {
        self.away.store(!reachable, SeqCst);
    }

    async fn hang(&self) {
        self.away.store(true, SeqCst);
    }

    async fn set_routed(&self, routed: bool) {
        self.unrouted.store(!routed, SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn conforms() {
    run(Harness).await;
}
