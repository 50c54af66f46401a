//! What `inspect` finds, and that it leaves everything as it was.

use std::time::Duration;

use inboxd_contract::{Finding, Severity};
use inboxd_kafka::{StartAt, inspect};
use rdkafka::consumer::{BaseConsumer, Consumer};

use crate::front::FrontedBroker;
use crate::latest::delete_records_before;
use crate::support::{Place, blocking, config, numbered, properties};

const WITHIN: Duration = Duration::from_secs(30);

/// The finding of this severity about this subject; panics with all if there is none.
fn finding<'a>(
    findings: &'a [Finding],
    severity: Severity,
    subject: &str,
    what: &str,
) -> &'a Finding {
    let found = findings.iter().find(|finding| {
        finding.severity == severity
            && finding.subject.contains(subject)
            && finding.what.contains(what)
    });
    let found = found.unwrap_or_else(|| panic!("{severity:?} {subject} {what} in {findings:#?}"));
    assert_eq!(found.remedy.is_empty(), severity == Severity::Info, "{found:?}");
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_there_is_told_and_nothing_is_changed() {
    let place = Place::new(2).await;
    place.produce(0, &numbered("m", 10)).await;
    place.commit_elsewhere(0, 2, "another inbox").await;
    delete_records_before(&place, 0, 6).await;
    let mut config = place.config();
    let missing = format!("{}-misspelt", place.topic);
    config.topics.push(missing.clone());
    config.topics.push(format!("^{}$", place.topic));
    config.topics.push("^no such topic at all$".into());
    config.commit_metadata = Some("our inbox".into());
    let found = inspect(&config, WITHIN).await;
    let (topic, group) = (place.topic.as_str(), place.group.as_str());
    finding(&found, Severity::Info, "Kafka at", "cluster");
    finding(&found, Severity::Info, topic, "2 partitions, retention.ms");
    finding(&found, Severity::Info, topic, "max.message.bytes");
    finding(&found, Severity::Warning, &missing, "does not exist");
    finding(&found, Severity::Info, &format!("^{topic}"), "matches");
    finding(&found, Severity::Warning, "no such topic", "no topic matches");
    finding(&found, Severity::Warning, &format!("{topic}/0"), "overtaken the group by 4");
    finding(&found, Severity::Info, group, "offsets for 1 of 2 partitions, lag 4");
    finding(&found, Severity::Info, group, "begin with their oldest record");
    finding(&found, Severity::Warning, group, "another inbox");
    finding(&found, Severity::Info, group, "has no members");
    assert!(!found.iter().any(|finding| finding.severity == Severity::Problem), "{found:#?}");

    // No offset, no member and no topic has come of it.
    assert_eq!(place.committed(0).await, Some((2, "another inbox".into())));
    assert_eq!(place.committed(1).await, None);
    let brokers = place.brokers.clone();
    blocking(move || {
        let plain: BaseConsumer = rdkafka::ClientConfig::new()
            .set("bootstrap.servers", &brokers)
            .create()
            .expect("a consumer");
        let metadata = plain.fetch_metadata(None, WITHIN).expect("an answer");
        assert!(!metadata.topics().iter().any(|topic| topic.name() == missing), "created");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_work_is_a_problem_with_a_remedy() {
    let place = Place::new(1).await;
    let mut refusing = place.config();
    refusing.start = StartAt::Refuse;
    let found = inspect(&refusing, WITHIN).await;
    finding(&found, Severity::Problem, &place.group, "no committed offset");

    let missing = format!("{}-misspelt", place.topic);
    let found = inspect(&config(&place.brokers, &missing, &place.group), WITHIN).await;
    finding(&found, Severity::Problem, &missing, "does not exist");

    let mut owned = place.config();
    owned.properties.insert("group.id".into(), "other".into());
    finding(&inspect(&owned, WITHIN).await, Severity::Problem, "Kafka at", "group.id");

    let nobody = config("127.0.0.1:1", &place.topic, &place.group);
    let found = inspect(&nobody, Duration::from_secs(3)).await;
    finding(&found, Severity::Problem, "127.0.0.1:1", "no broker answers");

    let guarded = FrontedBroker::start_guarded(&place.brokers, Some(("inboxd", "right"))).await;
    let mut wrong = config(&guarded.address(), &place.topic, &place.group);
    wrong.properties.extend(properties(&[
        ("security.protocol", "sasl_plaintext"),
        ("sasl.mechanism", "PLAIN"),
        ("sasl.username", "inboxd"),
        ("sasl.password", "geheim"),
    ]));
    let found = inspect(&wrong, Duration::from_secs(5)).await;
    let said = finding(&found, Severity::Problem, "Kafka at", "login is refused");
    assert!(!format!("{said:?}").contains("geheim"), "{said:?}");
}
