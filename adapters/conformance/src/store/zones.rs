//! Ages and leases in whatever time zones server, session and process are.

use std::process::Command;
use std::time::Duration;

use inboxd_contract::{ClaimAnswer, InboxKey, InboxStore, Settled, SweepPolicy};

use super::context::{
    LEASE, claim_one, complete, dead_letter, key, loose_letter, new_claim, owner, request,
};

const HOUR: Duration = Duration::from_secs(3_600);
/// Asia/Tokyo, in the form that needs no list of zones.
const TOKYO: &str = "JST-9";

/// Whether this process is in Tokyo. If not, the test named runs in a process that is.
///
/// # Panics
/// If the test fails there.
pub fn in_tokyo(test: &str) -> bool {
    if std::env::var("TZ").is_ok_and(|zone| zone == TOKYO) {
        return true;
    }
    let binary = std::env::current_exe().expect("the test's own binary");
    let done = Command::new(binary)
        .args([test, "--exact", "--nocapture"])
        .env("TZ", TOKYO)
        .output()
        .expect("the test runs once more");
    let told = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{told}\n{}", String::from_utf8_lossy(&done.stderr));
    assert!(told.contains("1 passed"), "no test has this name:\n{told}");
    false
}

/// What `writer` wrote is kept for an hour by `other`, whose zone may be another one, and claims
/// hold for their lease. `earlier` moves a column (`processed_at`, `parked_at`, `expires_at`) of
/// a key's row back by itself, so that whatever was written there counts.
///
/// # Panics
/// If they do not.
pub async fn retention_and_leases_hold(
    writer: &dyn InboxStore,
    other: &dyn InboxStore,
    earlier: impl AsyncFn(&'static str, &'static str, &InboxKey, Duration),
) {
    let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
    let mut rows = Vec::new();
    for age in [0, 59, 61] {
        let claim = new_claim(&key("processed"));
        let held = claim_one(writer, &owner("writer"), request(&claim)).await;
        assert!(held.expect("claimed").is_held());
        assert_eq!(complete(writer, &claim).await, Settled::Done);
        let dead = key("dead");
        assert_eq!(dead_letter(writer, &loose_letter(&dead)).await, Settled::Done);
        if age > 0 {
            earlier("inbox_messages", "processed_at", &claim.key, minutes(age)).await;
            earlier("inbox_parked", "parked_at", &dead, minutes(age)).await;
        }
        rows.push((age, claim.key, dead));
    }
    let policy =
        SweepPolicy { retention: HOUR, dead_retention: HOUR, idle_claims: HOUR, batch: 100 };
    let report = other.sweep(&policy).await.expect("swept");
    assert_eq!((report.messages, report.dead), (1, 1), "{report:?}");
    for (age, processed, dead) in &rows {
        let known = other.explain(processed).await.expect("explained").message;
        let kept = *age < 60;
        assert_eq!(known.is_some(), kept, "processed {age} min ago");
        if let Some(known) = known {
            let (least, ago) = (minutes(*age), known.processed_ago);
            assert!(ago >= least && ago < least + minutes(1), "{age} min ago, and told {ago:?}");
        }
        let copies = other.explain(dead).await.expect("explained").copies.len();
        assert_eq!(copies == 1, kept, "dead letter since {age} min");
    }

    let (claim, second) = (new_claim(&key("held")), owner("other"));
    let held = claim_one(writer, &owner("writer"), request(&claim)).await;
    assert!(held.expect("claimed").is_held());
    let again = request(&new_claim(&claim.key));
    match claim_one(other, &second, again.clone()).await.expect("answered") {
        ClaimAnswer::Busy { wait } => assert!(!wait.is_zero() && wait <= LEASE, "{wait:?}"),
        answer => panic!("held by somebody else, and answered {answer:?}"),
    }
    earlier("inbox_claims", "expires_at", &claim.key, LEASE).await;
    let answer = claim_one(other, &second, again).await.expect("answered");
    assert_eq!(answer, ClaimAnswer::Fresh { attempts: 2 }, "its lease has run out");
}
