//! Block quantization: from high precision to quantized data and scales.

use deepwell_precision::QuantFormat;
use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, Dim, OpError, Plane, PlaneType, Shape, Storage};

/// Axis of a `[rows, columns]` matrix along which blocks extend: the contraction axis of the GEMM
/// that reads the operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Rowwise: blocks along a row; the operand keeps its shape.
    Row,
    /// Columnwise: blocks down a column; the operand is stored transposed, contraction axis
    /// contiguous.
    Column,
    /// Rowwise and columnwise, in one pass over the source.
    Both,
}

impl Axis {
    /// The axis that covers both uses.
    pub fn union(self, other: Axis) -> Axis {
        if self == other { self } else { Axis::Both }
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Row => "row",
            Axis::Column => "column",
            Axis::Both => "both",
        }
    }
}

/// Planes of a matrix `[rows, columns]` along one axis, as operand types.
pub(super) fn planes_of(
    check: &Check<'_>,
    format: QuantFormat,
    axis: Axis,
    shape: [Dim; 2],
) -> Result<Vec<PlaneType>, OpError> {
    stacked_planes_of(check, format, axis, &[], shape)
}

/// [`planes_of`] for `stack` separately quantized matrices; for one matrix if `stack` is empty.
pub(super) fn stacked_planes_of(
    check: &Check<'_>,
    format: QuantFormat,
    axis: Axis,
    stack: &[Dim],
    shape: [Dim; 2],
) -> Result<Vec<PlaneType>, OpError> {
    let error = |expected: &str, got: String| Err(check.error(expected, got));
    let Some(mut planes) = (Storage::Planes { format, axis, shape }).planes() else {
        let got = format!("{format} {}", axis.name());
        return error("a format that a tensor stores, along one axis", got);
    };
    for plane in &mut planes {
        plane.shape.0.splice(0..0, stack.iter().copied());
    }
    Ok(planes)
}

/// [`planes_of`] for a matrix whose rows are in groups, each with its own tensor scale.
pub(super) fn grouped_planes_of(
    check: &Check<'_>,
    format: QuantFormat,
    axis: Axis,
    groups: Dim,
    shape: [Dim; 2],
) -> Result<Vec<PlaneType>, OpError> {
    let mut planes = planes_of(check, format, axis, shape)?;
    let of_tensor = planes.iter_mut().filter(|plane| plane.plane == Plane::TensorScale);
    of_tensor.for_each(|plane| plane.shape = Shape(vec![groups, 1.into()]));
    Ok(planes)
}

/// The number of groups that an input `offsets` i32 `[G + 1]` of rows delimits; `None` without this
/// input.
pub(super) fn groups_of(check: &Check<'_>, index: usize) -> Result<Option<Dim>, OpError> {
    let is_offsets = |input: &TensorType| input.dtype == DType::I32;
    if !check.inputs.get(index).is_some_and(is_offsets) {
        return Ok(None);
    }
    match check.fixed(index, 0)? {
        0 => Err(check.error("offsets of at least no group, one element", "none".to_string())),
        count => Ok(Some(Dim::fixed(count - 1))),
    }
}

/// Leading dimension of a stack of matrices (empty for one matrix), and rows and columns of a
/// matrix.
pub(super) fn matrices<'a>(
    check: &Check<'a>,
    index: usize,
) -> Result<(&'a [Dim], [Dim; 2]), OpError> {
    match check.inputs[index].shape.0.as_slice() {
        &[rows, columns] => Ok((&[], [rows, columns])),
        [stack @ .., rows, columns] if stack.len() == 1 => Ok((stack, [*rows, *columns])),
        _ => Err(check.rank(index, 2).expect_err("neither two nor three dimensions")),
    }
}

/// x `[R, C]` → the planes of x quantized rowwise, `[R, C]`, and/or columnwise, `[C, R]`, as in
/// [`Storage::planes`]; the counters `[STATISTICS]` as u64 are always last.
///
/// In a stack of matrices, x `[G, R, C]` (weights of experts), each matrix is quantized separately
/// and planes have a leading `G`; the counters cover all matrices.
///
/// In a format with a tensor scale, a second input amax f32 `[1]` is the largest magnitude of the
/// tensor of which x is a slice; without it, x is the whole tensor. A second input offsets i32
/// `[G + 1]` says that the rows of x are in groups, tokens of experts: each group has its own
/// tensor scale `[G, 1]`, and rows after the last group become zeros.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quantize {
    /// Quantization format; elements are rounded to nearest.
    pub format: QuantFormat,
    /// Quantization axes.
    pub axis: Axis,
}

impl Quantize {
    /// Number of counters of a quantization: bits of amax as f32, elements, underflows,
    /// saturations, scale clamps, non-finite values.
    pub const STATISTICS: usize = Storage::COUNTERS;

    /// The single axes of this quantization.
    pub fn axes(&self) -> &'static [Axis] {
        match self.axis {
            Axis::Row => &[Axis::Row],
            Axis::Column => &[Axis::Column],
            Axis::Both => &[Axis::Row, Axis::Column],
        }
    }

    /// Axis and plane of each output, in output order.
    pub fn planes(&self) -> Vec<(Axis, Plane)> {
        let of_operand = [Plane::Data, Plane::Scales, Plane::TensorScale];
        let of_operand = &of_operand[..Storage::plane_count(&self.format)];
        let axes = self.axes().iter();
        let operands = axes.flat_map(|&axis| of_operand.iter().map(move |&plane| (axis, plane)));
        operands.chain([(self.axis, Plane::Counters)]).collect()
    }

    /// Number of outputs.
    pub fn output_count(&self) -> usize {
        self.axes().len() * Storage::plane_count(&self.format) + 1
    }
}

impl OpRule for Quantize {
    fn name(&self) -> &'static str {
        "quantize"
    }

    fn attributes(&self) -> String {
        format!("axis={} {}", self.axis.name(), self.format)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let has_second = inputs.len() > 1 && Storage::plane_count(&self.format) == 3;
        let names = &["x", "amax or offsets"][..1 + usize::from(has_second)];
        let check = Check::count(self.name(), inputs, names)?;
        check.same_float(&[0])?;
        let groups = groups_of(&check, 1)?;
        if has_second && groups.is_none() {
            check.dtype(1, DType::F32)?;
            check.shape(1, &Shape::new([1]))?;
        }
        let (stack, shape) = matrices(&check, 0)?;
        if self.format.is_stochastic() {
            return Err(check.error("rounding to nearest", self.format.to_string()));
        }
        let mut outputs = Vec::with_capacity(self.output_count());
        for &axis in self.axes() {
            let prefix = if axis == Axis::Column { "col" } else { "row" };
            let planes = match groups {
                Some(groups) => grouped_planes_of(&check, self.format, axis, groups, shape)?,
                None => stacked_planes_of(&check, self.format, axis, stack, shape)?,
            };
            for PlaneType { plane, dtype, shape } in planes {
                let suffix = format!("{prefix}{}", plane.suffix()).into();
                outputs.push(OutputType { suffix, shape, dtype, kind: OutputKind::Copy });
            }
        }
        outputs.push(OutputType {
            suffix: "stats".into(),
            shape: Shape(vec![Self::STATISTICS.into()]),
            dtype: DType::U64,
            kind: OutputKind::Copy,
        });
        Ok(outputs)
    }

    fn result_count(&self) -> usize {
        self.output_count()
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        // Amax, scaling and rounding for each element and axis.
        3 * self.axes().len() as u64 * product(&shapes[0])
    }
}
