//! `[telemetry]`: where traces and metrics are sent.
//!
//! What is not set here the `OTEL_*` variables may say; that is decided where telemetry starts.

use url::Url;

use super::headers;
use super::model::TelemetryConfig;
use super::names;
use super::problem::Fault;
use super::reader::Section;

const SERVICE_NAME_BYTES_MAX: usize = 255;
const ENDPOINT_BYTES_MAX: usize = 4_096;
/// Exports make these themselves.
const OWN_HEADERS: &[&str] = &[
    "host",
    "content-length",
    "content-type",
    "content-encoding",
    "transfer-encoding",
    "connection",
];

/// `[telemetry]`.
pub(super) fn read(section: &Section<'_>) -> TelemetryConfig {
    TelemetryConfig {
        endpoint: section.parse("endpoint", endpoint),
        traces: section.switch_if_set("traces"),
        metrics: section.switch_if_set("metrics"),
        headers: headers::read(&section.section("headers"), header_name),
        service_name: section
            .parse("service_name", |text| names::broker_text(text, SERVICE_NAME_BYTES_MAX)),
        sample_ratio: section.number_if_set("sample_ratio").map(f64::from),
        metrics_interval: section.duration_if_set("metrics_interval"),
        timeout: section.duration_if_set("timeout"),
    }
}

/// Names that the export itself does not need.
pub(super) fn header_name(name: &str) -> Result<(), Fault> {
    headers::check_name(name)?;
    if OWN_HEADERS.iter().any(|own| own.eq_ignore_ascii_case(name)) {
        return Err(Fault::new(format!("{name} belongs to the export itself"), "leave it out"));
    }
    Ok(())
}

/// The text may hold credentials: no fault shows it.
pub(super) fn endpoint(text: &str) -> Result<String, Fault> {
    let remedy = "write the collector's base URL, like http://127.0.0.1:4318";
    let text = text.trim();
    if text.len() > ENDPOINT_BYTES_MAX {
        return Err(Fault::new(format!("it has {} bytes", text.len()), remedy));
    }
    let url =
        Url::parse(text).map_err(|error| Fault::new(format!("it is no URL: {error}"), remedy))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(Fault::new(format!("the scheme {:?} is not known", url.scheme()), remedy));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(Fault::new(
            "it holds credentials, which would stand in logs",
            "set telemetry.headers.authorization_file instead",
        ));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(Fault::new("it has a query or a fragment", remedy));
    }
    if ["/v1/traces", "/v1/metrics"].iter().any(|path| url.path().ends_with(path)) {
        return Err(Fault::new("/v1/traces and /v1/metrics are appended to it", remedy));
    }
    Ok(text.trim_end_matches('/').to_owned())
}
