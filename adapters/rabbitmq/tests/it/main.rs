//! RabbitMQ source against real servers.

mod conformance;
mod content;
mod inspect;
mod letters;
mod letters_own;
mod logins;
mod order;
mod own_server;
mod queues;
mod raw;
mod settling;
mod support;
