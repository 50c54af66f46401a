//! Completing and dead-lettering: the claim goes and the row comes, or nothing.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use inboxd_contract::{
    Claim, Completion, DeadLetter, Envelope, Fingerprint, InboxKey, Look, ParkedSeq, Settled,
    StoreError,
};
use sqlx::Row;
use sqlx::mysql::MySqlConnection;

use crate::MysqlStore;
use crate::batch::{Answers, check_key, check_record};
use crate::claims::{KeyBytes, bind_keys, drop_claims, key_bytes, micros, sorted_by_key};
use crate::look::{key_of_row, look};
use crate::sql::{Patience, Sql, padded, query};

/// `last_error` and what the engine may add to it, below TEXT's 65,535 bytes.
const ERROR_BYTES_MAX: usize = 16_384;
/// What the column holds, whatever the characters.
const SUBSCRIPTION_BYTES_MAX: usize = 255;
/// Room in a packet beside body, envelope and lane: the statement and the small columns.
pub(crate) const ROW_OVERHEAD_BYTES: u64 = 64 * 1_024;

impl MysqlStore {
    pub(crate) async fn complete_batch(
        &self,
        completions: &[Completion],
    ) -> Vec<Result<Settled, StoreError>> {
        let mut answers = Answers::new(completions.len());
        for (index, completion) in completions.iter().enumerate() {
            let fits = check_key(&completion.claim.key).and(check_record(&completion.record));
            if let Err(error) = fits {
                answers.set(index, Err(error));
            }
        }
        let run = |chosen: Vec<usize>, patience| {
            let chosen: Vec<&Completion> = chosen.into_iter().map(|i| &completions[i]).collect();
            async move {
                let work = async {
                    let mut transaction = self.main.begin().await?;
                    let connection = transaction.connection();
                    let result = complete_in(connection, &self.sql, &chosen, patience).await;
                    transaction.end(result).await
                };
                self.main.in_time("completing messages", work).await
            }
        };
        let members = sorted_by_key(answers.open(), |index| &completions[index].claim.key);
        answers.run(members, self.chunk_max, self.lock_wait, run).await;
        answers.finish()
    }

    pub(crate) async fn dead_letter_batch(
        &self,
        letters: &[DeadLetter],
    ) -> Vec<Result<Settled, StoreError>> {
        let mut answers = Answers::new(letters.len());
        for (index, letter) in letters.iter().enumerate() {
            if let Err(error) = self.check_letter(letter) {
                answers.set(index, Err(error));
            }
        }
        let run = |chosen: Vec<usize>, patience| {
            let chosen: Vec<&DeadLetter> = chosen.into_iter().map(|i| &letters[i]).collect();
            async move {
                let work = async {
                    let mut settled = Vec::with_capacity(chosen.len());
                    for letter in chosen {
                        let mut transaction = self.main.begin().await?;
                        let connection = transaction.connection();
                        let result = dead_letter_in(connection, &self.sql, letter, patience).await;
                        settled.push(transaction.end(result).await?);
                    }
                    Ok(settled)
                };
                self.main.in_time("writing dead letters", work).await
            }
        };
        // One by one: letters are few and large, and each is a packet of its own. In the order
        // asked: two letters of one key are written in that order.
        answers.run(answers.open(), 1, self.lock_wait, run).await;
        answers.finish()
    }

    fn check_letter(&self, letter: &DeadLetter) -> Result<(), StoreError> {
        let body = letter.envelope.body.as_ref().filter(|_| letter.body_kept);
        self.check_copy(
            &letter.key,
            &Copied {
                subscription: &letter.subscription,
                last_error: letter.last_error.as_deref(),
                lane: letter.lane.as_deref(),
                envelope: &letter.envelope,
                body,
            },
        )
        .map(drop)
    }

    /// A row that the columns hold to the byte, and that fits into a packet: its bytes.
    pub(crate) fn check_copy(&self, key: &InboxKey, copy: &Copied<'_>) -> Result<u64, StoreError> {
        check_key(key)?;
        let error_bytes = copy.last_error.map_or(0, str::len);
        if error_bytes > ERROR_BYTES_MAX || copy.subscription.len() > SUBSCRIPTION_BYTES_MAX {
            return Err(StoreError::refused(format!(
                "a copy's error text has {error_bytes} bytes and its subscription's name {}; at \
                 most {ERROR_BYTES_MAX} and {SUBSCRIPTION_BYTES_MAX} are stored",
                copy.subscription.len()
            )));
        }
        let bytes = copy.body.map_or(0, |body| body.len())
            + copy.envelope.to_stored().len()
            + copy.lane.map_or(0, <[u8]>::len);
        let room = self.packet_bytes_max.saturating_sub(ROW_OVERHEAD_BYTES);
        if bytes as u64 > room {
            return Err(StoreError::refused(format!(
                "a copy of {bytes} bytes does not fit into one packet: the server's \
                 max_allowed_packet is {}; raise it",
                self.packet_bytes_max
            )));
        }
        Ok(bytes as u64)
    }
}

/// What of a copy is bounded.
pub(crate) struct Copied<'a> {
    pub(crate) subscription: &'a str,
    pub(crate) last_error: Option<&'a str>,
    pub(crate) lane: Option<&'a [u8]>,
    pub(crate) envelope: &'a Envelope,
    pub(crate) body: Option<&'a Bytes>,
}

/// What the locking read found for one key: the claim's token and the message's row.
pub(crate) struct Found {
    token: Option<Vec<u8>>,
    processed: Option<Option<Fingerprint>>,
}

/// Locks claim and message rows and reads them: what it answers holds until the commit.
pub(crate) async fn find(
    connection: &mut MySqlConnection,
    sql: &Sql,
    keys: &[&InboxKey],
    patience: Patience,
) -> Result<HashMap<KeyBytes, Found>, sqlx::Error> {
    let select = query(sql.lock_claims_and_messages(keys.len(), patience));
    let rows = bind_keys(select, padded(keys).copied()).fetch_all(connection).await?;
    rows.iter()
        .map(|row| {
            let fingerprint: Option<Vec<u8>> = row.try_get(4)?;
            let fingerprint = fingerprint
                .and_then(|bytes| Fingerprint::from_stored(&String::from_utf8_lossy(&bytes)));
            let processed = row.try_get::<bool, _>(3)?.then_some(fingerprint);
            Ok((key_of_row(row, 0)?, Found { token: row.try_get(2)?, processed }))
        })
        .collect()
}

/// What became of a claim that is to be removed.
pub(crate) enum Taken {
    Held,
    HeldButProcessed(Option<Fingerprint>),
    Lost,
}

pub(crate) fn taken(found: &HashMap<KeyBytes, Found>, key: &InboxKey, token: &[u8]) -> Taken {
    match found.get(&key_bytes(key)) {
        Some(row) if row.token.as_deref() == Some(token) => match &row.processed {
            Some(fingerprint) => Taken::HeldButProcessed(fingerprint.clone()),
            None => Taken::Held,
        },
        _ => Taken::Lost,
    }
}

async fn complete_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    completions: &[&Completion],
    patience: Patience,
) -> Result<Vec<Settled>, sqlx::Error> {
    let keys: Vec<&InboxKey> = completions.iter().map(|c| &c.claim.key).collect();
    let found = find(connection, sql, &keys, patience).await?;
    let mut served = HashSet::new();
    let taken: Vec<Taken> = completions
        .iter()
        .map(|completion| {
            let claim = &completion.claim;
            match taken(&found, &claim.key, claim.token.0.as_bytes()) {
                // Whoever is named twice is served once.
                held if !matches!(held, Taken::Lost) && !served.insert(claim.token) => Taken::Lost,
                taken => taken,
            }
        })
        .collect();
    let pairs = || completions.iter().copied().zip(&taken);
    let held: Vec<&Completion> =
        pairs().filter(|(_, taken)| !matches!(taken, Taken::Lost)).map(|(c, _)| c).collect();
    let claims: Vec<&Claim> = held.iter().map(|completion| &completion.claim).collect();
    drop_claims(connection, sql, &claims).await?;
    let fresh: Vec<&Completion> =
        pairs().filter(|(_, taken)| matches!(taken, Taken::Held)).map(|(c, _)| c).collect();
    record(connection, sql, &fresh).await?;
    for completion in held.iter().filter(|completion| completion.supersedes_dead) {
        let fingerprint = completion.record.fingerprint.as_ref();
        drop_dead(connection, sql, &completion.claim.key, fingerprint).await?;
    }
    let parked = held.iter().filter_map(|c| c.parked.map(|seq| (seq, &c.claim.key)));
    drop_due(connection, sql, &parked.collect::<Vec<_>>()).await?;
    let lost = held.len() < completions.len();
    let mut seen = if lost { look(connection, sql, &keys).await? } else { Vec::new() }.into_iter();
    Ok(taken
        .into_iter()
        .map(|taken| {
            let look = seen.next().map_or_else(Look::default, |seen| seen.look);
            match taken {
                Taken::Held => Settled::Done,
                Taken::HeldButProcessed(fingerprint) => Settled::AlreadyProcessed { fingerprint },
                Taken::Lost => Settled::Lost(look),
            }
        })
        .collect())
}

/// A plain insert: a row that somebody committed since the locking read makes it fail, and the
/// transaction is tried again.
async fn record(
    connection: &mut MySqlConnection,
    sql: &Sql,
    completions: &[&Completion],
) -> Result<(), sqlx::Error> {
    if completions.is_empty() {
        return Ok(());
    }
    let mut insert = query(sql.record(completions.len()));
    for completion in completions {
        let record = &completion.record;
        insert = bind_keys(insert, std::iter::once(&completion.claim.key))
            .bind(record.fingerprint.as_ref().map(|fingerprint| fingerprint.as_str().as_bytes()))
            .bind(record.producer.as_deref())
            .bind(record.message_type.as_deref())
            .bind(record.correlation_id.as_deref())
            .bind(record.causation_id.as_deref());
    }
    // Each number of rows is another text; only those of a power of two are worth keeping.
    let persistent = completions.len().is_power_of_two();
    insert.persistent(persistent).execute(connection).await.map(drop)
}

/// Removes dead letters of a key that do not conflict with `fingerprint`.
pub(crate) async fn drop_dead(
    connection: &mut MySqlConnection,
    sql: &Sql,
    key: &InboxKey,
    fingerprint: Option<&Fingerprint>,
) -> Result<(), sqlx::Error> {
    let fingerprint = fingerprint_bytes(fingerprint);
    let delete = query(sql.drop_dead());
    bind_keys(delete, std::iter::once(key))
        .bind(fingerprint)
        .bind(fingerprint)
        .execute(connection)
        .await
        .map(drop)
}

/// Removes due rows.
pub(crate) async fn drop_due(
    connection: &mut MySqlConnection,
    sql: &Sql,
    rows: &[(ParkedSeq, &InboxKey)],
) -> Result<(), sqlx::Error> {
    if rows.is_empty() {
        return Ok(());
    }
    let mut delete = query(sql.drop_due(rows.len()));
    for (seq, key) in padded(rows) {
        delete = bind_keys(delete.bind(seq.0), std::iter::once(*key));
    }
    delete.execute(connection).await.map(drop)
}

pub(crate) fn fingerprint_bytes(fingerprint: Option<&Fingerprint>) -> &[u8] {
    fingerprint.map_or(b"", |fingerprint| fingerprint.as_str().as_bytes())
}

async fn dead_letter_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    letter: &DeadLetter,
    patience: Patience,
) -> Result<Settled, sqlx::Error> {
    if let Some(token) = letter.token {
        let found = find(connection, sql, &[&letter.key], patience).await?;
        match taken(&found, &letter.key, token.0.as_bytes()) {
            Taken::Lost => {
                let seen = look(connection, sql, &[&letter.key]).await?.pop().unwrap_or_default();
                return Ok(Settled::Lost(seen.look));
            }
            taken => {
                let claim = Claim { key: letter.key.clone(), token };
                drop_claims(connection, sql, &[&claim]).await?;
                if let Taken::HeldButProcessed(fingerprint) = taken {
                    return Ok(Settled::AlreadyProcessed { fingerprint });
                }
            }
        }
    }
    let envelope = &letter.envelope;
    let body = envelope.body.as_deref().filter(|_| letter.body_kept);
    query(sql.dead_letter())
        .bind(&*letter.subscription)
        .bind(letter.key.consumer_id.as_str().as_bytes())
        .bind(letter.key.message_id.as_str().as_bytes())
        .bind(fingerprint_bytes(letter.fingerprint.as_ref()))
        .bind(envelope.origin.position())
        .bind(letter.lane.as_deref())
        .bind(letter.lane_id.map(|lane| lane.0.to_vec()))
        .bind(envelope.to_stored())
        .bind(i32::try_from(letter.attempts).unwrap_or(i32::MAX))
        .bind(letter.last_status)
        .bind(letter.last_error.as_deref())
        .bind(<&'static str>::from(letter.reason))
        .bind(body)
        .bind(letter.body_kept)
        .bind(micros(letter.first_ago))
        .execute(connection)
        .await?;
    Ok(Settled::Done)
}
