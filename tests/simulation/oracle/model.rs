//! What can be said of a record from what was seen.

use super::*;

impl State {
    pub(super) fn life(&mut self, life: &Life) -> &mut LifeRecord {
        self.lives.entry((life.slot, life.number)).or_default()
    }

    pub(super) fn attempts_may_skip(&mut self, places: &[Place]) {
        for place in places {
            if let Some(key) = self.copies[place].key.clone() {
                self.attempts.entry(key).or_default().may_skip += 1;
            }
        }
    }

    /// Its attempts are counted from the beginning.
    pub(super) fn begins_anew(&mut self, key: &InboxKey) {
        let attempts = self.attempts.entry(key.clone()).or_default();
        attempts.last_begun = 0;
        attempts.failed = 0;
        attempts.repeats = None;
    }

    /// What the holder of this claim heard counts from now on.
    pub(super) fn failure_is_recorded(&mut self, key: &InboxKey, token: Token) {
        let attempts = self.attempts.entry(key.clone()).or_default();
        if attempts.unrecorded.take_if(|of| *of == token).is_some() {
            attempts.failed += 1;
        }
    }

    pub(super) fn name(&self, place: Place) -> String {
        match self.copies.get(&place).map(|copy| &copy.key) {
            Some(Some(key)) => key.message_id.as_str().chars().take(40).collect(),
            Some(None) => "(no id)".into(),
            None => "(unknown)".into(),
        }
    }

    /// The path that a record is forwarded to, `Some(None)` being the callback's own; `None`: it is
    /// not forwarded at all.
    pub(super) fn route(&self, place: Place) -> Option<Option<String>> {
        let settings = &self.plan.settings;
        let kind = self.copies[&place].kind;
        if settings.routes.is_empty() {
            return Some(None);
        }
        match KINDS[..2].contains(&kind) {
            true => Some(Some(path_of(kind))),
            false => (settings.on_unrouted == OnUnrouted::Forward).then_some(None),
        }
    }

    /// The configuration ignores such messages, and one with this content exists.
    pub(super) fn is_ignored(&self, key: &InboxKey, fingerprint: Option<&Fingerprint>) -> bool {
        self.plan.settings.on_unrouted == OnUnrouted::Ignore
            && self.copies.iter().any(|(place, copy)| {
                let replayed = self.parked.aliases.get(key) == Some(place);
                (copy.key.as_ref() == Some(key) || replayed)
                    && copy.fingerprint.as_ref() == fingerprint
                    && self.route(*place).is_none()
            })
    }

    /// Whether a row, and whether a parked copy or dead letter of this record's message exists or,
    /// of a dead letter, existed.
    pub(super) fn evidence(&self, place: Place) -> (bool, bool) {
        let copy = &self.copies[&place];
        let parked = self.has_copy(place, |_| true);
        match &copy.key {
            Some(key) => {
                let mut dead = self.parked.ever_dead.iter();
                let mut copies = self.parked.copies.values();
                let letter = dead.any(|(of, _)| of == key) || copies.any(|copy| copy.key == *key);
                (self.rows.contains_key(key), letter)
            }
            None => {
                let mut made = self.generated.iter().filter(|(_, of)| **of == place);
                (
                    made.any(|(key, _)| self.rows.contains_key(key)),
                    parked || self.parked.ever_dead_places.contains(&place),
                )
            }
        }
    }

    /// A proof of this very record is committed.
    pub(super) fn is_proven(&self, place: Place) -> bool {
        let copy = &self.copies[&place];
        let Some(key) = &copy.key else {
            return self.evidence(place).0
                || self.has_copy(place, |_| true)
                || self.has_alias(place);
        };
        let duplicate = self.plan.settings.identity.on_conflict == OnIdConflict::Duplicate;
        let row = self.rows.get(key).is_some_and(|row| {
            duplicate || !Fingerprint::conflict(row.as_ref(), copy.fingerprint.as_ref())
        });
        row || self.has_copy(place, |_| true) || self.has_alias(place)
    }

    /// An accepted POST may be followed by another: its answer was not heard, its process ended,
    /// or its claim was taken over.
    pub(super) fn explains_another(&self, post: usize) -> bool {
        let post = &self.posts[post];
        let cut = self.lives.get(&(post.life.slot, post.life.number)).is_none_or(|life| life.cut);
        let ended = post.life.is_dead() || cut;
        let lost = post.token.is_none_or(|token| self.fates.get(&token) == Some(&Fate::TakenOver));
        !post.heard || ended || lost || self.clock_jumped_at.is_some()
    }
}
