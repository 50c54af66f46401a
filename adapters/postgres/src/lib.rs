//! PostgreSQL inbox store.
