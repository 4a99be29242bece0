//! The model families that are similar to llama, and their differences.

use serde_json::{Value, json};

use crate::capture::CaptureError;
use crate::capture::json::Keys;

/// Default window of Mistral's attention.
const MISTRAL_WINDOW: usize = 4096;
/// Default window of gpt-oss.
const GPT_OSS_WINDOW: usize = 128;
/// Default head width of gpt-oss.
const GPT_OSS_HEAD_DIM: usize = 64;
/// Default head width of Qwen3.
const QWEN3_HEAD_DIM: usize = 128;

/// Tensor names of a mixture.
pub(super) struct ExpertNames {
    /// Name of the whole mixture, within a layer.
    pub(super) block: &'static str,
    pub(super) router: &'static str,
    pub(super) gate: &'static str,
    pub(super) up: &'static str,
    pub(super) down: &'static str,
}

/// A family of decoders with RMSNorm, rotary positions and a gated feed-forward block
/// (`model_type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ModelFamily {
    /// Llama 1 to 3.
    #[default]
    Llama,
    /// Mistral: attention may be limited to a sliding window.
    Mistral,
    /// Qwen 2 and 2.5: biases on the query, key and value projections.
    Qwen2,
    /// Qwen 3: norms on each head of queries and keys.
    Qwen3,
    /// Mixtral: Mistral with experts.
    Mixtral,
    /// Qwen 3 with experts.
    Qwen3Moe,
    /// DeepSeek-V3 and R1: latent attention, routed and shared experts, dense first layers.
    DeepseekV3,
    /// gpt-oss: attention with sinks, windows in some layers, experts with biases.
    GptOss,
    /// Phi-3: query, key and value projections stored as one tensor, gate and up projections as
    /// another.
    Phi3,
}

impl ModelFamily {
    /// All families.
    pub const ALL: [ModelFamily; 9] = [
        ModelFamily::Llama,
        ModelFamily::Mistral,
        ModelFamily::Qwen2,
        ModelFamily::Qwen3,
        ModelFamily::Mixtral,
        ModelFamily::Qwen3Moe,
        ModelFamily::DeepseekV3,
        ModelFamily::GptOss,
        ModelFamily::Phi3,
    ];

    /// The value of `model_type` in a `config.json`.
    pub const fn model_type(self) -> &'static str {
        match self {
            ModelFamily::Llama => "llama",
            ModelFamily::Mistral => "mistral",
            ModelFamily::Qwen2 => "qwen2",
            ModelFamily::Qwen3 => "qwen3",
            ModelFamily::Mixtral => "mixtral",
            ModelFamily::Qwen3Moe => "qwen3_moe",
            ModelFamily::DeepseekV3 => "deepseek_v3",
            ModelFamily::GptOss => "gpt_oss",
            ModelFamily::Phi3 => "phi3",
        }
    }

    /// Class name in transformers, as in `architectures`.
    pub const fn architecture(self) -> &'static str {
        match self {
            ModelFamily::Llama => "LlamaForCausalLM",
            ModelFamily::Mistral => "MistralForCausalLM",
            ModelFamily::Qwen2 => "Qwen2ForCausalLM",
            ModelFamily::Qwen3 => "Qwen3ForCausalLM",
            ModelFamily::Mixtral => "MixtralForCausalLM",
            ModelFamily::Qwen3Moe => "Qwen3MoeForCausalLM",
            ModelFamily::DeepseekV3 => "DeepseekV3ForCausalLM",
            ModelFamily::GptOss => "GptOssForCausalLM",
            ModelFamily::Phi3 => "Phi3ForCausalLM",
        }
    }

    /// Whether queries and keys have a norm per head, before the rotation.
    pub const fn has_head_norms(self) -> bool {
        matches!(self, ModelFamily::Qwen3 | ModelFamily::Qwen3Moe)
    }

    /// Whether feed-forward blocks are mixtures of experts.
    pub const fn has_experts(self) -> bool {
        matches!(
            self,
            ModelFamily::Mixtral
                | ModelFamily::Qwen3Moe
                | ModelFamily::DeepseekV3
                | ModelFamily::GptOss
        )
    }

    /// Whether keys and values are projected from a narrow latent.
    pub const fn has_latent_attention(self) -> bool {
        matches!(self, ModelFamily::DeepseekV3)
    }

    /// Whether each head has an attention sink.
    pub const fn has_sinks(self) -> bool {
        matches!(self, ModelFamily::GptOss)
    }

    /// Whether projections with the same input are stored as one tensor: `qkv_proj`,
    /// `gate_up_proj`.
    pub const fn stores_fused(self) -> bool {
        matches!(self, ModelFamily::Phi3)
    }

    /// Whether the output projection of attention has a bias if the other projections do.
    pub const fn output_takes_bias(self) -> bool {
        !matches!(self, ModelFamily::Qwen2)
    }

    /// Tensor names of a mixture.
    pub(super) fn expert_names(self) -> ExpertNames {
        let named = |block, router, gate, up, down| ExpertNames { block, router, gate, up, down };
        match self {
            ModelFamily::Mixtral => named("block_sparse_moe", "gate", "w1", "w3", "w2"),
            ModelFamily::GptOss => named("mlp", "router", "gate_proj", "up_proj", "down_proj"),
            _ => named("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
        }
    }

    /// Whether the family supports a sliding window.
    const fn takes_window(self) -> bool {
        matches!(
            self,
            ModelFamily::Mistral | ModelFamily::Mixtral | ModelFamily::GptOss | ModelFamily::Phi3
        )
    }

    /// Whether `attention_bias` is configurable; otherwise the family fixes the value.
    const fn chooses_attention_bias(self) -> bool {
        !matches!(
            self,
            ModelFamily::Mistral | ModelFamily::Mixtral | ModelFamily::Qwen2 | ModelFamily::Phi3
        )
    }

    /// Whether a `config.json` of the family has the key `key`.
    pub(super) fn writes(self, key: &str) -> bool {
        match key {
            "attention_bias" => self.chooses_attention_bias(),
            "mlp_bias" => self == ModelFamily::Llama,
            "sliding_window" => self.takes_window(),
            "head_dim" => !self.has_latent_attention(),
            _ => true,
        }
    }

    /// Constraints of the family on biases and window: key, expected value, actual value, and
    /// whether the constraint holds.
    pub(super) fn fixed(
        self,
        attention_bias: bool,
        mlp_bias: bool,
        window: Option<usize>,
    ) -> [(&'static str, String, String, bool); 3] {
        let biased = self == ModelFamily::Qwen2;
        let expected = format!("`{biased}` with {}", self.model_type());
        let bias_fits = self.chooses_attention_bias() || attention_bias == biased;
        let shown = window.map_or("null".to_string(), |tokens| tokens.to_string());
        [
            ("attention_bias", expected, attention_bias.to_string(), bias_fits),
            (
                "mlp_bias",
                "`false` in any family but llama".to_string(),
                mlp_bias.to_string(),
                !mlp_bias || self.writes("mlp_bias"),
            ),
            (
                "sliding_window",
                "`null` in any family but mistral, mixtral, gpt_oss and phi3, and 1 or more"
                    .to_string(),
                shown,
                window.is_none_or(|tokens| tokens > 0 && self.takes_window()),
            ),
        ]
    }

    /// Keys specific to the family that change no forward or backward pass: expert placement,
    /// balancing losses of pretraining, and redundant lengths.
    pub(super) fn keys_without_effect(self) -> &'static [&'static str] {
        match self {
            ModelFamily::Mixtral | ModelFamily::Qwen3Moe => &["router_aux_loss_coef"],
            ModelFamily::DeepseekV3 => &["aux_loss_alpha", "ep_size", "seq_aux"],
            ModelFamily::GptOss => &["initial_context_length", "router_aux_loss_coef"],
            _ => &[],
        }
    }

    /// Redundant keys of some configurations, with the only value valid for the family.
    pub(super) fn stated(self) -> [(&'static str, bool); 2] {
        [("qkv_bias", self == ModelFamily::Qwen2), ("use_qk_norm", self.has_head_norms())]
    }

    /// Whether `auto_map` names only the code published by DeepSeek or Microsoft with their
    /// weights, which is now part of transformers.
    pub(super) fn knows_code(self, auto_map: &Value) -> bool {
        let stem = match self {
            ModelFamily::DeepseekV3 => "deepseek",
            ModelFamily::Phi3 => "phi3",
            _ => return false,
        };
        let known = |class: &Value| {
            let name = class.as_str().unwrap_or_default();
            ["configuration_", "modeling_"].iter().any(|kind| {
                name.strip_prefix(kind)
                    .and_then(|it| it.strip_prefix(stem))
                    .is_some_and(|it| it.starts_with('.'))
            })
        };
        let classes = auto_map.as_object();
        classes.is_some_and(|map| map.values().all(known))
    }

    /// Reads `model_type`.
    pub(super) fn read(keys: &mut Keys<'_>) -> Result<ModelFamily, CaptureError> {
        let supported = format!("supported: {}", supported_types());
        let Some(name) = keys.string("model_type")? else {
            return Err(keys.missing("model_type", &supported));
        };
        ModelFamily::ALL
            .into_iter()
            .find(|family| family.model_type() == name)
            .ok_or_else(|| keys.unsupported("model_type", &json!(name), &supported))
    }

    /// Default head width, if not derived from `hidden_size`.
    pub(super) fn default_head_dim(self) -> Option<usize> {
        match self {
            ModelFamily::Qwen3 => Some(QWEN3_HEAD_DIM),
            ModelFamily::GptOss => Some(GPT_OSS_HEAD_DIM),
            _ => None,
        }
    }

    /// Default of transformers for `rms_norm_eps`.
    pub(super) fn default_eps(self) -> f64 {
        match self {
            ModelFamily::Mixtral | ModelFamily::GptOss | ModelFamily::Phi3 => 1e-5,
            _ => 1e-6,
        }
    }

    /// Default of transformers for the base of the rotation.
    pub(super) fn default_theta(self) -> f64 {
        match self {
            ModelFamily::Mixtral => 1_000_000.0,
            ModelFamily::GptOss => 150_000.0,
            _ => 10_000.0,
        }
    }

    /// Reads `num_key_value_heads`. Defaults to the number of query heads for llama, Phi-3 and
    /// latent attention; required otherwise, because the default of transformers fits only one
    /// published size.
    pub(super) fn read_kv_heads(
        self,
        keys: &mut Keys<'_>,
        num_heads: usize,
    ) -> Result<usize, CaptureError> {
        match keys.size("num_key_value_heads")? {
            Some(heads) if self.has_latent_attention() && heads != num_heads => {
                let expected = format!("{num_heads} as in `num_attention_heads`");
                let hint = "every head of latent attention has its own key";
                Err(keys.wrong("num_key_value_heads", &expected, &json!(heads), hint))
            }
            Some(heads) => Ok(heads),
            None if matches!(self, ModelFamily::Llama | ModelFamily::Phi3) => Ok(num_heads),
            None if self.has_latent_attention() => Ok(num_heads),
            None => Err(keys.missing(
                "num_key_value_heads",
                "transformers would take that of one published size; state it",
            )),
        }
    }

    pub(super) fn read_attention_bias(self, keys: &mut Keys<'_>) -> Result<bool, CaptureError> {
        if self.chooses_attention_bias() {
            let default = self == ModelFamily::GptOss;
            return Ok(keys.boolean("attention_bias")?.unwrap_or(default));
        }
        Ok(self == ModelFamily::Qwen2)
    }

    pub(super) fn read_mlp_bias(self, keys: &mut Keys<'_>) -> Result<bool, CaptureError> {
        if self != ModelFamily::Llama {
            return Ok(false);
        }
        Ok(keys.boolean("mlp_bias")?.unwrap_or(false))
    }

    /// Reads `sliding_window`. Qwen states a window that is off unless `use_sliding_window` is set,
    /// which is rejected elsewhere.
    pub(super) fn read_window(self, keys: &mut Keys<'_>) -> Result<Option<usize>, CaptureError> {
        match self {
            ModelFamily::Llama | ModelFamily::DeepseekV3 => Ok(None),
            ModelFamily::Mistral if !keys.holds("sliding_window") => Ok(Some(MISTRAL_WINDOW)),
            ModelFamily::GptOss if !keys.holds("sliding_window") => Ok(Some(GPT_OSS_WINDOW)),
            ModelFamily::Mistral
            | ModelFamily::Mixtral
            | ModelFamily::GptOss
            | ModelFamily::Phi3 => keys.size("sliding_window"),
            ModelFamily::Qwen2 | ModelFamily::Qwen3 | ModelFamily::Qwen3Moe => {
                keys.size("sliding_window")?;
                keys.get("max_window_layers");
                Ok(None)
            }
        }
    }

    /// Reads `layer_types`: the layers without the window. Only gpt_oss mixes both kinds of layers;
    /// for other families the list of restricted keys decides.
    pub(super) fn read_full_layers(
        self,
        keys: &mut Keys<'_>,
        num_layers: usize,
    ) -> Result<Vec<usize>, CaptureError> {
        if self != ModelFamily::GptOss {
            return Ok(Vec::new());
        }
        let Some(value) = keys.get("layer_types") else {
            return Ok((0..num_layers).filter(|layer| layer % 2 == 1).collect());
        };
        let mut full = Vec::new();
        let kinds = value.as_array().filter(|kinds| kinds.len() == num_layers);
        for (layer, kind) in kinds.into_iter().flatten().enumerate() {
            match kind.as_str() {
                Some("full_attention") => full.push(layer),
                Some("sliding_attention") => {}
                _ => {
                    let hint = "supported: `full_attention`, `sliding_attention`";
                    return Err(keys.unsupported("layer_types", kind, hint));
                }
            }
        }
        if kinds.is_none() {
            let expected = format!("a list of {num_layers} kinds, one for each layer");
            return Err(keys.wrong("layer_types", &expected, value, ""));
        }
        Ok(full)
    }
}

/// The supported model types, as text for a hint.
fn supported_types() -> String {
    let names: Vec<String> =
        ModelFamily::ALL.iter().map(|family| format!("`{}`", family.model_type())).collect();
    names.join(", ")
}
