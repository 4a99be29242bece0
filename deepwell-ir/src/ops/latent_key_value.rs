//! Keys and values of latent attention (multi-head latent attention: DeepSeek-V2, arXiv 2405.04434,
//! section 2.1.2 and 2.1.3): projected columns of the latent, and rotated columns that all heads
//! share.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// kv `[T, H·(N+V)]`, k_rope `[T, R]` → k `[T, H·(N+R)]`, v `[T, H·V]`.
///
/// A head of kv has `N` key columns and then its value. The key of a head consists of these `N`
/// columns and the `R` columns of k_rope, which all heads share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatentKeyValue {
    /// Heads, `H`.
    pub heads: usize,
    /// Columns of a key that are specific to the head, `N`.
    pub plain_dim: usize,
    /// Columns that all heads share, `R`.
    pub rope_dim: usize,
    /// Columns of a value, `V`.
    pub value_dim: usize,
}

impl LatentKeyValue {
    /// Checks that inputs `first` and `first + 1` are matrices with these numbers of columns.
    fn check(
        check: &Check<'_>,
        first: usize,
        columns: [usize; 2],
    ) -> Result<(Dim, DType), OpError> {
        let dtype = check.same_float(&[first, first + 1])?;
        let tokens = check.rank(first, 2)?[0];
        check.shape(first, &Shape(vec![tokens, Dim::fixed(columns[0])]))?;
        check.shape(first + 1, &Shape(vec![tokens, Dim::fixed(columns[1])]))?;
        Ok((tokens, dtype))
    }

    /// Columns of kv and of k_rope.
    fn sources(&self) -> [usize; 2] {
        [self.heads * (self.plain_dim + self.value_dim), self.rope_dim]
    }

    /// Columns of k and of v.
    fn results(&self) -> [usize; 2] {
        [self.heads * (self.plain_dim + self.rope_dim), self.heads * self.value_dim]
    }

    fn text(&self) -> String {
        format!(
            "heads={} plain_dim={} rope_dim={} value_dim={}",
            self.heads, self.plain_dim, self.rope_dim, self.value_dim
        )
    }
}

impl OpRule for LatentKeyValue {
    fn name(&self) -> &'static str {
        "latent_key_value"
    }

    fn attributes(&self) -> String {
        self.text()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["kv", "k_rope"])?;
        let (tokens, dtype) = Self::check(&check, 0, self.sources())?;
        let [k, v] = self.results().map(|columns| Shape(vec![tokens, Dim::fixed(columns)]));
        Ok(vec![OutputType::activation("k", k, dtype), OutputType::activation("v", v, dtype)])
    }

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, _shapes: &[Vec<usize>]) -> u64 {
        0
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let gradients = [0, 1].map(|index| context.gradient_of(node.outputs[index]));
        // Attention gives gradients for both or none.
        let [Some(dk), Some(dv)] = gradients else { return Ok(()) };
        let op = LatentKeyValueBackward { forward: self.clone() };
        let gradients = context.emit_fresh(op, "", &[dk, dv])?;
        for (&input, gradient) in node.inputs.iter().zip(gradients) {
            context.contribute(input, gradient)?;
        }
        Ok(())
    }
}

/// dk `[T, H·(N+R)]`, dv `[T, H·V]` → dkv `[T, H·(N+V)]`, dk_rope `[T, R]`, the sum over heads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatentKeyValueBackward {
    /// The forward op.
    pub forward: LatentKeyValue,
}

impl OpRule for LatentKeyValueBackward {
    fn name(&self) -> &'static str {
        "latent_key_value_backward"
    }

    fn attributes(&self) -> String {
        self.forward.text()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["dk", "dv"])?;
        let (tokens, dtype) = LatentKeyValue::check(&check, 0, self.forward.results())?;
        let sources = self.forward.sources();
        let [kv, rope] = sources.map(|columns| Shape(vec![tokens, Dim::fixed(columns)]));
        Ok(vec![
            OutputType::activation("dkv", kv, dtype),
            OutputType::activation("dk_rope", rope, dtype),
        ])
    }

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        // The sum over heads.
        product(&shapes[3]) * self.forward.heads as u64
    }
}
