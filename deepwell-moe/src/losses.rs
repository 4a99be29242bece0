//! The two auxiliary losses of a router, each with the gradient of the logits.

use deepwell_ir::ops::RouteScore;

use crate::error::{check_expert_count, check_rows};
use crate::route::{SUM_FLOOR, logit_gradients, softmax};
use crate::{MoeError, Real, Routing};

/// A loss and its gradient.
#[derive(Debug, Clone, PartialEq)]
pub struct LossAndGradient<T> {
    /// The loss, coefficient included.
    pub loss: f64,
    /// Its gradient with respect to the logits, `[tokens, experts]`.
    pub dlogits: Vec<T>,
}

/// The load-balancing loss: `coefficient * experts * sum over experts of f * P`.
///
/// `f` is the part of all choices that went to the expert (before any dropping) and `P` the mean
/// over tokens of the probability that the router gave it. Balanced routing has the loss
/// `coefficient`, the least that a router reaches whose choices follow its probabilities.
///
/// Source: Switch Transformers, arXiv 2101.03961, eq. 4 to 6, for one choice a token. For
/// `top_k` choices, `f` is divided by `top_k`, as in DeepSeekMoE, arXiv 2401.06066, eq. 12 to 14.
/// Sigmoid scores are divided by their sum over the experts first, as in DeepSeek-V3, arXiv
/// 2412.19437, eq. 17 to 20. `f` has no gradient: only `P` has.
///
/// No tokens have the loss 0.
pub fn load_balancing_loss<T: Real>(routing: &Routing<T>, coefficient: f64) -> LossAndGradient<T> {
    let config = routing.settings();
    let (experts, tokens) = (config.experts, routing.token_count());
    if tokens == 0 {
        return LossAndGradient { loss: 0.0, dlogits: Vec::new() };
    }
    // The loss is the sum over tokens and experts of `weights[expert] * probability`.
    let scale = coefficient * experts as f64 / (tokens as f64 * (tokens * config.top_k) as f64);
    let weights: Vec<f64> =
        routing.expert_counts().into_iter().map(|count| scale * count as f64).collect();

    let mut loss = 0.0;
    let mut dlogits = Vec::with_capacity(routing.scores().len());
    let (mut dscores, mut row) = (vec![0.0; experts], vec![0.0; experts]);
    for scores in routing.scores().chunks_exact(experts) {
        let sum = match config.score {
            RouteScore::Softmax => 1.0,
            RouteScore::Sigmoid => scores.iter().map(|s| s.to_f64()).sum::<f64>() + SUM_FLOOR,
        };
        let weighted = scores.iter().zip(&weights).map(|(s, w)| s.to_f64() / sum * w).sum::<f64>();
        loss += weighted;
        for (dscore, weight) in dscores.iter_mut().zip(&weights) {
            *dscore = match config.score {
                RouteScore::Softmax => *weight,
                // Through the division by the sum of the scores.
                RouteScore::Sigmoid => (weight - weighted) / sum,
            };
        }
        logit_gradients(config.score, scores, &dscores, &mut row);
        dlogits.extend(row.iter().map(|&dlogit| T::from_f64(dlogit)));
    }
    LossAndGradient { loss, dlogits }
}

/// The router z-loss: `coefficient` times the mean over tokens of the squared logarithm of the
/// sum of `e^logit`. It keeps the logits small, where low precision still tells them apart.
///
/// `logits` is `[tokens, experts]`. No tokens have the loss 0.
///
/// Source: ST-MoE (Zoph et al.), arXiv 2202.08906, eq. 5, there with the coefficient 0.001.
///
/// # Errors
///
/// No experts, logits that are not whole rows, or one that is not finite.
pub fn z_loss<T: Real>(
    logits: &[T],
    experts: usize,
    coefficient: f64,
) -> Result<LossAndGradient<T>, MoeError> {
    check_expert_count(experts)?;
    let tokens = check_rows("logits", logits, experts)?;
    let mut loss = 0.0;
    let mut dlogits = Vec::with_capacity(logits.len());
    let mut probabilities = vec![0.0; experts];
    for row in logits.chunks_exact(experts) {
        let log_sum = softmax(row, &mut probabilities);
        let scale = coefficient / tokens as f64;
        loss += scale * log_sum * log_sum;
        dlogits.extend(probabilities.iter().map(|p| T::from_f64(2.0 * scale * log_sum * p)));
    }
    Ok(LossAndGradient { loss, dlogits })
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
        // Token t prefers the experts t, t+1, ... around the circle.
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
