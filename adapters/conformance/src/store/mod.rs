//! The suite that every inbox store passes.
//!
//! Purpose: each rule of claiming (design, section 3) has a case here that fails when the rule is
//! broken. An adapter implements [`StoreHarness`], which gives the suite what no store offers:
//! rows of any age without sleeping, locks held by somebody else, and transactions that are
//! still open.
//!
//! Invariants: a case uses fresh keys, so that cases do not meet; no case sleeps until something
//! has surely happened; a failing case names itself, and the others run all the same.
//!
//! What it does not do: talk to a database itself.

mod accounting;
mod arrivals;
mod blocked;
mod cancel;
mod claims;
mod concurrency;
mod context;
mod copies;
mod dead;
mod harness;
mod holding;
mod identity;
mod known;
mod letters;
mod locks;
mod migrations;
mod notes;
mod parked_locks;
mod parking;
mod race;
mod settle;
mod stale;
mod sweep;
mod taking;
pub mod zones;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::LocalBoxFuture;

use context::Context;
pub use harness::{FreshDatabase, Guard, Row, StoreHarness, StoreTraits};

/// A case that hangs is a failure of that case.
const CASE_DEADLINE: Duration = Duration::from_secs(90);

type CaseFn = fn(&Context) -> LocalBoxFuture<'_, ()>;

/// One case: its name, whether it applies to such a store, and what it does.
struct Case {
    name: &'static str,
    applies: fn(&StoreTraits) -> bool,
    run: CaseFn,
}

macro_rules! case {
    ($module:ident::$name:ident) => {
        case!($module::$name, if |_| true)
    };
    ($module:ident::$name:ident, if $applies:expr) => {
        Case {
            name: concat!(stringify!($module), "::", stringify!($name)),
            applies: $applies,
            run: |context| Box::pin($module::$name(context)),
        }
    };
}

const CASES: &[Case] = &[
    case!(claims::first_claim_is_fresh_and_second_is_busy),
    case!(claims::repeated_with_its_own_token_is_fresh_with_the_same_attempts),
    case!(claims::repeated_with_an_old_token_after_a_take_over_is_busy),
    case!(claims::processed_message_is_never_fresh_and_leaves_no_claim),
    case!(claims::expired_claim_is_taken_over),
    case!(claims::unexpired_claim_is_not_taken_over),
    case!(claims::batch_answers_in_the_order_asked),
    case!(claims::duplicate_in_a_batch_is_busy),
    case!(claims::refused_member_leaves_the_others_of_its_batch_alone),
    case!(claims::empty_batches_answer_nothing),
    case!(claims::busy_says_how_long_by_the_clock_of_the_database),
    case!(claims::lease_starts_anew_with_a_take_over),
    case!(claims::starting_instance_clears_no_claims, if |traits| traits.instances > 1),
    case!(claims::look_is_not_cached),
    case!(stale::token_completes_nothing),
    case!(stale::token_dead_letters_nothing),
    case!(stale::token_releases_nothing),
    case!(stale::token_counts_nothing),
    case!(stale::token_renews_nothing),
    case!(settle::completion_moves_claim_to_row),
    case!(settle::completion_repeated_finds_its_own_commit),
    case!(settle::completion_of_a_row_that_exists_is_already_processed),
    case!(settle::dead_letter_repeated_finds_its_own_commit),
    case!(settle::record_is_stored_and_may_be_absent),
    case!(settle::mixed_batch_answers_each_member),
    case!(settle::expired_claim_that_nobody_took_still_completes),
    case!(settle::refused_member_leaves_the_others_of_its_batch_alone),
    case!(settle::large_batches_are_answered_whole),
    case!(accounting::attempts_count_claims_and_retries),
    case!(accounting::attempts_are_taken_back_by_a_release_without_verdict),
    case!(accounting::attempts_are_kept_by_a_release_with_verdict),
    case!(accounting::attempts_are_kept_by_a_take_over),
    case!(accounting::release_makes_claimable_at_once),
    case!(accounting::released_token_holds_nothing),
    case!(accounting::renewal_extends_only_the_named_tokens),
    case!(accounting::renewal_revives_an_expired_claim_that_nobody_took),
    case!(identity::message_ids_compare_by_bytes),
    case!(identity::consumer_ids_compare_by_bytes),
    case!(identity::longest_ids_are_kept_whole),
    case!(identity::dead_letters_compare_by_bytes),
    case!(identity::too_long_id_is_refused_not_cut),
    case!(dead::letter_keeps_every_byte),
    case!(dead::tombstone_is_not_an_empty_body),
    case!(dead::large_body_is_kept_whole),
    case!(dead::body_that_is_not_kept_is_none),
    case!(dead::same_fingerprint_is_updated),
    case!(dead::no_fingerprint_is_one_row_too),
    case!(dead::another_fingerprint_is_another_row),
    case!(dead::copy_of_the_same_position_is_not_held),
    case!(dead::copy_of_another_position_is_held),
    case!(dead::copy_without_position_is_held),
    case!(dead::conflicting_copy_is_not_held),
    case!(dead::accepted_copy_takes_the_letter_away),
    case!(dead::accepted_copy_leaves_letters_of_other_contents),
    case!(dead::refused_copy_updates_the_letter),
    case!(dead::letter_without_a_token_needs_no_claim),
    case!(dead::letter_of_a_processed_message_is_not_written),
    case!(dead::discarded_letter_still_answers),
    case!(race::claim_against_an_open_completion_is_never_fresh),
    case!(race::claim_that_waits_for_a_completion_sees_it),
    case!(race::claim_beside_a_completion_is_never_fresh),
    case!(race::completion_beside_a_renewal_is_done),
    case!(race::completion_beside_a_take_over_has_one_winner),
    case!(race::claim_beside_a_dead_letter_is_not_held),
    case!(race::dead_letters_at_once_are_one_row),
    case!(locks::locked_member_of_a_claim_stalls_nobody, if |traits| traits.row_locks),
    case!(locks::locked_member_of_a_completion_stalls_nobody, if |traits| traits.row_locks),
    case!(locks::locked_claim_row_bounds_every_write),
    case!(locks::completion_against_an_uncommitted_row_that_commits),
    case!(locks::completion_against_an_uncommitted_row_that_rolls_back),
    case!(locks::renewal_skips_locked_rows, if |traits| traits.row_locks),
    case!(locks::look_and_ping_do_not_wait_for_locks),
    case!(cancel::claim_dropped_at_any_point_leaves_all_or_nothing),
    case!(cancel::completion_dropped_at_any_point_leaves_all_or_nothing),
    case!(cancel::dead_letter_dropped_at_any_point_leaves_all_or_nothing),
    case!(cancel::store_is_usable_after_many_dropped_calls),
    case!(concurrency::claim_storm_has_exactly_one_holder_each),
    case!(concurrency::batches_in_opposite_order_share_the_work),
    case!(concurrency::batches_take_locks_in_one_order, if |traits| traits.row_locks),
    case!(concurrency::more_calls_than_connections_all_finish),
    case!(sweep::old_rows_are_deleted_and_young_ones_kept),
    case!(sweep::dead_and_discarded_rows_have_a_retention_of_their_own),
    case!(sweep::idle_claims_are_deleted),
    case!(sweep::small_batches_delete_everything_old),
    case!(sweep::one_instance_at_a_time, if |traits| traits.sweep_lock),
    case!(known::unknown_message_is_explained_by_nothing),
    case!(known::claim_is_explained_with_its_owner),
    case!(known::processed_message_is_explained_with_its_age),
    case!(known::dead_letter_is_explained_whole),
    case!(known::newest_of_many_dead_letters_are_explained),
    case!(known::message_on_its_way_is_never_unknown),
    case!(known::rows_and_ages_are_counted),
    case!(notes::note_is_stored_once),
    case!(notes::note_is_replaced),
    case!(notes::keys_compare_by_bytes),
    case!(migrations::many_instances_start_at_once, if |traits| traits.migrations),
    case!(migrations::starting_again_changes_nothing, if |traits| traits.migrations),
    case!(migrations::newer_database_is_accepted_unless_breaking, if |traits| traits.migrations),
];

/// The cases of parking: copies, workers, lanes and dead letters in the hands of operators.
const PARKING_CASES: &[Case] = &[
    case!(arrivals::copies_keep_every_byte),
    case!(arrivals::tombstones_and_large_bodies_are_kept_whole),
    case!(arrivals::order_given_is_the_order_of_the_lane),
    case!(arrivals::key_twice_in_a_batch_meets_the_first),
    case!(arrivals::arrival_repeated_finds_its_own_commit),
    case!(arrivals::processed_message_is_told_and_not_parked),
    case!(arrivals::dead_letter_of_the_same_position_is_told),
    case!(arrivals::dead_letter_published_again_gives_way),
    case!(arrivals::arrivals_are_all_there_or_none),
    case!(arrivals::claim_of_somebody_is_left_alone),
    case!(arrivals::ids_compare_by_bytes),
    case!(arrivals::large_batches_keep_their_order),
    case!(parking::copy_takes_the_place_of_the_claim),
    case!(parking::parking_repeated_finds_its_own_commit),
    case!(parking::message_processed_meanwhile_is_not_parked),
    case!(parking::stale_token_parks_nothing),
    case!(parking::dead_letter_gives_way_and_the_copy_is_last_of_its_lane),
    case!(parking::dead_letter_of_another_content_stays),
    case!(parking::due_copy_that_came_meanwhile_stays_as_it_is),
    case!(parking::two_contents_of_one_id_are_taken_one_after_the_other),
    case!(parking::mixed_batch_answers_each_member),
    case!(parking::unknown_token_parks_nothing),
    case!(taking::row_whose_key_is_claimed_is_not_taken),
    case!(taking::rows_of_others_are_not_taken),
    case!(taking::due_times_are_by_the_clock_of_the_database),
    case!(taking::more_that_is_due_is_told),
    case!(taking::bodies_bound_what_is_taken),
    case!(taking::head_of_a_lane_goes_first_and_alone),
    case!(taking::head_that_is_put_off_blocks_its_lane),
    case!(taking::dead_letter_blocks_its_lane_only_if_it_has_one),
    case!(taking::run_of_a_lane_comes_in_order),
    case!(taking::run_of_a_lane_has_no_gap),
    case!(taking::lanes_are_found_wherever_they_are_begun_with),
    case!(taking::no_lane_starves_behind_a_long_one),
    case!(taking::instances_at_once_get_disjoint_rows),
    case!(taking::one_lane_between_two_instances_keeps_its_order),
    case!(taking::row_of_a_worker_that_died_is_taken_again),
    case!(taking::run_of_a_worker_that_died_begins_anew),
    case!(taking::processed_message_says_so),
    case!(taking::taking_against_an_open_completion_sees_it),
    case!(taking::taking_beside_a_completion_has_one_winner),
    case!(taking::taking_beside_a_direct_completion_is_never_unaware),
    case!(holding::completion_takes_the_row_along),
    case!(holding::completion_of_a_processed_message_takes_the_row_along),
    case!(holding::completions_with_and_without_a_row_go_together),
    case!(holding::row_put_off_keeps_its_attempts_and_its_place),
    case!(holding::row_put_off_without_an_attempt_counts_none),
    case!(holding::many_are_put_off_at_once),
    case!(holding::row_of_a_processed_message_is_removed),
    case!(holding::row_becomes_dead_in_place),
    case!(holding::row_given_back_is_due_still),
    case!(holding::claim_of_a_taken_row_is_renewed),
    case!(holding::stale_token_changes_nothing),
    case!(blocked::copy_of_a_due_row_is_parked),
    case!(blocked::processed_comes_before_parked),
    case!(blocked::parked_keeps_the_attempts_of_a_worker_that_died),
    case!(blocked::batch_answers_each_member),
    case!(blocked::lane_is_blocked_until_its_rows_are_gone),
    case!(blocked::other_lanes_are_not_blocked),
    case!(blocked::claim_that_is_held_meets_a_lane_that_was_blocked_since),
    case!(blocked::dead_letter_blocks_a_lane_only_if_it_has_one),
    case!(blocked::claim_beside_parking_sees_it_or_waits),
    case!(blocked::blocked_delivery_arrives_behind_its_lane),
    case!(letters::list_tells_everything_but_bodies),
    case!(letters::each_field_of_the_filter_counts),
    case!(letters::pages_follow_each_other_by_seq),
    case!(letters::replayed_letter_is_due_with_attempts_anew),
    case!(letters::replay_leaves_a_claim_that_is_held),
    case!(letters::replay_waits_for_its_delay),
    case!(letters::replay_keeps_the_place_in_the_lane),
    case!(letters::conflicting_copy_is_replayed_under_an_id_of_its_own),
    case!(letters::processed_message_is_replayed_only_if_allowed),
    case!(letters::row_without_a_body_is_not_replayed_but_a_tombstone_is),
    case!(letters::what_is_not_dead_is_not_replayed),
    case!(letters::replay_does_not_meet_a_copy_that_is_there),
    case!(letters::discarded_letter_loses_its_body_and_stays),
    case!(letters::audit_comes_newest_first_in_pages),
    case!(letters::due_rows_are_not_swept_and_the_audit_is),
    case!(letters::due_rows_are_counted),
    case!(letters::due_row_is_explained),
    case!(parked_locks::locked_member_of_a_parking_stalls_nobody, if |traits| traits.row_locks),
    case!(parked_locks::locked_member_of_a_putting_off_stalls_nobody, if |traits| traits.row_locks),
    case!(parked_locks::locked_claim_row_bounds_every_write),
    case!(parked_locks::taking_passes_over_locked_rows, if |traits| traits.row_locks),
    case!(parked_locks::taking_is_not_stalled_by_a_locked_claim, if |traits| traits.row_locks),
    case!(parked_locks::lane_whose_head_is_locked_waits, if |traits| traits.row_locks),
];

/// Runs all cases but those of parking, one after the other, and prints `conformance store <adapter>: <n> cases`.
/// Answers how many ran. `INBOXD_CASE` runs only those whose name contains it.
///
/// # Panics
/// After all cases have run, if any failed, naming those that did.
pub async fn run(harness: Arc<dyn StoreHarness>) -> usize {
    run_cases(harness, "store", CASES).await
}

/// The same for the cases of parking.
///
/// # Panics
/// After all cases have run, if any failed, naming those that did.
pub async fn run_parking(harness: Arc<dyn StoreHarness>) -> usize {
    run_cases(harness, "parking", PARKING_CASES).await
}

async fn run_cases(harness: Arc<dyn StoreHarness>, suite: &str, cases: &[Case]) -> usize {
    let traits = harness.traits();
    let only = std::env::var("INBOXD_CASE").unwrap_or_default();
    let context = Context::new(Arc::clone(&harness)).await;
    let mut failed = Vec::new();
    let mut ran = 0;
    for case in cases {
        if !(case.applies)(&traits) || !case.name.contains(&only) {
            continue;
        }
        ran += 1;
        let started = std::time::Instant::now();
        let body = AssertUnwindSafe((case.run)(&context)).catch_unwind();
        match tokio::time::timeout(CASE_DEADLINE, body).await {
            Ok(Ok(())) => {}
            Ok(Err(panic)) => failed.push(format!("{}: {}", case.name, panic_text(&*panic))),
            Err(_) => failed.push(format!("{}: not done within {CASE_DEADLINE:?}", case.name)),
        }
        println!("case {suite} {} {} ({:?})", harness.adapter(), case.name, started.elapsed());
    }
    context.close().await;
    println!("conformance {suite} {}: {ran} cases", harness.adapter());
    assert!(
        failed.is_empty(),
        "{} of {ran} cases failed on {}:\n{}",
        failed.len(),
        harness.adapter(),
        failed.join("\n")
    );
    ran
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_else(|| String::from("panicked without a text"))
}
