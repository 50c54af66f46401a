//! librdkafka's mock cluster, on a thread of its own (it must stay on one).

use std::sync::mpsc;

use rdkafka::mocking::MockCluster;
use tokio::sync::oneshot;

/// A cluster of one broker; gone when dropped.
pub struct Mock {
    pub brokers: String,
    topics: mpsc::Sender<(String, i32, oneshot::Sender<()>)>,
}

impl Mock {
    pub fn start() -> Self {
        let (topics, wanted) = mpsc::channel::<(String, i32, oneshot::Sender<()>)>();
        let (started, brokers) = mpsc::channel();
        std::thread::spawn(move || {
            let cluster = MockCluster::new(1).expect("a mock cluster");
            started.send(cluster.bootstrap_servers()).expect("the test waits");
            while let Ok((topic, partitions, done)) = wanted.recv() {
                cluster.create_topic(&topic, partitions, 1).expect("the mock makes a topic");
                let _ = done.send(());
            }
        });
        Self { brokers: brokers.recv().expect("the mock cluster starts"), topics }
    }

    pub async fn create_topic(&self, topic: &str, partitions: i32) {
        let (done, created) = oneshot::channel();
        self.topics.send((topic.to_owned(), partitions, done)).expect("the cluster lives");
        created.await.expect("the topic is created");
    }
}
