//! The statements of parked rows: workers', operators'.

use super::{Patience, Sql, tuples};

/// Columns of a whole row, the first nine those of `read_parked`. `{body}` is `p.body` or NULL.
const COLUMNS: &str = "p.subscription, p.envelope, {body}, p.fingerprint, p.lane, p.attempts, \
     p.last_status, p.last_error, p.reason, p.seq, p.consumer_id, p.message_id, p.state, \
     p.lane_id, p.body_bytes, \
     IF(p.state = 'due', GREATEST(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(3), p.due_at), 0), \
         NULL), \
     TIMESTAMPDIFF(MICROSECOND, COALESCE(p.first_at, p.parked_at), UTC_TIMESTAMP(3)), \
     TIMESTAMPDIFF(MICROSECOND, p.parked_at, UTC_TIMESTAMP(3))";

/// A due row as it is weighed: seq, consumer, message, lane, microseconds until due, bytes of the
/// body, whether nobody holds its key's claim, whether a dead letter of its lane is before it.
const CANDIDATE: &str = "SELECT p.seq, p.consumer_id, p.message_id, p.lane_id, \
     TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(3), p.due_at), \
     COALESCE(p.body_bytes, 0), {free}, \
     EXISTS (SELECT 1 FROM {p}inbox_parked AS d FORCE INDEX (inbox_parked_lane) \
         WHERE d.lane_id = p.lane_id AND d.state = 'dead' AND d.seq < p.seq) \
     FROM {p}inbox_parked AS p ";

const FREE: &str = "NOT EXISTS (SELECT 1 FROM {p}inbox_claims AS c FORCE INDEX (PRIMARY) \
     WHERE c.consumer_id = p.consumer_id AND c.message_id = p.message_id \
         AND c.token IS NOT NULL AND c.expires_at > UTC_TIMESTAMP(3))";

fn columns(body: &str) -> String {
    COLUMNS.replace("{body}", body)
}

impl Sql {
    fn candidates(&self, rest: &str) -> String {
        self.with_prefix(&format!("{CANDIDATE}{rest}").replace("{free}", FREE))
    }

    /// Per row: subscription, consumer, message, fingerprint, position, lane, lane's id, envelope,
    /// attempts, microseconds until due, status, error, reason, microseconds since it was received
    /// first, body. A row that exists is refused, or stays as it is.
    pub(crate) fn insert_due(&self, rows: usize, existing_stays: bool) -> String {
        let row = "(?, ?, ?, ?, ?, ?, ?, ?, ?, UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND, ?, ?, ?, \
             UTC_TIMESTAMP(3) - INTERVAL ? MICROSECOND, ?, UTC_TIMESTAMP(3), 'due')";
        let rows = vec![row; rows].join(", ");
        let existing =
            if existing_stays { "ON DUPLICATE KEY UPDATE seq = {p}inbox_parked.seq" } else { "" };
        self.with_prefix(&format!(
            "INSERT INTO {{p}}inbox_parked (subscription, consumer_id, message_id, fingerprint, \
                 position, lane, lane_id, envelope, attempts, due_at, last_status, last_error, \
                 reason, first_at, body, parked_at, state) VALUES {rows} {existing}"
        ))
    }

    /// Subscription, consumer, lane before the first, last lane, rows: the lanes of so
    /// many due rows, by the index alone.
    pub(crate) fn lanes(&self) -> String {
        self.with_prefix(
            "SELECT p.lane_id FROM {p}inbox_parked AS p FORCE INDEX (inbox_parked_due) \
             WHERE p.subscription = ? AND p.consumer_id = ? AND p.state = 'due' \
                 AND p.lane_id > ? AND p.lane_id <= ? \
             ORDER BY p.lane_id LIMIT ?",
        )
    }

    /// Lanes: the first due row of each, in no order.
    pub(crate) fn heads(&self, lanes: usize) -> String {
        let head = self.candidates(
            "FORCE INDEX (inbox_parked_lane) WHERE p.lane_id = ? AND p.state = 'due' \
             ORDER BY p.seq LIMIT 1",
        );
        vec![format!("({head})"); lanes.next_power_of_two()].join(" UNION ALL ")
    }

    /// Lane, seq of its head, rows, lane, seq: what is due behind the head, in order, and the next
    /// dead letter of the lane, if any: seq alone.
    pub(crate) fn run(&self) -> String {
        let due = self.candidates(
            "FORCE INDEX (inbox_parked_lane) WHERE p.lane_id = ? AND p.state = 'due' \
             AND p.seq > ? ORDER BY p.seq LIMIT ?",
        );
        let dead = self.with_prefix(
            "SELECT p.seq, NULL, NULL, NULL, 0, 0, 0, 0 \
             FROM {p}inbox_parked AS p FORCE INDEX (inbox_parked_lane) \
             WHERE p.lane_id = ? AND p.state = 'dead' AND p.seq > ? ORDER BY p.seq LIMIT 1",
        );
        format!("({due}) UNION ALL ({dead})")
    }

    /// Subscription, consumer, rows: due rows outside of lanes that are free, by their time.
    pub(crate) fn alone(&self) -> String {
        self.candidates(
            "FORCE INDEX (inbox_parked_due) WHERE p.subscription = ? AND p.consumer_id = ? \
             AND p.state = 'due' AND p.lane_id IS NULL AND p.due_at <= UTC_TIMESTAMP(3) \
             AND {free} ORDER BY p.due_at LIMIT ?",
        )
    }

    /// Subscription, consumer: the next row outside of lanes that is not due yet and free.
    pub(crate) fn alone_next(&self) -> String {
        self.candidates(
            "FORCE INDEX (inbox_parked_due) WHERE p.subscription = ? AND p.consumer_id = ? \
             AND p.state = 'due' AND p.lane_id IS NULL AND p.due_at > UTC_TIMESTAMP(3) \
             AND {free} ORDER BY p.due_at LIMIT 1",
        )
    }

    /// Seqs: those that are due still and that nobody has locked, and their attempts.
    pub(crate) fn lock_due(&self, rows: usize) -> String {
        self.with_prefix(&format!(
            "SELECT p.seq, p.attempts FROM {{p}}inbox_parked AS p FORCE INDEX (PRIMARY) \
             WHERE p.seq IN ({}) AND p.state = 'due' AND p.due_at <= UTC_TIMESTAMP(3) {}",
            tuples(rows, "?"),
            Patience::Skip.clause()
        ))
    }

    /// Per member: consumer, message, owner, token, attempts, lease in microseconds. As `claim`;
    /// the number of attempts is the larger of two: the row's, and that of a claim which ran out.
    pub(crate) fn claim_due(&self, members: usize) -> String {
        let rows = tuples(members, "(?, ?, ?, ?, ?, UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND)");
        let free = "(token IS NULL OR token = VALUES(token) OR expires_at <= UTC_TIMESTAMP(3))";
        self.with_prefix(&format!(
            "INSERT INTO {{p}}inbox_claims \
                 (consumer_id, message_id, owner, token, attempts, expires_at) VALUES {rows} \
             ON DUPLICATE KEY UPDATE \
                 attempts = IF({free} AND NOT (token <=> VALUES(token)), \
                     GREATEST(attempts + 1, VALUES(attempts)), attempts), \
                 owner = IF({free}, VALUES(owner), owner), \
                 token = IF({free}, VALUES(token), token), \
                 expires_at = IF(token <=> VALUES(token), VALUES(expires_at), expires_at)"
        ))
    }

    /// Seqs: whole rows; token and attempts of the claim, processed, fingerprint.
    pub(crate) fn taken(&self, rows: usize) -> String {
        self.with_prefix(&format!(
            "SELECT {}, c.token, c.attempts, m.message_id IS NOT NULL, m.fingerprint \
             FROM {{p}}inbox_parked AS p FORCE INDEX (PRIMARY) \
             JOIN {{p}}inbox_claims AS c FORCE INDEX (PRIMARY) \
                 ON c.consumer_id = p.consumer_id AND c.message_id = p.message_id \
             LEFT JOIN {{p}}inbox_messages AS m FORCE INDEX (PRIMARY) \
                 ON m.consumer_id = p.consumer_id AND m.message_id = p.message_id \
             WHERE p.seq IN ({})",
            columns("p.body"),
            tuples(rows, "?")
        ))
    }

    /// Attempts, microseconds until due, then, where status and error are told: these; then seq,
    /// consumer, message.
    pub(crate) fn reschedule(&self, told: bool) -> String {
        let told = if told { ", p.last_status = ?, p.last_error = ?" } else { "" };
        self.with_prefix(&format!(
            "UPDATE {{p}}inbox_parked AS p FORCE INDEX (PRIMARY) \
             SET p.attempts = GREATEST(p.attempts, ?), \
                 p.due_at = UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND{told} \
             WHERE p.seq = ? AND p.consumer_id = ? AND p.message_id = ? AND p.state = 'due'"
        ))
    }

    /// Per row: seq, consumer, message.
    pub(crate) fn drop_due(&self, rows: usize) -> String {
        let row = "(p.seq = ? AND p.consumer_id = ? AND p.message_id = ?)";
        self.with_prefix(&format!(
            "DELETE p FROM {{p}}inbox_parked AS p FORCE INDEX (PRIMARY) \
             WHERE p.state = 'due' AND ({})",
            vec![row; rows.next_power_of_two()].join(" OR ")
        ))
    }

    /// The parameters of `conditions`, seq that is passed, rows: whole rows without bodies, in the
    /// order of seq.
    pub(crate) fn list(&self, conditions: &[String], index: &str) -> String {
        self.with_prefix(&format!(
            "SELECT {} FROM {{p}}inbox_parked AS p {index} WHERE {} AND p.seq > ? \
             ORDER BY p.seq LIMIT ?",
            columns("NULL"),
            conditions.join(" AND ")
        ))
    }

    /// The parameters of `conditions`, rows: how many there are, counted up to that.
    pub(crate) fn count_rows(&self, conditions: &[String], index: &str) -> String {
        self.with_prefix(&format!(
            "SELECT COUNT(*) FROM (SELECT 1 FROM {{p}}inbox_parked AS p {index} WHERE {} LIMIT ?) \
             AS counted",
            conditions.join(" AND ")
        ))
    }

    /// Seq: the whole row.
    pub(crate) fn row(&self) -> String {
        self.with_prefix(&format!(
            "SELECT {} FROM {{p}}inbox_parked AS p WHERE p.seq = ?",
            columns("p.body")
        ))
    }

    /// Seq: consumer, message, fingerprint, reason, body kept, of a dead row, which is locked.
    /// Former binaries kept no body of what was too large, and said nothing else.
    pub(crate) fn lock_dead(&self, patience: Patience) -> String {
        let template = "SELECT p.consumer_id, p.message_id, p.fingerprint, p.reason, \
                 p.body IS NOT NULL OR (p.body_kept AND p.reason <> 'body_too_large') \
             FROM {p}inbox_parked AS p FORCE INDEX (PRIMARY) \
             WHERE p.seq = ? AND p.state = 'dead' ";
        self.with_prefix(template) + patience.clause()
    }

    /// Consumer, message: fingerprint.
    pub(crate) fn processed(&self) -> String {
        self.with_prefix(
            "SELECT fingerprint FROM {p}inbox_messages WHERE consumer_id = ? AND message_id = ?",
        )
    }

    /// Consumer, message, fingerprint or '', seq of the row that does not count.
    pub(crate) fn same(&self) -> String {
        self.with_prefix(
            "SELECT 1 FROM {p}inbox_parked FORCE INDEX (inbox_parked_message) \
             WHERE consumer_id = ? AND message_id = ? AND fingerprint = ? AND seq <> ?",
        )
    }

    /// Message, microseconds until due, seq.
    pub(crate) fn replay(&self) -> String {
        self.with_prefix(
            "UPDATE {p}inbox_parked SET message_id = ?, state = 'due', attempts = 0, \
                 reason = 'replayed', first_at = UTC_TIMESTAMP(3), \
                 due_at = UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND, parked_at = UTC_TIMESTAMP(3) \
             WHERE seq = ?",
        )
    }

    /// Consumer, message: whether there is a claim that nobody holds and nobody has locked.
    pub(crate) fn lock_idle(&self) -> String {
        self.with_prefix(
            "SELECT 1 FROM {p}inbox_claims FORCE INDEX (PRIMARY) \
             WHERE consumer_id = ? AND message_id = ? \
                 AND (token IS NULL OR expires_at <= UTC_TIMESTAMP(3)) FOR UPDATE SKIP LOCKED",
        )
    }

    /// Consumer, message.
    pub(crate) fn drop_claim(&self) -> String {
        self.with_prefix("DELETE FROM {p}inbox_claims WHERE consumer_id = ? AND message_id = ?")
    }

    /// Seq.
    pub(crate) fn discard(&self) -> String {
        self.with_prefix(
            "UPDATE {p}inbox_parked SET state = 'discarded', body = NULL, body_kept = FALSE, \
                 first_at = COALESCE(first_at, parked_at), parked_at = UTC_TIMESTAMP(3) \
             WHERE seq = ?",
        )
    }

    /// Actor, action, consumer, message, seq, replayed as.
    pub(crate) fn record_audit(&self) -> String {
        self.with_prefix(
            "INSERT INTO {p}inbox_audit \
                 (acted_at, actor, action, consumer_id, message_id, seq, replayed_as) \
             VALUES (UTC_TIMESTAMP(3), ?, ?, ?, ?, ?, ?)",
        )
    }

    /// Before this id, entries.
    pub(crate) fn audit(&self) -> String {
        self.with_prefix(
            "SELECT id, TIMESTAMPDIFF(MICROSECOND, acted_at, UTC_TIMESTAMP(3)), actor, action, \
                 consumer_id, message_id, seq, replayed_as \
             FROM {p}inbox_audit WHERE id < ? ORDER BY id DESC LIMIT ?",
        )
    }
}
