//! Publishing what client libraries cannot express: names, ids and types that are not text.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::process::Stdio;

use tokio::process::Command;

use super::Broker;

#[path = "../../../adapters/rabbitmq/tests/it/raw.rs"]
mod amqp;

pub use amqp::{HEADERS, MESSAGE_ID, RawPublisher, TYPE, long, short};

/// A publisher at the broker of this queue.
pub async fn amqp_publisher(broker: &Broker) -> RawPublisher {
    let url = url::Url::parse(broker.url()).expect("a URL");
    let decoded = |text: &str| {
        let text = percent_encoding::percent_decode_str(text);
        text.decode_utf8().expect("text").into_owned()
    };
    let host = url.host_str().expect("a host");
    let mut config =
        inboxd_rabbitmq::RabbitMqConfig::new(host, url.port().unwrap_or(5672), &broker.name);
    if !url.username().is_empty() {
        config.user = decoded(url.username());
        config.password = decoded(url.password().unwrap_or_default()).into();
    }
    let vhost = decoded(url.path().trim_start_matches('/'));
    config.vhost = if vhost.is_empty() { "/".to_owned() } else { vhost };
    RawPublisher::connect(&config).await
}

/// Produces one record with these headers, as bytes, by kcat.
pub async fn produce_bytes(topic: &Broker, headers: &[(&[u8], &[u8])], body: &[u8]) {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), body).expect("written");
    let mut kcat = Command::new("kcat");
    kcat.args(["-P", "-b", topic.url(), "-t", &topic.name]);
    for (name, value) in headers {
        kcat.arg("-H").arg(OsString::from_vec([name, &b"="[..], value].concat()));
    }
    let kcat = kcat.arg(file.path()).stdin(Stdio::null()).kill_on_drop(true);
    let output = kcat.output().await.expect("kcat is there: `scripts/services up` installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
