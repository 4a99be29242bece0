//! A gated activation of inputs in MXFP8, as they are stored for the backward pass.

use deepwell_precision::QuantFormat;
use serde::{Deserialize, Serialize};

use super::quantize::planes_of;
use super::{Axis, Check, product};
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, Dim, OpError};

/// Rowwise planes of gate, rowwise planes of up `[T, F]` → `silu(gate) · up` in BF16.
///
/// The result has the bits of [`super::Dequantize`] of gate and of up, followed by
/// [`super::SwiGlu`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredSwiGlu {
    /// Format of gate and up, an MX format.
    pub format: QuantFormat,
}

/// Checks the planes of gate and of up, matrices of this shape, from input `first` on.
fn check_planes(
    check: &Check<'_>,
    format: QuantFormat,
    shape: [Dim; 2],
    first: usize,
) -> Result<(), OpError> {
    if !format.is_mx() {
        return Err(check.error("gate and up in an MX format", format.to_string()));
    }
    let planes = planes_of(check, format, Axis::Row, shape)?;
    check.planes(first, &planes)?;
    check.planes(first + 2, &planes)
}

impl OpRule for StoredSwiGlu {
    fn name(&self) -> &'static str {
        "stored_swiglu"
    }

    fn attributes(&self) -> String {
        self.format.to_string()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = ["gate", "gate.scale", "up", "up.scale"];
        let check = Check::count(self.name(), inputs, &names)?;
        let &[rows, columns] = check.rank(0, 2)? else { return Ok(Vec::new()) };
        check_planes(&check, self.format, [rows, columns], 0)?;
        Ok(vec![OutputType::activation("", inputs[0].shape.clone(), DType::Bf16)])
    }

    /// As [`super::SwiGlu`], and a multiplication for each element of gate and up.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        7 * product(&shapes[0])
    }
}

/// dout `[T, F]` in BF16, rowwise planes of gate, rowwise planes of up → dgate, dup.
///
/// The result has the bits of [`super::Dequantize`] of gate and of up, followed by
/// [`super::SwiGluBackward`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredSwiGluBackward {
    /// Format of gate and up, an MX format.
    pub format: QuantFormat,
}

impl OpRule for StoredSwiGluBackward {
    fn name(&self) -> &'static str {
        "stored_swiglu_backward"
    }

    fn attributes(&self) -> String {
        self.format.to_string()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = ["dout", "gate", "gate.scale", "up", "up.scale"];
        let check = Check::count(self.name(), inputs, &names)?;
        check.dtype(0, DType::Bf16)?;
        let &[rows, columns] = check.rank(0, 2)? else { return Ok(Vec::new()) };
        check_planes(&check, self.format, [rows, columns], 1)?;
        let matrix = |suffix| OutputType::activation(suffix, inputs[0].shape.clone(), DType::Bf16);
        Ok(vec![matrix("dgate"), matrix("dup")])
    }

    fn result_count(&self) -> usize {
        2
    }

    /// As [`super::SwiGluBackward`], and a multiplication for each element of gate and up.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        11 * product(&shapes[0])
    }
}
