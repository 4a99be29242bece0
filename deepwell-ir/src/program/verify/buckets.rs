//! The optimizer updates every parameter once, in buckets that lie as they say.

use super::ALIGNMENT_BYTES;
use crate::ops::AdamW;
use crate::{Access, Call, Op, Operand, OperandType, ParameterState, Program, ValueId};

/// Buckets in the order of their parameters: each is what its call says, they do not meet, and what
/// has a gradient is in one of them.
pub(super) fn check(program: &Program) -> Result<(), String> {
    let mut buckets: Vec<(&Call, &AdamW)> = Vec::new();
    for call in &program.calls {
        match &call.op {
            Op::AdamW(bucket) => buckets.push((call, bucket)),
            Op::AdamWCoefficients(_) => types(program, call)?,
            _ => {}
        }
    }
    if buckets.is_empty() {
        return Ok(());
    }
    buckets.sort_by_key(|(_, bucket)| bucket.parameters.start);
    let mut next = 0;
    for (call, bucket) in buckets {
        let (name, range) = (&call.name, &bucket.parameters);
        if range.start < next {
            return Err(format!("call `{name}` updates parameters {range:?} as well as another"));
        }
        let Some(states) = program.parameters.get(range.clone()) else {
            let count = program.parameters.len();
            return Err(format!("call `{name}` updates parameters {range:?}, there are {count}"));
        };
        all_frozen(&program.parameters[next..range.start])?;
        operands(call, states)?;
        types(program, call)?;
        columns(program, call, states)?;
        next = range.end;
    }
    all_frozen(&program.parameters[next..])
}

fn all_frozen(states: &[ParameterState]) -> Result<(), String> {
    match states.iter().find(|state| state.gradient.is_some()) {
        Some(state) => Err(format!("parameter `{}` has a gradient and no update", state.name)),
        None => Ok(()),
    }
}

/// Gradient, master and moments of a parameter, in operand order.
fn values_of(state: &ParameterState) -> Option<[ValueId; AdamW::OPERANDS_PER_PARAMETER]> {
    Some([state.gradient?, state.master, state.first_moment?, state.second_moment?])
}

fn operands(call: &Call, states: &[ParameterState]) -> Result<(), String> {
    let of_parameters = call.operands.get(AdamW::LEADING_OPERANDS..).unwrap_or_default();
    let chunks = of_parameters.chunks(AdamW::OPERANDS_PER_PARAMETER);
    let is_state = |operands: &[Operand], state: &ParameterState| {
        let [update, read] = [Access::Update, Access::Read];
        let got = operands.iter().map(|operand| (operand.value, operand.access));
        let values = values_of(state).into_iter().flatten();
        got.eq(values.zip([read, update, update, update]))
    };
    if chunks.len() != states.len() {
        let (got, expected) = (chunks.len(), states.len());
        return Err(format!("call `{}` updates {got} parameters, expected {expected}", call.name));
    }
    match chunks.zip(states).find(|(operands, state)| !is_state(operands, state)) {
        Some((_, state)) => {
            let (name, parameter) = (&call.name, &state.name);
            Err(format!("call `{name}`: expected gradient, master and moments of `{parameter}`"))
        }
        None => Ok(()),
    }
}

fn types(program: &Program, call: &Call) -> Result<(), String> {
    let type_of = |operand: &Operand| {
        let value = program.value(operand.value);
        OperandType { dtype: value.dtype, shape: value.shape.clone() }
    };
    let inputs: Vec<OperandType> = call.inputs().iter().map(type_of).collect();
    let outputs: Vec<OperandType> = call.outputs().iter().map(type_of).collect();
    let expected =
        call.op.outputs_of(&inputs).map_err(|error| format!("`{}`: {error}", call.name))?;
    if outputs != expected {
        return Err(format!("call `{}` gives {outputs:?}, expected {expected:?}", call.name));
    }
    Ok(())
}

/// Gradients lie one behind the other, so do masters and moments: a shard is one range of each.
fn columns(program: &Program, call: &Call, states: &[ParameterState]) -> Result<(), String> {
    for pair in states.windows(2) {
        let values = values_of(&pair[0]).into_iter().flatten();
        for (before, after) in values.zip(values_of(&pair[1]).into_iter().flatten()) {
            let (before, after) = (program.value(before), program.value(after));
            let expected = before.range.end().next_multiple_of(ALIGNMENT_BYTES);
            if after.range.offset != expected {
                return Err(format!(
                    "call `{}`: `{}` lies at {}, expected it behind `{}` at {expected}",
                    call.name, after.name, after.range.offset, before.name
                ));
            }
        }
    }
    Ok(())
}
