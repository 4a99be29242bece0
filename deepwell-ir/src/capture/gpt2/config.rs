//! The configuration of a GPT-2 model, from a Hugging Face `config.json`.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::capture::json::{Keys, parse_object, read_text};
use crate::capture::llama::read_dtype;
use crate::capture::{CaptureError, CaptureNotes, StoredDType};

/// Upper limit of accepted sizes, as for llama.
const SIZE_MAX: usize = 1 << 22;

/// A GPT-2 model: LayerNorm, GELU, learned positions, biases on every projection.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// Tokens in the vocabulary (`vocab_size`).
    pub vocab_size: usize,
    /// Width of the residual stream (`n_embd`).
    pub hidden_size: usize,
    /// Width of the feed-forward block (`n_inner`); by default four times `n_embd`.
    pub intermediate_size: usize,
    /// Transformer layers (`n_layer`).
    pub num_layers: usize,
    /// Heads (`n_head`); divides `n_embd`.
    pub num_heads: usize,
    /// Rows of the position table (`n_positions`): the longest sequence, tokens.
    pub max_position_embeddings: usize,
    /// Added to the variance by LayerNorm (`layer_norm_epsilon`).
    pub layer_norm_eps: f64,
    /// Whether GELU uses the tanh approximation (`activation_function` is `gelu_new` or
    /// `gelu_pytorch_tanh`) rather than the error function (`gelu`).
    pub gelu_tanh: bool,
    /// Whether scores are divided by the square root of the head width (`scale_attn_weights`).
    pub scale_attention: bool,
    /// Whether the token table is also the output head (`tie_word_embeddings`).
    pub tie_word_embeddings: bool,
    /// Standard deviation of freshly initialized weights (`initializer_range`).
    pub initializer_range: f64,
    /// Element type of the stored weights (`torch_dtype` or `dtype`), if stated.
    pub torch_dtype: Option<StoredDType>,
}

impl Gpt2Config {
    /// Reads the text of a `config.json`. `location` names the text in errors.
    ///
    /// Defaults are those of transformers, except that vocabulary, width, layers and heads are
    /// required. Dropout is ignored, with a remark.
    ///
    /// # Errors
    /// As [`LlamaConfig::from_json`](crate::capture::LlamaConfig::from_json).
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
        match keys.string("model_type")? {
            Some("gpt2") => {}
            Some(other) => {
                return Err(keys.unsupported("model_type", &json!(other), "supported: `gpt2`"));
            }
            None => return Err(keys.missing("model_type", "supported: `gpt2`")),
        }
        let config = Self::from_keys(&mut keys, &mut notes)?;
        if let Some(value) = keys.get("auto_map") {
            let hint = "the model brings code of its own, which may compute anything; if it is a \
                        plain GPT-2, remove the key";
            return Err(keys.unsupported("auto_map", value, hint));
        }
        // Only other head classes read these keys; `wte` has no padding row.
        for key in [
            "pad_token_id",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ] {
            if keys.get(key).is_some() {
                notes.without_effect.push(key.to_string());
            }
        }
        notes.without_effect.extend(keys.finish_config("GPT2LMHeadModel")?);
        notes.without_effect.sort();
        config.check(location)?;
        Ok((config, notes))
    }

    /// Reads a `config.json`, given directly or by its model folder.
    ///
    /// # Errors
    /// A missing or unreadable file, and errors of [`Gpt2Config::from_json`].
    pub fn from_path(path: impl AsRef<Path>) -> Result<(Self, CaptureNotes), CaptureError> {
        let (text, location) = read_text(path.as_ref())?;
        Self::from_json(&text, &location)
    }

    fn from_keys(keys: &mut Keys<'_>, notes: &mut CaptureNotes) -> Result<Self, CaptureError> {
        let hidden_size = required(keys, "n_embd")?;
        let max_position_embeddings = keys.size("n_positions")?.unwrap_or(1024);
        if let Some(context) = keys.size("n_ctx")?.filter(|&n| n != max_position_embeddings) {
            let expected = format!("{max_position_embeddings} as in `n_positions`");
            return Err(keys.wrong("n_ctx", &expected, &json!(context), ""));
        }
        for key in ["attn_pdrop", "embd_pdrop", "resid_pdrop"] {
            if keys.number(key, 0.0, true)?.unwrap_or(0.1) != 0.0 {
                notes.remarks.push(format!("`{key}` is not 0: training is without dropout"));
            }
        }
        for key in ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"] {
            if keys.boolean(key)? == Some(true) {
                return Err(keys.unsupported(key, &json!(true), "supported: `false`"));
            }
        }
        let gelu_tanh = match keys.string("activation_function")? {
            None | Some("gelu_new" | "gelu_pytorch_tanh") => true,
            Some("gelu") => false,
            Some(other) => {
                let hint = "supported: `gelu_new`, `gelu_pytorch_tanh`, `gelu`";
                return Err(keys.unsupported("activation_function", &json!(other), hint));
            }
        };
        Ok(Gpt2Config {
            vocab_size: required(keys, "vocab_size")?,
            hidden_size,
            intermediate_size: keys.size("n_inner")?.unwrap_or(hidden_size.saturating_mul(4)),
            num_layers: required(keys, "n_layer")?,
            num_heads: required(keys, "n_head")?,
            max_position_embeddings,
            layer_norm_eps: keys.number("layer_norm_epsilon", 0.0, false)?.unwrap_or(1e-5),
            gelu_tanh,
            scale_attention: keys.boolean("scale_attn_weights")?.unwrap_or(true),
            tie_word_embeddings: keys.boolean("tie_word_embeddings")?.unwrap_or(true),
            initializer_range: keys.number("initializer_range", 0.0, false)?.unwrap_or(0.02),
            torch_dtype: read_dtype(keys)?,
        })
    }

    /// Checks that the fields are consistent. `location` names the configuration in errors.
    ///
    /// # Errors
    /// [`CaptureError::Value`] for the first inconsistent field, under its name in a `config.json`.
    pub fn check(&self, location: &str) -> Result<(), CaptureError> {
        let wrong = |key: &str, expected: String, got: Value| {
            let location = location.to_string();
            let key = key.to_string();
            let got = got.to_string();
            Err(CaptureError::Value { location, key, expected, got, hint: String::new() })
        };
        for (key, size, size_max) in [
            ("vocab_size", self.vocab_size, SIZE_MAX),
            ("n_embd", self.hidden_size, SIZE_MAX),
            ("n_inner", self.intermediate_size, SIZE_MAX),
            ("n_layer", self.num_layers, 1 << 14),
            ("n_head", self.num_heads, SIZE_MAX),
            ("n_positions", self.max_position_embeddings, SIZE_MAX),
        ] {
            if size == 0 || size > size_max {
                return wrong(key, format!("an integer from 1 to {size_max}"), json!(size));
            }
        }
        if !self.hidden_size.is_multiple_of(self.num_heads) {
            let expected = format!("a divisor of `n_embd` ({})", self.hidden_size);
            return wrong("n_head", expected, json!(self.num_heads));
        }
        for (key, number) in [
            ("layer_norm_epsilon", self.layer_norm_eps),
            ("initializer_range", self.initializer_range),
        ] {
            if !number.is_finite() || number <= 0.0 {
                return wrong(key, "a number greater than 0".to_string(), json!(number));
            }
        }
        Ok(())
    }
}

fn required(keys: &mut Keys<'_>, key: &'static str) -> Result<usize, CaptureError> {
    let hint = "transformers would take the size of the smallest GPT-2 in its place; state it";
    keys.size(key)?.ok_or_else(|| keys.missing(key, hint))
}
