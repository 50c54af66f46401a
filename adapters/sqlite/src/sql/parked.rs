//! The statements of parked rows: workers', operators'.

use super::{Statement, Text};

/// Columns of a whole row, the first nine those of `read_parked`. `{body}` is `p.body` or NULL.
const COLUMNS: &str = "
    p.subscription, p.envelope, {body}, p.fingerprint, p.lane, p.attempts, p.last_status,
    p.last_error, p.reason, p.seq, p.consumer_id, p.message_id, p.state, p.lane_id,
    length(p.body), CASE WHEN p.state = 'due' THEN max(p.due_at - {now}, 0) END,
    {now} - p.first_at, {now} - p.parked_at";

/// Nobody holds the claim of a row's key.
const FREE: &str = "NOT EXISTS (
    SELECT 1 FROM {p}inbox_claims AS c
    WHERE c.consumer_id = p.consumer_id AND c.message_id = p.message_id
        AND c.token IS NOT NULL AND c.expires_at > {now}
)";

#[derive(Debug)]
pub(crate) struct ParkedSql {
    text: Text,
    /// One due row, 15 parameters; nothing where its key and fingerprint have a row.
    pub(crate) insert: Statement,
    /// Subscription, consumer, lane before the first, lane after the last, lanes at most. Rows:
    /// kind (0 a head that may be taken, 1 how long until the next one may, 2 how many lanes were
    /// looked at, and the last), lanes or ms, lane, seq, consumer, message, bytes of the body.
    pub(crate) heads: Statement,
    /// Subscription, consumer, rows at most: as kind 0 of `heads`.
    pub(crate) alone: Statement,
    /// Subscription, consumer: ms until the next row outside of lanes may be taken.
    pub(crate) alone_next: Statement,
    /// Subscription, consumer, lane, seq of its head, rows at most: as kind 0 of `heads`; 0
    /// instead of 1 in the first column where a row may not be taken.
    pub(crate) run: Statement,
    /// `[seq, token]`, owner, lease in ms.
    pub(crate) take: Statement,
    /// `[seq, token]`: columns of a row, and token, attempts of the claim, processed, fingerprint.
    pub(crate) taken: Statement,
    /// `[seq, consumer, message, attempts, delay in ms, status, error, status and error
    /// stay]`.
    pub(crate) reschedule: Statement,
    /// `[seq, consumer, message]`.
    pub(crate) drop_due: Statement,
    /// Seq.
    pub(crate) row: Statement,
    /// Seq: consumer, message, fingerprint, reason, body kept, of a dead row.
    pub(crate) dead_row: Statement,
    /// Consumer, message: fingerprint.
    pub(crate) processed: Statement,
    /// Consumer, message, fingerprint or '', seq of the row that does not count.
    pub(crate) same: Statement,
    /// Seq, message id, delay in ms.
    pub(crate) replay: Statement,
    /// Consumer, message: a claim that nobody holds.
    pub(crate) forget_idle: Statement,
    /// Seq: consumer, message of the row that is discarded now.
    pub(crate) discard: Statement,
    /// Actor, action, consumer, message, seq, replayed as.
    pub(crate) record_audit: Statement,
    /// Before this id, entries at most.
    pub(crate) audit: Statement,
    /// Age in ms, rows.
    pub(crate) sweep_audit: Statement,
}

impl ParkedSql {
    pub(super) fn new(text: Text) -> Self {
        let of = |template: &str| text.of(&template.replace("{free}", FREE));
        Self {
            insert: of(INSERT),
            heads: of(HEADS),
            alone: of(ALONE),
            alone_next: of(ALONE_NEXT),
            run: of(RUN),
            take: of(TAKE),
            taken: of(&columns(TAKEN, "p.body")),
            reschedule: of(RESCHEDULE),
            drop_due: of(DROP_DUE),
            row: of(&columns(
                "SELECT {columns} FROM {p}inbox_parked AS p WHERE p.seq = ?1",
                "p.body",
            )),
            dead_row: of(DEAD_ROW),
            processed: of("SELECT fingerprint FROM {p}inbox_messages \
                 WHERE consumer_id = ?1 AND message_id = ?2"),
            same: of("SELECT 1 FROM {p}inbox_parked WHERE consumer_id = ?1 AND message_id = ?2 \
                 AND fingerprint = ?3 AND seq <> ?4"),
            replay: of(REPLAY),
            forget_idle: of("DELETE FROM {p}inbox_claims WHERE consumer_id = ?1 \
                 AND message_id = ?2 AND (token IS NULL OR expires_at <= {now})"),
            discard: of("UPDATE {p}inbox_parked SET state = 'discarded', body = NULL, \
                 body_kept = 0, parked_at = {now} WHERE seq = ?1 AND state = 'dead' \
                 RETURNING consumer_id, message_id"),
            record_audit: of(RECORD_AUDIT),
            audit: of("SELECT id, {now} - acted_at, actor, action, consumer_id, message_id, seq, \
                 replayed_as FROM {p}inbox_audit WHERE id < ?1 ORDER BY id DESC LIMIT ?2"),
            sweep_audit: of("DELETE FROM {p}inbox_audit WHERE id IN (SELECT id \
                 FROM {p}inbox_audit WHERE acted_at < {now} - ?1 LIMIT ?2)"),
            text,
        }
    }

    /// Whole rows without bodies where `condition` holds, in the order of seq.
    pub(crate) fn list(&self, condition: &str, limit: &str) -> Statement {
        let template = format!(
            "SELECT {{columns}} FROM {{p}}inbox_parked AS p WHERE {condition} \
             ORDER BY p.seq LIMIT {limit}"
        );
        self.text.of(&columns(&template, "NULL"))
    }

    /// How many rows there are where `condition` holds, counted up to `limit`.
    pub(crate) fn count(&self, condition: &str, limit: &str) -> Statement {
        self.text.of(&format!(
            "SELECT count(*) FROM (SELECT 1 FROM {{p}}inbox_parked AS p WHERE {condition} \
             LIMIT {limit})"
        ))
    }
}

fn columns(template: &str, body: &str) -> String {
    template.replace("{columns}", &COLUMNS.replace("{body}", body))
}

const INSERT: &str = "
INSERT INTO {p}inbox_parked (subscription, consumer_id, message_id, fingerprint, position, lane,
    lane_id, envelope, attempts, due_at, last_status, last_error, reason, first_at, body, parked_at,
    state)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, {now} + ?10, ?11, ?12, ?13, {now} - ?14, ?15, {now},
    'due')
ON CONFLICT (consumer_id, message_id, fingerprint) DO NOTHING";

/// From lane to lane by the index, so that it costs the same whatever waits in each; a lane's head
/// is its first row that is not discarded.
const HEADS: &str = "
WITH RECURSIVE lanes (n, lane_id) AS MATERIALIZED (
    SELECT 1, (
        SELECT p.lane_id FROM {p}inbox_parked AS p
        WHERE p.subscription = ?1 AND p.consumer_id = ?2 AND p.state = 'due'
            AND p.lane_id > ?3 AND p.lane_id < ?4
        ORDER BY p.lane_id LIMIT 1
    )
    UNION ALL
    SELECT lanes.n + 1, (
        SELECT p.lane_id FROM {p}inbox_parked AS p
        WHERE p.subscription = ?1 AND p.consumer_id = ?2 AND p.state = 'due'
            AND p.lane_id > lanes.lane_id AND p.lane_id < ?4
        ORDER BY p.lane_id LIMIT 1
    )
    FROM lanes WHERE lanes.lane_id IS NOT NULL AND lanes.n < ?5
), heads AS MATERIALIZED (
    SELECT p.due_at - {now} AS due_in, p.lane_id, p.seq, p.consumer_id, p.message_id,
        length(p.body) AS bytes
    FROM lanes CROSS JOIN {p}inbox_parked AS p ON p.seq = (
        SELECT first.seq FROM {p}inbox_parked AS first
        WHERE first.lane_id = lanes.lane_id AND first.state <> 'discarded'
        ORDER BY first.seq LIMIT 1
    )
    WHERE lanes.lane_id IS NOT NULL AND p.state = 'due'
        AND p.subscription = ?1 AND p.consumer_id = ?2 AND {free}
)
SELECT 0, due_in, lane_id, seq, consumer_id, message_id, bytes FROM heads WHERE due_in <= 0
UNION ALL
SELECT 1, min(due_in), NULL, 0, '', '', NULL FROM heads WHERE due_in > 0
UNION ALL
SELECT 2, max(n), lane_id, 0, '', '', NULL FROM lanes WHERE lane_id IS NOT NULL";

const ALONE: &str = "
SELECT 0, p.due_at - {now}, NULL, p.seq, p.consumer_id, p.message_id, length(p.body)
FROM {p}inbox_parked AS p
WHERE p.subscription = ?1 AND p.consumer_id = ?2 AND p.state = 'due' AND p.lane_id IS NULL
    AND p.due_at <= {now} AND {free}
ORDER BY p.due_at LIMIT ?3";

const ALONE_NEXT: &str = "
SELECT p.due_at - {now} FROM {p}inbox_parked AS p
WHERE p.subscription = ?1 AND p.consumer_id = ?2 AND p.state = 'due' AND p.lane_id IS NULL
    AND p.due_at > {now} AND {free}
ORDER BY p.due_at LIMIT 1";

const RUN: &str = "
SELECT p.state = 'due' AND p.due_at <= {now} AND p.subscription = ?1 AND p.consumer_id = ?2
        AND {free},
    p.due_at - {now}, p.lane_id, p.seq, p.consumer_id, p.message_id, length(p.body)
FROM {p}inbox_parked AS p
WHERE p.lane_id = ?3 AND p.state <> 'discarded' AND p.seq > ?4
ORDER BY p.seq LIMIT ?5";

/// The number of attempts is the larger of two: the row's, and that of a claim which ran out.
const TAKE: &str = "
INSERT INTO {p}inbox_claims (consumer_id, message_id, owner, token, attempts, expires_at)
SELECT p.consumer_id, p.message_id, ?2, j.value ->> 1, p.attempts + 1, {now} + ?3
FROM json_each(?1) AS j CROSS JOIN {p}inbox_parked AS p ON p.seq = j.value ->> 0
WHERE p.state = 'due'
ON CONFLICT (consumer_id, message_id) DO UPDATE SET
    owner = excluded.owner,
    attempts = max(attempts + 1, excluded.attempts),
    token = excluded.token,
    expires_at = excluded.expires_at
WHERE token IS NULL OR expires_at <= {now}";

const TAKEN: &str = "
SELECT {columns}, c.token, c.attempts, m.message_id IS NOT NULL, m.fingerprint
FROM json_each(?1) AS j
CROSS JOIN {p}inbox_parked AS p ON p.seq = j.value ->> 0
JOIN {p}inbox_claims AS c ON c.consumer_id = p.consumer_id AND c.message_id = p.message_id
    AND c.token = j.value ->> 1
LEFT JOIN {p}inbox_messages AS m
    ON m.consumer_id = p.consumer_id AND m.message_id = p.message_id
ORDER BY j.key";

const RESCHEDULE: &str = "
UPDATE {p}inbox_parked AS p SET
    attempts = max(p.attempts, j.value ->> 3),
    due_at = {now} + (j.value ->> 4),
    last_status = CASE WHEN j.value ->> 7 THEN p.last_status ELSE j.value ->> 5 END,
    last_error = CASE WHEN j.value ->> 7 THEN p.last_error ELSE j.value ->> 6 END
FROM json_each(?1) AS j
WHERE p.seq = j.value ->> 0 AND p.state = 'due'
    AND p.consumer_id = j.value ->> 1 AND p.message_id = j.value ->> 2";

const DROP_DUE: &str = "
DELETE FROM {p}inbox_parked WHERE seq IN (
    SELECT p.seq FROM json_each(?1) AS j
    CROSS JOIN {p}inbox_parked AS p ON p.seq = j.value ->> 0
    WHERE p.state = 'due' AND p.consumer_id = j.value ->> 1 AND p.message_id = j.value ->> 2
)";

/// Former binaries kept no body of what was too large, and said nothing else.
const DEAD_ROW: &str = "
SELECT consumer_id, message_id, fingerprint, reason,
    body IS NOT NULL OR (body_kept AND reason <> 'body_too_large')
FROM {p}inbox_parked WHERE seq = ?1 AND state = 'dead'";

const REPLAY: &str = "
UPDATE {p}inbox_parked SET message_id = ?2, state = 'due', attempts = 0, reason = 'replayed',
    due_at = {now} + ?3, first_at = {now}, parked_at = {now}
WHERE seq = ?1 AND state = 'dead'";

const RECORD_AUDIT: &str = "
INSERT INTO {p}inbox_audit (acted_at, actor, action, consumer_id, message_id, seq, replayed_as)
VALUES ({now}, ?1, ?2, ?3, ?4, ?5, ?6)";
