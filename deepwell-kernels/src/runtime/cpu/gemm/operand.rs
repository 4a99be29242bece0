//! Inputs and outputs of a GEMM, and the checks that make the kernels' pointers sound.

use std::any::TypeId;

use deepwell_precision::scale_tiles::{self, TILE_BYTES, shape};
use deepwell_precision::{ElementFormat, packed};
use half::bf16;

use crate::runtime::cpu::element::Element;

/// Elements of one operand.
#[derive(Clone, Copy, Debug)]
pub enum OperandData<'a> {
    /// FP32; the GEMM runs on the F32 tier.
    F32(&'a [f32]),
    /// BF16.
    Bf16(&'a [bf16]),
    /// An MX format: elements and one E8M0 scale per 32 elements along `k`.
    Mx {
        /// Format of the elements.
        element: ElementFormat,
        /// Elements, `[outer, k]` row-major, [packed](deepwell_precision::packed).
        data: &'a [u8],
        /// E8M0 scales (`2^(code - 127)`, `0xFF` is NaN) of `[outer, ceil(k / 32)]` blocks, in
        /// [tiles](deepwell_precision::scale_tiles). Padding is never read.
        scales: &'a [u8],
    },
}

/// Element type of an operand, for sizing a workspace before the operand exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataKind {
    /// [`OperandData::F32`].
    F32,
    /// [`OperandData::Bf16`].
    Bf16,
    /// [`OperandData::Mx`].
    Mx,
}

impl DataKind {
    /// The kind of a slice of `E`.
    #[must_use]
    pub fn of<E: Element>() -> Self {
        if TypeId::of::<E>() == TypeId::of::<bf16>() { DataKind::Bf16 } else { DataKind::F32 }
    }
}

/// One operand as a matrix `[outer, k]`, where `outer` is `m` for A and `n` for B.
///
/// Element `(i, j)` is at `i * outer_stride + j * k_stride`. A transposed operand is the same slice
/// with swapped strides.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// The elements.
    pub data: OperandData<'a>,
    /// Distance in elements between outer rows. For MX: `k`, or the row stride of the whole.
    pub outer_stride: usize,
    /// Distance in elements along `k`. For MX: 1.
    pub k_stride: usize,
    /// For MX: position of the scales, if the operand is a part of a larger one.
    pub part: Option<MxPart>,
}

/// Position of a part within a larger MX operand. The data slice begins at the part's first
/// element and keeps the row stride of the whole; the scales slice is that of the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MxPart {
    /// First row of the part within the whole; a multiple of 32.
    pub first_row: usize,
    /// First block of 32 along `k` of the part within the whole.
    pub first_block: usize,
    /// Blocks along `k` of the whole.
    pub blocks: usize,
}

impl<'a> Operand<'a> {
    /// BF16 rows `[outer, k]`, `row_stride` elements apart (`k` if there are no gaps).
    #[must_use]
    pub fn rows_bf16(data: &'a [bf16], row_stride: usize) -> Self {
        Self { data: OperandData::Bf16(data), outer_stride: row_stride, k_stride: 1, part: None }
    }

    /// F32 rows `[outer, k]`, `row_stride` elements apart.
    #[must_use]
    pub fn rows_f32(data: &'a [f32], row_stride: usize) -> Self {
        Self { data: OperandData::F32(data), outer_stride: row_stride, k_stride: 1, part: None }
    }

    /// Rows `[outer, k]` of either element type, `row_stride` elements apart.
    #[must_use]
    pub fn rows<E: Element>(data: &'a [E], row_stride: usize) -> Self {
        // Each cast is from a type to itself.
        match DataKind::of::<E>() {
            DataKind::Bf16 => Self::rows_bf16(bytemuck::cast_slice(data), row_stride),
            _ => Self::rows_f32(bytemuck::cast_slice(data), row_stride),
        }
    }

    /// MX rows `[outer, k]`, with scales in tiles.
    #[must_use]
    pub fn rows_mx(element: ElementFormat, data: &'a [u8], scales: &'a [u8], k: usize) -> Self {
        let data = OperandData::Mx { element, data, scales };
        Self { data, outer_stride: k, k_stride: 1, part: None }
    }

    /// Rows of a larger MX operand with row stride `row_stride` and all of its `scales`.
    #[must_use]
    pub fn part_mx(
        element: ElementFormat,
        data: &'a [u8],
        scales: &'a [u8],
        row_stride: usize,
        part: MxPart,
    ) -> Self {
        let data = OperandData::Mx { element, data, scales };
        Self { data, outer_stride: row_stride, k_stride: 1, part: Some(part) }
    }

    /// The elements of an MX operand from row `row` and column `column` on, a multiple of 32.
    #[inline(always)]
    pub(super) fn mx_from(&self, row: usize, column: usize) -> usize {
        let OperandData::Mx { element, .. } = self.data else { return 0 };
        packed::len(element, row, self.outer_stride) + packed::len(element, 1, column)
    }

    /// Offset of a block's scale within the scales.
    #[inline(always)]
    pub(super) fn scale_offset(&self, row: usize, block: usize, k: usize) -> usize {
        match self.part {
            None => scale_tiles::offset(row, block, k.div_ceil(32)),
            Some(MxPart { first_row, first_block, blocks }) => {
                scale_tiles::offset(first_row + row, first_block + block, blocks)
            }
        }
    }

    /// Views memory of layout `[k, outer]` as an operand `[outer, k]`.
    ///
    /// `Operand::rows_bf16(dy, columns).transposed()` reads `dy[k, columns]` as `[columns, k]`.
    /// (MX formats have their blocks along `k` and cannot be transposed: [`GemmError::MxLayout`].)
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { outer_stride: self.k_stride, k_stride: self.outer_stride, ..self }
    }

    /// The type of the numbers.
    #[must_use]
    pub fn kind(&self) -> DataKind {
        match self.data {
            OperandData::F32(_) => DataKind::F32,
            OperandData::Bf16(_) => DataKind::Bf16,
            OperandData::Mx { .. } => DataKind::Mx,
        }
    }

    /// Checks that every element of `[outer, k]` lies inside the slices.
    pub(super) fn validate(
        &self,
        name: &'static str,
        outer: usize,
        k: usize,
    ) -> Result<(), GemmError> {
        if outer == 0 || k == 0 {
            return Ok(());
        }
        let check = |what: &'static str, needed: Option<usize>, got: usize| match needed {
            Some(needed) if needed <= got => Ok(()),
            needed => Err(GemmError::OperandTooShort {
                operand: name,
                what,
                outer,
                k,
                needed: needed.unwrap_or(usize::MAX),
                got,
            }),
        };
        let last_element = || {
            let row = (outer - 1).checked_mul(self.outer_stride)?;
            let column = (k - 1).checked_mul(self.k_stride)?;
            row.checked_add(column)?.checked_add(1)
        };
        match self.data {
            OperandData::F32(data) => check("elements", last_element(), data.len()),
            OperandData::Bf16(data) => check("elements", last_element(), data.len()),
            OperandData::Mx { element, data, scales } => {
                let is_apart = match self.part {
                    None => self.outer_stride != k,
                    Some(part) => self.outer_stride < k || !part.first_row.is_multiple_of(32),
                };
                if self.k_stride != 1 || is_apart {
                    return Err(GemmError::MxLayout {
                        operand: name,
                        k,
                        outer_stride: self.outer_stride,
                        k_stride: self.k_stride,
                    });
                }
                let bytes = |elements: usize| {
                    let bits = elements.checked_mul(element.bits() as usize)?;
                    Some(bits.div_ceil(8))
                };
                let last_byte = || {
                    let row = (outer - 1).checked_mul(bytes(self.outer_stride)?)?;
                    row.checked_add(bytes(k)?)
                };
                check("data", last_byte(), data.len())?;
                let (rows, blocks) = match self.part {
                    None => (outer, k.div_ceil(32)),
                    Some(part) => {
                        let needed = part.first_block.saturating_add(k.div_ceil(32));
                        check("blocks of scales", Some(needed), part.blocks)?;
                        (outer.saturating_add(part.first_row), part.blocks)
                    }
                };
                let [down, along, _] = shape(rows, blocks);
                let bytes = down.checked_mul(along).and_then(|tiles| tiles.checked_mul(TILE_BYTES));
                check("scales", bytes, scales.len())
            }
        }
    }
}

/// Output of a GEMM: row-major `[m, n]` without gaps.
#[derive(Debug)]
pub enum Output<'a> {
    /// FP32.
    F32 {
        /// The result.
        data: &'a mut [f32],
        /// Whether to add to the previous values instead of overwriting them.
        accumulate: bool,
    },
    /// BF16, rounded to nearest even from the FP32 sum.
    Bf16 {
        /// The result.
        data: &'a mut [bf16],
    },
}

impl<'a> Output<'a> {
    /// An output of either element type that is overwritten.
    #[must_use]
    pub fn overwrite<E: Element>(data: &'a mut [E]) -> Self {
        // Each cast is from a type to itself.
        match DataKind::of::<E>() {
            DataKind::Bf16 => Output::Bf16 { data: bytemuck::cast_slice_mut(data) },
            _ => Output::F32 { data: bytemuck::cast_slice_mut(data), accumulate: false },
        }
    }

    pub(crate) fn validate(&self, m: usize, n: usize) -> Result<(), GemmError> {
        let got = match self {
            Output::F32 { data, .. } => data.len(),
            Output::Bf16 { data } => data.len(),
        };
        match m.checked_mul(n) {
            Some(needed) if needed == got => Ok(()),
            _ => Err(GemmError::OutputLength { m, n, got }),
        }
    }

    /// Writes the result of a GEMM with `k = 0`.
    pub(super) fn add_nothing(&mut self) {
        match self {
            Output::F32 { accumulate: true, .. } => {}
            Output::F32 { data, .. } => data.fill(0.0),
            Output::Bf16 { data } => data.fill(bf16::ZERO),
        }
    }
}

/// Reason for refusing a GEMM. In all cases nothing has been written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GemmError {
    /// A slice ends before the last element that the sizes and strides require.
    #[error(
        "operand {operand}: expected at least {needed} {what} for [{outer}, {k}] \
         with its strides, got {got}"
    )]
    OperandTooShort {
        /// `A` or `B`.
        operand: &'static str,
        /// `elements`, `data` or `scales`.
        what: &'static str,
        /// `m` for A, `n` for B.
        outer: usize,
        /// The contraction's length.
        k: usize,
        /// Required length (`usize::MAX` on overflow).
        needed: usize,
        /// The slice's length.
        got: usize,
    },
    /// An MX operand that is not `[outer, k]` without gaps.
    #[error(
        "operand {operand}: expected MX rows with strides [{k}, 1], \
         got [{outer_stride}, {k_stride}]\n\
         hint: quantize along the contraction; blocks of another direction cannot be contracted"
    )]
    MxLayout {
        /// `A` or `B`.
        operand: &'static str,
        /// The contraction's length.
        k: usize,
        /// The operand's outer stride.
        outer_stride: usize,
        /// The operand's stride along `k`.
        k_stride: usize,
    },
    /// The output slice does not hold exactly `m * n` elements.
    #[error("output: expected [{m}, {n}] elements, got a slice of {got}")]
    OutputLength {
        /// Rows.
        m: usize,
        /// Columns.
        n: usize,
        /// The slice's length.
        got: usize,
    },
    /// The workspace is smaller than [`workspace_bytes`](super::workspace_bytes).
    #[error(
        "workspace: expected at least {needed} bytes, got {got}\n\
         hint: size it with `workspace_bytes`"
    )]
    WorkspaceTooSmall {
        /// Bytes needed.
        needed: usize,
        /// Bytes given.
        got: usize,
    },
    /// The CPU or the operating system does not offer the tier.
    #[error(
        "tier `{tier}` cannot run here, the best that can is `{best}`\n\
         hint: ask `Tier::is_available` first"
    )]
    TierUnavailable {
        /// The requested tier.
        tier: &'static str,
        /// The best tier of this machine.
        best: &'static str,
    },
    /// The environment names no tier.
    #[error("`{variable}`: expected `{expected}`, got `{got}`")]
    UnknownTier {
        /// Name of the variable.
        variable: &'static str,
        /// The names of all tiers.
        expected: String,
        /// The value of the variable.
        got: String,
    },
}
