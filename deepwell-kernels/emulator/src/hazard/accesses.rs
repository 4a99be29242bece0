//! Accesses: splits them into cells and checks each cell.

use std::ops::Range;

use super::cell::{Record, Visitor};
use super::check::{Context, Memory, Missing, View, remedy};
use super::clock::ALL_LANES;
use super::knowledge::level;
use super::operations::{Operation, OperationInfo};
use super::pattern::{self, Patterns};
use super::shadow::{CELL_BYTES, CELL_LANES, GlobalShadow};
use super::threads::Warp;
use super::{Cluster, Direction, HazardKind, Lanes, Place, Scope, Thread, Tracker, Unit, WarpId};

/// Most readers of a cell, besides the first.
const SHARED_READS_MAX: usize = 96;
const GLOBAL_READS_MAX: usize = 8;

/// An unordered conflict.
pub(super) struct Found {
    pub(super) kind: HazardKind,
    swapped: bool,
    record: Record,
    written: bool,
    lanes: u32,
    place: Place,
}

impl Found {
    pub(super) fn new(
        kind: HazardKind,
        record: Record,
        written: bool,
        lanes: u32,
        place: Place,
    ) -> Found {
        Found { kind, swapped: false, record, written, lanes, place }
    }
}

pub(super) struct Checker<'a> {
    pub(super) context: Context<'a>,
    pub(super) view: View<'a>,
    /// The new record, for lane-by-lane checks of warp-wide accesses.
    pub(super) new: Record,
    pub(super) place: Place,
    pub(super) found: &'a mut Vec<Found>,
}

impl Visitor for Checker<'_> {
    fn conflict(&mut self, record: &Record, overlap: u16, written: bool) {
        let as_one = self.view.operation.is_some()
            || self.view.lanes.is_power_of_two()
            || self.context.rules.lanes == Lanes::AsOneThread;
        let found = if as_one {
            let found = self.context.missing(&self.view, record, overlap, written);
            found.map(|missing| (missing, self.view.lanes))
        } else if self.is_program_order(record) {
            None
        } else {
            // Fast path: ordered for all lanes without program order. Otherwise each lane is
            // checked.
            let all = View { lanes: 0, ..self.view };
            match self.context.missing(&all, record, overlap, written) {
                None => None,
                Some(_) => self.lane_by_lane(record, overlap, written),
            }
        };
        if let Some((Missing { kind, swapped }, lanes)) = found {
            let (record, place) = (*record, self.place);
            self.found.push(Found { kind, swapped, record, written, lanes, place });
        }
    }

    fn supersedes(&self, record: &Record) -> bool {
        if self.is_program_order(record) {
            return true;
        }
        // Completion on an mbarrier does not imply completion of earlier operations.
        let forgetful =
            matches!(self.view.unit, Unit::BulkLoad | Unit::StoreAsync | Unit::LaunchControl);
        if forgetful {
            return false;
        }
        if let (Some(later), Some(earlier)) = (self.view.operation, record.operation()) {
            let operations = self.context.operations;
            let (later, earlier) = (&operations[later as usize], &operations[earlier as usize]);
            let same_stream = later.warp == earlier.warp
                && later.lanes == earlier.lanes
                && later.unit == earlier.unit;
            if same_stream {
                return true;
            }
        }
        let all = View { lanes: 0, strong: 0, ..self.view };
        self.context.missing(&all, record, record.bytes, false).is_none()
    }
}

impl Checker<'_> {
    /// Whether each lane accesses its own earlier bytes again.
    fn is_program_order(&self, record: &Record) -> bool {
        self.view.operation.is_none()
            && record.warp() == Some(self.view.warp.0)
            && record.same_lanes(&self.new)
    }

    fn lane_by_lane(&self, record: &Record, overlap: u16, written: bool) -> Option<(Missing, u32)> {
        let mut left = self.new.lanes_of(overlap);
        while left != 0 {
            let lane = left & left.wrapping_neg();
            left &= left - 1;
            let bytes = (0..16)
                .map(|byte| 1u16 << byte)
                .filter(|byte| overlap & byte != 0 && self.new.lanes_of(*byte) & lane != 0)
                .fold(0, |mask, byte| mask | byte);
            let view = View { lanes: lane, ..self.view };
            if let Some(missing) = self.context.missing(&view, record, bytes, written) {
                return Some((missing, lane));
            }
        }
        None
    }
}

/// Splits bytes into cells: cell index, first touched byte, byte mask.
#[inline]
fn cells(start: u64, bytes: u32) -> impl Iterator<Item = (u64, u64, u16)> {
    let end = start + u64::from(bytes);
    (start / CELL_BYTES..end.div_ceil(CELL_BYTES)).map(move |cell| {
        let first = start.max(cell * CELL_BYTES);
        let last = end.min((cell + 1) * CELL_BYTES);
        let mask = (1u32 << (last - first)) - 1;
        (cell, first, (mask << (first - cell * CELL_BYTES)) as u16)
    })
}

/// Returns the address of a place in its memory.
#[inline]
fn address(place: Place) -> u64 {
    match place {
        Place::Global(address) => address,
        Place::Shared { offset, .. } => u64::from(offset),
        Place::Tensor { column, .. } => u64::from(column),
    }
}

/// Returns a place at another address of the same memory.
#[inline]
fn at_address(place: Place, address: u64) -> Place {
    match place {
        Place::Global(_) => Place::Global(address),
        Place::Shared { rank, .. } => Place::Shared { rank, offset: address as u32 },
        Place::Tensor { rank, lane, .. } => Place::Tensor { rank, lane, column: address as u32 },
    }
}

/// The shadow memories.
struct Memories<'a> {
    clusters: &'a mut [Cluster],
    global: &'a mut GlobalShadow,
    cluster: u32,
}

impl Memories<'_> {
    #[inline]
    fn touch(&mut self, index: u64, direction: Direction, checker: &mut Checker<'_>) {
        let new = checker.new;
        let (cell, reads_max) = match checker.place {
            Place::Global(_) => (self.global.cell(index), GLOBAL_READS_MAX),
            Place::Shared { rank, .. } => {
                let shared = &mut self.clusters[self.cluster as usize].shared;
                let Some(of_cta) = shared.get_mut(rank as usize) else { return };
                (of_cta.cell(index as usize), SHARED_READS_MAX)
            }
            Place::Tensor { rank, lane, column } => {
                let tensor = &mut self.clusters[self.cluster as usize].tensor;
                let Some(of_cta) = tensor.get_mut(rank as usize) else { return };
                (of_cta.cell(lane / CELL_LANES, column), SHARED_READS_MAX)
            }
        };
        match direction {
            Direction::Read => cell.read(new, reads_max, checker),
            Direction::Write => cell.write(new, checker),
        }
    }

    /// Clears the swizzle pattern of a cell: the layout of a thread's store is unknown.
    #[inline]
    fn stored(&mut self, index: u64, place: Place) {
        if let Place::Shared { rank, .. } = place
            && let Some(shared) = self.clusters[self.cluster as usize].shared.get_mut(rank as usize)
        {
            shared.set_pattern(index as usize, Patterns::default());
        }
    }
}

fn memory_of(place: Place) -> Memory {
    match place {
        Place::Global(address) => Memory::Global(address),
        Place::Shared { .. } => Memory::Shared,
        Place::Tensor { .. } => Memory::Tensor,
    }
}

impl Tracker {
    /// Reports loads or stores of some lanes: `bytes` bytes at each lane's place. `strong` is the
    /// scope of a strong access (`.relaxed`, `.acquire`, `.release`; `.volatile` with
    /// [`Scope::System`]; atomic operations with [`Direction::Write`]). Neighboring lanes must be
    /// in order; lanes outside of `thread.lanes` are ignored.
    pub fn access(
        &mut self,
        thread: Thread,
        direction: Direction,
        strong: Option<Scope>,
        bytes: u32,
        places: &[(u32, Place)],
    ) {
        let Tracker { warps, clusters, operations, global, rules, .. } = self;
        let warp = &warps[thread.warp.0 as usize];
        let mut memories = Memories { clusters, global, cluster: warp.cluster };
        let context = Context { rules: *rules, warps, operations };
        let strong = strong.map_or(0, |scope| level(scope) as u8 + 1);
        let mut found = Vec::new();
        let mut early = None;
        for (mask, state) in &warp.groups {
            let lanes = mask & thread.lanes;
            if lanes == 0 {
                continue;
            }
            let view = View {
                warp: thread.warp,
                lanes,
                tick: warp.tick,
                known: &state.known,
                own: &state.own,
                tensor_pending: &state.tensor_pending,
                operation: None,
                unit: Unit::Thread,
                memory: Memory::Shared,
                strong,
            };
            let (new, place) = (Record::default(), Place::Global(0));
            let mut checker = Checker { context, view, new, place, found: &mut found };
            let mut flush = |pending: &mut Option<(u64, Place, Record)>| {
                let Some((cell, place, new)) = pending.take() else { return };
                checker.view.lanes = match rules.lanes {
                    Lanes::Followed => new.all_lanes(),
                    Lanes::AsOneThread => ALL_LANES,
                };
                checker.view.memory = memory_of(place);
                (checker.new, checker.place) = (new, place);
                memories.touch(cell, direction, &mut checker);
                if direction == Direction::Write {
                    memories.stored(cell, place);
                }
            };
            let mut pending: Option<(u64, Place, Record)> = None;
            for (lane, place) in places.iter().filter(|(lane, _)| lanes >> lane & 1 == 1) {
                if let Some(rank) = other_cta(*place, warp.rank)
                    && state.known.started >> rank & 1 == 0
                {
                    early = Some((*place, 1 << lane));
                }
                for (cell, first, mask) in cells(address(*place), bytes) {
                    if let Some((of, before, record)) = &mut pending
                        && *of == cell
                        && same_memory(*before, *place)
                        && record.absorb(*lane, mask)
                    {
                        continue;
                    }
                    flush(&mut pending);
                    let lanes = 1 << lane;
                    let record =
                        Record::of_warp(thread.warp.0, warp.tick, lanes, thread.step, mask)
                            .with_scope(strong);
                    pending = Some((cell, at_address(*place, first), record));
                }
            }
            flush(&mut pending);
        }
        if let Some((place, lanes)) = early {
            self.report_early((thread.warp, lanes, thread.step, Unit::Thread), direction, place);
        }
        self.report_found(found, (thread.warp, thread.step, Unit::Thread), direction);
    }

    /// Reports an access to memory of a CTA that may not have started.
    fn report_early(
        &mut self,
        later: (WarpId, u32, u32, Unit),
        direction: Direction,
        place: Place,
    ) {
        let (cluster, own_rank) = self.cta(later.0);
        let Some(rank) = other_cta(place, own_rank) else { return };
        let start = (self.warp(cluster, rank, 0), ALL_LANES, u32::MAX, Unit::Thread);
        let kind = HazardKind::PeerNotStarted;
        let later = (later, direction == Direction::Write);
        self.report_pair(kind, (start, true), later, place, || remedy(kind, Unit::Thread));
    }

    /// Reports that an issued operation touches `bytes` bytes at `place`. For tensor memory see
    /// [`Self::access_tensor`].
    pub fn access_operation(
        &mut self,
        operation: Operation,
        direction: Direction,
        place: Place,
        bytes: u32,
    ) {
        if let Place::Tensor { rank, lane, column } = place {
            let columns = column..column + bytes.div_ceil(4);
            self.access_tensor_row(operation, direction, rank, lane, columns);
            return;
        }
        let memory = memory_of(place);
        let cells = cells(address(place), bytes);
        let cells = cells.map(|(cell, first, mask)| (cell, at_address(place, first), mask));
        self.touch_by_operation(operation, direction, memory, None, cells);
    }

    /// Reports the accesses of one lane of a `cp.async`, or of another operation of several
    /// threads.
    pub fn access_operation_lane(
        &mut self,
        operation: Operation,
        direction: Direction,
        lane: u32,
        place: Place,
        bytes: u32,
    ) {
        let memory = memory_of(place);
        let cells = cells(address(place), bytes);
        let cells = cells.map(|(cell, first, mask)| (cell, at_address(place, first), mask));
        self.touch_by_operation(operation, direction, memory, Some(lane), cells);
    }

    /// Reports that an issued operation reads the 128 bytes of a tensor map in global memory. Maps
    /// in parameters or constant memory are immutable and need not be reported.
    pub fn access_tensor_map(&mut self, operation: Operation, address: u64) {
        let warp = self.operations[operation.0 as usize].warp;
        let number = self.warps[warp.0 as usize].streams.number_of_map_read();
        self.operations[operation.0 as usize].map = Some((address, number));
        let cells =
            cells(address, 128).map(|(cell, first, mask)| (cell, Place::Global(first), mask));
        self.touch_by_operation(operation, Direction::Read, Memory::Map(address), None, cells);
    }

    pub(super) fn touch_by_operation(
        &mut self,
        operation: Operation,
        direction: Direction,
        memory: Memory,
        lane: Option<u32>,
        cells: impl Iterator<Item = (u64, Place, u16)>,
    ) {
        let Tracker { warps, clusters, operations, global, rules, .. } = self;
        let info = &operations[operation.0 as usize];
        let Some(snapshot) = &info.view else { return };
        let strong = if info.strong { 3 } else { 0 };
        let cluster = warps[info.warp.0 as usize].cluster;
        let mut memories = Memories { clusters, global, cluster };
        let lanes = lane.map_or(info.lanes, |lane| 1 << lane);
        let view = View {
            warp: info.warp,
            lanes,
            tick: snapshot.tick,
            known: &snapshot.known,
            own: &snapshot.own,
            tensor_pending: &snapshot.tensor_pending,
            operation: Some(operation.0),
            unit: info.unit,
            memory,
            strong,
        };
        let mut found = Vec::new();
        let new = Record::of_operation(operation.0, lanes, 0).with_scope(strong);
        let context = Context { rules: *rules, warps, operations };
        let place = Place::Global(0);
        let mut checker = Checker { context, view, new, place, found: &mut found };
        let (own_rank, started) = (warps[info.warp.0 as usize].rank, snapshot.known.started);
        let mut early = None;
        for (cell, place, mask) in cells {
            if let Some(rank) = other_cta(place, own_rank)
                && started >> rank & 1 == 0
            {
                early = Some(place);
            }
            checker.new.bytes = mask;
            checker.place = place;
            memories.touch(cell, direction, &mut checker);
            let of = pattern::touch(memories.clusters, cluster, place, info.patterns, direction);
            checker.found.extend(of.map(|of| pattern::found(of, lanes, place)));
        }
        let (warp, step, unit) = (info.warp, info.step, info.unit);
        if let Some(place) = early {
            self.report_early((warp, lanes, step, unit), direction, place);
        }
        self.report_found(found, (warp, step, unit), direction);
    }

    /// Records accesses of the previous grid, without checks.
    pub(super) fn record_previous_grid(
        &mut self,
        operation: u32,
        addresses: Range<u64>,
        direction: Direction,
    ) {
        struct Nothing;
        impl Visitor for Nothing {
            fn conflict(&mut self, _: &Record, _: u16, _: bool) {}
            fn supersedes(&self, _: &Record) -> bool {
                false
            }
        }
        let mut start = addresses.start;
        while start < addresses.end {
            let bytes = (addresses.end - start).min(1 << 20) as u32;
            for (cell, _, mask) in cells(start, bytes) {
                let new = Record::of_operation(operation, u32::MAX, mask);
                let cell = self.global.cell(cell);
                match direction {
                    Direction::Read => cell.read(new, GLOBAL_READS_MAX, &mut Nothing),
                    Direction::Write => cell.write(new, &mut Nothing),
                }
            }
            start += u64::from(bytes);
        }
    }

    pub(super) fn report_found(
        &mut self,
        found: Vec<Found>,
        (warp, step, unit): (WarpId, u32, Unit),
        direction: Direction,
    ) {
        for Found { kind, swapped, record, written, lanes, place } in found {
            let mut earlier = (self.record_actor(&record), written);
            let mut later = ((warp, lanes, step, unit), direction == Direction::Write);
            if swapped {
                std::mem::swap(&mut earlier, &mut later);
            }
            let unit_before = earlier.0.3;
            self.report_pair(kind, earlier, later, place, || remedy(kind, unit_before));
        }
    }

    pub(super) fn record_actor(&self, record: &Record) -> (WarpId, u32, u32, Unit) {
        match record.operation() {
            Some(operation) => {
                let info: &OperationInfo = &self.operations[operation as usize];
                (info.warp, info.lanes, info.step, info.unit)
            }
            None => {
                let warp = WarpId(record.warp().unwrap_or(0));
                (warp, record.all_lanes(), record.step, Unit::Thread)
            }
        }
    }
}

/// Returns the CTA rank of a place, if it differs from `own_rank`.
#[inline]
fn other_cta(place: Place, own_rank: u32) -> Option<u32> {
    match place {
        Place::Shared { rank, .. } | Place::Tensor { rank, .. } => {
            (rank != own_rank).then_some(rank)
        }
        Place::Global(_) => None,
    }
}

fn same_memory(a: Place, b: Place) -> bool {
    match (a, b) {
        (Place::Global(_), Place::Global(_)) => true,
        (Place::Shared { rank: a, .. }, Place::Shared { rank: b, .. }) => a == b,
        _ => false,
    }
}

impl Warp {
    /// For tests: the number of lane groups with different knowledge.
    #[cfg(test)]
    pub(super) fn group_count(&self) -> usize {
        self.groups.len()
    }
}
