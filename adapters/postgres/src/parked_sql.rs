//! The statements about parked rows: of workers, of arrivals, and of operators.
//!
//! Statements are planned once, maybe while the table is empty, as it mostly is; and then a minute
//! brings 100,000 rows. So each is written such that no plan reads the whole table: rows are named
//! by `seq = ANY`, and what is asked of another table for each row is a subquery of its own
//! (scalar with a limit, or lateral with OFFSET 0), which a join would turn into a hash or a merge.

use crate::sql::statements;

statements! {
    /// All statements about parked rows of one store.
    ParkedSql

    /// Inserts full copies that are due, in the order given; those that are there already are
    /// left alone. Answers which are new.
    insert = r#"
INSERT INTO {t}inbox_parked (subscription, consumer_id, message_id, fingerprint, position, lane,
    lane_id, envelope, body, attempts, due_at, last_status, last_error, reason, first_at, state)
SELECT u.subscription, u.consumer_id, u.message_id, u.fingerprint, u.position, u.lane, u.lane_id,
    u.envelope, u.body, u.attempts, clock_timestamp() + u.delay_us * interval '1 microsecond',
    u.last_status, u.last_error, u.reason,
    clock_timestamp() - u.first_us * interval '1 microsecond', 'due'
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::bytea[],
            $8::text[], $9::bytea[], $10::integer[], $11::bigint[], $12::integer[], $13::text[],
            $14::text[], $15::bigint[])
    WITH ORDINALITY AS u (subscription, consumer_id, message_id, fingerprint, position, lane,
        lane_id, envelope, body, attempts, delay_us, last_status, last_error, reason, first_us,
        place)
ORDER BY u.place
ON CONFLICT (consumer_id, message_id, fingerprint) DO NOTHING
RETURNING consumer_id, message_id, fingerprint"#;

    /// Removes the claims that are held. Answers the places of those that were.
    unhold = r#"
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
DELETE FROM {t}inbox_claims c
USING held
WHERE c.consumer_id = held.consumer_id AND c.message_id = held.message_id
RETURNING held.place"#;

    /// Removes the claims that are held, and puts their rows off. Answers the places.
    reschedule = r#"
WITH u AS MATERIALIZED (
    SELECT *
    FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::integer[], $6::bigint[],
                $7::integer[], $8::text[])
        WITH ORDINALITY AS u (consumer_id, message_id, token, seq, back, delay_us, last_status,
                              last_error, place)
), held AS MATERIALIZED (
    SELECT c.consumer_id, c.message_id, c.attempts, u.place
    FROM {t}inbox_claims c
    JOIN u ON c.consumer_id = u.consumer_id AND c.message_id = u.message_id
          AND c.token = u.token::uuid
    ORDER BY c.consumer_id, c.message_id
    FOR UPDATE OF c
), gone AS (
    DELETE FROM {t}inbox_claims c
    USING held
    WHERE c.consumer_id = held.consumer_id AND c.message_id = held.message_id
    RETURNING held.place, held.attempts
), put AS (
    UPDATE {t}inbox_parked p
    SET due_at = clock_timestamp() + u.delay_us * interval '1 microsecond',
        attempts = greatest(gone.attempts - u.back, 0),
        last_status = CASE WHEN u.back = 0 THEN u.last_status ELSE p.last_status END,
        last_error = CASE WHEN u.back = 0 THEN u.last_error ELSE p.last_error END
    FROM gone
    JOIN u ON u.place = gone.place
    WHERE p.seq = ANY ($4::bigint[]) AND p.seq = u.seq AND p.state = 'due'
      AND p.consumer_id IS NOT DISTINCT FROM u.consumer_id
      AND p.message_id IS NOT DISTINCT FROM u.message_id
)
SELECT place FROM gone"#;

    /// Removes due rows whose claims were held by us.
    unpark = r#"
DELETE FROM {t}inbox_parked p
USING unnest($1::text[], $2::text[], $3::bigint[]) AS u (consumer_id, message_id, seq)
WHERE p.seq = ANY ($3::bigint[]) AND p.seq = u.seq AND p.state = 'due'
  AND p.consumer_id IS NOT DISTINCT FROM u.consumer_id
  AND p.message_id IS NOT DISTINCT FROM u.message_id"#;

    /// Due rows outside of lanes whose keys nobody has claimed, the oldest first; locked.
    take_loose = r#"
SELECT p.seq, p.message_id, p.attempts, NULL::bytea AS lane_id,
    coalesce(octet_length(p.body), 0)::bigint AS body_bytes,
    (extract(epoch FROM statement_timestamp() - p.due_at) * 1000000)::bigint AS late_us
FROM {t}inbox_parked p
WHERE p.consumer_id = $1 AND p.subscription = $2 AND p.state = 'due' AND p.lane_id IS NULL
  AND p.due_at <= statement_timestamp()
  AND (SELECT true FROM {t}inbox_claims c
       WHERE c.consumer_id = p.consumer_id AND c.message_id = p.message_id
         AND c.token IS NOT NULL AND c.expires_at > clock_timestamp() LIMIT 1) IS NULL
ORDER BY p.due_at
LIMIT $3
FOR UPDATE OF p SKIP LOCKED"#;

    /// Heads of lanes that are due and whose keys nobody has claimed; locked. It goes from lane to
    /// lane, upwards from $3 and around, whatever waits in each: not further than $4 such heads or
    /// $5 lanes. Beside them, how many were found, how many lanes were seen, and when the
    /// next row becomes due; at least one row is answered.
    take_heads = r#"
WITH RECURSIVE up AS (
    SELECT $3::bytea AS lane_id, NULL::bigint AS seq, NULL::timestamptz AS due_at, false AS ready,
        0::bigint AS found, 0::bigint AS seen
    UNION ALL
    SELECT n.lane_id, n.seq, n.due_at, n.due_at <= statement_timestamp(),
        up.found + (n.due_at <= statement_timestamp() IS TRUE)::integer, up.seen + 1
    FROM up
    CROSS JOIN LATERAL (
        SELECT p.lane_id, p.seq, CASE WHEN p.state = 'due' AND (
            p.due_at > statement_timestamp() OR (
            SELECT true FROM {t}inbox_claims c
            WHERE c.consumer_id = p.consumer_id AND c.message_id = p.message_id
              AND c.token IS NOT NULL AND c.expires_at > clock_timestamp() LIMIT 1) IS NULL)
            THEN p.due_at END AS due_at
        FROM {t}inbox_parked p
        WHERE p.consumer_id = $1 AND p.subscription = $2 AND p.lane_id > up.lane_id
          AND p.state <> 'discarded'
        ORDER BY p.lane_id, p.seq
        LIMIT 1
    ) AS n
    WHERE up.found < $4 AND up.seen < $5
), around AS (
    SELECT ''::bytea AS lane_id, NULL::bigint AS seq, NULL::timestamptz AS due_at, false AS ready,
        (SELECT max(found) FROM up) AS found, (SELECT max(seen) FROM up) AS seen
    UNION ALL
    SELECT n.lane_id, n.seq, n.due_at, n.due_at <= statement_timestamp(),
        around.found + (n.due_at <= statement_timestamp() IS TRUE)::integer, around.seen + 1
    FROM around
    CROSS JOIN LATERAL (
        SELECT p.lane_id, p.seq, CASE WHEN p.state = 'due' AND (
            p.due_at > statement_timestamp() OR (
            SELECT true FROM {t}inbox_claims c
            WHERE c.consumer_id = p.consumer_id AND c.message_id = p.message_id
              AND c.token IS NOT NULL AND c.expires_at > clock_timestamp() LIMIT 1) IS NULL)
            THEN p.due_at END AS due_at
        FROM {t}inbox_parked p
        WHERE p.consumer_id = $1 AND p.subscription = $2 AND p.lane_id > around.lane_id
          AND p.lane_id <= $3 AND p.state <> 'discarded'
        ORDER BY p.lane_id, p.seq
        LIMIT 1
    ) AS n
    WHERE around.found < $4 AND around.seen < $5
), heads AS MATERIALIZED (
    SELECT seq, due_at, ready FROM up WHERE due_at IS NOT NULL
    UNION ALL
    SELECT seq, due_at, ready FROM around WHERE due_at IS NOT NULL
), locked AS MATERIALIZED (
    SELECT p.seq, p.message_id, p.attempts, p.lane_id,
        coalesce(octet_length(p.body), 0)::bigint AS body_bytes,
        (extract(epoch FROM statement_timestamp() - p.due_at) * 1000000)::bigint AS late_us
    FROM {t}inbox_parked p
    WHERE p.seq = ANY (ARRAY(SELECT seq FROM heads WHERE ready))
      AND p.state = 'due' AND p.due_at <= statement_timestamp()
    FOR UPDATE OF p SKIP LOCKED
)
SELECT known.found, known.seen,
    (extract(epoch FROM known.next_at - statement_timestamp()) * 1000000)::bigint AS next_us,
    locked.*
FROM (
    SELECT (SELECT max(found) FROM around) AS found, (SELECT max(seen) FROM around) AS seen,
        least((SELECT min(due_at) FROM heads WHERE NOT ready), (
            SELECT p.due_at FROM {t}inbox_parked p
            WHERE p.consumer_id = $1 AND p.subscription = $2 AND p.state = 'due'
              AND p.lane_id IS NULL AND p.due_at > statement_timestamp()
            ORDER BY p.due_at LIMIT 1)) AS next_at
) AS known
LEFT JOIN locked ON true"#;

    /// What follows the heads of lanes, at most $5 rows of each, and whether it is due and free.
    take_followers = r#"
SELECT u.place, f.*
FROM unnest($3::bytea[], $4::bigint[]) WITH ORDINALITY AS u (lane_id, seq, place)
CROSS JOIN LATERAL (
    SELECT p.seq, p.message_id, p.attempts, p.lane_id,
        coalesce(octet_length(p.body), 0)::bigint AS body_bytes, 0::bigint AS late_us,
        p.state = 'due' AND p.due_at <= statement_timestamp() AND (
            SELECT true FROM {t}inbox_claims c
            WHERE c.consumer_id = p.consumer_id AND c.message_id = p.message_id
              AND c.token IS NOT NULL AND c.expires_at > clock_timestamp() LIMIT 1) IS NULL
            AS ready
    FROM {t}inbox_parked p
    WHERE p.consumer_id = $1 AND p.subscription = $2
      AND (p.lane_id, p.seq) > (u.lane_id, u.seq) AND p.lane_id <= u.lane_id
      AND p.state <> 'discarded'
    ORDER BY p.lane_id, p.seq
    LIMIT $5
) AS f
ORDER BY u.place, f.seq"#;

    /// Locks these rows, but for those that others are just taking.
    take_lock = r#"
SELECT p.seq FROM {t}inbox_parked p
WHERE p.seq = ANY ($1::bigint[]) AND p.state = 'due' AND p.due_at <= statement_timestamp()
FOR UPDATE OF p SKIP LOCKED"#;

    /// Claims the keys of rows: attempts go on from the larger of both counts. A claim that
    /// somebody has locked is passed over.
    take_claim = r#"
WITH u AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::integer[])
        AS u (consumer_id, message_id, token, attempts)
), there AS MATERIALIZED (
    SELECT c.consumer_id, c.message_id
    FROM {t}inbox_claims c
    JOIN u ON c.consumer_id = u.consumer_id AND c.message_id = u.message_id
), free AS MATERIALIZED (
    SELECT c.consumer_id, c.message_id
    FROM {t}inbox_claims c
    JOIN u ON c.consumer_id = u.consumer_id AND c.message_id = u.message_id
    WHERE c.token IS NULL OR c.expires_at <= clock_timestamp()
    ORDER BY c.consumer_id, c.message_id
    FOR UPDATE OF c SKIP LOCKED
)
INSERT INTO {t}inbox_claims AS c (consumer_id, message_id, owner, token, attempts, expires_at)
SELECT u.consumer_id, u.message_id, $5, u.token::uuid, u.attempts + 1,
       clock_timestamp() + $6::bigint * interval '1 microsecond'
FROM u
WHERE (u.consumer_id, u.message_id) NOT IN (SELECT * FROM there)
   OR (u.consumer_id, u.message_id) IN (SELECT * FROM free)
ORDER BY u.consumer_id COLLATE "C", u.message_id COLLATE "C"
ON CONFLICT (consumer_id, message_id) DO UPDATE
SET owner = excluded.owner,
    token = excluded.token,
    attempts = greatest(c.attempts + 1, excluded.attempts),
    expires_at = excluded.expires_at
WHERE c.token IS NULL OR c.expires_at <= clock_timestamp()
RETURNING c.token::text AS token, c.attempts"#;

    /// Rows in hand, whole, and whether their messages are processed.
    take_read = r#"
SELECT u.place, p.subscription, p.fingerprint, p.lane, p.lane_id, p.envelope, p.body, p.attempts,
    p.last_status, p.last_error, p.reason,
    (extract(epoch FROM clock_timestamp() - p.first_at) * 1000000)::bigint AS first_us,
    m.message_id IS NOT NULL AS processed, m.fingerprint AS message_fingerprint
FROM unnest($1::bigint[]) WITH ORDINALITY AS u (seq, place)
JOIN {t}inbox_parked p ON p.seq = u.seq AND p.seq = ANY ($1::bigint[])
LEFT JOIN LATERAL (
    SELECT m.message_id, m.fingerprint
    FROM {t}inbox_messages m
    WHERE m.consumer_id = p.consumer_id AND m.message_id = p.message_id
    OFFSET 0
) AS m ON true
ORDER BY u.place"#;

    /// One parked row.
    row = r#"
SELECT p.seq, p.consumer_id, p.message_id, p.state, p.subscription, p.fingerprint, p.lane,
    p.lane_id, p.envelope, p.body, p.attempts, p.last_status, p.last_error, p.reason,
    octet_length(p.body)::bigint AS body_bytes, CASE WHEN p.state = 'due' THEN
        (extract(epoch FROM p.due_at - clock_timestamp()) * 1000000)::bigint END AS due_us,
    (extract(epoch FROM clock_timestamp() - p.first_at) * 1000000)::bigint AS first_us,
    (extract(epoch FROM clock_timestamp() - p.parked_at) * 1000000)::bigint AS ago_us
FROM {t}inbox_parked p
WHERE p.seq = $1"#;

    /// Parked rows without their bodies; what is asked of them follows.
    list = r#"
SELECT p.seq, p.consumer_id, p.message_id, p.state, p.subscription, p.fingerprint, p.lane,
    p.lane_id, p.envelope, NULL::bytea AS body, p.attempts, p.last_status, p.last_error, p.reason,
    octet_length(p.body)::bigint AS body_bytes, CASE WHEN p.state = 'due' THEN
        (extract(epoch FROM p.due_at - clock_timestamp()) * 1000000)::bigint END AS due_us,
    (extract(epoch FROM clock_timestamp() - p.first_at) * 1000000)::bigint AS first_us,
    (extract(epoch FROM clock_timestamp() - p.parked_at) * 1000000)::bigint AS ago_us
FROM {t}inbox_parked p
WHERE true"#;

    /// How many they are; what is asked of them follows.
    count = r#"
SELECT count(*) AS rows FROM (SELECT 1 FROM {t}inbox_parked p WHERE true"#;

    /// A dead row that is to be replayed.
    replay_row = r#"
SELECT consumer_id, message_id, fingerprint, reason,
    body IS NOT NULL OR (body_kept AND reason <> 'body_too_large') AS body_kept
FROM {t}inbox_parked
WHERE seq = $1 AND state = 'dead'
FOR UPDATE"#;

    /// Another row with this content under this id.
    replay_other = r#"
SELECT 1
FROM {t}inbox_parked
WHERE consumer_id = $1 AND message_id = $2 AND seq <> $3
  AND (fingerprint = $4 OR (state = 'due' AND (fingerprint = '' OR $4 = '')))
LIMIT 1"#;

    /// Removes the claim of a key, unless somebody holds it.
    replay_claim = r#"
DELETE FROM {t}inbox_claims
WHERE consumer_id = $1 AND message_id = $2 AND (token IS NULL OR expires_at <= clock_timestamp())"#;

    /// Makes a dead row due, under this id.
    replay = r#"
UPDATE {t}inbox_parked
SET message_id = $2, due_at = clock_timestamp() + $3::bigint * interval '1 microsecond',
    attempts = 0, reason = $4, first_at = clock_timestamp(), parked_at = clock_timestamp(),
    state = 'due'
WHERE seq = $1"#;

    /// An entry of the audit.
    replay_audit = r#"
INSERT INTO {t}inbox_audit (actor, action, consumer_id, message_id, seq, replayed_as)
VALUES ($1, $2, $3, $4, $5, $6)"#;

    /// Empties dead rows and records it. Answers which.
    discard = r#"
WITH dead AS MATERIALIZED (
    SELECT seq FROM {t}inbox_parked
    WHERE seq = ANY ($1::bigint[]) AND state = 'dead'
    ORDER BY seq
    FOR UPDATE
), emptied AS (
    UPDATE {t}inbox_parked p
    SET state = 'discarded', body = NULL, body_kept = false, parked_at = clock_timestamp()
    FROM dead
    WHERE p.seq = dead.seq
    RETURNING p.seq, p.consumer_id, p.message_id
), told AS (
    INSERT INTO {t}inbox_audit (actor, action, consumer_id, message_id, seq)
    SELECT $2, $3, consumer_id, message_id, seq FROM emptied ORDER BY seq
)
SELECT seq FROM emptied"#;

    /// Entries of the audit, newest first.
    audit = r#"
SELECT id, actor, action, consumer_id, message_id, seq, replayed_as,
    (extract(epoch FROM clock_timestamp() - acted_at) * 1000000)::bigint AS ago_us
FROM {t}inbox_audit
WHERE id < $1
ORDER BY id DESC
LIMIT $2"#;

    /// Old entries of the audit.
    sweep_audit = r#"
DELETE FROM {t}inbox_audit
WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {t}inbox_audit
    WHERE acted_at < clock_timestamp() - $1::bigint * interval '1 microsecond'
    ORDER BY acted_at LIMIT $2 FOR UPDATE SKIP LOCKED))
RETURNING 1"#;
}
