//! How long Kafka can deliver again what it delivered once: a topic's retention.

use std::time::Duration;

use inboxd_contract::RedeliveryHorizon;
use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use tokio::runtime::Handle;

use crate::config::KafkaConfig;

const ASK_TIMEOUT: Duration = Duration::from_secs(4);
/// The answer's, with making and freeing a client.
const TIMEOUT: Duration = Duration::from_secs(6);

/// How long the topics that a configuration names, patterns apart, can deliver again. Joins no
/// group. Must be called within a tokio runtime.
pub async fn redelivery_horizon(config: &KafkaConfig) -> Vec<(String, RedeliveryHorizon)> {
    let named = config.topics.iter().filter(|topic| !topic.starts_with('^'));
    match config.client() {
        Ok(client) => ask(client, named.cloned().collect()).await,
        // What is wrong with a configuration is told by who starts or inspects it.
        Err(_) => Vec::new(),
    }
}

/// Asks for each topic; what cannot be found out is said to be unknown.
pub(crate) async fn ask(
    client: ClientConfig,
    topics: Vec<String>,
) -> Vec<(String, RedeliveryHorizon)> {
    let names = topics.clone();
    let runtime = Handle::current();
    // Making and freeing a client blocks.
    let asked = tokio::task::spawn_blocking(move || describe(&client, &names, &runtime));
    let unknown = |why: &str| {
        let unknown = |topic| (topic, RedeliveryHorizon::Unknown(why.to_owned()));
        topics.into_iter().map(unknown).collect()
    };
    match tokio::time::timeout(TIMEOUT, asked).await {
        Ok(Ok(Ok(known))) => known,
        Ok(Ok(Err(why))) => unknown(&why),
        Ok(Err(_)) => unknown("the question failed"),
        Err(_) => unknown("the broker did not answer in time"),
    }
}

fn describe(
    client: &ClientConfig,
    topics: &[String],
    runtime: &Handle,
) -> Result<Vec<(String, RedeliveryHorizon)>, String> {
    let admin: AdminClient<DefaultClientContext> =
        client.create().map_err(|error| error.to_string())?;
    let resources: Vec<_> = topics.iter().map(|topic| ResourceSpecifier::Topic(topic)).collect();
    let options = AdminOptions::new().request_timeout(Some(ASK_TIMEOUT));
    let answers = runtime
        .block_on(admin.describe_configs(&resources, &options))
        .map_err(|error| error.to_string())?;
    let horizons = answers.into_iter().map(|answer| match answer {
        Ok(resource) => horizon(&resource),
        Err(code) => RedeliveryHorizon::Unknown(code.to_string()),
    });
    Ok(topics.iter().cloned().zip(horizons).collect())
}

fn horizon(resource: &ConfigResource) -> RedeliveryHorizon {
    let value = |name| resource.get(name).and_then(|entry| entry.value.as_deref());
    if value("cleanup.policy").is_some_and(|policy| policy.contains("compact")) {
        return RedeliveryHorizon::Compacted;
    }
    match value("retention.ms").map(str::parse::<i64>) {
        Some(Ok(-1)) => RedeliveryHorizon::Unlimited,
        Some(Ok(ms)) => {
            RedeliveryHorizon::Limited(Duration::from_millis(u64::try_from(ms).unwrap_or(0)))
        }
        _ => RedeliveryHorizon::Unknown("the broker does not tell retention.ms".into()),
    }
}
