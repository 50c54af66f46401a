//! Claiming, renewing, counting and releasing.

use std::collections::HashMap;
use std::time::Duration;

use inboxd_contract::{
    Attempt, Claim, ClaimAnswer, ClaimRequest, Hold, InboxKey, LaneId, OwnerId, Release, Settled,
    StoreError, Token,
};
use sqlx::Row;
use sqlx::mysql::MySqlConnection;

use crate::MysqlStore;
use crate::batch::{Answers, check_key};
use crate::look::{Seen, key_of_row, look, look_with_lanes};
use crate::sql::{Bound, Patience, Sql, padded, query};

/// Microseconds, as intervals are bound; far below what DATETIME holds.
pub(crate) fn micros(duration: Duration) -> i64 {
    const YEARS_100: u64 = 100 * 365 * 86_400;
    i64::try_from(duration.min(Duration::from_secs(YEARS_100)).as_micros()).unwrap_or(i64::MAX)
}

/// Binds consumer and message of each.
pub(crate) fn bind_keys<'q, 'k: 'q>(
    mut query: Bound<'q>,
    keys: impl Iterator<Item = &'k InboxKey>,
) -> Bound<'q> {
    for key in keys {
        query = query
            .bind(key.consumer_id.as_str().as_bytes())
            .bind(key.message_id.as_str().as_bytes());
    }
    query
}

/// Binds consumer, message and token of each.
pub(crate) fn bind_claims<'q, 'k: 'q>(
    mut query: Bound<'q>,
    claims: impl Iterator<Item = &'k Claim>,
) -> Bound<'q> {
    for claim in claims {
        query = bind_keys(query, std::iter::once(&claim.key));
        query = query.bind(&claim.token.0.as_bytes()[..]);
    }
    query
}

/// Consumer and message id as their columns hold them.
pub(crate) type KeyBytes = (Vec<u8>, Vec<u8>);

/// Token and attempts of each locked claim row.
pub(crate) type Locked = HashMap<KeyBytes, (Option<Vec<u8>>, u32)>;

pub(crate) fn attempts_if_held(locked: &Locked, claim: &Claim) -> Option<u32> {
    let (token, attempts) = locked.get(&key_bytes(&claim.key))?;
    (token.as_deref() == Some(claim.token.0.as_bytes())).then_some(*attempts)
}

pub(crate) fn key_bytes(key: &InboxKey) -> KeyBytes {
    (key.consumer_id.as_str().into(), key.message_id.as_str().into())
}

/// Members in the one order in which locks are taken.
pub(crate) fn sorted_by_key<'a>(
    mut members: Vec<usize>,
    key: impl Fn(usize) -> &'a InboxKey,
) -> Vec<usize> {
    members.sort_by(|left, right| key(*left).cmp(key(*right)));
    members
}

impl MysqlStore {
    pub(crate) async fn claim_batch(
        &self,
        owner: &OwnerId,
        lease: Duration,
        requests: &[ClaimRequest],
    ) -> Vec<Result<ClaimAnswer, StoreError>> {
        let mut answers = Answers::new(requests.len());
        // The first of each key, and who follows whom.
        let mut first: HashMap<&InboxKey, usize> = HashMap::new();
        let mut followers = Vec::new();
        let mut leaders = Vec::new();
        for (index, request) in requests.iter().enumerate() {
            if let Err(error) = check_key(&request.claim.key) {
                answers.set(index, Err(error));
            } else if let Some(leader) = first.get(&request.claim.key) {
                followers.push((index, *leader));
            } else {
                first.insert(&request.claim.key, index);
                leaders.push(index);
            }
        }
        let leaders = sorted_by_key(leaders, |index| &requests[index].claim.key);
        let run = |chosen: Vec<usize>, patience| {
            let chosen: Vec<&ClaimRequest> = chosen.into_iter().map(|i| &requests[i]).collect();
            async move {
                let work = async {
                    let mut transaction = self.main.begin().await?;
                    let connection = transaction.connection();
                    let result =
                        claim_in(connection, &self.sql, owner, lease, &chosen, patience).await;
                    transaction.end(result).await
                };
                self.main.in_time("claiming", work).await
            }
        };
        answers.run(leaders, self.chunk_max, self.lock_wait, run).await;
        for (index, leader) in followers {
            let wait = match answers.get(leader) {
                Some(Ok(ClaimAnswer::Busy { wait })) => *wait,
                Some(Ok(answer)) if answer.is_held() => lease,
                _ => Duration::ZERO,
            };
            answers.set(index, Ok(ClaimAnswer::Busy { wait }));
        }
        answers.finish()
    }

    pub(crate) async fn renew_batch(
        &self,
        lease: Duration,
        claims: &[Claim],
    ) -> Result<Vec<Token>, StoreError> {
        let order = sorted_by_key((0..claims.len()).collect(), |index| &claims[index].key);
        let mut renewed = Vec::with_capacity(claims.len());
        for chunk in order.chunks(self.chunk_max) {
            let chunk: Vec<&Claim> = chunk.iter().map(|index| &claims[*index]).collect();
            let work = async {
                let mut transaction = self.renewals.begin().await?;
                let result = renew_in(transaction.connection(), &self.sql, lease, &chunk).await;
                transaction.end(result).await
            };
            renewed.extend(self.renewals.in_time("renewing claims", work).await?);
        }
        Ok(renewed)
    }

    pub(crate) async fn count_batch(&self, claims: &[Claim]) -> Vec<Result<Attempt, StoreError>> {
        let mut answers = Answers::new(claims.len());
        let run = |chosen: Vec<usize>, patience| {
            let chosen: Vec<&Claim> = chosen.into_iter().map(|index| &claims[index]).collect();
            async move {
                let work = async {
                    let mut transaction = self.main.begin().await?;
                    let connection = transaction.connection();
                    let result = count_in(connection, &self.sql, &chosen, patience).await;
                    transaction.end(result).await
                };
                self.main.in_time("counting attempts", work).await
            }
        };
        let members = sorted_by_key(answers.open(), |index| &claims[index].key);
        answers.run(members, self.chunk_max, self.lock_wait, run).await;
        answers.finish()
    }

    pub(crate) async fn release_batch(
        &self,
        releases: &[Release],
    ) -> Vec<Result<Settled, StoreError>> {
        let mut answers = Answers::new(releases.len());
        let run = |chosen: Vec<usize>, patience| {
            let chosen: Vec<&Release> = chosen.into_iter().map(|index| &releases[index]).collect();
            async move {
                let work = async {
                    let mut transaction = self.main.begin().await?;
                    let connection = transaction.connection();
                    let result = release_in(connection, &self.sql, &chosen, patience).await;
                    transaction.end(result).await
                };
                self.main.in_time("releasing claims", work).await
            }
        };
        let members = sorted_by_key(answers.open(), |index| &releases[index].claim.key);
        answers.run(members, self.chunk_max, self.lock_wait, run).await;
        answers.finish()
    }
}

async fn claim_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    owner: &OwnerId,
    lease: Duration,
    requests: &[&ClaimRequest],
    patience: Patience,
) -> Result<Vec<ClaimAnswer>, sqlx::Error> {
    let keys: Vec<&InboxKey> = requests.iter().map(|request| &request.claim.key).collect();
    if patience == Patience::NoWait {
        // An insert cannot be told not to wait. This finds what is locked, inserted and not
        // yet committed included, before it does.
        lock_claims(connection, sql, &keys, patience).await?;
    }
    let mut insert = query(sql.claim(requests.len()));
    for request in padded(requests) {
        insert = bind_keys(insert, std::iter::once(&request.claim.key))
            .bind(owner.0.as_bytes())
            .bind(&request.claim.token.0.as_bytes()[..])
            .bind(micros(lease));
    }
    insert.execute(&mut *connection).await?;

    // A statement of its own: at READ COMMITTED it sees what was committed while the one before
    // waited. Who holds what is read here, by token.
    let lanes: Vec<Option<LaneId>> = requests.iter().map(|request| request.lane_id).collect();
    let seen = look_with_lanes(connection, sql, &keys, &lanes).await?;
    let mut answers = Vec::with_capacity(requests.len());
    let (mut given_back, mut freed) = (Vec::new(), Vec::new());
    for (request, seen) in requests.iter().zip(seen) {
        let hold = hold_of(request, &seen);
        let answer = ClaimAnswer::resolve(request, hold, &seen.look);
        if matches!(hold, Hold::Held { .. }) && !answer.is_held() {
            match answer {
                ClaimAnswer::Parked { .. } => freed.push(&request.claim),
                _ => given_back.push(&request.claim),
            }
        }
        answers.push(answer);
    }
    free_claims(connection, sql, &freed, true).await?;
    drop_claims(connection, sql, &given_back).await?;
    Ok(answers)
}

fn hold_of(request: &ClaimRequest, seen: &Seen) -> Hold {
    match &seen.claim {
        Some(row) if row.token.as_deref() == Some(request.claim.token.0.as_bytes()) => {
            Hold::Held { attempts: row.attempts }
        }
        Some(row) => Hold::Other { expires_in: row.expires_in },
        None => Hold::Other { expires_in: Duration::ZERO },
    }
}

/// Locks the claim rows of these keys and reads them.
pub(crate) async fn lock_claims(
    connection: &mut MySqlConnection,
    sql: &Sql,
    keys: &[&InboxKey],
    patience: Patience,
) -> Result<Locked, sqlx::Error> {
    let select = query(sql.lock_claims(keys.len(), patience));
    let rows = bind_keys(select, padded(keys).copied()).fetch_all(connection).await?;
    rows.iter()
        .map(|row| {
            let attempts = u32::try_from(row.try_get::<i32, _>(3)?).unwrap_or(0);
            Ok((key_of_row(row, 0)?, (row.try_get(2)?, attempts)))
        })
        .collect()
}

/// Frees claims by their tokens, with or without the attempt that they added.
async fn free_claims(
    connection: &mut MySqlConnection,
    sql: &Sql,
    claims: &[&Claim],
    attempt_back: bool,
) -> Result<(), sqlx::Error> {
    if claims.is_empty() {
        return Ok(());
    }
    let update = query(sql.release(claims.len())).bind(i32::from(attempt_back));
    bind_claims(update, padded(claims).copied()).execute(connection).await.map(drop)
}

/// Removes claims by their tokens.
pub(crate) async fn drop_claims(
    connection: &mut MySqlConnection,
    sql: &Sql,
    claims: &[&Claim],
) -> Result<(), sqlx::Error> {
    if claims.is_empty() {
        return Ok(());
    }
    let delete = query(sql.drop_claims(claims.len()));
    bind_claims(delete, padded(claims).copied()).execute(connection).await.map(drop)
}

async fn renew_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    lease: Duration,
    claims: &[&Claim],
) -> Result<Vec<Token>, sqlx::Error> {
    let keys: Vec<&InboxKey> = claims.iter().map(|claim| &claim.key).collect();
    let locked = lock_claims(connection, sql, &keys, Patience::Skip).await?;
    let held: Vec<&Claim> =
        claims.iter().copied().filter(|claim| attempts_if_held(&locked, claim).is_some()).collect();
    if !held.is_empty() {
        let update = query(sql.renew(held.len())).bind(micros(lease));
        bind_claims(update, padded(&held).copied()).execute(connection).await?;
    }
    Ok(held.into_iter().map(|claim| claim.token).collect())
}

async fn count_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    claims: &[&Claim],
    patience: Patience,
) -> Result<Vec<Attempt>, sqlx::Error> {
    let keys: Vec<&InboxKey> = claims.iter().map(|claim| &claim.key).collect();
    let locked = lock_claims(connection, sql, &keys, patience).await?;
    let counted: Vec<Option<u32>> =
        claims.iter().map(|claim| attempts_if_held(&locked, claim)).collect();
    let held: Vec<&Claim> = claims
        .iter()
        .zip(&counted)
        .filter_map(|(claim, counted)| counted.map(|_| *claim))
        .collect();
    if !held.is_empty() {
        let update = query(sql.count(held.len()));
        bind_claims(update, padded(&held).copied()).execute(&mut *connection).await?;
    }
    let mut seen = look_if(connection, sql, &keys, held.len() < claims.len()).await?;
    Ok(counted
        .into_iter()
        .map(|counted| {
            let seen = seen.next().unwrap_or_default();
            match counted {
                // The row is locked, so that nobody else added to it.
                Some(attempts) => Attempt::Counted(attempts.saturating_add(1)),
                None => Attempt::Lost(seen.look),
            }
        })
        .collect())
}

async fn release_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    releases: &[&Release],
    patience: Patience,
) -> Result<Vec<Settled>, sqlx::Error> {
    let keys: Vec<&InboxKey> = releases.iter().map(|release| &release.claim.key).collect();
    let mut locked = lock_claims(connection, sql, &keys, patience).await?;
    let held: Vec<bool> = releases
        .iter()
        .map(|release| {
            let held = attempts_if_held(&locked, &release.claim).is_some();
            // Whoever is named twice is served once.
            if held {
                locked.remove(&key_bytes(&release.claim.key));
            }
            held
        })
        .collect();
    for back in [false, true] {
        let group: Vec<&Claim> = releases
            .iter()
            .zip(&held)
            .filter(|(release, held)| **held && release.attempt_back == back)
            .map(|(release, _)| &release.claim)
            .collect();
        free_claims(connection, sql, &group, back).await?;
    }
    let lost = held.iter().any(|held| !held);
    let mut seen = look_if(connection, sql, &keys, lost).await?;
    Ok(held
        .into_iter()
        .map(|held| {
            let seen = seen.next().unwrap_or_default();
            if held { Settled::Done } else { Settled::Lost(seen.look) }
        })
        .collect())
}

/// The look, where somebody needs it.
pub(crate) async fn look_if(
    connection: &mut MySqlConnection,
    sql: &Sql,
    keys: &[&InboxKey],
    needed: bool,
) -> Result<std::vec::IntoIter<Seen>, sqlx::Error> {
    let seen = if needed { look(connection, sql, keys).await? } else { Vec::new() };
    Ok(seen.into_iter())
}
