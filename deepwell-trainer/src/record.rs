//! Lines of `metrics.jsonl`.

use deepwell_precision::GuardEvent;
use serde::{Deserialize, Serialize};

use crate::ExpertLoad;
use crate::metrics::nonfinite::option as number;
use crate::product_charts::ProductRecord;
use crate::rank_times::RankTime;

/// One line of `metrics.jsonl`. `None` means not measured; a measured number that is not finite is
/// stored as the string `"NaN"`, `"inf"` or `"-inf"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Steps done.
    pub step: u64,
    /// Time at which the line was written, seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub unix_s: Option<f64>,
    /// Mean training loss of the step, nats per token.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub loss: Option<f64>,
    /// Global gradient norm before clipping.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub grad_norm: Option<f64>,
    /// Learning rate of the step.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub learning_rate: Option<f64>,
    /// Tokens per second of the step.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub tokens_per_s: Option<f64>,
    /// Predicted time of the step over its measured time.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub speed_of_light: Option<f64>,
    /// Held-out loss, nats per token.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub val_loss: Option<f64>,
    /// `exp(val_loss)`.
    #[serde(with = "number", skip_serializing_if = "Option::is_none", default)]
    pub val_ppl: Option<f64>,
    /// Number of held-out tokens predicted by the evaluation.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub val_tokens: Option<u64>,
    /// Action of a guard after the step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub guard: Option<GuardEvent>,
    /// Busy and waiting time of each rank; empty for a single rank, and for GPUs.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub ranks: Vec<RankTime>,
    /// Distribution of the step's tokens over experts, by layer.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub experts: Vec<ExpertRecord>,
    /// Signal-to-error ratios of quantized GEMMs, in steps that measure them.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub products: Vec<ProductRecord>,
    /// Whether the update was skipped because the gradient norm was not finite.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub skipped: bool,
}

/// The load of a layer's experts in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertRecord {
    /// The counts.
    #[serde(flatten)]
    pub load: ExpertLoad,
    /// Number of experts that no token chose.
    pub dead: usize,
    /// Entropy of the load over the entropy of a uniform load, 0 to 1.
    pub entropy: f64,
    /// The largest load over the mean.
    pub largest_over_mean: f64,
}

impl From<&ExpertLoad> for ExpertRecord {
    fn from(load: &ExpertLoad) -> ExpertRecord {
        let (dead, entropy) = (load.dead(), load.entropy());
        let largest_over_mean = load.largest_over_mean();
        ExpertRecord { load: load.clone(), dead, entropy, largest_over_mean }
    }
}

impl Record {
    /// A line with only its step.
    pub(crate) fn at(step: u64) -> Record {
        Record {
            step,
            unix_s: None,
            loss: None,
            grad_norm: None,
            learning_rate: None,
            tokens_per_s: None,
            speed_of_light: None,
            val_loss: None,
            val_ppl: None,
            val_tokens: None,
            guard: None,
            ranks: Vec::new(),
            experts: Vec::new(),
            products: Vec::new(),
            skipped: false,
        }
    }
}
