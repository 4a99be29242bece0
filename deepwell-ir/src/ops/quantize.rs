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
    if !stack.is_empty() && Storage::plane_count(&format) == 3 {
        return error("a stack of matrices in a format without tensor scale", format.to_string());
    }
    for plane in &mut planes {
        plane.shape.0.splice(0..0, stack.iter().copied());
    }
    Ok(planes)
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
        let check = Check::count(self.name(), inputs, &["x"])?;
        check.same_float(&[0])?;
        let (stack, shape) = matrices(&check, 0)?;
        if self.format.is_stochastic() {
            return Err(check.error("rounding to nearest", self.format.to_string()));
        }
        let mut outputs = Vec::with_capacity(self.output_count());
        for &axis in self.axes() {
            let prefix = if axis == Axis::Column { "col" } else { "row" };
            for PlaneType { plane, dtype, shape } in
                stacked_planes_of(&check, self.format, axis, stack, shape)?
            {
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

    /// Data and scales per axis, and the counters (formats without tensor scale).
    fn result_count(&self) -> usize {
        if self.axis == Axis::Both { 5 } else { 3 }
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        // Amax, scaling and rounding for each element and axis.
        3 * self.axes().len() as u64 * product(&shapes[0])
    }
}
