//! Initial weights: a pure function of seed, parameter name and index.

use std::collections::HashMap;

use deepwell_ir::{Graph, Init, TensorKind};
use deepwell_precision::random::split_mix64 as mix;
use rayon::prelude::*;

/// Values computed by one thread at a time: whole pairs.
const PART: usize = 1 << 16;

/// A uniform number in the open interval (0, 1).
fn uniform(bits: u64) -> f64 {
    ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

/// Start of the random numbers of parameter `name`.
fn stream(seed: u64, name: &str) -> u64 {
    let hash = blake3::hash(name.as_bytes());
    let mut key = [0u8; 8];
    key.copy_from_slice(&hash.as_bytes()[..8]);
    mix(seed ^ u64::from_le_bytes(key))
}

/// Returns the initialization of each parameter of a graph, by name.
pub(crate) fn initial_values(graph: &Graph) -> HashMap<String, Init> {
    let parameters = graph.parameters().filter_map(|(_, tensor)| match tensor.kind {
        TensorKind::Parameter { init, .. } => Some((tensor.name.clone(), init)),
        _ => None,
    });
    parameters.collect()
}

/// Flips the last bit of about half of the `values` of parameter `name`. Zeros are kept, because
/// their neighbours are subnormal.
pub fn perturb(seed: u64, name: &str, values: &mut [f32]) {
    let stream = stream(seed, name);
    values.par_chunks_mut(PART).enumerate().for_each(|(part, values)| {
        for (index, value) in values.iter_mut().enumerate() {
            let coin = mix(stream.wrapping_add((part * PART + index) as u64)) >> 63;
            if *value != 0.0 {
                *value = f32::from_bits(value.to_bits() ^ coin as u32);
            }
        }
    });
}

/// Fills `values` with the initial values of parameter `name`.
///
/// Normal numbers come in pairs by the Box-Muller method, so that the value at an index does not
/// depend on the length or on the number of threads.
pub fn fill(init: Init, seed: u64, name: &str, values: &mut [f32]) {
    let std = match init {
        Init::Ones => return values.fill(1.0),
        Init::Zeros => return values.fill(0.0),
        Init::Normal { std } => std,
    };
    let stream = stream(seed, name);
    // Parallel, because logarithms of billions of numbers take minutes on one core.
    values.par_chunks_mut(PART).enumerate().for_each(|(part, values)| {
        for (pair, values) in values.chunks_mut(2).enumerate() {
            let counter = stream.wrapping_add((part * PART + 2 * pair) as u64);
            let radius = (-2.0 * uniform(mix(counter)).ln()).sqrt() * std;
            let angle = std::f64::consts::TAU * uniform(mix(counter.wrapping_add(1)));
            values[0] = (radius * angle.cos()) as f32;
            if let Some(second) = values.get_mut(1) {
                *second = (radius * angle.sin()) as f32;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_the_moments_they_should() {
        let mut values = vec![0.0; 200_001];
        fill(Init::Normal { std: 0.5 }, 7, "w", &mut values);
        let n = values.len() as f64;
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let variance = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
        // Four standard errors of the mean and of the variance of 200,001 normal numbers.
        assert!(mean.abs() < 4.0 * 0.5 / n.sqrt(), "{mean}");
        assert!((variance - 0.25).abs() < 4.0 * 0.25 * (2.0 / n).sqrt(), "{variance}");
    }

    #[test]
    fn a_perturbation_is_one_bit_of_half_of_the_values() {
        let mut values = vec![0.0; PART + 1000];
        fill(Init::Normal { std: 0.5 }, 7, "w", &mut values);
        values[3] = 0.0;
        let before = values.clone();
        perturb(1, "w", &mut values);
        let distance = |(a, b): (&f32, &f32)| a.to_bits().abs_diff(b.to_bits());
        let distances: Vec<u32> = before.iter().zip(&values).map(distance).collect();
        let flipped: u32 = distances.iter().sum();
        assert!(distances.iter().all(|&distance| distance <= 1) && distances[3] == 0);
        // Four standard deviations of this number of random bits.
        let half = before.len() as f64 / 2.0;
        assert!((f64::from(flipped) - half).abs() < 4.0 * (half / 2.0).sqrt(), "{flipped}");
        let mut other = before.clone();
        perturb(2, "w", &mut other);
        assert_ne!(values, other);
    }

    #[test]
    fn a_value_depends_on_seed_and_name_only() {
        let (mut a, mut b, mut c) = (vec![0.0; 7], vec![0.0; PART + 3], vec![0.0; 7]);
        fill(Init::Normal { std: 1.0 }, 1, "a", &mut a);
        fill(Init::Normal { std: 1.0 }, 1, "a", &mut b);
        fill(Init::Normal { std: 1.0 }, 1, "b", &mut c);
        assert_eq!(a, b[..7]);
        // The first value of a second part, computed separately.
        let mut longer = vec![0.0; 2 * PART];
        fill(Init::Normal { std: 1.0 }, 1, "a", &mut longer);
        assert_eq!(b[..], longer[..PART + 3]);
        assert_ne!(b[0], b[PART]);
        assert_ne!(a, c);
    }
}
