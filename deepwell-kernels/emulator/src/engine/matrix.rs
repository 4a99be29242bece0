//! Matrix instructions of warps and warp groups.

use super::access::{address_of, shared_place};
use super::cluster::ClusterState;
use super::execute::{Gathered, Next, gather_lanes};
use super::reach::Reach;
use super::track::Tracked;
use super::warp::{Wait, Warp, lanes};
use super::watch;
use super::world::World;
use crate::decode::{
    Address, Instruction, Register, Source, Space, WarpGroupMma, WarpGroupOperand, WarpMma,
};
use crate::error::Fault;
use crate::hazard::{Group, Unit};
use crate::warp_mma::{
    MatrixAccess, ScaleSelector, WarpMmaForm, WarpScales, load_matrix, store_matrix,
    transpose_matrix,
};
use crate::wgmma::{MatrixA, WarpFragments, WgmmaForm};

/// A pending `wgmma` of a warp.
#[derive(Clone, Debug)]
pub(crate) struct PendingWgmma {
    /// Position in the program.
    pub(crate) pc: u32,
    /// Number of groups that the warp had committed before.
    group: u32,
    form: WgmmaForm,
    a: MatrixA,
    a_rows: Vec<[u32; 32]>,
    b: u64,
    accumulate: bool,
    d: Box<[Register]>,
    tracked: Tracked,
}

/// Executes a matrix instruction. All of these instructions are `.aligned`.
pub(crate) fn run(
    instruction: &Instruction,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<Next, Fault> {
    if gather_lanes(warp, world, mask, warp.alive) == Gathered::Parked {
        return Ok(Next::Select);
    }
    match instruction {
        Instruction::LoadMatrix(load) => {
            let access = MatrixAccess {
                shape: load.shape,
                count: load.count,
                transpose: load.transpose,
                element: load.element,
            };
            let count = access.addresses();
            let rows = matrix_rows(warp, world, load.space, &load.address, count)?;
            let tracked = world.by_threads(warp, cluster, mask);
            let mut reach = Reach::operation(cluster, world, warp.rank, tracked);
            reach.by_rows = true;
            let found = load_matrix(access, &rows, &mut reach)?;
            world.counts.bytes.shared_read += 16 * count as u64;
            for (row, destination) in found.iter().zip(&load.destinations) {
                if let Some(destination) = destination {
                    warp.registers.set_row32(*destination, row, mask);
                }
            }
        }
        Instruction::StoreMatrix(store) => {
            let access = MatrixAccess {
                shape: store.shape,
                count: store.count,
                transpose: store.transpose,
                element: store.element,
            };
            let count = access.addresses();
            let rows = matrix_rows(warp, world, store.space, &store.address, count)?;
            let registers = rows_of(warp, &store.sources);
            let tracked = world.by_threads(warp, cluster, mask);
            let mut reach = Reach::operation(cluster, world, warp.rank, tracked);
            reach.by_rows = true;
            store_matrix(access, &rows, &registers, &mut reach)?;
            world.counts.bytes.shared_written += 16 * count as u64;
            world.changes += 1;
        }
        Instruction::MoveMatrix { destination, source } => {
            let row = transpose_matrix(&warp.registers.row32(*source));
            warp.registers.set_row32(*destination, &row, mask);
        }
        Instruction::WarpMma(mma) => warp_mma(mma, warp, world, mask)?,
        Instruction::WarpGroupMma(mma) => group_mma(mma, warp, cluster, world, mask)?,
        Instruction::WarpGroupFence => warp.watch.warp_group_fence(),
        Instruction::WarpGroupCommit => {
            warp.wgmma_groups += 1;
            cluster.ctas[warp.rank as usize].warp_groups.committed(warp.index);
            warp.watch.warp_group_commit();
            world.group_committed(warp, cluster, mask, Group::WarpGroup);
        }
        Instruction::WarpGroupWait { pending } => {
            while let Some(first) = warp.wgmmas.first()
                && first.group + pending < warp.wgmma_groups
            {
                complete_first_wgmma(warp, cluster, world)?;
            }
            let groups = &mut cluster.ctas[warp.rank as usize].warp_groups;
            let wgmmas = groups.awaited(warp.index, *pending);
            if !groups.are_complete(warp.index, wgmmas) {
                warp.spread();
                super::control::leave(warp, mask);
                let pc = warp.pc;
                warp.park(mask, pc, Wait::Wgmmas { wgmmas }, world.instructions);
                return Ok(Next::Select);
            }
            groups.waited(warp.index, *pending);
            warp.watch.warp_group_wait(*pending);
            world.group_waited(warp, cluster, mask, Group::WarpGroup, (*pending, false));
        }
        _ => {}
    }
    Ok(Next::Advance)
}

fn rows_of(warp: &Warp, sources: &[Source]) -> Vec<[u32; 32]> {
    sources.iter().map(|source| warp.registers.row32(*source)).collect()
}

/// Returns rank and offset of each lane's matrix row; (0, 0) for lanes beyond `count`.
fn matrix_rows(
    warp: &Warp,
    world: &World<'_>,
    space: Space,
    address: &Address,
    count: usize,
) -> Result<[(u32, u32); 32], Fault> {
    let mut rows = [(0, 0); 32];
    for (lane, row) in rows.iter_mut().enumerate().take(count) {
        *row = shared_place(warp, world, space, address_of(warp, space, address, lane))?;
    }
    Ok(rows)
}

fn warp_mma(mma: &WarpMma, warp: &mut Warp, world: &mut World<'_>, mask: u32) -> Result<(), Fault> {
    let form = WarpMmaForm::of(mma)?;
    let (a, b, c) = (rows_of(warp, &mma.a), rows_of(warp, &mma.b), rows_of(warp, &mma.c));
    let scales = mma.scales.as_ref().map(|scales| {
        let value = |source| warp.registers.lane(source, 0) as u32;
        WarpScales {
            a: warp.registers.row32(scales.a.data),
            a_selector: ScaleSelector {
                byte: value(scales.a.byte_id),
                thread: value(scales.a.thread_id),
            },
            b: warp.registers.row32(scales.b.data),
            b_selector: ScaleSelector {
                byte: value(scales.b.byte_id),
                thread: value(scales.b.thread_id),
            },
        }
    });
    let d = form.run(world.target, world.settings.results, &a, &b, &c, scales.as_ref())?;
    for (row, destination) in d.iter().zip(&mma.d) {
        if let Some(destination) = destination {
            warp.registers.set_row32(*destination, row, mask);
        }
    }
    world.counts.mmas += 1;
    let shape = mma.shape;
    world.counts.multiply_adds += u64::from(shape.m) * u64::from(shape.n) * u64::from(shape.k);
    Ok(())
}

fn uniform(warp: &Warp, source: Source, mask: u32) -> Result<u64, Fault> {
    let first = warp.registers.lane(source, mask.trailing_zeros() as usize);
    if lanes(mask).any(|lane| warp.registers.lane(source, lane) != first) {
        return Err(Fault::new(
            "wgmma-descriptor-differs",
            "lanes of a warp give different matrix descriptors to `wgmma`",
        ));
    }
    Ok(first)
}

fn group_mma(
    mma: &WarpGroupMma,
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
    mask: u32,
) -> Result<(), Fault> {
    let form = WgmmaForm::of(mma);
    form.check()?;
    if mask != u32::MAX || !world.shape.warps().is_multiple_of(4) {
        return Err(Fault::new(
            "wgmma-warp-group",
            "`wgmma` needs four whole warps, the first of which has a multiple of 4 as its number",
        ));
    }
    cluster.ctas[warp.rank as usize].warp_groups.wgmma(warp.index, warp.pc)?;
    let scales = warp.registers.predicate(mma.scale_d) & mask;
    if scales != 0 && scales != mask {
        return Err(Fault::new(
            "wgmma-descriptor-differs",
            "lanes of a warp give different `scale-d` to `wgmma`",
        ));
    }
    let (a, a_rows) = match &mma.a {
        WarpGroupOperand::Descriptor(source) => {
            (MatrixA::Shared(uniform(warp, *source, mask)?), Vec::new())
        }
        WarpGroupOperand::Registers(sources) => (MatrixA::Registers, rows_of(warp, sources)),
    };
    let tracked = world.issued(warp, cluster, mask, Unit::WarpGroupMma);
    let mut patterns = super::pattern::of_group(uniform(warp, mma.b, mask)?);
    if let MatrixA::Shared(descriptor) = a {
        patterns = patterns | super::pattern::of_group(descriptor);
    }
    world.permutes(tracked, patterns);
    if let Some(thread) = world.thread(warp, cluster, mask) {
        let d = watch::words(&mma.d);
        let a_registers = match &mma.a {
            WarpGroupOperand::Registers(sources) => {
                watch::words(sources.iter().filter_map(|source| match source {
                    Source::Register(register) => Some(register),
                    Source::Immediate(_) => None,
                }))
            }
            WarpGroupOperand::Descriptor(_) => Vec::new(),
        };
        if let Some(found) = warp.watch.warp_group_mma(&d, &a_registers, warp.pc)
            && let Some(tracker) = &mut world.tracker
        {
            tracker.report_register(thread, Unit::WarpGroupMma, found);
        }
    }
    warp.wgmmas.push(PendingWgmma {
        pc: warp.pc,
        group: warp.wgmma_groups,
        form,
        a,
        a_rows,
        b: uniform(warp, mma.b, mask)?,
        accumulate: scales != 0,
        d: mma.d.clone(),
        tracked,
    });
    if warp.index.is_multiple_of(4) {
        world.counts.mmas += 1;
    }
    let shape = mma.shape;
    world.counts.multiply_adds += 16 * u64::from(shape.n) * u64::from(shape.k);
    if world.settings.completion.runs_mmas_at_issue() {
        complete_first_wgmma(warp, cluster, world)?;
    }
    Ok(())
}

/// Runs the first pending `wgmma` of a warp. Returns false if none is pending.
pub(crate) fn complete_first_wgmma(
    warp: &mut Warp,
    cluster: &mut ClusterState,
    world: &mut World<'_>,
) -> Result<bool, Fault> {
    if warp.wgmmas.is_empty() {
        return Ok(false);
    }
    let wgmma = warp.wgmmas.remove(0);
    cluster.ctas[warp.rank as usize].warp_groups.completed(warp.index);
    let mut fragments = [WarpFragments {
        warp: warp.index % 4,
        a: wgmma.a_rows,
        d: (wgmma.d.iter())
            .map(|register| warp.registers.row32(Source::Register(*register)))
            .collect(),
    }];
    let model = world.settings.results;
    let mut reach = Reach::operation(cluster, world, warp.rank, wgmma.tracked);
    wgmma.form.run(
        model,
        warp.rank,
        wgmma.a,
        wgmma.b,
        wgmma.accumulate,
        &mut fragments,
        &mut reach,
    )?;
    world.ran(wgmma.tracked);
    for (row, register) in fragments[0].d.iter().zip(&wgmma.d) {
        warp.registers.set_row32(*register, row, u32::MAX);
    }
    world.changes += 1;
    Ok(true)
}
