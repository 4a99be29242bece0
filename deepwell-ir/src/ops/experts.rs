//! The experts of a mixture: many feed-forward blocks of one shape; each token visits a few.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, Dim, OpError, Shape};

/// Activation between the projections of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertActivation {
    /// `silu(gate) · up`.
    SwiGlu,
    /// `g · sigmoid(alpha · g) · (u + 1)` with `g = min(gate, limit)` and `u` the up projection
    /// clamped to `±limit` (gpt-oss).
    ClampedSwiGlu {
        /// Factor on the argument of the sigmoid.
        alpha: f64,
        /// Limit of both factors.
        limit: f64,
    },
}

impl ExpertActivation {
    /// Attribute text.
    pub(super) fn describe(&self) -> String {
        match self {
            ExpertActivation::SwiGlu => "swiglu".to_string(),
            ExpertActivation::ClampedSwiGlu { alpha, limit } => {
                format!("clamped_swiglu alpha={alpha} limit={limit}")
            }
        }
    }
}

/// x `[T, D]`, gates f32 `[T, K]`, chosen i32 `[T, K]`, w_gate, w_up `[E, F, D]`, w_down
/// `[E, D, F]` (, biases `[E, F]`, `[E, F]`, `[E, D]`) → `[T, D]`: for each token the sum of gate
/// times expert output over the chosen experts.
///
/// All experts of a layer as one node, created by capture to represent a model's structure and
/// counts. The op has no kernel and no derivative: `deepwell_moe::expand` replaces it by ops that
/// move the tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Experts {
    /// Activation between the projections.
    pub activation: ExpertActivation,
    /// Whether the three projections have biases.
    pub bias: bool,
    /// Limit of the pairs per expert, see [`super::Dispatch::capacity_factor`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
}

const OPERANDS: [&str; 9] =
    ["x", "gates", "chosen", "w_gate", "w_up", "w_down", "gate_bias", "up_bias", "down_bias"];

impl OpRule for Experts {
    fn name(&self) -> &'static str {
        "experts"
    }

    fn attributes(&self) -> String {
        let activation = self.activation.describe();
        if self.bias { format!("{activation} bias") } else { activation }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = if self.bias { &OPERANDS[..] } else { &OPERANDS[..6] };
        let check = Check::count(self.name(), inputs, names)?;
        let floats: &[usize] = if self.bias { &[0, 3, 4, 5, 6, 7, 8] } else { &[0, 3, 4, 5] };
        let dtype = check.same_float(floats)?;
        check.dtype(1, DType::F32)?;
        check.dtype(2, DType::I32)?;
        let x = check.rank(0, 2)?;
        let top_k = check.rank(1, 2)?[1];
        let gate = check.rank(3, 3)?;
        let (experts, width) = (gate[0], gate[1]);
        check.shape(1, &Shape(vec![x[0], top_k]))?;
        check.shape(2, &Shape(vec![x[0], top_k]))?;
        check.shape(3, &Shape(vec![experts, width, x[1]]))?;
        check.shape(4, &Shape(vec![experts, width, x[1]]))?;
        check.shape(5, &Shape(vec![experts, x[1], width]))?;
        for axis in 0..3 {
            check.fixed(3, axis)?;
        }
        check.fixed(1, 1)?;
        if self.bias {
            check.shape(6, &Shape(vec![experts, width]))?;
            check.shape(7, &Shape(vec![experts, width]))?;
            check.shape(8, &Shape(vec![experts, x[1]]))?;
        }
        Ok(vec![OutputType::activation(
            "",
            Shape(vec![x[0], Dim::from(check.fixed(0, 1)?)]),
            dtype,
        )])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        // Three GEMMs per (token, expert) pair, and the activation.
        let (pairs, width) = (product(&shapes[1]), shapes[3][1] as u64);
        pairs * width * (6 * shapes[0][1] as u64 + 5)
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        if operands[0] == DType::Bf16 { MathUnit::Bf16 } else { MathUnit::F32 }
    }
}
