//! The embedded sample application: one HTTP route, no deduplication of its own.
//!
//! It takes a moment for each order, fails now and then, and is slow now and then. What one
//! POST meets is drawn from the seed, the order and how often it was sent: not from the time.
//! Work that was begun is finished, whether or not the sidecar is still there to hear of it, as
//! in most applications: that is how a message comes to be accepted twice.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::serve::ListenerExt;
use percent_encoding::percent_decode_str;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::net::TcpListener;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::ledger::Ledger;
use super::plan::{Plan, message_id};

/// Of 1,000 POSTs, so many are answered 503.
const FAILING_PER_MILLE: u32 = 30;
/// Of 1,000 POSTs, so many are slow.
const SLOW_PER_MILLE: u32 = 10;

/// What one POST meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Fate {
    /// How long it takes.
    delay: Duration,
    /// What it is answered.
    status: StatusCode,
}

impl Fate {
    /// Of the POST of `id` that is `place` POSTs after its first one.
    fn draw(seed: u64, id: &str, place: usize) -> Self {
        let number = id
            .bytes()
            .fold(place as u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let mut random = SmallRng::seed_from_u64(seed.wrapping_add(number));
        let lot = random.random_range(0..1_000);
        let status = match lot {
            0..FAILING_PER_MILLE => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::OK,
        };
        let slow = lot >= 1_000 - SLOW_PER_MILLE;
        let delay = random.random_range(if slow { 50..=250 } else { 1..=4 });
        Self { delay: Duration::from_millis(delay), status }
    }
}

struct Shared {
    plan: Arc<Plan>,
    ledger: Ledger,
    seed: u64,
    /// POSTs whose work is not finished; as many as the sidecar sends at once.
    work: TaskTracker,
}

/// The application. Dropped: it listens no more.
pub(super) struct Application {
    address: SocketAddr,
    _server: AbortOnDropHandle<()>,
}

impl Application {
    /// Starts it on a free loopback port.
    pub(super) async fn start(plan: Arc<Plan>, ledger: Ledger, seed: u64) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0))
            .await
            .context("starting the sample application")?;
        let address = listener.local_addr()?;
        // Without it an answer waits for the acknowledgement of the one before.
        let listener = listener.tap_io(|connection| drop(connection.set_nodelay(true)));
        let shared = Shared { plan, ledger, seed, work: TaskTracker::new() };
        let router = Router::new().route("/orders", post(order)).with_state(Arc::new(shared));
        let server = tokio::spawn(async move {
            // Serving ends with the task alone: `axum::serve` has no other end.
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self { address, _server: AbortOnDropHandle::new(server) })
    }

    /// What the sidecar is to call.
    pub(super) fn callback(&self) -> String {
        format!("http://{}/orders", self.address)
    }
}

async fn order(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let text = |name: &str| {
        headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
    };
    let Some(encoded) = text("inbox-message-id") else { return StatusCode::BAD_REQUEST };
    let id = percent_decode_str(&encoded).decode_utf8_lossy().into_owned();
    let intact = shared.published(&id).is_some_and(|published| published.as_bytes() == body);
    let origin = text("inbox-origin").unwrap_or_default();
    let entry = shared.ledger.begin(&id, text("idempotency-key"), intact, origin);
    let fate = Fate::draw(shared.seed, &id, entry.place());
    // On a task of its own: this future is dropped when the sidecar dies.
    let ledger = shared.ledger.clone();
    let work = shared.work.spawn(async move {
        tokio::time::sleep(fate.delay).await;
        ledger.answer(&entry, fate.status.as_u16());
    });
    match work.await {
        Ok(()) => fate.status,
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl Shared {
    /// The body that was published under an id.
    fn published(&self, id: &str) -> Option<String> {
        let number = id.strip_prefix("order-")?.parse().ok()?;
        (number < self.plan.distinct() && message_id(number) == id).then(|| self.plan.body(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_posts_in_a_hundred_fail_and_a_few_are_slow() {
        let fates: Vec<_> = (0..10_000).map(|n| Fate::draw(9, &message_id(n), 0)).collect();
        let failing = fates.iter().filter(|fate| fate.status != StatusCode::OK).count();
        let slow = fates.iter().filter(|fate| fate.delay >= Duration::from_millis(50)).count();
        assert!((200..400).contains(&failing), "{failing}");
        assert!((50..150).contains(&slow), "{slow}");
    }

    #[test]
    fn a_fate_is_the_seed_s_and_another_for_the_next_attempt() {
        let fates = |seed, place| -> Vec<_> {
            (0..1_000).map(|n| Fate::draw(seed, &message_id(n), place)).collect()
        };
        assert_eq!(fates(9, 0), fates(9, 0));
        assert_ne!(fates(9, 0), fates(10, 0));
        assert_ne!(fates(9, 0), fates(9, 1));
    }

    #[tokio::test]
    async fn work_goes_on_when_the_caller_has_gone() {
        use tokio::io::AsyncWriteExt;

        let plan = Arc::new(Plan::draw(300, 4, 1));
        let ledger = Ledger::new();
        let application = Application::start(plan.clone(), ledger.clone(), 1).await.unwrap();
        let body = plan.body(3);
        let mut caller = tokio::net::TcpStream::connect(application.address).await.unwrap();
        let request = format!(
            "POST /orders HTTP/1.1\r\nhost: a\r\ninbox-message-id: order-000003\r\n\
             idempotency-key: \"order-000003\"\r\ninbox-origin: kafka:orders/1/2\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        caller.write_all(request.as_bytes()).await.unwrap();
        let mut tally = ledger.watch();
        let answered = async {
            tally.wait_for(|tally| tally.begun == 1).await.unwrap();
            drop(caller);
            tally.wait_for(|tally| tally.open == 0).await.unwrap();
        };
        tokio::time::timeout(Duration::from_secs(20), answered).await.expect("in time");
        let post = ledger.posts()["order-000003"][0].clone();
        assert!(post.intact && post.status.is_some());
        assert_eq!(post.key(), Some("\"order-000003\""));
        assert_eq!(post.origin, "kafka:orders/1/2");
    }
}
