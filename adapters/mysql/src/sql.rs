//! The statements: text for a number of members, with the table prefix put in.
//!
//! Common to MySQL and MariaDB: no RETURNING, `VALUES()` in `ON DUPLICATE KEY UPDATE`, and
//! assignments there that run from left to right. The number of members is rounded up to a
//! power of two (the last one is repeated), so that few texts are prepared per connection.
//! `FORCE INDEX (PRIMARY)` keeps a small table from being scanned, which would meet the locks
//! of rows that nobody asked for.

use inboxd_contract::EXPLAINED_COPIES_MAX;
use sqlx::mysql::MySqlArguments;
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, MySql};

mod parked;

/// A statement with its parameters.
pub(crate) type Bound<'q> = Query<'q, MySql, MySqlArguments>;

/// Whether a locking read waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// As long as the session's lock timeout says: for a member alone.
    Wait,
    /// Not at all: a member of a batch must not stall the others.
    NoWait,
    /// Locked rows are left out.
    Skip,
}

impl Patience {
    fn clause(self) -> &'static str {
        match self {
            Self::Wait => "FOR UPDATE",
            Self::NoWait => "FOR UPDATE NOWAIT",
            Self::Skip => "FOR UPDATE SKIP LOCKED",
        }
    }
}

/// Names of the tables.
#[derive(Debug)]
pub(crate) struct Sql {
    prefix: String,
}

/// `query` of a text that holds no input but the prefix, which is a validated identifier.
pub(crate) fn query<'q>(text: String) -> Bound<'q> {
    sqlx::query(AssertSqlSafe(text))
}

/// `members`, the last one repeated up to a power of two. Never of none.
pub(crate) fn padded<T>(members: &[T]) -> impl Iterator<Item = &T> {
    let missing = members.len().next_power_of_two() - members.len();
    members.iter().chain(members.last().into_iter().cycle().take(missing))
}

/// `(?, ?), (?, ?)`: as many as [`padded`] gives.
fn tuples(members: usize, tuple: &str) -> String {
    vec![tuple; members.next_power_of_two()].join(", ")
}

impl Sql {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.to_owned() }
    }

    pub(crate) fn with_prefix(&self, template: &str) -> String {
        template.replace("{p}", &self.prefix)
    }

    fn with_members(&self, template: &str, members: usize) -> String {
        self.with_prefix(template)
            .replace("{keys}", &format!("({})", tuples(members, "(?, ?)")))
            .replace("{tokens}", &format!("({})", tuples(members, "(?, ?, ?)")))
    }

    /// Keys. Rows: consumer, message, token, attempts.
    pub(crate) fn lock_claims(&self, members: usize, patience: Patience) -> String {
        let template = "SELECT c.consumer_id, c.message_id, c.token, c.attempts \
             FROM {p}inbox_claims AS c FORCE INDEX (PRIMARY) \
             WHERE (c.consumer_id, c.message_id) IN {keys} ";
        self.with_members(template, members) + patience.clause()
    }

    /// Keys. Rows: consumer, message, token, processed, fingerprint. Locks both rows: what it
    /// answers holds until the commit.
    pub(crate) fn lock_claims_and_messages(&self, members: usize, patience: Patience) -> String {
        let template = "SELECT c.consumer_id, c.message_id, c.token, \
             m.message_id IS NOT NULL, m.fingerprint \
             FROM {p}inbox_claims AS c FORCE INDEX (PRIMARY) \
             LEFT JOIN {p}inbox_messages AS m FORCE INDEX (PRIMARY) \
                 ON m.consumer_id = c.consumer_id AND m.message_id = c.message_id \
             WHERE (c.consumer_id, c.message_id) IN {keys} ";
        self.with_members(template, members) + patience.clause()
    }

    /// Per member: consumer, message, owner, token, lease in microseconds.
    ///
    /// From left to right: attempts and owner see the row as it was; token is assigned if the
    /// row is free, expired or already ours; expires_at then sees the token as it is now,
    /// which is ours exactly if it was assigned.
    pub(crate) fn claim(&self, members: usize) -> String {
        let rows = tuples(members, "(?, ?, ?, ?, 1, UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND)");
        let free = "(token IS NULL OR token = VALUES(token) OR expires_at <= UTC_TIMESTAMP(3))";
        self.with_prefix(&format!(
            "INSERT INTO {{p}}inbox_claims \
                 (consumer_id, message_id, owner, token, attempts, expires_at) VALUES {rows} \
             ON DUPLICATE KEY UPDATE \
                 attempts = attempts + IF({free} AND NOT (token <=> VALUES(token)), 1, 0), \
                 owner = IF({free}, VALUES(owner), owner), \
                 token = IF({free}, VALUES(token), token), \
                 expires_at = IF(token <=> VALUES(token), VALUES(expires_at), expires_at)"
        ))
    }

    /// Keys three times, then lanes, as many as keys (or none). Rows: kind (0 claim, 1 message, 2
    /// parked, 3 a lane that is blocked, in the consumer's place), consumer, message, token or
    /// fingerprint, attempts, microseconds left, position, state, seq.
    pub(crate) fn look(&self, members: usize, asks_lanes: bool) -> String {
        let keys = self.with_members(
            "SELECT 0, consumer_id, message_id, token, attempts, \
                 TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(3), expires_at), NULL, NULL, 0 \
             FROM {p}inbox_claims FORCE INDEX (PRIMARY) \
             WHERE (consumer_id, message_id) IN {keys} \
             UNION ALL \
             SELECT 1, consumer_id, message_id, fingerprint, 0, 0, NULL, NULL, 0 \
             FROM {p}inbox_messages FORCE INDEX (PRIMARY) \
             WHERE (consumer_id, message_id) IN {keys} \
             UNION ALL \
             SELECT 2, consumer_id, message_id, fingerprint, 0, 0, position, state, seq \
             FROM {p}inbox_parked FORCE INDEX (inbox_parked_message) \
             WHERE (consumer_id, message_id) IN {keys}",
            members,
        );
        // One entry of the index each, however many rows a lane has.
        let lane = self.with_prefix(
            " UNION ALL (SELECT 3, lane_id, '', NULL, 0, 0, NULL, NULL, 0 \
             FROM {p}inbox_parked FORCE INDEX (inbox_parked_lane) \
             WHERE lane_id = ? AND state IN ('due', 'dead') LIMIT 1)",
        );
        let lanes = if asks_lanes { members.next_power_of_two() } else { 0 };
        keys + &lane.repeat(lanes)
    }

    /// Per member: consumer, message, token.
    pub(crate) fn drop_claims(&self, members: usize) -> String {
        self.with_members(
            "DELETE c FROM {p}inbox_claims AS c FORCE INDEX (PRIMARY) \
             WHERE (c.consumer_id, c.message_id, c.token) IN {tokens}",
            members,
        )
    }

    /// Per member: consumer, message, token.
    pub(crate) fn count(&self, members: usize) -> String {
        self.with_members(
            "UPDATE {p}inbox_claims AS c FORCE INDEX (PRIMARY) SET c.attempts = c.attempts + 1 \
             WHERE (c.consumer_id, c.message_id, c.token) IN {tokens}",
            members,
        )
    }

    /// Lease in microseconds, then per member: consumer, message, token.
    pub(crate) fn renew(&self, members: usize) -> String {
        self.with_members(
            "UPDATE {p}inbox_claims AS c FORCE INDEX (PRIMARY) \
             SET c.expires_at = UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND \
             WHERE (c.consumer_id, c.message_id, c.token) IN {tokens}",
            members,
        )
    }

    /// Attempts back, then per member: consumer, message, token.
    pub(crate) fn release(&self, members: usize) -> String {
        self.with_members(
            "UPDATE {p}inbox_claims AS c FORCE INDEX (PRIMARY) \
             SET c.attempts = GREATEST(c.attempts - ?, 0), c.token = NULL, \
                 c.expires_at = UTC_TIMESTAMP(3) \
             WHERE (c.consumer_id, c.message_id, c.token) IN {tokens}",
            members,
        )
    }

    /// Per row: consumer, message, fingerprint, producer, type, correlation, causation. Not
    /// rounded: a row that is named twice would be refused.
    pub(crate) fn record(&self, rows: usize) -> String {
        let rows = vec!["(?, ?, ?, ?, ?, ?, ?, UTC_TIMESTAMP(3))"; rows].join(", ");
        self.with_prefix(&format!(
            "INSERT INTO {{p}}inbox_messages (consumer_id, message_id, fingerprint, producer, \
                 message_type, correlation_id, causation_id, processed_at) VALUES {rows}"
        ))
    }

    /// Consumer, message, fingerprint or '' twice.
    pub(crate) fn drop_dead(&self) -> String {
        self.with_prefix(
            "DELETE p FROM {p}inbox_parked AS p FORCE INDEX (inbox_parked_message) \
             WHERE p.consumer_id = ? AND p.message_id = ? AND p.state IN ('dead', 'discarded') \
                 AND (p.fingerprint IN ('', ?) OR ? = '')",
        )
    }

    /// Subscription, consumer, message, fingerprint, position, lane, lane's id, envelope, attempts,
    /// status, error, reason, body, whether it is kept, microseconds since it was received first.
    /// `seq` stays where the row exists; an older time stays, and is read before it is assigned.
    pub(crate) fn dead_letter(&self) -> String {
        self.with_prefix(
            "INSERT INTO {p}inbox_parked (subscription, consumer_id, message_id, fingerprint, \
                 position, lane, lane_id, envelope, attempts, last_status, last_error, reason, \
                 body, body_kept, first_at, due_at, parked_at, state) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, \
                 UTC_TIMESTAMP(3) - INTERVAL ? MICROSECOND, NULL, UTC_TIMESTAMP(3), 'dead') \
             ON DUPLICATE KEY UPDATE subscription = VALUES(subscription), \
                 position = VALUES(position), lane = VALUES(lane), lane_id = VALUES(lane_id), \
                 envelope = VALUES(envelope), attempts = VALUES(attempts), \
                 last_status = VALUES(last_status), last_error = VALUES(last_error), \
                 reason = VALUES(reason), body = VALUES(body), body_kept = VALUES(body_kept), \
                 first_at = LEAST(COALESCE(first_at, parked_at), VALUES(first_at)), \
                 due_at = NULL, parked_at = VALUES(parked_at), state = VALUES(state)",
        )
    }

    /// Consumer, message: the row and its age in microseconds.
    pub(crate) fn explain_message(&self) -> String {
        self.with_prefix(
            "SELECT fingerprint, producer, message_type, correlation_id, causation_id, \
                 TIMESTAMPDIFF(MICROSECOND, processed_at, UTC_TIMESTAMP(3)) \
             FROM {p}inbox_messages WHERE consumer_id = ? AND message_id = ?",
        )
    }

    /// Consumer, message: owner, attempts, microseconds left; a free claim has none.
    pub(crate) fn explain_claim(&self) -> String {
        self.with_prefix(
            "SELECT owner, attempts, CASE WHEN token IS NULL THEN 0 \
                 ELSE TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(3), expires_at) END \
             FROM {p}inbox_claims WHERE consumer_id = ? AND message_id = ?",
        )
    }

    /// Rows of messages, claims, dead, due; microseconds since the oldest message, dead row, and
    /// since the first of due rows was received. Up to 10,000 rows are counted, beyond that the
    /// server's estimate is answered (of parked rows, of all states): no part reads more than that
    /// many entries, whatever the size. (The oldest are the first entries of indexes.)
    pub(crate) fn stats(&self) -> String {
        let rows = |table: &str, bounded: &str| {
            format!(
                "(SELECT CAST(CASE WHEN COUNT(*) <= 10000 THEN COUNT(*) \
                     ELSE GREATEST(COUNT(*), COALESCE((SELECT table_rows \
                         FROM information_schema.tables WHERE table_schema = DATABASE() \
                         AND table_name = '{{p}}{table}'), 0)) END AS SIGNED) \
                 FROM (SELECT 1 FROM {bounded} LIMIT 10001) AS bounded)"
            )
        };
        let messages = rows("inbox_messages", "{p}inbox_messages");
        let claims = rows("inbox_claims", "{p}inbox_claims");
        let parked = |state: &str| {
            let index = "FORCE INDEX (inbox_parked_state)";
            rows("inbox_parked", &format!("{{p}}inbox_parked {index} WHERE state = '{state}'"))
        };
        let oldest = |column: &str, table: &str| {
            format!(
                "(SELECT TIMESTAMPDIFF(MICROSECOND, {column}, UTC_TIMESTAMP(3)) \
                 FROM {{p}}{table} ORDER BY {column} LIMIT 1)"
            )
        };
        self.with_prefix(&format!(
            "SELECT {messages}, {claims}, {}, {}, {}, {}, {}",
            parked("dead"),
            parked("due"),
            oldest("processed_at", "inbox_messages"),
            oldest(
                "parked_at",
                "inbox_parked FORCE INDEX (inbox_parked_parked_at) WHERE state = 'dead'"
            ),
            oldest(
                "first_at",
                "inbox_parked FORCE INDEX (inbox_parked_first_at) WHERE state = 'due'"
            ),
        ))
    }

    /// Consumer, message.
    pub(crate) fn parked(&self) -> String {
        self.with_prefix(
            "SELECT subscription, envelope, body, fingerprint, lane, attempts, last_status, \
                 last_error, reason \
             FROM {p}inbox_parked WHERE consumer_id = ? AND message_id = ? ORDER BY seq",
        )
    }

    /// Consumer, message: the newest rows, oldest first, without their bodies: columns of
    /// `parked`, state, microseconds of age, bytes of the body, rows of the key, microseconds until
    /// due.
    pub(crate) fn explain_parked(&self) -> String {
        self.with_prefix(&format!(
            "SELECT p.subscription, p.envelope, NULL, p.fingerprint, p.lane, p.attempts, \
                 p.last_status, p.last_error, p.reason, p.state, \
                 TIMESTAMPDIFF(MICROSECOND, p.parked_at, UTC_TIMESTAMP(3)), \
                 p.body_bytes, newest.total, \
                 IF(p.state = 'due', GREATEST(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(3), \
                     p.due_at), 0), NULL) \
             FROM (SELECT seq, COUNT(*) OVER () AS total FROM {{p}}inbox_parked \
                 WHERE consumer_id = ? AND message_id = ? \
                 ORDER BY seq DESC LIMIT {EXPLAINED_COPIES_MAX}) AS newest \
             JOIN {{p}}inbox_parked AS p ON p.seq = newest.seq ORDER BY p.seq"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_padded_to_a_power_of_two_by_the_last() {
        assert_eq!(padded(&[1]).copied().collect::<Vec<_>>(), [1]);
        assert_eq!(padded(&[1, 2, 3]).copied().collect::<Vec<_>>(), [1, 2, 3, 3]);
        assert_eq!(tuples(3, "(?)"), "(?), (?), (?), (?)");
    }

    #[test]
    fn texts_have_as_many_parameters_as_are_bound() {
        let sql = Sql::new("app_");
        let marks = |text: String| text.matches('?').count();
        assert_eq!(marks(sql.lock_claims(3, Patience::NoWait)), 4 * 2);
        assert_eq!(marks(sql.look(2, false)), 2 * 2 * 3);
        assert_eq!(marks(sql.look(3, true)), 4 * 2 * 3 + 4);
        assert_eq!(marks(sql.claim(1)), 5);
        assert_eq!(marks(sql.renew(5)), 1 + 8 * 3);
        assert_eq!(marks(sql.record(3)), 3 * 7);
        assert!(sql.drop_claims(1).contains("app_inbox_claims"));
    }
}
