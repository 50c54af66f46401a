//! The memory forwarder against the suite that every forwarder passes, in paused time.

use std::sync::Arc;

use async_trait::async_trait;
use inboxd_conformance::forward::{self, Application, Behaviour, ForwardHarness, Seen};
use inboxd_contract::Forwarder;
use inboxd_memory::{MemoryForwarder, MemoryPost, Reply};
use std::time::Duration;

struct Harness;

#[async_trait]
impl ForwardHarness for Harness {
    fn adapter(&self) -> &'static str {
        "memory"
    }

    async fn fresh(&self) -> Box<dyn Application> {
        Box::new(Memory { forwarder: MemoryForwarder::accepting() })
    }
}

struct Memory {
    forwarder: MemoryForwarder,
}

#[async_trait]
impl Application for Memory {
    fn forwarder(&self) -> Arc<dyn Forwarder> {
        Arc::new(self.forwarder.clone())
    }

    fn plan(&self, behaviours: Vec<Behaviour>) {
        let mut behaviours = behaviours.into_iter();
        self.forwarder.set_plan(move |_| behaviours.next().map_or(Reply::status(200), reply));
    }

    fn seen(&self) -> Vec<Seen> {
        self.forwarder.posts().into_iter().map(seen).collect()
    }

    async fn set_reachable(&mut self, reachable: bool) {
        self.forwarder.set_reachable(reachable);
    }
}

fn reply(behaviour: Behaviour) -> Reply {
    let delay = Duration::ZERO;
    match behaviour {
        Behaviour::Status(status) => Reply::status(status),
        Behaviour::RetryAfter(status, seconds) => {
            Reply::Answer { delay, status, after: Some(Duration::from_secs(seconds)) }
        }
        Behaviour::After(delay, status) => Reply::after(delay, status),
        Behaviour::LostAnswer => Reply::LostAnswer { delay, status: 200 },
        Behaviour::Hang => Reply::Hang,
    }
}

fn seen(post: MemoryPost) -> Seen {
    Seen {
        message_id: post.key.message_id.as_str().to_owned(),
        consumer_id: post.key.consumer_id.as_str().to_owned(),
        subscription: post.subscription,
        attempt: post.attempt,
        ordering_key: post.ordering_key,
        body: post.body,
    }
}

#[tokio::test(start_paused = true)]
async fn the_memory_forwarder_conforms() {
    forward::run(Harness).await;
}

mod alone {
    //! What the simulator relies on beyond the suite.

    use bytes::Bytes;
    use inboxd_contract::{ConsumerId, Envelope, ForwardRequest, InboxKey, MessageId, Origin};
    use tokio::time::{Instant, sleep};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn key() -> InboxKey {
        InboxKey {
            consumer_id: ConsumerId::new("c").expect("valid"),
            message_id: MessageId::from_bytes(b"m").expect("not blank"),
        }
    }

    async fn send(forwarder: &MemoryForwarder, timeout: Duration) {
        let origin = Origin::Memory { stream: "s".into(), position: 0 };
        let envelope = Envelope::new(origin, Some(Bytes::new()));
        let key = key();
        let request = ForwardRequest {
            envelope: &envelope,
            key: &key,
            subscription: "s",
            attempt: 1,
            ordering_key: None,
            timeout,
            path: None,
            trace: None,
        };
        forwarder.forward(request).await;
    }

    #[tokio::test(start_paused = true)]
    async fn time_passes_as_the_plan_says_and_not_otherwise() {
        let forwarder = MemoryForwarder::new(|_| Reply::after(Duration::from_secs(7), 200));
        let begun = Instant::now();
        send(&forwarder, TIMEOUT).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(7));
        forwarder.set_plan(|_| Reply::Hang);
        send(&forwarder, TIMEOUT).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(7) + TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_caller_gave_up_is_accepted_all_the_same_and_not_before_its_time() {
        let forwarder = MemoryForwarder::new(|_| Reply::after(Duration::from_secs(7), 200));
        send(&forwarder, Duration::from_secs(1)).await;
        assert_eq!((forwarder.begun(), forwarder.accepted(&key())), (1, 0));
        sleep(Duration::from_secs(6)).await;
        assert_eq!(forwarder.accepted(&key()), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_broken_connection_decides_nothing_and_a_lost_answer_decided() {
        let forwarder = MemoryForwarder::new(|_| Reply::Broken { delay: Duration::ZERO });
        send(&forwarder, TIMEOUT).await;
        assert_eq!(forwarder.accepted(&key()), 0);
        forwarder.set_plan(|_| Reply::LostAnswer { delay: Duration::ZERO, status: 200 });
        send(&forwarder, TIMEOUT).await;
        assert_eq!((forwarder.begun(), forwarder.accepted(&key())), (2, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_fails_as_it_is_told_until_it_is_healed() {
        let forwarder = MemoryForwarder::accepting();
        forwarder.fail(&key(), Reply::Hang);
        let begun = Instant::now();
        send(&forwarder, TIMEOUT).await;
        assert_eq!(begun.elapsed(), TIMEOUT);
        forwarder.fail(&key(), Reply::status(500));
        send(&forwarder, TIMEOUT).await;
        assert_eq!((begun.elapsed(), forwarder.accepted(&key())), (TIMEOUT, 0));
        forwarder.heal();
        send(&forwarder, TIMEOUT).await;
        assert_eq!((forwarder.begun(), forwarder.accepted(&key())), (3, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_fails_while_it_is_down_or_its_health_url_says_so() {
        let forwarder = MemoryForwarder::accepting();
        assert!(!forwarder.has_health());
        assert!(forwarder.probe().await.is_ok());
        forwarder.set_reachable(false);
        assert!(forwarder.probe().await.is_err());
        forwarder.set_reachable(true);
        forwarder.set_health(Some(false));
        assert!(forwarder.has_health() && forwarder.probe().await.is_err());
        forwarder.set_health(Some(true));
        assert!(forwarder.probe().await.is_ok());
        assert_eq!((forwarder.probes(), forwarder.begun()), (4, 0));
    }
}
