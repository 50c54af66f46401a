//! Which delivery tags of one channel are outstanding, and how to tell the broker about acks.
//!
//! Purpose: to coalesce acks into `multiple` ones. Invariants: a tag is told once; an ack with
//! `multiple` covers tags that were acked and nothing else, because everything outstanding
//! below it is acked; memory is bounded by what is outstanding, that is by the prefetch.
//! Pure: no I/O, no clock.

use std::collections::{BTreeSet, VecDeque};

/// One frame to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frame {
    /// `basic.ack`; with `multiple` for everything outstanding up to the tag.
    Ack {
        /// The delivery tag.
        tag: u64,
        /// Everything outstanding below it too.
        multiple: bool,
    },
    /// `basic.nack` with requeue.
    Nack {
        /// The delivery tag.
        tag: u64,
    },
}

/// The tags of one channel.
#[derive(Debug, Default)]
pub(crate) struct AckTracker {
    /// Delivered and neither acked nor told as released. A release that waits for its turn is
    /// here: an ack must not cover it.
    open: BTreeSet<u64>,
    /// Acked, the broker not told yet.
    acked: BTreeSet<u64>,
    /// Released, in order of release, the broker not told yet.
    released: VecDeque<u64>,
}

impl AckTracker {
    /// A delivery came.
    pub(crate) fn delivered(&mut self, tag: u64) {
        self.open.insert(tag);
    }

    /// Its proof is committed.
    pub(crate) fn ack(&mut self, tag: u64) {
        if self.open.remove(&tag) {
            self.acked.insert(tag);
        }
    }

    /// It goes back when [`AckTracker::take_releases`] lets it.
    pub(crate) fn release(&mut self, tag: u64) {
        if self.open.contains(&tag) {
            self.released.push_back(tag);
        }
    }

    /// Releases that wait.
    pub(crate) fn releases_waiting(&self) -> usize {
        self.released.len()
    }

    /// Something is acked and not told.
    pub(crate) fn has_acks(&self) -> bool {
        !self.acked.is_empty()
    }

    /// Deliveries that the broker counts as unacked.
    pub(crate) fn outstanding(&self) -> usize {
        self.open.len() + self.acked.len()
    }

    /// The frames that tell of all acks so far.
    pub(crate) fn take_acks(&mut self) -> Vec<Frame> {
        let above = match self.open.first() {
            Some(lowest) => self.acked.split_off(lowest),
            None => BTreeSet::new(),
        };
        let below = std::mem::take(&mut self.acked);
        let covering =
            below.last().map(|last| Frame::Ack { tag: *last, multiple: below.len() > 1 });
        let single = above.into_iter().map(|tag| Frame::Ack { tag, multiple: false });
        covering.into_iter().chain(single).collect()
    }

    /// The frames for at most `most` of the releases that wait, oldest first.
    pub(crate) fn take_releases(&mut self, most: usize) -> Vec<Frame> {
        let most = most.min(self.released.len());
        let tags: Vec<_> = self.released.drain(..most).collect();
        for tag in &tags {
            self.open.remove(tag);
        }
        tags.into_iter().map(|tag| Frame::Nack { tag }).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Deliver,
        Ack(usize),
        Release(usize),
        TellAcks,
        TellReleases(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => Just(Step::Deliver),
            4 => any::<usize>().prop_map(Step::Ack),
            1 => any::<usize>().prop_map(Step::Release),
            2 => Just(Step::TellAcks),
            1 => (0_usize..4).prop_map(Step::TellReleases),
        ];
        proptest::collection::vec(step, 0..200)
    }

    /// What a broker makes of the frames.
    #[derive(Default)]
    struct Broker {
        unacked: BTreeSet<u64>,
        acked: BTreeSet<u64>,
        requeued: BTreeSet<u64>,
    }

    impl Broker {
        fn receive(&mut self, frame: Frame) {
            match frame {
                Frame::Ack { tag, multiple } => {
                    // RabbitMQ closes the channel on a tag that is not outstanding.
                    assert!(self.unacked.contains(&tag), "unknown tag {tag}");
                    let covered: Vec<_> = self.unacked.iter().copied().collect();
                    for covered in covered.into_iter().filter(|t| *t == tag || multiple && *t < tag)
                    {
                        self.unacked.remove(&covered);
                        self.acked.insert(covered);
                    }
                }
                Frame::Nack { tag } => {
                    assert!(self.unacked.remove(&tag), "unknown tag {tag}");
                    self.requeued.insert(tag);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn the_broker_learns_exactly_what_was_settled(steps in steps()) {
            let (mut tracker, mut broker) = (AckTracker::default(), Broker::default());
            let (mut held, mut acked, mut released) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
            let mut next = 1;
            for step in steps {
                match step {
                    Step::Deliver => {
                        tracker.delivered(next);
                        broker.unacked.insert(next);
                        held.push(next);
                        next += 1;
                    }
                    Step::Ack(at) if !held.is_empty() => {
                        let tag = held.swap_remove(at % held.len());
                        tracker.ack(tag);
                        acked.insert(tag);
                    }
                    Step::Release(at) if !held.is_empty() => {
                        let tag = held.swap_remove(at % held.len());
                        tracker.release(tag);
                        released.insert(tag);
                    }
                    Step::Ack(_) | Step::Release(_) => {}
                    Step::TellAcks => {
                        tracker.take_acks().into_iter().for_each(|frame| broker.receive(frame));
                        prop_assert_eq!(&broker.acked, &acked);
                        prop_assert!(!tracker.has_acks());
                    }
                    Step::TellReleases(most) => {
                        let frames = tracker.take_releases(most);
                        prop_assert!(frames.len() <= most);
                        frames.into_iter().for_each(|frame| broker.receive(frame));
                    }
                }
                prop_assert_eq!(tracker.outstanding(), broker.unacked.len());
                prop_assert!(broker.acked.is_subset(&acked), "never acked what was not");
                prop_assert!(broker.requeued.is_subset(&released));
            }
            tracker.take_acks().into_iter().for_each(|frame| broker.receive(frame));
            tracker.take_releases(usize::MAX).into_iter().for_each(|frame| broker.receive(frame));
            prop_assert_eq!(broker.acked, acked);
            prop_assert_eq!(broker.requeued, released);
            prop_assert_eq!(broker.unacked.into_iter().collect::<Vec<_>>(), {
                held.sort_unstable();
                held
            });
        }
    }

    #[test]
    fn one_frame_acks_a_run_and_a_hole_is_never_covered() {
        let mut tracker = AckTracker::default();
        (1..=6).for_each(|tag| tracker.delivered(tag));
        [5, 2, 1, 6].into_iter().for_each(|tag| tracker.ack(tag));
        assert_eq!(
            tracker.take_acks(),
            [
                Frame::Ack { tag: 2, multiple: true },
                Frame::Ack { tag: 5, multiple: false },
                Frame::Ack { tag: 6, multiple: false },
            ]
        );
        [3, 4].into_iter().for_each(|tag| tracker.ack(tag));
        assert_eq!(tracker.take_acks(), [Frame::Ack { tag: 4, multiple: true }]);
        assert_eq!(tracker.outstanding(), 0);
    }
}
