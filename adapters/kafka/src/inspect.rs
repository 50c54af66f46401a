//! What `inboxd check --connect` finds at the brokers.
//!
//! Purpose: looks with a client of its own, says what it sees and what to do about it.
//!
//! Invariants: it subscribes to nothing, joins no group, consumes, commits and changes nothing;
//! each question has a bound, and all of them together. No text has a secret.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use inboxd_contract::Finding;
use rdkafka::ClientContext;
use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::{ClientConfig, FromClientConfigAndContext};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::metadata::Metadata;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use regex::Regex;
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::config::{KafkaConfig, StartAt};
use crate::raw;

const ASK_MAX: Duration = Duration::from_secs(5);
/// More partitions than are asked for at once.
const PARTITIONS_MAX: usize = 10_000;
/// More names than a line of text bears.
const NAMES_MAX: usize = 10;

/// Looks at brokers, topics and the group's offsets, within `within`. Never consumes, joins,
/// commits or creates anything. Must be called within a tokio runtime.
pub async fn inspect(config: &KafkaConfig, within: Duration) -> Vec<Finding> {
    let subject = format!("Kafka at {}", config.brokers);
    let client = match config.client() {
        Ok(client) => client,
        Err(error) => {
            let remedy = "mend the setting that is named";
            return vec![Finding::problem(subject, error.to_string(), remedy)];
        }
    };
    let (config, runtime) = (config.clone(), Handle::current());
    let deadline = Instant::now() + within;
    // librdkafka's calls block.
    let looking = tokio::task::spawn_blocking(move || {
        let mut look = match Look::new(config, client, runtime, deadline) {
            Ok(look) => look,
            Err(finding) => return vec![finding],
        };
        look.all();
        look.findings
    });
    match tokio::time::timeout(within + Duration::from_secs(1), looking).await {
        Ok(Ok(findings)) => findings,
        Ok(Err(_)) => vec![Finding::problem(subject, "the inspection failed", "report this")],
        Err(_) => vec![Finding::problem(
            subject,
            format!("no answer within {within:?}"),
            "check that the brokers can be reached from here, and what they advertise",
        )],
    }
}

/// Keeps what went wrong with connections.
#[derive(Clone, Default)]
struct Words(Arc<Mutex<Vec<(Code, String)>>>);

impl ClientContext for Words {
    fn error(&self, error: KafkaError, words: &str) {
        let code = error.rdkafka_error_code().unwrap_or(Code::Unknown);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push((code, words.to_owned()));
    }
}

impl ConsumerContext for Words {}

struct Look {
    config: KafkaConfig,
    client: ClientConfig,
    runtime: Handle,
    deadline: Instant,
    words: Words,
    consumer: BaseConsumer<Words>,
    findings: Vec<Finding>,
}

impl Look {
    fn new(
        config: KafkaConfig,
        mut client: ClientConfig,
        runtime: Handle,
        deadline: Instant,
    ) -> Result<Self, Finding> {
        // Nothing is told twice, and a static member's name is not used.
        client.set("statistics.interval.ms", "0").remove("group.instance.id");
        let words = Words::default();
        let made = BaseConsumer::from_config_and_context(&client, words.clone());
        let consumer = made.map_err(|error| {
            let what = format!("librdkafka cannot make a client: {error}");
            Finding::problem(format!("Kafka at {}", config.brokers), what, "mend the properties")
        })?;
        let findings = Vec::new();
        Ok(Self { config, client, runtime, deadline, words, consumer, findings })
    }

    fn timeout(&self) -> Duration {
        let left = self.deadline.saturating_duration_since(Instant::now());
        left.min(ASK_MAX).max(Duration::from_millis(100))
    }

    fn all(&mut self) {
        let metadata = match self.consumer.fetch_metadata(None, self.timeout()) {
            Ok(metadata) => metadata,
            Err(error) => return self.unreachable(&error),
        };
        self.cluster(&metadata);
        let topics = self.topics(&metadata);
        if topics.is_empty() {
            return;
        }
        self.settings(&topics);
        self.group();
        self.offsets(&topics);
    }

    fn unreachable(&mut self, error: &KafkaError) {
        // Serves the events of connections.
        let _ = self.consumer.poll(Duration::from_millis(100));
        let words = self.words.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let subject = format!("Kafka at {}", self.config.brokers);
        let named = |codes: &[Code]| words.iter().find(|(code, _)| codes.contains(code));
        let login =
            [Code::Authentication, Code::SaslAuthenticationFailed, Code::UnsupportedSASLMechanism];
        let finding = if let Some((_, words)) = named(&login) {
            let remedy = "check `sasl.mechanism`, `sasl.username` and the password";
            Finding::problem(subject, format!("the login is refused: {words}"), remedy)
        } else if let Some((_, words)) = named(&[Code::SSL]) {
            let remedy = "check `security.protocol`, `ssl.ca.location`, and that the host is named \
                          in the certificate";
            Finding::problem(subject, format!("TLS fails: {words}"), remedy)
        } else {
            let last = words.last().map_or(String::new(), |(_, words)| format!(" ({words})"));
            let remedy = "check host and port, `security.protocol`, and that what the brokers \
                          advertise can be reached from here";
            Finding::problem(subject, format!("no broker answers: {error}{last}"), remedy)
        };
        self.findings.push(finding);
    }

    fn cluster(&mut self, metadata: &Metadata) {
        let id = self.consumer.client().fetch_cluster_id(self.timeout());
        let id = id.unwrap_or_else(|| "not told".into());
        let brokers: Vec<_> = metadata
            .brokers()
            .iter()
            .map(|broker| format!("{}:{}", broker.host(), broker.port()))
            .collect();
        let count = match brokers.len() {
            1 => "1 broker".to_owned(),
            count => format!("{count} brokers"),
        };
        let what = format!("cluster {id}, {count}: {}", shortened(&brokers));
        self.findings.push(Finding::info(format!("Kafka at {}", self.config.brokers), what));
    }

    /// The topics that are there, with their numbers of partitions.
    fn topics(&mut self, metadata: &Metadata) -> BTreeMap<String, i32> {
        let mut found = BTreeMap::new();
        let mut missing = Vec::new();
        let there = |topic: &rdkafka::metadata::MetadataTopic| {
            let count = i32::try_from(topic.partitions().len()).unwrap_or(i32::MAX);
            (topic.name().to_owned(), count)
        };
        for wanted in self.config.topics.clone() {
            if wanted.starts_with('^') {
                let matching = Regex::new(&wanted).ok();
                let matches: BTreeMap<_, _> = metadata
                    .topics()
                    .iter()
                    .filter(|topic| matching.as_ref().is_some_and(|m| m.is_match(topic.name())))
                    .map(there)
                    .collect();
                let names: Vec<_> = matches.keys().cloned().collect();
                let subject = format!("topics {wanted}");
                self.findings.push(match names.is_empty() {
                    true => Finding::warning(
                        subject,
                        "no topic matches the pattern now",
                        "check the pattern, and the right to describe topics; those that come later \
                         are consumed",
                    ),
                    false => Finding::info(subject, format!("matches {}", shortened(&names))),
                });
                found.extend(matches);
                continue;
            }
            match self.topic(&wanted) {
                Ok(count) => drop(found.insert(wanted, count)),
                Err(why) => missing.push((wanted, why)),
            }
        }
        for (topic, (what, remedy)) in missing {
            let subject = format!("topic {topic}");
            self.findings.push(match found.is_empty() {
                true => Finding::problem(subject, what, remedy),
                false => Finding::warning(subject, format!("{what}; the others are"), remedy),
            });
        }
        found
    }

    fn topic(&self, topic: &str) -> Result<i32, (String, String)> {
        let metadata = self.consumer.fetch_metadata(Some(topic), self.timeout());
        let metadata = metadata.map_err(|error| {
            (format!("cannot be looked at: {error}"), "check the brokers' logs".to_owned())
        })?;
        let described = metadata.topics().iter().find(|described| described.name() == topic);
        let error = described.and_then(|described| described.error()).map(Code::from);
        let count = described.map_or(0, |described| described.partitions().len());
        match error {
            Some(Code::TopicAuthorizationFailed) => Err((
                "cannot be consumed: the user may not describe it".into(),
                "grant READ and DESCRIBE on the topic".into(),
            )),
            Some(Code::UnknownTopicOrPartition) | None if count == 0 => Err((
                "cannot be consumed: it does not exist".into(),
                "create it, or check its name; it is consumed as soon as it is there".into(),
            )),
            Some(code) if count == 0 => {
                Err((format!("cannot be consumed: {code}"), "check the brokers' logs".into()))
            }
            _ => Ok(i32::try_from(count).unwrap_or(i32::MAX)),
        }
    }

    /// Retention, compaction, the largest message.
    fn settings(&mut self, topics: &BTreeMap<String, i32>) {
        let made: Result<AdminClient<DefaultClientContext>, _> = self.client.create();
        let resources: Vec<_> =
            topics.keys().map(|topic| ResourceSpecifier::Topic(topic)).collect();
        let options = AdminOptions::new().request_timeout(Some(self.timeout()));
        let answers = made
            .and_then(|admin| self.runtime.block_on(admin.describe_configs(&resources, &options)));
        let answers = match answers {
            Ok(answers) => answers,
            Err(error) => {
                let what = format!("the topics' settings cannot be asked for: {error}");
                return self.findings.push(Finding::info("topics", what));
            }
        };
        for ((topic, count), answer) in topics.iter().zip(answers) {
            let what = match answer {
                Ok(resource) => format!("{count} partitions, {}", described(&resource)),
                Err(code) => format!("{count} partitions; its settings are not told ({code})"),
            };
            self.findings.push(Finding::info(format!("topic {topic}"), what));
        }
    }

    fn group(&mut self) {
        let group = self.config.group.clone();
        let subject = format!("group {group}");
        let finding = match self.consumer.fetch_group_list(Some(&group), self.timeout()) {
            Ok(list) => match list.groups().iter().find(|known| known.name() == group) {
                Some(known) if !known.members().is_empty() => {
                    let (state, members) = (known.state(), known.members().len());
                    Finding::info(subject, format!("{}, {members} members", state.to_lowercase()))
                }
                _ => Finding::info(subject, "has no members"),
            },
            Err(error) if is_forbidden(&error) => forbidden(subject),
            Err(error) => Finding::info(subject, format!("its state is not told: {error}")),
        };
        self.findings.push(finding);
    }

    /// What the group has committed, against what the logs hold.
    fn offsets(&mut self, topics: &BTreeMap<String, i32>) {
        let subject = format!("group {}", self.config.group);
        let all = topics.iter().flat_map(|(topic, count)| (0..*count).map(move |n| (topic, n)));
        let places: Vec<_> = all.take(PARTITIONS_MAX).collect();
        let mut list = TopicPartitionList::with_capacity(places.len());
        for (topic, partition) in &places {
            list.add_partition(topic, *partition);
        }
        let committed = match self.consumer.committed_offsets(list.clone(), self.timeout()) {
            Ok(committed) => committed,
            Err(error) if is_forbidden(&error) => return self.findings.push(forbidden(subject)),
            Err(error) => {
                let what = format!("its committed offsets are not told: {error}");
                let remedy = "check the group's coordinator and the right to READ the group";
                return self.findings.push(Finding::warning(subject, what, remedy));
            }
        };
        self.foreign(&committed);
        let ends = |at| self.at(&list, at);
        let (Some(starts), Some(ends)) = (ends(Offset::Beginning), ends(Offset::End)) else {
            let what = "where the topics begin and end is not told";
            return self.findings.push(Finding::info(subject, what));
        };
        self.compare(&places, &offsets(&committed), &starts, &ends);
    }

    fn compare(
        &mut self,
        places: &[(&String, i32)],
        committed: &Offsets,
        starts: &Offsets,
        ends: &Offsets,
    ) {
        let subject = format!("group {}", self.config.group);
        let (mut without, mut lag) = (0, 0);
        for (topic, partition) in places {
            let place = ((*topic).clone(), *partition);
            let (Some(start), Some(end)) = (starts.get(&place), ends.get(&place)) else { continue };
            let Some(at) = committed.get(&place) else {
                without += 1;
                continue;
            };
            lag += (end - at.max(start)).max(0);
            if at < start {
                let what = format!(
                    "committed offset {at} is below the oldest record left, {start}: retention has \
                     overtaken the group by {} offsets",
                    start - at
                );
                let remedy = match self.config.start {
                    StartAt::Refuse => {
                        "set the group's offset: `start = refuse` will not choose one"
                    }
                    _ => "reading goes on with the oldest record left; lengthen retention.ms",
                };
                let subject = format!("{topic}/{partition}");
                self.findings.push(Finding::warning(subject, what, remedy));
            } else if at > end {
                let what = format!(
                    "committed offset {at} is beyond the end, {end}: the topic was made again or cut"
                );
                let remedy = "reset the group's offsets where records must not be read twice";
                let subject = format!("{topic}/{partition}");
                self.findings.push(Finding::warning(subject, what, remedy));
            }
        }
        let all = places.len();
        let what = format!("has offsets for {} of {all} partitions, lag {lag}", all - without);
        self.findings.push(Finding::info(subject.clone(), what));
        if without > 0 {
            self.findings.push(match self.config.start {
                StartAt::Refuse => Finding::problem(
                    subject,
                    format!("{without} partitions have no committed offset, and start = refuse"),
                    "set the group's offsets, or choose start = earliest or latest",
                ),
                StartAt::Earliest => Finding::info(
                    subject,
                    format!("{without} partitions begin with their oldest record"),
                ),
                StartAt::Latest => Finding::info(
                    subject,
                    format!(
                        "{without} partitions begin at their end, unless they came after the group"
                    ),
                ),
            });
        }
    }

    fn foreign(&mut self, committed: &TopicPartitionList) {
        let Some(ours) = self.config.commit_metadata.as_deref() else { return };
        let foreign = raw::metadata(committed);
        let is_other = |bytes: &[u8]| !bytes.is_empty() && bytes != ours.as_bytes();
        let count = foreign.iter().filter(|(_, _, bytes)| is_other(bytes)).count();
        if count > 0 {
            self.findings.push(Finding::warning(
                format!("group {}", self.config.group),
                format!("the offsets of {count} partitions were committed beside another inbox"),
                "give all members of the group one database: inboxes of their own do not \
                 deduplicate each other's messages",
            ));
        }
    }

    /// An end of each log.
    fn at(&self, list: &TopicPartitionList, at: Offset) -> Option<Offsets> {
        let mut asked = list.clone();
        asked.set_all_offsets(at).ok()?;
        let answered = self.consumer.offsets_for_times(asked, self.timeout()).ok()?;
        Some(offsets(&answered))
    }
}

type Offsets = BTreeMap<(String, i32), i64>;

fn offsets(list: &TopicPartitionList) -> Offsets {
    let elements = list.elements();
    let known = elements.iter().filter_map(|element| match element.offset() {
        Offset::Offset(at) => Some(((element.topic().to_owned(), element.partition()), at)),
        _ => None,
    });
    known.collect()
}

fn described(resource: &ConfigResource) -> String {
    let value = |name| resource.get(name).and_then(|entry| entry.value.as_deref());
    let named = ["retention.ms", "cleanup.policy", "max.message.bytes"];
    let told: Vec<_> = named
        .into_iter()
        .filter_map(|name| value(name).map(|value| format!("{name} {value}")))
        .collect();
    told.join(", ")
}

fn is_forbidden(error: &KafkaError) -> bool {
    error.rdkafka_error_code() == Some(Code::GroupAuthorizationFailed)
}

fn forbidden(subject: String) -> Finding {
    Finding::problem(subject, "the user may not use the group", "grant READ on the group")
}

fn shortened(names: &[String]) -> String {
    let shown = names[..names.len().min(NAMES_MAX)].join(", ");
    match names.len().saturating_sub(NAMES_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
