//! Router logits to chosen experts and gate weights, and the backward.
//!
//! The settings are those of the op, [`Route`], so this module computes exactly the op of a graph.
//!
//! Sources: softmax scores with top-k selection: Shazeer et al., arXiv 1701.06538, and Switch
//! Transformers (Fedus, Zoph, Shazeer), arXiv 2101.03961, eq. 1 and 2, with the softmax over all
//! experts. Gate weights divided by their sum over the chosen experts: Mixtral, arXiv 2401.04088,
//! section 2.1 (equal to a softmax over the chosen logits). Sigmoid scores, normalized gates and a
//! bias for selection only: DeepSeek-V3, arXiv 2412.19437, eq. 12 to 16; groups of experts by the
//! sum of their two best scores: section 2.1.2 of the same paper.

use deepwell_ir::ops::{Route, RouteGroups, RouteScore};

use crate::error::{check_finite, check_length, check_rows};
use crate::{MoeError, Real};

/// Added to the sum of scores before a division, so that scores that all underflow to zero give
/// gates of zero instead of NaN. Far below the last bit of any other sum.
pub(crate) const SUM_FLOOR: f64 = 1e-20;

/// Number of best scores that determine the quality of a group.
const SCORES_OF_A_GROUP: usize = 2;

/// The decision of a router for a batch of tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing<T> {
    settings: Route,
    scores: Vec<T>,
    experts: Vec<u32>,
    gates: Vec<T>,
}

/// Scores the experts of each token and chooses `top_k` of them.
///
/// `logits` is `[tokens, experts]` row-major. Selection uses the score plus `selection_bias`
/// `[experts]`, if enabled in the settings; the gate weights are the scores without the bias.
/// Choices of a token are sorted from best to worst, and ties go to the lower index. Scores are
/// compared in `f64`, before rounding to `T`.
///
/// # Errors
///
/// Inconsistent settings, wrong lengths, and logits or biases that are not finite.
pub fn route<T: Real>(
    settings: &Route,
    logits: &[T],
    selection_bias: Option<&[T]>,
) -> Result<Routing<T>, MoeError> {
    let mut router = TokenRouter::new(settings, selection_bias)?;
    let Route { experts, top_k, .. } = *settings;
    let tokens = check_rows("logits", logits, experts)?;
    let mut routing = Routing {
        settings: settings.clone(),
        scores: Vec::with_capacity(logits.len()),
        experts: vec![0; tokens * top_k],
        gates: Vec::with_capacity(tokens * top_k),
    };
    let mut gates = vec![0.0; top_k];
    let rows = logits.chunks_exact(experts).zip(routing.experts.chunks_exact_mut(top_k));
    for (row, chosen) in rows {
        router.choose(row, chosen, &mut gates);
        routing.gates.extend(gates.iter().map(|&gate| T::from_f64(gate)));
        routing.scores.extend(router.scores.iter().map(|&score| T::from_f64(score)));
    }
    Ok(routing)
}

/// Routes one token at a time, in `f64`, for use in kernels.
#[derive(Debug, Clone)]
pub struct TokenRouter {
    settings: Route,
    bias: Option<Vec<f64>>,
    scores: Vec<f64>,
    keys: Vec<f64>,
    is_open: Vec<bool>,
}

impl TokenRouter {
    /// Creates a router with a selection bias `[experts]`, if enabled in the settings.
    ///
    /// # Errors
    ///
    /// Inconsistent settings, or a bias that is missing, unexpected, of the wrong length or not
    /// finite.
    pub fn new<T: Real>(settings: &Route, selection_bias: Option<&[T]>) -> Result<Self, MoeError> {
        settings.check()?;
        let experts = settings.experts;
        if settings.selection_bias != selection_bias.is_some() {
            return Err(MoeError::SelectionBias { expected: settings.selection_bias });
        }
        if let Some(bias) = selection_bias {
            check_length("selection_bias", "[experts]", bias, experts)?;
            check_finite("selection_bias", bias, experts)?;
        }
        Ok(TokenRouter {
            settings: settings.clone(),
            bias: selection_bias.map(|bias| bias.iter().map(|b| b.to_f64()).collect()),
            scores: vec![0.0; experts],
            keys: vec![0.0; experts],
            is_open: vec![true; experts],
        })
    }

    /// Chooses the experts of a token and their gates.
    ///
    /// If a logit is NaN or infinite, gates become NaN (with softmax all of them), but the experts
    /// are still valid and distinct.
    ///
    /// # Panics
    ///
    /// If the length of a slice does not match the settings.
    pub fn choose<T: Real>(&mut self, logits: &[T], chosen: &mut [u32], gates: &mut [f64]) {
        let Route { experts, top_k, normalize, scaling, .. } = self.settings;
        assert_eq!((logits.len(), chosen.len(), gates.len()), (experts, top_k, top_k));
        score_row(self.settings.score, logits, &mut self.scores);
        self.keys.copy_from_slice(&self.scores);
        if let Some(bias) = &self.bias {
            self.keys.iter_mut().zip(bias).for_each(|(key, bias)| *key += bias);
        }
        self.open_groups();
        for chosen in chosen.iter_mut() {
            let best = best_of(&self.keys, &self.is_open);
            self.is_open[best] = false;
            *chosen = best as u32;
        }
        let score_of = |expert: u32| self.scores[expert as usize];
        let divisor = match normalize {
            true => chosen.iter().map(|&expert| score_of(expert)).sum::<f64>() + SUM_FLOOR,
            false => 1.0,
        };
        for (gate, &expert) in gates.iter_mut().zip(&*chosen) {
            *gate = scaling * score_of(expert) / divisor;
        }
    }

    /// Opens the candidate experts: all, or the experts of the best groups.
    fn open_groups(&mut self) {
        let Some(RouteGroups { count, chosen }) = self.settings.groups else {
            return self.is_open.fill(true);
        };
        let size = self.settings.experts / count;
        let quality = |keys: &[f64]| {
            let mut is_open = vec![true; keys.len()];
            let best = (0..SCORES_OF_A_GROUP.min(keys.len())).map(|_| {
                let best = best_of(keys, &is_open);
                is_open[best] = false;
                keys[best]
            });
            best.sum::<f64>()
        };
        let qualities: Vec<f64> = self.keys.chunks_exact(size).map(quality).collect();
        let mut is_candidate = vec![true; count];
        self.is_open.fill(false);
        for _ in 0..chosen {
            let group = best_of(&qualities, &is_candidate);
            is_candidate[group] = false;
            self.is_open[group * size..(group + 1) * size].fill(true);
        }
    }

    /// Computes the gradient of a token's logits from the gradient of its gates, for the given
    /// chosen experts. The selection itself has no gradient.
    ///
    /// # Panics
    ///
    /// If the length of a slice does not match the settings, or an expert is invalid.
    pub fn backward<L: Real, D: Real>(
        &mut self,
        logits: &[L],
        chosen: &[u32],
        dgates: &[D],
        dlogits: &mut [f64],
    ) {
        let Route { experts, top_k, .. } = self.settings;
        assert_eq!((logits.len(), dlogits.len()), (experts, experts));
        assert_eq!((chosen.len(), dgates.len()), (top_k, top_k));
        score_row(self.settings.score, logits, &mut self.scores);
        gradient_row(&self.settings, &self.scores, chosen, dgates, dlogits);
    }
}

/// Computes the scores of one token.
pub(crate) fn score_row<T: Real>(function: RouteScore, logits: &[T], scores: &mut [f64]) {
    match function {
        RouteScore::Softmax => {
            softmax(logits, scores);
        }
        RouteScore::Sigmoid => {
            for (score, logit) in scores.iter_mut().zip(logits) {
                *score = 1.0 / (1.0 + (-logit.to_f64()).exp());
            }
        }
    }
}

/// Computes the softmax of one row and returns the logsumexp of the row.
pub(crate) fn softmax<T: Real>(logits: &[T], probabilities: &mut [f64]) -> f64 {
    // Exponentials of differences from the maximum cannot overflow.
    let largest = logits.iter().map(|x| x.to_f64()).fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    for (probability, logit) in probabilities.iter_mut().zip(logits) {
        *probability = (logit.to_f64() - largest).exp();
        sum += *probability;
    }
    probabilities.iter_mut().for_each(|probability| *probability /= sum);
    largest + sum.ln()
}

/// Index of the largest open key, the lowest index among equal keys. At least one key is open.
fn best_of(keys: &[f64], is_open: &[bool]) -> usize {
    let mut best: Option<usize> = None;
    for (index, key) in keys.iter().enumerate() {
        // Only a larger key replaces an earlier key.
        if is_open[index] && best.is_none_or(|best| *key > keys[best]) {
            best = Some(index);
        }
    }
    best.unwrap_or(0)
}

impl<T: Real> Routing<T> {
    /// Settings of the routing.
    pub fn settings(&self) -> &Route {
        &self.settings
    }

    /// Number of tokens.
    pub fn token_count(&self) -> usize {
        self.scores.len() / self.settings.experts
    }

    /// Scores of all experts, `[tokens, experts]`.
    pub fn scores(&self) -> &[T] {
        &self.scores
    }

    /// Chosen experts, `[tokens, top_k]`, best first.
    pub fn experts(&self) -> &[u32] {
        &self.experts
    }

    /// Weights of the chosen experts' outputs, `[tokens, top_k]`.
    pub fn gates(&self) -> &[T] {
        &self.gates
    }

    /// Number of tokens that chose each expert, `[experts]`, before dropping.
    pub fn expert_counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.settings.experts];
        for &expert in &self.experts {
            counts[expert as usize] += 1;
        }
        counts
    }

    /// Computes the gradient of the logits, `[tokens, experts]`, from the gradient `dgates`
    /// `[tokens, top_k]` of the gate weights.
    ///
    /// The selection itself has no gradient. The entry of a dropped pair must be zero
    /// ([`Dispatch::zero_dropped`](crate::Dispatch::zero_dropped)), because the gate multiplies
    /// nothing.
    ///
    /// # Errors
    ///
    /// A wrong length, or a gradient that is not finite.
    pub fn backward(&self, dgates: &[T]) -> Result<Vec<T>, MoeError> {
        let Route { experts, top_k, .. } = self.settings;
        check_length("dgates", "[tokens, top_k]", dgates, self.gates.len())?;
        check_finite("dgates", dgates, top_k)?;

        let mut dlogits = Vec::with_capacity(self.scores.len());
        let mut row = vec![0.0; experts];
        let rows = self.scores.chunks_exact(experts).zip(self.experts.chunks_exact(top_k));
        for ((scores, chosen), dgates) in rows.zip(dgates.chunks_exact(top_k)) {
            gradient_row(&self.settings, scores, chosen, dgates, &mut row);
            dlogits.extend(row.iter().map(|&dlogit| T::from_f64(dlogit)));
        }
        Ok(dlogits)
    }
}

/// Computes the gradient of a token's logits from its scores and the gradient of its gates.
fn gradient_row<S: Real, T: Real>(
    settings: &Route,
    scores: &[S],
    chosen: &[u32],
    dgates: &[T],
    dlogits: &mut [f64],
) {
    let Route { normalize, scaling, score, .. } = *settings;
    let score_of = |expert: u32| scores[expert as usize].to_f64();
    let pairs = || chosen.iter().zip(dgates).map(|(&e, d)| (e, scaling * d.to_f64()));
    let (mut mean, mut divisor) = (0.0, 1.0);
    if normalize {
        // gate_j = s_j / D with D the sum of the chosen scores.
        divisor = chosen.iter().map(|&e| score_of(e)).sum::<f64>() + SUM_FLOOR;
        mean = pairs().map(|(e, d)| d * score_of(e)).sum::<f64>() / divisor;
    }
    let mut dscores = vec![0.0; scores.len()];
    for (expert, d) in pairs() {
        dscores[expert as usize] = (d - mean) / divisor;
    }
    logit_gradients(score, scores, &dscores, dlogits);
}

/// Computes one row of `dlogits` from a row of scores and the gradient of the scores.
pub(crate) fn logit_gradients<S: Real>(
    function: RouteScore,
    scores: &[S],
    dscores: &[f64],
    dlogits: &mut [f64],
) {
    let pairs = scores.iter().zip(dscores).map(|(s, d)| (s.to_f64(), d));
    let mean: f64 = match function {
        RouteScore::Softmax => pairs.clone().map(|(s, d)| s * d).sum(),
        RouteScore::Sigmoid => 0.0,
    };
    for (dlogit, (s, d)) in dlogits.iter_mut().zip(pairs) {
        *dlogit = match function {
            RouteScore::Softmax => s * (d - mean),
            RouteScore::Sigmoid => d * s * (1.0 - s),
        };
    }
}

#[cfg(test)]
mod tests;
