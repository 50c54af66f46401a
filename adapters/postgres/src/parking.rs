//! Parking, putting off and removing: writes that begin with the claim's row, by its token.

use std::collections::HashSet;
use std::time::Duration;

use inboxd_contract::{
    Fingerprint, InboxKey, NewCopy, ParkedSeq, Parking, Reschedule, Settled, Unpark,
};
use sqlx::Row;

use crate::batch::Operation;
use crate::claim::{lane_bytes, looks_of, micros, place, tokens, unreadable};
use crate::error::Failure;
use crate::look::{look, split_keys};
use crate::parked_sql::ParkedSql;
use crate::session::{LockWait, Sessions, Work};
use crate::sql::Sql;

/// Bodies that go into one statement; one may overshoot.
const BODIES_BYTES_MAX: usize = 16 * 1024 * 1024;

/// The copies of one key's content that an insert has answered as new.
type Inserted = HashSet<(String, String, String)>;

/// Splits what carries bodies so that no statement becomes too large.
pub(crate) fn portions<T>(members: &[T], body_bytes: impl Fn(&T) -> usize) -> Vec<&[T]> {
    let mut portions = Vec::new();
    let (mut from, mut bytes) = (0, 0_usize);
    for (index, member) in members.iter().enumerate() {
        let more = body_bytes(member);
        if index > from && bytes.saturating_add(more) > BODIES_BYTES_MAX {
            portions.push(&members[from..index]);
            (from, bytes) = (index, 0);
        }
        bytes = bytes.saturating_add(more);
    }
    if from < members.len() {
        portions.push(&members[from..]);
    }
    portions
}

/// How many bytes the body has.
pub(crate) fn body_bytes(copy: &NewCopy) -> usize {
    copy.envelope.body.as_ref().map_or(0, bytes::Bytes::len)
}

fn print(fingerprint: Option<&Fingerprint>) -> &str {
    fingerprint.map_or("", Fingerprint::as_str)
}

/// Inserts copies in the order given: those that are not there. Answers which are new.
pub(crate) async fn insert(
    work: &mut Work,
    sql: &ParkedSql,
    copies: &[(&InboxKey, &NewCopy)],
) -> Result<Vec<bool>, Failure> {
    if copies.is_empty() {
        return Ok(Vec::new());
    }
    let (consumers, messages) = split_keys(copies.iter().map(|(key, _)| *key));
    let all = || copies.iter().map(|(_, copy)| *copy);
    let query = sqlx::query(sql.insert())
        .bind(all().map(|copy| &*copy.subscription).collect::<Vec<_>>())
        .bind(consumers)
        .bind(messages)
        .bind(all().map(|copy| print(copy.fingerprint.as_ref())).collect::<Vec<_>>())
        .bind(all().map(|copy| copy.envelope.origin.position()).collect::<Vec<_>>())
        .bind(all().map(|copy| copy.lane.as_deref()).collect::<Vec<_>>())
        .bind(all().map(|copy| lane_bytes(copy.lane_id.as_ref())).collect::<Vec<_>>())
        .bind(all().map(|copy| copy.envelope.to_stored()).collect::<Vec<_>>())
        .bind(all().map(|copy| copy.envelope.body.as_deref()).collect::<Vec<_>>())
        .bind(all().map(|copy| integer(copy.attempts)).collect::<Vec<_>>())
        .bind(all().map(|copy| micros(copy.delay)).collect::<Vec<_>>())
        .bind(all().map(|copy| copy.last_status.map(i32::from)).collect::<Vec<_>>())
        .bind(all().map(|copy| copy.last_error.as_deref()).collect::<Vec<_>>())
        .bind(all().map(|copy| <&'static str>::from(copy.reason)).collect::<Vec<_>>())
        .bind(all().map(|copy| micros(copy.first_ago)).collect::<Vec<_>>());
    let rows = work.rows("parking", query).await?;
    let mut inserted = Inserted::with_capacity(rows.len());
    for row in &rows {
        let text = |column| row.try_get::<String, _>(column).map_err(unreadable);
        inserted.insert((text(0)?, text(1)?, text(2)?));
    }
    let is_new = |(key, copy): &(&InboxKey, &NewCopy)| {
        let owned = |text: &str| text.to_owned();
        inserted.contains(&(
            owned(key.consumer_id.as_str()),
            owned(key.message_id.as_str()),
            owned(print(copy.fingerprint.as_ref())),
        ))
    };
    Ok(copies.iter().map(is_new).collect())
}

pub(crate) fn integer(count: u32) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

/// Dead rows of the same contents give way.
pub(crate) async fn supersede(
    work: &mut Work,
    sql: &Sql,
    copies: &[(&InboxKey, &NewCopy)],
) -> Result<(), Failure> {
    if copies.is_empty() {
        return Ok(());
    }
    let (consumers, messages) = split_keys(copies.iter().map(|(key, _)| *key));
    let prints: Vec<&str> =
        copies.iter().map(|(_, copy)| print(copy.fingerprint.as_ref())).collect();
    let query = sqlx::query(sql.supersede()).bind(consumers).bind(messages).bind(prints);
    work.rows("removing dead letters", query).await?;
    Ok(())
}

/// Removes due rows whose claims were held by us.
pub(crate) async fn remove_rows<'a>(
    work: &mut Work,
    sql: &ParkedSql,
    rows: impl Iterator<Item = (&'a InboxKey, ParkedSeq)>,
) -> Result<(), Failure> {
    let (keys, seqs): (Vec<&InboxKey>, Vec<i64>) = rows.map(|(key, seq)| (key, seq.0)).unzip();
    if seqs.is_empty() {
        return Ok(());
    }
    let (consumers, messages) = split_keys(keys.into_iter());
    let query = sqlx::query(sql.unpark()).bind(consumers).bind(messages).bind(seqs);
    work.rows("removing parked rows", query).await?;
    Ok(())
}

/// `Done` for those that were held, and a look for the others.
async fn done_or_lost(
    work: &mut Work,
    sql: &Sql,
    keys: &[&InboxKey],
    held: Vec<bool>,
) -> Result<Vec<Settled>, Failure> {
    let lost = keys.iter().zip(&held).filter(|(_, held)| !**held);
    let lost: Vec<&InboxKey> = lost.map(|(key, _)| *key).collect();
    let mut looks = looks_of(work, sql, &lost).await?.into_iter();
    let answer = |held| match held {
        true => Settled::Done,
        false => Settled::Lost(looks.next().unwrap_or_default()),
    };
    Ok(held.into_iter().map(answer).collect())
}

/// Which places a statement answered.
fn places(rows: &[sqlx::postgres::PgRow], members: usize) -> Result<Vec<bool>, Failure> {
    let mut there = vec![false; members];
    for row in rows {
        if let Some(member) = there.get_mut(place(row)?) {
            *member = true;
        }
    }
    Ok(there)
}

/// A batch of messages to be parked.
pub(crate) struct ParkingAll<'a> {
    pub(crate) sessions: &'a Sessions,
    pub(crate) sql: &'a Sql,
    pub(crate) parked_sql: &'a ParkedSql,
}

impl Operation for ParkingAll<'_> {
    type Member = Parking;
    type Answer = Settled;

    fn patience(&self) -> Duration {
        self.sessions.lock_patience()
    }

    async fn run(&self, members: &[&Parking], wait: LockWait) -> Result<Vec<Settled>, Failure> {
        let call = async {
            let mut work = self.sessions.begin(wait).await?;
            let answers = self.park(&mut work, members).await;
            work.end(answers).await
        };
        self.sessions.bounded("parking", call).await
    }
}

impl ParkingAll<'_> {
    /// Away with the claims; then, with a snapshot of its own, the look; then the copies of what
    /// was held and is not processed.
    async fn park(&self, work: &mut Work, members: &[&Parking]) -> Result<Vec<Settled>, Failure> {
        let keys: Vec<&InboxKey> = members.iter().map(|member| &member.claim.key).collect();
        let (consumers, messages) = split_keys(keys.iter().copied());
        let query = sqlx::query(self.parked_sql.unhold())
            .bind(consumers)
            .bind(messages)
            .bind(tokens(members.iter().map(|member| &member.claim)));
        let held = places(&work.rows("removing claims", query).await?, members.len())?;
        let sights = look(work, self.sql, &keys).await?;
        let mut answers = Vec::with_capacity(members.len());
        let (mut copies, mut replacing) = (Vec::new(), Vec::new());
        for ((member, held), sight) in members.iter().zip(held).zip(sights) {
            let look = sight.look;
            if !held {
                answers.push(Settled::Lost(look));
                continue;
            }
            if let Some(fingerprint) = look.processed {
                answers.push(Settled::AlreadyProcessed { fingerprint });
                continue;
            }
            answers.push(Settled::Done);
            let copy = (&member.claim.key, &member.copy);
            let own = member.copy.fingerprint.as_ref();
            let same = |other: &Option<Fingerprint>| !Fingerprint::conflict(other.as_ref(), own);
            if look.dead.iter().any(|row| same(&row.fingerprint)) {
                replacing.push(copy);
            }
            if !look.due.iter().any(same) {
                copies.push(copy);
            }
        }
        supersede(work, self.sql, &replacing).await?;
        // Whoever else inserts rows of these keys does so in this order.
        copies.sort_by_key(|(key, _)| *key);
        insert(work, self.parked_sql, &copies).await?;
        Ok(answers)
    }
}

/// A batch of rows to be put off.
pub(crate) struct Rescheduling<'a> {
    pub(crate) sessions: &'a Sessions,
    pub(crate) sql: &'a Sql,
    pub(crate) parked_sql: &'a ParkedSql,
}

impl Operation for Rescheduling<'_> {
    type Member = Reschedule;
    type Answer = Settled;

    fn patience(&self) -> Duration {
        self.sessions.lock_patience()
    }

    async fn run(&self, members: &[&Reschedule], wait: LockWait) -> Result<Vec<Settled>, Failure> {
        let call = async {
            let mut work = self.sessions.begin(wait).await?;
            let answers = self.reschedule(&mut work, members).await;
            work.end(answers).await
        };
        self.sessions.bounded("putting off", call).await
    }
}

impl Rescheduling<'_> {
    async fn reschedule(
        &self,
        work: &mut Work,
        members: &[&Reschedule],
    ) -> Result<Vec<Settled>, Failure> {
        let keys: Vec<&InboxKey> = members.iter().map(|member| &member.claim.key).collect();
        let (consumers, messages) = split_keys(keys.iter().copied());
        let all = || members.iter();
        let query = sqlx::query(self.parked_sql.reschedule())
            .bind(consumers)
            .bind(messages)
            .bind(tokens(all().map(|member| &member.claim)))
            .bind(all().map(|member| member.seq.0).collect::<Vec<_>>())
            .bind(all().map(|member| i32::from(member.attempt_back)).collect::<Vec<_>>())
            .bind(all().map(|member| micros(member.delay)).collect::<Vec<_>>())
            .bind(all().map(|member| member.last_status.map(i32::from)).collect::<Vec<_>>())
            .bind(all().map(|member| member.last_error.as_deref()).collect::<Vec<_>>());
        let held = places(&work.rows("putting off", query).await?, members.len())?;
        done_or_lost(work, self.sql, &keys, held).await
    }
}

/// A batch of rows whose messages are processed.
pub(crate) struct Unparking<'a> {
    pub(crate) sessions: &'a Sessions,
    pub(crate) sql: &'a Sql,
    pub(crate) parked_sql: &'a ParkedSql,
}

impl Operation for Unparking<'_> {
    type Member = Unpark;
    type Answer = Settled;

    fn patience(&self) -> Duration {
        self.sessions.lock_patience()
    }

    async fn run(&self, members: &[&Unpark], wait: LockWait) -> Result<Vec<Settled>, Failure> {
        let call = async {
            let mut work = self.sessions.begin(wait).await?;
            let answers = self.unpark(&mut work, members).await;
            work.end(answers).await
        };
        self.sessions.bounded("removing parked rows", call).await
    }
}

impl Unparking<'_> {
    async fn unpark(&self, work: &mut Work, members: &[&Unpark]) -> Result<Vec<Settled>, Failure> {
        let keys: Vec<&InboxKey> = members.iter().map(|member| &member.claim.key).collect();
        let (consumers, messages) = split_keys(keys.iter().copied());
        let query = sqlx::query(self.parked_sql.unhold())
            .bind(consumers)
            .bind(messages)
            .bind(tokens(members.iter().map(|member| &member.claim)));
        let held = places(&work.rows("removing claims", query).await?, members.len())?;
        let rows = members.iter().zip(&held).filter(|(_, held)| **held);
        let rows = rows.map(|(member, _)| (&member.claim.key, member.seq));
        remove_rows(work, self.parked_sql, rows).await?;
        done_or_lost(work, self.sql, &keys, held).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_hold_what_fits_and_what_is_too_large_alone() {
        let third = BODIES_BYTES_MAX / 3;
        let sizes = [third, third, third, third, BODIES_BYTES_MAX * 2, 1, 1];
        let split = portions(&sizes, |size| *size);
        let lengths: Vec<usize> = split.iter().map(|portion| portion.len()).collect();
        assert_eq!(lengths, [3, 1, 1, 2]);
        assert!(portions(&[] as &[usize], |size| *size).is_empty());
    }
}
