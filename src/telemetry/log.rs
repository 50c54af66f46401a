//! Log lines on standard error: for people on a terminal, as JSON elsewhere.
//!
//! Invariants: one event is one line, whatever a publisher, an application or a broker put into
//! what it shows: control characters come out escaped, so that nobody forges a line or a colour.

use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write};

use tracing::Subscriber;
use tracing::field::Field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::fmt::format;
use tracing_subscriber::fmt::time::SystemTime;
use tracing_subscriber::util::SubscriberInitExt as _;

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
    let look = match settings.format {
        LogFormat::Auto if terminal => Look::Human { colours: true },
        LogFormat::Human => Look::Human { colours: terminal },
        LogFormat::Auto | LogFormat::Json => Look::Json,
    };
    subscriber(filter, look, io::stderr).try_init().map_err(|error| LogError::Again(error.into()))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    Human { colours: bool },
    Json,
}

fn subscriber<W: Write>(
    filter: EnvFilter,
    look: Look,
    out: impl Fn() -> W + Send + Sync + 'static,
) -> Box<dyn Subscriber + Send + Sync> {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_timer(SystemTime)
        .with_writer(move || OneLine { look, out: out() });
    match look {
        Look::Human { colours } => {
            let fields = format::debug_fn(human_field).delimited(" ");
            Box::new(builder.with_ansi(colours).fmt_fields(fields).finish())
        }
        Look::Json => {
            let json = builder.with_ansi(false).json();
            let json = json.flatten_event(true).with_current_span(true).with_span_list(false);
            Box::new(json.finish())
        }
    }
}

/// Writes one field for a person. The subscriber's own way would let control characters of values
/// pass, which cannot be told from its colours afterwards.
fn human_field(to: &mut format::Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    let name = field.name().trim_start_matches("r#");
    match (name, to.has_ansi_escapes()) {
        ("message", _) => {}
        (name, true) => write!(to, "\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m")?,
        (name, false) => write!(to, "{name}=")?,
    }
    write!(Escaping(to), "{value:?}")
}

struct Escaping<'a, W>(&'a mut W);

impl<W: fmt::Write> fmt::Write for Escaping<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for part in text.split_inclusive(char::is_control) {
            match part.chars().next_back().filter(|last| last.is_control()) {
                Some(control) => {
                    self.0.write_str(&part[..part.len() - control.len_utf8()])?;
                    write!(self.0, "{}", control.escape_default())?;
                }
                None => self.0.write_str(part)?,
            }
        }
        Ok(())
    }
}

/// Writes each event as one line. The subscriber hands over an event whole, with its newline.
struct OneLine<W> {
    /// With colours, escape sequences are our own: fields were escaped when they were written.
    look: Look,
    out: W,
}

impl<W: Write> Write for OneLine<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        self.write_all(event)?;
        Ok(event.len())
    }

    fn write_all(&mut self, event: &[u8]) -> io::Result<()> {
        let line = String::from_utf8_lossy(event.strip_suffix(b"\n").unwrap_or(event));
        let colours = self.look == (Look::Human { colours: true });
        let passes = |c: char| !c.is_control() || (c == '\x1b' && colours);
        if line.chars().all(passes) {
            return self.out.write_all(event);
        }
        let mut escaped = String::with_capacity(line.len() + 16);
        for c in line.chars() {
            match self.look {
                _ if passes(c) => escaped.push(c),
                Look::Human { .. } => escaped.extend(c.escape_default()),
                // Such a character stands within a string, or there would be no JSON already.
                Look::Json => escaped.push_str(&format!("\\u{:04x}", u32::from(c))),
            }
        }
        escaped.push('\n');
        self.out.write_all(escaped.as_bytes())
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

    /// Everything that may do harm on a terminal or in a line: C0, DEL and C1.
    const HOSTILE: &str =
        "id\r\n2026-12-01T00:00:00Z ERROR inboxd: forged\u{1b}[31m\u{7}\u{0}\u{7f}\u{85}\u{9b}2J";

    /// One event that shows the text in every way, as it is written.
    fn line(look: Look, text: &str) -> String {
        let kept = Kept::default();
        let out = kept.clone();
        let subscriber = subscriber(EnvFilter::new("info"), look, move || out.clone());
        let error = io::Error::other(text);
        tracing::subscriber::with_default(subscriber, || {
            let span = tracing::info_span!("span", spanned = %text);
            let _in_span = span.enter();
            let cause: &dyn std::error::Error = &error;
            tracing::warn!(detail = text, key = ?text, origin = %text, cause, %error, "said: {text}");
        });
        String::from_utf8(kept.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn nobody_forges_a_line_or_a_colour() {
        for look in [Look::Human { colours: false }, Look::Json] {
            let text = line(look, HOSTILE);
            let one = text.strip_suffix('\n').unwrap();
            assert!(!one.contains(char::is_control), "{text:?}");
            assert_eq!(text.matches("forged").count(), 7, "nothing is left out: {text}");
        }
    }

    #[test]
    fn with_colours_too_no_value_reaches_the_terminal_raw() {
        let look = Look::Human { colours: true };
        let text = line(look, HOSTILE);
        let one = text.strip_suffix('\n').unwrap();
        let escapes = |text: &str| text.matches('\x1b').count();
        assert!(!one.contains(|c: char| c.is_control() && c != '\x1b'), "{text:?}");
        assert!(!one.contains("\x1b[31m"), "{text:?}");
        assert!(escapes(one) > 0 && escapes(one) == escapes(&line(look, "harmless")), "{text:?}");
        assert_eq!(text.matches("forged").count(), 7, "nothing is left out: {text}");
    }

    #[test]
    fn a_line_of_json_parses_and_has_every_character_back() {
        let text = line(Look::Json, HOSTILE);
        let parsed: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&parsed["detail"], &parsed["origin"]), (&HOSTILE.into(), &HOSTILE.into()));
        assert_eq!(parsed["message"], format!("said: {HOSTILE}"));
        assert_eq!(parsed["span"]["spanned"], HOSTILE);
    }

    #[test]
    fn a_person_reads_names_and_values() {
        let text = line(Look::Human { colours: false }, "harmless");
        let (_, fields) = text.split_once("tests: ").unwrap();
        assert_eq!(
            fields,
            "said: harmless detail=\"harmless\" key=\"harmless\" origin=harmless cause=harmless \
             error=harmless\n"
        );
        assert!(text.contains("span{spanned=harmless}"), "{text}");
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
