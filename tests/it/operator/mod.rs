//! What an operator types: check, explain, drain, health, dead-letters, parked, subscriptions, status.

mod check;
mod drain;
mod explain;
mod health;
mod letters;
mod subscriptions;
