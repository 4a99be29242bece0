//! The configuration of a llama-like model, from and to a Hugging Face `config.json`.

use std::path::Path;

use safetensors::tensor::Dtype;
use serde_json::{Map, Value, json};

use crate::capture::json::{Keys, parse_object, read_text};
use crate::capture::{CaptureError, ExpertsConfig, LatentConfig, ModelFamily, Rope, WeightPacking};

/// Upper limit of the number of layers.
pub(super) const LAYERS_MAX: usize = 1 << 14;

/// Activation of the gated feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HiddenAct {
    /// `x · sigmoid(x)`, also called swish.
    Silu,
}

/// Element type of stored weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoredDType {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// E4M3 elements of packed weights.
    E4m3,
    /// Bytes: packed data and scales.
    U8,
}

impl StoredDType {
    /// The name in a `config.json`.
    pub const fn name(self) -> &'static str {
        match self {
            StoredDType::F32 => "float32",
            StoredDType::Bf16 => "bfloat16",
            StoredDType::F16 => "float16",
            StoredDType::E4m3 => "float8_e4m3fn",
            StoredDType::U8 => "uint8",
        }
    }

    /// The name in the header of a safetensors file.
    pub const fn safetensors_name(self) -> &'static str {
        match self {
            StoredDType::F32 => "F32",
            StoredDType::Bf16 => "BF16",
            StoredDType::F16 => "F16",
            StoredDType::E4m3 => "F8_E4M3",
            StoredDType::U8 => "U8",
        }
    }

    /// The type of a stored tensor, if a model may have it.
    pub fn of(dtype: Dtype) -> Option<StoredDType> {
        match dtype {
            Dtype::F32 => Some(StoredDType::F32),
            Dtype::BF16 => Some(StoredDType::Bf16),
            Dtype::F16 => Some(StoredDType::F16),
            Dtype::F8_E4M3 => Some(StoredDType::E4m3),
            Dtype::U8 => Some(StoredDType::U8),
            _ => None,
        }
    }

    /// Types that a `config.json` may state.
    const PLAIN: [StoredDType; 3] = [StoredDType::F32, StoredDType::Bf16, StoredDType::F16];
}

/// A llama model, or a model of a similar family, see [`ModelFamily`].
///
/// Fields may be changed freely: call [`LlamaConfig::check`] afterwards, which
/// [`capture`](crate::capture::capture) also does.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// The family (`model_type`).
    pub family: ModelFamily,
    /// Tokens in the vocabulary (`vocab_size`).
    pub vocab_size: usize,
    /// Width of the residual stream (`hidden_size`).
    pub hidden_size: usize,
    /// Width of the feed-forward block (`intermediate_size`).
    pub intermediate_size: usize,
    /// Transformer layers (`num_hidden_layers`).
    pub num_layers: usize,
    /// Query heads (`num_attention_heads`).
    pub num_heads: usize,
    /// Key and value heads (`num_key_value_heads`); divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head (`head_dim`), even; by default `hidden_size / num_heads`. With latent
    /// attention, the width of the rotated part (`qk_rope_head_dim`).
    pub head_dim: usize,
    /// Added to the mean square by RMSNorm (`rms_norm_eps`).
    pub rms_norm_eps: f64,
    /// Rotary position embedding (`rope_parameters`, or `rope_theta` and `rope_scaling`).
    pub rope: Rope,
    /// Biases on the four projections of attention (`attention_bias`); for qwen2 always true, and
    /// without a bias on the output projection.
    pub attention_bias: bool,
    /// Biases on the three projections of the feed-forward block (`mlp_bias`).
    pub mlp_bias: bool,
    /// Tokens that a token attends to, itself included (`sliding_window`); all if `None`.
    pub sliding_window: Option<usize>,
    /// Layers without the sliding window, ascending (`layer_types`); gpt_oss only.
    pub full_attention_layers: Vec<usize>,
    /// Latent attention, in families with latent attention.
    pub latent: Option<LatentConfig>,
    /// The mixture of experts, in families with experts.
    pub experts: Option<ExpertsConfig>,
    /// Packing of the weight files (`quantization_config`), if any.
    pub packing: Option<WeightPacking>,
    /// Row of the token table whose lookups are not trained (`pad_token_id`), as in transformers; a
    /// tied table still trains all rows through the output head.
    pub padding_row: Option<usize>,
    /// Whether the token table is also the output head (`tie_word_embeddings`).
    pub tie_word_embeddings: bool,
    /// Longest intended sequence (`max_position_embeddings`), tokens.
    pub max_position_embeddings: usize,
    /// Standard deviation of freshly initialized weights (`initializer_range`).
    pub initializer_range: f64,
    /// Activation of the feed-forward block (`hidden_act`).
    pub hidden_act: HiddenAct,
    /// Element type of the stored weights (`torch_dtype` or `dtype`), if stated.
    pub torch_dtype: Option<StoredDType>,
}

/// Notes on a `config.json` beyond the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaptureNotes {
    /// Keys of the file that have no effect on training.
    pub without_effect: Vec<String>,
    /// Defaults that were used, and differences in unusual cases, as sentences.
    pub remarks: Vec<String>,
}

impl LlamaConfig {
    /// Reads the text of a `config.json`. `location` names the text in errors.
    ///
    /// Defaults are those of transformers, except that the five sizes of a model are required.
    ///
    /// # Errors
    /// Text that is not a JSON object, a key that is missing, unknown, of the wrong type or out of
    /// range, or a value that selects unsupported mathematics.
    pub fn from_json(text: &str, location: &str) -> Result<(Self, CaptureNotes), CaptureError> {
        Self::from_object(&parse_object(text, location)?, location)
    }

    /// Reads the object of a `config.json`.
    pub(in crate::capture) fn from_object(
        object: &Map<String, Value>,
        location: &str,
    ) -> Result<(Self, CaptureNotes), CaptureError> {
        let mut notes = CaptureNotes::default();
        let mut keys = Keys::new(location, "", object);
        let family = ModelFamily::read(&mut keys)?;
        let config = Self::from_keys(&mut keys, family, location, &mut notes)?;
        if let Some(value) = keys.get("auto_map").filter(|map| !family.knows_code(map)) {
            let hint = "the model brings code of its own, which may compute anything; if it is a \
                        plain model of its type, remove the key";
            return Err(keys.unsupported("auto_map", value, hint));
        }
        for (key, has) in family.stated() {
            if let Some(value) = keys.boolean(key)? {
                if value != has {
                    let hint = format!("supported with {}: `{has}`", family.model_type());
                    return Err(keys.unsupported(key, &json!(value), &hint));
                }
                notes.without_effect.push(key.to_string());
            }
        }
        for key in family.keys_without_effect() {
            if keys.get(key).is_some() {
                notes.without_effect.push(key.to_string());
            }
        }
        if family == ModelFamily::DeepseekV3
            && keys.count("num_nextn_predict_layers")?.is_some_and(|count| count > 0)
        {
            notes.remarks.push(
                "`num_nextn_predict_layers`: the layers that predict further tokens are left out"
                    .to_string(),
            );
        }
        notes.without_effect.extend(keys.finish_config(family.architecture())?);
        notes.without_effect.sort();
        config.check(location)?;
        Ok((config, notes))
    }

    /// Reads a `config.json`, given directly or by its model folder.
    ///
    /// # Errors
    /// A missing or unreadable file, and errors of [`LlamaConfig::from_json`].
    pub fn from_path(path: impl AsRef<Path>) -> Result<(Self, CaptureNotes), CaptureError> {
        let (text, location) = read_text(path.as_ref())?;
        Self::from_json(&text, &location)
    }

    fn from_keys(
        keys: &mut Keys<'_>,
        family: ModelFamily,
        location: &str,
        notes: &mut CaptureNotes,
    ) -> Result<Self, CaptureError> {
        let vocab_size = keys.required_size("vocab_size")?;
        let hidden_size = keys.required_size("hidden_size")?;
        let intermediate_size = keys.required_size("intermediate_size")?;
        let num_layers = keys.required_size("num_hidden_layers")?;
        if num_layers > LAYERS_MAX {
            // Check before building lists per layer.
            let expected = format!("an integer from 1 to {LAYERS_MAX}");
            return Err(keys.wrong("num_hidden_layers", &expected, &json!(num_layers), ""));
        }
        let num_heads = keys.required_size("num_attention_heads")?;
        let num_kv_heads = family.read_kv_heads(keys, num_heads)?;
        let (latent, rope_dim) = LatentConfig::read(keys, family)?.unzip();
        let head_dim = match rope_dim.or(keys.size("head_dim")?).or(family.default_head_dim()) {
            Some(head_dim) => head_dim,
            None if hidden_size % num_heads == 0 => hidden_size / num_heads,
            None => {
                return Err(keys.wrong(
                    "hidden_size",
                    &format!("a multiple of `num_attention_heads` ({num_heads})"),
                    &json!(hidden_size),
                    "or state `head_dim`",
                ));
            }
        };
        let max_position_embeddings = match keys.size("max_position_embeddings")? {
            Some(positions) => positions,
            None if family == ModelFamily::Llama => {
                note_default(notes, "max_position_embeddings", "2048");
                2048
            }
            None => {
                let hint = "the default depends on the family; state it";
                return Err(keys.missing("max_position_embeddings", hint));
            }
        };
        let rms_norm_eps = keys.number("rms_norm_eps", 0.0, false)?.unwrap_or_else(|| {
            let eps = family.default_eps();
            note_default(notes, "rms_norm_eps", &format!("{eps:e}"));
            eps
        });
        if family == ModelFamily::GptOss
            && keys.get("rope_scaling").or(keys.get("rope_parameters")).is_none()
        {
            let hint = "transformers would take that of the published sizes; state it";
            return Err(keys.missing("rope_scaling", hint));
        }
        let theta = family.default_theta();
        let hidden_act = match keys.string("hidden_act")? {
            None | Some("silu" | "swish") => HiddenAct::Silu,
            Some(other) => {
                return Err(keys.unsupported("hidden_act", &json!(other), "supported: `silu`"));
            }
        };
        Ok(LlamaConfig {
            family,
            vocab_size,
            hidden_size,
            intermediate_size,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            rms_norm_eps,
            rope: super::rope_json::read(keys, location, theta, max_position_embeddings, notes)?,
            attention_bias: family.read_attention_bias(keys)?,
            mlp_bias: family.read_mlp_bias(keys)?,
            sliding_window: family.read_window(keys)?,
            full_attention_layers: family.read_full_layers(keys, num_layers)?,
            latent,
            experts: ExpertsConfig::read(keys, family, intermediate_size, num_layers)?,
            packing: WeightPacking::read(keys, location, family, notes)?,
            padding_row: read_padding_row(keys, vocab_size)?,
            tie_word_embeddings: keys.boolean("tie_word_embeddings")?.unwrap_or(false),
            max_position_embeddings,
            initializer_range: keys.number("initializer_range", 0.0, false)?.unwrap_or(0.02),
            hidden_act,
            torch_dtype: read_dtype(keys)?,
        })
    }

    /// Radians per position for the `head_dim / 2` pairs of a head, for sequences of `seq_len`
    /// tokens. Only [`RopeScaling::Dynamic`](crate::capture::RopeScaling::Dynamic) depends on the
    /// length.
    pub fn inverse_frequencies(&self, seq_len: usize) -> Vec<f32> {
        self.rope.inverse_frequencies(self.head_dim, self.max_position_embeddings, seq_len)
    }

    /// Factor on sine and cosine of the rotation; 1 unless RoPE is scaled by yarn.
    pub fn attention_factor(&self) -> f32 {
        self.rope.attention_factor()
    }
}

/// Reads `pad_token_id`; negative values count from the end of the table, as in PyTorch.
fn read_padding_row(keys: &mut Keys<'_>, vocab_size: usize) -> Result<Option<usize>, CaptureError> {
    let Some(value) = keys.get("pad_token_id") else { return Ok(None) };
    let rows = vocab_size as i64;
    match value.as_i64() {
        Some(row) if (0..rows).contains(&row) => Ok(Some(row as usize)),
        Some(row) if (-rows..0).contains(&row) => Ok(Some((rows + row) as usize)),
        _ => {
            let expected = format!("a token below `vocab_size` ({vocab_size})");
            let hint = "PyTorch refuses such a table; remove the key if no token is padding";
            Err(keys.wrong("pad_token_id", &expected, value, hint))
        }
    }
}

fn note_default(notes: &mut CaptureNotes, key: &str, value: &str) {
    notes.remarks.push(format!("`{key}` is not stated: {value}, the default of transformers"));
}

/// Reads `dtype` and its older name `torch_dtype`.
pub(in crate::capture) fn read_dtype(
    keys: &mut Keys<'_>,
) -> Result<Option<StoredDType>, CaptureError> {
    let mut found: Option<StoredDType> = None;
    for key in ["dtype", "torch_dtype"] {
        let Some(name) = keys.string(key)? else { continue };
        let Some(dtype) = StoredDType::PLAIN.into_iter().find(|dtype| dtype.name() == name) else {
            let hint = "supported: `float32`, `bfloat16`, `float16`";
            return Err(keys.unsupported(key, &json!(name), hint));
        };
        if let Some(first) = found.filter(|&first| first != dtype) {
            let expected = format!("`{}` as in `dtype`", first.name());
            return Err(keys.wrong(key, &expected, &json!(name), "keep one of the two keys"));
        }
        found = Some(dtype);
    }
    Ok(found)
}
