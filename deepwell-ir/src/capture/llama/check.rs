//! Consistency checks of a configuration.

use super::config::LAYERS_MAX;
use super::stored::MXFP4_BLOCK;
use crate::capture::{CaptureError, LlamaConfig, RopeScaling, WeightPacking};

/// Upper limit of widths and head counts; larger values are assumed to be mistakes. The limit also
/// keeps parameter counts of accepted models within 64 bits.
const SIZE_MAX: usize = 1 << 22;

impl LlamaConfig {
    /// Checks that the fields are consistent. `location` names the configuration in errors.
    ///
    /// # Errors
    /// [`CaptureError::Value`] for the first inconsistent field, under its name in a `config.json`.
    pub fn check(&self, location: &str) -> Result<(), CaptureError> {
        let wrong = |key: &str, expected: String, got: String, hint: &str| {
            let (location, key) = (location.to_string(), key.to_string());
            Err(CaptureError::Value { location, key, expected, got, hint: hint.to_string() })
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
        self.check_structure(location)?;
        let biases = (self.attention_bias, self.mlp_bias);
        let window = self.sliding_window;
        for (key, expected, got, fits) in self.family.fixed(biases.0, biases.1, window) {
            if !fits {
                return wrong(key, expected, got, "");
            }
        }
        Ok(())
    }

    /// Checks latent attention, experts, full-attention layers and packing.
    fn check_structure(&self, location: &str) -> Result<(), CaptureError> {
        let wrong = |key: &str, expected: String, got: String| {
            let location = location.to_string();
            let key = key.to_string();
            let hint = String::new();
            Err(CaptureError::Value { location, key, expected, got, hint })
        };
        let family = self.family;
        let name = family.model_type();
        for (what, has, is_there) in [
            ("experts", family.has_experts(), self.experts.is_some()),
            ("latent attention", family.has_latent_attention(), self.latent.is_some()),
        ] {
            if has != is_there {
                let expected = if has { "settings of it" } else { "none of it" };
                let got = if is_there { "some" } else { "none" };
                return wrong(what, format!("{expected} with {name}"), got.to_string());
            }
        }
        if let Some(experts) = &self.experts
            && let Some((key, expected, got)) = experts.misfit(family, self.num_layers, SIZE_MAX)
        {
            return wrong(key, expected, got);
        }
        let misfit = |size: &&usize| !size.is_multiple_of(MXFP4_BLOCK);
        if self.packing == Some(WeightPacking::Mxfp4)
            && let Some(size) = [self.hidden_size, self.intermediate_size].iter().find(misfit)
        {
            let expected = format!("widths divisible by {MXFP4_BLOCK} with mxfp4");
            return wrong("quantization_config", expected, size.to_string());
        }
        if let Some(latent) = &self.latent {
            let query = latent.plain_dim.saturating_add(self.head_dim);
            let kv = latent.plain_dim.saturating_add(latent.value_dim);
            for (key, size) in [
                ("q_lora_rank", latent.q_rank.unwrap_or(1)),
                ("kv_lora_rank", latent.kv_rank),
                ("qk_nope_head_dim", latent.plain_dim),
                ("v_head_dim", latent.value_dim),
                ("heads of queries", query.saturating_mul(self.num_heads)),
                ("heads of keys and values", kv.saturating_mul(self.num_heads)),
            ] {
                if size == 0 || size > SIZE_MAX {
                    let expected = format!("an integer from 1 to {SIZE_MAX}");
                    return wrong(key, expected, size.to_string());
                }
            }
        }
        let full = &self.full_attention_layers;
        let ascending = full.windows(2).all(|pair| pair[0] < pair[1]);
        let inside = full.last().is_none_or(|&last| last < self.num_layers);
        if !ascending || !inside || (!full.is_empty() && !family.has_sinks()) {
            let expected = format!("ascending layers under {}, with gpt_oss only", self.num_layers);
            return wrong("layer_types", expected, format!("{full:?}"));
        }
        Ok(())
    }
}
