//! The API's routes, declared: the router and the OpenAPI document are made from this list.

use axum::Router;
use axum::http::Method;
use axum::routing::{MethodRouter, get, patch, post};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::api::{self, Api};
use super::fields::{Field, Kind};
use super::letters::{
    AuditPage, DiscardAnswer, LetterWhole, ParkedPage, ROWS_MAX, ReplayAnswer, SPREAD_MAX,
    all_reasons, dead_reasons,
};
use super::message::MessageReport;
use super::operator::{DrainAnswer, Status, SubscriptionStatus, Subscriptions};

/// One method of one path.
pub(super) struct Route {
    pub(super) method: Method,
    /// As the document has it.
    pub(super) path: &'static str,
    /// As the router has it, where that is not the same.
    router_path: Option<&'static str>,
    pub(super) id: &'static str,
    pub(super) tag: &'static str,
    pub(super) summary: &'static str,
    pub(super) about: &'static str,
    pub(super) in_path: &'static [Field],
    pub(super) query: &'static [Field],
    pub(super) body: Option<Body>,
    /// It changes something: who is told by `Inbox-Actor`.
    pub(super) is_change: bool,
    pub(super) answer: Answer,
    /// Beside those that every route has: status, codes and what they mean.
    pub(super) problems: &'static [(u16, &'static str)],
    serve: fn() -> MethodRouter<Api>,
}

/// The JSON object that a request carries.
pub(super) struct Body {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    pub(super) fields: &'static [Field],
    pub(super) is_patch: bool,
}

/// The 200 of a route.
pub(super) enum Answer {
    /// JSON of this type.
    Json(SchemaOf),
    /// As [`Answer::Json`], or bytes.
    JsonOrBytes(SchemaOf),
    /// This document.
    Document,
}

/// A schema, its name, and those that it refers to.
pub(super) struct SchemaOf {
    pub(super) name: fn() -> String,
    pub(super) schema: fn() -> RefOr<Schema>,
    pub(super) others: fn(&mut Vec<(String, RefOr<Schema>)>),
}

const fn of<T: ToSchema + PartialSchema>() -> SchemaOf {
    SchemaOf {
        name: || T::name().into_owned(),
        schema: || T::schema(),
        others: |all| T::schemas(all),
    }
}

/// Characters of a message id that is asked for: each may take 12 bytes of a head that has 16 KiB.
const ID_MOST: usize = 512;
pub(super) const CONCURRENCY_MAX: i64 = 4_096;
pub(super) const RATE_MAX: f64 = 1_000_000.0;
const RATE_LEAST: f64 = 0.001;

const ID: Field = Field::new(
    "id",
    Kind::Id { most: ID_MOST },
    "The message id, as the publisher set it or as the application has it in `Inbox-Message-Id`. \
     In a query, `+` is a plus.",
);
const CONSUMER_ID: Field =
    Field::new("consumer_id", Kind::Text { most: 128 }, "Of this consumer id.");
const SUBSCRIPTION: Field =
    Field::new("subscription", Kind::Text { most: 128 }, "Of the subscription of this name.");
const DEAD_REASON: Field =
    Field::new("reason", Kind::Choice(dead_reasons), "Why the message is a dead letter.");
const SINCE: Field = Field::new(
    "since",
    Kind::Time,
    "In their state since then or later. Compared with the age by the database's clock, taken from \
     the time of this request.",
);
const UNTIL: Field = Field::new(
    "until",
    Kind::Time,
    "In their state since then or earlier; with `since`, not before it.",
);
const ERROR: Field = Field::new(
    "error",
    Kind::Text { most: 256 },
    "With this text in the last error, byte for byte.",
);
const AFTER: Field = Field::new(
    "after",
    Kind::Integer { least: 0, most: i64::MAX },
    "Those behind this `seq`: the `next` of the page before.",
);
const LIMIT: Field = Field::new(
    "limit",
    Kind::Integer { least: 1, most: ROWS_MAX as i64 },
    "So many at most; 100 where it is not given.",
);
const COUNT: Field =
    Field::new("count", Kind::Flag, "Also counts what the filter finds, up to 100,000.");
const SEQ: Field =
    Field::new("seq", Kind::Integer { least: 1, most: i64::MAX }, "The row's key.").needed();
const NAME: Field =
    Field::new("name", Kind::Text { most: 128 }, "The subscription's name.").needed();
const SEQS: Field = Field::new(
    "seqs",
    Kind::Seqs { most: ROWS_MAX as usize },
    "These rows, and no filter beside them.",
);
const ALL: Field =
    Field::new("all", Kind::Flag, "Every dead letter is meant: needed where there is no filter.");
const DRY_RUN: Field =
    Field::new("dry_run", Kind::Flag, "Changes nothing; answers what would be changed.");

fn row_states() -> Vec<&'static str> {
    vec!["due", "dead", "discarded", "any"]
}

fn letter_states() -> Vec<&'static str> {
    vec!["dead", "discarded", "any"]
}

static FILTERED: &[Field] = &[
    CONSUMER_ID,
    SUBSCRIPTION,
    ID,
    Field::new("reason", Kind::Choice(all_reasons), "Why the message is parked or dead."),
    Field::new("state", Kind::Choice(row_states), "What the row is; `due` where it is not given."),
    SINCE,
    UNTIL,
    ERROR,
    AFTER,
    LIMIT,
    COUNT,
];

static FILTERED_DEAD: &[Field] = &[
    CONSUMER_ID,
    SUBSCRIPTION,
    ID,
    DEAD_REASON,
    Field::new(
        "state",
        Kind::Choice(letter_states),
        "What the row is; `dead` where it is not given.",
    ),
    SINCE,
    UNTIL,
    ERROR,
    AFTER,
    LIMIT,
    COUNT,
];

static REPLAYED: &[Field] = &[
    SEQS,
    CONSUMER_ID,
    SUBSCRIPTION,
    ID,
    DEAD_REASON,
    SINCE,
    UNTIL,
    ERROR,
    ALL,
    DRY_RUN,
    AFTER,
    LIMIT,
    Field::new(
        "rate",
        Kind::Number { least: RATE_LEAST, most: RATE_MAX },
        "Messages that become due in a second: their times are spread, in the database, whoever \
         forwards them. At once where it is not given.",
    ),
    Field::new(
        "delay_ms",
        Kind::Integer { least: 0, most: SPREAD_MAX.as_millis() as i64 },
        "When the first becomes due: the `next.delay_ms` of the answer before.",
    ),
    Field::new(
        "allow_processed",
        Kind::Flag,
        "Forwards messages that are processed too, under ids of their own; the audit names it.",
    ),
];

static DISCARDED: &[Field] = &[
    SEQS,
    CONSUMER_ID,
    SUBSCRIPTION,
    ID,
    DEAD_REASON,
    SINCE,
    UNTIL,
    ERROR,
    ALL,
    DRY_RUN,
    AFTER,
    LIMIT,
];

static LIMITS: &[Field] = &[
    Field::new(
        "concurrency",
        Kind::Integer { least: 1, most: CONCURRENCY_MAX },
        "Concurrent POSTs.",
    ),
    Field::new(
        "rate",
        Kind::NumberOrNull { least: RATE_LEAST, most: RATE_MAX },
        "POSTs begun in a second; null: as many as there are.",
    ),
];

static NO_SUBSCRIPTION: &[(u16, &str)] = &[
    (404, "`unknown_subscription`: there is none of this name."),
    (409, "`not_running`: it has not begun yet, or has ended."),
];
const AWAY: (u16, &str) =
    (503, "`inbox_unavailable`: the database cannot be used, or is not open yet.");
const SENSELESS: (u16, &str) =
    (422, "`senseless`: each field is well-formed, and together or here they mean nothing.");

/// All of them.
pub(super) static ROUTES: &[Route] = &[
    Route {
        method: Method::GET,
        path: "/v1/openapi.json",
        router_path: None,
        id: "openapi",
        tag: "process",
        summary: "This document",
        about: "OpenAPI 3.1.",
        in_path: &[],
        query: &[],
        body: None,
        is_change: false,
        answer: Answer::Document,
        problems: &[],
        serve: || get(api::document),
    },
    Route {
        method: Method::GET,
        path: "/v1/status",
        router_path: None,
        id: "status",
        tag: "process",
        summary: "How things stand",
        about: "Version, uptime, phase, the database, and each subscription.",
        in_path: &[],
        query: &[],
        body: None,
        is_change: false,
        answer: Answer::Json(of::<Status>()),
        problems: &[],
        serve: || get(api::status),
    },
    Route {
        method: Method::POST,
        path: "/v1/drain",
        router_path: None,
        id: "drain",
        tag: "process",
        summary: "Takes nothing more, and finishes what is in hand",
        about: "Cannot be undone: the process stays, not ready, until it is told to stop. Who asks \
                again asks about the same drain.",
        in_path: &[],
        query: &[Field::new(
            "timeout",
            Kind::Duration,
            "How long to wait for the end, at most 1h; `shutdown_grace` where it is not given.",
        )],
        body: None,
        is_change: true,
        answer: Answer::Json(of::<DrainAnswer>()),
        problems: &[
            SENSELESS,
            (504, "`still_draining`: something still runs, as `running` says; the drain goes on."),
        ],
        serve: || post(api::drain),
    },
    Route {
        method: Method::GET,
        path: "/v1/subscriptions",
        router_path: None,
        id: "subscriptions",
        tag: "subscriptions",
        summary: "All subscriptions",
        about: "",
        in_path: &[],
        query: &[],
        body: None,
        is_change: false,
        answer: Answer::Json(of::<Subscriptions>()),
        problems: &[],
        serve: || get(api::subscriptions),
    },
    Route {
        method: Method::GET,
        path: "/v1/subscriptions/{name}",
        router_path: None,
        id: "subscription",
        tag: "subscriptions",
        summary: "One subscription",
        about: "",
        in_path: &[NAME],
        query: &[],
        body: None,
        is_change: false,
        answer: Answer::Json(of::<SubscriptionStatus>()),
        problems: &[(404, "`unknown_subscription`: there is none of this name.")],
        serve: || get(api::subscription),
    },
    Route {
        method: Method::POST,
        path: "/v1/subscriptions/{name}/pause",
        router_path: None,
        id: "pause",
        tag: "subscriptions",
        summary: "Takes and sends nothing until it is resumed",
        about: "Of this process alone, and until it is started again. Deliveries under way end; \
                membership of the group and the connection are kept. Pausing twice is pausing once.",
        in_path: &[NAME],
        query: &[],
        body: None,
        is_change: true,
        answer: Answer::Json(of::<SubscriptionStatus>()),
        problems: NO_SUBSCRIPTION,
        serve: || post(api::pause),
    },
    Route {
        method: Method::POST,
        path: "/v1/subscriptions/{name}/resume",
        router_path: None,
        id: "resume",
        tag: "subscriptions",
        summary: "Goes on",
        about: "",
        in_path: &[NAME],
        query: &[],
        body: None,
        is_change: true,
        answer: Answer::Json(of::<SubscriptionStatus>()),
        problems: NO_SUBSCRIPTION,
        serve: || post(api::resume),
    },
    Route {
        method: Method::PATCH,
        path: "/v1/subscriptions/{name}/limits",
        router_path: None,
        id: "limits",
        tag: "subscriptions",
        summary: "Changes concurrency and rate",
        about: "Of this process alone, and until it is started again. What is not given stays.",
        in_path: &[NAME],
        query: &[],
        body: Some(Body {
            name: "LimitsBody",
            about: "At least one of them.",
            fields: LIMITS,
            is_patch: true,
        }),
        is_change: true,
        answer: Answer::Json(of::<SubscriptionStatus>()),
        problems: NO_SUBSCRIPTION,
        serve: || patch(api::limits),
    },
    Route {
        method: Method::GET,
        path: "/v1/messages",
        router_path: None,
        id: "message",
        tag: "messages",
        summary: "What is known of one message",
        about: "Every consumer id of the configuration is asked, or the one that is named.",
        in_path: &[],
        query: &[ID.needed(), CONSUMER_ID, SUBSCRIPTION],
        body: None,
        is_change: false,
        answer: Answer::Json(of::<MessageReport>()),
        problems: &[
            (404, "`unknown_message`: nothing is known of it; `report` says what that means."),
            SENSELESS,
            AWAY,
        ],
        serve: || get(api::message),
    },
    Route {
        method: Method::GET,
        path: "/v1/messages/{id}",
        router_path: Some("/v1/messages/{*id}"),
        id: "message_by_path",
        tag: "messages",
        summary: "What is known of one message",
        about: "As `/v1/messages?id=`; the ids `.` and `..` are folded away by clients, and can be \
                asked for only there.",
        in_path: &[ID.needed()],
        query: &[CONSUMER_ID, SUBSCRIPTION],
        body: None,
        is_change: false,
        answer: Answer::Json(of::<MessageReport>()),
        problems: &[
            (404, "`unknown_message`: nothing is known of it; `report` says what that means."),
            SENSELESS,
            AWAY,
        ],
        serve: || get(api::message),
    },
    Route {
        method: Method::GET,
        path: "/v1/parked",
        router_path: None,
        id: "parked",
        tag: "dead letters",
        summary: "Parked messages",
        about: "In the order of `seq`, without bodies.",
        in_path: &[],
        query: FILTERED,
        body: None,
        is_change: false,
        answer: Answer::Json(of::<ParkedPage>()),
        problems: &[SENSELESS, AWAY],
        serve: || get(api::parked),
    },
    Route {
        method: Method::GET,
        path: "/v1/dead-letters",
        router_path: None,
        id: "dead_letters",
        tag: "dead letters",
        summary: "Dead letters",
        about: "In the order of `seq`, without bodies.",
        in_path: &[],
        query: FILTERED_DEAD,
        body: None,
        is_change: false,
        answer: Answer::Json(of::<ParkedPage>()),
        problems: &[SENSELESS, AWAY],
        serve: || get(api::dead_letters),
    },
    Route {
        method: Method::GET,
        path: "/v1/dead-letters/{seq}",
        router_path: None,
        id: "dead_letter",
        tag: "dead letters",
        summary: "One dead letter, whole",
        about: "Also of a row that is due, as after a replay.",
        in_path: &[SEQ],
        query: &[Field::new("raw", Kind::Flag, "The body alone, all of it, as it is.")],
        body: None,
        is_change: false,
        answer: Answer::JsonOrBytes(of::<LetterWhole>()),
        problems: &[
            (404, "`unknown_letter`: no row has this seq; `no_body`: it keeps no body."),
            AWAY,
        ],
        serve: || get(api::dead_letter),
    },
    Route {
        method: Method::POST,
        path: "/v1/dead-letters/replay",
        router_path: None,
        id: "replay",
        tag: "dead letters",
        summary: "Has dead letters forwarded again",
        about: "By `seqs`, or by what the filter finds, at most `limit` a call: `next` says how to \
                go on. Each leaves an entry in the audit. Of two replays at once, one finds \
                `not_dead`.",
        in_path: &[],
        query: &[],
        body: Some(Body {
            name: "ReplayBody",
            about: "Which, and how.",
            fields: REPLAYED,
            is_patch: false,
        }),
        is_change: true,
        answer: Answer::Json(of::<ReplayAnswer>()),
        problems: &[SENSELESS, AWAY],
        serve: || post(api::replay),
    },
    Route {
        method: Method::POST,
        path: "/v1/dead-letters/discard",
        router_path: None,
        id: "discard",
        tag: "dead letters",
        summary: "Gives dead letters up",
        about: "The rows stay until `database.dead_retention` is over, their bodies are gone at \
                once. By `seqs`, or by what the filter finds, at most `limit` a call. Each leaves \
                an entry in the audit.",
        in_path: &[],
        query: &[],
        body: Some(Body {
            name: "DiscardBody",
            about: "Which.",
            fields: DISCARDED,
            is_patch: false,
        }),
        is_change: true,
        answer: Answer::Json(of::<DiscardAnswer>()),
        problems: &[SENSELESS, AWAY],
        serve: || post(api::discard),
    },
    Route {
        method: Method::GET,
        path: "/v1/audit",
        router_path: None,
        id: "audit",
        tag: "dead letters",
        summary: "Who did what to dead letters",
        about: "Newest first; kept as long as dead letters are.",
        in_path: &[],
        query: &[
            Field::new(
                "before",
                Kind::Integer { least: 1, most: i64::MAX },
                "Those older than this one: the `next` of the page before.",
            ),
            LIMIT,
        ],
        body: None,
        is_change: false,
        answer: Answer::Json(of::<AuditPage>()),
        problems: &[AWAY],
        serve: || get(api::audit),
    },
];

/// The fields of a query of this route.
pub(super) fn query_of(id: &str) -> &'static [Field] {
    route(id).query
}

/// The fields of the body of this route.
pub(super) fn body_of(id: &str) -> &'static [Field] {
    route(id).body.as_ref().map_or(&[], |body| body.fields)
}

/// The fields in the path of this route.
pub(super) fn path_of(id: &str) -> &'static [Field] {
    route(id).in_path
}

fn route(id: &str) -> &'static Route {
    // Ids are written in this crate alone; a test goes through all of them.
    ROUTES.iter().find(|route| route.id == id).unwrap_or(&ROUTES[0])
}

/// All of them, served.
pub(super) fn router(api: Api) -> Router {
    let router = ROUTES.iter().fold(Router::new(), |router, route| {
        router.route(route.router_path.unwrap_or(route.path), (route.serve)())
    });
    router.with_state(api)
}
