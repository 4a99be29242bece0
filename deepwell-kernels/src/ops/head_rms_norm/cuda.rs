//! `head_rms_norm.cu` and `head_rms_norm_backward.cu`: root-mean-square normalization of heads.
//!
//! The heads of all tokens are contiguous. Heads of widths that these kernels do not support are
//! therefore processed as rows by `rms_norm.cu` and `rms_norm_backward.cu`.

use deepwell_ir::{KernelRequest, Op, OperandType, Target};

use crate::KernelError;
use crate::ops::rms_norm::cuda_backward as rms_norm_backward;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::rows::{self, CtaColumns};
use crate::runtime::cuda::launch::support;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA of each kernel, as in the sources.
const FORWARD_THREADS: u32 = 256;
const BACKWARD_THREADS: u32 = 512;
/// Heads per thread at a time, as in the sources.
const HEADS: u32 = 4;
/// BF16 elements of 16 bytes: a lane's part of a head.
const VECTOR: usize = 8;
/// Largest number of lanes per head.
const LANES_MAX: usize = 32;
/// Largest number of heads of all tokens, and of elements per head, that the kernels can index.
const EXTENT_MAX: usize = i32::MAX as usize;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_head_rms_norm", &["head_rms_norm"], prepare_forward)
        .reject(|request| support::all_bf16(request, &[0, 1, 2]).or_else(|| reject(request, 0, 1))),
    CudaKernelSpec::new(
        "cuda_head_rms_norm_backward",
        &["head_rms_norm_backward"],
        prepare_backward,
    )
    .reject(|request| support::all_bf16(request, &[0, 1, 2, 4]).or_else(|| reject(request, 1, 2)))
    .workspace_bytes(backward_workspace_bytes),
];

/// Number of heads of all tokens and of elements per head, from x `[tokens, heads · D]` and the
/// gain `[D]`.
fn heads_of(x: &[usize], gain: &[usize]) -> [usize; 2] {
    let head_dim = gain.iter().product::<usize>();
    [x.iter().product::<usize>() / head_dim.max(1), head_dim]
}

fn reject(request: &KernelRequest<'_>, x: usize, gain: usize) -> Option<String> {
    let shape = |index: usize| -> &OperandType { &request.operands[index] };
    let heads = heads_of(&shape(x).shape, &shape(gain).shape);
    let too_large = heads.iter().any(|&extent| extent > EXTENT_MAX);
    too_large.then(|| {
        format!(
            "takes at most {EXTENT_MAX} heads over all tokens, and elements of one, not {heads:?}"
        )
    })
}

/// Lanes that share a head, a power of two; `None` if a head is not whole vectors or is wider than
/// a warp.
fn lanes_of(head_dim: usize) -> Option<u32> {
    let lanes = (head_dim / VECTOR).next_power_of_two();
    let fits = head_dim > 0 && head_dim.is_multiple_of(VECTOR) && lanes <= LANES_MAX;
    fits.then_some(lanes as u32)
}

/// Division of the sums over heads among CTAs.
fn division([heads, _]: [usize; 2], lanes: u32, workers: usize) -> CtaColumns {
    CtaColumns::new(heads, (BACKWARD_THREADS / lanes * HEADS) as usize, workers)
}

fn prepare_forward(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::HeadRmsNorm(op) = &call.call.op else {
        return Err(call.refuse("expected `head_rms_norm`"));
    };
    let matrix = heads_of(&call.input(0).shape, &call.input(1).shape);
    let Some(lanes) = lanes_of(matrix[1]) else {
        return rows::prepare_forward(call, device, matrix, "rms_norm", "rms_norm", op.eps);
    };
    let [heads, head_dim] = matrix.map(|extent| extent as u32);
    let function = device.function("head_rms_norm", "head_rms_norm", 0)?;
    let ctas = heads.div_ceil(FORWARD_THREADS / lanes * HEADS).max(1);
    let mut arguments: Vec<_> = (0..4).map(|index| call.operand(index).argument()).collect();
    arguments.extend([heads, head_dim, lanes].map(Argument::U32));
    arguments.push(Argument::F32(op.eps as f32));
    Ok(vec![Device::launch(function, ctas, FORWARD_THREADS, 0, arguments)])
}

fn backward_workspace_bytes(request: &KernelRequest<'_>, target: &Target) -> usize {
    let matrix = heads_of(&request.operands[1].shape, &request.operands[2].shape);
    match lanes_of(matrix[1]) {
        Some(lanes) => division(matrix, lanes, target.workers).scratch_bytes(matrix[1]),
        None => rms_norm_backward::KERNEL.workspace_bytes(&matrix, target.workers),
    }
}

fn prepare_backward(
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    if !matches!(call.call.op, Op::HeadRmsNormBackward(_)) {
        return Err(call.refuse("expected `head_rms_norm_backward`"));
    }
    let matrix = heads_of(&call.input(1).shape, &call.input(2).shape);
    let Some(lanes) = lanes_of(matrix[1]) else {
        return rms_norm_backward::KERNEL.prepare(call, device, matrix, false);
    };
    // The worker count of the plan, because the scratch is sized for this number of CTAs.
    let division = division(matrix, lanes, call.program.target.workers);
    let function = device.function("head_rms_norm_backward", "head_rms_norm_backward", 0)?;
    let mut arguments: Vec<_> = (0..6).map(|index| call.operand(index).argument()).collect();
    let [heads, head_dim] = matrix.map(|extent| extent as u32);
    arguments.extend([heads, head_dim, lanes, call.accumulate().into()].map(Argument::U32));
    arguments.extend([
        Argument::Pointer(call.workspace().0),
        Argument::Pointer(device.arrival_counters(division.arrival_counters())?),
        Argument::U32(division.members as u32),
    ]);
    let ctas = division.ctas as u32;
    Ok(vec![Device::launch(function, ctas, BACKWARD_THREADS, 0, arguments)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_fit_their_lanes() {
        for (head_dim, expected) in [
            (0, None),
            (1, None),
            (8, Some(1)),
            (16, Some(2)),
            (24, Some(4)),
            (64, Some(8)),
            (96, Some(16)),
            (100, None),
            (128, Some(16)),
            (136, Some(32)),
            (256, Some(32)),
            (264, None),
        ] {
            assert_eq!(lanes_of(head_dim), expected, "{head_dim}");
        }
    }

    #[test]
    fn heads_are_counted_over_all_tokens() {
        assert_eq!(heads_of(&[5, 6 * 128], &[128]), [30, 128]);
        assert_eq!(heads_of(&[0, 128], &[128]), [0, 128]);
        assert_eq!(heads_of(&[5, 0], &[0]), [0, 0]);
    }
}
