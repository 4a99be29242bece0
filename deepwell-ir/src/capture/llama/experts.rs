//! The mixture of experts of a configuration: keys by family, and consistency checks.

use serde_json::{Map, Value, json};

use crate::OpError;
use crate::capture::json::Keys;
use crate::capture::{CaptureError, ModelFamily};
use crate::ops::{ExpertActivation, Route, RouteGroups, RouteScore};

/// Default of gpt-oss for `swiglu_alpha`.
const GPT_OSS_ALPHA: f64 = 1.702;
/// Default of gpt-oss for `swiglu_limit`.
const GPT_OSS_LIMIT: f64 = 7.0;

/// Upper limit of experts over all layers: each expert is a tensor of the weight files.
const EXPERTS_MAX: usize = 1 << 20;

/// Feed-forward blocks of a mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Experts of a layer (`num_local_experts`, `num_experts` or `n_routed_experts`).
    pub num_experts: usize,
    /// Experts that a token visits (`num_experts_per_tok`).
    pub experts_per_token: usize,
    /// Width of an expert (`moe_intermediate_size`; `intermediate_size` with mixtral and gpt_oss).
    pub intermediate_size: usize,
    /// Number of experts that every token visits, combined into one wider block
    /// (`n_shared_experts`); deepseek_v3 only.
    pub shared_experts: usize,
    /// Layers with one dense feed-forward block instead, ascending (`first_k_dense_replace` of
    /// deepseek_v3; `mlp_only_layers` and `decoder_sparse_step` of qwen3_moe).
    pub dense_layers: Vec<usize>,
    /// Whether the gates of a token are divided by their sum (`norm_topk_prob`).
    pub normalize_gates: bool,
    /// Factor on the gates (`routed_scaling_factor`); 1 except in deepseek_v3.
    pub gate_scaling: f64,
    /// Groups that limit the selection (`n_group`, `topk_group`); deepseek_v3 only.
    pub groups: Option<RouteGroups>,
    /// Activation between the projections of an expert (`swiglu_alpha`, `swiglu_limit`).
    pub activation: ExpertActivation,
}

impl ExpertsConfig {
    /// The router as an op.
    pub fn route(&self, family: ModelFamily) -> Route {
        let sigmoid = family == ModelFamily::DeepseekV3;
        Route {
            experts: self.num_experts,
            top_k: self.experts_per_token,
            score: if sigmoid { RouteScore::Sigmoid } else { RouteScore::Softmax },
            normalize: self.normalize_gates,
            scaling: self.gate_scaling,
            groups: self.groups,
            selection_bias: sigmoid,
        }
    }

    /// Whether layer `layer` has one dense feed-forward block.
    pub fn is_dense(&self, layer: u32) -> bool {
        self.dense_layers.contains(&(layer as usize))
    }

    /// Reads the keys of a family with experts; `None` for any other family.
    pub(super) fn read(
        keys: &mut Keys<'_>,
        family: ModelFamily,
        width: usize,
        num_layers: usize,
    ) -> Result<Option<ExpertsConfig>, CaptureError> {
        let mut config = match family {
            ModelFamily::Mixtral => plain(required(keys, "num_local_experts")?, width),
            ModelFamily::GptOss => {
                let alpha = keys.number("swiglu_alpha", 0.0, false)?.unwrap_or(GPT_OSS_ALPHA);
                let limit = keys.number("swiglu_limit", 0.0, false)?.unwrap_or(GPT_OSS_LIMIT);
                ExpertsConfig {
                    activation: ExpertActivation::ClampedSwiGlu { alpha, limit },
                    ..plain(required(keys, "num_local_experts")?, width)
                }
            }
            ModelFamily::Qwen3Moe => ExpertsConfig {
                dense_layers: qwen_dense_layers(keys, num_layers)?,
                normalize_gates: keys.boolean("norm_topk_prob")?.unwrap_or(false),
                ..plain(qwen_experts(keys)?, required(keys, "moe_intermediate_size")?)
            },
            ModelFamily::DeepseekV3 => read_deepseek(keys, num_layers)?,
            _ => return Ok(None),
        };
        let old = "experts_per_token";
        config.experts_per_token = match (keys.size("num_experts_per_tok")?, keys.size(old)?) {
            (Some(new), Some(other)) if new != other => {
                let expected = format!("{new} as in `num_experts_per_tok`");
                return Err(keys.wrong(old, &expected, &json!(other), "keep one of the two keys"));
            }
            (new, other) => match new.or(other) {
                Some(count) => count,
                None => return Err(keys.missing("num_experts_per_tok", STATE)),
            },
        };
        // transformers adds the balancing loss if router logits are returned.
        if keys.boolean("output_router_logits")? == Some(true) {
            let hint = "it adds a balancing loss, which is not supported: `false`";
            return Err(keys.unsupported("output_router_logits", &json!(true), hint));
        }
        if let Some(noise) = keys.number("router_jitter_noise", 0.0, true)?.filter(|&n| n != 0.0) {
            let hint = "noise on the router's input is not supported; set it to 0";
            return Err(keys.unsupported("router_jitter_noise", &json!(noise), hint));
        }
        Ok(Some(config))
    }

    /// First inconsistent field for a family: key, expected value and actual value.
    pub(super) fn misfit(
        &self,
        family: ModelFamily,
        num_layers: usize,
        size_max: usize,
    ) -> Option<(&'static str, String, String)> {
        let width = self.num_experts.saturating_mul(self.intermediate_size);
        if self.intermediate_size == 0 || width > size_max {
            let expected = format!("1 to {size_max} columns over all experts");
            return Some(("moe_intermediate_size", expected, width.to_string()));
        }
        let in_all = self.num_experts.saturating_mul(num_layers);
        if in_all > EXPERTS_MAX {
            let expected = format!("at most {EXPERTS_MAX} experts in all layers");
            return Some(("num_experts", expected, in_all.to_string()));
        }
        let shared = self.shared_experts.saturating_mul(self.intermediate_size);
        if shared > size_max {
            let expected = format!("at most {size_max} columns over all shared experts");
            return Some(("n_shared_experts", expected, shared.to_string()));
        }
        if let Err(OpError { expected, got, .. }) = self.route(family).check() {
            return Some(("num_experts_per_tok", expected, got));
        }
        let ascending = self.dense_layers.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || self.dense_layers.last().is_some_and(|&last| last >= num_layers) {
            let expected = format!("ascending layers under {num_layers}");
            return Some(("dense layers", expected, format!("{:?}", self.dense_layers)));
        }
        let deepseek = family == ModelFamily::DeepseekV3;
        let clamped = matches!(self.activation, ExpertActivation::ClampedSwiGlu { .. });
        let first = self.dense_layers.iter().enumerate().all(|(index, &layer)| index == layer);
        let some_dense = !self.dense_layers.is_empty();
        let fixed = matches!(family, ModelFamily::Mixtral | ModelFamily::GptOss);
        let name = family.model_type();
        for (key, fits, expected) in [
            ("n_shared_experts", deepseek || self.shared_experts == 0, "0"),
            ("routed_scaling_factor", deepseek || self.gate_scaling == 1.0, "1"),
            ("n_group", deepseek || self.groups.is_none(), "none"),
            ("norm_topk_prob", !fixed || self.normalize_gates, "`true`"),
            ("dense layers", !fixed || !some_dense, "none"),
            ("first_k_dense_replace", !deepseek || first, "the first layers"),
            ("swiglu_limit", clamped == (family == ModelFamily::GptOss), "with gpt_oss only"),
        ] {
            if !fits {
                return Some((key, format!("{expected} with {name}"), "another".to_string()));
            }
        }
        None
    }

    /// Writes the keys that [`ExpertsConfig::read`] reads.
    pub(super) fn write(&self, family: ModelFamily, object: &mut Map<String, Value>) {
        let mut put = |key: &str, value: Value| {
            object.insert(key.to_string(), value);
        };
        put("num_experts_per_tok", json!(self.experts_per_token));
        match family {
            ModelFamily::Qwen3Moe => {
                put("num_experts", json!(self.num_experts));
                put("moe_intermediate_size", json!(self.intermediate_size));
                put("norm_topk_prob", json!(self.normalize_gates));
                put("mlp_only_layers", json!(self.dense_layers));
                put("decoder_sparse_step", json!(1));
            }
            ModelFamily::DeepseekV3 => {
                put("n_routed_experts", json!(self.num_experts));
                put("moe_intermediate_size", json!(self.intermediate_size));
                put("n_shared_experts", json!(self.shared_experts));
                put("first_k_dense_replace", json!(self.dense_layers.len()));
                put("norm_topk_prob", json!(self.normalize_gates));
                put("routed_scaling_factor", json!(self.gate_scaling));
                let groups = self.groups.unwrap_or(RouteGroups { count: 1, chosen: 1 });
                put("n_group", json!(groups.count));
                put("topk_group", json!(groups.chosen));
                put("scoring_func", json!("sigmoid"));
                put("topk_method", json!("noaux_tc"));
            }
            _ => put("num_local_experts", json!(self.num_experts)),
        }
        if let ExpertActivation::ClampedSwiGlu { alpha, limit } = self.activation {
            put("swiglu_alpha", json!(alpha));
            put("swiglu_limit", json!(limit));
        }
    }
}

const STATE: &str = "transformers would take that of one published size; state it";

fn required(keys: &mut Keys<'_>, key: &'static str) -> Result<usize, CaptureError> {
    keys.size(key)?.ok_or_else(|| keys.missing(key, STATE))
}

/// Experts in every layer, with normalized gates.
fn plain(num_experts: usize, intermediate_size: usize) -> ExpertsConfig {
    ExpertsConfig {
        num_experts,
        experts_per_token: 0,
        intermediate_size,
        shared_experts: 0,
        dense_layers: Vec::new(),
        normalize_gates: true,
        gate_scaling: 1.0,
        groups: None,
        activation: ExpertActivation::SwiGlu,
    }
}

/// Reads `num_experts`, or `num_local_experts` as transformers 5 may write.
fn qwen_experts(keys: &mut Keys<'_>) -> Result<usize, CaptureError> {
    match (keys.size("num_experts")?, keys.size("num_local_experts")?) {
        (Some(new), Some(other)) if new != other => {
            let expected = format!("{new} as in `num_experts`");
            let hint = "keep one of the two keys";
            Err(keys.wrong("num_local_experts", &expected, &json!(other), hint))
        }
        (new, other) => new.or(other).ok_or_else(|| keys.missing("num_experts", STATE)),
    }
}

fn qwen_dense_layers(keys: &mut Keys<'_>, num_layers: usize) -> Result<Vec<usize>, CaptureError> {
    let step = keys.size("decoder_sparse_step")?.unwrap_or(1);
    let listed: Vec<usize> = match keys.get("mlp_only_layers") {
        None => Vec::new(),
        Some(value) => {
            let wrong = || keys.wrong("mlp_only_layers", "a list of layers", value, "");
            let layers = value.as_array().ok_or_else(wrong)?;
            let index = |layer: &Value| {
                layer.as_u64().map(|layer| layer as usize).filter(|&layer| layer < num_layers)
            };
            layers.iter().map(index).collect::<Option<_>>().ok_or_else(wrong)?
        }
    };
    Ok((0..num_layers)
        .filter(|&layer| !(layer + 1).is_multiple_of(step) || listed.contains(&layer))
        .collect())
}

fn read_deepseek(keys: &mut Keys<'_>, num_layers: usize) -> Result<ExpertsConfig, CaptureError> {
    for (key, only) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if let Some(other) = keys.string(key)?.filter(|&value| value != only) {
            return Err(keys.unsupported(key, &json!(other), &format!("supported: `{only}`")));
        }
    }
    if let Some(step) = keys.size("moe_layer_freq")?.filter(|&step| step != 1) {
        let hint = "supported: 1, experts in every layer after the first dense ones";
        return Err(keys.unsupported("moe_layer_freq", &json!(step), hint));
    }
    let groups = match (keys.size("n_group")?, keys.size("topk_group")?) {
        (None, None) | (Some(1), Some(1)) => None,
        (Some(count), Some(chosen)) => Some(RouteGroups { count, chosen }),
        (None, Some(_)) => return Err(keys.missing("n_group", "`topk_group` is there")),
        (Some(_), None) => return Err(keys.missing("topk_group", "`n_group` is there")),
    };
    let dense = keys
        .count("first_k_dense_replace")?
        .ok_or_else(|| keys.missing("first_k_dense_replace", STATE))?;
    Ok(ExpertsConfig {
        shared_experts: keys.count("n_shared_experts")?.unwrap_or(0),
        // A larger count fails the check below in any case.
        dense_layers: (0..dense.min(num_layers + 1)).collect(),
        normalize_gates: keys.boolean("norm_topk_prob")?.unwrap_or(true),
        gate_scaling: keys.number("routed_scaling_factor", 0.0, false)?.unwrap_or(1.0),
        groups,
        ..plain(required(keys, "n_routed_experts")?, required(keys, "moe_intermediate_size")?)
    })
}
