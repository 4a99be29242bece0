//! `sm100_nvfp4_gemm.cu`: NVFP4 GEMMs on tcgen05.
//!
//! Operands are in the layout of quantization: packed data by rows, scales in the tiles that tensor
//! cores read, and a scale for each tensor, which the FP32 sums are multiplied by.

use deepwell_ir::{DType, KernelRequest, Target};
use deepwell_precision::QuantFormat;

use super::sm90_dequantized_nvfp4_gemm::{b_input, gemm_of, reject as reject_gemm};
use super::sm100_mxfp8_gemm::{ARCHITECTURES, sizes};
use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::tcgen05::{CTA_ROWS, GemmSizes, TileShape};
use crate::runtime::cuda::launch::tcgen05_cost::ResultCost;
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes, nvfp4_scale_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::{CudaKernelSpec, TileSelection};

/// Rows of operands are multiples of this many elements, 16 bytes, for tensor copies.
const WIDTH: usize = 32;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm100_nvfp4_gemm", &["scaled_gemm"], prepare)
        .architectures(ARCHITECTURES)
        .family(QuantFormat::NVFP4)
        .reject(reject)
        .predict(predict)
        .select_tile(select_tile)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let k = request.operands[0].shape[1];
    if !k.is_multiple_of(WIDTH) {
        return Some(format!("takes a contraction in multiples of {WIDTH}, not {k}"));
    }
    reject_gemm(request)
}

fn sizes_of(request: &KernelRequest<'_>) -> GemmSizes {
    sizes(&request.operands[0].shape, &request.operands[b_input(request)].shape)
}

fn select_tile(request: &KernelRequest<'_>, target: &Target) -> TileSelection {
    let shapes = TileShape::all(Operands::Nvfp4);
    TileShape::select(shapes, sizes_of(request), ResultCost::default(), target)
}

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let shapes = TileShape::all(Operands::Nvfp4);
    TileShape::predicted_s(shapes, sizes_of(request), ResultCost::default(), request, target)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Some(op) = gemm_of(&call.call.op) else {
        return Err(call.refuse(format!("expected scaled_gemm, got {}", call.call.op.name())));
    };
    let firsts = [0, op.b_input()];
    let [a, b] = firsts.map(|index| call.input(index));
    let (sizes, out) = (sizes(&a.shape, &b.shape), call.output(0));
    let sm_count = device.sm_count();
    let shape = TileShape::of_call(call, &TileShape::all(Operands::Nvfp4))?;
    let element = if out.dtype == DType::Bf16 { "bf16" } else { "f32" };
    let name = format!("sm100_nvfp4_gemm_{element}_{}", shape.name());
    let function = device.function("sm100_nvfp4_gemm", &name, shape.shared_bytes())?;
    let mut arguments = Vec::with_capacity(12);
    // Each CTA copies the scales of its rows of `a`, and of all columns of the tile.
    let scale_rows = [CTA_ROWS, shape.columns];
    for ((first, rows), scale_rows) in firsts.into_iter().zip(shape.copied_rows()).zip(scale_rows) {
        let data = k_major_boxes(&call.input(first), Operands::Nvfp4, rows);
        for boxes in [data, nvfp4_scale_boxes(&call.input(first + 1), scale_rows)] {
            arguments.push(Argument::TensorMap(device.tensor_map(&boxes)?));
        }
        arguments.push(call.input(first + 2).argument());
    }
    let bias = if op.bias { call.input(op.plane_inputs()).pointer } else { DevicePtr(0) };
    arguments.extend([Argument::Pointer(bias), out.argument()]);
    arguments.extend([sizes.m, sizes.n, sizes.k].map(|size| Argument::I32(size as i32)));
    arguments.push(Argument::U32(call.accumulate().into()));
    Ok(vec![shape.launch(function, sizes, sm_count, arguments)])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::{GemmKind, Op, OperandType, ops};
    use deepwell_precision::scale_tiles;

    use super::*;

    #[test]
    fn refusals_say_what_is_taken() {
        let operand = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
        let format = QuantFormat::NVFP4;
        let of_bias = "adds a bias of the result's type, f32, not bf16";
        for (rows, k, output, bias, expected) in [
            (4usize, 32usize, DType::F32, None, None),
            (4, 64, DType::Bf16, Some(DType::Bf16), None),
            (4, 48, DType::F32, None, Some("takes a contraction in multiples of 32, not 48")),
            (0, 64, DType::F32, None, Some("takes no empty matrices")),
            (4, 0, DType::F32, None, Some("takes no empty matrices")),
            (4, 64, DType::F32, Some(DType::Bf16), Some(of_bias)),
        ] {
            let kind = GemmKind::Fprop;
            let op: Op =
                ops::ScaledGemm { kind, output, bias: bias.is_some(), a: format, b: format }.into();
            let planes = |rows: usize| {
                let tiles = scale_tiles::shape(rows, k.div_ceil(16));
                let data = operand(DType::E2m1, &[rows, k]);
                [data, operand(DType::Ue4m3, &tiles), operand(DType::F32, &[1])]
            };
            let mut operands = [planes(rows), planes(3)].concat();
            operands.extend(bias.map(|dtype| operand(dtype, &[3])));
            let input_count = operands.len();
            operands.push(operand(output, &[rows, 3]));
            let request = KernelRequest { op: &op, operands: &operands, input_count };
            assert_eq!(reject(&request).as_deref(), expected, "{rows} {k} {output}");
        }
    }
}
