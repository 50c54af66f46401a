//! SQLite inbox store.
