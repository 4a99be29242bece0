//! Block quantization: the point where high precision becomes codes and scales.

use deepwell_precision::{BLOCK, ElementFormat, MxSpec, scale_tiles};
use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, Dim, OpError, Shape};

/// Along which axis of a `[rows, columns]` matrix the blocks lie: the contraction of the product
/// that reads the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Blocks along a row; the copy keeps the shape.
    Row,
    /// Blocks down a column; the copy is stored transposed, contraction contiguous.
    Column,
    /// Both copies in one pass over the source.
    Both,
}

impl Axis {
    /// The axis that serves both uses.
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

/// The shape of the scales of codes `[rows, contraction]`: tiles of 128 rows by the scales of 128
/// codes, `[rows/128, contraction/128, 512]`, see [`deepwell_precision::scale_tiles`].
pub(super) fn scales_shape(rows: Dim, contraction: Dim) -> Vec<Dim> {
    let elements = scale_tiles::TILE_BLOCKS * BLOCK;
    vec![
        rows.blocks_of(scale_tiles::TILE_ROWS),
        contraction.blocks_of(elements),
        scale_tiles::TILE_BYTES.into(),
    ]
}

/// x `[R, C]` → row codes `[R, C]` and scales `[R/128, C/128, 512]`, and/or column codes `[C, R]`
/// and scales `[C/128, R/128, 512]`; always last the counters `[STATISTICS]` as u64.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quantize {
    /// Element format, scale rule, granularity, block.
    pub spec: MxSpec,
    /// Which copies.
    pub axis: Axis,
}

impl Quantize {
    /// Counters that a quantization leaves: bits of amax as f32, elements, underflows,
    /// saturations, scale clamps, non-finite values.
    pub const STATISTICS: usize = 6;
}

impl OpRule for Quantize {
    fn name(&self) -> &'static str {
        "quantize"
    }

    fn attributes(&self) -> String {
        format!(
            "axis={} {:?} {:?} {:?} {:?}",
            self.axis.name(),
            self.spec.element,
            self.spec.scale_rule,
            self.spec.granularity,
            self.spec.block
        )
        .to_lowercase()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x"])?;
        check.same_float(&[0])?;
        let x = check.rank(0, 2)?;
        if self.spec.element != ElementFormat::E4M3 {
            return Err(check.error("element format E4M3", format!("{:?}", self.spec.element)));
        }
        let output = |suffix: &'static str, shape: Vec<_>, dtype| OutputType {
            suffix: suffix.into(),
            shape: Shape(shape),
            dtype,
            kind: OutputKind::Copy,
        };
        let mut outputs = Vec::with_capacity(5);
        if self.axis != Axis::Column {
            outputs.push(output("row", vec![x[0], x[1]], DType::E4m3));
            outputs.push(output("row.scale", scales_shape(x[0], x[1]), DType::E8m0));
        }
        if self.axis != Axis::Row {
            outputs.push(output("col", vec![x[1], x[0]], DType::E4m3));
            outputs.push(output("col.scale", scales_shape(x[1], x[0]), DType::E8m0));
        }
        outputs.push(output("stats", vec![Self::STATISTICS.into()], DType::U64));
        Ok(outputs)
    }

    /// Codes and scales of each copy, and the counters.
    fn result_count(&self) -> usize {
        if self.axis == Axis::Both { 5 } else { 3 }
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        // Largest magnitude, scaling and rounding of each element and copy.
        let copies = if self.axis == Axis::Both { 2 } else { 1 };
        3 * copies * product(&shapes[0])
    }
}
