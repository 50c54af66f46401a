//! Start-up: many at once, again, and before a database of a newer binary.

use inboxd_contract::{ErrorClass, InboxStore, Settled};

use super::context::{
    Context, all_ok, claim_one, complete, dead_letter, key, loose_letter, new_claim, owner,
    request, told,
};

const INSTANCES: usize = 8;

/// The tables are there and whole.
async fn assert_works(store: &dyn InboxStore) {
    store.ping().await.expect("writable");
    let claim = new_claim(&key("m"));
    let answer = claim_one(store, &owner("x"), request(&claim)).await;
    assert!(all_ok(vec![answer])[0].is_held());
    assert_eq!(complete(store, &claim).await, Settled::Done);
    assert_eq!(dead_letter(store, &loose_letter(&key("d"))).await, Settled::Done);
    store.set_note("k", "v").await.expect("stored");
}

pub async fn many_instances_start_at_once(context: &Context) {
    let database = context.harness.fresh_database().await;
    let at_once = INSTANCES.min(context.harness.traits().instances);
    let starts = (0..at_once).map(|_| database.start());
    let stores = all_ok(futures::future::join_all(starts).await);
    for store in &stores {
        assert_works(&**store).await;
    }
    let versions = database.versions().await;
    assert!(!versions.is_empty());
    let mut expected = versions.clone();
    expected.sort_unstable();
    expected.dedup();
    assert_eq!(versions, expected, "each migration ran once");
    for store in stores {
        store.close().await;
    }
}

pub async fn starting_again_changes_nothing(context: &Context) {
    let database = context.harness.fresh_database().await;
    let store = all_ok(vec![database.start().await]).remove(0);
    let claim = new_claim(&key("m"));
    let answer = claim_one(&*store, &owner("x"), request(&claim)).await;
    assert!(all_ok(vec![answer])[0].is_held());
    assert_eq!(complete(&*store, &claim).await, Settled::Done);
    let versions = database.versions().await;
    store.close().await;
    let store = all_ok(vec![database.start().await]).remove(0);
    assert_eq!(database.versions().await, versions);
    let looks = store.look(&[claim.key]).await.expect("answered");
    assert!(looks[0].processed.is_some(), "what was processed before is processed");
    store.close().await;
}

pub async fn newer_database_is_accepted_unless_breaking(context: &Context) {
    let database = context.harness.fresh_database().await;
    all_ok(vec![database.start().await]).remove(0).close().await;
    database.record_newer(false).await;
    let store = all_ok(vec![database.start().await]).remove(0);
    assert_works(&*store).await;
    store.close().await;
    database.record_newer(true).await;
    match database.start().await {
        Ok(_) => panic!("a newer breaking migration is recorded, and the store started"),
        Err(error) => {
            assert_eq!(error.class, ErrorClass::Permanent, "{}", told(&error));
            assert!(error.what.contains("9001"), "names the migration: {}", told(&error));
        }
    }
}
