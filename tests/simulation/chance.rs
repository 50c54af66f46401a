//! What is drawn while a run goes on; one generator, asked in an order that is itself decided by
//! the seed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use super::trace::lock;

#[derive(Clone)]
pub struct Chance(Arc<Mutex<SmallRng>>);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(SmallRng::seed_from_u64(seed))))
    }

    /// True in so many of a thousand.
    pub fn hits(&self, thousandths: u32) -> bool {
        thousandths > 0 && lock(&self.0).random_range(0..1_000) < thousandths
    }

    pub fn up_to(&self, most: Duration) -> Duration {
        if most.is_zero() {
            return most;
        }
        lock(&self.0).random_range(Duration::ZERO..=most)
    }

    pub fn number(&self) -> u64 {
        lock(&self.0).random()
    }
}
