//! The GEMMs of groups of rows on Hopper, with MXFP8 operands of any granularity: both operands are
//! dequantized, exactly, into the workspace, then `sm90_bf16_grouped_gemm.cu` runs. The reasons are
//! those of the dense GEMM (`scaled_gemm/dequantized_gemm.rs`).

use deepwell_ir::{DType, GemmKind, KernelRequest, Op, Target};

use super::mxfp8_grouped_gemm;
use super::sm90_bf16_grouped_gemm::{Gemm, SHARE, STEP_K};
use super::sm90_mxfp8_grouped_gemm::{BOX_ROWS, Sizes};
use crate::KernelError;
use crate::ops::scaled_gemm::dequantize_operands::{self as operands, Groups, Operand, sizes_of};
use crate::ops::scaled_gemm::operand;
use crate::ops::scaled_gemm::sm90_mxfp8_gemm::TILE_COLUMNS;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::DevicePtr;
use crate::runtime::cuda::launch::gemm::{LIBRARY_ALIGNMENT_BYTES, align_for_library, not_empty};
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm90_dequantized_grouped_gemm", &["scaled_grouped_gemm"], prepare)
        .architectures(&[Architecture::Sm90a])
        .reject(reject)
        .predict(predict)
        .workspace_bytes(workspace_bytes)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::ScaledGroupedGemm(op) = request.op else {
        return Some(format!("takes scaled_grouped_gemm, not {}", request.op.name()));
    };
    let align = op.grouped.align;
    if !align.is_multiple_of(STEP_K) {
        return Some(format!("takes groups of a multiple of {STEP_K} rows, not of {align}"));
    }
    mxfp8_grouped_gemm::reject(request).or_else(|| not_empty(request, &[0, 2]))
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
    let (operands, _) = operands::operands(call, align_for_library(call.workspace().0));
    let (out, offsets) = (call.output(0), call.input(op.plane_inputs()));
    debug_assert!(op.kind == GemmKind::Wgrad || out.dtype == DType::Bf16);
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
    let b = call.input(operand::B).shape;
    let columns = b[b.len() - 2];
    let sizes = Sizes { rows: matrices[0].shape[0], columns, k: matrices[0].shape[1] };
    let groups = op.grouped.groups;
    let group_scales = [DevicePtr(0); 2];
    let gemm = Gemm { kind: op.kind, name, sizes, groups, maps, group_scales };
    let of_groups = Groups { kind: op.kind, count: groups, offsets: offsets.pointer };
    Ok(vec![
        operands::dequantize(device, &operands)?,
        gemm.step(device, &offsets, &out, call.accumulate())?,
        operands::add_unheld_of_groups(device, &operands, &out, of_groups)?,
    ])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::OperandType;
    use deepwell_ir::ops::{GroupedRows, ScaledGroupedGemm};
    use deepwell_precision::{QuantFormat, scale_tiles};

    use super::*;

    #[test]
    fn refusals_say_what_is_taken() {
        let scales = |rows, k: usize| scale_tiles::shape(rows, k.div_ceil(32)).to_vec();
        for (align, k, output, expected) in [
            (32, 40, DType::Bf16, None),
            (32, 33, DType::Bf16, None),
            (128, 64, DType::Bf16, None),
            (8, 64, DType::Bf16, Some("takes groups of a multiple of 16 rows, not of 8")),
            (16, 64, DType::Bf16, Some("takes groups of a multiple of 32 rows, not 16")),
            (32, 64, DType::F32, Some("gives bf16, not f32")),
            (32, 0, DType::Bf16, Some("takes no empty matrices")),
        ] {
            let format = QuantFormat::MXFP8;
            let grouped = GroupedRows::new(2, align);
            let kind = GemmKind::Fprop;
            let op = ScaledGroupedGemm { kind, grouped, output, a: format, b: format };
            let stacked = |shape: &[usize]| [&[2], shape].concat();
            let operands: Vec<OperandType> = [
                (DType::E4m3, vec![96, k]),
                (DType::E8m0, scales(96, k)),
                (DType::E4m3, stacked(&[24, k])),
                (DType::E8m0, stacked(&scales(24, k))),
                (DType::I32, vec![3]),
                (output, vec![96, 24]),
            ]
            .map(|(dtype, shape)| OperandType { dtype, shape })
            .to_vec();
            let op = Op::from(op);
            let request = KernelRequest { op: &op, operands: &operands, input_count: 5 };
            assert_eq!(reject(&request).as_deref(), expected, "{align} {k} {output}");
        }
    }
}
