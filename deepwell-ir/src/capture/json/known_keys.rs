//! Keys of a `config.json` that set no field: keys without effect, and keys that are only allowed
//! with some values.

use serde_json::{Map, Value};

/// Keys for the tokenizer, generation, file management or the execution of transformers. None of
/// these changes a forward or backward pass over packed text.
pub(super) const WITHOUT_EFFECT: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation",
    "_flash_attn_2_enabled",
    "_name_or_path",
    "_num_labels",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "cls_token_id",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "is_decoder",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "mask_token_id",
    "max_length",
    "max_new_tokens",
    "max_sequence_length",
    "min_length",
    "model_max_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_flash_attn",
    "use_return_dict",
];

/// A key with some values without effect; all other values change the mathematics.
pub(super) struct Restricted {
    pub(super) key: &'static str,
    pub(super) allowed: fn(&Value) -> bool,
    pub(super) hint: &'static str,
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn is_false(value: &Value) -> bool {
    value.as_bool() == Some(false)
}

fn is_true(value: &Value) -> bool {
    value.as_bool() == Some(true)
}

fn is_never(_: &Value) -> bool {
    false
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

fn is_full_attention(value: &Value) -> bool {
    value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind == "full_attention"))
}

/// Keys whose "off" value disables a feature that the models here always have.
const ON_BY_DEFAULT: &[&str] = &[
    "causal",
    "do_layer_norm_before",
    "elementwise_affine",
    "gated_mlp",
    "glu",
    "is_causal",
    "is_gated_act",
    "norm_elementwise_affine",
    "normalize_before",
    "pre_norm",
    "residual",
    "rms_norm",
    "rope",
    "rotary",
    "scale_attention",
    "scale_attn",
    "use_causal_mask",
    "use_gated_mlp",
    "use_glu",
    "use_pre_norm",
    "use_residual",
    "use_rms_norm",
    "use_rmsnorm",
    "use_rope",
    "use_rotary",
    "use_rotary_embeddings",
    "use_swiglu",
];
/// Name suffixes of factors, for which 0 does not mean "off".
const FACTORS: [&str; 6] = ["_factor", "_multiplier", "_scale", "_scaling", "_temperature", "_pct"];

/// Whether the value of an unknown key means "off": `null`, `false`, 0, an empty string, list or
/// object, and lists and objects of such values.
pub(super) fn says_nothing_special(key: &str, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(is_on) => !is_on && !ON_BY_DEFAULT.contains(&key),
        Value::Number(_) => {
            is_zero(value)
                && !ON_BY_DEFAULT.contains(&key)
                && !FACTORS.iter().any(|ending| key.ends_with(ending))
        }
        Value::String(text) => text.is_empty(),
        Value::Array(all) => all.iter().all(|value| says_nothing_special(key, value)),
        Value::Object(all) => all.iter().all(|(key, value)| says_nothing_special(key, value)),
    }
}

/// Values of `null` count as absent, as for every key.
pub(super) const RESTRICTED: &[Restricted] = &[
    Restricted {
        key: "add_cross_attention",
        allowed: is_false,
        hint: "only decoders without cross-attention are supported: `false`",
    },
    Restricted {
        key: "attention_dropout",
        allowed: is_zero,
        hint: "dropout is not supported; set it to 0 to train without",
    },
    Restricted {
        key: "compression_config",
        allowed: is_empty,
        hint: "start from weights in BF16, F16 or F32",
    },
    Restricted {
        key: "cross_attention_hidden_size",
        allowed: is_never,
        hint: "only decoders without cross-attention are supported: `null`",
    },
    Restricted {
        key: "embd_pdrop",
        allowed: is_zero,
        hint: "dropout is not supported; set it to 0 to train without",
    },
    Restricted {
        key: "is_encoder_decoder",
        allowed: is_false,
        hint: "only decoders are supported: `false`",
    },
    Restricted { key: "is_llama_config", allowed: is_true, hint: "supported: `true`" },
    Restricted {
        key: "layer_types",
        allowed: is_full_attention,
        hint: "supported: \"full_attention\" for every layer",
    },
    Restricted {
        key: "neftune_noise_alpha",
        allowed: is_zero,
        hint: "noise on the embeddings is not supported; remove the key to train without",
    },
    Restricted {
        key: "partial_rotary_factor",
        allowed: is_one,
        hint: "supported: 1, a rotation of the whole head",
    },
    Restricted {
        key: "pretraining_tp",
        allowed: is_one,
        hint: "supported: 1; other values only split the GEMMs in another way, so that 1 trains \
               the same model up to rounding",
    },
    Restricted {
        key: "pruned_heads",
        allowed: is_empty,
        hint: "pruned heads are not supported: `{}`",
    },
    Restricted {
        key: "quantization_config",
        allowed: is_empty,
        hint: "start from weights in BF16, F16 or F32; the precision of training is set by the \
               precision policy",
    },
    Restricted {
        key: "resid_pdrop",
        allowed: is_zero,
        hint: "dropout is not supported; set it to 0 to train without",
    },
    Restricted {
        key: "rope_interleaved",
        allowed: is_false,
        hint: "supported: `false`, pairs of elements half a head apart",
    },
    Restricted {
        key: "sliding_window",
        allowed: is_never,
        hint: "only full causal attention is supported: `null`",
    },
    Restricted {
        key: "tie_encoder_decoder",
        allowed: is_false,
        hint: "only decoders are supported: `false`",
    },
    Restricted {
        key: "use_mrope",
        allowed: is_false,
        hint: "positions of several axes are not supported: `false`",
    },
    Restricted {
        key: "use_sliding_window",
        allowed: is_false,
        hint: "only full causal attention is supported: `false`",
    },
];
