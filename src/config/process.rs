//! What is said once per process: listeners, the database, the log.

use std::net::SocketAddr;
use std::time::Duration;

use super::model::{AdminConfig, DatabaseConfig, DatabaseUrl};
use super::names;
use super::problem::Fault;
use super::reader::Section;
use super::units::{days, minutes, seconds};
use crate::telemetry::{LogFormat, LogSettings};

const ADMIN_LISTEN: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7461);
const SCHEMA_BYTES_MAX: usize = 41;
const PREFIX_BYTES_MAX: usize = 32;
const TOKEN_BYTES_MIN: usize = 16;

/// `[admin]`.
pub(super) fn admin(section: Section<'_>) -> AdminConfig {
    use secrecy::ExposeSecret;

    let listen = section.parse("listen", names::listen).unwrap_or(Some(ADMIN_LISTEN));
    let token = section.secret("token");
    if token.as_ref().is_some_and(|token| token.expose_secret().len() < TOKEN_BYTES_MIN) {
        let key = if section.has("token") { "token" } else { "token_file" };
        section.problem(
            key,
            Fault::new(
                format!("it is shorter than {TOKEN_BYTES_MIN} bytes"),
                "use a random one, like the output of: openssl rand -hex 32",
            ),
        );
    }
    if let Some(address) = listen
        && !address.ip().is_loopback()
        && token.is_none()
    {
        section.missing(
            "token_file",
            format!("{address} can be reached from elsewhere: name a file with a token, or listen on 127.0.0.1; [health] serves probes and metrics without one"),
        );
    }
    section.finish();
    AdminConfig { listen, token }
}

/// `[health]`.
pub(super) fn health(section: Section<'_>) -> Option<SocketAddr> {
    let listen = section.parse("listen", names::listen).flatten();
    section.finish();
    listen
}

/// `[log]`.
pub(super) fn log(section: Section<'_>) -> LogSettings {
    let mut settings = LogSettings {
        format: section
            .choice(
                "format",
                &[
                    ("auto", LogFormat::Auto),
                    ("human", LogFormat::Human),
                    ("json", LogFormat::Json),
                ],
            )
            .unwrap_or_default(),
        ..LogSettings::default()
    };
    let level = section.parse("level", |text| {
        let settings = LogSettings { level: text.to_owned(), ..LogSettings::default() };
        settings.filter().map(|_| text.to_owned()).map_err(|_| {
            Fault::new(
                format!("{text:?} is no filter"),
                "set error, warn, info, debug or trace, or directives like info,inboxd::engine=debug",
            )
        })
    });
    settings.level = level.unwrap_or(settings.level);
    section.finish();
    settings
}

/// `[database]`.
pub(super) fn database(section: Section<'_>) -> DatabaseConfig {
    let password = section.secret("password");
    let set = section.has("url") || section.has("url_file");
    let url = match section.secret("url") {
        Some(url) => names::database(&url, password.as_ref())
            .map_err(|fault| section.problem("url", fault))
            .ok(),
        None if set => None,
        None => Some(DatabaseUrl::Sqlite("inbox.db".into())),
    };
    let url = url.unwrap_or(DatabaseUrl::Sqlite("inbox.db".into()));
    let config = DatabaseConfig {
        migrate_url: migrate_url(&section, &url),
        pool_max: section.count("pool_max", 4, 1..=256) as u32,
        schema: schema(&section, &url),
        table_prefix: section
            .parse("table_prefix", |text| names::identifier(text, PREFIX_BYTES_MAX))
            .unwrap_or_default(),
        allow_weak_durability: section.switch("allow_weak_durability", false),
        prepared_statements: section.switch("prepared_statements", true),
        retention: section.duration("retention", days(14), seconds(1)..=days(3_650)),
        dead_retention: section.duration("dead_retention", days(90), seconds(1)..=days(3_650)),
        sweep_interval: section.duration(
            "sweep_interval",
            minutes(10),
            Duration::from_millis(100)..=days(7),
        ),
        url,
    };
    section.finish();
    config
}

fn migrate_url(section: &Section<'_>, url: &DatabaseUrl) -> Option<secrecy::SecretString> {
    let password = section.secret("migrate_password");
    let migrate = section.secret("migrate_url")?;
    let key = if section.has("migrate_url") { "migrate_url" } else { "migrate_url_file" };
    match (names::database(&migrate, password.as_ref()), url) {
        (Ok(DatabaseUrl::Postgres(migrate)), DatabaseUrl::Postgres(_))
        | (Ok(DatabaseUrl::MySql(migrate)), DatabaseUrl::MySql(_)) => Some(migrate),
        (Ok(_), _) => {
            section.problem(
                key,
                Fault::new(
                    "it is not a server of the same kind as url",
                    "name the same database with another user; SQLite needs none",
                ),
            );
            None
        }
        (Err(fault), _) => {
            section.problem(key, fault);
            None
        }
    }
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

/// `shutdown_grace` and `stale_after`.
pub(super) fn times(section: &Section<'_>) -> (Duration, Duration) {
    let grace =
        section.duration("shutdown_grace", seconds(25), Duration::from_millis(100)..=minutes(60));
    let stale = section.duration("stale_after", seconds(60), seconds(5)..=minutes(60));
    (grace, stale)
}
