-- Lanes, when a message was received first, and the audit of what operators do to dead letters.
-- DDL commits by itself here, and not every server knows ADD COLUMN IF NOT EXISTS: the table is
-- changed by one statement, which is left out where it has been done before a crash.
-- Indexes cannot be partial: those by state have it in front. first_at is null in rows of former
-- binaries: when they were parked counts. A body's length is a column, since a server reads the
-- whole body to tell it.

SET @change = IF(
    (SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE()
        AND table_name = '{p}inbox_parked' AND column_name = 'lane_id') > 0,
    'DO 0',
    'ALTER TABLE {p}inbox_parked
        MODIFY COLUMN subscription VARCHAR(255) NOT NULL,
        ADD COLUMN lane_id BINARY(16),
        ADD COLUMN first_at DATETIME(3),
        ADD COLUMN body_kept BOOLEAN NOT NULL DEFAULT TRUE,
        ADD COLUMN body_bytes BIGINT GENERATED ALWAYS AS (OCTET_LENGTH(body)) STORED,
        ADD KEY inbox_parked_lane (lane_id, state, seq),
        ADD KEY inbox_parked_due (subscription, consumer_id, state, lane_id, due_at),
        ADD KEY inbox_parked_state (state, seq),
        ADD KEY inbox_parked_first_at (state, first_at),
        DROP KEY inbox_parked_parked_at,
        ADD KEY inbox_parked_parked_at (state, parked_at)'
);
PREPARE change_parked FROM @change;
EXECUTE change_parked;
DEALLOCATE PREPARE change_parked;

-- Who replayed or discarded what; written in the transaction that does it.
CREATE TABLE IF NOT EXISTS {p}inbox_audit (
    id          BIGINT NOT NULL AUTO_INCREMENT,
    acted_at    DATETIME(3) NOT NULL,
    actor       VARBINARY(255) NOT NULL,
    action      VARCHAR(32) NOT NULL,
    consumer_id VARBINARY(128) NOT NULL,
    message_id  VARBINARY(512) NOT NULL,
    seq         BIGINT NOT NULL,
    replayed_as VARBINARY(512),
    PRIMARY KEY (id),
    KEY inbox_audit_acted_at (acted_at)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;
