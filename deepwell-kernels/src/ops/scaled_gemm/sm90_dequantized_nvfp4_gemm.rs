//! NVFP4 GEMMs on Hopper as GEMMs in BF16: `dequantize_nvfp4_operands.cu` writes elements times
//! block scales, exactly, to the workspace, and `sm90_bf16_gemm.cu` multiplies its FP32 sums by
//! both tensor scales. The numbers are those of tensor cores that read NVFP4.

use deepwell_ir::ops::ScaledGemm;
use deepwell_ir::{DType, GemmKind, KernelRequest, Op, Target};
use deepwell_precision::QuantFormat;

use super::dequantize_operands::width;
use crate::KernelError;
use crate::ops::linear::sm90_bf16_tiles::{self, BOX_ROWS, Gemm};
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::gemm::{
    LIBRARY_ALIGNMENT_BYTES, align_for_library, extents_fit, not_empty,
};
use crate::runtime::cuda::launch::tcgen05::GemmSizes;
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

/// Threads of a CTA that dequantizes, and rows and columns of its tile, as in the source.
const THREADS: u32 = 256;
const TILE: usize = 128;
/// Dequantization's share of the datasheet's bandwidth: assumed, as of MXFP8.
const SHARE: f64 = 0.75;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm90_dequantized_nvfp4_gemm", &["scaled_gemm"], prepare)
        .architectures(&[Architecture::Sm90a])
        .family(QuantFormat::NVFP4)
        .reject(reject)
        .predict(predicted_s)
        .workspace_bytes(|request, target| {
            LIBRARY_ALIGNMENT_BYTES
                + operands_bytes(sizes_of(request))
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

/// Bytes of both operands in BF16.
fn operands_bytes(GemmSizes { m, n, k }: GemmSizes) -> usize {
    [m, n].map(|rows| (rows * k * 2).next_multiple_of(LIBRARY_ALIGNMENT_BYTES)).iter().sum()
}

fn predicted_s(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let (sizes, rates) = (sizes_of(request), Rates::of(target));
    // Each element is read as half a byte with 1/16 of a scale, and written as two bytes.
    let bytes = ((sizes.m + sizes.n) * sizes.k) as f64 * (0.5 + 1.0 / 16.0 + 2.0);
    rates.bytes_s(bytes) / SHARE + rates.launch_s() + sm90_bf16_tiles::predicted_s(sizes, target)
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
    let first = align_for_library(workspace);
    let firsts = [0, op.b_input()];
    let rows = firsts.map(|index| call.input(index).shape[0]);
    let k = call.input(0).shape[1];
    let sizes = GemmSizes { m: rows[0], n: rows[1], k: width(k) };
    let of_a = (rows[0] * sizes.k * 2).next_multiple_of(LIBRARY_ALIGNMENT_BYTES);
    let places = [first, first.offset(of_a)];
    let tiles = rows.map(|rows| rows.div_ceil(TILE) * k.div_ceil(TILE));

    let function = device.function("dequantize_nvfp4_operands", "dequantize_nvfp4_operands", 0)?;
    let mut arguments = Vec::with_capacity(10);
    for (operand, place) in places.into_iter().enumerate() {
        let planes = [0, 1].map(|plane| call.input(firsts[operand] + plane).argument());
        arguments.extend(planes);
        arguments.extend([Argument::Pointer(place), Argument::U32(rows[operand] as u32)]);
        if operand == 0 {
            arguments.push(Argument::U32(tiles[0] as u32));
        }
    }
    arguments.push(Argument::U32(k as u32));
    let ctas = tiles[0] + tiles[1];
    let mut steps = vec![Device::launch(function, ctas as u32, THREADS, 0, arguments)];

    let mut map = |operand: usize| {
        let shape = vec![rows[operand], sizes.k];
        let matrix = DeviceTensor { pointer: places[operand], dtype: DType::Bf16, shape };
        device.tensor_map(&k_major_boxes(&matrix, Operands::Bf16, BOX_ROWS))
    };
    let maps = [map(0)?, map(1)?];
    let used = LIBRARY_ALIGNMENT_BYTES + operands_bytes(sizes);
    let gemm = Gemm {
        kind: GemmKind::Fprop,
        sizes,
        maps,
        tensor_scales: firsts.map(|index| call.input(index + 2).pointer),
        bias: if op.bias { call.input(op.plane_inputs()).pointer } else { DevicePtr(0) },
        out: call.output(0),
        accumulate: call.accumulate(),
        workspace: (first.offset(operands_bytes(sizes)), bytes.saturating_sub(used)),
    };
    steps.extend(gemm.steps(call, device)?);
    Ok(steps)
}
