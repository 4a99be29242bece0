//! The configuration of a llama-like model, from and to a Hugging Face `config.json`.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::keys::{Keys, kind, shown};
use super::{CaptureError, ModelFamily, Rope, RopeScaling};

/// Largest width, head count or layer count that is believed; larger is taken for a mistake. It
/// also keeps the parameter count of any accepted model within 64 bits.
const SIZE_MAX: usize = 1 << 22;
/// Most layers that are believed.
const LAYERS_MAX: usize = 1 << 14;

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
}

impl StoredDType {
    /// The name in a `config.json`.
    pub const fn name(self) -> &'static str {
        match self {
            StoredDType::F32 => "float32",
            StoredDType::Bf16 => "bfloat16",
            StoredDType::F16 => "float16",
        }
    }

    /// The name in the header of a safetensors file.
    pub const fn safetensors_name(self) -> &'static str {
        match self {
            StoredDType::F32 => "F32",
            StoredDType::Bf16 => "BF16",
            StoredDType::F16 => "F16",
        }
    }

    pub(super) const ALL: [StoredDType; 3] =
        [StoredDType::F32, StoredDType::Bf16, StoredDType::F16];
}

/// A llama model, or one of a family that differs from it as [`ModelFamily`] says.
///
/// Fields are plain: change them freely and call [`LlamaConfig::check`], which
/// [`capture`](super::capture) does again.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Which family (`model_type`).
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
    /// Width of a head (`head_dim`), even; `hidden_size / num_heads` unless stated.
    pub head_dim: usize,
    /// Added to the mean square by RMSNorm (`rms_norm_eps`).
    pub rms_norm_eps: f64,
    /// Rotary position embedding (`rope_parameters`, or `rope_theta` and `rope_scaling`).
    pub rope: Rope,
    /// Biases on the four projections of attention (`attention_bias`); with qwen2 always, and on
    /// three of them.
    pub attention_bias: bool,
    /// Biases on the three projections of the feed-forward block (`mlp_bias`).
    pub mlp_bias: bool,
    /// How many tokens, itself included, a token sees (`sliding_window`); all if `None`.
    pub sliding_window: Option<usize>,
    /// Whether the token table is also the output head (`tie_word_embeddings`).
    pub tie_word_embeddings: bool,
    /// Longest sequence that the model is made for (`max_position_embeddings`), tokens.
    pub max_position_embeddings: usize,
    /// Standard deviation of freshly made weights (`initializer_range`).
    pub initializer_range: f64,
    /// Activation of the feed-forward block (`hidden_act`).
    pub hidden_act: HiddenAct,
    /// Element type of the stored weights (`torch_dtype` or `dtype`), if stated.
    pub torch_dtype: Option<StoredDType>,
}

/// What a reader of a `config.json` may want to know beyond the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaptureNotes {
    /// Keys of the file that have no effect on training.
    pub without_effect: Vec<String>,
    /// Defaults that were taken, and differences that show only in unusual use; sentences.
    pub remarks: Vec<String>,
}

impl LlamaConfig {
    /// Reads the text of a `config.json`. `place` names the text in errors.
    ///
    /// Defaults are those of transformers, except that the five sizes of a model must be stated.
    ///
    /// # Errors
    /// Text that is no JSON object, a key that is missing, unknown, of the wrong type or out of
    /// range, or a value that changes the mathematics in a way that is not supported.
    pub fn from_json(text: &str, place: &str) -> Result<(Self, CaptureNotes), CaptureError> {
        let object = parse_object(text, place)?;
        let mut notes = CaptureNotes::default();
        let mut keys = Keys::new(place, "", &object);
        let family = ModelFamily::read(&mut keys)?;
        let config = Self::from_keys(&mut keys, family, place, &mut notes)?;
        if let Some(value) = keys.get("pad_token_id") {
            notes.remarks.push(format!(
                "`pad_token_id` is {}: transformers gives that row of the table no gradient; here \
                 it trains like any other, which differs only if the text holds that token",
                shown(value)
            ));
        }
        notes.without_effect.extend(keys.finish_config(family.architecture())?);
        config.check(place)?;
        Ok((config, notes))
    }

    /// Reads a `config.json`, or that of a model folder.
    ///
    /// # Errors
    /// A file that is not there or cannot be read, and those of [`LlamaConfig::from_json`].
    pub fn from_path(path: impl AsRef<Path>) -> Result<(Self, CaptureNotes), CaptureError> {
        let (text, place) = read_text(path.as_ref())?;
        Self::from_json(&text, &place)
    }

    fn from_keys(
        keys: &mut Keys<'_>,
        family: ModelFamily,
        place: &str,
        notes: &mut CaptureNotes,
    ) -> Result<Self, CaptureError> {
        let vocab_size = keys.required_size("vocab_size")?;
        let hidden_size = keys.required_size("hidden_size")?;
        let intermediate_size = keys.required_size("intermediate_size")?;
        let num_layers = keys.required_size("num_hidden_layers")?;
        let num_heads = keys.required_size("num_attention_heads")?;
        let num_kv_heads = family.read_kv_heads(keys, num_heads)?;
        let head_dim = match keys.size("head_dim")?.or(family.default_head_dim()) {
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
            note_default(notes, "rms_norm_eps", "1e-6");
            1e-6
        });
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
            rope: super::rope_json::read(keys, place, max_position_embeddings, notes)?,
            attention_bias: family.read_attention_bias(keys)?,
            mlp_bias: family.read_mlp_bias(keys)?,
            sliding_window: family.read_window(keys)?,
            tie_word_embeddings: keys.boolean("tie_word_embeddings")?.unwrap_or(false),
            max_position_embeddings,
            initializer_range: keys.number("initializer_range", 0.0, false)?.unwrap_or(0.02),
            hidden_act,
            torch_dtype: read_dtype(keys)?,
        })
    }

    /// Checks how the fields fit each other. `place` names the configuration in errors.
    ///
    /// # Errors
    /// [`CaptureError::Value`] for the first field that does not fit, under its name in a
    /// `config.json`.
    pub fn check(&self, place: &str) -> Result<(), CaptureError> {
        let wrong = |key: &str, expected: String, got: String, hint: &str| {
            let (place, key) = (place.to_string(), key.to_string());
            Err(CaptureError::Value { place, key, expected, got, hint: hint.to_string() })
        };
        let width = self.num_heads.saturating_mul(self.head_dim);
        for (key, size, size_max) in [
            ("vocab_size", self.vocab_size, SIZE_MAX),
            ("hidden_size", self.hidden_size, SIZE_MAX),
            ("intermediate_size", self.intermediate_size, SIZE_MAX),
            ("num_hidden_layers", self.num_layers, LAYERS_MAX),
            ("num_attention_heads", self.num_heads, SIZE_MAX),
            ("num_key_value_heads", self.num_kv_heads, SIZE_MAX),
            ("head_dim", self.head_dim, SIZE_MAX),
            ("num_attention_heads * head_dim", width, SIZE_MAX),
            ("max_position_embeddings", self.max_position_embeddings, i32::MAX as usize),
        ] {
            if size == 0 || size > size_max {
                let expected = format!("an integer from 1 to {size_max}");
                return wrong(key, expected, size.to_string(), "");
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return wrong(
                "num_key_value_heads",
                format!("a divisor of `num_attention_heads` ({})", self.num_heads),
                self.num_kv_heads.to_string(),
                "each key/value head serves the same number of query heads",
            );
        }
        if !self.head_dim.is_multiple_of(2) {
            return wrong(
                "head_dim",
                "an even number".to_string(),
                self.head_dim.to_string(),
                "RoPE turns elements in pairs; head_dim is hidden_size / num_attention_heads \
                 unless stated",
            );
        }
        if matches!(self.rope.scaling, RopeScaling::Dynamic { .. }) && self.head_dim == 2 {
            return wrong(
                "head_dim",
                "4 or more with rope_type `dynamic`".to_string(),
                self.head_dim.to_string(),
                "the rule divides by head_dim - 2",
            );
        }
        for (key, number, least) in [
            ("rms_norm_eps", self.rms_norm_eps, 0.0),
            ("initializer_range", self.initializer_range, 0.0),
            ("rope_theta", self.rope.theta, 1.0),
        ] {
            if !number.is_finite() || number <= least {
                let expected = format!("a number greater than {least}");
                return wrong(key, expected, number.to_string(), "");
            }
        }
        let (biases, window) = ((self.attention_bias, self.mlp_bias), self.sliding_window);
        for (key, expected, got, fits) in self.family.fixed(biases.0, biases.1, window) {
            if !fits {
                return wrong(key, expected.to_string(), got, "");
            }
        }
        Ok(())
    }

    /// The configuration as a `config.json` in the keys of transformers 4, which 5 takes as well;
    /// [`LlamaConfig::from_json`] reads it back to the same value.
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
        if let Some(dtype) = self.torch_dtype {
            object.insert("torch_dtype".to_string(), json!(dtype.name()));
        }
        Value::Object(object)
    }

    /// Radians per position of the `head_dim / 2` pairs of a head, for sequences of `seq_len`
    /// tokens. The length matters with [`RopeScaling::Dynamic`] only.
    pub fn inverse_frequencies(&self, seq_len: usize) -> Vec<f32> {
        self.rope.inverse_frequencies(self.head_dim, self.max_position_embeddings, seq_len)
    }

    /// Multiplies sine and cosine of the rotation; 1 unless RoPE is scaled by yarn.
    pub fn attention_factor(&self) -> f32 {
        self.rope.attention_factor()
    }
}

fn note_default(notes: &mut CaptureNotes, key: &str, value: &str) {
    notes.remarks.push(format!("`{key}` is not stated: {value}, the default of transformers"));
}

/// The text of a `config.json`, or that of a model folder, and how messages name it.
pub(super) fn read_text(path: &Path) -> Result<(String, String), CaptureError> {
    let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
    let bytes = std::fs::read(&file).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => CaptureError::NotFound {
            path: file.clone(),
            expected: "a config.json".to_string(),
            hint: "give a Hugging Face model folder or its config.json".to_string(),
        },
        _ => CaptureError::Io { path: file.clone(), source },
    })?;
    let place = file.display().to_string();
    let text = String::from_utf8(bytes).map_err(|_| CaptureError::Form {
        place: place.clone(),
        expected: "UTF-8 text",
        got: "other bytes".to_string(),
    })?;
    Ok((text, place))
}

/// The JSON object that `text` is.
pub(super) fn parse_object(text: &str, place: &str) -> Result<Map<String, Value>, CaptureError> {
    let value: Value = serde_json::from_str(text).map_err(|error| CaptureError::Json {
        place: place.to_string(),
        line: error.line(),
        column: error.column(),
        message: strip_position(&error.to_string()),
    })?;
    match value {
        Value::Object(object) => Ok(object),
        other => Err(CaptureError::Form {
            place: place.to_string(),
            expected: "a JSON object",
            got: kind(&other).to_string(),
        }),
    }
}

/// `dtype` and its older name `torch_dtype`.
pub(super) fn read_dtype(keys: &mut Keys<'_>) -> Result<Option<StoredDType>, CaptureError> {
    let mut found: Option<StoredDType> = None;
    for key in ["dtype", "torch_dtype"] {
        let Some(name) = keys.string(key)? else { continue };
        let Some(dtype) = StoredDType::ALL.into_iter().find(|dtype| dtype.name() == name) else {
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

/// The parser's message without the position, which the error states itself.
fn strip_position(message: &str) -> String {
    match message.rfind(" at line ") {
        Some(end) => message[..end].to_string(),
        None => message.to_string(),
    }
}
