//! Guard state of one weight's GEMMs: counters, evidence of the current step, and whether the GEMMs
//! are in BF16.
//!
//! ```text
//!           offence                 back-off over              probation over
//!   Low ─────────────▶ Bf16 {until} ─────────────▶ Probation ─────────────────▶ Low
//!                        ▲     │ last one allowed       │ offence: back-off doubles
//!                        │     ▼                        │
//!                        │  Bf16 {for good}             │
//!                        └──────────────────────────────┘
//! ```
//!
//! GEMMs of a format with fewer bits than MXFP8 first move to MXFP8, which takes the place of Bf16
//! in the picture, and from there to BF16 if they offend again.

use alloc::format;
use alloc::string::String;

use serde::{Deserialize, Serialize};

use super::departure::{Departure, History};
use super::product::{LowProduct, Products};
use super::window::Window;
use super::{GuardConfig, Observed};
use crate::{BLOCK, ElementFormat, QuantStats};

/// Precision that the guards assign to the GEMMs of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GemmState {
    /// As the policy specifies.
    Low,
    /// Computed in BF16.
    Bf16 {
        /// Step after which low precision is tried again; `None`: never.
        until_step: Option<u64>,
    },
    /// Computed in MXFP8, because the policy's format has fewer bits.
    Mxfp8 {
        /// Step after which the policy's format is tried again; `None`: never.
        until_step: Option<u64>,
    },
    /// As the policy specifies, after a return.
    Probation {
        /// Step after which probation ends.
        until_step: u64,
    },
}

/// Evidence of the current step: the worst value over the operands of the GEMMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Evidence {
    pub(super) observed: bool,
    pub(super) amax: f32,
    /// Amax of the activation that the forward GEMM reads.
    #[serde(default)]
    pub(super) activation_amax: f32,
    /// Amax of tensors quantized in the backward pass: gradients and recomputed activations.
    #[serde(default)]
    pub(super) backward_amax: f32,
    pub(super) underflow_fraction: f64,
    /// Of operands with elements of a small range.
    #[serde(default)]
    pub(super) fp4_underflow_fraction: f64,
    pub(super) saturation_fraction: f64,
    /// Of operands with E2M1 elements under exponents.
    #[serde(default)]
    pub(super) fp4_saturation_fraction: f64,
    pub(super) scale_clamp_fraction: f64,
    pub(super) nonfinite: u64,
    /// Whether the GEMMs read the step's first operand with non-finite values.
    #[serde(default)]
    pub(super) is_first_nonfinite: bool,
    /// A product with too large an error.
    #[serde(default)]
    pub(super) product: Option<LowProduct>,
}

impl Evidence {
    /// The largest share of underflows, whatever the format.
    pub(super) fn largest_underflow(&self) -> f32 {
        self.underflow_fraction.max(self.fp4_underflow_fraction) as f32
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Gemm {
    /// Name of the weight.
    pub(super) name: String,
    pub(super) state: GemmState,
    /// Sum over the run.
    pub(super) counters: QuantStats,
    pub(super) amax_history: Window,
    /// Amax of the activation in the last steps; no guard reads it.
    #[serde(default)]
    pub(super) activation_amax: Window,
    /// History of the other measures, over the same steps.
    #[serde(default)]
    pub(super) history: History,
    /// Signal-to-error ratios of the products.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) products: Products,
    pub(super) evidence: Evidence,
    /// Consecutive steps that counted against the GEMMs.
    pub(super) strikes: u32,
    pub(super) fallbacks: u32,
    /// Duration of the next fallback, steps.
    pub(super) backoff_steps: u64,
}

fn is_default(products: &Products) -> bool {
    *products == Products::default()
}

impl Gemm {
    pub(super) fn new(name: String, config: &GuardConfig) -> Self {
        Self {
            name,
            state: GemmState::Low,
            counters: QuantStats::default(),
            amax_history: Window::new(config.amax_history_len),
            activation_amax: Window::new(config.amax_history_len),
            history: History::default(),
            products: Products::default(),
            evidence: Evidence::default(),
            strikes: 0,
            fallbacks: 0,
            backoff_steps: config.backoff_steps,
        }
    }

    /// GEMMs that start in the state of `before`. Counters and histories start empty, as the
    /// operands differ from those of `before`.
    pub(super) fn after(name: String, before: &Gemm, config: &GuardConfig) -> Self {
        let Gemm { state, strikes, fallbacks, backoff_steps, .. } = *before;
        Self { state, strikes, fallbacks, backoff_steps, ..Self::new(name, config) }
    }

    pub(super) fn observe(&mut self, stats: &QuantStats, operand: Observed) {
        self.counters.merge(stats);
        if stats.elements == 0 {
            return;
        }
        let evidence = &mut self.evidence;
        if operand.is_activation {
            evidence.activation_amax = evidence.activation_amax.max(stats.amax);
        }
        if operand.is_backward {
            evidence.backward_amax = evidence.backward_amax.max(stats.amax);
        }
        evidence.observed = true;
        evidence.amax = evidence.amax.max(stats.amax);
        evidence.nonfinite += stats.nonfinite;
        let raise = |share: &mut f64, to: f64| *share = share.max(to);
        let underflow = match operand.has_tensor_scale || operand.has_small_range() {
            true => &mut evidence.fp4_underflow_fraction,
            false => &mut evidence.underflow_fraction,
        };
        raise(underflow, stats.underflow_fraction());
        if operand.has_tensor_scale {
            return;
        }
        let blocks = stats.elements.div_ceil(BLOCK as u64);
        let saturation = match operand.element {
            ElementFormat::E2M1 => &mut evidence.fp4_saturation_fraction,
            _ => &mut evidence.saturation_fraction,
        };
        raise(saturation, stats.saturation_fraction());
        raise(&mut evidence.scale_clamp_fraction, stats.scale_clamps as f64 / blocks as f64);
    }

    /// Returns why the step counts against the GEMMs, if it does. Appends the step to the history.
    pub(super) fn judge(&mut self, config: &GuardConfig) -> Option<String> {
        let evidence = self.evidence;
        if !evidence.observed {
            return None;
        }
        let reason = self.crossed_threshold(config);
        self.amax_history.push(evidence.amax);
        if evidence.activation_amax > 0.0 {
            self.activation_amax.reserve(config.amax_history_len);
            self.activation_amax.push(evidence.activation_amax);
        }
        self.history.push(&evidence, config.amax_history_len);
        self.strikes = if reason.is_some() { self.strikes + 1 } else { 0 };
        reason
    }

    fn crossed_threshold(&self, config: &GuardConfig) -> Option<String> {
        let evidence = &self.evidence;
        let share = |what: &str, got: f64, limit: f64| {
            (got > limit)
                .then(|| format!("{:.3} % {what}, more than {:.3} %", got * 100.0, limit * 100.0))
        };
        let growth = || {
            if !self.amax_history.is_full() {
                return None;
            }
            let median = self.amax_history.median()?;
            let limit = median * config.amax_growth_max;
            (median > 0.0 && evidence.amax > limit).then(|| {
                let (amax, factor) = (evidence.amax, config.amax_growth_max);
                format!("amax {amax:e} is more than {factor} times its median {median:e}")
            })
        };
        let underflow = "of the elements of a tensor underflowed to zero";
        let saturation = "of the elements of a tensor saturated";
        let clamps = "of the scales of a tensor fell below 2^-127";
        let fp4_max = config.fp4_underflow_fraction_max;
        let fp4_saturation_max = config.fp4_saturation_fraction_max;
        share(underflow, evidence.underflow_fraction, config.underflow_fraction_max)
            .or_else(|| share(underflow, evidence.fp4_underflow_fraction, fp4_max))
            .or_else(|| {
                share(saturation, evidence.saturation_fraction, config.saturation_fraction_max)
            })
            .or_else(|| share(saturation, evidence.fp4_saturation_fraction, fp4_saturation_max))
            .or_else(|| {
                share(clamps, evidence.scale_clamp_fraction, config.scale_clamp_fraction_max)
            })
            .or_else(growth)
    }

    /// Largest departure of the step from its history; `None` if the GEMMs were not computed in low
    /// precision, or the history is too short.
    pub(super) fn departure(&self) -> Option<Departure> {
        let is_judged = self.is_low() && self.evidence.observed;
        is_judged.then(|| self.history.departure(&self.evidence, &self.amax_history))?
    }

    pub(super) fn is_low(&self) -> bool {
        !matches!(self.state, GemmState::Bf16 { .. })
    }

    /// Moves to MXFP8 if `to_mxfp8` and the GEMMs are not there yet, otherwise to BF16.
    pub(super) fn fall_back(
        &mut self,
        step: u64,
        config: &GuardConfig,
        to_mxfp8: bool,
    ) -> Option<u64> {
        self.fallbacks += 1;
        self.strikes = 0;
        self.products = Products::default();
        let for_good = self.fallbacks >= config.fallbacks_max;
        let until_step = (!for_good).then(|| step.saturating_add(self.backoff_steps));
        self.backoff_steps = self.backoff_steps.saturating_mul(2);
        let is_first = !matches!(self.state, GemmState::Mxfp8 { .. });
        self.state = match to_mxfp8 && is_first {
            true => GemmState::Mxfp8 { until_step },
            false => GemmState::Bf16 { until_step },
        };
        until_step
    }
}
