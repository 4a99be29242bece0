//! Signal-to-error ratios of a weight's products: a low ratio is an offence.
//!
//! The ratio is the sum of squares of a product over the sum of squares of its error, so that a
//! factor of 10 is 10 dB. The ratio of a single tensor says nothing: it is about 100 for any data.

use alloc::format;
use alloc::string::String;

use serde::{Deserialize, Serialize};

use super::GuardConfig;
use super::window::Window;
use crate::operand::GemmKind;

/// Measurements of history kept for each GEMM.
const HISTORY: usize = 16;
/// Measurements before a ratio is compared with their median.
const HISTORY_MIN: usize = 4;
/// A ratio that four-bit formats have of any data, over the smallest ratio of the configuration.
const USUAL: f32 = 4.0;
/// A ratio without an error.
const EXACT: f32 = 1e12;

/// The GEMMs, in the order of [`Products`]' fields.
const KINDS: [GemmKind; 3] = [GemmKind::Fprop, GemmKind::Dgrad, GemmKind::Wgrad];

/// A ratio that is too low.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct LowProduct {
    kind: GemmKind,
    ratio: f32,
    /// The median of the GEMM, if the ratio is far below it.
    median: Option<f32>,
    least: f32,
}

impl LowProduct {
    /// Description for a report.
    pub(super) fn reason(&self) -> String {
        let Self { kind, ratio, least, .. } = self;
        let (kind, signal) = (kind.name(), format!("signal of {ratio:.1} times the error"));
        match self.median {
            None => format!("{kind} has a {signal}, less than {least}"),
            Some(median) => {
                format!("{kind} has a {signal}, below 1/{least} of its median {median:.1}")
            }
        }
    }
}

/// Ratios of the three GEMMs of a weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Products {
    history: [Window; 3],
    /// Consecutive measurements that were too low.
    strikes: [u32; 3],
}

impl Default for Products {
    fn default() -> Self {
        Self { history: [(); 3].map(|()| Window::new(HISTORY)), strikes: [0; 3] }
    }
}

impl Products {
    /// Records a measurement; returns an offence.
    pub(super) fn observe(
        &mut self,
        kind: GemmKind,
        (signal, error): (f64, f64),
        config: &GuardConfig,
    ) -> Option<LowProduct> {
        let ratio = (signal / error.max(signal / f64::from(EXACT))) as f32;
        // A product of zeros has no ratio; non-finite operands are an offence of their own.
        if !(signal > 0.0 && ratio.is_finite()) {
            return None;
        }
        let index = KINDS.iter().position(|&it| it == kind)?;
        let (history, strikes) = (&mut self.history[index], &mut self.strikes[index]);
        let median = history.median().filter(|_| history.len() >= HISTORY_MIN);
        let (least, drop) = (config.product_ratio_min, config.product_drop_max);
        let low = |median, least| LowProduct { kind, ratio, median, least };
        let is_far_below = |median: &f32| ratio * drop < *median && ratio < USUAL * least;
        let found = match median.filter(is_far_below) {
            _ if ratio < least => Some(low(None, least)),
            Some(median) => Some(low(Some(median), drop)),
            None => None,
        };
        history.push(ratio);
        *strikes = if found.is_some() { *strikes + 1 } else { 0 };
        found.filter(|_| *strikes >= config.product_strikes_max)
    }
}
