//! Router of a mixture of experts: selects the experts of a token and computes the gates.
//!
//! Sources: Mixtral, arXiv 2401.04088, section 2.1 (softmax); DeepSeek-V3, arXiv 2412.19437,
//! equations 12 to 16 (sigmoid, a bias for selection only, groups of experts).

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// Function from router logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RouteScore {
    /// Softmax over all experts of the token.
    Softmax,
    /// `1 / (1 + e^-x)`, independently for each expert.
    Sigmoid,
}

/// Equal groups of experts; a token may visit experts of a few groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteGroups {
    /// Number of groups; divides the number of experts.
    pub count: usize,
    /// Number of groups that a token may visit: the groups with the largest sum of the two best
    /// scores.
    pub chosen: usize,
}

/// logits f32 `[T, E]` (, selection bias f32 `[E]`) → gates f32 `[T, K]`, experts i32 `[T, K]`,
/// best first, ties to the lower index.
///
/// Selection uses the score plus the bias. The gates are the scores without the bias and have a
/// gradient; the selection and the bias have none. Token counts update the bias, see
/// [`super::SelectionBiasUpdate`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Route {
    /// Experts to choose from, `E`.
    pub experts: usize,
    /// Experts that a token visits, `K`.
    pub top_k: usize,
    /// Function from logits to scores.
    pub score: RouteScore,
    /// Whether the gates of a token are divided by their sum.
    pub normalize: bool,
    /// Factor on the gates, after normalization.
    pub scaling: f64,
    /// Groups of experts, if selection is limited to some groups.
    pub groups: Option<RouteGroups>,
    /// Whether a second operand is added to the scores, for selection only.
    pub selection_bias: bool,
}

impl Route {
    /// Checks that the settings are consistent.
    ///
    /// # Errors
    /// The expected and the actual setting.
    pub fn check(&self) -> Result<(), OpError> {
        match self.misfit() {
            Some((expected, got)) => Err(OpError { op: self.name(), expected, got }),
            None => Ok(()),
        }
    }

    /// First inconsistency of the settings, if any: expected and actual value.
    fn misfit(&self) -> Option<(String, String)> {
        if self.experts == 0 || self.top_k == 0 || self.top_k > self.experts {
            let expected = format!("1 to {} experts for each token", self.experts);
            return Some((expected, self.top_k.to_string()));
        }
        if !self.scaling.is_finite() || self.scaling <= 0.0 {
            return Some(("a scaling over 0".to_string(), self.scaling.to_string()));
        }
        let RouteGroups { count, chosen } = self.groups?;
        if count == 0 || !self.experts.is_multiple_of(count) {
            let expected = format!("groups that divide {} experts", self.experts);
            return Some((expected, count.to_string()));
        }
        let are_some = (1..=count).contains(&chosen);
        if !are_some || chosen * (self.experts / count) < self.top_k {
            let expected = format!("1 to {count} chosen groups with {} experts", self.top_k);
            return Some((expected, chosen.to_string()));
        }
        None
    }
}

impl OpRule for Route {
    fn name(&self) -> &'static str {
        "route"
    }

    fn attributes(&self) -> String {
        let mut text = format!(
            "experts={} top_k={} {}",
            self.experts,
            self.top_k,
            match self.score {
                RouteScore::Softmax => "softmax",
                RouteScore::Sigmoid => "sigmoid",
            }
        );
        if self.normalize {
            text.push_str(" normalize");
        }
        if self.scaling != 1.0 {
            text.push_str(&format!(" scaling={}", self.scaling));
        }
        if let Some(groups) = self.groups {
            text.push_str(&format!(" groups={}/{}", groups.chosen, groups.count));
        }
        text
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names: &[&str] = if self.selection_bias { &["logits", "bias"] } else { &["logits"] };
        let check = Check::count(self.name(), inputs, names)?;
        self.check()?;
        check.dtype(0, DType::F32)?;
        let tokens = check.rank(0, 2)?[0];
        check.shape(0, &Shape(vec![tokens, Dim::fixed(self.experts)]))?;
        if self.selection_bias {
            check.dtype(1, DType::F32)?;
            check.shape(1, &Shape::new([self.experts]))?;
        }
        let chosen = Shape(vec![tokens, Dim::fixed(self.top_k)]);
        Ok(vec![
            OutputType::statistic("gates", chosen.clone(), DType::F32),
            OutputType::statistic("experts", chosen, DType::I32),
        ])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        // The score of each expert, and the sum and division.
        5 * product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let (logits, experts) = (node.inputs[0], node.outputs[1]);
        if self.selection_bias {
            // The counts take the place of the bias's gradient.
            let counts = context.parameter_gradient(node.inputs[1]);
            let op = super::CountExperts { experts: self.experts };
            context.emit(op, "counts", &[experts], &[counts])?;
        }
        let Some(dgates) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let op = RouteBackward { forward: self.clone() };
        let dlogits = context.emit_fresh(op, "", &[dgates, logits, experts])?[0];
        context.contribute(logits, dlogits)
    }
}

/// dgates f32 `[T, K]`, logits f32 `[T, E]`, experts i32 `[T, K]` → dlogits f32 `[T, E]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouteBackward {
    /// The forward op.
    pub forward: Route,
}

impl OpRule for RouteBackward {
    fn name(&self) -> &'static str {
        "route_backward"
    }

    fn attributes(&self) -> String {
        self.forward.attributes()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dgates", "logits", "experts"])?;
        self.forward.check()?;
        let Route { experts, top_k, .. } = self.forward;
        check.dtype(0, DType::F32)?;
        check.dtype(2, DType::I32)?;
        check.dtype(1, DType::F32)?;
        let tokens = check.rank(1, 2)?[0];
        let rows = |columns| Shape(vec![tokens, Dim::fixed(columns)]);
        check.shape(0, &rows(top_k))?;
        check.shape(1, &rows(experts))?;
        check.shape(2, &rows(top_k))?;
        Ok(vec![OutputType::statistic("dlogits", rows(experts), DType::F32)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        // The recomputed score of each expert, and its gradient.
        9 * product(&shapes[1])
    }
}
