//! `dispatch_to_ranks.cu`, after the count of `dispatch.cu`: rows of pairs, divided among ranks.

use deepwell_ir::{KernelRequest, Op, Target};

use super::cuda::{THREADS, capacity, runs, tallies_bytes, too_many_experts};
use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Alignment of the counts, which follow the offsets in the workspace.
const ALIGN_BYTES: usize = 256;

pub(super) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_dispatch_to_ranks", &["dispatch_to_ranks"], prepare)
        .reject(reject)
        .workspace_bytes(workspace_bytes)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::DispatchToRanks(op) = request.op else { return None };
    let wanted = &request.operands[4].shape;
    let limit = i32::MAX as usize;
    let too_many = wanted.iter().product::<usize>() > limit;
    let too_many =
        too_many.then(|| format!("takes at most {limit} choices of rows, not {wanted:?}"));
    too_many.or_else(|| too_many_experts(op.experts))
}

/// Aligned bytes of the offsets.
fn offset_bytes(experts: usize) -> usize {
    ((experts + 1) * size_of::<i32>()).next_multiple_of(ALIGN_BYTES)
}

fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    let Op::DispatchToRanks(op) = request.op else { return 0 };
    let (runs, _) = runs(request.operands[0].shape.iter().product());
    offset_bytes(op.experts) + runs * op.experts * size_of::<u32>()
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::DispatchToRanks(op) = &call.call.op else {
        return Err(call.refuse("expected `dispatch_to_ranks`"));
    };
    let chosen = call.input(0);
    let (tokens, top_k) = (chosen.shape[0], chosen.shape[1]);
    let capacity = capacity(op.capacity_factor, op.experts, (tokens, top_k));
    let capacity = capacity.map_err(|what| call.refuse(what))?;
    let [rows, load, pairs, wanted] = [0, 1, 2, 3].map(|index| call.output(index));
    let (ctas, run) = runs(chosen.elements());
    let number = |number: usize| Argument::U32(number as u32);
    let pair_count = number(chosen.elements());
    let experts = number(op.experts);
    let run = number(run);
    let workspace = call.workspace().0;
    let offsets = Argument::Pointer(workspace);
    let counts = Argument::Pointer(workspace.offset(offset_bytes(op.experts)));
    let across = number(op.experts.next_power_of_two().min(THREADS as usize));

    let nowhere = Step::Fill { target: wanted.pointer, byte: 0xff, bytes: wanted.bytes() };
    let count = device.function("dispatch", "dispatch_count", 0)?;
    let of_count = vec![
        chosen.argument(),
        offsets,
        load.argument(),
        rows.argument(),
        pairs.argument(),
        counts,
        Argument::Pointer(device.arrival_counters(1)?),
        pair_count,
        number(pairs.elements()),
        experts,
        number(0),
        experts,
        number(1),
        number(capacity),
        run,
        across,
    ];
    let place_kernel = device.function("dispatch_to_ranks", "dispatch_place_to_ranks", 0)?;
    let of_place = vec![
        chosen.argument(),
        offsets,
        rows.argument(),
        pairs.argument(),
        wanted.argument(),
        counts,
        pair_count,
        experts,
        number(op.experts_of_rank()),
        number(pairs.elements() / op.ranks),
        number(top_k),
        number(capacity),
        run,
        across,
    ];
    let ctas = ctas as u32;
    let launches = [
        Device::launch(count, ctas, THREADS, tallies_bytes(op.experts), of_count),
        Device::launch(place_kernel, ctas, THREADS, 0, of_place),
    ];
    let fill = (wanted.elements() > 0).then_some(nowhere);
    Ok(fill.into_iter().chain(launches).collect())
}
