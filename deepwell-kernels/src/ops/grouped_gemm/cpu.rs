//! The GEMMs of grouped rows: one GEMM of the backend per group, in order.

mod nvfp4;

use std::ops::Range;

use deepwell_ir::{DType, GemmKind, KernelRequest, Op};
use deepwell_precision::{BLOCK, ElementFormat, QuantFormat, packed, scale_tiles};
use half::bf16;

use crate::KernelError;
use crate::ops::scaled_gemm;
use crate::runtime::cpu::arena::{Arena, In};
use crate::runtime::cpu::gemm::{MxPart, Operand, Output, Tier, gemm};
use crate::runtime::cpu::gemm_output::{self, GemmTarget};
use crate::runtime::cpu::operands::{Operands, Run};

/// Elements of an operand: `[rows, columns]`, or a stack of such matrices.
#[derive(Clone, Copy, Debug)]
pub enum Matrix<'a> {
    /// FP32.
    F32(&'a [f32]),
    /// BF16.
    Bf16(&'a [bf16]),
    /// An MX format, quantized along the columns.
    Mx {
        /// Format of the elements.
        element: ElementFormat,
        /// Elements.
        data: &'a [u8],
        /// E8M0 scales in tiles, with separate tiles for each matrix of a stack.
        scales: &'a [u8],
    },
}

impl<'a> Matrix<'a> {
    fn is_mx(&self) -> bool {
        matches!(self, Matrix::Mx { .. })
    }

    /// The rows from `first` on, of a matrix with `columns` columns.
    fn rows_from(&self, first: usize, columns: usize) -> Operand<'a> {
        match *self {
            Matrix::F32(data) => Operand::rows_f32(&data[first * columns..], columns),
            Matrix::Bf16(data) => Operand::rows_bf16(&data[first * columns..], columns),
            Matrix::Mx { element, data, scales } => {
                let blocks = columns.div_ceil(BLOCK);
                let part = MxPart { first_row: first, first_block: 0, blocks };
                let data = &data[packed::len(element, first, columns)..];
                Operand::part_mx(element, data, scales, columns, part)
            }
        }
    }

    /// The columns from `first` on, of a quantized matrix with `columns` columns.
    fn columns_from(&self, first: usize, columns: usize) -> Operand<'a> {
        match *self {
            Matrix::Mx { element, data, scales } => {
                let blocks = columns.div_ceil(BLOCK);
                let part = MxPart { first_row: 0, first_block: first / BLOCK, blocks };
                let start = packed::len(element, 1, first).min(data.len());
                Operand::part_mx(element, &data[start..], scales, columns, part)
            }
            // Unquantized operands are stored as `[columns, rows]`; the caller transposes them.
            _ => self.rows_from(first, columns),
        }
    }

    /// Matrix `index` of a stack of `[rows, columns]`.
    fn of_stack(&self, index: usize, rows: usize, columns: usize) -> Operand<'a> {
        let elements = rows * columns;
        match *self {
            Matrix::F32(data) => Operand::rows_f32(&data[index * elements..][..elements], columns),
            Matrix::Bf16(data) => {
                Operand::rows_bf16(&data[index * elements..][..elements], columns)
            }
            Matrix::Mx { element, data, scales } => {
                let tiles = scale_tiles::tiled_len(rows, columns.div_ceil(BLOCK));
                let scales = &scales[index * tiles..][..tiles];
                let bytes = packed::len(element, rows, columns);
                Operand::rows_mx(element, &data[index * bytes..][..bytes], scales, columns)
            }
        }
    }
}

/// Sizes of grouped GEMMs.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Rows of the buffer, including those after the groups.
    pub rows: usize,
    /// Outputs of the layer.
    pub n: usize,
    /// Inputs of the layer.
    pub k: usize,
}

/// Computes one of the three GEMMs of a layer for each group of rows.
///
/// Unquantized operands: fprop takes `a` = x `[rows, k]` and `b` = w `[groups, n, k]`, dgrad dy
/// `[rows, n]` and w, wgrad dy and x. Quantized operands are stored along their contraction: w of
/// dgrad is `[groups, k, n]`, `a` of wgrad is `[n, rows]` and `b` is `[k, rows]`. `out` is
/// `[rows, n]`, `[rows, k]` or `[groups, n, k]`.
///
/// # Errors
///
/// If offsets do not ascend within the buffer (for quantized operands, in whole blocks), or if
/// [`gemm`] fails.
pub fn grouped_gemm(
    tier: Tier,
    kind: GemmKind,
    Sizes { rows, n, k }: Sizes,
    [a, b]: [Matrix<'_>; 2],
    offsets: &[i32],
    out: &mut Output<'_>,
    workspace: &mut [u8],
) -> Result<(), String> {
    let groups = check_offsets(offsets, rows, if a.is_mx() { BLOCK } else { 1 })?;
    for (index, group) in groups.iter().enumerate() {
        let (first, count) = (group.start, group.len());
        let (m, columns, contraction, a, b) = match kind {
            GemmKind::Fprop => (count, n, k, a.rows_from(first, k), b.of_stack(index, n, k)),
            GemmKind::Dgrad => {
                let b = match b.is_mx() {
                    true => b.of_stack(index, k, n),
                    false => b.of_stack(index, n, k).transposed(),
                };
                (count, k, n, a.rows_from(first, n), b)
            }
            GemmKind::Wgrad if a.is_mx() => {
                (n, k, count, a.columns_from(first, rows), b.columns_from(first, rows))
            }
            GemmKind::Wgrad => {
                let (a, b) = (a.rows_from(first, n), b.rows_from(first, k));
                (n, k, count, a.transposed(), b.transposed())
            }
        };
        let start = match kind {
            GemmKind::Wgrad => index * n * k,
            _ => first * columns,
        };
        let part = part_of(out, start..start + m * columns);
        gemm(tier, m, columns, contraction, a, b, part, workspace)
            .map_err(|error| error.to_string())?;
    }
    if kind != GemmKind::Wgrad {
        let columns = if kind == GemmKind::Fprop { n } else { k };
        let end = groups.last().map_or(0, |group| group.end);
        match out {
            Output::F32 { data, .. } => data[end * columns..].fill(0.0),
            Output::Bf16 { data } => data[end * columns..].fill(bf16::ZERO),
        }
    }
    Ok(())
}

/// Checks the offsets and returns the rows of each group.
pub(super) fn check_offsets(
    offsets: &[i32],
    rows: usize,
    multiple: usize,
) -> Result<Vec<Range<usize>>, String> {
    let places: Option<Vec<usize>> =
        offsets.iter().map(|&offset| usize::try_from(offset).ok()).collect();
    let fits = |places: &[usize]| {
        places.first() == Some(&0)
            && places.is_sorted()
            && places.iter().all(|place| place.is_multiple_of(multiple) && *place <= rows)
    };
    match places.filter(|places| fits(places)) {
        Some(places) => Ok(places.windows(2).map(|pair| pair[0]..pair[1]).collect()),
        None => Err(format!(
            "expected offsets that ascend from 0 to {rows} in multiples of {multiple}, got \
             {offsets:?}"
        )),
    }
}

pub(super) fn part_of<'a>(out: &'a mut Output<'_>, range: Range<usize>) -> Output<'a> {
    match out {
        Output::F32 { data, accumulate } => {
            Output::F32 { data: &mut data[range], accumulate: *accumulate }
        }
        Output::Bf16 { data } => Output::Bf16 { data: &mut data[range] },
    }
}

/// An operand in the arena.
enum MatrixIn {
    F32(In<f32>),
    Bf16(In<bf16>),
    Mx { element: ElementFormat, data: In<u8>, scales: In<u8> },
}

impl MatrixIn {
    /// The operand at `index`, of a GEMM of quantized operands in `format`.
    fn new(
        operands: &Operands<'_>,
        index: usize,
        format: Option<&QuantFormat>,
    ) -> Result<MatrixIn, KernelError> {
        Ok(match (operands.dtype(index), format) {
            (_, Some(format)) => MatrixIn::Mx {
                element: format.element,
                data: operands.input(index)?,
                scales: operands.input(index + 1)?,
            },
            (DType::Bf16, None) => MatrixIn::Bf16(operands.input(index)?),
            (DType::F32, None) => MatrixIn::F32(operands.input(index)?),
            _ => return Err(operands.unexpected(index, "f32 or bf16")),
        })
    }

    fn of<'a>(&self, arena: &'a Arena) -> Matrix<'a> {
        match self {
            MatrixIn::F32(data) => Matrix::F32(data.of(arena)),
            MatrixIn::Bf16(data) => Matrix::Bf16(data.of(arena)),
            MatrixIn::Mx { element, data, scales } => {
                let (data, scales) = (data.of(arena), scales.of(arena));
                Matrix::Mx { element: *element, data, scales }
            }
        }
    }
}

/// Returns the GEMM kind, the input indices of `b`'s data and of `offsets`, and the sizes.
pub(super) fn layout(
    op: &Op,
    shape: &dyn Fn(usize) -> Vec<usize>,
) -> Option<(GemmKind, [usize; 2], Sizes)> {
    let (kind, b, offsets, is_scaled) = match op {
        Op::GroupedGemm(_) => (GemmKind::Fprop, 1, 2, false),
        Op::GroupedGemmDgrad(_) => (GemmKind::Dgrad, 1, 2, false),
        Op::GroupedGemmWgrad(_) => (GemmKind::Wgrad, 1, 2, false),
        Op::ScaledGroupedGemm(op) => (op.kind, op.b_input(), op.plane_inputs(), true),
        _ => return None,
    };
    let (of_a, of_b) = (shape(0), shape(b));
    let sizes = match (kind, is_scaled) {
        (GemmKind::Fprop, _) => Sizes { rows: of_a[0], n: of_b[1], k: of_b[2] },
        (GemmKind::Dgrad, false) => Sizes { rows: of_a[0], n: of_b[1], k: of_b[2] },
        (GemmKind::Dgrad, true) => Sizes { rows: of_a[0], n: of_b[2], k: of_b[1] },
        (GemmKind::Wgrad, false) => Sizes { rows: of_a[0], n: of_a[1], k: of_b[1] },
        (GemmKind::Wgrad, true) => Sizes { rows: of_a[1], n: of_a[0], k: of_b[0] },
    };
    Some((kind, [b, offsets], sizes))
}

/// Formats of the operands of a GEMM of quantized ones.
fn formats(op: &Op) -> Option<[&QuantFormat; 2]> {
    match op {
        Op::ScaledGroupedGemm(op) => Some([&op.a, &op.b]),
        _ => None,
    }
}

pub(super) fn prepare(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let shape = |index: usize| operands.shape(index).to_vec();
    let Some((kind, [b, offsets], sizes)) = layout(op, &shape) else {
        return Err(operands.unknown_kernel());
    };
    let tier = operands.tier()?;
    let formats = formats(op);
    if formats.is_some_and(|[a, _]| !a.is_mx()) {
        return nvfp4::prepare(operands, tier, kind, [b, offsets], sizes);
    }
    let [of_a, of_b] = formats.map_or([None, None], |formats| formats.map(Some));
    let (a, b) = (MatrixIn::new(operands, 0, of_a)?, MatrixIn::new(operands, b, of_b)?);
    let offsets = operands.input::<i32>(offsets)?;
    let target = GemmTarget::new(operands, operands.output(0))?;
    let workspace = operands.workspace::<u8>()?;
    Ok(Box::new(move |arena| {
        let matrices = [a.of(arena), b.of(arena)];
        let mut out = target.output(arena);
        let offsets = offsets.of(arena);
        grouped_gemm(tier, kind, sizes, matrices, offsets, &mut out, workspace.of(arena))
    }))
}

/// Scratch of the GEMM of a single group with all rows.
pub(super) fn workspace_bytes(request: &KernelRequest<'_>, tier: Tier, _: usize) -> usize {
    let shape = |index: usize| request.operands[index].shape.clone();
    let Some((kind, [b, _], Sizes { rows, n, k })) = layout(request.op, &shape) else { return 0 };
    let sizes = match kind {
        GemmKind::Fprop => [rows, n, k],
        GemmKind::Dgrad => [rows, k, n],
        GemmKind::Wgrad => [n, k, rows],
    };
    if formats(request.op).is_some_and(|[a, _]| !a.is_mx()) {
        let [m, n, k] = sizes;
        return scaled_gemm::nvfp4::workspace_bytes(tier, m, n, k);
    }
    gemm_output::workspace_bytes(request, [0, b], sizes, tier)
}

#[cfg(test)]
mod tests;
