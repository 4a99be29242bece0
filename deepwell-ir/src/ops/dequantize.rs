//! Quantized data and scales back to a high-precision matrix.

use deepwell_precision::QuantFormat;
use serde::{Deserialize, Serialize};

use super::quantize::{matrices, stacked_planes_of};
use super::{Axis, Check, product};
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, OpError, Shape, Storage};

/// The planes of x `[R, C]`, quantized rowwise or columnwise by a [`super::Quantize`] → `[R, C]`.
///
/// Columnwise data is stored transposed, `[C, R]`. The result has the layout of x, so ops can read
/// the result in place of x.
///
/// An element of an MX format is a number of at most four significant bits times a power of two, so
/// BF16 holds it exactly, with two exceptions: numbers with bits below 2^-133, BF16's smallest
/// number, are rounded to nearest even (in MXFP8 a scale below 2^-124 and a small element), and
/// numbers from 2^128 on become infinite (a scale above 2^119 and a large element). A block whose
/// scale is NaN becomes NaN.
///
/// An element of NVFP4 is the exact product of E2M1 and UE4M3, times the tensor scale, rounded to
/// FP32 and then to the storage type of the result. A transform of the format is undone: groups of
/// 16 numbers in FP32 are transformed back before the last rounding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dequantize {
    /// Quantization format.
    pub format: QuantFormat,
    /// Quantization axis, [`Axis::Row`] or [`Axis::Column`].
    pub axis: Axis,
    /// Storage type of the result, F32 or BF16.
    pub to: DType,
}

impl OpRule for Dequantize {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn attributes(&self) -> String {
        format!("axis={} {} to={}", self.axis.name(), self.format, self.to)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = ["data", "scales", "tensor_scale"];
        let check =
            Check::count(self.name(), inputs, &names[..Storage::plane_count(&self.format)])?;
        let (stack, data) = matrices(&check, 0)?;
        if !self.to.is_high_precision() {
            return Err(check.error("a result in f32 or bf16", self.to.name()));
        }
        let shape = match self.axis {
            Axis::Row => data,
            Axis::Column => [data[1], data[0]],
            Axis::Both => return Err(check.error("axis row or column", "both")),
        };
        let planes = stacked_planes_of(&check, self.format, self.axis, stack, shape)?;
        check.planes(0, &planes)?;
        Ok(vec![OutputType {
            suffix: "".into(),
            shape: Shape([stack, &shape].concat()),
            dtype: self.to,
            kind: OutputKind::Copy,
        }])
    }

    /// One multiplication per element; scales are decoded once per block.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let elements = product(&shapes[0]);
        elements + elements / self.format.scale.stored_every() as u64
    }
}
