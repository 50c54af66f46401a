//! The real engine over memory adapters: several processes, one thread, paused time, one seed.
//!
//! `INBOXD_SIM_SEED=7` replays one seed and prints its trace; `INBOXD_SIM_SEEDS=20000` runs more
//! of them; `INBOXD_SIM_FIRST=5000` begins there. docs/simulation.md says what is drawn and checked.

mod application;
// Settings and messages are those of the engine's own tests.
#[expect(dead_code, reason = "the simulator needs a part of it")]
#[path = "../it/engine/world.rs"]
mod base;
mod chance;
mod found;
mod letters;
mod life;
mod oracle;
mod parking;
mod plan;
mod report;
mod runs;
mod scenarios;
mod shrink;
mod source;
mod store;
mod trace;
mod world;
