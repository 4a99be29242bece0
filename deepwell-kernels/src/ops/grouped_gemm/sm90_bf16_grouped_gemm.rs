//! `sm90_bf16_grouped_gemm.cu`: the GEMMs of groups of rows on wgmma, with BF16 operands. Only the
//! device knows the groups' offsets, so a launch is sized for all rows.

use deepwell_ir::ops::GroupedRows;
use deepwell_ir::{GemmKind, KernelRequest, Op};

use super::sm90_mxfp8_grouped_gemm::{BOX_ROWS, Sizes};
use crate::KernelError;
use crate::ops::scaled_gemm::sm90_mxfp8_gemm::{
    SHARED_BESIDE_STAGES, SHARED_LIMIT, THREADS, TILE_COLUMNS,
};
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{
    Argument, DevicePtr, Launch, TensorMap, TensorMapElement, TensorMapSpec, TensorMapSwizzle,
};
use crate::runtime::cuda::launch::gemm::{extents_fit, not_empty};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes, mn_major_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

/// Bytes of a stage: 256 rows and 128 columns, 64 along K.
const STAGE_BYTES: usize = (256 + TILE_COLUMNS) * 128;
/// Shared memory with as many stages as fit.
const SHARED_BYTES: u32 =
    (SHARED_LIMIT - (SHARED_LIMIT - SHARED_BESIDE_STAGES) % STAGE_BYTES) as u32;
/// Row strides of operands are multiples of this, for tensor copies.
const WIDTH: usize = 8;
/// K of one wgmma: group sizes are multiples of it if rows are the contraction.
pub(super) const STEP_K: usize = 16;
/// Share of the BF16 peak: 45 to 69 % on an H200 with experts of ordinary size
/// (`benchmarks/grouped_gemm_2026-11-23.md`).
pub(super) const SHARE: f64 = 0.6;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new(
    "cuda_sm90_bf16_grouped_gemm",
    &["grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad"],
    prepare,
)
.architectures(&[Architecture::Sm90a])
.reject(reject)
.predict(|request, target| Rates::of(target).roofline_s(request, SHARE))];

/// Returns the GEMM kind of an op, and its groups.
fn kind_of(op: &Op) -> Option<(GemmKind, GroupedRows)> {
    match op {
        Op::GroupedGemm(op) => Some((GemmKind::Fprop, op.grouped)),
        Op::GroupedGemmDgrad(op) => Some((GemmKind::Dgrad, op.grouped)),
        Op::GroupedGemmWgrad(op) => Some((GemmKind::Wgrad, op.grouped)),
        _ => None,
    }
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Some((kind, grouped)) = kind_of(request.op) else {
        return Some(format!("takes grouped_gemm and its gradients, not {}", request.op.name()));
    };
    if kind == GemmKind::Wgrad && !grouped.align.is_multiple_of(STEP_K) {
        let align = grouped.align;
        return Some(format!("takes groups of a multiple of {STEP_K} rows, not of {align}"));
    }
    let widths = [0, 1].map(|index| request.operands[index].shape.last().copied().unwrap_or(0));
    if let Some(width) = widths.into_iter().find(|width| !width.is_multiple_of(WIDTH)) {
        return Some(format!("takes rows of a multiple of {WIDTH} elements, not of {width}"));
    }
    all_bf16(request, &[0, 1])
        .or_else(|| not_empty(request, &[0, 1]))
        .or_else(|| extents_fit(request, &[0, 1]))
}

/// Boxes of 64 by 64 of a stack of matrices `[k, columns]`.
fn stack_boxes(stack: &DeviceTensor) -> TensorMapSpec {
    let [groups, k, columns] = [0, 1, 2].map(|axis| stack.shape[axis] as u64);
    let row_bytes = columns * 2;
    TensorMapSpec {
        base: stack.pointer,
        element: TensorMapElement::Bf16,
        sizes: vec![columns, k, groups, 1],
        strides_bytes: vec![row_bytes, k * row_bytes, groups * k * row_bytes],
        box_sizes: vec![64, 64, 1, 1],
        swizzle: TensorMapSwizzle::Bytes128,
    }
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Some((kind, grouped)) = kind_of(&call.call.op) else {
        let got = call.call.op.name();
        return Err(call.refuse(format!("expected grouped_gemm or a gradient, got {got}")));
    };
    let (a, b, out) = (call.input(0), call.input(1), call.output(0));
    let width = |tensor: &DeviceTensor| tensor.shape.last().copied().unwrap_or(0);
    let (name, sizes) = match kind {
        GemmKind::Fprop => {
            let columns = b.shape[1];
            ("fprop", Sizes { rows: a.shape[0], columns, k: width(&a) })
        }
        GemmKind::Dgrad => ("dgrad", Sizes { rows: a.shape[0], columns: width(&b), k: width(&a) }),
        GemmKind::Wgrad => ("wgrad", Sizes { rows: width(&a), columns: width(&b), k: a.shape[0] }),
    };
    let boxes = match kind {
        GemmKind::Fprop => {
            // The matrices of a stack are contiguous, as one matrix of more rows.
            let rows = b.elements() / sizes.k;
            let b = DeviceTensor { shape: vec![rows, sizes.k], ..b };
            [
                k_major_boxes(&a, Operands::Bf16, BOX_ROWS),
                k_major_boxes(&b, Operands::Bf16, TILE_COLUMNS),
            ]
        }
        GemmKind::Dgrad => [k_major_boxes(&a, Operands::Bf16, BOX_ROWS), stack_boxes(&b)],
        GemmKind::Wgrad => [mn_major_boxes(&a, Operands::Bf16), mn_major_boxes(&b, Operands::Bf16)],
    };
    let maps = [device.tensor_map(&boxes[0])?, device.tensor_map(&boxes[1])?];
    let group_scales = [DevicePtr(0); 2];
    let gemm = Gemm { kind, name, sizes, groups: grouped.groups, maps, group_scales };
    let offsets = call.input(2);
    Ok(vec![gemm.step(device, &offsets, &out, call.accumulate())?])
}

/// Parameters of a launch.
pub(super) struct Gemm {
    pub(super) kind: GemmKind,
    /// `fprop`, `dgrad`, `wgrad` or `wgrad_k_major`.
    pub(super) name: &'static str,
    pub(super) sizes: Sizes,
    pub(super) groups: usize,
    pub(super) maps: [TensorMap; 2],
    /// Scales of each group of both operands, FP32 factors of the sums; null for operands without.
    pub(super) group_scales: [DevicePtr; 2],
}

impl Gemm {
    pub(super) fn step(
        self,
        device: &mut Device<'_>,
        offsets: &DeviceTensor,
        out: &DeviceTensor,
        accumulate: bool,
    ) -> Result<Step, KernelError> {
        let Gemm { kind, name, sizes, groups, maps, group_scales } = self;
        let is_k_major = ["fprop", "wgrad_k_major"].contains(&name);
        let name = format!("sm90_bf16_grouped_gemm_{name}");
        let function = device.function("sm90_bf16_grouped_gemm", &name, SHARED_BYTES)?;
        let mut arguments = maps.map(Argument::TensorMap).to_vec();
        arguments.extend([
            offsets.argument(),
            out.argument(),
            Argument::I32(groups as i32),
            Argument::I32(sizes.rows as i32),
            Argument::I32(sizes.columns as i32),
        ]);
        arguments.push(match kind {
            GemmKind::Wgrad => Argument::U32(accumulate.into()),
            _ => Argument::I32(sizes.k as i32),
        });
        if is_k_major {
            arguments.extend(group_scales.map(Argument::Pointer));
        }
        let ctas = sizes.tiles_max(kind, groups).min(device.sm_count() as usize);
        Ok(Step::Launch(Launch {
            function,
            grid: [ctas as u32, 1, 1],
            block: [THREADS, 1, 1],
            cluster: [1, 1, 1],
            shared_bytes: SHARED_BYTES,
            programmatic: false,
            arguments,
        }))
    }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::{DType, OperandType, ops};

    use super::*;

    #[test]
    fn refusals_say_what_is_taken() {
        let (bf16, f32) = (DType::Bf16, DType::F32);
        for (dtype, align, k, expected) in [
            (bf16, 1, 8, Some("takes groups of a multiple of 16 rows, not of 1")),
            (bf16, 32, 8, None),
            (bf16, 32, 12, Some("takes rows of a multiple of 8 elements, not of 12")),
            (f32, 32, 8, Some("takes bf16 operands, not f32")),
            (bf16, 32, 0, Some("takes no empty matrices")),
        ] {
            let grouped = GroupedRows::new(2, align);
            let op = Op::from(ops::GroupedGemmWgrad { grouped });
            let shapes = [vec![96, 16], vec![96, k], vec![3], vec![2, 16, k]];
            let dtypes = [dtype, dtype, DType::I32, f32];
            let operand = |(dtype, shape)| OperandType { dtype, shape };
            let operands: Vec<_> = dtypes.into_iter().zip(shapes).map(operand).collect();
            let request = KernelRequest { op: &op, operands: &operands, input_count: 3 };
            assert_eq!(reject(&request).as_deref(), expected, "{dtype} {align} {k}");
        }
    }

    #[test]
    fn four_stages_fit() {
        assert_eq!(SHARED_BYTES as usize, SHARED_BESIDE_STAGES + 4 * STAGE_BYTES);
    }
}
