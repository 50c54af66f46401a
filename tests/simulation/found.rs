//! Each deliberate fault makes the simulator fail, and soon.

use inboxd::mutations::Mutation;
use inboxd_memory::{MemoryBrokerFlaw, MemoryFlaw};

use super::plan::Plan;
use super::world::{Broken, run};

/// The most seeds that finding one may take.
const SEEDS: u64 = 2_000;

/// Runs seeds until one breaks an invariant; says after how many and which.
fn is_found(broken: Broken) {
    for seed in 0..SEEDS {
        if let Some(violation) = run(&Plan::draw(seed), broken).violation {
            println!("| {broken:?} | {} | {violation} |", seed + 1);
            return;
        }
    }
    panic!("{broken:?} goes unnoticed in {SEEDS} seeds");
}

macro_rules! found {
    ($($name:ident: $broken:expr,)*) => {
        $(
            #[test]
            fn $name() {
                is_found($broken);
            }
        )*
    };
}

found! {
    ack_before_commit: Broken::Engine(Mutation::AckBeforeCommit),
    mark_before_the_answer: Broken::Engine(Mutation::MarkBeforeAnswer),
    forget_to_release_on_cancel: Broken::Engine(Mutation::ForgetReleaseOnCancel),
    keep_the_claim_of_a_cancelled_attempt: Broken::Engine(Mutation::KeepClaimOnGiveUp),
    count_an_undecided_twin_as_a_duplicate: Broken::Engine(Mutation::UndecidedTwinIsDuplicate),
    ack_before_the_dead_letter: Broken::Engine(Mutation::AckBeforeDeadLetter),
    pass_the_lane_on_early: Broken::Engine(Mutation::LanePassesEarly),
    ignore_an_id_conflict: Broken::Engine(Mutation::IgnoreConflict),
    keep_the_budget: Broken::Engine(Mutation::KeepPermit),
    ignore_the_lease: Broken::Engine(Mutation::IgnoreLease),
    count_the_lease_from_the_answer: Broken::Engine(Mutation::LeaseFromAnswer),
    ignore_the_fence: Broken::Engine(Mutation::IgnoreFence),
    forget_the_followers: Broken::Engine(Mutation::ForgetFollowers),
    keep_the_attempt_that_was_not_made: Broken::Engine(Mutation::KeepAttempt),
    forget_what_was_decided: Broken::Engine(Mutation::ForgetDecision),
    ack_what_has_no_id: Broken::Engine(Mutation::AckUnidentified),
    ignore_the_concurrency: Broken::Engine(Mutation::IgnoreConcurrency),
    renew_for_ever: Broken::Engine(Mutation::RenewForEver),
    ack_before_it_is_parked: Broken::Engine(Mutation::AckBeforePark),
    park_and_forget_the_attempts: Broken::Engine(Mutation::ForgetAttemptsOnPark),
    ignore_a_blocked_lane: Broken::Engine(Mutation::IgnoreBlockedLane),
    write_arrivals_backwards: Broken::Engine(Mutation::ArriveBackwards),
    record_a_dead_letter_before_it_is_published: Broken::Engine(Mutation::RecordBeforePublish),
    complete_and_leave_the_row: Broken::Engine(Mutation::CompleteKeepsRow),
    forward_what_was_processed_meanwhile: Broken::Engine(Mutation::WorkerIgnoresRow),
    never_open_the_breaker: Broken::Engine(Mutation::BreakerNeverOpens),
    park_and_keep_the_claim: Broken::Store(MemoryFlaw::ParkKeepsClaim),
    park_without_the_token: Broken::Store(MemoryFlaw::ParkWithoutToken),
    take_what_is_not_the_head_of_its_lane: Broken::Store(MemoryFlaw::TakeBlocked),
    find_no_lane_blocked: Broken::Store(MemoryFlaw::IgnoreBlockedLane),
    put_off_without_the_token: Broken::Store(MemoryFlaw::RescheduleWithoutToken),
    put_off_and_forget_the_attempts: Broken::Store(MemoryFlaw::RescheduleForgetsAttempts),
    complete_and_keep_the_copy: Broken::Store(MemoryFlaw::CompleteKeepsCopy),
    store_arrivals_backwards: Broken::Store(MemoryFlaw::ArriveBackwards),
    look_before_the_claim: Broken::Store(MemoryFlaw::LookBeforeClaim),
    complete_without_the_token: Broken::Store(MemoryFlaw::CompleteWithoutToken),
    dead_letter_without_the_token: Broken::Store(MemoryFlaw::DeadLetterWithoutToken),
    release_without_the_token: Broken::Store(MemoryFlaw::ReleaseWithoutToken),
    renew_by_owner: Broken::Store(MemoryFlaw::RenewByOwner),
    take_over_a_claim_in_force: Broken::Store(MemoryFlaw::TakeOverUnexpired),
    never_take_an_attempt_back: Broken::Store(MemoryFlaw::KeepAttempts),
    complete_and_keep_the_claim: Broken::Store(MemoryFlaw::CompleteKeepsClaim),
    commit_the_highest_offset: Broken::Broker(MemoryBrokerFlaw::CommitHighest),
    settle_by_a_stale_tag: Broken::Broker(MemoryBrokerFlaw::SettleStaleTags),
}

/// A mutation that is in the list and in no test would show nothing.
#[test]
fn every_mutation_of_the_engine_has_its_test() {
    use strum::IntoEnumIterator as _;
    let text = include_str!("found.rs");
    for mutation in Mutation::iter() {
        let named = format!("Mutation::{mutation:?})");
        assert!(text.contains(&named), "{mutation:?} has no test");
    }
}
