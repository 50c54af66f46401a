//! Log lines on standard error: for people on a terminal, as JSON elsewhere.
//!
//! Invariants: one event is one line, whatever a publisher, an application or a broker put into
//! what it shows: control characters come out escaped, so that nobody forges a line or a colour.

use std::io::{self, IsTerminal, Write};

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
        .with_writer(move || OneLine { colours: terminal, out: io::stderr().lock() })
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

/// Writes each event as one line. The subscriber hands over an event whole, with its newline.
struct OneLine<W> {
    /// Escape sequences are our own: the subscriber has escaped those of others.
    colours: bool,
    out: W,
}

impl<W: Write> Write for OneLine<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        self.write_all(event)?;
        Ok(event.len())
    }

    fn write_all(&mut self, event: &[u8]) -> io::Result<()> {
        let line = event.strip_suffix(b"\n").unwrap_or(event);
        let is_ours = |byte: u8| !byte.is_ascii_control() || (byte == 0x1b && self.colours);
        if line.iter().all(|byte| is_ours(*byte)) {
            return self.out.write_all(event);
        }
        let mut escaped = Vec::with_capacity(line.len() + 16);
        for byte in line {
            match byte {
                byte if is_ours(*byte) => escaped.push(*byte),
                byte => escaped.extend(byte.escape_ascii()),
            }
        }
        escaped.push(b'\n');
        self.out.write_all(&escaped)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn nobody_forges_a_line_or_a_colour() {
        let kept = Kept::default();
        let out = kept.clone();
        let writer = move || OneLine { colours: false, out: out.clone() };
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
        let hostile = "id\r\n2026-12-01T00:00:00Z ERROR inboxd: forged\u{1b}[31m\u{7}\u{0}";
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(detail = hostile, key = ?hostile, origin = %hostile, "said: {hostile}");
        });
        let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        assert!(text.ends_with('\n'));
        assert!(text.trim_end_matches('\n').chars().all(|c| !c.is_control()), "{text:?}");
        assert_eq!(text.matches("forged").count(), 4, "nothing is left out: {text}");
    }

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
