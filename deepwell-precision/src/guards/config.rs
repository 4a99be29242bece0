//! Thresholds of the guards, with reasons.

use serde::{Deserialize, Serialize};

/// Thresholds and durations of the guards. Steps are optimizer steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GuardConfig {
    /// Threshold for the underflowed share of a tensor, 0 to 1; a step above the threshold counts
    /// against the tensor's GEMMs.
    ///
    /// Default 0.5. An element underflows in E4M3 when it is about 2^18 times smaller than the
    /// largest of its block; this happens to one in 10^5 normally distributed elements. Gradients
    /// are not normally distributed: small models that matched BF16's loss lost 5 to 6 % of a
    /// tensor this way. Block scaling is not suited to a tensor of which half underflows.
    pub underflow_fraction_max: f64,
    /// [`GuardConfig::underflow_fraction_max`] for elements of a small range: E2M1, and E2M3 of
    /// MXFP6.
    ///
    /// Default 0.9. An element of E2M1 underflows when it is 24 times smaller than the largest of
    /// its block: operands of llama-134m lose half of their elements this way in runs that follow
    /// BF16's loss (`benchmarks/nvfp4_h200_2026-11-30b.md`). One of E2M3 underflows at a 120th:
    /// normal numbers times log-normal ones of σ = 2 lose half of their elements. Under an outlier
    /// that dominates a tensor nearly all elements underflow. The error of products is the finer
    /// signal.
    #[serde(skip_serializing_if = "is_default_fp4_underflow")]
    pub fp4_underflow_fraction_max: f64,
    /// Threshold for the saturated share of a tensor, 0 to 1; a step above the threshold counts
    /// against the tensor's GEMMs. Only the OCP floor rule saturates at all.
    ///
    /// Default 0.03. Under the floor rule a fifth (log2(2 / 1.75) = 19 %) of all blocks clip their
    /// largest element by design, that is 0.6 % of the elements; the default is five times as much.
    pub saturation_fraction_max: f64,
    /// [`GuardConfig::saturation_fraction_max`] for MXFP4. NVFP4 saturates by design, so its
    /// saturations count for nothing.
    ///
    /// Default 0.125. E2M1 ends at 1.5 * 2^2, so that under the floor rule two fifths
    /// (log2(2 / 1.5) = 42 %) of all blocks clip, 2.5 % of normally distributed elements; the
    /// default is five times as much.
    #[serde(skip_serializing_if = "is_default_fp4_saturation")]
    pub fp4_saturation_fraction_max: f64,
    /// Threshold for the share of a tensor's blocks, counted as elements / 32, with a scale clamped
    /// to 2^-127, 0 to 1; a step above the threshold counts against the tensor's GEMMs.
    ///
    /// Default 0.01. A clamp means magnitudes below 1e-36. In training these are either exact zeros
    /// (never a clamp) or a sign of vanished gradients.
    pub scale_clamp_fraction_max: f64,
    /// Largest ratio of an operand's amax to the median amax of its GEMMs; a larger ratio counts
    /// against the GEMMs. Judged once the history is full.
    ///
    /// Default 65536. Block scales follow any amax, so growth is harmless in itself; sixteen
    /// binades within one history mean an outlier that dominates a block.
    pub amax_growth_max: f32,
    /// Steps of amax history kept for the GEMMs of each weight.
    ///
    /// Default 16: long enough for a stable median, small enough to hold for thousands of weights.
    pub amax_history_len: usize,
    /// Consecutive steps that must count against GEMMs before they offend. Non-finite values offend
    /// at once.
    ///
    /// Default 3: a single odd batch does not recompile a model.
    pub strikes_max: u32,
    /// Steps between two measurements of the error of quantized GEMMs, in formats with elements of
    /// four bits; 0 for none.
    ///
    /// Default 64. Other steps run another program and pay nothing.
    #[serde(skip_serializing_if = "is_default_interval")]
    pub product_every_steps: u64,
    /// Smallest ratio of signal to error of a product, in squares; a lower ratio counts against the
    /// GEMMs.
    ///
    /// Default 10 (10 dB). NVFP4 with stochastic rounding of gradients has a ratio of 30 to 40 for
    /// most data.
    #[serde(skip_serializing_if = "is_default_ratio")]
    pub product_ratio_min: f32,
    /// Largest factor between the median ratio of a GEMM and its ratio; a larger factor counts
    /// against the GEMMs if the ratio is also below four times `product_ratio_min`, which NVFP4 has
    /// of any data.
    ///
    /// Default 4 (6 dB). Ratios of wgrad follow the correlation of tokens: three healthy runs of
    /// llama-134m had 13 pairs of measurements in a row below 1/2.5 of the median, none of them
    /// below 1/4 and 40 (`benchmarks/nvfp4_h200_2026-11-30b.md`).
    #[serde(skip_serializing_if = "is_default_drop")]
    pub product_drop_max: f32,
    /// Consecutive measurements that must count against GEMMs before they offend.
    ///
    /// Default 2: within 128 steps.
    #[serde(skip_serializing_if = "is_default_product_strikes")]
    pub product_strikes_max: u32,
    /// Largest share of the linear FLOPs, 0 to 1, of GEMMs moved away from a format with fewer
    /// bits than MXFP8; with more, the run stops.
    ///
    /// Default 0.25: a model of which more offends does not suit the format.
    #[serde(skip_serializing_if = "is_default_moved")]
    pub moved_flops_max: f64,
    /// Steps in BF16 after the first fallback.
    ///
    /// Default 200: several tens of times the cost of recompilation.
    pub backoff_steps: u64,
    /// Steps after a return during which an offence counts as a relapse. GEMMs that pass probation
    /// start again from `backoff_steps`.
    ///
    /// Default 100.
    pub probation_steps: u64,
    /// Number of fallbacks of a weight's GEMMs in a run; after the last one the GEMMs stay in BF16.
    ///
    /// Default 3: with doubling, 200 + 400 steps in BF16 before the last fallback.
    pub fallbacks_max: u32,
    /// Number of losses for the median and the median absolute deviation.
    ///
    /// Default 64.
    pub loss_window: usize,
    /// Number of losses before spike detection starts, at most `loss_window`.
    ///
    /// Default 32: the first losses of a run fall too quickly to have a typical value.
    pub loss_warmup: usize,
    /// A loss spikes when it exceeds the median by this many standard deviations, estimated as
    /// 1.4826 times the median absolute deviation.
    ///
    /// Default 8: with 10^6 steps of normally distributed noise none is expected.
    pub spike_deviations: f32,
    /// A spike must also exceed the median by this fraction of the median.
    ///
    /// Default 0.1, so that tiny deviations of a nearly constant loss are not spikes.
    pub spike_fraction_min: f32,
    /// Smallest factor by which a measure of GEMMs must exceed its median for a loss spike to be
    /// attributed to the GEMMs. Judged once the history is full.
    ///
    /// Default 2. Measures change by a few percent from step to step. If none has doubled, the
    /// spike has another cause, such as an odd batch.
    #[serde(skip_serializing_if = "is_default_departure")]
    pub spike_departure_min: f32,
    /// Consecutive steps with a non-finite loss or gradient norm after which the run is aborted.
    /// Each of these steps is skipped, so that weights stay finite.
    ///
    /// Default 8: GEMMs at fault are in BF16 after the first, so later steps have another cause.
    pub nonfinite_steps_max: u32,
}

/// Whether to omit the field: earlier versions had no such field and used the default.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_default_departure(factor: &f32) -> bool {
    *factor == GuardConfig::default().spike_departure_min
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_default_fp4_underflow(share: &f64) -> bool {
    *share == GuardConfig::default().fp4_underflow_fraction_max
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_default_fp4_saturation(share: &f64) -> bool {
    *share == GuardConfig::default().fp4_saturation_fraction_max
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_default_moved(share: &f64) -> bool {
    *share == GuardConfig::default().moved_flops_max
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_default_interval(steps: &u64) -> bool {
    *steps == GuardConfig::default().product_every_steps
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_default_ratio(ratio: &f32) -> bool {
    *ratio == GuardConfig::default().product_ratio_min
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_default_drop(factor: &f32) -> bool {
    *factor == GuardConfig::default().product_drop_max
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_default_product_strikes(strikes: &u32) -> bool {
    *strikes == GuardConfig::default().product_strikes_max
}

impl Default for GuardConfig {
    fn default() -> Self {
        Self {
            underflow_fraction_max: 0.5,
            fp4_underflow_fraction_max: 0.9,
            saturation_fraction_max: 0.03,
            fp4_saturation_fraction_max: 0.125,
            scale_clamp_fraction_max: 0.01,
            amax_growth_max: 65536.0,
            amax_history_len: 16,
            strikes_max: 3,
            product_every_steps: 64,
            product_ratio_min: 10.0,
            product_drop_max: 4.0,
            product_strikes_max: 2,
            moved_flops_max: 0.25,
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
