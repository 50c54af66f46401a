//! Claiming, renewing, counting and releasing.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use inboxd_contract::{
    Attempt, Claim, ClaimAnswer, ClaimRequest, Hold, InboxKey, OwnerId, Release, Settled,
    StoreError, Token,
};
use serde_json::{Value, json};
use sqlx::Row;
use sqlx::sqlite::SqliteConnection;

use crate::SqliteStore;
use crate::batch::{Answers, check_key};
use crate::look::{Seen, look};
use crate::sql::Sql;

/// A token as its column holds it.
pub(crate) fn token_text(token: Token) -> String {
    token.0.simple().to_string()
}

/// `[consumer, message, token]`, what most statements know a member by.
pub(crate) fn member(claim: &Claim) -> Value {
    json!([claim.key.consumer_id.as_str(), claim.key.message_id.as_str(), token_text(claim.token)])
}

pub(crate) fn members<'a>(claims: impl Iterator<Item = &'a Claim>) -> String {
    Value::Array(claims.map(member).collect()).to_string()
}

/// Members with the lanes that they ask about, in hex.
fn members_with_lanes(requests: &[ClaimRequest]) -> String {
    let member = |request: &ClaimRequest| {
        let mut member = member(&request.claim);
        if let Value::Array(fields) = &mut member {
            fields.push(json!(request.lane_id.map(|lane| hex::encode(lane.0))));
        }
        member
    };
    Value::Array(requests.iter().map(member).collect()).to_string()
}

/// A claim of `batch` that is given up, without the attempt that it added where none was made.
fn given_up(claim: &Claim, attempt_back: bool) -> Value {
    let mut member = member(claim);
    if let Value::Array(fields) = &mut member {
        fields.push(json!(i64::from(attempt_back)));
    }
    member
}

pub(crate) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}

impl SqliteStore {
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
        let run = |chosen: Vec<usize>| {
            let chosen = chosen.into_iter().map(|index| requests[index].clone()).collect();
            self.claim_together(owner, lease, chosen)
        };
        answers.run(leaders, run).await;
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

    async fn claim_together(
        &self,
        owner: &OwnerId,
        lease: Duration,
        requests: Vec<ClaimRequest>,
    ) -> Result<Vec<ClaimAnswer>, StoreError> {
        let sql = Arc::clone(&self.sql);
        let owner = owner.to_string();
        self.writer
            .transaction("claiming", move |connection| {
                claim_in(connection, sql, owner, lease, requests).boxed()
            })
            .await
    }

    pub(crate) async fn renew_batch(
        &self,
        lease: Duration,
        claims: &[Claim],
    ) -> Result<Vec<Token>, StoreError> {
        if claims.is_empty() {
            return Ok(Vec::new());
        }
        let sql = Arc::clone(&self.sql);
        let batch = members(claims.iter());
        let renewed = self
            .writer
            .transaction("renewing claims", move |connection| {
                async move {
                    let query = sql.renew.query().bind(batch).bind(millis(lease));
                    let rows = query.fetch_all(connection).await?;
                    rows.iter().map(|row| row.try_get(0)).collect::<Result<HashSet<String>, _>>()
                }
                .boxed()
            })
            .await?;
        let tokens = claims.iter().map(|claim| claim.token);
        Ok(tokens.filter(|token| renewed.contains(&token_text(*token))).collect())
    }

    pub(crate) async fn count_batch(&self, claims: &[Claim]) -> Vec<Result<Attempt, StoreError>> {
        let mut answers = Answers::new(claims.len());
        let run = |chosen: Vec<usize>| {
            let chosen: Vec<Claim> = chosen.into_iter().map(|i| claims[i].clone()).collect();
            let sql = Arc::clone(&self.sql);
            self.writer.transaction("counting attempts", move |connection| {
                count_in(connection, sql, chosen).boxed()
            })
        };
        answers.run(answers.open(), run).await;
        answers.finish()
    }

    pub(crate) async fn release_batch(
        &self,
        releases: &[Release],
    ) -> Vec<Result<Settled, StoreError>> {
        let mut answers = Answers::new(releases.len());
        let run = |chosen: Vec<usize>| {
            let chosen: Vec<Release> = chosen.into_iter().map(|i| releases[i].clone()).collect();
            let sql = Arc::clone(&self.sql);
            self.writer.transaction("releasing claims", move |connection| {
                release_in(connection, sql, chosen).boxed()
            })
        };
        answers.run(answers.open(), run).await;
        answers.finish()
    }
}

async fn claim_in(
    connection: &mut SqliteConnection,
    sql: Arc<Sql>,
    owner: String,
    lease: Duration,
    requests: Vec<ClaimRequest>,
) -> Result<Vec<ClaimAnswer>, sqlx::Error> {
    let batch = members_with_lanes(&requests);
    let query = sql.claim.query().bind(&batch).bind(owner).bind(millis(lease));
    query.execute(&mut *connection).await?;
    // The write lock is ours since BEGIN: nothing commits between the two.
    let seen = look(connection, &sql, &batch, requests.len()).await?;

    let mut answers = Vec::with_capacity(requests.len());
    let mut given_back = Vec::new();
    let mut freed = Vec::new();
    for (request, seen) in requests.iter().zip(seen) {
        let hold = hold_of(request, &seen);
        let answer = ClaimAnswer::resolve(request, hold, &seen.look);
        if matches!(hold, Hold::Held { .. }) && !answer.is_held() {
            match answer {
                ClaimAnswer::Parked { .. } => freed.push(given_up(&request.claim, true)),
                _ => given_back.push(&request.claim),
            }
        }
        answers.push(answer);
    }
    if !freed.is_empty() {
        let freed = Value::Array(freed).to_string();
        sql.release.query().bind(freed).execute(&mut *connection).await?;
    }
    if !given_back.is_empty() {
        let batch = members(given_back.into_iter());
        sql.take_claims.query().bind(batch).fetch_all(connection).await?;
    }
    Ok(answers)
}

fn hold_of(request: &ClaimRequest, seen: &Seen) -> Hold {
    match &seen.claim {
        Some(row) if row.token.as_deref() == Some(&token_text(request.claim.token)) => {
            Hold::Held { attempts: row.attempts }
        }
        Some(row) => Hold::Other { expires_in: row.expires_in },
        // Processed messages are not claimed at all; then the look answers.
        None => Hold::Other { expires_in: Duration::ZERO },
    }
}

async fn count_in(
    connection: &mut SqliteConnection,
    sql: Arc<Sql>,
    claims: Vec<Claim>,
) -> Result<Vec<Attempt>, sqlx::Error> {
    let batch = members(claims.iter());
    let rows = sql.count.query().bind(&batch).fetch_all(&mut *connection).await?;
    let mut counted: HashMap<String, u32> = HashMap::with_capacity(rows.len());
    for row in &rows {
        counted.insert(row.try_get(0)?, row.try_get(1)?);
    }
    let mut seen = match counted.len() < claims.len() {
        true => look(connection, &sql, &batch, claims.len()).await?,
        false => Vec::new(),
    }
    .into_iter();
    Ok(claims
        .iter()
        .map(|claim| {
            let seen = seen.next();
            match counted.get(&token_text(claim.token)) {
                Some(attempts) => Attempt::Counted(*attempts),
                None => Attempt::Lost(seen.map(|seen| seen.look).unwrap_or_default()),
            }
        })
        .collect())
}

async fn release_in(
    connection: &mut SqliteConnection,
    sql: Arc<Sql>,
    releases: Vec<Release>,
) -> Result<Vec<Settled>, sqlx::Error> {
    let batch = members(releases.iter().map(|release| &release.claim));
    let rows = sql.held.query().bind(&batch).fetch_all(&mut *connection).await?;
    let held = rows.iter().map(|row| row.try_get(0)).collect::<Result<HashSet<String>, _>>()?;
    if !held.is_empty() {
        let given = releases.iter().map(|release| given_up(&release.claim, release.attempt_back));
        let given = Value::Array(given.collect()).to_string();
        sql.release.query().bind(given).execute(&mut *connection).await?;
    }
    settle_lost(connection, &sql, &batch, releases.iter().map(|r| &r.claim), held).await
}

/// `Done` for the tokens in `held`, once each; for the others what is there now.
pub(crate) async fn settle_lost<'a>(
    connection: &mut SqliteConnection,
    sql: &Sql,
    batch: &str,
    claims: impl ExactSizeIterator<Item = &'a Claim>,
    mut held: HashSet<String>,
) -> Result<Vec<Settled>, sqlx::Error> {
    let mut seen = match held.len() < claims.len() {
        true => look(connection, sql, batch, claims.len()).await?,
        false => Vec::new(),
    }
    .into_iter();
    Ok(claims
        .map(|claim| {
            let seen = seen.next();
            match held.remove(&token_text(claim.token)) {
                true => Settled::Done,
                false => Settled::Lost(seen.map(|seen| seen.look).unwrap_or_default()),
            }
        })
        .collect())
}
