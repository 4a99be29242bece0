//! `tcgen05`: conversion of instructions to requests, and pending operations.

use super::access::{address_of, live_rank, shared_place};
use super::asynchronous;
use super::cluster::ClusterState;
use super::execute::{Gathered, Next, gather_lanes, together};
use super::pattern;
use super::reach::Reach;
use super::track::Tracked;
use super::warp::{Wait, Warp, lanes};
use super::world::World;
use crate::decode::{Address, Source, Space, Tcgen05, Tcgen05Mma, Tcgen05Operand};
use crate::error::Fault;
use crate::hazard::{Mark, Unit};
use crate::launch::Completion;
use crate::observe::{Event, Phase};
use crate::place::{Memory, Place};
use crate::tcgen05::{
    Allocator, CopyPlan, CopyRequest, MatrixA, MmaPlan, MmaRequest, RegisterAccess, ScaleOperands,
};

/// An operation of a CTA's tensor core; operations run in order.
#[derive(Debug)]
pub(crate) struct TensorWork {
    /// Position in the program.
    pub(crate) pc: u32,
    /// Rank of the issuing CTA.
    rank: u32,
    /// The issuing warp.
    warp: u32,
    what: TensorWorkKind,
    tracked: Tracked,
}

#[derive(Debug)]
enum TensorWorkKind {
    Mma(Box<MmaPlan>),
    Copy(Box<CopyPlan>),
    /// One arrival at each mbarrier after all earlier operations.
    Commit {
        barriers: Vec<(u32, u32)>,
        mark: Option<Box<Mark>>,
    },
}

/// Returns the value of a source that must be equal in all lanes of `mask`.
fn uniform(warp: &Warp, source: Source, mask: u32, what: &str) -> Result<u32, Fault> {
    let first = warp.registers.lane(source, mask.trailing_zeros() as usize) as u32;
    if lanes(mask).any(|lane| warp.registers.lane(source, lane) as u32 != first) {
        return Err(Fault::new(
            "tensor-operand-differs",
            format!("lanes of a warp give different values of {what}"),
        ));
    }
    Ok(first)
}

fn tensor_address(warp: &Warp, address: &Address, mask: u32, what: &str) -> Result<u32, Fault> {
    let base = uniform(warp, address.base, mask, what)?;
    Ok(base.wrapping_add(address.offset as u32))
}

/// Executes a `tcgen05` instruction.
pub(crate) fn run(
    operation: &Tcgen05,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    match operation {
        Tcgen05::Allocate { group, target, space, columns } => {
            if gather_lanes(warp, world, mask, warp.alive) == Gathered::Parked {
                return Ok(Next::Select);
            }
            let columns = uniform(warp, *columns, mask, "the count of columns")?;
            let lane = mask.trailing_zeros() as usize;
            let address = address_of(warp, *space, target, lane);
            let (rank, offset) = shared_place(warp, world, *space, address)?;
            let own = warp.rank as usize;
            let granted = if *group == 1 {
                cluster.ctas[own].allocator.allocate(1, columns)?
            } else {
                allocate_pair(cluster, own, columns)?
            };
            let Some(column) = granted else {
                let frees = cluster.tensor_frees(warp.rank);
                warp.spread();
                super::control::leave(warp, mask);
                let pc = warp.pc;
                let wait = Wait::TensorColumns { frees };
                warp.park(mask, pc, wait, world.instructions);
                return Ok(Next::Select);
            };
            cluster.ctas[own].tensor.poison(column, columns);
            let tracked = world.by_threads(warp, cluster, 1 << lane);
            let mut reach = Reach::operation(cluster, world, warp.rank, tracked);
            reach.write(Place::Shared { rank, offset }, &column.to_le_bytes())?;
            world.changes += 1;
            Ok(Next::Advance)
        }
        Tcgen05::Deallocate { group, address, columns } => {
            if gather_lanes(warp, world, mask, warp.alive) == Gathered::Parked {
                return Ok(Next::Select);
            }
            let address = uniform(warp, *address, mask, "the tensor-memory address")?;
            let columns = uniform(warp, *columns, mask, "the count of columns")?;
            let cta = &mut cluster.ctas[warp.rank as usize];
            cta.allocator.deallocate(*group, address, columns)?;
            if let Some(thread) = world.thread(warp, cluster, mask)
                && let Some(tracker) = &mut world.tracker
            {
                let first = address & 0xFFFF;
                tracker.tensor_free(thread, first..first + columns);
            }
            for cta in &mut cluster.ctas {
                cta.tensor_frees += 1;
            }
            world.changes += 1;
            Ok(Next::Advance)
        }
        Tcgen05::Relinquish { group } => {
            let rank = warp.rank as usize;
            let group = *group;
            together(warp, world, mask, |_, _| cluster.ctas[rank].allocator.relinquish(group))
        }
        Tcgen05::Mma(mma) => {
            for lane in lanes(mask) {
                world.lane = Some(lane);
                let request = mma_request(mma, warp, lane)?;
                let mut patterns = pattern::of_tensor(request.b);
                if let MatrixA::Shared(descriptor) = request.a {
                    patterns = patterns | pattern::of_tensor(descriptor);
                }
                let plan = request.check()?;
                check_group(cluster, warp, mma.group)?;
                for rank in group_ranks(warp.rank, mma.group) {
                    let cta = cluster.ctas.get_mut(rank as usize).ok_or_else(no_pair)?;
                    cta.allocator.use_group(mma.group)?;
                    for (_, column, columns) in plan.tensor_columns() {
                        cta.allocator.check_access(column, columns)?;
                    }
                }
                world.counts.mmas += 1;
                world.counts.multiply_adds += plan.multiply_adds();
                let tracked = world.issued(warp, cluster, 1 << lane, Unit::TensorMma);
                world.permutes(tracked, patterns);
                world.accumulates(tracked, plan.accumulator());
                let what = TensorWorkKind::Mma(Box::new(plan));
                submit(work(warp, what, tracked), cluster, world)?;
            }
            world.lane = None;
            Ok(Next::Advance)
        }
        Tcgen05::Copy { group, shape, source_format, target, descriptor } => {
            for lane in lanes(mask) {
                world.lane = Some(lane);
                let request = CopyRequest {
                    group: *group,
                    rank: warp.rank,
                    shape: *shape,
                    format: *source_format,
                    target: address_of(warp, Space::Generic, target, lane) as u32,
                    descriptor: warp.registers.lane(*descriptor, lane),
                };
                let plan = request.check()?;
                check_group(cluster, warp, *group)?;
                let (column, columns) = plan.columns();
                for rank in group_ranks(warp.rank, *group) {
                    let cta = cluster.ctas.get_mut(rank as usize).ok_or_else(no_pair)?;
                    cta.allocator.use_group(*group)?;
                    cta.allocator.check_access(column, columns)?;
                }
                let tracked = world.issued(warp, cluster, 1 << lane, Unit::TensorCopy);
                let descriptor = warp.registers.lane(*descriptor, lane);
                world.permutes(tracked, pattern::of_tensor(descriptor));
                let what = TensorWorkKind::Copy(Box::new(plan));
                submit(work(warp, what, tracked), cluster, world)?;
            }
            world.lane = None;
            Ok(Next::Advance)
        }
        Tcgen05::Shift { .. } => Err(Fault::new("tensor-shift", "`tcgen05.shift` is not emulated")),
        Tcgen05::Commit { group, barrier, space, multicast } => {
            for lane in lanes(mask) {
                world.lane = Some(lane);
                check_group(cluster, warp, *group)?;
                for rank in group_ranks(warp.rank, *group) {
                    let cta = cluster.ctas.get_mut(rank as usize).ok_or_else(no_pair)?;
                    cta.allocator.use_group(*group)?;
                }
                let address = address_of(warp, *space, barrier, lane);
                let (rank, offset) = shared_place(warp, world, *space, address)?;
                let barriers = match multicast {
                    None => vec![(rank, offset)],
                    Some(ranks) => {
                        let ranks = warp.registers.lane(*ranks, lane) as u32 & 0xFFFF;
                        lanes(ranks).map(|rank| (rank as u32, offset)).collect()
                    }
                };
                let mark = world.marked(warp, cluster, 1 << lane, Unit::TensorMma);
                let tracked = world.by_threads(warp, cluster, 1 << lane);
                let what = TensorWorkKind::Commit { barriers, mark };
                submit(work(warp, what, tracked), cluster, world)?;
            }
            world.lane = None;
            Ok(Next::Advance)
        }
        Tcgen05::Load { shape, repeat, pack, half_offset, destinations, address } => {
            if gather_lanes(warp, world, mask, warp.alive) == Gathered::Parked {
                return Ok(Next::Select);
            }
            let plan = RegisterAccess {
                shape: *shape,
                repeat: *repeat,
                halves: *pack,
                half_offset: *half_offset,
                address: tensor_address(warp, address, mask, "the tensor-memory address")?,
                rank: warp.rank,
                warp: warp.index,
                lane_bits: world.settings.lane_bits,
            }
            .check()?;
            let allocator = &cluster.ctas[warp.rank as usize].allocator;
            for (_, _, column, columns) in plan.extents() {
                allocator.check_access(column, columns)?;
            }
            let tracked = world.issued(warp, cluster, mask, Unit::TensorLoad);
            let mut reach = Reach::operation(cluster, world, warp.rank, tracked);
            let rows = plan.load(&mut reach)?;
            world.ran(tracked);
            world.counts.bytes.tensor_read += rows.len() as u64 * 128;
            for (row, destination) in rows.iter().zip(destinations) {
                if let Some(destination) = destination {
                    warp.registers.set_row32(*destination, row, mask);
                }
            }
            if world.tracker.is_some() {
                let registers = super::watch::words(destinations.iter().flatten());
                let pc = warp.pc;
                warp.watch.tensor_load(&registers, pc);
            }
            Ok(Next::Advance)
        }
        Tcgen05::Store { shape, repeat, unpack, half_offset, sources, address } => {
            if gather_lanes(warp, world, mask, warp.alive) == Gathered::Parked {
                return Ok(Next::Select);
            }
            let plan = RegisterAccess {
                shape: *shape,
                repeat: *repeat,
                halves: *unpack,
                half_offset: *half_offset,
                address: tensor_address(warp, address, mask, "the tensor-memory address")?,
                rank: warp.rank,
                warp: warp.index,
                lane_bits: world.settings.lane_bits,
            }
            .check()?;
            let allocator = &cluster.ctas[warp.rank as usize].allocator;
            for (_, _, column, columns) in plan.extents() {
                allocator.check_access(column, columns)?;
            }
            let rows: Vec<[u32; 32]> =
                sources.iter().map(|source| warp.registers.row32(*source)).collect();
            let tracked = world.issued(warp, cluster, mask, Unit::TensorStore);
            let mut reach = Reach::operation(cluster, world, warp.rank, tracked);
            plan.store(&rows, &mut reach)?;
            world.ran(tracked);
            world.counts.bytes.tensor_written += rows.len() as u64 * 128;
            world.changes += 1;
            Ok(Next::Advance)
        }
        Tcgen05::WaitLoad | Tcgen05::WaitStore => {
            if gather_lanes(warp, world, mask, warp.alive) == Gathered::Parked {
                return Ok(Next::Select);
            }
            let is_load = matches!(operation, Tcgen05::WaitLoad);
            if is_load {
                warp.watch.tensor_wait_load();
            }
            if let Some(thread) = world.thread(warp, cluster, mask)
                && let Some(tracker) = &mut world.tracker
            {
                if is_load {
                    tracker.tensor_wait_load(thread);
                } else {
                    tracker.tensor_wait_store(thread);
                }
            }
            Ok(Next::Advance)
        }
        Tcgen05::FenceBefore | Tcgen05::FenceAfter => {
            if let Some(thread) = world.thread(warp, cluster, mask)
                && let Some(tracker) = &mut world.tracker
            {
                if matches!(operation, Tcgen05::FenceBefore) {
                    tracker.tensor_fence_before(thread);
                } else {
                    tracker.tensor_fence_after(thread);
                }
            }
            Ok(Next::Advance)
        }
    }
}

/// Allocates for a CTA pair once both CTAs have requested. The second request allocates for both;
/// the first CTA finds the result when it retries.
fn allocate_pair(
    cluster: &mut ClusterState,
    own: usize,
    columns: u32,
) -> Result<Option<u32>, Fault> {
    if let Some(granted) = cluster.ctas[own].tensor_granted.take() {
        return Ok(Some(granted));
    }
    let even = own & !1;
    if even + 1 >= cluster.ctas.len() {
        return Err(no_pair());
    }
    cluster.ctas[own].tensor_asked = Some(columns);
    let other = own ^ 1;
    match cluster.ctas[other].tensor_asked {
        None => return Ok(None),
        Some(asked) if asked != columns => {
            return Err(Fault::new(
                "tensor-alloc-pair",
                format!("the CTAs of a pair ask for {columns} and {asked} columns"),
            ));
        }
        Some(_) => {}
    }
    let (left, right) = cluster.ctas.split_at_mut(even + 1);
    let (even, odd) = (&mut left[even], &mut right[0]);
    let granted = Allocator::allocate_pair(&mut even.allocator, &mut odd.allocator, columns)?;
    if let Some(column) = granted {
        cluster.ctas[own].tensor_asked = None;
        let other = &mut cluster.ctas[other];
        (other.tensor_asked, other.tensor_granted) = (None, Some(column));
        other.tensor_frees += 1;
    }
    Ok(granted)
}

/// Fault of a pair instruction in a CTA without a peer.
pub(super) fn no_pair() -> Fault {
    Fault::new(
        "tcgen05-pair",
        "`.cta_group::2` in a CTA without a peer: expected a cluster of an even size",
    )
}

/// Returns the CTA ranks of a group.
fn group_ranks(rank: u32, group: u32) -> std::ops::Range<u32> {
    if group == 2 { (rank & !1)..(rank & !1) + 2 } else { rank..rank + 1 }
}

/// Checks that the CTAs of a group exist and have live threads.
fn check_group(cluster: &ClusterState, warp: &Warp, group: u32) -> Result<(), Fault> {
    for rank in group_ranks(warp.rank, group) {
        if rank as usize >= cluster.ctas.len() {
            return Err(no_pair());
        }
        live_rank(cluster, warp.rank, rank)?;
    }
    Ok(())
}

fn mma_request(mma: &Tcgen05Mma, warp: &Warp, lane: usize) -> Result<MmaRequest, Fault> {
    let value = |source: Source| warp.registers.lane(source, lane);
    let tensor = |address: &Address| address_of(warp, Space::Generic, address, lane) as u32;
    let mut disabled_lanes = [0; 8];
    for (word, source) in disabled_lanes.iter_mut().zip(&mma.disable_output_lanes) {
        *word = value(*source) as u32;
    }
    Ok(MmaRequest {
        kind: mma.kind,
        group: mma.group,
        rank: warp.rank,
        weight_stationary: false,
        d: tensor(&mma.d),
        a: match &mma.a {
            Tcgen05Operand::Descriptor(source) => MatrixA::Shared(value(*source)),
            Tcgen05Operand::Tensor(address) => MatrixA::Tensor(tensor(address)),
        },
        b: value(mma.b),
        instruction: value(mma.instruction_descriptor) as u32,
        scales: mma.scales.as_ref().map(|scales| ScaleOperands {
            block: scales.block,
            a: tensor(&scales.a),
            b: tensor(&scales.b),
        }),
        accumulate: warp.registers.predicate(mma.enable_input_d) >> lane & 1 == 1,
        scale_input_d: mma.scale_input_d,
        disabled_lanes,
        shift_a: mma.shift_a,
    })
}

fn work(warp: &Warp, what: TensorWorkKind, tracked: Tracked) -> TensorWork {
    TensorWork { pc: warp.pc, rank: warp.rank, warp: warp.index, what, tracked }
}

fn submit(
    work: TensorWork,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
) -> Result<(), Fault> {
    world.changes += 1;
    if world.settings.completion.runs_mmas_at_issue() {
        return complete(&work, cluster, world);
    }
    let rank = work.rank as usize;
    cluster.queue.tensor[rank].push_back(work);
    if matches!(world.settings.completion, Completion::Lazy { .. }) && world.random.below(8) == 0 {
        asynchronous::complete_tensor(rank, cluster, world)?;
    }
    Ok(())
}

/// Runs an operation of a tensor core.
pub(crate) fn complete(
    work: &TensorWork,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
) -> Result<(), Fault> {
    match &work.what {
        TensorWorkKind::Mma(plan) => {
            let model = world.settings.results;
            let mut reach = Reach::operation(cluster, world, work.rank, work.tracked);
            plan.run(model, &mut reach)?;
            world.ran(work.tracked);
            let origin = (work.rank, work.warp, work.pc);
            world.observe_of(origin, cluster, Event::TensorMma(plan.observed()));
        }
        TensorWorkKind::Copy(plan) => {
            let mut reach = Reach::operation(cluster, world, work.rank, work.tracked);
            plan.run(&mut reach)?;
            world.ran(work.tracked);
        }
        TensorWorkKind::Commit { barriers, mark } => {
            for &(rank, offset) in barriers {
                live_rank(cluster, work.rank, rank)?;
                let arrival = cluster.barriers.arrive(rank, offset, 1, false)?;
                world.mark_arrived(mark.as_deref(), (rank, offset), arrival);
                let phase = Phase { rank, offset, phase: arrival.phase };
                let origin = (work.rank, work.warp, work.pc);
                world.observe_of(origin, cluster, Event::TensorCommit(phase));
            }
        }
    }
    Ok(())
}
