//! Guards over a low-precision run. Guards detect operands that underflow, saturate or hold NaN,
//! and loss spikes, and decide when GEMMs fall back to BF16 and return.
//!
//! The unit is the weight: its fprop, dgrad and wgrad GEMMs move together and independently of
//! other weights. A stack of experts is a weight, and its grouped GEMMs form a unit.
//!
//! During a step the trainer reports the counters of each quantization and the GEMMs that read the
//! operand ([`Guards::observe_tensor`], in execution order). At the end of the step it reports the
//! loss ([`Guards::observe_loss`]). [`Guards::decide`] then returns the changes before the next
//! step. All state is plain data: a run resumed from a checkpoint continues with the same
//! decisions.
//!
//! - A step counts against a GEMM if an operand crosses a threshold of [`GuardConfig`]; several
//!   such steps in a row are an *offence*. After a loss spike every GEMM with a step against it
//!   offends at once.
//! - A product whose error is too large, measured every [`GuardConfig::product_every_steps`] steps
//!   ([`Guards::observe_product`]), counts against its GEMMs; two such measurements in a row are an
//!   offence.
//! - A loss spike also makes the GEMMs offend that depart most from their own history, even if no
//!   threshold was crossed. The measures are amax, amax of the backward pass, and the shares of
//!   underflow, saturation and clamped scales, each divided by its median in the last
//!   [`GuardConfig::amax_history_len`] steps. The departure of a GEMM is the largest of these
//!   ratios. GEMMs offend if their departure is at least [`GuardConfig::spike_departure_min`] and
//!   at least the square root of the largest departure. If no GEMM departs that much, none moves.
//! - Non-finite values are an offence of the GEMMs that read the step's first operand with such
//!   values, and of no other GEMMs, because non-finite values spread to everything computed later.
//!   Nothing else is judged in such a step.
//!
//! Queries, keys and values read one activation. The counters of an operand with several readers
//! count for each reader, as nothing tells which reader is harmed.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::operand::GemmKind;
use crate::{Fallback, Format, QuantStats};

mod config;
mod departure;
mod event;
mod gemm;
mod loss;
mod observed;
mod product;
mod window;

pub use config::GuardConfig;
use departure::Departure;
pub use event::{GuardError, GuardEvent, GuardEventKind};
pub use gemm::GemmState;
use gemm::{Evidence, Gemm};
use loss::LossVerdict;
pub use observed::Observed;
use window::Window;

/// Maximum number of recorded events; further events are only counted.
const EVENTS_MAX: usize = 10_000;

/// The guards of one run. See the module documentation.
///
/// ```
/// use deepwell_precision::{Fallback, GuardConfig, Guards, QuantStats};
/// let mut guards = Guards::new(GuardConfig::default(), vec!["up_proj".into()], Fallback::Safe);
/// let bad = QuantStats { amax: 1.0, elements: 100, underflows: 60, ..QuantStats::default() };
/// for step in 1..=3 {
///     assert!(guards.in_fallback().is_empty());
///     guards.observe_tensor(step, &[0], &bad);
///     guards.observe_loss(step, 2.0, 1.0);
///     guards.decide(step)?;
/// }
/// assert_eq!(guards.in_fallback(), [0]);
/// assert_eq!(
///     guards.events()[0].reason,
///     "60.000 % of the elements of a tensor underflowed to zero, more than 50.000 %, \
///      3 steps in a row"
/// );
/// # Ok::<(), deepwell_precision::GuardError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Guards {
    config: GuardConfig,
    fallback: Fallback,
    /// FLOPs of each weight's GEMMs in a policy whose format has a tensor scale: they move to MXFP8
    /// first. Empty for other policies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    flops: Vec<u64>,
    /// The GEMMs of each weight. Earlier versions had guards over layers.
    #[serde(alias = "layers")]
    gemms: Vec<Gemm>,
    losses: Window,
    verdict: LossVerdict,
    /// Whether an operand of this step had non-finite values.
    #[serde(default)]
    is_nonfinite: bool,
    nonfinite_steps: u32,
    /// Last step of a repair after a loss spike.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    repair_until: Option<u64>,
    events: Vec<GuardEvent>,
    events_dropped: u64,
}

impl Guards {
    /// Creates guards over the GEMMs of the weights `names`; later calls refer to weights by index.
    #[must_use]
    pub fn new(config: GuardConfig, names: Vec<String>, fallback: Fallback) -> Self {
        Self {
            gemms: names.into_iter().map(|name| Gemm::new(name, &config)).collect(),
            losses: Window::new(config.loss_window),
            config,
            fallback,
            flops: Vec::new(),
            verdict: LossVerdict::Calm,
            is_nonfinite: false,
            nonfinite_steps: 0,
            repair_until: None,
            events: Vec::new(),
            events_dropped: 0,
        }
    }

    /// Guards of a policy whose format has a tensor scale: GEMMs move to MXFP8 first, and at most
    /// [`GuardConfig::moved_flops_max`] of `flops`, those of each weight's GEMMs, leave the format.
    #[must_use]
    pub fn with_mxfp8_stage(self, flops: Vec<u64>) -> Self {
        Self { flops, ..self }
    }

    /// Converts the guards to the units of `gemms`. Each entry is a name and the index of the
    /// current unit whose state is inherited; a unit without an index starts anew. Losses and
    /// events are kept.
    #[must_use]
    pub fn regrouped(self, gemms: impl IntoIterator<Item = (String, Option<usize>)>) -> Self {
        let of = |(name, before): (String, Option<usize>)| match before
            .and_then(|index| self.gemms.get(index))
        {
            Some(before) => Gemm::after(name, before, &self.config),
            None => Gemm::new(name, &self.config),
        };
        let gemms = gemms.into_iter().map(of).collect();
        Self { gemms, ..self }
    }

    /// Records the counters of quantizing one operand of `gemms`. Call it in execution order: the
    /// readers of the first operand with non-finite values are held responsible. Unknown indices
    /// are ignored. Does not allocate.
    pub fn observe_tensor(&mut self, step: u64, gemms: &[usize], stats: &QuantStats) {
        self.observe_operand(step, gemms, stats, Observed::default());
    }

    /// [`Guards::observe_tensor`] for the activation that forward GEMMs read. Its amax is kept for
    /// [`Guards::activation_amax`].
    pub fn observe_activation(&mut self, step: u64, gemms: &[usize], stats: &QuantStats) {
        let operand = Observed { is_activation: true, ..Observed::default() };
        self.observe_operand(step, gemms, stats, operand);
    }

    /// The largest amax of each weight's activation in the last
    /// [`GuardConfig::amax_history_len`] steps, by name of the weight. Weights whose activation was
    /// not quantized are left out.
    pub fn activation_amax(&self) -> impl Iterator<Item = (&str, f32)> {
        let of_gemm = |gemm: &Gemm| gemm.activation_amax.iter().reduce(f32::max);
        self.gemms.iter().filter_map(move |gemm| Some((gemm.name.as_str(), of_gemm(gemm)?)))
    }

    /// [`Guards::observe_tensor`] for a tensor that the backward pass quantizes. Its amax has a
    /// separate history, as gradients are smaller than activations.
    pub fn observe_backward_tensor(&mut self, step: u64, gemms: &[usize], stats: &QuantStats) {
        let operand = Observed { is_backward: true, ..Observed::default() };
        self.observe_operand(step, gemms, stats, operand);
    }

    /// [`Guards::observe_tensor`] for any kind of operand.
    pub fn observe_operand(
        &mut self,
        _step: u64,
        gemms: &[usize],
        stats: &QuantStats,
        operand: Observed,
    ) {
        let is_first_nonfinite = stats.nonfinite > 0 && !self.is_nonfinite;
        for &index in gemms {
            let Some(gemm) = self.gemms.get_mut(index) else { continue };
            gemm.observe(stats, operand);
            gemm.evidence.is_first_nonfinite |= is_first_nonfinite;
            self.is_nonfinite |= is_first_nonfinite;
        }
    }

    /// Records a measurement of a product of `gemm`: sums of squares of the product of the
    /// unquantized operands, and of its error. Unknown indices are ignored.
    pub fn observe_product(&mut self, gemm: usize, kind: GemmKind, signal: f64, error: f64) {
        let Some(gemm) = self.gemms.get_mut(gemm) else { return };
        let low = gemm.products.observe(kind, (signal, error), &self.config);
        gemm.evidence.product = gemm.evidence.product.or(low);
    }

    /// Records the loss of the step and the global gradient norm before clipping.
    pub fn observe_loss(&mut self, _step: u64, loss: f32, grad_norm: f32) {
        self.verdict = loss::judge(&mut self.losses, &self.config, loss, grad_norm);
    }

    /// Called after `step`; returns the events of this step. [`GuardEventKind::ToBf16`] and
    /// [`GuardEventKind::BackToLow`] are changes to make before the next step.
    ///
    /// # Errors
    ///
    /// [`GuardError::Diverged`] after too many non-finite steps in a row, unless the fallback is
    /// `off`. With `strict`: [`GuardError::Offence`] for the first GEMMs that offend and
    /// [`GuardError::NonFiniteStep`] for a non-finite step without one.
    pub fn decide(&mut self, step: u64) -> Result<Vec<GuardEvent>, GuardError> {
        let events_before = self.events.len();
        let dropped_before = self.events_dropped;
        let mut fresh = Vec::new();
        let verdict = core::mem::replace(&mut self.verdict, LossVerdict::Calm);
        let is_nonfinite = core::mem::take(&mut self.is_nonfinite);

        let outcome = self.run_event(step, &verdict, is_nonfinite, &mut fresh).and_then(|()| {
            let spiked = matches!(verdict, LossVerdict::Spike { .. });
            let unjudged = is_nonfinite || matches!(verdict, LossVerdict::NonFinite { .. });
            let mut departed = if spiked && !unjudged { self.departed() } else { Vec::new() };
            for index in 0..self.gemms.len() {
                let Evidence { is_first_nonfinite, nonfinite: count, .. } =
                    self.gemms[index].evidence;
                let offence = if is_first_nonfinite {
                    Some(format!("{count} NaN or infinite values were to be quantized"))
                } else if unjudged {
                    None
                } else {
                    let departed = departed.get_mut(index).and_then(Option::take);
                    self.offence(index, spiked, departed)
                };
                self.move_gemm(step, index, offence, &mut fresh)?;
            }
            Ok(())
        });
        for gemm in &mut self.gemms {
            gemm.evidence = Evidence::default();
        }
        for event in &fresh {
            if self.events.len() < EVENTS_MAX {
                self.events.push(event.clone());
            } else {
                self.events_dropped += 1;
            }
        }
        debug_assert_eq!(
            (self.events.len() - events_before) as u64 + self.events_dropped - dropped_before,
            fresh.len() as u64
        );
        outcome.map(|()| fresh)
    }

    /// Reports the verdict about the loss for the run as a whole.
    fn run_event(
        &mut self,
        step: u64,
        verdict: &LossVerdict,
        is_nonfinite: bool,
        fresh: &mut Vec<GuardEvent>,
    ) -> Result<(), GuardError> {
        let (kind, reason) = match verdict {
            LossVerdict::Calm => {
                self.nonfinite_steps = 0;
                return Ok(());
            }
            LossVerdict::Spike { loss, median, limit } => {
                self.nonfinite_steps = 0;
                let (loss, median, limit) = (*loss, *median, *limit);
                let kind = GuardEventKind::LossSpike { loss, median, limit };
                (kind, format!("loss {loss:.4} is above {limit:.4}; recent median {median:.4}"))
            }
            LossVerdict::NonFinite { reason } => {
                self.nonfinite_steps += 1;
                (GuardEventKind::NonFiniteStep, reason.clone())
            }
        };
        fresh.push(GuardEvent { step, gemm: String::new(), kind, reason: reason.clone() });
        if kind != GuardEventKind::NonFiniteStep || self.fallback == Fallback::Off {
            return Ok(());
        }
        let count = self.nonfinite_steps;
        if count >= self.config.nonfinite_steps_max {
            return Err(GuardError::Diverged { step, count, reason });
        }
        if self.fallback == Fallback::Strict && !is_nonfinite {
            return Err(GuardError::NonFiniteStep { step, reason });
        }
        Ok(())
    }

    /// The departure of each GEMM in a step whose loss spiked; `None` if a GEMM departs little.
    fn departed(&self) -> Vec<Option<Departure>> {
        let found: Vec<_> = self.gemms.iter().map(Gemm::departure).collect();
        let ratios = found.iter().flatten().map(|departure| departure.ratio);
        let most = ratios.fold(0.0, f32::max);
        let least = self.config.spike_departure_min;
        // In binades, at least half of the largest departure.
        let stands_out = |it: &Departure| it.ratio >= least && it.ratio * it.ratio >= most;
        found.into_iter().map(|departure| departure.filter(stands_out)).collect()
    }

    /// Returns why the GEMMs offend, if they do: a threshold was crossed, or the departure is large
    /// in a step whose loss spiked.
    fn offence(
        &mut self,
        index: usize,
        spiked: bool,
        departed: Option<Departure>,
    ) -> Option<String> {
        let gemm = &mut self.gemms[index];
        let strikes_max = self.config.strikes_max;
        let product = gemm.evidence.product;
        match gemm.judge(&self.config) {
            _ if let Some(product) = product => Some(product.reason()),
            Some(reason) if gemm.strikes >= strikes_max => {
                Some(format!("{reason}, {} steps in a row", gemm.strikes))
            }
            Some(reason) if spiked => Some(format!("{reason}, in a step whose loss spiked")),
            _ => Some(format!("{}, in a step whose loss spiked", departed?.reason())),
        }
    }

    /// One transition of the state machine of a weight's GEMMs.
    fn move_gemm(
        &mut self,
        step: u64,
        index: usize,
        offence: Option<String>,
        fresh: &mut Vec<GuardEvent>,
    ) -> Result<(), GuardError> {
        let gemm = &mut self.gemms[index];
        let name = gemm.name.clone();
        let mut record = |kind, reason| {
            fresh.push(GuardEvent { step, gemm: name.clone(), kind, reason });
        };
        if let Some(reason) = offence
            && gemm.is_low()
        {
            match self.fallback {
                Fallback::Strict => {
                    record(GuardEventKind::Offence, reason.clone());
                    return Err(GuardError::Offence { step, gemm: name, reason });
                }
                Fallback::Off => {
                    gemm.strikes = 0;
                    record(GuardEventKind::Offence, reason);
                }
                Fallback::Safe => {
                    let to_mxfp8 = !self.flops.is_empty();
                    let until_step = gemm.fall_back(step, &self.config, to_mxfp8);
                    let fallbacks = gemm.fallbacks;
                    let kind = match gemm.state {
                        GemmState::Mxfp8 { .. } => {
                            GuardEventKind::ToMxfp8 { until_step, fallbacks }
                        }
                        _ => GuardEventKind::ToBf16 { until_step, fallbacks },
                    };
                    record(kind, reason.clone());
                    return self.check_moved(step, name, reason);
                }
            }
            return Ok(());
        }
        match gemm.state {
            GemmState::Bf16 { until_step: Some(over) }
            | GemmState::Mxfp8 { until_step: Some(over) }
                if step >= over =>
            {
                let until_step = step.saturating_add(self.config.probation_steps);
                gemm.state = GemmState::Probation { until_step };
                let kind = GuardEventKind::BackToLow { probation_until_step: until_step };
                record(kind, "the time of the fallback is over".to_owned());
            }
            GemmState::Probation { until_step } if step >= until_step => {
                gemm.state = GemmState::Low;
                gemm.backoff_steps = self.config.backoff_steps;
                let reason = "no offence during probation".to_owned();
                record(GuardEventKind::ProbationPassed, reason);
            }
            _ => {}
        }
        Ok(())
    }

    /// Starts a repair after a loss spike: until and with `step`, forward GEMMs run in BF16.
    pub fn repair_until(&mut self, step: u64) {
        self.repair_until = Some(step);
    }

    /// Whether a repair after a loss spike includes `step`.
    #[must_use]
    pub fn is_repairing(&self, step: u64) -> bool {
        self.repair_until.is_some_and(|last| step <= last)
    }

    /// Checks the share of the FLOPs outside the policy's format, after GEMMs have moved.
    fn check_moved(&self, step: u64, gemm: String, reason: String) -> Result<(), GuardError> {
        let all: u64 = self.flops.iter().sum();
        let is_away =
            |gemm: &Gemm| matches!(gemm.state, GemmState::Bf16 { .. } | GemmState::Mxfp8 { .. });
        let away = self.gemms.iter().zip(&self.flops).filter(|(gemm, _)| is_away(gemm));
        let away: u64 = away.map(|(_, flops)| flops).sum();
        let (share, limit) = (away as f64 / all.max(1) as f64, self.config.moved_flops_max);
        if share <= limit {
            return Ok(());
        }
        let [share_percent, limit_percent] = [share, limit].map(|it| (it * 100.0) as u32);
        Err(GuardError::TooManyMoved { step, gemm, reason, share_percent, limit_percent })
    }

    /// Weights whose GEMMs are not in the policy's format, ascending, with their formats.
    #[must_use]
    pub fn moved(&self) -> Vec<(usize, Format)> {
        let format = |gemm: &Gemm| match gemm.state {
            GemmState::Bf16 { .. } => Some(Format::Bf16),
            GemmState::Mxfp8 { .. } => Some(Format::MXFP8),
            _ => None,
        };
        let moved = self.gemms.iter().enumerate();
        moved.filter_map(|(index, gemm)| Some((index, format(gemm)?))).collect()
    }

    /// Indices of the weights whose GEMMs are to be computed in BF16, ascending.
    #[must_use]
    pub fn in_fallback(&self) -> Vec<usize> {
        let low = |&index: &usize| !self.gemms[index].is_low();
        (0..self.gemms.len()).filter(low).collect()
    }

    /// Events of the run, oldest first; beyond 10,000 events are only counted, see
    /// [`Guards::events_dropped`].
    #[must_use]
    pub fn events(&self) -> &[GuardEvent] {
        &self.events
    }

    /// Number of events that are not in [`Guards::events`].
    #[must_use]
    pub fn events_dropped(&self) -> u64 {
        self.events_dropped
    }

    /// Names of the weights, in index order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.gemms.iter().map(|gemm| gemm.name.as_str())
    }

    /// The configuration in use.
    #[must_use]
    pub fn config(&self) -> &GuardConfig {
        &self.config
    }

    /// The state of `gemm`; `None` for an unknown index.
    #[must_use]
    pub fn state(&self, gemm: usize) -> Option<GemmState> {
        self.gemms.get(gemm).map(|gemm| gemm.state)
    }

    /// Counters of `gemm` over the whole run; `None` for an unknown index.
    #[must_use]
    pub fn counters(&self, gemm: usize) -> Option<&QuantStats> {
        self.gemms.get(gemm).map(|gemm| &gemm.counters)
    }

    /// The largest magnitudes of `gemm` in each of the last steps, oldest first; empty for an
    /// unknown index.
    pub fn amax_history(&self, gemm: usize) -> impl Iterator<Item = f32> + '_ {
        self.gemms.get(gemm).into_iter().flat_map(|gemm| gemm.amax_history.iter())
    }
}

#[cfg(test)]
mod limit_tests;
#[cfg(test)]
mod tests;
