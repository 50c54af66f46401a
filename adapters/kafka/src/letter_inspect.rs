//! What `inboxd check --connect` finds of a topic for dead letters.
//!
//! Invariants: it produces nothing and creates nothing, not even by asking; each question has a
//! bound, and all of them together. No text has a secret.

use std::time::Duration;

use inboxd_contract::{ErrorCode, Finding};
use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::metadata::Metadata;
use tokio::time::Instant;

use crate::config::KafkaConfig;
use crate::letter_config::DeadLetterTopicConfig;
use crate::raw;

const ASK_MAX: Duration = Duration::from_secs(5);

/// Looks at the topic that dead letters are to go to, within `within`. Must be called within a tokio
/// runtime.
pub async fn inspect_dead_letters(
    config: &DeadLetterTopicConfig,
    within: Duration,
) -> Vec<Finding> {
    let subject = format!("topic {} for dead letters", config.topic);
    if let Err(error) = config.validate() {
        return vec![Finding::problem(
            subject,
            error.to_string(),
            "mend the setting that is named",
        )];
    }
    let (config, deadline) = (config.clone(), Instant::now() + within);
    let about = subject.clone();
    let runtime = tokio::runtime::Handle::current();
    // librdkafka's calls block.
    let looking = tokio::task::spawn_blocking(move || {
        let look = Look { config: &config, subject: &about, deadline, runtime };
        look.all().unwrap_or_else(|finding| vec![finding])
    });
    match tokio::time::timeout(within + Duration::from_secs(1), looking).await {
        Ok(Ok(findings)) => findings,
        Ok(Err(_)) => vec![Finding::problem(subject, "the inspection failed", "report this")],
        Err(_) => vec![away(subject, &format!("no answer within {within:?}"))],
    }
}

fn away(subject: String, what: &str) -> Finding {
    let what = format!("its brokers do not answer: {what} ({})", ErrorCode::DeadLetterTargetAway);
    Finding::problem(
        subject,
        what,
        "check that the brokers can be reached from here, and the login",
    )
}

struct Look<'a> {
    config: &'a DeadLetterTopicConfig,
    subject: &'a str,
    deadline: Instant,
    runtime: tokio::runtime::Handle,
}

impl Look<'_> {
    fn timeout(&self) -> Duration {
        let left = self.deadline.saturating_duration_since(Instant::now());
        left.min(ASK_MAX).max(Duration::from_millis(100))
    }

    fn all(&self) -> Result<Vec<Finding>, Finding> {
        // A consumer, since a producer that asks for a topic may make it.
        let (brokers, topic) = (self.config.brokers.clone(), self.config.topic.as_str());
        let mut asking = KafkaConfig::new(brokers, [topic], "inboxd-check");
        let connecting = self.config.properties.iter();
        let connecting = connecting.filter(|(name, _)| crate::letter_config::connects(name));
        asking.properties = connecting.map(|(name, value)| (name.clone(), value.clone())).collect();
        let refused =
            |error: String| Finding::problem(self.subject, error, "mend the setting that is named");
        let mut client = asking.client().map_err(|error| refused(error.to_string()))?;
        client.set("statistics.interval.ms", "0").set("allow.auto.create.topics", "false");
        let consumer: BaseConsumer = client.create().map_err(|error| refused(error.to_string()))?;
        let answered = consumer.fetch_metadata(Some(topic), self.timeout());
        let metadata =
            answered.map_err(|error| away(self.subject.to_owned(), &error.to_string()))?;
        let admin: Option<AdminClient<DefaultClientContext>> = client.create().ok();
        let partitions = self.partitions(&metadata, admin.as_ref())?;
        let mut findings = vec![];
        let settings =
            admin.as_ref().and_then(|admin| self.described(admin, ResourceSpecifier::Topic(topic)));
        findings.push(Finding::info(self.subject, told(partitions, settings.as_ref())));
        findings.extend(settings.as_ref().and_then(|settings| self.compacted(settings)));
        findings.extend(self.writable(&consumer));
        Ok(findings)
    }

    fn partitions(
        &self,
        metadata: &Metadata,
        admin: Option<&AdminClient<DefaultClientContext>>,
    ) -> Result<usize, Finding> {
        let topic = metadata.topics().iter().find(|topic| topic.name() == self.config.topic);
        let code = topic.and_then(|topic| topic.error()).map(Code::from);
        match (topic, code) {
            (Some(topic), None) => Ok(topic.partitions().len()),
            (Some(_), Some(Code::TopicAuthorizationFailed)) => Err(self.forbidden()),
            (None, _) | (_, Some(Code::UnknownTopicOrPartition | Code::UnknownTopic)) => {
                Err(self.missing(metadata, admin))
            }
            (Some(_), Some(code)) => Err(Finding::problem(
                self.subject,
                format!("cannot be used: {code}"),
                "check the topic's name and the brokers' logs",
            )),
        }
    }

    /// There is no such topic; the broker's own setting says what would become of a letter.
    fn missing(
        &self,
        metadata: &Metadata,
        admin: Option<&AdminClient<DefaultClientContext>>,
    ) -> Finding {
        let broker = metadata.brokers().first().map(|broker| broker.id());
        let settings = admin
            .zip(broker)
            .and_then(|(admin, broker)| self.described(admin, ResourceSpecifier::Broker(broker)));
        let creates = settings.and_then(|settings| value(&settings, "auto.create.topics.enable"));
        let code = ErrorCode::DeadLetterTargetRefused;
        match creates.as_deref() {
            Some("true") => Finding::warning(
                self.subject,
                "does not exist; the brokers would make it with the first dead letter, with their \
                 defaults for partitions, replicas and retention (auto.create.topics.enable)",
                "create it with the retention that dead letters need",
            ),
            _ => Finding::problem(
                self.subject,
                format!("does not exist: dead letters would wait, unsettled ({code})"),
                "create it",
            ),
        }
    }

    fn forbidden(&self) -> Finding {
        let what =
            format!("may not be written to by this user ({})", ErrorCode::DeadLetterTargetRefused);
        Finding::problem(self.subject, what, "grant WRITE and DESCRIBE on the topic")
    }

    fn compacted(&self, settings: &ConfigResource) -> Option<Finding> {
        let policy = value(settings, "cleanup.policy")?;
        policy.contains("compact").then(|| {
            Finding::warning(
                self.subject,
                "is compacted: it takes no dead letter without a key, and keeps the last of each key \
                 alone",
                "set cleanup.policy=delete",
            )
        })
    }

    fn writable(&self, consumer: &BaseConsumer) -> Option<Finding> {
        let allowed = raw::may_write(consumer.client(), &self.config.topic, self.timeout())?;
        (!allowed).then(|| self.forbidden())
    }

    fn described(
        &self,
        admin: &AdminClient<DefaultClientContext>,
        of: ResourceSpecifier<'_>,
    ) -> Option<ConfigResource> {
        let options = AdminOptions::new().request_timeout(Some(self.timeout()));
        let answers: Result<_, KafkaError> =
            self.runtime.block_on(admin.describe_configs([&of], &options));
        answers.ok()?.pop()?.ok()
    }
}

fn value(settings: &ConfigResource, name: &str) -> Option<String> {
    settings.get(name).and_then(|entry| entry.value.clone())
}

fn told(partitions: usize, settings: Option<&ConfigResource>) -> String {
    let named = ["retention.ms", "max.message.bytes", "min.insync.replicas"].into_iter();
    let told = named.filter_map(|name| Some(format!(", {name} {}", value(settings?, name)?)));
    format!("{partitions} partitions{}", told.collect::<String>())
}
