//! Rectangles of tensor memory.

use std::ops::Range;

use super::accesses::Checker;
use super::cell::Record;
use super::check::{Context, Memory, View};
use super::operations::Operation;
use super::shadow::CELL_LANES;
use super::{Direction, HazardKind, Place, Severity, Thread, Tracker, Unit};

/// Most rectangles gathered for one operation: D in both directions, scales, A.
const TENSOR_ROWS_MAX: usize = 8;

/// A rectangle of tensor memory that an operation touched.
#[derive(Clone, Debug)]
pub(super) struct TensorRows {
    operation: Operation,
    direction: Direction,
    rank: u32,
    lanes: Range<u32>,
    columns: Range<u32>,
}

impl Tracker {
    /// Reports that an issued operation touches a rectangle of tensor memory of CTA `rank`.
    pub fn access_tensor(
        &mut self,
        operation: Operation,
        direction: Direction,
        rank: u32,
        lanes: Range<u32>,
        columns: Range<u32>,
    ) {
        let cells = tensor_cells(rank, lanes, columns);
        self.touch_by_operation(operation, direction, Memory::Tensor, None, cells);
    }

    /// Reports one lane's columns. Operations access tensor memory lane by lane. Lanes are gathered
    /// to rectangles, which are checked when the operation has run or another operation follows.
    pub(super) fn access_tensor_row(
        &mut self,
        operation: Operation,
        direction: Direction,
        rank: u32,
        lane: u32,
        columns: Range<u32>,
    ) {
        let rows = &mut self.tensor_rows;
        let fits = |row: &&mut TensorRows| {
            row.operation == operation
                && row.direction == direction
                && row.rank == rank
                && row.columns == columns
                && (row.lanes.start..=row.lanes.end).contains(&lane)
        };
        if let Some(row) = rows.iter_mut().find(fits) {
            row.lanes.end = row.lanes.end.max(lane + 1);
            return;
        }
        let other = rows.first().is_some_and(|row| row.operation != operation);
        if other || rows.len() >= TENSOR_ROWS_MAX {
            self.tell_tensor_rows();
        }
        let lanes = lane..lane + 1;
        self.tensor_rows.push(TensorRows { operation, direction, rank, lanes, columns });
    }

    /// Checks the gathered rectangles.
    pub(super) fn tell_tensor_rows(&mut self) {
        for rows in std::mem::take(&mut self.tensor_rows) {
            let TensorRows { operation, direction, rank, lanes, columns } = rows;
            self.access_tensor(operation, direction, rank, lanes, columns);
        }
    }

    /// Checks that no operation may still use the columns of a deallocation.
    pub(super) fn check_tensor_free(
        &mut self,
        thread: Thread,
        rank: u32,
        lanes: Range<u32>,
        columns: Range<u32>,
    ) {
        self.tell_tensor_rows();
        let Tracker { warps, clusters, operations, rules, .. } = self;
        let warp = &warps[thread.warp.0 as usize];
        let state = warp.state(thread.lanes.trailing_zeros());
        let Some(tensor) = clusters[warp.cluster as usize].tensor.get_mut(rank as usize) else {
            return;
        };
        let view = View {
            warp: thread.warp,
            lanes: thread.lanes,
            tick: warp.tick,
            known: &state.known,
            own: &state.own,
            tensor_pending: &state.tensor_pending,
            operation: None,
            unit: Unit::Thread,
            memory: Memory::Tensor,
            strong: 0,
        };
        let mut found = Vec::new();
        for (_, place, mask) in tensor_cells(rank, lanes, columns) {
            let Place::Tensor { lane, column, .. } = place else { continue };
            let cell = tensor.cell(lane / CELL_LANES, column);
            let new = Record::of_warp(thread.warp.0, warp.tick, thread.lanes, thread.step, mask);
            let context = Context { rules: *rules, warps, operations };
            cell.visit(mask, &mut Checker { context, view, new, place, found: &mut found });
            *cell = Default::default();
        }
        for of in found.iter_mut().filter(|of| of.kind.severity() == Severity::Error) {
            of.kind = HazardKind::TensorMemoryFreedInUse;
        }
        self.report_found(found, (thread.warp, thread.step, Unit::Thread), Direction::Write);
    }
}

/// Returns the cells of a rectangle of tensor memory; each mask bit stands for two lanes.
fn tensor_cells(
    rank: u32,
    lanes: Range<u32>,
    columns: Range<u32>,
) -> impl Iterator<Item = (u64, Place, u16)> {
    let groups = lanes.start / CELL_LANES..lanes.end.div_ceil(CELL_LANES);
    groups.flat_map(move |group| {
        let first = lanes.start.max(group * CELL_LANES);
        let last = lanes.end.min((group + 1) * CELL_LANES);
        let (low, high) = (first % CELL_LANES / 2, (last - group * CELL_LANES).div_ceil(2));
        let mask = ((1u32 << high) - (1u32 << low)) as u16;
        columns.clone().map(move |column| (0, Place::Tensor { rank, lane: first, column }, mask))
    })
}
