//! The latent attention of a configuration.

use serde_json::{Map, Value, json};

use crate::capture::json::Keys;
use crate::capture::{CaptureError, ModelFamily, Rope, RopeScaling};

/// Widths of multi-head latent attention, see [`LatentKeyValue`](crate::ops::LatentKeyValue).
///
/// The rotated part of a head is
/// [`LlamaConfig::head_dim`](crate::capture::LlamaConfig::head_dim) wide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatentConfig {
    /// Width of the query latent (`q_lora_rank`); `None` for a single query projection.
    pub q_rank: Option<usize>,
    /// Width of the key-value latent (`kv_lora_rank`).
    pub kv_rank: usize,
    /// Columns of a head that are not rotated (`qk_nope_head_dim`).
    pub plain_dim: usize,
    /// Columns of a value (`v_head_dim`).
    pub value_dim: usize,
    /// Whether adjacent elements form a rotated pair (`rope_interleave`).
    pub interleaved: bool,
}

impl LatentConfig {
    /// Reads the keys of a family with latent attention; returns the widths, and the width of the
    /// rotated part.
    pub(super) fn read(
        keys: &mut Keys<'_>,
        family: ModelFamily,
    ) -> Result<Option<(LatentConfig, usize)>, CaptureError> {
        if family != ModelFamily::DeepseekV3 {
            return Ok(None);
        }
        let mut required = |key: &'static str| {
            let hint = "transformers would take that of DeepSeek-V3; state it";
            keys.size(key)?.ok_or_else(|| keys.missing(key, hint))
        };
        let kv_rank = required("kv_lora_rank")?;
        let plain_dim = required("qk_nope_head_dim")?;
        let rope_dim = required("qk_rope_head_dim")?;
        let value_dim = required("v_head_dim")?;
        if !keys.holds("q_lora_rank") {
            let hint = "the width of the latent of queries, or `null` for none";
            return Err(keys.missing("q_lora_rank", hint));
        }
        let q_rank = keys.size("q_lora_rank")?;
        for (key, expected) in [("head_dim", rope_dim), ("qk_head_dim", plain_dim + rope_dim)] {
            if let Some(other) = keys.size(key)?.filter(|&size| size != expected) {
                let hint = "it follows from `qk_nope_head_dim` and `qk_rope_head_dim`";
                return Err(keys.wrong(key, &expected.to_string(), &json!(other), hint));
            }
        }
        let interleaved = keys.boolean("rope_interleave")?.unwrap_or(true);
        Ok(Some((LatentConfig { q_rank, kv_rank, plain_dim, value_dim, interleaved }, rope_dim)))
    }

    /// Factor on the scores: the reciprocal square root of the head width, and for yarn also the
    /// square of its factor for all dimensions (`yarn_apply_mscale` of transformers).
    pub(super) fn scale(&self, rope_dim: usize, rope: &Rope) -> f64 {
        let plain = 1.0 / ((self.plain_dim + rope_dim) as f64).sqrt();
        match &rope.scaling {
            RopeScaling::Yarn(yarn) => {
                let factor = yarn.factor_of(yarn.mscale_all_dim.unwrap_or(0.0));
                plain * factor * factor
            }
            _ => plain,
        }
    }

    pub(super) fn write(&self, rope_dim: usize, object: &mut Map<String, Value>) {
        for (key, value) in [
            ("q_lora_rank", json!(self.q_rank)),
            ("kv_lora_rank", json!(self.kv_rank)),
            ("qk_nope_head_dim", json!(self.plain_dim)),
            ("qk_rope_head_dim", json!(rope_dim)),
            ("v_head_dim", json!(self.value_dim)),
            ("rope_interleave", json!(self.interleaved)),
        ] {
            object.insert(key.to_string(), value);
        }
    }
}
