//! What librdkafka calls: rebalances, errors, statistics, log lines.
//!
//! Purpose: the rebalance callback runs inside poll, on the consumer's thread. On assign each
//! partition gets a fence of its own. On revoke nothing new starts, what is at the engine is
//! waited for (up to the drain deadline), offsets are committed and answered, then the fence is
//! lost. On loss the fence is lost at once and nothing is committed.
//!
//! Invariant: whatever happens in between, the assignment that librdkafka asked for is carried
//! out, incrementally where the protocol is cooperative.

use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::ErrorCode;
use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::topic_partition_list::TopicPartitionList;
use rdkafka::types::RDKafkaRespErr;
use tokio::time::Instant;

use crate::beginning::{self, Begun};
use crate::commit::{self, Between};
use crate::config::{KafkaConfig, StartAt};
use crate::health::{Trouble, is_unreadable};
use crate::partitions::{Epoch, Scope};
use crate::raw;
use crate::shared::Shared;
use crate::stats::Statistics;

const COMMITTED_TIMEOUT: Duration = Duration::from_secs(3);
const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);
const TURN: Duration = Duration::from_millis(200);

/// The settings that the consumer's thread needs.
pub(crate) struct Settings {
    group: String,
    drain_for: Duration,
    silence_max: Duration,
    committed_only: bool,
    pub(crate) metadata: Option<String>,
    pub(crate) position_identity: bool,
    pub(crate) latest: bool,
    pub(crate) commit_interval: Duration,
}

impl Settings {
    pub(crate) fn new(config: &KafkaConfig) -> Self {
        Self {
            group: config.group.clone(),
            drain_for: config.drain_for(),
            silence_max: config.silence_max(),
            committed_only: config.reads_committed(),
            metadata: config.commit_metadata.clone(),
            position_identity: config.position_identity,
            latest: config.start == StartAt::Latest,
            commit_interval: config.commit_interval,
        }
    }
}

/// See the module.
pub(crate) struct Context {
    shared: Arc<Shared>,
    settings: Arc<Settings>,
}

impl Context {
    pub(crate) fn new(shared: Arc<Shared>, settings: Arc<Settings>) -> Self {
        Self { shared, settings }
    }

    /// False: what is assigned cannot be begun with, and nothing of it is taken.
    fn assigned(&self, consumer: &BaseConsumer<Self>, list: &mut TopicPartitionList) -> bool {
        self.warn_of_other_inboxes(consumer, list);
        let begun = match self.settings.latest && list.count() > 0 {
            true => self.begin(consumer, list),
            false => Some(Begun::new()),
        };
        let Some(begun) = begun else { return false };
        let scope = if self.settings.position_identity { Scope::Wanted } else { Scope::NotAsked };
        let mut state = self.shared.lock();
        for (topic, partition) in names(list) {
            let epoch = state.partitions.assign(&topic, partition, scope.clone());
            let place = (topic, partition);
            if let Some(offset) = begun.get(&place) {
                state.partitions.begin_at(epoch, *offset);
                state.begun.insert(place, *offset);
            }
        }
        state.health.assigned();
        true
    }

    /// Decides where partitions begin that have no committed offset, as long as it takes within
    /// what a revoke may take. `None`: the cluster did not answer.
    fn begin(&self, consumer: &BaseConsumer<Self>, list: &mut TopicPartitionList) -> Option<Begun> {
        let deadline = Instant::now() + self.settings.drain_for;
        loop {
            let (seen, begun) = {
                let state = self.shared.lock();
                (state.first_seen.clone(), state.begun.clone())
            };
            let error = match beginning::decide(consumer, list, &seen, &begun) {
                Ok(decided) => return Some(decided),
                Err(error) => error,
            };
            let ending = self.shared.lock().end.is_some();
            if ending || consumer.assignment_lost() || Instant::now() >= deadline {
                tracing::warn!(
                    %error,
                    group = %self.settings.group,
                    "where assigned partitions begin cannot be found out: joining the group again"
                );
                return None;
            }
            tracing::info!(%error, "where assigned partitions begin is not known yet; asking again");
            self.shared.publish();
            self.shared.wait_while(TURN, |state| state.end.is_none());
        }
    }

    /// Offsets committed beside another inbox: what that one has processed, ours does not know.
    fn warn_of_other_inboxes(&self, consumer: &BaseConsumer<Self>, list: &TopicPartitionList) {
        let Some(ours) = self.settings.metadata.as_deref().filter(|_| list.count() > 0) else {
            return;
        };
        let committed = match consumer.committed_offsets(list.clone(), COMMITTED_TIMEOUT) {
            Ok(committed) => committed,
            Err(error) => {
                tracing::warn!(%error, "committed offsets cannot be read: not known whose they are");
                return;
            }
        };
        for (topic, partition, metadata) in raw::metadata(&committed) {
            if metadata.is_empty() || metadata == ours.as_bytes() {
                continue;
            }
            self.shared.counters.count_foreign_commit();
            tracing::warn!(
                code = ErrorCode::InboxForeign.as_str(),
                group = %self.settings.group,
                topic,
                partition,
                theirs = %String::from_utf8_lossy(&metadata),
                ours,
                "this partition's offset was committed by a member with ANOTHER inbox: members \
                 with an inbox each do not deduplicate each other's messages; give all members \
                 of the group one database"
            );
        }
    }

    fn revoked(&self, consumer: &BaseConsumer<Self>, list: &TopicPartitionList) {
        let names = names(list);
        if consumer.assignment_lost() {
            tracing::warn!(
                code = ErrorCode::AssignmentLost.as_str(),
                group = %self.settings.group,
                partitions = names.len(),
                "the assignment is lost: the group went on without this member"
            );
            self.lose(&names);
            self.shared.lock().health.expelled();
            return;
        }
        let deadline = Instant::now() + self.settings.drain_for;
        let epochs: Vec<Epoch> = {
            let mut state = self.shared.lock();
            names.iter().filter_map(|(topic, n)| state.partitions.drain(topic, *n)).collect()
        };
        self.wait_for(consumer, &epochs, deadline);
        if !consumer.assignment_lost() {
            let metadata = self.settings.metadata.as_deref();
            let committed = commit::within(
                consumer.client(),
                &self.shared,
                Some(&epochs),
                metadata,
                COMMIT_TIMEOUT,
                Between::Wait,
            );
            if let Err(error) = committed {
                let code = ErrorCode::OffsetsNotCommitted.as_str();
                tracing::warn!(code, %error, "offsets of revoked partitions were not committed: settled \
                     records come again and are suppressed");
            }
        }
        self.lose(&names);
    }

    /// Waits until nothing of these epochs is at the engine.
    fn wait_for(&self, consumer: &BaseConsumer<Self>, epochs: &[Epoch], deadline: Instant) {
        loop {
            let (left, ending) = {
                let state = self.shared.lock();
                (state.partitions.handed_out(epochs), state.end.is_some())
            };
            if left == 0 || ending || consumer.assignment_lost() {
                return;
            }
            let time = deadline.saturating_duration_since(Instant::now());
            if time.is_zero() {
                tracing::warn!(
                    left,
                    "revoked partitions are handed over with records still at the application: \
                     they come again elsewhere"
                );
                return;
            }
            self.shared.publish();
            self.shared.wait_while(time.min(TURN), |state| {
                state.partitions.handed_out(epochs) > 0 && state.end.is_none()
            });
        }
    }

    fn lose(&self, names: &[(String, i32)]) {
        let mut state = self.shared.lock();
        names.iter().for_each(|(topic, partition)| state.partitions.lose(topic, *partition));
    }
}

impl ConsumerContext for Context {
    fn rebalance(
        &self,
        consumer: &BaseConsumer<Self>,
        kind: RDKafkaRespErr,
        list: &mut TopicPartitionList,
    ) {
        let assign = kind == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS;
        let incremental = matches!(consumer.rebalance_protocol(), RebalanceProtocol::Cooperative);
        self.shared.counters.count_rebalance();
        tracing::info!(
            group = %self.settings.group,
            assign,
            incremental,
            partitions = ?names(list),
            "rebalance"
        );
        let mut begun = true;
        if assign {
            begun = self.assigned(consumer, list);
            self.shared.lock().rejoin |= !begun;
        } else {
            self.revoked(consumer, list);
            // librdkafka keeps a pause over the end of an assignment: the next one, which knows
            // nothing of it, would never be read.
            if let Err(error) = consumer.resume(list) {
                tracing::warn!(%error, "revoked partitions cannot be resumed");
            }
        }
        // The list belongs to librdkafka and must not be replaced.
        let nothing = TopicPartitionList::new();
        let list = if begun { &*list } else { &nothing };
        let done = match (assign, incremental) {
            (true, true) => consumer.incremental_assign(list),
            (true, false) => consumer.assign(list),
            (false, true) => consumer.incremental_unassign(list),
            (false, false) => consumer.unassign(),
        };
        if let Err(error) = done {
            tracing::error!(%error, assign, "librdkafka refuses an assignment it asked for");
        }
        self.shared.publish();
    }
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        if is_overtaken(facility, line) {
            self.shared.counters.count_started_over();
            tracing::warn!(
                code = ErrorCode::RecordsPassedOver.as_str(),
                group = %self.settings.group,
                "RECORDS MAY HAVE BEEN PASSED OVER: a partition does not have the offset that was to \
                 be read next (retention has overtaken it, or the log was cut); reading goes on \
                 with the oldest record that is left: {line}"
            );
            return;
        }
        match level {
            RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
                tracing::error!(target: "librdkafka", facility, "{line}");
            }
            // Mostly a connection, which librdkafka mends: nobody has to act on the line.
            RDKafkaLogLevel::Error | RDKafkaLogLevel::Warning => {
                tracing::warn!(target: "librdkafka", facility, "{line}");
            }
            RDKafkaLogLevel::Notice | RDKafkaLogLevel::Info => {
                tracing::info!(target: "librdkafka", facility, "{line}");
            }
            RDKafkaLogLevel::Debug => tracing::debug!(target: "librdkafka", facility, "{line}"),
        }
    }

    fn stats_raw(&self, statistics: &[u8]) {
        match serde_json::from_slice::<Statistics>(statistics) {
            Ok(statistics) => {
                let mut state = self.shared.lock();
                let alive = statistics.alive(self.settings.silence_max);
                state.health.observe(alive, statistics.steady(), Instant::now());
                state.partitions.observe(&statistics, self.settings.committed_only);
            }
            Err(error) => tracing::warn!(%error, "librdkafka's statistics cannot be read"),
        }
    }

    fn error(&self, error: KafkaError, words: &str) {
        let code = error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Unknown);
        let news = self.shared.lock().health.error(code, words, Instant::now());
        match (code, Trouble::of(code)) {
            // Told by the consumer's loop, with the reason behind it.
            (RDKafkaErrorCode::Fatal, _) => {}
            (RDKafkaErrorCode::AutoOffsetReset, _) => self.shared.fail_as(
                ErrorCode::OffsetMissing,
                format!(
                    "a partition has no committed offset in group {}, or one that retention has \
                     overtaken, and `start` refuses to choose another: {words}",
                    self.settings.group
                ),
            ),
            _ if is_unreadable(code) => {
                self.shared.counters.count_unreadable();
                // librdkafka tries again at once; the same is said once.
                if news {
                    tracing::error!(
                        code = ErrorCode::FrameUndecodable.as_str(),
                        group = %self.settings.group,
                        "RECORDS CANNOT BE READ and may be passed over: {words}"
                    );
                }
            }
            // Each topic is asked for by name too, and told once.
            (RDKafkaErrorCode::UnknownTopicOrPartition, Trouble::Passing) => {
                tracing::debug!(error = %code, "Kafka: {words}");
            }
            (_, Trouble::Passing) => tracing::info!(error = %code, "Kafka: {words}"),
            (_, Trouble::Connection) => tracing::info!(error = %code, "Kafka connection: {words}"),
            // The engine tells it, with the subscription's name, from the status.
            (_, Trouble::Down | Trouble::Operator) => {
                tracing::info!(error = %code, "Kafka: {words}");
            }
        }
        self.shared.publish();
    }
}

/// Whether librdkafka says that an offset was not there any more: it has no event for that.
fn is_overtaken(facility: &str, line: &str) -> bool {
    facility == "OFFSET" && line.contains("offset reset (at ")
}

fn names(list: &TopicPartitionList) -> Vec<(String, i32)> {
    let elements = list.elements();
    elements.iter().map(|element| (element.topic().to_owned(), element.partition())).collect()
}
