//! Load balancing without a loss: selection biases of a router follow the load of the experts (Wang
//! et al., arXiv 2408.15664).
//!
//! A selection bias affects selection only, so it has no gradient. Its gradient accumulator instead
//! counts how often each expert was chosen, accumulated over micro-batches and summed over the
//! ranks that split the batch. [`SelectionBiasUpdate`] replaces AdamW and updates the bias once per
//! step.

use serde::{Deserialize, Serialize};

use super::{AdamWCoefficients, Check, product};
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, OpError, Shape};

/// experts i32 `[T, K]` → f32 `[E]` `(+)=`: number of pairs that chose each expert, before
/// dropping.
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

/// Inputs: coefficients of [`AdamWCoefficients`], counts f32 `[E]`, and, updated in place, bias f32
/// `[E]`. The bias of an expert chosen less often than the mean grows by `rate`; if chosen more
/// often, it shrinks by `rate`. A skipped step changes nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SelectionBiasUpdate {
    /// Change of a bias per step.
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
        // Sum for the mean, comparison, update.
        3 * product(&shapes[1])
    }
}
