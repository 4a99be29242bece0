//! Pseudo-random numbers and permutations as functions of a seed and a counter, without state.

use deepwell_precision::random::split_mix64 as mix;

/// A permutation of `0..count`.
///
/// A Feistel network of six rounds permutes the numbers of an even number of bits; an image that is
/// not below `count` is permuted again until it is (the network has at most `4 * count` values, so
/// the average is at most four passes through the network). Nothing is stored, and every element
/// costs the same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Permutation {
    count: u64,
    half_bits: u32,
    seed: u64,
}

impl Permutation {
    const ROUNDS: u64 = 6;

    /// `count` is at least 1.
    pub(crate) fn new(count: u64, seed: u64) -> Self {
        debug_assert!(count > 0);
        let bits = u64::BITS - (count - 1).leading_zeros();
        Self { count, half_bits: bits.div_ceil(2).max(1), seed }
    }

    /// Image of `index`, which must be below `count`.
    pub(crate) fn get(&self, index: u64) -> u64 {
        debug_assert!(index < self.count);
        let mut image = self.round_trip(index);
        while image >= self.count {
            image = self.round_trip(image);
        }
        image
    }

    fn round_trip(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..Self::ROUNDS {
            let f = mix(mix(self.seed ^ round.rotate_right(8)) ^ right) & mask;
            (left, right) = (right, left ^ f);
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_comes_once() {
        for count in (1..70).chain([255, 256, 257, 4095, 4096, 4097, 100_003]) {
            for seed in [0, 1, u64::MAX] {
                let permutation = Permutation::new(count, seed);
                let mut images: Vec<u64> = (0..count).map(|i| permutation.get(i)).collect();
                images.sort_unstable();
                assert!(images.into_iter().eq(0..count), "{count} {seed}");
            }
        }
    }

    #[test]
    fn the_largest_count_works() {
        let permutation = Permutation::new(u64::MAX >> 1, 3);
        assert_ne!(permutation.get(0), permutation.get(1));
    }

    #[test]
    fn an_image_says_nothing_about_its_neighbour_or_its_seed() {
        // The mean distance of neighbours in a random permutation of n is n / 3; with 4096 samples
        // the standard error is about 0.4 % of n, so 2 % is five standard errors.
        let count = 4096u64;
        let mean = |pairs: &mut dyn Iterator<Item = (u64, u64)>| {
            let distances: Vec<u64> = pairs.map(|(a, b)| a.abs_diff(b)).collect();
            distances.iter().sum::<u64>() as f64 / distances.len() as f64 / count as f64
        };
        let first = Permutation::new(count, 1);
        let second = Permutation::new(count, 2);
        let neighbours = mean(&mut (1..count).map(|i| (first.get(i - 1), first.get(i))));
        let seeds = mean(&mut (0..count).map(|i| (first.get(i), second.get(i))));
        assert!((neighbours - 1.0 / 3.0).abs() < 0.02, "{neighbours}");
        assert!((seeds - 1.0 / 3.0).abs() < 0.02, "{seeds}");
    }
}
