//! Token embedding.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputType, TensorType};
use crate::{DType, IrError, Node, OpError, Shape};

/// `out[t, :] = table[tokens[t], :]`: tokens i32 `[T]`, table `[V, D]` → `[T, D]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Embedding {
    /// A row without gradient, as PyTorch's `padding_idx`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<usize>,
}

/// Attribute text of a row without gradient.
pub(super) fn padding_text(padding: Option<usize>) -> String {
    padding.map_or(String::new(), |row| format!("padding={row}"))
}

/// Rejects a padding row outside a table of `vocab` rows.
pub(super) fn check_padding(
    check: &Check<'_>,
    padding: Option<usize>,
    vocab: Option<usize>,
) -> Result<(), OpError> {
    match (padding, vocab) {
        (Some(row), Some(vocab)) if row >= vocab => {
            Err(check.error(format!("a padding row below {vocab}"), format!("row {row}")))
        }
        _ => Ok(()),
    }
}

impl OpRule for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn attributes(&self) -> String {
        padding_text(self.padding)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["tokens", "table"])?;
        check.dtype(0, DType::I32)?;
        let dtype = check.same_float(&[1])?;
        let tokens = check.rank(0, 1)?[0];
        let &[vocab, width] = check.rank(1, 2)? else { unreachable!() };
        check_padding(&check, self.padding, vocab.as_fixed())?;
        Ok(vec![OutputType::activation("", Shape::new([tokens, width]), dtype)])
    }

    fn flops(&self, _shapes: &[Vec<usize>]) -> u64 {
        0
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let dtable = context.parameter_gradient(node.inputs[1]);
        let vocab = context.shape(node.inputs[1]).0[0].as_fixed();
        let op = EmbeddingBackward { vocab, padding: self.padding };
        context.emit(op, "", &[node.inputs[0], dout], &[dtable])
    }
}

/// `dtable[v, :] (+)= sum of dout[t, :] over tokens[t] = v`, zero for the padding row: tokens, dout
/// → dtable f32 `[V, D]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EmbeddingBackward {
    /// Rows of the table.
    pub vocab: Option<usize>,
    /// A row without gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<usize>,
}

impl OpRule for EmbeddingBackward {
    fn name(&self) -> &'static str {
        "embedding_backward"
    }

    fn attributes(&self) -> String {
        padding_text(self.padding)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["tokens", "dout"])?;
        check.dtype(0, DType::I32)?;
        check.same_float(&[1])?;
        let width = check.rank(1, 2)?[1];
        let vocab =
            self.vocab.ok_or_else(|| check.error("a table of known height", "an open one"))?;
        check_padding(&check, self.padding, Some(vocab))?;
        Ok(vec![OutputType::accumulator("dtable", Shape::new([vocab.into(), width]))])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[1])
    }
}
