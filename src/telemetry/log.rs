//! Log lines on standard error: for people on a terminal, as JSON elsewhere.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::time::SystemTime;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// Human on a terminal, JSON elsewhere.
    #[default]
    Auto,
    /// One line of text.
    Human,
    /// One JSON object per line.
    Json,
}

/// What is logged, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// How lines look.
    pub format: LogFormat,
    /// `error`, `warn`, `info`, `debug`, `trace`, or directives by module as `RUST_LOG`
    /// has them (`info,inboxd::engine=debug`).
    pub level: String,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { format: LogFormat::default(), level: "info".into() }
    }
}

/// The log cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The level is no filter.
    #[error("log.level {level:?} is no filter")]
    Level {
        /// The value.
        level: String,
        /// What is wrong with it.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    /// Called a second time.
    #[error("the log is set up already")]
    Again(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl LogSettings {
    /// Whether the level can be read as a filter.
    ///
    /// A plain `info`, `warn` or `error` leaves out what the AMQP library says of lost
    /// connections: the source tells it once, in its own words and with what follows from it.
    pub fn filter(&self) -> Result<EnvFilter, LogError> {
        let level = match self.level.trim().to_ascii_lowercase().as_str() {
            plain @ ("info" | "warn" | "error") => format!("{plain},lapin=off"),
            _ => self.level.clone(),
        };
        EnvFilter::builder()
            .parse(&level)
            .map_err(|source| LogError::Level { level: self.level.clone(), source })
    }
}

/// Sends the process's log lines to standard error. Once per process.
pub fn init_log(settings: &LogSettings) -> Result<(), LogError> {
    let filter = settings.filter()?;
    let terminal = std::io::stderr().is_terminal();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_timer(SystemTime)
        .with_writer(std::io::stderr)
        .with_ansi(terminal);
    let human = match settings.format {
        LogFormat::Auto => terminal,
        LogFormat::Human => true,
        LogFormat::Json => false,
    };
    if human {
        builder.try_init()
    } else {
        builder.json().flatten_event(true).with_current_span(true).with_span_list(false).try_init()
    }
    .map_err(LogError::Again)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_a_filter_with_directives_by_module() {
        let settings =
            LogSettings { level: "warn,inboxd::engine=debug".into(), ..LogSettings::default() };
        assert!(settings.filter().is_ok());
    }

    #[test]
    fn a_plain_level_leaves_out_the_amqp_library_s_own_words() {
        let filter = |level: &str| {
            LogSettings { level: level.into(), ..LogSettings::default() }.filter().unwrap()
        };
        assert!(filter("info").to_string().contains("lapin=off"));
        assert!(!filter("debug").to_string().contains("lapin"));
        assert!(!filter("info,lapin=warn").to_string().contains("lapin=off"));
    }

    #[test]
    fn what_is_no_filter_is_named() {
        let settings = LogSettings { level: "inboxd=loud".into(), ..LogSettings::default() };
        let error = settings.filter().unwrap_err();
        assert!(error.to_string().contains("inboxd=loud"));
    }
}
