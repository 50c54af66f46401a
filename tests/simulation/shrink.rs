//! Makes a failing plan smaller: whatever can be left out without mending it is left out.

use inboxd::engine::{DeadLetterTo, DeliveryMode};

use super::parking::LetterProfile;
use super::plan::{ApplicationProfile, Plan, StoreProfile};
use super::report::Report;
use super::world::{Broken, run};

/// The class of a violation: its first word.
fn class(report: &Report) -> Option<&str> {
    report.violation.as_deref()?.split([':', ' ']).next()
}

/// A smaller plan that breaks the same invariant, and its run.
pub fn shrink(plan: &Plan, broken: Broken) -> (Plan, Report) {
    let mut best = (plan.clone(), run(plan, broken));
    let wanted = class(&best.1).map(ToOwned::to_owned);
    let mut attempt = |best: &mut (Plan, Report), smaller: Plan| -> bool {
        let report = run(&smaller, broken);
        let same = class(&report).map(ToOwned::to_owned) == wanted;
        if same {
            *best = (smaller, report);
        }
        same
    };
    for change in CHANGES {
        let mut smaller = best.0.clone();
        change(&mut smaller);
        attempt(&mut best, smaller);
    }
    leave_out(&mut best, &mut attempt, |plan| &mut plan.disturbances);
    leave_out(&mut best, &mut attempt, |plan| &mut plan.publications);
    best
}

/// Whole classes of faults.
const CHANGES: [fn(&mut Plan); 14] = [
    |plan| plan.application = ApplicationProfile::default(),
    |plan| plan.store = StoreProfile::default(),
    |plan| plan.disturbances.clear(),
    |plan| plan.instances = 1,
    |plan| plan.letters = LetterProfile::default(),
    |plan| plan.failing.clear(),
    |plan| plan.settings.delivery = DeliveryMode::Direct,
    |plan| plan.settings.dead_letter_to = DeadLetterTo::Table,
    |plan| plan.store.before_commit = 0,
    |plan| plan.store.after_commit = 0,
    |plan| plan.store.slow = 0,
    |plan| plan.store.hangs = 0,
    |plan| plan.application.answer_lost = 0,
    |plan| plan.application.server_error = 0,
];

/// Single members, in halves first.
fn leave_out<T: Clone>(
    best: &mut (Plan, Report),
    attempt: &mut impl FnMut(&mut (Plan, Report), Plan) -> bool,
    of: fn(&mut Plan) -> &mut Vec<T>,
) {
    let mut size = of(&mut best.0).len().div_ceil(2);
    while size > 0 {
        let mut begin = 0;
        while begin < of(&mut best.0).len() {
            let mut smaller = best.0.clone();
            let members = of(&mut smaller);
            let end = (begin + size).min(members.len());
            members.drain(begin..end);
            if !attempt(best, smaller) {
                begin += size;
            }
        }
        size /= 2;
    }
}
