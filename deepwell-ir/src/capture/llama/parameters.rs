//! The tensors of a configuration, with Hugging Face names.

use crate::capture::{ExpertsConfig, LatentConfig, LlamaConfig};
use crate::{Init, Role};

/// Role of a parameter in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterRole {
    /// Token table `[vocab, hidden]`; also the output head when tied.
    TokenEmbedding,
    /// Position table `[positions, hidden]`.
    PositionEmbedding,
    /// Gain of the norm before attention, `[hidden]`.
    AttentionNorm,
    /// Bias of the norm before attention, `[hidden]`.
    AttentionNormBias,
    /// Query projection `[heads · head_dim, hidden]`.
    Query,
    /// Bias of the query projection.
    QueryBias,
    /// Key projection `[kv_heads · head_dim, hidden]`.
    Key,
    /// Bias of the key projection.
    KeyBias,
    /// Value projection `[kv_heads · head_dim, hidden]`.
    Value,
    /// Bias of the value projection.
    ValueBias,
    /// Gain of the norm of each query head, `[head_dim]`.
    QueryNorm,
    /// Gain of the norm of each key head, `[head_dim]`.
    KeyNorm,
    /// Projection from the residual stream to the query latent `[q_rank, hidden]`.
    QueryDown,
    /// Bias of the projection to the query latent.
    QueryDownBias,
    /// Gain of the norm of the query latent, `[q_rank]`.
    QueryLatentNorm,
    /// Projection from the residual stream to the key-value latent and the rotated part of the
    /// keys, `[kv_rank + rope_dim, hidden]`.
    KeyValueDown,
    /// Bias of the projection to the key-value latent.
    KeyValueDownBias,
    /// Gain of the norm of the key-value latent, `[kv_rank]`.
    KeyValueLatentNorm,
    /// Projection from the latent to keys and values `[heads · (plain_dim + value_dim), kv_rank]`.
    KeyValueUp,
    /// Attention sink of each head, `[heads]`.
    Sinks,
    /// Output projection of attention `[hidden, heads · head_dim]`.
    AttentionOutput,
    /// Bias of the output projection.
    AttentionOutputBias,
    /// Gain of the norm before the feed-forward block, `[hidden]`.
    MlpNorm,
    /// Bias of the norm before the feed-forward block, `[hidden]`.
    MlpNormBias,
    /// Gate projection `[ffn, hidden]`.
    Gate,
    /// Bias of the gate projection.
    GateBias,
    /// Up projection `[ffn, hidden]`.
    Up,
    /// Bias of the up projection.
    UpBias,
    /// Down projection `[hidden, ffn]`.
    Down,
    /// Bias of the down projection.
    DownBias,
    /// Router projection `[experts, hidden]`.
    Router,
    /// Bias of the router projection, `[experts]`.
    RouterBias,
    /// Bias added to the scores for expert selection only, `[experts]`.
    SelectionBias,
    /// Gate projections of all experts `[experts, ffn, hidden]`.
    ExpertGate,
    /// Biases of the gate projections `[experts, ffn]`.
    ExpertGateBias,
    /// Up projections of all experts `[experts, ffn, hidden]`.
    ExpertUp,
    /// Biases of the up projections `[experts, ffn]`.
    ExpertUpBias,
    /// Down projections of all experts `[experts, hidden, ffn]`.
    ExpertDown,
    /// Biases of the down projections `[experts, hidden]`.
    ExpertDownBias,
    /// Gate projection of the shared experts.
    SharedGate,
    /// Up projection of the shared experts.
    SharedUp,
    /// Down projection of the shared experts.
    SharedDown,
    /// Gain of the norm before the output head, `[hidden]`.
    FinalNorm,
    /// Bias of the norm before the output head, `[hidden]`.
    FinalNormBias,
    /// Output head `[vocab, hidden]`; absent when tied.
    Head,
}

impl ParameterRole {
    /// Role in the precision policy. A bias counts as part of its linear layer.
    pub fn precision_role(self) -> Role {
        match self {
            ParameterRole::TokenEmbedding | ParameterRole::PositionEmbedding => Role::Embedding,
            ParameterRole::AttentionNorm
            | ParameterRole::AttentionNormBias
            | ParameterRole::QueryNorm
            | ParameterRole::KeyNorm
            | ParameterRole::QueryLatentNorm
            | ParameterRole::KeyValueLatentNorm
            | ParameterRole::MlpNorm
            | ParameterRole::MlpNormBias
            | ParameterRole::FinalNorm
            | ParameterRole::FinalNormBias => Role::Norm,
            ParameterRole::Head => Role::Head,
            ParameterRole::Router | ParameterRole::RouterBias | ParameterRole::SelectionBias => {
                Role::Router
            }
            ParameterRole::ExpertGate
            | ParameterRole::ExpertGateBias
            | ParameterRole::ExpertUp
            | ParameterRole::ExpertUpBias
            | ParameterRole::ExpertDown
            | ParameterRole::ExpertDownBias
            | ParameterRole::SharedGate
            | ParameterRole::SharedUp
            | ParameterRole::SharedDown => Role::Expert,
            _ => Role::Linear,
        }
    }
}

/// A trained tensor of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// Name in Hugging Face checkpoints, `model.layers.0.self_attn.q_proj.weight` for example.
    pub name: String,
    /// Row-major shape; the output dimension of a linear layer comes first.
    pub shape: Vec<usize>,
    /// Initialization for training from scratch.
    pub init: Init,
    /// Role in the model.
    pub role: ParameterRole,
    /// Transformer layer, counted from 0.
    pub layer: Option<u32>,
}

impl ParameterSpec {
    /// Number of values.
    pub fn count(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }
}

impl LlamaConfig {
    /// All parameters in canonical order: table, layers from the first, final norm, head. A tied
    /// head is not repeated.
    ///
    /// Initial values are those of transformers: linear weights and the table normal with
    /// `initializer_range`, norm gains one, biases zero.
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        let mut list = ParameterList {
            specs: Vec::new(),
            normal: Init::Normal { std: self.initializer_range },
        };
        let table = vec![self.vocab_size, self.hidden_size];
        list.add("model.embed_tokens.weight", table.clone(), ParameterRole::TokenEmbedding, None);
        for layer in 0..self.num_layers {
            self.layer_parameters(&mut list, layer as u32);
        }
        let gain = vec![self.hidden_size];
        list.add("model.norm.weight", gain, ParameterRole::FinalNorm, None);
        if !self.tie_word_embeddings {
            list.add("lm_head.weight", table, ParameterRole::Head, None);
        }
        list.specs
    }

    /// Number of trained values.
    pub fn parameter_count(&self) -> u64 {
        self.parameters().iter().map(ParameterSpec::count).sum()
    }

    fn layer_parameters(&self, list: &mut ParameterList, layer: u32) {
        use ParameterRole as R;
        let (hidden, ffn) = (self.hidden_size, self.intermediate_size);
        list.norm(layer, "input_layernorm", hidden, R::AttentionNorm);
        match &self.latent {
            Some(latent) => self.latent_parameters(list, layer, latent),
            None => self.attention_parameters(list, layer),
        }
        list.norm(layer, "post_attention_layernorm", hidden, R::MlpNorm);
        if let Some(experts) = self.experts.as_ref().filter(|experts| !experts.is_dense(layer)) {
            return self.expert_parameters(list, layer, experts);
        }
        for (stem, rows, columns, role, bias_role) in [
            ("mlp.gate_proj", ffn, hidden, R::Gate, R::GateBias),
            ("mlp.up_proj", ffn, hidden, R::Up, R::UpBias),
            ("mlp.down_proj", hidden, ffn, R::Down, R::DownBias),
        ] {
            list.linear(layer, stem, [rows, columns], role, self.mlp_bias.then_some(bias_role));
        }
    }

    fn attention_parameters(&self, list: &mut ParameterList, layer: u32) {
        use ParameterRole as R;
        let (hidden, bias) = (self.hidden_size, self.attention_bias);
        let query = self.num_heads * self.head_dim;
        let key = self.num_kv_heads * self.head_dim;
        for (stem, rows, columns, role, bias_role, bias) in [
            ("self_attn.q_proj", query, hidden, R::Query, R::QueryBias, bias),
            ("self_attn.k_proj", key, hidden, R::Key, R::KeyBias, bias),
            ("self_attn.v_proj", key, hidden, R::Value, R::ValueBias, bias),
            (
                "self_attn.o_proj",
                hidden,
                query,
                R::AttentionOutput,
                R::AttentionOutputBias,
                bias && self.family.output_takes_bias(),
            ),
        ] {
            list.linear(layer, stem, [rows, columns], role, bias.then_some(bias_role));
        }
        if self.family.has_head_norms() {
            list.norm(layer, "self_attn.q_norm", self.head_dim, R::QueryNorm);
            list.norm(layer, "self_attn.k_norm", self.head_dim, R::KeyNorm);
        }
        if self.family.has_sinks() {
            list.vector(layer, "self_attn.sinks", self.num_heads, R::Sinks);
        }
    }

    fn latent_parameters(&self, list: &mut ParameterList, layer: u32, latent: &LatentConfig) {
        use ParameterRole as R;
        let (hidden, heads, bias) = (self.hidden_size, self.num_heads, self.attention_bias);
        let query = heads * (latent.plain_dim + self.head_dim);
        match latent.q_rank {
            None => list.linear(layer, "self_attn.q_proj", [query, hidden], R::Query, None),
            Some(rank) => {
                let bias_role = bias.then_some(R::QueryDownBias);
                let stem = "self_attn.q_a_proj";
                list.linear(layer, stem, [rank, hidden], R::QueryDown, bias_role);
                list.norm(layer, "self_attn.q_a_layernorm", rank, R::QueryLatentNorm);
                list.linear(layer, "self_attn.q_b_proj", [query, rank], R::Query, None);
            }
        }
        let stem = "self_attn.kv_a_proj_with_mqa";
        let shape = [latent.kv_rank + self.head_dim, hidden];
        list.linear(layer, stem, shape, R::KeyValueDown, bias.then_some(R::KeyValueDownBias));
        list.norm(layer, "self_attn.kv_a_layernorm", latent.kv_rank, R::KeyValueLatentNorm);
        let shape = [heads * (latent.plain_dim + latent.value_dim), latent.kv_rank];
        list.linear(layer, "self_attn.kv_b_proj", shape, R::KeyValueUp, None);
        let (shape, role) = ([hidden, heads * latent.value_dim], R::AttentionOutput);
        let bias_role = bias.then_some(R::AttentionOutputBias);
        list.linear(layer, "self_attn.o_proj", shape, role, bias_role);
    }

    /// Adds the parameters of experts: stacked, one tensor per projection of a layer.
    /// [`LlamaConfig::stored_tensors`] describes the layout in weight files.
    fn expert_parameters(&self, list: &mut ParameterList, layer: u32, config: &ExpertsConfig) {
        use ParameterRole as R;
        let (experts, hidden, ffn) =
            (config.num_experts, self.hidden_size, config.intermediate_size);
        let names = self.family.expert_names();
        let bias = self.family.has_sinks();
        let block = names.block;
        let router = format!("{block}.{}", names.router);
        list.linear(layer, &router, [experts, hidden], R::Router, bias.then_some(R::RouterBias));
        if config.route(self.family).selection_bias {
            let stem = format!("{router}.e_score_correction_bias");
            list.vector(layer, &stem, experts, R::SelectionBias);
        }
        for (leaf, rows, columns, role, bias_role) in [
            (names.gate, ffn, hidden, R::ExpertGate, R::ExpertGateBias),
            (names.up, ffn, hidden, R::ExpertUp, R::ExpertUpBias),
            (names.down, hidden, ffn, R::ExpertDown, R::ExpertDownBias),
        ] {
            let name = format!("model.layers.{layer}.{block}.experts.{leaf}");
            list.add(&format!("{name}.weight"), vec![experts, rows, columns], role, Some(layer));
            if bias {
                list.add(&format!("{name}.bias"), vec![experts, rows], bias_role, Some(layer));
            }
        }
        let shared = config.shared_experts * ffn;
        for (leaf, rows, columns, role) in [
            ("gate_proj", shared, hidden, R::SharedGate),
            ("up_proj", shared, hidden, R::SharedUp),
            ("down_proj", hidden, shared, R::SharedDown),
        ] {
            if shared > 0 {
                let stem = format!("{block}.shared_experts.{leaf}");
                list.linear(layer, &stem, [rows, columns], role, None);
            }
        }
    }
}

/// Collects specs with initial values by kind.
struct ParameterList {
    specs: Vec<ParameterSpec>,
    normal: Init,
}

impl ParameterList {
    fn add(&mut self, name: &str, shape: Vec<usize>, role: ParameterRole, layer: Option<u32>) {
        let is_bias = matches!(
            role,
            ParameterRole::ExpertGateBias
                | ParameterRole::ExpertUpBias
                | ParameterRole::ExpertDownBias
        );
        let init = match (role.precision_role(), shape.len()) {
            (Role::Norm, _) => Init::Ones,
            _ if role == ParameterRole::Sinks => self.normal,
            (_, 1) => Init::Zeros,
            _ if is_bias => Init::Zeros,
            _ => self.normal,
        };
        self.specs.push(ParameterSpec { name: name.to_string(), shape, init, role, layer });
    }

    fn norm(&mut self, layer: u32, stem: &str, width: usize, role: ParameterRole) {
        let name = format!("model.layers.{layer}.{stem}.weight");
        self.add(&name, vec![width], role, Some(layer));
    }

    fn vector(&mut self, layer: u32, stem: &str, length: usize, role: ParameterRole) {
        self.add(&format!("model.layers.{layer}.{stem}"), vec![length], role, Some(layer));
    }

    fn linear(
        &mut self,
        layer: u32,
        stem: &str,
        shape: [usize; 2],
        role: ParameterRole,
        bias_role: Option<ParameterRole>,
    ) {
        let name = format!("model.layers.{layer}.{stem}");
        self.add(&format!("{name}.weight"), shape.to_vec(), role, Some(layer));
        if let Some(bias_role) = bias_role {
            self.add(&format!("{name}.bias"), vec![shape[0]], bias_role, Some(layer));
        }
    }
}
