//! Every key there is.
//!
//! The order is that of the reference. A group is read by the module of its name; the pairs of
//! words and meanings that a choice is read by stand there.

use std::time::Duration;

use super::address::BrokerKind::{Kafka, RabbitMq};
use super::declare::{Group, Key, Kind, words};
use super::units::{GIB, KIB, MIB, days, minutes, seconds};
use super::{broker, callback, failure, forms, identity, process, routes, subscription};

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn duration(default: Duration, least: Duration, most: Duration) -> Kind {
    Kind::Duration { default: Some(default), least, most }
}

const fn duration_or_otel(least: Duration, most: Duration) -> Kind {
    Kind::Duration { default: None, least, most }
}

const fn count(default: u64, least: u64, most: u64) -> Kind {
    Kind::Count { default: Some(default), least, most }
}

const fn size(default: u64, least: u64, most: u64) -> Kind {
    Kind::Size { default, least, most }
}

const fn switch(default: bool) -> Kind {
    Kind::Switch { default: Some(default) }
}

const fn choice(default: &'static str, words: &'static [&'static str]) -> Kind {
    Kind::Choice { default: Some(default), words }
}

const fn list(entry: &'static super::declare::Form, most: usize) -> Kind {
    Kind::List { entry, most, gather: forms::as_they_are }
}

/// The value of a header.
static HEADER_VALUE: Kind = Kind::Secret(&forms::HEADER_VALUE);

const fn headers(names: &'static super::declare::Form) -> Kind {
    Kind::Values { most: 64, names, join: "-", value: &HEADER_VALUE }
}

pub(super) static ROOT: Group = Group {
    apart: true,
    keys: &[
        Key::new(
            "shutdown_grace",
            duration(seconds(25), millis(100), minutes(60)),
            "from SIGTERM to the end",
        ),
        Key::new(
            "stale_after",
            duration(seconds(60), seconds(5), minutes(60)),
            "an inner loop that has not turned for so long makes `/livez` false",
        ),
        Key::new(
            "shared_consumer_ids",
            list(&forms::CONSUMER_ID, 256),
            "consumer ids that subscriptions with *different* callbacks may share: each message reaches only one of them",
        ),
        Key::new("admin", Kind::Table(&ADMIN), "the operators' listener"),
        Key::new("health", Kind::Table(&HEALTH), "a listener for probes and metrics alone"),
        Key::new("log", Kind::Table(&LOG), "log lines"),
        Key::new(
            "telemetry",
            Kind::Table(&TELEMETRY),
            "traces and metrics over OTLP; what is not set here is taken from the `OTEL_*` variables",
        ),
        Key::new("database", Kind::Table(&DATABASE), "the inbox"),
        Key::new("broker", Kind::Tables { most: 256, group: &BROKER }, "brokers by name"),
        Key::new(
            "subscription",
            Kind::Tables { most: 256, group: &SUBSCRIPTION },
            "subscriptions by name",
        ),
    ],
};

static ADMIN: Group = Group {
    apart: false,
    keys: &[
        Key::new("listen", Kind::Text(&forms::LISTEN), "`/livez`, `/readyz`, `/metrics` and what operators ask; beyond loopback it wants a token").unset("127.0.0.1:7461"),
        Key::new("token", Kind::Secret(&forms::TOKEN), "asked for as `Authorization: Bearer …`"),
        Key::new("tls", Kind::Table(&SERVER_TLS), "HTTPS instead of HTTP"),
    ],
};

static SERVER_TLS: Group = Group {
    apart: false,
    keys: &[
        Key::new(
            "cert_file",
            Kind::PemFile,
            "the listener's certificate chain: HTTPS instead of HTTP; with `key_file`",
        ),
        Key::new("key_file", Kind::PemFile, "its key; with `cert_file`"),
    ],
};

static HEALTH: Group = Group {
    apart: false,
    keys: &[Key::new(
        "listen",
        Kind::Text(&forms::LISTEN),
        "`/livez`, `/readyz` and `/metrics` without a token, for kubelet and Prometheus",
    )
    .unset("off")],
};

static LOG: Group = Group {
    apart: false,
    keys: &[
        Key::new("format", choice("auto", &words(&process::LOG_FORMATS)), "auto: human on a terminal, else JSON"),
        Key::new("level", Kind::Text(&forms::LOG_LEVEL), "a plain `info`, `warn` or `error` leaves out the AMQP library's own words; `RUST_LOG` where it is not set").unset("info"),
    ],
};

static TELEMETRY: Group = Group {
    apart: true,
    keys: &[
        Key::new(
            "endpoint",
            Kind::Text(&forms::ENDPOINT),
            "base URL of an OTLP/HTTP collector; `/v1/traces` and `/v1/metrics` are appended",
        ),
        Key::new("traces", Kind::Switch { default: None }, "whether traces are sent")
            .unset("true with an endpoint"),
        Key::new("metrics", Kind::Switch { default: None }, "whether metrics are sent")
            .unset("true with an endpoint"),
        Key::new("headers", headers(&forms::EXPORT_HEADER), "sent with each export"),
        Key::new("service_name", Kind::Text(&forms::NAME_255), "`service.name`").unset("inboxd"),
        Key::new(
            "sample_ratio",
            Kind::Number { default: None, least: 0.0, most: 1.0 },
            "of the traces that begin here",
        )
        .unset("1"),
        Key::new(
            "metrics_interval",
            duration_or_otel(seconds(1), minutes(60)),
            "how often metrics are sent",
        )
        .unset("60s"),
        Key::new("timeout", duration_or_otel(millis(100), minutes(1)), "one export").unset("10s"),
    ],
};

static DATABASE: Group = Group {
    apart: true,
    keys: &[
        Key::new(
            "url",
            Kind::Secret(&forms::DATABASE),
            "`sqlite:FILE`, `postgres://…`, `mysql://…` (MariaDB too)",
        )
        .unset("sqlite:inbox.db"),
        Key::new("password", Kind::Secret(&forms::SECRET), "put into the URL"),
        Key::new(
            "migrate_url",
            Kind::Secret(&forms::DATABASE),
            "used for migrations, where they need more rights; a server of the same kind",
        )
        .unset("the same as `url`"),
        Key::new("migrate_password", Kind::Secret(&forms::SECRET), "put into `migrate_url`"),
        Key::new(
            "retention",
            duration(days(14), seconds(1), days(3_650)),
            "how long a processed message is known; longer than the broker can redeliver",
        )
        .limits("at least the lease"),
        Key::new(
            "dead_retention",
            duration(days(90), seconds(1), days(3_650)),
            "how long dead letters are kept",
        )
        .limits("at least the lease"),
        Key::new(
            "sweep_interval",
            duration(minutes(10), millis(100), days(7)),
            "how often old rows are deleted",
        ),
        Key::new("pool_max", count(4, 1, 256), "connections, beside the one that renews leases"),
        Key::new(
            "schema",
            Kind::Text(&forms::SCHEMA),
            "PostgreSQL's schema; MySQL's database instead of the URL's",
        ),
        Key::new("table_prefix", Kind::Text(&forms::TABLE_PREFIX), "before each table's name"),
        Key::new(
            "prepared_statements",
            switch(true),
            "PostgreSQL: false behind a pooler that does not know them",
        ),
        Key::new(
            "allow_weak_durability",
            switch(false),
            "MySQL: take a server that does not flush at commit",
        ),
    ],
};

static BROKER: Group = Group {
    apart: true,
    keys: &[
        Key::new(
            "url",
            Kind::Secret(&forms::BROKER_URL),
            "hosts with commas, or with scheme, user, password and vhost",
        )
        .unset("required"),
        Key::new(
            "kind",
            Kind::Choice { default: None, words: &words(&broker::KINDS) },
            "which broker",
        )
        .unset("from the URL's scheme"),
        Key::new(
            "user",
            Kind::Text(&forms::NAME_255),
            "on Kafka SASL PLAIN, unless `properties` say otherwise",
        )
        .unset("guest on RabbitMQ; required with `password`"),
        Key::new("password", Kind::Secret(&forms::SECRET), "of `user`")
            .unset("guest on RabbitMQ; required with `user`"),
        Key::new("vhost", Kind::Text(&forms::NAME_255), "not percent-encoded")
            .unset("/")
            .only(RabbitMq),
        Key::new("tls", Kind::SwitchOrTable(&TLS), "a table of files turns it on too")
            .unset("false"),
        Key::new(
            "heartbeat",
            duration(seconds(10), seconds(1), minutes(10)),
            "a peer that is silent for two and a half is lost",
        )
        .limits("whole seconds")
        .only(RabbitMq),
        Key::new(
            "properties",
            Kind::Values {
                most: 256,
                names: &forms::PROPERTY,
                join: ".",
                value: &Kind::Secret(&forms::PROPERTY_VALUE),
            },
            "librdkafka's, by their names",
        )
        .only(Kafka),
    ],
};

static TLS: Group = Group {
    apart: false,
    keys: &[
        Key::new("ca_file", Kind::PemFile, "authorities to trust").unset("the system's roots"),
        Key::new("cert_file", Kind::PemFile, "the client's certificate chain; with `key_file`"),
        Key::new("key_file", Kind::PemFile, "the client's key; with `cert_file`"),
    ],
};

pub(super) static SUBSCRIPTION: Group = Group {
    apart: true,
    keys: &[
        Key::new("callback", Kind::Text(&forms::CALLBACK), "`http://…`, `https://…` or `unix:/path.sock:/route`, without credentials").unset("required"),
        Key::new("consumer_id", Kind::Text(&forms::CONSUMER_ID), "half of the deduplication key: stable across deploys").unset("the group or queue"),
        Key::new("source", Kind::Table(&SOURCE), "where it consumes").unset("required"),
        Key::new("ordering", choice("none", &words(&identity::ORDERINGS)), "one message at a time per key, or per partition or queue"),
        Key::new("ordering_key", Kind::Text(&forms::ORDERING_KEY), "required with `ordering = \"key\"` on RabbitMQ").unset("record-key on Kafka"),
        Key::new("delivery", choice("direct", &words(&failure::DELIVERIES)), "stored: a message is parked on arrival and acked at once, and forwarded from the database"),
        Key::new("message_id", Kind::List { entry: &forms::EXTRACTOR, most: 16, gather: identity::join_hashes }, "the first that yields a value").unset("property, header:message-id, cloudevents; on Kafka kafka-position last"),
        Key::new("scope_by_producer", switch(false), "ids are prefixed by the message's producer"),
        Key::new("fingerprint", Kind::Text(&forms::FINGERPRINT), "what tells two contents of one id apart; ids from `hash:` and `kafka-key` have none").unset("body"),
        Key::new("on_id_conflict", choice("dead_letter", &words(&identity::ON_ID_CONFLICT)), "the same id with another fingerprint"),
        Key::new("on_missing_id", choice("dead_letter", &words(&identity::ON_MISSING_ID)), "not set: the subscription pauses if no message ever carried an id"),
        Key::new("concurrency", count(16, 1, 4_096), "POSTs at once"),
        Key::new("adaptive_concurrency", switch(true), "POSTs at once follow how the application copes, up to `concurrency`"),
        Key::new("rate", Kind::Number { default: None, least: 0.01, most: 1_000_000.0 }, "POSTs begun in a second").unset("no limit"),
        Key::new("in_flight_max", count(1_024, 1, 1_000_000), "deliveries taken and not settled").limits("at least `concurrency`"),
        Key::new("in_flight_bytes_max", size(64 * MIB, 64 * KIB, 64 * GIB), "their size; a larger delivery takes all of it, alone"),
        Key::new("body_bytes_max", size(16 * MIB, 1, GIB), "a larger body becomes a dead letter without its body; never above what the database takes"),
        Key::new("offset_span_max", count(100_000, 1, 10_000_000), "records above the lowest unsettled one before the partition is paused").only(Kafka),
        Key::new("callback_timeout", duration(seconds(30), millis(10), minutes(60)), "one attempt, response included"),
        Key::new("connect_timeout", duration(seconds(5), millis(10), minutes(5)), "until a connection is open").limits("at most `callback_timeout`"),
        Key::new("callback_http2", switch(false), "HTTP/2 without asking, on `http://` and `unix:`"),
        Key::new("lease", duration(seconds(15), millis(500), minutes(10)), "a claim's life, renewed at a third; the longest of all subscriptions holds for the process").limits("MySQL from 5s"),
        Key::new("hold_max", duration(minutes(10), millis(100), days(1)), "a delivery that is held for so long is parked; one of a halted lane stays held, and says so"),
        Key::new("retry", Kind::Table(&RETRY), "attempts in place"),
        Key::new("park", Kind::Table(&PARK), "attempts from the database"),
        Key::new("on_blocked_lane", Kind::Choice { default: None, words: &words(&failure::ON_BLOCKED_LANE) }, "what follows a parked message of its lane is parked behind it, skips it (out of order), or is held until it is gone").unset("park; halt with `ordering = \"partition\"`").limits("only with `ordering`"),
        Key::new("on_dead_letter", choice("continue", &words(&failure::ON_DEAD_LETTER)), "halt: a dead letter blocks its lane until it is replayed or discarded").limits("halt only with `ordering`"),
        Key::new("breaker", Kind::Table(&BREAKER), "rests for an application that fails"),
        Key::new("health_url", Kind::Text(&forms::CALLBACK), "asked with GET, like `callback`: nothing is consumed before it answers 2xx, nor while it does not").unset("nobody asks"),
        Key::new("health_interval", duration(seconds(5), millis(50), minutes(10)), "how often it is asked").limits("only with `health_url`"),
        Key::new("dead_letter", Kind::Table(&DEAD_LETTER), "where dead letters go"),
        Key::new("headers", Kind::Table(&HEADERS), "headers of the request"),
        Key::new("tls", Kind::Table(&TLS), "of an `https` callback"),
        Key::new("contract", choice("plain", &words(&callback::CONTRACTS)), "dapr: after a 2xx the body's `status` decides"),
        Key::new("status_map", Kind::Values { most: 64, names: &forms::STATUS, join: "_", value: &Kind::Choice { default: None, words: &words(&callback::VERDICTS) } }, "what a status is made to mean; a code wins over its class"),
        Key::new("signing", Kind::Table(&SIGNING), "Standard Webhooks"),
        Key::new("route", Kind::Tables { most: 256, group: &ROUTE }, "which messages go to which path; tried in the order of their names, byte by byte: the first that matches wins"),
        Key::new("on_unrouted", choice("dead_letter", &words(&routes::ON_UNROUTED)), "what no route matches; forward: to `callback` itself").limits("only with a route"),
    ],
};

static RETRY: Group = Group {
    apart: false,
    keys: &[
        Key::new(
            "initial",
            duration(millis(200), millis(1), minutes(60)),
            "the first delay's upper bound",
        ),
        Key::new("factor", FACTOR, "each next bound is this much larger"),
        Key::new(
            "cap",
            duration(seconds(30), millis(1), days(1)),
            "the largest bound, of `Retry-After` too",
        )
        .limits("at least `retry.initial`"),
        Key::new("jitter", JITTER, "full: anything between nothing and the bound"),
        Key::new("attempts_max", count(5, 1, 1_000), "then the message is parked"),
        Key::new(
            "elapsed_max",
            duration(minutes(2), millis(1), days(1)),
            "since it was received; then it is parked",
        ),
    ],
};

static PARK: Group = Group {
    apart: false,
    keys: &[
        Key::new(
            "initial",
            duration(seconds(30), millis(1), days(1)),
            "the first delay's upper bound",
        ),
        Key::new("factor", FACTOR, "each next bound is this much larger"),
        Key::new(
            "cap",
            duration(minutes(60), millis(1), days(30)),
            "the largest bound, of `Retry-After` too",
        )
        .limits("at least `park.initial`"),
        Key::new("jitter", JITTER, "full: anything between nothing and the bound"),
        Key::new(
            "attempts_max",
            count(20, 1, 100_000),
            "all POSTs of a message, those in place included; then it is a dead letter",
        )
        .limits("at least `retry.attempts_max`"),
        Key::new(
            "elapsed_max",
            duration(days(3), millis(1), days(365)),
            "since it was first received; then it is a dead letter",
        ),
    ],
};

const FACTOR: Kind = Kind::Number { default: Some(2.0), least: 1.0, most: 100.0 };
const JITTER: Kind = choice("full", &words(&failure::JITTERS));

static BREAKER: Group = Group {
    apart: false,
    keys: &[
        Key::new(
            "failures",
            count(10, 0, 1_000_000),
            "of the application, in a row, that open it; 0: never",
        ),
        Key::new(
            "probe_initial",
            duration(seconds(1), millis(10), minutes(60)),
            "from its opening to the first probe; doubled after each one that fails",
        ),
        Key::new(
            "probe_cap",
            duration(seconds(30), millis(10), days(1)),
            "the longest time between two probes",
        )
        .limits("at least `breaker.probe_initial`"),
    ],
};

static DEAD_LETTER: Group = Group {
    apart: true,
    keys: &[
        Key::new(
            "to",
            choice("table", &words(&failure::DEAD_LETTER_TO)),
            "broker: published, confirmed and routed, and the table keeps a row without the body; both: the row is whole",
        ),
        Key::new("broker", Kind::Text(&forms::TABLE_NAME), "the name of a `[broker.NAME]`, of either kind")
            .unset("the source's"),
        Key::new("topic", Kind::Text(&forms::TOPIC_NAME), "must exist; not one that the subscription consumes")
            .unset("required")
            .only(Kafka),
        Key::new("exchange", Kind::Text(&forms::NAME_255), "must exist, and route every dead letter to a queue")
            .unset("the default one")
            .only(RabbitMq),
        Key::new("routing_key", Kind::Text(&forms::NAME_255), "with the default exchange the queue itself; not the one that the subscription consumes")
            .unset("the message's own; required without `exchange`")
            .only(RabbitMq),
    ],
};

static HEADERS: Group = Group {
    apart: false,
    keys: &[
        Key::new(
            "copy",
            list(&forms::HEADER_NAME, 256),
            "which headers of a message are copied: all, none, or these",
        )
        .unset("all"),
        Key::new(
            "prefix",
            Kind::Text(&forms::HEADER_PREFIX),
            "before their names; empty only with named headers",
        )
        .unset("Inbox-Header-"),
        Key::new(
            "set",
            headers(&forms::SET_HEADER),
            "sent with every request, `Authorization` too; names of the contract are refused",
        ),
    ],
};

static SIGNING: Group = Group {
    apart: false,
    keys: &[Key::new(
        "secrets",
        Kind::Secrets { twin: "secret_files", entry: &forms::SIGNING_SECRET, most: 16 },
        "all sign, the first one first",
    )],
};

static ROUTE: Group = Group {
    apart: true,
    keys: &[
        Key::new("type", Kind::Text(&forms::PATTERN), "of the message's type").unset("any"),
        Key::new("routing_key", Kind::Text(&forms::PATTERN), "of the message's routing key")
            .unset("any")
            .only(RabbitMq),
        Key::new("header", Kind::Text(&forms::HEADER_PATTERN), "a header of the message")
            .unset("any"),
        Key::new("path", Kind::Text(&forms::PATH), "path and query instead of the callback's own")
            .unset("required"),
    ],
};

pub(super) static SOURCE: Group = Group {
    apart: true,
    keys: &[
        Key::new("broker", Kind::Text(&forms::TABLE_NAME), "the name of a `[broker.NAME]`").unset("the only one"),
        Key::new("queue", Kind::Text(&forms::NAME_255), "the queue").unset("required").only(RabbitMq),
        Key::new("prefetch", Kind::Count { default: None, least: 1, most: 65_535 }, "unsettled deliveries at once").unset("2 × concurrency").only(RabbitMq),
        Key::new("declare", choice("false", &words(&subscription::DECLARE)), "true is quorum; false: the queue exists, or is waited for").only(RabbitMq),
        Key::new("single_active_consumer", switch(false), "the queue is one; needed for `ordering` on a quorum queue").only(RabbitMq),
        Key::new("queue_kind", Kind::Choice { default: None, words: &words(&subscription::QUEUE_KINDS) }, "for `ordering` where the user may not ask").unset("asked of the broker").only(RabbitMq),
        Key::new("topics", list(&forms::TOPIC, 1_000), "names, or regular expressions that begin with `^`").unset("required").only(Kafka),
        Key::new("topic_pattern", Kind::Text(&forms::NAME_1024), "a regular expression").only(Kafka),
        Key::new("group", Kind::Text(&forms::NAME_255), "the consumer group").unset("the consumer id").only(Kafka),
        Key::new("start", choice("earliest", &words(&subscription::STARTS)), "where a group begins. latest passes over what a topic held when the group first saw it (noted in the inbox database) and nothing else: partitions and topics that come later are read from their beginning, and a partition whose committed offset retention has overtaken from the oldest record left, loudly, under earliest and latest alike; refuse ends the subscription in both cases").only(Kafka),
        Key::new("commit_interval", duration(seconds(1), millis(10), minutes(1)), "how often changed offsets are committed").only(Kafka),
    ],
};
