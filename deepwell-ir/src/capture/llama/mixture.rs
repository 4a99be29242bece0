//! Blocks of mixture models: latent attention, experts and shared experts.

use super::graph::LlamaBuilder;
use crate::capture::{CaptureError, ExpertsConfig, LatentConfig, ParameterRole as R};
use crate::ops;
use crate::{Tag, TensorId};

/// Epsilon of latent norms: the default of transformers.
const LATENT_EPS: f64 = 1e-6;

impl LlamaBuilder<'_> {
    /// Adds attention with queries, keys and values from latents of the normalized `y`, without the
    /// output projection.
    pub(super) fn latent_attention(
        &mut self,
        layer: u32,
        y: TensorId,
        latent: &LatentConfig,
    ) -> Result<TensorId, CaptureError> {
        let at = |name: &str| format!("layers.{layer}.self_attn.{name}");
        let (mut x, mut q_name) = (y, "q_proj");
        if latent.q_rank.is_some() {
            let (role, bias) = (R::QueryDown, R::QueryDownBias);
            x = self.blocks.linear(&at("q_a_proj"), role, bias, layer, y)?;
            x = self.latent_norm(&at("q_a_layernorm"), R::QueryLatentNorm, layer, x)?;
            q_name = "q_b_proj";
        }
        let q = self.blocks.linear(&at(q_name), R::Query, R::QueryBias, layer, x)?;
        let (role, bias) = (R::KeyValueDown, R::KeyValueDownBias);
        let kv = self.blocks.linear(&at("kv_a_proj_with_mqa"), role, bias, layer, y)?;
        let split = ops::SplitColumns { columns: latent.kv_rank };
        let parts = self.blocks.graph.op(&at("kv_a_split"), split, &[kv])?;
        let role = R::KeyValueLatentNorm;
        let kv = self.latent_norm(&at("kv_a_layernorm"), role, layer, parts[0])?;
        let weight = self.blocks.parameter(R::KeyValueUp, Some(layer));
        let kv = self.blocks.op(&at("kv_b_proj"), ops::Linear { bias: false }, &[kv, weight])?;
        let LatentConfig { plain_dim, value_dim, interleaved, .. } = *latent;
        let (heads, rope_dim) = (self.config.num_heads, self.config.head_dim);
        let rope = |heads, plain_dim| ops::Rope {
            heads,
            head_dim: plain_dim + rope_dim,
            plain_dim,
            interleaved,
            inverse_frequencies: self.inverse_frequencies.clone(),
            attention_factor: self.config.attention_factor(),
        };
        let (of_queries, of_keys) = (rope(heads, plain_dim), rope(1, 0));
        let q = self.blocks.op(&at("q_rope"), of_queries, &[q])?;
        let k_rope = self.blocks.op(&at("k_rope"), of_keys, &[parts[1]])?;
        let op = ops::LatentKeyValue { heads, plain_dim, rope_dim, value_dim };
        let key_value = self.blocks.graph.op(&at("key_value"), op, &[kv, k_rope])?;
        let heads = ops::AttentionHeads {
            heads,
            kv_heads: heads,
            head_dim: plain_dim + rope_dim,
            value_dim: Some(value_dim).filter(|&width| width != plain_dim + rope_dim),
            scale: latent.scale(rope_dim, &self.config.rope),
            causal: true,
            ..ops::AttentionHeads::default()
        };
        let inputs = [q, key_value[0], key_value[1]];
        self.blocks.op(&at("attention"), ops::Attention { heads }, &inputs)
    }

    fn latent_norm(
        &mut self,
        name: &str,
        role: R,
        layer: u32,
        x: TensorId,
    ) -> Result<TensorId, CaptureError> {
        self.blocks.graph.scope(Tag::Norm, Some(layer));
        let gain = self.blocks.parameter(role, Some(layer));
        let normed = self.blocks.op(name, ops::RmsNorm { eps: LATENT_EPS }, &[x, gain])?;
        self.blocks.graph.scope(Tag::Attn, Some(layer));
        Ok(normed)
    }

    /// Adds `x + experts(y) (+ shared(y))` for the normalized `y`.
    pub(super) fn expert_block(
        &mut self,
        layer: u32,
        x: TensorId,
        y: TensorId,
        experts: &ExpertsConfig,
    ) -> Result<TensorId, CaptureError> {
        let family = self.config.family;
        let names = family.expert_names();
        let at = |name: &str| format!("layers.{layer}.{}.{name}", names.block);
        self.blocks.graph.scope(Tag::Router, Some(layer));
        let mut inputs = vec![y, self.blocks.parameter(R::Router, Some(layer))];
        inputs.extend(self.blocks.optional(R::RouterBias, Some(layer)));
        let op = ops::RouterLogits { bias: inputs.len() == 3 };
        let logits = self.blocks.op(&at(names.router), op, &inputs)?;
        let route = experts.route(family);
        let mut inputs = vec![logits];
        if route.selection_bias {
            inputs.push(self.blocks.parameter(R::SelectionBias, Some(layer)));
        }
        let chosen = self.blocks.graph.op(&at("route"), route, &inputs)?;
        self.blocks.graph.scope(Tag::Experts, Some(layer));
        let mut inputs = vec![y, chosen[0], chosen[1]];
        let weights = [R::ExpertGate, R::ExpertUp, R::ExpertDown];
        let biases = [R::ExpertGateBias, R::ExpertUpBias, R::ExpertDownBias];
        let bias = family.has_sinks();
        for role in weights.into_iter().chain(biases.into_iter().filter(|_| bias)) {
            inputs.push(self.blocks.parameter(role, Some(layer)));
        }
        let op = ops::Experts { activation: experts.activation, bias, capacity_factor: None };
        let mut sum = self.blocks.op(&at("experts"), op, &inputs)?;
        if experts.shared_experts > 0 {
            let shared = self.shared_experts(layer, y)?;
            sum = self.blocks.op(&at("sum"), ops::Add {}, &[sum, shared])?;
        }
        self.blocks.op(&at("residual"), ops::Add {}, &[x, sum])
    }

    fn shared_experts(&mut self, layer: u32, y: TensorId) -> Result<TensorId, CaptureError> {
        let at = |name: &str| format!("layers.{layer}.mlp.shared_experts.{name}");
        let linear = ops::Linear { bias: false };
        let weight = self.blocks.parameter(R::SharedGate, Some(layer));
        let gate = self.blocks.op(&at("gate_proj"), linear.clone(), &[y, weight])?;
        let weight = self.blocks.parameter(R::SharedUp, Some(layer));
        let up = self.blocks.op(&at("up_proj"), linear.clone(), &[y, weight])?;
        let product = self.blocks.op(&at("swiglu"), ops::SwiGlu {}, &[gate, up])?;
        let weight = self.blocks.parameter(R::SharedDown, Some(layer));
        self.blocks.op(&at("down_proj"), linear, &[product, weight])
    }
}
