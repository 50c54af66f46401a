//! Due rows: taking them, giving them back, removing them.
//!
//! A row is held by the claim of its key. Heads of lanes are found from lane to lane by an index,
//! so that what waits behind a head costs nothing; of lanes without a head that may be taken only
//! so many are looked at in one call, the others in the next ones.
//!
//! | died after | what is left | what comes of it |
//! |---|---|---|
//! | taking, before the answer | claims | they run out; their attempts count |
//! | rescheduling or removing, before the commit | claim and row | the claim runs out; taken again |
//! | the same, before the answer | no claim; the row later, or gone | asked again: `Lost` |

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use inboxd_contract::{
    Claim, Fingerprint, LaneId, OwnerId, Reschedule, Settled, StoreError, TakeDue, Taken,
    TakenBatch, Token, Unpark,
};
use serde_json::{Value, json};
use sqlx::Row;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use crate::SqliteStore;
use crate::batch::Answers;
use crate::claims::{members, millis, settle_lost, token_text};
use crate::letters::read_row;
use crate::look::fingerprint;
use crate::settle::{drop_due, due_member, take_claims};
use crate::sql::Sql;

/// Lanes that one call looks at; beyond that it says when to go on.
const LANES_MAX: i64 = 4_096;
/// Lanes that the first statement of a call looks at, at least.
const LANES_FIRST: i64 = 32;
/// After how long to go on with lanes that were not looked at.
const LANES_PAUSE: Duration = Duration::from_millis(50);
/// Above every lane.
const LANES_END: [u8; 17] = [0xff; 17];

impl SqliteStore {
    pub(crate) async fn take_due_rows(
        &self,
        owner: &OwnerId,
        lease: Duration,
        request: &TakeDue,
    ) -> Result<TakenBatch, StoreError> {
        let (sql, owner, request) = (Arc::clone(&self.sql), owner.to_string(), request.clone());
        let taken = self.writer.transaction("taking due messages", move |connection| {
            take_in(connection, sql, owner, lease, request).boxed()
        });
        let (rows, next_in) = taken.await?;
        // One that cannot be read (a newer binary's) keeps its claim for a lease, and no other back.
        let readable = rows.iter().filter_map(|row| {
            let taken = read_taken(row);
            taken.inspect_err(|error| tracing::error!(%error, "a due message stays parked")).ok()
        });
        Ok(TakenBatch { rows: readable.collect(), next_in })
    }

    pub(crate) async fn reschedule_batch(
        &self,
        reschedules: &[Reschedule],
    ) -> Vec<Result<Settled, StoreError>> {
        let mut answers = Answers::new(reschedules.len());
        for (index, reschedule) in reschedules.iter().enumerate() {
            if reschedule.last_error.as_ref().is_some_and(|error| error.contains('\0')) {
                let what = "a parked row's error text has a NUL, which no column holds";
                answers.set(index, Err(StoreError::refused(what)));
            }
        }
        let run = |chosen: Vec<usize>| {
            let chosen: Vec<Reschedule> =
                chosen.into_iter().map(|index| reschedules[index].clone()).collect();
            let sql = Arc::clone(&self.sql);
            self.writer.transaction("rescheduling messages", move |connection| {
                reschedule_in(connection, sql, chosen).boxed()
            })
        };
        answers.run(answers.open(), run).await;
        answers.finish()
    }

    pub(crate) async fn unpark_batch(
        &self,
        unparks: &[Unpark],
    ) -> Vec<Result<Settled, StoreError>> {
        let mut answers = Answers::new(unparks.len());
        let run = |chosen: Vec<usize>| {
            let chosen: Vec<Unpark> = chosen.into_iter().map(|i| unparks[i].clone()).collect();
            let sql = Arc::clone(&self.sql);
            self.writer.transaction("removing processed messages", move |connection| {
                unpark_in(connection, sql, chosen).boxed()
            })
        };
        answers.run(answers.open(), run).await;
        answers.finish()
    }
}

/// A row that may be taken.
struct Candidate {
    /// In ms, negative since it is due.
    due_in: i64,
    lane: Option<Vec<u8>>,
    seq: i64,
    key: (String, String),
    bytes: u64,
}

fn candidate(row: &SqliteRow) -> Result<Candidate, sqlx::Error> {
    Ok(Candidate {
        due_in: row.try_get(1)?,
        lane: row.try_get(2)?,
        seq: row.try_get(3)?,
        key: (row.try_get(4)?, row.try_get(5)?),
        bytes: row.try_get::<Option<i64>, _>(6)?.map_or(0, |n| u64::try_from(n).unwrap_or(0)),
    })
}

/// Heads of lanes that may be taken, in the order of lanes.
struct Heads {
    found: Vec<Candidate>,
    /// Until the next of those that may not yet, in ms.
    next: Option<i64>,
    /// Not all lanes were looked at.
    cut: bool,
}

async fn find_heads(
    connection: &mut SqliteConnection,
    sql: &Sql,
    request: &TakeDue,
    wanted: usize,
) -> Result<Heads, sqlx::Error> {
    let mut heads = Heads { found: Vec::new(), next: None, cut: false };
    let mut left = LANES_MAX;
    let mut window = LANES_FIRST.max(2 * i64::try_from(wanted).unwrap_or(0)).min(left);
    for (mut after, below) in around(request.lanes_from) {
        loop {
            let query = sql.copies.heads.query();
            let query = query.bind(request.subscription.to_string());
            let query = query.bind(request.consumer_id.as_str().to_owned());
            let query = query.bind(after.clone()).bind(below.clone()).bind(window);
            let rows = query.fetch_all(&mut *connection).await?;
            let mut seen = 0;
            for row in &rows {
                match row.try_get::<i64, _>(0)? {
                    0 => heads.found.push(candidate(row)?),
                    1 => {
                        let next = row.try_get::<Option<i64>, _>(1)?;
                        heads.next = heads.next.into_iter().chain(next).min();
                    }
                    _ => {
                        seen = row.try_get::<Option<i64>, _>(1)?.unwrap_or(0);
                        after = row.try_get::<Option<Vec<u8>>, _>(2)?.unwrap_or_default();
                    }
                }
            }
            left -= seen;
            if seen < window {
                break;
            }
            if heads.found.len() >= wanted || left <= 0 {
                heads.cut = true;
                return Ok(heads);
            }
            window = (4 * window).min(left);
        }
        if heads.found.len() >= wanted {
            heads.cut = true;
            break;
        }
    }
    Ok(heads)
}

/// From this lane to the last, and from the first to this one: bounds that are themselves outside.
fn around(lane: LaneId) -> [(Vec<u8>, Vec<u8>); 2] {
    // The empty value is before all lanes.
    let before = u128::from_be_bytes(lane.0).checked_sub(1);
    let before = before.map_or(Vec::new(), |before| before.to_be_bytes().to_vec());
    [(before, LANES_END.to_vec()), (Vec::new(), lane.0.to_vec())]
}

/// What is taken, bounded by tokens and bytes.
struct Choice {
    seqs: Vec<i64>,
    keys: HashSet<(String, String)>,
    bytes: u64,
    /// Something was left for want of tokens or bytes.
    full: bool,
}

impl Choice {
    /// False: not to be had.
    fn add(&mut self, candidate: Candidate, request: &TakeDue) -> bool {
        if self.seqs.len() >= request.tokens.len() || self.bytes >= request.bytes_max {
            self.full = true;
            return false;
        }
        // Two rows of one key have one claim.
        if !self.keys.insert(candidate.key) {
            return false;
        }
        self.seqs.push(candidate.seq);
        self.bytes = self.bytes.saturating_add(candidate.bytes);
        true
    }
}

async fn take_in(
    connection: &mut SqliteConnection,
    sql: Arc<Sql>,
    owner: String,
    lease: Duration,
    request: TakeDue,
) -> Result<(Vec<SqliteRow>, Option<Duration>), sqlx::Error> {
    // One more than can be taken: whether there is more is told exactly.
    let wanted = request.tokens.len() + 1;
    let heads = find_heads(connection, &sql, &request, wanted).await?;
    let alone = of_subscription(&sql.copies.alone, &request);
    let alone = alone.bind(i64::try_from(wanted).unwrap_or(i64::MAX));
    let alone = alone.fetch_all(&mut *connection).await?;
    let alone = alone.iter().map(candidate).collect::<Result<Vec<_>, _>>()?;

    let mut choice = Choice { seqs: Vec::new(), keys: HashSet::new(), bytes: 0, full: false };
    let (mut lanes, mut alone) = (heads.found.into_iter().peekable(), alone.into_iter().peekable());
    while !choice.full {
        // What has been due for longer goes first, so that neither kind starves the other.
        let in_lane = match (lanes.peek(), alone.peek()) {
            (Some(head), Some(row)) => head.due_in <= row.due_in,
            (head, _) => head.is_some(),
        };
        let Some(next) = (if in_lane { lanes.next() } else { alone.next() }) else { break };
        let (lane, seq) = (next.lane.clone(), next.seq);
        if choice.add(next, &request)
            && let Some(lane) = lane
        {
            add_run(connection, &sql, &request, &mut choice, lane, seq).await?;
        }
    }
    let next_in = match choice.full {
        true => Some(Duration::ZERO),
        false if heads.cut && choice.seqs.is_empty() => Some(LANES_PAUSE),
        false if heads.cut => Some(Duration::ZERO),
        false => {
            let next = of_subscription(&sql.copies.alone_next, &request);
            let next = next.fetch_optional(&mut *connection).await?;
            let next = next.map(|row| row.try_get::<i64, _>(0)).transpose()?;
            let next = next.into_iter().chain(heads.next).min();
            next.map(crate::explain::millis)
        }
    };
    let rows = claim_chosen(connection, &sql, owner, lease, &request.tokens, &choice.seqs).await?;
    Ok((rows, next_in))
}

type Query = sqlx::query::Query<'static, sqlx::Sqlite, sqlx::sqlite::SqliteArguments>;

fn of_subscription(statement: &crate::sql::Statement, request: &TakeDue) -> Query {
    let query = statement.query().bind(request.subscription.to_string());
    query.bind(request.consumer_id.as_str().to_owned())
}

/// What follows a head without a gap, all of it due and free.
async fn add_run(
    connection: &mut SqliteConnection,
    sql: &Sql,
    request: &TakeDue,
    choice: &mut Choice,
    lane: Vec<u8>,
    head: i64,
) -> Result<(), sqlx::Error> {
    let room = request.run_max.min(request.tokens.len() + 1 - choice.seqs.len());
    if room <= 1 {
        return Ok(());
    }
    let query = of_subscription(&sql.copies.run, request).bind(lane).bind(head);
    let query = query.bind(i64::try_from(room - 1).unwrap_or(i64::MAX));
    for row in &query.fetch_all(connection).await? {
        if !row.try_get::<bool, _>(0)? || !choice.add(candidate(row)?, request) {
            break;
        }
    }
    Ok(())
}

async fn claim_chosen(
    connection: &mut SqliteConnection,
    sql: &Sql,
    owner: String,
    lease: Duration,
    tokens: &[Token],
    seqs: &[i64],
) -> Result<Vec<SqliteRow>, sqlx::Error> {
    if seqs.is_empty() {
        return Ok(Vec::new());
    }
    let chosen = seqs.iter().zip(tokens).map(|(seq, token)| json!([seq, token_text(*token)]));
    let chosen = Value::Array(chosen.collect()).to_string();
    let take = sql.copies.take.query().bind(chosen.clone()).bind(owner).bind(millis(lease));
    take.execute(&mut *connection).await?;
    // Read back by token, after the claim: what is processed is seen.
    sql.copies.taken.query().bind(chosen).fetch_all(connection).await
}

fn read_taken(row: &SqliteRow) -> Result<Taken, StoreError> {
    let failed = |error| crate::error::store_error("reading a taken message", error);
    let parked = read_row(row)?;
    let token: String = row.try_get(18).map_err(failed)?;
    let token = token.parse().map(Token).map_err(|error| {
        StoreError::new(inboxd_contract::ErrorClass::Bug, "reading a taken message", error)
    })?;
    let processed: bool = row.try_get(20).map_err(failed)?;
    let recorded: Option<Fingerprint> = fingerprint(row.try_get(21).map_err(failed)?);
    Ok(Taken {
        claim: Claim { key: parked.key, token },
        seq: parked.seq,
        attempts: row.try_get(19).map_err(failed)?,
        lane_id: parked.lane_id,
        copy: parked.copy,
        first_ago: parked.first_ago,
        processed: processed.then_some(recorded),
    })
}

async fn reschedule_in(
    connection: &mut SqliteConnection,
    sql: Arc<Sql>,
    reschedules: Vec<Reschedule>,
) -> Result<Vec<Settled>, sqlx::Error> {
    let batch = members(reschedules.iter().map(|reschedule| &reschedule.claim));
    let held = take_claims(connection, &sql, &batch).await?;
    let later = first_of(&held, reschedules.iter().map(|r| (&r.claim, r))).map(|(r, attempts)| {
        json!([
            r.seq.0,
            r.claim.key.consumer_id.as_str(),
            r.claim.key.message_id.as_str(),
            attempts.saturating_sub(u32::from(r.attempt_back)),
            millis(r.delay),
            r.last_status,
            r.last_error,
            r.attempt_back,
        ])
    });
    let later: Vec<Value> = later.collect();
    if !later.is_empty() {
        let later = Value::Array(later).to_string();
        sql.copies.reschedule.query().bind(later).execute(&mut *connection).await?;
    }
    let claims = reschedules.iter().map(|reschedule| &reschedule.claim);
    settle_lost(connection, &sql, &batch, claims, held.into_keys().collect()).await
}

async fn unpark_in(
    connection: &mut SqliteConnection,
    sql: Arc<Sql>,
    unparks: Vec<Unpark>,
) -> Result<Vec<Settled>, sqlx::Error> {
    let batch = members(unparks.iter().map(|unpark| &unpark.claim));
    let held = take_claims(connection, &sql, &batch).await?;
    let gone = first_of(&held, unparks.iter().map(|u| (&u.claim, u)))
        .map(|(unpark, _)| due_member(&unpark.claim.key, unpark.seq));
    drop_due(connection, &sql, gone.collect()).await?;
    let claims = unparks.iter().map(|unpark| &unpark.claim);
    settle_lost(connection, &sql, &batch, claims, held.into_keys().collect()).await
}

/// Those that held their claims, the first of each, with its attempts.
fn first_of<'a, T>(
    held: &HashMap<String, u32>,
    members: impl Iterator<Item = (&'a Claim, T)>,
) -> impl Iterator<Item = (T, u32)> {
    let mut left = held.clone();
    members.filter_map(move |(claim, member)| {
        left.remove(&token_text(claim.token)).map(|attempts| (member, attempts))
    })
}
