//! The cases.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{LocalBoxFuture, join_all};
use inboxd_contract::{
    ConsumerId, Envelope, ForwardRequest, Forwarder, InboxKey, MessageId, Origin, RetryReason,
    Verdict,
};

use super::{Application, Behaviour, Seen};
use crate::{ensure, eventually};

type Case = for<'a> fn(&'a mut dyn Application) -> LocalBoxFuture<'a, ()>;

/// The bound on an attempt that is expected to be answered.
const AMPLE: Duration = Duration::from_secs(30);
/// The bound on an attempt that is expected to run out.
const SHORT: Duration = Duration::from_millis(300);
const DEADLINE: Duration = Duration::from_secs(30);

macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        vec![$((stringify!($name), (|application| Box::pin($name(application))) as Case)),*]
    };
}

pub(super) fn all() -> Vec<(&'static str, Case)> {
    cases![
        a_message_arrives_whole_and_is_accepted,
        any_2xx_is_accepted,
        other_4xx_are_refused,
        faults_of_the_server_are_retried,
        an_overloaded_application_is_retried,
        a_busy_application_is_retried,
        a_wrong_endpoint_is_told_from_a_bad_message,
        an_endpoint_that_is_gone_says_so,
        retry_after_is_passed_on_and_capped,
        one_call_is_one_post_whatever_comes_of_it,
        a_lost_answer_is_retried_as_disconnected,
        every_attempt_has_the_same_identity_and_body,
        silence_ends_at_the_bound,
        a_slow_answer_within_the_bound_counts,
        a_refused_connection_is_unreachable_and_sends_nothing,
        a_restarted_application_is_found_again,
        a_probe_tells_reachable_from_not_and_sends_nothing,
        a_tombstone_is_not_an_empty_body,
        bodies_are_not_touched,
        ids_of_any_text_arrive_byte_for_byte,
        many_at_once_get_each_its_own_answer,
        an_abandoned_attempt_leaves_the_forwarder_whole,
    ]
}

struct Message {
    envelope: Envelope,
    key: InboxKey,
    ordering_key: Option<Vec<u8>>,
}

impl Message {
    fn new(id: &str) -> Self {
        Self::with_body(id, Some(Bytes::from(format!("body of {id}"))))
    }

    fn with_body(id: &str, body: Option<Bytes>) -> Self {
        let origin = Origin::Memory { stream: "conformance".into(), position: 7 };
        let message_id = MessageId::from_bytes(id.as_bytes()).expect("not blank");
        let consumer_id = ConsumerId::new("billing service").expect("valid");
        Self {
            envelope: Envelope::new(origin, body),
            key: InboxKey { consumer_id, message_id },
            ordering_key: None,
        }
    }

    fn request(&self, attempt: u32, timeout: Duration) -> ForwardRequest<'_> {
        ForwardRequest {
            envelope: &self.envelope,
            key: &self.key,
            subscription: "orders",
            attempt,
            ordering_key: self.ordering_key.as_deref(),
            timeout,
            path: None,
            trace: None,
        }
    }

    async fn send(&self, application: &dyn Application, attempt: u32) -> Verdict {
        application.forwarder().forward(self.request(attempt, AMPLE)).await
    }

    fn as_seen(&self, attempt: u32) -> Seen {
        Seen {
            message_id: self.key.message_id.as_str().to_owned(),
            consumer_id: self.key.consumer_id.as_str().to_owned(),
            subscription: "orders".to_owned(),
            attempt,
            ordering_key: self.ordering_key.clone(),
            body: self.envelope.body.clone(),
        }
    }
}

fn retried(verdict: &Verdict) -> Option<(RetryReason, Option<u16>)> {
    match verdict {
        Verdict::Retry { reason, status, .. } => Some((*reason, *status)),
        _ => None,
    }
}

async fn retried_as(application: &dyn Application, reason: RetryReason, statuses: &[u16]) {
    application.plan(statuses.iter().map(|status| Behaviour::Status(*status)).collect());
    for status in statuses {
        let verdict = Message::new("m").send(application, 1).await;
        assert_eq!(retried(&verdict), Some((reason, Some(*status))), "{status}: {verdict:?}");
    }
    assert_eq!(application.seen().len(), statuses.len());
}

async fn a_message_arrives_whole_and_is_accepted(application: &mut dyn Application) {
    let mut message = Message::new("order-1");
    message.ordering_key = Some(b"customer 7".to_vec());
    let verdict = message.send(application, 3).await;
    assert_eq!(verdict, Verdict::Accepted { status: 200 });
    assert_eq!(application.seen(), [message.as_seen(3)]);
}

async fn any_2xx_is_accepted(application: &mut dyn Application) {
    let statuses = [200, 201, 202, 204, 299];
    application.plan(statuses.map(Behaviour::Status).to_vec());
    for status in statuses {
        let verdict = Message::new("m").send(application, 1).await;
        assert_eq!(verdict, Verdict::Accepted { status });
    }
}

async fn other_4xx_are_refused(application: &mut dyn Application) {
    let statuses = [400, 402, 406, 411, 413, 415, 418, 422, 451, 499];
    application.plan(statuses.map(Behaviour::Status).to_vec());
    for expected in statuses {
        let verdict = Message::new("m").send(application, 1).await;
        let refused = matches!(&verdict, Verdict::Refused { status, .. } if *status == expected);
        assert!(refused, "{expected}: {verdict:?}");
    }
    assert_eq!(application.seen().len(), statuses.len());
}

async fn faults_of_the_server_are_retried(application: &mut dyn Application) {
    let statuses = [408, 425, 500, 501, 502, 504, 599, 999];
    retried_as(application, RetryReason::ServerError, &statuses).await;
}

async fn an_overloaded_application_is_retried(application: &mut dyn Application) {
    retried_as(application, RetryReason::Overloaded, &[429, 503]).await;
}

async fn a_busy_application_is_retried(application: &mut dyn Application) {
    retried_as(application, RetryReason::Busy, &[409]).await;
}

async fn a_wrong_endpoint_is_told_from_a_bad_message(application: &mut dyn Application) {
    let statuses = [300, 301, 302, 304, 307, 308, 401, 403, 404, 405];
    retried_as(application, RetryReason::Endpoint, &statuses).await;
}

async fn an_endpoint_that_is_gone_says_so(application: &mut dyn Application) {
    retried_as(application, RetryReason::Gone, &[410]).await;
}

async fn retry_after_is_passed_on_and_capped(application: &mut dyn Application) {
    application.plan(vec![
        Behaviour::RetryAfter(503, 2),
        Behaviour::RetryAfter(429, 86_400),
        Behaviour::RetryAfter(500, 0),
        Behaviour::Status(503),
    ]);
    let mut waits = Vec::new();
    for _ in 0..4 {
        match Message::new("m").send(application, 1).await {
            Verdict::Retry { after, .. } => waits.push(after),
            other => panic!("{other:?}"),
        }
    }
    let seconds = |seconds| Some(Duration::from_secs(seconds));
    assert_eq!(waits, [seconds(2), seconds(30), seconds(0), None]);
}

async fn one_call_is_one_post_whatever_comes_of_it(application: &mut dyn Application) {
    let behaviours = vec![
        Behaviour::Status(503),
        Behaviour::LostAnswer,
        Behaviour::RetryAfter(429, 0),
        Behaviour::Status(307),
        Behaviour::Status(500),
    ];
    let count = behaviours.len();
    application.plan(behaviours);
    for attempt in 1..=count {
        Message::new("m").send(application, attempt as u32).await;
        assert_eq!(application.seen().len(), attempt);
    }
}

async fn a_lost_answer_is_retried_as_disconnected(application: &mut dyn Application) {
    application.plan(vec![Behaviour::LostAnswer]);
    let message = Message::new("m");
    let verdict = message.send(application, 1).await;
    assert_eq!(retried(&verdict), Some((RetryReason::Disconnected, None)), "{verdict:?}");
    assert_eq!(application.seen(), [message.as_seen(1)]);
    assert_eq!(message.send(application, 2).await, Verdict::Accepted { status: 200 });
}

async fn every_attempt_has_the_same_identity_and_body(application: &mut dyn Application) {
    application.plan(vec![Behaviour::Status(500), Behaviour::LostAnswer, Behaviour::Status(409)]);
    let message = Message::new("m");
    for attempt in 1..=4 {
        message.send(application, attempt).await;
    }
    let expected: Vec<_> = (1..=4).map(|attempt| message.as_seen(attempt)).collect();
    assert_eq!(application.seen(), expected);
}

async fn silence_ends_at_the_bound(application: &mut dyn Application) {
    application.plan(vec![Behaviour::Hang]);
    let message = Message::new("m");
    let forwarder = application.forwarder();
    let attempt = forwarder.forward(message.request(1, SHORT));
    let verdict = tokio::time::timeout(DEADLINE, attempt).await.expect("an attempt has a bound");
    assert_eq!(retried(&verdict), Some((RetryReason::Timeout, None)), "{verdict:?}");
    assert_eq!(message.send(application, 2).await, Verdict::Accepted { status: 200 });
}

async fn a_slow_answer_within_the_bound_counts(application: &mut dyn Application) {
    application.plan(vec![Behaviour::After(SHORT, 202)]);
    assert_eq!(Message::new("m").send(application, 1).await, Verdict::Accepted { status: 202 });
}

async fn a_refused_connection_is_unreachable_and_sends_nothing(application: &mut dyn Application) {
    application.set_reachable(false).await;
    let verdict = Message::new("m").send(application, 1).await;
    assert_eq!(retried(&verdict), Some((RetryReason::Unreachable, None)), "{verdict:?}");
    assert_eq!(application.seen(), []);
}

async fn a_restarted_application_is_found_again(application: &mut dyn Application) {
    let message = Message::new("m");
    assert_eq!(message.send(application, 1).await, Verdict::Accepted { status: 200 });
    application.set_reachable(false).await;
    let verdict = message.send(application, 2).await;
    assert!(retried(&verdict).is_some(), "{verdict:?}");
    application.set_reachable(true).await;
    let application = &*application;
    eventually(DEADLINE, async || {
        let verdict = message.send(application, 3).await;
        ensure(verdict == Verdict::Accepted { status: 200 }, format!("{verdict:?}"))
    })
    .await;
}

async fn a_probe_tells_reachable_from_not_and_sends_nothing(application: &mut dyn Application) {
    let forwarder = application.forwarder();
    assert_eq!(forwarder.probe().await, Ok(()));
    application.set_reachable(false).await;
    assert!(forwarder.probe().await.is_err_and(|reason| !reason.is_empty()));
    application.set_reachable(true).await;
    eventually(DEADLINE, async || forwarder.probe().await).await;
    assert_eq!(application.seen(), []);
}

async fn a_tombstone_is_not_an_empty_body(application: &mut dyn Application) {
    for body in [None, Some(Bytes::new())] {
        let verdict = Message::with_body("m", body).send(application, 1).await;
        assert_eq!(verdict, Verdict::Accepted { status: 200 });
    }
    let bodies: Vec<_> = application.seen().into_iter().map(|seen| seen.body).collect();
    assert_eq!(bodies, [None, Some(Bytes::new())]);
}

async fn bodies_are_not_touched(application: &mut dyn Application) {
    let awkward: Vec<u8> = vec![0x00, 0x01, 0x7f, 0x80, 0xff, 0xfe, 0xc3, 0x28, b'\r', b'\n'];
    let large: Vec<u8> = (0..1024 * 1024).map(|_| rand::random()).collect();
    let all: Vec<u8> = (0..=255).collect();
    let bodies = [awkward, all, large].map(|body| Some(Bytes::from(body)));
    for body in &bodies {
        let verdict = Message::with_body("m", body.clone()).send(application, 1).await;
        assert_eq!(verdict, Verdict::Accepted { status: 200 });
    }
    let seen: Vec<_> = application.seen().into_iter().map(|seen| seen.body).collect();
    assert!(seen == bodies, "a body arrived changed");
}

async fn ids_of_any_text_arrive_byte_for_byte(application: &mut dyn Application) {
    let longest = "\u{e9}".repeat(256);
    let ids =
        ["a", " a ", "a%20b", "%", "a\"b\\c", "a\r\nInbox-Attempt: 9", "\u{1f600}/x?y#z", &longest];
    for id in ids {
        let verdict = Message::new(id).send(application, 1).await;
        assert_eq!(verdict, Verdict::Accepted { status: 200 }, "{id:?}");
    }
    let seen: Vec<_> = application.seen().into_iter().map(|seen| seen.message_id).collect();
    assert_eq!(seen, ids);
}

async fn many_at_once_get_each_its_own_answer(application: &mut dyn Application) {
    let statuses: Vec<u16> = (0..32).map(|index| if index % 2 == 0 { 200 } else { 422 }).collect();
    application.plan(statuses.iter().map(|status| Behaviour::Status(*status)).collect());
    let messages: Vec<_> = (0..32).map(|index| Message::new(&format!("m{index}"))).collect();
    let application = &*application;
    let verdicts = join_all(messages.iter().map(|message| message.send(application, 1))).await;
    // The plan is by arrival: which message met which answer is told by the order of arrival.
    let arrived = application.seen();
    assert_eq!(arrived.len(), 32);
    for (seen, status) in arrived.iter().zip(statuses) {
        let index: usize = seen.message_id[1..].parse().expect("as sent");
        let accepted = matches!(verdicts[index], Verdict::Accepted { .. });
        assert_eq!(accepted, status == 200, "{}: {:?}", seen.message_id, verdicts[index]);
    }
}

async fn an_abandoned_attempt_leaves_the_forwarder_whole(application: &mut dyn Application) {
    application.plan(vec![Behaviour::Hang]);
    let forwarder: Arc<dyn Forwarder> = application.forwarder();
    let abandoned = tokio::spawn(async move {
        let message = Message::new("first");
        forwarder.forward(message.request(1, AMPLE)).await
    });
    let application = &*application;
    eventually(DEADLINE, async || ensure(application.seen().len() == 1, application.seen().len()))
        .await;
    abandoned.abort();
    assert!(abandoned.await.is_err_and(|error| error.is_cancelled()));
    let verdict = Message::new("second").send(application, 1).await;
    assert_eq!(verdict, Verdict::Accepted { status: 200 });
}
