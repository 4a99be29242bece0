//! Builds the forward graph of a llama-like model.

use crate::capture::blocks::Blocks;
use crate::capture::{CaptureError, LlamaConfig, ParameterRole, RopeScaling};
use crate::ops;
use crate::{Graph, Tag, TensorId};

use ParameterRole as R;

/// Captures the forward pass of a model as a [`Graph`] with symbolic batch and sequence sizes.
///
/// Inputs are `tokens` and `targets`, i32 `[B·S]`, and `loss_scale`, f32 `[1]`; the loss is
/// `loss_scale` times the sum of the tokens' cross-entropies. Parameters have the order and the
/// names of [`LlamaConfig::parameters`]; other tensors are named after parameters without `model.`
/// and `.weight`. All tensors are F32; the precision pass changes the types.
///
/// # Errors
/// A configuration that fails [`LlamaConfig::check`], and [`CaptureError::NeedsSequenceLength`] for
/// dynamically scaled RoPE.
pub fn capture(config: &LlamaConfig) -> Result<Graph, CaptureError> {
    config.check("configuration")?;
    if matches!(config.rope.scaling, RopeScaling::Dynamic { .. }) {
        return Err(CaptureError::NeedsSequenceLength);
    }
    build(config, config.max_position_embeddings)
}

/// Like [`capture`], for sequences of `seq_len` tokens. Required for [`RopeScaling::Dynamic`],
/// whose frequencies depend on the length. Otherwise equal to [`capture`], except that attention
/// with a window of at least `seq_len` tokens becomes plain causal attention.
///
/// # Errors
/// A configuration that fails [`LlamaConfig::check`].
pub fn capture_for_sequence(config: &LlamaConfig, seq_len: usize) -> Result<Graph, CaptureError> {
    config.check("configuration")?;
    build(config, seq_len)
}

fn build(config: &LlamaConfig, seq_len: usize) -> Result<Graph, CaptureError> {
    let mut model = LlamaBuilder::new(config, seq_len);
    model.blocks.graph.scope(Tag::Embed, None);
    let table = model.blocks.parameter(R::TokenEmbedding, None);
    let embedding = ops::Embedding { padding: config.padding_row };
    let mut x = model.blocks.op("embed_tokens", embedding, &[model.blocks.tokens, table])?;
    for layer in 0..config.num_layers as u32 {
        x = model.attention_block(layer, x)?;
        x = model.mlp_block(layer, x)?;
    }
    let x = model.norm("norm", R::FinalNorm, None, x)?;
    model.blocks.finish(config.tie_word_embeddings, x)
}

/// Builder state: the graph so far, rotation frequencies and window.
pub(super) struct LlamaBuilder<'a> {
    pub(super) config: &'a LlamaConfig,
    pub(super) blocks: Blocks,
    pub(super) inverse_frequencies: Vec<f32>,
    /// Sliding window, if shorter than the sequences.
    window: Option<usize>,
}

impl<'a> LlamaBuilder<'a> {
    fn new(config: &'a LlamaConfig, seq_len: usize) -> LlamaBuilder<'a> {
        LlamaBuilder {
            config,
            blocks: Blocks::new(config.family.model_type(), config.parameters()),
            inverse_frequencies: config.inverse_frequencies(seq_len),
            window: config.sliding_window.filter(|&window| window < seq_len),
        }
    }

    pub(super) fn norm(
        &mut self,
        name: &str,
        role: ParameterRole,
        layer: Option<u32>,
        x: TensorId,
    ) -> Result<TensorId, CaptureError> {
        self.blocks.graph.scope(Tag::Norm, layer);
        let gain = self.blocks.parameter(role, layer);
        self.blocks.op(name, ops::RmsNorm { eps: self.config.rms_norm_eps }, &[x, gain])
    }

    /// Adds the norm of each head of queries or keys.
    fn head_norm(
        &mut self,
        name: &str,
        role: ParameterRole,
        layer: u32,
        x: TensorId,
    ) -> Result<TensorId, CaptureError> {
        let gain = self.blocks.parameter(role, Some(layer));
        self.blocks.op(name, ops::HeadRmsNorm { eps: self.config.rms_norm_eps }, &[x, gain])
    }

    fn rope(&mut self, name: &str, heads: usize, x: TensorId) -> Result<TensorId, CaptureError> {
        let op = ops::Rope {
            heads,
            head_dim: self.config.head_dim,
            inverse_frequencies: self.inverse_frequencies.clone(),
            attention_factor: self.config.attention_factor(),
            ..ops::Rope::default()
        };
        self.blocks.op(name, op, &[x])
    }

    /// Adds `x + o(attention(norm(x)))`.
    fn attention_block(&mut self, layer: u32, x: TensorId) -> Result<TensorId, CaptureError> {
        let at = |name: &str| format!("layers.{layer}.{name}");
        let y = self.norm(&at("input_layernorm"), R::AttentionNorm, Some(layer), x)?;
        self.blocks.graph.scope(Tag::Attn, Some(layer));
        let o = match &self.config.latent {
            Some(latent) => self.latent_attention(layer, y, latent)?,
            None => self.attention(layer, y)?,
        };
        let (role, bias_role) = (R::AttentionOutput, R::AttentionOutputBias);
        let o = self.blocks.linear(&at("self_attn.o_proj"), role, bias_role, layer, o)?;
        self.blocks.op(&at("self_attn.residual"), ops::Add {}, &[x, o])
    }

    /// Adds `attention(rope(q), rope(k), v)`.
    fn attention(&mut self, layer: u32, y: TensorId) -> Result<TensorId, CaptureError> {
        let config = self.config;
        let at = |name: &str| format!("layers.{layer}.{name}");
        let q = self.blocks.linear(&at("self_attn.q_proj"), R::Query, R::QueryBias, layer, y)?;
        let k = self.blocks.linear(&at("self_attn.k_proj"), R::Key, R::KeyBias, layer, y)?;
        let v = self.blocks.linear(&at("self_attn.v_proj"), R::Value, R::ValueBias, layer, y)?;
        let (q, k) = if config.family.has_head_norms() {
            self.blocks.graph.scope(Tag::Norm, Some(layer));
            let q = self.head_norm(&at("self_attn.q_norm"), R::QueryNorm, layer, q)?;
            let k = self.head_norm(&at("self_attn.k_norm"), R::KeyNorm, layer, k)?;
            self.blocks.graph.scope(Tag::Attn, Some(layer));
            (q, k)
        } else {
            (q, k)
        };
        let q = self.rope(&at("self_attn.q_rope"), config.num_heads, q)?;
        let k = self.rope(&at("self_attn.k_rope"), config.num_kv_heads, k)?;
        let sees_all = config.full_attention_layers.contains(&(layer as usize));
        let heads = ops::AttentionHeads {
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            scale: 1.0 / (config.head_dim as f64).sqrt(),
            causal: true,
            window: self.window.filter(|_| !sees_all),
            sinks: config.family.has_sinks(),
            value_dim: None,
            documents: false,
            heads_first: ops::HeadsFirst::default(),
        };
        let mut inputs = vec![q, k, v];
        if heads.sinks {
            inputs.push(self.blocks.parameter(R::Sinks, Some(layer)));
        }
        self.blocks.op(&at("self_attn.attention"), ops::Attention { heads }, &inputs)
    }

    /// Adds `x + down(silu(gate) · up)` of the normalized x, or a mixture of experts.
    fn mlp_block(&mut self, layer: u32, x: TensorId) -> Result<TensorId, CaptureError> {
        let at = |name: &str| format!("layers.{layer}.{name}");
        let y = self.norm(&at("post_attention_layernorm"), R::MlpNorm, Some(layer), x)?;
        let experts = self.config.experts.as_ref().filter(|experts| !experts.is_dense(layer));
        if let Some(experts) = experts {
            return self.expert_block(layer, x, y, experts);
        }
        self.blocks.graph.scope(Tag::Mlp, Some(layer));
        let gate = self.blocks.linear(&at("mlp.gate_proj"), R::Gate, R::GateBias, layer, y)?;
        let up = self.blocks.linear(&at("mlp.up_proj"), R::Up, R::UpBias, layer, y)?;
        let product = self.blocks.op(&at("mlp.swiglu"), ops::SwiGlu {}, &[gate, up])?;
        let down =
            self.blocks.linear(&at("mlp.down_proj"), R::Down, R::DownBias, layer, product)?;
        self.blocks.op(&at("mlp.residual"), ops::Add {}, &[x, down])
    }
}
