//! Keys of a `config.json` that set no field: harmless ones, and those that are harmless with some
//! values only.

use serde_json::{Map, Value};

/// Keys that describe the tokenizer, generation, file keeping or the way transformers runs a
/// model. None of them changes a forward or backward pass over packed text.
pub(super) const WITHOUT_EFFECT: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_flash_attn_2_enabled",
    "_name_or_path",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
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
    "id2label",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
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
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

/// A key that is harmless with some values and changes the mathematics with all others.
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

fn is_never(_: &Value) -> bool {
    false
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

fn is_full_attention(value: &Value) -> bool {
    value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind == "full_attention"))
}

/// As for every key, `null` counts as absent.
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
        allowed: is_never,
        hint: "start from weights in BF16, F16 or F32",
    },
    Restricted {
        key: "cross_attention_hidden_size",
        allowed: is_never,
        hint: "only decoders without cross-attention are supported: `null`",
    },
    Restricted {
        key: "is_encoder_decoder",
        allowed: is_false,
        hint: "only decoders are supported: `false`",
    },
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
        allowed: is_never,
        hint: "start from weights in BF16, F16 or F32; the precision of training is set by the \
               precision policy",
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
        key: "use_sliding_window",
        allowed: is_false,
        hint: "only full causal attention is supported: `false`",
    },
];
