//! The error of a quantized GEMM, on one tile of its output.

use std::ops::Range;

use deepwell_precision::{GemmKind, QuantFormat};
use serde::{Deserialize, Serialize};

use super::quantize::{grouped_planes_of, groups_of, planes_of, stacked_planes_of};
use super::{Axis, Check, product};
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, Dim, OpError, Shape, Storage};

/// Rows and columns of the output tile on which the error of a GEMM is measured.
pub const SAMPLED_ROWS: usize = 128;

/// The first of the rows of a sample among `rows` rows: in the middle, at a multiple of the rows of
/// a tile of scales.
///
/// ```
/// use deepwell_ir::ops::first_sampled_row;
/// assert_eq!([0, 128, 300, 1024].map(first_sampled_row), [0, 0, 0, 384]);
/// ```
pub fn first_sampled_row(rows: usize) -> usize {
    rows.saturating_sub(SAMPLED_ROWS) / 2 / SAMPLED_ROWS * SAMPLED_ROWS
}

/// The group whose tile measures a grouped GEMM, and its rows: the first of the groups with the
/// most rows.
///
/// ```
/// use deepwell_ir::ops::sampled_group;
/// assert_eq!(sampled_group(&[0, 128, 384, 384, 640]), (1, 128..384));
/// assert_eq!(sampled_group(&[0, 0]), (0, 0..0));
/// ```
pub fn sampled_group(offsets: &[i32]) -> (usize, Range<usize>) {
    let row = |index: usize| offsets.get(index).map_or(0, |&row| row.max(0) as usize);
    let groups =
        (0..offsets.len().saturating_sub(1)).map(|group| (group, row(group)..row(group + 1)));
    let larger = |(best, rows): (usize, Range<usize>), (group, other): (usize, Range<usize>)| {
        if other.len() > rows.len() { (group, other) } else { (best, rows) }
    };
    groups.reduce(larger).unwrap_or((0, 0..0))
}

/// x `[R, C]` → the part of x that an output tile of a GEMM reads: [`SAMPLED_ROWS`] rows,
/// `[128, depth]`, or as many columns, `[depth, 128]`, from [`first_sampled_row`] on. The
/// contraction begins with its first element. Elements beyond x are zeros.
///
/// With offsets i32 `[G + 1]` as a second input, x is an operand of a grouped GEMM, and the sample
/// that of the [`sampled_group`]: x `[R, C]` has groups of rows, of which rows are sampled or, for
/// [`Axis::Column`], the contraction goes through; x `[G, N, K]` is a stack of matrices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleOperand {
    /// Axis of the contraction: rows of x for [`Axis::Row`], columns for [`Axis::Column`].
    pub axis: Axis,
    /// Elements along the contraction.
    pub depth: usize,
}

impl OpRule for SampleOperand {
    fn name(&self) -> &'static str {
        "sample_operand"
    }

    fn attributes(&self) -> String {
        format!("axis={} depth={}", self.axis.name(), self.depth)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = if inputs.len() > 1 { &["x", "offsets"][..] } else { &["x"] };
        let check = Check::count(self.name(), inputs, names)?;
        let dtype = check.same_float(&[0])?;
        match (inputs[0].shape.0.len(), names.len()) {
            (3, 2) => {
                let groups = offsets_groups(&check, 1)?;
                check.shape(0, &Shape([&[groups], &inputs[0].shape.0[1..]].concat()))?;
            }
            (_, 2) => {
                offsets_groups(&check, 1)?;
                check.rank(0, 2)?;
            }
            _ => {
                check.rank(0, 2)?;
            }
        }
        let shape = match self.axis {
            Axis::Row => Shape::new([SAMPLED_ROWS, self.depth]),
            Axis::Column => Shape::new([self.depth, SAMPLED_ROWS]),
            Axis::Both => return Err(check.error("axis row or column", self.axis.name())),
        };
        Ok(vec![OutputType::statistic("", shape, dtype)])
    }

    fn flops(&self, _: &[Vec<usize>]) -> u64 {
        0
    }
}

/// Samples of the unquantized operands a and b of a GEMM ([`SampleOperand`]), the planes of a, the
/// planes of b → f32 `[2]`: over the sampled output tile, the sum of squares of the product of the
/// samples, and the sum of squares of the difference between the product of the quantized operands
/// and this product. The contraction ends with the shorter sample. If the formats have a transform,
/// both do: the product of transformed operands is the product of the operands.
///
/// With offsets i32 `[G + 1]` as the last input, the GEMM is a grouped one (see
/// [`super::ScaledGroupedGemm`] for the shapes of planes), and the tile that of the
/// [`sampled_group`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProductError {
    /// GEMM of the linear layer.
    pub kind: GemmKind,
    /// Name of the layer's weight.
    pub weight: String,
    /// Quantization format of a.
    pub a: QuantFormat,
    /// Quantization format of b.
    pub b: QuantFormat,
}

impl ProductError {
    /// Axes of the contraction in the unquantized operands.
    pub fn axes(&self) -> [Axis; 2] {
        match self.kind {
            GemmKind::Fprop => [Axis::Row, Axis::Row],
            GemmKind::Dgrad => [Axis::Row, Axis::Column],
            GemmKind::Wgrad => [Axis::Column, Axis::Column],
        }
    }

    /// Input index of the data of each quantized operand; scales follow.
    pub fn data_inputs(&self) -> [usize; 2] {
        [2, 2 + Storage::plane_count(&self.a)]
    }

    /// Input index of the offsets of a grouped GEMM.
    pub fn offsets_input(&self) -> usize {
        self.data_inputs()[1] + Storage::plane_count(&self.b)
    }
}

fn offsets_groups(check: &Check<'_>, index: usize) -> Result<Dim, OpError> {
    let expected = || check.error("offsets of groups, i32", "another input".to_string());
    groups_of(check, index)?.ok_or_else(expected)
}

impl OpRule for ProductError {
    fn name(&self) -> &'static str {
        "product_error"
    }

    fn attributes(&self) -> String {
        format!("{} {} {}", self.kind.name(), self.a.name(), self.b.name())
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let planes = ["data", "scale", "tensor_scale"];
        let counts = [&self.a, &self.b].map(Storage::plane_count);
        let mut names = vec!["a_sample", "b_sample"];
        names.extend(counts.iter().flat_map(|&count| &planes[..count]));
        let is_grouped = inputs.len() > names.len();
        names.extend(is_grouped.then_some("offsets"));
        let check = Check::count(self.name(), inputs, &names)?;
        let groups = match is_grouped {
            true => Some(offsets_groups(&check, self.offsets_input())?),
            false => None,
        };
        let operands = self.axes().into_iter().zip([self.a, self.b]).zip(self.data_inputs());
        for (index, ((axis, format), data)) in operands.enumerate() {
            let along = if axis == Axis::Column { 1 } else { 0 };
            if check.fixed(index, along)? != SAMPLED_ROWS {
                let expected = format!("{SAMPLED_ROWS} {}s in sample {index}", axis.name());
                return Err(check.error(expected, inputs[index].shape.to_string()));
            }
            let planes = match groups {
                Some(groups) if index == 1 && self.kind != GemmKind::Wgrad => {
                    let shape = check.rank(data, 3)?;
                    let matrix = [shape[1], shape[2]];
                    stacked_planes_of(&check, format, Axis::Row, &[groups], matrix)?
                }
                groups => {
                    let shape = check.rank(data, 2)?;
                    let matrix = [shape[0], shape[1]];
                    match groups {
                        Some(groups) => {
                            grouped_planes_of(&check, format, Axis::Row, groups, matrix)?
                        }
                        None => planes_of(&check, format, Axis::Row, matrix)?,
                    }
                }
            };
            check.planes(data, &planes)?;
        }
        let kind = OutputKind::Statistic;
        let (suffix, shape) = ("".into(), Shape::new([2]));
        Ok(vec![OutputType { suffix, shape, dtype: DType::F32, kind }])
    }

    /// Two products.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * 2 * SAMPLED_ROWS as u64 * product(&shapes[0])
    }
}
