//! Checks the order of bodies in a step, and that slots do not overlap.

use std::collections::{HashMap, HashSet};

use super::{ByteRange, last_only};
use crate::{Phase, Program};

pub(super) fn check(program: &Program) -> Result<(), String> {
    invocations(program)?;
    if program.slots > 1 { slots_apart(program) } else { Ok(()) }
}

/// Holder of a slot: a micro-batch in a chunk, and its next phase.
#[derive(Clone, Copy, PartialEq)]
struct Holder {
    chunk: u32,
    micro_batch: u32,
    next: Phase,
}

/// Phases of a micro-batch, in order.
const PASSES: [Phase; 3] = [Phase::Forward, Phase::Backward, Phase::WeightGradients];

/// Checks that each micro-batch runs forward and then backward through a chunk in its slot, and
/// then weight gradients if separate, in micro-batch order. The optimizer and the weights run only
/// if no micro-batch is in flight.
fn invocations(program: &Program) -> Result<(), String> {
    let mut kinds = HashSet::new();
    if let Some(body) = program.bodies.iter().find(|body| !kinds.insert((body.phase, body.chunk))) {
        return Err(match body.chunk {
            0 => format!("two bodies are of {}", body.phase),
            chunk => format!("two bodies are of {} of chunk {chunk}", body.phase),
        });
    }
    // Next pass of a chunk after `phase`.
    let behind = |phase: Phase, chunk: u32| {
        let later = PASSES.into_iter().filter(move |&it| it > phase);
        later.into_iter().find(|&it| kinds.contains(&(it, chunk)))
    };
    let mut held: Vec<Option<Holder>> = vec![None; program.slots as usize];
    let mut next: HashMap<(Phase, u32), u32> = HashMap::new();
    for invocation in &program.schedule {
        let Some(body) = program.bodies.get(invocation.body.index()) else {
            let (id, count) = (invocation.body.0, program.bodies.len());
            return Err(format!("the schedule names body {id}, there are {count}"));
        };
        let (phase, micro_batch, slot) = (body.phase, invocation.micro_batch, invocation.slot);
        let Some(holder) = held.get_mut(slot as usize) else {
            return Err(format!("the schedule names slot {slot}, there are {}", program.slots));
        };
        if matches!(phase, Phase::Optimizer | Phase::Weights) {
            if let Some(Holder { micro_batch: busy, .. }) = held.iter().flatten().next() {
                return Err(format!("{phase} runs while micro-batch {busy} is under way"));
            }
            continue;
        }
        let next = next.entry((phase, body.chunk)).or_default();
        if micro_batch != *next {
            return Err(format!("{phase} of micro-batch {micro_batch}, expected {next}"));
        }
        *next += 1;
        let before = |next| Holder { chunk: body.chunk, micro_batch, next };
        let expected = (phase != Phase::Forward).then_some(before(phase));
        if *holder != expected {
            let holds = |holder: Option<Holder>| match holder {
                Some(Holder { chunk, micro_batch, next }) => {
                    let chunk = match chunk {
                        0 => String::new(),
                        chunk => format!(" of chunk {chunk}"),
                    };
                    let next = match next {
                        Phase::Backward => String::new(),
                        next => format!(" before its {next}"),
                    };
                    format!("micro-batch {micro_batch}{chunk}{next}")
                }
                None => "none".to_string(),
            };
            return Err(format!(
                "{phase} of micro-batch {micro_batch} finds {} in slot {slot}, expected {}",
                holds(*holder),
                holds(expected)
            ));
        }
        *holder = behind(phase, body.chunk).map(before);
    }
    let expected = program.micro_batches as u32;
    let runs = |phase, chunk| next.get(&(phase, chunk)).copied().unwrap_or(0);
    for chunk in program.bodies.iter().map(|body| body.chunk) {
        let differs = |phase| kinds.contains(&(phase, chunk)) && runs(phase, chunk) != expected;
        let [forward, backward, weights] = PASSES.map(|phase| runs(phase, chunk));
        if differs(Phase::WeightGradients) {
            return Err(format!(
                "the schedule makes gradients of weights of {weights} micro-batches, expected \
                 {expected}"
            ));
        }
        if differs(Phase::Forward) || differs(Phase::Backward) {
            return Err(format!(
                "the schedule runs {forward} forward and {backward} backward passes, expected \
                 {expected} of each"
            ));
        }
    }
    Ok(())
}

/// Checks that, with several slots, values shared by several bodies have a separate range in each
/// slot, except values made only in the last micro-batch.
fn slots_apart(program: &Program) -> Result<(), String> {
    let made_last = last_only::values(program);
    let mut user: Vec<Option<usize>> = vec![None; program.values.len()];
    for (index, body) in program.bodies.iter().enumerate() {
        for operand in program.calls[body.calls.clone()].iter().flat_map(|call| &call.operands) {
            let value = program.value(operand.value);
            let has_place = value.slot_stride_bytes > 0 || made_last.contains(&operand.value);
            if value.memory.is_persistent() || has_place {
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
