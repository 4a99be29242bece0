//! `sm100_nvfp4_grouped_gemm.cu`: the GEMMs of groups of rows on tcgen05, with NVFP4 operands that
//! have a tensor scale for each group. Only the device knows the groups' offsets, so a launch is
//! sized for all rows.

use deepwell_ir::{DType, GemmKind, KernelRequest, Op, Target};
use deepwell_precision::QuantFormat;

use super::sm100_mxfp8_grouped_gemm::Sizes;
use crate::KernelError;
use crate::ops::scaled_gemm::operand;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::gemm::{extents_fit, not_empty};
use crate::runtime::cuda::launch::tcgen05::{CTA_ROWS, TileShape};
use crate::runtime::cuda::launch::tcgen05_cost::ResultCost;
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes, nvfp4_scale_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::{CudaKernelSpec, TileSelection};

/// Group sizes are multiples of this: a tile of scales belongs to one group.
const GROUP_ROWS: usize = 128;
/// Rows of operands are multiples of this many elements, 16 bytes, for tensor copies.
const WIDTH: usize = 32;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm100_nvfp4_grouped_gemm", &["scaled_grouped_gemm"], prepare)
        .architectures(&[Architecture::Sm100a, Architecture::Sm103a])
        .family(QuantFormat::NVFP4)
        .reject(reject)
        .predict(predict)
        .select_tile(select_tile)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::ScaledGroupedGemm(op) = request.op else {
        return Some(format!("takes scaled_grouped_gemm, not {}", request.op.name()));
    };
    let output = request.operands[request.input_count].dtype;
    let expected = if op.kind == GemmKind::Wgrad { DType::F32 } else { DType::Bf16 };
    if output != expected {
        return Some(format!("gives {expected}, not {output}"));
    }
    let align = op.grouped.align;
    if !align.is_multiple_of(GROUP_ROWS) {
        return Some(format!("takes groups of a multiple of {GROUP_ROWS} rows, not of {align}"));
    }
    let k = request.operands[operand::A].shape[1];
    if !k.is_multiple_of(WIDTH) {
        return Some(format!("takes a contraction in multiples of {WIDTH}, not {k}"));
    }
    let data = [operand::A, op.b_input()];
    not_empty(request, &data).or_else(|| extents_fit(request, &data))
}

fn select_tile(request: &KernelRequest<'_>, target: &Target) -> TileSelection {
    let shapes = TileShape::alone(Operands::Nvfp4);
    let sizes = Sizes::of(request).expect("a grouped GEMM, as `reject` has seen");
    TileShape::select_by(shapes, |shape| sizes.as_one(shape), ResultCost::default(), target)
}

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let shapes = TileShape::alone(Operands::Nvfp4);
    let sizes = Sizes::of(request).expect("a grouped GEMM, as `reject` has seen");
    let as_one = |shape| sizes.as_one(shape);
    TileShape::predicted_by(shapes, as_one, ResultCost::default(), request, target)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::ScaledGroupedGemm(op) = &call.call.op else {
        let got = call.call.op.name();
        return Err(call.refuse(format!("expected scaled_grouped_gemm, got {got}")));
    };
    let firsts = [operand::A, op.b_input()];
    let ([a, b], out) = (firsts.map(|index| call.input(index)), call.output(0));
    let sizes = Sizes::new(op.kind, op.grouped.groups, &a.shape, &b.shape);
    let shape = TileShape::of_call(call, &TileShape::alone(Operands::Nvfp4))?;
    let kind = if op.kind == GemmKind::Wgrad { "wgrad" } else { "rows" };
    let name = format!("sm100_nvfp4_grouped_gemm_{kind}_{}", shape.name());
    let function = device.function("sm100_nvfp4_grouped_gemm", &name, shape.shared_bytes())?;
    // The matrices of a stack are contiguous, as one matrix of more rows.
    let rows_of_b = b.elements() / sizes.k;
    let b = DeviceTensor { shape: vec![rows_of_b, sizes.k], ..b };
    let mut arguments = Vec::with_capacity(13);
    // Each CTA copies the scales of its rows of `a`, and of all columns of the tile.
    let scale_rows = [CTA_ROWS, shape.columns];
    let copied = shape.copied_rows().into_iter().zip(scale_rows);
    for ((first, data), (rows, scale_rows)) in firsts.into_iter().zip([a, b]).zip(copied) {
        let data = k_major_boxes(&data, Operands::Nvfp4, rows);
        for boxes in [data, nvfp4_scale_boxes(&call.input(first + 1), scale_rows)] {
            arguments.push(Argument::TensorMap(device.tensor_map(&boxes)?));
        }
        arguments.push(call.input(first + 2).argument());
    }
    arguments.extend([call.input(op.plane_inputs()).argument(), out.argument()]);
    let numbers = [sizes.groups, sizes.rows, sizes.columns, sizes.k];
    arguments.extend(numbers.map(|number| Argument::I32(number as i32)));
    if op.kind == GemmKind::Wgrad {
        arguments.push(Argument::U32(call.accumulate().into()));
    }
    let sm_count = device.sm_count();
    Ok(vec![shape.launch_clusters(function, sizes.tiles_max(shape), sm_count, arguments)])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::OperandType;
    use deepwell_ir::ops::{GroupedRows, ScaledGroupedGemm};
    use deepwell_precision::scale_tiles;

    use super::*;

    #[test]
    fn refusals_say_what_is_taken() {
        let operand = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
        let format = QuantFormat::NVFP4;
        for (rows, k, align, output, expected) in [
            (256usize, 32usize, 128usize, DType::Bf16, None),
            (256, 32, 64, DType::Bf16, Some("takes groups of a multiple of 128 rows, not of 64")),
            (256, 48, 128, DType::Bf16, Some("takes a contraction in multiples of 32, not 48")),
            (256, 32, 128, DType::F32, Some("gives bf16, not f32")),
            (0, 32, 128, DType::Bf16, Some("takes no empty matrices")),
        ] {
            let grouped = GroupedRows::new(3, align);
            let kind = GemmKind::Fprop;
            let op = ScaledGroupedGemm { kind, grouped, output, a: format, b: format };
            let planes = |stack: &[usize], rows: usize| {
                let tiles = scale_tiles::shape(rows, k.div_ceil(16));
                let of = |shape: &[usize]| [stack, shape].concat();
                [
                    operand(DType::E2m1, &of(&[rows, k])),
                    operand(DType::Ue4m3, &of(&tiles)),
                    operand(DType::F32, &[3, 1]),
                ]
            };
            let mut operands = [planes(&[], rows), planes(&[3], 40)].concat();
            operands.push(operand(DType::I32, &[4]));
            let input_count = operands.len();
            operands.push(operand(output, &[rows, 40]));
            let op: Op = op.into();
            let request = KernelRequest { op: &op, operands: &operands, input_count };
            assert_eq!(reject(&request).as_deref(), expected, "{rows} {k} {align} {output}");
        }
    }
}
