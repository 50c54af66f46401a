//! The statements, with the table prefix put in once.
//!
//! A batch is one JSON parameter: the text stays the same whatever the size, so each
//! statement is prepared once per connection. `->>` gives text as text and null as NULL.

use std::sync::Arc;

use sqlx::{AssertSqlSafe, Sqlite};

mod parked;

pub(crate) use parked::ParkedSql;

/// Milliseconds since 1970 by the database's clock; the same all through one statement.
const NOW: &str = "CAST(unixepoch('subsec') * 1000 AS INTEGER)";

/// One statement's text.
#[derive(Debug, Clone)]
pub(crate) struct Statement(Arc<str>);

impl Statement {
    /// The text holds no input but the prefix, which is a validated identifier.
    pub(crate) fn query(
        &self,
    ) -> sqlx::query::Query<'static, Sqlite, sqlx::sqlite::SqliteArguments> {
        sqlx::query(AssertSqlSafe(Arc::clone(&self.0)))
    }
}

/// Makes statements of templates.
#[derive(Debug, Clone)]
pub(crate) struct Text {
    prefix: String,
}

impl Text {
    fn of(&self, template: &str) -> Statement {
        Statement(template.replace("{now}", NOW).replace("{p}", &self.prefix).into())
    }
}

/// All statements of the store. `?1` of a batch is an array of arrays.
#[derive(Debug)]
pub(crate) struct Sql {
    /// `[consumer, message, token]`, owner, lease in ms.
    pub(crate) claim: Statement,
    /// `[consumer, message, token, lane in hex]`, of which the last two may be absent: index,
    /// processed, fingerprint, parked fingerprint, position, state, claim's token, attempts, ms
    /// left, lane blocked; one row per key and parked row.
    pub(crate) look: Statement,
    /// `[consumer, message, token]`: removes; the tokens removed, and their attempts.
    pub(crate) take_claims: Statement,
    /// `[consumer, message, token]`, lease in ms; the tokens extended.
    pub(crate) renew: Statement,
    /// `[consumer, message, token]`; tokens and attempts.
    pub(crate) count: Statement,
    /// `[consumer, message, token]`; the tokens that hold.
    pub(crate) held: Statement,
    /// `[consumer, message, token, attempts back]`. It clears the token, so that it cannot
    /// tell which ones it met.
    pub(crate) release: Statement,
    /// `[consumer, message, fingerprint, producer, type, correlation, causation]`; the keys
    /// inserted.
    pub(crate) record: Statement,
    /// `[consumer, message, fingerprint or ""]`: dead rows that do not conflict with it.
    pub(crate) drop_dead: Statement,
    /// One dead letter, 15 parameters.
    pub(crate) dead_letter: Statement,
    /// Consumer, message.
    pub(crate) parked: Statement,
    /// Consumer, message, limit: the newest rows, oldest first, without their bodies: columns of
    /// `parked`, state, ms of age, bytes of the body, rows of the key, ms until due.
    pub(crate) explain_parked: Statement,
    /// Consumer, message: the row and its age in ms.
    pub(crate) explain_message: Statement,
    /// Consumer, message: owner, attempts, ms left; a free claim has none.
    pub(crate) explain_claim: Statement,
    /// Rows of messages, claims, dead, due; ms since the oldest message, dead row, and since the
    /// first of due rows was received.
    pub(crate) stats: Statement,
    /// Age in ms, rows.
    pub(crate) sweep_messages: Statement,
    /// Age in ms, rows.
    pub(crate) sweep_dead: Statement,
    /// Age in ms, rows.
    pub(crate) sweep_claims: Statement,
    /// Frees what former lives held; attempts stay.
    pub(crate) free_all: Statement,
    /// Name.
    pub(crate) note: Statement,
    /// Name, value.
    pub(crate) note_once: Statement,
    /// Name, value.
    pub(crate) set_note: Statement,
    /// Workers' and operators'.
    pub(crate) copies: ParkedSql,
}

impl Sql {
    pub(crate) fn new(prefix: &str) -> Self {
        let texts = Text { prefix: prefix.to_owned() };
        let text = |template: &str| texts.of(template);
        // The members that a statement concerns, by key and token.
        let members = "(c.consumer_id, c.message_id, c.token) IN \
             (SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(?1))";
        let with_members = |template: &str| text(&template.replace("{members}", members));
        Self {
            claim: text(CLAIM),
            look: text(LOOK),
            take_claims: with_members(
                "DELETE FROM {p}inbox_claims AS c WHERE {members} RETURNING token, attempts",
            ),
            renew: with_members(
                "UPDATE {p}inbox_claims AS c SET expires_at = {now} + ?2 WHERE {members} \
                 RETURNING token",
            ),
            count: with_members(
                "UPDATE {p}inbox_claims AS c SET attempts = attempts + 1 WHERE {members} \
                 RETURNING token, attempts",
            ),
            held: with_members("SELECT c.token FROM {p}inbox_claims AS c WHERE {members}"),
            release: text(RELEASE),
            record: text(RECORD),
            drop_dead: text(DROP_DEAD),
            dead_letter: text(DEAD_LETTER),
            parked: text(PARKED),
            explain_parked: text(EXPLAIN_PARKED),
            explain_message: text(EXPLAIN_MESSAGE),
            explain_claim: text(EXPLAIN_CLAIM),
            stats: text(STATS),
            sweep_messages: text(SWEEP_MESSAGES),
            sweep_dead: text(
                "DELETE FROM {p}inbox_parked WHERE seq IN (SELECT seq FROM {p}inbox_parked \
                 WHERE parked_at < {now} - ?1 AND state <> 'due' \
                 AND state IN ('dead', 'discarded') LIMIT ?2)",
            ),
            sweep_claims: text(SWEEP_CLAIMS),
            free_all: text(
                "UPDATE {p}inbox_claims SET token = NULL, expires_at = min(expires_at, {now}) \
                 WHERE token IS NOT NULL",
            ),
            note: text("SELECT value FROM {p}inbox_notes WHERE name = ?1"),
            note_once: text(
                "INSERT INTO {p}inbox_notes (name, value) VALUES (?1, ?2) \
                 ON CONFLICT (name) DO NOTHING",
            ),
            set_note: text(
                "INSERT INTO {p}inbox_notes (name, value) VALUES (?1, ?2) \
                 ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            ),
            copies: ParkedSql::new(texts.clone()),
        }
    }
}

/// The filters spare a message that is processed or parked the write of a claim; they admit
/// nothing, the look after them does. The right-hand sides see the row as it was.
const CLAIM: &str = "
INSERT INTO {p}inbox_claims (consumer_id, message_id, owner, token, attempts, expires_at)
SELECT j.value ->> 0, j.value ->> 1, ?2, j.value ->> 2, 1, {now} + ?3
FROM json_each(?1) AS j
WHERE NOT EXISTS (
    SELECT 1 FROM {p}inbox_messages AS m
    WHERE m.consumer_id = j.value ->> 0 AND m.message_id = j.value ->> 1
) AND NOT EXISTS (
    SELECT 1 FROM {p}inbox_parked AS p
    WHERE p.consumer_id = j.value ->> 0 AND p.message_id = j.value ->> 1 AND p.state = 'due'
)
ON CONFLICT (consumer_id, message_id) DO UPDATE SET
    owner = excluded.owner,
    attempts = attempts + (token IS NOT excluded.token),
    token = excluded.token,
    expires_at = excluded.expires_at
WHERE token IS NULL OR token = excluded.token OR expires_at <= {now}";

const LOOK: &str = "
SELECT j.key, m.message_id IS NOT NULL, m.fingerprint, p.fingerprint, p.position, p.state,
    c.token, c.attempts, c.expires_at - {now},
    EXISTS (SELECT 1 FROM {p}inbox_parked AS b
        WHERE b.lane_id = unhex(j.value ->> 3) AND b.state <> 'discarded')
FROM json_each(?1) AS j
LEFT JOIN {p}inbox_messages AS m
    ON m.consumer_id = j.value ->> 0 AND m.message_id = j.value ->> 1
LEFT JOIN {p}inbox_claims AS c
    ON c.consumer_id = j.value ->> 0 AND c.message_id = j.value ->> 1
LEFT JOIN {p}inbox_parked AS p
    ON p.consumer_id = j.value ->> 0 AND p.message_id = j.value ->> 1
ORDER BY j.key, p.seq";

const RELEASE: &str = "
UPDATE {p}inbox_claims AS c SET
    token = NULL,
    expires_at = {now},
    attempts = max(0, c.attempts - j.value ->> 3)
FROM json_each(?1) AS j
WHERE c.consumer_id = j.value ->> 0 AND c.message_id = j.value ->> 1
    AND c.token = j.value ->> 2";

const RECORD: &str = "
INSERT INTO {p}inbox_messages (consumer_id, message_id, fingerprint, producer, message_type,
    correlation_id, causation_id, processed_at)
SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5,
    value ->> 6, {now}
FROM json_each(?1) WHERE true
ON CONFLICT (consumer_id, message_id) DO NOTHING
RETURNING consumer_id, message_id";

const DROP_DEAD: &str = "
DELETE FROM {p}inbox_parked WHERE seq IN (
    SELECT p.seq FROM json_each(?1) AS j
    JOIN {p}inbox_parked AS p
        ON p.consumer_id = j.value ->> 0 AND p.message_id = j.value ->> 1
    WHERE p.state IN ('dead', 'discarded')
        AND (p.fingerprint IN ('', j.value ->> 2) OR j.value ->> 2 = '')
)";

const DEAD_LETTER: &str = "
INSERT INTO {p}inbox_parked (subscription, consumer_id, message_id, fingerprint, position, lane,
    lane_id, envelope, attempts, last_status, last_error, reason, first_at, body_kept, body,
    parked_at, state)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, {now} - ?13, ?14, ?15, {now}, 'dead')
ON CONFLICT (consumer_id, message_id, fingerprint) DO UPDATE SET
    subscription = excluded.subscription,
    position = excluded.position,
    lane = excluded.lane,
    lane_id = excluded.lane_id,
    envelope = excluded.envelope,
    attempts = excluded.attempts,
    due_at = NULL,
    last_status = excluded.last_status,
    last_error = excluded.last_error,
    reason = excluded.reason,
    first_at = min(first_at, excluded.first_at),
    body_kept = excluded.body_kept,
    body = excluded.body,
    parked_at = excluded.parked_at,
    state = excluded.state";

const PARKED: &str = "
SELECT subscription, envelope, body, fingerprint, lane, attempts, last_status, last_error, reason
FROM {p}inbox_parked WHERE consumer_id = ?1 AND message_id = ?2 ORDER BY seq";

const EXPLAIN_PARKED: &str = "
SELECT p.subscription, p.envelope, NULL, p.fingerprint, p.lane, p.attempts, p.last_status,
    p.last_error, p.reason, p.state, {now} - p.parked_at, length(p.body), newest.total,
    CASE WHEN p.state = 'due' THEN max(p.due_at - {now}, 0) END
FROM (SELECT seq, count(*) OVER () AS total FROM {p}inbox_parked
    WHERE consumer_id = ?1 AND message_id = ?2 ORDER BY seq DESC LIMIT ?3) AS newest
JOIN {p}inbox_parked AS p ON p.seq = newest.seq
ORDER BY p.seq";

const EXPLAIN_MESSAGE: &str = "
SELECT fingerprint, producer, message_type, correlation_id, causation_id, {now} - processed_at
FROM {p}inbox_messages WHERE consumer_id = ?1 AND message_id = ?2";

const EXPLAIN_CLAIM: &str = "
SELECT owner, attempts, CASE WHEN token IS NULL THEN 0 ELSE expires_at - {now} END
FROM {p}inbox_claims WHERE consumer_id = ?1 AND message_id = ?2";

/// A million rows are counted; there is no estimate beyond it, so that nothing is answered then.
/// (The oldest are the first entries of the indexes that sweeps use.)
const STATS: &str = "SELECT
    (SELECT nullif(count(*), 1000001) FROM (SELECT 1 FROM {p}inbox_messages LIMIT 1000001)),
    (SELECT nullif(count(*), 1000001) FROM (SELECT 1 FROM {p}inbox_claims LIMIT 1000001)),
    (SELECT nullif(count(*), 1000001) FROM (SELECT 1 FROM {p}inbox_parked
        WHERE state = 'dead' LIMIT 1000001)),
    (SELECT nullif(count(*), 1000001) FROM (SELECT 1 FROM {p}inbox_parked
        WHERE state = 'due' LIMIT 1000001)),
    (SELECT {now} - processed_at FROM {p}inbox_messages ORDER BY processed_at LIMIT 1),
    (SELECT {now} - parked_at FROM {p}inbox_parked WHERE state <> 'due' AND state = 'dead'
        ORDER BY parked_at LIMIT 1),
    (SELECT {now} - first_at FROM {p}inbox_parked INDEXED BY {p}inbox_parked_first_at
        WHERE state = 'due' ORDER BY first_at LIMIT 1)";

const SWEEP_MESSAGES: &str = "
DELETE FROM {p}inbox_messages WHERE (consumer_id, message_id) IN (
    SELECT consumer_id, message_id FROM {p}inbox_messages
    WHERE processed_at < {now} - ?1 LIMIT ?2
)";

const SWEEP_CLAIMS: &str = "
DELETE FROM {p}inbox_claims WHERE (consumer_id, message_id) IN (
    SELECT consumer_id, message_id FROM {p}inbox_claims
    WHERE expires_at < {now} - ?1 LIMIT ?2
)";
