//! The forms of text that keys hold.

use inboxd_contract::ConsumerId;
use secrecy::SecretString;

use super::address::{self, BrokerKind};
use super::declare::Form;
use super::problem::Fault;
use super::{broker, callback, failure, headers, identity, names, process, routes, telemetry};

/// A list that commas split rightly.
pub(super) fn as_they_are(items: Vec<String>) -> Vec<String> {
    items
}

pub(super) static NAME_255: Form = Form {
    limits: "255 bytes",
    pattern: r"\S",
    sample: "another",
    check: |text| names::broker_text(text, 255).map(drop),
};

pub(super) static NAME_1024: Form = Form {
    limits: "1,024 bytes",
    pattern: r"\S",
    sample: "^another-.*",
    check: |text| names::broker_text(text, 1_024).map(drop),
};

pub(super) static TABLE_NAME: Form = Form {
    limits: "64 letters, digits, `-`, `_` and `.`",
    pattern: names::TABLE_NAME_PATTERN,
    sample: "another",
    check: names::table_name,
};

pub(super) static SECRET: Form =
    Form { limits: "", pattern: "", sample: "canary-secret", check: |_| Ok(()) };

pub(super) static TOKEN: Form = Form {
    limits: "16 bytes and more",
    pattern: r"^[\s\S]{16,}$",
    sample: "canary-secret-of-operators",
    check: process::token,
};

pub(super) static DATABASE: Form = Form {
    limits: "",
    pattern: "^(sqlite|postgres|postgresql|mysql|mariadb):.+",
    sample: "postgres://inbox:canary-secret@db/other",
    check: |text| names::database(&SecretString::from(text), None).map(drop),
};

pub(super) static SCHEMA: Form = Form {
    limits: "identifier, 41 characters",
    pattern: "^([a-z_][a-z0-9_]{0,40})?$",
    sample: "another",
    check: |text| names::identifier(text, process::SCHEMA_BYTES_MAX).map(drop),
};

pub(super) static TABLE_PREFIX: Form = Form {
    limits: "identifier, 32 characters",
    pattern: "^([a-z_][a-z0-9_]{0,31})?$",
    sample: "another_",
    check: |text| names::identifier(text, process::PREFIX_BYTES_MAX).map(drop),
};

pub(super) static LISTEN: Form = Form {
    limits: "IP address with port, or `off`",
    pattern: r"^\s*(off|(\d{1,3}\.){3}\d{1,3}:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5})\s*$",
    sample: "127.0.0.1:7999",
    check: |text| names::listen(text).map(drop),
};

pub(super) static LOG_LEVEL: Form = Form {
    limits: "error – trace, or directives as `RUST_LOG` has them",
    pattern: "",
    sample: "debug",
    check: |text| process::level(text).map(drop),
};

pub(super) static ENDPOINT: Form = Form {
    limits: "`http://…`, `https://…`",
    pattern: "^\\s*https?://",
    sample: "http://127.0.0.1:4318",
    check: |text| telemetry::endpoint(text).map(drop),
};

pub(super) static BROKER_URL: Form = Form {
    limits: "64 hosts",
    pattern: "^\\s*((amqps?|kafka)://)?[^\\s#]+\\s*$",
    sample: "",
    check: |text| {
        if text.contains("://") {
            address::parse(text).map(drop)
        } else {
            // Which port a host gets without one is not looked at.
            address::parse_hosts(text, BrokerKind::Kafka, false).map(drop)
        }
    },
};

pub(super) static PROPERTY: Form = Form {
    limits: "256 properties",
    pattern: "^[!-~]+$",
    sample: "sasl.password",
    check: broker::property_name,
};

pub(super) static PROPERTY_VALUE: Form =
    Form { limits: "64 KiB", pattern: "", sample: "canary-secret", check: broker::property_value };

pub(super) static CALLBACK: Form = Form {
    limits: "4,096 bytes",
    pattern: "^\\s*(https?://|unix:/)",
    sample: "http://127.0.0.1:8081/other",
    check: |text| names::callback(text).map(drop),
};

pub(super) static CONSUMER_ID: Form = Form {
    limits: "128 bytes",
    pattern: r"\S",
    sample: "another",
    check: |text| consumer_id(text).map(drop),
};

/// The name of a logical subscriber.
pub(super) fn consumer_id(text: &str) -> Result<ConsumerId, Fault> {
    ConsumerId::new(text).map_err(|error| {
        Fault::new(error.to_string(), "set a short name that stays the same across deploys")
    })
}

pub(super) static ORDERING_KEY: Form = Form {
    limits: "record-key, routing-key, header:NAME, json:/POINTER",
    pattern: "^(record-key|routing-key|header:.+|json:/.*)$",
    sample: "header:tenant",
    check: |text| identity::key_from(text).map(drop),
};

pub(super) static TOPIC: Form = Form {
    limits: "names",
    pattern: "^(\\^.+|[A-Za-z0-9._-]{1,249})$",
    sample: "another",
    check: |text| names::topic(text).map(drop),
};

pub(super) static TOPIC_NAME: Form = Form {
    limits: "a name",
    pattern: "^[A-Za-z0-9._-]{1,249}$",
    sample: "another",
    check: |text| failure::topic_name(text).map(drop),
};

pub(super) static EXTRACTOR: Form = Form {
    limits: "property, header:NAME, cloudevents, json:/POINTER, hash:/POINTER,/POINTER, body-hash, kafka-key, kafka-position",
    pattern: "^(property|cloudevents|body-hash|kafka-key|kafka-position|header:.+|json:/.*|hash:/.*|/.*)$",
    sample: "body-hash",
    check: |text| identity::extractor(text).map(drop),
};

pub(super) static FINGERPRINT: Form = Form {
    limits: "body, json:/POINTER, off",
    pattern: "^(body|off|json:/.*)$",
    sample: "off",
    check: |text| identity::fingerprint(text).map(drop),
};

pub(super) static HEADER_NAME: Form = Form {
    limits: "names",
    pattern: headers::TOKEN_PATTERN,
    sample: "tenant",
    check: headers::check_name,
};

pub(super) static HEADER_PREFIX: Form = Form {
    limits: "64 bytes",
    pattern: "^[!#$%&'*+.^_`|~0-9A-Za-z-]{0,64}$",
    sample: "X-Message-",
    check: |text| callback::header_prefix(text).map(drop),
};

pub(super) static SET_HEADER: Form = Form {
    limits: "64 headers",
    pattern: headers::TOKEN_PATTERN,
    sample: "authorization",
    check: callback::may_be_set,
};

pub(super) static EXPORT_HEADER: Form = Form {
    limits: "64 headers",
    pattern: headers::TOKEN_PATTERN,
    sample: "authorization",
    check: telemetry::header_name,
};

pub(super) static HEADER_VALUE: Form = Form {
    limits: "8 KiB",
    pattern: "^[\\t -~]+$",
    sample: "Bearer canary-secret",
    check: headers::check_value,
};

pub(super) static STATUS: Form = Form {
    limits: "three digits from 200, or a class like `4xx`",
    pattern: "^[2-9]([0-9][0-9]|[xX][xX])$",
    sample: "404",
    check: |text| callback::status_pattern(text).map(drop),
};

pub(super) static SIGNING_SECRET: Form = Form {
    limits: "`whsec_` and the base64 of 24 to 64 bytes",
    pattern: "^whsec_[A-Za-z0-9+/]{32,86}={0,2}$",
    sample: "whsec_Y2FuYXJ5LXNlY3JldC1vZi13ZWJob29rcy0wMDE=",
    check: callback::signing_secret,
};

pub(super) static PATTERN: Form = Form {
    limits: "`*` is any run of characters",
    pattern: r"\S",
    sample: "refund.*",
    check: |text| routes::pattern(text).map(drop),
};

pub(super) static HEADER_PATTERN: Form = Form {
    limits: "`NAME=PATTERN`",
    pattern: "^\\s*[!#$%&'*+.^_`|~0-9A-Za-z-]+\\s*=\\s*\\S",
    sample: "tenant=a*",
    check: |text| routes::header_pattern(text).map(drop),
};

pub(super) static PATH: Form = Form {
    limits: "begins with one `/`",
    pattern: r"^\s*/(?!/)[^\s#\\]*\s*$",
    sample: "/other?x=1",
    check: |text| routes::path(text).map(drop),
};
