//! `sm100_mxfp8_gemm.cu`: MXFP8 GEMMs of any granularity, on tcgen05.
//!
//! Operands are in the layout of quantization: data by rows, and scales in the tiles that tensor
//! cores read.

use deepwell_ir::{DType, KernelRequest, Op, Target};

use super::operand;
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::gemm::{extents_fit, not_empty};
use crate::runtime::cuda::launch::tcgen05::{GemmSizes, TileShape};
use crate::runtime::cuda::launch::tcgen05_cost::ResultCost;
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes, scale_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::{CudaKernelSpec, TileSelection};

/// Row strides of operands are multiples of this, for tensor copies.
const WIDTH: usize = 16;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm100_mxfp8_gemm", OPS, prepare)
        .architectures(ARCHITECTURES)
        .reject(reject)
        .predict(predict)
        .select_tile(select_tile)];

const OPS: &[&str] = &["scaled_gemm"];
pub(crate) const ARCHITECTURES: &[Architecture] = &[Architecture::Sm100a, Architecture::Sm103a];

pub(crate) fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let output = request.operands[request.input_count].dtype;
    if !matches!(output, DType::Bf16 | DType::F32) {
        return Some(format!("gives bf16 or f32, not {output}"));
    }
    if let Some(bias) = request.operands[operand::BIAS..request.input_count].first()
        && bias.dtype != output
    {
        return Some(format!("adds a bias of the result's type, {output}, not {}", bias.dtype));
    }
    let k = request.operands[operand::A].shape[1];
    if !k.is_multiple_of(WIDTH) {
        return Some(format!("takes a contraction in multiples of {WIDTH}, not {k}"));
    }
    not_empty(request, &[0, 2]).or_else(|| extents_fit(request, &[0, 2]))
}

pub(crate) fn sizes(a: &[usize], b: &[usize]) -> GemmSizes {
    GemmSizes { m: a[0], n: b[0], k: a[1] }
}

/// Sizes of a request whose first inputs are the GEMM's.
pub(crate) fn sizes_of(request: &KernelRequest<'_>) -> GemmSizes {
    sizes(&request.operands[operand::A].shape, &request.operands[operand::B].shape)
}

fn select_tile(request: &KernelRequest<'_>, target: &Target) -> TileSelection {
    let shapes = TileShape::all(Operands::Mx);
    TileShape::select(shapes, sizes_of(request), ResultCost::default(), target)
}

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let shapes = TileShape::all(Operands::Mx);
    TileShape::predicted_s(shapes, sizes_of(request), ResultCost::default(), request, target)
}

/// Tensor maps of data and scales of both operands, which are a call's first inputs.
pub(crate) fn operand_maps(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    shape: TileShape,
) -> Result<Vec<Argument>, KernelError> {
    let mut maps = Vec::with_capacity(4);
    for (index, rows) in [0, 2].into_iter().zip(shape.copied_rows()) {
        let data = k_major_boxes(&call.input(index), Operands::Mx, rows);
        for boxes in [data, scale_boxes(&call.input(index + 1))] {
            maps.push(Argument::TensorMap(device.tensor_map(&boxes)?));
        }
    }
    Ok(maps)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (a, b, out) = (call.input(operand::A), call.input(operand::B), call.output(0));
    let sizes = sizes(&a.shape, &b.shape);
    let has_bias = matches!(&call.call.op, Op::ScaledGemm(op) if op.bias);
    let bias = if has_bias { call.input(operand::BIAS).pointer } else { DevicePtr(0) };
    let sm_count = device.sm_count();
    let shape = TileShape::of_call(call, &TileShape::all(Operands::Mx))?;
    let element = if out.dtype == DType::Bf16 { "bf16" } else { "f32" };
    let name = format!("sm100_mxfp8_gemm_{element}_{}", shape.name());
    let function = device.function("sm100_mxfp8_gemm", &name, shape.shared_bytes())?;
    let mut arguments = operand_maps(call, device, shape)?;
    arguments.extend([
        Argument::Pointer(bias),
        out.argument(),
        Argument::I32(sizes.m as i32),
        Argument::I32(sizes.n as i32),
        Argument::I32(sizes.k as i32),
        Argument::U32(call.accumulate().into()),
    ]);
    Ok(vec![shape.launch(function, sizes, sm_count, arguments)])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::{GemmKind, OperandType, ops};
    use deepwell_precision::{QuantFormat, scale_tiles};

    use super::*;

    #[test]
    fn refusals_say_what_is_taken() {
        let operand = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
        let spec = QuantFormat::MXFP8;
        for (rows, k, output, bias, expected) in [
            (4usize, 32usize, DType::F32, None, None),
            (4, 64, DType::Bf16, Some(DType::Bf16), None),
            (4, 48, DType::F32, None, None),
            (4, 40, DType::F32, None, Some("takes a contraction in multiples of 16, not 40")),
            (0, 64, DType::F32, None, Some("takes no empty matrices")),
            (4, 0, DType::F32, None, Some("takes no empty matrices")),
            (
                4,
                64,
                DType::F32,
                Some(DType::Bf16),
                Some("adds a bias of the result's type, f32, not bf16"),
            ),
        ] {
            let kind = GemmKind::Fprop;
            let op: Op =
                ops::ScaledGemm { kind, output, bias: bias.is_some(), a: spec, b: spec }.into();
            let blocks = k.div_ceil(32);
            let mut operands = vec![
                operand(DType::E4m3, &[rows, k]),
                operand(DType::E8m0, &scale_tiles::shape(rows, blocks)),
                operand(DType::E4m3, &[3, k]),
                operand(DType::E8m0, &scale_tiles::shape(3, blocks)),
            ];
            operands.extend(bias.map(|dtype| operand(dtype, &[3])));
            let input_count = operands.len();
            operands.push(operand(output, &[rows, 3]));
            let request = KernelRequest { op: &op, operands: &operands, input_count };
            assert_eq!(reject(&request).as_deref(), expected, "{rows} {k} {output}");
        }
    }
}
