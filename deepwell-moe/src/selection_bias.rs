//! Load balancing without a loss: a bias per expert for selection only.

use crate::MoeError;
use crate::Real;
use crate::error::check_length;

/// Moves each expert's bias by `rate`: up if the expert got fewer tokens than the mean, down if
/// more.
///
/// `counts` `[experts]` is the number of tokens that chose each expert in the last step
/// ([`Routing::expert_counts`](crate::Routing::expert_counts), summed over ranks); `bias`
/// `[experts]` is the `selection_bias` of [`route`](crate::route). There is no gradient.
///
/// Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
/// arXiv 2408.15664, algorithm 1.
///
/// ```
/// use deepwell_moe::update_selection_bias;
///
/// let mut bias = [0.0f64; 3];
/// update_selection_bias(&mut bias, &[6, 3, 0], 0.001)?;
/// assert_eq!(bias, [-0.001, 0.0, 0.001]);
/// # Ok::<(), deepwell_moe::MoeError>(())
/// ```
///
/// # Errors
///
/// Lengths that differ, or a rate that is negative or not finite.
pub fn update_selection_bias<T: Real>(
    bias: &mut [T],
    counts: &[usize],
    rate: f64,
) -> Result<(), MoeError> {
    check_length("counts", "[experts]", counts, bias.len())?;
    if !rate.is_finite() || rate < 0.0 {
        return Err(MoeError::Setting {
            name: "rate",
            expected: "a finite number of at least 0",
            value: rate,
        });
    }
    let total: u128 = counts.iter().map(|&count| count as u128).sum();
    let experts = bias.len() as u128;
    for (bias, &count) in bias.iter_mut().zip(counts) {
        // Compares the count with the mean in integers.
        let step = match (count as u128 * experts).cmp(&total) {
            std::cmp::Ordering::Less => rate,
            std::cmp::Ordering::Equal => 0.0,
            std::cmp::Ordering::Greater => -rate,
        };
        *bias = T::from_f64(bias.to_f64() + step);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{Route, RouteScore};

    use super::*;
    use crate::route;
    use crate::test_support::{settings, varied};

    #[test]
    fn evens_out_a_skewed_router() {
        // Every token prefers the first experts; after enough steps all experts are close to the
        // mean.
        let (tokens, experts, top_k) = (256, 8, 2);
        let logits: Vec<f64> = varied(tokens * experts, 3)
            .iter()
            .enumerate()
            .map(|(i, x)| x - 0.3 * (i % experts) as f64)
            .collect();
        let router = Route {
            normalize: true,
            selection_bias: true,
            ..settings(experts, top_k, RouteScore::Sigmoid)
        };
        let mut bias = vec![0.0; experts];
        let spread = |bias: &[f64]| {
            let counts = route(&router, &logits, Some(bias)).unwrap().expert_counts();
            (counts.iter().max().unwrap() - counts.iter().min().unwrap(), counts)
        };
        let (before, _) = spread(&bias);
        for _ in 0..1000 {
            let (_, counts) = spread(&bias);
            update_selection_bias(&mut bias, &counts, 1e-3).unwrap();
        }
        let (after, counts) = spread(&bias);
        assert!(before > 100, "the start is not skewed: {before}");
        assert!(after <= 8, "{after} after balancing: {counts:?}");
    }

    #[test]
    fn wrong_arguments_are_named() {
        assert!(matches!(
            update_selection_bias(&mut [0.0f32; 2], &[1, 2, 3], 0.1),
            Err(MoeError::Length { name: "counts", expected: 2, got: 3, .. })
        ));
        for rate in [-0.1, f64::NAN, f64::INFINITY] {
            assert!(matches!(
                update_selection_bias(&mut [0.0f32; 1], &[1], rate),
                Err(MoeError::Setting { name: "rate", .. })
            ));
        }
        assert_eq!(update_selection_bias::<f32>(&mut [], &[], 0.1), Ok(()));
    }
}
