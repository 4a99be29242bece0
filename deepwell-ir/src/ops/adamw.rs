//! Gradient norm and the AdamW update (Loshchilov and Hutter, arXiv 1711.05101).

use serde::{Deserialize, Serialize};

use super::product;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{OpError, Shape};

/// All gradients → their global L2 norm, f32 `[1]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradNorm {}

impl OpRule for GradNorm {
    fn name(&self) -> &'static str {
        "grad_norm"
    }

    fn infer(&self, _inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        Ok(vec![OutputType::statistic("", Shape::new([1usize]), crate::DType::F32)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * shapes.iter().map(|shape| product(shape)).sum::<u64>()
    }
}

/// Updates every parameter in place.
///
/// Operands, in this order: grad_norm f32 `[1]`, schedule f32 `[2]` (learning rate, largest
/// gradient norm), counters u64 `[2]` (applied steps, skipped steps; updated), then for each
/// parameter: gradient, and updated in place: master weight, first moment, second moment, all
/// f32. A step whose norm is not finite changes nothing but the count of skipped steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay of each parameter, in operand order.
    pub weight_decay: Vec<f32>,
}

impl AdamW {
    /// Operands before the first parameter's.
    pub const LEADING_OPERANDS: usize = 3;
    /// Operands per parameter: gradient, master, first moment, second moment.
    pub const OPERANDS_PER_PARAMETER: usize = 4;
}

impl OpRule for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn attributes(&self) -> String {
        format!(
            "betas=({}, {}) eps={:e} parameters={}",
            self.beta1,
            self.beta2,
            self.eps,
            self.weight_decay.len()
        )
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let expected =
            Self::LEADING_OPERANDS + Self::OPERANDS_PER_PARAMETER * self.weight_decay.len();
        if inputs.len() != expected {
            return Err(OpError {
                op: self.name(),
                expected: format!("{expected} operands"),
                got: inputs.len().to_string(),
            });
        }
        Ok(vec![])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let parameters = &shapes[Self::LEADING_OPERANDS..];
        14 * parameters
            .iter()
            .step_by(Self::OPERANDS_PER_PARAMETER)
            .map(|shape| product(shape))
            .sum::<u64>()
    }
}
