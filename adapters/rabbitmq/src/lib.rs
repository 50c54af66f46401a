//! RabbitMQ source (AMQP 0-9-1).
//!
//! Purpose: deliveries of one queue, classic or quorum, and their settlement, over connections
//! that come and go. A [`RabbitMqSource`] has a connection of its own and one task that keeps
//! it; that task runs one session (a channel with its consumer) after the other.
//!
//! Invariants
//! - An ack goes to the channel that the delivery came by, or nowhere: tags of an older channel
//!   cannot reach a newer one. Each channel has its own fence, lost with it.
//! - `multiple` covers acked deliveries only; no ack is awaited one by one.
//! - No more than the prefetch is unsettled, here and at the broker, over reconnections too.
//! - An ordered subscription neither nacks nor cancels, both reorder; it has the queue to itself.
//! - The client never decodes what a publisher wrote: `wire` says why and how.
//! - Nothing loops without a pause, and nothing that stops consumption is silent: it is in the
//!   status, with what to do.
//!
//! What it does not do: use the client's own recovery, which would bring channels back
//! without a fence; declare anything unless told to; read `x-death`.

mod bucket;
mod buffer;
mod config;
mod content;
mod counts;
mod depth;
mod inspect;
mod letter_config;
mod letter_inspect;
mod letter_message;
mod letters;
mod link;
mod outgoing;
mod probe;
mod properties;
mod session;
mod source;
mod stream;
mod supervisor;
mod tracker;
mod trouble;
mod wire;

pub use config::{ArgumentValue, DeclareOptions, QueueKind, RabbitMqConfig, RabbitMqTls};
pub use inspect::inspect;
pub use letter_config::{DeadLetterExchangeConfig, RabbitMqBroker};
pub use letter_inspect::inspect_dead_letters;
pub use letters::DeadLetterExchange;
pub use source::RabbitMqSource;
