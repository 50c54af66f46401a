//! What the run came to: a pure function of what was published, what the application saw,
//! and what the inbox held at the kill and at the end.
//!
//! Nothing here takes the sidecar's word for anything that matters: lost and accepted again are
//! told from the application's ledger and the database's rows alone. Only the number of
//! redelivered duplicates comes from the sidecar's own counters, since nobody else sees
//! what it kept away from the application.

use std::collections::{HashMap, HashSet};

use super::ledger::{Post, Posts};
use super::plan::{Copy, Plan, message_id};
use super::sidecar::Counters;

/// Everything that is known after a run.
pub(super) struct Evidence<'a> {
    /// What was published.
    pub(super) plan: &'a Plan,
    /// What the application saw.
    pub(super) posts: &'a Posts,
    /// Ids with a row in the inbox after the kill and before the restart.
    pub(super) rows_at_kill: &'a HashSet<String>,
    /// Ids with a row in the inbox at the end.
    pub(super) rows_at_end: &'a HashSet<String>,
    /// The first life's counters, read right before the kill.
    pub(super) before_kill: Counters,
    /// The second life's counters, read when everything was settled.
    pub(super) at_end: Counters,
}

/// The result. Lists of ids are sorted.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Judgement {
    /// Records published.
    pub(super) published: u64,
    /// Different ids among them.
    pub(super) distinct: u64,
    /// Deliveries that were not forwarded, by the sidecar's counters; the first life's were
    /// read a moment before the kill, so that a few may be missing.
    pub(super) suppressed: u64,
    /// Second copies that came much later and never reached the application.
    pub(super) suppressed_republished: u64,
    /// Second copies right behind the first that never reached the application.
    pub(super) suppressed_concurrent: u64,
    /// What is left of `suppressed`: records that the restarted sidecar was sent again.
    pub(super) suppressed_redelivered: u64,
    /// POSTs that reached the application.
    pub(super) forwarded: u64,
    /// Of these, answered by something else than 2xx, or by nothing.
    pub(super) turned_down: u64,
    /// Different ids that the application accepted.
    pub(super) accepted: u64,
    /// Ids published and never accepted.
    pub(super) lost: Vec<String>,
    /// Ids accepted once more because the kill fell between the POST and the row.
    pub(super) again_by_kill: Vec<String>,
    /// Ids accepted more than once that were not in flight at the kill, or not in this way.
    pub(super) again_otherwise: Vec<String>,
    /// Ids whose POSTs had no `Idempotency-Key`, different ones, or another id's.
    pub(super) key_changed: Vec<String>,
    /// Ids that arrived with other bytes than were published.
    pub(super) altered: Vec<String>,
    /// Ids that were never published.
    pub(super) unknown: Vec<String>,
    /// Ids that were accepted and have no row in the inbox at the end.
    pub(super) unrecorded: Vec<String>,
}

impl Judgement {
    /// Judges a run.
    pub(super) fn of(evidence: &Evidence<'_>) -> Self {
        let plan = evidence.plan;
        let mut judgement = Self {
            published: plan.records().len() as u64,
            distinct: u64::from(plan.distinct()),
            suppressed: evidence.before_kill.suppressed + evidence.at_end.suppressed,
            ..Self::default()
        };
        let mut published: HashSet<String> = HashSet::new();
        for number in 0..plan.distinct() {
            let id = message_id(number);
            judgement.judge_id(&id, evidence);
            published.insert(id);
        }
        judgement.count_copies(evidence);
        let posts = || evidence.posts.values().flatten();
        judgement.forwarded = posts().count() as u64;
        judgement.turned_down = posts().filter(|post| !post.accepted()).count() as u64;
        judgement.unknown =
            evidence.posts.keys().filter(|id| !published.contains(*id)).cloned().collect();
        judgement.unknown.sort();
        judgement.judge_keys(evidence.posts);
        judgement
    }

    fn judge_id(&mut self, id: &str, evidence: &Evidence<'_>) {
        let posts = evidence.posts.get(id).map_or(&[][..], Vec::as_slice);
        let accepted_by = |life| posts.iter().filter(|p| p.accepted() && p.life == life).count();
        let accepted = posts.iter().filter(|post| post.accepted()).count();
        if accepted == 0 {
            self.lost.push(id.to_owned());
        } else {
            self.accepted += 1;
            if !evidence.rows_at_end.contains(id) {
                self.unrecorded.push(id.to_owned());
            }
        }
        if accepted > 1 {
            // A POST had begun, and no row existed at the kill.
            let in_flight_at_kill =
                posts.iter().any(|post| post.life == 1) && !evidence.rows_at_kill.contains(id);
            // One kill explains one acceptance by each life and no more.
            let once_each = accepted_by(1) == 1 && accepted_by(2) == 1;
            if in_flight_at_kill && once_each {
                self.again_by_kill.push(id.to_owned());
            } else {
                self.again_otherwise.push(id.to_owned());
            }
        }
        if posts.iter().any(|post| !post.intact) {
            self.altered.push(id.to_owned());
        }
    }

    /// A copy is suppressed if its id was accepted and none of the accepted POSTs was
    /// made from it: of n records, all but those that were accepted.
    fn count_copies(&mut self, evidence: &Evidence<'_>) {
        for record in evidence.plan.records() {
            let kind = match record.copy {
                Copy::First => continue,
                Copy::Concurrent => &mut self.suppressed_concurrent,
                Copy::Republished => &mut self.suppressed_republished,
            };
            let posts = evidence.posts.get(&message_id(record.number));
            let accepted = posts.into_iter().flatten().filter(|post| post.accepted());
            let origins: HashSet<&str> = accepted.map(|post| post.origin.as_str()).collect();
            *kind += u64::from(origins.len() == 1);
        }
        let copies = self.suppressed_concurrent + self.suppressed_republished;
        // The ledger knows of these whatever the moment missed.
        self.suppressed = self.suppressed.max(copies);
        self.suppressed_redelivered = self.suppressed - copies;
    }

    fn judge_keys(&mut self, posts: &Posts) {
        let mut owners: HashMap<&str, &str> = HashMap::new();
        let mut changed: HashSet<&str> = HashSet::new();
        for (id, posts) in posts {
            let keys: HashSet<Option<&str>> = posts.iter().map(Post::key).collect();
            if keys.len() != 1 || keys.contains(&None) {
                changed.insert(id);
            }
            for key in keys.into_iter().flatten() {
                if owners.insert(key, id).is_some_and(|owner| owner != id) {
                    changed.insert(id);
                }
            }
        }
        self.key_changed = changed.into_iter().map(str::to_owned).collect();
        self.key_changed.sort();
    }

    /// What may never be, each with the ids concerned; those without any left out.
    pub(super) fn faults(&self) -> Vec<(&'static str, &[String])> {
        [
            ("lost: published and never accepted", &self.lost),
            ("accepted twice, and not in flight at the kill", &self.again_otherwise),
            ("forwarded without an Idempotency-Key of their own", &self.key_changed),
            ("forwarded with other bytes than were published", &self.altered),
            ("forwarded and never published", &self.unknown),
            ("accepted without a row in the inbox at the end", &self.unrecorded),
        ]
        .into_iter()
        .filter(|(_, ids)| !ids.is_empty())
        .map(|(what, ids)| (what, ids.as_slice()))
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run that went well: each id accepted once, from its first copy.
    struct Run {
        plan: Plan,
        posts: Posts,
        rows_at_kill: HashSet<String>,
        rows_at_end: HashSet<String>,
    }

    fn post(id: &str, life: u32, status: u16) -> Post {
        Post {
            life,
            key: Some(format!("\"{id}\"")),
            intact: true,
            origin: "kafka:orders/0/1".into(),
            status: Some(status),
        }
    }

    impl Run {
        fn good() -> Self {
            let plan = Plan::draw(300, 4, 1);
            let ids = || (0..plan.distinct()).map(message_id);
            let posts = ids().map(|id| (id.clone(), vec![post(&id, 1, 200)])).collect();
            let (rows_at_kill, rows_at_end) = (ids().collect(), ids().collect());
            Self { plan, posts, rows_at_kill, rows_at_end }
        }

        fn posts(&mut self, id: &str) -> &mut Vec<Post> {
            self.posts.get_mut(id).unwrap()
        }

        fn judge(&self) -> Judgement {
            Judgement::of(&Evidence {
                plan: &self.plan,
                posts: &self.posts,
                rows_at_kill: &self.rows_at_kill,
                rows_at_end: &self.rows_at_end,
                before_kill: Counters { suppressed: 70, settled: 200 },
                at_end: Counters { suppressed: 55, settled: 140 },
            })
        }
    }

    const ID: &str = "order-000007";

    fn only(judgement: &Judgement, what: &str) {
        let faults = judgement.faults();
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert!(faults[0].0.contains(what), "{faults:?}");
        assert_eq!(faults[0].1, [ID]);
    }

    #[test]
    fn a_good_run_has_no_faults_and_its_figures_add_up() {
        let judgement = Run::good().judge();
        assert_eq!(judgement.faults(), []);
        assert_eq!((judgement.published, judgement.distinct), (300, 200));
        assert_eq!((judgement.forwarded, judgement.turned_down, judgement.accepted), (200, 0, 200));
        assert_eq!(judgement.suppressed_concurrent, 50);
        assert_eq!(judgement.suppressed_republished, 50);
        assert_eq!((judgement.suppressed, judgement.suppressed_redelivered), (125, 25));
    }

    #[test]
    fn an_id_that_was_never_accepted_is_lost() {
        let mut run = Run::good();
        run.posts(ID)[0].status = Some(503);
        only(&run.judge(), "lost");
        run.posts(ID)[0].status = None;
        only(&run.judge(), "lost");
        run.posts.remove(ID);
        let judgement = run.judge();
        only(&judgement, "lost");
        assert_eq!(judgement.accepted, 199);
    }

    #[test]
    fn accepted_by_both_lives_without_a_row_at_the_kill_is_the_kill_s_window() {
        let mut run = Run::good();
        run.posts(ID).push(post(ID, 2, 200));
        run.rows_at_kill.remove(ID);
        let judgement = run.judge();
        assert_eq!(judgement.faults(), []);
        assert_eq!(judgement.again_by_kill, [ID]);
        assert_eq!(judgement.forwarded, 201);
    }

    #[test]
    fn accepted_again_though_the_row_existed_at_the_kill_is_a_fault() {
        let mut run = Run::good();
        run.posts(ID).push(post(ID, 2, 200));
        only(&run.judge(), "accepted twice");
    }

    #[test]
    fn accepted_twice_by_one_life_is_a_fault_whatever_the_rows_say() {
        for life in [1, 2] {
            let mut run = Run::good();
            run.rows_at_kill.remove(ID);
            *run.posts(ID) = vec![post(ID, life, 200), post(ID, life, 200)];
            only(&run.judge(), "accepted twice");
        }
        let mut run = Run::good();
        run.rows_at_kill.remove(ID);
        run.posts(ID).extend([post(ID, 2, 200), post(ID, 2, 200)]);
        only(&run.judge(), "accepted twice");
    }

    #[test]
    fn a_refused_attempt_before_the_accepted_one_is_no_second_acceptance() {
        let mut run = Run::good();
        run.posts(ID).insert(0, post(ID, 1, 503));
        let judgement = run.judge();
        assert_eq!(judgement.faults(), []);
        assert_eq!((judgement.forwarded, judgement.turned_down), (201, 1));
    }

    #[test]
    fn the_key_is_there_the_same_on_each_post_and_the_id_s_own() {
        let mut run = Run::good();
        run.posts(ID).insert(0, Post { key: Some("other".into()), ..post(ID, 1, 503) });
        only(&run.judge(), "Idempotency-Key");
        let mut run = Run::good();
        run.posts(ID)[0].key = None;
        only(&run.judge(), "Idempotency-Key");
        let mut run = Run::good();
        run.posts(ID)[0].key = Some("\"order-000008\"".into());
        assert_eq!(run.judge().key_changed.len(), 1);
    }

    #[test]
    fn what_was_altered_invented_or_not_recorded_is_a_fault() {
        let mut run = Run::good();
        run.posts(ID)[0].intact = false;
        only(&run.judge(), "other bytes");
        let mut run = Run::good();
        run.rows_at_end.remove(ID);
        only(&run.judge(), "without a row");
        let mut run = Run::good();
        run.posts.insert("stranger".into(), vec![post("stranger", 1, 200)]);
        assert_eq!(run.judge().faults()[0].1, ["stranger"]);
    }

    #[test]
    fn a_copy_that_reached_the_application_is_not_counted_as_suppressed() {
        let mut run = Run::good();
        let copied = run.plan.records().iter().find(|r| r.copy == Copy::Concurrent).unwrap();
        let id = message_id(copied.number);
        run.rows_at_kill.remove(&id);
        let again = Post { origin: "kafka:orders/1/1".into(), ..post(&id, 2, 200) };
        run.posts(&id).push(again);
        let judgement = run.judge();
        assert_eq!(judgement.suppressed_concurrent, 49);
        assert_eq!(judgement.again_by_kill, [id]);
    }
}
