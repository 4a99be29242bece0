//! Detection of loss spikes by a robust measure: median and median absolute deviation of a window.

use alloc::format;
use alloc::string::String;

use serde::{Deserialize, Serialize};

use super::GuardConfig;
use super::window::Window;

/// Ratio of the standard deviation to the median absolute deviation of a normal distribution.
const DEVIATION_PER_MAD: f32 = 1.4826;

/// Verdict about one loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum LossVerdict {
    /// Nothing to report.
    Calm,
    /// Far above the window.
    Spike { loss: f32, median: f32, limit: f32 },
    /// Loss or gradient norm is not finite, in words, as JSON has no NaN.
    NonFinite { reason: String },
}

/// Judges `loss` by `window`, then appends it. Spikes are appended too: the median is robust
/// against them. If the loss has really moved, the window follows and the alarm ends by itself.
pub(super) fn judge(
    window: &mut Window,
    config: &GuardConfig,
    loss: f32,
    grad_norm: f32,
) -> LossVerdict {
    let verdict = match (loss.is_finite(), grad_norm.is_finite()) {
        (true, true) => spike(window, config, loss),
        (false, true) => LossVerdict::NonFinite { reason: format!("the loss is {loss}") },
        (true, false) => {
            LossVerdict::NonFinite { reason: format!("the gradient norm is {grad_norm}") }
        }
        (false, false) => LossVerdict::NonFinite {
            reason: format!("the loss is {loss} and the gradient norm {grad_norm}"),
        },
    };
    if loss.is_finite() {
        window.push(loss);
    }
    verdict
}

fn spike(window: &Window, config: &GuardConfig, loss: f32) -> LossVerdict {
    if window.len() < config.loss_warmup.clamp(1, config.loss_window.max(1)) {
        return LossVerdict::Calm;
    }
    let Some((median, deviation)) = window.median_and_deviation() else {
        return LossVerdict::Calm;
    };
    let noise = config.spike_deviations * DEVIATION_PER_MAD * deviation;
    let limit = median + noise.max(config.spike_fraction_min * median.abs());
    if loss > limit { LossVerdict::Spike { loss, median, limit } } else { LossVerdict::Calm }
}
