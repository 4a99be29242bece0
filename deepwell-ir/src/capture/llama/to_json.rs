//! A configuration as a `config.json`.

use serde_json::{Map, Value, json};

use crate::capture::LlamaConfig;

impl LlamaConfig {
    /// The configuration as a `config.json` with the keys of transformers 4, which version 5 also
    /// accepts; [`LlamaConfig::from_json`] reads an equal value back.
    pub fn to_json(&self) -> Value {
        let mut object = Map::new();
        for (key, value) in [
            ("architectures", json!([self.family.architecture()])),
            ("attention_bias", json!(self.attention_bias)),
            ("attention_dropout", json!(0.0)),
            ("head_dim", json!(self.head_dim)),
            ("hidden_act", json!("silu")),
            ("hidden_size", json!(self.hidden_size)),
            ("initializer_range", json!(self.initializer_range)),
            ("intermediate_size", json!(self.intermediate_size)),
            ("max_position_embeddings", json!(self.max_position_embeddings)),
            ("mlp_bias", json!(self.mlp_bias)),
            ("model_type", json!(self.family.model_type())),
            ("num_attention_heads", json!(self.num_heads)),
            ("num_hidden_layers", json!(self.num_layers)),
            ("num_key_value_heads", json!(self.num_kv_heads)),
            ("rms_norm_eps", json!(self.rms_norm_eps)),
            ("rope_scaling", super::rope_json::write(&self.rope.scaling)),
            ("rope_theta", json!(self.rope.theta)),
            ("sliding_window", json!(self.sliding_window)),
            ("tie_word_embeddings", json!(self.tie_word_embeddings)),
            ("vocab_size", json!(self.vocab_size)),
        ] {
            if self.family.writes(key) {
                object.insert(key.to_string(), value);
            }
        }
        if let Some(row) = self.padding_row {
            object.insert("pad_token_id".to_string(), json!(row));
        }
        if let Some(latent) = &self.latent {
            latent.write(self.head_dim, &mut object);
        }
        if let Some(experts) = &self.experts {
            experts.write(self.family, &mut object);
        }
        if self.family.has_sinks() {
            let kind = |layer| match self.full_attention_layers.contains(&layer) {
                true => "full_attention",
                false => "sliding_attention",
            };
            let kinds: Vec<&str> = (0..self.num_layers).map(kind).collect();
            object.insert("layer_types".to_string(), json!(kinds));
        }
        if let Some(packing) = self.packing {
            object.insert("quantization_config".to_string(), packing.write());
        }
        if let Some(dtype) = self.torch_dtype {
            object.insert("torch_dtype".to_string(), json!(dtype.name()));
        }
        Value::Object(object)
    }
}
