//! Calls that run only in the last micro-batch of a step: sums over ranks of gradients accumulated
//! over all micro-batches.

use std::collections::HashSet;

use crate::{Access, Accumulate, Call, Phase, Program, ValueId};

/// Checks that such calls belong to passes and do not accumulate over micro-batches. After the last
/// run of their body, no earlier body may run, so that results persist until the end of the step.
/// No call that also runs in other micro-batches may read their transient results.
pub(super) fn check(program: &Program) -> Result<(), String> {
    let Some(first) = program.calls.iter().find(|call| call.last_only) else { return Ok(()) };
    let last_only_calls = || program.calls.iter().filter(|call| call.last_only);
    if let Some(call) = last_only_calls().find(|call| is_once(call)) {
        let (name, phase) = (&call.name, call.phase);
        return Err(format!("call `{name}` is for the last micro-batch, and {phase} runs once"));
    }
    if let Some(call) = last_only_calls().find(|call| call.accumulate != Accumulate::Never) {
        let name = &call.name;
        return Err(format!("call `{name}` of the last micro-batch adds up those before"));
    }
    let made = values(program);
    let passes = program.calls.iter().filter(|call| !call.last_only && !is_once(call));
    for call in passes {
        let mut read = call.operands.iter().filter(|operand| operand.access != Access::Write);
        if let Some(operand) = read.find(|operand| made.contains(&operand.value)) {
            let name = &call.name;
            let value = &program.value(operand.value).name;
            return Err(format!(
                "call `{name}` reads `{value}`, which is made in the last micro-batch alone"
            ));
        }
    }
    let has = |body: usize| {
        program.calls[program.bodies[body].calls.clone()].iter().any(|it| it.last_only)
    };
    for body in (0..program.bodies.len()).filter(|&body| has(body)) {
        let last = program.schedule.iter().rposition(|it| it.body.index() == body);
        let behind = last.map_or(&[][..], |last| &program.schedule[last + 1..]);
        if let Some(later) = behind.iter().find(|it| it.body.index() < body) {
            let phase = |body: usize| program.bodies[body].phase;
            return Err(format!(
                "call `{}`: {} of micro-batch {} runs behind the last {}",
                first.name,
                phase(later.body.index()),
                later.micro_batch,
                phase(body)
            ));
        }
    }
    Ok(())
}

/// Whether the phase of a call runs once per step.
fn is_once(call: &Call) -> bool {
    matches!(call.phase, Phase::Optimizer | Phase::Weights)
}

/// Transient values that only last-micro-batch calls write.
pub(super) fn values(program: &Program) -> HashSet<ValueId> {
    let written = |last_only: bool| {
        let calls = program.calls.iter().filter(move |call| call.last_only == last_only);
        let operands = calls.flat_map(|call| &call.operands);
        operands.filter(|it| it.access != Access::Read).map(|it| it.value)
    };
    let others: HashSet<ValueId> = written(false).collect();
    let is_transient = |id: &ValueId| !program.value(*id).memory.is_persistent();
    written(true).filter(|id| is_transient(id) && !others.contains(id)).collect()
}
