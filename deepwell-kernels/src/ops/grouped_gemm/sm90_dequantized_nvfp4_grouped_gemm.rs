//! The GEMMs of groups of rows on Hopper, with NVFP4 operands that have a tensor scale for each
//! group: `dequantize_nvfp4_operands.cu` writes elements times block scales, exactly, to the
//! workspace, and `sm90_bf16_grouped_gemm.cu` multiplies its FP32 sums by the scales of the group.

use deepwell_ir::{DType, GemmKind, KernelRequest, Op, Target};
use deepwell_precision::QuantFormat;
use deepwell_precision::nvfp4::BLOCK;

use super::sm90_bf16_grouped_gemm::{Gemm, SHARE};
use super::sm90_mxfp8_grouped_gemm::{BOX_ROWS, Sizes};
use crate::KernelError;
use crate::ops::scaled_gemm::dequantize_nvfp4_operands::{self as operands, Operand};
use crate::ops::scaled_gemm::dequantize_operands::OperandSizes;
use crate::ops::scaled_gemm::operand;
use crate::ops::scaled_gemm::sm90_mxfp8_gemm::TILE_COLUMNS;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::launch::gemm::{
    LIBRARY_ALIGNMENT_BYTES, align_for_library, extents_fit, not_empty,
};
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new(
    "cuda_sm90_dequantized_nvfp4_grouped_gemm",
    &["scaled_grouped_gemm"],
    prepare,
)
.architectures(&[Architecture::Sm90a])
.family(QuantFormat::NVFP4)
.reject(|request| reject(request, BLOCK))
.predict(predict)
.workspace_bytes(workspace_bytes)];

/// Why kernels for groups of a multiple of `rows` rows do not take a request.
pub(super) fn reject(request: &KernelRequest<'_>, rows: usize) -> Option<String> {
    let Op::ScaledGroupedGemm(op) = request.op else {
        return Some(format!("takes scaled_grouped_gemm, not {}", request.op.name()));
    };
    let output = request.operands[request.input_count].dtype;
    let expected = if op.kind == GemmKind::Wgrad { DType::F32 } else { DType::Bf16 };
    if output != expected {
        return Some(format!("gives {expected}, not {output}"));
    }
    let align = op.grouped.align;
    if !align.is_multiple_of(rows) {
        return Some(format!("takes groups of a multiple of {rows} rows, not of {align}"));
    }
    let data = [operand::A, op.b_input()];
    not_empty(request, &data).or_else(|| extents_fit(request, &data))
}

fn sizes_of(request: &KernelRequest<'_>) -> [OperandSizes; 2] {
    let b = match request.op {
        Op::ScaledGroupedGemm(op) => op.b_input(),
        _ => operand::A,
    };
    operands::sizes_of(request, [operand::A, b])
}

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let gemm_s = Rates::of(target).bf16_gemm_s(request, SHARE);
    operands::predicted_s(sizes_of(request), target) + gemm_s
}

fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    LIBRARY_ALIGNMENT_BYTES + operands::bytes(sizes_of(request))
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::ScaledGroupedGemm(op) = &call.call.op else {
        let got = call.call.op.name();
        return Err(call.refuse(format!("expected scaled_grouped_gemm, got {got}")));
    };
    let firsts = [operand::A, op.b_input()];
    let workspace = align_for_library(call.workspace().0);
    let (operands, _) = operands::operands(call, firsts, workspace);
    let (out, offsets) = (call.output(0), call.input(op.plane_inputs()));
    let matrices = operands.each_ref().map(Operand::matrix);
    let (name, box_rows) = match op.kind {
        GemmKind::Wgrad => ("wgrad_k_major", BOX_ROWS),
        // Every operand is quantized along its contraction, so those of dgrad are K-major, too.
        _ => ("fprop", TILE_COLUMNS),
    };
    let mut map = |index: usize, rows: usize| {
        device.tensor_map(&k_major_boxes(&matrices[index], Operands::Bf16, rows))
    };
    let maps = [map(0, BOX_ROWS)?, map(1, box_rows)?];
    let b = call.input(firsts[1]).shape;
    let columns = b[b.len() - 2];
    let sizes = Sizes { rows: matrices[0].shape[0], columns, k: matrices[0].shape[1] };
    let groups = op.grouped.groups;
    let group_scales = firsts.map(|index| call.input(index + 2).pointer);
    let gemm = Gemm { kind: op.kind, name, sizes, groups, maps, group_scales };
    Ok(vec![
        operands::dequantize(device, &operands)?,
        gemm.step(device, &offsets, &out, call.accumulate())?,
    ])
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
            (256, 32, 128, DType::Bf16, None),
            (96, 31, 16, DType::Bf16, None),
            (96, 31, 8, DType::Bf16, Some("takes groups of a multiple of 16 rows, not of 8")),
            (256, 32, 128, DType::F32, Some("gives bf16, not f32")),
            (256, 0, 128, DType::Bf16, Some("takes no empty matrices")),
        ] {
            let grouped = GroupedRows::new(3, align);
            let kind = GemmKind::Fprop;
            let op: Op = ScaledGroupedGemm { kind, grouped, output, a: format, b: format }.into();
            let planes = |stack: &[usize], rows: usize| {
                let tiles = scale_tiles::shape(rows, usize::div_ceil(k, BLOCK));
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
            let request = KernelRequest { op: &op, operands: &operands, input_count };
            assert_eq!(reject(&request, BLOCK).as_deref(), expected, "{rows} {k} {align} {output}");
        }
    }
}
