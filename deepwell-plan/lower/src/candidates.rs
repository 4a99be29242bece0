//! The candidates of a plan: micro-batches, recomputation and streams.

use std::num::NonZeroU32;

use deepwell_ir::Recompute;

use crate::planned::Planned;
use crate::{Plan, PlanError};

/// The candidates of a request.
pub(super) struct Candidates<'a> {
    /// The plan without batches and recomputation.
    pub(super) base: &'a Plan,
    /// Sequences per step on a rank.
    pub(super) rows: usize,
    /// Sizes of micro-batches, the largest first.
    pub(super) micro_batches: Vec<usize>,
    /// Lowers a candidate and predicts it.
    pub(super) attempt: &'a dyn Fn(Plan) -> Result<Attempt, PlanError>,
}

impl Candidates<'_> {
    /// Tries a rule of recomputation; returns whether a candidate fits.
    pub(super) fn try_rule(&self, rule: Recompute, best: &mut Best) -> Result<bool, PlanError> {
        let mut fits = false;
        // With several streams first: larger micro-batches that do not fit are retried with one
        // stream.
        let mut too_large = Vec::new();
        for &micro_batch in &self.micro_batches {
            let candidate = with_batches(self.base, micro_batch, self.rows / micro_batch, rule);
            match (self.attempt)(candidate.clone())? {
                Attempt::TooLarge(reason) => {
                    best.rejected.push(reason);
                    too_large.push(candidate);
                    continue;
                }
                Attempt::Fits(planned) => best.consider(*planned),
            }
            fits = true;
            if self.base.parallel.pipeline > 1 {
                continue;
            }
            // Smaller micro-batches only read the weights more often.
            let smaller = self.micro_batches.iter().filter(|&&size| size < micro_batch);
            best.rejected
                .extend(smaller.map(|size| {
                    format!("micro-batch {size}, recompute {rule}: a larger one fits")
                }));
            break;
        }
        for candidate in too_large {
            if self.base.arch == "cpu" || candidate.has_one_stream() {
                break;
            }
            match (self.attempt)(Plan { one_stream: true, ..candidate })? {
                Attempt::TooLarge(reason) => best.rejected.push(reason),
                Attempt::Fits(planned) => {
                    best.consider(*planned);
                    fits = true;
                    if self.base.parallel.pipeline == 1 {
                        break;
                    }
                }
            }
        }
        Ok(fits)
    }

    /// Tries rules from the least to the most work until one fits.
    pub(super) fn least_recompute(&self, layers: usize, best: &mut Best) -> Result<(), PlanError> {
        use Recompute::{Activations, Full, FullOf, None, Norms, Selective};
        // Norms or activation functions alone: the faster of the two, if both fit.
        for rules in [&[None][..], &[Norms, Activations], &[Selective]] {
            for &rule in rules {
                self.try_rule(rule, best)?;
            }
            if best.planned.is_some() {
                return Ok(());
            }
        }
        // The peak is lowest without the last layer, if only one micro-batch is in flight.
        let mut full_of = |layers: usize| match NonZeroU32::new(layers as u32) {
            Some(layers) => self.try_rule(FullOf(layers), best),
            Option::None => Ok(false),
        };
        let (mut too_few, mut enough) = (0, layers.saturating_sub(1));
        if !full_of(enough)? {
            self.try_rule(Full, best)?;
            return Ok(());
        }
        while enough - too_few > 1 {
            let middle = too_few + (enough - too_few) / 2;
            match full_of(middle)? {
                true => enough = middle,
                false => too_few = middle,
            }
        }
        Ok(())
    }
}

/// Result of a candidate.
pub(super) enum Attempt {
    Fits(Box<Planned>),
    /// Why the candidate does not fit.
    TooLarge(String),
}

/// A candidate's name in the list of rejected candidates.
pub(super) fn name_of(plan: &Plan) -> String {
    let Plan { micro_batch, micro_batches, recompute, .. } = plan;
    let streams = if plan.one_stream { ", one stream" } else { "" };
    format!("micro-batch {micro_batch} x {micro_batches}, recompute {recompute}{streams}")
}

/// The fastest candidate that fits.
#[derive(Default)]
pub(super) struct Best {
    pub(super) planned: Option<Planned>,
    pub(super) rejected: Vec<String>,
}

impl Best {
    fn consider(&mut self, planned: Planned) {
        let Some(best) = &self.planned else {
            self.planned = Some(planned);
            return;
        };
        let slower = if priced_s(best) <= priced_s(&planned) { &planned } else { best };
        let time_ms = priced_s(slower) * 1e3;
        self.rejected.push(format!("{}: at least {time_ms:.3} ms a step", name_of(&slower.plan)));
        if priced_s(best) > priced_s(&planned) {
            self.planned = Some(planned);
        }
    }
}

/// Predicted time of a step, for comparing candidates. A prediction does not include the idle SMs
/// filled by side streams: one stream was 1.8 % slower for llama-1.1b in MXFP8 and 14.7 % for
/// moe-1b-a300m (`benchmarks/train_h200_2026-11-27.md`).
fn priced_s(planned: &Planned) -> f64 {
    let has_experts = planned.prediction.ranks.iter().any(|rank| rank.expert_room.is_some());
    let price = match (planned.plan.one_stream, has_experts) {
        (false, _) => 1.0,
        (true, false) => 1.018,
        (true, true) => 1.147,
    };
    planned.prediction.time_s * price
}

/// Returns the plan with other batch sizes and recomputation.
fn with_batches(plan: &Plan, micro_batch: usize, micro_batches: usize, rule: Recompute) -> Plan {
    Plan { micro_batch, micro_batches, recompute: rule, ..plan.clone() }
}
