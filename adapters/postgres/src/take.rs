//! Taking due rows: choose and lock, then claim, then look, each with a snapshot of its own.
//!
//! Invariants:
//! - A row is chosen with `FOR UPDATE SKIP LOCKED`, so that instances that take at once get
//!   different rows and none waits; that lock ends with the transaction. What holds the row
//!   from then on is the claim of its key.
//! - Of a lane, what is held is its head and what follows it without a gap: what stands behind a
//!   member that could not be locked or claimed is left, or given back.
//! - Whether a message is processed is looked for after its claim.
//!
//! | died after | what is left | what comes of it |
//! |---|---|---|
//! | choosing, claiming, looking | nothing: the transaction is rolled back | the rows are taken by others |
//! | the commit | claims that nobody works on | they run out, and the rows are taken again |
//!
//! What it does not do: visit every lane in one call. Where more lanes wait for their time than a
//! call looks at, the next call begins with another one.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use inboxd_contract::{
    Claim, ConsumerId, Fingerprint, InboxKey, LaneId, MessageId, OwnerId, ParkedSeq, TakeDue,
    Taken, TakenBatch, Token,
};
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::claim::{give_back, micros as as_micros, place, tokens, unreadable};
use crate::error::Failure;
use crate::explain::{micros, unsigned};
use crate::look::{copy, split_keys};
use crate::parked_sql::ParkedSql;
use crate::parking::integer;
use crate::session::{LockWait, Sessions, Work};
use crate::sql::Sql;

/// Lanes that one call looks at, some 10 µs each.
const LANES_MAX: i64 = 4_000;
/// When to ask again where not every lane was seen.
const AGAIN_LANES: Duration = Duration::from_millis(250);
/// When to ask again where others were just at what was due.
const AGAIN_LOCKED: Duration = Duration::from_millis(50);

/// One call for due rows.
pub(crate) struct Taking<'a> {
    pub(crate) sessions: &'a Sessions,
    pub(crate) sql: &'a Sql,
    pub(crate) parked_sql: &'a ParkedSql,
    pub(crate) owner: &'a OwnerId,
    pub(crate) lease: Duration,
    pub(crate) request: &'a TakeDue,
}

/// A row that may be taken.
#[derive(Debug, Clone)]
struct Candidate {
    seq: i64,
    key: InboxKey,
    /// Those of the row.
    attempts: u32,
    lane: Option<LaneId>,
    body_bytes: u64,
    /// How long it has been due.
    late: Duration,
}

/// What was chosen, locked.
#[derive(Debug, Default)]
struct Choice {
    /// Of one lane in its order.
    rows: Vec<Candidate>,
    /// More is due than was chosen.
    more: bool,
    /// When to look again: others are at what is due, or there are more lanes.
    again: Option<Duration>,
    /// When the next row that is free becomes due.
    next_in: Option<Duration>,
}

/// How claims are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claiming {
    /// In one statement.
    Whole,
    /// One by one, so that one that is locked is left out.
    Each,
}

impl Taking<'_> {
    pub(crate) async fn run(&self) -> Result<TakenBatch, Failure> {
        match self.once(LockWait::Whole, Claiming::Whole).await {
            // Somebody has inserted a claim and neither committed nor rolled back.
            Err(failure) if failure.locked => self.once(LockWait::Part, Claiming::Each).await,
            batch => batch,
        }
    }

    async fn once(&self, wait: LockWait, claiming: Claiming) -> Result<TakenBatch, Failure> {
        let call = async {
            let mut work = self.sessions.begin(wait).await?;
            let batch = self.take(&mut work, claiming).await;
            work.end(batch).await
        };
        self.sessions.bounded("taking due rows", call).await
    }

    async fn take(&self, work: &mut Work, claiming: Claiming) -> Result<TakenBatch, Failure> {
        let choice = self.choose(work).await?;
        let claims: Vec<Claim> = choice
            .rows
            .iter()
            .zip(&self.request.tokens)
            .map(|(row, token)| Claim { key: row.key.clone(), token: *token })
            .collect();
        let held = match claiming {
            Claiming::Whole => self.claim(work, &choice.rows, &claims).await?,
            Claiming::Each => self.claim_each(work, &choice.rows, &claims).await?,
        };
        let (mut kept, mut surplus, mut broken) = (Vec::new(), Vec::new(), HashSet::new());
        for (row, claim) in choice.rows.iter().zip(&claims) {
            let attempts = held.get(&claim.token);
            match attempts {
                Some(attempts) if row.lane.is_none_or(|lane| !broken.contains(&lane)) => {
                    kept.push((row, claim, *attempts));
                }
                attempts => {
                    broken.extend(row.lane);
                    surplus.extend(attempts.map(|_| claim));
                }
            }
        }
        let passed_over = kept.len() < choice.rows.len();
        if !surplus.is_empty() {
            give_back(work, self.sql, &surplus).await?;
        }
        let rows = self.read(work, &kept).await?;
        let soon = match (rows.is_empty(), choice.more || passed_over) {
            (false, true) => Some(Duration::ZERO),
            (true, true) => Some(AGAIN_LOCKED),
            (_, false) => choice.again,
        };
        Ok(TakenBatch { rows, next_in: soon.into_iter().chain(choice.next_in).min() })
    }

    /// Rows outside of lanes and heads of lanes, those first that have been due for longest; then,
    /// where there are tokens left, what follows the heads.
    async fn choose(&self, work: &mut Work) -> Result<Choice, Failure> {
        let limit = self.request.tokens.len();
        let mut choice = Choice::default();
        let mut rows = self.loose(work).await?;
        choice.more = rows.len() >= limit;
        rows.extend(self.heads(work, &mut choice).await?);
        rows.sort_by(|left, right| right.late.cmp(&left.late).then(left.seq.cmp(&right.seq)));
        let mut budget = Budget::new(limit, self.request.bytes_max);
        let mut keys = HashSet::new();
        for row in rows {
            if !keys.insert(row.key.clone()) || !budget.admits() {
                choice.more = true;
                continue;
            }
            budget.spend(&row);
            choice.rows.push(row);
        }
        if self.request.run_max > 1 && budget.admits() {
            self.follow(work, &mut choice, &mut budget, &mut keys).await?;
        }
        choice.more |= !budget.admits();
        Ok(choice)
    }

    async fn loose(&self, work: &mut Work) -> Result<Vec<Candidate>, Failure> {
        let query = sqlx::query(self.parked_sql.take_loose())
            .bind(self.request.consumer_id.as_str())
            .bind(&*self.request.subscription)
            .bind(as_i64(self.request.tokens.len()));
        let rows = work.rows("choosing due rows", query).await?;
        rows.iter().map(|row| self.candidate(row).map_err(unreadable)).collect()
    }

    async fn heads(&self, work: &mut Work, choice: &mut Choice) -> Result<Vec<Candidate>, Failure> {
        let query = sqlx::query(self.parked_sql.take_heads())
            .bind(self.request.consumer_id.as_str())
            .bind(&*self.request.subscription)
            .bind(&self.request.lanes_from.0[..])
            .bind(as_i64(self.request.tokens.len()))
            .bind(LANES_MAX);
        let rows = work.rows("choosing heads of lanes", query).await?;
        let mut heads = Vec::with_capacity(rows.len());
        let mut locked_by_others = false;
        for row in &rows {
            let known = |column| row.try_get::<Option<i64>, _>(column).map_err(unreadable);
            choice.next_in = known("next_us")?.map(micros);
            let found = known("found")?.unwrap_or(0);
            choice.more |= found >= as_i64(self.request.tokens.len());
            if known("seen")?.unwrap_or(0) >= LANES_MAX {
                choice.again = Some(AGAIN_LANES);
            }
            if known("seq")?.is_some() {
                heads.push(self.candidate(row).map_err(unreadable)?);
            }
            locked_by_others = as_i64(heads.len()) < found;
        }
        if locked_by_others {
            choice.again = Some(AGAIN_LOCKED);
        }
        Ok(heads)
    }

    /// Adds what follows the heads, in rounds, so that each lane gets its share.
    async fn follow(
        &self,
        work: &mut Work,
        choice: &mut Choice,
        budget: &mut Budget,
        keys: &mut HashSet<InboxKey>,
    ) -> Result<(), Failure> {
        let heads: Vec<(LaneId, i64)> =
            choice.rows.iter().filter_map(|row| Some((row.lane?, row.seq))).collect();
        if heads.is_empty() {
            return Ok(());
        }
        let query = sqlx::query(self.parked_sql.take_followers())
            .bind(self.request.consumer_id.as_str())
            .bind(&*self.request.subscription)
            .bind(heads.iter().map(|(lane, _)| &lane.0[..]).collect::<Vec<_>>())
            .bind(heads.iter().map(|(_, seq)| *seq).collect::<Vec<_>>())
            .bind(as_i64(self.request.run_max.min(self.request.tokens.len()) - 1));
        let rows = work.rows("choosing what follows", query).await?;
        let mut runs: Vec<Vec<Candidate>> = vec![Vec::new(); heads.len()];
        let mut ended = vec![false; heads.len()];
        for row in &rows {
            let lane = place(row)?;
            let ready = row.try_get::<Option<bool>, _>("ready").map_err(unreadable)?;
            let candidate = self.candidate(row).map_err(unreadable)?;
            let (Some(run), Some(ended)) = (runs.get_mut(lane), ended.get_mut(lane)) else {
                continue;
            };
            *ended |= ready != Some(true) || keys.contains(&candidate.key);
            if !*ended {
                keys.insert(candidate.key.clone());
                run.push(candidate);
            }
        }
        let chosen = shares(runs, budget);
        let locked = self.lock(work, &chosen).await?;
        let mut broken = HashSet::new();
        for row in chosen {
            let Some(lane) = row.lane else { continue };
            if locked.contains(&row.seq) && !broken.contains(&lane) {
                choice.rows.push(row);
            } else {
                broken.insert(lane);
            }
        }
        Ok(())
    }

    async fn lock(&self, work: &mut Work, rows: &[Candidate]) -> Result<HashSet<i64>, Failure> {
        if rows.is_empty() {
            return Ok(HashSet::new());
        }
        let seqs: Vec<i64> = rows.iter().map(|row| row.seq).collect();
        let query = sqlx::query(self.parked_sql.take_lock()).bind(seqs);
        let rows = work.rows("locking due rows", query).await?;
        rows.iter().map(|row| row.try_get(0).map_err(unreadable)).collect()
    }

    /// Which tokens hold their claims now, with the attempts.
    async fn claim(
        &self,
        work: &mut Work,
        rows: &[Candidate],
        claims: &[Claim],
    ) -> Result<HashMap<Token, u32>, Failure> {
        if rows.is_empty() {
            return Ok(HashMap::new());
        }
        let (consumers, messages) = split_keys(rows.iter().map(|row| &row.key));
        let query = sqlx::query(self.parked_sql.take_claim())
            .bind(consumers)
            .bind(messages)
            .bind(tokens(claims.iter()))
            .bind(rows.iter().map(|row| integer(row.attempts)).collect::<Vec<_>>())
            .bind(&*self.owner.0)
            .bind(as_micros(self.lease));
        let held = work.rows("claiming due rows", query).await?;
        held.iter()
            .map(|row| {
                let token: &str = row.try_get(0).map_err(unreadable)?;
                let token = token
                    .parse()
                    .map_err(|error| unreadable(sqlx::Error::Decode(Box::new(error))))?;
                let attempts: i32 = row.try_get(1).map_err(unreadable)?;
                Ok((Token(token), u32::try_from(attempts).unwrap_or(0)))
            })
            .collect()
    }

    /// The same, one by one: a lock that is met undoes that one alone.
    async fn claim_each(
        &self,
        work: &mut Work,
        rows: &[Candidate],
        claims: &[Claim],
    ) -> Result<HashMap<Token, u32>, Failure> {
        let mut held = HashMap::new();
        let until = tokio::time::Instant::now() + self.sessions.lock_patience();
        for (row, claim) in rows.iter().zip(claims) {
            if tokio::time::Instant::now() >= until {
                break;
            }
            work.simple("SAVEPOINT one").await?;
            let one = std::slice::from_ref(claim);
            match self.claim(work, std::slice::from_ref(row), one).await {
                Ok(claimed) => held.extend(claimed),
                Err(failure) if failure.locked => work.simple("ROLLBACK TO SAVEPOINT one").await?,
                Err(failure) => return Err(failure),
            }
        }
        Ok(held)
    }

    async fn read(
        &self,
        work: &mut Work,
        kept: &[(&Candidate, &Claim, u32)],
    ) -> Result<Vec<Taken>, Failure> {
        if kept.is_empty() {
            return Ok(Vec::new());
        }
        let seqs: Vec<i64> = kept.iter().map(|(row, _, _)| row.seq).collect();
        let query = sqlx::query(self.parked_sql.take_read()).bind(seqs);
        let rows = work.rows("reading due rows", query).await?;
        rows.iter()
            .map(|row| {
                let Some((candidate, claim, attempts)) = kept.get(place(row)?) else {
                    return Err(unreadable(sqlx::Error::RowNotFound));
                };
                taken(row, candidate, claim, *attempts).map_err(|error| {
                    let what = format!("PostgreSQL: parked row {} is unreadable", candidate.seq);
                    Failure::unreadable(what, error)
                })
            })
            .collect()
    }

    fn candidate(&self, row: &PgRow) -> Result<Candidate, sqlx::Error> {
        let consumer_id: &ConsumerId = &self.request.consumer_id;
        Ok(Candidate {
            seq: row.try_get("seq")?,
            key: InboxKey {
                consumer_id: consumer_id.clone(),
                message_id: MessageId::from_stored(row.try_get("message_id")?),
            },
            attempts: u32::try_from(row.try_get::<i32, _>("attempts")?).unwrap_or(0),
            lane: lane(row)?,
            body_bytes: row.try_get::<i64, _>("body_bytes").map(unsigned)?,
            late: micros(row.try_get("late_us")?),
        })
    }
}

fn as_i64(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// The lane of a row.
pub(crate) fn lane(row: &PgRow) -> Result<Option<LaneId>, sqlx::Error> {
    let bytes: Option<&[u8]> = row.try_get("lane_id")?;
    let lane = |bytes: &[u8]| <[u8; 16]>::try_from(bytes).map(LaneId);
    bytes.map(lane).transpose().map_err(|error| sqlx::Error::Decode(Box::new(error)))
}

fn taken(
    row: &PgRow,
    candidate: &Candidate,
    claim: &Claim,
    attempts: u32,
) -> Result<Taken, sqlx::Error> {
    let processed = match row.try_get("processed")? {
        true => {
            let fingerprint: Option<&str> = row.try_get("message_fingerprint")?;
            Some(fingerprint.and_then(Fingerprint::from_stored))
        }
        false => None,
    };
    Ok(Taken {
        claim: claim.clone(),
        seq: ParkedSeq(candidate.seq),
        attempts,
        lane_id: lane(row)?,
        copy: copy(row)?,
        first_ago: micros(row.try_get("first_us")?),
        processed,
    })
}

/// How many rows and bytes of bodies there is room for.
#[derive(Debug)]
struct Budget {
    rows: usize,
    bytes: u64,
}

impl Budget {
    fn new(rows: usize, bytes: u64) -> Self {
        Self { rows, bytes }
    }

    /// Room for one more; its body may overshoot.
    fn admits(&self) -> bool {
        self.rows > 0 && self.bytes > 0
    }

    fn spend(&mut self, row: &Candidate) {
        self.rows = self.rows.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(row.body_bytes);
    }
}

/// What there is room for: the first of each run, then the second of each. Lane by lane in the
/// answer.
fn shares(runs: Vec<Vec<Candidate>>, budget: &mut Budget) -> Vec<Candidate> {
    let longest = runs.iter().map(Vec::len).max().unwrap_or(0);
    let mut lengths = vec![0; runs.len()];
    'full: for round in 0..longest {
        for (run, length) in runs.iter().zip(&mut lengths) {
            let Some(row) = run.get(round) else { continue };
            if !budget.admits() {
                break 'full;
            }
            budget.spend(row);
            *length = round + 1;
        }
    }
    runs.into_iter().zip(lengths).flat_map(|(run, length)| run.into_iter().take(length)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(seq: i64) -> Candidate {
        Candidate {
            seq,
            key: InboxKey {
                consumer_id: ConsumerId::new("c").expect("valid"),
                message_id: MessageId::from_stored("m"),
            },
            attempts: 0,
            lane: Some(LaneId([0; 16])),
            body_bytes: 10,
            late: Duration::ZERO,
        }
    }

    #[test]
    fn runs_are_shared_evenly_and_have_no_gap() {
        let run = |seqs: &[i64]| seqs.iter().map(|seq| candidate(*seq)).collect::<Vec<_>>();
        let runs = || vec![run(&[1, 2, 3, 4]), run(&[11]), run(&[21, 22, 23])];
        let seqs = |rows, bytes| -> Vec<i64> {
            let shared = shares(runs(), &mut Budget::new(rows, bytes));
            shared.into_iter().map(|row| row.seq).collect()
        };
        assert_eq!(seqs(8, 1_000), [1, 2, 3, 4, 11, 21, 22, 23]);
        assert_eq!(seqs(5, 1_000), [1, 2, 11, 21, 22]);
        assert_eq!(seqs(8, 35), [1, 2, 11, 21], "one may overshoot");
        assert_eq!(seqs(0, 35), [0_i64; 0]);
    }
}
