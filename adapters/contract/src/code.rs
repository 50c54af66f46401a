//! Stable codes of what operators meet: in log lines (`code`), in `/readyz`, in `docs/errors.md`.

use std::fmt;

use strum::{EnumIter, IntoStaticStr};

use crate::ErrorClass;

/// One kind of trouble. A code is never renamed or given another meaning; each has its section,
/// with what was lost and what to do, in `docs/errors.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ErrorCode {
    /// The configuration has problems.
    ConfigRefused,
    /// A listener's address cannot be bound.
    ListenerRefused,
    /// The database does not answer, or not now.
    DatabaseUnavailable,
    /// The database answers, and refuses: a login, a right, a table, a value.
    DatabaseRefused,
    /// The tables were made by a newer or another build.
    DatabaseNewer,
    /// The database may forget what it has committed.
    DatabaseNotDurable,
    /// The SQLite inbox belongs to another running instance.
    InboxInUse,
    /// Rows are kept shorter than the broker can redeliver.
    RetentionShort,
    /// The database takes no bodies as large as the configuration allows.
    BodyLimitLowered,
    /// Old rows were not deleted.
    SweepFailed,
    /// Leases of claims could not be renewed.
    LeasesNotRenewed,
    /// No broker answers, or the connection was lost.
    SourceUnreachable,
    /// The broker does not know the user, or not the password.
    SourceLoginRefused,
    /// The user has no right to the queue, topic, group or vhost.
    SourceForbidden,
    /// TLS with the broker fails.
    SourceTls,
    /// The queue does not exist.
    QueueMissing,
    /// The queue is not as the configuration has it, or belongs to another connection.
    QueueRefused,
    /// The queue cannot be consumed in order.
    OrderRefused,
    /// The broker sends what the AMQP client cannot decode.
    FrameUndecodable,
    /// A topic does not exist.
    TopicMissing,
    /// A partition's offset was committed beside another inbox.
    InboxForeign,
    /// Ids made of positions would take new records for old ones.
    PositionsLost,
    /// A topic was made again or its log was cut: it is read from there.
    TopicRemade,
    /// Records were deleted by the broker before they were read.
    RecordsPassedOver,
    /// The group has no offset and `start` refuses to choose one.
    OffsetMissing,
    /// Offsets were not committed.
    OffsetsNotCommitted,
    /// The group went on without this member.
    AssignmentLost,
    /// A source cannot go on; its subscription has ended.
    SourceEnded,
    /// The application's host accepts no connection.
    CallbackUnreachable,
    /// The application fails or does not answer in time.
    CallbackFailing,
    /// The answer says that the address or the credentials are wrong: 401, 403, 404, 405, 3xx.
    CallbackWrong,
    /// TLS with the application fails.
    CallbackTls,
    /// The application answered 410.
    CallbackGone,
    /// The application failed so often in a row that it is given a rest.
    CallbackBreakerOpen,
    /// The application's health URL fails.
    CallbackUnhealthy,
    /// No message carried an id.
    IdsMissing,
    /// The same id came with another content.
    IdConflict,
    /// A message was kept as a dead letter.
    DeadLetter,
    /// The broker's topic or exchange for dead letters does not take copies now.
    DeadLetterTargetAway,
    /// The broker refuses copies of dead letters: no topic or exchange, no right, or their size.
    DeadLetterTargetRefused,
    /// The exchange for dead letters routes a copy to no queue.
    DeadLetterUnrouted,
    /// A message is held for longer than `hold_max`.
    HeldTooLong,
    /// The grace period ended before the work did.
    DrainCut,
    /// Traces or metrics do not reach their collector.
    TelemetryNotSent,
    /// A fault of inboxd itself.
    Bug,
}

impl ErrorCode {
    /// The code, as it stands in logs and in `docs/errors.md`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// What a store's error is where nothing more is known.
    pub fn of_store(class: ErrorClass) -> Self {
        match class {
            ErrorClass::Transient => Self::DatabaseUnavailable,
            ErrorClass::Permanent => Self::DatabaseRefused,
            ErrorClass::Bug => Self::Bug,
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
