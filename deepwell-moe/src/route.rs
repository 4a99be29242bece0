//! From router logits to chosen experts and gate weights, and back.
//!
//! Sources: softmax scores with the top k kept: Shazeer et al., arXiv 1701.06538, and Switch
//! Transformers (Fedus, Zoph, Shazeer), arXiv 2101.03961, eq. 1 and 2, there with the softmax over
//! all experts. Gate weights divided by their sum over the chosen experts: Mixtral, arXiv
//! 2401.04088, section 2.1 (a softmax over the chosen logits is the same number). Sigmoid scores,
//! normalized gates and a bias that takes part in the choice alone: DeepSeek-V3, arXiv 2412.19437,
//! eq. 12 to 16.

use serde::{Deserialize, Serialize};

use crate::error::{check_finite, check_length, check_rows, check_top_k};
use crate::{MoeError, Real};

/// Added to the sum that scores are divided by, so that scores that all underflow to zero give
/// gates of zero and no NaN. Far below the last bit of any other sum.
pub(crate) const SUM_FLOOR: f64 = 1e-20;

/// How logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScoreFunction {
    /// `e^x` over the sum of `e^x` of all experts of the token.
    Softmax,
    /// `1 / (1 + e^-x)`, each expert by itself.
    Sigmoid,
}

/// The settings of a router.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterConfig {
    /// Experts to choose from.
    pub experts: usize,
    /// Experts that each token visits.
    pub top_k: usize,
    /// How logits become scores.
    pub score: ScoreFunction,
    /// Whether the gate weights of a token are divided by their sum.
    pub renormalize: bool,
    /// Factor on the gate weights, after renormalization; 1 for most models.
    pub scaling: f64,
}

impl RouterConfig {
    /// Checks the settings by themselves.
    ///
    /// # Errors
    ///
    /// No experts, `top_k` of zero or above the experts, or a `scaling` that is not finite.
    pub fn validate(&self) -> Result<(), MoeError> {
        check_top_k(self.top_k, self.experts)?;
        if !self.scaling.is_finite() {
            return Err(MoeError::Setting {
                name: "scaling",
                expected: "a finite number",
                value: self.scaling,
            });
        }
        Ok(())
    }
}

/// The decision of a router for a batch of tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing<T> {
    config: RouterConfig,
    scores: Vec<T>,
    experts: Vec<u32>,
    gates: Vec<T>,
}

/// Scores the experts of each token and chooses `top_k` of them.
///
/// `logits` is `[tokens, experts]` row-major. The choice is by the score plus `selection_bias`
/// `[experts]`, where given; the gate weights are the scores without it. Choices of a token are
/// ordered from the best down, and ties go to the lower index; the scores are compared in `f64`,
/// before rounding to `T`.
///
/// # Errors
///
/// What [`RouterConfig::validate`] says, lengths that do not fit, and logits or biases that are
/// not finite.
pub fn route<T: Real>(
    config: &RouterConfig,
    logits: &[T],
    selection_bias: Option<&[T]>,
) -> Result<Routing<T>, MoeError> {
    config.validate()?;
    let RouterConfig { experts, top_k, .. } = *config;
    let tokens = check_rows("logits", logits, experts)?;
    if let Some(bias) = selection_bias {
        check_length("selection_bias", "[experts]", bias, experts)?;
        check_finite("selection_bias", bias, experts)?;
    }

    let mut routing = Routing {
        config: *config,
        scores: Vec::with_capacity(logits.len()),
        experts: Vec::with_capacity(tokens * top_k),
        gates: Vec::with_capacity(tokens * top_k),
    };
    let (mut scores, mut keys) = (vec![0.0; experts], vec![0.0; experts]);
    let mut chosen = Vec::with_capacity(top_k);
    for row in logits.chunks_exact(experts) {
        score_row(config.score, row, &mut scores);
        keys.copy_from_slice(&scores);
        if let Some(bias) = selection_bias {
            keys.iter_mut().zip(bias).for_each(|(key, bias)| *key += bias.to_f64());
        }
        choose(&keys, top_k, &mut chosen);

        let divisor = match config.renormalize {
            true => chosen.iter().map(|&expert| scores[expert]).sum::<f64>() + SUM_FLOOR,
            false => 1.0,
        };
        for &expert in &chosen {
            routing.experts.push(expert as u32);
            routing.gates.push(T::from_f64(config.scaling * scores[expert] / divisor));
        }
        routing.scores.extend(scores.iter().map(|&score| T::from_f64(score)));
    }
    Ok(routing)
}

/// Writes the scores of one token.
fn score_row<T: Real>(function: ScoreFunction, logits: &[T], scores: &mut [f64]) {
    match function {
        ScoreFunction::Softmax => {
            softmax(logits, scores);
        }
        ScoreFunction::Sigmoid => {
            for (score, logit) in scores.iter_mut().zip(logits) {
                *score = 1.0 / (1.0 + (-logit.to_f64()).exp());
            }
        }
    }
}

/// Writes the softmax of one row and returns the logarithm of the sum of its exponentials.
pub(crate) fn softmax<T: Real>(logits: &[T], probabilities: &mut [f64]) -> f64 {
    // Exponentials of differences to the largest cannot overflow.
    let largest = logits.iter().map(|x| x.to_f64()).fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    for (probability, logit) in probabilities.iter_mut().zip(logits) {
        *probability = (logit.to_f64() - largest).exp();
        sum += *probability;
    }
    probabilities.iter_mut().for_each(|probability| *probability /= sum);
    largest + sum.ln()
}

/// The indices of the `top_k` largest keys, best first, the lower index first among equals.
fn choose(keys: &[f64], top_k: usize, chosen: &mut Vec<usize>) {
    chosen.clear();
    for _ in 0..top_k {
        let mut best: Option<usize> = None;
        for (index, key) in keys.iter().enumerate() {
            // Only a larger key replaces an earlier one.
            if best.is_none_or(|best| *key > keys[best]) && !chosen.contains(&index) {
                best = Some(index);
            }
        }
        chosen.extend(best);
    }
}

impl<T: Real> Routing<T> {
    /// The settings that the decision was made under.
    pub fn config(&self) -> &RouterConfig {
        &self.config
    }

    /// Tokens of the batch.
    pub fn token_count(&self) -> usize {
        self.scores.len() / self.config.experts
    }

    /// The scores of all experts, `[tokens, experts]`.
    pub fn scores(&self) -> &[T] {
        &self.scores
    }

    /// The chosen experts, `[tokens, top_k]`, best first.
    pub fn experts(&self) -> &[u32] {
        &self.experts
    }

    /// The weights of the chosen experts' outputs, `[tokens, top_k]`.
    pub fn gates(&self) -> &[T] {
        &self.gates
    }

    /// How many tokens chose each expert, `[experts]`; nothing is dropped yet.
    pub fn expert_counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.config.experts];
        for &expert in &self.experts {
            counts[expert as usize] += 1;
        }
        counts
    }

    /// The gradient of the logits `[tokens, experts]` for the gradient `dgates` `[tokens, top_k]`
    /// of the gate weights.
    ///
    /// The choice itself has no gradient. For a pair that was dropped, pass zero
    /// ([`Dispatch::zero_dropped`](crate::Dispatch::zero_dropped)): its gate multiplies nothing.
    ///
    /// # Errors
    ///
    /// A wrong length, or a gradient that is not finite.
    pub fn backward(&self, dgates: &[T]) -> Result<Vec<T>, MoeError> {
        let RouterConfig { experts, top_k, score, renormalize, scaling } = self.config;
        check_length("dgates", "[tokens, top_k]", dgates, self.gates.len())?;
        check_finite("dgates", dgates, top_k)?;

        let mut dlogits = Vec::with_capacity(self.scores.len());
        let mut dscores = vec![0.0; experts];
        let rows = self.scores.chunks_exact(experts).zip(self.experts.chunks_exact(top_k));
        for ((scores, chosen), dgates) in rows.zip(dgates.chunks_exact(top_k)) {
            dscores.fill(0.0);
            let score_of = |expert: u32| scores[expert as usize].to_f64();
            let pairs = || chosen.iter().zip(dgates).map(|(&e, d)| (e, scaling * d.to_f64()));
            if renormalize {
                // gate_j = s_j / D with D the sum of the chosen scores.
                let divisor: f64 = chosen.iter().map(|&e| score_of(e)).sum::<f64>() + SUM_FLOOR;
                let mean: f64 = pairs().map(|(e, d)| d * score_of(e)).sum::<f64>() / divisor;
                for (expert, d) in pairs() {
                    dscores[expert as usize] = (d - mean) / divisor;
                }
            } else {
                for (expert, d) in pairs() {
                    dscores[expert as usize] = d;
                }
            }
            push_logit_gradients(score, scores, &dscores, &mut dlogits);
        }
        Ok(dlogits)
    }
}

/// Appends one row of `dlogits`, given the row of scores and their gradient.
pub(crate) fn push_logit_gradients<T: Real>(
    function: ScoreFunction,
    scores: &[T],
    dscores: &[f64],
    dlogits: &mut Vec<T>,
) {
    let pairs = scores.iter().zip(dscores).map(|(s, d)| (s.to_f64(), d));
    match function {
        ScoreFunction::Softmax => {
            let mean: f64 = pairs.clone().map(|(s, d)| s * d).sum();
            dlogits.extend(pairs.map(|(s, d)| T::from_f64(s * (d - mean))));
        }
        ScoreFunction::Sigmoid => {
            dlogits.extend(pairs.map(|(s, d)| T::from_f64(d * s * (1.0 - s))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{check_gradient, dot, varied};
    use proptest::prelude::*;

    fn config(experts: usize, top_k: usize, score: ScoreFunction) -> RouterConfig {
        RouterConfig { experts, top_k, score, renormalize: false, scaling: 1.0 }
    }

    #[test]
    fn softmax_by_hand() {
        // Scores 1/6, 3/6, 2/6.
        let logits = [1f64.ln(), 3f64.ln(), 2f64.ln()];
        let plain = route(&config(3, 2, ScoreFunction::Softmax), &logits, None).unwrap();
        assert_eq!(plain.experts(), [1, 2]);
        let expected = [0.5, 1.0 / 3.0];
        assert!(plain.gates().iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-15));

        let settings = RouterConfig {
            renormalize: true,
            scaling: 2.5,
            ..config(3, 2, ScoreFunction::Softmax)
        };
        let scaled = route(&settings, &logits, None).unwrap();
        let expected = [2.5 * 0.6, 2.5 * 0.4];
        assert!(scaled.gates().iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-14));
    }

    #[test]
    fn sigmoid_by_hand() {
        // Scores 3/4, 1/2, 1/4.
        let logits = [3f64.ln(), 0.0, -(3f64.ln())];
        let routing = route(&config(3, 2, ScoreFunction::Sigmoid), &logits, None).unwrap();
        assert_eq!(routing.experts(), [0, 1]);
        assert!((routing.gates()[0] - 0.75).abs() < 1e-15);
        assert_eq!(routing.gates()[1], 0.5);
    }

    #[test]
    fn the_bias_chooses_but_does_not_weigh() {
        let logits = [3f64.ln(), 0.0, -(3f64.ln())];
        let bias = [0.0, 0.0, 1.0];
        let routing = route(&config(3, 2, ScoreFunction::Sigmoid), &logits, Some(&bias)).unwrap();
        assert_eq!(routing.experts(), [2, 0]);
        assert!((routing.gates()[0] - 0.25).abs() < 1e-15);
        assert!((routing.gates()[1] - 0.75).abs() < 1e-15);
    }

    #[test]
    fn ties_go_to_the_lower_index() {
        for (logits, expected) in [
            ([1.0f32, 1.0, 1.0, 1.0], [0, 1, 2]),
            ([0.0, 1.0, 0.0, 1.0], [1, 3, 0]),
            ([-5.0, 7.0, 7.0, -5.0], [1, 2, 0]),
            ([0.0, -0.0, 0.0, -0.0], [0, 1, 2]),
        ] {
            for score in [ScoreFunction::Softmax, ScoreFunction::Sigmoid] {
                let routing = route(&config(4, 3, score), &logits, None).unwrap();
                assert_eq!(routing.experts(), expected, "{logits:?} {score:?}");
            }
        }
    }

    #[test]
    fn extreme_logits_stay_finite() {
        for score in [ScoreFunction::Softmax, ScoreFunction::Sigmoid] {
            for renormalize in [false, true] {
                let settings = RouterConfig { renormalize, ..config(2, 2, score) };
                for logits in [[1e300f64, -1e300], [-1e300, -1e300], [1e300, 1e300], [0.0, 800.0]] {
                    let routing = route(&settings, &logits, None).unwrap();
                    assert!(routing.gates().iter().all(|g| (0.0..=1.0).contains(g)), "{logits:?}");
                    let dlogits = routing.backward(&[1.0, -2.0]).unwrap();
                    assert!(dlogits.iter().all(|d| d.is_finite()), "{logits:?}: {dlogits:?}");
                }
            }
        }
    }

    #[test]
    fn no_tokens_give_an_empty_routing() {
        let routing = route::<f32>(&config(3, 2, ScoreFunction::Softmax), &[], None).unwrap();
        assert_eq!(routing.token_count(), 0);
        assert_eq!(routing.expert_counts(), [0, 0, 0]);
        assert_eq!(routing.backward(&[]).unwrap(), []);
    }

    #[test]
    fn backward_agrees_with_finite_differences() {
        for score in [ScoreFunction::Softmax, ScoreFunction::Sigmoid] {
            for renormalize in [false, true] {
                for (tokens, experts, top_k) in [(1, 1, 1), (4, 5, 1), (3, 8, 3), (2, 4, 4)] {
                    let settings =
                        RouterConfig { renormalize, scaling: 1.7, ..config(experts, top_k, score) };
                    let logits: Vec<f64> =
                        varied(tokens * experts, 5).iter().map(|x| 3.0 * x).collect();
                    let bias = varied(experts, 6);
                    let dgates = varied(tokens * top_k, 7);
                    let routing = route(&settings, &logits, Some(&bias)).unwrap();
                    let dlogits = routing.backward(&dgates).unwrap();
                    check_gradient("dlogits", &logits, &dlogits, |logits| {
                        let moved = route(&settings, logits, Some(&bias)).unwrap();
                        assert_eq!(moved.experts(), routing.experts(), "the step chose anew");
                        dot(moved.gates(), &dgates)
                    });
                }
            }
        }
    }

    #[test]
    fn f32_is_f64_rounded() {
        let settings = RouterConfig { renormalize: true, ..config(6, 2, ScoreFunction::Softmax) };
        let narrow: Vec<f32> = varied(30, 9).iter().map(|&x| x as f32).collect();
        let wide: Vec<f64> = narrow.iter().map(|&x| f64::from(x)).collect();
        let (narrow, wide) =
            (route(&settings, &narrow, None).unwrap(), route(&settings, &wide, None).unwrap());
        assert_eq!(narrow.experts(), wide.experts());
        assert!(narrow.gates().iter().zip(wide.gates()).all(|(&n, &w)| n == w as f32));
    }

    #[test]
    fn wrong_arguments_are_named() {
        let settings = config(3, 2, ScoreFunction::Softmax);
        let nan = route(&settings, &[0.0, 1.0, 2.0, 0.0, f64::NAN, 0.0], None);
        let infinite_bias = [0.0, 0.0, f64::INFINITY];
        for (error, expected) in [
            (route(&config(3, 4, settings.score), &[0.0f64; 3], None), "got 4"),
            (route(&config(3, 0, settings.score), &[0.0; 3], None), "got 0"),
            (route(&config(0, 0, settings.score), &[], None), "experts, got 0"),
            (route(&settings, &[0.0; 7], None), "expected rows of 3 numbers, got 7"),
            (nan, "`logits`: expected finite numbers, got NaN at row 1, column 1"),
            (route(&settings, &[0.0; 3], Some(&[0.0; 2])), "`selection_bias`: expected 3"),
            (route(&settings, &[0.0; 3], Some(&infinite_bias)), "got inf at row 0, column 2"),
            (
                route(&RouterConfig { scaling: f64::NAN, ..settings }, &[0.0; 3], None),
                "`scaling`: expected a finite number, got NaN",
            ),
        ] {
            let message = error.unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        let routing = route(&settings, &[0.0, 1.0, 2.0], None).unwrap();
        assert!(matches!(routing.backward(&[1.0]), Err(MoeError::Length { expected: 2, .. })));
        assert!(matches!(
            routing.backward(&[1.0, f64::NAN]),
            Err(MoeError::NonFinite { row: 0, column: 1, .. })
        ));
    }

    proptest! {
        #[test]
        fn the_chosen_are_the_best_and_distinct(
            (experts, top_k) in (1usize..12).prop_flat_map(|n| (Just(n), 1..=n)),
            seed in any::<u64>(),
            coarse in any::<bool>(),
        ) {
            // Coarse logits make ties common.
            let logits: Vec<f64> = varied(5 * experts, seed)
                .iter()
                .map(|x| if coarse { (2.0 * x).round() } else { 4.0 * x })
                .collect();
            let settings = RouterConfig {
                renormalize: true,
                ..config(experts, top_k, ScoreFunction::Softmax)
            };
            let routing = route(&settings, &logits, None).unwrap();
            prop_assert_eq!(routing.expert_counts().iter().sum::<usize>(), 5 * top_k);
            for token in 0..5 {
                let scores = &routing.scores()[token * experts..][..experts];
                let chosen = &routing.experts()[token * top_k..][..top_k];
                let total: f64 = scores.iter().sum();
                prop_assert!((total - 1.0).abs() < 1e-12);
                let gates: f64 = routing.gates()[token * top_k..][..top_k].iter().sum();
                prop_assert!((gates - 1.0).abs() < 1e-12);
                // The order of a stable sort by descending score.
                let mut order: Vec<u32> = (0..experts as u32).collect();
                order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
                prop_assert_eq!(chosen, &order[..top_k]);
            }
        }
    }
}
