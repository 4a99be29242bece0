//! The router of a mixture of experts, as [`deepwell_moe`] defines it, in `f64`.

use deepwell_ir::ops::Route;
use deepwell_moe::TokenRouter;

/// Result of a router.
#[derive(Clone, Debug, PartialEq)]
pub struct Routing {
    /// `[tokens, top_k]`.
    pub gates: Vec<f64>,
    /// `[tokens, top_k]`, best first.
    pub experts: Vec<i32>,
}

/// Computes gates and experts from `logits` `[tokens, experts]`.
///
/// # Panics
///
/// If settings, lengths or numbers do not fit.
pub fn forward(settings: &Route, logits: &[f64], selection_bias: Option<&[f64]>) -> Routing {
    let routing = deepwell_moe::route(settings, logits, selection_bias)
        .unwrap_or_else(|error| panic!("the router refuses: {error}"));
    let experts = routing.experts().iter().map(|&expert| expert as i32).collect();
    Routing { gates: routing.gates().to_vec(), experts }
}

/// Computes the gradient of the logits `[tokens, experts]` from `dgates` `[tokens, top_k]`.
///
/// # Panics
///
/// If settings or lengths do not fit.
pub fn backward(settings: &Route, dgates: &[f64], logits: &[f64], chosen: &[i32]) -> Vec<f64> {
    let settings = Route { selection_bias: false, ..settings.clone() };
    let mut router = TokenRouter::new::<f64>(&settings, None)
        .unwrap_or_else(|error| panic!("the router refuses: {error}"));
    let Route { experts, top_k, .. } = settings;
    let mut dlogits = vec![0.0; logits.len()];
    for (token, row) in logits.chunks_exact(experts).enumerate() {
        let of_token = token * top_k..(token + 1) * top_k;
        let chosen: Vec<u32> = chosen[of_token.clone()].iter().map(|&e| e as u32).collect();
        let dlogits = &mut dlogits[token * experts..][..experts];
        router.backward(row, &chosen, &dgates[of_token], dlogits);
    }
    dlogits
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{RouteGroups, RouteScore};

    use super::*;
    use crate::ops::finite_difference::{check, dot, varied};

    #[test]
    fn backward_agrees_with_finite_differences() {
        for (score, normalize) in [(RouteScore::Softmax, false), (RouteScore::Sigmoid, true)] {
            let settings = Route {
                experts: 6,
                top_k: 2,
                score,
                normalize,
                scaling: 1.5,
                groups: Some(RouteGroups { count: 3, chosen: 2 }),
                selection_bias: true,
            };
            let logits = varied(18, 1);
            let bias = varied(6, 2);
            let dgates = varied(6, 3);
            let routing = forward(&settings, &logits, Some(&bias));
            let dlogits = backward(&settings, &dgates, &logits, &routing.experts);
            check("dlogits", &logits, &dlogits, |logits| {
                dot(&forward(&settings, logits, Some(&bias)).gates, &dgates)
            });
        }
    }
}
