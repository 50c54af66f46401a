//! Where messages are sent to.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use url::{Host, Url};

use crate::HttpConfigError;

/// The longest path of a Unix socket that the system takes, in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The application's address: `http://host:port/route`, `https://…` or
/// `unix:/path/to.sock:/route`.
///
/// Its `Display` and `Debug` have no credentials.
#[derive(Clone, PartialEq, Eq)]
pub struct Callback {
    // Without user, password and fragment.
    url: Url,
    socket: Option<PathBuf>,
    // `user:password` as they were in the URL, decoded.
    credentials: Option<Vec<u8>>,
}

impl Callback {
    /// Reads one.
    ///
    /// # Errors
    /// What is wrong and how it should look. The text is not repeated where it may hold a password.
    pub fn parse(text: &str) -> Result<Self, HttpConfigError> {
        let text = text.trim();
        match text.strip_prefix("unix:") {
            Some(rest) => Self::parse_unix(rest),
            None => Self::parse_url(text),
        }
    }

    fn parse_unix(rest: &str) -> Result<Self, HttpConfigError> {
        let rest = if rest.starts_with("///") { &rest[2..] } else { rest };
        let (path, route) = match rest.find(":/") {
            Some(colon) => (&rest[..colon], &rest[colon + 1..]),
            None => (rest, "/"),
        };
        if !path.starts_with('/') || path.len() < 2 {
            return Err(HttpConfigError::Callback(
                "a Unix socket is written unix:/path/to.sock:/route, its path from the root".into(),
            ));
        }
        if path.len() > SOCKET_PATH_BYTES_MAX {
            return Err(HttpConfigError::Callback(format!(
                "the socket's path has {} bytes; the system takes {SOCKET_PATH_BYTES_MAX}: \
                 choose a shorter one",
                path.len()
            )));
        }
        let mut url = Url::parse(&format!("http://localhost{route}")).map_err(|error| {
            HttpConfigError::Callback(format!("the route behind the socket's path: {error}"))
        })?;
        url.set_fragment(None);
        Ok(Self { url, socket: Some(PathBuf::from(path)), credentials: None })
    }

    fn parse_url(text: &str) -> Result<Self, HttpConfigError> {
        let form = "it is http://host:port/route, https://… or unix:/path/to.sock:/route";
        let mut url = Url::parse(text)
            .map_err(|error| HttpConfigError::Callback(format!("{error}; {form}")))?;
        if !matches!(url.scheme(), "http" | "https") {
            let scheme = url.scheme();
            return Err(HttpConfigError::Callback(format!("the scheme is {scheme}; {form}")));
        }
        let credentials = (!url.username().is_empty() || url.password().is_some()).then(|| {
            let mut pair = decoded(url.username());
            pair.push(b':');
            pair.extend(decoded(url.password().unwrap_or_default()));
            pair
        });
        // Neither fails: the URL has a host.
        let _ = url.set_username("");
        let _ = url.set_password(None);
        url.set_fragment(None);
        Ok(Self { url, socket: None, credentials })
    }

    /// The request's URL, without credentials; behind a Unix socket its host is `localhost`.
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// The socket's path, where it is a Unix socket.
    pub fn socket(&self) -> Option<&Path> {
        self.socket.as_deref()
    }

    /// It is `https`.
    pub fn is_https(&self) -> bool {
        self.url.scheme() == "https"
    }

    /// On this very machine: a Unix socket, `localhost`, 127.0.0.0/8 or ::1.
    pub fn is_local(&self) -> bool {
        self.socket.is_some() || is_loopback(&self.url)
    }

    /// Another path and query on the same host.
    pub(crate) fn at(&self, path: &str) -> Self {
        let mut at = self.clone();
        set_path_and_query(&mut at.url, path);
        at
    }

    /// The same scheme, host and port, or the same socket.
    pub(crate) fn has_host_of(&self, other: &Self) -> bool {
        self.socket == other.socket && self.url.origin() == other.url.origin()
    }

    /// `user:password` of the URL.
    pub(crate) fn credentials(&self) -> Option<&[u8]> {
        self.credentials.as_deref()
    }
}

/// In place of what it has.
pub(crate) fn set_path_and_query(url: &mut Url, path: &str) {
    let (path, query) = match path.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (path, None),
    };
    url.set_path(path);
    url.set_query(query);
}

/// The host is `localhost`, a name below it, or a loopback address.
pub(crate) fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => IpAddr::V6(address).to_canonical().is_loopback(),
        Some(Host::Domain(name)) => {
            let name = name.trim_end_matches('.').to_ascii_lowercase();
            name == "localhost" || name.ends_with(".localhost")
        }
        None => false,
    }
}

fn decoded(text: &str) -> Vec<u8> {
    percent_encoding::percent_decode_str(text).collect()
}

impl fmt::Display for Callback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.socket {
            Some(path) => {
                write!(f, "unix:{}:{}", path.display(), self.url.path())?;
            }
            None => {
                let mut url = self.url.clone();
                url.set_query(None);
                fmt::Display::fmt(&url, f)?;
            }
        }
        // A query may hold a key.
        if self.url.query().is_some() { f.write_str("?\u{2026}") } else { Ok(()) }
    }
}

impl fmt::Debug for Callback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Callback {
        Callback::parse(text).unwrap()
    }

    #[test]
    fn a_unix_socket_has_a_path_and_a_route() {
        let callback = parsed("unix:/run/app.sock:/orders?x=1");
        assert_eq!(callback.socket(), Some(Path::new("/run/app.sock")));
        assert_eq!(callback.url().as_str(), "http://localhost/orders?x=1");
        assert_eq!(callback.to_string(), "unix:/run/app.sock:/orders?\u{2026}");
        assert_eq!(parsed("unix:///run/app.sock:/o").socket(), Some(Path::new("/run/app.sock")));
        assert_eq!(parsed("unix:/run/app.sock").url().path(), "/");
        assert!(callback.is_local());
    }

    #[test]
    fn credentials_are_kept_apart_and_never_printed() {
        let callback = parsed("http://me:p%40ss@app:8080/o#f");
        assert_eq!(callback.credentials(), Some(&b"me:p@ss"[..]));
        assert_eq!(callback.url().as_str(), "http://app:8080/o");
        assert!(!format!("{callback} {callback:?}").contains("ss"));
    }

    #[test]
    fn local_is_known_by_name_and_address() {
        for local in
            ["http://localhost:1/", "http://127.8.0.1/", "https://[::1]:2/", "http://a.localhost/"]
        {
            assert!(parsed(local).is_local(), "{local}");
        }
        for remote in ["http://example.test/", "http://10.0.0.1/", "http://localhost.example.test/"]
        {
            assert!(!parsed(remote).is_local(), "{remote}");
        }
    }

    #[test]
    fn what_is_no_callback_is_refused_with_its_form() {
        let long = format!("unix:/{}:/", "x".repeat(200));
        for bad in
            ["", "app:8080/orders", "ftp://a/b", "http://", "unix:app.sock:/x", "unix:", &long]
        {
            let error = Callback::parse(bad).unwrap_err().to_string();
            assert!(error.contains("unix:/") || error.contains("shorter"), "{bad}: {error}");
        }
    }
}
