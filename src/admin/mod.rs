//! The HTTP endpoints that operators, kubelet and Prometheus ask.

mod api;
mod fields;
mod guard;
mod health;
mod letters;
mod message;
mod openapi;
mod operator;
mod problem;
mod routes;
mod server;
mod tls;
mod words;

#[cfg(test)]
mod tests;

pub use api::{ACTOR_BYTES_MAX, ACTOR_HEADER};
pub use fields::parse_time;
pub use health::{
    Dependency, DependencyState, HealthRegistry, Heartbeat, Liveness, Readiness, SubscriptionHealth,
};
pub use letters::{
    AuditItem, AuditPage, BODY_SHOWN_MAX, COUNT_MAX, DiscardAnswer, DiscardAsk, DiscardCounts,
    DiscardResult, DiscardedRow, LetterFilter, LetterHeader, LetterWhole, LettersError, ParkedAsk,
    ParkedItem, ParkedPage, ROWS_DEFAULT, ROWS_MAX, ReplayAnswer, ReplayAsk, ReplayCounts,
    ReplayNext, ReplayResult, ReplayedRow, RowState, SPREAD_MAX, Selection, all_reasons,
    dead_reasons,
};
pub use message::{Answering, ConsumerReport, MessageReport, ReadAs, State, readings, shown};
pub use openapi::document;
pub use operator::{
    CallbackStatus, Change, ChangeError, DatabaseStatus, DrainAnswer, ExplainError, Operator,
    Running, RunningMessage, Status, SubscriptionStatus, Subscriptions, Which,
};
pub use server::{AdminServer, Endpoints};
pub use tls::{TlsError, acceptor, certificates};
pub use words::{span, waits};
