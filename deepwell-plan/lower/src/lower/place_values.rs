//! Places the values of a lowered program in its arena: a pass over the finished calls.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{Arena, ByteRange, IrError, MemoryKind, Order, Program, ValueId};

use crate::PlanError;
use crate::arena::{Lifetime, Packing, align, alive_bytes, pack};

/// Places all values and workspaces of `program`, and sets its arena. The values of each list in
/// `contiguous` lie one after the other. An evaluation has the persistent values of `training` in
/// the same place. Returns the live bytes at each call, of the transient values outside of slots.
///
/// # Errors
/// Calls in an impossible order, or persistent values that `training` does not have.
pub(super) fn place_values(
    program: &mut Program,
    contiguous: &[Vec<ValueId>],
    training: Option<&Program>,
) -> Result<Vec<usize>, PlanError> {
    let transient_offset = match training {
        None => place_persistent(program),
        Some(training) => place_as_in(program, training)?,
    };
    let host_bytes = match training {
        None => program.values_of(MemoryKind::Offloaded).map(|it| align(it.range.end())).max(),
        Some(training) => Some(training.arena.host_bytes),
    };
    let order = Order::of(&program.calls, &program.bodies)
        .map_err(|what| IrError::Program { program: program.name.clone(), what })?;
    program.arena.host_bytes = host_bytes.unwrap_or(0);
    Ok(place_transient(program, contiguous, transient_offset, &order))
}

/// Places persistent values, kind by kind. Host inputs of a micro-batch get a copy in every slot.
/// Returns the end of the persistent part.
fn place_persistent(program: &mut Program) -> usize {
    let slots = program.slots as usize;
    let host = &program.host;
    let of_micro_batch =
        [host.tokens, host.targets, host.documents, host.positions, host.rounding_key];
    let mut offset = 0;
    for kind in MemoryKind::ALL.into_iter().filter(|kind| kind.is_persistent()) {
        for (index, value) in program.values.iter_mut().enumerate() {
            if value.memory != kind {
                continue;
            }
            value.range.offset = offset;
            let bytes = align(value.range.bytes);
            if slots > 1 && of_micro_batch.contains(&Some(ValueId(index as u32))) {
                value.slot_stride_bytes = bytes;
                offset += slots * bytes;
            } else {
                offset += bytes;
            }
        }
    }
    offset
}

/// Places persistent values as in the training program. Values missing there (counters of
/// quantizations only in the evaluation) move to the transient part.
fn place_as_in(program: &mut Program, training: &Program) -> Result<usize, PlanError> {
    let ranges: HashMap<&str, (ByteRange, MemoryKind)> = training
        .values
        .iter()
        .filter(|value| value.memory.is_persistent())
        .map(|value| (value.name.as_str(), (value.range, value.memory)))
        .collect();
    for value in program.values.iter_mut().filter(|value| value.memory.is_persistent()) {
        match ranges.get(value.name.as_str()) {
            Some(&(range, memory)) if range.bytes == value.range.bytes => {
                (value.range, value.memory) = (range, memory);
            }
            _ if value.memory == MemoryKind::Host => value.memory = MemoryKind::Activations,
            _ => {
                return Err(PlanError::Request {
                    what: "evaluation program",
                    expected: format!("value `{}` in the training program", value.name),
                    got: "none of that size".to_string(),
                });
            }
        }
    }
    Ok(training.arena.transient_offset)
}

/// Moves the persistent values of a program to their places in `training`, a program of the same
/// plan with fewer host values. Further host values follow those of `training`. Transient values
/// stay.
///
/// # Errors
/// A value that outlives a step and is not in `training`, or has another size there.
pub fn place_state_as(program: &mut Program, training: &Program) -> Result<(), PlanError> {
    let persistent = |program: &Program| {
        let values = program.values.iter().filter(|value| value.memory.is_persistent());
        values.map(|value| (value.name.clone(), value.range)).collect::<HashMap<_, _>>()
    };
    let ranges = persistent(training);
    let mut end = training.arena.transient_offset;
    for value in program.values.iter_mut().filter(|value| value.memory.is_persistent()) {
        let (memory, bytes) = (value.memory, value.range.bytes);
        match ranges.get(&value.name) {
            Some(range) if range.bytes == bytes => value.range = *range,
            None if memory == MemoryKind::Host => {
                value.range.offset = end;
                end += align(bytes);
            }
            _ => return Err(other_state(&value.name, bytes)),
        }
    }
    // A slot has its copies of host inputs within the persistent part of both programs.
    match end <= program.arena.transient_offset {
        true => Ok(()),
        false => Err(other_state("persistent part", end)),
    }
}

fn other_state(name: &str, bytes: usize) -> PlanError {
    PlanError::Request {
        what: "program with the state of the training program",
        expected: format!("`{name}` as in the training program"),
        got: format!("{bytes} bytes"),
    }
}

/// Places the values living within a step. With one slot all values share the transient part of the
/// arena. With several slots, values living across bodies get a copy in each slot; values within a
/// body, or made only in the last micro-batch, follow the slots.
fn place_transient(
    program: &mut Program,
    contiguous: &[Vec<ValueId>],
    transient_offset: usize,
    order: &Order,
) -> Vec<usize> {
    let allocations = allocations(program, contiguous, order);
    let slots = program.slots as usize;
    let made_last = made_last(program);
    let crosses = |allocation: &Allocation| {
        let is_made_last =
            matches!(allocation.item, Item::Value(index) if made_last.contains(&index));
        slots > 1 && allocation.bodies.0 != allocation.bodies.1 && !is_made_last
    };
    let (crossing, local): (Vec<Allocation>, Vec<Allocation>) =
        allocations.into_iter().partition(crosses);
    let in_slot = pack_allocations(&crossing);
    let shared = pack_allocations(&local);
    let stride = if crossing.is_empty() { 0 } else { in_slot.bytes };
    let after_slots = transient_offset + stride * slots;
    for (allocation, offset) in crossing.iter().zip(&in_slot.offsets) {
        put(program, contiguous, allocation.item, transient_offset + offset, stride);
    }
    for (allocation, offset) in local.iter().zip(&shared.offsets) {
        put(program, contiguous, allocation.item, after_slots + offset, 0);
    }
    program.arena = Arena {
        bytes: after_slots + shared.bytes,
        host_bytes: program.arena.host_bytes,
        transient_offset,
        transient_lower_bound_bytes: slots * in_slot.lower_bound_bytes + shared.lower_bound_bytes,
    };
    alive_bytes(&lifetimes(&local))
}

/// The values, by index, written by calls of the last micro-batch only.
fn made_last(program: &Program) -> HashSet<usize> {
    let calls = program.calls.iter().filter(|call| call.last_only);
    calls.flat_map(|call| call.outputs()).map(|output| output.value.index()).collect()
}

fn put(
    program: &mut Program,
    contiguous: &[Vec<ValueId>],
    item: Item,
    offset: usize,
    slot_stride_bytes: usize,
) {
    match item {
        Item::Value(index) => {
            let value = &mut program.values[index];
            value.range.offset = offset;
            value.slot_stride_bytes = slot_stride_bytes;
        }
        Item::Contiguous(index) => {
            let mut next = offset;
            for id in &contiguous[index] {
                let value = &mut program.values[id.index()];
                value.range.offset = next;
                value.slot_stride_bytes = slot_stride_bytes;
                next += align(value.range.bytes);
            }
        }
        Item::Workspace(call) => program.calls[call].workspace.offset = offset,
    }
}

/// Allocations in the transient part and their lifetimes: values, then lists of contiguous values,
/// then workspaces. A life ends with the last call that may overlap with the last reader or writer.
fn allocations(program: &Program, contiguous: &[Vec<ValueId>], order: &Order) -> Vec<Allocation> {
    let (mut of_values, workspaces) = allocations_of_calls(program, order);
    let is_transient = |index: usize| !program.values[index].memory.is_persistent();
    let mut is_in_list = vec![false; program.values.len()];
    let mut lists = Vec::with_capacity(contiguous.len());
    for (index, ids) in contiguous.iter().enumerate() {
        let allocations = ids.iter().filter_map(|id| of_values[id.index()]);
        let bytes = ids.iter().map(|id| align(program.value(*id).range.bytes)).sum();
        ids.iter().for_each(|id| is_in_list[id.index()] = true);
        lists.extend(allocations.reduce(Allocation::join).map(|joined| Allocation {
            item: Item::Contiguous(index),
            life: Lifetime { bytes, ..joined.life },
            ..joined
        }));
    }
    for (index, allocation) in of_values.iter_mut().enumerate() {
        let bytes = program.values[index].range.bytes;
        // No call uses the value.
        allocation.get_or_insert(Allocation {
            item: Item::Value(index),
            life: Lifetime { bytes, first: 0, last: 0 },
            bodies: (0, 0),
        });
    }
    let apart = (0..program.values.len()).filter(|&at| is_transient(at) && !is_in_list[at]);
    apart.filter_map(|at| of_values[at]).chain(lists).chain(workspaces).collect()
}

/// The allocation of each value that a call uses, and of the workspaces of all calls.
fn allocations_of_calls(
    program: &Program,
    order: &Order,
) -> (Vec<Option<Allocation>>, Vec<Allocation>) {
    let mut of_values: Vec<Option<Allocation>> = vec![None; program.values.len()];
    let mut workspaces = Vec::new();
    for (body, calls) in program.bodies.iter().map(|body| body.calls.clone()).enumerate() {
        for call in calls {
            let last = order.last_beside(call);
            let allocation = |item, bytes| Allocation {
                item,
                life: Lifetime { bytes, first: call, last },
                bodies: (body, body),
            };
            for operand in &program.calls[call].operands {
                let index = operand.value.index();
                let bytes = program.values[index].range.bytes;
                let known =
                    of_values[index].get_or_insert_with(|| allocation(Item::Value(index), bytes));
                known.life.last = known.life.last.max(last);
                known.bodies.1 = body;
            }
            let bytes = program.calls[call].workspace.bytes;
            workspaces.push(allocation(Item::Workspace(call), bytes));
        }
    }
    (of_values, workspaces)
}

/// An item of the transient part of the arena.
#[derive(Clone, Copy, Debug)]
enum Item {
    /// A value, by index.
    Value(usize),
    /// A list of contiguous values, by index.
    Contiguous(usize),
    /// The scratch of a call, by index.
    Workspace(usize),
}

#[derive(Clone, Copy, Debug)]
struct Allocation {
    item: Item,
    life: Lifetime,
    /// First and last body using the item.
    bodies: (usize, usize),
}

impl Allocation {
    /// An allocation that lives as long as both.
    fn join(self, other: Allocation) -> Allocation {
        let (a, b) = (self.life, other.life);
        let bodies = (self.bodies.0.min(other.bodies.0), self.bodies.1.max(other.bodies.1));
        let life = Lifetime { first: a.first.min(b.first), last: a.last.max(b.last), ..a };
        Allocation { life, bodies, ..self }
    }
}

fn lifetimes(allocations: &[Allocation]) -> Vec<Lifetime> {
    allocations.iter().map(|allocation| allocation.life).collect()
}

fn pack_allocations(allocations: &[Allocation]) -> Packing {
    pack(&lifetimes(allocations))
}
