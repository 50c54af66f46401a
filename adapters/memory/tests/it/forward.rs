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
