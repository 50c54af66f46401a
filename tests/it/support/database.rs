//! The inbox database as a test sees it: its configuration and its rows.

use std::collections::{BTreeMap, BTreeSet};

use inboxd_conformance::servers;
use sqlx::{
    AssertSqlSafe, Connection as _, MySqlConnection, PgConnection, Row as _, SqliteConnection,
};
use tempfile::TempDir;

/// Which database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DatabaseKind {
    Sqlite,
    Postgres,
    MariaDb,
}

/// An inbox of the test's own: a file, or tables with a prefix on the shared server.
pub struct Database {
    pub kind: DatabaseKind,
    url: String,
    prefix: String,
    _dir: TempDir,
}

impl Database {
    /// A fresh one.
    pub fn new(kind: DatabaseKind) -> Self {
        let url = match kind {
            DatabaseKind::Sqlite => String::new(),
            DatabaseKind::Postgres => servers::postgres_url(),
            DatabaseKind::MariaDb => servers::mysql_url(),
        };
        Self::at(kind, &url)
    }

    /// A fresh one on this server, for instance behind a proxy. SQLite ignores the address.
    pub fn at(kind: DatabaseKind, url: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let url = match kind {
            DatabaseKind::Sqlite => format!("sqlite:{}", dir.path().join("inbox.db").display()),
            _ => url.to_owned(),
        };
        let prefix = format!("t{}_", &servers::unique("").replace('-', "")[..12]);
        Self { kind, url, prefix, _dir: dir }
    }

    /// The `[database]` table.
    pub fn config(&self) -> String {
        self.config_with(&self.url)
    }

    /// The `[database]` table with another address of the same database.
    pub fn config_with(&self, url: &str) -> String {
        format!("[database]\nurl = \"{url}\"\ntable_prefix = \"{}\"\n", self.prefix)
    }

    /// The address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The full name of a table, such as `inbox_messages`.
    pub fn table(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Ids processed for this consumer. Empty while the tables do not exist.
    pub async fn rows(&self, consumer_id: &str) -> BTreeSet<String> {
        self.ids("inbox_messages", consumer_id).await.into_keys().collect()
    }

    /// Dead letters of this consumer: how many rows each id has.
    pub async fn dead(&self, consumer_id: &str) -> BTreeMap<String, usize> {
        self.ids("inbox_parked", consumer_id).await
    }

    /// Claims of this consumer, expired ones included.
    pub async fn claims(&self, consumer_id: &str) -> BTreeMap<String, usize> {
        self.ids("inbox_claims", consumer_id).await
    }

    async fn ids(&self, table: &str, consumer_id: &str) -> BTreeMap<String, usize> {
        let select = format!("SELECT message_id, consumer_id FROM {}", self.table(table));
        let pairs = self.pairs(&select).await;
        let mut ids = BTreeMap::new();
        for (id, consumer) in pairs {
            if consumer == consumer_id {
                *ids.entry(id).or_default() += 1;
            }
        }
        ids
    }

    async fn pairs(&self, select: &str) -> Vec<(String, String)> {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("ids are UTF-8");
        let sql = AssertSqlSafe(select.to_owned());
        match self.kind {
            DatabaseKind::Sqlite => {
                let Ok(mut connection) =
                    SqliteConnection::connect(&format!("{}?mode=ro", self.url)).await
                else {
                    return Vec::new();
                };
                let rows = sqlx::query(sql).fetch_all(&mut connection).await.unwrap_or_default();
                rows.iter().map(|row| (row.get(0), row.get(1))).collect()
            }
            DatabaseKind::Postgres => {
                let mut connection =
                    PgConnection::connect(&servers::postgres_url()).await.expect("PostgreSQL");
                let rows = sqlx::query(sql).fetch_all(&mut connection).await.unwrap_or_default();
                rows.iter().map(|row| (row.get(0), row.get(1))).collect()
            }
            DatabaseKind::MariaDb => {
                let mut connection =
                    MySqlConnection::connect(&servers::mysql_url()).await.expect("MariaDB");
                let rows = sqlx::query(sql).fetch_all(&mut connection).await.unwrap_or_default();
                rows.iter().map(|row| (text(row.get(0)), text(row.get(1)))).collect()
            }
        }
    }
}
