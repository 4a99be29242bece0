//! The numbers by which the guards judge, each with its reason.

use serde::{Deserialize, Serialize};

/// Thresholds and times of the guards. Steps are optimizer steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GuardConfig {
    /// Underflowed share of one tensor, 0 to 1, above which a step counts against its
    /// GEMMs.
    ///
    /// Default 0.5. An element underflows in E4M3 when it is about 2^18 times smaller than the
    /// largest of its block, which one in 10^5 normally distributed elements is. Gradients are not
    /// normal: small models that held BF16's loss were seen to lose 5 to 6 % of a tensor so. When
    /// half of a tensor vanishes, it is not what block scaling is made for.
    pub underflow_fraction_max: f64,
    /// Saturated share of one tensor, 0 to 1, above which a step counts against its
    /// GEMMs. Only the OCP floor rule saturates at all.
    ///
    /// Default 0.03. Under the floor rule a fifth (log2(2 / 1.75) = 19 %) of all blocks clip
    /// their largest element, that is 0.6 % of the elements, by design; this is five times that.
    pub saturation_fraction_max: f64,
    /// Share of the blocks of one tensor, counted as elements / 32, whose scale was clamped to
    /// 2^-127, 0 to 1, above which a step counts against its
    /// GEMMs.
    ///
    /// Default 0.01. A clamp means magnitudes below 1e-36, which in training are either exact
    /// zeros (never a clamp) or a sign of vanished gradients.
    pub scale_clamp_fraction_max: f64,
    /// Largest ratio of an operand's amax to the median of the history of its GEMMs before it
    /// counts against them. Judged once the history is full.
    ///
    /// Default 65536. Block scales follow any amax, so growth is harmless in itself; sixteen
    /// binades within one history are an outlier that drowns its block.
    pub amax_growth_max: f32,
    /// Steps of amax history kept for the GEMMs of each weight.
    ///
    /// Default 16: long enough for a stable median, small enough to hold for thousands of weights.
    pub amax_history_len: usize,
    /// Steps in a row that must count against GEMMs before they offend. Non-finite values offend at
    /// once.
    ///
    /// Default 3: one odd batch does not recompile a model.
    pub strikes_max: u32,
    /// Steps that GEMMs stay in BF16 the first time.
    ///
    /// Default 200: some tens of times what compiling again costs.
    pub backoff_steps: u64,
    /// Steps after a return during which an offence counts as a relapse. GEMMs whose probation
    /// ends without one start again from `backoff_steps`.
    ///
    /// Default 100.
    pub probation_steps: u64,
    /// How often the GEMMs of a weight may fall back in a run; the last time they stay in BF16 for
    /// good.
    ///
    /// Default 3: with doubling, 200 + 400 steps of trying before that.
    pub fallbacks_max: u32,
    /// Losses over which the median and the median absolute deviation are taken.
    ///
    /// Default 64.
    pub loss_window: usize,
    /// Losses seen before spikes are looked for, at most `loss_window`.
    ///
    /// Default 32: the first losses of a run fall too quickly to have a typical value.
    pub loss_warmup: usize,
    /// A loss spikes when it exceeds the median by this many standard deviations, estimated as
    /// 1.4826 times the median absolute deviation.
    ///
    /// Default 8: with 10^6 steps of normally distributed noise none is expected.
    pub spike_deviations: f32,
    /// A loss also has to exceed the median by this share of it to spike.
    ///
    /// Default 0.1, so that a loss with next to no noise does not spike over nothing.
    pub spike_fraction_min: f32,
    /// How far a measure of GEMMs has to be above its median, as a factor, for a loss spike to be
    /// laid to them. Judged once the history is full.
    ///
    /// Default 2. Measures change by a few percent from step to step; a spike without
    /// any that doubled has another cause, such as an odd batch.
    #[serde(skip_serializing_if = "is_default_departure")]
    pub spike_departure_min: f32,
    /// Steps in a row with a non-finite loss or gradient norm after which the run is given up.
    /// Each of them is skipped, so that weights stay finite meanwhile.
    ///
    /// Default 8: GEMMs at fault are in BF16 after the first, so later ones have another cause.
    pub nonfinite_steps_max: u32,
}

/// Whether it need not be written down: records of runs from before it was there have it so.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_default_departure(factor: &f32) -> bool {
    *factor == GuardConfig::default().spike_departure_min
}

impl Default for GuardConfig {
    fn default() -> Self {
        Self {
            underflow_fraction_max: 0.5,
            saturation_fraction_max: 0.03,
            scale_clamp_fraction_max: 0.01,
            amax_growth_max: 65536.0,
            amax_history_len: 16,
            strikes_max: 3,
            backoff_steps: 200,
            probation_steps: 100,
            fallbacks_max: 3,
            loss_window: 64,
            loss_warmup: 32,
            spike_deviations: 8.0,
            spike_fraction_min: 0.1,
            spike_departure_min: 2.0,
            nonfinite_steps_max: 8,
        }
    }
}
