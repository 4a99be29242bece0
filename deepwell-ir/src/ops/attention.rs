//! Scaled dot-product attention with grouped query heads.

use serde::{Deserialize, Serialize};

use super::Check;
use crate::autodiff::BackwardContext;
use crate::op::{MathUnit, OpRule, OutputType, TensorType};
use crate::{DType, Dim, IrError, Node, OpError, Shape};

/// Operands of an attention that are `[B, heads, S, width]` in memory, as PyTorch's models have
/// them: the tokens of a head together, instead of the heads of a token. The sizes of an operand do
/// not tell the two orders apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeadsFirst {
    /// The queries and their gradient.
    pub q: bool,
    /// The keys and their gradient.
    pub k: bool,
    /// The values and their gradient.
    pub v: bool,
    /// The output and its gradient.
    pub o: bool,
}

impl HeadsFirst {
    /// Whether no operand has its heads first.
    pub fn is_none(&self) -> bool {
        *self == HeadsFirst::default()
    }

    /// The letters of the operands whose heads are first.
    fn letters(&self) -> String {
        let operands = [(self.q, 'q'), (self.k, 'k'), (self.v, 'v'), (self.o, 'o')];
        operands.into_iter().filter(|(is_first, _)| *is_first).map(|(_, letter)| letter).collect()
    }
}

/// Heads of an attention, mask, and extensions such as sinks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AttentionHeads {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a query and of a key.
    pub head_dim: usize,
    /// Width of a value, if different from `head_dim`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_dim: Option<usize>,
    /// Factor on the scores, usually `1/sqrt(head_dim)`.
    pub scale: f64,
    /// Whether a token attends only to itself and earlier tokens.
    pub causal: bool,
    /// Number of tokens that a token attends to, itself included; causal only. All if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// Whether each head has a sink: an additional score in the softmax, like an extra key whose
    /// value is zero.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sinks: bool,
    /// Whether a token attends only to tokens of the same document; causal only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub documents: bool,
    /// Order of heads and tokens in memory. Captured models have the tokens first.
    #[serde(default, skip_serializing_if = "HeadsFirst::is_none")]
    pub heads_first: HeadsFirst,
}

impl AttentionHeads {
    /// Width of a value.
    pub fn value_dim(&self) -> usize {
        self.value_dim.unwrap_or(self.head_dim)
    }

    /// Describes the first extension beyond plain attention (causal or full, one head width), for
    /// kernels that do not support extensions. `None` for plain attention.
    pub fn extension(&self) -> Option<String> {
        let window = self.window.map(|window| format!("a window of {window} tokens"));
        let sinks = self.sinks.then(|| "sinks".to_string());
        let documents = self.documents.then(|| "several documents to a sequence".to_string());
        let widths = (self.value_dim() != self.head_dim)
            .then(|| format!("values of {} beside keys of {}", self.value_dim(), self.head_dim));
        window.or(sinks).or(widths).or(documents)
    }

    pub(super) fn text(&self) -> String {
        let mut text =
            format!("heads={} kv_heads={} head_dim={}", self.heads, self.kv_heads, self.head_dim);
        if let Some(value_dim) = self.value_dim {
            text.push_str(&format!(" value_dim={value_dim}"));
        }
        if self.causal {
            text.push_str(" causal");
        }
        if let Some(window) = self.window {
            text.push_str(&format!(" window={window}"));
        }
        if self.sinks {
            text.push_str(" sinks");
        }
        if self.documents {
            text.push_str(" documents");
        }
        if !self.heads_first.is_none() {
            text.push_str(&format!(" heads_first={}", self.heads_first.letters()));
        }
        text
    }

    /// Checks that inputs `q`, `q + 1`, `q + 2` are queries, keys, values, and that inputs from
    /// `extra` on are the sinks (if used, one FP32 score per head) and the documents (if used).
    /// Returns the shape of the output.
    pub(super) fn check(
        &self,
        check: &Check<'_>,
        q: usize,
        extra: usize,
    ) -> Result<Shape, OpError> {
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(check.error(
                "query heads a multiple of key/value heads",
                format!("{} and {}", self.heads, self.kv_heads),
            ));
        }
        match self.window {
            Some(0) => return Err(check.error("a window of 1 token or more", "0")),
            Some(_) if !self.causal => {
                return Err(check.error("a causal mask where there is a window", "none"));
            }
            _ => {}
        }
        if self.documents && !self.causal {
            return Err(check.error("a causal mask where documents are told apart", "none"));
        }
        let tokens = check.rank(q, 2)?[0];
        let columns = |heads, width| Shape(vec![tokens, Dim::fixed(heads * width)]);
        check.shape(q, &columns(self.heads, self.head_dim))?;
        check.shape(q + 1, &columns(self.kv_heads, self.head_dim))?;
        check.shape(q + 2, &columns(self.kv_heads, self.value_dim()))?;
        if self.sinks {
            check.dtype(extra, DType::F32)?;
            check.shape(extra, &Shape::new([self.heads]))?;
        }
        if let Some(documents) = self.documents_at(extra) {
            check.dtype(documents, DType::I32)?;
            check.shape(documents, &Shape(vec![tokens, Dim::fixed(2)]))?;
        }
        Ok(columns(self.heads, self.value_dim()))
    }

    /// Checks that the tokens of every operand precede its heads, for ops that have no other order.
    pub(super) fn check_tokens_first(&self, check: &Check<'_>) -> Result<(), OpError> {
        match self.heads_first.is_none() {
            true => Ok(()),
            false => Err(check.error(
                "operands with the tokens before the heads",
                format!("heads first in {}", self.heads_first.letters()),
            )),
        }
    }

    /// Operand index of the documents, if used. `extra` is the index of the first optional operand:
    /// 3 in the forward op, 6 in the backward op.
    pub fn documents_at(&self, extra: usize) -> Option<usize> {
        self.documents.then_some(extra + usize::from(self.sinks))
    }

    /// Number of optional operands.
    pub fn extra_inputs(&self) -> usize {
        usize::from(self.sinks) + usize::from(self.documents)
    }

    pub(super) fn lse_shape(&self) -> Shape {
        Shape(vec![Dim::BATCH, Dim::fixed(self.heads), Dim::SEQ])
    }

    /// Operand names, including sinks and documents only if used.
    pub(super) fn names(&self, names: &[&'static str]) -> Vec<&'static str> {
        let sinks = self.sinks.then_some("sinks");
        names.iter().copied().chain(sinks).chain(self.documents.then_some("documents")).collect()
    }

    /// FLOPs of GEMMs over all heads with a total width of `width` columns, from the shape of lse.
    /// Only unmasked scores count. Document lengths are data, so a document mask counts as one
    /// document per sequence.
    fn gemm_flops(&self, lse: &[usize], width: usize) -> u64 {
        let (batch, heads, seq) = (lse[0] as u64, lse[1] as u64, lse[2] as u64);
        let scores = if self.causal { causal_scores(seq, self.window) } else { seq * seq };
        2 * batch * heads * scores * width as u64
    }
}

/// Scores per head under a causal mask, in windows of at most `window` tokens.
fn causal_scores(seq: u64, window: Option<usize>) -> u64 {
    let window = window.map_or(seq, |window| (window as u64).min(seq));
    // The first tokens see 1, 2, ... tokens, later tokens a full window.
    window * (window + 1) / 2 + (seq - window) * window
}

/// q `[T, H·D]`, k `[T, KV·D]`, v `[T, KV·V]` (, sinks f32 `[H]`) (, documents i32 `[T, 2]`, see
/// [`InputRole::Documents`](crate::InputRole::Documents)) → o `[T, H·V]`, lse f32 `[B, H, S]`
/// (natural logarithm of the sum of exponentials of the scaled scores, including the unscaled
/// sink).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// Heads and mask.
    pub heads: AttentionHeads,
}

impl OpRule for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn attributes(&self) -> String {
        self.heads.text()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = self.heads.names(&["q", "k", "v"]);
        let check = Check::count(self.name(), inputs, &names)?;
        let dtype = check.same_float(&[0, 1, 2])?;
        let out = self.heads.check(&check, 0, 3)?;
        Ok(vec![
            OutputType::activation("", out, dtype),
            OutputType::statistic("lse", self.heads.lse_shape(), DType::F32),
        ])
    }

    fn result_count(&self) -> usize {
        2
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let lse = &shapes[4 + self.heads.extra_inputs()];
        self.heads.gemm_flops(lse, self.heads.head_dim + self.heads.value_dim())
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        if operands[0] == DType::Bf16 { MathUnit::Bf16 } else { MathUnit::F32 }
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let Some(dout) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let (q, k, v) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        let mut inputs = vec![dout, q, k, v, node.outputs[0], node.outputs[1]];
        let mut outputs = vec![None; 3];
        inputs.extend(&node.inputs[3..]);
        if self.heads.sinks {
            outputs.push(Some(context.parameter_gradient(node.inputs[3])));
        }
        let op = AttentionBackward { heads: self.heads.clone() };
        let gradients = context.emit_with(op, "", &inputs, &outputs)?;
        for (tensor, gradient) in [q, k, v].into_iter().zip(gradients) {
            context.contribute(tensor, gradient)?;
        }
        Ok(())
    }
}

/// dout, q, k, v, o, lse (, sinks) (, documents) → dq, dk, dv (, dsinks f32 `[H]` `(+)=`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionBackward {
    /// Heads and mask of the forward.
    pub heads: AttentionHeads,
}

impl OpRule for AttentionBackward {
    fn name(&self) -> &'static str {
        "attention_backward"
    }

    fn attributes(&self) -> String {
        self.heads.text()
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        let names = self.heads.names(&["dout", "q", "k", "v", "o", "lse"]);
        let check = Check::count(self.name(), inputs, &names)?;
        let dtype = check.same_float(&[0, 1, 2, 3, 4])?;
        check.dtype(5, DType::F32)?;
        let out = self.heads.check(&check, 1, 6)?;
        check.shape(0, &out)?;
        check.shape(4, &out)?;
        check.shape(5, &self.heads.lse_shape())?;
        let mut outputs = vec![
            OutputType::activation("dq", inputs[1].shape.clone(), dtype),
            OutputType::activation("dk", inputs[2].shape.clone(), dtype),
            OutputType::activation("dv", inputs[3].shape.clone(), dtype),
        ];
        if self.heads.sinks {
            outputs.push(OutputType::accumulator("dsinks", inputs[6].shape.clone()));
        }
        Ok(outputs)
    }

    fn result_count(&self) -> usize {
        if self.heads.sinks { 4 } else { 3 }
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        // Five GEMMs: recomputed scores, dQ, dK of width head_dim; dP, dV of width value_dim.
        let width = 3 * self.heads.head_dim + 2 * self.heads.value_dim();
        self.heads.gemm_flops(&shapes[5], width)
    }

    fn unit(&self, operands: &[DType]) -> MathUnit {
        if operands[0] == DType::Bf16 { MathUnit::Bf16 } else { MathUnit::F32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Op;
    use crate::ops::{AttentionPart, KeySource};

    fn heads(heads_first: HeadsFirst) -> AttentionHeads {
        AttentionHeads {
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            scale: 0.5,
            heads_first,
            ..AttentionHeads::default()
        }
    }

    #[test]
    fn the_order_of_heads_is_written_only_if_it_is_another() {
        let first = |q, k, v, o| HeadsFirst { q, k, v, o };
        for (heads_first, letters) in [
            (first(false, false, false, false), ""),
            (first(true, true, true, true), " heads_first=qkvo"),
            (first(false, true, true, false), " heads_first=kv"),
        ] {
            let op: Op = Attention { heads: heads(heads_first) }.into();
            let json = serde_json::to_string(&op).unwrap();
            assert_eq!(json.contains("heads_first"), !letters.is_empty(), "{json}");
            assert_eq!(serde_json::from_str::<Op>(&json).unwrap(), op);
            let text = heads(heads_first).text();
            assert_eq!(text, format!("heads=4 kv_heads=2 head_dim=8{letters}"));
        }
        let misspelt = r#"{"op": "attention", "heads": {"heads": 4, "kv_heads": 2, "head_dim": 8,
            "scale": 0.5, "causal": true, "heads_first": {"queries": true}}}"#;
        assert!(serde_json::from_str::<Op>(misspelt).is_err());
    }

    #[test]
    fn a_part_has_the_tokens_first() {
        let of = |columns| TensorType {
            shape: Shape(vec![Dim::fixed(6), Dim::fixed(columns)]),
            dtype: DType::Bf16,
        };
        let heads = heads(HeadsFirst { k: true, ..HeadsFirst::default() });
        let part = AttentionPart { heads, keys: KeySource::Own, places: None };
        let error = part.infer(&[of(32), of(16), of(16)]).unwrap_err().to_string();
        assert!(error.contains("got heads first in k"), "{error}");
    }
}
