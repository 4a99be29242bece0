//! Checks that the optimizer updates every parameter once, in consecutive buckets or in shards of
//! buckets. Counts update selection biases instead.

use std::collections::HashSet;

use super::ALIGNMENT_BYTES;
use super::offloaded::Homes;
use crate::ops::AdamW;
use crate::{
    Access, Call, DType, Gathered, Master, MemoryKind, Op, Operand, OperandType, ParameterState,
    Program, Shard, ValueId,
};

/// Checks the buckets in parameter order: operands match the call, buckets do not overlap, and
/// every parameter with a gradient is in a bucket.
pub(super) fn check(program: &Program, homes: &Homes) -> Result<(), String> {
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
    let moved = moved_by_counts(program)?;
    buckets.sort_by_key(|(_, bucket)| bucket.parameters.start);
    if !program.shards.is_empty() {
        return shards(program, &buckets, &moved, homes);
    }
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
        all_frozen(&program.parameters[next..range.start], &moved)?;
        operands(call, states, homes)?;
        types(program, call)?;
        columns(program, call, states)?;
        next = range.end;
    }
    all_frozen(&program.parameters[next..], &moved)
}

/// Selection biases that calls update: each bias once, from the counts stored as its gradient.
fn moved_by_counts(program: &Program) -> Result<HashSet<ValueId>, String> {
    let mut moved = HashSet::new();
    for call in &program.calls {
        let Op::SelectionBiasUpdate(_) = &call.op else { continue };
        types(program, call)?;
        let (name, [_, counts, bias]) = (&call.name, call.operands.as_slice()) else {
            return Err(format!("call `{}` has no bias", call.name));
        };
        let is_state = |state: &&ParameterState| {
            state.master.value() == bias.value && state.gradient == Some(counts.value)
        };
        let state = program.parameters.iter().find(is_state);
        let has_moments =
            |state: &ParameterState| state.first_moment.is_some() || state.second_moment.is_some();
        if state.is_none_or(has_moments) || bias.access != Access::Update {
            return Err(format!("call `{name}`: expected counts and bias of one parameter"));
        }
        if !moved.insert(bias.value) {
            return Err(format!("call `{name}` moves a bias that another call moves"));
        }
    }
    Ok(moved)
}

/// Checks that each call updates its shard's slice, each shard is updated once, and each parameter
/// with a gradient is in one shard, consecutive with the parameter before it.
fn shards(
    program: &Program,
    buckets: &[(&Call, &AdamW)],
    moved: &HashSet<ValueId>,
    homes: &Homes,
) -> Result<(), String> {
    let (expected, got) = (program.shards.len(), buckets.len());
    if expected != got {
        return Err(format!("{got} calls update {expected} shards, expected one for each"));
    }
    let mut is_sharded = vec![false; program.parameters.len()];
    for (index, (call, bucket)) in buckets.iter().enumerate() {
        let (name, shard) = (&call.name, &program.shards[index]);
        if bucket.parameters != (index..index + 1) {
            let got = &bucket.parameters;
            return Err(format!("call `{name}` updates shards {got:?}, expected {index}"));
        }
        types(program, call)?;
        let operands = call.inputs().get(AdamW::LEADING_OPERANDS + 1..).unwrap_or_default();
        let expected = [shard.master, shard.first_moment, shard.second_moment];
        let got = operands.iter().map(|operand| (homes.home(operand.value), operand.access));
        if !got.eq(expected.map(|value| (value, Access::Update))) {
            return Err(format!("call `{name}`: expected master and moments of shard {index}"));
        }
        shard_places(program, (index, shard), &mut is_sharded)
            .map_err(|what| format!("shard {index}: {what}"))?;
    }
    let rest = program.parameters.iter().zip(is_sharded).filter(|(_, sharded)| !sharded);
    for (state, _) in rest {
        all_frozen(std::slice::from_ref(state), moved)?;
        if let Master::Sharded { shard, .. } = state.master {
            return Err(format!("parameter `{}` is not in shard {shard}", state.name));
        }
    }
    Ok(())
}

/// Checks that the parameters of a shard are consecutive and fit into the slices of its group.
fn shard_places(
    program: &Program,
    (number, shard): (usize, &Shard),
    is_sharded: &mut [bool],
) -> Result<(), String> {
    let Some((_, group)) = program.target.ranks.named(&shard.group) else {
        return Err(format!("it is of group `{}`, which its target does not have", shard.group));
    };
    let mut next = 0;
    for &(index, offset) in &shard.parameters {
        let Some(state) = program.parameters.get(index) else {
            return Err(format!("it names parameter {index}, there are {}", is_sharded.len()));
        };
        if std::mem::replace(&mut is_sharded[index], true) {
            return Err(format!("parameter `{}` is in another shard too", state.name));
        }
        gathered_as(program, state, number)?;
        if offset != next {
            return Err(format!("`{}` begins at {offset}, expected {next}", state.name));
        }
        let elements = program.value(state.master.value()).elements();
        next += elements.next_multiple_of(ALIGNMENT_BYTES / size_of::<f32>());
    }
    let room = program.value(shard.master).elements() * group.ranks.len();
    if next > room {
        return Err(format!("expected slices for {next} elements, got {room}"));
    }
    Ok(())
}

/// Checks that the weight of a parameter in shard `number` is stored as its [`Master`] says.
fn gathered_as(program: &Program, state: &ParameterState, number: usize) -> Result<(), String> {
    let Master::Sharded { shard, gathered, form } = state.master else {
        return Err(format!("the master of `{}` is whole", state.name));
    };
    if shard != number {
        return Err(format!("`{}` names shard {shard}", state.name));
    }
    let value = program.value(gathered);
    let (dtype, is_kept) = (value.dtype, value.memory.is_persistent());
    let is_so = match form {
        Gathered::Kept => dtype == DType::F32 && is_kept,
        Gathered::Fp32 => dtype == DType::F32 && !is_kept,
        Gathered::Bf16 => dtype == DType::Bf16,
        Gathered::Quantized => ![DType::F32, DType::Bf16].contains(&dtype),
    };
    match is_so {
        true => Ok(()),
        false => Err(format!("`{}` is gathered as {form:?}, its value is {dtype}", state.name)),
    }
}

/// Checks that parameters outside all buckets have no gradient, except selection biases.
fn all_frozen(states: &[ParameterState], moved: &HashSet<ValueId>) -> Result<(), String> {
    let trained = |state: &&ParameterState| {
        state.gradient.is_some() && !moved.contains(&state.master.value())
    };
    match states.iter().find(trained) {
        Some(state) => Err(format!("parameter `{}` has a gradient and no update", state.name)),
        None => Ok(()),
    }
}

/// Gradient, master and moments of a parameter, in operand order.
fn values_of(state: &ParameterState) -> Option<[ValueId; AdamW::OPERANDS_PER_PARAMETER]> {
    Some([state.gradient?, state.master.value(), state.first_moment?, state.second_moment?])
}

fn operands(call: &Call, states: &[ParameterState], homes: &Homes) -> Result<(), String> {
    let of_parameters = call.inputs().get(AdamW::LEADING_OPERANDS..).unwrap_or_default();
    let chunks = of_parameters.chunks(AdamW::OPERANDS_PER_PARAMETER);
    let is_state = |operands: &[Operand], state: &ParameterState| {
        let [update, read] = [Access::Update, Access::Read];
        let got = operands.iter().map(|operand| (homes.home(operand.value), operand.access));
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

/// Checks that gradients, masters and moments are each consecutive: a shard is one range of each.
/// Of offloaded values each has copies of its own.
fn columns(program: &Program, call: &Call, states: &[ParameterState]) -> Result<(), String> {
    for pair in states.windows(2) {
        let values = values_of(&pair[0]).into_iter().flatten();
        for (before, after) in values.zip(values_of(&pair[1]).into_iter().flatten()) {
            let before = program.value(before);
            let after = program.value(after);
            if [before, after].iter().any(|value| value.memory == MemoryKind::Offloaded) {
                continue;
            }
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
