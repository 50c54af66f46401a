//! Arrivals: copies of messages that nobody has claimed, all of them or none.

use std::collections::HashMap;

use inboxd_contract::{
    Arrival, ArrivalStep, Arrived, Fingerprint, InboxKey, Look, NewCopy, StoreError,
};

use crate::error::Failure;
use crate::look::look;
use crate::parked_sql::ParkedSql;
use crate::parking::{body_bytes, insert, portions, supersede};
use crate::session::{LockWait, Sessions, Work};
use crate::sql::Sql;

/// How often it is looked again where somebody else was first with a row.
const ROUNDS_MAX: usize = 5;

/// Arrivals in one transaction.
pub(crate) struct Arriving<'a> {
    pub(crate) sessions: &'a Sessions,
    pub(crate) sql: &'a Sql,
    pub(crate) parked_sql: &'a ParkedSql,
}

impl Arriving<'_> {
    pub(crate) async fn run(&self, arrivals: &[Arrival]) -> Result<Vec<Arrived>, StoreError> {
        if arrivals.is_empty() {
            return Ok(Vec::new());
        }
        let call = async {
            let mut work = self.sessions.begin(LockWait::Whole).await?;
            let answers = self.arrive(&mut work, arrivals).await;
            work.end(answers).await
        };
        let answers = self.sessions.bounded("an arrival", call).await?;
        let all: Option<Vec<Arrived>> = answers.into_iter().collect();
        all.ok_or_else(|| {
            StoreError::transient("PostgreSQL: others changed the rows of an arrival all the time")
        })
    }

    /// Rounds of looking and inserting: a row that somebody else committed in between is met in
    /// the next one.
    async fn arrive(
        &self,
        work: &mut Work,
        arrivals: &[Arrival],
    ) -> Result<Vec<Option<Arrived>>, Failure> {
        let mut answers: Vec<Option<Arrived>> = vec![None; arrivals.len()];
        for _ in 0..ROUNDS_MAX {
            let open: Vec<usize> =
                (0..arrivals.len()).filter(|index| answers[*index].is_none()).collect();
            if open.is_empty() {
                break;
            }
            self.round(work, arrivals, &open, &mut answers).await?;
        }
        Ok(answers)
    }

    async fn round(
        &self,
        work: &mut Work,
        arrivals: &[Arrival],
        open: &[usize],
        answers: &mut [Option<Arrived>],
    ) -> Result<(), Failure> {
        let keys: Vec<&InboxKey> = open.iter().map(|index| &arrivals[*index].key).collect();
        let sights = look(work, self.sql, &keys).await?;
        let mut looks: HashMap<&InboxKey, Look> =
            keys.into_iter().zip(sights.into_iter().map(|sight| sight.look)).collect();
        let (mut copies, mut replacing) = (Vec::new(), Vec::new());
        for index in open {
            let arrival = &arrivals[*index];
            let Some(look) = looks.get_mut(&arrival.key) else { continue };
            let own = &arrival.copy.fingerprint;
            match arrival.resolve(look) {
                ArrivalStep::Answer(answer) => {
                    answers[*index] = Some(answer);
                    continue;
                }
                ArrivalStep::Insert => {}
                ArrivalStep::Replace => {
                    replacing.push((&arrival.key, &arrival.copy));
                    look.dead.retain(|row| {
                        Fingerprint::conflict(row.fingerprint.as_ref(), own.as_ref())
                    });
                }
            }
            // The next one with this key meets it.
            look.due.push(own.clone());
            copies.push((*index, &arrival.key, &arrival.copy));
        }
        supersede(work, self.sql, &replacing).await?;
        for portion in portions(&copies, |(_, _, copy)| body_bytes(copy)) {
            let rows: Vec<(&InboxKey, &NewCopy)> =
                portion.iter().map(|(_, key, copy)| (*key, *copy)).collect();
            let inserted = insert(work, self.parked_sql, &rows).await?;
            for ((index, key, _), inserted) in portion.iter().zip(inserted) {
                if inserted {
                    answers[*index] = Some(Arrived::Parked);
                    continue;
                }
                // Somebody was first: whoever met this one meets that one instead.
                for other in open.iter().filter(|other| arrivals[**other].key == **key) {
                    answers[*other] = None;
                }
            }
        }
        Ok(())
    }
}
