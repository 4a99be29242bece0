//! Event sequences of kernels, whole and with each synchronizing step left out.

use super::*;
use crate::mbarrier::{MbarrierTable, PhaseTest};

mod copies;
mod gemm;
mod global;
mod threads;

/// All lanes.
const ALL: u32 = u32::MAX;
/// The elected lane.
const ONE: u32 = 1;

/// Runs events eagerly: operations complete when issued. Steps are numbered as they are told, and
/// those with a name can be left out.
struct Machine {
    tracker: Tracker,
    mbarriers: MbarrierTable,
    step: u32,
    left_out: Option<&'static str>,
    names: Vec<&'static str>,
    deadlock: bool,
}

impl Machine {
    fn new(ctas: u32, warps: u32, left_out: Option<&'static str>) -> Machine {
        let sites = (0..4000).map(|line| Site { ptx_line: line, source: None }).collect();
        let mut tracker = Tracker::new(sites, Rules::default());
        tracker.add_cluster(ctas, warps);
        let mbarriers = MbarrierTable::new(ctas);
        Machine { tracker, mbarriers, step: 0, left_out, names: Vec::new(), deadlock: false }
    }

    /// A step of a warp of CTA 0.
    fn at(&mut self, warp: u32, lanes: u32) -> Thread {
        self.of(0, warp, lanes)
    }

    fn of(&mut self, rank: u32, warp: u32, lanes: u32) -> Thread {
        self.step += 1;
        Thread { warp: self.tracker.warp(0, rank, warp), lanes, step: self.step }
    }

    /// Whether a named step is executed.
    fn does(&mut self, name: &'static str) -> bool {
        if !self.names.contains(&name) {
            self.names.push(name);
        }
        self.left_out != Some(name)
    }

    fn init(&mut self, thread: Thread, rank: u32, offset: u32, count: u32) {
        self.mbarriers.init(rank, offset, count).unwrap();
        self.tracker.mbarrier_init(thread, rank, offset);
    }

    fn arrive(&mut self, thread: Thread, rank: u32, offset: u32) {
        // The engine faults on an arrival too many; a sequence without waits may come there.
        let arrival = self.mbarriers.arrive(rank, offset, thread.lanes.count_ones(), false);
        let arrival = arrival.unwrap();
        self.tracker.mbarrier_arrive(
            thread,
            rank,
            offset,
            (Order::Release, Scope::Cluster),
            arrival,
        );
    }

    fn expect(&mut self, thread: Thread, rank: u32, offset: u32, bytes: u32) {
        let arrival = self.mbarriers.arrive_expect_tx(rank, offset, bytes).unwrap();
        self.tracker.mbarrier_arrive(
            thread,
            rank,
            offset,
            (Order::Release, Scope::Cluster),
            arrival,
        );
    }

    /// A wait that would not end is noted, and passed.
    fn wait(&mut self, thread: Thread, rank: u32, offset: u32, parity: u32) {
        if self.mbarriers.test(rank, offset, PhaseTest::Parity(parity)).unwrap() {
            self.tracker.mbarrier_wait(thread, rank, offset, (true, Scope::Cluster));
        } else {
            self.deadlock = true;
        }
    }

    /// Loads or stores of `bytes` a lane, side by side from `offset` on.
    fn shared(&mut self, thread: Thread, direction: Direction, offset: u32, bytes: u32) {
        let (_, rank) = self.tracker.cta(thread.warp);
        self.remote(thread, direction, rank, offset, bytes);
    }

    fn remote(&mut self, thread: Thread, direction: Direction, rank: u32, offset: u32, bytes: u32) {
        let places: Vec<(u32, Place)> = (0..32)
            .map(|lane| (lane, Place::Shared { rank, offset: offset + lane * bytes }))
            .collect();
        self.tracker.access(thread, direction, None, bytes, &places);
    }

    /// A TMA load of `bytes` to shared memory.
    fn load(&mut self, thread: Thread, rank: u32, offset: u32, bytes: u32, mbarrier: (u32, u32)) {
        let operation = self.tracker.issue(thread, Unit::BulkLoad);
        let (source, target) = (Place::Global(1 << 20), Place::Shared { rank, offset });
        self.tracker.access_operation(operation, Direction::Read, source, bytes);
        self.tracker.access_operation(operation, Direction::Write, target, bytes);
        let arrival = self.mbarriers.complete_tx(mbarrier.0, mbarrier.1, bytes).unwrap();
        self.tracker.complete_tx(operation, mbarrier.0, mbarrier.1, arrival);
        self.tracker.ran(operation);
    }

    /// A TMA store of `bytes` from shared memory.
    fn store(&mut self, thread: Thread, offset: u32, bytes: u32) {
        let (_, rank) = self.tracker.cta(thread.warp);
        let operation = self.tracker.issue(thread, Unit::BulkStore);
        let source = Place::Shared { rank, offset };
        let target = Place::Global(2 << 20 | u64::from(self.step) << 12);
        self.tracker.access_operation(operation, Direction::Read, source, bytes);
        self.tracker.access_operation(operation, Direction::Write, target, bytes);
        self.tracker.ran(operation);
    }

    /// An operation that reads shared memory.
    fn reads(&mut self, thread: Thread, unit: Unit, offset: u32, bytes: u32) -> Operation {
        let (_, rank) = self.tracker.cta(thread.warp);
        let operation = self.tracker.issue(thread, unit);
        let place = Place::Shared { rank, offset };
        self.tracker.access_operation(operation, Direction::Read, place, bytes);
        operation
    }

    fn commit_to(&mut self, thread: Thread, rank: u32, offset: u32) {
        let mark = self.tracker.mark(thread, Unit::TensorMma);
        let arrival = self.mbarriers.arrive(rank, offset, 1, false).unwrap();
        self.tracker.arrive_mark(&mark, rank, offset, arrival);
    }

    /// `bar.sync` of whole warps of CTA 0.
    fn sync(&mut self, warps: &[u32], barrier: u32) {
        self.sync_of(0, warps, barrier);
    }

    fn sync_of(&mut self, rank: u32, warps: &[u32], barrier: u32) {
        let mut waiters = Vec::new();
        for warp in warps {
            let thread = self.of(rank, *warp, ALL);
            self.tracker.barrier_arrive(thread, barrier);
            waiters.push((thread.warp, ALL));
        }
        self.tracker.barrier_complete(&waiters, barrier);
    }

    /// `barrier.cluster.arrive` and `.wait` of all warps.
    fn cluster_sync(&mut self, ctas: u32, warps: u32, release: bool) {
        for rank in 0..ctas {
            for warp in 0..warps {
                let thread = self.of(rank, warp, ALL);
                self.tracker.cluster_arrive(thread, release);
            }
        }
        self.tracker.cluster_complete(0);
        for rank in 0..ctas {
            for warp in 0..warps {
                let thread = self.of(rank, warp, ALL);
                self.tracker.cluster_wait(thread);
            }
        }
    }

    fn kinds(&self) -> Vec<&'static str> {
        let mut kinds: Vec<_> =
            self.tracker.hazards().iter().map(|hazard| hazard.kind.name()).collect();
        if self.deadlock {
            kinds.push("deadlock");
        }
        kinds
    }
}

/// Runs a sequence whole, which must find nothing, then without each named step in turn, which
/// must find the kind that `expected` has for it. `expected` names all steps that can be left out.
fn check(
    (ctas, warps): (u32, u32),
    sequence: impl Fn(&mut Machine),
    expected: &[(&'static str, &str)],
) {
    let run = |left_out| {
        let mut machine = Machine::new(ctas, warps, left_out);
        sequence(&mut machine);
        machine
    };
    let whole = run(None);
    let reports: Vec<String> = whole.tracker.hazards().iter().map(ToString::to_string).collect();
    assert!(whole.kinds().is_empty(), "the whole sequence: {}", reports.join("\n"));
    let listed: Vec<&str> = expected.iter().map(|row| row.0).collect();
    for name in &whole.names {
        assert!(listed.contains(name), "no expectation for leaving out `{name}`");
    }
    for (name, kind) in expected {
        assert!(whole.names.contains(name), "the sequence has no step `{name}`");
        let kinds = run(Some(name)).kinds();
        assert!(kinds.contains(kind), "without `{name}`: expected `{kind}`, got {kinds:?}");
    }
}

#[test]
fn reports_read_well_and_count() {
    let mut machine = Machine::new(1, 2, None);
    for _ in 0..2 {
        let places = [(0, Place::Shared { rank: 0, offset: 32 })];
        let writer = Thread { step: 7, ..machine.at(0, ONE) };
        machine.tracker.access(writer, Direction::Write, None, 4, &places);
        let reader = Thread { step: 9, ..machine.at(1, ONE) };
        machine.tracker.access(reader, Direction::Read, None, 4, &places);
    }
    let report = machine.tracker.hazards()[0].to_string();
    assert_eq!(
        report,
        "missing-synchronization: read by thread of cluster 0 CTA 0 warp 1 lane 0 at PTX line \
         9 is not ordered after write by thread of cluster 0 CTA 0 warp 0 lane 0 at PTX line 7, \
         both at shared 0x20 of CTA 0 and 1 more times\nhint: a barrier, an mbarrier arrive and \
         wait, or a release and an acquire between the two threads"
    );
    // The write of the second round comes after the read of the first.
    assert_eq!(machine.tracker.hazards().len(), 2);
}
