//! From quantized data and scales back to a high-precision matrix.

use deepwell_precision::BLOCK;
use serde::{Deserialize, Serialize};

use super::quantize::scales_shape;
use super::{Axis, Check, product};
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, OpError, Shape};

/// One copy that a [`super::Quantize`] of x `[R, C]` made → `[R, C]`.
///
/// Rowwise: data `[R, C]`, scales `[R/128, C/128, 512]`. Columnwise: data `[C, R]`, stored
/// transposed, and scales `[C/128, R/128, 512]`; the result has the layout of x again, so every
/// op that reads x reads the result in its place.
///
/// An element is an E4M3 number times a power of two. It has four significant bits, so BF16 holds
/// it exactly, with two exceptions: what needs bits below 2^-133, BF16's smallest number, is
/// rounded to nearest even (a scale below 2^-124 and a small element), and from 2^128 on it is
/// infinite (a scale above 2^119 and a large element). A block whose scale is NaN becomes NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dequantize {
    /// Which copy it reads, [`Axis::Row`] or [`Axis::Column`].
    pub axis: Axis,
    /// Storage of the result, F32 or BF16.
    pub to: DType,
}

impl OpRule for Dequantize {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn attributes(&self) -> String {
        format!("axis={} to={}", self.axis.name(), self.to)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["data", "scales"])?;
        let data = check.rank(0, 2)?;
        check.dtype(0, DType::E4m3)?;
        check.dtype(1, DType::E8m0)?;
        check.shape(1, &Shape(scales_shape(data[0], data[1])))?;
        if !self.to.is_high_precision() {
            return Err(check.error("a result in f32 or bf16", self.to.name()));
        }
        let shape = match self.axis {
            Axis::Row => vec![data[0], data[1]],
            Axis::Column => vec![data[1], data[0]],
            Axis::Both => return Err(check.error("axis row or column", "both")),
        };
        Ok(vec![OutputType {
            suffix: "".into(),
            shape: Shape(shape),
            dtype: self.to,
            kind: OutputKind::Copy,
        }])
    }

    /// A multiplication for each element; scales are decoded once for each block.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let elements = product(&shapes[0]);
        elements + elements / BLOCK as u64
    }
}
