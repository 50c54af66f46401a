//! Parked rows and dead letters: asked of a store and changed there, by a running sidecar or by a
//! command that has the database to itself.
//!
//! Invariants: one call changes a bounded number of rows and takes a bounded time; each row is
//! changed on its own, with its entry in the audit, in one transaction of the store's. Which
//! rows, is decided once per call, before the first is changed: a row that somebody else changes
//! meanwhile answers that it is no dead letter any more.
//!
//! | died after | what is left | what comes of it |
//! |---|---|---|
//! | the rows were listed | nothing | the call is made again |
//! | some rows were replayed or discarded | those are due or discarded, each with its entry | made again by filter, the call finds the others alone; by `seqs`, those answer `not_dead` |
//! | all were, and the answer was lost | all is done | made again, the same |
//! | a page of several | the pages before are done | going on after the last `seq`, or from the start by filter: what is no dead letter any more is not found |

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use inboxd_contract::{
    Actor, AuditEntry, ConsumerId, DeadReason, Fingerprint, Header, InboxKey, InboxStore,
    MessageId, ParkedFilter, ParkedRow, ParkedSeq, ParkedState, Replay, Replayed, StoreError,
};
use uuid::Uuid;

use super::{AppError, CLOSE_WITHIN, store};
use crate::admin::{
    AuditItem, AuditPage, BODY_SHOWN_MAX, COUNT_MAX, DiscardAnswer, DiscardAsk, DiscardResult,
    DiscardedRow, LetterFilter, LetterHeader, LetterWhole, LettersError, ParkedAsk, ParkedItem,
    ParkedPage, ReplayAnswer, ReplayAsk, ReplayNext, ReplayResult, ReplayedRow, SPREAD_MAX,
    Selection, readings,
};
use crate::causes::chain;
use crate::config::Config;

/// A database that hangs must not hang who asks.
const READ_WITHIN: Duration = Duration::from_secs(10);
/// For all rows of one call.
const CHANGE_WITHIN: Duration = Duration::from_secs(60);

/// A database that a command has opened for itself.
pub struct OpenedStore(Arc<dyn InboxStore>);

impl OpenedStore {
    /// Its rows, as of now.
    pub fn dead_letters(&self) -> DeadLetters<'_> {
        DeadLetters::of(&*self.0)
    }

    /// Lets go of it.
    pub async fn close(self) {
        let _ = tokio::time::timeout(CLOSE_WITHIN, self.0.close()).await;
    }
}

/// Opens the database as it is, to look into it: nothing is migrated, locked or written.
///
/// # Errors
/// It cannot be read, in words.
pub async fn open_to_look(config: &Config) -> Result<OpenedStore, String> {
    opened(store::open_to_read(&config.database, config.lease), READ_WITHIN).await
}

/// Opens the database to change rows; it is migrated as for a start, and one that is a file is
/// locked.
///
/// # Errors
/// It cannot be used, in words: a SQLite file that a running sidecar has open names its process.
pub async fn open_to_change(config: &Config) -> Result<OpenedStore, String> {
    opened(store::open_to_change(&config.database, config.lease), CHANGE_WITHIN).await
}

async fn opened(
    open: impl Future<Output = Result<Arc<dyn InboxStore>, AppError>>,
    within: Duration,
) -> Result<OpenedStore, String> {
    match tokio::time::timeout(within, open).await {
        Ok(Ok(store)) => Ok(OpenedStore(store)),
        Ok(Err(AppError::Store(error))) => Err(chain(&error)),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {within:?}")),
    }
}

/// What is asked of a store, at one time.
pub struct DeadLetters<'a> {
    store: &'a dyn InboxStore,
    /// What ages are compared with.
    now: SystemTime,
}

impl<'a> DeadLetters<'a> {
    /// Those of this store, asked for now.
    pub(super) fn of(store: &'a dyn InboxStore) -> Self {
        Self { store, now: SystemTime::now() }
    }

    /// A page of rows.
    ///
    /// # Errors
    /// What is asked for makes no sense, or the store cannot be used.
    pub async fn list(&self, ask: &ParkedAsk) -> Result<ParkedPage, LettersError> {
        let filter = self.filter(&ask.filter, &ask.states).await?;
        let matching = match ask.count {
            true => Some(read(self.store.count_parked(&filter, COUNT_MAX)).await?),
            false => None,
        };
        let rows = self.rows(&filter, ask.after, ask.limit).await?;
        Ok(ParkedPage {
            next: next(&rows, ask.limit),
            rows: rows.iter().map(|row| ParkedItem::new(row, self.now)).collect(),
            matching,
        })
    }

    /// One row, whole.
    ///
    /// # Errors
    /// The store cannot be used.
    pub async fn show(&self, seq: i64) -> Result<Option<LetterWhole>, LettersError> {
        let row = read(self.store.parked_row(ParkedSeq(seq))).await?;
        Ok(row.map(|row| whole(&row, self.now)))
    }

    /// The body of one row; `Some(None)`: it keeps none.
    ///
    /// # Errors
    /// The store cannot be used.
    pub async fn body(&self, seq: i64) -> Result<Option<Option<Bytes>>, LettersError> {
        let row = read(self.store.parked_row(ParkedSeq(seq))).await?;
        Ok(row.map(|row| row.copy.envelope.body.filter(|_| row.body_bytes.is_some())))
    }

    /// Makes dead letters due again.
    ///
    /// # Errors
    /// What is asked for makes no sense, or the store could do none of it.
    pub async fn replay(
        &self,
        ask: &ReplayAsk,
        actor: &Actor,
    ) -> Result<ReplayAnswer, LettersError> {
        let chosen = self.chosen(&ask.selection).await?;
        let delays = delays(ask, chosen.rows.len())?;
        let results = match ask.dry_run {
            true => self.foreseen(ask, &chosen.rows).await?,
            false => self.replayed(ask, &chosen.rows, &delays, actor).await?,
        };
        let mut answer = ReplayAnswer { dry_run: ask.dry_run, ..ReplayAnswer::default() };
        for ((row, delay), result) in chosen.rows.iter().zip(&delays).zip(results) {
            let told = replayed_row(row, *delay, result);
            answer.counts.add(told.result);
            answer.rows.push(told);
        }
        let after_all = ask.delay + spread(ask.rate, chosen.rows.len());
        answer.next = chosen.next.map(|after| ReplayNext { after, delay_ms: millis(after_all) });
        Ok(answer)
    }

    /// Gives dead letters up.
    ///
    /// # Errors
    /// What is asked for makes no sense, or the store could do none of it.
    pub async fn discard(
        &self,
        ask: &DiscardAsk,
        actor: &Actor,
    ) -> Result<DiscardAnswer, LettersError> {
        let chosen = self.chosen(&ask.selection).await?;
        let results = match ask.dry_run {
            true => chosen.rows.iter().map(|row| Ok(row.is_dead())).collect(),
            false => {
                let seqs: Vec<_> = chosen.rows.iter().map(|row| ParkedSeq(row.seq)).collect();
                change(self.store.discard(&seqs, actor)).await?
            }
        };
        let mut answer = DiscardAnswer { dry_run: ask.dry_run, ..DiscardAnswer::default() };
        for (row, result) in chosen.rows.iter().zip(results) {
            let (result, error) = match result {
                Ok(true) => (DiscardResult::Discarded, None),
                Ok(false) => (DiscardResult::NotDead, None),
                Err(error) => (DiscardResult::Failed, Some(chain(&error))),
            };
            answer.counts.add(result);
            let (seq, message_id) = (row.seq, row.message_id());
            answer.rows.push(DiscardedRow { seq, message_id, result, error });
        }
        answer.next = chosen.next;
        Ok(answer)
    }

    /// What was done to dead letters.
    ///
    /// # Errors
    /// The store cannot be used.
    pub async fn audit(&self, before: Option<i64>, limit: u32) -> Result<AuditPage, LettersError> {
        let entries = read(self.store.audit(before, limit)).await?;
        let is_full = entries.len() >= limit as usize;
        Ok(AuditPage {
            next: entries.last().filter(|_| is_full).map(|entry| entry.id),
            entries: entries.iter().map(|entry| self.entry(entry)).collect(),
        })
    }

    fn entry(&self, entry: &AuditEntry) -> AuditItem {
        let at = self.now.checked_sub(entry.ago).filter(|at| *at >= SystemTime::UNIX_EPOCH);
        let at = at.unwrap_or(SystemTime::UNIX_EPOCH);
        AuditItem {
            id: entry.id,
            ago_ms: millis(entry.ago),
            at: humantime::format_rfc3339_seconds(at).to_string(),
            actor: entry.actor.clone(),
            action: <&'static str>::from(entry.action).to_owned(),
            consumer_id: entry.key.consumer_id.to_string(),
            message_id: entry.key.message_id.to_string(),
            seq: entry.seq.0,
            replayed_as: entry.replayed_as.as_ref().map(ToString::to_string),
        }
    }

    /// The store's filter: times as ages from now, and the id in that form which has rows.
    async fn filter(
        &self,
        asked: &LetterFilter,
        states: &[ParkedState],
    ) -> Result<ParkedFilter, LettersError> {
        let consumer_id = asked.consumer_id.as_deref().map(ConsumerId::new).transpose();
        let reason = asked.reason.as_deref().map(str::parse).transpose();
        let age = |at: SystemTime| self.now.duration_since(at).ok();
        let mut filter = ParkedFilter {
            consumer_id: consumer_id
                .map_err(|error| LettersError::asked("consumer_id", error.to_string()))?,
            subscription: asked.subscription.clone(),
            states: states.to_vec(),
            message_id: None,
            reason: reason.map_err(|_| LettersError::asked("reason", "there is no such reason"))?,
            error_contains: asked.error.clone(),
            // What is since a time to come has no age yet.
            parked_at_most: asked.since.map(|since| age(since).unwrap_or_default()),
            parked_at_least: asked.until.and_then(age),
        };
        let Some(id) = &asked.id else { return Ok(filter) };
        let ids = readings(id);
        let Some((first, _)) = ids.first().cloned() else {
            return Err(LettersError::asked("id", "a message id is not blank"));
        };
        for (id, _) in ids {
            filter.message_id = Some(id);
            if read(self.store.count_parked(&filter, 1)).await? > 0 {
                return Ok(filter);
            }
        }
        filter.message_id = Some(first);
        Ok(filter)
    }

    async fn rows(
        &self,
        filter: &ParkedFilter,
        after: Option<i64>,
        limit: u32,
    ) -> Result<Vec<ParkedRow>, LettersError> {
        read(self.store.list_parked(filter, after.map(ParkedSeq), limit)).await
    }

    /// The rows that something is done to.
    async fn chosen(&self, selection: &Selection) -> Result<Chosen, LettersError> {
        match selection {
            Selection::Filter { filter, after, limit } => {
                let filter = self.filter(filter, &[ParkedState::Dead]).await?;
                let rows = self.rows(&filter, *after, *limit).await?;
                let next = next(&rows, *limit);
                Ok(Chosen { next, rows: rows.into_iter().map(Row::of).collect() })
            }
            Selection::Seqs(seqs) => {
                let mut rows = Vec::with_capacity(seqs.len());
                for seq in seqs {
                    // Lists leave bodies where they are.
                    let found = self.rows(&ParkedFilter::default(), Some(seq - 1), 1).await?;
                    let row = found.into_iter().find(|row| row.seq.0 == *seq);
                    rows.push(Row { seq: *seq, row });
                }
                Ok(Chosen { rows, next: None })
            }
        }
    }

    async fn replayed(
        &self,
        ask: &ReplayAsk,
        rows: &[Row],
        delays: &[Duration],
        actor: &Actor,
    ) -> Result<Vec<Result<Replayed, StoreError>>, LettersError> {
        let replays: Vec<_> = rows
            .iter()
            .zip(delays)
            .map(|(row, delay)| Replay {
                seq: ParkedSeq(row.seq),
                delay: *delay,
                allow_processed: ask.allow_processed,
                fresh: Uuid::new_v4(),
            })
            .collect();
        failpoint!(ReplayBegins);
        let replayed = change(self.store.replay(&replays, actor)).await;
        failpoint!(ReplayCommitted);
        replayed
    }

    /// What a replay would come to, as far as can be said without making it.
    async fn foreseen(
        &self,
        ask: &ReplayAsk,
        rows: &[Row],
    ) -> Result<Vec<Result<Replayed, StoreError>>, LettersError> {
        let dead = rows.iter().filter(|row| row.is_dead());
        let dead: Vec<_> = dead.filter_map(|row| row.row.as_ref()).collect();
        let processed = self.processed(dead.iter().map(|row| row.key.clone()).collect()).await?;
        // Under which id each would go, and whether that is processed.
        let ids: Vec<_> = dead.iter().zip(&processed).map(|(row, at)| own_id(row, at)).collect();
        let keys = dead.iter().zip(&ids).map(|(row, id)| InboxKey {
            consumer_id: row.key.consumer_id.clone(),
            message_id: id.clone(),
        });
        let processed = self.processed(keys.collect()).await?;
        let mut foreseen =
            dead.iter().zip(ids).zip(processed).map(|((row, id), processed)| {
                match (processed, ask.allow_processed) {
                    _ if row.copy.reason == DeadReason::BodyTooLarge => Replayed::NoBody,
                    (Some(_), true) => Replayed::Due(id.of_override(Uuid::nil())),
                    (Some(_), false) => Replayed::Processed,
                    (None, _) => Replayed::Due(id),
                }
            });
        let each = rows.iter().map(|row| match row.is_dead() {
            true => Ok(foreseen.next().unwrap_or(Replayed::NotDead)),
            false => Ok(Replayed::NotDead),
        });
        Ok(each.collect())
    }

    /// The rows of `inbox_messages` of these keys.
    async fn processed(
        &self,
        keys: Vec<InboxKey>,
    ) -> Result<Vec<Option<Option<Fingerprint>>>, LettersError> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let looks = read(self.store.look(&keys)).await?;
        Ok(looks.into_iter().map(|look| look.processed).collect())
    }
}

/// The id that a row is replayed under where its message is not processed under that.
fn own_id(row: &ParkedRow, processed: &Option<Option<Fingerprint>>) -> MessageId {
    let own = row.copy.fingerprint.as_ref();
    let differs =
        processed.as_ref().is_some_and(|processed| Fingerprint::conflict(processed.as_ref(), own));
    let id = &row.key.message_id;
    match own {
        Some(own) if differs || row.copy.reason == DeadReason::IdConflict => id.of_conflict(own),
        _ => id.clone(),
    }
}

/// The rows of one call.
struct Chosen {
    rows: Vec<Row>,
    /// There may be more behind this one.
    next: Option<i64>,
}

/// A row that is meant; by its key, it may not be there.
struct Row {
    seq: i64,
    row: Option<ParkedRow>,
}

impl Row {
    fn of(row: ParkedRow) -> Self {
        Self { seq: row.seq.0, row: Some(row) }
    }

    fn is_dead(&self) -> bool {
        self.row.as_ref().is_some_and(|row| row.state == ParkedState::Dead)
    }

    fn message_id(&self) -> Option<String> {
        self.row.as_ref().filter(|_| self.is_dead()).map(|row| row.key.message_id.to_string())
    }
}

fn replayed_row(row: &Row, delay: Duration, result: Result<Replayed, StoreError>) -> ReplayedRow {
    let message_id = row.message_id();
    let (mut replayed_as, mut due_in_ms, mut error) = (None, None, None);
    let result = match result {
        Ok(Replayed::Due(id)) => {
            due_in_ms = Some(millis(delay));
            replayed_as = Some(id.to_string()).filter(|id| message_id.as_ref() != Some(id));
            ReplayResult::Due
        }
        Ok(Replayed::NotDead) => ReplayResult::NotDead,
        Ok(Replayed::NoBody) => ReplayResult::NoBody,
        Ok(Replayed::Processed) => ReplayResult::Processed,
        Ok(Replayed::Exists) => ReplayResult::Exists,
        Err(why) => {
            error = Some(chain(&why));
            ReplayResult::Failed
        }
    };
    ReplayedRow { seq: row.seq, message_id, result, replayed_as, due_in_ms, error }
}

/// When each of so many rows becomes due.
fn delays(ask: &ReplayAsk, rows: usize) -> Result<Vec<Duration>, LettersError> {
    let last = ask.delay + spread(ask.rate, rows.saturating_sub(1));
    if last > SPREAD_MAX {
        let last = humantime::format_duration(Duration::from_secs(last.as_secs()));
        let why =
            format!("at this rate the last one would be due in {last}, and 30 days are the most");
        return Err(LettersError::asked("rate", why));
    }
    Ok((0..rows).map(|row| ask.delay + spread(ask.rate, row)).collect())
}

/// How long so many rows take at this rate, in whole milliseconds.
fn spread(rate: Option<f64>, rows: usize) -> Duration {
    match rate {
        Some(rate) => Duration::from_millis((rows as f64 * 1_000.0 / rate) as u64),
        None => Duration::ZERO,
    }
}

fn next(rows: &[ParkedRow], limit: u32) -> Option<i64> {
    rows.last().filter(|_| rows.len() >= limit as usize).map(|row| row.seq.0)
}

fn whole(row: &ParkedRow, now: SystemTime) -> LetterWhole {
    let envelope = &row.copy.envelope;
    let text = |bytes: &Option<Bytes>| {
        bytes.as_deref().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    };
    let body = envelope.body.as_deref().filter(|_| row.body_bytes.is_some());
    LetterWhole {
        row: ParkedItem::new(row, now),
        headers: envelope.headers.iter().map(header).collect(),
        key_base64: envelope.key.as_deref().map(|key| STANDARD.encode(key)),
        content_encoding: text(&envelope.content_encoding),
        traceparent: text(&envelope.traceparent),
        producer: text(&envelope.producer),
        correlation_id: text(&envelope.correlation_id),
        causation_id: text(&envelope.causation_id),
        body_base64: body.map(|body| STANDARD.encode(&body[..body.len().min(BODY_SHOWN_MAX)])),
        body_cut: body.is_some_and(|body| body.len() > BODY_SHOWN_MAX),
    }
}

fn header(header: &Header) -> LetterHeader {
    let value = header.value.as_deref();
    LetterHeader {
        name: String::from_utf8_lossy(&header.name).into_owned(),
        value: value.map(|value| String::from_utf8_lossy(value).into_owned()),
        value_base64: value
            .filter(|value| std::str::from_utf8(value).is_err())
            .map(|value| STANDARD.encode(value)),
    }
}

async fn read<T>(asked: impl Future<Output = Result<T, StoreError>>) -> Result<T, LettersError> {
    match tokio::time::timeout(READ_WITHIN, asked).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(LettersError::Inbox(chain(&error))),
        Err(_) => {
            let why = format!("the database did not answer within {READ_WITHIN:?}");
            Err(LettersError::Inbox(why))
        }
    }
}

/// Where nothing was done, one error says so.
async fn change<T>(
    asked: impl Future<Output = Vec<Result<T, StoreError>>>,
) -> Result<Vec<Result<T, StoreError>>, LettersError> {
    let Ok(results) = tokio::time::timeout(CHANGE_WITHIN, asked).await else {
        return Err(LettersError::Inbox(format!(
            "the database did not answer within {CHANGE_WITHIN:?}: some rows may be changed, and \
             the audit has those; ask again"
        )));
    };
    match results.first() {
        Some(Err(error)) if results.iter().all(Result::is_err) => {
            Err(LettersError::Inbox(chain(error)))
        }
        _ => Ok(results),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
