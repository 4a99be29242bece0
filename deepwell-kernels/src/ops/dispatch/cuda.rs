//! `dispatch.cu`: rows of pairs of token and expert, grouped by expert.

use deepwell_ir::{KernelRequest, Op, Target};
use deepwell_moe::Capacity;

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
pub(crate) const THREADS: u32 = 256;
/// Smallest number of pairs per CTA.
const RUN_MIN: usize = 256;
/// Largest number of runs that the last CTA can add quickly.
const RUNS_MAX: usize = 128;
/// Pairs that a thread reads at a time, in other kernels that use the same runs.
const WIDTH: usize = 4;
/// Most experts for which a CTA's shared memory holds the counts of each warp.
const EXPERTS_MAX: usize = 1536;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_dispatch", &["dispatch"], prepare)
        .reject(reject)
        .workspace_bytes(workspace_bytes)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::Dispatch(op) = request.op else { return None };
    let rows = &request.operands[4].shape;
    let limit = i32::MAX as usize;
    let too_many = rows.iter().any(|&rows| rows > limit);
    let too_many = too_many.then(|| format!("takes at most {limit} rows, not {rows:?}"));
    too_many.or_else(|| too_many_experts(op.experts()))
}

/// Bytes of shared memory for the counts of a CTA's warps.
pub(crate) fn tallies_bytes(experts: usize) -> u32 {
    THREADS / 32 * (experts * size_of::<u32>()) as u32
}

/// Reason for refusing the number of experts, if too large.
pub(super) fn too_many_experts(experts: usize) -> Option<String> {
    let too_many = experts > EXPERTS_MAX;
    too_many.then(|| format!("takes at most {EXPERTS_MAX} experts, not {experts}"))
}

/// Number of runs into which this many pairs are split, and the pairs of each run.
pub(crate) fn runs(pairs: usize) -> (usize, usize) {
    let run = pairs.div_ceil(RUNS_MAX).max(RUN_MIN).next_multiple_of(WIDTH);
    (pairs.div_ceil(run).max(1), run)
}

fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    let Op::Dispatch(op) = request.op else { return 0 };
    let (runs, _) = runs(request.operands[0].shape.iter().product());
    runs * op.experts() * size_of::<u32>()
}

/// Maximum number of pairs that one of `experts` accepts.
pub(super) fn capacity(
    factor: Option<f64>,
    experts: usize,
    (tokens, top_k): (usize, usize),
) -> Result<usize, String> {
    match factor {
        // A token may choose one expert twice; all pairs are kept.
        None => Ok(tokens * top_k),
        Some(factor) => Capacity::Factor(factor)
            .tokens_per_expert_max(tokens, top_k, experts)
            .map_err(|error| error.to_string()),
    }
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::Dispatch(op) = &call.call.op else {
        return Err(call.refuse("expected `dispatch`"));
    };
    let chosen = call.input(0);
    let sizes = (chosen.shape[0], chosen.shape[1]);
    let capacity = capacity(op.capacity_factor, op.experts(), sizes);
    let capacity = capacity.map_err(|what| call.refuse(what))?;
    let [offsets, load, rows, pairs] = [0, 1, 2, 3].map(|index| call.output(index));
    let (ctas, run) = runs(chosen.elements());
    let number = |number: usize| Argument::U32(number as u32);
    let pair_count = number(chosen.elements());
    let experts = number(op.experts());
    let run = number(run);
    let here = op.here();
    let (first_here, end_here) = (number(here.start), number(here.end));
    let counts = Argument::Pointer(call.workspace().0);
    // With few experts, groups of `across` threads share the runs.
    let across = number(op.experts().next_power_of_two().min(THREADS as usize));
    let tallies_bytes = tallies_bytes(op.experts());

    let count = device.function("dispatch", "dispatch_count", 0)?;
    let of_count = vec![
        chosen.argument(),
        offsets.argument(),
        load.argument(),
        rows.argument(),
        pairs.argument(),
        counts,
        Argument::Pointer(device.arrival_counters(1)?),
        pair_count,
        number(pairs.elements()),
        experts,
        first_here,
        end_here,
        number(op.grouped.align),
        number(capacity),
        run,
        across,
    ];
    let place_kernel = device.function("dispatch", "dispatch_place", 0)?;
    let of_place = vec![
        chosen.argument(),
        offsets.argument(),
        rows.argument(),
        pairs.argument(),
        counts,
        pair_count,
        experts,
        first_here,
        end_here,
        number(capacity),
        run,
    ];
    let ctas = ctas as u32;
    Ok(vec![
        Device::launch(count, ctas, THREADS, tallies_bytes, of_count),
        Device::launch(place_kernel, ctas, THREADS, tallies_bytes, of_place),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_neither_short_nor_many() {
        for (pairs, expected) in [
            (0, (1, 256)),
            (1, (1, 256)),
            (256, (1, 256)),
            (257, (2, 256)),
            (32_768, (128, 256)),
            (32_769, (127, 260)),
            (131_072, (128, 1024)),
        ] {
            assert_eq!(runs(pairs), expected, "{pairs}");
        }
    }
}
