//! Rules of a program, checked when a program is made, read or run.

mod buckets;
mod copies;
mod data_flow;
mod handover;
mod last_only;
mod offloaded;
mod races;
mod reduced;
mod schedule;

use std::collections::HashSet;

use self::offloaded::Homes;
use super::{Access, ByteRange, Call, Operand, Order, Program, Value, ValueId};
use crate::ops::{Collective, CollectiveKind};
use crate::{Accumulate, Binding, IrError, Op, OperandType};

/// Alignment of every value and workspace: a cache line, sufficient for vector loads and bulk
/// copies.
pub const ALIGNMENT_BYTES: usize = 64;

/// Checks that
/// - value and call names are unique, ids in range, ranges inside the arena, aligned and as long as
///   the shape requires;
/// - persistent values overlap with no other memory, and offloaded values are copied for each use;
/// - operands of one call and its workspace do not overlap, unless both are only read;
/// - every transient operand is written before it is read, and not overwritten in between;
/// - bodies cover all calls, events are recorded before any wait, and two calls that use the same
///   bytes, unless both only read, are ordered;
/// - the schedule runs each micro-batch forward and then backward in one slot, and values that live
///   between passes have a range in each slot;
/// - with transfers between bodies, each body has received its inputs before it begins, in a place
///   that was free and exclusive;
/// - calls of only the last micro-batch run after all earlier passes, and no call of other
///   micro-batches reads their results;
/// - the optimizer updates each parameter with a gradient once, in buckets whose operands are
///   consecutive and match the named parameters;
/// - a step skips exactly the weight copies that the optimizer's calls write;
/// - the target's groups contain the program's rank, and a collective covers all ranks of one
///   group, with operands of matching sizes; the tensors of a bucket are consecutive;
/// - if several ranks split the batches of a step, each gradient is summed over these ranks once,
///   before the optimizer uses it.
///
/// # Errors
/// [`IrError::Program`] naming the first offender.
pub fn verify_program(program: &Program) -> Result<(), IrError> {
    let check = Check { program };
    check
        .ranks()
        .and_then(|()| check.values())
        .and_then(|()| check.interface())
        .and_then(|()| check.calls())
        .and_then(|()| {
            let order = Order::of(&program.calls, &program.bodies)?;
            data_flow::check(program)?;
            races::check(program, &order)?;
            schedule::check(program)?;
            handover::check(program)?;
            last_only::check(program)?;
            offloaded::check(program)?;
            let homes = Homes::of(program);
            buckets::check(program, &homes)?;
            copies::check(program, &homes)?;
            reduced::check(program)
        })
        .map_err(|what| IrError::Program { program: program.name.clone(), what })
}

struct Check<'a> {
    program: &'a Program,
}

impl Check<'_> {
    fn ranks(&self) -> Result<(), String> {
        let Program { rank, target, .. } = self.program;
        target.ranks.check()?;
        if *rank != target.ranks.rank {
            return Err(format!("it is for rank {rank}, its target is rank {}", target.ranks.rank));
        }
        Ok(())
    }

    fn collective(&self, call: &Call, collective: &Collective) -> Result<(), String> {
        let refuse = |what: String| Err(format!("call `{}`: {what}", call.name));
        let ranks = &self.program.target.ranks;
        let Some(group) = ranks.group(collective.group) else {
            let (id, count) = (collective.group.0, ranks.groups.len());
            return refuse(format!("it is among group {id}, its target has {count} groups"));
        };
        if group.ranks.len() != collective.ranks as usize {
            let (name, size) = (&group.name, group.ranks.len());
            let ranks = collective.ranks;
            return refuse(format!("it is among {ranks} ranks, group `{name}` has {size}"));
        }
        let types = |operands: &[Operand]| -> Vec<OperandType> {
            let values = operands.iter().map(|operand| self.program.value(operand.value));
            values.map(|v| OperandType { dtype: v.dtype, shape: v.shape.clone() }).collect()
        };
        let (inputs, outputs) = (types(call.inputs()), types(call.outputs()));
        if let Err(error) = collective.check(&inputs, &outputs) {
            return refuse(error.to_string());
        }
        if collective.bucket.is_some() && !collective.each {
            self.bucket(call, collective).or_else(refuse)?;
        }
        if let CollectiveKind::Recv { shape, .. } = &collective.kind {
            let binding = Binding { batch: self.program.batch, seq: self.program.seq };
            let (expected, got) = (shape.bind(&binding), &outputs[0].shape);
            if expected != *got {
                return refuse(format!("it receives {expected:?} into {got:?}"));
            }
        }
        Ok(())
    }

    /// Checks that the tensors of a bucket are consecutive and as long as the slices of all ranks;
    /// an all-reduce updates them.
    fn bucket(&self, call: &Call, collective: &Collective) -> Result<(), String> {
        let (bucket, slice) = match collective.kind {
            CollectiveKind::AllGather => (call.outputs(), call.inputs().first()),
            CollectiveKind::ReduceScatter { .. } => (call.inputs(), call.outputs().first()),
            _ => (call.inputs(), None),
        };
        let range = |operand: &Operand| self.program.value(operand.value).range;
        let ranges: Vec<ByteRange> = bucket.iter().map(range).collect();
        let Some(span) = ByteRange::spanning(&ranges) else {
            return Err("expected tensors one behind the other in its bucket".to_string());
        };
        let is_all_reduce = matches!(collective.kind, CollectiveKind::AllReduce { .. });
        if is_all_reduce && bucket.iter().any(|operand| operand.access != Access::Update) {
            return Err("expected a bucket that is updated".to_string());
        }
        let Some(slice) = slice else { return Ok(()) };
        let expected = range(slice).bytes * collective.ranks as usize;
        // An accumulating reduce-scatter pads the slices with zeros itself.
        let is_filled_up = call.accumulate == Accumulate::AfterFirst;
        match span.bytes.next_multiple_of(ALIGNMENT_BYTES) {
            bytes if bytes == expected || is_filled_up && bytes < expected => Ok(()),
            bytes => Err(format!("expected a bucket of {expected} bytes, got {bytes}")),
        }
    }

    fn values(&self) -> Result<(), String> {
        let mut names = HashSet::new();
        for value in &self.program.values {
            if !names.insert(value.name.as_str()) {
                return Err(format!("two values are named `{}`", value.name));
            }
            let bytes = value.storage_bytes().ok_or_else(|| {
                format!("value `{}` has more elements than memory has bytes", value.name)
            })?;
            if value.range.bytes != bytes {
                return Err(format!(
                    "value `{}` of {} bytes lies in {}",
                    value.name, bytes, value.range.bytes
                ));
            }
            self.range(&value.range, &value.name)?;
            self.slots(value)?;
            let in_transient = value.range.offset >= self.program.arena.transient_offset;
            if value.range.bytes > 0 && in_transient == value.memory.is_persistent() {
                return Err(format!(
                    "value `{}` ({}) lies in the wrong part of the arena",
                    value.name,
                    value.memory.name()
                ));
            }
        }
        let transient_offset = self.program.arena.transient_offset;
        let mut persistent: Vec<&Value> =
            self.program.values.iter().filter(|v| v.memory.is_persistent()).collect();
        persistent.sort_by_key(|value| value.range.offset);
        let last_slot = self.program.slots.saturating_sub(1);
        let end = |value: &Value| value.range_in(last_slot).end();
        if let Some(value) = persistent.iter().find(|value| end(value) > transient_offset) {
            return Err(format!(
                "value `{}` ({}) reaches into the transient part of the arena",
                value.name,
                value.memory.name()
            ));
        }
        for pair in persistent.windows(2) {
            let bytes = end(pair[0]) - pair[0].range.offset;
            if (ByteRange { bytes, ..pair[0].range }).overlaps(&pair[1].range) {
                return Err(format!("`{}` and `{}` overlap", pair[0].name, pair[1].name));
            }
        }
        Ok(())
    }

    fn range(&self, range: &ByteRange, name: &str) -> Result<(), String> {
        if range.end() > self.program.arena.bytes {
            return Err(format!("`{name}` ends at {} outside the arena", range.end()));
        }
        if !range.offset.is_multiple_of(ALIGNMENT_BYTES) {
            return Err(format!("`{name}` starts at {}, not aligned", range.offset));
        }
        Ok(())
    }

    /// Checks that the ranges of a value in all slots are disjoint and inside the arena.
    fn slots(&self, value: &Value) -> Result<(), String> {
        let (stride, slots) = (value.slot_stride_bytes, self.program.slots as usize);
        if stride == 0 || slots < 2 {
            return Ok(());
        }
        let apart = stride >= value.range.bytes && stride.is_multiple_of(ALIGNMENT_BYTES);
        let end = (slots - 1).checked_mul(stride).and_then(|at| at.checked_add(value.range.end()));
        if !apart || end.is_none_or(|end| end > self.program.arena.bytes) {
            return Err(format!(
                "`{}` of {} bytes has slots of {stride} bytes, which overlap or leave the arena",
                value.name, value.range.bytes
            ));
        }
        Ok(())
    }

    fn ids(&self, who: &str, ids: impl IntoIterator<Item = ValueId>) -> Result<(), String> {
        let count = self.program.values.len();
        match ids.into_iter().find(|id| id.index() >= count) {
            Some(id) => Err(format!("{who} names value {}, there are {count}", id.0)),
            None => Ok(()),
        }
    }

    fn interface(&self) -> Result<(), String> {
        let host = &self.program.host;
        let statistics = host.statistics.iter().map(|(_, id)| id);
        let others = [&host.tokens, &host.targets, &host.loss_scale, &host.schedule]
            .into_iter()
            .chain([&host.counters, &host.loss, &host.grad_norm, &host.rounding_key])
            .chain([&host.documents, &host.positions])
            .flatten();
        self.ids("the host interface", statistics.chain(others).copied())?;
        for (index, shard) in self.program.shards.iter().enumerate() {
            let ids = [shard.master, shard.first_moment, shard.second_moment];
            self.ids(&format!("shard {index}"), ids)?;
        }
        for state in &self.program.parameters {
            let kept = [state.first_moment, state.second_moment, state.gradient];
            let ids = [Some(state.master.value())].into_iter().chain(kept).flatten();
            self.ids(&format!("parameter `{}`", state.name), ids)?;
        }
        Ok(())
    }

    fn calls(&self) -> Result<(), String> {
        let mut names = HashSet::new();
        for call in &self.program.calls {
            if !names.insert(call.name.as_str()) {
                return Err(format!("two calls are named `{}`", call.name));
            }
            if call.input_count > call.operands.len() {
                return Err(format!("call `{}` has too few operands", call.name));
            }
            if call.workspace.bytes != call.choice.workspace_bytes {
                return Err(format!(
                    "call `{}` has {} bytes of workspace, its kernel wants {}",
                    call.name, call.workspace.bytes, call.choice.workspace_bytes
                ));
            }
            self.range(&call.workspace, &call.name)?;
            let in_persistent = call.workspace.offset < self.program.arena.transient_offset;
            if call.workspace.bytes > 0 && in_persistent {
                return Err(format!(
                    "workspace of `{}` reaches into the persistent part of the arena",
                    call.name
                ));
            }
            let ids = call.operands.iter().map(|operand| operand.value);
            self.ids(&format!("call `{}`", call.name), ids)?;
            self.overlaps(call)?;
            if let Op::Collective(collective) = &call.op {
                self.collective(call, collective)?;
            }
        }
        Ok(())
    }

    /// Checks that overlapping operands are only read, and that the workspace overlaps with none.
    /// Sorted by offset, each range is compared only with the earlier range that ends last, because
    /// an optimizer call has thousands of operands.
    fn overlaps(&self, call: &Call) -> Result<(), String> {
        let operands = call
            .operands
            .iter()
            .map(|it| (self.program.value(it.value).range, it.access == Access::Read));
        let mut used: Vec<(ByteRange, bool, usize)> = operands
            .chain([(call.workspace, false)])
            .enumerate()
            .map(|(index, (range, only_reads))| (range, only_reads, index))
            .filter(|(range, ..)| range.bytes > 0)
            .collect();
        used.sort_unstable_by_key(|(range, _, index)| (range.offset, *index));
        // Ends and indices of the ranges that end last: among all, and among written ones.
        let mut furthest = [(0, 0); 2];
        for (range, only_reads, index) in used {
            let (end, other) = furthest[usize::from(only_reads)];
            if range.offset < end {
                return Err(self.overlap(call, index.min(other), index.max(other)));
            }
            for of_kind in &mut furthest[..if only_reads { 1 } else { 2 }] {
                *of_kind = (range.end(), index).max(*of_kind);
            }
        }
        Ok(())
    }

    fn overlap(&self, call: &Call, first: usize, second: usize) -> String {
        let name = |index: usize| &self.program.value(call.operands[index].value).name;
        if second == call.operands.len() {
            return format!("call `{}`: workspace overlaps operand `{}`", call.name, name(first));
        }
        let (first, second) = (name(first), name(second));
        format!("call `{}`: operands `{first}` and `{second}` overlap", call.name)
    }
}
