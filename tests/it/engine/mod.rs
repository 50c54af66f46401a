//! The engine over memory adapters in paused time: every branch of a delivery's way that real
//! servers reach only by luck.

mod conflicts;
mod draining;
mod faults;
mod order;
mod world;
