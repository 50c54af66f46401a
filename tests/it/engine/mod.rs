//! The engine over memory adapters in paused time: every branch of a delivery's way that real
//! servers reach only by luck.

mod callback;
mod conflicts;
mod draining;
mod faults;
mod lanes;
mod letters;
mod order;
mod parking;
mod stored;
mod world;
