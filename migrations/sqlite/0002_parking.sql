-- Lanes, when a message was received first, and the audit of what operators do to dead letters.
-- The table is made anew, so that its bodies stay last: what stands behind a body is read through
-- all of its pages. Rows keep their seq, and no number is ever used twice.

CREATE TABLE {p}inbox_parked_2 (
    seq          INTEGER PRIMARY KEY AUTOINCREMENT,
    subscription TEXT NOT NULL,
    consumer_id  TEXT NOT NULL,
    message_id   TEXT NOT NULL,
    fingerprint  TEXT NOT NULL DEFAULT '',
    position     TEXT,
    lane         BLOB,
    lane_id      BLOB,
    envelope     TEXT NOT NULL,
    attempts     INTEGER NOT NULL,
    due_at       INTEGER,
    last_status  INTEGER,
    last_error   TEXT,
    first_at     INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER)),
    parked_at    INTEGER NOT NULL,
    reason       TEXT NOT NULL,
    state        TEXT NOT NULL CHECK (state IN ('due', 'dead', 'discarded')),
    -- False: the body was not stored, or is gone. A tombstone has none and is kept.
    body_kept    INTEGER NOT NULL DEFAULT 1,
    body         BLOB,
    UNIQUE (consumer_id, message_id, fingerprint)
) STRICT;

INSERT INTO {p}inbox_parked_2 (seq, subscription, consumer_id, message_id, fingerprint, position,
    lane, envelope, attempts, due_at, last_status, last_error, first_at, parked_at, reason, state,
    body_kept, body)
SELECT seq, subscription, consumer_id, message_id, fingerprint, position, lane, envelope, attempts,
    due_at, last_status, last_error, parked_at, parked_at, reason, state,
    body IS NOT NULL OR (state <> 'discarded' AND reason <> 'body_too_large'), body
FROM {p}inbox_parked;

DELETE FROM sqlite_sequence WHERE name = '{p}inbox_parked_2';
INSERT INTO sqlite_sequence (name, seq)
SELECT '{p}inbox_parked_2', seq FROM sqlite_sequence WHERE name = '{p}inbox_parked';

DROP TABLE {p}inbox_parked;
ALTER TABLE {p}inbox_parked_2 RENAME TO {p}inbox_parked;

-- What blocks a lane, and its head.
CREATE INDEX {p}inbox_parked_lane ON {p}inbox_parked (lane_id, seq)
    WHERE lane_id IS NOT NULL AND state <> 'discarded';
-- Lane by lane, whatever waits in each.
CREATE INDEX {p}inbox_parked_lanes ON {p}inbox_parked (subscription, consumer_id, lane_id)
    WHERE lane_id IS NOT NULL AND state = 'due';
-- Due rows outside of lanes, by their time.
CREATE INDEX {p}inbox_parked_due ON {p}inbox_parked (subscription, consumer_id, due_at)
    WHERE lane_id IS NULL AND state = 'due';
-- Rows of a state in their order, and how many there are.
CREATE INDEX {p}inbox_parked_state ON {p}inbox_parked (state);
-- The oldest of them.
CREATE INDEX {p}inbox_parked_first_at ON {p}inbox_parked (first_at) WHERE state = 'due';
CREATE INDEX {p}inbox_parked_parked_at ON {p}inbox_parked (state, parked_at) WHERE state <> 'due';

CREATE TABLE {p}inbox_audit (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    acted_at    INTEGER NOT NULL,
    actor       TEXT NOT NULL,
    action      TEXT NOT NULL,
    consumer_id TEXT NOT NULL,
    message_id  TEXT NOT NULL,
    seq         INTEGER NOT NULL,
    replayed_as TEXT
) STRICT;

CREATE INDEX {p}inbox_audit_acted_at ON {p}inbox_audit (acted_at);
