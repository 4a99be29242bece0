//! NVFP4 GEMMs on Hopper as GEMMs in BF16: `dequantize_nvfp4_operands.cu` writes elements times
//! block scales, exactly, to the workspace, and `sm90_bf16_gemm.cu` multiplies its FP32 sums by
//! both tensor scales. The numbers are those of tensor cores that read NVFP4.

use deepwell_ir::ops::ScaledGemm;
use deepwell_ir::{DType, GemmKind, KernelRequest, Op, Target};
use deepwell_precision::QuantFormat;

use super::dequantize_nvfp4_operands::{self as operands, Operand};
use super::dequantize_operands::{OperandSizes, width};
use crate::KernelError;
use crate::ops::linear::sm90_bf16_tiles::{self, BOX_ROWS, Gemm};
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::DevicePtr;
use crate::runtime::cuda::launch::gemm::{
    LIBRARY_ALIGNMENT_BYTES, align_for_library, extents_fit, not_empty,
};
use crate::runtime::cuda::launch::tcgen05::GemmSizes;
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm90_dequantized_nvfp4_gemm", &["scaled_gemm"], prepare)
        .architectures(&[Architecture::Sm90a])
        .family(QuantFormat::NVFP4)
        .reject(reject)
        .predict(predicted_s)
        .workspace_bytes(|request, target| {
            LIBRARY_ALIGNMENT_BYTES
                + operands::bytes(operand_sizes(request))
                + sm90_bf16_tiles::workspace_bytes(sizes_of(request), target)
        })
        .select_tile(|request, target| sm90_bf16_tiles::select_tile(sizes_of(request), target))];

pub(super) fn gemm_of(op: &Op) -> Option<&ScaledGemm> {
    match op.leading() {
        Op::ScaledGemm(op) => Some(op),
        _ => None,
    }
}

/// Index of the data of `b`.
pub(super) fn b_input(request: &KernelRequest<'_>) -> usize {
    gemm_of(request.op).map_or(0, ScaledGemm::b_input)
}

/// Sizes of the GEMM in BF16.
fn sizes_of(request: &KernelRequest<'_>) -> GemmSizes {
    let (a, b) = (&request.operands[0].shape, &request.operands[b_input(request)].shape);
    GemmSizes { m: a[0], n: b[0], k: width(a[1]) }
}

fn operand_sizes(request: &KernelRequest<'_>) -> [OperandSizes; 2] {
    operands::sizes_of(request, [0, b_input(request)])
}

fn predicted_s(request: &KernelRequest<'_>, target: &Target) -> f64 {
    operands::predicted_s(operand_sizes(request), target)
        + sm90_bf16_tiles::predicted_s(sizes_of(request), target)
}

pub(super) fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let operands = [0, b_input(request)];
    refuse_result(request)
        .or_else(|| not_empty(request, &operands))
        .or_else(|| extents_fit(request, &operands))
}

/// Why the kernels of NVFP4 do not write a result, or do not add a bias.
pub(super) fn refuse_result(request: &KernelRequest<'_>) -> Option<String> {
    let gemm = gemm_of(request.op)?;
    let output = request.operands[request.input_count].dtype;
    if !matches!(output, DType::Bf16 | DType::F32) {
        return Some(format!("gives bf16 or f32, not {output}"));
    }
    let bias = gemm.bias.then(|| &request.operands[gemm.plane_inputs()]);
    let bias = bias.filter(|bias| bias.dtype != output)?;
    Some(format!("adds a bias of the result's type, {output}, not {}", bias.dtype))
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Some(op) = gemm_of(&call.call.op) else {
        return Err(call.refuse(format!("expected scaled_gemm, got {}", call.call.op.name())));
    };
    let (workspace, bytes) = call.workspace();
    let firsts = [0, op.b_input()];
    let (operands, free) = operands::operands(call, firsts, align_for_library(workspace));
    let out = call.output(0);
    let matrices = operands.each_ref().map(Operand::matrix);
    let mut map = |index: usize| {
        device.tensor_map(&k_major_boxes(&matrices[index], Operands::Bf16, BOX_ROWS))
    };
    let maps = [map(0)?, map(1)?];
    let sizes = firsts.map(|index| OperandSizes::of(&call.input(index).shape));
    let used = LIBRARY_ALIGNMENT_BYTES + operands::bytes(sizes);
    let gemm = Gemm {
        kind: GemmKind::Fprop,
        sizes: GemmSizes { m: sizes[0].rows, n: sizes[1].rows, k: width(sizes[0].k) },
        maps,
        tensor_scales: firsts.map(|index| call.input(index + 2).pointer),
        bias: if op.bias { call.input(op.plane_inputs()).pointer } else { DevicePtr(0) },
        out,
        accumulate: call.accumulate(),
        workspace: (free, bytes.saturating_sub(used)),
    };
    let mut steps = vec![operands::dequantize(device, &operands)?];
    steps.extend(gemm.steps(call, device)?);
    Ok(steps)
}
