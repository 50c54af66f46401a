//! Looks at a callback without delivering anything: for `inboxd check --connect`.
//!
//! One connection and one `OPTIONS` request, with the fixed headers of the configuration and
//! nothing of any message. `OPTIONS` is safe by its definition: an application that does something
//! on it does so against HTTP. It proves the name, the way, TLS in both directions and the
//! credentials; that a POST would be accepted it cannot prove.

use http::header::{ALLOW, LOCATION};
use http::{HeaderMap, Method};
use inboxd_contract::{Finding, RetryReason, Verdict};
use reqwest::Request;
use tokio::time::timeout;

use crate::response::printable;
use crate::{HttpForwarder, sending};

impl HttpForwarder {
    /// What can be found out about the callback within its own bounds of time.
    pub async fn inspect(&self) -> Vec<Finding> {
        let subject = format!("callback {}", self.callback());
        if let Err(reason) = self.connects().await {
            let place = format!("{}: ", self.callback());
            let reason = reason.strip_prefix(&place).unwrap_or(&reason);
            let remedy = "start the application, or correct `callback`; while it is away, nothing \
                          is consumed and nothing is lost";
            return vec![Finding::problem(subject, reason, remedy)];
        }
        let mut options = Request::new(Method::OPTIONS, self.callback().url().clone());
        *options.headers_mut() = self.fixed.clone();
        let bound = self.callback_timeout;
        let own = match timeout(bound, self.client.execute(options)).await {
            Ok(Ok(response)) => judge(subject, response.status().as_u16(), response.headers()),
            Ok(Err(error)) => failure(subject, sending::judge_failure(error)),
            Err(_) => Finding::warning(
                subject,
                format!("it accepts a connection, and gave no answer to OPTIONS within {bound:?}"),
                "see whether it hangs, or raise `callback_timeout`",
            ),
        };
        std::iter::once(own).chain(self.inspect_health().await).collect()
    }

    async fn inspect_health(&self) -> Option<Finding> {
        let health = self.health.as_ref()?;
        let subject = format!("health URL {}", health.target());
        Some(match health.ask().await {
            Ok(()) => Finding::info(subject, "it answers 2xx"),
            Err(reason) => {
                let place = format!("{}: ", health.target());
                let reason = reason.strip_prefix(&place).unwrap_or(&reason).to_owned();
                let remedy = "see what the application lacks, or correct `health_url`; until it \
                              answers 2xx nothing is consumed";
                Finding::problem(subject, reason, remedy)
            }
        })
    }
}

fn failure(subject: String, verdict: Verdict) -> Finding {
    let Verdict::Retry { reason, detail, .. } = verdict else {
        unreachable!("a failure without an answer is always to be tried again")
    };
    let remedy = match reason {
        RetryReason::Endpoint => {
            "the certificate has to be for this host and signed by the system's authorities or by \
             `tls.ca_file`; where the application asks for one, set `tls.cert_file` and \
             `tls.key_file`"
        }
        RetryReason::Timeout => "see whether the application hangs",
        _ => "see whether `callback` speaks this protocol (http or https, HTTP/1.1 or HTTP/2)",
    };
    Finding::problem(subject, detail, remedy)
}

fn judge(subject: String, status: u16, headers: &HeaderMap) -> Finding {
    let text =
        |name| headers.get(name).map(|value: &http::HeaderValue| printable(value.as_bytes()));
    let answered = format!("it answered {status} to OPTIONS");
    match (status, text(ALLOW)) {
        (200..=299 | 405 | 501, Some(allowed)) if !allows_post(&allowed) => Finding::warning(
            subject,
            format!("{answered}, and allows {allowed} but not POST"),
            "messages are POSTed: correct the path in `callback`, or accept POST there",
        ),
        (200..=299 | 400 | 405 | 415 | 422 | 501, _) => {
            Finding::info(subject, format!("{answered}; no message was sent"))
        }
        (300..=399, _) => Finding::warning(
            subject,
            format!("{answered}, a redirect to {}", text(LOCATION).unwrap_or_default()),
            "redirects are not followed: set `callback` to where it leads",
        ),
        (401 | 403 | 407, _) => Finding::warning(
            subject,
            format!("{answered}: it does not accept who asks"),
            "set the Authorization header in `headers.set`, unless POST is treated otherwise",
        ),
        (404, _) => Finding::warning(
            subject,
            format!("{answered}: the path may not exist"),
            "correct the path in `callback`, unless the application knows it for POST alone",
        ),
        (410, _) => Finding::warning(
            subject,
            format!("{answered}: the endpoint says that it is gone"),
            "correct `callback`: on 410 the subscription pauses",
        ),
        _ => Finding::warning(
            subject,
            answered,
            "see the application's log; messages that are answered so are tried again",
        ),
    }
}

fn allows_post(allowed: &str) -> bool {
    allowed.split(',').any(|method| matches!(method.trim(), "POST" | "*"))
}

#[cfg(test)]
mod tests {
    use inboxd_contract::Severity;

    use super::*;

    fn judged(status: u16, allow: Option<&'static str>) -> Finding {
        let mut headers = HeaderMap::new();
        if let Some(allow) = allow {
            headers.insert(ALLOW, http::HeaderValue::from_static(allow));
        }
        judge("callback".into(), status, &headers)
    }

    #[test]
    fn an_answer_that_says_nothing_against_post_is_fine() {
        for (status, allow) in
            [(200, None), (204, Some("GET, POST")), (405, Some("POST")), (405, None)]
        {
            assert_eq!(judged(status, allow).severity, Severity::Info, "{status} {allow:?}");
        }
    }

    #[test]
    fn what_speaks_against_post_is_told_with_a_remedy() {
        for (status, allow) in
            [(200, Some("GET")), (302, None), (401, None), (404, None), (410, None), (500, None)]
        {
            let finding = judged(status, allow);
            assert_eq!(finding.severity, Severity::Warning, "{status} {allow:?}");
            assert!(!finding.remedy.is_empty());
        }
    }
}
