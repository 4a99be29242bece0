//! A step runs its bodies in an order that makes sense, over slots that do not meet.

use std::collections::HashSet;

use super::ByteRange;
use crate::{Phase, Program};

pub(super) fn check(program: &Program) -> Result<(), String> {
    invocations(program)?;
    if program.slots > 1 { slots_apart(program) } else { Ok(()) }
}

/// Each micro-batch runs forward and then backward in its slot, in order; the optimizer and the
/// weights run when no micro-batch is under way.
fn invocations(program: &Program) -> Result<(), String> {
    let mut phases = HashSet::new();
    if let Some(body) = program.bodies.iter().find(|body| !phases.insert(body.phase)) {
        return Err(format!("two bodies are of {}", body.phase));
    }
    let has_backward = phases.contains(&Phase::Backward);
    let mut held: Vec<Option<u32>> = vec![None; program.slots as usize];
    let mut next = [0u32; 2];
    for invocation in &program.schedule {
        let Some(body) = program.bodies.get(invocation.body.index()) else {
            let (id, count) = (invocation.body.0, program.bodies.len());
            return Err(format!("the schedule names body {id}, there are {count}"));
        };
        let (phase, micro_batch, slot) = (body.phase, invocation.micro_batch, invocation.slot);
        let Some(holder) = held.get_mut(slot as usize) else {
            return Err(format!("the schedule names slot {slot}, there are {}", program.slots));
        };
        let turn = match phase {
            Phase::Forward => 0,
            Phase::Backward => 1,
            Phase::Optimizer | Phase::Weights => {
                if let Some(busy) = held.iter().flatten().next() {
                    return Err(format!("{phase} runs while micro-batch {busy} is under way"));
                }
                continue;
            }
        };
        if micro_batch != next[turn] {
            let expected = next[turn];
            return Err(format!("{phase} of micro-batch {micro_batch}, expected {expected}"));
        }
        next[turn] += 1;
        let expected = (phase == Phase::Backward).then_some(micro_batch);
        if *holder != expected {
            let holds = |holder: Option<u32>| match holder {
                Some(micro_batch) => format!("micro-batch {micro_batch}"),
                None => "none".to_string(),
            };
            return Err(format!(
                "{phase} of micro-batch {micro_batch} finds {} in slot {slot}, expected {}",
                holds(*holder),
                holds(expected)
            ));
        }
        *holder = (phase == Phase::Forward && has_backward).then_some(micro_batch);
    }
    let expected = program.micro_batches as u32;
    let runs = |phase, runs: u32| phases.contains(&phase) && runs != expected;
    if runs(Phase::Forward, next[0]) || runs(Phase::Backward, next[1]) {
        return Err(format!(
            "the schedule runs {} forward and {} backward passes, expected {expected} of each",
            next[0], next[1]
        ));
    }
    Ok(())
}

/// With several slots, what several bodies use lies in each slot apart from everything else.
fn slots_apart(program: &Program) -> Result<(), String> {
    let mut user: Vec<Option<usize>> = vec![None; program.values.len()];
    for (index, body) in program.bodies.iter().enumerate() {
        for operand in program.calls[body.calls.clone()].iter().flat_map(|call| &call.operands) {
            let value = program.value(operand.value);
            if value.memory.is_persistent() || value.slot_stride_bytes > 0 {
                continue;
            }
            let first = *user[operand.value.index()].get_or_insert(index);
            if first != index {
                return Err(format!(
                    "`{}` lives from {} to {} and has one place for {} slots",
                    value.name, program.bodies[first].phase, body.phase, program.slots
                ));
            }
        }
    }
    let transient = || program.values.iter().filter(|value| !value.memory.is_persistent());
    let strided = || transient().filter(|value| value.slot_stride_bytes > 0);
    let (Some(first), Some(end), Some(stride)) = (
        strided().map(|value| value.range.offset).min(),
        strided().map(|value| value.range.end()).max(),
        strided().map(|value| value.slot_stride_bytes).min(),
    ) else {
        return Ok(());
    };
    if let Some(value) = strided().find(|value| value.slot_stride_bytes != stride) {
        return Err(format!("`{}` has slots of another size than others", value.name));
    }
    if end - first > stride {
        return Err(format!("a slot of {} bytes reaches into the next, {stride} on", end - first));
    }
    let slots = ByteRange { offset: first, bytes: stride * program.slots as usize };
    let shared = transient().filter(|value| value.slot_stride_bytes == 0);
    let meets = shared
        .map(|value| (&value.name, value.range))
        .chain(program.calls.iter().map(|call| (&call.name, call.workspace)))
        .find(|(_, range)| range.overlaps(&slots));
    match meets {
        Some((name, _)) => Err(format!("`{name}` lies in the slots of the activations")),
        None => Ok(()),
    }
}
