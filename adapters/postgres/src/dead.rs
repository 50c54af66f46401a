//! Dead letters: one transaction each. They are rare, and their bodies may be large.

use std::time::Duration;

use inboxd_contract::{DeadLetter, Settled, Token};

use crate::batch::Operation;
use crate::claim::{lane_bytes, micros};
use crate::error::Failure;
use crate::look::look;
use crate::session::{LockWait, Sessions, Work};
use crate::sql::Sql;

/// One dead letter.
pub(crate) struct Burying<'a> {
    pub(crate) sessions: &'a Sessions,
    pub(crate) sql: &'a Sql,
}

impl Operation for Burying<'_> {
    type Member = DeadLetter;
    type Answer = Settled;

    fn patience(&self) -> Duration {
        self.sessions.lock_patience()
    }

    async fn run(&self, members: &[&DeadLetter], wait: LockWait) -> Result<Vec<Settled>, Failure> {
        let call = async {
            let mut work = self.sessions.begin(wait).await?;
            let mut answers = Vec::with_capacity(members.len());
            for letter in members {
                match self.bury(&mut work, letter).await {
                    Ok(answer) => answers.push(answer),
                    Err(failure) => {
                        work.fail(&failure).await;
                        return Err(failure);
                    }
                }
            }
            work.commit().await?;
            Ok(answers)
        };
        self.sessions.bounded("a dead letter", call).await
    }
}

impl Burying<'_> {
    async fn bury(&self, work: &mut Work, letter: &DeadLetter) -> Result<Settled, Failure> {
        if let Some(token) = letter.token
            && let Some(settled) = self.unhold(work, letter, token).await?
        {
            return Ok(settled);
        }
        self.write(work, letter).await?;
        Ok(Settled::Done)
    }

    /// Removes the claim. `Some` where no letter is to be written.
    async fn unhold(
        &self,
        work: &mut Work,
        letter: &DeadLetter,
        token: Token,
    ) -> Result<Option<Settled>, Failure> {
        let query = sqlx::query(self.sql.remove_claim())
            .bind(letter.key.consumer_id.as_str())
            .bind(letter.key.message_id.as_str())
            .bind(token.0.to_string());
        let held = !work.rows("removing a claim", query).await?.is_empty();
        let sights = look(work, self.sql, &[&letter.key]).await?;
        let look = sights.into_iter().next().unwrap_or_default().look;
        if !held {
            return Ok(Some(Settled::Lost(look)));
        }
        Ok(look.processed.map(|fingerprint| Settled::AlreadyProcessed { fingerprint }))
    }

    async fn write(&self, work: &mut Work, letter: &DeadLetter) -> Result<(), Failure> {
        let envelope = &letter.envelope;
        let body = envelope.body.as_deref().filter(|_| letter.body_kept);
        let reason: &'static str = letter.reason.into();
        let query = sqlx::query(self.sql.dead_letter())
            .bind(&*letter.subscription)
            .bind(letter.key.consumer_id.as_str())
            .bind(letter.key.message_id.as_str())
            .bind(letter.fingerprint.as_ref().map_or("", |print| print.as_str()))
            .bind(envelope.origin.position())
            .bind(letter.lane.as_deref())
            .bind(envelope.to_stored())
            .bind(body)
            .bind(i32::try_from(letter.attempts).unwrap_or(i32::MAX))
            .bind(letter.last_status.map(i32::from))
            .bind(letter.last_error.as_deref())
            .bind(reason)
            .bind(lane_bytes(letter.lane_id.as_ref()))
            .bind(micros(letter.first_ago))
            .bind(letter.body_kept);
        work.rows("the dead letter", query).await?;
        Ok(())
    }
}
