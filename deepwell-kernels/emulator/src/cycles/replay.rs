//! Replay of a recording on servers with the rates of a [`Machine`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use super::cost::Work;
use super::ledger::Ledger;
use super::machine::{Bound, Machine, operand_bytes};
use super::record::{Recording, Signal, Step};
use super::summary::{Cycles, Unit};
use super::timeline::{Span, Track};
use crate::observe::{Direction, TensorMma};

#[derive(Debug, Default)]
struct Sm {
    issue: [Ledger; 4],
    lanes: [[Ledger; 3]; 4],
    /// End of the last `wgmma` or `mma.sync` of each quarter, and its busy clocks.
    quarters: [(f64, f64); 4],
    /// End of the last `tcgen05.mma`, and busy clocks.
    tensor: (f64, f64),
    port: Ledger,
    copies: [Ledger; 2],
    tensor_memory: [Ledger; 4],
}

#[derive(Debug, Default)]
struct WarpState {
    next: usize,
    /// Start of the current wait.
    since: f64,
    mma_end: f64,
    mma_is_pair: bool,
    tensor_ready: f64,
    /// End of copies that are not committed: sources read, all done.
    open_copies: (f64, f64),
    copies: VecDeque<(f64, f64)>,
    open_group: f64,
    groups: VecDeque<f64>,
}

#[derive(Debug, Default)]
struct SignalState {
    left: u32,
    /// When waiters see it.
    seen: f64,
    waiters: Vec<usize>,
}

struct Replay<'a> {
    machine: &'a Machine,
    recording: &'a Recording,
    sms: BTreeMap<u32, Sm>,
    warps: Vec<WarpState>,
    signals: Vec<SignalState>,
    /// Warps by time of their next step.
    ready: BinaryHeap<Reverse<(u64, usize)>>,
    result: Cycles,
}

/// Replays a recording.
pub fn replay(recording: &Recording, machine: &Machine) -> Cycles {
    let signal = |left: &u32| SignalState { left: *left, ..SignalState::default() };
    let mut replay = Replay {
        machine,
        recording,
        sms: BTreeMap::new(),
        warps: recording.warps.iter().map(|_| WarpState::default()).collect(),
        signals: recording.arrivals.iter().map(signal).collect(),
        ready: BinaryHeap::new(),
        result: Cycles::default(),
    };
    replay.run();
    replay.result.clocks = replay.result.clocks.max(1.0);
    replay.summarize();
    replay.result
}

impl Replay<'_> {
    fn run(&mut self) {
        // Clusters of a place run one after another.
        let mut places: BTreeMap<u32, VecDeque<u64>> = BTreeMap::new();
        let mut of_cluster: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (at, warp) in self.recording.warps.iter().enumerate() {
            let clusters = places.entry(warp.origin.place).or_default();
            if clusters.back() != Some(&warp.origin.cluster) {
                clusters.push_back(warp.origin.cluster);
            }
            of_cluster.entry(warp.origin.cluster).or_default().push(at);
        }
        let mut running: BTreeMap<u64, usize> = BTreeMap::new();
        let starts: Vec<(u64, f64)> =
            places.values_mut().filter_map(|list| Some((list.pop_front()?, 0.0))).collect();
        for (cluster, time) in starts {
            running.insert(cluster, of_cluster[&cluster].len());
            of_cluster[&cluster].iter().for_each(|warp| self.push(*warp, time));
        }
        while let Some(Reverse((time, warp))) = self.ready.pop() {
            let time = f64::from_bits(time);
            if self.warps[warp].next < self.recording.warps[warp].steps.len() {
                self.step(warp, time);
                continue;
            }
            self.result.clocks = self.result.clocks.max(time);
            let origin = self.recording.warps[warp].origin;
            let left = running.get_mut(&origin.cluster).map(|left| {
                *left -= 1;
                *left
            });
            if left == Some(0)
                && let Some(next) = places.get_mut(&origin.place).and_then(VecDeque::pop_front)
            {
                running.insert(next, of_cluster[&next].len());
                of_cluster[&next].iter().for_each(|warp| self.push(*warp, time));
            }
        }
        let done =
            |(state, warp): (&WarpState, &super::record::WarpSteps)| state.next >= warp.steps.len();
        let ended = self.warps.iter().zip(&self.recording.warps).map(done).filter(|ended| *ended);
        self.result.stuck = self.warps.len() - ended.count();
    }

    fn push(&mut self, warp: usize, time: f64) {
        self.ready.push(Reverse((time.to_bits(), warp)));
    }

    fn sm_of(&mut self, warp: usize, rank: u32) -> &mut Sm {
        let cluster = self.recording.warps[warp].origin.cluster;
        let sm = self.recording.sms.get(&(cluster, rank)).copied().unwrap_or(0);
        self.sms.entry(sm).or_default()
    }

    /// Runs one step of a warp.
    fn step(&mut self, warp: usize, time: f64) {
        let recording = self.recording;
        let (pc, step) = &recording.warps[warp].steps[self.warps[warp].next];
        let origin = recording.warps[warp].origin;
        let machine = *self.machine;
        self.warps[warp].next += 1;
        let state = &mut self.warps[warp];
        let end = match step {
            Step::Work(work) => self.work(warp, time, work),
            Step::Arrive(signal) => {
                let latency = match recording.of_mbarriers[*signal as usize] {
                    true => machine.wake_latency,
                    false => machine.barrier_latency,
                };
                self.arrive(*signal, time + latency);
                time + 1.0
            }
            Step::Wait(signal) => {
                let of = &mut self.signals[*signal as usize];
                if of.left > 0 {
                    state.next -= 1;
                    if state.since == 0.0 {
                        state.since = time;
                    }
                    of.waiters.push(warp);
                    return;
                }
                let begun = if state.since > 0.0 { state.since } else { time };
                state.since = 0.0;
                let passing = match recording.of_mbarriers[*signal as usize] {
                    true => machine.wait_latency,
                    false => 0.0,
                };
                let end = (begun + passing).max(of.seen);
                self.waited(warp, *pc, begun, end);
                end + 1.0
            }
            Step::Copy { direction, bytes, signal } => {
                self.copy(warp, *pc, time, *direction, f64::from(*bytes), *signal);
                time + 1.0
            }
            Step::LaneCopy(bytes) => {
                self.copy(
                    warp,
                    *pc,
                    time,
                    Direction::ToShared(origin.rank),
                    f64::from(*bytes),
                    None,
                );
                time + 1.0
            }
            Step::CopyCommit => {
                let open = std::mem::take(&mut state.open_copies);
                state.copies.push_back(open);
                time + 1.0
            }
            Step::CopyWait(pending, read) => {
                let mut end = time;
                while state.copies.len() > *pending as usize {
                    let (sources, done) = state.copies.pop_front().unwrap_or_default();
                    end = end.max(if *read { sources } else { done });
                }
                self.waited(warp, *pc, time, end);
                end + 1.0
            }
            Step::Mma(mma) => {
                self.mma(warp, *pc, time, mma);
                time + 1.0
            }
            Step::Commit(signal) => {
                let seen =
                    state.mma_end.max(time) + machine.mma_latency[usize::from(state.mma_is_pair)];
                self.arrive(*signal, seen);
                time + 1.0
            }
            Step::TensorMove(bytes) => {
                let clocks = f64::from(*bytes) / machine.tensor_memory_bytes;
                let quarter = origin.warp as usize % 4;
                let end = self.sm_of(warp, origin.rank).tensor_memory[quarter].take(time, clocks);
                let ready = &mut self.warps[warp].tensor_ready;
                *ready = ready.max(end + machine.tensor_memory_latency);
                time + 1.0
            }
            Step::TensorWait => {
                let end = time.max(state.tensor_ready);
                self.waited(warp, *pc, time, end);
                end + 1.0
            }
            Step::GroupMma(n, a_in_shared) => {
                self.group_mma(warp, *pc, time, *n, *a_in_shared);
                time + 1.0
            }
            Step::GroupCommit => {
                let open = std::mem::take(&mut state.open_group);
                state.groups.push_back(open);
                time + 1.0
            }
            Step::GroupWait(pending) => {
                let mut end = time;
                while state.groups.len() > *pending as usize {
                    let done = state.groups.pop_front().unwrap_or_default();
                    if done > 0.0 {
                        end = end.max(done + machine.mma_latency[0]);
                    }
                }
                self.waited(warp, *pc, time, end);
                end + 1.0
            }
        };
        self.push(warp, end);
    }

    fn work(&mut self, warp: usize, time: f64, work: &Work) -> f64 {
        let machine = *self.machine;
        let origin = self.recording.warps[warp].origin;
        let quarter = origin.warp as usize % 4;
        let sm = self.sm_of(warp, origin.rank);
        let issue = f64::from(work.issue);
        let alone = work.alone[usize::from(machine.bound == Bound::Slow)];
        let mut end = sm.issue[quarter].take(time, issue).max(time + f64::from(alone));
        for (lanes, clocks) in sm.lanes[quarter].iter_mut().zip(work.lanes(&machine)) {
            end = end.max(lanes.take(time, clocks));
        }
        end = end.max(sm.port.take(time, f64::from(work.shared_bytes) / machine.shared_bytes));
        for (copies, bytes) in sm.copies.iter_mut().zip([work.loaded_bytes, work.stored_bytes]) {
            end = end.max(copies.take(time, f64::from(bytes) / machine.copy_bytes));
        }
        if work.multiply_adds > 0.0 {
            let clocks = f64::from(work.multiply_adds) / (machine.multiply_adds / 4.0);
            let (free, busy) = &mut sm.quarters[quarter];
            *free = free.max(time) + clocks;
            *busy += clocks;
            end = end.max(*free);
        }
        self.result.mma_clocks += f64::from(work.multiply_adds) / machine.multiply_adds;
        end
    }

    fn arrive(&mut self, signal: Signal, seen: f64) {
        let of = &mut self.signals[signal as usize];
        of.seen = of.seen.max(seen);
        of.left = of.left.saturating_sub(1);
        if of.left == 0 {
            let seen = of.seen;
            for warp in std::mem::take(&mut of.waiters) {
                self.push(warp, seen);
            }
        }
    }

    fn copy(
        &mut self,
        warp: usize,
        pc: u32,
        time: f64,
        direction: Direction,
        bytes: f64,
        signal: Option<Signal>,
    ) {
        let machine = *self.machine;
        let origin = self.recording.warps[warp].origin;
        let (rank, way) = match direction {
            Direction::ToShared(rank) | Direction::Between(rank) => (rank, 0),
            Direction::FromShared => (origin.rank, 1),
        };
        let sm = self.sm_of(warp, rank);
        let moved = sm.copies[way].take(time, bytes / machine.copy_bytes);
        let mut landed = moved + machine.copy_latency;
        if way == 1 {
            landed = landed.max(sm.port.take(time, bytes / machine.shared_bytes));
        } else if machine.copies_share_port {
            let begin = landed - bytes / machine.copy_bytes;
            landed = landed.max(sm.port.take(begin.max(0.0), bytes / machine.shared_bytes));
        }
        let (sources, done) = &mut self.warps[warp].open_copies;
        (*sources, *done) = (sources.max(moved), done.max(landed));
        self.span(warp, rank, Track::Copies, pc, (time, landed));
        if let Some(signal) = signal {
            self.arrive(signal, landed + machine.wake_latency);
        }
    }

    fn mma(&mut self, warp: usize, pc: u32, time: f64, mma: &TensorMma) {
        let machine = *self.machine;
        let rank = self.recording.warps[warp].origin.rank;
        let ranks = if mma.group == 2 { [rank & !1, rank | 1] } else { [rank, rank] };
        let [a, b] = operand_bytes(mma);
        let mut start = time + machine.mma_start;
        for rank in ranks {
            start = start.max(self.sm_of(warp, rank).tensor.0);
        }
        let mut end = start + machine.multiply_clocks(mma);
        for rank in &ranks[..mma.group as usize] {
            let port = &mut self.sm_of(warp, *rank).port;
            end = end.max(port.take(start, (a + b) / machine.shared_bytes));
        }
        for rank in &ranks[..mma.group as usize] {
            let tensor = &mut self.sm_of(warp, *rank).tensor;
            *tensor = (end, tensor.1 + end - start);
            self.span(warp, *rank, Track::TensorCores, pc, (start, end));
        }
        self.result.mma_clocks += f64::from(mma.m * mma.n * 16) / machine.multiply_adds;
        let state = &mut self.warps[warp];
        (state.mma_end, state.mma_is_pair) = (end, mma.group == 2);
    }

    fn group_mma(&mut self, warp: usize, pc: u32, time: f64, n: u32, a_in_shared: bool) {
        let machine = *self.machine;
        let origin = self.recording.warps[warp].origin;
        let quarter = origin.warp as usize % 4;
        let sm = self.sm_of(warp, origin.rank);
        // A warp has 16 rows of A; the four warps of a group share the columns of B.
        let multiply_adds = f64::from(16 * n * 16);
        let bytes = 512.0 * f64::from(u8::from(a_in_shared)) + f64::from(n) * 8.0;
        let start = time.max(sm.quarters[quarter].0);
        let moved = sm.port.take(start, bytes / machine.shared_bytes);
        let end = moved.max(start + multiply_adds / (machine.multiply_adds / 4.0));
        let busy = sm.quarters[quarter].1 + end - start;
        sm.quarters[quarter] = (end, busy);
        self.result.mma_clocks += multiply_adds / machine.multiply_adds;
        if quarter == 0 {
            self.span(warp, origin.rank, Track::TensorCores, pc, (start, end));
        }
        let open = &mut self.warps[warp].open_group;
        *open = open.max(end);
    }

    fn waited(&mut self, warp: usize, pc: u32, begun: f64, end: f64) {
        let origin = self.recording.warps[warp].origin;
        let of = self.result.waits.entry((origin.warp, pc)).or_default();
        of.times += 1;
        of.clocks += end - begun;
        if end - begun >= 1.0 {
            self.span(warp, origin.rank, Track::Warp(origin.warp), pc, (begun, end));
        }
    }

    fn span(&mut self, warp: usize, rank: u32, track: Track, pc: u32, (start, end): (f64, f64)) {
        let cluster = self.recording.warps[warp].origin.cluster;
        let sm = self.recording.sms.get(&(cluster, rank)).copied().unwrap_or(0);
        self.result.spans.push(Span { sm, cluster, rank, track, pc, start, end });
    }

    fn summarize(&mut self) {
        let Replay { sms, result, .. } = self;
        result.sms = sms.len() as u32;
        let mut most = |unit: Unit, clocks: f64| {
            let share = result.busy.entry(unit).or_default();
            *share = share.max(clocks / result.clocks);
        };
        for sm in sms.values() {
            most(Unit::TensorCores, sm.tensor.1);
            sm.quarters.iter().for_each(|(_, busy)| most(Unit::TensorCores, *busy));
            sm.issue.iter().for_each(|issue| most(Unit::IssueSlots, issue.busy()));
            for lanes in &sm.lanes {
                most(Unit::Fma, lanes[0].busy());
                most(Unit::Alu, lanes[1].busy());
                most(Unit::Mufu, lanes[2].busy());
            }
            most(Unit::SharedMemory, sm.port.busy());
            sm.copies.iter().for_each(|copies| most(Unit::Copies, copies.busy()));
            sm.tensor_memory.iter().for_each(|port| most(Unit::TensorMemory, port.busy()));
        }
    }
}
