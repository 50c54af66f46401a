//! Proxies on the way to the callback, from the environment's usual variables.
//!
//! They are read here and not by the client, so that whoever probes the callback's host goes
//! the same way as whoever sends. A callback on this machine never goes through a proxy.

use std::fmt;
use std::net::IpAddr;

use url::{Host, Url};

use crate::HttpConfigError;
use crate::callback::Callback;

/// `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ProxyVariables {
    /// For `http` callbacks.
    pub http: Option<String>,
    /// For `https` callbacks.
    pub https: Option<String>,
    /// For both, where the one above is not set.
    pub all: Option<String>,
    /// Hosts that are reached directly: names (which stand for those below them, too), addresses,
    /// networks (`10.0.0.0/8`), each with or without a port, or `*`; separated by commas.
    pub none: Option<String>,
}

impl ProxyVariables {
    /// As the process's environment has them, lower-case names first.
    pub fn from_environment() -> Self {
        let read = |name: &str| {
            [name.to_ascii_lowercase(), name.to_owned()]
                .iter()
                .find_map(|name| std::env::var(name).ok())
                .filter(|value| !value.trim().is_empty())
        };
        Self {
            http: read("HTTP_PROXY"),
            https: read("HTTPS_PROXY"),
            all: read("ALL_PROXY"),
            none: read("NO_PROXY"),
        }
    }

    /// The proxy that this callback is reached through, if any.
    pub(crate) fn proxy_for(&self, callback: &Callback) -> Result<Option<Url>, HttpConfigError> {
        let own = if callback.is_https() { &self.https } else { &self.http };
        let Some(text) = own.as_ref().or(self.all.as_ref()) else { return Ok(None) };
        if callback.is_local() || self.is_exempt(callback.url()) {
            return Ok(None);
        }
        let with_scheme =
            if text.contains("://") { text.trim().to_owned() } else { format!("http://{text}") };
        match Url::parse(&with_scheme) {
            Ok(url) if matches!(url.scheme(), "http" | "https") && url.has_host() => Ok(Some(url)),
            // The value may hold a password: it is not repeated.
            _ => Err(HttpConfigError::Proxy),
        }
    }

    fn is_exempt(&self, url: &Url) -> bool {
        let Some(list) = &self.none else { return false };
        let port = url.port_or_known_default();
        list.split(',').map(str::trim).filter(|entry| !entry.is_empty()).any(|entry| {
            let (host, wanted) = split_port(entry);
            (wanted.is_none() || wanted == port) && covers(host, url)
        })
    }
}

/// `host:port` apart; an IPv6 address without brackets is a host alone.
fn split_port(entry: &str) -> (&str, Option<u16>) {
    match entry.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => match port.parse() {
            Ok(port) => (host, Some(port)),
            Err(_) => (entry, None),
        },
        _ => (entry, None),
    }
}

fn covers(entry: &str, url: &Url) -> bool {
    if entry == "*" {
        return true;
    }
    let bare = entry.trim_start_matches('[').trim_end_matches(']');
    match url.host() {
        Some(Host::Domain(name)) => {
            let name = name.trim_end_matches('.').to_ascii_lowercase();
            let entry = entry.trim_start_matches("*.").trim_matches('.').to_ascii_lowercase();
            name == entry || name.strip_suffix(&entry).is_some_and(|rest| rest.ends_with('.'))
        }
        Some(Host::Ipv4(address)) => network_has(bare, address.into()),
        Some(Host::Ipv6(address)) => network_has(bare, address.into()),
        None => false,
    }
}

/// `network` is an address or `address/bits`.
fn network_has(network: &str, address: IpAddr) -> bool {
    let (base, bits) = match network.split_once('/') {
        Some((base, bits)) => (base, bits.parse::<u32>().ok()),
        None => (network, Some(128)),
    };
    let (Ok(base), Some(bits)) = (base.parse::<IpAddr>(), bits) else { return false };
    match (base, address) {
        (IpAddr::V4(base), IpAddr::V4(address)) => {
            let shift = 32 - bits.min(32);
            u32::from(base).checked_shr(shift).unwrap_or(0)
                == u32::from(address).checked_shr(shift).unwrap_or(0)
        }
        (IpAddr::V6(base), IpAddr::V6(address)) => {
            let shift = 128 - bits.min(128);
            u128::from(base).checked_shr(shift).unwrap_or(0)
                == u128::from(address).checked_shr(shift).unwrap_or(0)
        }
        _ => false,
    }
}

/// Says which are set, not to what: proxies have passwords.
impl fmt::Debug for ProxyVariables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProxyVariables")
            .field("http", &self.http.is_some())
            .field("https", &self.https.is_some())
            .field("all", &self.all.is_some())
            .field("none", &self.none)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(none: &str) -> ProxyVariables {
        ProxyVariables {
            http: Some("proxy.test:3128".into()),
            none: (!none.is_empty()).then(|| none.to_owned()),
            ..ProxyVariables::default()
        }
    }

    fn goes_through(none: &str, callback: &str) -> bool {
        let callback = Callback::parse(callback).unwrap();
        variables(none).proxy_for(&callback).unwrap().is_some()
    }

    #[test]
    fn callbacks_on_this_machine_are_direct() {
        for local in ["http://127.0.0.1:1/", "http://localhost/", "http://[::1]/", "unix:/a:/b"] {
            assert!(!goes_through("", local), "{local}");
        }
        assert!(goes_through("", "http://app.test/"));
    }

    #[test]
    fn each_scheme_has_its_variable() {
        assert!(!goes_through("", "https://app.test/"));
        let all = ProxyVariables { all: Some("http://p:1".into()), ..ProxyVariables::default() };
        let callback = Callback::parse("https://app.test/").unwrap();
        assert_eq!(all.proxy_for(&callback).unwrap().unwrap().as_str(), "http://p:1/");
    }

    #[test]
    fn exempt_hosts_are_direct() {
        for (none, callback) in [
            ("app.test", "http://app.test/"),
            ("x, .test", "http://app.test/"),
            ("test", "http://app.test/"),
            ("*", "http://app.test/"),
            ("app.test:8080", "http://app.test:8080/"),
            ("10.0.0.0/8", "http://10.2.3.4/"),
            ("10.2.3.4", "http://10.2.3.4/"),
            ("fd00::/8", "http://[fd12::1]/"),
        ] {
            assert!(!goes_through(none, callback), "{none} {callback}");
        }
        for (none, callback) in [
            ("pp.test", "http://app.test/"),
            ("app.test:81", "http://app.test/"),
            ("10.0.0.0/8", "http://11.2.3.4/"),
            ("10.2.3.4/x", "http://10.2.3.4/"),
        ] {
            assert!(goes_through(none, callback), "{none} {callback}");
        }
    }

    #[test]
    fn a_malformed_proxy_is_an_error_without_its_value() {
        let broken = ProxyVariables { http: Some("http://u:secret@".into()), ..variables("") };
        let error = broken.proxy_for(&Callback::parse("http://app.test/").unwrap()).unwrap_err();
        assert!(error.to_string().contains("HTTP_PROXY"));
        assert!(!format!("{error} {error:?} {broken:?}").contains("secret"));
    }
}
