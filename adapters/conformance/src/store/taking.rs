//! Taking due rows: what is free, what its lane allows, and by the clock of the database.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use inboxd_contract::{
    Attempt, InboxKey, InboxStore, LaneId, OwnerId, Settled, TakeDue, Taken, TakenBatch,
};

use super::context::{
    Context, LEASE, complete, count, dead_letter, key, key_of, only, release, told,
};
use super::copies::{
    HOUR, SLACK, Subscription, assert_same_keys, finish, finished, keys_of, put_off, reschedule,
    unpark,
};

pub async fn row_whose_key_is_claimed_is_not_taken(context: &Context) {
    let orders = Subscription::new(context);
    let held = context.held_by_a("held").await;
    orders.parked(&[orders.arrival(&held.key)]).await;
    let free = orders.due("free").await;
    assert_eq!(orders.keys_for_b().await, [free]);
    assert!(orders.take_a(&orders.asking(4)).await.rows.is_empty(), "both are claimed");
    assert_eq!(release(&*context.a, &held, true).await, Settled::Done);
    let taken = only(orders.take_b(&orders.asking(4)).await.rows);
    assert_eq!((&taken.claim.key, taken.attempts), (&held.key, 1));
}

pub async fn rows_of_others_are_not_taken(context: &Context) {
    let (orders, bills) = (Subscription::new(context), Subscription::new(context));
    let key = orders.due("m").await;
    assert!(bills.keys_for_b().await.is_empty(), "of another subscription");
    let elsewhere = key_of("another", key.message_id.as_str());
    let request = TakeDue { consumer_id: elsewhere.consumer_id.clone(), ..orders.asking(4) };
    assert!(orders.take_b(&request).await.rows.is_empty(), "of another consumer id");
    orders.parked(&[orders.arrival(&elsewhere)]).await;
    assert_eq!(keys_of(&orders.take_b(&request).await), [elsewhere]);
    assert_eq!(orders.keys_for_b().await, [key]);
}

/// A row that is due in an hour is not taken; made due, it is. And when to ask again is told.
pub async fn due_times_are_by_the_clock_of_the_database(context: &Context) {
    let orders = Subscription::new(context);
    let (loose, first) = (key("loose"), key("first"));
    let mut arrivals = [orders.arrival(&loose), orders.arrival_in(&first, "lane")];
    arrivals[0].copy.delay = HOUR;
    arrivals[1].copy.delay = HOUR * 2;
    orders.parked(&arrivals).await;
    let batch = orders.take_b(&orders.asking(4)).await;
    assert!(batch.rows.is_empty(), "{batch:?}");
    let next_in = batch.next_in.expect("two rows are there");
    assert!(next_in <= HOUR && next_in > HOUR - SLACK, "{next_in:?}");
    context.harness.backdate_due(&loose, SLACK).await;
    let batch = orders.take_b(&orders.asking(4)).await;
    assert_eq!(keys_of(&batch), [loose]);
    let next_in = batch.next_in.expect("one row is left");
    assert!(
        next_in <= HOUR * 2 && next_in > HOUR * 2 - SLACK,
        "of the head of a lane: {next_in:?}"
    );
    context.harness.backdate_due(&first, Duration::ZERO).await;
    assert_eq!(keys_of(&orders.take_b(&orders.asking(4)).await), [first]);
}

pub async fn more_that_is_due_is_told(context: &Context) {
    let orders = Subscription::new(context);
    let keys = [orders.due("1").await, orders.due("2").await, orders.due("3").await];
    let batch = orders.take_a(&orders.asking(2)).await;
    assert_eq!((batch.rows.len(), batch.next_in), (2, Some(Duration::ZERO)));
    let rest = orders.take_b(&orders.asking(2)).await;
    assert_eq!(rest.rows.len(), 1);
    assert_same_keys([keys_of(&batch), keys_of(&rest)].concat(), &keys);
    let none = orders.take_b(&orders.asking(2)).await;
    assert!(none.rows.is_empty() && none.next_in != Some(Duration::ZERO), "{none:?}");
}

pub async fn bodies_bound_what_is_taken(context: &Context) {
    let orders = Subscription::new(context);
    let keys = orders.due_in("lane", 3).await;
    let mut loose = Vec::new();
    for index in 0..3 {
        loose.push(orders.due(&format!("{index}")).await);
    }
    let small = TakeDue { bytes_max: 1, ..orders.asking_runs(8, 8) };
    let mut came = Vec::new();
    for _ in 0..6 {
        let taken = only(orders.take_a(&small).await.rows);
        assert_eq!(finish(&*context.a, &taken).await, Settled::Done);
        came.push(taken.claim.key);
    }
    assert_same_keys(came.clone(), &[keys.clone(), loose].concat());
    let of_lane: Vec<_> = came.into_iter().filter(|key| keys.contains(key)).collect();
    assert_eq!(of_lane, keys, "in the order of the lane");
}

pub async fn head_of_a_lane_goes_first_and_alone(context: &Context) {
    let orders = Subscription::new(context);
    let keys = orders.due_in("lane", 3).await;
    for key in &keys {
        let head = only(orders.take_a(&orders.asking(4)).await.rows);
        assert_eq!(head.claim.key, *key);
        assert_eq!(head.lane_id, Some(orders.lane("lane")));
        assert!(orders.keys_for_b().await.is_empty(), "the head is at the application");
        assert_eq!(finish(&*context.a, &head).await, Settled::Done);
    }
    assert!(orders.keys_for_b().await.is_empty());
}

/// A head that waits for its time blocks what follows it, however long that has been due.
pub async fn head_that_is_put_off_blocks_its_lane(context: &Context) {
    let orders = Subscription::new(context);
    let keys = orders.due_in("lane", 2).await;
    let others = orders.due_in("other", 1).await;
    let heads = orders.take_a(&orders.asking(4)).await;
    assert_same_keys(keys_of(&heads), &[keys[0].clone(), others[0].clone()]);
    let head = heads.rows.iter().find(|taken| taken.claim.key == keys[0]).expect("taken");
    assert_eq!(reschedule(&*context.a, &put_off(head)).await, Settled::Done);
    context.harness.backdate_due(&keys[1], HOUR).await;
    assert!(orders.keys_for_b().await.is_empty());
    context.harness.backdate_due(&keys[0], Duration::ZERO).await;
    assert_eq!(keys_of(&orders.take_b(&orders.asking_runs(4, 4)).await), keys);
}

/// `halt`: a dead letter with a lane blocks it until it is discarded. `continue`: without one, it
/// blocks nothing.
pub async fn dead_letter_blocks_its_lane_only_if_it_has_one(context: &Context) {
    let orders = Subscription::new(context);
    let mut halted = orders.due_in("halted", 2).await;
    let mut going = orders.due_in("going", 2).await;
    for taken in orders.take_a(&orders.asking(2)).await.rows {
        let mut letter = orders.letter(&taken.claim);
        letter.lane_id = taken.lane_id.filter(|lane| *lane == orders.lane("halted"));
        assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    }
    assert_eq!(orders.keys_for_b().await, [going.remove(1)]);
    context.harness.discard(&halted[0]).await;
    assert_eq!(orders.keys_for_b().await, [halted.remove(1)]);
}

pub async fn run_of_a_lane_comes_in_order(context: &Context) {
    let orders = Subscription::new(context);
    let keys = orders.due_in("lane", 6).await;
    let run = orders.take_a(&orders.asking_runs(8, 4)).await;
    assert_eq!(keys_of(&run), keys[..4], "not longer than asked for");
    let seqs: Vec<_> = run.rows.iter().map(|taken| taken.seq).collect();
    assert!(seqs.is_sorted(), "{seqs:?}");
    assert!(orders.take_b(&orders.asking_runs(8, 8)).await.rows.is_empty(), "the lane is taken");
    // Its holder finishes one and gives the others back: they come again, from there.
    assert_eq!(finish(&*context.a, &run.rows[0]).await, Settled::Done);
    for taken in &run.rows[1..] {
        assert_eq!(release(&*context.a, &taken.claim, true).await, Settled::Done);
    }
    let run = orders.take_b(&orders.asking_runs(3, 8)).await;
    assert_eq!(keys_of(&run), keys[1..4], "a token for each");
    assert!(run.rows.iter().all(|taken| taken.attempts == 1), "no attempt was made: {run:?}");
}

/// What is not due yet ends the run; so does what somebody has claimed.
pub async fn run_of_a_lane_has_no_gap(context: &Context) {
    let orders = Subscription::new(context);
    let later: Vec<_> = (0..4).map(|index| key(&format!("later{index}"))).collect();
    let mut arrivals: Vec<_> = later.iter().map(|key| orders.arrival_in(key, "later")).collect();
    arrivals[2].copy.delay = HOUR;
    orders.parked(&arrivals).await;
    assert_eq!(keys_of(&orders.take_a(&orders.asking_runs(8, 8)).await), later[..2]);

    let held = context.held_by_a("held").await;
    let mut claimed: Vec<_> = (0..4).map(|index| key(&format!("claimed{index}"))).collect();
    claimed[2] = held.key.clone();
    let arrivals: Vec<_> = claimed.iter().map(|key| orders.arrival_in(key, "claimed")).collect();
    orders.parked(&arrivals).await;
    assert_eq!(keys_of(&orders.take_b(&orders.asking_runs(8, 8)).await), claimed[..2]);

    // A dead letter that blocks ends it too.
    let halted = orders.due_in("halted", 3).await;
    let run = orders.take_a(&orders.asking_runs(8, 8)).await;
    assert_eq!(keys_of(&run), halted);
    let mut letter = orders.letter(&run.rows[1].claim);
    letter.lane_id = Some(orders.lane("halted"));
    assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    for taken in [&run.rows[0], &run.rows[2]] {
        assert_eq!(release(&*context.a, &taken.claim, true).await, Settled::Done);
    }
    assert_eq!(keys_of(&orders.take_b(&orders.asking_runs(8, 8)).await), halted[..1]);
}

/// Lanes are begun with anywhere, and all of them are found.
pub async fn lanes_are_found_wherever_they_are_begun_with(context: &Context) {
    for lanes_from in [LaneId([0; 16]), LaneId([0xff; 16]), LaneId([0x80; 16])] {
        let orders = Subscription::new(context);
        let mut heads = Vec::new();
        for lane in 0..9 {
            heads.push(orders.due_in(&format!("{lane}"), 2).await.remove(0));
        }
        let loose = orders.due("loose").await;
        let batch = orders.take_a(&TakeDue { lanes_from, ..orders.asking(10) }).await;
        heads.push(loose);
        assert_same_keys(keys_of(&batch), &heads);
    }
}

/// Runs are shared among few lanes, and many lanes are served before any has a run.
pub async fn no_lane_starves_behind_a_long_one(context: &Context) {
    let orders = Subscription::new(context);
    let long = orders.due_in("long", 30).await;
    let mut short = Vec::new();
    for lane in 0..3 {
        short.extend(orders.due_in(&format!("{lane}"), 1).await);
    }
    let mut open: HashSet<InboxKey> = short.iter().cloned().collect();
    let mut rounds = 0;
    while !open.is_empty() {
        rounds += 1;
        assert!(rounds <= long.len(), "a short lane starves");
        let batch = orders.take_a(&orders.asking_runs(4, 4)).await;
        for taken in &batch.rows {
            open.remove(&taken.claim.key);
            assert_eq!(finish(&*context.a, taken).await, Settled::Done);
        }
    }
}

/// Takes until all of `left` came to one or the other, and finishes what it gets; answers it in
/// that order.
async fn drain(
    store: &dyn InboxStore,
    owner: &OwnerId,
    ask: impl Fn() -> TakeDue,
    left: &AtomicUsize,
) -> Vec<Taken> {
    let mut got = Vec::new();
    for _ in 0..1_000 {
        if left.load(Ordering::SeqCst) == 0 {
            break;
        }
        let batch = match store.take_due(owner, LEASE, &ask()).await {
            Ok(batch) => batch,
            Err(error) => {
                assert!(error.locked, "{}", told(&error));
                TakenBatch::default()
            }
        };
        if batch.rows.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for taken in batch.rows {
            assert_eq!(finish(store, &taken).await, Settled::Done);
            left.fetch_sub(1, Ordering::SeqCst);
            got.push(taken);
        }
    }
    got
}

/// Two instances take side by side: each row once, and each lane in its order.
pub async fn instances_at_once_get_disjoint_rows(context: &Context) {
    let orders = Subscription::new(context);
    let mut all = Vec::new();
    for index in 0..40 {
        all.push(orders.due(&format!("{index}")).await);
    }
    let mut lanes = Vec::new();
    for lane in 0..6 {
        lanes.push(orders.due_in(&format!("{lane}"), 5).await);
    }
    all.extend(lanes.iter().flatten().cloned());
    // A batch at once, first: nothing is answered twice.
    let (ask_a, ask_b) = (orders.asking_runs(20, 3), orders.asking_runs(20, 3));
    let (a, b) = tokio::join!(orders.take_a(&ask_a), orders.take_b(&ask_b));
    let mut order: Vec<_> = a.rows.iter().chain(&b.rows).cloned().collect();
    for taken in &order {
        assert_eq!(taken.attempts, 1);
    }
    for (store, batch) in [(&context.a, &a), (&context.b, &b)] {
        for taken in &batch.rows {
            assert_eq!(finish(&**store, taken).await, Settled::Done);
        }
    }
    let ask = || orders.asking_runs(5, 2);
    let left = AtomicUsize::new(all.len() - order.len());
    let (a, b) = tokio::join!(
        drain(&*context.a, &context.owner_a, ask, &left),
        drain(&*context.b, &context.owner_b, ask, &left)
    );
    order.extend(a);
    order.extend(b);
    let mut seen: HashMap<InboxKey, usize> = HashMap::new();
    for taken in &order {
        *seen.entry(taken.claim.key.clone()).or_default() += 1;
    }
    assert!(seen.values().all(|times| *times == 1), "taken twice: {seen:?}");
    assert_eq!(seen.len(), all.len());
}

/// A lane that two instances take from is never at both, and never out of order.
pub async fn one_lane_between_two_instances_keeps_its_order(context: &Context) {
    let orders = Subscription::new(context);
    let keys = orders.due_in("lane", 24).await;
    let done = std::sync::Mutex::new(Vec::new());
    let work = async |store: &dyn InboxStore, owner: &OwnerId| {
        for _ in 0..400 {
            if done.lock().expect("no case panics with it").len() == keys.len() {
                return;
            }
            let Ok(batch) = store.take_due(owner, LEASE, &orders.asking_runs(3, 3)).await else {
                continue;
            };
            for taken in &batch.rows {
                done.lock().expect("no case panics with it").push(taken.claim.key.clone());
                tokio::time::sleep(Duration::from_millis(1)).await;
                assert_eq!(finish(store, taken).await, Settled::Done);
            }
            if batch.rows.is_empty() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    };
    tokio::join!(work(&*context.a, &context.owner_a), work(&*context.b, &context.owner_b));
    assert_eq!(done.into_inner().expect("no case panics with it"), keys);
}

/// A worker died: its row is free when the claim has run out, and attempts go on from the larger
/// count.
pub async fn row_of_a_worker_that_died_is_taken_again(context: &Context) {
    let orders = Subscription::new(context);
    let taken = orders.taken_by_a("m").await;
    assert_eq!(taken.attempts, 1);
    assert_eq!(count(&*context.a, &taken.claim).await, Attempt::Counted(2));
    assert!(orders.keys_for_b().await.is_empty());
    context.expire(&taken.claim.key).await;
    let again = only(orders.take_b(&orders.asking(1)).await.rows);
    assert_eq!((again.seq, again.attempts, again.copy.attempts), (taken.seq, 3, 0));
    // The row counts more than the claim, now.
    assert_eq!(reschedule(&*context.b, &put_off(&again)).await, Settled::Done);
    context.harness.backdate_due(&again.claim.key, Duration::ZERO).await;
    let third = only(orders.take_a(&orders.asking(1)).await.rows);
    assert_eq!((third.attempts, third.copy.attempts), (4, 3));
    context.expire(&third.claim.key).await;
    let fourth = only(orders.take_b(&orders.asking(1)).await.rows);
    assert_eq!((fourth.attempts, fourth.copy.attempts), (5, 3));
}

/// The lane of a worker that died goes on from its head.
pub async fn run_of_a_worker_that_died_begins_anew(context: &Context) {
    let orders = Subscription::new(context);
    let keys = orders.due_in("lane", 3).await;
    let run = orders.take_a(&orders.asking_runs(3, 3)).await;
    assert_eq!(keys_of(&run), keys);
    context.expire(&keys[0]).await;
    context.expire(&keys[1]).await;
    let again = orders.take_b(&orders.asking_runs(3, 3)).await;
    assert_eq!(keys_of(&again), keys[..2], "the third is still claimed");
    assert!(again.rows.iter().all(|taken| taken.attempts == 2));
}

/// Claim first, then look: what was processed before says so.
pub async fn processed_message_says_so(context: &Context) {
    let orders = Subscription::new(context);
    let key = orders.due("m").await;
    context.harness.hold_uncommitted_message(&key).await.commit().await;
    let taken = only(orders.take_b(&orders.asking(1)).await.rows);
    assert_eq!(taken.processed, Some(None));
    assert_eq!(unpark(&*context.b, &taken).await, Settled::Done);
    assert_eq!(context.parked_rows(&key).await + context.claim_rows(&key).await, 0);
    assert_eq!(context.message_rows(&key).await, 1);
}

/// A completion in mid-air is waited for, passed over, or seen; never taken for nothing.
pub async fn taking_against_an_open_completion_sees_it(context: &Context) {
    let orders = Subscription::new(context);
    for delay_ms in [0, 1, 3, 10, 30] {
        let taken = orders.taken_by_a("m").await;
        context.expire(&taken.claim.key).await;
        let open = context.harness.hold_open_completion(&taken.claim).await;
        let ask = orders.asking(1);
        let take = context.b.take_due(&context.owner_b, LEASE, &ask);
        let commit = async {
            tokio::time::sleep(Duration::from_millis(delay_ms)).await;
            open.commit().await;
        };
        let (batch, ()) = tokio::join!(take, commit);
        let mut rows = match batch {
            Ok(batch) => batch.rows,
            Err(error) => {
                assert!(error.locked, "{}", told(&error));
                Vec::new()
            }
        };
        if rows.is_empty() {
            rows = orders.take_b(&orders.asking(1)).await.rows;
        }
        let again = only(rows);
        assert_eq!(again.processed, Some(None), "processed meanwhile");
        assert_eq!(unpark(&*context.b, &again).await, Settled::Done);
    }
}

/// A holder whose claim ran out completes while another takes the row: one of them has it.
pub async fn taking_beside_a_completion_has_one_winner(context: &Context) {
    let orders = Subscription::new(context);
    for _ in 0..50 {
        let old = orders.taken_by_a("m").await;
        context.expire(&old.claim.key).await;
        let ask = orders.asking(1);
        let (batch, settled) = tokio::join!(
            context.b.take_due(&context.owner_b, LEASE, &ask),
            finish(&*context.a, &old)
        );
        let rows = match batch {
            Ok(batch) => batch.rows,
            Err(error) => {
                assert!(error.locked, "{}", told(&error));
                Vec::new()
            }
        };
        match (settled, rows.first()) {
            (Settled::Done, None) => {}
            (Settled::Lost(look), Some(new)) => {
                assert_eq!((look.processed, new.attempts), (None, 2));
                assert_eq!(new.processed, None);
                assert_eq!(finish(&*context.b, new).await, Settled::Done);
            }
            other => panic!("both or none: {other:?}"),
        }
        assert_eq!(context.message_rows(&old.claim.key).await, 1);
        assert_eq!(context.parked_rows(&old.claim.key).await, 0);
        assert_eq!(context.claim_rows(&old.claim.key).await, 0);
    }
}

/// A delivery of the same message that is forwarded and completed beside the taking.
pub async fn taking_beside_a_direct_completion_is_never_unaware(context: &Context) {
    let orders = Subscription::new(context);
    for _ in 0..30 {
        let held = context.held_by_a("m").await;
        orders.parked(&[orders.arrival(&held.key)]).await;
        let ask = orders.asking(1);
        let (batch, settled) = tokio::join!(
            context.b.take_due(&context.owner_b, LEASE, &ask),
            complete(&*context.a, &held)
        );
        assert_eq!(settled, Settled::Done);
        let mut rows = match batch {
            Ok(batch) => batch.rows,
            Err(error) => {
                assert!(error.locked, "{}", told(&error));
                Vec::new()
            }
        };
        if rows.is_empty() {
            rows = orders.take_b(&orders.asking(1)).await.rows;
        }
        let taken = only(rows);
        assert!(taken.processed.is_some(), "processed, and nobody said so");
        assert_eq!(finish(&*context.b, &taken).await, already(&taken));
        assert_eq!(context.parked_rows(&held.key).await, 0, "and its row went all the same");
    }
}

fn already(taken: &Taken) -> Settled {
    Settled::AlreadyProcessed { fingerprint: finished(taken).record.fingerprint }
}
