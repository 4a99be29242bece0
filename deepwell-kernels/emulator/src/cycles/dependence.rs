//! How long dependent instructions of one warp take, without other warps.

use std::collections::HashMap;

use super::cost::{Work, work_of};
use crate::decode::{Instruction, Register, ScalarInstruction, Space, UnaryOperation};
use crate::engine::visit_registers;

/// Latencies of a result, fast and slow, in clocks.
mod latency {
    /// Arithmetic: 4.5 to 5 on an H200, with a loop around it (benchmarks/cycles_2026-11-29.md).
    pub(super) const ARITHMETIC: [f64; 2] = [4.0, 5.0];
    /// MUFU: 17 on an H200 (same).
    pub(super) const FUNCTION: [f64; 2] = [17.0, 17.0];
    /// Loads from shared memory and shuffles: 23 on an H200 (same); 29 on an H100 (arXiv
    /// 2402.13499).
    pub(super) const SHARED: [f64; 2] = [23.0, 29.0];
    /// Loads from device memory: a hit in the L1 cache, in the L2 cache (arXiv 2402.13499).
    pub(super) const DEVICE: [f64; 2] = [33.0, 270.0];
    /// `mma.sync`: 33 on an H100 for 16x8x16 (arXiv 2402.13499).
    pub(super) const WARP_MMA: [f64; 2] = [33.0, 33.0];
}

/// Registers of an instruction.
#[derive(Clone, Debug, Default)]
struct Registers {
    reads: Vec<(u8, u32)>,
    writes: Vec<(u8, u32)>,
}

/// When the registers of a warp are ready. The fast clock follows the flow of data alone: the
/// assembler may have put the instructions in any order. The slow clock issues in the order of the
/// PTX.
#[derive(Debug, Default)]
pub(super) struct Scoreboard {
    known: HashMap<u32, Registers>,
    ready: HashMap<(u8, u32), [f64; 2]>,
    /// No later instruction starts earlier on the fast clock.
    floor: f64,
    /// Latest result on the fast clock, last issue on the slow clock.
    now: [f64; 2],
    /// The same at the last [`Scoreboard::take`].
    taken: [f64; 2],
    /// When FMA, ALU and MUFU lanes are free on the slow clock.
    lanes: [f64; 3],
}

fn registers_of(instruction: &Instruction) -> Registers {
    let mut found = Registers::default();
    let mut copy = instruction.clone();
    visit_registers(&mut copy, &mut |register, is_write| {
        let key = match register {
            Register::Word(index) | Register::Half(index) => (0, *index),
            Register::Long(index) => (1, *index),
        };
        if is_write { &mut found.writes } else { &mut found.reads }.push(key);
    });
    found
}

/// Latency of the results, fast and slow.
fn latency_of(instruction: &Instruction, work: &Work) -> [f64; 2] {
    use Instruction as I;
    match instruction {
        _ if *work == Work::default() => [0.0, 0.0],
        I::Scalar(ScalarInstruction::Unary { operation: UnaryOperation::Function(..), .. }) => {
            latency::FUNCTION
        }
        I::Load(load) => match load.space {
            Space::Global | Space::Generic => latency::DEVICE,
            _ => latency::SHARED,
        },
        I::LoadMatrix(_) | I::Shuffle(_) | I::Redux { .. } | I::Vote(_) | I::Match(_) => {
            latency::SHARED
        }
        I::Atomic(_) => [latency::DEVICE[1]; 2],
        I::WarpMma(_) => latency::WARP_MMA,
        _ => latency::ARITHMETIC,
    }
}

impl Scoreboard {
    /// Runs the instruction at position `pc`. Returns its work.
    pub(super) fn run(&mut self, pc: u32, instruction: &Instruction) -> Work {
        let Scoreboard { known, ready, floor, now, lanes, .. } = self;
        let registers = known.entry(pc).or_insert_with(|| registers_of(instruction));
        let work = work_of(instruction);
        let mut start = [*floor, now[1] + f64::from(work.issue)];
        for register in &registers.reads {
            if let Some(ready) = ready.get(register) {
                start = [start[0].max(ready[0]), start[1].max(ready[1])];
            }
        }
        for (free, clocks) in lanes.iter_mut().zip(work.lanes_at_least()) {
            if clocks > 0.0 {
                start[1] = start[1].max(*free);
                *free = start[1] + clocks;
            }
        }
        let latency = latency_of(instruction, &work);
        let done = [start[0] + latency[0], start[1] + latency[1]];
        for register in &registers.writes {
            ready.insert(*register, done);
        }
        if work != Work::default() {
            *now = [now[0].max(done[0]), now[1].max(start[1])];
        }
        work
    }

    /// Waits for the sources of an asynchronous operation, whose results come by another wait.
    pub(super) fn issue(&mut self, pc: u32, instruction: &Instruction) {
        let registers = self.known.entry(pc).or_insert_with(|| registers_of(instruction));
        for register in &registers.reads {
            if let Some(ready) = self.ready.get(register) {
                self.now = [self.now[0].max(ready[0]), self.now[1].max(ready[1])];
            }
        }
        for register in &registers.writes {
            self.ready.remove(register);
        }
    }

    /// A wait: later instructions do not start before it.
    pub(super) fn wait(&mut self) {
        self.floor = self.floor.max(self.now[0]);
    }

    /// Clocks since the last call, fast and slow.
    pub(super) fn take(&mut self) -> [f32; 2] {
        let passed = [0, 1].map(|at| (self.now[at] - self.taken[at]) as f32);
        self.taken = self.now;
        passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::{BinaryOperation, FloatModifiers, Source, Type};

    fn add(destination: u32, a: u32, b: u32) -> Instruction {
        let [a, b] = [a, b].map(|index| Source::Register(Register::Word(index)));
        Instruction::Scalar(ScalarInstruction::Binary {
            operation: BinaryOperation::FloatAdd(FloatModifiers::default()),
            value_type: Type::F32,
            destination: Register::Word(destination),
            a,
            b,
        })
    }

    #[test]
    fn chains_take_latencies_and_independent_sums_do_not() {
        // Ten sums: each of the last, or of registers that nobody wrote.
        for (chained, expected) in [(true, [40.0, 46.0]), (false, [4.0, 10.0])] {
            let mut board = Scoreboard::default();
            for at in 0..10 {
                let from = if chained { 0 } else { 100 + at };
                board.run(at, &add(if chained { 0 } else { at }, from, 200));
            }
            let passed = board.take();
            assert_eq!(passed, expected, "chained {chained}");
            assert_eq!(board.take(), [0.0, 0.0]);
        }
    }
}
