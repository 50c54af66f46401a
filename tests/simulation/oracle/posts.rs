//! The application's side: every POST, when it is decided on, when it begins, what comes of it.

use inboxd::engine::OnBlockedLane;

use super::*;

impl Oracle {
    /// The engine has decided to POST; answers the POST's number.
    pub fn forward_called(&self, life: &Arc<Life>, request: &ForwardRequest<'_>) -> usize {
        let mut state = lock(&self.state);
        let place = place_of(&request.envelope.origin);
        let key = request.key.clone();
        let copy = &state.copies[&place];
        let (lane, fingerprint) = (copy.lane.clone(), copy.fingerprint.clone());
        let own_key = copy.key.clone();
        let name = state.name(place);
        self.trace
            .add(&life.name, format_args!("forwards {place:?} {name} attempt {}", request.attempt));
        if own_key.is_none() {
            state.generated.insert(key.clone(), place);
        } else if own_key.as_ref() != Some(&key) && !state.parked.aliases.contains_key(&key) {
            self.fail(&mut state, format_args!("I9: {name} is forwarded as {}", key.message_id));
        }
        let held = state.life(life).held.iter().rev().find(|(_, held)| held.place == place);
        let held =
            held.map(|(serial, held)| (*serial, Some(held.seen.clone()), Some(held.outer.clone())));
        let token = state.claims.get(&key).and_then(|claim| claim.token);
        let is_worker = state.parked.is_worker(token);
        let held = held.filter(|_| !is_worker);
        let (serial, seen, fence) = held.unwrap_or((0, None, None));
        self.check_start(&mut state, life, &name, &key, (!is_worker).then_some(seen.as_ref()));
        self.check_lane(&mut state, life, place, lane.as_deref(), is_worker, &name);
        self.check_attempt(&mut state, &key, request.attempt, &name);
        let route = state.route(place);
        if route.as_ref().map(Option::as_deref) != Some(request.path) {
            self.fail(
                &mut state,
                format_args!("{name} is forwarded to {:?}, its route is {route:?}", request.path),
            );
        }
        let again = state.posts.iter().any(|post| {
            let same = if is_worker { post.token == token } else { post.serial == serial };
            Arc::ptr_eq(&post.life, life) && same && post.heard
        });
        if again {
            self.fail(
                &mut state,
                format_args!("what the application decided about {name} is asked again"),
            );
        }
        let concurrency = state.plan.settings.concurrency;
        let open_posts = &mut state.life(life).open_posts;
        *open_posts += 1;
        let open_posts = *open_posts;
        if open_posts > concurrency {
            self.fail(
                &mut state,
                format_args!("I7: {open_posts} POSTs at once, bound {concurrency}"),
            );
        }
        state.stats.posts += 1;
        state.posts.push(Post {
            key,
            place,
            lane,
            life: life.clone(),
            serial,
            attempt: request.attempt,
            token,
            fingerprint,
            begun_at: None,
            open: true,
            accepted: false,
            refused: false,
            heard: false,
            fence,
        });
        state.posts.len() - 1
    }

    /// I3, I4 and the fence, at the moment of the decision.
    fn check_start(
        &self,
        state: &mut State,
        life: &Life,
        name: &str,
        key: &InboxKey,
        fence: Option<Option<&Fence>>,
    ) {
        let now = self.database_now(state);
        // Leases protect as far as the database's clock goes as fast as ours.
        let excused = state.clock_jumped_at.is_some_and(|at| {
            at.elapsed() <= 2 * state.plan.settings.lease + Duration::from_secs(1)
        });
        if excused {
            state.stats.excused_by_clock += 1;
        } else if state.rows.contains_key(key) {
            self.fail(state, format_args!("I3: {name} is forwarded although its row is committed"));
        } else {
            let held = state.claims.get(key).is_some_and(|claim| {
                claim.owner == life.owner && claim.token.is_some() && claim.expires_at > now
            });
            if !held {
                self.fail(state, format_args!("I3: {name} is forwarded without a claim in force"));
            }
        }
        // A worker's message is no delivery and has none.
        if fence.is_some_and(|fence| fence.is_none_or(|fence| !fence.is_open())) {
            self.fail(state, format_args!("{name} is forwarded although its fence is closed"));
        }
    }

    fn database_now(&self, state: &State) -> i64 {
        i64::try_from(self.begun_at.elapsed().as_micros()).unwrap_or(i64::MAX) + state.clock_shift
    }

    /// I6: everything before it in its lane is decided, and nobody else of the lane is at it.
    fn check_lane(
        &self,
        state: &mut State,
        life: &Arc<Life>,
        place: Place,
        lane: Option<&[u8]>,
        is_worker: bool,
        name: &str,
    ) {
        let Some(lane) = lane else { return };
        if state.is_replayed(place) {
            return;
        }
        let skips = state.plan.settings.on_blocked_lane == OnBlockedLane::Skip;
        let earlier: Vec<u64> = state.lanes[&(place.0, lane.to_vec())]
            .iter()
            .copied()
            .filter(|position| *position < place.1)
            .collect();
        // Those that skip pass what is parked, and are passed by it.
        let open = earlier.into_iter().map(|position| (place.0, position)).find(|earlier| {
            !state.is_decided(*earlier) && !(skips && (is_worker || state.is_proven(*earlier)))
        });
        if let Some((_, position)) = open {
            self.fail(
                state,
                format_args!(
                    "I6: {name} at {} is forwarded before {position} of its lane is decided",
                    place.1
                ),
            );
        }
        if let Some(dead) = state.halting(place, lane)
            && !skips
        {
            let dead = dead.key.message_id.clone();
            self.fail(
                state,
                format_args!("I6: {name} is forwarded although {dead} of its lane is dead"),
            );
        }
        let now = self.database_now(state);
        let other = state.posts.iter().find(|post| {
            let by_worker = state.parked.is_worker(post.token);
            let same_life = Arc::ptr_eq(&post.life, life) && !by_worker;
            let in_force = state
                .claims
                .get(&post.key)
                .is_some_and(|claim| claim.token == post.token && claim.expires_at > now);
            // Across instances only as far as the broker says whose the stream is, or the lease.
            let fenced = post.fence.as_ref().is_none_or(Fence::is_lost);
            let lost = post.life.is_dead() || if by_worker { !in_force } else { fenced };
            post.open
                && post.place.0 == place.0
                && post.lane.as_deref() == Some(lane)
                && (same_life || !lost)
                && !(skips && (by_worker || is_worker))
                && !state.is_replayed(post.place)
        });
        if let Some(other) = other.map(|other| other.place) {
            self.fail(
                state,
                format_args!("I6: {name} is forwarded while {other:?} of its lane is"),
            );
        }
    }

    /// Attempts grow with each POST, and by one where nothing was lost.
    fn check_attempt(&self, state: &mut State, key: &InboxKey, attempt: u32, name: &str) {
        let excused = state.clock_jumped_at.is_some();
        let known = state.attempts.entry(key.clone()).or_default();
        let (last, highest) = (known.last_begun, known.highest);
        let skipped = attempt.saturating_sub(highest + 1);
        let skips = skipped > known.may_skip;
        known.may_skip = known.may_skip.saturating_sub(skipped);
        known.highest = highest.max(attempt);
        if attempt <= last && !excused {
            self.fail(state, format_args!("I9: {name}: attempt {attempt} after attempt {last}"));
        }
        let repeats = state.attempts.entry(key.clone()).or_default().repeats.take();
        if repeats.is_some_and(|repeats| attempt > repeats + skipped) {
            self.fail(
                state,
                format_args!(
                    "breaker: {name}: attempt {attempt} after one that was made while nobody was there"
                ),
            );
        }
        if skips {
            self.fail(
                state,
                format_args!("I9: {name}: attempt {attempt} after {highest} skips one"),
            );
        }
    }

    /// The application has the request.
    pub fn begun(&self, post: usize, attempt: u32) {
        let mut state = lock(&self.state);
        let key = state.posts[post].key.clone();
        state.posts[post].begun_at = Some(Instant::now());
        let most = state.plan.settings.park.attempts_max;
        let last = state.attempts.entry(key.clone()).or_default();
        last.last_begun = attempt.max(last.last_begun);
        let failed = last.failed;
        if failed >= most {
            let id = &key.message_id;
            self.fail(
                &mut state,
                format_args!("I9: {id} is POSTed after {failed} failures, {most} are allowed"),
            );
        }
        if state.rows.contains_key(&key) {
            // Between the last check and the write: the documented window.
            state.stats.residual += 1;
            self.trace.add("app", format_args!("#{post} begins in the residual window"));
        }
    }

    pub fn decided(&self, post: usize, verdict: &Verdict, heard: bool) {
        let mut state = lock(&self.state);
        let taken = matches!(verdict, Verdict::Accepted { .. } | Verdict::Drop { .. });
        state.posts[post].accepted = taken;
        state.posts[post].refused = matches!(verdict, Verdict::Refused { .. });
        state.stats.accepted += u64::from(taken);
        state.stats.answers_lost += u64::from(!heard);
        let name = state.name(state.posts[post].place);
        let what = verdict.as_str();
        self.trace.add(
            "app",
            format_args!(
                "#{post} {name}: {what}{}",
                if heard { "" } else { ", the answer is lost" }
            ),
        );
    }

    /// The caller has its verdict.
    pub fn answered(&self, life: &Life, post: usize, verdict: &Verdict) {
        let mut state = lock(&self.state);
        state.posts[post].open = false;
        state.posts[post].heard = !matches!(verdict, Verdict::Retry { .. } | Verdict::Park { .. });
        state.life(life).open_posts -= 1;
        self.heard(&mut state, life, post, verdict);
        let what = verdict.as_str();
        self.trace.add(&life.name, format_args!("hears of #{post}: {what}"));
    }

    /// The caller is gone: crashed, cut, or panicked.
    pub fn abandoned(&self, life: &Life, post: usize) {
        let mut state = lock(&self.state);
        state.posts[post].open = false;
        state.life(life).open_posts -= 1;
    }
}
