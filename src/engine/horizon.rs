//! Retention against what the broker can still redeliver: a row that is deleted before its
//! message comes for the last time suppresses nothing.

use std::time::Duration;

use inboxd_contract::{ErrorCode, RedeliveryHorizon};

/// What is to be said about one stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Finding {
    /// Duplicates may get through.
    Warning(String),
    /// Worth knowing once.
    Information(String),
}

/// Compares how long rows are kept with how long each stream can redeliver.
pub(super) fn compare(
    retention: Duration,
    horizons: &[(String, RedeliveryHorizon)],
) -> Vec<Finding> {
    let retention_text = humantime::format_duration(retention);
    horizons
        .iter()
        .filter_map(|(stream, horizon)| match horizon {
            RedeliveryHorizon::Limited(horizon) if *horizon > retention => {
                Some(Finding::Warning(format!(
                    "{stream} can deliver a message again for {}, but inbox rows are kept for \
                     {retention_text}: a later redelivery would be forwarded again; set \
                     database.retention to more than that, or shorten the broker's retention",
                    humantime::format_duration(*horizon)
                )))
            }
            RedeliveryHorizon::Limited(_) => None,
            RedeliveryHorizon::Unlimited => Some(Finding::Information(format!(
                "{stream} has no limit on how long it keeps messages; inbox rows are kept for \
                 {retention_text}"
            ))),
            RedeliveryHorizon::Compacted => Some(Finding::Information(format!(
                "{stream} is compacted: it keeps the last message of each key for ever; inbox rows \
                 are kept for {retention_text}"
            ))),
            RedeliveryHorizon::Unknown(why) => Some(Finding::Information(format!(
                "how long {stream} can redeliver could not be found out ({why}); inbox rows are \
                 kept for {retention_text}"
            ))),
        })
        .collect()
}

/// The same for `inboxd check`.
pub fn compare_retention(
    retention: Duration,
    horizons: &[(String, RedeliveryHorizon)],
) -> Vec<inboxd_contract::Finding> {
    let found = compare(retention, horizons).into_iter();
    found
        .map(|finding| match finding {
            Finding::Warning(text) => inboxd_contract::Finding::warning(
                "database.retention",
                text,
                "a longer retention costs rows, a shorter one lets late duplicates through",
            ),
            Finding::Information(text) => {
                inboxd_contract::Finding::info("database.retention", text)
            }
        })
        .collect()
}

/// Logs the findings.
pub(super) fn tell(retention: Duration, horizons: &[(String, RedeliveryHorizon)]) {
    for finding in compare(retention, horizons) {
        match finding {
            Finding::Warning(text) => tracing::warn!(code = %ErrorCode::RetentionShort, "{text}"),
            Finding::Information(text) => tracing::info!("{text}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn of(horizon: RedeliveryHorizon) -> Vec<Finding> {
        compare(14 * DAY, &[("orders".into(), horizon)])
    }

    #[test]
    fn a_longer_horizon_is_a_warning_that_names_both() {
        let findings = of(RedeliveryHorizon::Limited(30 * DAY));
        let [Finding::Warning(text)] = findings.as_slice() else { panic!("{findings:?}") };
        assert!(text.contains("orders") && text.contains("30days") && text.contains("14days"));
    }

    #[test]
    fn a_shorter_horizon_is_nothing_to_speak_of() {
        assert_eq!(of(RedeliveryHorizon::Limited(7 * DAY)), []);
    }

    #[test]
    fn what_has_no_limit_or_cannot_be_known_is_information() {
        for horizon in [
            RedeliveryHorizon::Unlimited,
            RedeliveryHorizon::Compacted,
            RedeliveryHorizon::Unknown("not authorised".into()),
        ] {
            assert!(matches!(of(horizon).as_slice(), [Finding::Information(_)]));
        }
    }
}
