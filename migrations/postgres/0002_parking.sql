-- Lanes, when a message was received first, and the audit of what operators do to dead letters.
-- Breaking: an older binary does not see due rows, and would forward their messages again.
ALTER TABLE {t}inbox_parked
    ADD COLUMN lane_id   bytea CHECK (octet_length(lane_id) = 16),
    ADD COLUMN first_at  timestamptz NOT NULL DEFAULT now(),
    -- False: the body was not stored, or is gone. A tombstone has none and is kept.
    ADD COLUMN body_kept boolean NOT NULL DEFAULT true;

UPDATE {t}inbox_parked
SET first_at = parked_at,
    body_kept = body IS NOT NULL OR (state <> 'discarded' AND reason <> 'body_too_large');

-- Due rows outside of lanes, by their time.
CREATE INDEX {p}inbox_parked_loose ON {t}inbox_parked (consumer_id, subscription, due_at)
    WHERE state = 'due' AND lane_id IS NULL;
-- Lane by lane, each from its head.
CREATE INDEX {p}inbox_parked_lanes ON {t}inbox_parked (consumer_id, subscription, lane_id, seq)
    WHERE lane_id IS NOT NULL AND state <> 'discarded';
-- Whether a lane is blocked.
CREATE INDEX {p}inbox_parked_lane ON {t}inbox_parked (lane_id)
    WHERE lane_id IS NOT NULL AND state <> 'discarded';
-- How many are due, and since when. Not a partial index: one with that condition alone would be
-- scanned whole by statements that name a few due rows, where they were planned on an empty table.
CREATE INDEX {p}inbox_parked_due_first ON {t}inbox_parked
    ((CASE WHEN state = 'due' THEN first_at END));
-- Pages of dead letters.
CREATE INDEX {p}inbox_parked_pages ON {t}inbox_parked (seq) WHERE state <> 'due';

-- Who replayed or discarded what; written in the transaction that does it.
CREATE TABLE {t}inbox_audit (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    acted_at    timestamptz NOT NULL DEFAULT now(),
    actor       text NOT NULL CHECK (octet_length(actor) <= 255),
    action      text NOT NULL,
    consumer_id text COLLATE "C" NOT NULL,
    message_id  text COLLATE "C" NOT NULL,
    seq         bigint NOT NULL,
    replayed_as text COLLATE "C"
);

CREATE INDEX {p}inbox_audit_acted_at ON {t}inbox_audit (acted_at);
