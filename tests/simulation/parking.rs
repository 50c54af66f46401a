//! What a run draws beside the way of a delivery: parking, lanes in the database, dead letters on a
//! broker, breaker, operators. From a generator of its own, so that what was drawn before stays.

use std::time::Duration;

use inboxd::engine::{
    BreakerSettings, DeadLetterTo, DeliveryMode, Jitter, OnBlockedLane, OnDeadLetter, Ordering,
    RetrySettings, SubscriptionSettings,
};

use super::plan::{Disturbance, Draw, MS, Plan, SECOND};

/// Messages that fail until everything is calm.
#[derive(Debug, Clone)]
pub struct Failing {
    pub id: String,
    pub how: FailsBy,
}

/// How each POST of such a message ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailsBy {
    Status(u16),
    /// No answer at all.
    Hanging,
}

/// How likely each fault of a publication of a dead letter is, in thousandths.
#[derive(Debug, Clone, Default)]
pub struct LetterProfile {
    pub away: u32,
    pub unrouted: u32,
    pub refused: u32,
    pub answer_lost: u32,
    pub slow_max: Duration,
}

/// What an operator does to dead letters once everything is calm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operator {
    /// Nothing, unless they block lanes: those are discarded.
    Discards,
    /// Has those that block lanes forwarded again, and discards what cannot be.
    Replays,
}

impl Plan {
    /// Draws all of it into a plan.
    pub fn park(&mut self, draw: &mut Draw) {
        let broker = draw.letters();
        self.settings.delivery =
            if draw.chance(30) { DeliveryMode::Stored } else { DeliveryMode::Direct };
        draw.parking_settings(&mut self.settings, self.chaos);
        self.letters = broker;
        self.operator = *draw.one_of(&[Operator::Discards, Operator::Replays]);
        if draw.chance(40) {
            let share = *draw.one_of(&[10, 30, 100]);
            for publication in &self.publications {
                let Some(id) = &publication.id else { continue };
                if draw.chance(share) {
                    let how = *draw.one_of(&[
                        FailsBy::Status(500),
                        FailsBy::Status(500),
                        FailsBy::Status(404),
                        FailsBy::Status(503),
                        FailsBy::Hanging,
                    ]);
                    self.failing.push(Failing { id: id.clone(), how });
                }
            }
        }
        if draw.chance(20) {
            let at = draw.between(Duration::ZERO, self.chaos);
            let time = draw.between(5 * SECOND, 60 * SECOND);
            self.disturbances.push((at, Disturbance::ApplicationAway { time }));
        }
        if draw.chance(15) {
            for _ in 0..draw.number(1, 4) {
                let at = draw.between(self.chaos / 4, self.chaos);
                let replay = draw.chance(70);
                self.disturbances.push((at, Disturbance::Operator { replay }));
            }
        }
        self.disturbances.sort_by_key(|(at, _)| *at);
    }
}

impl Draw {
    fn parking_settings(&mut self, settings: &mut SubscriptionSettings, chaos: Duration) {
        settings.retry.attempts_max = *self.one_of(&[1, 2, 3, 5, 1_000]);
        settings.retry.elapsed_max = *self.one_of(&[SECOND, 5 * SECOND, 120 * SECOND]);
        settings.park = RetrySettings {
            initial: self.between(50 * MS, 3 * SECOND),
            factor: 2.0,
            cap: *self.one_of(&[SECOND, 5 * SECOND, 20 * SECOND]),
            jitter: *self.one_of(&[Jitter::Full, Jitter::None]),
            attempts_max: *self.one_of(&[1, 3, 8, 1_000]),
            elapsed_max: *self.one_of(&[10 * SECOND, chaos, 3_600 * SECOND, 86_400 * SECOND]),
        };
        settings.on_blocked_lane = match settings.ordering {
            Ordering::Partition if self.chance(60) => OnBlockedLane::Halt,
            _ => *self.one_of(&[
                OnBlockedLane::Park,
                OnBlockedLane::Park,
                OnBlockedLane::Park,
                OnBlockedLane::Skip,
                OnBlockedLane::Halt,
            ]),
        };
        settings.on_dead_letter =
            if self.chance(25) { OnDeadLetter::Halt } else { OnDeadLetter::Continue };
        settings.dead_letter_to = *self.one_of(&[
            DeadLetterTo::Table,
            DeadLetterTo::Table,
            DeadLetterTo::Broker,
            DeadLetterTo::Both,
        ]);
        settings.breaker = BreakerSettings {
            failures: *self.one_of(&[0, 2, 3, 5, 10]),
            probe_initial: self.between(100 * MS, 2 * SECOND),
            probe_cap: *self.one_of(&[2 * SECOND, 10 * SECOND]),
        };
        settings.adaptive = self.chance(20);
        settings.rate = self.chance(10).then(|| *self.one_of(&[5.0, 50.0]));
    }

    fn letters(&mut self) -> LetterProfile {
        LetterProfile {
            away: self.rate(40, 600),
            unrouted: self.rate(15, 300),
            refused: self.rate(15, 300),
            answer_lost: self.rate(25, 300),
            slow_max: *self.one_of(&[Duration::ZERO, 20 * MS, SECOND]),
        }
    }
}
