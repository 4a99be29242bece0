//! `selection_bias.cu`: counts of chosen experts, and the update of selection biases.

use deepwell_ir::{KernelRequest, Op, Target};

use crate::KernelError;
use crate::ops::dispatch::cuda::{THREADS, runs};
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_count_experts", &["count_experts"], prepare_counts)
        .reject(reject)
        .workspace_bytes(workspace_bytes),
    CudaKernelSpec::new("cuda_selection_bias_update", &["selection_bias_update"], prepare_update)
        .reject(|_| None),
];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let chosen = &request.operands[0].shape;
    let limit = i32::MAX as usize;
    (chosen.iter().product::<usize>() > limit)
        .then(|| format!("takes at most {limit} pairs, not {chosen:?}"))
}

/// One count per expert and run.
fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    let Op::CountExperts(op) = request.op else { return 0 };
    let (runs, _) = runs(request.operands[0].shape.iter().product());
    runs * op.experts * size_of::<u32>()
}

fn prepare_counts(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::CountExperts(op) = &call.call.op else {
        return Err(call.refuse("expected `count_experts`"));
    };
    let chosen = call.input(0);
    let (ctas, run) = runs(chosen.elements());
    let function = device.function("selection_bias", "count_experts", 0)?;
    let mut arguments = vec![
        chosen.argument(),
        call.output(0).argument(),
        Argument::Pointer(call.workspace().0),
        Argument::Pointer(device.arrival_counters(1)?),
    ];
    // With few experts, groups of `across` threads share the pairs of a run.
    let across = op.experts.next_power_of_two().min(THREADS as usize);
    let sizes = [chosen.elements(), op.experts, run, across];
    arguments.extend(sizes.map(|size| Argument::U32(size as u32)));
    arguments.push(Argument::U32(call.accumulate().into()));
    Ok(vec![Device::launch(function, ctas as u32, THREADS, 0, arguments)])
}

fn prepare_update(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::SelectionBiasUpdate(op) = &call.call.op else {
        return Err(call.refuse("expected `selection_bias_update`"));
    };
    let function = device.function("selection_bias", "selection_bias_update", 0)?;
    let mut arguments: Vec<_> = [0, 1, 2].map(|index| call.operand(index).argument()).to_vec();
    arguments.push(Argument::U32(call.operand(1).elements() as u32));
    arguments.push(Argument::F32(op.rate));
    Ok(vec![Device::launch(function, 1, THREADS, 0, arguments)])
}
