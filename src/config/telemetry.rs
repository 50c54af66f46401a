//! `[telemetry]`: where traces and metrics are sent.
//!
//! What is not set here the `OTEL_*` variables may say; that is decided where telemetry starts.

use std::time::Duration;

use url::Url;

use super::headers;
use super::model::TelemetryConfig;
use super::names;
use super::problem::Fault;
use super::reader::Section;
use super::units::{self, minutes, seconds};

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
pub(super) fn read(section: Section<'_>) -> TelemetryConfig {
    let headers = section.section("headers");
    let config = TelemetryConfig {
        endpoint: section.parse("endpoint", endpoint),
        traces: section.parse("traces", units::switch),
        metrics: section.parse("metrics", units::switch),
        headers: headers::read(&headers, |name| {
            if OWN_HEADERS.iter().any(|own| own.eq_ignore_ascii_case(name)) {
                return Err(Fault::new(
                    format!("{name} belongs to the export itself"),
                    "leave it out",
                ));
            }
            Ok(())
        }),
        service_name: section
            .parse("service_name", |text| names::broker_text(text, SERVICE_NAME_BYTES_MAX)),
        sample_ratio: section
            .parse("sample_ratio", |text| units::number(text, &(0.0..=1.0)))
            .map(f64::from),
        metrics_interval: section
            .parse("metrics_interval", |text| units::duration(text, &(seconds(1)..=minutes(60)))),
        timeout: section.parse("timeout", |text| {
            units::duration(text, &(Duration::from_millis(100)..=minutes(1)))
        }),
    };
    section.finish();
    config
}

/// The text may hold credentials: no fault shows it.
fn endpoint(text: &str) -> Result<String, Fault> {
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
