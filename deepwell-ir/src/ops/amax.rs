//! The largest magnitude of a tensor, for its tensor scale.

use deepwell_precision::QuantFormat;
use serde::{Deserialize, Serialize};

use super::{Axis, Check, product};
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, OpError, Shape};

/// x `[R, C]` → amax f32 `[1]`: the largest finite magnitude of x, after the transform of `format`
/// along `axis` if there is one.
///
/// A [`super::Quantize`] computes the amax itself, except of a slice of a tensor: the maximum over
/// the slices of all ranks comes between the two ops.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Amax {
    /// Format of the quantization that reads the amax.
    pub format: QuantFormat,
    /// Axis of that quantization.
    pub axis: Axis,
}

impl OpRule for Amax {
    fn name(&self) -> &'static str {
        "amax"
    }

    fn attributes(&self) -> String {
        format!("axis={} {}", self.axis.name(), self.format)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x"])?;
        check.same_float(&[0])?;
        check.rank(0, 2)?;
        if self.format.hadamard.is_some() && self.axis == Axis::Both {
            return Err(check.error("one axis for a transform", "both".to_string()));
        }
        let (suffix, shape) = ("amax".into(), Shape::new([1]));
        Ok(vec![OutputType { suffix, shape, dtype: DType::F32, kind: OutputKind::Copy }])
    }

    /// One comparison per element; a transform adds four additions and a multiplication.
    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let of_element = if self.format.hadamard.is_some() { 6 } else { 1 };
        of_element * product(&shapes[0])
    }
}
