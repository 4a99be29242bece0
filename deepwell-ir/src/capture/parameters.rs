//! The tensors that a configuration asks for, in the names of Hugging Face.

use super::LlamaConfig;
use crate::{Init, Role};

/// What a parameter does in the model.
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
    /// Gain of the norm before the output head, `[hidden]`.
    FinalNorm,
    /// Bias of the norm before the output head, `[hidden]`.
    FinalNormBias,
    /// Output head `[vocab, hidden]`; absent when tied.
    Head,
}

impl ParameterRole {
    /// What the precision policy sees. A bias counts as part of its linear layer.
    pub fn precision_role(self) -> Role {
        match self {
            ParameterRole::TokenEmbedding | ParameterRole::PositionEmbedding => Role::Embedding,
            ParameterRole::AttentionNorm
            | ParameterRole::AttentionNormBias
            | ParameterRole::QueryNorm
            | ParameterRole::KeyNorm
            | ParameterRole::MlpNorm
            | ParameterRole::MlpNormBias
            | ParameterRole::FinalNorm
            | ParameterRole::FinalNormBias => Role::Norm,
            ParameterRole::Head => Role::Head,
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
    /// How it starts when a model is trained from nothing.
    pub init: Init,
    /// What it does.
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
    /// Starting values are those of transformers: linear weights and the table normal with
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
        let query = self.num_heads * self.head_dim;
        let key = self.num_kv_heads * self.head_dim;
        let (attention_bias, mlp_bias) = (self.attention_bias, self.mlp_bias);
        list.norm(layer, "input_layernorm", hidden, R::AttentionNorm);
        for (stem, rows, columns, role, bias_role, bias) in [
            ("self_attn.q_proj", query, hidden, R::Query, R::QueryBias, attention_bias),
            ("self_attn.k_proj", key, hidden, R::Key, R::KeyBias, attention_bias),
            ("self_attn.v_proj", key, hidden, R::Value, R::ValueBias, attention_bias),
            (
                "self_attn.o_proj",
                hidden,
                query,
                R::AttentionOutput,
                R::AttentionOutputBias,
                attention_bias && self.family.output_takes_bias(),
            ),
        ] {
            list.linear(layer, stem, [rows, columns], role, bias.then_some(bias_role));
        }
        if self.family.has_head_norms() {
            list.norm(layer, "self_attn.q_norm", self.head_dim, R::QueryNorm);
            list.norm(layer, "self_attn.k_norm", self.head_dim, R::KeyNorm);
        }
        list.norm(layer, "post_attention_layernorm", hidden, R::MlpNorm);
        for (stem, rows, columns, role, bias_role) in [
            ("mlp.gate_proj", ffn, hidden, R::Gate, R::GateBias),
            ("mlp.up_proj", ffn, hidden, R::Up, R::UpBias),
            ("mlp.down_proj", hidden, ffn, R::Down, R::DownBias),
        ] {
            list.linear(layer, stem, [rows, columns], role, mlp_bias.then_some(bias_role));
        }
    }
}

/// Collects specs with the starting values that go with their kind.
struct ParameterList {
    specs: Vec<ParameterSpec>,
    normal: Init,
}

impl ParameterList {
    fn add(&mut self, name: &str, shape: Vec<usize>, role: ParameterRole, layer: Option<u32>) {
        let init = match (role.precision_role(), shape.len()) {
            (Role::Norm, _) => Init::Ones,
            (_, 1) => Init::Zeros,
            _ => self.normal,
        };
        self.specs.push(ParameterSpec { name: name.to_string(), shape, init, role, layer });
    }

    fn norm(&mut self, layer: u32, stem: &str, width: usize, role: ParameterRole) {
        let name = format!("model.layers.{layer}.{stem}.weight");
        self.add(&name, vec![width], role, Some(layer));
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
