//! Completing and releasing: writes that begin with the claim's row, by its token.

use std::collections::HashSet;
use std::time::Duration;

use inboxd_contract::{Completion, InboxKey, Release, Settled};
use sqlx::Row;

use crate::batch::Operation;
use crate::claim::{looks_of, place, tokens, unreadable};
use crate::error::Failure;
use crate::look::split_keys;
use crate::parked_sql::ParkedSql;
use crate::parking::remove_rows;
use crate::session::{LockWait, Sessions, Work};
use crate::sql::Sql;

/// A batch of completions.
pub(crate) struct Completing<'a> {
    pub(crate) sessions: &'a Sessions,
    pub(crate) sql: &'a Sql,
    pub(crate) parked_sql: &'a ParkedSql,
}

/// What the statement said of one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Written {
    /// No claim with this token.
    Lost,
    /// The claim is gone, and the row was there already.
    Existed,
    /// The claim is gone, the row is new.
    New,
}

impl Operation for Completing<'_> {
    type Member = Completion;
    type Answer = Settled;

    fn patience(&self) -> Duration {
        self.sessions.lock_patience()
    }

    async fn run(&self, members: &[&Completion], wait: LockWait) -> Result<Vec<Settled>, Failure> {
        let call = async {
            let mut work = self.sessions.begin(wait).await?;
            let answers = self.complete(&mut work, members).await;
            work.end(answers).await
        };
        self.sessions.bounded("a completion", call).await
    }
}

impl Completing<'_> {
    async fn complete(
        &self,
        work: &mut Work,
        members: &[&Completion],
    ) -> Result<Vec<Settled>, Failure> {
        let written = self.write(work, members).await?;
        self.supersede(work, members, &written).await?;
        let held = members.iter().zip(&written).filter(|(_, written)| **written != Written::Lost);
        let rows = held.filter_map(|(member, _)| Some((&member.claim.key, member.parked?)));
        remove_rows(work, self.parked_sql, rows).await?;
        let keys: Vec<&InboxKey> = members
            .iter()
            .zip(&written)
            .filter(|(_, written)| **written != Written::New)
            .map(|(completion, _)| &completion.claim.key)
            .collect();
        let mut looks = looks_of(work, self.sql, &keys).await?.into_iter();
        Ok(written
            .into_iter()
            .map(|written| match written {
                Written::New => Settled::Done,
                Written::Lost => Settled::Lost(looks.next().unwrap_or_default()),
                Written::Existed => {
                    let processed = looks.next().and_then(|look| look.processed);
                    Settled::AlreadyProcessed { fingerprint: processed.flatten() }
                }
            })
            .collect())
    }

    async fn write(
        &self,
        work: &mut Work,
        members: &[&Completion],
    ) -> Result<Vec<Written>, Failure> {
        let records = || members.iter().map(|completion| &completion.record);
        let texts = |text: &dyn Fn(&Completion) -> Option<String>| -> Vec<Option<String>> {
            members.iter().map(|completion| text(completion)).collect()
        };
        let prints: Vec<Option<&str>> = records()
            .map(|record| record.fingerprint.as_ref().map(|print| print.as_str()))
            .collect();
        let (consumers, messages) = split_keys(members.iter().map(|member| &member.claim.key));
        let query = sqlx::query(self.sql.complete())
            .bind(consumers)
            .bind(messages)
            .bind(tokens(members.iter().map(|member| &member.claim)))
            .bind(prints)
            .bind(texts(&|completion| completion.record.producer.clone()))
            .bind(texts(&|completion| completion.record.message_type.clone()))
            .bind(texts(&|completion| completion.record.correlation_id.clone()))
            .bind(texts(&|completion| completion.record.causation_id.clone()));
        let rows = work.rows("the completion", query).await?;
        let mut written = vec![Written::Lost; members.len()];
        let mut new = HashSet::with_capacity(members.len());
        for row in &rows {
            if row.try_get::<Option<i64>, _>("place").map_err(unreadable)?.is_some() {
                if let Some(member) = written.get_mut(place(row)?) {
                    *member = Written::Existed;
                }
            } else {
                let consumer: &str = row.try_get("consumer_id").map_err(unreadable)?;
                let message: &str = row.try_get("message_id").map_err(unreadable)?;
                new.insert((consumer, message));
            }
        }
        for (member, written) in members.iter().zip(&mut written) {
            let key = &member.claim.key;
            let is_new = new.contains(&(key.consumer_id.as_str(), key.message_id.as_str()));
            if *written == Written::Existed && is_new {
                *written = Written::New;
            }
        }
        Ok(written)
    }

    async fn supersede(
        &self,
        work: &mut Work,
        members: &[&Completion],
        written: &[Written],
    ) -> Result<(), Failure> {
        let superseding: Vec<&&Completion> = members
            .iter()
            .zip(written)
            .filter(|(member, written)| member.supersedes_dead && **written != Written::Lost)
            .map(|(member, _)| member)
            .collect();
        if superseding.is_empty() {
            return Ok(());
        }
        let (consumers, messages) = split_keys(superseding.iter().map(|member| &member.claim.key));
        let prints: Vec<&str> = superseding
            .iter()
            .map(|member| member.record.fingerprint.as_ref().map_or("", |print| print.as_str()))
            .collect();
        let query = sqlx::query(self.sql.supersede()).bind(consumers).bind(messages).bind(prints);
        work.rows("removing dead letters", query).await?;
        Ok(())
    }
}

/// A batch of releases.
pub(crate) struct Releasing<'a> {
    pub(crate) sessions: &'a Sessions,
    pub(crate) sql: &'a Sql,
}

impl Operation for Releasing<'_> {
    type Member = Release;
    type Answer = Settled;

    fn patience(&self) -> Duration {
        self.sessions.lock_patience()
    }

    async fn run(&self, members: &[&Release], wait: LockWait) -> Result<Vec<Settled>, Failure> {
        let call = async {
            let mut work = self.sessions.begin(wait).await?;
            let answers = self.release(&mut work, members).await;
            work.end(answers).await
        };
        self.sessions.bounded("a release", call).await
    }
}

impl Releasing<'_> {
    async fn release(
        &self,
        work: &mut Work,
        members: &[&Release],
    ) -> Result<Vec<Settled>, Failure> {
        let (consumers, messages) = split_keys(members.iter().map(|member| &member.claim.key));
        let back: Vec<i32> = members.iter().map(|member| i32::from(member.attempt_back)).collect();
        let query = sqlx::query(self.sql.release())
            .bind(consumers)
            .bind(messages)
            .bind(tokens(members.iter().map(|member| &member.claim)))
            .bind(back);
        let rows = work.rows("the release", query).await?;
        let mut released = vec![false; members.len()];
        for row in &rows {
            if let Some(member) = released.get_mut(place(row)?) {
                *member = true;
            }
        }
        let lost = members.iter().zip(&released).filter(|(_, released)| !**released);
        let keys: Vec<&InboxKey> = lost.map(|(member, _)| &member.claim.key).collect();
        let mut looks = looks_of(work, self.sql, &keys).await?.into_iter();
        Ok(released
            .into_iter()
            .map(|released| {
                if released {
                    Settled::Done
                } else {
                    Settled::Lost(looks.next().unwrap_or_default())
                }
            })
            .collect())
    }
}
