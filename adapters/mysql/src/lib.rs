//! MySQL and MariaDB inbox store.
