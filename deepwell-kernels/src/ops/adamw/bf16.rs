//! AdamW with master weights in BF16 on a CPU: the update in FP32, rounded stochastically.

use deepwell_ir::ops::AdamWCoefficients;
use deepwell_precision::Philox;
use deepwell_precision::moments::{self, BLOCK, BLOCK_BYTES, Moment};
use half::bf16;
use rayon::prelude::*;

use super::cpu::{Coefficients, update};
use crate::runtime::cpu::parallel::{ELEMENTS_PER_CHUNK, vectorized};

const _: () = assert!(ELEMENTS_PER_CHUNK.is_multiple_of(BLOCK));

/// Bytes of a moment in eight bits of a chunk.
const CHUNK_BYTES: usize = ELEMENTS_PER_CHUNK / BLOCK * BLOCK_BYTES;

/// Both moments of a parameter.
#[derive(Debug)]
pub enum MomentsMut<'a> {
    /// FP32.
    Fp32([&'a mut [f32]; 2]),
    /// Blocks of [`deepwell_precision::moments`].
    Fp8([&'a mut [u8]; 2]),
}

/// Rounds to one of the two neighbours in BF16, away from zero with a probability equal to the
/// fraction of the distance to the neighbour nearer to zero. The lower 16 bits of `random` decide.
/// Infinities and NaN stay.
#[inline(always)]
pub fn stochastic(x: f32, random: u32) -> bf16 {
    if !x.is_finite() {
        return bf16::from_f32(x);
    }
    bf16::from_bits((x.to_bits().wrapping_add(random & 0xFFFF) >> 16) as u16)
}

/// Random bits of the masters of parameter `index` in a step. Moments in eight bits use the stream
/// `index`.
fn random_of(step: u64, index: usize) -> Philox {
    Philox { seed: step, stream: 1 << 32 | index as u64 }
}

/// One step on one parameter, from the coefficients of [`AdamWCoefficients`]. `index` is the
/// parameter's among those of the program.
///
/// # Panics
/// If the lengths differ.
pub fn adamw_bf16(
    param: &mut [bf16],
    grad: &[f32],
    moments: MomentsMut<'_>,
    index: usize,
    weight_decay: f64,
    coefficients: &[f32; AdamWCoefficients::COUNT],
) {
    assert_eq!(param.len(), grad.len(), "`grad` differs in length");
    match &moments {
        MomentsMut::Fp32(both) => {
            assert!(both.iter().all(|it| it.len() == param.len()), "a moment differs in length");
        }
        MomentsMut::Fp8(both) => {
            let bytes = moments::blocks(param.len()) * BLOCK_BYTES;
            assert!(both.iter().all(|it| it.len() == bytes), "expected {bytes} bytes of a moment");
        }
    }
    let coefficients = Coefficients::from_array(*coefficients);
    if coefficients.step() > 0 {
        let decay = coefficients.decay(weight_decay);
        apply(param, grad, moments, index, decay, coefficients);
    }
}

/// Updates one parameter. `index` is the parameter's among those of the program.
pub(super) fn apply(
    param: &mut [bf16],
    grad: &[f32],
    moments: MomentsMut<'_>,
    index: usize,
    decay: f32,
    coefficients: Coefficients,
) {
    let step = coefficients.step();
    let update = Update { index, step, decay, coefficients };
    let chunks = param.par_chunks_mut(ELEMENTS_PER_CHUNK).zip(grad.par_chunks(ELEMENTS_PER_CHUNK));
    match moments {
        MomentsMut::Fp32([first, second]) => chunks
            .zip(first.par_chunks_mut(ELEMENTS_PER_CHUNK))
            .zip(second.par_chunks_mut(ELEMENTS_PER_CHUNK))
            .enumerate()
            .for_each(|(chunk, (((param, grad), first), second))| {
                vectorized(
                    #[inline(always)]
                    || update.with_fp32(param, grad, [first, second], chunk * ELEMENTS_PER_CHUNK),
                );
            }),
        MomentsMut::Fp8([first, second]) => chunks
            .zip(first.par_chunks_mut(CHUNK_BYTES))
            .zip(second.par_chunks_mut(CHUNK_BYTES))
            .enumerate()
            .for_each(|(chunk, (((param, grad), first), second))| {
                vectorized(
                    #[inline(always)]
                    || update.with_fp8(param, grad, [first, second], chunk * ELEMENTS_PER_CHUNK),
                );
            }),
    }
}

/// An update of one parameter.
#[derive(Clone, Copy)]
struct Update {
    index: usize,
    step: u64,
    decay: f32,
    coefficients: Coefficients,
}

impl Update {
    #[inline(always)]
    fn with_fp32(
        &self,
        param: &mut [bf16],
        grad: &[f32],
        [first, second]: [&mut [f32]; 2],
        begin: usize,
    ) {
        let blocks = param.chunks_mut(BLOCK).zip(grad.chunks(BLOCK));
        let blocks = blocks.zip(first.chunks_mut(BLOCK)).zip(second.chunks_mut(BLOCK));
        for (block, (((param, grad), m), v)) in blocks.enumerate() {
            self.block(param, grad, m, v, begin + block * BLOCK);
        }
    }

    #[inline(always)]
    fn with_fp8(
        &self,
        param: &mut [bf16],
        grad: &[f32],
        [first, second]: [&mut [u8]; 2],
        begin: usize,
    ) {
        let random = Philox { seed: self.step, stream: self.index as u64 };
        let first = first.as_chunks_mut::<BLOCK_BYTES>().0;
        let second = second.as_chunks_mut::<BLOCK_BYTES>().0;
        let blocks = param.chunks_mut(BLOCK).zip(grad.chunks(BLOCK)).zip(first).zip(second);
        for (block, (((param, grad), first), second)) in blocks.enumerate() {
            let (mut m, mut v, mut words) = ([0.0; BLOCK], [0.0; BLOCK], [0; BLOCK]);
            moments::decode(first, Moment::First, &mut m);
            moments::decode(second, Moment::Second, &mut v);
            let (len, at) = (param.len(), begin + block * BLOCK);
            self.block(param, grad, &mut m[..len], &mut v[..len], at);
            random.fill(at as u64, &mut words);
            moments::encode(&m, Moment::First, &words, first);
            moments::encode(&v, Moment::Second, &words, second);
        }
    }

    /// Updates at most [`BLOCK`] elements from index `at` on.
    #[inline(always)]
    fn block(&self, param: &mut [bf16], grad: &[f32], m: &mut [f32], v: &mut [f32], at: usize) {
        let (mut weights, mut words) = ([0.0; BLOCK], [0; BLOCK]);
        let weights = &mut weights[..param.len()];
        weights.iter_mut().zip(&*param).for_each(|(wide, narrow)| *wide = narrow.to_f32());
        update(weights, grad, m, v, self.decay, self.coefficients);
        random_of(self.step, self.index).fill(at as u64, &mut words);
        for ((narrow, wide), random) in param.iter_mut().zip(weights).zip(words) {
            *narrow = stochastic(*wide, random);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_rounds_to_its_neighbours_with_the_right_mean() {
        // Between 1 and 1 + 2^-7, a quarter of the way; then a negative and a subnormal number.
        let unit = 2f32.powi(-7);
        for (x, low, step, share) in [
            (1.0 + unit / 4.0, 1.0, unit, 0.25),
            (-1.0 - unit * 0.75, -1.0, -unit, 0.75),
            (f32::from_bits(0x8000), 0.0, f32::from_bits(0x10000), 0.5),
            (3.0, 3.0, 0.0, 0.0),
        ] {
            let ups = (0..1 << 16).filter(|&random| {
                let rounded = stochastic(x, random).to_f32();
                assert!(rounded == low || rounded == low + step, "{x} became {rounded}");
                rounded != low
            });
            assert_eq!(ups.count() as f64 / 65536.0, share, "{x}");
        }
        for x in [f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(stochastic(x, 0xFFFF).to_f32(), x);
        }
        assert!(stochastic(f32::NAN, 0xFFFF).to_f32().is_nan());
        // The upper half of a word has no part.
        assert_eq!(stochastic(1.0 + unit / 4.0, 0xFFFF_0000).to_f32(), 1.0);
    }

    /// Small updates are lost to rounding to nearest; rounded stochastically they arrive on
    /// average.
    #[test]
    fn updates_below_half_a_step_arrive_on_average() {
        let len = 40_000;
        let mut param = vec![bf16::from_f32(1.0); len];
        let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
        let rate = 1e-4;
        for step in 1..=20u16 {
            // A gradient of 1 moves a weight by the learning rate.
            let coefficients = [
                f32::from(step),
                rate,
                1.0,
                0.1,
                0.95,
                0.05,
                rate / (1.0 - 0.9f32.powi(step.into())),
                (1.0 - 0.95f32.powi(step.into())).sqrt().recip(),
                1e-8,
            ];
            let moments = MomentsMut::Fp32([&mut m, &mut v]);
            adamw_bf16(&mut param, &vec![1.0; len], moments, 3, 0.0, &coefficients);
        }
        let mean = param.iter().map(|w| f64::from(w.to_f32())).sum::<f64>() / len as f64;
        // A weight below 1 has steps of 2^-8: a rounding has a variance of at most a quarter of the
        // square, 20 of them have 20 times as much. Five standard errors.
        let error = 5.0 * (20.0f64 / 4.0).sqrt() * 2f64.powi(-8) / (len as f64).sqrt();
        assert!((mean - (1.0 - 20.0 * f64::from(rate))).abs() < error, "{mean}");
    }
}
