//! The whole callback over an application that only answers probes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use async_trait::async_trait;
use futures::FutureExt as _;
use inboxd_contract::{ConsumerId, ForwardRequest, MessageId, RetryReason};
use tokio::task::JoinHandle;

use super::*;
use crate::admin::HealthRegistry;
use crate::engine::settings::*;
use crate::telemetry::Metrics;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Host {
    is_away: AtomicBool,
    has_health: bool,
    probes: AtomicUsize,
}

#[async_trait]
impl Forwarder for Host {
    async fn forward(&self, _: ForwardRequest<'_>) -> Verdict {
        unreachable!("the tests answer themselves")
    }

    async fn probe(&self) -> Result<(), String> {
        self.probes.fetch_add(1, SeqCst);
        match self.is_away.load(SeqCst) {
            true => Err("connection refused".into()),
            false => Ok(()),
        }
    }

    fn has_health(&self) -> bool {
        self.has_health
    }
}

struct World {
    callback: Arc<Callback>,
    host: Arc<Host>,
    metrics: Metrics,
    draining: CancellationToken,
    driver: JoinHandle<()>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

fn settings() -> SubscriptionSettings {
    SubscriptionSettings {
        name: "orders".into(),
        consumer_id: ConsumerId::new("c").unwrap(),
        ordering: Ordering::None,
        key_from: KeyFrom::RecordKey,
        identity: IdentitySettings {
            extractors: vec![Extractor::Property],
            scope_by_producer: false,
            fingerprint: FingerprintOf::Off,
            on_missing: OnMissingId::DeadLetter,
            on_missing_is_explicit: true,
            on_conflict: OnIdConflict::DeadLetter,
        },
        delivery: DeliveryMode::Direct,
        concurrency: 16,
        adaptive: false,
        rate: None,
        in_flight_max: 64,
        in_flight_bytes_max: 1 << 20,
        body_bytes_max: 1 << 16,
        callback_timeout: 30 * SECOND,
        lease: 15 * SECOND,
        hold_max: 600 * SECOND,
        retry: RetrySettings::IN_PLACE,
        park: RetrySettings::PARKED,
        on_blocked_lane: OnBlockedLane::Park,
        on_dead_letter: OnDeadLetter::Continue,
        dead_letter_to: DeadLetterTo::Table,
        breaker: BreakerSettings { failures: 3, ..BreakerSettings::default() },
        health_interval: 5 * SECOND,
        routes: Vec::new(),
        on_unrouted: OnUnrouted::DeadLetter,
    }
}

impl World {
    fn start(settings: &SubscriptionSettings, host: Host) -> Self {
        let (metrics, draining) = (Metrics::new(), CancellationToken::new());
        let host = Arc::new(host);
        let parts = CallbackParts {
            forwarder: host.clone(),
            metrics: metrics.subscription("orders"),
            health: HealthRegistry::new(30 * SECOND).subscription("orders"),
            draining: draining.clone(),
            jitter: Box::new(|bound| bound),
        };
        let callback = Callback::new(settings, parts);
        let driver = tokio::spawn(callback.clone().run());
        Self { callback, host, metrics, draining, driver }
    }

    /// One that is reached.
    async fn reached(settings: &SubscriptionSettings) -> Self {
        let world = Self::start(settings, Host::default());
        world.flows(Flow::Free).await;
        world
    }

    async fn flows(&self, wanted: Flow) {
        let flow = self.callback.flow();
        tokio::time::timeout(600 * SECOND, flow.wait_for(|flow| flow == wanted))
            .await
            .unwrap_or_else(|_| panic!("not {wanted:?}: {:?}", self.callback.report()));
    }

    fn flow(&self) -> Flow {
        self.callback.flow().get()
    }

    fn state(&self) -> CallbackState {
        self.callback.report().state
    }

    async fn admit(&self, id: &str) -> Admission<'_> {
        tokio::time::timeout(600 * SECOND, self.callback.admit(true, &key(id)))
            .await
            .unwrap_or_else(|_| panic!("{id}: {:?}", self.callback.report()))
    }

    fn waits(&self, id: &str) -> bool {
        self.callback.admit(true, &key(id)).now_or_never().is_none()
    }

    async fn answer(&self, id: &str, verdict: &Verdict) -> Judged {
        self.admit(id).await.answered(None, verdict, MS)
    }

    /// Opens the breaker.
    async fn fail(&self) {
        for id in ["x", "y", "z"] {
            self.answer(id, &retry(RetryReason::Unreachable)).await;
        }
        assert_eq!(self.state(), CallbackState::Open);
    }

    fn metric(&self, series: &str) -> String {
        let text = self.metrics.encode();
        let line = text.lines().find_map(|line| line.strip_prefix(series)).map(str::trim);
        line.unwrap_or_else(|| panic!("{series} in\n{text}")).to_owned()
    }
}

fn key(id: &str) -> InboxKey {
    InboxKey {
        consumer_id: ConsumerId::new("c").unwrap(),
        message_id: MessageId::from_bytes(id.as_bytes()).unwrap(),
    }
}

fn accepted() -> Verdict {
    Verdict::Accepted { status: 200 }
}

fn retry(reason: RetryReason) -> Verdict {
    let status = match reason {
        RetryReason::Gone => Some(410),
        RetryReason::Overloaded => Some(503),
        RetryReason::Endpoint => Some(404),
        RetryReason::ServerError => Some(500),
        _ => None,
    };
    Verdict::Retry { reason, status, after: None, detail: "what it said".into() }
}

#[tokio::test(start_paused = true)]
async fn nothing_goes_before_the_host_was_reached() {
    let host = Host { is_away: true.into(), ..Host::default() };
    let world = World::start(&settings(), host);
    tokio::time::sleep(30 * SECOND).await;
    assert_eq!((world.state(), world.flow()), (CallbackState::Starting, Flow::Nothing));
    assert!(world.waits("a"));
    assert_eq!(world.callback.report().why, "connection refused");
    world.host.is_away.store(false, SeqCst);
    let begun = Instant::now();
    world.flows(Flow::Free).await;
    assert!(begun.elapsed() <= 2 * SECOND);
    assert!(!world.waits("a"));
}

#[tokio::test(start_paused = true)]
async fn as_many_as_the_limit_in_the_order_they_asked() {
    let world = World::reached(&SubscriptionSettings { concurrency: 2, ..settings() }).await;
    let (one, two) = (world.admit("1").await, world.admit("2").await);
    let (third, fourth) = (key("3"), key("4"));
    let mut third = Box::pin(world.callback.admit(true, &third));
    assert!((&mut third).now_or_never().is_none());
    let mut fourth = Box::pin(world.callback.admit(true, &fourth));
    assert!((&mut fourth).now_or_never().is_none());
    assert_eq!((world.callback.report().in_use, world.callback.report().waiting), (2, 2));
    one.answered(None, &accepted(), MS);
    assert!((&mut fourth).now_or_never().is_none(), "the third was before it");
    let third = third.now_or_never().expect("its turn has come");
    drop(two);
    assert!(fourth.now_or_never().is_some(), "one that was dropped gives its slot back");
    drop(third);
    assert_eq!((world.callback.report().in_use, world.callback.report().waiting), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_nobody_takes_any_more_passes_on() {
    let world = World::reached(&SubscriptionSettings { concurrency: 1, ..settings() }).await;
    let held = world.admit("1").await;
    let (second, third) = (key("2"), key("3"));
    let mut second = Box::pin(world.callback.admit(true, &second));
    assert!((&mut second).now_or_never().is_none());
    let mut third = Box::pin(world.callback.admit(true, &third));
    assert!((&mut third).now_or_never().is_none());
    // The second has its turn and is dropped before it hears of it.
    drop(held);
    drop(second);
    assert!(third.now_or_never().is_some());
    assert_eq!(world.callback.report().in_use, 0);
}

#[tokio::test(start_paused = true)]
async fn further_attempts_have_few_slots_and_hold_up_no_first_one() {
    let world = World::reached(&settings()).await;
    let further = |id: &str| {
        let (callback, key) = (world.callback.clone(), key(id));
        async move { callback.admit_in_place(&key).await.map(std::mem::forget) }
    };
    assert_eq!(further("a").now_or_never(), Some(Some(())));
    assert_eq!(further("b").now_or_never(), Some(Some(())), "16 / 8");
    assert_eq!(further("c").now_or_never(), Some(None), "at once: it is to be parked");
    let parked = key("parked");
    let mut worker = Box::pin(world.callback.admit(false, &parked));
    assert!((&mut worker).now_or_never().is_none(), "a worker waits");
    let firsts: Vec<_> = (0..14).map(|n| world.waits(&format!("m{n}"))).collect();
    assert!(firsts.iter().all(|waits| !waits), "{firsts:?}");
}

#[tokio::test(start_paused = true)]
async fn workers_and_deliveries_take_turns() {
    let world = World::reached(&SubscriptionSettings { concurrency: 1, ..settings() }).await;
    let order = Arc::new(Mutex::new(Vec::new()));
    let held = world.admit("held").await;
    let mut tasks = Vec::new();
    for n in 0..6 {
        let (callback, order) = (world.callback.clone(), order.clone());
        tasks.push(tokio::spawn(async move {
            let admission = callback.admit(n % 2 == 0, &key(&format!("m{n}"))).await;
            order.lock().unwrap().push(n);
            tokio::time::sleep(SECOND).await;
            admission.answered(None, &accepted(), SECOND);
        }));
        tokio::task::yield_now().await;
    }
    drop(held);
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
}

#[tokio::test(start_paused = true)]
async fn the_rate_holds_and_can_be_changed_while_it_is_waited_for() {
    let world = World::reached(&SubscriptionSettings { rate: Some(10.0), ..settings() }).await;
    let begun = Instant::now();
    for n in 0..21 {
        world.answer(&format!("m{n}"), &accepted()).await;
    }
    let took = begun.elapsed();
    assert!((1_990 * MS..2_200 * MS).contains(&took), "{took:?}");
    world.callback.set_limits(Limits { concurrency: 4, rate: Some(0.01) });
    let callback = world.callback.clone();
    let slow = tokio::spawn(async move { drop(callback.admit(true, &key("slow")).await) });
    tokio::time::sleep(5 * SECOND).await;
    assert!(!slow.is_finished());
    world.callback.set_limits(Limits { concurrency: 4, rate: None });
    tokio::time::timeout(SECOND, slow).await.unwrap().unwrap();
    let report = world.callback.report();
    assert_eq!((report.concurrency, report.limit, report.rate), (4, 4, None));
}

#[tokio::test(start_paused = true)]
async fn what_says_nothing_of_the_message_is_not_counted_while_it_rests() {
    let world = World::reached(&settings()).await;
    let overloaded = retry(RetryReason::Overloaded);
    let mut late = Vec::new();
    for id in ["a", "b", "c", "d", "e"] {
        late.push(world.admit(id).await);
    }
    let judged: Vec<Judged> =
        late.into_iter().map(|late| late.answered(None, &overloaded, MS)).collect();
    let counts: Vec<bool> = judged.iter().map(|judged| judged.counts_as_attempt).collect();
    assert_eq!(counts, [true, true, false, false, false], "the third opened it");
    assert!(judged[4].rests && !judged[1].rests);
    assert_eq!(
        world.metric("inboxd_callback_attempts_taken_back_total{subscription=\"orders\"}"),
        "3"
    );
    let judged = world.answer("f", &overloaded).await;
    assert!(!judged.counts_as_attempt, "a probe that failed so is taken back");
    let judged = world.answer("g", &retry(RetryReason::ServerError)).await;
    assert!(judged.counts_as_attempt && judged.rests, "500 may be the message's own doing");
    assert!(world.answer("h", &accepted()).await.counts_as_attempt);
    let judged = world.answer("i", &retry(RetryReason::Unreachable)).await;
    assert!(!judged.counts_as_attempt, "it never left");
}

#[tokio::test(start_paused = true)]
async fn an_open_breaker_takes_nothing_and_closes_by_its_probe_in_steps() {
    let world = World::reached(&settings()).await;
    world.fail().await;
    assert_eq!(world.flow(), Flow::Nothing);
    let report = world.callback.report();
    assert_eq!(report.next_probe_in, Some(SECOND));
    assert_eq!(report.why, "unreachable: what it said");
    world.host.is_away.store(true, SeqCst);
    let (asked, begun) = (world.host.probes.load(SeqCst), Instant::now());
    tokio::time::sleep(20 * SECOND).await;
    assert_eq!((world.state(), world.flow()), (CallbackState::Open, Flow::Nothing));
    assert_eq!(world.host.probes.load(SeqCst) - asked, 4, "after 1, 3, 7 and 15 s");
    world.host.is_away.store(false, SeqCst);
    world.flows(Flow::One).await;
    assert_eq!(begun.elapsed(), 31 * SECOND + breaker::IN_HAND_WAIT);
    assert_eq!(world.state(), CallbackState::Probing);

    // One goes; the others wait for what becomes of it.
    let probe = world.admit("a").await;
    assert!(world.waits("b"));
    assert_eq!(world.flow(), Flow::Nothing);
    probe.answered(None, &accepted(), MS);
    assert_eq!((world.state(), world.flow()), (CallbackState::Closed, Flow::Free));
    assert_eq!(world.callback.report().limit, 2, "slowly at first");
    world.answer("b", &accepted()).await;
    world.answer("c", &accepted()).await;
    assert_eq!(world.callback.report().limit, 4);
    for n in 0..20 {
        world.answer(&format!("m{n}"), &accepted()).await;
    }
    assert_eq!(world.callback.report().limit, 16);
    let probes = "inboxd_callback_probes_total{subscription=\"orders\",result=";
    assert_eq!(world.metric(&format!("{probes}\"succeeded\"}}")), "1");
    assert_eq!(world.metric(&format!("{probes}\"failed\"}}")), "4");
    let openings = "inboxd_callback_openings_total{subscription=\"orders\",reason=\"open\"}";
    assert_eq!(world.metric(openings), "1");
}

#[tokio::test(start_paused = true)]
async fn a_message_that_can_only_fail_does_not_keep_it_open() {
    let world = World::reached(&settings()).await;
    for id in ["x", "y", "z"] {
        world.answer(id, &retry(RetryReason::ServerError)).await;
    }
    assert_eq!(world.state(), CallbackState::Open);
    // They are the only ones here, and each waits again; a fresh one is asked for.
    let waiting: Vec<_> = ["x", "y", "z"].map(key).into_iter().collect();
    let mut waiting: Vec<_> =
        waiting.iter().map(|key| Box::pin(world.callback.admit(false, key))).collect();
    for poison in &mut waiting {
        assert!(poison.now_or_never().is_none());
    }
    world.flows(Flow::One).await;
    let begun = Instant::now();
    world.callback.one_was_taken();
    assert_eq!(world.flow(), Flow::Nothing, "one is on its way");
    let healthy = world.admit("healthy").await;
    assert_eq!(begun.elapsed(), Duration::ZERO, "it goes before those that have failed");
    healthy.answered(None, &accepted(), MS);
    assert_eq!(world.state(), CallbackState::Closed);
}

#[tokio::test(start_paused = true)]
async fn without_a_fresh_message_one_that_failed_is_sent_after_a_while() {
    let world = World::reached(&settings()).await;
    for id in ["x", "y", "z"] {
        world.answer(id, &retry(RetryReason::Timeout)).await;
    }
    let callback = world.callback.clone();
    let again = tokio::spawn(async move {
        let poison = key("x");
        let admission = callback.admit(false, &poison).await;
        admission.answered(None, &retry(RetryReason::Timeout), MS)
    });
    world.flows(Flow::One).await;
    let begun = Instant::now();
    let judged = again.await.unwrap();
    assert_eq!(begun.elapsed(), breaker::FRESH_WAIT);
    assert!(judged.counts_as_attempt && judged.rests, "so that it ends as a dead letter");
}

#[tokio::test(start_paused = true)]
async fn a_message_that_does_not_come_is_asked_for_again() {
    let world = World::reached(&settings()).await;
    world.fail().await;
    world.flows(Flow::One).await;
    world.callback.one_was_taken();
    assert_eq!(world.flow(), Flow::Nothing);
    world.flows(Flow::One).await;
    drop(world.admit("a").await);
    world.flows(Flow::One).await;
    assert_eq!(world.state(), CallbackState::Probing, "a probe that was not sent decides nothing");
}

#[tokio::test(start_paused = true)]
async fn a_path_that_is_gone_rests_until_a_message_says_otherwise() {
    let world = World::reached(&settings()).await;
    let judged = world.answer("a", &retry(RetryReason::Gone)).await;
    assert!(!judged.counts_as_attempt && judged.rests);
    assert_eq!((world.state(), world.flow()), (CallbackState::Gone, Flow::Nothing));
    assert_eq!(world.metric("inboxd_subscription_paused{subscription=\"orders\"}"), "1");
    world.answer("a", &retry(RetryReason::Unreachable)).await;
    assert_eq!(world.state(), CallbackState::Gone, "no answer ends nothing");
    world.answer("a", &accepted()).await;
    assert_eq!((world.state(), world.flow()), (CallbackState::Closed, Flow::Free));
    assert_eq!(world.metric("inboxd_subscription_paused{subscription=\"orders\"}"), "0");
}

#[tokio::test(start_paused = true)]
async fn an_operator_pauses_and_resumes() {
    let world = World::reached(&settings()).await;
    let under_way = world.admit("a").await;
    world.callback.pause();
    assert_eq!((world.state(), world.flow()), (CallbackState::Paused, Flow::Nothing));
    assert!(world.waits("b"));
    under_way.answered(None, &accepted(), MS);
    tokio::time::sleep(3_600 * SECOND).await;
    assert_eq!(world.callback.report().since, 3_600 * SECOND);
    assert_eq!(world.flow(), Flow::Nothing);
    world.callback.resume();
    assert_eq!((world.state(), world.flow()), (CallbackState::Closed, Flow::Free));
    assert!(!world.waits("b"));
}

#[tokio::test(start_paused = true)]
async fn a_health_url_stops_everything_while_it_fails_and_no_longer() {
    let host = Host { has_health: true, ..Host::default() };
    let world = World::start(&settings(), host);
    world.flows(Flow::Free).await;
    tokio::time::sleep(62 * SECOND).await;
    assert_eq!(world.host.probes.load(SeqCst), 13, "every five seconds");
    world.host.is_away.store(true, SeqCst);
    world.flows(Flow::Nothing).await;
    assert_eq!(world.state(), CallbackState::Health);
    assert!(world.waits("a"));
    world.host.is_away.store(false, SeqCst);
    let begun = Instant::now();
    world.flows(Flow::Free).await;
    assert!(begun.elapsed() <= 2 * SECOND, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn one_late_answer_of_a_health_url_stops_nothing() {
    let world = World::start(&settings(), Host { has_health: true, ..Host::default() });
    world.flows(Flow::Free).await;
    world.host.is_away.store(true, SeqCst);
    let asked = world.host.probes.load(SeqCst);
    while world.host.probes.load(SeqCst) == asked {
        tokio::time::sleep(10 * MS).await;
    }
    world.host.is_away.store(false, SeqCst);
    assert_eq!(world.flow(), Flow::Free);
    tokio::time::sleep(20 * SECOND).await;
    assert_eq!(
        world.metric("inboxd_callback_openings_total{subscription=\"orders\",reason=\"health\"}"),
        "0"
    );
}

#[tokio::test(start_paused = true)]
async fn while_it_drains_nothing_is_opened() {
    let world = World::reached(&settings()).await;
    world.draining.cancel();
    for id in ["a", "b", "c", "d", "e"] {
        let judged = world.answer(id, &retry(RetryReason::Unreachable)).await;
        assert!(!judged.counts_as_attempt);
    }
    assert!(world.answer("f", &retry(RetryReason::Overloaded)).await.counts_as_attempt);
    assert_eq!(world.state(), CallbackState::Closed);
}
