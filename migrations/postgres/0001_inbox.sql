-- {t} stands for the schema (where one is configured) and the table prefix, {p} for the prefix.

-- The row exists <=> the message was processed. No state column, so no predicate can lie.
-- Ids compare by bytes: COLLATE "C". What does not fit is refused, never cut.
CREATE TABLE {t}inbox_messages (
    consumer_id    text COLLATE "C" NOT NULL CHECK (octet_length(consumer_id) BETWEEN 1 AND 128),
    message_id     text COLLATE "C" NOT NULL CHECK (octet_length(message_id) BETWEEN 1 AND 512),
    fingerprint    text COLLATE "C" CHECK (octet_length(fingerprint) <= 64),
    producer       text CHECK (octet_length(producer) <= 256),
    message_type   text CHECK (octet_length(message_type) <= 256),
    correlation_id text CHECK (octet_length(correlation_id) <= 256),
    causation_id   text CHECK (octet_length(causation_id) <= 256),
    processed_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_id, message_id)
);

CREATE INDEX {p}inbox_messages_processed_at ON {t}inbox_messages (processed_at);

-- Rights to forward, short-lived. A null token is free and only keeps the attempts.
-- expires_at has no index, so that renewals stay within the page (HOT); rows come and go so
-- fast that vacuum must not wait for a share of the table.
CREATE TABLE {t}inbox_claims (
    consumer_id text COLLATE "C" NOT NULL CHECK (octet_length(consumer_id) BETWEEN 1 AND 128),
    message_id  text COLLATE "C" NOT NULL CHECK (octet_length(message_id) BETWEEN 1 AND 512),
    owner       text NOT NULL,
    token       uuid,
    attempts    integer NOT NULL,
    expires_at  timestamptz NOT NULL,
    PRIMARY KEY (consumer_id, message_id)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

-- Full copies of messages: due at some time, dead, or discarded (the body emptied).
-- No fingerprint is stored as an empty one, since nulls never collide.
CREATE TABLE {t}inbox_parked (
    seq          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subscription text NOT NULL,
    consumer_id  text COLLATE "C" NOT NULL CHECK (octet_length(consumer_id) BETWEEN 1 AND 128),
    message_id   text COLLATE "C" NOT NULL CHECK (octet_length(message_id) BETWEEN 1 AND 512),
    fingerprint  text COLLATE "C" NOT NULL DEFAULT '' CHECK (octet_length(fingerprint) <= 64),
    position     text COLLATE "C",
    lane         bytea,
    envelope     text NOT NULL,
    body         bytea,
    attempts     integer NOT NULL,
    due_at       timestamptz,
    last_status  integer,
    last_error   text,
    parked_at    timestamptz NOT NULL DEFAULT now(),
    reason       text NOT NULL,
    state        text NOT NULL CHECK (state IN ('due', 'dead', 'discarded')),
    UNIQUE (consumer_id, message_id, fingerprint)
);

CREATE INDEX {p}inbox_parked_not_due ON {t}inbox_parked (parked_at) WHERE state <> 'due';

-- Small durable facts.
CREATE TABLE {t}inbox_notes (
    key   text COLLATE "C" NOT NULL PRIMARY KEY CHECK (octet_length(key) BETWEEN 1 AND 255),
    value text NOT NULL CHECK (octet_length(value) <= 1024)
);
