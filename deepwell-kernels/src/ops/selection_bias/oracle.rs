//! Counts of chosen experts, and updates of selection biases. Neither op has a gradient.

/// The number of occurrences of each of `experts` experts in `chosen`.
pub fn counts(chosen: &[i32], experts: usize) -> Vec<f64> {
    let of = |expert| chosen.iter().filter(|&&chosen| chosen as usize == expert).count() as f64;
    (0..experts).map(of).collect()
}

/// `bias` after a step of `rate`: increased for `counts` below their mean, decreased above the
/// mean.
pub fn updated(bias: &[f64], counts: &[f64], rate: f64) -> Vec<f64> {
    let mean = counts.iter().sum::<f64>() / counts.len() as f64;
    let direction = |count: f64| match count.partial_cmp(&mean) {
        Some(std::cmp::Ordering::Less) => 1.0,
        Some(std::cmp::Ordering::Greater) => -1.0,
        _ => 0.0,
    };
    bias.iter().zip(counts).map(|(bias, &count)| bias + rate * direction(count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_experts_by_hand() {
        let counts = counts(&[0, 1, 0, 2, 0, 1, 2, 0], 4);
        assert_eq!(counts, [4.0, 2.0, 2.0, 0.0]);
        assert_eq!(updated(&[1.0; 4], &counts, 0.5), [0.5, 1.0, 1.0, 1.5]);
    }
}
