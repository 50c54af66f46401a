//! The grammar of `--source`, and of a broker's `url`.
//!
//! ```text
//! source     = scheme "://" [ user [ ":" password ] "@" ] hosts [ "/" path ] [ "?" parameters ]
//! scheme     = "amqp" | "amqps" | "kafka"
//! hosts      = host [ ":" port ] *( "," host [ ":" port ] )       an IPv6 address in brackets
//! path       = a vhost (amqp), or topics with commas (kafka); a topic that begins with ^ is
//!              a regular expression
//! parameters = key "=" value *( "&" key "=" value )
//! ```
//!
//! Everything between the delimiters is percent-encoded UTF-8; `+` is itself. A parameter's key
//! is a key of the `source` table, `properties.<name>` (the broker's properties), `heartbeat` or
//! `tls.<key>` (the broker's), or another key of the subscription (`ordering`, `retry.cap` …).

use percent_encoding::percent_decode_str;

use super::problem::Fault;

const ADDRESS_BYTES_MAX: usize = 4096;
const HOSTS_MAX: usize = 64;
const HOST_BYTES_MAX: usize = 253;
const EXAMPLES: &str =
    "write amqp://user:password@host:5672/vhost?queue=orders or kafka://host:9092/topic?group=name";

/// Which broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BrokerKind {
    RabbitMq,
    Kafka,
}

impl BrokerKind {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::RabbitMq => "rabbitmq",
            Self::Kafka => "kafka",
        }
    }

    /// As people write it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::RabbitMq => "RabbitMQ",
            Self::Kafka => "Kafka",
        }
    }

    fn port(self, tls: bool) -> u16 {
        match (self, tls) {
            (Self::RabbitMq, false) => 5672,
            (Self::RabbitMq, true) => 5671,
            (Self::Kafka, _) => 9092,
        }
    }
}

/// An address taken apart; not printable, because it may hold a password.
#[derive(PartialEq, Eq)]
pub(super) struct Address {
    pub(super) kind: BrokerKind,
    pub(super) tls: bool,
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    /// `host:port` each.
    pub(super) hosts: Vec<String>,
    /// The path's parts, split at commas, decoded; none where there is no path.
    pub(super) path: Vec<String>,
    /// In the order given, decoded.
    pub(super) parameters: Vec<(String, String)>,
}

/// Takes an address apart. Faults show no part that may be secret.
pub(super) fn parse(text: &str) -> Result<Address, Fault> {
    let text = text.trim();
    if text.len() > ADDRESS_BYTES_MAX {
        return Err(Fault::new(
            format!("it has {} bytes, the most is {ADDRESS_BYTES_MAX}", text.len()),
            "shorten it, or write a configuration file",
        ));
    }
    if text.contains('#') {
        return Err(Fault::new("it has a #, which delimits nothing here", "write %23 for a #"));
    }
    if text.contains(|c: char| c.is_control() || c.is_whitespace()) {
        return Err(Fault::new(
            "it has white space or a control character",
            "percent-encode it: %20 is a space",
        ));
    }
    let (scheme, rest) =
        text.split_once("://").ok_or_else(|| Fault::new("it has no scheme", EXAMPLES))?;
    let (kind, tls) = match scheme {
        "amqp" => (BrokerKind::RabbitMq, false),
        "amqps" => (BrokerKind::RabbitMq, true),
        "kafka" => (BrokerKind::Kafka, false),
        _ => return Err(Fault::new(format!("the scheme {scheme:?} is not known"), EXAMPLES)),
    };
    let (rest, query) = match rest.split_once('?') {
        Some((rest, query)) => (rest, Some(query)),
        None => (rest, None),
    };
    let (authority, path) = match rest.split_once('/') {
        Some((authority, path)) => (authority, path),
        None => (rest, ""),
    };
    // A password may hold an @ that nobody encoded: the last one is the delimiter.
    let (credentials, hosts) = match authority.rsplit_once('@') {
        Some((credentials, hosts)) => (Some(credentials), hosts),
        None => (None, authority),
    };
    let (user, password) = match credentials.map(|both| both.split_once(':').ok_or(both)) {
        None => (None, None),
        Some(Err(user)) => (Some(decode("the user's name", user)?), None),
        Some(Ok((user, password))) => {
            (Some(decode("the user's name", user)?), Some(decode("the password", password)?))
        }
    };
    Ok(Address {
        kind,
        tls,
        user,
        password,
        hosts: parse_hosts(hosts, kind, tls)?,
        path: parse_path(path, kind)?,
        parameters: query.map(parse_parameters).transpose()?.unwrap_or_default(),
    })
}

/// `host[:port]` with commas; each gets the kind's port where it names none.
pub(super) fn parse_hosts(text: &str, kind: BrokerKind, tls: bool) -> Result<Vec<String>, Fault> {
    let hosts: Vec<_> = text.split(',').map(str::trim).collect();
    if hosts.len() > HOSTS_MAX {
        return Err(Fault::new(
            format!("it names {} hosts, the most is {HOSTS_MAX}", hosts.len()),
            "name a few; the broker tells the others",
        ));
    }
    hosts.into_iter().map(|host| parse_host(host, kind.port(tls))).collect()
}

fn parse_host(text: &str, default_port: u16) -> Result<String, Fault> {
    let remedy = "write host:port, like 127.0.0.1:9092 or [::1]:5672; percent-encode a / or an @ in a password";
    let (host, port) = match text.rsplit_once(':') {
        // The last colon is within an address in brackets.
        Some((_, port)) if port.ends_with(']') => (text, None),
        Some((host, port)) => (host, Some(port)),
        None => (text, None),
    };
    let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let valid = match inner {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            !host.is_empty()
                && host.len() <= HOST_BYTES_MAX
                && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
        }
    };
    if !valid {
        return Err(Fault::new("it has a host that is no name or address", remedy));
    }
    let port = match port {
        None => default_port,
        Some(port) => port
            .parse::<u16>()
            .ok()
            .filter(|port| *port > 0)
            .ok_or_else(|| Fault::new("a port is no number from 1 to 65535", remedy))?,
    };
    Ok(format!("{host}:{port}"))
}

fn parse_path(path: &str, kind: BrokerKind) -> Result<Vec<String>, Fault> {
    if path.is_empty() {
        return Ok(Vec::new());
    }
    match kind {
        BrokerKind::RabbitMq if path.contains('/') => Err(Fault::new(
            "the vhost has a /",
            "write %2F for a / in a vhost; the default vhost is %2F",
        )),
        BrokerKind::RabbitMq => Ok(vec![decode("the vhost", path)?]),
        BrokerKind::Kafka => path.split(',').map(|topic| decode("a topic", topic)).collect(),
    }
}

fn parse_parameters(query: &str) -> Result<Vec<(String, String)>, Fault> {
    let mut parameters: Vec<(String, String)> = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').ok_or_else(|| {
            Fault::new(
                "a parameter has no value",
                "write key=value, and %26 for an & within a value",
            )
        })?;
        let key = decode("a parameter's name", key)?;
        let value = decode(&format!("the parameter {key}"), value)?;
        if parameters.iter().any(|(known, _)| *known == key) {
            return Err(Fault::new(
                format!("the parameter {key} is there twice"),
                "write it once, a list with commas",
            ));
        }
        parameters.push((key, value));
    }
    Ok(parameters)
}

fn decode(what: &str, text: &str) -> Result<String, Fault> {
    let bytes = text.as_bytes();
    let broken = bytes.iter().enumerate().any(|(at, byte)| {
        *byte == b'%'
            && !bytes
                .get(at + 1..at + 3)
                .is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    });
    if broken {
        return Err(Fault::new(
            format!("{what} has a % without two hex digits"),
            "write %25 for a %",
        ));
    }
    match percent_decode_str(text).decode_utf8() {
        Ok(decoded) if !decoded.contains('\0') => Ok(decoded.into_owned()),
        _ => Err(Fault::new(
            format!("{what} is not percent-encoded UTF-8 without NUL"),
            "encode its bytes in UTF-8",
        )),
    }
}

#[cfg(test)]
mod tests {
    use inboxd_contract::encode_percent;
    use proptest::prelude::*;

    use super::*;

    fn good(text: &str) -> Address {
        parse(text).unwrap_or_else(|fault| panic!("{text}: {fault:?}"))
    }

    fn bad(text: &str) -> Fault {
        parse(text).err().unwrap_or_else(|| panic!("{text} was taken"))
    }

    #[test]
    fn a_rabbitmq_queue() {
        let address = good("amqp://guest:guest@127.0.0.1:5672/%2f?queue=orders&prefetch=64");
        assert_eq!(address.kind, BrokerKind::RabbitMq);
        assert!(!address.tls);
        assert_eq!(address.user.as_deref(), Some("guest"));
        assert_eq!(address.password.as_deref(), Some("guest"));
        assert_eq!(address.hosts, ["127.0.0.1:5672"]);
        assert_eq!(address.path, ["/"]);
        assert_eq!(
            address.parameters,
            [("queue".into(), "orders".into()), ("prefetch".into(), "64".into())]
        );
    }

    #[test]
    fn several_brokers_and_topics() {
        let address =
            good("kafka://a:9092,b,[::1]:9094,[2001:db8::1]/orders,refunds?group=billing");
        assert_eq!(address.kind, BrokerKind::Kafka);
        assert_eq!(address.hosts, ["a:9092", "b:9092", "[::1]:9094", "[2001:db8::1]:9092"]);
        assert_eq!(address.path, ["orders", "refunds"]);
    }

    #[test]
    fn a_pattern_and_properties() {
        let address = good("kafka://a/%5Eorders-.*?group=g&properties.fetch.wait.max.ms=50");
        assert_eq!(address.path, ["^orders-.*"]);
        assert_eq!(address.parameters[1], ("properties.fetch.wait.max.ms".into(), "50".into()));
    }

    #[test]
    fn tls_has_its_own_port() {
        let address = good("amqps://mq.example/");
        assert!(address.tls);
        assert_eq!(address.hosts, ["mq.example:5671"]);
        assert!(address.path.is_empty() && address.user.is_none());
    }

    #[test]
    fn an_at_sign_in_a_password_and_a_plus_in_a_value_are_themselves() {
        let address = good("amqp://u:p@ss%2Fword@h/?queue=a+b%26c");
        assert_eq!(address.password.as_deref(), Some("p@ss/word"));
        assert_eq!(address.parameters[0].1, "a+b&c");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, what) in [
            ("127.0.0.1:5672", "no scheme"),
            ("redis://h", "\"redis\""),
            ("amqp://", "a host that is no name"),
            ("amqp://h:0/", "port"),
            ("amqp://h:70000/", "port"),
            ("amqp://h:/", "port"),
            ("amqp://h/a/b", "vhost has a /"),
            ("amqp://h/%zz", "two hex digits"),
            ("amqp://h/%ff", "UTF-8"),
            ("amqp://h/%00", "NUL"),
            ("amqp://h/?queue", "no value"),
            ("amqp://h/?queue=a&queue=b", "twice"),
            ("amqp://h/?queue=a#b", "#"),
            ("amqp://h/?queue=a b", "white space"),
            ("kafka://a,,b/t", "a host that is no name"),
            ("kafka://[::zz]/t", "a host that is no name"),
        ] {
            let fault = bad(text);
            assert!(fault.what.contains(what), "{text}: {fault:?}");
            assert!(!fault.remedy.is_empty());
        }
        assert!(bad(&format!("amqp://h/{}", "a".repeat(5000))).what.contains("4096"));
    }

    #[test]
    fn a_password_is_in_no_fault() {
        for text in [
            "amqp://u:hunter2@h:x/",
            "amqp://u:hunter2@/",
            "amqp://u:hunter2/@h/",
            "amqp://u:hunter2%zz@h/",
            "amqp://u:hunter2 @h/",
            "amqp://u:hunter2@h/?x",
            "amqp://u:hunter2",
        ] {
            let fault = bad(text);
            assert!(!format!("{fault:?}").contains("hunter2"), "{text}: {fault:?}");
        }
    }

    proptest! {
        #[test]
        fn any_encoded_parts_come_back(
            user in "[^\0]{1,20}",
            password in "[^\0]{0,20}",
            vhost in "[^\0]{1,20}",
            queue in "[^\0]{1,20}",
        ) {
            let encode = |text: &str| encode_percent(text.as_bytes());
            let text = format!(
                "amqp://{}:{}@h:1,i:2/{}?queue={}",
                encode(&user), encode(&password), encode(&vhost), encode(&queue)
            );
            let address = good(&text);
            prop_assert_eq!(address.user, Some(user));
            prop_assert_eq!(address.password, Some(password));
            prop_assert_eq!(address.path, vec![vhost]);
            prop_assert_eq!(address.parameters, vec![("queue".to_owned(), queue)]);
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,60}") {
            drop(parse(&text));
            drop(parse(&format!("amqp://{text}")));
            drop(parse(&format!("kafka://{text}")));
        }
    }
}
