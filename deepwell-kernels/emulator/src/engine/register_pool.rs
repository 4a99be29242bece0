//! Registers of a CTA, which `setmaxnreg` moves between warps.
//!
//! PTX ISA 9.7.20.5 (`setmaxnreg`): a CTA starts with a pool of its registers at launch; `.dec`
//! returns registers to the pool, `.inc` waits until the pool has enough.

use super::cluster::ClusterState;
use super::execute::{Gathered, Next, gather_lanes};
use super::warp::{Wait, Warp};
use super::world::World;
use crate::decode::{Instruction, Program};
use crate::error::Fault;

/// 32-bit registers of an SM (CUDA programming guide, compute capabilities 9.0, 10.0 and 12.0).
pub(crate) const SM_REGISTERS: u32 = 65_536;
/// The hardware allocates registers of a thread in steps of this size (same).
const STEP: u32 = 8;
/// Most registers that a thread starts with: 255, in steps of 8.
const LAUNCH_LIMIT: u32 = 256;

/// Returns the registers of a thread at launch. Known for kernels with `.maxnreg`, and for kernels
/// with `setmaxnreg`, `.maxntid` and `.minnctapersm`: ptxas then gives each thread all registers
/// that both leave (168 for 384 threads), and ignores `setmaxnreg` otherwise.
pub(crate) fn launch_registers(program: &Program) -> Option<u32> {
    let moves =
        |instruction: &Instruction| matches!(instruction, Instruction::SetMaxRegisters { .. });
    if let Some(count) = program.max_registers {
        return Some(count.next_multiple_of(STEP));
    }
    if !program.steps.iter().any(|step| moves(&step.instruction)) {
        return None;
    }
    let block = program.max_threads.or(program.required_threads)?;
    let threads: u32 = block.iter().map(|axis| (*axis).max(1)).product();
    let ctas = program.min_ctas_per_sm?.max(1);
    let count = SM_REGISTERS / (threads.next_multiple_of(32) * ctas);
    Some((count / STEP * STEP).min(LAUNCH_LIMIT))
}

/// The registers of a CTA; counts are of a thread, a warp holds 32 times as many.
#[derive(Clone, Debug, Default)]
pub(crate) struct RegisterPool {
    /// Registers of a thread at launch; `None` if unknown.
    launch: Option<u32>,
    /// Registers of a thread of each warp.
    held: Vec<u32>,
    /// Number of `setmaxnreg`s of each warp.
    ran: Vec<u64>,
    /// Registers in the pool, in registers of a thread of one warp.
    free: u32,
}

impl RegisterPool {
    pub(crate) fn new(launch: Option<u32>, warps: u32) -> RegisterPool {
        let warps = warps as usize;
        RegisterPool {
            launch,
            held: vec![launch.unwrap_or(0); warps],
            ran: vec![0; warps],
            free: 0,
        }
    }

    /// Whether a warp could have `count` registers of a thread now.
    pub(crate) fn has(&self, warp: u32, count: u32) -> bool {
        count <= self.held[warp as usize] + self.free
    }

    /// Executes a `setmaxnreg` of a warp. Returns false if the warp has to wait.
    fn set(&mut self, warp: u32, increase: bool, count: u32) -> Result<bool, Fault> {
        let Some(launch) = self.launch else {
            return Err(Fault::new(
                "setmaxnreg-without-register-count",
                "`setmaxnreg` in a kernel without `.maxnreg`, or `.maxntid` and `.minnctapersm`: \
                 ptxas ignores it; give the kernel `__launch_bounds__(threads, 1)`"
                    .to_owned(),
            ));
        };
        let held = self.held[warp as usize];
        if if increase { count < held } else { count > held } {
            let (word, bound) = if increase { ("inc", "fewer") } else { ("dec", "more") };
            return Err(Fault::new(
                "setmaxnreg-direction",
                format!(
                    "`setmaxnreg.{word}` to {count} registers, {bound} than the {held} that warp \
                     {warp} has (a thread starts with {launch})"
                ),
            ));
        }
        self.check_group(warp)?;
        if !self.has(warp, count) {
            return Ok(false);
        }
        self.free = self.free + held - count;
        self.held[warp as usize] = count;
        self.ran[warp as usize] += 1;
        Ok(true)
    }

    fn group(&self, warp: u32) -> std::ops::Range<usize> {
        let first = warp as usize / 4 * 4;
        first..(first + 4).min(self.ran.len())
    }

    /// All warps of a warp group run the same `setmaxnreg`s, with a barrier between two.
    fn check_group(&self, warp: u32) -> Result<(), Fault> {
        let ran = self.ran[warp as usize];
        match self.group(warp).find(|other| self.ran[*other] < ran) {
            None => Ok(()),
            Some(other) => Err(Fault::new(
                "setmaxnreg-warp-group",
                format!(
                    "`setmaxnreg` number {} of warp {warp} before number {ran} of warp {other} of \
                     its warp group: all four warps run each, with a barrier between two",
                    ran + 1
                ),
            )),
        }
    }

    /// Checks, at the end of the CTA, that the warps of each warp group ran the same number.
    pub(crate) fn check_exit(&self) -> Result<(), Fault> {
        match self.ran.chunks(4).position(|group| group.iter().any(|ran| *ran != group[0])) {
            None => Ok(()),
            Some(group) => Err(Fault::new(
                "setmaxnreg-warp-group",
                format!(
                    "the warps of warp group {group} ran {:?} `setmaxnreg`s: all four must run \
                     the same",
                    &self.ran[group * 4..(group * 4 + 4).min(self.ran.len())]
                ),
            )),
        }
    }

    /// Describes the wait of a warp for registers.
    pub(crate) fn describe(&self, warp: u32, count: u32) -> String {
        format!(
            "{count} registers of a thread (`setmaxnreg.inc`): warp {warp} has {}, the CTA's pool \
             {} for one warp; the warps hold {:?}, {} at launch",
            self.held[warp as usize],
            self.free,
            self.held,
            self.launch.unwrap_or(0)
        )
    }
}

/// Executes `setmaxnreg`.
pub(crate) fn run(
    (increase, count): (bool, u32),
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    if gather_lanes(warp, world, mask, warp.alive) == Gathered::Parked {
        return Ok(Next::Select);
    }
    let pool = &mut cluster.ctas[warp.rank as usize].registers;
    if pool.set(warp.index, increase, count)? {
        world.changes += 1;
        return Ok(Next::Advance);
    }
    warp.spread();
    super::control::leave(warp, mask);
    let pc = warp.pc;
    warp.park(mask, pc, Wait::Registers { count }, world.instructions);
    Ok(Next::Select)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two consumers of 232 registers and a producer of 40, of 168 for each at launch.
    #[test]
    fn registers_move_between_warp_groups() {
        let mut pool = RegisterPool::new(Some(168), 12);
        assert_eq!(pool.set(4, true, 232), Ok(false));
        for warp in 0..4 {
            assert_eq!(pool.set(warp, false, 40), Ok(true));
        }
        for warp in 4..12 {
            assert_eq!(pool.set(warp, true, 232), Ok(true), "warp {warp}");
        }
        assert_eq!((pool.free, pool.check_exit()), (0, Ok(())));
        assert_eq!(pool.set(4, true, 240), Ok(false));
        assert_eq!(pool.set(4, true, 224).unwrap_err().rule, "setmaxnreg-direction");
        assert_eq!(pool.set(0, false, 48).unwrap_err().rule, "setmaxnreg-direction");
        assert_eq!(pool.set(0, false, 32), Ok(true));
        assert_eq!(pool.set(0, false, 24).unwrap_err().rule, "setmaxnreg-warp-group");
        assert_eq!(pool.check_exit().unwrap_err().rule, "setmaxnreg-warp-group");
    }
}
