//! Execution of a warp during its turn.

use super::cluster::ClusterState;
use super::warp::{Wait, Warp, lanes};
use super::world::World;
use super::{
    access, asynchronous, control, gather, matrix, register_pool, special, synchronize, tensor,
    watch,
};
use crate::decode::{Instruction, Program};
use crate::error::Fault;
use crate::observe::Event;

/// Reasons for the end of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The instruction budget is used up.
    Over,
    /// The warp polled state that other warps change, and yields.
    Polled,
    /// All lanes wait or have exited.
    Blocked,
}

/// Effect of an instruction on its warp.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Next {
    /// All active lanes advance to the next instruction.
    Advance,
    /// All active lanes advance, but other warps should run first.
    Yield,
    /// Program counters changed or lanes were parked: select the active lanes again.
    Select,
}

/// Executes up to `budget` instructions.
pub(crate) fn run(
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    budget: u32,
) -> Result<Turn, Fault> {
    let program: &Program = world.program;
    let steps = &program.steps[..];
    let mut left = budget;
    let mut polled = false;
    let mut ran = 0;
    let watched = world.watched;
    let watches = !watched.is_empty();
    let observes = world.observer.is_some();
    let traces = world.settings.trace_limit > 0;
    if warp.active == 0 && !warp.select(None) {
        return Ok(Turn::Blocked);
    }
    let turn = loop {
        if warp.pc >= warp.limit {
            // The active lanes reached other lanes: merge, or let the lanes behind run first.
            warp.spread();
            warp.select(None);
        }
        if left == 0 {
            // Fairness between diverged lanes: the lanes ahead get the next turn.
            if warp.limit != u32::MAX || warp.active != warp.alive & !warp.blocked {
                let pc = warp.pc;
                warp.spread();
                warp.select(Some(pc));
            }
            break if polled { Turn::Polled } else { Turn::Over };
        }
        left -= 1;
        let Some(step) = steps.get(warp.pc as usize) else {
            let lanes_left = warp.active;
            control::exit(warp, cluster, world, lanes_left)?;
            if !warp.select(None) {
                break Turn::Blocked;
            }
            continue;
        };
        let mask = match step.guard {
            None => warp.active,
            Some(guard) => warp.active & warp.registers.predicate(guard),
        };
        if mask == 0 {
            warp.pc += 1;
            continue;
        }
        world.counts.executed[warp.pc as usize] += 1;
        if watches && let Some(touches) = &watched[warp.pc as usize] {
            watch::touch(&step.instruction, touches, warp, cluster, world, mask);
        }
        if traces {
            let position = cluster.ctas[warp.rank as usize].position;
            world.record(position, warp.index, mask, warp.pc);
        }
        if observes {
            world.observe(warp, cluster, Event::Instruction(&step.instruction));
        }
        let next = match &step.instruction {
            Instruction::Scalar(instruction) => {
                crate::scalar::execute(instruction, &mut warp.registers, mask);
                warp.pc += 1;
                continue;
            }
            Instruction::Branch { target, uniform } => {
                if mask == warp.active {
                    warp.pc = *target;
                    // The branch may have crossed the position of other lanes.
                    if warp.limit != u32::MAX {
                        warp.spread();
                        warp.select(None);
                    }
                    continue;
                }
                control::diverge(warp, *target, *uniform, mask)?
            }
            other => other_instruction(other, warp, cluster, world, mask)?,
        };
        match next {
            Next::Advance => warp.pc += 1,
            Next::Yield => {
                warp.pc += 1;
                ran += u64::from(left);
                (left, polled) = (0, true);
            }
            Next::Select => {
                if !warp.select(None) {
                    break Turn::Blocked;
                }
            }
        }
    };
    let ran = u64::from(budget - left) - ran;
    warp.instructions += ran;
    world.instructions += ran;
    Ok(turn)
}

fn other_instruction(
    instruction: &Instruction,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    use Instruction as I;
    match instruction {
        I::Special { destination, register } => {
            special::read(warp, cluster, world, *destination, *register, mask);
            Ok(Next::Advance)
        }
        I::Load(load) => access::load(load, warp, cluster, world, mask),
        I::Store(store) => access::store(store, warp, cluster, world, mask),
        I::Atomic(atomic) => access::atomic(atomic, warp, cluster, world, mask),
        I::ConvertAddress { .. }
        | I::IsSpace { .. }
        | I::MapAddress { .. }
        | I::CtaRank { .. }
        | I::CreatePolicy { .. } => access::address(instruction, warp, cluster, world, mask),
        I::BranchIndexed { targets, index, uniform } => {
            control::branch_indexed(warp, targets, *index, *uniform, mask)
        }
        I::Exit => {
            control::leave(warp, mask);
            control::exit(warp, cluster, world, mask)?;
            asynchronous::lanes_exited(warp, cluster, world)?;
            Ok(Next::Select)
        }
        I::Trap => Err(Fault::new("trap", "the kernel ran a `trap`")),
        I::ExternalCall(call) => control::external_call(call, warp, world, mask),
        I::Hint => Ok(Next::Yield),
        I::Shuffle(_)
        | I::Vote(_)
        | I::Match(_)
        | I::Elect { .. }
        | I::Redux { .. }
        | I::WarpBarrier { .. }
        | I::ActiveMask { .. } => gather::run(instruction, warp, cluster, world, mask),
        I::Barrier(_) | I::ClusterArrive { .. } | I::ClusterWait { .. } | I::Mbarrier(_) => {
            synchronize::run(instruction, warp, cluster, world, mask)
        }
        I::Fence(fence) => synchronize::fence(fence, warp, cluster, world, mask),
        I::SetMaxRegisters { increase, count } => {
            register_pool::run((*increase, *count), warp, cluster, world, mask)
        }
        I::LaunchDependents => Ok(Next::Advance),
        I::DependencyWait => {
            // Launches run one after another, so the previous one has completed.
            if let Some(thread) = world.thread(warp, cluster, mask)
                && let Some(tracker) = &mut world.tracker
            {
                tracker.grid_dependency_wait(thread);
            }
            Ok(Next::Advance)
        }
        I::CopyAsync { .. }
        | I::CopyAsyncCommit
        | I::CopyAsyncWait { .. }
        | I::CopyAsyncArrive { .. }
        | I::StoreAsync(_)
        | I::BulkCopy(_)
        | I::TensorCopy(_)
        | I::BulkCommit
        | I::BulkWait { .. }
        | I::TensorMapReplace(_)
        | I::TensorMapCopyFence { .. }
        | I::TryCancel { .. }
        | I::QueryCanceled { .. }
        | I::QueryFirstCta { .. } => asynchronous::run(instruction, warp, cluster, world, mask),
        I::LoadMatrix(_)
        | I::StoreMatrix(_)
        | I::MoveMatrix { .. }
        | I::WarpMma(_)
        | I::WarpGroupMma(_)
        | I::WarpGroupFence
        | I::WarpGroupCommit
        | I::WarpGroupWait { .. } => matrix::run(instruction, warp, cluster, world, mask),
        I::Tcgen05(operation) => tensor::run(operation, warp, cluster, world, mask),
        I::Scalar(_) | I::Branch { .. } => Ok(Next::Advance),
    }
}

/// Executes an `.aligned` instruction when all live lanes of the warp have reached it. Until then,
/// parks the lanes that have.
pub(crate) fn together(
    warp: &mut Warp,
    world: &mut World<'_>,
    mask: u32,
    run: impl FnOnce(&mut Warp, &mut World<'_>) -> Result<(), Fault>,
) -> Result<Next, Fault> {
    match gather_lanes(warp, world, mask, warp.alive) {
        Gathered::All => {
            run(warp, world)?;
            Ok(Next::Advance)
        }
        Gathered::Parked => Ok(Next::Select),
    }
}

/// Whether all lanes needed by an instruction have reached it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gathered {
    /// All needed lanes are active; there may be more active lanes than before.
    All,
    /// The lanes were parked; other lanes must run.
    Parked,
}

/// Gathers the lanes of `needed` at the current instruction, which the lanes of `mask` have
/// reached. Parked lanes wake when the last lane arrives. The caller continues only after
/// [`Gathered::All`], and must then read `warp.active` again.
pub(crate) fn gather_lanes(warp: &mut Warp, world: &World<'_>, mask: u32, needed: u32) -> Gathered {
    let needed = needed & warp.alive;
    if mask & needed == needed {
        return Gathered::All;
    }
    let pc = warp.pc;
    let waiting =
        |parked: &super::warp::Parked| parked.pc == pc && matches!(parked.wait, Wait::Lanes { .. });
    let there = (warp.parked.iter()).filter(|p| waiting(p)).fold(0, |all, p| all | p.lanes);
    warp.spread();
    // Lanes with a false guard do not take part and continue.
    for lane in lanes(warp.active & !mask) {
        warp.pcs[lane] = pc + 1;
    }
    if (there | mask) & needed == needed {
        warp.parked.retain(|parked| !waiting(parked));
        warp.blocked &= !there;
        // All needed lanes are at `pc` now and execute the instruction together.
        for lane in lanes(there | mask) {
            warp.pcs[lane] = pc;
        }
    } else {
        warp.park(mask, pc, Wait::Lanes { needed }, world.instructions);
    }
    Gathered::Parked
}
