//! Publishes the plan: in order, as fast as the application keeps up.
//!
//! It stays a bounded number of ids ahead of what the application accepted. Otherwise
//! all would be published before the sidecar's first POST, and copies that were published
//! at once would be read seconds apart.

use std::collections::VecDeque;

use anyhow::{Context, anyhow};
use rdkafka::producer::future_producer::DeliveryFuture;
use tokio::sync::watch;

use super::broker::Broker;
use super::ledger::Ledger;
use super::plan::{Copy, Plan, message_id};

/// Ids ahead of the application, at most; fewer in a short run, so that the kill comes while
/// there is something left to publish.
const AHEAD_MAX: u64 = 1_000;
/// Records that wait for the broker's confirmation, at most.
const UNCONFIRMED_MAX: usize = 256;

/// How many ids the publisher may be ahead of the application in this plan.
fn ahead_max(plan: &Plan) -> u64 {
    (u64::from(plan.distinct()) / 8).clamp(1, AHEAD_MAX)
}

/// Publishes everything; returns when the broker has confirmed the last record. `published`
/// follows the number of confirmed records.
pub(super) async fn publish(
    plan: &Plan,
    broker: &Broker,
    ledger: &Ledger,
    published: &watch::Sender<u64>,
) -> anyhow::Result<()> {
    let mut tally = ledger.watch();
    let mut unconfirmed: VecDeque<DeliveryFuture> = VecDeque::new();
    for record in plan.records() {
        if record.copy == Copy::First {
            let ahead_max = ahead_max(plan);
            let number = u64::from(record.number);
            if number >= tally.borrow().accepted + ahead_max {
                // All that the application is waited for must be at the broker.
                confirm(&mut unconfirmed, 0, published).await?;
                tally
                    .wait_for(|tally| number < tally.accepted + ahead_max)
                    .await
                    .context("the ledger is gone")?;
            }
        }
        let (id, body) = (message_id(record.number), plan.body(record.number));
        unconfirmed.push_back(broker.publish(record.partition, &id, &body).await?);
        confirm(&mut unconfirmed, UNCONFIRMED_MAX, published).await?;
    }
    confirm(&mut unconfirmed, 0, published).await
}

/// Waits until at most `left` records are unconfirmed.
async fn confirm(
    unconfirmed: &mut VecDeque<DeliveryFuture>,
    left: usize,
    published: &watch::Sender<u64>,
) -> anyhow::Result<()> {
    while unconfirmed.len() > left {
        let Some(oldest) = unconfirmed.pop_front() else { break };
        oldest
            .await
            .map_err(|_| anyhow!("the producer ended"))?
            .map_err(|(error, _)| error)
            .context("the embedded broker did not take a record")?;
        published.send_modify(|count| *count += 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::broker::PARTITIONS;
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn it_stays_a_bounded_number_of_ids_ahead_and_ends_with_all_confirmed() {
        let plan = Plan::draw(1_200, PARTITIONS, 3);
        let (broker, ledger) = (Broker::start().unwrap(), Ledger::new());
        let published = watch::Sender::new(0);
        let publishing = publish(&plan, &broker, &ledger, &published);
        let accepting = async {
            // 800 ids, so 100 ahead, and their copies.
            let mut count = published.subscribe();
            count.wait_for(|count| *count >= 100).await.unwrap();
            assert!(*count.borrow() < 250);
            for number in 0..plan.distinct() {
                let entry = ledger.begin(&message_id(number), None, true, String::new());
                ledger.answer(&entry, 200);
            }
        };
        let both = async { tokio::join!(publishing, accepting).0 };
        tokio::time::timeout(DEADLINE, both).await.expect("in time").unwrap();
        assert_eq!(*published.borrow(), 1_200);
    }
}
