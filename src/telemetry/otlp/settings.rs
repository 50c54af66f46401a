//! What is exported, where to and how: the configuration, then the `OTEL_*` variables, then the
//! specification's defaults.
//!
//! Invariants: nothing is exported unless an endpoint is named; a key of the configuration comes
//! before a variable; values of headers are never printed, nor are URLs with credentials taken.

use std::time::Duration;

use opentelemetry_sdk::trace::Sampler;
use percent_encoding::percent_decode_str;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Certificate, Url};
use secrecy::ExposeSecret as _;

use crate::config::TelemetryConfig;

const SERVICE_NAME: &str = "inboxd";
const TIMEOUT: Duration = Duration::from_secs(10);
const METRICS_INTERVAL: Duration = Duration::from_secs(60);
/// Bounds what spans take in memory, whatever a variable says.
const QUEUE_MAX: usize = 65_536;

/// The kinds of telemetry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Signal {
    Traces,
    Metrics,
}

impl Signal {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Traces => "traces",
            Self::Metrics => "metrics",
        }
    }

    fn variable(self, name: &str) -> String {
        format!("OTEL_EXPORTER_OTLP_{}_{name}", self.as_str().to_ascii_uppercase())
    }
}

/// Where one signal goes.
#[derive(Debug, Clone)]
pub(super) struct Target {
    /// Its query may hold a key: print [`Target::shown`].
    pub(super) url: Url,
    /// What the collector's certificate is checked against in place of the system's roots.
    pub(super) roots: Option<Vec<Certificate>>,
    /// Marked as sensitive: not printed.
    pub(super) headers: HeaderMap,
    /// The bound on one export.
    pub(super) timeout: Duration,
}

impl Target {
    /// The URL as it may stand in logs: without its query and fragment.
    pub(super) fn shown(&self) -> String {
        let mut url = self.url.clone();
        url.set_query(None);
        url.set_fragment(None);
        url.into()
    }
}

/// How spans are batched.
#[derive(Debug, Clone, Copy)]
pub(super) struct Batching {
    pub(super) queue_max: usize,
    pub(super) batch_max: usize,
    pub(super) delay: Duration,
}

/// Everything.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) traces: Option<Target>,
    pub(super) metrics: Option<Target>,
    /// `service.name`, the attributes of `OTEL_RESOURCE_ATTRIBUTES`, in no order.
    pub(super) resource: Vec<(String, String)>,
    pub(super) sampler: Sampler,
    pub(super) batching: Batching,
    pub(super) metrics_interval: Duration,
    /// What the operator should know, though it is no error.
    pub(super) notices: Vec<String>,
}

/// A key or variable cannot be followed.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct TelemetryError {
    /// Which.
    pub name: String,
    /// What is wrong and what to write instead; no secrets.
    pub what: String,
}

fn refused<T>(name: impl Into<String>, what: impl Into<String>) -> Result<T, TelemetryError> {
    Err(TelemetryError { name: name.into(), what: what.into() })
}

impl Settings {
    /// `environment` answers the value of a variable. `Ok(None)`: nothing is to be exported.
    pub(super) fn resolve(
        config: &TelemetryConfig,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, TelemetryError> {
        let variables = Variables(&environment);
        if variables.get("OTEL_SDK_DISABLED").is_some_and(|on| on.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let mut notices = Vec::new();
        let traces = target(config, &variables, Signal::Traces, &mut notices)?;
        let metrics = target(config, &variables, Signal::Metrics, &mut notices)?;
        if traces.is_none() && metrics.is_none() {
            return Ok(None);
        }
        let queue_max = variables.number("OTEL_BSP_MAX_QUEUE_SIZE", 2_048, &mut notices);
        let queue_max = (queue_max as usize).clamp(1, QUEUE_MAX);
        let batch_max = variables.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512, &mut notices);
        let delay = variables.number("OTEL_BSP_SCHEDULE_DELAY", 5_000, &mut notices);
        let interval = config.metrics_interval.unwrap_or_else(|| {
            let default = METRICS_INTERVAL.as_millis() as u64;
            let name = "OTEL_METRIC_EXPORT_INTERVAL";
            Duration::from_millis(variables.number(name, default, &mut notices).max(100))
        });
        Ok(Some(Self {
            traces,
            metrics,
            resource: resource(config, &variables, &mut notices),
            sampler: sampler(config, &variables, &mut notices),
            batching: Batching {
                queue_max,
                batch_max: (batch_max as usize).clamp(1, queue_max),
                delay: Duration::from_millis(delay),
            },
            metrics_interval: interval,
            notices,
        }))
    }
}

/// The environment, where an empty value is none, as the specification says.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        let value = (self.0)(name)?;
        let value = value.trim();
        (!value.is_empty()).then(|| value.to_owned())
    }

    /// A signal's own variable, else the one for all.
    fn either(&self, signal: Signal, name: &str) -> Option<(String, String)> {
        [signal.variable(name), format!("OTEL_EXPORTER_OTLP_{name}")]
            .into_iter()
            .find_map(|variable| self.get(&variable).map(|value| (variable, value)))
    }

    /// As the specification says, a number that is none is named and passed over.
    fn number(&self, name: &str, default: u64, notices: &mut Vec<String>) -> u64 {
        let Some(text) = self.get(name) else { return default };
        text.parse().unwrap_or_else(|_| {
            notices.push(format!("{name} is no number: {default} is taken"));
            default
        })
    }
}

fn target(
    config: &TelemetryConfig,
    variables: &Variables<'_>,
    signal: Signal,
    notices: &mut Vec<String>,
) -> Result<Option<Target>, TelemetryError> {
    let wanted = match signal {
        Signal::Traces => config.traces,
        Signal::Metrics => config.metrics,
    };
    let wanted = match wanted {
        Some(wanted) => wanted,
        None => is_exported(variables, signal)?,
    };
    if !wanted {
        return Ok(None);
    }
    let Some(url) = endpoint(config, variables, signal)? else { return Ok(None) };
    if let Some((name, protocol)) = variables.either(signal, "PROTOCOL")
        && protocol != "http/protobuf"
    {
        return refused(
            name,
            format!("{protocol:?} is not spoken here: set http/protobuf, mostly on port 4318"),
        );
    }
    if let Some((name, compression)) = variables.either(signal, "COMPRESSION")
        && compression != "none"
    {
        notices.push(format!("{name}: exports are sent without compression"));
    }
    let timeout = match (config.timeout, variables.either(signal, "TIMEOUT")) {
        (Some(timeout), _) => timeout,
        (None, Some((name, _))) => {
            let default = TIMEOUT.as_millis() as u64;
            Duration::from_millis(variables.number(&name, default, notices).max(1))
        }
        (None, None) => TIMEOUT,
    };
    for name in ["CLIENT_CERTIFICATE", "CLIENT_KEY"] {
        if let Some((name, _)) = variables.either(signal, name) {
            notices.push(format!("{name}: exports are sent without a client certificate"));
        }
    }
    let roots = match url.scheme() {
        "https" => roots(variables, signal)?,
        _ => None,
    };
    Ok(Some(Target { url, roots, headers: headers(config, variables, signal)?, timeout }))
}

fn roots(
    variables: &Variables<'_>,
    signal: Signal,
) -> Result<Option<Vec<Certificate>>, TelemetryError> {
    let Some((name, path)) = variables.either(signal, "CERTIFICATE") else { return Ok(None) };
    let pem = match std::fs::read(&path) {
        Ok(pem) => pem,
        Err(error) => return refused(name, format!("the file {path:?} cannot be read: {error}")),
    };
    match Certificate::from_pem_bundle(&pem) {
        Ok(roots) if !roots.is_empty() => Ok(Some(roots)),
        _ => refused(name, format!("the file {path:?} has no certificates in PEM")),
    }
}

fn is_exported(variables: &Variables<'_>, signal: Signal) -> Result<bool, TelemetryError> {
    let name = format!("OTEL_{}_EXPORTER", signal.as_str().to_ascii_uppercase());
    match variables.get(&name).as_deref() {
        None | Some("otlp") => Ok(true),
        Some("none") => Ok(false),
        // Prometheus can have them from /metrics in any case.
        Some("prometheus") if signal == Signal::Metrics => Ok(false),
        Some(other) => refused(name, format!("{other:?} is not known: set otlp or none")),
    }
}

fn endpoint(
    config: &TelemetryConfig,
    variables: &Variables<'_>,
    signal: Signal,
) -> Result<Option<Url>, TelemetryError> {
    let path = format!("v1/{}", signal.as_str());
    let own = signal.variable("ENDPOINT");
    let mut path_is_added = true;
    let (name, text) = if let Some(base) = &config.endpoint {
        ("telemetry.endpoint".to_owned(), format!("{}/{path}", base.trim_end_matches('/')))
    } else if let Some(url) = variables.get(&own) {
        path_is_added = false;
        (own, url)
    } else if let Some(base) = variables.get("OTEL_EXPORTER_OTLP_ENDPOINT") {
        let url = format!("{}/{path}", base.trim_end_matches('/'));
        ("OTEL_EXPORTER_OTLP_ENDPOINT".to_owned(), url)
    } else {
        return Ok(None);
    };
    let url = match Url::parse(&text) {
        Ok(url) if matches!(url.scheme(), "http" | "https") && url.has_host() => url,
        // The text may hold credentials.
        _ => return refused(name, "it is no URL: write it like http://127.0.0.1:4318"),
    };
    if !url.username().is_empty() || url.password().is_some() {
        return refused(name, "it holds credentials, which would stand in logs: use a header");
    }
    if path_is_added && (url.query().is_some() || url.fragment().is_some()) {
        let what = format!(
            "it has a query or a fragment, after which no path can be added: write the base URL \
             alone, or the whole URL as {}",
            signal.variable("ENDPOINT")
        );
        return refused(name, what);
    }
    Ok(Some(url))
}

/// The configuration's headers replace those of the environment, which may be another
/// collector's.
fn headers(
    config: &TelemetryConfig,
    variables: &Variables<'_>,
    signal: Signal,
) -> Result<HeaderMap, TelemetryError> {
    let mut headers = HeaderMap::new();
    let mut put = |source: &str, name: &str, value: &str| {
        let (Ok(header), Ok(mut value)) =
            (HeaderName::try_from(name.trim()), HeaderValue::try_from(value.trim()))
        else {
            return refused(source, "it holds something that is no header: write name=value,…");
        };
        value.set_sensitive(true);
        headers.insert(header, value);
        Ok(())
    };
    if !config.headers.is_empty() {
        for (name, value) in &config.headers {
            put("telemetry.headers", name, value.expose_secret())?;
        }
        return Ok(headers);
    }
    for variable in ["OTEL_EXPORTER_OTLP_HEADERS".to_owned(), signal.variable("HEADERS")] {
        for (name, value) in pairs(&variables.get(&variable).unwrap_or_default()) {
            put(&variable, &name, &value)?;
        }
    }
    Ok(headers)
}

/// `name=value,…` with percent-encoded values, as in baggage. What has no `=` is left out.
fn pairs(text: &str) -> Vec<(String, String)> {
    text.split(',')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| {
            let value = percent_decode_str(value.trim()).decode_utf8_lossy().into_owned();
            (name.trim().to_owned(), value)
        })
        .filter(|(name, _)| !name.is_empty())
        .collect()
}

fn resource(
    config: &TelemetryConfig,
    variables: &Variables<'_>,
    notices: &mut Vec<String>,
) -> Vec<(String, String)> {
    let text = variables.get("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
    let mut attributes = pairs(&text);
    if attributes.is_empty() && !text.is_empty() {
        notices.push("OTEL_RESOURCE_ATTRIBUTES has no name=value: it is passed over".into());
    }
    let name = config.service_name.clone().or_else(|| variables.get("OTEL_SERVICE_NAME"));
    let has_name = attributes.iter().any(|(key, _)| key == "service.name");
    if let Some(name) = name.or_else(|| (!has_name).then(|| SERVICE_NAME.to_owned())) {
        attributes.retain(|(key, _)| key != "service.name");
        attributes.push(("service.name".into(), name));
    }
    attributes
}

fn sampler(
    config: &TelemetryConfig,
    variables: &Variables<'_>,
    notices: &mut Vec<String>,
) -> Sampler {
    let parent_based = |sampler| Sampler::ParentBased(Box::new(sampler));
    if let Some(ratio) = config.sample_ratio {
        return parent_based(Sampler::TraceIdRatioBased(ratio));
    }
    let default = parent_based(Sampler::AlwaysOn);
    let Some(name) = variables.get("OTEL_TRACES_SAMPLER") else { return default };
    let mut ratio = || {
        let argument = variables.get("OTEL_TRACES_SAMPLER_ARG");
        let ratio = argument.and_then(|text| text.parse().ok());
        ratio.filter(|ratio| (0.0..=1.0).contains(ratio)).unwrap_or_else(|| {
            notices.push("OTEL_TRACES_SAMPLER_ARG is no number from 0 to 1: 1 is taken".into());
            1.0
        })
    };
    match name.as_str() {
        "always_on" => Sampler::AlwaysOn,
        "always_off" => Sampler::AlwaysOff,
        "traceidratio" => Sampler::TraceIdRatioBased(ratio()),
        "parentbased_always_on" => default,
        "parentbased_always_off" => parent_based(Sampler::AlwaysOff),
        "parentbased_traceidratio" => parent_based(Sampler::TraceIdRatioBased(ratio())),
        _ => {
            notices.push(format!(
                "OTEL_TRACES_SAMPLER {name:?} is not known: parentbased_always_on is taken"
            ));
            default
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(
        config: &TelemetryConfig,
        variables: &[(&str, &str)],
    ) -> Result<Option<Settings>, TelemetryError> {
        Settings::resolve(config, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn good(config: &TelemetryConfig, variables: &[(&str, &str)]) -> Settings {
        resolve(config, variables).unwrap().unwrap()
    }

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/");

    #[test]
    fn without_an_endpoint_or_disabled_nothing_is_exported() {
        let none = TelemetryConfig::default();
        assert!(resolve(&none, &[]).unwrap().is_none());
        assert!(resolve(&none, &[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]).unwrap().is_none());
        assert!(resolve(&none, &[ENDPOINT, ("OTEL_SDK_DISABLED", "true")]).unwrap().is_none());
        let off = [ENDPOINT, ("OTEL_TRACES_EXPORTER", "none"), ("OTEL_METRICS_EXPORTER", "none")];
        assert!(resolve(&none, &off).unwrap().is_none());
    }

    #[test]
    fn a_signal_s_own_endpoint_is_taken_as_it_is_and_the_general_one_gets_a_path() {
        let none = TelemetryConfig::default();
        let settings = good(&none, &[ENDPOINT]);
        assert_eq!(settings.traces.unwrap().url.as_str(), "http://collector:4318/v1/traces");
        assert_eq!(settings.metrics.unwrap().url.as_str(), "http://collector:4318/v1/metrics");
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces/in");
        let settings = good(&none, &[own]);
        assert_eq!(settings.traces.unwrap().url.as_str(), "http://traces/in");
        assert!(settings.metrics.is_none());
    }

    #[test]
    fn a_key_in_a_signal_s_own_endpoint_is_sent_and_not_shown() {
        let url = "https://collector/v1/traces?api_key=geheim#geheim";
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url);
        let traces = good(&TelemetryConfig::default(), &[own]).traces.unwrap();
        assert_eq!(traces.url.as_str(), url);
        assert_eq!(traces.shown(), "https://collector/v1/traces");
    }

    #[test]
    fn the_roots_of_a_file_replace_the_system_s_for_https_alone() {
        let none = TelemetryConfig::default();
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let root = rcgen::generate_simple_self_signed(["collector".to_owned()]).unwrap();
        let (good_file, bad_file) = (file("ca.pem", &root.cert.pem()), file("no.pem", "nothing"));
        let https = ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector:4318");
        let own = "OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE";
        let settings = good(&none, &[https, (own, &good_file)]);
        assert!(settings.traces.unwrap().roots.is_none());
        assert_eq!(settings.metrics.unwrap().roots.unwrap().len(), 1);
        assert!(settings.notices.is_empty(), "{:?}", settings.notices);
        for path in [bad_file.as_str(), "/does/not/exist.pem"] {
            let name = "OTEL_EXPORTER_OTLP_CERTIFICATE";
            let error = resolve(&none, &[https, (name, path)]).unwrap_err();
            assert_eq!(error.name, name);
            assert!(error.to_string().contains(path), "{error}");
            assert!(good(&none, &[ENDPOINT, (name, path)]).traces.unwrap().roots.is_none());
        }
    }

    #[test]
    fn the_configuration_comes_before_the_environment() {
        let config = TelemetryConfig {
            endpoint: Some("http://127.0.0.1:4318".into()),
            metrics: Some(false),
            headers: vec![("x-key".into(), "of the file".into())],
            service_name: Some("orders-inbox".into()),
            sample_ratio: Some(0.25),
            timeout: Some(Duration::from_secs(1)),
            ..TelemetryConfig::default()
        };
        let settings = good(
            &config,
            &[
                ENDPOINT,
                ("OTEL_SERVICE_NAME", "other"),
                ("OTEL_EXPORTER_OTLP_HEADERS", "x-other=1"),
                ("OTEL_EXPORTER_OTLP_TIMEOUT", "5"),
                ("OTEL_TRACES_SAMPLER", "always_off"),
                (
                    "OTEL_RESOURCE_ATTRIBUTES",
                    "deployment.environment.name=prod%20eu,service.name=x",
                ),
            ],
        );
        assert!(settings.metrics.is_none());
        let traces = settings.traces.unwrap();
        assert_eq!(traces.url.as_str(), "http://127.0.0.1:4318/v1/traces");
        assert_eq!(traces.timeout, Duration::from_secs(1));
        assert_eq!(traces.headers["x-key"], "of the file");
        assert!(!traces.headers.contains_key("x-other"));
        assert!(!format!("{traces:?}",).contains("of the file"));
        assert!(format!("{:?}", settings.sampler).contains("0.25"));
        let mut resource = settings.resource;
        resource.sort();
        assert_eq!(
            resource,
            [
                ("deployment.environment.name".to_owned(), "prod eu".to_owned()),
                ("service.name".to_owned(), "orders-inbox".to_owned()),
            ]
        );
    }

    #[test]
    fn variables_are_followed() {
        let settings = good(
            &TelemetryConfig::default(),
            &[
                ENDPOINT,
                ("OTEL_EXPORTER_OTLP_HEADERS", "a=1,b=x%2Cy"),
                ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "a=2"),
                ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "250"),
                ("OTEL_METRIC_EXPORT_INTERVAL", "1500"),
                ("OTEL_BSP_MAX_QUEUE_SIZE", "10"),
                ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "50"),
                ("OTEL_BSP_SCHEDULE_DELAY", "20"),
                ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
                ("OTEL_TRACES_SAMPLER_ARG", "0.5"),
            ],
        );
        let (traces, metrics) = (settings.traces.unwrap(), settings.metrics.unwrap());
        assert_eq!(
            (&traces.headers["a"], &traces.headers["b"]),
            (&"2".parse().unwrap(), &"x,y".parse().unwrap())
        );
        assert_eq!(metrics.headers["a"], "1");
        assert_eq!((traces.timeout, metrics.timeout), (TIMEOUT, Duration::from_millis(250)));
        assert_eq!(settings.metrics_interval, Duration::from_millis(1_500));
        assert_eq!((settings.batching.queue_max, settings.batching.batch_max), (10, 10));
        assert_eq!(settings.batching.delay, Duration::from_millis(20));
        assert!(format!("{:?}", settings.sampler).contains("0.5"));
        assert!(settings.notices.is_empty(), "{:?}", settings.notices);
    }

    #[test]
    fn what_cannot_be_followed_is_refused_by_name_or_named() {
        let none = TelemetryConfig::default();
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
            ("OTEL_METRICS_EXPORTER", "console"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a b=1"),
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "collector:4318"),
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://me:geheim@collector"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/?api_key=geheim"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318#geheim"),
        ] {
            let error = resolve(&none, &[(name, value), ENDPOINT]).unwrap_err();
            assert_eq!(error.name, name);
            assert!(!error.to_string().contains("geheim"), "{error}");
        }
        for (name, value) in [
            ("OTEL_BSP_SCHEDULE_DELAY", "soon"),
            ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "client.key"),
            ("OTEL_EXPORTER_OTLP_METRICS_CLIENT_CERTIFICATE", "client.pem"),
        ] {
            let notices = good(&none, &[ENDPOINT, (name, value)]).notices;
            assert!(notices.iter().any(|notice| notice.contains(name)), "{notices:?}");
        }
    }
}
