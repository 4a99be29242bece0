//! Signal and error of a product, in f64.

/// Sums of squares over the tile `a · bᵀ` of rows of `depth` elements: of the product of `a` and
/// `b`, and of the difference between the product of `a_quantized` and `b_quantized` and that
/// product.
///
/// # Panics
/// If operands differ in length, or rows are not whole.
pub fn product_error(
    [a, b]: [&[f64]; 2],
    [a_quantized, b_quantized]: [&[f64]; 2],
    depth: usize,
) -> [f64; 2] {
    assert_eq!([a.len(), b.len()], [a_quantized.len(), b_quantized.len()]);
    let depth = depth.max(1);
    assert!(a.len().is_multiple_of(depth) && b.len().is_multiple_of(depth));
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let mut sums = [0.0; 2];
    for (a, a_quantized) in a.chunks(depth).zip(a_quantized.chunks(depth)) {
        for (b, b_quantized) in b.chunks(depth).zip(b_quantized.chunks(depth)) {
            let product = dot(a, b);
            let error = dot(a_quantized, b_quantized) - product;
            sums[0] += product * product;
            sums[1] += error * error;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_and_error_of_a_small_tile() {
        let (a, b) = ([1.0, 2.0], [3.0, 4.0, -1.0, 0.5]);
        // Products 11 and 0; of the quantized operands 12 and -1.
        let b_quantized = [2.0, 5.0, -1.0, 0.0];
        assert_eq!(product_error([&a, &b], [&a, &b_quantized], 2), [121.0, 2.0]);
    }
}
