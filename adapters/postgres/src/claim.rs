//! Claiming, renewing and counting.

use std::collections::HashMap;
use std::time::Duration;

use inboxd_contract::{
    Attempt, Claim, ClaimAnswer, ClaimRequest, Hold, InboxKey, LaneId, OwnerId, Token,
};
use sqlx::Row;

use crate::batch::Operation;
use crate::error::Failure;
use crate::look::{look, look_at_lanes, split_keys};
use crate::session::{LockWait, Sessions, Work};
use crate::sql::Sql;

/// PostgreSQL's interval arithmetic ends somewhere; a thousand years are long enough.
const MICROS_MAX: i64 = 1_000 * 365 * 86_400 * 1_000_000;

/// A duration as the statements take it: microseconds.
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).map_or(MICROS_MAX, |micros| micros.min(MICROS_MAX))
}

/// Tokens as the statements take them.
pub(crate) fn tokens<'a>(claims: impl Iterator<Item = &'a Claim>) -> Vec<String> {
    claims.map(|claim| claim.token.0.to_string()).collect()
}

pub(crate) fn unreadable(error: sqlx::Error) -> Failure {
    Failure::unreadable(String::from("PostgreSQL: an answer is unreadable"), error)
}

/// A batch of claims, one per key.
pub(crate) struct Claiming<'a> {
    pub(crate) sessions: &'a Sessions,
    pub(crate) sql: &'a Sql,
    pub(crate) owner: &'a OwnerId,
    pub(crate) lease: Duration,
}

impl Operation for Claiming<'_> {
    type Member = ClaimRequest;
    type Answer = ClaimAnswer;

    fn patience(&self) -> Duration {
        self.sessions.lock_patience()
    }

    async fn run(
        &self,
        members: &[&ClaimRequest],
        wait: LockWait,
    ) -> Result<Vec<ClaimAnswer>, Failure> {
        let call = async {
            let mut work = self.sessions.begin(wait).await?;
            let answers = self.claim(&mut work, members).await;
            work.end(answers).await
        };
        self.sessions.bounded("a claim", call).await
    }
}

impl Claiming<'_> {
    /// First the claims; then, with a snapshot of its own, the look; then away with the claims
    /// that turned out not to be needed.
    async fn claim(
        &self,
        work: &mut Work,
        members: &[&ClaimRequest],
    ) -> Result<Vec<ClaimAnswer>, Failure> {
        let held = self.take(work, members).await?;
        let keys: Vec<&InboxKey> = members.iter().map(|request| &request.claim.key).collect();
        let lanes = members.iter().map(|request| lane_bytes(request.lane_id.as_ref())).collect();
        let sights = look_at_lanes(work, self.sql, &keys, lanes).await?;
        let mut answers = Vec::with_capacity(members.len());
        let (mut unneeded, mut freed) = (Vec::new(), Vec::new());
        for (request, sight) in members.iter().zip(&sights) {
            let key = &request.claim.key;
            let attempts = held.get(&(key.consumer_id.as_str(), key.message_id.as_str()));
            let hold = match attempts {
                Some(attempts) => Hold::Held { attempts: *attempts },
                None => Hold::Other { expires_in: sight.claim_left },
            };
            let answer = ClaimAnswer::resolve(request, hold, &sight.look);
            match (&answer, attempts) {
                (_, None) => {}
                (answer, Some(_)) if answer.is_held() => {}
                // What a worker that died had counted stays.
                (ClaimAnswer::Parked { .. }, Some(2..)) => freed.push(&request.claim),
                _ => unneeded.push(&request.claim),
            }
            answers.push(answer);
        }
        if !unneeded.is_empty() {
            let (consumers, messages) = split_keys(unneeded.iter().map(|claim| &claim.key));
            let query = sqlx::query(self.sql.unclaim())
                .bind(consumers)
                .bind(messages)
                .bind(tokens(unneeded.into_iter()));
            work.rows("removing claims", query).await?;
        }
        if !freed.is_empty() {
            give_back(work, self.sql, &freed).await?;
        }
        Ok(answers)
    }

    /// Which of the members' tokens hold their claims now, with the attempts.
    async fn take<'m>(
        &self,
        work: &mut Work,
        members: &[&'m ClaimRequest],
    ) -> Result<HashMap<(&'m str, &'m str), u32>, Failure> {
        let (consumers, messages) = split_keys(members.iter().map(|request| &request.claim.key));
        let query = sqlx::query(self.sql.claim())
            .bind(consumers)
            .bind(messages)
            .bind(tokens(members.iter().map(|request| &request.claim)))
            .bind(&*self.owner.0)
            .bind(micros(self.lease));
        let rows = work.rows("the claim", query).await?;
        let mut attempts = HashMap::with_capacity(rows.len());
        for row in &rows {
            let consumer: &str = row.try_get(0).map_err(unreadable)?;
            let message: &str = row.try_get(1).map_err(unreadable)?;
            let count: i32 = row.try_get(2).map_err(unreadable)?;
            attempts.insert((consumer, message), u32::try_from(count).unwrap_or(0));
        }
        let mut held = HashMap::with_capacity(rows.len());
        for request in members {
            let key = &request.claim.key;
            let key = (key.consumer_id.as_str(), key.message_id.as_str());
            if let Some(count) = attempts.get(&key) {
                held.insert(key, *count);
            }
        }
        Ok(held)
    }
}

/// A lane as the statements take it.
pub(crate) fn lane_bytes(lane: Option<&LaneId>) -> Option<&[u8]> {
    lane.map(|lane| &lane.0[..])
}

/// Frees claims of ours and takes their attempts back; their rows are locked by us already.
pub(crate) async fn give_back(
    work: &mut Work,
    sql: &Sql,
    claims: &[&Claim],
) -> Result<(), Failure> {
    let (consumers, messages) = split_keys(claims.iter().map(|claim| &claim.key));
    let query = sqlx::query(sql.release())
        .bind(consumers)
        .bind(messages)
        .bind(tokens(claims.iter().copied()))
        .bind(vec![1_i32; claims.len()]);
    work.rows("giving claims back", query).await?;
    Ok(())
}

/// A batch of further attempts.
pub(crate) struct Counting<'a> {
    pub(crate) sessions: &'a Sessions,
    pub(crate) sql: &'a Sql,
}

impl Operation for Counting<'_> {
    type Member = Claim;
    type Answer = Attempt;

    fn patience(&self) -> Duration {
        self.sessions.lock_patience()
    }

    async fn run(&self, members: &[&Claim], wait: LockWait) -> Result<Vec<Attempt>, Failure> {
        let call = async {
            let mut work = self.sessions.begin(wait).await?;
            let answers = self.count(&mut work, members).await;
            work.end(answers).await
        };
        self.sessions.bounded("counting attempts", call).await
    }
}

impl Counting<'_> {
    async fn count(&self, work: &mut Work, members: &[&Claim]) -> Result<Vec<Attempt>, Failure> {
        let (consumers, messages) = split_keys(members.iter().map(|claim| &claim.key));
        let query = sqlx::query(self.sql.count())
            .bind(consumers)
            .bind(messages)
            .bind(tokens(members.iter().copied()));
        let rows = work.rows("counting attempts", query).await?;
        let mut counted: Vec<Option<u32>> = vec![None; members.len()];
        for row in &rows {
            let attempts: i32 = row.try_get(1).map_err(unreadable)?;
            if let Some(count) = counted.get_mut(place(row)?) {
                *count = Some(u32::try_from(attempts).unwrap_or(0));
            }
        }
        let lost = members.iter().zip(&counted).filter(|(_, count)| count.is_none());
        let keys: Vec<&InboxKey> = lost.map(|(claim, _)| &claim.key).collect();
        let mut sights = looks_of(work, self.sql, &keys).await?.into_iter();
        Ok(counted
            .into_iter()
            .map(|count| match count {
                Some(attempts) => Attempt::Counted(attempts),
                None => Attempt::Lost(sights.next().unwrap_or_default()),
            })
            .collect())
    }
}

/// The index of the member that a row of a batch answers: `place` counts from 1.
pub(crate) fn place(row: &sqlx::postgres::PgRow) -> Result<usize, Failure> {
    let place: i64 = row.try_get("place").map_err(unreadable)?;
    Ok(usize::try_from(place).unwrap_or(0).saturating_sub(1))
}

/// Looks, where there is anything to look at.
pub(crate) async fn looks_of(
    work: &mut Work,
    sql: &Sql,
    keys: &[&InboxKey],
) -> Result<Vec<inboxd_contract::Look>, Failure> {
    if keys.is_empty() {
        return Ok(Vec::new());
    }
    Ok(look(work, sql, keys).await?.into_iter().map(|sight| sight.look).collect())
}

/// Extends claims; answers the tokens that were.
pub(crate) async fn renew(
    sessions: &Sessions,
    sql: &Sql,
    lease: Duration,
    claims: &[Claim],
) -> Result<Vec<Token>, Failure> {
    if claims.is_empty() {
        return Ok(Vec::new());
    }
    let call = async {
        let mut work = sessions.begin(LockWait::Whole).await?;
        let (consumers, messages) = split_keys(claims.iter().map(|claim| &claim.key));
        let query = sqlx::query(sql.renew())
            .bind(consumers)
            .bind(messages)
            .bind(tokens(claims.iter()))
            .bind(micros(lease));
        let rows = work.rows("the renewal", query).await;
        let rows = work.end(rows).await?;
        rows.iter()
            .map(|row| {
                let token: &str = row.try_get(0).map_err(unreadable)?;
                let token = token
                    .parse()
                    .map_err(|error| unreadable(sqlx::Error::Decode(Box::new(error))))?;
                Ok(Token(token))
            })
            .collect()
    };
    sessions.bounded("the renewal", call).await
}
