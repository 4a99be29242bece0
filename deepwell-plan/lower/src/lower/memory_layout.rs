//! Arena layout of a lowered step.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{Arena, ByteRange, MemoryKind, Order, Program, ValueId};

use super::Lowering;
use crate::PlanError;
use crate::arena::{Lifetime, Packing, align, alive_bytes, pack};

impl Lowering<'_> {
    /// Places persistent values, kind by kind. Host inputs of a micro-batch get a copy in every
    /// slot.
    pub(super) fn layout_persistent(&mut self) -> usize {
        let slots = self.passes.slots as usize;
        let host = &self.host;
        let of_micro_batch = [host.tokens, host.targets, host.documents, host.positions];
        let mut offset = 0;
        for kind in MemoryKind::ALL.into_iter().filter(|kind| kind.is_persistent()) {
            for (index, value) in self.values.iter_mut().enumerate() {
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
    pub(super) fn layout_as_in(&mut self, training: &Program) -> Result<usize, PlanError> {
        let ranges: HashMap<&str, ByteRange> = training
            .values
            .iter()
            .filter(|value| value.memory.is_persistent())
            .map(|value| (value.name.as_str(), value.range))
            .collect();
        for value in self.values.iter_mut().filter(|value| value.memory.is_persistent()) {
            match ranges.get(value.name.as_str()) {
                Some(range) if range.bytes == value.range.bytes => value.range = *range,
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

    /// Places the values living within a step. With one slot all values share the transient part of
    /// the arena. With several slots, values living across bodies get a copy in each slot; values
    /// within a body, or made only in the last micro-batch, follow the slots. Returns also the live
    /// bytes of these at each call.
    pub(super) fn layout_transient(
        &mut self,
        transient_offset: usize,
        order: &Order,
    ) -> (Arena, Vec<usize>) {
        let allocations = self.allocations(order);
        let slots = self.passes.slots as usize;
        let made_last = self.made_last();
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
        let behind = transient_offset + stride * slots;
        for (allocation, offset) in crossing.iter().zip(&in_slot.offsets) {
            self.put(allocation.item, transient_offset + offset, stride);
        }
        for (allocation, offset) in local.iter().zip(&shared.offsets) {
            self.put(allocation.item, behind + offset, 0);
        }
        let arena = Arena {
            bytes: behind + shared.bytes,
            transient_offset,
            transient_lower_bound_bytes: slots * in_slot.lower_bound_bytes
                + shared.lower_bound_bytes,
        };
        (arena, alive_bytes(&lifetimes(&local)))
    }

    /// The values, by index, written by calls of the last micro-batch only.
    fn made_last(&self) -> HashSet<usize> {
        let own = self.calls.iter().filter(|call| call.last_only);
        own.flat_map(|call| call.outputs()).map(|output| output.value.index()).collect()
    }

    fn put(&mut self, item: Item, offset: usize, slot_stride_bytes: usize) {
        match item {
            Item::Value(index) => {
                let value = &mut self.values[index];
                value.range.offset = offset;
                value.slot_stride_bytes = slot_stride_bytes;
            }
            Item::Contiguous(index) => {
                let mut next = offset;
                for id in self.transient.contiguous[index].clone() {
                    let value = &mut self.values[id.index()];
                    value.range.offset = next;
                    value.slot_stride_bytes = slot_stride_bytes;
                    next += align(value.range.bytes);
                }
            }
            Item::Workspace(call) => self.calls[call].workspace.offset = offset,
        }
    }

    /// Allocations in the transient part and their lifetimes: values first, then workspaces. A life
    /// ends with the last call that may overlap with the last reader or writer.
    fn allocations(&self, order: &Order) -> Vec<Allocation> {
        let mut of_values: Vec<Option<Allocation>> = vec![None; self.values.len()];
        let mut workspaces = Vec::new();
        for (body, calls) in self.bodies.iter().map(|body| body.calls.clone()).enumerate() {
            for call in calls {
                let last = order.last_beside(call);
                for operand in &self.calls[call].operands {
                    let index = operand.value.index();
                    let bytes = self.values[index].range.bytes;
                    let allocation = of_values[index].get_or_insert(Allocation {
                        item: Item::Value(index),
                        life: Lifetime { bytes, first: call, last },
                        bodies: (body, body),
                    });
                    allocation.life.last = allocation.life.last.max(last);
                    allocation.bodies.1 = body;
                }
                let bytes = self.calls[call].workspace.bytes;
                let life = Lifetime { bytes, first: call, last };
                workspaces.push(Allocation {
                    item: Item::Workspace(call),
                    life,
                    bodies: (body, body),
                });
            }
        }
        let unused = |index| Allocation {
            item: Item::Value(index),
            life: Lifetime { bytes: self.values[index].range.bytes, first: 0, last: 0 },
            bodies: (0, 0),
        };
        let mut is_in_run = vec![false; self.values.len()];
        let mut runs = Vec::with_capacity(self.transient.contiguous.len());
        for (run, ids) in self.transient.contiguous.iter().enumerate() {
            let allocations = ids.iter().filter_map(|id| of_values[id.index()]);
            let bytes = ids.iter().map(|id| align(self.values[id.index()].range.bytes)).sum();
            ids.iter().for_each(|id| is_in_run[id.index()] = true);
            let whole = allocations.reduce(|a, b| Allocation {
                life: Lifetime {
                    first: a.life.first.min(b.life.first),
                    last: a.life.last.max(b.life.last),
                    ..a.life
                },
                bodies: (a.bodies.0.min(b.bodies.0), a.bodies.1.max(b.bodies.1)),
                ..a
            });
            let life = |allocation: Allocation| Lifetime { bytes, ..allocation.life };
            runs.extend(whole.map(|allocation| Allocation {
                item: Item::Contiguous(run),
                life: life(allocation),
                ..allocation
            }));
        }
        let of_values = of_values.into_iter().enumerate();
        of_values
            .filter(|(index, _)| !self.values[*index].memory.is_persistent() && !is_in_run[*index])
            .map(|(index, allocation)| allocation.unwrap_or_else(|| unused(index)))
            .chain(runs)
            .chain(workspaces)
            .collect()
    }
}

/// An item of the transient part of the arena.
#[derive(Clone, Copy, Debug)]
enum Item {
    /// A value, by index.
    Value(usize),
    /// A run of contiguous values, by index.
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

fn lifetimes(allocations: &[Allocation]) -> Vec<Lifetime> {
    allocations.iter().map(|allocation| allocation.life).collect()
}

fn pack_allocations(allocations: &[Allocation]) -> Packing {
    pack(&lifetimes(allocations))
}
