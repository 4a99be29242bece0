//! `sm90_mxfp8_grouped_gemm.cu`: the GEMMs of groups of rows on wgmma, with MXFP8 operands at
//! granularity 128. Only the device knows the groups' offsets, so a launch is sized for all rows.

use deepwell_ir::{DType, GemmKind, KernelRequest, Op, Target};

use crate::KernelError;
use crate::ops::scaled_gemm::operand;
use crate::ops::scaled_gemm::sm90_mxfp8_gemm::{STAGE_K, THREADS, TILE_COLUMNS, TileShape};
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{
    Argument, Launch, TensorMapElement, TensorMapSpec, TensorMapSwizzle,
};
use crate::runtime::cuda::launch::gemm::{extents_fit, not_empty};
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes, scale_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;
use crate::runtime::predict::Rates;

/// The tile; the last tile of a group may have half of the rows.
const TILE: TileShape = TileShape { waves: 2, across: 1 };
/// Group sizes are multiples of this: the rows of a scale tile, and of half a tile.
const GROUP_ROWS: usize = 128;
/// Rows of `a` in a box: half a tile.
pub(super) const BOX_ROWS: usize = 128;
/// Results of wgrad that are stored by tensor copies: boxes of this many rows and all columns of a
/// warp, in parts as wide as the swizzle.
const COPIED_ROWS: usize = 16;
const COPIED_COLUMNS: usize = 32;
/// Row strides of operands are multiples of this, for tensor copies.
const WIDTH: usize = 16;
/// Shares of the FP8 peak of fprop and dgrad, and of wgrad, where each column has its own scales:
/// 36 to 54 % and 24 to 37 % on an H200 with experts of ordinary size
/// (`benchmarks/grouped_gemm_2026-11-23.md`).
const SHARE: f64 = 0.45;
const WGRAD_SHARE: f64 = 0.3;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm90_mxfp8_grouped_gemm", &["scaled_grouped_gemm"], prepare)
        .architectures(&[Architecture::Sm90a])
        .reject(reject)
        .predict(predict)];

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let is_wgrad = matches!(request.op, Op::ScaledGroupedGemm(op) if op.kind == GemmKind::Wgrad);
    Rates::of(target).roofline_s(request, if is_wgrad { WGRAD_SHARE } else { SHARE })
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::ScaledGroupedGemm(op) = request.op else {
        return Some(format!("takes scaled_grouped_gemm, not {}", request.op.name()));
    };
    for (name, format) in [("a", op.a), ("b", op.b)] {
        let elements = usize::from(format.block.k);
        if elements != STAGE_K {
            return Some(format!(
                "takes one scale for {STAGE_K} elements, `{name}` has one for {elements}"
            ));
        }
    }
    let align = op.grouped.align;
    if !align.is_multiple_of(GROUP_ROWS) {
        return Some(format!("takes groups of a multiple of {GROUP_ROWS} rows, not of {align}"));
    }
    let output = request.operands[request.input_count].dtype;
    if op.kind != GemmKind::Wgrad && output != DType::Bf16 {
        return Some(format!("gives bf16, not {output}"));
    }
    let k = request.operands[operand::A].shape[1];
    if !k.is_multiple_of(WIDTH) {
        return Some(format!("takes a contraction in multiples of {WIDTH}, not {k}"));
    }
    not_empty(request, &[0, 2]).or_else(|| extents_fit(request, &[0, 2]))
}

/// Sizes of a call: results of `rows` by `columns`, operands with `k` along the contraction.
pub(super) struct Sizes {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) k: usize,
}

impl Sizes {
    /// `a` and `b` are the shapes of the operands' data.
    fn new(kind: GemmKind, a: &[usize], b: &[usize]) -> Sizes {
        let columns = if kind == GemmKind::Wgrad { b[0] } else { b[1] };
        Sizes { rows: a[0], columns, k: a[1] }
    }

    /// Upper bound of the number of tiles of all groups.
    pub(super) fn tiles_max(&self, kind: GemmKind, groups: usize) -> usize {
        let down = match kind {
            GemmKind::Wgrad => groups * self.rows.div_ceil(TILE.rows()),
            // Each group, and the rows after the groups, may end with a partial tile.
            _ => self.rows / TILE.rows() + groups + 1,
        };
        down * self.columns.div_ceil(TILE_COLUMNS)
    }
}

/// Boxes of a warp's part of a tile of the FP32 matrices `[groups, rows, columns]`.
fn result_boxes(out: &DeviceTensor) -> TensorMapSpec {
    let [groups, rows, columns] = [0, 1, 2].map(|axis| out.shape[axis]);
    let row_bytes = columns * size_of::<f32>();
    let part_bytes = COPIED_COLUMNS * size_of::<f32>();
    let bytes = [row_bytes, part_bytes, rows * row_bytes];
    let parts = TILE_COLUMNS / COPIED_COLUMNS;
    TensorMapSpec {
        base: out.pointer,
        element: TensorMapElement::F32,
        sizes: [COPIED_COLUMNS, rows, columns / COPIED_COLUMNS, groups].map(|n| n as u64).to_vec(),
        strides_bytes: bytes.map(|n| n as u64).to_vec(),
        box_sizes: [COPIED_COLUMNS, COPIED_ROWS, parts, 1].map(|n| n as u32).to_vec(),
        swizzle: TensorMapSwizzle::Bytes128,
    }
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::ScaledGroupedGemm(op) = &call.call.op else {
        let got = call.call.op.name();
        return Err(call.refuse(format!("expected scaled_grouped_gemm, got {got}")));
    };
    let (a, b, out) = (call.input(operand::A), call.input(operand::B), call.output(0));
    let sizes = Sizes::new(op.kind, &a.shape, &b.shape);
    let by_copies = op.kind == GemmKind::Wgrad
        && !call.accumulate()
        && sizes.columns.is_multiple_of(COPIED_COLUMNS);
    let name = match (op.kind, op.b.block.is_square()) {
        // A square's scale is stored for each of its rows.
        (GemmKind::Wgrad, _) if by_copies => "sm90_mxfp8_grouped_gemm_wgrad",
        (GemmKind::Wgrad, _) => "sm90_mxfp8_grouped_gemm_wgrad_add",
        (_, true) => "sm90_mxfp8_grouped_gemm_squares",
        (_, false) => "sm90_mxfp8_grouped_gemm_rows",
    };
    let shared_bytes = match by_copies {
        true => TILE.shared_bytes_staging(COPIED_ROWS * TILE_COLUMNS * size_of::<f32>()),
        false => TILE.shared_bytes(),
    };
    let function = device.function("sm90_mxfp8_grouped_gemm", name, shared_bytes)?;
    // The matrices of a stack are contiguous, as one matrix of more rows.
    let rows_of_b = b.elements() / sizes.k;
    let b = DeviceTensor { shape: vec![rows_of_b, sizes.k], ..b };
    let boxes = [
        k_major_boxes(&a, Operands::Mx, BOX_ROWS),
        scale_boxes(&call.input(operand::A_SCALES)),
        k_major_boxes(&b, Operands::Mx, TILE_COLUMNS),
        scale_boxes(&call.input(operand::B_SCALES)),
    ];
    let mut arguments = Vec::with_capacity(11);
    for boxes in boxes {
        arguments.push(Argument::TensorMap(device.tensor_map(&boxes)?));
    }
    let offsets = call.input(op.plane_inputs()).argument();
    if by_copies {
        arguments.extend([Argument::TensorMap(device.tensor_map(&result_boxes(&out))?), offsets]);
    } else {
        arguments.extend([offsets, out.argument()]);
    }
    arguments.extend([
        Argument::I32(op.grouped.groups as i32),
        Argument::I32(sizes.rows as i32),
        Argument::I32(sizes.columns as i32),
        Argument::I32(sizes.k as i32),
    ]);
    if op.kind == GemmKind::Wgrad && !by_copies {
        arguments.push(Argument::U32(call.accumulate().into()));
    }
    let ctas = sizes.tiles_max(op.kind, op.grouped.groups).min(device.sm_count() as usize);
    Ok(vec![Step::Launch(Launch {
        function,
        grid: [ctas as u32, 1, 1],
        block: [THREADS, 1, 1],
        cluster: [1, 1, 1],
        shared_bytes,
        programmatic: false,
        arguments,
    })])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{Axis, GroupedRows, ScaledGroupedGemm};
    use deepwell_ir::{OperandType, Storage};
    use deepwell_precision::QuantFormat;

    use super::*;

    /// Operands of fprop: data and scales of `a`, of a stack `b`, offsets, result.
    fn operands(op: &ScaledGroupedGemm, k: usize) -> Vec<OperandType> {
        let (rows, n, groups) = (512, 24, op.grouped.groups);
        let planes = |format, rows: usize, stack: &[usize]| -> Vec<OperandType> {
            let storage =
                Storage::Planes { format, axis: Axis::Row, shape: [rows, k].map(Into::into) };
            let planes = storage.planes().unwrap().into_iter();
            let shape = |shape: deepwell_ir::Shape| [stack, &shape.as_fixed().unwrap()].concat();
            planes
                .map(|plane| OperandType { dtype: plane.dtype, shape: shape(plane.shape) })
                .collect()
        };
        let mut all = planes(op.a, rows, &[]);
        all.extend(planes(op.b, n, &[groups]));
        all.push(OperandType { dtype: DType::I32, shape: vec![groups + 1] });
        all.push(OperandType { dtype: op.output, shape: vec![rows, n] });
        all
    }

    #[test]
    fn refusals_say_what_is_taken() {
        let (fine, coarse) = (QuantFormat::MXFP8, QuantFormat::MXFP8_128);
        for (format, align, output, k, expected) in [
            (coarse, 128, DType::Bf16, 64, None),
            (coarse, 256, DType::Bf16, 16, None),
            (
                coarse,
                32,
                DType::Bf16,
                64,
                Some("takes groups of a multiple of 128 rows, not of 32"),
            ),
            (
                fine,
                128,
                DType::Bf16,
                64,
                Some("takes one scale for 128 elements, `a` has one for 32"),
            ),
            (coarse, 128, DType::F32, 64, Some("gives bf16, not f32")),
            (coarse, 128, DType::Bf16, 40, Some("takes a contraction in multiples of 16, not 40")),
            (coarse, 128, DType::Bf16, 0, Some("takes no empty matrices")),
        ] {
            let op = ScaledGroupedGemm {
                kind: GemmKind::Fprop,
                grouped: GroupedRows::new(3, align),
                output,
                a: format,
                b: format,
            };
            let operands = operands(&op, k);
            let (op, input_count) = (Op::from(op), operands.len() - 1);
            let request = KernelRequest { op: &op, operands: &operands, input_count };
            assert_eq!(reject(&request).as_deref(), expected, "{} {align} {k}", format.name());
        }
    }

    #[test]
    fn grids_cover_every_way_to_fill_the_groups() {
        let sizes = Sizes { rows: 1024, columns: 130, k: 16 };
        // Four tiles of 256 rows, one more per group and for the rows after the groups; two across.
        assert_eq!(sizes.tiles_max(GemmKind::Fprop, 3), 2 * (4 + 3 + 1));
        assert_eq!(sizes.tiles_max(GemmKind::Wgrad, 3), 2 * 3 * 4);
    }

    #[test]
    fn results_that_are_copied_leave_room_for_three_stages() {
        assert_eq!(TILE.shared_bytes_staging(16 * 128 * 4), 1024 + 8 * 8192 + 256 + 3 * 52_096);
    }
}
