//! Lines of `metrics.jsonl`, of this and of earlier versions.

use deepwell_metrics::nonfinite::option as number;
use serde::Deserialize;
use serde_json::Value;

/// One line. Every field may be missing: another kind of line has it, or a later version.
#[derive(Debug, Deserialize)]
pub(crate) struct Line {
    pub(crate) step: u64,
    #[serde(default)]
    pub(crate) unix_s: Option<f64>,
    #[serde(with = "number", default)]
    pub(crate) loss: Option<f64>,
    #[serde(with = "number", default)]
    pub(crate) grad_norm: Option<f64>,
    #[serde(with = "number", default)]
    pub(crate) learning_rate: Option<f64>,
    #[serde(with = "number", default)]
    pub(crate) tokens_per_s: Option<f64>,
    #[serde(with = "number", default)]
    pub(crate) speed_of_light: Option<f64>,
    #[serde(with = "number", default)]
    pub(crate) val_loss: Option<f64>,
    #[serde(default)]
    pub(crate) val_tokens: Option<u64>,
    #[serde(default)]
    pub(crate) skipped: bool,
    #[serde(default)]
    pub(crate) guard: Option<GuardLine>,
    #[serde(default)]
    pub(crate) experts: Vec<ExpertLine>,
    #[serde(default)]
    pub(crate) products: Vec<ProductLine>,
}

/// A guard event.
#[derive(Debug, Deserialize)]
pub(crate) struct GuardLine {
    /// The weight; earlier versions name a layer.
    #[serde(default, alias = "layer")]
    pub(crate) gemm: String,
    #[serde(default)]
    pub(crate) kind: Value,
    #[serde(default)]
    pub(crate) reason: String,
}

impl GuardLine {
    /// Name of the kind in words: `to bf16`.
    pub(crate) fn kind_name(&self) -> String {
        let name = match &self.kind {
            Value::String(name) => name.as_str(),
            Value::Object(fields) => fields.keys().next().map_or("", String::as_str),
            _ => "",
        };
        if name.is_empty() { "event".to_owned() } else { name.replace('_', " ") }
    }
}

/// The load of a layer's experts.
#[derive(Debug, Deserialize)]
pub(crate) struct ExpertLine {
    #[serde(default)]
    pub(crate) layer: u32,
    #[serde(default)]
    pub(crate) entropy: Option<f64>,
    #[serde(default)]
    pub(crate) largest_over_mean: Option<f64>,
    #[serde(default)]
    pub(crate) dead: u64,
    #[serde(default)]
    pub(crate) dropped: u64,
}

/// The signal of a GEMM over its error.
#[derive(Debug, Deserialize)]
pub(crate) struct ProductLine {
    #[serde(default)]
    pub(crate) ratio: Option<f64>,
}
