//! Many seeds, on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Instant;

use super::plan::Plan;
use super::report::{Report, Stats};
use super::shrink;
use super::trace::lock;
use super::world::{Broken, run};

const SEEDS: u64 = 2_000;
const TRACE_LINES: usize = 200;

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Runs seeds on all cores until one fails; answers the lowest that failed and all figures.
fn run_seeds(first: u64, count: u64) -> (Option<(u64, Report)>, Stats) {
    let next = AtomicU64::new(first);
    let stop = AtomicBool::new(false);
    let failed: Mutex<Option<(u64, Report)>> = Mutex::default();
    let sum = Mutex::new(Stats::default());
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !stop.load(SeqCst) {
                    let seed = next.fetch_add(1, SeqCst);
                    if seed >= first + count {
                        return;
                    }
                    let report = run(&Plan::draw(seed), Broken::Nothing);
                    *lock(&sum) += report.stats.clone();
                    if report.violation.is_some() {
                        stop.store(true, SeqCst);
                        let mut failed = lock(&failed);
                        if failed.as_ref().is_none_or(|(other, _)| seed < *other) {
                            *failed = Some((seed, report));
                        }
                    }
                }
            });
        }
    });
    (failed.into_inner().unwrap(), sum.into_inner().unwrap())
}

/// What a failing seed prints.
fn explain(plan: &Plan, report: &Report) -> String {
    let violation = report.violation.as_deref().unwrap_or_default();
    let (smaller, shrunk) = shrink::shrink(plan, Broken::Nothing);
    let skip = shrunk.trace.len().saturating_sub(TRACE_LINES);
    format!(
        "seed {seed} breaks an invariant: {violation}\n\n\
         replay: INBOXD_SIM_SEED={seed} scripts/simulate\n\n\
         made smaller ({of} of {messages} messages), it breaks: {again}\n{smaller:#?}\n\n{trace}\n",
        seed = plan.seed,
        of = smaller.publications.len(),
        messages = plan.publications.len(),
        again = shrunk.violation.as_deref().unwrap_or_default(),
        trace = shrunk.trace[skip..].join("\n"),
    )
}

#[test]
fn the_engine_keeps_its_guarantees_whatever_the_seed() {
    if let Some(seed) = variable("INBOXD_SIM_SEED") {
        let plan = Plan::draw(seed);
        let report = run(&plan, Broken::Nothing);
        println!("{plan:#?}\n\n{}\n\n{}", report.trace.join("\n"), report.stats);
        assert!(report.violation.is_none(), "{}", explain(&plan, &report));
        return;
    }
    let first = variable("INBOXD_SIM_FIRST").unwrap_or(0);
    let count = variable("INBOXD_SIM_SEEDS").unwrap_or(SEEDS);
    let started = Instant::now();
    let (failed, stats) = run_seeds(first, count);
    println!("{stats}| minutes | {:.1} |", started.elapsed().as_secs_f64() / 60.0);
    if let Some((seed, report)) = failed {
        panic!("{}", explain(&Plan::draw(seed), &report));
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in (0..40).chain([1_000, 12_345, 99_999_999]) {
        let plan = Plan::draw(seed);
        let (one, two) = (run(&plan, Broken::Nothing), run(&plan, Broken::Nothing));
        let differ = one.trace.iter().zip(&two.trace).position(|(one, two)| one != two);
        if let Some(line) = differ {
            panic!("seed {seed}, line {line}:\n{}\n{}", one.trace[line], two.trace[line]);
        }
        assert_eq!(one.trace.len(), two.trace.len(), "seed {seed}");
    }
}
