//! `[broker.NAME]`: one address, its TLS and its secrets, for as many subscriptions as like.

use std::path::PathBuf;
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use secrecy::{ExposeSecret, SecretString};

use super::address::{Address, BrokerKind, parse, parse_hosts};
use super::model::{Properties, TlsFiles};
use super::names;
use super::problem::{Fault, quote};
use super::reader::{Section, read_file, shown_path};
use super::tree::Value;
use super::units::MIB;

const NAME_BYTES_MAX: usize = 255;
const PROPERTY_BYTES_MAX: usize = 64 * 1024;
const PEM_BYTES_MAX: u64 = 4 * MIB;

/// A broker as subscriptions use it.
#[derive(Clone)]
pub(super) struct Broker {
    pub(super) kind: BrokerKind,
    pub(super) hosts: Vec<String>,
    pub(super) user: Option<String>,
    pub(super) password: Option<SecretString>,
    pub(super) vhost: String,
    pub(super) tls: Option<TlsFiles>,
    pub(super) heartbeat: Duration,
    pub(super) properties: Properties,
}

impl Broker {
    /// Nowhere: for reading on where the real one is not known.
    pub(super) fn of_kind(kind: BrokerKind) -> Self {
        Self {
            kind,
            hosts: Vec::new(),
            user: None,
            password: None,
            vhost: String::new(),
            tls: None,
            heartbeat: Duration::ZERO,
            properties: Properties::default(),
        }
    }
}

/// `kind`.
pub(super) const KINDS: [(&str, BrokerKind); 2] =
    [("kafka", BrokerKind::Kafka), ("rabbitmq", BrokerKind::RabbitMq)];

/// Reads one broker; `None` where too little is known of it to go on.
pub(super) fn read(section: &Section<'_>) -> Option<Broker> {
    let kind = section.word("kind", &KINDS);
    let tls = tls_switch(section);
    let address = address(section, kind, tls.is_some());
    let password = section.secret("password");
    let user = section.parse("user", |text| names::broker_text(text, NAME_BYTES_MAX));
    let heartbeat = section.duration("heartbeat");
    if heartbeat.subsec_nanos() > 0 {
        let fault = Fault::new("AMQP counts it in whole seconds", "leave the fraction out");
        section.problem("heartbeat", fault);
    }
    let properties = properties(section);
    let broker = address.map(|address| {
        let vhost = vhost(section, &address);
        Broker {
            kind: address.kind,
            tls: tls.or_else(|| address.tls.then(TlsFiles::default)),
            hosts: address.hosts,
            user: user.or(address.user),
            password: password.or(address.password.map(SecretString::from)),
            vhost,
            heartbeat,
            properties,
        }
    });
    if let Some(broker) = &broker {
        check(section, broker);
    }
    broker
}

fn address(section: &Section<'_>, kind: Option<BrokerKind>, tls: bool) -> Option<Address> {
    // Reads the twin url_file too. Faults never show the text: it may hold a password.
    let Some(url) = section.secret("url") else {
        if !section.has_secret("url") {
            section.missing("url", "set host:port, or amqp://user@host/vhost");
        }
        return None;
    };
    let url = url.expose_secret();
    let parsed = if url.contains("://") {
        parse(url).and_then(|address| consistent(address, kind))
    } else {
        let Some(kind) = kind else {
            section.missing("kind", "set kafka or rabbitmq, or write the url with its scheme");
            return None;
        };
        parse_hosts(url, kind, tls).map(|hosts| Address {
            kind,
            tls: false,
            user: None,
            password: None,
            hosts,
            path: Vec::new(),
            parameters: Vec::new(),
        })
    };
    parsed
        .map_err(|fault| {
            let key = if section.has("url") { "url" } else { "url_file" };
            section.unreadable(key, fault);
        })
        .ok()
}

fn consistent(address: Address, kind: Option<BrokerKind>) -> Result<Address, Fault> {
    if kind.is_some_and(|kind| kind != address.kind) {
        return Err(Fault::new(
            format!("its scheme is that of {}", address.kind.as_str()),
            format!("set kind to {:?}, or leave it out", address.kind.as_str()),
        ));
    }
    if !address.parameters.is_empty() {
        return Err(Fault::new(
            "a broker's url has no parameters",
            "set them as keys of the broker or of the subscription's source",
        ));
    }
    if address.kind == BrokerKind::Kafka && !address.path.is_empty() {
        return Err(Fault::new("a broker's url names no topics", "set topics in the source"));
    }
    Ok(address)
}

fn vhost(section: &Section<'_>, address: &Address) -> String {
    if address.kind == BrokerKind::Kafka {
        return String::new();
    }
    section
        .parse("vhost", |text| names::broker_text(text, NAME_BYTES_MAX))
        .or_else(|| address.path.first().cloned())
        .unwrap_or_else(|| "/".to_owned())
}

fn check(section: &Section<'_>, broker: &Broker) {
    if broker.user.is_some() != broker.password.is_some() {
        let (have, lack) =
            if broker.user.is_some() { ("user", "password") } else { ("password", "user") };
        if !section.has_secret(lack) {
            let remedy = format!("set {lack} too ({have} is set), or neither");
            section.missing(lack, remedy);
        }
    }
    section.refuse_those_of_others(broker.kind);
}

/// `tls = true`, `tls = false` or a table of files.
fn tls_switch(section: &Section<'_>) -> Option<TlsFiles> {
    match section.node("tls").map(|node| &node.value) {
        Some(Value::Table(_)) => {
            // Only librdkafka takes an encrypted key, with the password beside it.
            let decrypts = section.section("properties").has_secret("ssl.key.password");
            Some(tls_files(&section.section("tls"), decrypts))
        }
        Some(_) => section.switch_if_set("tls").unwrap_or_default().then(TlsFiles::default),
        None => None,
    }
}

/// `ca_file`, `cert_file`, `key_file`; whether the key may be encrypted.
pub(super) fn tls_files(section: &Section<'_>, decrypts: bool) -> TlsFiles {
    let file = |key: &str| {
        section.parse(key, |text| {
            let shown = shown_path(text.as_ref());
            let remedy = "name a readable PEM file";
            let pem = read_file(text.as_ref(), &shown, PEM_BYTES_MAX, remedy)?;
            match key {
                "key_file" => holds_key(&pem, &shown, decrypts)?,
                _ => holds_certificates(&pem, &shown)?,
            }
            Ok(PathBuf::from(text))
        })
    };
    let files = TlsFiles {
        ca_file: file("ca_file"),
        cert_file: file("cert_file"),
        key_file: file("key_file"),
    };
    for (have, lack) in [("cert_file", "key_file"), ("key_file", "cert_file")] {
        if section.has(have) && !section.has(lack) {
            section
                .missing(lack, format!("a certificate and its key belong together; {have} is set"));
        }
    }
    files
}

fn holds_certificates(pem: &str, shown: &str) -> Result<(), Fault> {
    let mut certificates = CertificateDer::pem_slice_iter(pem.as_bytes()).peekable();
    if certificates.peek().is_some() && certificates.all(|certificate| certificate.is_ok()) {
        return Ok(());
    }
    Err(Fault::new(
        format!("{shown} holds no certificate in PEM, or one that cannot be read"),
        "name a file with -----BEGIN CERTIFICATE-----",
    ))
}

/// Shows nothing of the key.
fn holds_key(pem: &str, shown: &str, decrypts: bool) -> Result<(), Fault> {
    let encrypted = pem.contains("-----BEGIN ENCRYPTED PRIVATE KEY-----")
        || pem.contains("Proc-Type: 4,ENCRYPTED");
    match (encrypted, decrypts) {
        (true, true) => return Ok(()),
        (true, false) => {
            return Err(Fault::new(
                format!("{shown} holds an encrypted private key"),
                "decrypt it with openssl pkey; on Kafka properties may have ssl.key.password",
            ));
        }
        (false, _) => {}
    }
    PrivateKeyDer::from_pem_slice(pem.as_bytes()).map(drop).map_err(|_| {
        Fault::new(
            format!("{shown} holds no private key in PEM, or one that cannot be read"),
            "name a file with -----BEGIN PRIVATE KEY-----",
        )
    })
}

fn properties(section: &Section<'_>) -> Properties {
    let table = section.section("properties");
    let mut properties = Properties::default();
    for name in table.secret_names() {
        let value = table.parse_secret(name, |value| {
            property_value(value.expose_secret())?;
            known_property(name, value.expose_secret())?;
            Ok(value.clone())
        });
        if let Some(value) = value {
            properties.insert(name, value);
        }
    }
    properties
}

/// librdkafka's names have no blanks.
pub(super) fn property_name(name: &str) -> Result<(), Fault> {
    if !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    Err(Fault::new(format!("{} is no property", quote(name)), "use librdkafka's names"))
}

/// The value may be a secret: no fault shows it.
pub(super) fn property_value(value: &str) -> Result<(), Fault> {
    if value.len() <= PROPERTY_BYTES_MAX {
        return Ok(());
    }
    Err(Fault::new(
        format!("it has {} bytes, the most is {PROPERTY_BYTES_MAX}", value.len()),
        "name files by librdkafka's ….location instead of their content",
    ))
}

/// Whether librdkafka takes it and inboxd does not set it itself.
#[cfg(feature = "kafka")]
fn known_property(name: &str, value: &str) -> Result<(), Fault> {
    inboxd_kafka::check_property(name, value).map_err(|error| Fault::new(error.what, error.remedy))
}

/// Nothing here knows librdkafka's properties.
#[cfg(not(feature = "kafka"))]
fn known_property(_: &str, _: &str) -> Result<(), Fault> {
    Ok(())
}

impl Broker {
    /// The properties with what `user`, `password` and `tls` mean to librdkafka. What is set
    /// by its own name stays.
    pub(super) fn kafka_properties(&self) -> Properties {
        let mut properties = self.properties.clone();
        let protocol = match (&self.user, &self.tls) {
            (Some(_), Some(_)) => Some("sasl_ssl"),
            (Some(_), None) => Some("sasl_plaintext"),
            (None, Some(_)) => Some("ssl"),
            (None, None) => None,
        };
        if let Some(protocol) = protocol {
            properties.insert_default("security.protocol", protocol.into());
        }
        if let (Some(user), Some(password)) = (&self.user, &self.password) {
            if properties.get("sasl.mechanism").is_none() {
                properties.insert_default("sasl.mechanisms", "PLAIN".into());
            }
            properties.insert_default("sasl.username", user.as_str().into());
            properties.insert_default("sasl.password", password.clone());
        }
        let files = self.tls.iter().flat_map(|tls| {
            [
                ("ssl.ca.location", &tls.ca_file),
                ("ssl.certificate.location", &tls.cert_file),
                ("ssl.key.location", &tls.key_file),
            ]
        });
        for (name, file) in files {
            if let Some(path) = file.as_deref().and_then(|path| path.to_str()) {
                properties.insert_default(name, path.into());
            }
        }
        properties
    }
}
