//! Ids compare by bytes: no folding of case or accents, no padding, no truncation.

use std::collections::BTreeSet;

use inboxd_contract::{ClaimAnswer, DeadLetter, ErrorClass, Fingerprint, InboxKey, Settled};
use uuid::Uuid;

use super::context::{
    Context, LEASE, all_ok, completion, dead_letter, fingerprint_of, key, key_of, loose_letter,
    new_claim, only, refused_key, request, requests, told,
};

/// Pairs that some collation or some padding rule takes for one.
const ALIKE: &[&str] = &[
    "order",
    "Order",
    "ORDER",
    "order ",
    "order  ",
    " order",
    "order\t",
    "order\n",
    "\u{e9}",
    "e\u{301}",
    "e",
    "E",
    "\u{c9}",
    "stra\u{df}e",
    "strasse",
    "STRASSE",
    "\u{1e9e}",
    "\u{130}",
    "\u{131}",
    "i",
    "I",
    "\u{1f600}",
    "\u{1f601}",
    "?",
    "\u{fffd}",
    "\u{1f468}\u{200d}\u{1f469}",
    "\u{1f468}\u{1f469}",
    "a\u{200b}",
    "a",
    "a\u{ad}",
    "a\u{feff}",
    "\u{ff41}",
    "\u{3bb}\u{3c2}",
    "\u{3bb}\u{3c3}",
    "0",
    "00",
    "-0",
    "1e1",
    "10",
    "10.0",
    "%",
    "_",
    "\\",
    "\\\\",
    "'",
    "''",
    "\"",
    "`",
    "$1",
    "{}",
    "[null]",
    "NULL",
    "null",
    "a,b",
    "a b",
    "a/b",
    "a%20b",
    "a+b",
];

pub fn keys_alike() -> Vec<InboxKey> {
    // One scope for all, so that only these endings tell them apart; in front as well, since a
    // trailing space is another matter than a leading one.
    let scope = Uuid::new_v4();
    ALIKE.iter().map(|id| key_of("conformance", &format!("{scope}{id}"))).collect()
}

/// Claims and completes all, in one batch each, and looks: each has its own row.
async fn all_are_distinct(context: &Context, keys: &[InboxKey]) {
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len(), "the case's own keys");
    let claims: Vec<_> = keys.iter().map(new_claim).collect();
    let answers = all_ok(context.a.claim(&context.owner_a, LEASE, &requests(&claims)).await);
    for (key, answer) in keys.iter().zip(&answers) {
        assert_eq!(*answer, ClaimAnswer::Fresh { attempts: 1 }, "{key:?} met another id");
    }
    // Half of them first: the others must not be seen as processed.
    let (first, second) = claims.split_at(claims.len() / 2);
    let completions: Vec<_> = first.iter().map(completion).collect();
    let answers = all_ok(context.a.complete(&completions).await);
    assert!(answers.iter().all(|answer| *answer == Settled::Done), "{answers:?}");
    for claim in second {
        let processed = context.look(&claim.key).await.processed;
        assert_eq!(processed, None, "{:?} met another id", claim.key);
    }
    let completions: Vec<_> = second.iter().map(completion).collect();
    let answers = all_ok(context.a.complete(&completions).await);
    assert!(answers.iter().all(|answer| *answer == Settled::Done), "{answers:?}");
    let looks = context.a.look(keys).await.expect("answered");
    assert_eq!(looks.len(), keys.len());
    for (key, look) in keys.iter().zip(looks) {
        assert_eq!(look.processed, Some(Some(fingerprint_of(key))), "{key:?} met another id");
    }
}

pub async fn message_ids_compare_by_bytes(context: &Context) {
    all_are_distinct(context, &keys_alike()).await;
}

pub async fn consumer_ids_compare_by_bytes(context: &Context) {
    let id = Uuid::new_v4().to_string();
    let consumers =
        ["billing", "Billing", "BILLING", "billing ", "b\u{ef}lling", "bi\u{308}lling", "bílling"];
    let keys: Vec<_> = consumers.iter().map(|consumer| key_of(consumer, &id)).collect();
    all_are_distinct(context, &keys).await;
    // Where consumer id and message id meet is no matter of chance either.
    let keys = [key_of("c", &format!("1{id}")), key_of("c1", &id)];
    all_are_distinct(context, &keys).await;
}

pub async fn longest_ids_are_kept_whole(context: &Context) {
    let scope = Uuid::new_v4().to_string();
    let padding = 512 - scope.len() - 1;
    let emoji = "\u{1f600}".repeat(padding / 4) + &"x".repeat(padding % 4);
    let consumer = "c".repeat(128);
    let mut keys = Vec::new();
    for last in ["a", "b", "A", " "] {
        keys.push(key_of(&consumer, &format!("{scope}{}{last}", "x".repeat(padding))));
        keys.push(key_of("conformance", &format!("{scope}{emoji}{last}")));
    }
    assert!(keys.iter().all(|key| key.message_id.as_str().len() == 512));
    // One byte more is hashed by the contract, so the store sees another id.
    keys.push(key_of(&consumer, &format!("{scope}{}aa", "x".repeat(padding))));
    all_are_distinct(context, &keys).await;
}

pub async fn dead_letters_compare_by_bytes(context: &Context) {
    let keys = keys_alike();
    for key in &keys {
        let letter = DeadLetter {
            fingerprint: Some(fingerprint_of(key)),
            last_error: Some(format!("of {key:?}")),
            ..loose_letter(key)
        };
        assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    }
    let looks = context.a.look(&keys).await.expect("answered");
    for (key, look) in keys.iter().zip(looks) {
        let fingerprints: Vec<Option<Fingerprint>> =
            look.dead.into_iter().map(|row| row.fingerprint).collect();
        assert_eq!(fingerprints, [Some(fingerprint_of(key))], "{key:?} met another id");
        let parked = context.a.parked(key).await.expect("answered");
        assert_eq!(only(parked).last_error, Some(format!("of {key:?}")));
    }
}

pub async fn too_long_id_is_refused_not_cut(context: &Context) {
    let long = refused_key();
    let answer =
        only(context.a.claim(&context.owner_a, LEASE, &[request(&new_claim(&long))]).await);
    let error = answer.expect_err("no column holds this id");
    assert_eq!(error.class, ErrorClass::Permanent, "{}", told(&error));
    // Nothing of it was stored under a shorter name.
    let cut = key_of("conformance", &long.message_id.as_str()[..512]);
    assert_eq!(context.claim_rows(&cut).await, 0);
    let answer = only(context.a.dead_letter(&[loose_letter(&long)]).await);
    assert_eq!(answer.expect_err("no column holds this id").class, ErrorClass::Permanent);
    assert_eq!(context.parked_rows(&cut).await, 0);
    assert!(context.claim_a(&new_claim(&key("next"))).await.is_held(), "and life goes on");
}
