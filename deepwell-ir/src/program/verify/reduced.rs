//! Ranks that split the batches of a step agree on its gradients: each is summed over all of them
//! once, and only then used.

use std::collections::HashMap;

use crate::ops::{CollectiveKind, Reduction};
use crate::{Mode, Op, Phase, ProcessGroup, Program, ValueId};

/// In the body of the optimizer, a sum over the ranks of the data group comes before all else that
/// uses a gradient, or the loss, and comes once.
pub(super) fn check(program: &Program) -> Result<(), String> {
    let Some((group, members)) = program.target.ranks.named(ProcessGroup::DATA) else {
        return Ok(());
    };
    if program.mode != Mode::Train || members.ranks.len() < 2 {
        return Ok(());
    }
    let gradients = program.parameters.iter().filter_map(|state| state.gradient);
    let mut sums: HashMap<ValueId, usize> =
        gradients.chain(program.host.loss).map(|value| (value, 0)).collect();
    for call in program.calls.iter().filter(|call| call.phase == Phase::Optimizer) {
        let is_sum = match &call.op {
            Op::Collective(op) => {
                op.group == group
                    && matches!(
                        op.kind,
                        CollectiveKind::AllReduce { reduction: Reduction::Sum }
                            | CollectiveKind::ReduceScatter { reduction: Reduction::Sum }
                    )
            }
            _ => false,
        };
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
