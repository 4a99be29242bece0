//! The recorded run: requests of each warp to the units, and its waits.

use std::collections::BTreeMap;
use std::collections::HashMap;

pub use super::cost::Work;
use super::dependence::Scoreboard;
use crate::decode::{Instruction, Tcgen05, WarpGroupOperand};
use crate::observe::{Direction, Event, Observer, Origin, Phase, TensorMma};

/// Most issue slots of one [`Step::Work`]: warps of a quarter take turns at this grain.
const GRAIN: f32 = 32.0;

/// Number of a signal: a phase of an mbarrier, or a use of a barrier.
pub type Signal = u32;

/// One step of a warp.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Instructions.
    Work(Work),
    /// An arrival.
    Arrive(Signal),
    /// A wait for all arrivals.
    Wait(Signal),
    /// A bulk or tensor copy; the signal gets its bytes.
    Copy {
        /// Direction.
        direction: Direction,
        /// Bytes.
        bytes: u32,
        /// The signal.
        signal: Option<Signal>,
    },
    /// `cp.async` of this many bytes of the warp.
    LaneCopy(u32),
    /// `commit_group` of copies.
    CopyCommit,
    /// `wait_group` of copies: groups that may stay pending, and whether reads suffice.
    CopyWait(u32, bool),
    /// `tcgen05.mma`.
    Mma(TensorMma),
    /// `tcgen05.commit`.
    Commit(Signal),
    /// `tcgen05.ld` or `.st` of this many bytes.
    TensorMove(u32),
    /// `tcgen05.wait`.
    TensorWait,
    /// A warp's part of a `wgmma`: N, and whether A is in shared memory.
    GroupMma(u32, bool),
    /// `wgmma.commit_group`.
    GroupCommit,
    /// `wgmma.wait_group`: groups that may stay pending.
    GroupWait(u32),
}

/// The steps of one warp, with the positions of their instructions.
#[derive(Clone, Debug)]
pub struct WarpSteps {
    /// The warp; `pc` is 0.
    pub origin: Origin,
    /// The steps.
    pub steps: Vec<(u32, Step)>,
}

/// A recorded launch.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// The warps, cluster by cluster.
    pub warps: Vec<WarpSteps>,
    /// Number of arrivals of each signal.
    pub arrivals: Vec<u32>,
    /// Whether each signal is of an mbarrier; otherwise, of a barrier of the CTA or the cluster.
    pub of_mbarriers: Vec<bool>,
    /// SM of each CTA, by cluster and rank.
    pub sms: BTreeMap<(u64, u32), u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Phase(u64, Phase),
    Named { cluster: u64, rank: u32, name: u32, generation: u64 },
    Cluster(u64, u64),
}

#[derive(Debug, Default)]
struct Open {
    steps: Vec<(u32, Step)>,
    work: Work,
    board: Scoreboard,
    pc: u32,
}

impl Open {
    fn flush(&mut self) {
        self.work.alone = self.board.take();
        if self.work != Work::default() {
            self.steps.push((self.pc, Step::Work(std::mem::take(&mut self.work))));
        }
    }

    fn push(&mut self, pc: u32, step: Step) {
        self.flush();
        if matches!(
            step,
            Step::Wait(_) | Step::CopyWait(..) | Step::TensorWait | Step::GroupWait(_)
        ) {
            self.board.wait();
        }
        self.steps.push((pc, step));
    }
}

/// Records a launch for [`replay`](super::replay()).
#[derive(Debug, Default)]
pub struct Recorder {
    warps: BTreeMap<(u64, u32, u32), (Origin, Open)>,
    signals: HashMap<Key, Signal>,
    arrivals: Vec<u32>,
    of_mbarriers: Vec<bool>,
    sms: BTreeMap<(u64, u32), u32>,
}

impl Recorder {
    /// Returns the recording, after the launch.
    pub fn finish(self) -> Recording {
        let Recorder { warps, arrivals, of_mbarriers, sms, .. } = self;
        let warps = warps.into_values().map(|(origin, mut open)| {
            open.flush();
            WarpSteps { origin: Origin { pc: 0, ..origin }, steps: open.steps }
        });
        Recording { warps: warps.collect(), arrivals, of_mbarriers, sms }
    }

    fn signal(&mut self, key: Key) -> Signal {
        let Recorder { signals, arrivals, of_mbarriers, .. } = self;
        *signals.entry(key).or_insert_with(|| {
            arrivals.push(0);
            of_mbarriers.push(matches!(key, Key::Phase(..)));
            arrivals.len() as u32 - 1
        })
    }

    fn arrival(&mut self, key: Key) -> Signal {
        let signal = self.signal(key);
        self.arrivals[signal as usize] += 1;
        signal
    }

    fn open(&mut self, origin: Origin) -> &mut Open {
        let key = (origin.cluster, origin.rank, origin.warp);
        self.sms.insert((origin.cluster, origin.rank), origin.sm);
        &mut self.warps.entry(key).or_insert_with(|| (origin, Open::default())).1
    }

    /// Appends an arrival of a warp; lanes that arrive together count once.
    fn arrive(&mut self, origin: Origin, key: Key) {
        let known = self.signals.get(&key).copied();
        let last = self.open(origin);
        let same = known.is_some_and(|signal| {
            last.work == Work::default()
                && last.steps.last() == Some(&(origin.pc, Step::Arrive(signal)))
        });
        if !same {
            let signal = self.arrival(key);
            self.open(origin).push(origin.pc, Step::Arrive(signal));
        }
    }

    fn wait(&mut self, origin: Origin, key: Key) {
        let signal = self.signal(key);
        let open = self.open(origin);
        if open.steps.last() != Some(&(origin.pc, Step::Wait(signal))) {
            open.push(origin.pc, Step::Wait(signal));
        }
    }

    fn instruction(&mut self, origin: Origin, instruction: &Instruction) {
        use Instruction as I;
        let open = self.open(origin);
        let step = match instruction {
            I::Tcgen05(Tcgen05::Load { destinations, .. }) => {
                Step::TensorMove(destinations.len() as u32 * 128)
            }
            I::Tcgen05(Tcgen05::Store { sources, .. }) => {
                Step::TensorMove(sources.len() as u32 * 128)
            }
            I::Tcgen05(Tcgen05::WaitLoad | Tcgen05::WaitStore) => Step::TensorWait,
            I::WarpGroupMma(mma) => {
                Step::GroupMma(mma.shape.n, matches!(mma.a, WarpGroupOperand::Descriptor(_)))
            }
            I::WarpGroupCommit => Step::GroupCommit,
            I::WarpGroupWait { pending } => Step::GroupWait(*pending),
            I::CopyAsync { bytes, .. } => Step::LaneCopy(32 * bytes),
            I::BulkCommit | I::CopyAsyncCommit => Step::CopyCommit,
            I::BulkWait { pending, read } => Step::CopyWait(*pending, *read),
            I::CopyAsyncWait { pending } => Step::CopyWait(pending.unwrap_or(0), false),
            _ => {
                if open.work == Work::default() {
                    open.pc = origin.pc;
                }
                let work = open.board.run(origin.pc, instruction);
                open.work.add(work);
                if open.work.issue >= GRAIN {
                    open.flush();
                }
                return;
            }
        };
        open.board.issue(origin.pc, instruction);
        open.push(origin.pc, step);
    }
}

impl Observer for Recorder {
    fn event(&mut self, origin: Origin, event: Event<'_>) {
        let cluster = origin.cluster;
        match event {
            Event::Instruction(instruction) => self.instruction(origin, instruction),
            Event::Arrival(phase) => self.arrive(origin, Key::Phase(cluster, phase)),
            Event::Wait(None) => {}
            Event::Wait(Some(phase)) => self.wait(origin, Key::Phase(cluster, phase)),
            Event::BarrierArrival { name, generation, waits } => {
                let key = Key::Named { cluster, rank: origin.rank, name, generation };
                self.arrive(origin, key);
                if waits {
                    self.wait(origin, key);
                }
            }
            Event::ClusterArrival(use_of) => self.arrive(origin, Key::Cluster(cluster, use_of)),
            Event::ClusterWait(use_of) => self.wait(origin, Key::Cluster(cluster, use_of)),
            Event::Copy { direction, bytes, arrival } => {
                let signal = arrival.map(|phase| self.arrival(Key::Phase(cluster, phase)));
                self.open(origin).push(origin.pc, Step::Copy { direction, bytes, signal });
            }
            Event::TensorMma(mma) => self.open(origin).push(origin.pc, Step::Mma(mma)),
            Event::TensorCommit(phase) => {
                let signal = self.arrival(Key::Phase(cluster, phase));
                self.open(origin).push(origin.pc, Step::Commit(signal));
            }
        }
    }
}
