//! Token embedding, output head and cross-entropy with the vocabulary split over ranks (Shoeybi et
//! al., arXiv 1909.08053, section 3).
//!
//! The logits of a token are spread over the ranks. [`VocabParallelSums`] reduces a rank's logits
//! to three numbers per token, which an all-gather distributes. From these,
//! [`VocabParallelCrossEntropyGrad`] computes the loss, equal on all ranks, and the gradient
//! contributions of the rank's rows. Logits are computed twice, so the full logits are never stored
//! and no collective runs between chunks of tokens.

use serde::{Deserialize, Serialize};

use super::embedding::{check_padding, padding_text};
use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// The vocabulary rows of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct VocabSlice {
    /// First row.
    pub first: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of rows on all ranks.
    pub vocab: usize,
}

impl VocabSlice {
    /// Slice `place` of `parts` equal slices; `None` if `parts` does not divide `vocab`.
    pub fn of(vocab: usize, place: usize, parts: usize) -> Option<VocabSlice> {
        let rows = (parts > 0 && vocab.is_multiple_of(parts)).then(|| vocab / parts)?;
        Some(VocabSlice { first: place * rows, rows, vocab })
    }

    /// Row of a token within the slice; `None` if the token belongs to another rank.
    pub fn row_of(&self, token: i32) -> Option<usize> {
        let row = usize::try_from(token).ok()?.checked_sub(self.first)?;
        (row < self.rows).then_some(row)
    }

    fn text(&self) -> String {
        format!("rows={}..{} of {}", self.first, self.first + self.rows, self.vocab)
    }

    fn text_with(&self, padding: Option<usize>) -> String {
        let parts = [self.text(), padding_text(padding)];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
    }

    /// Checks that operand `index` has this slice's rows.
    fn check(&self, check: &Check<'_>, index: usize) -> Result<(), OpError> {
        let got = check.rank(index, 2)?[0];
        if got != Dim::fixed(self.rows) || self.first + self.rows > self.vocab {
            return Err(check.error(self.text(), format!("{got} rows")));
        }
        Ok(())
    }
}

/// `out[t, :] = table[tokens[t] - first, :]`, zero for tokens of other ranks: tokens i32 `[T]`,
/// table `[rows, D]` → `[T, D]`. The embedding is the sum over ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VocabParallelEmbedding {
    /// The rows of the table.
    pub slice: VocabSlice,
    /// A row of the whole table without gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<usize>,
}

impl OpRule for VocabParallelEmbedding {
    fn name(&self) -> &'static str {
        "vocab_parallel_embedding"
    }

    fn attributes(&self) -> String {
        self.slice.text_with(self.padding)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["tokens", "table"])?;
        check.dtype(0, DType::I32)?;
        let dtype = check.same_float(&[1])?;
        let tokens = check.rank(0, 1)?[0];
        self.slice.check(&check, 1)?;
        check_padding(&check, self.padding, Some(self.slice.vocab))?;
        let width = check.rank(1, 2)?[1];
        Ok(vec![OutputType::activation("", Shape(vec![tokens, width]), dtype)])
    }

    fn flops(&self, _shapes: &[Vec<usize>]) -> u64 {
        0
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let dtable = context.parameter_gradient(node.inputs[1]);
        let op = VocabParallelEmbeddingBackward { slice: self.slice, padding: self.padding };
        context.emit(op, "", &[node.inputs[0], dout], &[dtable])
    }
}

/// `dtable[v, :] (+)= sum of dout[t, :] over tokens[t] = first + v`: tokens i32 `[T]`, dout
/// `[T, D]` → dtable f32 `[rows, D]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VocabParallelEmbeddingBackward {
    /// The rows of the table.
    pub slice: VocabSlice,
    /// A row of the whole table without gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<usize>,
}

impl OpRule for VocabParallelEmbeddingBackward {
    fn name(&self) -> &'static str {
        "vocab_parallel_embedding_backward"
    }

    fn attributes(&self) -> String {
        self.slice.text_with(self.padding)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["tokens", "dout"])?;
        check.dtype(0, DType::I32)?;
        check.same_float(&[1])?;
        let width = check.rank(1, 2)?[1];
        let shape = Shape(vec![Dim::fixed(self.slice.rows), width]);
        Ok(vec![OutputType::accumulator("dtable", shape)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[1])
    }
}

fn unit(operands: &[DType]) -> MathUnit {
    if operands[0] == DType::Bf16 { MathUnit::Bf16 } else { MathUnit::F32 }
}

/// Checks x `[T, D]`, w `[rows, D]` and targets i32 `[T]`; returns `T`.
fn check_head(check: &Check<'_>, slice: &VocabSlice) -> Result<Dim, OpError> {
    check.same_float(&[0, 1])?;
    let x = check.rank(0, 2)?;
    slice.check(check, 1)?;
    check.shape(1, &Shape(vec![check.rank(1, 2)?[0], x[1]]))?;
    check.dtype(2, DType::I32)?;
    check.shape(2, &Shape(vec![x[0]]))?;
    Ok(x[0])
}

/// x `[T, D]`, w `[rows, D]`, targets i32 `[T]` → f32 `[T, 3]`: for the logits `x · wᵀ` of each
/// token the maximum, the sum of `exp(logit - maximum)`, and the target's logit; the latter is zero
/// if another rank or no rank has the target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VocabParallelSums {
    /// The rows of w.
    pub slice: VocabSlice,
}

impl VocabParallelSums {
    /// Numbers per token.
    pub const COUNT: usize = 3;
}

impl OpRule for VocabParallelSums {
    fn name(&self) -> &'static str {
        "vocab_parallel_sums"
    }

    fn attributes(&self) -> String {
        self.slice.text()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let check = Check::count(self.name(), inputs, &["x", "w", "targets"])?;
        let tokens = check_head(&check, &self.slice)?;
        let shape = Shape(vec![tokens, Dim::fixed(Self::COUNT)]);
        Ok(vec![OutputType::statistic("", shape, DType::F32)])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        2 * product(&shapes[0]) * shapes[1][0] as u64
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        unit(operands)
    }

    /// [`VocabParallelCrossEntropy`] computes the complete gradients.
    fn backward(&self, _: &Node, _: &mut BackwardContext<'_>) -> Result<(), IrError> {
        Ok(())
    }
}

fn check_loss(
    op: &'static str,
    inputs: &[TensorType],
    slice: &VocabSlice,
    ranks: usize,
) -> Result<(), OpError> {
    let check = Check::count(op, inputs, &["x", "w", "targets", "loss_scale", "sums"])?;
    let tokens = check_head(&check, slice)?;
    check.dtype(3, DType::F32)?;
    check.shape(3, &Shape(vec![Dim::fixed(1)]))?;
    check.dtype(4, DType::F32)?;
    let count = Dim::fixed(VocabParallelSums::COUNT);
    check.shape(4, &Shape(vec![tokens.times(ranks), count]))
}

/// x `[T, D]`, w `[rows, D]`, targets i32 `[T]`, loss_scale f32 `[1]`, the sums of all ranks f32
/// `[ranks·T, 3]` → `loss (+)= loss_scale · sum over tokens of (lse - logit of the target)`, the
/// same on all ranks. x and w are inputs for the gradients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VocabParallelCrossEntropy {
    /// The rows of w.
    pub slice: VocabSlice,
    /// Number of ranks.
    pub ranks: usize,
}

impl OpRule for VocabParallelCrossEntropy {
    fn name(&self) -> &'static str {
        "vocab_parallel_cross_entropy"
    }

    fn attributes(&self) -> String {
        format!("{} ranks={}", self.slice.text(), self.ranks)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        check_loss(self.name(), inputs, &self.slice, self.ranks)?;
        Ok(vec![OutputType::accumulator("loss", Shape(vec![Dim::fixed(1)]))])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        product(&shapes[4])
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        // As for the loss on one rank, forward and backward are a single pass.
        let (x, w) = (node.inputs[0], node.inputs[1]);
        let dw = context.parameter_gradient(w);
        context.replace_forward();
        let outputs = [Some(node.outputs[0]), None, Some(dw)];
        let op = VocabParallelCrossEntropyGrad { slice: self.slice, ranks: self.ranks };
        let made = context.emit_with(op, "", &node.inputs, &outputs)?;
        context.contribute(x, made[1])
    }
}

/// Like [`VocabParallelCrossEntropy`], with dx `[T, D]` and dw f32 `[rows, D]` `(+)=` in the same
/// pass. dx is the contribution of this rank's rows; the gradient is the sum over ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VocabParallelCrossEntropyGrad {
    /// The rows of w.
    pub slice: VocabSlice,
    /// Number of ranks.
    pub ranks: usize,
}

impl OpRule for VocabParallelCrossEntropyGrad {
    fn name(&self) -> &'static str {
        "vocab_parallel_cross_entropy_grad"
    }

    fn attributes(&self) -> String {
        format!("{} ranks={}", self.slice.text(), self.ranks)
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        check_loss(self.name(), inputs, &self.slice, self.ranks)?;
        Ok(vec![
            OutputType::accumulator("loss", Shape(vec![Dim::fixed(1)])),
            OutputType::activation("dx", inputs[0].shape.clone(), inputs[0].dtype),
            OutputType::accumulator("dw", inputs[1].shape.clone()),
        ])
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        6 * product(&shapes[0]) * shapes[1][0] as u64
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        unit(operands)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_meet_and_cover_the_vocabulary() {
        for (vocab, parts) in [(256, 1), (256, 4), (6, 3)] {
            let owners = |token: i32| -> Vec<(usize, usize)> {
                let slice = |place| VocabSlice::of(vocab, place, parts).unwrap();
                (0..parts)
                    .filter_map(|place| {
                        Some((place, slice(place).first + slice(place).row_of(token)?))
                    })
                    .collect()
            };
            for token in 0..vocab {
                let place = token / (vocab / parts);
                assert_eq!(owners(token as i32), [(place, token)]);
            }
            assert_eq!((owners(-100), owners(vocab as i32)), (vec![], vec![]));
        }
        assert_eq!((VocabSlice::of(10, 0, 4), VocabSlice::of(10, 0, 0)), (None, None));
    }
}
