//! MXFP8 GEMMs of any granularity on Hopper as GEMMs in BF16: both operands are dequantized,
//! exactly, into the workspace, then cuBLASLt or `sm90_bf16_gemm.cu` runs.
//!
//! wgmma has no block scales, and at granularity 32 sums that are rescaled in registers reach at
//! most half of the FP8 peak, which is the BF16 peak. Products with elements that BF16 cannot
//! represent are added after the GEMM (`dequantize_operands.cu`, `add_unheld.cu`).

use deepwell_ir::{DType, GemmKind, KernelRequest, Op};

use super::dequantize_operands::{self as operands, Operand, sizes_of, width};
use super::mxfp8_gemm;
use super::operand;
use crate::KernelError;
use crate::ops::linear::sm90_bf16_tiles::{self, BOX_ROWS, Gemm};
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::architecture::CUBLASLT;
use crate::runtime::cuda::blas::{Matmul, Matrix};
use crate::runtime::cuda::driver::DevicePtr;
use crate::runtime::cuda::launch::gemm::{
    LIBRARY_ALIGNMENT_BYTES, LIBRARY_SCRATCH_BYTES, align_for_library, not_empty,
};
use crate::runtime::cuda::launch::tcgen05::GemmSizes;
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::{CUBLASLT_BF16, Rates};

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cublaslt_dequantized_mx_gemm", &["scaled_gemm"], prepare_by_library)
        .architectures(&[Architecture::Sm90a])
        .library(CUBLASLT)
        .reject(reject_by_library)
        .predict(|request, target| {
            let gemm_s = Rates::of(target).bf16_gemm_s(request, CUBLASLT_BF16);
            operands::predicted_s(sizes_of(request), target) + gemm_s
        })
        .workspace_bytes(|request, _| {
            LIBRARY_ALIGNMENT_BYTES + operands::bytes(sizes_of(request)) + LIBRARY_SCRATCH_BYTES
        }),
    CudaKernelSpec::new("cuda_sm90_dequantized_mxfp8_gemm", &["scaled_gemm"], prepare)
        .architectures(&[Architecture::Sm90a])
        .reject(reject)
        .predict(|request, target| {
            operands::predicted_s(sizes_of(request), target)
                + sm90_bf16_tiles::predicted_s(gemm_sizes(request), target)
        })
        .workspace_bytes(|request, target| {
            LIBRARY_ALIGNMENT_BYTES
                + operands::bytes(sizes_of(request))
                + sm90_bf16_tiles::workspace_bytes(gemm_sizes(request), target)
        })
        .select_tile(|request, target| sm90_bf16_tiles::select_tile(gemm_sizes(request), target)),
];

/// Sizes of the GEMM in BF16.
fn gemm_sizes(request: &KernelRequest<'_>) -> GemmSizes {
    let [a, b] = sizes_of(request);
    GemmSizes { m: a.rows, n: b.rows, k: width(a.k) }
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    mxfp8_gemm::reject(request).or_else(|| not_empty(request, &[0, 2]))
}

fn reject_by_library(request: &KernelRequest<'_>) -> Option<String> {
    let output = request.operands[request.input_count].dtype;
    let bias = request.operands[operand::BIAS..request.input_count].first();
    if bias.is_some_and(|bias| (bias.dtype, output) != (DType::Bf16, DType::Bf16)) {
        return Some("adds a bias in bf16 to a result in bf16 only".to_string());
    }
    reject(request)
}

/// The bias of a call; null without bias.
fn bias_of(call: &CallView<'_>) -> DevicePtr {
    match &call.call.op {
        Op::ScaledGemm(op) if op.bias => call.input(operand::BIAS).pointer,
        _ => DevicePtr(0),
    }
}

fn prepare_by_library(
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let (operands, free) = operands::operands(call, align_for_library(call.workspace().0));
    let out = call.output(0);
    let [a, b] = operands.each_ref().map(|operand: &Operand| {
        let matrix = operand.matrix();
        let (rows, columns) = (matrix.shape[0], matrix.shape[1]);
        Matrix { pointer: matrix.pointer, dtype: DType::Bf16, rows, columns, leading: columns }
    });
    let (rows, columns) = (out.shape[0], out.shape[1]);
    let bias = bias_of(call);
    let matmul = Matmul {
        a,
        a_transposed: false,
        b,
        b_transposed: true,
        out: Matrix { pointer: out.pointer, dtype: out.dtype, rows, columns, leading: columns },
        added: call.accumulate().then_some(out.pointer),
        bias: (bias != DevicePtr(0)).then_some(bias),
        scales: None,
        workspace: free,
        workspace_bytes: LIBRARY_SCRATCH_BYTES,
    };
    Ok(vec![
        operands::dequantize(device, &operands)?,
        device.matmul(&matmul)?,
        operands::add_unheld(device, &operands, &out)?,
    ])
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (workspace, bytes) = call.workspace();
    let (operands, free) = operands::operands(call, align_for_library(workspace));
    let out = call.output(0);
    let matrices = operands.each_ref().map(Operand::matrix);
    let mut map = |index: usize| {
        device.tensor_map(&k_major_boxes(&matrices[index], Operands::Bf16, BOX_ROWS))
    };
    let maps = [map(0)?, map(1)?];
    let [m, n] = [out.shape[0], out.shape[1]];
    let shape = |index: usize| operands::OperandSizes::of(&call.input(index).shape);
    let used = LIBRARY_ALIGNMENT_BYTES + operands::bytes([shape(0), shape(2)]);
    let gemm = Gemm {
        kind: GemmKind::Fprop,
        sizes: GemmSizes { m, n, k: matrices[0].shape[1] },
        maps,
        tensor_scales: [DevicePtr(0); 2],
        bias: bias_of(call),
        out: out.clone(),
        accumulate: call.accumulate(),
        workspace: (free, bytes.saturating_sub(used)),
    };
    let mut steps = vec![operands::dequantize(device, &operands)?];
    steps.extend(gemm.steps(call, device)?);
    steps.push(operands::add_unheld(device, &operands, &out)?);
    Ok(steps)
}
