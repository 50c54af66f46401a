//! Names and addresses that keys hold, each with its rule.

use std::net::SocketAddr;
use std::path::PathBuf;

use secrecy::{ExposeSecret, SecretString};
use url::Url;

use super::model::DatabaseUrl;
use super::problem::{Fault, quote};

const URL_BYTES_MAX: usize = 4096;
/// Of a socket's path: what the kernel takes.
const SOCKET_BYTES_MAX: usize = 107;

/// What [`table_name`] takes, for the schema.
pub(super) const TABLE_NAME_PATTERN: &str = "^(?!.*__)[A-Za-z0-9][A-Za-z0-9._-]{0,63}$";

/// A name as variables can write it: in one case, with `_` alone.
pub(super) fn plain(name: &str) -> String {
    name.to_ascii_lowercase().replace(['-', '.'], "_")
}

/// The name of a subscription or a broker: it is a metric's label and part of a variable's name.
pub(super) fn table_name(name: &str) -> Result<(), Fault> {
    let fits = (1..=64).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if fits && !name.contains("__") {
        return Ok(());
    }
    Err(Fault::new(
        format!("{} is no name", quote(name)),
        "use 1 to 64 letters, digits, -, _ and ., a letter or digit first, and no two _ in a row",
    ))
}

/// Text that a broker takes as a name: not blank, bounded, no control characters.
pub(super) fn broker_text(text: &str, bytes_max: usize) -> Result<String, Fault> {
    let remedy = format!("use 1 to {bytes_max} bytes without control characters");
    if text.trim().is_empty() {
        return Err(Fault::new("it is blank", remedy));
    }
    if text.len() > bytes_max {
        return Err(Fault::new(
            format!("it has {} bytes, the most is {bytes_max}", text.len()),
            remedy,
        ));
    }
    if text.chars().any(char::is_control) {
        return Err(Fault::new(format!("{} has a control character", quote(text)), remedy));
    }
    Ok(text.to_owned())
}

/// A Kafka topic, or a regular expression that begins with `^`.
pub(super) fn topic(text: &str) -> Result<String, Fault> {
    if text.starts_with('^') {
        return broker_text(text, 1024);
    }
    let fits = (1..=249).contains(&text.len())
        && !matches!(text, "." | "..")
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if fits {
        return Ok(text.to_owned());
    }
    Err(Fault::new(
        format!("{} is no topic's name", quote(text)),
        "use 1 to 249 letters, digits, -, _ and ., or a regular expression that begins with ^",
    ))
}

/// A database identifier, or the beginning of one.
pub(super) fn identifier(text: &str, bytes_max: usize) -> Result<String, Fault> {
    let fits = text.len() <= bytes_max
        && !text.starts_with(|c: char| c.is_ascii_digit())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    if fits {
        return Ok(text.to_owned());
    }
    Err(Fault::new(
        format!("{} is no identifier", quote(text)),
        format!("use a to z, 0 to 9 and _, no digit first, at most {bytes_max} characters"),
    ))
}

/// A listener's address; `None` is off.
pub(super) fn listen(text: &str) -> Result<Option<SocketAddr>, Fault> {
    if text.trim() == "off" {
        return Ok(None);
    }
    text.trim().parse().map(Some).map_err(|_| {
        Fault::new(
            format!("{} is no address to listen on", quote(text)),
            "write an IP address and a port, like 127.0.0.1:7461, or off",
        )
    })
}

/// The callback: `http://`, `https://`, or `unix:/path.sock:/route`.
pub(super) fn callback(text: &str) -> Result<String, Fault> {
    let remedy = "write http://host:port/path, https://host/path or unix:/path/of.sock:/path";
    let text = text.trim();
    if text.len() > URL_BYTES_MAX {
        return Err(Fault::new(
            format!("it has {} bytes, the most is {URL_BYTES_MAX}", text.len()),
            remedy,
        ));
    }
    if let Some(rest) = text.strip_prefix("unix:") {
        let (socket, route) =
            rest.split_once(":/").map_or((rest, ""), |(socket, route)| (socket, route));
        if !socket.starts_with('/') || socket.len() > SOCKET_BYTES_MAX {
            return Err(Fault::new(
                format!(
                    "{} is no absolute path of at most {SOCKET_BYTES_MAX} bytes",
                    quote(socket)
                ),
                remedy,
            ));
        }
        if route.contains(|c: char| c.is_control() || c.is_whitespace() || c == '#') {
            return Err(Fault::new(format!("/{route} is no path of a request"), remedy));
        }
        return Ok(text.to_owned());
    }
    // The text may hold credentials: no fault shows it.
    let url =
        Url::parse(text).map_err(|error| Fault::new(format!("it is no URL: {error}"), remedy))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(Fault::new(format!("the scheme {:?} is not known", url.scheme()), remedy));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(Fault::new(
            "it holds credentials, which would stand in logs",
            "leave user and password out of the URL",
        ));
    }
    if url.port() == Some(0) {
        return Err(Fault::new("nothing listens on port 0", remedy));
    }
    if url.fragment().is_some() {
        return Err(Fault::new("it has a fragment (#), which is never sent", "leave it out"));
    }
    Ok(text.to_owned())
}

/// A database's URL, with the password from elsewhere where there is one.
pub(super) fn database(
    text: &SecretString,
    password: Option<&SecretString>,
) -> Result<DatabaseUrl, Fault> {
    let remedy =
        "write sqlite:inbox.db, postgres://user@host/database or mysql://user@host/database";
    let text = text.expose_secret().trim();
    if text.len() > URL_BYTES_MAX {
        return Err(Fault::new(
            format!("it has {} bytes, the most is {URL_BYTES_MAX}", text.len()),
            remedy,
        ));
    }
    let Some((scheme, rest)) = text.split_once(':') else {
        return Err(Fault::new("it has no scheme", remedy));
    };
    match scheme {
        "sqlite" => sqlite(rest, password, remedy),
        "postgres" | "postgresql" => {
            server(text, "postgres", password, remedy).map(DatabaseUrl::Postgres)
        }
        "mysql" | "mariadb" => server(text, "mysql", password, remedy).map(DatabaseUrl::MySql),
        _ if rest.starts_with("//") => {
            Err(Fault::new(format!("the scheme {} is not known", quote(scheme)), remedy))
        }
        // It may be anything, a password too.
        _ => Err(Fault::new("the scheme is not known", remedy)),
    }
}

fn sqlite(rest: &str, password: Option<&SecretString>, remedy: &str) -> Result<DatabaseUrl, Fault> {
    let path = rest.strip_prefix("//").unwrap_or(rest);
    if path.contains(":memory:") {
        return Err(Fault::new(
            "a database in memory forgets what was processed",
            "name a file: sqlite:inbox.db",
        ));
    }
    if path.is_empty() || path.ends_with('/') || path.contains(['?', '\0']) {
        return Err(Fault::new("it names no file, or has parameters", remedy));
    }
    if password.is_some() {
        return Err(Fault::new("SQLite has no password", "leave password_file out"));
    }
    Ok(DatabaseUrl::Sqlite(PathBuf::from(path)))
}

fn server(
    text: &str,
    scheme: &str,
    password: Option<&SecretString>,
    remedy: &str,
) -> Result<SecretString, Fault> {
    let rest = text.split_once("://").map(|(_, rest)| rest);
    let rest = rest.ok_or_else(|| Fault::new("its scheme is not followed by //", remedy))?;
    let or_unencoded = |fault: Fault| match rest.rsplit_once('@') {
        Some((before, _)) if before.contains(['#', '/', '?']) => Fault::new(
            "it has a #, / or ? before the @, which ends the host",
            "percent-encode user and password (%23 is #, %2F is /, %3F is ?), or set password_file",
        ),
        _ => fault,
    };
    let mut url = Url::parse(&format!("{scheme}://{rest}"))
        .map_err(|error| or_unencoded(Fault::new(format!("it is no URL: {error}"), remedy)))?;
    if url.path().trim_matches('/').is_empty() {
        return Err(or_unencoded(Fault::new("it names no database", remedy)));
    }
    if let Some(password) = password {
        if url.password().is_some() {
            return Err(Fault::new(
                "it holds a password, and another is set beside it",
                "set the password in one place",
            ));
        }
        url.set_password(Some(password.expose_secret()))
            .map_err(|()| Fault::new("it has no host, so no password belongs to it", remedy))?;
    }
    Ok(String::from(url).into())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn callbacks() {
        for good in [
            "http://127.0.0.1:8080/orders",
            "https://app.example/hook?x=1",
            "unix:/run/app.sock:/orders",
            "unix:/run/app.sock",
            "http://[::1]:8080",
        ] {
            assert_eq!(callback(good).as_deref(), Ok(good));
        }
        for bad in [
            "",
            "127.0.0.1:8080",
            "ftp://h/",
            "http://",
            "http://u:hunter2@h/",
            "http://h/#a",
            "http://h:99999/",
            "http://h:0/",
            "unix:app.sock:/x",
            "unix:/a.sock:/x y",
        ] {
            let fault = callback(bad).expect_err(bad);
            assert!(!format!("{fault:?}").contains("hunter2"));
        }
        assert!(callback(&format!("http://h/{}", "a".repeat(5000))).is_err());
        assert!(callback(&format!("unix:/{}:/", "a".repeat(120))).is_err());
    }

    #[test]
    fn databases() {
        let parse = |text: &str| database(&text.into(), None);
        assert!(
            matches!(parse("sqlite:inbox.db"), Ok(DatabaseUrl::Sqlite(path)) if path == Path::new("inbox.db"))
        );
        assert!(
            matches!(parse("sqlite:///var/inbox.db"), Ok(DatabaseUrl::Sqlite(path)) if path == Path::new("/var/inbox.db"))
        );
        assert!(matches!(
            parse("postgresql://inbox@127.0.0.1/inbox"),
            Ok(DatabaseUrl::Postgres(_))
        ));
        assert!(matches!(
            parse("mariadb://inbox@127.0.0.1/inbox"),
            Ok(DatabaseUrl::MySql(url)) if url.expose_secret() == "mysql://inbox@127.0.0.1/inbox"
        ));
        for bad in [
            "inbox.db",
            "sqlite:",
            "sqlite::memory:",
            "sqlite:a.db?mode=ro",
            "postgres:inbox",
            "postgres://h/",
            "postgres://u:hunter2@h:x/inbox",
            "oracle://u:hunter2@h/inbox",
        ] {
            let fault = parse(bad).expect_err(bad);
            assert!(!format!("{fault:?}").contains("hunter2"), "{fault:?}");
        }
    }

    #[test]
    fn a_password_that_is_not_encoded_is_told_as_such() {
        for bad in ["postgres://u:hunter2#pw@h/x", "mysql://u:hunter2/pw@h/x"] {
            let fault = database(&bad.into(), None).expect_err(bad);
            assert!(fault.remedy.contains("percent-encode"), "{fault:?}");
            assert!(!format!("{fault:?}").contains("hunter2"), "{fault:?}");
        }
        assert!(database(&"postgres://h/x?application_name=a@b".into(), None).is_ok());
    }

    #[test]
    fn a_password_from_elsewhere_is_put_in_encoded() {
        let url = database(&"postgres://inbox@h/inbox".into(), Some(&"a/b@c".into())).unwrap();
        let DatabaseUrl::Postgres(url) = url else { panic!("postgres") };
        assert_eq!(url.expose_secret(), "postgres://inbox:a%2Fb%40c@h/inbox");
        assert!(database(&"postgres://inbox:x@h/inbox".into(), Some(&"y".into())).is_err());
        assert!(database(&"sqlite:a.db".into(), Some(&"y".into())).is_err());
    }

    #[test]
    fn names() {
        assert!(table_name("orders-v2.eu").is_ok());
        for bad in ["", "-a", "a b", "a__b", "é", &"a".repeat(65)] {
            assert!(table_name(bad).is_err(), "{bad}");
        }
        assert!(topic("orders").is_ok() && topic("^orders-.*").is_ok());
        for bad in ["", "a b", "..", "a/b", &"a".repeat(250)] {
            assert!(topic(bad).is_err(), "{bad}");
        }
        assert!(identifier("app_", 32).is_ok() && identifier("", 32).is_ok());
        for bad in ["1a", "A", "a-b", "a;b", &"a".repeat(33)] {
            assert!(identifier(bad, 32).is_err(), "{bad}");
        }
        assert!(broker_text("orders", 255).is_ok());
        for bad in ["", "  ", "a\nb", &"a".repeat(256)] {
            assert!(broker_text(bad, 255).is_err(), "{bad}");
        }
    }

    #[test]
    fn listeners() {
        assert_eq!(listen("off"), Ok(None));
        assert_eq!(listen("127.0.0.1:0"), Ok(Some(([127, 0, 0, 1], 0).into())));
        for bad in ["localhost:1", "7461", ":7461", "127.0.0.1"] {
            assert!(listen(bad).is_err(), "{bad}");
        }
    }
}
