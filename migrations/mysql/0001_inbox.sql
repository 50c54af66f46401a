-- The three tables of the inbox, and notes. {p} is the configured table prefix.
-- DDL commits by itself here: every statement can run again after a crash half-way.
-- Ids are VARBINARY, so that they compare by bytes: no folding, no padding. Times are UTC.

CREATE TABLE IF NOT EXISTS {p}inbox_messages (
    consumer_id    VARBINARY(128) NOT NULL,
    message_id     VARBINARY(512) NOT NULL,
    fingerprint    VARBINARY(64),
    producer       VARCHAR(256),
    message_type   VARCHAR(256),
    correlation_id VARCHAR(256),
    causation_id   VARCHAR(256),
    processed_at   DATETIME(3) NOT NULL DEFAULT (UTC_TIMESTAMP(3)),
    PRIMARY KEY (consumer_id, message_id),
    KEY inbox_messages_processed_at (processed_at)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- No token: free, and kept for its attempts alone.
CREATE TABLE IF NOT EXISTS {p}inbox_claims (
    consumer_id VARBINARY(128) NOT NULL,
    message_id  VARBINARY(512) NOT NULL,
    owner       VARBINARY(128) NOT NULL,
    token       BINARY(16),
    attempts    INT NOT NULL,
    expires_at  DATETIME(3) NOT NULL,
    PRIMARY KEY (consumer_id, message_id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- No fingerprint is the empty string, since NULLs never collide.
CREATE TABLE IF NOT EXISTS {p}inbox_parked (
    seq          BIGINT NOT NULL AUTO_INCREMENT,
    subscription TEXT NOT NULL,
    consumer_id  VARBINARY(128) NOT NULL,
    message_id   VARBINARY(512) NOT NULL,
    fingerprint  VARBINARY(64) NOT NULL DEFAULT '',
    position     TEXT,
    lane         LONGBLOB,
    envelope     LONGTEXT NOT NULL,
    attempts     INT NOT NULL,
    due_at       DATETIME(3),
    last_status  SMALLINT UNSIGNED,
    last_error   TEXT,
    parked_at    DATETIME(3) NOT NULL,
    reason       VARCHAR(32) NOT NULL,
    state        VARCHAR(16) NOT NULL,
    body         LONGBLOB,
    PRIMARY KEY (seq),
    UNIQUE KEY inbox_parked_message (consumer_id, message_id, fingerprint),
    KEY inbox_parked_parked_at (parked_at)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS {p}inbox_notes (
    name  VARBINARY(255) NOT NULL,
    value VARBINARY(1024) NOT NULL,
    PRIMARY KEY (name)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;
