//! What an operator types: check, explain, drain, health.

mod check;
mod drain;
mod explain;
mod health;
