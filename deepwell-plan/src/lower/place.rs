//! Where the values of a lowered step lie in the arena.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{Arena, ByteRange, MemoryKind, Order, Program, ValueId};

use super::Lowering;
use crate::PlanError;
use crate::arena::{Lifetime, Packing, align, pack};

impl Lowering<'_> {
    /// Places what outlives a step, kind by kind; what the host writes for each micro-batch lies in
    /// each slot anew.
    pub(super) fn place_persistent(&mut self) -> usize {
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

    /// Persistent values lie where the training program has them; what it does not have (the
    /// counters of quantizations that only evaluation makes) goes first into the transient part.
    pub(super) fn place_as_in(&mut self, training: &Program) -> Result<usize, PlanError> {
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

    /// Places what lives within a step. With one slot all of it shares the transient part of the
    /// arena; with several, what lives from one body to the next lies in each slot anew, and
    /// behind the slots lies what lives within a body, or is made in the last micro-batch alone.
    pub(super) fn place_transient(&mut self, transient_offset: usize, order: &Order) -> Arena {
        let lives = self.lives(order);
        let slots = self.passes.slots as usize;
        let made_last = self.made_last();
        let crosses = |place: &Place| {
            let is_made_last =
                matches!(place.what, What::Value(index) if made_last.contains(&index));
            slots > 1 && place.bodies.0 != place.bodies.1 && !is_made_last
        };
        let (crossing, local): (Vec<Place>, Vec<Place>) = lives.into_iter().partition(crosses);
        let in_slot = pack_places(&crossing);
        let shared = pack_places(&local);
        let stride = if crossing.is_empty() { 0 } else { in_slot.bytes };
        let behind = transient_offset + stride * slots;
        for (place, offset) in crossing.iter().zip(&in_slot.offsets) {
            self.put(place.what, transient_offset + offset, stride);
        }
        for (place, offset) in local.iter().zip(&shared.offsets) {
            self.put(place.what, behind + offset, 0);
        }
        Arena {
            bytes: behind + shared.bytes,
            transient_offset,
            transient_lower_bound_bytes: slots * in_slot.lower_bound_bytes
                + shared.lower_bound_bytes,
        }
    }

    /// The values, by index, that calls of the last micro-batch alone make.
    fn made_last(&self) -> HashSet<usize> {
        let own = self.calls.iter().filter(|call| call.last_only);
        own.flat_map(|call| call.outputs()).map(|output| output.value.index()).collect()
    }

    fn put(&mut self, what: What, offset: usize, slot_stride_bytes: usize) {
        match what {
            What::Value(index) => {
                let value = &mut self.values[index];
                value.range.offset = offset;
                value.slot_stride_bytes = slot_stride_bytes;
            }
            What::Run(index) => {
                let mut next = offset;
                for id in self.passing.together[index].clone() {
                    let value = &mut self.values[id.index()];
                    value.range.offset = next;
                    value.slot_stride_bytes = slot_stride_bytes;
                    next += align(value.range.bytes);
                }
            }
            What::Workspace(call) => self.calls[call].workspace.offset = offset,
        }
    }

    /// What wants bytes of the transient part and from which call to which: values first, then
    /// workspaces. A life ends with the last call that may run beside its last user.
    fn lives(&self, order: &Order) -> Vec<Place> {
        let mut of_values: Vec<Option<Place>> = vec![None; self.values.len()];
        let mut workspaces = Vec::new();
        for (body, calls) in self.bodies.iter().map(|body| body.calls.clone()).enumerate() {
            for call in calls {
                let last = order.last_beside(call);
                for operand in &self.calls[call].operands {
                    let index = operand.value.index();
                    let bytes = self.values[index].range.bytes;
                    let place = of_values[index].get_or_insert(Place {
                        what: What::Value(index),
                        life: Lifetime { bytes, first: call, last },
                        bodies: (body, body),
                    });
                    place.life.last = place.life.last.max(last);
                    place.bodies.1 = body;
                }
                let bytes = self.calls[call].workspace.bytes;
                let life = Lifetime { bytes, first: call, last };
                workspaces.push(Place { what: What::Workspace(call), life, bodies: (body, body) });
            }
        }
        let unused = |index| Place {
            what: What::Value(index),
            life: Lifetime { bytes: self.values[index].range.bytes, first: 0, last: 0 },
            bodies: (0, 0),
        };
        let mut is_of_run = vec![false; self.values.len()];
        let mut runs = Vec::with_capacity(self.passing.together.len());
        for (run, ids) in self.passing.together.iter().enumerate() {
            let places = ids.iter().filter_map(|id| of_values[id.index()]);
            let bytes = ids.iter().map(|id| align(self.values[id.index()].range.bytes)).sum();
            ids.iter().for_each(|id| is_of_run[id.index()] = true);
            let whole = places.reduce(|a, b| Place {
                life: Lifetime {
                    first: a.life.first.min(b.life.first),
                    last: a.life.last.max(b.life.last),
                    ..a.life
                },
                bodies: (a.bodies.0.min(b.bodies.0), a.bodies.1.max(b.bodies.1)),
                ..a
            });
            let life = |place: Place| Lifetime { bytes, ..place.life };
            runs.extend(whole.map(|place| Place {
                what: What::Run(run),
                life: life(place),
                ..place
            }));
        }
        let of_values = of_values.into_iter().enumerate();
        of_values
            .filter(|(index, _)| !self.values[*index].memory.is_persistent() && !is_of_run[*index])
            .map(|(index, place)| place.unwrap_or_else(|| unused(index)))
            .chain(runs)
            .chain(workspaces)
            .collect()
    }
}

/// Something that lies in the transient part of the arena.
#[derive(Clone, Copy, Debug)]
enum What {
    /// A value, by index.
    Value(usize),
    /// Values one behind the other, by index among those.
    Run(usize),
    /// The scratch of a call, by index.
    Workspace(usize),
}

#[derive(Clone, Copy, Debug)]
struct Place {
    what: What,
    life: Lifetime,
    /// First and last body that use it.
    bodies: (usize, usize),
}

fn pack_places(places: &[Place]) -> Packing {
    let lives: Vec<Lifetime> = places.iter().map(|place| place.life).collect();
    pack(&lives)
}
