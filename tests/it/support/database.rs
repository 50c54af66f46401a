//! The inbox database as a test sees it: its configuration and its rows.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use inboxd_conformance::servers;
use sqlx::{
    AssertSqlSafe, Connection as _, MySqlConnection, PgConnection, Row as _, SqliteConnection,
};
use tempfile::TempDir;
use url::Url;

/// Which database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DatabaseKind {
    Sqlite,
    Postgres,
    MariaDb,
}

impl DatabaseKind {
    /// All three.
    pub const ALL: [Self; 3] = [Self::Sqlite, Self::Postgres, Self::MariaDb];
}

/// An inbox of the test's own: a file, or tables with a prefix on a server.
pub struct Database {
    pub kind: DatabaseKind,
    url: String,
    /// Where the sidecar finds it, if not at `url`.
    seen_at: Option<String>,
    prefix: String,
    _dir: TempDir,
}

impl Database {
    /// A fresh one on the shared server.
    pub fn new(kind: DatabaseKind) -> Self {
        let url = match kind {
            DatabaseKind::Sqlite => String::new(),
            DatabaseKind::Postgres => servers::postgres_url(),
            DatabaseKind::MariaDb => servers::mysql_url(),
        };
        Self::at(kind, &url)
    }

    /// A fresh one on this server. SQLite ignores the address.
    pub fn at(kind: DatabaseKind, url: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let url = match kind {
            DatabaseKind::Sqlite => format!("sqlite:{}", dir.path().join("inbox.db").display()),
            _ => url.to_owned(),
        };
        let prefix = format!("t{}_", &servers::unique("").replace('-', "")[..12]);
        Self { kind, url, seen_at: None, prefix, _dir: dir }
    }

    /// A fresh one in a database (catalog) of its own on the shared server, whose settings
    /// concern nobody else; with its name.
    pub async fn own(kind: DatabaseKind) -> (Self, String) {
        let mut database = Self::new(kind);
        let name = servers::unique("it");
        if kind != DatabaseKind::Sqlite {
            database.session().await.execute(&format!("CREATE DATABASE {name}")).await;
            let mut url = Url::parse(&database.url).expect("a URL");
            url.set_path(&name);
            database.url = url.into();
        }
        (database, name)
    }

    /// The sidecar reaches it through this address, such as a proxy's.
    pub fn through(mut self, address: SocketAddr) -> Self {
        let mut url = Url::parse(&self.url).expect("a URL");
        url.set_ip_host(address.ip()).expect("a host");
        url.set_port(Some(address.port())).expect("a port");
        self.seen_at = Some(url.into());
        self
    }

    /// `host:port` of its server.
    pub fn address(&self) -> String {
        let url = Url::parse(&self.url).expect("a URL");
        let host = url.host_str().expect("a host").to_owned();
        format!("{host}:{}", url.port().expect("a port"))
    }

    /// The `[database]` table.
    pub fn config(&self) -> String {
        self.config_with(self.seen_at.as_deref().unwrap_or(&self.url))
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
        self.ids_where("inbox_parked", consumer_id, "state <> 'due'").await
    }

    /// Parked messages of this consumer that are due, now or later.
    pub async fn parked(&self, consumer_id: &str) -> BTreeMap<String, usize> {
        self.ids_where("inbox_parked", consumer_id, "state = 'due'").await
    }

    /// Claims of this consumer, expired ones included.
    pub async fn claims(&self, consumer_id: &str) -> BTreeMap<String, usize> {
        self.ids("inbox_claims", consumer_id).await
    }

    /// A connection of the test's own.
    pub async fn session(&self) -> Session {
        match self.kind {
            DatabaseKind::Sqlite => {
                Session::Sqlite(SqliteConnection::connect(&self.url).await.expect("SQLite"))
            }
            DatabaseKind::Postgres => {
                Session::Postgres(PgConnection::connect(&self.url).await.expect("PostgreSQL"))
            }
            DatabaseKind::MariaDb => {
                Session::MariaDb(MySqlConnection::connect(&self.url).await.expect("MariaDB"))
            }
        }
    }

    async fn ids(&self, table: &str, consumer_id: &str) -> BTreeMap<String, usize> {
        self.ids_where(table, consumer_id, "1 = 1").await
    }

    async fn ids_where(
        &self,
        table: &str,
        consumer_id: &str,
        condition: &str,
    ) -> BTreeMap<String, usize> {
        let table = self.table(table);
        let select = format!("SELECT message_id, consumer_id FROM {table} WHERE {condition}");
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
        if self.kind == DatabaseKind::Sqlite {
            let url = format!("{}?mode=ro", self.url);
            let Ok(mut connection) = SqliteConnection::connect(&url).await else {
                return Vec::new();
            };
            let rows = sqlx::query(sql).fetch_all(&mut connection).await.unwrap_or_default();
            return rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        }
        match self.session().await {
            Session::Postgres(mut connection) => {
                let rows = sqlx::query(sql).fetch_all(&mut connection).await.unwrap_or_default();
                rows.iter().map(|row| (row.get(0), row.get(1))).collect()
            }
            Session::MariaDb(mut connection) => {
                let rows = sqlx::query(sql).fetch_all(&mut connection).await.unwrap_or_default();
                rows.iter().map(|row| (text(row.get(0)), text(row.get(1)))).collect()
            }
            Session::Sqlite(_) => unreachable!("returned above"),
        }
    }
}

/// A connection of the test's own, for locks, settings and questions.
pub enum Session {
    Sqlite(SqliteConnection),
    Postgres(PgConnection),
    MariaDb(MySqlConnection),
}

impl Session {
    /// Executes statements.
    pub async fn execute(&mut self, sql: &str) {
        if let Err(error) = self.try_execute(sql).await {
            panic!("{sql}: {error}");
        }
    }

    /// The same where it may fail.
    pub async fn try_execute(&mut self, sql: &str) -> Result<(), sqlx::Error> {
        let statements = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()));
        match self {
            Self::Sqlite(connection) => statements.execute(connection).await.map(|_| ()),
            Self::Postgres(connection) => statements.execute(connection).await.map(|_| ()),
            Self::MariaDb(connection) => statements.execute(connection).await.map(|_| ()),
        }
    }

    /// The one number that a query answers.
    pub async fn number(&mut self, sql: &str) -> i64 {
        let text = AssertSqlSafe(sql.to_owned());
        let number = match self {
            Self::Sqlite(connection) => sqlx::query_scalar(text).fetch_one(connection).await,
            Self::Postgres(connection) => sqlx::query_scalar(text).fetch_one(connection).await,
            Self::MariaDb(connection) => sqlx::query_scalar(text).fetch_one(connection).await,
        };
        number.unwrap_or_else(|error| panic!("{sql}: {error}"))
    }
}
