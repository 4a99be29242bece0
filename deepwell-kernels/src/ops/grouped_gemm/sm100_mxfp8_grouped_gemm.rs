//! `sm100_mxfp8_grouped_gemm.cu`: the GEMMs of groups of rows on tcgen05, with MXFP8 operands of
//! any granularity. Only the device knows the groups' offsets, so a launch is sized for all rows.

use deepwell_ir::{DType, GemmKind, KernelRequest, Op, Target};

use crate::KernelError;
use crate::ops::scaled_gemm::operand;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::gemm::{extents_fit, not_empty};
use crate::runtime::cuda::launch::tcgen05::{GemmSizes, TileShape};
use crate::runtime::cuda::launch::tcgen05_cost::ResultCost;
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes, scale_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::{CudaKernelSpec, TileSelection};

/// Group sizes are multiples of this: the K of one MMA.
const GROUP_ROWS: usize = 32;
/// Rows of a scale tile; GEMM tiles begin at multiples of it.
const SCALE_TILE_ROWS: usize = 128;
/// Row strides of operands are multiples of this, for tensor copies.
const WIDTH: usize = 16;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm100_mxfp8_grouped_gemm", &["scaled_grouped_gemm"], prepare)
        .architectures(&[Architecture::Sm100a, Architecture::Sm103a])
        .reject(reject)
        .predict(predict)
        .select_tile(select_tile)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::ScaledGroupedGemm(op) = request.op else {
        return Some(format!("takes scaled_grouped_gemm, not {}", request.op.name()));
    };
    let data = request.operands[operand::A].dtype;
    if data != DType::E4m3 {
        return Some(format!("takes e4m3 operands with scales of e8m0, not {data}"));
    }
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
    not_empty(request, &[0, 2]).or_else(|| extents_fit(request, &[0, 2]))
}

/// Sizes of a call: results of `rows` by `columns`, operands with `k` along the contraction.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) kind: GemmKind,
    pub(super) groups: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) k: usize,
}

impl Sizes {
    /// `a` and `b` are the shapes of the operands' data.
    pub(super) fn new(kind: GemmKind, groups: usize, a: &[usize], b: &[usize]) -> Sizes {
        let columns = if kind == GemmKind::Wgrad { b[0] } else { b[1] };
        Sizes { kind, groups, rows: a[0], columns, k: a[1] }
    }

    pub(super) fn of(request: &KernelRequest<'_>) -> Option<Sizes> {
        let Op::ScaledGroupedGemm(op) = request.op else { return None };
        let [a, b] = [0, op.b_input()].map(|index| request.operands[index].shape.as_slice());
        Some(Sizes::new(op.kind, op.grouped.groups, a, b))
    }

    /// Upper bound of the number of tiles of all groups.
    pub(super) fn tiles_max(self, shape: TileShape) -> usize {
        let down = match self.kind {
            GemmKind::Wgrad => self.groups * self.rows.div_ceil(shape.rows()),
            // Each group, and the rows after the groups, may begin and end with a tile that
            // includes other rows.
            _ => self.rows / shape.rows() + 2 * (self.groups + 1),
        };
        down * self.columns.div_ceil(shape.columns)
    }

    /// Models the groups, with equal sizes, as one GEMM of the same time: their tiles are stacked
    /// along M.
    pub(super) fn as_one(self, shape: TileShape) -> GemmSizes {
        let groups = self.groups.max(1);
        let (of_group, k) = match self.kind {
            GemmKind::Wgrad => (self.rows, self.k.div_ceil(groups).max(1)),
            // On average, the first half scale tile of a group belongs to the previous group.
            _ => (self.rows.div_ceil(groups) + SCALE_TILE_ROWS / 2, self.k),
        };
        let m = groups * of_group.next_multiple_of(shape.rows());
        GemmSizes { m, n: self.columns, k }
    }
}

fn select_tile(request: &KernelRequest<'_>, target: &Target) -> TileSelection {
    let shapes = TileShape::alone(Operands::Mx);
    let sizes = Sizes::of(request).expect("a grouped GEMM, as `reject` has seen");
    TileShape::select_by(shapes, |shape| sizes.as_one(shape), ResultCost::default(), target)
}

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let shapes = TileShape::alone(Operands::Mx);
    let sizes = Sizes::of(request).expect("a grouped GEMM, as `reject` has seen");
    let as_one = |shape| sizes.as_one(shape);
    TileShape::predicted_by(shapes, as_one, ResultCost::default(), request, target)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::ScaledGroupedGemm(op) = &call.call.op else {
        let got = call.call.op.name();
        return Err(call.refuse(format!("expected scaled_grouped_gemm, got {got}")));
    };
    let (a, b, out) = (call.input(operand::A), call.input(operand::B), call.output(0));
    let sizes = Sizes::new(op.kind, op.grouped.groups, &a.shape, &b.shape);
    let shape = TileShape::of_call(call, &TileShape::alone(Operands::Mx))?;
    let kind = if op.kind == GemmKind::Wgrad { "wgrad" } else { "rows" };
    let name = format!("sm100_mxfp8_grouped_gemm_{kind}_{}", shape.name());
    let function = device.function("sm100_mxfp8_grouped_gemm", &name, shape.shared_bytes())?;
    // The matrices of a stack are contiguous, as one matrix of more rows.
    let rows_of_b = b.elements() / sizes.k;
    let b = DeviceTensor { shape: vec![rows_of_b, sizes.k], ..b };
    let [rows_of_a, copied_of_b] = shape.copied_rows();
    let boxes = [
        k_major_boxes(&a, Operands::Mx, rows_of_a),
        scale_boxes(&call.input(operand::A_SCALES)),
        k_major_boxes(&b, Operands::Mx, copied_of_b),
        scale_boxes(&call.input(operand::B_SCALES)),
    ];
    let mut arguments = Vec::with_capacity(11);
    for boxes in boxes {
        arguments.push(Argument::TensorMap(device.tensor_map(&boxes)?));
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
    use super::*;

    #[test]
    fn grids_cover_every_way_to_fill_the_groups() {
        let [pair, _, _, small] = TileShape::alone(Operands::Mx)[..] else { panic!("four tiles") };
        let rows = Sizes::new(GemmKind::Fprop, 3, &[1024, 16], &[3, 130, 16]);
        assert_eq!((rows.tiles_max(small), rows.tiles_max(pair)), (2 * 16, 12));
        let wgrad = Sizes::new(GemmKind::Wgrad, 3, &[300, 1024], &[130, 1024]);
        assert_eq!((wgrad.tiles_max(small), wgrad.tiles_max(pair)), (2 * 9, 6));
    }
}
