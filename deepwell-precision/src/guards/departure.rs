//! Departure of a step from the history of one weight's GEMMs. A loss spike is attributed to the
//! GEMMs with the largest departures.
//!
//! Each measure is divided by its median over the last steps, so that measures and GEMMs of any
//! size are comparable. The departure is the largest of these ratios.

use alloc::format;
use alloc::string::String;

use serde::{Deserialize, Serialize};

use super::gemm::Evidence;
use super::window::Window;

/// Added to shares before comparison: less than a thousandth of a tensor is noise.
const SHARE_NOISE: f32 = 1.0 / 1024.0;

/// The measures of the last steps, except amax, which [`super::gemm::Gemm`] keeps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct History {
    backward_amax: Window,
    underflow: Window,
    saturation: Window,
    scale_clamp: Window,
}

impl Default for History {
    fn default() -> History {
        let [backward_amax, underflow, saturation, scale_clamp] = [(); 4].map(|()| Window::new(1));
        History { backward_amax, underflow, saturation, scale_clamp }
    }
}

/// The measure with the largest departure.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Departure {
    /// Ratio to the median of the last steps.
    pub(super) ratio: f32,
    measure: &'static str,
    now: f32,
    median: f32,
    is_share: bool,
}

impl Departure {
    /// Description for a report.
    pub(super) fn reason(&self) -> String {
        let Departure { measure, now, median, .. } = self;
        match self.is_share {
            true => {
                let [now, median] = [now, median].map(|share| share * 100.0);
                format!("{measure} rose from {median:.3} % to {now:.3} %")
            }
            false => format!("{measure} rose from {median:e} to {now:e}"),
        }
    }
}

impl History {
    /// Appends a step to the last `len` steps.
    pub(super) fn push(&mut self, evidence: &Evidence, len: usize) {
        let History { backward_amax, underflow, saturation, scale_clamp } = self;
        for (window, value) in [
            (backward_amax, evidence.backward_amax),
            (underflow, evidence.largest_underflow()),
            (saturation, evidence.saturation_fraction as f32),
            (scale_clamp, evidence.scale_clamp_fraction as f32),
        ] {
            window.reserve(len);
            window.push(value);
        }
    }

    /// Departure of a step from its history, by the largest ratio; `None` until the history is
    /// full.
    pub(super) fn departure(&self, evidence: &Evidence, amax: &Window) -> Option<Departure> {
        let History { backward_amax, underflow, saturation, scale_clamp } = self;
        let rows = [
            ("amax", amax, evidence.amax, false),
            ("amax of the backward pass", backward_amax, evidence.backward_amax, false),
            ("underflow to zero", underflow, evidence.largest_underflow(), true),
            ("saturation", saturation, evidence.saturation_fraction as f32, true),
            ("clamped scales", scale_clamp, evidence.scale_clamp_fraction as f32, true),
        ];
        // State saved by an earlier version has one full history and four empty ones.
        if !amax.is_full() || amax.len() != underflow.len() {
            return None;
        }
        let of_row = |(measure, window, now, is_share): (&'static str, &Window, f32, bool)| {
            let median = window.median()?;
            let noise = if is_share { SHARE_NOISE } else { 0.0 };
            let ratio = (now + noise) / (median + noise);
            ratio.is_finite().then_some(Departure { ratio, measure, now, median, is_share })
        };
        // The first of equal ratios.
        rows.into_iter().filter_map(of_row).reduce(|a, b| if b.ratio > a.ratio { b } else { a })
    }
}
