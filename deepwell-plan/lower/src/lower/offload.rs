//! Moves the optimizer's state to host memory: a pass over the finished calls, before their streams
//! are assigned.
//!
//! A call uses a copy of an offloaded value: fetched from the host before the call, and stored to
//! the host after a change. The copies of a layer's calls are fetched one layer ahead, so that the
//! link is busy while the device computes.

use std::collections::{BTreeSet, HashMap, HashSet};

use deepwell_ir::ops::{HostCopy, HostCopyDirection};
use deepwell_ir::{
    Access, Body, Call, MemoryKind, Op, Operand, ParameterState, Phase, Shard, ValueId,
};

use super::builder::{NewCall, ProgramBuilder, read, write};
use super::lowering::Lowering;
use crate::PlanError;

/// The least size of an offloaded value. A smaller copy takes no less time: the latency of a copy
/// over PCI Express is about that of 32 KiB.
const OFFLOADED_BYTES_MIN: usize = 32 << 10;

impl Lowering<'_> {
    /// Offloads the masters and moments that no forward or backward call reads.
    pub(super) fn offload_state(&mut self) -> Result<(), PlanError> {
        if !self.rank.plan.optimizer.on_host {
            return Ok(());
        }
        let offloaded = offloaded(&self.build, &self.parameters.states, &self.zero.shards);
        for &value in &offloaded {
            self.build.values[value.index()].memory = MemoryKind::Offloaded;
        }
        let calls = std::mem::take(&mut self.build.calls);
        let bodies = std::mem::take(&mut self.build.bodies);
        let mut copies = Copies { build: &mut self.build, offloaded, count: HashMap::new() };
        for Body { phase, chunk, calls: range } in bodies {
            copies.body(&calls[range])?;
            copies.build.end_body(phase, chunk);
        }
        Ok(())
    }
}

/// Masters and moments used by updates and weight copies alone.
fn offloaded(
    build: &ProgramBuilder<'_>,
    states: &[ParameterState],
    shards: &[Shard],
) -> BTreeSet<ValueId> {
    let of_state = |state: &ParameterState| {
        [Some(state.master.value()), state.first_moment, state.second_moment].into_iter().flatten()
    };
    let of_shard = |shard: &Shard| [shard.master, shard.first_moment, shard.second_moment];
    let all = states.iter().flat_map(of_state).chain(shards.iter().flat_map(of_shard));
    let is_state = |id: &ValueId| {
        let value = &build.values[id.index()];
        value.memory == MemoryKind::Optimizer && value.range.bytes >= OFFLOADED_BYTES_MIN
    };
    let mut offloaded: BTreeSet<ValueId> = all.filter(is_state).collect();
    for call in build.calls.iter().filter(|call| !uses_copies(call)) {
        for operand in &call.operands {
            offloaded.remove(&operand.value);
        }
    }
    offloaded
}

/// Whether a call runs so seldom that its operands may be copied from the host: once a step, or in
/// the steps that measure products.
fn uses_copies(call: &Call) -> bool {
    matches!(call.phase, Phase::Optimizer | Phase::Weights)
        || matches!(call.op, Op::AdamW(_) | Op::ProductError(_) | Op::SampleOperand(_))
}

/// The copy of an offloaded value for a group of calls.
struct Copied {
    value: ValueId,
    /// The name of the offloaded value, numbered if there are several copies.
    name: String,
}

/// Writes the calls of a program again, with copies.
struct Copies<'a, 'b> {
    build: &'a mut ProgramBuilder<'b>,
    offloaded: BTreeSet<ValueId>,
    /// Number of copies of each value so far, for their names.
    count: HashMap<ValueId, usize>,
}

impl Copies<'_, '_> {
    fn body(&mut self, calls: &[Call]) -> Result<(), PlanError> {
        let groups: Vec<&[Call]> = calls.chunk_by(|a, b| self.is_one_group(a, b)).collect();
        let mut fetched = match groups.first() {
            Some(first) => self.fetch(first)?,
            None => return Ok(()),
        };
        for (at, group) in groups.iter().enumerate() {
            let next = match groups.get(at + 1) {
                Some(next) => self.fetch(next)?,
                None => HashMap::new(),
            };
            for call in *group {
                self.call(call, &fetched)?;
            }
            fetched = next;
        }
        Ok(())
    }

    /// Whether the operands of two consecutive calls are fetched together: calls of a layer, or
    /// calls outside of passes with a common operand.
    fn is_one_group(&self, a: &Call, b: &Call) -> bool {
        match a.phase {
            Phase::Optimizer | Phase::Weights => {
                let of_a: HashSet<ValueId> = self.uses(a).collect();
                self.uses(b).any(|value| of_a.contains(&value))
            }
            _ => a.layer == b.layer,
        }
    }

    fn uses(&self, call: &Call) -> impl Iterator<Item = ValueId> {
        let values = call.operands.iter().map(|operand| operand.value);
        values.filter(|value| self.offloaded.contains(value))
    }

    /// Adds calls that fetch the offloaded operands of a group. Returns the copy of each.
    fn fetch(&mut self, group: &[Call]) -> Result<HashMap<ValueId, Copied>, PlanError> {
        let mut copies = HashMap::new();
        for call in group {
            for home in self.uses(call).collect::<Vec<_>>() {
                if copies.contains_key(&home) {
                    continue;
                }
                let number = self.count.entry(home).or_default();
                *number += 1;
                let suffix = if *number > 1 { format!(".{number}") } else { String::new() };
                let value = &self.build.values[home.index()];
                let name = format!("{}{suffix}", value.name);
                let (dtype, shape) = (value.dtype, value.shape.clone());
                let memory = MemoryKind::Activations;
                let copy = self.build.add(format!("on_device.{name}"), dtype, shape, memory);
                let users = group.iter().filter(|call| self.uses(call).any(|value| value == home));
                let users: Vec<&Call> = users.collect();
                let ends = (read(home), write(copy));
                self.copy(&format!("fetch.{name}"), HostCopyDirection::ToDevice, &users, ends)?;
                copies.insert(home, Copied { value: copy, name });
            }
        }
        Ok(copies)
    }

    /// Adds a call that uses copies of its offloaded operands, and stores the changed ones.
    fn call(&mut self, call: &Call, copies: &HashMap<ValueId, Copied>) -> Result<(), PlanError> {
        let on_device = |operand: &Operand| Operand {
            value: copies.get(&operand.value).map_or(operand.value, |copied| copied.value),
            access: operand.access,
        };
        let operands = call.operands.iter().map(on_device).collect();
        self.build.calls.push(Call { operands, ..call.clone() });
        for operand in call.operands.iter().filter(|operand| operand.access != Access::Read) {
            let home = operand.value;
            let Some(Copied { value, name }) = copies.get(&home) else { continue };
            let ends = (read(*value), write(home));
            self.copy(&format!("store.{name}"), HostCopyDirection::ToHost, &[call], ends)?;
        }
        Ok(())
    }

    /// Adds a copy that runs whenever one of `users` does.
    fn copy(
        &mut self,
        name: &str,
        direction: HostCopyDirection,
        users: &[&Call],
        (from, to): (Operand, Operand),
    ) -> Result<(), PlanError> {
        let Some(first) = users.first() else { return Ok(()) };
        let (pass, op) = ((first.phase, first.layer), HostCopy { direction });
        let call = self.build.call_without_node(pass, name, op.into(), vec![from], vec![to]);
        self.build.call(NewCall {
            alone_only: users.iter().all(|user| user.alone_only),
            last_only: users.iter().all(|user| user.last_only),
            ..call
        })
    }
}
