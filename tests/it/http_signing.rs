//! H7: signatures of Standard Webhooks over a chain of retries, from the configuration to the
//! application, which checks them with an HMAC written for it from the RFC.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use inboxd_conformance::app::{Answer, App, Post};
use inboxd_conformance::{ensure, eventually};
use sha2::{Digest, Sha256};

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
};

const BLOCK_BYTES: usize = 64;
/// A minute more than any test takes; the specification's own libraries allow five minutes.
const TOLERANCE: Duration = Duration::from_secs(240);

/// RFC 2104 with SHA-256.
fn hmac(key: &[u8], message: &[u8]) -> Vec<u8> {
    assert!(key.len() <= BLOCK_BYTES);
    let padded = |with: u8| -> Vec<u8> {
        let mut block = [with; BLOCK_BYTES];
        block.iter_mut().zip(key).for_each(|(byte, key)| *byte ^= key);
        block.to_vec()
    };
    let inner = Sha256::digest([padded(0x36), message.to_vec()].concat());
    Sha256::digest([padded(0x5c), inner.to_vec()].concat()).to_vec()
}

/// What a receiver with this one key does.
fn verifies(post: &Post, key: &[u8]) -> Result<(), String> {
    let only = |name: &str| match post.headers_named(name).as_slice() {
        [value] => Ok(value.clone()),
        values => Err(format!("{name}: {values:?}")),
    };
    let (id, timestamp) = (only("webhook-id")?, only("webhook-timestamp")?);
    let signed_at: u64 = timestamp.parse().map_err(|_| format!("{timestamp} are no seconds"))?;
    let signed_at = SystemTime::UNIX_EPOCH + Duration::from_secs(signed_at);
    let age = post.begun_at_wall.duration_since(signed_at).unwrap_or_else(|ahead| ahead.duration());
    ensure(age < TOLERANCE, format!("signed {age:?} from its arrival"))?;
    let body = post.body.as_deref().unwrap_or_default();
    let content = [id.as_bytes(), b".", timestamp.as_bytes(), b".", body].concat();
    let expected = format!("v1,{}", STANDARD.encode(hmac(key, &content)));
    let signatures = only("webhook-signature")?;
    ensure(signatures.split(' ').any(|signature| signature == expected), signatures.clone())
}

async fn a_chain_of_retries(broker: BrokerKind, database: DatabaseKind) {
    let (new, old) = ([7_u8; 32], [9_u8; 24]);
    let secret = |key: &[u8]| format!("whsec_{}", STANDARD.encode(key));
    let files = tempfile::tempdir().unwrap();
    for (name, key) in [("new", &new[..]), ("old", &old)] {
        std::fs::write(files.path().join(name), secret(key) + "\n").unwrap();
    }
    let app = App::start().await;
    let failing = Arc::new(AtomicBool::new(true));
    let decides = Arc::clone(&failing);
    app.plan_with(move |_: &Post| decides.load(SeqCst).then(|| Answer::status(500)));
    let database = Database::new(database);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let path = |name: &str| files.path().join(name).display().to_string();
    let keys = format!(
        "retry = {{ initial = \"100ms\", cap = \"400ms\" }}\n\
         signing = {{ secret_files = [\"{}\", \"{}\"] }}",
        path("new"),
        path("old")
    );
    let mut sidecar =
        Sidecar::start(&config(&broker, &database, &group, &app.url("/orders"), &keys, ""));
    let binary = Message::id("order.1 %").body(&b"\x00\x01\x7f\x80\xff\xfe\xc3\x28.1.\r\n"[..]);
    broker.publish([binary, Message::id("empty").body("")]).await;
    // Over more than one second, so that a chain has more than one timestamp.
    let stamps = |id: &str| {
        let stamps =
            app.ledger().posts(id).into_iter().map(|post| post.header("webhook-timestamp"));
        stamps.collect::<std::collections::BTreeSet<_>>().len()
    };
    eventually(PATIENCE, async || ensure(stamps("order.1 %") >= 2, sidecar.log())).await;
    assert!(sidecar.stop().await.success(), "{}", sidecar.log());
    let before = app.ledger().begun();
    sidecar.start_again();
    eventually(PATIENCE, async || ensure(app.ledger().begun() > before, sidecar.log())).await;
    failing.store(false, SeqCst);
    eventually(PATIENCE, async || {
        let rows = database.rows(&group).await;
        ensure(rows.len() == 2, format!("{rows:?}; log:\n{}", sidecar.log()))
    })
    .await;

    for id in ["order.1 %", "empty"] {
        let posts = app.ledger().posts(id);
        assert!(posts.len() >= 3, "{id}: {} attempts", posts.len());
        for post in &posts {
            for key in [&new[..], &old] {
                verifies(post, key).unwrap_or_else(|why| panic!("{id}, {}: {why}", post.attempt));
            }
            assert!(verifies(post, &[0; 32]).is_err(), "with another key it fails");
            assert_eq!(post.header("webhook-id"), posts[0].header("webhook-id"), "{id}");
        }
        let stamps: Vec<_> = posts.iter().map(|post| post.header("webhook-timestamp")).collect();
        assert!(stamps.is_sorted(), "each attempt has its own time: {stamps:?}");
    }
    assert!(!sidecar.log().contains("whsec_"), "a secret is in the log");
    stop_all(&broker, &group, &mut [sidecar]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_attempt_is_signed_anew_and_its_id_is_the_same_also_after_a_restart() {
    tokio::join!(
        a_chain_of_retries(BrokerKind::RabbitClassic, DatabaseKind::Sqlite),
        a_chain_of_retries(BrokerKind::Kafka, DatabaseKind::Postgres),
    );
}

#[tokio::test]
async fn a_secret_that_is_none_ends_the_start_and_is_not_shown() {
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::named(BrokerKind::Kafka, "127.0.0.1:9");
    let good = format!("whsec_{}", STANDARD.encode([1_u8; 24]));
    for bad in ["whsec_c2hvcnQ=", "whsec_geheim%%", "Z2VoZWltZ2VoZWltZ2VoZWltZ2VoZWlt"] {
        let keys = format!("signing = {{ secrets = [\"{good}\", \"{bad}\"] }}");
        let callback = "http://127.0.0.1:9/";
        let mut sidecar =
            Sidecar::start(&config(&broker, &database, "billing", callback, &keys, ""));
        assert_eq!(sidecar.ended().await.code(), Some(78), "{}", sidecar.log());
        let log = sidecar.log();
        assert!(log.contains("signing.secrets") && log.contains("entry 2"), "{log}");
        assert!(!log.contains(bad) && !log.contains(&good), "a secret is shown:\n{log}");
    }
}
