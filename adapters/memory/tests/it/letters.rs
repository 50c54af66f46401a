//! The target of dead letters in memory: what it has, whatever its publisher hears.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use inboxd_contract::{
    ConsumerId, DeadLetterTarget, DeadReason, Envelope, ErrorCode, InboxKey, LetterCopy, MessageId,
    Origin, PublishError,
};
use inboxd_memory::{LetterFault, MemoryLetters};

fn key() -> InboxKey {
    InboxKey {
        consumer_id: ConsumerId::new("c").expect("valid"),
        message_id: MessageId::from_bytes(b"m").expect("not blank"),
    }
}

async fn publish(target: &MemoryLetters) -> Result<(), PublishError> {
    let origin = Origin::Memory { stream: "s".into(), position: 7 };
    let envelope = Envelope::new(origin, Some(Bytes::from_static(b"body")));
    let key = key();
    let letter = LetterCopy {
        envelope: &envelope,
        key: &key,
        subscription: "orders",
        reason: DeadReason::Refused,
        attempts: 3,
        last_status: Some(422),
        last_error: Some("no"),
        first_ago: Duration::from_secs(1),
    };
    target.publish(letter).await
}

#[tokio::test(start_paused = true)]
async fn what_is_published_is_kept_whole_and_told() {
    let target = MemoryLetters::new();
    let told = Arc::new(Mutex::new(0));
    let count = told.clone();
    target.watch(move |_| *count.lock().expect("no panic") += 1);
    publish(&target).await.expect("it is taken");
    let letters = target.letters();
    let [letter] = letters.as_slice() else { panic!("one letter, not {letters:?}") };
    assert_eq!(letter.key, key());
    assert_eq!(letter.envelope.body.as_deref(), Some(b"body".as_slice()));
    assert_eq!((letter.reason, letter.attempts), (DeadReason::Refused, 3));
    assert_eq!((letter.last_status, letter.last_error.as_deref()), (Some(422), Some("no")));
    assert_eq!(*told.lock().expect("no panic"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_fault_publishes_nothing_but_for_a_lost_answer() {
    let target = MemoryLetters::new();
    let mut seen = Vec::new();
    for fault in
        [LetterFault::Away, LetterFault::Unrouted, LetterFault::Refused, LetterFault::AnswerLost]
    {
        target.push_fault(fault);
        let error = publish(&target).await.expect_err("each of them fails");
        seen.push((error.code, error.refused, target.letters().len()));
    }
    assert_eq!(
        seen,
        [
            (ErrorCode::DeadLetterTargetAway, false, 0),
            (ErrorCode::DeadLetterUnrouted, false, 0),
            (ErrorCode::DeadLetterTargetRefused, true, 0),
            (ErrorCode::DeadLetterTargetAway, false, 1),
        ]
    );
    target.set_fault(Some(LetterFault::Away));
    publish(&target).await.expect_err("it is away");
    target.set_fault(None);
    publish(&target).await.expect("it is back");
    assert_eq!((target.tries(), target.letters().len()), (6, 2));
}
