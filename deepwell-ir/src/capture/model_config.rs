//! A configuration of any supported family.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::json::{edit_distance, parse_object, read_text};
use super::{
    CaptureError, CaptureNotes, Gpt2Config, LlamaConfig, ModelFamily, ParameterSpec, StoredSlice,
    capture, capture_for_sequence, capture_gpt2,
};
use crate::Graph;

/// The configuration of a model of any family.
///
/// ```
/// use deepwell_ir::capture::ModelConfig;
///
/// # fn main() -> Result<(), deepwell_ir::capture::CaptureError> {
/// let text = r#"{"model_type": "gpt2", "vocab_size": 96, "n_embd": 64, "n_layer": 2,
///     "n_head": 2, "n_positions": 32}"#;
/// let (config, notes) = ModelConfig::from_json(text, "config.json")?;
/// assert_eq!((config.family(), config.num_layers()), ("gpt2", 2));
/// assert_eq!(notes.remarks.len(), 3);
/// let graph = config.capture(Some(16))?;
/// assert_eq!(graph.parameter_count(), config.parameter_count());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ModelConfig {
    /// Llama, or a similar family, see [`ModelFamily`].
    Llama(Box<LlamaConfig>),
    /// GPT-2.
    Gpt2(Gpt2Config),
}

impl From<LlamaConfig> for ModelConfig {
    fn from(config: LlamaConfig) -> ModelConfig {
        ModelConfig::Llama(Box::new(config))
    }
}

impl From<Gpt2Config> for ModelConfig {
    fn from(config: Gpt2Config) -> ModelConfig {
        ModelConfig::Gpt2(config)
    }
}

impl ModelConfig {
    /// All supported values of `model_type`.
    pub fn model_types() -> impl Iterator<Item = &'static str> {
        ["gpt2"].into_iter().chain(ModelFamily::ALL.iter().map(|family| family.model_type()))
    }

    /// Names that [`ModelConfig::preset`] knows.
    pub fn presets() -> impl Iterator<Item = &'static str> {
        LlamaConfig::PRESETS.into_iter().chain(Gpt2Config::PRESETS)
    }

    /// A configuration by name; `None` for an unknown name.
    pub fn preset(name: &str) -> Option<ModelConfig> {
        let llama = LlamaConfig::preset(name).map(ModelConfig::from);
        llama.or_else(|| Gpt2Config::preset(name).map(ModelConfig::from))
    }

    /// The preset most similar to a misspelled name, if any.
    ///
    /// ```
    /// use deepwell_ir::capture::ModelConfig;
    ///
    /// assert_eq!(ModelConfig::similar_preset("lama-micro"), Some("llama-micro"));
    /// assert_eq!(ModelConfig::similar_preset("Llama3_8B"), Some("llama-3-8b"));
    /// assert_eq!(ModelConfig::similar_preset("./my-model"), None);
    /// ```
    pub fn similar_preset(name: &str) -> Option<&'static str> {
        let wanted = letters(name);
        let distances =
            Self::presets().map(|preset| (edit_distance(&wanted, &letters(preset)), preset));
        let (distance, preset) = distances.min()?;
        (distance <= 2 && distance < wanted.chars().count() / 2).then_some(preset)
    }

    /// Reads the text of a `config.json`. `location` names the text in errors.
    ///
    /// # Errors
    /// As [`LlamaConfig::from_json`].
    pub fn from_json(text: &str, location: &str) -> Result<(Self, CaptureNotes), CaptureError> {
        Self::from_object(&parse_object(text, location)?, location)
    }

    /// Reads the object of a `config.json`.
    pub(super) fn from_object(
        object: &Map<String, Value>,
        location: &str,
    ) -> Result<(Self, CaptureNotes), CaptureError> {
        match object.get("model_type").and_then(Value::as_str) {
            Some("gpt2") => {
                let (config, notes) = Gpt2Config::from_object(object, location)?;
                Ok((config.into(), notes))
            }
            Some(other) if !ModelConfig::model_types().any(|model_type| model_type == other) => {
                let model_types: Vec<String> =
                    ModelConfig::model_types().map(|name| format!("`{name}`")).collect();
                Err(CaptureError::Unsupported {
                    location: location.to_string(),
                    key: "model_type".to_string(),
                    value: other.to_string(),
                    hint: match missing_for(other) {
                        Some(missing) => format!("{missing} are not there yet"),
                        None => format!("supported: {}", model_types.join(", ")),
                    },
                })
            }
            _ => {
                let (config, notes) = LlamaConfig::from_object(object, location)?;
                Ok((config.into(), notes))
            }
        }
    }

    /// Reads a `config.json`, given directly or by its model folder.
    ///
    /// # Errors
    /// A missing or unreadable file, and errors of [`ModelConfig::from_json`].
    pub fn from_path(path: impl AsRef<Path>) -> Result<(Self, CaptureNotes), CaptureError> {
        let (text, location) = read_text(path.as_ref())?;
        Self::from_json(&text, &location)
    }

    /// The value of `model_type`.
    pub fn family(&self) -> &'static str {
        match self {
            ModelConfig::Llama(config) => config.family.model_type(),
            ModelConfig::Gpt2(_) => "gpt2",
        }
    }

    /// Tokens in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        match self {
            ModelConfig::Llama(config) => config.vocab_size,
            ModelConfig::Gpt2(config) => config.vocab_size,
        }
    }

    /// Transformer layers.
    pub fn num_layers(&self) -> usize {
        match self {
            ModelConfig::Llama(config) => config.num_layers,
            ModelConfig::Gpt2(config) => config.num_layers,
        }
    }

    /// Longest intended sequence, tokens.
    pub fn max_position_embeddings(&self) -> usize {
        match self {
            ModelConfig::Llama(config) => config.max_position_embeddings,
            ModelConfig::Gpt2(config) => config.max_position_embeddings,
        }
    }

    /// All parameters in canonical order.
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        match self {
            ModelConfig::Llama(config) => config.parameters(),
            ModelConfig::Gpt2(config) => config.parameters(),
        }
    }

    /// Number of trained values.
    pub fn parameter_count(&self) -> u64 {
        self.parameters().iter().map(ParameterSpec::count).sum()
    }

    /// All parameters, each with the tensors of the weight files that hold it: one, or one per
    /// expert.
    pub fn stored_slices(&self) -> Vec<(ParameterSpec, Vec<StoredSlice>)> {
        match self {
            ModelConfig::Gpt2(config) => {
                let parts = config.parameters_and_parts().into_iter();
                parts.map(|(spec, part)| (spec, vec![part])).collect()
            }
            ModelConfig::Llama(config) => {
                let parts = |spec: ParameterSpec| (config.slices_of(&spec), spec);
                let parameters = config.parameters().into_iter().map(parts);
                parameters.map(|(parts, spec)| (spec, parts)).collect()
            }
        }
    }

    /// The same model with unpacked weights, as written by export.
    #[must_use]
    pub fn unpacked(mut self) -> ModelConfig {
        if let ModelConfig::Llama(config) = &mut self {
            config.packing = None;
        }
        self
    }

    /// Captures the forward pass as a graph, for sequences of `seq` tokens if known; see
    /// [`capture`] and [`capture_for_sequence`].
    ///
    /// # Errors
    /// A configuration that fails its check, a missing sequence length, or a sequence longer than
    /// the position table of a GPT-2.
    pub fn capture(&self, seq: Option<usize>) -> Result<Graph, CaptureError> {
        match (self, seq) {
            (ModelConfig::Llama(config), Some(seq)) => capture_for_sequence(config, seq),
            (ModelConfig::Llama(config), None) => capture(config),
            (ModelConfig::Gpt2(config), seq) => {
                let positions = config.max_position_embeddings;
                match seq.filter(|&seq| seq > positions) {
                    Some(seq) => Err(CaptureError::Value {
                        location: "configuration".to_string(),
                        key: "n_positions".to_string(),
                        expected: format!("{seq} or more for sequences of {seq} tokens"),
                        got: positions.to_string(),
                        hint: "each position has a row of its own; shorten the sequences"
                            .to_string(),
                    }),
                    None => capture_gpt2(config),
                }
            }
        }
    }

    /// The configuration as a `config.json`; [`ModelConfig::from_json`] reads it back.
    pub fn to_json(&self) -> Value {
        match self {
            ModelConfig::Llama(config) => config.to_json(),
            ModelConfig::Gpt2(config) => config.to_json(),
        }
    }
}

/// Missing features of an unsupported family.
fn missing_for(model_type: &str) -> Option<&'static str> {
    match model_type {
        "gemma" => Some(
            "Gemma's feed-forward blocks gated by GELU (tanh), norms that multiply by 1 + w and \
             the scale of its embeddings",
        ),
        "gemma2" => Some(
            "Gemma 2's feed-forward blocks gated by GELU (tanh), norms that multiply by 1 + w and \
             stand after blocks too, the scale of its embeddings, the soft caps of its scores and \
             logits, and windows in every other layer",
        ),
        "gemma3" | "gemma3_text" => Some(
            "Gemma 3's feed-forward blocks gated by GELU (tanh), norms that multiply by 1 + w and \
             stand after blocks too, the scale of its embeddings, and layers with a window and a \
             rotation of their own",
        ),
        "phi" => Some("Phi's parallel blocks, biased norms and rotation of a part of each head"),
        _ => None,
    }
}

impl Gpt2Config {
    /// Names that [`Gpt2Config::preset`] knows.
    pub const PRESETS: [&'static str; 2] = ["gpt2-micro", "gpt2"];

    /// A configuration by name: `gpt2` is the smallest published GPT-2, `gpt2-micro` a size for
    /// tests.
    ///
    /// ```
    /// use deepwell_ir::capture::Gpt2Config;
    ///
    /// assert_eq!(Gpt2Config::preset("gpt2").unwrap().parameter_count(), 124_439_808);
    /// ```
    pub fn preset(name: &str) -> Option<Gpt2Config> {
        let sized = |vocab_size, hidden_size, num_layers, num_heads| Gpt2Config {
            vocab_size,
            hidden_size,
            intermediate_size: 4 * hidden_size,
            num_layers,
            num_heads,
            max_position_embeddings: 1024,
            layer_norm_eps: 1e-5,
            gelu_tanh: true,
            scale_attention: true,
            tie_word_embeddings: true,
            initializer_range: 0.02,
            torch_dtype: None,
        };
        match name {
            "gpt2-micro" => Some(sized(256, 64, 2, 2)),
            "gpt2" => Some(sized(50257, 768, 12, 12)),
            _ => None,
        }
    }

    /// The configuration as a `config.json`; [`Gpt2Config::from_json`] reads an equal value back.
    pub fn to_json(&self) -> Value {
        let mut object = json!({
            "activation_function": if self.gelu_tanh { "gelu_new" } else { "gelu" },
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "initializer_range": self.initializer_range,
            "layer_norm_epsilon": self.layer_norm_eps,
            "model_type": "gpt2",
            "n_embd": self.hidden_size,
            "n_head": self.num_heads,
            "n_inner": self.intermediate_size,
            "n_layer": self.num_layers,
            "n_positions": self.max_position_embeddings,
            "resid_pdrop": 0.0,
            "scale_attn_weights": self.scale_attention,
            "tie_word_embeddings": self.tie_word_embeddings,
            "vocab_size": self.vocab_size,
        });
        if let (Some(dtype), Some(object)) = (self.torch_dtype, object.as_object_mut()) {
            object.insert("torch_dtype".to_string(), json!(dtype.name()));
        }
        object
    }
}

/// The name in lower case, without separators.
fn letters(name: &str) -> String {
    let lower = name.to_lowercase();
    lower.chars().filter(|letter| !matches!(letter, '-' | '_' | '.' | ' ')).collect()
}
