//! What a request that got no response came to.

use std::error::Error;

use inboxd_contract::{RetryReason, Verdict};

use crate::response::printable;

/// A verdict for a failure of the client: always to be tried again, the reason says whether the
/// application may have seen the message.
pub(crate) fn judge_failure(error: reqwest::Error) -> Verdict {
    let error = error.without_url();
    let reason = reason(&error);
    retry(reason, &told(reason, &error))
}

/// A failure of the client, for a person.
pub(crate) fn failure(error: reqwest::Error) -> String {
    let error = error.without_url();
    printable(told(reason(&error), &error).as_bytes())
}

fn told(reason: RetryReason, error: &reqwest::Error) -> String {
    let what = match reason {
        RetryReason::Endpoint => "TLS failed",
        RetryReason::Unreachable => "no connection",
        RetryReason::Timeout => "no answer in time",
        _ => "the connection broke before an answer could be read",
    };
    format!("{what}: {}", causes(error))
}

/// A verdict to try again, without a response.
pub(crate) fn retry(reason: RetryReason, detail: &str) -> Verdict {
    Verdict::Retry { reason, status: None, after: None, detail: printable(detail.as_bytes()) }
}

fn reason(error: &reqwest::Error) -> RetryReason {
    if chain(error).any(is_tls) {
        RetryReason::Endpoint
    } else if error.is_connect() || error.is_dns() || error.is_builder() {
        RetryReason::Unreachable
    } else if error.is_timeout() {
        RetryReason::Timeout
    } else {
        RetryReason::Disconnected
    }
}

/// A complaint of TLS, from either side: a certificate, an alert, something that is no TLS.
/// I/O errors wrap it, and each other, without naming what they wrap as their source.
fn is_tls(error: &(dyn Error + 'static)) -> bool {
    if error.is::<rustls::Error>() {
        return true;
    }
    let wrapped = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
    wrapped.is_some_and(|inner| is_tls(inner))
}

fn chain(error: &reqwest::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    let mut next = error.source();
    std::iter::from_fn(move || {
        let this = next?;
        next = this.source();
        Some(this)
    })
}

/// The causes, the innermost last; the outermost only repeats what was attempted.
fn causes(error: &reqwest::Error) -> String {
    let causes: Vec<_> = chain(error).map(ToString::to_string).collect();
    if causes.is_empty() { error.to_string() } else { causes.join(": ") }
}
