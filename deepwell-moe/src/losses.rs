//! The two auxiliary losses of a router, each with its gradient for the logits.

use deepwell_ir::ops::{Route, RouteScore, RouterLoss};

use crate::error::{check_expert_count, check_length, check_rows, check_top_k};
use crate::route::{SUM_FLOOR, logit_gradients, score_row, softmax};
use crate::{MoeError, Real, Routing};

/// A loss and its gradient.
#[derive(Debug, Clone, PartialEq)]
pub struct LossAndGradient<T> {
    /// The loss, coefficient included.
    pub loss: f64,
    /// Gradient of the loss with respect to the logits, `[tokens, experts]`.
    pub dlogits: Vec<T>,
}

/// The load-balancing loss: `coefficient * experts * sum over experts of f * P`.
///
/// `f` is the fraction of all choices that went to the expert (before dropping) and `P` the mean
/// over tokens of the expert's probability. Balanced routing has the loss `coefficient`, the
/// minimum for a router whose choices follow its probabilities.
///
/// Source: Switch Transformers, arXiv 2101.03961, eq. 4 to 6, for one choice per token. For `top_k`
/// choices, `f` is divided by `top_k`, as in DeepSeekMoE, arXiv 2401.06066, eq. 12 to 14. Sigmoid
/// scores are first divided by their sum over the experts, as in DeepSeek-V3, arXiv 2412.19437, eq.
/// 17 to 20. Only `P` has a gradient, `f` has none.
///
/// Without tokens the loss is 0.
pub fn load_balancing_loss<T: Real>(routing: &Routing<T>, coefficient: f64) -> LossAndGradient<T> {
    let Route { score, experts, top_k, .. } = *routing.settings();
    let counts = routing.expert_counts();
    balance(score, [experts, top_k], routing.scores(), &counts, coefficient)
}

fn balance<S: Real, T: Real>(
    score: RouteScore,
    [experts, top_k]: [usize; 2],
    scores: &[S],
    counts: &[usize],
    coefficient: f64,
) -> LossAndGradient<T> {
    let tokens = scores.len() / experts;
    if tokens == 0 {
        return LossAndGradient { loss: 0.0, dlogits: Vec::new() };
    }
    // The loss is the sum over tokens and experts of `weights[expert] * probability`.
    let scale = coefficient * experts as f64 / (tokens as f64 * (tokens * top_k) as f64);
    let weights: Vec<f64> = counts.iter().map(|&count| scale * count as f64).collect();

    let mut loss = 0.0;
    let mut dlogits = Vec::with_capacity(scores.len());
    let (mut dscores, mut row) = (vec![0.0; experts], vec![0.0; experts]);
    for scores in scores.chunks_exact(experts) {
        let sum = match score {
            RouteScore::Softmax => 1.0,
            RouteScore::Sigmoid => scores.iter().map(|s| s.to_f64()).sum::<f64>() + SUM_FLOOR,
        };
        let weighted = scores.iter().zip(&weights).map(|(s, w)| s.to_f64() / sum * w).sum::<f64>();
        loss += weighted;
        for (dscore, weight) in dscores.iter_mut().zip(&weights) {
            *dscore = match score {
                RouteScore::Softmax => *weight,
                // Derivative of the division by the sum of the scores.
                RouteScore::Sigmoid => (weight - weighted) / sum,
            };
        }
        logit_gradients(score, scores, &dscores, &mut row);
        dlogits.extend(row.iter().map(|&dlogit| T::from_f64(dlogit)));
    }
    LossAndGradient { loss, dlogits }
}

/// Both losses of the op [`RouterLoss`], without the factor `share`: `logits` `[tokens, experts]`,
/// `chosen` `[tokens, top_k]`. Logits that are not finite give losses that are not finite.
///
/// # Errors
///
/// Logits or choices that are not whole rows of the same number of tokens, or an invalid expert.
pub fn router_losses<T: Real>(
    op: &RouterLoss,
    logits: &[T],
    experts: usize,
    chosen: &[i32],
    top_k: usize,
) -> Result<LossAndGradient<T>, MoeError> {
    check_expert_count(experts)?;
    check_top_k(top_k, experts)?;
    let tokens = logits.len() / experts;
    check_length("logits", "[tokens, experts]", logits, tokens * experts)?;
    check_length("chosen", "[tokens, top_k]", chosen, tokens * top_k)?;
    let mut counts = vec![0; experts];
    for (index, &expert) in chosen.iter().enumerate() {
        match counts.get_mut(usize::try_from(expert).unwrap_or(usize::MAX)) {
            Some(count) => *count += 1,
            None => {
                let expert = expert as u32;
                return Err(MoeError::ExpertOutOfRange { index, expert, experts });
            }
        }
    }
    let mut scores = vec![0.0; logits.len()];
    for (logits, scores) in logits.chunks_exact(experts).zip(scores.chunks_exact_mut(experts)) {
        score_row(op.score, logits, scores);
    }
    let balance: LossAndGradient<f64> =
        balance(op.score, [experts, top_k], &scores, &counts, op.balance);
    let z: LossAndGradient<f64> = z_of_rows(logits, experts, op.z);
    let sums = balance.dlogits.iter().zip(&z.dlogits).map(|(a, b)| T::from_f64(a + b));
    Ok(LossAndGradient { loss: balance.loss + z.loss, dlogits: sums.collect() })
}

/// The router z-loss: `coefficient` times the mean over tokens of the squared logsumexp of the
/// logits. The loss keeps logits small, where low precision can still distinguish them.
///
/// `logits` is `[tokens, experts]`. Without tokens the loss is 0.
///
/// Source: ST-MoE (Zoph et al.), arXiv 2202.08906, eq. 5, with a coefficient of 0.001.
///
/// # Errors
///
/// No experts, logits that are not whole rows, or a logit that is not finite.
pub fn z_loss<T: Real>(
    logits: &[T],
    experts: usize,
    coefficient: f64,
) -> Result<LossAndGradient<T>, MoeError> {
    check_expert_count(experts)?;
    check_rows("logits", logits, experts)?;
    Ok(z_of_rows(logits, experts, coefficient))
}

fn z_of_rows<L: Real, T: Real>(
    logits: &[L],
    experts: usize,
    coefficient: f64,
) -> LossAndGradient<T> {
    let tokens = logits.len() / experts;
    let mut loss = 0.0;
    let mut dlogits = Vec::with_capacity(logits.len());
    let mut probabilities = vec![0.0; experts];
    for row in logits.chunks_exact(experts) {
        let log_sum = softmax(row, &mut probabilities);
        let scale = coefficient / tokens as f64;
        loss += scale * log_sum * log_sum;
        dlogits.extend(probabilities.iter().map(|p| T::from_f64(2.0 * scale * log_sum * p)));
    }
    LossAndGradient { loss, dlogits }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route;
    use crate::test_support::{check_gradient, settings, varied};

    #[test]
    fn balance_by_hand() {
        // Two experts, two tokens, both choose expert 0 with probability 3/4: f = [1, 0],
        // P = [3/4, 1/4], loss = 2 * 3/4.
        let router = settings(2, 1, RouteScore::Softmax);
        let logits = [3f64.ln(), 0.0, 3f64.ln(), 0.0];
        let routing = route(&router, &logits, None).unwrap();
        let result = load_balancing_loss(&routing, 1.0);
        assert!((result.loss - 1.5).abs() < 1e-14, "{}", result.loss);
        // dloss/dp0 = 2 / 2 per token; through the softmax: p0 (1 - p0) = 3/16.
        for (got, expected) in result.dlogits.iter().zip([0.1875, -0.1875, 0.1875, -0.1875]) {
            assert!((got - expected).abs() < 1e-14, "{got} is not {expected}");
        }
    }

    #[test]
    fn balanced_routing_costs_the_coefficient() {
        // Token t prefers the experts t, t+1, ... cyclically.
        for score in [RouteScore::Softmax, RouteScore::Sigmoid] {
            for top_k in 1..=4 {
                let logits: Vec<f64> =
                    (0..16).map(|i| -(((i % 4 + 4 - i / 4) % 4) as f64)).collect();
                let routing = route(&settings(4, top_k, score), &logits, None).unwrap();
                let loss = load_balancing_loss(&routing, 0.01).loss;
                assert!((loss - 0.01).abs() < 1e-14, "{score:?} {top_k}: {loss}");
            }
        }
    }

    #[test]
    fn collapsed_routing_costs_as_many_times_more_as_there_are_experts() {
        let logits = [100.0, 0.0, 0.0, 0.0].repeat(8);
        let routing = route(&settings(4, 1, RouteScore::Softmax), &logits, None).unwrap();
        assert!((load_balancing_loss(&routing, 1.0).loss - 4.0).abs() < 1e-12);
    }

    #[test]
    fn balance_gradient_agrees_with_finite_differences() {
        for score in [RouteScore::Softmax, RouteScore::Sigmoid] {
            for (tokens, experts, top_k) in [(1, 1, 1), (5, 4, 1), (7, 6, 2), (3, 3, 3)] {
                let router = settings(experts, top_k, score);
                let logits: Vec<f64> =
                    varied(tokens * experts, 11).iter().map(|x| 2.0 * x).collect();
                let routing = route(&router, &logits, None).unwrap();
                let dlogits = load_balancing_loss(&routing, 0.7).dlogits;
                check_gradient("dlogits", &logits, &dlogits, |logits| {
                    let moved = route(&router, logits, None).unwrap();
                    assert_eq!(moved.experts(), routing.experts(), "the step chose anew");
                    load_balancing_loss(&moved, 0.7).loss
                });
            }
        }
    }

    #[test]
    fn z_by_hand() {
        // One token with sum of exponentials e, one with 4.
        let logits = [0.0, (std::f64::consts::E - 1.0).ln(), 3f64.ln(), 0.0];
        let result = z_loss(&logits, 2, 1.0).unwrap();
        let expected = (1.0 + 4f64.ln().powi(2)) / 2.0;
        assert!((result.loss - expected).abs() < 1e-14, "{}", result.loss);
        // 2 / 2 * ln 4 * [3/4, 1/4].
        assert!((result.dlogits[2] - 4f64.ln() * 0.75).abs() < 1e-14);
        assert!((result.dlogits[3] - 4f64.ln() * 0.25).abs() < 1e-14);
    }

    #[test]
    fn z_gradient_agrees_with_finite_differences() {
        for (tokens, experts) in [(1, 1), (4, 5), (2, 9)] {
            let logits: Vec<f64> = varied(tokens * experts, 13).iter().map(|x| 3.0 * x).collect();
            let dlogits = z_loss(&logits, experts, 0.3).unwrap().dlogits;
            check_gradient("dlogits", &logits, &dlogits, |logits| {
                z_loss(logits, experts, 0.3).unwrap().loss
            });
        }
    }

    #[test]
    fn both_losses_are_those_of_each() {
        let router = settings(6, 2, RouteScore::Sigmoid);
        let logits: Vec<f64> = varied(5 * 6, 17).iter().map(|x| 2.0 * x).collect();
        let routing = route(&router, &logits, None).unwrap();
        let chosen: Vec<i32> = routing.experts().iter().map(|&expert| expert as i32).collect();
        let op = RouterLoss { score: RouteScore::Sigmoid, balance: 0.3, z: 0.2, ranks: 1 };
        let both = router_losses(&op, &logits, 6, &chosen, 2).unwrap();
        let (balance, z) = (load_balancing_loss(&routing, 0.3), z_loss(&logits, 6, 0.2).unwrap());
        assert!((both.loss - balance.loss - z.loss).abs() < 1e-14);
        check_gradient("dlogits", &logits, &both.dlogits, |logits| {
            router_losses(&op, logits, 6, &chosen, 2).unwrap().loss
        });
        let nan = router_losses(&op, &[f64::NAN; 6], 6, &[0, 1], 2).unwrap();
        assert!(nan.loss.is_nan() && nan.dlogits.iter().all(|d| d.is_nan()));
        let error = router_losses(&op, &logits, 6, &[-1; 10], 2).unwrap_err();
        assert!(matches!(error, MoeError::ExpertOutOfRange { index: 0, .. }), "{error}");
    }

    /// If four layers each send all tokens to two layer-specific experts, the total loss per layer
    /// is 8. Pooled over the layers, the same tokens look balanced.
    #[test]
    fn collapse_is_seen_in_each_layer() {
        let (experts, top_k, tokens) = (8, 2, 16);
        let op = RouterLoss { score: RouteScore::Softmax, balance: 1.0, z: 0.0, ranks: 1 };
        let (mut all_logits, mut all_chosen) = (Vec::new(), Vec::new());
        for layer in 0..4 {
            let is_own = |expert: usize| expert / 2 == layer;
            let logit = |expert| if is_own(expert) { 50.0 } else { 0.0 };
            let logits: Vec<f64> = (0..tokens).flat_map(|_| (0..experts).map(logit)).collect();
            let chosen = [2 * layer as i32, 2 * layer as i32 + 1].repeat(tokens);
            let loss = router_losses(&op, &logits, experts, &chosen, top_k).unwrap().loss;
            // Each of the two experts has half of the pairs and half of the probability: 8 / 2.
            assert!((loss - 4.0).abs() < 1e-9, "{loss}");
            all_logits.extend(logits);
            all_chosen.extend(chosen);
        }
        let pooled = router_losses(&op, &all_logits, experts, &all_chosen, top_k).unwrap().loss;
        assert!((pooled - 1.0).abs() < 1e-9, "{pooled}");
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let result = z_loss(&[1e4f64, -1e4, 1e4, 0.0], 2, 1.0).unwrap();
        assert!((result.loss - 1e8).abs() < 1e-6);
        assert!(result.dlogits.iter().all(|gradient| gradient.is_finite()));
    }

    #[test]
    fn no_tokens_cost_nothing() {
        let routing = route::<f32>(&settings(3, 2, RouteScore::Sigmoid), &[], None).unwrap();
        let empty = LossAndGradient { loss: 0.0, dlogits: vec![] };
        assert_eq!(load_balancing_loss(&routing, 1.0), empty);
        assert_eq!(z_loss::<f32>(&[], 3, 1.0).unwrap(), empty);
    }

    #[test]
    fn wrong_arguments_are_named() {
        assert!(matches!(z_loss(&[0.0f32], 0, 1.0), Err(MoeError::ExpertCount { experts: 0 })));
        assert!(matches!(z_loss(&[0.0f32; 5], 2, 1.0), Err(MoeError::PartialRow { got: 5, .. })));
        assert!(matches!(
            z_loss(&[0.0, f64::NEG_INFINITY], 2, 1.0),
            Err(MoeError::NonFinite { row: 0, column: 1, .. })
        ));
    }
}
