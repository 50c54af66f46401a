//! From the start of the process to ready, and memory when idle, with SQLite.
//!
//! Not a test: a busy machine makes every figure larger.

use std::path::Path;
use std::time::Duration;

use clap::Args;

use crate::application::Application;
use crate::queue::Queue;
use crate::sidecar::{Memory, Sidecar};
use crate::topic::Topic;

#[derive(Args)]
pub(crate) struct Options {
    /// How often it is started, with a new inbox and with one that is there
    #[arg(long, default_value_t = 20)]
    runs: usize,
    /// How long it idles before its memory is read, in seconds
    #[arg(long, default_value_t = 10)]
    idle: u64,
}

pub(crate) async fn run(program: &Path, options: Options) -> anyhow::Result<()> {
    let application = Application::start().await?;
    let queue = Queue::declare().await?;
    let topic = Topic::create().await?;
    println!(
        "{} starts each, SQLite, release build; milliseconds from exec to ready\n",
        options.runs
    );
    println!("{:<36} {:>8} {:>8} {:>8}", "", "median", "p95", "most");
    let mut memories = Vec::new();
    let sources = [
        ("RabbitMQ", queue.source(32)),
        ("Kafka (a group waits 3 s for members)", topic.source("bench")),
    ];
    for (name, source) in &sources {
        // Forming a group takes seconds whatever we do: fewer of them.
        let runs = if name.starts_with("Kafka") { options.runs.div_ceil(5) } else { options.runs };
        let flags = |group: &str| -> Vec<String> {
            let source = source.replace("group=bench", &format!("group={group}"));
            ["--source", &source, "--callback", &application.url()].map(str::to_owned).into()
        };
        let (mut fresh, mut again) = (Vec::new(), Vec::new());
        for number in 0..runs {
            let directory = tempfile::tempdir()?;
            let flags = flags(&format!("bench-{number}"));
            for times in [&mut fresh, &mut again] {
                let mut sidecar = Sidecar::start(program, directory.path(), &flags)?;
                times.push(sidecar.ready().await?);
                sidecar.stop().await?;
            }
        }
        print(&format!("{name}, new inbox"), &mut fresh);
        print(&format!("{name}, inbox there"), &mut again);
        let directory = tempfile::tempdir()?;
        let mut sidecar = Sidecar::start(program, directory.path(), &flags("idle"))?;
        sidecar.ready().await?;
        tokio::time::sleep(Duration::from_secs(options.idle)).await;
        memories.push((name, sidecar.memory()?));
        sidecar.stop().await?;
    }
    println!("\n{:<36} {:>8} {:>8}", "resident memory when idle, MiB", "now", "most");
    for (name, Memory { resident, peak }) in memories {
        println!("{name:<36} {resident:>8.1} {peak:>8.1}");
    }
    queue.delete().await?;
    topic.delete().await
}

fn print(name: &str, times: &mut [Duration]) {
    times.sort_unstable();
    let at = |share: usize| {
        let index = (times.len() * share / 100).min(times.len() - 1);
        times[index].as_secs_f64() * 1_000.0
    };
    println!("{name:<36} {:>8.0} {:>8.0} {:>8.0}", at(50), at(95), at(100));
}
