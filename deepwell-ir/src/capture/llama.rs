//! Builds the forward graph of a llama-like model.

use std::collections::HashMap;

use super::{CaptureError, LlamaConfig, ParameterRole, ParameterSpec, RopeScaling};
use crate::ops;
use crate::{DType, Dim, Graph, GraphBuilder, Shape, Tag, TensorId};

use ParameterRole as R;

/// The forward pass of a model as a [`Graph`] over open batch and sequence sizes.
///
/// Inputs are `tokens` and `targets`, i32 `[B·S]`, and `loss_scale`, f32 `[1]`; the loss is
/// `loss_scale` times the sum of the tokens' cross-entropies. Parameters stand in the order and
/// under the names of [`LlamaConfig::parameters`]; everything else is named after them without
/// `model.` and `.weight`. The graph holds F32 throughout; the precision pass decides otherwise.
///
/// # Errors
/// A configuration that does not pass [`LlamaConfig::check`], and
/// [`CaptureError::NeedsSequenceLength`] for RoPE scaled dynamically.
pub fn capture(config: &LlamaConfig) -> Result<Graph, CaptureError> {
    config.check("configuration")?;
    if matches!(config.rope.scaling, RopeScaling::Dynamic { .. }) {
        return Err(CaptureError::NeedsSequenceLength);
    }
    build(config, config.max_position_embeddings)
}

/// Like [`capture`], for sequences of `seq_len` tokens; needed with [`RopeScaling::Dynamic`],
/// whose frequencies depend on the length, and the same as [`capture`] otherwise, except that an
/// attention whose window holds the whole sequence is plain causal attention.
///
/// # Errors
/// A configuration that does not pass [`LlamaConfig::check`].
pub fn capture_for_sequence(config: &LlamaConfig, seq_len: usize) -> Result<Graph, CaptureError> {
    config.check("configuration")?;
    build(config, seq_len)
}

fn build(config: &LlamaConfig, seq_len: usize) -> Result<Graph, CaptureError> {
    let mut model = LlamaBuilder::new(config, seq_len);
    let tokens = model.graph.input("tokens", Shape(vec![Dim::TOKENS]), DType::I32);
    let targets = model.graph.input("targets", Shape(vec![Dim::TOKENS]), DType::I32);
    let loss_scale = model.graph.input("loss_scale", Shape(vec![Dim::fixed(1)]), DType::F32);
    model.add_parameters();

    model.graph.scope(Tag::Embed, None);
    let table = model.parameter(R::TokenEmbedding, None);
    let mut x = model.op("embed_tokens", ops::Embedding {}, &[tokens, table])?;
    for layer in 0..config.num_layers as u32 {
        x = model.attention_block(layer, x)?;
        x = model.mlp_block(layer, x)?;
    }
    let x = model.norm("norm", R::FinalNorm, None, x)?;
    model.graph.scope(Tag::Head, None);
    let head_role = if config.tie_word_embeddings { R::TokenEmbedding } else { R::Head };
    let head = model.parameter(head_role, None);
    let inputs = [x, head, targets, loss_scale];
    model.op("lm_head", ops::LinearCrossEntropy {}, &inputs)?;
    Ok(model.graph.finish()?)
}

/// Builder state: the graph so far and where each parameter is.
struct LlamaBuilder<'a> {
    config: &'a LlamaConfig,
    graph: GraphBuilder,
    parameters: HashMap<(ParameterRole, Option<u32>), TensorId>,
    inverse_frequencies: Vec<f32>,
    /// Tokens that a token sees, where sequences are longer than that.
    window: Option<usize>,
}

impl<'a> LlamaBuilder<'a> {
    fn new(config: &'a LlamaConfig, seq_len: usize) -> LlamaBuilder<'a> {
        LlamaBuilder {
            config,
            graph: GraphBuilder::new(config.family.model_type()),
            parameters: HashMap::new(),
            inverse_frequencies: config.inverse_frequencies(seq_len),
            window: config.sliding_window.filter(|&window| window < seq_len),
        }
    }

    fn add_parameters(&mut self) {
        for ParameterSpec { name, shape, init, role, layer } in self.config.parameters() {
            let id = self.graph.parameter(&name, Shape::new(shape), init, role.precision_role());
            self.parameters.insert((role, layer), id);
        }
    }

    /// A parameter that every configuration has.
    fn parameter(&self, role: ParameterRole, layer: Option<u32>) -> TensorId {
        self.parameters[&(role, layer)]
    }

    /// Applies an op and gives its first output.
    fn op(
        &mut self,
        name: &str,
        op: impl Into<crate::Op>,
        inputs: &[TensorId],
    ) -> Result<TensorId, CaptureError> {
        Ok(self.graph.op(name, op, inputs)?[0])
    }

    fn norm(
        &mut self,
        name: &str,
        role: ParameterRole,
        layer: Option<u32>,
        x: TensorId,
    ) -> Result<TensorId, CaptureError> {
        self.graph.scope(Tag::Norm, layer);
        let gain = self.parameter(role, layer);
        self.op(name, ops::RmsNorm { eps: self.config.rms_norm_eps }, &[x, gain])
    }

    /// The norm of each head of queries or keys.
    fn head_norm(
        &mut self,
        name: &str,
        role: ParameterRole,
        layer: u32,
        x: TensorId,
    ) -> Result<TensorId, CaptureError> {
        let gain = self.parameter(role, Some(layer));
        self.op(name, ops::HeadRmsNorm { eps: self.config.rms_norm_eps }, &[x, gain])
    }

    /// A linear layer, with its bias if the model has one.
    fn linear(
        &mut self,
        name: &str,
        role: ParameterRole,
        bias_role: ParameterRole,
        layer: u32,
        x: TensorId,
    ) -> Result<TensorId, CaptureError> {
        let mut inputs = vec![x, self.parameter(role, Some(layer))];
        inputs.extend(self.parameters.get(&(bias_role, Some(layer))));
        self.op(name, ops::Linear { bias: inputs.len() == 3 }, &inputs)
    }

    fn rope(&mut self, name: &str, heads: usize, x: TensorId) -> Result<TensorId, CaptureError> {
        let op = ops::Rope {
            heads,
            head_dim: self.config.head_dim,
            inverse_frequencies: self.inverse_frequencies.clone(),
            attention_factor: self.config.attention_factor(),
        };
        self.op(name, op, &[x])
    }

    /// `x + o(attention(rope(q), rope(k), v))` of the normalized x.
    fn attention_block(&mut self, layer: u32, x: TensorId) -> Result<TensorId, CaptureError> {
        let config = self.config;
        let at = |name: &str| format!("layers.{layer}.{name}");
        let y = self.norm(&at("input_layernorm"), R::AttentionNorm, Some(layer), x)?;
        self.graph.scope(Tag::Attn, Some(layer));
        let q = self.linear(&at("self_attn.q_proj"), R::Query, R::QueryBias, layer, y)?;
        let k = self.linear(&at("self_attn.k_proj"), R::Key, R::KeyBias, layer, y)?;
        let v = self.linear(&at("self_attn.v_proj"), R::Value, R::ValueBias, layer, y)?;
        let (q, k) = if config.family.has_head_norms() {
            self.graph.scope(Tag::Norm, Some(layer));
            let q = self.head_norm(&at("self_attn.q_norm"), R::QueryNorm, layer, q)?;
            let k = self.head_norm(&at("self_attn.k_norm"), R::KeyNorm, layer, k)?;
            self.graph.scope(Tag::Attn, Some(layer));
            (q, k)
        } else {
            (q, k)
        };
        let q = self.rope(&at("self_attn.q_rope"), config.num_heads, q)?;
        let k = self.rope(&at("self_attn.k_rope"), config.num_kv_heads, k)?;
        let heads = ops::AttentionHeads {
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            scale: 1.0 / (config.head_dim as f64).sqrt(),
            causal: true,
        };
        let op = match self.window {
            Some(window) => ops::WindowAttention { heads, window }.into(),
            None => crate::Op::from(ops::Attention { heads }),
        };
        let o = self.op(&at("self_attn.attention"), op, &[q, k, v])?;
        let (role, bias_role) = (R::AttentionOutput, R::AttentionOutputBias);
        let o = self.linear(&at("self_attn.o_proj"), role, bias_role, layer, o)?;
        self.op(&at("self_attn.residual"), ops::Add {}, &[x, o])
    }

    /// `x + down(silu(gate) · up)` of the normalized x.
    fn mlp_block(&mut self, layer: u32, x: TensorId) -> Result<TensorId, CaptureError> {
        let at = |name: &str| format!("layers.{layer}.{name}");
        let y = self.norm(&at("post_attention_layernorm"), R::MlpNorm, Some(layer), x)?;
        self.graph.scope(Tag::Mlp, Some(layer));
        let gate = self.linear(&at("mlp.gate_proj"), R::Gate, R::GateBias, layer, y)?;
        let up = self.linear(&at("mlp.up_proj"), R::Up, R::UpBias, layer, y)?;
        let product = self.op(&at("mlp.swiglu"), ops::SwiGlu {}, &[gate, up])?;
        let down = self.linear(&at("mlp.down_proj"), R::Down, R::DownBias, layer, product)?;
        self.op(&at("mlp.residual"), ops::Add {}, &[x, down])
    }
}
