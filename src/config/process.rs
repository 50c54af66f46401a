//! What is said once per process: listeners, the database, the log.

use std::net::SocketAddr;

use secrecy::{ExposeSecret, SecretString};

use super::broker::tls_files;
use super::model::{AdminConfig, DatabaseConfig, DatabaseUrl, ServerTls, TlsFiles};
use super::names;
use super::problem::{Fault, quote};
use super::reader::Section;
use crate::telemetry::{LogFormat, LogSettings};

const ADMIN_LISTEN: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7461);
pub(super) const SCHEMA_BYTES_MAX: usize = 41;
pub(super) const PREFIX_BYTES_MAX: usize = 32;
const TOKEN_BYTES_MIN: usize = 16;

/// `log.format`.
pub(super) const LOG_FORMATS: [(&str, LogFormat); 3] =
    [("auto", LogFormat::Auto), ("human", LogFormat::Human), ("json", LogFormat::Json)];

/// `[admin]`.
pub(super) fn admin(section: &Section<'_>) -> AdminConfig {
    let listen = section.parse("listen", names::listen).unwrap_or(Some(ADMIN_LISTEN));
    let secret = section
        .parse_secret("token", |secret| token(secret.expose_secret()).map(|()| secret.clone()));
    if let Some(address) = listen
        && !address.ip().is_loopback()
        && !section.has_secret("token")
    {
        section.missing(
            "token_file",
            format!("{address} can be reached from elsewhere: name a file with a token, or listen on 127.0.0.1; [health] serves probes and metrics without one"),
        );
    }
    AdminConfig { listen, token: secret, tls: server_tls(&section.section("tls")) }
}

/// `[admin.tls]`.
fn server_tls(section: &Section<'_>) -> Option<ServerTls> {
    let TlsFiles { cert_file, key_file, .. } = tls_files(section, false);
    Some(ServerTls { cert_file: cert_file?, key_file: key_file? })
}

/// What a token must have. It is not shown.
pub(super) fn token(token: &str) -> Result<(), Fault> {
    if token.len() >= TOKEN_BYTES_MIN {
        return Ok(());
    }
    Err(Fault::new(
        format!("it is shorter than {TOKEN_BYTES_MIN} bytes"),
        "use a random one, like the output of: openssl rand -hex 32",
    ))
}

/// `[health]`.
pub(super) fn health(section: &Section<'_>, admin: Option<SocketAddr>) -> Option<SocketAddr> {
    let listen = section.parse("listen", names::listen).flatten()?;
    // Port 0 is another one each time.
    if admin == Some(listen) && listen.port() != 0 {
        section.problem(
            "listen",
            Fault::new(
                format!("{listen} is admin.listen too, and only one can have it"),
                "choose another port, or leave it out: the admin listener has the probes too",
            ),
        );
    }
    Some(listen)
}

/// `[log]`.
pub(super) fn log(section: &Section<'_>) -> LogSettings {
    LogSettings {
        format: section.choice("format", &LOG_FORMATS),
        level: section.parse("level", level).unwrap_or(LogSettings::default().level),
    }
}

/// A filter of log lines.
pub(super) fn level(text: &str) -> Result<String, Fault> {
    let settings = LogSettings { level: text.to_owned(), ..LogSettings::default() };
    settings.filter().map(|_| text.to_owned()).map_err(|_| {
        Fault::new(
            format!("{} is no filter", quote(text)),
            "set error, warn, info, debug or trace, or directives like info,inboxd::engine=debug",
        )
    })
}

/// `[database]`.
pub(super) fn database(section: &Section<'_>) -> DatabaseConfig {
    let password = section.secret("password");
    let url = section.parse_secret("url", |url| names::database(url, password.as_ref()));
    let url = url.unwrap_or(DatabaseUrl::Sqlite("inbox.db".into()));
    DatabaseConfig {
        migrate_url: migrate_url(section, &url),
        pool_max: section.count("pool_max") as u32,
        schema: schema(section, &url),
        table_prefix: section
            .parse("table_prefix", |text| names::identifier(text, PREFIX_BYTES_MAX))
            .unwrap_or_default(),
        allow_weak_durability: section.switch("allow_weak_durability"),
        prepared_statements: section.switch("prepared_statements"),
        retention: section.duration("retention"),
        dead_retention: section.duration("dead_retention"),
        sweep_interval: section.duration("sweep_interval"),
        url,
    }
}

fn migrate_url(section: &Section<'_>, url: &DatabaseUrl) -> Option<SecretString> {
    let password = section.secret("migrate_password");
    section.parse_secret("migrate_url", |migrate| {
        match (names::database(migrate, password.as_ref())?, url) {
            (DatabaseUrl::Postgres(migrate), DatabaseUrl::Postgres(_))
            | (DatabaseUrl::MySql(migrate), DatabaseUrl::MySql(_)) => Ok(migrate),
            _ => Err(Fault::new(
                "it is not a server of the same kind as url",
                "name the same database with another user; SQLite needs none",
            )),
        }
    })
}

fn schema(section: &Section<'_>, url: &DatabaseUrl) -> Option<String> {
    let schema = section.parse("schema", |text| names::identifier(text, SCHEMA_BYTES_MAX))?;
    if matches!(url, DatabaseUrl::Sqlite(_)) {
        let fault = Fault::new("SQLite has no schemas", "leave it out, or set table_prefix");
        section.problem("schema", fault);
        return None;
    }
    Some(schema).filter(|schema| !schema.is_empty())
}
