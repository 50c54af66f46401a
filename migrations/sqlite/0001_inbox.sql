-- The three tables of the inbox, and notes. {p} is the configured table prefix.
-- Text columns compare by bytes (SQLite's default collation); STRICT keeps a blob or a
-- number from standing beside the same text as another key.

CREATE TABLE {p}inbox_messages (
    consumer_id    TEXT NOT NULL,
    message_id     TEXT NOT NULL,
    fingerprint    TEXT,
    producer       TEXT,
    message_type   TEXT,
    correlation_id TEXT,
    causation_id   TEXT,
    processed_at   INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER)),
    PRIMARY KEY (consumer_id, message_id)
) STRICT, WITHOUT ROWID;

-- The sweep looks rows up by age.
CREATE INDEX {p}inbox_messages_processed_at ON {p}inbox_messages (processed_at);

-- No token: free, and kept for its attempts alone. Times are milliseconds since 1970.
CREATE TABLE {p}inbox_claims (
    consumer_id TEXT NOT NULL,
    message_id  TEXT NOT NULL,
    owner       TEXT NOT NULL,
    token       TEXT,
    attempts    INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL,
    PRIMARY KEY (consumer_id, message_id)
) STRICT, WITHOUT ROWID;

-- No fingerprint is the empty string, since NULLs never collide. AUTOINCREMENT: seq is the
-- order within a lane, so that a number is never used twice.
CREATE TABLE {p}inbox_parked (
    seq          INTEGER PRIMARY KEY AUTOINCREMENT,
    subscription TEXT NOT NULL,
    consumer_id  TEXT NOT NULL,
    message_id   TEXT NOT NULL,
    fingerprint  TEXT NOT NULL DEFAULT '',
    position     TEXT,
    lane         BLOB,
    envelope     TEXT NOT NULL,
    attempts     INTEGER NOT NULL,
    due_at       INTEGER,
    last_status  INTEGER,
    last_error   TEXT,
    parked_at    INTEGER NOT NULL,
    reason       TEXT NOT NULL,
    state        TEXT NOT NULL CHECK (state IN ('due', 'dead', 'discarded')),
    body         BLOB,
    UNIQUE (consumer_id, message_id, fingerprint)
) STRICT;

CREATE INDEX {p}inbox_parked_parked_at ON {p}inbox_parked (parked_at);

CREATE TABLE {p}inbox_notes (
    name  TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
