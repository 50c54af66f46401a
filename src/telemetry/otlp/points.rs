//! The registry's figures as OTLP metrics.
//!
//! Purpose: one list of metrics. What `/metrics` shows is read from its own text form, so that a
//! metric that is registered is exported too, under the same name: `inboxd_` becomes `inboxd.`,
//! and a unit leaves the name for its own field.
//!
//! Invariants: all points are cumulative from the start of the process. What it does not do: read
//! any text but this process's own.

use std::borrow::Cow;

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
    ResourceMetrics, ScopeMetrics, Sum,
};
use opentelemetry_proto::tonic::resource::v1::Resource;

/// From when to when the points count, in nanoseconds since the epoch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) start_nanos: u64,
    pub(super) now_nanos: u64,
}

/// One export: everything in these OpenMetrics texts.
pub(super) fn request(
    texts: &[String],
    resource: Resource,
    scope: InstrumentationScope,
    span: Span,
) -> ExportMetricsServiceRequest {
    let metrics = texts.iter().flat_map(|text| families(text)).filter_map(|f| metric(&f, span));
    ExportMetricsServiceRequest {
        resource_metrics: vec![ResourceMetrics {
            resource: Some(resource),
            scope_metrics: vec![ScopeMetrics {
                scope: Some(scope),
                metrics: metrics.collect(),
                schema_url: String::new(),
            }],
            schema_url: String::new(),
        }],
    }
}

/// One metric of the text, with its samples.
#[derive(Debug, Default)]
struct Family<'a> {
    name: &'a str,
    kind: &'a str,
    unit: Option<&'a str>,
    help: &'a str,
    samples: Vec<Sample<'a>>,
}

#[derive(Debug)]
struct Sample<'a> {
    /// `_total`, `_bucket`, `_sum`, `_count` or nothing.
    suffix: &'a str,
    labels: Vec<(&'a str, Cow<'a, str>)>,
    value: &'a str,
}

fn families(text: &str) -> Vec<Family<'_>> {
    let mut families: Vec<Family<'_>> = Vec::new();
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let (Some(keyword), Some(name)) = (words.next(), words.next()) else { continue };
            let rest = words.next().unwrap_or_default();
            if families.last().is_none_or(|family| family.name != name) {
                families.push(Family { name, ..Family::default() });
            }
            let Some(family) = families.last_mut() else { continue };
            match keyword {
                "TYPE" => family.kind = rest,
                "UNIT" => family.unit = Some(rest),
                "HELP" => family.help = rest,
                _ => {}
            }
        } else if let Some(family) = families.last_mut()
            && let Some(sample) = sample(line, family.name)
        {
            family.samples.push(sample);
        }
    }
    families
}

fn sample<'a>(line: &'a str, family: &str) -> Option<Sample<'a>> {
    let rest = line.strip_prefix(family)?;
    let end = rest.find(['{', ' '])?;
    let (suffix, mut rest) = rest.split_at(end);
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (name, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.push((name, value));
            rest = after.strip_prefix(',').unwrap_or(after);
        }
        rest = &rest[1..];
    }
    Some(Sample { suffix, labels, value: rest.trim_start() })
}

/// Reads up to the closing quote: the value, and what follows it.
fn quoted(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let end = text.find(['"', '\\'])?;
    if text.as_bytes()[end] == b'"' {
        return Some((Cow::Borrowed(&text[..end]), &text[end + 1..]));
    }
    let mut value = text[..end].to_owned();
    let mut characters = text[end..].char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((Cow::Owned(value), &text[end + at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

fn metric(family: &Family<'_>, span: Span) -> Option<Metric> {
    if family.samples.is_empty() {
        return None;
    }
    let temporality = AggregationTemporality::Cumulative as i32;
    let data = match family.kind {
        "counter" => Data::Sum(Sum {
            data_points: numbers(family, span),
            aggregation_temporality: temporality,
            is_monotonic: true,
        }),
        "gauge" => Data::Gauge(Gauge { data_points: numbers(family, span) }),
        "histogram" => Data::Histogram(Histogram {
            data_points: histograms(family, span),
            aggregation_temporality: temporality,
        }),
        _ => return None,
    };
    let (name, unit) = named(family);
    let description = family.help.trim_end_matches('.').to_owned();
    Some(Metric { name, description, unit, data: Some(data), ..Metric::default() })
}

/// Name and unit as OpenTelemetry writes them.
fn named(family: &Family<'_>) -> (String, String) {
    let unit = family.unit.unwrap_or_default();
    let name = match family.name.strip_suffix(unit).and_then(|name| name.strip_suffix('_')) {
        Some(bare) if !unit.is_empty() => bare,
        _ => family.name,
    };
    let name = match name.strip_prefix("inboxd_") {
        Some(rest) => format!("inboxd.{rest}"),
        None => name.to_owned(),
    };
    let unit = match unit {
        "seconds" => "s",
        "bytes" => "By",
        "" => "1",
        other => other,
    };
    (name, unit.to_owned())
}

fn numbers(family: &Family<'_>, span: Span) -> Vec<NumberDataPoint> {
    let is_gauge = family.kind == "gauge";
    let point = |sample: &Sample<'_>| {
        let whole = sample.value.parse().ok().map(Number::AsInt);
        Some(NumberDataPoint {
            attributes: attributes(&sample.labels),
            start_time_unix_nano: if is_gauge { 0 } else { span.start_nanos },
            time_unix_nano: span.now_nanos,
            value: Some(whole.or_else(|| sample.value.parse().ok().map(Number::AsDouble))?),
            ..NumberDataPoint::default()
        })
    };
    family.samples.iter().filter_map(point).collect()
}

/// A series of a histogram as its samples come: its labels, and what its buckets came to so far.
struct Series<'a> {
    labels: Vec<&'a (&'a str, Cow<'a, str>)>,
    point: HistogramDataPoint,
    below: u64,
}

/// The samples of one series stand together, its buckets in order and cumulative.
fn histograms(family: &Family<'_>, span: Span) -> Vec<HistogramDataPoint> {
    let mut all: Vec<Series<'_>> = Vec::new();
    for sample in &family.samples {
        let labels: Vec<_> = sample.labels.iter().filter(|(name, _)| *name != "le").collect();
        if all.last().is_none_or(|series| series.labels != labels) {
            let point = HistogramDataPoint {
                attributes: labels.iter().map(|(name, value)| attribute(name, value)).collect(),
                start_time_unix_nano: span.start_nanos,
                time_unix_nano: span.now_nanos,
                ..HistogramDataPoint::default()
            };
            all.push(Series { labels, point, below: 0 });
        }
        let Some(Series { point, below, .. }) = all.last_mut() else { continue };
        match sample.suffix {
            "_sum" => point.sum = sample.value.parse().ok(),
            "_count" => point.count = sample.value.parse().unwrap_or_default(),
            "_bucket" => {
                let cumulative: u64 = sample.value.parse().unwrap_or_default();
                point.bucket_counts.push(cumulative.saturating_sub(*below));
                *below = cumulative;
                let bound = sample.labels.iter().find(|(name, _)| *name == "le");
                let bound = bound.and_then(|(_, bound)| bound.parse::<f64>().ok());
                point.explicit_bounds.extend(bound.filter(|bound| bound.is_finite()));
            }
            _ => {}
        }
    }
    all.into_iter().map(|series| series.point).collect()
}

fn attributes(labels: &[(&str, Cow<'_, str>)]) -> Vec<KeyValue> {
    labels.iter().map(|(name, value)| attribute(name, value)).collect()
}

fn attribute(name: &str, value: &str) -> KeyValue {
    KeyValue {
        key: name.to_owned(),
        value: Some(AnyValue { value: Some(Any::StringValue(value.to_owned())) }),
        ..KeyValue::default()
    }
}

#[cfg(test)]
mod tests {
    use inboxd_contract::Outcome;
    use strum::IntoEnumIterator as _;

    use super::*;
    use crate::telemetry::{Metrics, StoreCall};

    fn export(metrics: &Metrics) -> Vec<Metric> {
        let texts = [metrics.encode(), metrics.encode_conventions()];
        let span = Span { start_nanos: 1, now_nanos: 2 };
        let request = request(&texts, Resource::default(), InstrumentationScope::default(), span);
        request.resource_metrics[0].scope_metrics[0].metrics.clone()
    }

    fn find<'a>(metrics: &'a [Metric], name: &str) -> &'a Metric {
        metrics.iter().find(|metric| metric.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    #[test]
    fn a_counter_keeps_its_labels_and_its_value() {
        let metrics = Metrics::new();
        // The worst that a configuration can name a subscription.
        let name = "a\"b\\c\nd=e,{}";
        metrics.subscription(name).outcome(Outcome::Processed);
        let exported = export(&metrics);
        let Some(Data::Sum(sum)) = &find(&exported, "inboxd.deliveries").data else { panic!() };
        assert!(sum.is_monotonic);
        assert_eq!(sum.aggregation_temporality, AggregationTemporality::Cumulative as i32);
        let one: Vec<_> =
            sum.data_points.iter().filter(|p| p.value == Some(Number::AsInt(1))).collect();
        assert_eq!(one.len(), 1);
        assert_eq!(
            one[0].attributes,
            [attribute("subscription", name), attribute("outcome", "processed")]
        );
        assert_eq!((one[0].start_time_unix_nano, one[0].time_unix_nano), (1, 2));
    }

    #[test]
    fn a_histogram_has_its_own_buckets_not_the_cumulative_ones() {
        let metrics = Metrics::new();
        for seconds in [0.0004, 0.0004, 0.02, 100.0] {
            metrics.store_call(StoreCall::Claim, 3, seconds, 0);
        }
        let exported = export(&metrics);
        let metric = find(&exported, "inboxd.store_call_duration");
        assert_eq!(metric.unit, "s");
        let Some(Data::Histogram(histogram)) = &metric.data else { panic!() };
        assert_eq!(histogram.data_points.len(), StoreCall::iter().count(), "one for each call");
        let claim = attribute("call", "claim");
        let point = histogram.data_points.iter().find(|p| p.attributes.contains(&claim)).unwrap();
        assert_eq!((point.count, point.sum), (4, Some(100.0208)));
        assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
        assert_eq!(point.bucket_counts.iter().sum::<u64>(), 4);
        assert_eq!((point.bucket_counts[1], point.bucket_counts.last()), (2, Some(&1)));
    }

    #[test]
    fn everything_that_is_registered_is_exported_with_its_unit() {
        let metrics = Metrics::new();
        let orders = metrics.subscription("orders");
        orders.in_flight(1, 2_048);
        let exported = export(&metrics);
        let mut expected = Vec::new();
        for text in [metrics.encode(), metrics.encode_conventions()] {
            for line in text.lines() {
                let Some(typed) = line.strip_prefix("# TYPE ") else { continue };
                let name = typed.split(' ').next().unwrap();
                if text.lines().any(|line| line.starts_with(name)) {
                    expected.push(name.replacen("inboxd_", "inboxd.", 1));
                }
            }
        }
        assert!(expected.len() > 25, "{expected:?}");
        assert_eq!(exported.len(), expected.len());
        for name in expected {
            let (bare, unit) = match name.rsplit_once('_') {
                Some((bare, "seconds")) => (bare, "s"),
                Some((bare, "bytes")) => (bare, "By"),
                _ => (&*name, "1"),
            };
            assert_eq!(find(&exported, bare).unit, unit, "{name}");
        }
        assert_eq!(find(&exported, "inboxd.in_flight").unit, "By");
        assert_eq!(find(&exported, "inboxd.in_flight_deliveries").unit, "1");
    }
}
