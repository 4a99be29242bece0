//! The model families that differ from llama in a few places, and in which.

use serde_json::json;

use super::CaptureError;
use super::keys::Keys;

/// Longest window of the attention of Mistral if its `config.json` does not state one.
const MISTRAL_WINDOW: usize = 4096;
/// Width of a head of Qwen3 if its `config.json` does not state one.
const QWEN3_HEAD_DIM: usize = 128;

/// A family of decoders with RMSNorm, rotary positions and a gated feed-forward block
/// (`model_type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ModelFamily {
    /// Llama 1 to 3.
    #[default]
    Llama,
    /// Mistral: a token may see a window of the latest tokens only.
    Mistral,
    /// Qwen 2 and 2.5: biases on the query, key and value projections.
    Qwen2,
    /// Qwen 3: queries and keys are normalized head by head.
    Qwen3,
}

impl ModelFamily {
    /// All families.
    pub const ALL: [ModelFamily; 4] =
        [ModelFamily::Llama, ModelFamily::Mistral, ModelFamily::Qwen2, ModelFamily::Qwen3];

    /// The value of `model_type` in a `config.json`.
    pub const fn model_type(self) -> &'static str {
        match self {
            ModelFamily::Llama => "llama",
            ModelFamily::Mistral => "mistral",
            ModelFamily::Qwen2 => "qwen2",
            ModelFamily::Qwen3 => "qwen3",
        }
    }

    /// The class in transformers, as in `architectures`.
    pub const fn architecture(self) -> &'static str {
        match self {
            ModelFamily::Llama => "LlamaForCausalLM",
            ModelFamily::Mistral => "MistralForCausalLM",
            ModelFamily::Qwen2 => "Qwen2ForCausalLM",
            ModelFamily::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// Whether queries and keys are normalized head by head, before their rotation.
    pub const fn has_head_norms(self) -> bool {
        matches!(self, ModelFamily::Qwen3)
    }

    /// Whether the output projection of attention has a bias where the other three have one.
    pub const fn output_takes_bias(self) -> bool {
        !matches!(self, ModelFamily::Qwen2)
    }

    /// Whether `attention_bias` is a choice; else the family fixes it.
    const fn chooses_attention_bias(self) -> bool {
        matches!(self, ModelFamily::Llama | ModelFamily::Qwen3)
    }

    /// Whether `key` stands in a `config.json` of the family.
    pub(super) fn writes(self, key: &str) -> bool {
        match key {
            "attention_bias" => self.chooses_attention_bias(),
            "mlp_bias" => self == ModelFamily::Llama,
            "sliding_window" => self == ModelFamily::Mistral,
            _ => true,
        }
    }

    /// What the family fixes about biases and the window, as the key, what is expected and whether
    /// it is so.
    pub(super) fn fixed(
        self,
        attention_bias: bool,
        mlp_bias: bool,
        window: Option<usize>,
    ) -> [(&'static str, &'static str, String, bool); 3] {
        let biased = self == ModelFamily::Qwen2;
        let expected = if biased { "`true` with qwen2" } else { "`false` with mistral" };
        let bias_fits = self.chooses_attention_bias() || attention_bias == biased;
        let shown = window.map_or("null".to_string(), |tokens| tokens.to_string());
        [
            ("attention_bias", expected, attention_bias.to_string(), bias_fits),
            (
                "mlp_bias",
                "`false` in any family but llama",
                mlp_bias.to_string(),
                !mlp_bias || self.writes("mlp_bias"),
            ),
            (
                "sliding_window",
                "`null` in any family but mistral, and 1 or more",
                shown,
                window.is_none_or(|tokens| tokens > 0 && self.writes("sliding_window")),
            ),
        ]
    }

    /// Reads `model_type`.
    pub(super) fn read(keys: &mut Keys<'_>) -> Result<ModelFamily, CaptureError> {
        let supported = format!("supported: {}", super::supported_types());
        let Some(name) = keys.string("model_type")? else {
            return Err(keys.missing("model_type", &supported));
        };
        ModelFamily::ALL
            .into_iter()
            .find(|family| family.model_type() == name)
            .ok_or_else(|| keys.unsupported("model_type", &json!(name), &supported))
    }

    /// Width of a head if it is not stated and does not follow from `hidden_size`.
    pub(super) fn default_head_dim(self) -> Option<usize> {
        (self == ModelFamily::Qwen3).then_some(QWEN3_HEAD_DIM)
    }

    /// Reads `num_key_value_heads`. Only llama takes the number of query heads for it; the others
    /// have a number of their own that fits one published size.
    pub(super) fn read_kv_heads(
        self,
        keys: &mut Keys<'_>,
        num_heads: usize,
    ) -> Result<usize, CaptureError> {
        match keys.size("num_key_value_heads")? {
            Some(heads) => Ok(heads),
            None if self == ModelFamily::Llama => Ok(num_heads),
            None => Err(keys.missing(
                "num_key_value_heads",
                "transformers would take that of one published size; state it",
            )),
        }
    }

    pub(super) fn read_attention_bias(self, keys: &mut Keys<'_>) -> Result<bool, CaptureError> {
        if self.chooses_attention_bias() {
            return Ok(keys.boolean("attention_bias")?.unwrap_or(false));
        }
        Ok(self == ModelFamily::Qwen2)
    }

    pub(super) fn read_mlp_bias(self, keys: &mut Keys<'_>) -> Result<bool, CaptureError> {
        if self != ModelFamily::Llama {
            return Ok(false);
        }
        Ok(keys.boolean("mlp_bias")?.unwrap_or(false))
    }

    /// Reads `sliding_window`. Qwen states one that is off unless `use_sliding_window`, which is
    /// refused elsewhere.
    pub(super) fn read_window(self, keys: &mut Keys<'_>) -> Result<Option<usize>, CaptureError> {
        match self {
            ModelFamily::Llama => Ok(None),
            ModelFamily::Mistral if !keys.holds("sliding_window") => Ok(Some(MISTRAL_WINDOW)),
            ModelFamily::Mistral => keys.size("sliding_window"),
            ModelFamily::Qwen2 | ModelFamily::Qwen3 => {
                keys.size("sliding_window")?;
                keys.get("max_window_layers");
                Ok(None)
            }
        }
    }
}
