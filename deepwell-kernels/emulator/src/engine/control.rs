//! Branches, exits and calls of the device runtime.

use super::cluster::ClusterState;
use super::execute::Next;
use super::warp::{Wait, Warp, lanes};
use super::world::World;
use crate::decode::{ExternalCall, ExternalFunction, LocalSlot, Source};
use crate::error::Fault;
use crate::memory::Window;

/// Lanes in `taken` branch; the other active lanes continue.
pub(crate) fn diverge(
    warp: &mut Warp,
    target: u32,
    uniform: bool,
    taken: u32,
) -> Result<Next, Fault> {
    if uniform {
        return Err(Fault::new(
            "divergent-uniform-branch",
            format!(
                "`bra.uni` is taken by lanes {taken:#010x} of {:#010x}: all or none must",
                warp.active
            ),
        ));
    }
    for lane in lanes(warp.active) {
        warp.pcs[lane] = if taken >> lane & 1 == 1 { target } else { warp.pc + 1 };
    }
    Ok(Next::Select)
}

/// `brx.idx`.
pub(crate) fn branch_indexed(
    warp: &mut Warp,
    targets: &[u32],
    index: Source,
    uniform: bool,
    mask: u32,
) -> Result<Next, Fault> {
    let mut first = None;
    for lane in lanes(warp.active) {
        if mask >> lane & 1 == 0 {
            warp.pcs[lane] = warp.pc + 1;
            continue;
        }
        let chosen = warp.registers.lane(index, lane);
        let Some(target) = targets.get(chosen as usize) else {
            return Err(Fault::new(
                "branch-index-out-of-range",
                format!("`brx.idx` with index {chosen} of {} targets", targets.len()),
            ));
        };
        if uniform && *first.get_or_insert(*target) != *target {
            return Err(Fault::new(
                "divergent-uniform-branch",
                "`brx.idx.uni` with different targets".to_owned(),
            ));
        }
        warp.pcs[lane] = *target;
    }
    Ok(Next::Select)
}

/// Moves active lanes outside of `mask` to the next instruction.
pub(crate) fn leave(warp: &mut Warp, mask: u32) {
    for lane in lanes(warp.active & !mask) {
        warp.pcs[lane] = warp.pc + 1;
    }
}

/// Lanes exit, which may complete barriers for all threads.
pub(crate) fn exit(
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<(), Fault> {
    world.changes += 1;
    warp.alive &= !mask;
    warp.active &= !mask;
    let cta = &mut cluster.ctas[warp.rank as usize];
    cta.live_threads -= mask.count_ones();
    let live = cta.live_threads;
    for name in lanes(cta.barriers.threads_exited(live)) {
        world.barrier_completes(cluster, warp.rank, name as u32);
    }
    let live = cluster.live_threads();
    let generation = cluster.barrier.generation;
    let had_arrived = lanes(mask & warp.cluster_arrived)
        .filter(|&lane| warp.cluster_arrival[lane] == generation)
        .count();
    if cluster.barrier.exit(had_arrived as u32, live) {
        world.cluster_passed(cluster);
    }
    let left = warp.parked.iter().find(|parked| match parked.wait {
        Wait::Lanes { needed } => {
            let step = world.program.steps.get(parked.pc as usize);
            needed & mask != 0 && step.is_some_and(|step| step.instruction.is_aligned())
        }
        _ => false,
    });
    if let Some(parked) = left {
        return Err(Fault::new(
            "aligned-without-lanes",
            format!(
                "lanes {mask:#010x} exit while lanes {:#010x} of their warp wait for them at \
                 `.aligned` instructions (PTX line {}), which all lanes of a warp must run",
                parked.lanes,
                world.program.steps.get(parked.pc as usize).map_or(0, |step| step.ptx_line)
            ),
        ));
    }
    // Lanes that wait for exited lanes wake and retry.
    let mut woken = 0;
    warp.parked.retain(|parked| {
        let waits = matches!(
            parked.wait,
            super::warp::Wait::Lanes { .. } | super::warp::Wait::WarpBarrier { .. }
        );
        if waits {
            woken |= parked.lanes;
        }
        !waits
    });
    warp.blocked &= !woken;
    Ok(())
}

fn argument(warp: &Warp, program_local: usize, slot: LocalSlot, lane: usize) -> u64 {
    let start = lane * program_local + slot.offset as usize;
    let mut bytes = [0u8; 8];
    let count = (slot.bytes as usize).min(8);
    if let Some(found) = warp.local.get(start..start + count) {
        bytes[..count].copy_from_slice(found);
    }
    u64::from_le_bytes(bytes)
}

/// Executes a runtime function. Printed text is discarded; a failing assertion ends the launch.
pub(crate) fn external_call(
    call: &ExternalCall,
    warp: &mut Warp,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    let local = world.program.local_bytes as usize;
    for lane in lanes(mask) {
        world.lane = Some(lane);
        let result = match call.function {
            ExternalFunction::Printf => 0,
            ExternalFunction::AssertFail => {
                let text = call.arguments.first().map_or_else(String::new, |slot| {
                    string_at(world, argument(warp, local, *slot, lane))
                });
                return Err(Fault::new("assertion", format!("assertion `{text}` failed")));
            }
            ExternalFunction::Malloc => {
                let bytes =
                    call.arguments.first().map_or(0, |slot| argument(warp, local, *slot, lane));
                world.global.allocate(bytes, "malloc of a kernel")
            }
            ExternalFunction::Free => {
                let address =
                    call.arguments.first().map_or(0, |slot| argument(warp, local, *slot, lane));
                if address != 0 {
                    world.global.free(address)?;
                }
                0
            }
        };
        if let Some(slot) = call.result {
            let start = lane * local + slot.offset as usize;
            let count = (slot.bytes as usize).min(8);
            if let Some(bytes) = warp.local.get_mut(start..start + count) {
                bytes.copy_from_slice(&result.to_le_bytes()[..count]);
            }
        }
    }
    world.lane = None;
    Ok(Next::Advance)
}

fn string_at(world: &World<'_>, address: u64) -> String {
    let Window::Global(address) = Window::of(address) else { return String::new() };
    let mut text = Vec::new();
    while let Ok(byte) = world.global.slice(address + text.len() as u64, 1) {
        if byte[0] == 0 || text.len() > 400 {
            break;
        }
        text.push(byte[0]);
    }
    String::from_utf8_lossy(&text).into_owned()
}
