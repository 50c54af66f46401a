//! Values with units: durations, sizes, counts, each between bounds that errors name.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::problem::{Fault, quote};

pub(super) const KIB: u64 = 1024;
pub(super) const MIB: u64 = 1024 * KIB;
pub(super) const GIB: u64 = 1024 * MIB;

pub(super) const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(super) const fn minutes(minutes: u64) -> Duration {
    Duration::from_secs(60 * minutes)
}

pub(super) const fn days(days: u64) -> Duration {
    Duration::from_secs(24 * 60 * 60 * days)
}

pub(super) fn show_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    for (unit, length) in [("d", 86_400), ("h", 3_600), ("min", 60)] {
        if duration.subsec_nanos() == 0 && seconds > 0 && seconds.is_multiple_of(length) {
            return format!("{}{unit}", seconds / length);
        }
    }
    humantime::format_duration(duration).to_string()
}

pub(super) fn show_size(bytes: u64) -> String {
    for (unit, size) in [("GiB", GIB), ("MiB", MIB), ("KiB", KIB)] {
        if bytes > 0 && bytes.is_multiple_of(size) {
            return format!("{} {unit}", bytes / size);
        }
    }
    format!("{bytes} B")
}

fn between(what: &str, least: &str, most: &str) -> Fault {
    Fault::new(what.to_owned(), format!("set a value from {least} to {most}"))
}

/// `15s`, `200ms`, `1h 30m`.
pub(super) fn duration(text: &str, bounds: &RangeInclusive<Duration>) -> Result<Duration, Fault> {
    let (least, most) = (show_duration(*bounds.start()), show_duration(*bounds.end()));
    let duration = humantime::parse_duration(text.trim()).map_err(|_| {
        Fault::new(
            format!("{} is no duration", quote(text)),
            format!("write a number with its unit, like \"15s\", \"200ms\", \"10m\" or \"14d\", from {least} to {most}"),
        )
    })?;
    if duration < *bounds.start() {
        return Err(between(
            &format!("{} is below the least, {least}", quote(text)),
            &least,
            &most,
        ));
    }
    if duration > *bounds.end() {
        return Err(between(&format!("{} is above the most, {most}", quote(text)), &least, &most));
    }
    Ok(duration)
}

/// `64 MiB`, `500 kB`, or bytes.
pub(super) fn size(text: &str, bounds: &RangeInclusive<u64>) -> Result<u64, Fault> {
    let (least, most) = (show_size(*bounds.start()), show_size(*bounds.end()));
    let bytes = parse_size(text.trim()).ok_or_else(|| {
        Fault::new(
            format!("{} is no size", quote(text)),
            format!("write a whole number with its unit, like \"64 MiB\" or \"500 kB\", from {least} to {most}"),
        )
    })?;
    if bytes < *bounds.start() {
        return Err(between(
            &format!("{} is below the least, {least}", quote(text)),
            &least,
            &most,
        ));
    }
    if bytes > *bounds.end() {
        return Err(between(&format!("{} is above the most, {most}", quote(text)), &least, &most));
    }
    Ok(bytes)
}

fn parse_size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "kib" | "k" | "ki" => KIB,
        "mib" | "m" | "mi" => MIB,
        "gib" | "g" | "gi" => GIB,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// A whole number.
pub(super) fn count(text: &str, bounds: &RangeInclusive<u64>) -> Result<u64, Fault> {
    let (least, most) = (bounds.start().to_string(), bounds.end().to_string());
    let number: u64 = text.trim().parse().map_err(|_| {
        between(&format!("{} is no whole number in reach", quote(text)), &least, &most)
    })?;
    if number < *bounds.start() {
        return Err(between(&format!("{number} is below the least, {least}"), &least, &most));
    }
    if number > *bounds.end() {
        return Err(between(&format!("{number} is above the most, {most}"), &least, &most));
    }
    Ok(number)
}

/// A number with a fraction.
pub(super) fn number(text: &str, bounds: &RangeInclusive<f32>) -> Result<f32, Fault> {
    let (least, most) = (bounds.start().to_string(), bounds.end().to_string());
    match text.trim().parse::<f32>() {
        Ok(number) if bounds.contains(&number) => Ok(number),
        Ok(number) => {
            Err(between(&format!("{number} is not between {least} and {most}"), &least, &most))
        }
        Err(_) => Err(between(&format!("{} is no number", quote(text)), &least, &most)),
    }
}

/// `true` or `false`.
pub(super) fn switch(text: &str) -> Result<bool, Fault> {
    match text.trim() {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(Fault::new(
            format!("{} is neither true nor false", quote(text)),
            "set true or false",
        )),
    }
}

/// One of some words: its place among them.
pub(super) fn word(text: &str, words: &[&str]) -> Result<usize, Fault> {
    words.iter().position(|word| *word == text.trim()).ok_or_else(|| {
        let words: Vec<_> = words.iter().map(|word| format!("{word:?}")).collect();
        Fault::new(format!("{} is not known", quote(text)), format!("set {}", words.join(" or ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_carry_their_unit() {
        let bounds = seconds(1)..=days(365);
        assert_eq!(duration("15s", &bounds), Ok(seconds(15)));
        assert_eq!(duration("10m", &bounds), Ok(minutes(10)));
        assert_eq!(duration(" 14d ", &bounds), Ok(days(14)));
        assert_eq!(duration("1h 30m", &bounds), Ok(minutes(90)));
        for bad in ["15", "", "soon", "-5s", "1e3s"] {
            assert!(duration(bad, &bounds).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_duration_outside_names_the_limit_and_the_value() {
        let fault = duration("1ms", &(seconds(5)..=minutes(10))).unwrap_err();
        assert_eq!(fault.what, "\"1ms\" is below the least, 5s");
        assert_eq!(fault.remedy, "set a value from 5s to 10min");
        let fault = duration("1h", &(seconds(5)..=minutes(10))).unwrap_err();
        assert_eq!(fault.what, "\"1h\" is above the most, 10min");
    }

    #[test]
    fn sizes_know_both_kinds_of_units() {
        let bounds = 1..=GIB;
        assert_eq!(size("64 MiB", &bounds), Ok(64 * MIB));
        assert_eq!(size("500kB", &bounds), Ok(500_000));
        assert_eq!(size("4096", &bounds), Ok(4096));
        for bad in [
            "",
            "MiB",
            "1.5 MiB",
            "-1",
            "64 MiBs",
            "99999999999999999999",
            "18446744073709551615 GiB",
        ] {
            assert!(size(bad, &bounds).is_err(), "{bad}");
        }
        assert_eq!(size("2 GiB", &bounds).unwrap_err().what, "\"2 GiB\" is above the most, 1 GiB");
    }

    #[test]
    fn counts_have_bounds() {
        assert_eq!(count("16", &(1..=1024)), Ok(16));
        assert_eq!(count("0", &(1..=1024)).unwrap_err().what, "0 is below the least, 1");
        assert!(count("-1", &(1..=1024)).is_err());
        assert!(count("1e3", &(1..=1024)).is_err());
    }

    #[test]
    fn numbers_refuse_what_is_none() {
        assert_eq!(number("1.5", &(1.0..=10.0)), Ok(1.5));
        for bad in ["nan", "inf", "0.5", "eleven"] {
            assert!(number(bad, &(1.0..=10.0)).is_err(), "{bad}");
        }
    }
}
