//! The statements, with schema and prefix filled in once.
//!
//! Batches come as arrays. Every statement that locks rows does so in the order of the keys'
//! bytes, which is what COLLATE "C" compares; a row that was changed while it was waited for is
//! judged again by its token.

/// A struct of statements, with what stands before the tables' names filled in.
macro_rules! statements {
    ($(#[$about:meta])* $group:ident $($(#[$doc:meta])* $name:ident = $text:expr;)*) => {
        $(#[$about])*
        pub(crate) struct $group {
            $($(#[$doc])* $name: ::std::sync::Arc<str>,)*
        }

        impl $group {
            /// `qualifier` stands before every table's name.
            pub(crate) fn new(qualifier: &str) -> Self {
                Self { $($name: $text.replace("{t}", qualifier).into(),)* }
            }

            $($(#[$doc])* pub(crate) fn $name(&self) -> ::sqlx::AssertSqlSafe<::std::sync::Arc<str>> {
                ::sqlx::AssertSqlSafe(::std::sync::Arc::clone(&self.$name))
            })*
        }
    };
}
pub(crate) use statements;

statements! {
    /// All other statements of one store.
    Sql

    /// Takes what is free or expired, keeps what has this token already. Answers what is held.
    claim = r#"
INSERT INTO {t}inbox_claims AS c (consumer_id, message_id, owner, token, attempts, expires_at)
SELECT u.consumer_id, u.message_id, $4, u.token::uuid, 1,
       clock_timestamp() + $5::bigint * interval '1 microsecond'
FROM unnest($1::text[], $2::text[], $3::text[]) AS u (consumer_id, message_id, token)
ORDER BY u.consumer_id COLLATE "C", u.message_id COLLATE "C"
ON CONFLICT (consumer_id, message_id) DO UPDATE
SET owner = excluded.owner,
    token = excluded.token,
    attempts = c.attempts + CASE WHEN c.token = excluded.token THEN 0 ELSE 1 END,
    expires_at = excluded.expires_at
WHERE c.token IS NULL OR c.token = excluded.token OR c.expires_at <= clock_timestamp()
RETURNING c.consumer_id, c.message_id, c.attempts"#;

    /// What is there for each key, whether its lane is blocked (where one is asked about), and how
    /// long its claim still runs.
    look = r#"
SELECT u.place, m.message_id IS NOT NULL AS processed, m.fingerprint AS message_fingerprint,
       p.fingerprint AS parked_fingerprint, p.position, p.state,
       CASE WHEN u.lane_id IS NOT NULL THEN (
           SELECT true FROM {t}inbox_parked b
           WHERE b.lane_id = u.lane_id AND b.state <> 'discarded' LIMIT 1) END AS lane_blocked,
       (extract(epoch FROM c.expires_at - clock_timestamp()) * 1000000)::bigint AS left_us
FROM unnest($1::text[], $2::text[], $3::bytea[])
    WITH ORDINALITY AS u (consumer_id, message_id, lane_id, place)
LEFT JOIN {t}inbox_messages m
    ON m.consumer_id = u.consumer_id AND m.message_id = u.message_id
LEFT JOIN LATERAL (
    SELECT p.seq, p.fingerprint, p.position, p.state
    FROM {t}inbox_parked p
    WHERE p.consumer_id = u.consumer_id AND p.message_id = u.message_id
    OFFSET 0
) AS p ON true
LEFT JOIN {t}inbox_claims c
    ON c.consumer_id = u.consumer_id AND c.message_id = u.message_id
ORDER BY u.place, p.seq"#;

    /// Removes claims that turned out not to be needed; their rows are locked by us already.
    unclaim = r#"
DELETE FROM {t}inbox_claims c
USING unnest($1::text[], $2::text[], $3::text[]) AS u (consumer_id, message_id, token)
WHERE c.consumer_id = u.consumer_id AND c.message_id = u.message_id AND c.token = u.token::uuid"#;

    /// Removes the claims that are held, and inserts their rows. Answers the places of those that
    /// were held, and then the keys whose row is new: joined here, large batches would be
    /// compared pair by pair.
    complete = r#"
WITH u AS MATERIALIZED (
    SELECT *
    FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[],
                $8::text[])
        WITH ORDINALITY AS u (consumer_id, message_id, token, fingerprint, producer, message_type,
                              correlation_id, causation_id, place)
), held AS MATERIALIZED (
    SELECT c.consumer_id, c.message_id, u.place
    FROM {t}inbox_claims c
    JOIN u ON c.consumer_id = u.consumer_id AND c.message_id = u.message_id
          AND c.token = u.token::uuid
    ORDER BY c.consumer_id, c.message_id
    FOR UPDATE OF c
), gone AS (
    DELETE FROM {t}inbox_claims c
    USING held
    WHERE c.consumer_id = held.consumer_id AND c.message_id = held.message_id
    RETURNING held.place
), put AS (
    INSERT INTO {t}inbox_messages (consumer_id, message_id, fingerprint, producer, message_type,
                                   correlation_id, causation_id)
    SELECT u.consumer_id, u.message_id, u.fingerprint, u.producer, u.message_type,
           u.correlation_id, u.causation_id
    FROM gone
    JOIN u ON u.place = gone.place
    ORDER BY u.consumer_id COLLATE "C", u.message_id COLLATE "C"
    ON CONFLICT DO NOTHING
    RETURNING consumer_id, message_id
)
SELECT place, NULL AS consumer_id, NULL AS message_id FROM gone
UNION ALL
SELECT NULL, consumer_id, message_id FROM put"#;

    /// An accepted message takes its dead letter away; a missing fingerprint conflicts with none.
    /// (CASE, so that no index of all rows that are not due is thought to serve.)
    supersede = r#"
DELETE FROM {t}inbox_parked
WHERE CASE WHEN state = 'due' THEN false ELSE true END AND seq = ANY (ARRAY(
    SELECT p.seq
    FROM unnest($1::text[], $2::text[], $3::text[]) AS u (consumer_id, message_id, fingerprint)
    CROSS JOIN LATERAL (
        SELECT p.seq
        FROM {t}inbox_parked p
        WHERE p.consumer_id = u.consumer_id AND p.message_id = u.message_id
          AND CASE WHEN p.state = 'due' THEN false ELSE true END
          AND (u.fingerprint = '' OR p.fingerprint = '' OR p.fingerprint = u.fingerprint)
        OFFSET 0
    ) AS p))"#;

    /// Frees claims; the rows stay and keep the attempts.
    release = r#"
WITH held AS MATERIALIZED (
    SELECT c.consumer_id, c.message_id, u.back, u.place
    FROM {t}inbox_claims c
    JOIN unnest($1::text[], $2::text[], $3::text[], $4::integer[])
        WITH ORDINALITY AS u (consumer_id, message_id, token, back, place)
        ON c.consumer_id = u.consumer_id AND c.message_id = u.message_id
        AND c.token = u.token::uuid
    ORDER BY c.consumer_id, c.message_id
    FOR UPDATE OF c
)
UPDATE {t}inbox_claims c
SET token = NULL, expires_at = clock_timestamp(), attempts = greatest(c.attempts - held.back, 0)
FROM held
WHERE c.consumer_id = held.consumer_id AND c.message_id = held.message_id
RETURNING held.place"#;

    /// One attempt more for claims that are held.
    count = r#"
WITH held AS MATERIALIZED (
    SELECT c.consumer_id, c.message_id, u.place
    FROM {t}inbox_claims c
    JOIN unnest($1::text[], $2::text[], $3::text[])
        WITH ORDINALITY AS u (consumer_id, message_id, token, place)
        ON c.consumer_id = u.consumer_id AND c.message_id = u.message_id
        AND c.token = u.token::uuid
    ORDER BY c.consumer_id, c.message_id
    FOR UPDATE OF c
)
UPDATE {t}inbox_claims c
SET attempts = c.attempts + 1
FROM held
WHERE c.consumer_id = held.consumer_id AND c.message_id = held.message_id
RETURNING held.place, c.attempts"#;

    /// Extends claims by token; what is locked is left for the next time.
    renew = r#"
WITH held AS MATERIALIZED (
    SELECT c.consumer_id, c.message_id
    FROM {t}inbox_claims c
    JOIN unnest($1::text[], $2::text[], $3::text[]) AS u (consumer_id, message_id, token)
        ON c.consumer_id = u.consumer_id AND c.message_id = u.message_id
        AND c.token = u.token::uuid
    ORDER BY c.consumer_id, c.message_id
    FOR UPDATE OF c SKIP LOCKED
)
UPDATE {t}inbox_claims c
SET expires_at = clock_timestamp() + $4::bigint * interval '1 microsecond'
FROM held
WHERE c.consumer_id = held.consumer_id AND c.message_id = held.message_id
RETURNING c.token::text AS token"#;

    /// Removes one claim by its token.
    remove_claim = r#"
DELETE FROM {t}inbox_claims
WHERE consumer_id = $1 AND message_id = $2 AND token = $3::text::uuid
RETURNING attempts"#;

    /// Writes a dead letter, or replaces it.
    dead_letter = r#"
INSERT INTO {t}inbox_parked AS p (subscription, consumer_id, message_id, fingerprint, position,
    lane, envelope, body, attempts, last_status, last_error, reason, lane_id, first_at, body_kept,
    state)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13,
    clock_timestamp() - $14::bigint * interval '1 microsecond', $15, 'dead')
ON CONFLICT (consumer_id, message_id, fingerprint) DO UPDATE
SET subscription = excluded.subscription, position = excluded.position, lane = excluded.lane,
    lane_id = excluded.lane_id, first_at = least(p.first_at, excluded.first_at),
    body_kept = excluded.body_kept, envelope = excluded.envelope, body = excluded.body, attempts = excluded.attempts,
    due_at = NULL, last_status = excluded.last_status, last_error = excluded.last_error,
    parked_at = now(), reason = excluded.reason, state = 'dead'"#;

    /// The row of one key, and its age.
    explain_message = r#"
SELECT fingerprint, producer, message_type, correlation_id, causation_id,
    (extract(epoch FROM clock_timestamp() - processed_at) * 1000000)::bigint AS ago_us
FROM {t}inbox_messages
WHERE consumer_id = $1 AND message_id = $2"#;

    /// The claim of one key; a free one has no time left.
    explain_claim = r#"
SELECT owner, attempts, CASE WHEN token IS NULL THEN 0
    ELSE (extract(epoch FROM expires_at - clock_timestamp()) * 1000000)::bigint END AS left_us
FROM {t}inbox_claims
WHERE consumer_id = $1 AND message_id = $2"#;

    /// All parked rows of one key, whole.
    parked = r#"
SELECT subscription, fingerprint, lane, envelope, body, attempts, last_status, last_error, reason
FROM {t}inbox_parked
WHERE consumer_id = $1 AND message_id = $2
ORDER BY seq"#;

    /// The newest parked rows of one key, oldest first, without their bodies, and how many it has.
    explain_parked = r#"
SELECT p.subscription, p.fingerprint, p.lane, p.envelope, NULL::bytea AS body, p.attempts,
    p.last_status, p.last_error, p.reason, p.state,
    (extract(epoch FROM clock_timestamp() - p.parked_at) * 1000000)::bigint AS ago_us,
    octet_length(p.body)::bigint AS body_bytes, CASE WHEN p.state = 'due' THEN
        (extract(epoch FROM p.due_at - clock_timestamp()) * 1000000)::bigint END AS due_us,
    newest.total
FROM (SELECT seq, count(*) OVER () AS total FROM {t}inbox_parked
    WHERE consumer_id = $1 AND message_id = $2 ORDER BY seq DESC LIMIT $3) AS newest
JOIN {t}inbox_parked p ON p.seq = newest.seq
ORDER BY p.seq"#;

    /// Rows and ages. Up to 10,000 rows are counted, beyond that the planner's estimate is
    /// answered: no part reads more than that many entries of an index, whatever the size.
    /// (The oldest are the first entries of the indexes that sweeps use.)
    stats = r#"
SELECT m.rows AS messages, c.rows AS claims, p.rows AS dead, d.rows AS due,
    (SELECT (extract(epoch FROM clock_timestamp() - first_at) * 1000000)::bigint
        FROM {t}inbox_parked WHERE CASE WHEN state = 'due' THEN first_at END IS NOT NULL
        ORDER BY CASE WHEN state = 'due' THEN first_at END LIMIT 1) AS oldest_due_us,
    (SELECT (extract(epoch FROM clock_timestamp() - processed_at) * 1000000)::bigint
        FROM {t}inbox_messages ORDER BY processed_at LIMIT 1) AS oldest_message_us,
    (SELECT (extract(epoch FROM clock_timestamp() - parked_at) * 1000000)::bigint
        FROM {t}inbox_parked WHERE state <> 'due' AND state = 'dead'
        ORDER BY parked_at LIMIT 1) AS oldest_dead_us
FROM
    (SELECT CASE WHEN count(*) <= 10000 THEN count(*) ELSE greatest(count(*), (
            SELECT reltuples::bigint FROM pg_class
            WHERE oid = (SELECT tableoid FROM {t}inbox_messages LIMIT 1))) END AS rows
        FROM (SELECT 1 FROM {t}inbox_messages LIMIT 10001) AS bounded) AS m,
    (SELECT CASE WHEN count(*) <= 10000 THEN count(*) ELSE greatest(count(*), (
            SELECT reltuples::bigint FROM pg_class
            WHERE oid = (SELECT tableoid FROM {t}inbox_claims LIMIT 1))) END AS rows
        FROM (SELECT 1 FROM {t}inbox_claims LIMIT 10001) AS bounded) AS c,
    (SELECT CASE WHEN count(*) <= 10000 THEN count(*) FILTER (WHERE state = 'dead')
            ELSE greatest(count(*), (
            SELECT reltuples::bigint FROM pg_class
            WHERE oid = (SELECT tableoid FROM {t}inbox_parked LIMIT 1))) END AS rows
        FROM (SELECT state FROM {t}inbox_parked WHERE state <> 'due' ORDER BY parked_at
            LIMIT 10001) AS bounded) AS p,
    (SELECT CASE WHEN count(*) <= 10000 THEN count(*) ELSE greatest(count(*), (
            SELECT reltuples::bigint FROM pg_class
            WHERE oid = (SELECT tableoid FROM {t}inbox_parked LIMIT 1))) END AS rows
        FROM (SELECT 1 FROM {t}inbox_parked
            WHERE CASE WHEN state = 'due' THEN first_at END IS NOT NULL
            ORDER BY CASE WHEN state = 'due' THEN first_at END
            LIMIT 10001) AS bounded) AS d"#;

    /// True for one instance at a time, until the transaction ends.
    sweep_lock = "SELECT pg_try_advisory_xact_lock(hashtextextended($1, 0)) AS taken";

    /// Old rows of processed messages.
    sweep_messages = r#"
DELETE FROM {t}inbox_messages
WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {t}inbox_messages
    WHERE processed_at < clock_timestamp() - $1::bigint * interval '1 microsecond'
    ORDER BY processed_at LIMIT $2 FOR UPDATE SKIP LOCKED))
RETURNING 1"#;

    /// Old dead and discarded rows.
    sweep_parked = r#"
DELETE FROM {t}inbox_parked
WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {t}inbox_parked
    WHERE state <> 'due' AND parked_at < clock_timestamp() - $1::bigint * interval '1 microsecond'
    ORDER BY parked_at LIMIT $2 FOR UPDATE SKIP LOCKED))
RETURNING 1"#;

    /// Claims that ran out long ago.
    sweep_claims = r#"
DELETE FROM {t}inbox_claims
WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {t}inbox_claims
    WHERE expires_at < clock_timestamp() - $1::bigint * interval '1 microsecond'
    LIMIT $2 FOR UPDATE SKIP LOCKED))
RETURNING 1"#;

    /// Can it be written to?
    ping = "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' \
            AS read_only";

    /// A note's value.
    note = "SELECT value FROM {t}inbox_notes WHERE key = $1";

    /// A note, unless there is one.
    note_once = "INSERT INTO {t}inbox_notes (key, value) VALUES ($1, $2) ON CONFLICT DO NOTHING";

    /// A note in any case.
    set_note = "INSERT INTO {t}inbox_notes (key, value) VALUES ($1, $2) \
                ON CONFLICT (key) DO UPDATE SET value = excluded.value";
}
