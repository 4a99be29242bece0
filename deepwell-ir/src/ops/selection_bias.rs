//! Balancing without a loss: biases of a router that follow the load of its experts (Wang et al.,
//! arXiv 2408.15664).
//!
//! A selection bias takes part in the choice alone, so it has no gradient. What stands in the place
//! of one is how often each expert was chosen: an accumulator like a gradient, added to by every
//! micro-batch and summed over the ranks that split the batch. In place of AdamW,
//! [`SelectionBiasUpdate`] moves the bias once for the whole step.

use serde::{Deserialize, Serialize};

use super::{AdamWCoefficients, Check, product};
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, OpError, Shape};

/// experts i32 `[T, K]` → f32 `[E]` `(+)=`: how many pairs chose each expert, before any is
/// dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountExperts {
    /// Experts to choose from, `E`.
    pub experts: usize,
}

impl OpRule for CountExperts {
    fn name(&self) -> &'static str {
        "count_experts"
    }

    fn attributes(&self) -> String {
        format!("experts={}", self.experts)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["experts"])?;
        check.dtype(0, DType::I32)?;
        check.rank(0, 2)?;
        Ok(vec![OutputType::accumulator("counts", Shape::new([self.experts]))])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[0])
    }
}

/// Coefficients of [`AdamWCoefficients`], counts f32 `[E]`, and updated in place: bias f32 `[E]`.
/// An expert that was chosen less often than the mean gains `rate`, one that was chosen more often
/// loses it. A step that is skipped changes nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SelectionBiasUpdate {
    /// By how much a bias moves in a step.
    pub rate: f32,
}

impl OpRule for SelectionBiasUpdate {
    fn name(&self) -> &'static str {
        "selection_bias_update"
    }

    fn attributes(&self) -> String {
        format!("rate={:e}", self.rate)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["coefficients", "counts", "bias"])?;
        for index in 0..3 {
            check.dtype(index, DType::F32)?;
        }
        check.shape(0, &Shape::new([AdamWCoefficients::COUNT]))?;
        check.rank(1, 1)?;
        check.shape(2, &inputs[1].shape)?;
        Ok(vec![])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        // The sum, a comparison and a sum.
        3 * product(&shapes[1])
    }
}
