//! Guards over a low-precision run: who underflows, saturates or produces NaN, when the loss
//! spikes, and which layers go to BF16 for it and come back.
//!
//! During a step the trainer reports what each quantization counted
//! ([`Guards::observe_tensor`], in execution order) and, at its end, the loss
//! ([`Guards::observe_loss`]). At the boundary [`Guards::decide`] says what changes before the next
//! step. All state is plain data: a checkpoint that holds it continues with the same decisions.
//!
//! - A step counts against a layer when one of its tensors crosses a threshold of
//!   [`GuardConfig`]; several such steps in a row are an *offence*. A loss spike makes every layer
//!   with a step against it offend at once.
//! - A loss spike also makes the layers offend that stand out from their own history most, whether
//!   a threshold was crossed or not. The measures are amax, amax of the backward pass, and the
//!   shares of underflow, saturation and clamped scales, each over its median in the last
//!   [`GuardConfig::amax_history_len`] steps. A layer's departure is the largest of these ratios.
//!   Layers offend whose departure is at least [`GuardConfig::spike_departure_min`] and at least
//!   the square root of the largest one. Where no layer departs so far, none moves.
//! - Non-finite values are an offence of the first layer that reported them in the step, and of no
//!   other: they spread through everything computed afterwards. Nothing else is judged in such a
//!   step.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::{Fallback, QuantStats};

mod config;
mod departure;
mod event;
mod layer;
mod loss;
mod window;

pub use config::GuardConfig;
use departure::Departure;
pub use event::{GuardError, GuardEvent, GuardEventKind};
pub use layer::LayerState;
use layer::{Evidence, Layer};
use loss::LossVerdict;
use window::Window;

/// Events kept; a run in which more happen has been told enough.
const EVENTS_MAX: usize = 10_000;

/// The guards of one run. See the module documentation.
///
/// ```
/// use deepwell_precision::{Fallback, GuardConfig, Guards, QuantStats};
/// let mut guards = Guards::new(GuardConfig::default(), vec!["l0.up".into()], Fallback::Safe);
/// let bad = QuantStats { amax: 1.0, elements: 100, underflows: 60, ..QuantStats::default() };
/// for step in 1..=3 {
///     assert!(guards.in_fallback().is_empty());
///     guards.observe_tensor(step, 0, &bad);
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
    layers: Vec<Layer>,
    losses: Window,
    verdict: LossVerdict,
    /// The first layer that reported non-finite values in this step.
    nonfinite_layer: Option<usize>,
    nonfinite_steps: u32,
    events: Vec<GuardEvent>,
    events_dropped: u64,
}

impl Guards {
    /// Guards over the layers `names`, which are referred to by index from here on.
    #[must_use]
    pub fn new(config: GuardConfig, names: Vec<String>, fallback: Fallback) -> Self {
        Self {
            layers: names.into_iter().map(|name| Layer::new(name, &config)).collect(),
            losses: Window::new(config.loss_window),
            config,
            fallback,
            verdict: LossVerdict::Calm,
            nonfinite_layer: None,
            nonfinite_steps: 0,
            events: Vec::new(),
            events_dropped: 0,
        }
    }

    /// Takes note of what quantizing one tensor of `layer` counted. Call it in execution order: the
    /// first layer with non-finite values is the one held responsible. An index for which
    /// [`Guards::new`] got no name is ignored. Does not allocate.
    pub fn observe_tensor(&mut self, step: u64, layer: usize, stats: &QuantStats) {
        self.observe(step, layer, stats, false);
    }

    /// [`Guards::observe_tensor`] of a tensor that the backward pass quantizes: its amax has a
    /// history of its own, as gradients are smaller than activations.
    pub fn observe_backward_tensor(&mut self, step: u64, layer: usize, stats: &QuantStats) {
        self.observe(step, layer, stats, true);
    }

    fn observe(&mut self, _step: u64, layer: usize, stats: &QuantStats, is_backward: bool) {
        let Some(guarded) = self.layers.get_mut(layer) else { return };
        guarded.observe(stats, is_backward);
        if stats.nonfinite > 0 && self.nonfinite_layer.is_none() {
            self.nonfinite_layer = Some(layer);
        }
    }

    /// Takes note of the loss of the step and of the global gradient norm before clipping.
    pub fn observe_loss(&mut self, _step: u64, loss: f32, grad_norm: f32) {
        self.verdict = loss::judge(&mut self.losses, &self.config, loss, grad_norm);
    }

    /// Called at the boundary after `step`: the events of this step, [`GuardEventKind::ToBf16`] and
    /// [`GuardEventKind::BackToLow`] being changes to make before the next.
    ///
    /// # Errors
    ///
    /// [`GuardError::Diverged`] after too many non-finite steps in a row, unless the fallback is
    /// `off`. With `strict`: [`GuardError::Offence`] for the first layer that offends and
    /// [`GuardError::NonFiniteStep`] for a non-finite step without one.
    pub fn decide(&mut self, step: u64) -> Result<Vec<GuardEvent>, GuardError> {
        let events_before = self.events.len();
        let dropped_before = self.events_dropped;
        let mut fresh = Vec::new();
        let verdict = core::mem::replace(&mut self.verdict, LossVerdict::Calm);
        let nonfinite_layer = self.nonfinite_layer.take();

        let outcome = self.run_event(step, &verdict, nonfinite_layer, &mut fresh).and_then(|()| {
            let spiked = matches!(verdict, LossVerdict::Spike { .. });
            let unjudged =
                nonfinite_layer.is_some() || matches!(verdict, LossVerdict::NonFinite { .. });
            let mut departed = if spiked && !unjudged { self.departed() } else { Vec::new() };
            for index in 0..self.layers.len() {
                let offence = if nonfinite_layer == Some(index) {
                    let count = self.layers[index].evidence.nonfinite;
                    Some(format!("{count} NaN or infinite values were to be quantized"))
                } else if unjudged {
                    None
                } else {
                    let departed = departed.get_mut(index).and_then(Option::take);
                    self.offence(index, spiked, departed)
                };
                self.move_layer(step, index, offence, &mut fresh)?;
            }
            Ok(())
        });
        for layer in &mut self.layers {
            layer.evidence = Evidence::default();
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

    /// Reports what the loss said about the run as a whole.
    fn run_event(
        &mut self,
        step: u64,
        verdict: &LossVerdict,
        nonfinite_layer: Option<usize>,
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
        fresh.push(GuardEvent { step, layer: String::new(), kind, reason: reason.clone() });
        if kind != GuardEventKind::NonFiniteStep || self.fallback == Fallback::Off {
            return Ok(());
        }
        let count = self.nonfinite_steps;
        if count >= self.config.nonfinite_steps_max {
            return Err(GuardError::Diverged { step, count, reason });
        }
        if self.fallback == Fallback::Strict && nonfinite_layer.is_none() {
            return Err(GuardError::NonFiniteStep { step, reason });
        }
        Ok(())
    }

    /// Of each layer, how it stands out in a step whose loss spiked, if it is among those that do
    /// most.
    fn departed(&self) -> Vec<Option<Departure>> {
        let found: Vec<_> = self.layers.iter().map(Layer::departure).collect();
        let ratios = found.iter().flatten().map(|departure| departure.ratio);
        let most = ratios.fold(0.0, f32::max);
        let least = self.config.spike_departure_min;
        // In binades, at least half of the largest.
        let stands_out = |it: &Departure| it.ratio >= least && it.ratio * it.ratio >= most;
        found.into_iter().map(|departure| departure.filter(stands_out)).collect()
    }

    /// Whether the layer offends, by its thresholds or as it stands out in a step whose loss
    /// spiked, and why.
    fn offence(
        &mut self,
        index: usize,
        spiked: bool,
        departed: Option<Departure>,
    ) -> Option<String> {
        let layer = &mut self.layers[index];
        let strikes_max = self.config.strikes_max;
        match layer.judge(&self.config) {
            Some(reason) if layer.strikes >= strikes_max => {
                Some(format!("{reason}, {} steps in a row", layer.strikes))
            }
            Some(reason) if spiked => Some(format!("{reason}, in a step whose loss spiked")),
            _ => Some(format!("{}, in a step whose loss spiked", departed?.reason())),
        }
    }

    /// One step of the state machine of a layer.
    fn move_layer(
        &mut self,
        step: u64,
        index: usize,
        offence: Option<String>,
        fresh: &mut Vec<GuardEvent>,
    ) -> Result<(), GuardError> {
        let layer = &mut self.layers[index];
        let name = layer.name.clone();
        let mut record = |kind, reason| {
            fresh.push(GuardEvent { step, layer: name.clone(), kind, reason });
        };
        if let Some(reason) = offence
            && layer.is_low()
        {
            match self.fallback {
                Fallback::Strict => {
                    record(GuardEventKind::Offence, reason.clone());
                    return Err(GuardError::Offence { step, layer: name, reason });
                }
                Fallback::Off => {
                    layer.strikes = 0;
                    record(GuardEventKind::Offence, reason);
                }
                Fallback::Safe => {
                    let until_step = layer.fall_back(step, &self.config);
                    let fallbacks = layer.fallbacks;
                    record(GuardEventKind::ToBf16 { until_step, fallbacks }, reason);
                }
            }
            return Ok(());
        }
        match layer.state {
            LayerState::Bf16 { until_step: Some(until_step) } if step >= until_step => {
                let until_step = step.saturating_add(self.config.probation_steps);
                layer.state = LayerState::Probation { until_step };
                let kind = GuardEventKind::BackToLow { probation_until_step: until_step };
                record(kind, "its time in `bf16` is over".to_owned());
            }
            LayerState::Probation { until_step } if step >= until_step => {
                layer.state = LayerState::Low;
                layer.backoff_steps = self.config.backoff_steps;
                let reason = "no offence during probation".to_owned();
                record(GuardEventKind::ProbationPassed, reason);
            }
            _ => {}
        }
        Ok(())
    }

    /// Indices of the layers that are to be computed in BF16, ascending.
    #[must_use]
    pub fn in_fallback(&self) -> Vec<usize> {
        let low = |&index: &usize| !self.layers[index].is_low();
        (0..self.layers.len()).filter(low).collect()
    }

    /// All events of the run, oldest first; after 10,000 only counted, see
    /// [`Guards::events_dropped`].
    #[must_use]
    pub fn events(&self) -> &[GuardEvent] {
        &self.events
    }

    /// Events beyond those that [`Guards::events`] keeps.
    #[must_use]
    pub fn events_dropped(&self) -> u64 {
        self.events_dropped
    }

    /// Names of the layers, in the order of their indices.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.layers.iter().map(|layer| layer.name.as_str())
    }

    /// The thresholds in force.
    #[must_use]
    pub fn config(&self) -> &GuardConfig {
        &self.config
    }

    /// Where `layer` stands; `None` for an index without a layer.
    #[must_use]
    pub fn state(&self, layer: usize) -> Option<LayerState> {
        self.layers.get(layer).map(|layer| layer.state)
    }

    /// What was counted for `layer` over the whole run; `None` for an index without a layer.
    #[must_use]
    pub fn counters(&self, layer: usize) -> Option<&QuantStats> {
        self.layers.get(layer).map(|layer| &layer.counters)
    }

    /// The largest magnitude of each of the last steps of `layer`, oldest first; empty for an index
    /// without a layer.
    pub fn amax_history(&self, layer: usize) -> impl Iterator<Item = f32> + '_ {
        self.layers.get(layer).into_iter().flat_map(|layer| layer.amax_history.iter())
    }
}

#[cfg(test)]
mod tests;
