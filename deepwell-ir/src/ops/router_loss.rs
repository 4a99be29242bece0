//! Auxiliary losses of a router: load balance and z-loss.
//!
//! Sources: load balance, Switch Transformers, arXiv 2101.03961, eq. 4 to 6; z-loss, ST-MoE, arXiv
//! 2202.08906, eq. 5.

use serde::{Deserialize, Serialize};

use super::{Check, RouteScore, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// logits f32 `[T, E]`, experts i32 `[T, K]`, targets i32 `[T]`, loss_scale f32 `[1]` →
/// `loss (+)= share · (balance · E · sum over experts of f · P + z · mean of lse²)`.
///
/// `f` is the fraction of all pairs that chose an expert, before dropping, without a gradient; `P`
/// the mean over tokens of the expert's probability; `lse` the logsumexp of a token's logits. The
/// loss is computed per layer and micro-batch, so balanced routing costs `balance` in each layer
/// and imbalances of different layers do not cancel. `share` is the micro-batch's fraction of the
/// step's tokens (number of targets that count, times `loss_scale`), so that the losses of a step's
/// micro-batches are averaged for any number of micro-batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterLoss {
    /// Function from logits to scores; sigmoid scores are first divided by their sum.
    pub score: RouteScore,
    /// Coefficient of the load balance.
    pub balance: f64,
    /// Coefficient of the z-loss.
    pub z: f64,
    /// Number of ranks that compute this loss for the same tokens and then sum the gradients of the
    /// logits. Each rank's gradient is divided by `ranks`; the loss is not.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub ranks: u32,
}

fn one() -> u32 {
    1
}

fn is_one(ranks: &u32) -> bool {
    *ranks == 1
}

fn check<'a>(op: &RouterLoss, inputs: &'a [TensorType]) -> Result<Check<'a>, OpError> {
    let names = ["logits", "experts", "targets", "loss_scale"];
    let check = Check::count(op.name(), inputs, &names)?;
    check.dtype(0, DType::F32)?;
    check.dtype(1, DType::I32)?;
    let tokens = check.rank(0, 2)?[0];
    let top_k = check.rank(1, 2)?[1];
    check.shape(1, &Shape(vec![tokens, top_k]))?;
    check.dtype(2, DType::I32)?;
    check.shape(2, &Shape(vec![tokens]))?;
    check.dtype(3, DType::F32)?;
    check.shape(3, &Shape(vec![Dim::fixed(1)]))?;
    for coefficient in [op.balance, op.z] {
        if !coefficient.is_finite() || coefficient < 0.0 {
            let got = coefficient.to_string();
            return Err(check.error("finite coefficients of at least 0", got));
        }
    }
    if op.ranks == 0 {
        return Err(check.error("at least 1 rank", "0"));
    }
    Ok(check)
}

impl OpRule for RouterLoss {
    fn name(&self) -> &'static str {
        "router_loss"
    }

    fn attributes(&self) -> String {
        let ranks = if self.ranks == 1 { String::new() } else { format!(" ranks={}", self.ranks) };
        format!("balance={} z={}{ranks}", self.balance, self.z)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        check(self, inputs)?;
        Ok(vec![OutputType::accumulator("loss", Shape(vec![Dim::fixed(1)]))])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        5 * product(&shapes[0])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        // Part of the differentiated loss, so its gradient is one. The op accumulates into the loss
        // after the output head, which overwrites.
        context.replace_forward();
        let op = RouterLossGrad { forward: self.clone() };
        let outputs = [Some(node.outputs[0]), None];
        let made = context.emit_with(op, "", &node.inputs, &outputs)?;
        context.contribute(node.inputs[0], made[1])
    }
}

/// Like [`RouterLoss`], with dlogits f32 `[T, E]` in the same pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterLossGrad {
    /// The forward op.
    pub forward: RouterLoss,
}

impl OpRule for RouterLossGrad {
    fn name(&self) -> &'static str {
        "router_loss_grad"
    }

    fn attributes(&self) -> String {
        self.forward.attributes()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        check(&self.forward, inputs)?;
        Ok(vec![
            OutputType::accumulator("loss", Shape(vec![Dim::fixed(1)])),
            OutputType::statistic("dlogits", inputs[0].shape.clone(), DType::F32),
        ])
    }

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        9 * product(&shapes[0])
    }
}
