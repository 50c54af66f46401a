//! Due rows: taking them, giving them back, removing them.
//!
//! A row is held by the claim of its key. Taking is two steps. Reading finds what may be taken:
//! pages of an index give the lanes, a page of one lane alone lets the next one begin behind it, so
//! that what waits behind a head costs nothing. Then rows are locked (those that others have locked
//! are passed over) and their keys are claimed; who holds is read back by token. Of lanes without a
//! head that may be taken only so many are looked at in one call, the others in the next ones.
//!
//! Claims are locked before rows everywhere else. Here it is the other way round, so no claim is
//! waited for here.
//!
//! | died after | what is left | what comes of it |
//! |---|---|---|
//! | taking, before the answer | claims | they run out; their attempts count |
//! | rescheduling or removing, before the commit | claim and row | the claim runs out; taken again |
//! | the same, before the answer | no claim; the row later, or gone | asked again: `Lost` |

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use inboxd_contract::{
    Claim, ConsumerId, InboxKey, LaneId, MessageId, OwnerId, ParkedSeq, Reschedule, Settled,
    StoreError, TakeDue, Taken, TakenBatch, Token, Unpark,
};
use sqlx::Row;
use sqlx::mysql::{MySqlConnection, MySqlRow};

use crate::MysqlStore;
use crate::batch::Answers;
use crate::claims::{
    Locked, attempts_if_held, bind_keys, drop_claims, key_bytes, lock_claims, look_if, micros,
    sorted_by_key,
};
use crate::error::store_error;
use crate::explain::micros as duration;
use crate::letters::read_row;
use crate::look::{fingerprint, lane_id, text};
use crate::settle::drop_due;
use crate::sql::{Bound, Patience, Sql, padded, query};

/// Lanes that one call looks at; beyond that it says when to go on.
const LANES_MAX: usize = 1_024;
/// Index entries that one statement reads, and so lanes at most.
const PAGE_ROWS: usize = 64;
/// After how long to go on with lanes that were not looked at.
const LANES_PAUSE: Duration = Duration::from_millis(50);
const LANES_LAST: [u8; 16] = [0xff; 16];

impl MysqlStore {
    pub(crate) async fn take_due_rows(
        &self,
        owner: &OwnerId,
        lease: Duration,
        request: &TakeDue,
    ) -> Result<TakenBatch, StoreError> {
        let reading = async {
            let mut transaction = self.main.begin().await?;
            let result = find_due(transaction.connection(), &self.sql, request).await;
            transaction.end(result).await
        };
        let mut found = self.main.in_time("looking for due messages", reading).await?;
        let mut batch = TakenBatch::default();
        let mut bytes = 0_u64;
        // What somebody else is faster at, or has locked, gives its tokens to what comes next.
        loop {
            let tokens = &request.tokens[batch.rows.len().min(request.tokens.len())..];
            let mut left = tokens.len();
            let mut picks = Vec::new();
            while left > 0 && bytes < request.bytes_max {
                let Some(mut pick) = found.picks.pop_front() else { break };
                let fits = pick.rows.iter().take(left).take_while(|row| {
                    let begun = bytes < request.bytes_max;
                    bytes = if begun { bytes.saturating_add(row.bytes) } else { bytes };
                    begun
                });
                let fits = fits.count();
                found.more |= fits < pick.rows.len();
                pick.rows.truncate(fits);
                left -= fits;
                picks.push(pick);
            }
            if picks.is_empty() {
                break;
            }
            for taken in self.take_picks(owner, lease, tokens, &picks).await? {
                batch.rows.extend(taken);
            }
            bytes = batch.rows.iter().map(body_bytes).sum();
        }
        batch.next_in = match found.more || !found.picks.is_empty() {
            true => Some(Duration::ZERO),
            false if found.cut && batch.rows.is_empty() => Some(LANES_PAUSE),
            false if found.cut => Some(Duration::ZERO),
            false => found.next,
        };
        Ok(batch)
    }

    /// Each pick's rows that are held now.
    async fn take_picks(
        &self,
        owner: &OwnerId,
        lease: Duration,
        tokens: &[Token],
        picks: &[Pick],
    ) -> Result<Vec<Vec<Taken>>, StoreError> {
        let mut tokens = tokens.iter();
        let members: Vec<Vec<(&Candidate, Token)>> = picks
            .iter()
            .map(|pick| pick.rows.iter().zip(tokens.by_ref().copied()).collect())
            .collect();
        let mut answers = Answers::new(picks.len());
        let run = |chosen: Vec<usize>, _patience| {
            let chosen: Vec<&[(&Candidate, Token)]> =
                chosen.into_iter().map(|index| members[index].as_slice()).collect();
            async move {
                let work = async {
                    let mut transaction = self.main.begin().await?;
                    let connection = transaction.connection();
                    let result = take_in(connection, &self.sql, owner, lease, &chosen).await;
                    transaction.end(result).await
                };
                self.main.in_time("taking due messages", work).await
            }
        };
        answers.run(answers.open(), self.chunk_max, self.lock_wait, run).await;
        let mut taken = Vec::with_capacity(picks.len());
        for answer in answers.finish() {
            match answer {
                Ok(rows) => taken.push(rows),
                // Somebody is just at it.
                Err(error) if error.locked => {}
                // What was taken before it is told all the same: it is held.
                Err(error) if taken.iter().all(Vec::is_empty) => return Err(error),
                Err(error) => tracing::warn!(%error, "some due messages were not taken"),
            }
        }
        Ok(taken)
    }

    pub(crate) async fn reschedule_batch(
        &self,
        reschedules: &[Reschedule],
    ) -> Vec<Result<Settled, StoreError>> {
        let mut answers = Answers::new(reschedules.len());
        let run = |chosen: Vec<usize>, patience| {
            let chosen: Vec<&Reschedule> = chosen.into_iter().map(|i| &reschedules[i]).collect();
            async move {
                let work = async {
                    let mut transaction = self.main.begin().await?;
                    let connection = transaction.connection();
                    let result = reschedule_in(connection, &self.sql, &chosen, patience).await;
                    transaction.end(result).await
                };
                self.main.in_time("rescheduling messages", work).await
            }
        };
        let members = sorted_by_key(answers.open(), |index| &reschedules[index].claim.key);
        answers.run(members, self.chunk_max, self.lock_wait, run).await;
        answers.finish()
    }

    pub(crate) async fn unpark_batch(
        &self,
        unparks: &[Unpark],
    ) -> Vec<Result<Settled, StoreError>> {
        let mut answers = Answers::new(unparks.len());
        let run = |chosen: Vec<usize>, patience| {
            let chosen: Vec<&Unpark> = chosen.into_iter().map(|index| &unparks[index]).collect();
            async move {
                let work = async {
                    let mut transaction = self.main.begin().await?;
                    let connection = transaction.connection();
                    let result = unpark_in(connection, &self.sql, &chosen, patience).await;
                    transaction.end(result).await
                };
                self.main.in_time("removing processed messages", work).await
            }
        };
        let members = sorted_by_key(answers.open(), |index| &unparks[index].claim.key);
        answers.run(members, self.chunk_max, self.lock_wait, run).await;
        answers.finish()
    }
}

fn body_bytes(taken: &Taken) -> u64 {
    taken.copy.envelope.body.as_ref().map_or(0, |body| body.len() as u64)
}

/// A row that may be taken, when it was looked at.
struct Candidate {
    seq: i64,
    key: InboxKey,
    bytes: u64,
    /// Microseconds, negative since it is due.
    due_in: i64,
}

/// A head and what follows it in its lane, or a row outside of lanes.
struct Pick {
    rows: Vec<Candidate>,
}

/// What the reading found.
#[derive(Default)]
struct Found {
    picks: VecDeque<Pick>,
    /// There are more that may be taken.
    more: bool,
    /// Not all lanes were looked at.
    cut: bool,
    /// Until the next one may be taken that may not yet.
    next: Option<Duration>,
}

/// A candidate, its lane, and whether it may be taken at its time.
struct Weighed {
    candidate: Candidate,
    lane: Option<LaneId>,
    free: bool,
}

fn weigh(row: &MySqlRow) -> Result<Weighed, sqlx::Error> {
    let required = |at: usize| Ok::<_, sqlx::Error>(text(row, at)?.unwrap_or_default());
    let consumer_id = ConsumerId::new(&required(1)?);
    let consumer_id = consumer_id.map_err(|error| sqlx::Error::Decode(error.into()))?;
    let (bytes, free, blocked): (i64, i64, i64) =
        (row.try_get(5)?, row.try_get(6)?, row.try_get(7)?);
    Ok(Weighed {
        candidate: Candidate {
            seq: row.try_get(0)?,
            key: InboxKey { consumer_id, message_id: MessageId::from_stored(&required(2)?) },
            bytes: u64::try_from(bytes).unwrap_or(0),
            due_in: row.try_get(4)?,
        },
        lane: lane_id(row, 3)?,
        free: free != 0 && blocked == 0,
    })
}

fn of_subscription<'q>(text: String, request: &'q TakeDue) -> Bound<'q> {
    query(text).bind(&*request.subscription).bind(request.consumer_id.as_str().as_bytes())
}

async fn find_due(
    connection: &mut MySqlConnection,
    sql: &Sql,
    request: &TakeDue,
) -> Result<Found, sqlx::Error> {
    // More than can be taken: some may be locked, and whether there are more is to be told.
    let wanted = 2 * request.tokens.len() + 1;
    let mut found = Found::default();
    let mut heads = VecDeque::from(find_heads(connection, sql, request, wanted, &mut found).await?);
    let limit = i64::try_from(wanted).unwrap_or(i64::MAX);
    let alone = of_subscription(sql.alone(), request).bind(limit);
    let alone = alone.fetch_all(&mut *connection).await?;
    let mut alone = alone.iter().map(weigh).collect::<Result<VecDeque<_>, _>>()?;
    if alone.len() < wanted {
        let next = of_subscription(sql.alone_next(), request);
        if let Some(row) = next.fetch_optional(&mut *connection).await? {
            found.next_may_be(weigh(&row)?.candidate.due_in);
        }
    }
    // Two rows of one key have one claim.
    let mut keys = HashSet::new();
    loop {
        if keys.len() >= wanted {
            found.more = !heads.is_empty() || !alone.is_empty();
            return Ok(found);
        }
        // What has been due for longer goes first, so that neither kind starves the other.
        let in_lane = match (heads.front(), alone.front()) {
            (Some(head), Some(row)) => head.candidate.due_in <= row.candidate.due_in,
            (head, _) => head.is_some(),
        };
        let next = if in_lane { heads.pop_front() } else { alone.pop_front() };
        let Some(Weighed { candidate, lane, .. }) = next else { return Ok(found) };
        if !keys.insert(candidate.key.clone()) {
            continue;
        }
        let head = candidate.seq;
        let mut rows = vec![candidate];
        if let Some(lane) = lane {
            let run = find_run(connection, sql, request, lane, head).await?;
            rows.extend(run.into_iter().take_while(|row| keys.insert(row.key.clone())));
        }
        found.picks.push_back(Pick { rows });
    }
}

impl Found {
    fn next_may_be(&mut self, micros: i64) {
        let next = duration(micros);
        self.next = Some(self.next.map_or(next, |known| known.min(next)));
    }
}

/// Heads of lanes that may be taken, in the order of lanes.
async fn find_heads(
    connection: &mut MySqlConnection,
    sql: &Sql,
    request: &TakeDue,
    wanted: usize,
    found: &mut Found,
) -> Result<Vec<Weighed>, sqlx::Error> {
    let mut heads = Vec::new();
    let mut looked_at = 0;
    for (mut after, last) in around(request.lanes_from) {
        loop {
            let select = of_subscription(sql.lanes(), request);
            let select = select.bind(after).bind(last.clone());
            let page = i64::try_from(PAGE_ROWS).unwrap_or(i64::MAX);
            let rows = select.bind(page).fetch_all(&mut *connection).await?;
            let lanes = rows.iter().filter_map(|row| lane_id(row, 0).transpose());
            let mut lanes = lanes.collect::<Result<Vec<_>, _>>()?;
            lanes.dedup();
            let Some(end) = lanes.last().copied() else { break };
            looked_at += lanes.len();
            read_heads(connection, sql, request, &lanes, found, &mut heads).await?;
            if heads.len() >= wanted || looked_at >= LANES_MAX {
                found.cut = true;
                return Ok(heads);
            }
            if rows.len() < PAGE_ROWS {
                break;
            }
            after = end.0.to_vec();
        }
    }
    Ok(heads)
}

/// From this lane to the last, and from the first to this one: what is before each range, and the
/// last of it.
fn around(lane: LaneId) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> {
    let before = u128::from_be_bytes(lane.0).checked_sub(1).map(|lane| lane.to_be_bytes().to_vec());
    // The empty value is before all lanes.
    let upper = (before.clone().unwrap_or_default(), LANES_LAST.to_vec());
    std::iter::once(upper).chain(before.map(|before| (Vec::new(), before)))
}

async fn read_heads(
    connection: &mut MySqlConnection,
    sql: &Sql,
    request: &TakeDue,
    lanes: &[LaneId],
    found: &mut Found,
    heads: &mut Vec<Weighed>,
) -> Result<(), sqlx::Error> {
    let mut select = query(sql.heads(lanes.len()));
    for lane in padded(lanes) {
        select = select.bind(&lane.0[..]);
    }
    let rows = select.fetch_all(connection).await?;
    let mut of_lane = HashMap::new();
    for row in &rows {
        let weighed = weigh(row)?;
        if weighed.free && weighed.candidate.key.consumer_id == request.consumer_id {
            match weighed.candidate.due_in {
                ..=0 => drop(of_lane.insert(weighed.lane, weighed)),
                later => found.next_may_be(later),
            }
        }
    }
    heads.extend(lanes.iter().filter_map(|lane| of_lane.remove(&Some(*lane))));
    Ok(())
}

/// What follows a head without a gap, all of it due and free.
async fn find_run(
    connection: &mut MySqlConnection,
    sql: &Sql,
    request: &TakeDue,
    lane: LaneId,
    head: i64,
) -> Result<Vec<Candidate>, sqlx::Error> {
    let room = request.run_max.min(request.tokens.len()).saturating_sub(1);
    if room == 0 {
        return Ok(Vec::new());
    }
    let select = query(sql.run()).bind(lane.0.to_vec()).bind(head);
    let select = select.bind(i64::try_from(room).unwrap_or(i64::MAX));
    let rows = select.bind(lane.0.to_vec()).bind(head).fetch_all(connection).await?;
    // A dead letter has a seq alone; what is behind it waits.
    let is_dead = |row: &&MySqlRow| matches!(row.try_get::<Option<Vec<u8>>, _>(1), Ok(None));
    let gap = rows.iter().find(is_dead).map(|row| row.try_get::<i64, _>(0)).transpose()?;
    let mut run = Vec::new();
    for row in rows.iter().filter(|row| !is_dead(row)) {
        run.push(weigh(row)?);
    }
    run.sort_by_key(|row| row.candidate.seq);
    let behind_gap = |row: &Weighed| gap.is_some_and(|gap| row.candidate.seq > gap);
    Ok(run
        .into_iter()
        .take_while(|row| row.free && row.candidate.due_in <= 0 && !behind_gap(row))
        .map(|row| row.candidate)
        .collect())
}

async fn take_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    owner: &OwnerId,
    lease: Duration,
    picks: &[&[(&Candidate, Token)]],
) -> Result<Vec<Vec<Taken>>, sqlx::Error> {
    let all: Vec<i64> = picks.iter().flat_map(|pick| pick.iter()).map(|(c, _)| c.seq).collect();
    let locked = lock_due(connection, sql, &all).await?;
    // Without a gap: what comes after a row that is not to be had is left.
    let mut wanted: Vec<(&Candidate, Token, u32)> = Vec::new();
    for pick in picks {
        let rows = pick.iter().map_while(|(row, token)| {
            locked.get(&row.seq).map(|attempts| (*row, *token, *attempts))
        });
        wanted.extend(rows);
    }
    if wanted.is_empty() {
        return Ok(picks.iter().map(|_| Vec::new()).collect());
    }
    wanted.sort_by(|left, right| left.0.key.cmp(&right.0.key));
    let keys: Vec<&InboxKey> = wanted.iter().map(|(row, ..)| &row.key).collect();
    // An insert cannot be told not to wait: this finds what is locked before it does.
    lock_claims(connection, sql, &keys, Patience::NoWait).await?;
    let mut insert = query(sql.claim_due(wanted.len()));
    for (row, token, attempts) in padded(&wanted) {
        insert = bind_keys(insert, std::iter::once(&row.key))
            .bind(owner.0.as_bytes())
            .bind(&token.0.as_bytes()[..])
            .bind(i32::try_from(attempts.saturating_add(1)).unwrap_or(i32::MAX))
            .bind(micros(lease));
    }
    insert.execute(&mut *connection).await?;

    // A statement of its own: who holds what is read here, by token, and what is processed.
    let seqs: Vec<i64> = wanted.iter().map(|(row, ..)| row.seq).collect();
    let mut select = query(sql.taken(seqs.len()));
    for seq in padded(&seqs) {
        select = select.bind(*seq);
    }
    let rows = select.fetch_all(&mut *connection).await?;
    let mut held: HashMap<i64, &MySqlRow> = HashMap::new();
    for row in &rows {
        held.insert(row.try_get(9)?, row);
    }
    let mut answers = Vec::with_capacity(picks.len());
    let mut given_back = Vec::new();
    for pick in picks {
        let mut taken = Vec::new();
        let mut gap = false;
        for (candidate, token) in pick.iter() {
            let row = held.get(&candidate.seq).copied();
            let Some(row) = row.filter(|row| is_token(row, *token)) else {
                gap = true;
                continue;
            };
            if gap {
                given_back.push(Claim { key: candidate.key.clone(), token: *token });
                continue;
            }
            match read_taken(row, *token) {
                Ok(row) => taken.push(row),
                // A newer binary's: it keeps its claim for a lease, and no other back.
                Err(error) => {
                    tracing::error!(%error, "a due message stays parked");
                    gap = true;
                }
            }
        }
        answers.push(taken);
    }
    let given_back: Vec<&Claim> = given_back.iter().collect();
    drop_claims(connection, sql, &given_back).await?;
    Ok(answers)
}

/// Attempts of the rows that are due still and that nobody else has locked.
async fn lock_due(
    connection: &mut MySqlConnection,
    sql: &Sql,
    seqs: &[i64],
) -> Result<HashMap<i64, u32>, sqlx::Error> {
    let mut select = query(sql.lock_due(seqs.len()));
    for seq in padded(seqs) {
        select = select.bind(*seq);
    }
    let rows = select.fetch_all(connection).await?;
    rows.iter()
        .map(|row| Ok((row.try_get(0)?, u32::try_from(row.try_get::<i32, _>(1)?).unwrap_or(0))))
        .collect()
}

fn is_token(row: &MySqlRow, token: Token) -> bool {
    let stored: Result<Option<Vec<u8>>, _> = row.try_get(18);
    matches!(stored, Ok(Some(bytes)) if bytes == token.0.as_bytes())
}

fn read_taken(row: &MySqlRow, token: Token) -> Result<Taken, StoreError> {
    let failed = |error| store_error("reading a taken message", error);
    let parked = read_row(row)?;
    let processed: bool = row.try_get(20).map_err(failed)?;
    let recorded = fingerprint(row, 21).map_err(failed)?;
    Ok(Taken {
        claim: Claim { key: parked.key, token },
        seq: parked.seq,
        attempts: u32::try_from(row.try_get::<i32, _>(19).map_err(failed)?).unwrap_or(0),
        lane_id: parked.lane_id,
        copy: parked.copy,
        first_ago: parked.first_ago,
        processed: processed.then_some(recorded),
    })
}

/// The attempts of each claim that is held, the first of each token.
fn held_once<'a>(mut locked: Locked, claims: impl Iterator<Item = &'a Claim>) -> Vec<Option<u32>> {
    claims
        .map(|claim| {
            let attempts = attempts_if_held(&locked, claim);
            if attempts.is_some() {
                locked.remove(&key_bytes(&claim.key));
            }
            attempts
        })
        .collect()
}

async fn settled(
    connection: &mut MySqlConnection,
    sql: &Sql,
    keys: &[&InboxKey],
    held: &[Option<u32>],
) -> Result<Vec<Settled>, sqlx::Error> {
    let lost = held.iter().any(Option::is_none);
    let mut seen = look_if(connection, sql, keys, lost).await?;
    Ok(held
        .iter()
        .map(|held| {
            let seen = seen.next().unwrap_or_default();
            if held.is_some() { Settled::Done } else { Settled::Lost(seen.look) }
        })
        .collect())
}

async fn reschedule_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    reschedules: &[&Reschedule],
    patience: Patience,
) -> Result<Vec<Settled>, sqlx::Error> {
    let keys: Vec<&InboxKey> = reschedules.iter().map(|r| &r.claim.key).collect();
    let locked = lock_claims(connection, sql, &keys, patience).await?;
    let held = held_once(locked, reschedules.iter().map(|reschedule| &reschedule.claim));
    let pairs = || reschedules.iter().zip(&held).filter_map(|(r, held)| held.map(|n| (*r, n)));
    let claims: Vec<&Claim> = pairs().map(|(reschedule, _)| &reschedule.claim).collect();
    drop_claims(connection, sql, &claims).await?;
    for (reschedule, counted) in pairs() {
        let attempts = counted.saturating_sub(u32::from(reschedule.attempt_back));
        let mut update = query(sql.reschedule(!reschedule.attempt_back))
            .bind(i32::try_from(attempts).unwrap_or(i32::MAX))
            .bind(micros(reschedule.delay));
        if !reschedule.attempt_back {
            update = update.bind(reschedule.last_status).bind(reschedule.last_error.as_deref());
        }
        let update = update.bind(reschedule.seq.0);
        bind_keys(update, std::iter::once(&reschedule.claim.key)).execute(&mut *connection).await?;
    }
    settled(connection, sql, &keys, &held).await
}

async fn unpark_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    unparks: &[&Unpark],
    patience: Patience,
) -> Result<Vec<Settled>, sqlx::Error> {
    let keys: Vec<&InboxKey> = unparks.iter().map(|unpark| &unpark.claim.key).collect();
    let locked = lock_claims(connection, sql, &keys, patience).await?;
    let held = held_once(locked, unparks.iter().map(|unpark| &unpark.claim));
    let gone: Vec<&Unpark> =
        unparks.iter().zip(&held).filter(|(_, held)| held.is_some()).map(|(u, _)| *u).collect();
    let claims: Vec<&Claim> = gone.iter().map(|unpark| &unpark.claim).collect();
    drop_claims(connection, sql, &claims).await?;
    let rows: Vec<(ParkedSeq, &InboxKey)> =
        gone.iter().map(|unpark| (unpark.seq, &unpark.claim.key)).collect();
    drop_due(connection, sql, &rows).await?;
    settled(connection, sql, &keys, &held).await
}
