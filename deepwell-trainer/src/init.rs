//! Initial weights: a pure function of seed, parameter name and index.

use deepwell_ir::Init;
use rayon::prelude::*;

/// Values that one thread makes at a time: whole pairs.
const PART: usize = 1 << 16;

/// SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator: any index at once.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A uniform number in the open interval (0, 1).
fn uniform(bits: u64) -> f64 {
    ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

/// Fills `values` with the start of parameter `name`.
///
/// Normal numbers come in pairs by the method of Box and Muller, so that the value at an index
/// does not depend on the length or on threads.
pub fn fill(init: Init, seed: u64, name: &str, values: &mut [f32]) {
    let std = match init {
        Init::Ones => return values.fill(1.0),
        Init::Zeros => return values.fill(0.0),
        Init::Normal { std } => std,
    };
    let hash = blake3::hash(name.as_bytes());
    let mut key = [0u8; 8];
    key.copy_from_slice(&hash.as_bytes()[..8]);
    let stream = mix(seed ^ u64::from_le_bytes(key));
    // Logarithms of billions of numbers take minutes on one core.
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
    fn a_value_depends_on_seed_and_name_only() {
        let (mut a, mut b, mut c) = (vec![0.0; 7], vec![0.0; PART + 3], vec![0.0; 7]);
        fill(Init::Normal { std: 1.0 }, 1, "a", &mut a);
        fill(Init::Normal { std: 1.0 }, 1, "a", &mut b);
        fill(Init::Normal { std: 1.0 }, 1, "b", &mut c);
        assert_eq!(a, b[..7]);
        // The first value of a second part, worked out alone.
        let mut longer = vec![0.0; 2 * PART];
        fill(Init::Normal { std: 1.0 }, 1, "a", &mut longer);
        assert_eq!(b[..], longer[..PART + 3]);
        assert_ne!(b[0], b[PART]);
        assert_ne!(a, c);
    }
}
