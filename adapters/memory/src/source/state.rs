//! The broker's state: pure, synchronous, in a fixed order.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{
    Envelope, Fence, FenceHandle, Origin, Room, Settlement, SourcePhase, SourceStatus, StreamId,
};
use tokio::sync::watch;
use tokio::time::Instant;

use super::{MemoryBrokerFlaw, MemoryBrokerOptions, MemoryBrokerWitness, MemoryKind};

#[derive(Debug)]
pub(super) struct State {
    kind: MemoryKind,
    exclusive: bool,
    shuffle_seed: Option<u64>,
    witness: Option<Arc<dyn MemoryBrokerWitness>>,
    flaw: Option<MemoryBrokerFlaw>,
    prefetch: Option<usize>,
    drain_max: Duration,
    streams: Vec<Stream>,
    instances: BTreeMap<u64, Instance>,
    next_instance: u64,
    /// One per hand-over, never reused: what an acker settles.
    next_serial: u64,
    reachable: bool,
    hanging: bool,
    /// Exclusive only: who consumes.
    consumer: Option<u64>,
    /// Counts connections and assignments, so that a turn knows whether others must look.
    changes: u64,
}

#[derive(Debug)]
struct Stream {
    id: StreamId,
    /// Everything not settled for good, by position.
    entries: BTreeMap<u64, Entry>,
    next_position: u64,
    /// Log only: who has it, and by which fence.
    owner: Option<(u64, FenceHandle)>,
    /// Log only: it is drained; by when at the latest.
    drain_by: Option<Instant>,
}

#[derive(Debug)]
struct Entry {
    envelope: Arc<Envelope>,
    place: Place,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Ready,
    Held {
        instance: u64,
        serial: u64,
    },
    /// Log only: acked above an unsettled one.
    Acked,
}

#[derive(Debug)]
struct Instance {
    connected: bool,
    taking: bool,
    /// Its process stands still.
    stopped: bool,
    /// Log: in the group; again with its next turn once it was thrown out.
    member: bool,
    /// Queue: one per connection.
    fence: FenceHandle,
    held: usize,
    status: watch::Sender<SourceStatus>,
    connections: u64,
    /// Settlements that have not reached the broker yet; each was a delivery, so the
    /// prefetch or the engine's own bound limits them.
    wire: Vec<(usize, u64, u64, Settlement)>,
    /// When it may try to connect again.
    retry_at: Instant,
}

/// One delivery, before it is dressed as one.
pub(super) struct Taken {
    pub(super) envelope: Arc<Envelope>,
    pub(super) stream: StreamId,
    pub(super) stream_index: usize,
    pub(super) position: u64,
    pub(super) serial: u64,
    pub(super) fence: Fence,
}

impl State {
    pub(super) fn new(options: &MemoryBrokerOptions) -> Self {
        let stream = |n| Stream {
            id: StreamId(format!("{}/{n}", options.name).into()),
            entries: BTreeMap::new(),
            next_position: 0,
            owner: None,
            drain_by: None,
        };
        Self {
            kind: options.kind,
            exclusive: options.exclusive,
            shuffle_seed: options.shuffle_seed,
            witness: None,
            flaw: None,
            prefetch: options.prefetch,
            drain_max: options.drain_max,
            streams: (0..options.streams).map(stream).collect(),
            instances: BTreeMap::new(),
            next_instance: 0,
            next_serial: 0,
            reachable: true,
            hanging: false,
            consumer: None,
            changes: 0,
        }
    }

    pub(super) fn set_witness(&mut self, witness: Arc<dyn MemoryBrokerWitness>) {
        self.witness = Some(witness);
    }

    pub(super) fn set_flaw(&mut self, flaw: Option<MemoryBrokerFlaw>) {
        self.flaw = flaw;
    }

    pub(super) fn publish(&mut self, stream: usize, mut envelope: Envelope) -> u64 {
        let stream = &mut self.streams[stream];
        let position = stream.next_position;
        stream.next_position += 1;
        envelope.origin = Origin::Memory { stream: Arc::clone(&stream.id.0), position };
        let entry = Entry { envelope: Arc::new(envelope), place: Place::Ready };
        stream.entries.insert(position, entry);
        position
    }

    pub(super) fn unsettled(&self) -> usize {
        let entries = self.streams.iter().flat_map(|stream| stream.entries.values());
        entries.filter(|entry| entry.place != Place::Acked).count()
    }

    pub(super) fn held(&self) -> usize {
        self.instances.values().map(|instance| instance.held).sum()
    }

    pub(super) fn instance_ids(&self) -> Vec<u64> {
        self.instances.keys().copied().collect()
    }

    /// A new instance, not connected yet.
    pub(super) fn join(&mut self, status: watch::Sender<SourceStatus>) -> u64 {
        let id = self.next_instance;
        self.next_instance += 1;
        let instance = Instance {
            connected: false,
            taking: true,
            stopped: false,
            member: true,
            fence: FenceHandle::open(),
            held: 0,
            status,
            connections: 0,
            wire: Vec::new(),
            retry_at: Instant::now(),
        };
        self.instances.insert(id, instance);
        id
    }

    /// Gone, crashed or closed: what it held is to be had again.
    pub(super) fn leave(&mut self, id: u64) {
        let Some(instance) = self.instances.remove(&id) else { return };
        instance.fence.lose();
        instance.status.send_modify(|status| {
            status.phase = SourcePhase::Closed;
            status.reason = "closed".into();
        });
        self.return_held(id);
        self.pass_on(id);
        self.drop_assignments(id);
    }

    /// Connects where that is possible and due; the loop's turn of one instance. True if others
    /// may find something new.
    pub(super) fn turn(&mut self, id: u64, reconnect_after: Duration) -> bool {
        let before = self.changes;
        let now = Instant::now();
        let open = self.reachable && !self.hanging;
        let Some(instance) = self.instances.get_mut(&id) else { return false };
        if instance.stopped {
            return false;
        }
        if !std::mem::replace(&mut instance.member, true) {
            self.changes += 1;
        }
        let connects = !instance.connected && open && now >= instance.retry_at;
        if connects {
            instance.connected = true;
            instance.connections += 1;
            instance.fence = FenceHandle::open();
            self.consumer.get_or_insert(id);
        } else if !instance.connected && !open {
            instance.retry_at = now + reconnect_after;
        }
        let (connected, reconnects) = (instance.connected, instance.connections.max(1) - 1);
        instance.status.send_modify(|status| {
            status.turned_at = now;
            status.reconnects = reconnects;
            if connected {
                status.phase = SourcePhase::Ready;
                status.reason = String::new();
            } else {
                status.phase = SourcePhase::Connecting;
                status.reason = "the broker in memory cannot be reached".into();
            }
        });
        if connects {
            self.changes += 1;
            self.deliver_wire(id);
        }
        self.finish_drains(now);
        self.changes != before
    }

    pub(super) fn sever(&mut self, only: Option<u64>) {
        let ids: Vec<_> = match only {
            Some(id) => vec![id],
            None => self.instance_ids(),
        };
        for id in ids {
            let Some(instance) = self.instances.get_mut(&id) else { continue };
            if !instance.connected {
                continue;
            }
            instance.connected = false;
            instance.retry_at = Instant::now();
            instance.status.send_modify(|status| {
                status.phase = SourcePhase::Connecting;
                status.reason = "the connection to the broker in memory was cut".into();
            });
            if self.kind == MemoryKind::Queue {
                instance.wire.clear();
                instance.fence.lose();
                self.return_held(id);
                self.pass_on(id);
            }
        }
    }

    /// Exclusive: the next connected instance consumes.
    fn pass_on(&mut self, id: u64) {
        if self.consumer == Some(id) {
            let mut others = self.instances.iter().filter(|(_, instance)| instance.connected);
            self.consumer = others.next().map(|(id, _)| *id);
            self.changes += 1;
        }
    }

    pub(super) fn set_reachable(&mut self, reachable: bool) {
        self.reachable = reachable;
        if !reachable {
            self.sever(None);
        }
    }

    pub(super) fn set_hanging(&mut self, hanging: bool) {
        self.hanging = hanging;
        if !hanging {
            for id in self.instance_ids() {
                self.deliver_wire(id);
            }
        }
    }

    pub(super) fn revoke(&mut self, stream: usize) {
        match self.kind {
            MemoryKind::Queue => self.sever(None),
            MemoryKind::Log => self.drain(stream),
        }
        self.finish_drains(Instant::now());
    }

    pub(super) fn set_stopped(&mut self, id: u64, stopped: bool) {
        if let Some(instance) = self.instances.get_mut(&id) {
            instance.stopped = stopped;
        }
    }

    pub(super) fn expel(&mut self, id: u64) {
        match self.kind {
            MemoryKind::Queue => self.sever(Some(id)),
            MemoryKind::Log => {
                if let Some(instance) = self.instances.get_mut(&id) {
                    instance.wire.clear();
                    instance.member = false;
                }
                self.drop_assignments(id);
            }
        }
    }

    /// True if settlements reach the broker at once.
    pub(super) fn answers(&self, id: u64) -> bool {
        !self.hanging && self.instances.get(&id).is_some_and(|instance| instance.connected)
    }

    pub(super) fn stop_taking(&mut self, id: u64) {
        if let Some(instance) = self.instances.get_mut(&id) {
            instance.taking = false;
        }
    }

    /// What there is for this instance, within `room`.
    pub(super) fn take(&mut self, id: u64, room: Room) -> Vec<Taken> {
        let mut taken = Vec::new();
        let Some(instance) = self.instances.get_mut(&id) else { return taken };
        if !instance.connected || !instance.taking || instance.stopped || self.hanging {
            return taken;
        }
        if self.exclusive && self.consumer != Some(id) {
            return taken;
        }
        let prefetch = self.prefetch.map_or(usize::MAX, |most| most.saturating_sub(instance.held));
        let most = room.deliveries.min(prefetch);
        let mut bytes = 0;
        for (stream_index, stream) in self.streams.iter_mut().enumerate() {
            let fence = match (self.kind, &stream.owner) {
                (MemoryKind::Queue, _) => instance.fence.fence(),
                (MemoryKind::Log, Some((owner, fence))) if *owner == id => fence.fence(),
                (MemoryKind::Log, _) => continue,
            };
            if stream.drain_by.is_some() {
                continue;
            }
            for (position, entry) in in_turn(&mut stream.entries, self.shuffle_seed) {
                if taken.len() >= most || (bytes >= room.bytes && !taken.is_empty()) {
                    break;
                }
                if entry.place != Place::Ready {
                    continue;
                }
                let serial = self.next_serial;
                self.next_serial += 1;
                entry.place = Place::Held { instance: id, serial };
                instance.held += 1;
                bytes += entry.envelope.bytes().max(1);
                taken.push(Taken {
                    envelope: Arc::clone(&entry.envelope),
                    stream: stream.id.clone(),
                    stream_index,
                    position,
                    serial,
                    fence: fence.clone(),
                });
            }
        }
        taken
    }

    /// A settlement by the acker of one hand-over: carried out, on the wire, or too late.
    pub(super) fn settle(
        &mut self,
        id: u64,
        (stream, position, serial): (usize, u64, u64),
        settlement: Settlement,
    ) {
        if self.answers(id) {
            self.apply(id, (stream, position, serial), settlement);
            self.finish_drains(Instant::now());
        } else if let Some(instance) = self.instances.get_mut(&id) {
            instance.wire.push((stream, position, serial, settlement));
        }
    }

    fn deliver_wire(&mut self, id: u64) {
        if !self.answers(id) {
            return;
        }
        let wire = self.instances.get_mut(&id).map(|instance| std::mem::take(&mut instance.wire));
        for (stream, position, serial, settlement) in wire.unwrap_or_default() {
            self.apply(id, (stream, position, serial), settlement);
        }
    }

    fn apply(
        &mut self,
        id: u64,
        (stream, position, serial): (usize, u64, u64),
        settlement: Settlement,
    ) {
        let (index, position, serial) = self.settled_place(id, (stream, position, serial));
        let stream = &mut self.streams[index];
        let Some(entry) = stream.entries.get_mut(&position) else { return };
        if entry.place != (Place::Held { instance: id, serial }) {
            return;
        }
        if self.exclusive && settlement == Settlement::Release {
            // Never given back one by one, which would reorder: all of it with the connection.
            if self.instances.get(&id).is_some_and(|instance| instance.taking) {
                self.sever(Some(id));
            }
            return;
        }
        if let Some(instance) = self.instances.get_mut(&id) {
            instance.held -= 1;
        }
        match (settlement, self.kind) {
            (Settlement::Release, _) => entry.place = Place::Ready,
            (Settlement::Ack, MemoryKind::Queue) => self.forget(index, position),
            (Settlement::Ack, MemoryKind::Log) => {
                entry.place = Place::Acked;
                self.commit(index, position);
            }
        }
    }

    /// The committed position follows the lowest unsettled one.
    fn commit(&mut self, index: usize, acked: u64) {
        let highest = self.flaw == Some(MemoryBrokerFlaw::CommitHighest);
        while let Some((position, entry)) = self.streams[index].entries.first_key_value() {
            let position = *position;
            let passes = entry.place == Place::Acked || (highest && position <= acked);
            if !passes {
                break;
            }
            if let Place::Held { instance, .. } = entry.place
                && let Some(instance) = self.instances.get_mut(&instance)
            {
                instance.held -= 1;
            }
            self.forget(index, position);
        }
    }

    fn forget(&mut self, index: usize, position: u64) {
        self.streams[index].entries.remove(&position);
        if let Some(witness) = &self.witness {
            witness.forgotten(index, position);
        }
    }

    /// What a settlement is taken for: the hand-over it came with, unless that rule is broken.
    fn settled_place(&self, id: u64, place: (usize, u64, u64)) -> (usize, u64, u64) {
        let (index, position, serial) = place;
        let own = Place::Held { instance: id, serial };
        let entry = self.streams[index].entries.get(&position);
        let stale = entry.is_none_or(|entry| entry.place != own);
        if self.flaw != Some(MemoryBrokerFlaw::SettleStaleTags) || !stale {
            return place;
        }
        let held =
            self.streams[index].entries.iter().find_map(|(position, entry)| match entry.place {
                Place::Held { instance, serial } if instance == id => Some((*position, serial)),
                _ => None,
            });
        held.map_or(place, |(position, serial)| (index, position, serial))
    }

    /// What an instance held is ready again.
    fn return_held(&mut self, id: u64) {
        for entry in self.streams.iter_mut().flat_map(|stream| stream.entries.values_mut()) {
            if matches!(entry.place, Place::Held { instance, .. } if instance == id) {
                entry.place = Place::Ready;
            }
        }
        if let Some(instance) = self.instances.get_mut(&id) {
            instance.held = 0;
        }
    }

    fn drop_assignments(&mut self, id: u64) {
        for index in 0..self.streams.len() {
            if self.streams[index].owner.as_ref().is_some_and(|(owner, _)| *owner == id) {
                self.end_assignment(index);
            }
        }
        self.assign();
    }

    /// The fence is lost, and everything from the committed position on is ready again.
    fn end_assignment(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        stream.drain_by = None;
        let Some((owner, fence)) = stream.owner.take() else { return };
        fence.lose();
        let mut returned = 0;
        for entry in stream.entries.values_mut() {
            returned += usize::from(matches!(entry.place, Place::Held { .. }));
            entry.place = Place::Ready;
        }
        if let Some(instance) = self.instances.get_mut(&owner) {
            instance.held -= returned;
        }
    }

    fn drain(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        if let (Some((_, fence)), None) = (&stream.owner, stream.drain_by) {
            fence.drain();
            stream.drain_by = Some(Instant::now() + self.drain_max);
        }
    }

    /// Gives each free stream to the member whose turn it is, and drains those that have moved.
    fn assign(&mut self) {
        if self.kind == MemoryKind::Queue {
            return;
        }
        let members =
            self.instances.iter().filter(|(_, member)| member.connections > 0 && member.member);
        let members: Vec<_> = members.map(|(id, _)| *id).collect();
        if members.is_empty() {
            return;
        }
        for index in 0..self.streams.len() {
            let wanted = members[index % members.len()];
            match &self.streams[index].owner {
                None => {
                    self.streams[index].owner = Some((wanted, FenceHandle::open()));
                    self.changes += 1;
                }
                Some((owner, _)) if *owner != wanted => self.drain(index),
                Some(_) => {}
            }
        }
    }

    /// Ends the assignments of streams that have drained or took too long.
    fn finish_drains(&mut self, now: Instant) {
        for index in 0..self.streams.len() {
            let stream = &self.streams[index];
            let Some(by) = stream.drain_by else { continue };
            let held = stream.entries.values().any(|e| matches!(e.place, Place::Held { .. }));
            if !held || now >= by {
                self.end_assignment(index);
            }
        }
        self.assign();
    }
}

impl fmt::Debug for dyn MemoryBrokerWitness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemoryBrokerWitness")
    }
}

/// The entries in broker order, or in the one that a seed decides.
fn in_turn(
    entries: &mut BTreeMap<u64, Entry>,
    shuffle_seed: Option<u64>,
) -> Vec<(u64, &mut Entry)> {
    let mut all: Vec<_> = entries.iter_mut().map(|(position, entry)| (*position, entry)).collect();
    if let Some(seed) = shuffle_seed {
        // splitmix64: well mixed, and the same everywhere.
        all.sort_by_key(|(position, _)| {
            let mut mixed = (seed ^ position).wrapping_add(0x9e37_79b9_7f4a_7c15);
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        });
    }
    all
}
