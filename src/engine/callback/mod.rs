//! When the application is called.

mod report;

pub use report::{CallbackReport, CallbackState};
