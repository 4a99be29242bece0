//! Checks gradient synchronization of ranks that split the batches of a step: each gradient is
//! summed over all these ranks once, before any use. Sums over other groups, such as for an
//! embedding table shared by two pipeline stages, may come before.

use std::collections::HashMap;

use crate::ops::{CollectiveKind, Reduction};
use crate::{
    Access, Call, GroupId, Mode, Op, ParameterState, Phase, ProcessGroup, Program, Split,
    SplitOver, ValueId,
};

/// Checks that a sum over the ranks of the data group precedes every other use of a gradient or the
/// loss, and occurs once: in the body of the optimizer, or in a pass after the last writer.
/// Gradients of experts split over expert-parallel ranks are instead summed over the ranks with the
/// same experts. Gradients of unsplit parameters are also summed over the tensor group; gradients
/// of split parameters are not.
pub(super) fn check(program: &Program) -> Result<(), String> {
    if program.mode != Mode::Train {
        return Ok(());
    }
    let ranks = &program.target.ranks;
    let gradients = |of_experts: bool| {
        let is_its =
            move |state: &&ParameterState| state.split.is_some_and(over_experts) == of_experts;
        let of_its = program.parameters.iter().filter(is_its).filter_map(|state| state.gradient);
        // The others are reduce-scattered during the backward.
        of_its.filter(|gradient| program.value(*gradient).memory.is_persistent())
    };
    if let Some((group, members)) = ranks.named(ProcessGroup::DATA) {
        check_group(program, group, members, gradients(false).chain(own_loss(program)).collect())?;
        refuse_sums(program, (group, members), gradients(true).collect())?;
        check_scattered(program, (group, members), false)?;
    }
    if let Some((group, members)) = ranks.named(ProcessGroup::EXPERT_DATA) {
        check_group(program, group, members, gradients(true).collect())?;
        check_scattered(program, (group, members), true)?;
    }
    let Some((group, members)) = program.target.ranks.named(ProcessGroup::TENSOR) else {
        return Ok(());
    };
    let is_split = |state: &&ParameterState| state.split.is_some();
    let (split, whole): (Vec<&ParameterState>, Vec<&ParameterState>) =
        program.parameters.iter().partition(is_split);
    let split = split.into_iter().filter_map(|state| state.gradient);
    refuse_sums(program, (group, members), split.collect())?;
    let whole = whole.into_iter().filter_map(|state| state.gradient);
    let whole = whole.filter_map(|gradient| in_optimizer(program, gradient));
    check_group(program, group, members, whole.collect())
}

fn over_experts(split: Split) -> bool {
    split.over == SplitOver::Expert
}

/// The value of a gradient that the optimizer reads. For a gradient reduce-scattered during the
/// backward, the slice; a separate check covers the reduce-scatter.
fn in_optimizer(program: &Program, gradient: ValueId) -> Option<ValueId> {
    if program.value(gradient).memory.is_persistent() {
        return Some(gradient);
    }
    let scatters = |call: &&Call| {
        let is_it = matches!(&call.op, Op::Collective(op) if op.reduction().is_some());
        is_it && call.inputs().iter().any(|input| input.value == gradient)
    };
    let scatter = program.calls.iter().find(scatters)?;
    Some(scatter.outputs().first()?.value)
}

/// Checks that transient gradients are reduce-scattered once during the backward, after all
/// writers, and not read otherwise.
fn check_scattered(
    program: &Program,
    (group, members): (GroupId, &ProcessGroup),
    of_experts: bool,
) -> Result<(), String> {
    let is_transient = |value: &ValueId| !program.value(*value).memory.is_persistent();
    let is_its = |state: &&ParameterState| state.split.is_some_and(over_experts) == of_experts;
    let gradients = program.parameters.iter().filter(is_its).filter_map(|state| state.gradient);
    let mut scattered: HashMap<ValueId, bool> =
        gradients.filter(is_transient).map(|value| (value, false)).collect();
    let calls = program.calls.iter().filter(|_| !scattered.is_empty()).collect::<Vec<_>>();
    for call in calls {
        let scatters = match &call.op {
            Op::Collective(op) => {
                let kind = CollectiveKind::ReduceScatter { reduction: Reduction::Sum };
                let phases = [Phase::Backward, Phase::WeightGradients];
                op.group == group && op.kind == kind && phases.contains(&call.phase)
            }
            _ => false,
        };
        for operand in &call.operands {
            let Some(is_scattered) = scattered.get_mut(&operand.value) else { continue };
            let name = &call.name;
            let value = &program.value(operand.value).name;
            if *is_scattered {
                return Err(format!("call `{name}` uses `{value}`, which is scattered already"));
            }
            if scatters {
                *is_scattered = true;
            } else if operand.access == Access::Read {
                return Err(format!(
                    "call `{name}` uses `{value}`, which is not summed over the {} ranks of group \
                     `{}` yet",
                    members.ranks.len(),
                    members.name
                ));
            }
        }
    }
    let left = scattered.into_iter().filter(|(_, is_scattered)| !is_scattered);
    match left.map(|(value, _)| value).min() {
        Some(value) => {
            let (name, group) = (&program.value(value).name, &members.name);
            Err(format!("nothing scatters `{name}` over the ranks of group `{group}`"))
        }
        None => Ok(()),
    }
}

/// Rejects sums over ranks with different slices of a parameter.
fn refuse_sums(
    program: &Program,
    (group, members): (GroupId, &ProcessGroup),
    split: Vec<ValueId>,
) -> Result<(), String> {
    for call in program.calls.iter().filter(|call| sums_over(call, |of| of == group)) {
        let is_summed = |state: &&ParameterState| {
            let is_its = |value: ValueId| Some(value) == state.gradient && split.contains(&value);
            call.inputs().iter().any(|operand| is_its(operand.value))
        };
        if let Some(state) = program.parameters.iter().find(is_summed) {
            let (call, name) = (&call.name, &state.name);
            return Err(format!(
                "call `{call}` sums the gradient of `{name}`, of which each rank of group `{}` has \
                 a slice",
                members.name
            ));
        }
    }
    Ok(())
}

/// Whether a call after the forward pass sums over the ranks of a matching group.
fn sums_over(call: &Call, is_group: impl Fn(GroupId) -> bool) -> bool {
    match &call.op {
        Op::Collective(op) if is_behind_forward(call) && is_group(op.group) => matches!(
            op.kind,
            CollectiveKind::AllReduce { reduction: Reduction::Sum }
                | CollectiveKind::ReduceScatter { reduction: Reduction::Sum }
        ),
        _ => false,
    }
}

/// Whether a call is in a phase that computes or uses gradients.
fn is_behind_forward(call: &Call) -> bool {
    matches!(call.phase, Phase::Backward | Phase::WeightGradients | Phase::Optimizer)
}

fn check_group(
    program: &Program,
    group: GroupId,
    members: &ProcessGroup,
    values: Vec<ValueId>,
) -> Result<(), String> {
    if members.ranks.len() < 2 {
        return Ok(());
    }
    let mut sums: HashMap<ValueId, usize> = values.into_iter().map(|value| (value, 0)).collect();
    for call in program.calls.iter().filter(|call| is_behind_forward(call)) {
        let is_sum = sums_over(call, |of| of == group);
        let sums_elsewhere = sums_over(call, |of| of != group);
        if sums_elsewhere && call.outputs().is_empty() {
            // In-place sums over several groups may be in any order.
            continue;
        }
        if call.phase != Phase::Optimizer {
            check_in_pass(program, call, is_sum, &sums)?;
            if !is_sum && !sums_elsewhere {
                continue;
            }
        }
        for operand in call.inputs() {
            let Some(count) = sums.get_mut(&operand.value) else { continue };
            let value = &program.value(operand.value).name;
            match (is_sum, *count) {
                (true, 0) => *count = 1,
                (true, _) => {
                    let name = &call.name;
                    return Err(format!("call `{name}` sums `{value}` over the ranks once more"));
                }
                (false, 0) => {
                    return Err(format!(
                        "call `{}` uses `{value}`, which is not summed over the {} ranks of group \
                         `{}` yet",
                        call.name,
                        members.ranks.len(),
                        members.name
                    ));
                }
                (false, _) => {}
            }
        }
    }
    match sums.into_iter().filter(|(_, count)| *count == 0).map(|(value, _)| value).min() {
        Some(value) => {
            let (name, group) = (&program.value(value).name, &members.name);
            Err(format!("nothing sums `{name}` over the ranks of group `{group}`"))
        }
        None => Ok(()),
    }
}

/// Checks that a sum within a pass covers all contributions of the step: no later writes, and only
/// in the last micro-batch.
fn check_in_pass(
    program: &Program,
    call: &Call,
    is_sum: bool,
    sums: &HashMap<ValueId, usize>,
) -> Result<(), String> {
    for operand in &call.operands {
        let Some(&count) = sums.get(&operand.value) else { continue };
        let (name, value) = (&call.name, &program.value(operand.value).name);
        if is_sum && program.micro_batches > 1 && !call.last_only {
            return Err(format!(
                "call `{name}` sums `{value}` over the ranks in each of {} micro-batches",
                program.micro_batches
            ));
        }
        if !is_sum && count > 0 && operand.access != Access::Read {
            return Err(format!(
                "call `{name}` writes `{value}`, which is summed over the ranks already"
            ));
        }
    }
    Ok(())
}

/// This rank's own loss: if pipeline stages sum their losses, the input of the sum; `None` for a
/// stage that contributes no loss.
fn own_loss(program: &Program) -> Option<ValueId> {
    let loss = program.host.loss?;
    let mut calls = program.calls.iter().filter(|call| call.phase == Phase::Optimizer);
    let makes = |value: ValueId| {
        move |call: &&Call| call.outputs().iter().any(|output| output.value == value)
    };
    let Some(sum) = calls.clone().find(makes(loss)) else { return Some(loss) };
    let own = sum.inputs().first()?.value;
    calls.find(makes(own)).is_none().then_some(own)
}
