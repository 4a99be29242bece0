//! Stochastic rounding of one element of a block, without branches, and of whole matrices.

use super::lanes::{
    Counters, E2m1, E2m3, E3m2, E4m3, E5m2, Element, INFINITY_BITS, LANES, block_amax, survey_any,
};
use crate::e8m0::{self, finite_scale};
use crate::error::{QuantizeError, Shape};
use crate::quantize::{MxSpec, scales_len};
use crate::simd::{Kernel, Level};
use crate::source::Values;
use crate::threads::{ELEMENTS_PER_TASK, join};
use crate::{BLOCK, Block, ElementFormat, Philox, QuantFormat, QuantStats, ScaleRule, Source};

/// [`ElementFormat::encode_stochastic`] of one lane of finite `x` after multiplication.
///
/// The magnitude is truncated at the last bit of its code. `share` holds the 32 bits below this
/// position, which are compared with the random word. Below the smallest normal value the position
/// is fixed, and the significand is shifted down instead.
#[inline(always)]
pub(crate) fn encode_stochastic_lane<E: Element>(
    x: f32,
    factor: f32,
    word: u32,
    underflows: &mut u32,
    saturations: &mut u32,
) -> u8 {
    let bits = (x * factor).to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    *saturations += u32::from(magnitude > E::MAX_BITS);
    let magnitude = magnitude.min(E::MAX_BITS);
    let exponent_min = E::MIN_NORMAL_BITS >> 23;
    let exponent = (magnitude >> 23).max(exponent_min);
    // How far the magnitude's exponent lies below the smallest normal exponent.
    let below = exponent - (magnitude >> 23);
    // A subnormal f32 gets a wrong implicit bit, far below all 32 bits of `share`.
    let significand = (magnitude & 0x007F_FFFF) | 0x0080_0000;
    let units = significand >> (E::SHIFT + below).min(31);
    // Bits above `share` belong to `units`.
    let up = 32 - E::SHIFT;
    let shifted = significand << (up - below.min(up));
    let share = shifted >> (below - below.min(up)).min(31);
    let code = ((exponent - exponent_min) << E::MANTISSA_BITS) + units + u32::from(share > word);
    *underflows += u32::from((code == 0) & (x != 0.0));
    (code | ((bits >> 31) << E::SIGN_BIT)) as u8
}

/// Quantizes a matrix with blocks of 1 x 32 along its rows, as [`crate::quantize_rows`], except
/// that elements are rounded by [`ElementFormat::encode_stochastic`] with the words of `philox` at
/// their row-major indices. For gradients: rounding adds noise with zero mean.
///
/// Scales are computed as in [`crate::quantize_rows`], without randomness.
///
/// ```
/// use deepwell_precision::{ElementFormat, Philox, QuantFormat, quantize_rows_stochastic};
/// let format = QuantFormat { element: ElementFormat::E2M1, ..QuantFormat::MXFP8 };
/// let mut source = [2.25_f32; 4096];
/// source[0] = 6.0; // the first block has the scale 1, between whose values 2 and 3 lies 2.25
/// let (mut codes, mut scales) = ([0; 4096], [0; 128]);
/// let philox = Philox { seed: 7, stream: 0 };
/// quantize_rows_stochastic(&source, 1, 4096, &format, philox, &mut codes, &mut scales)?;
/// assert!(codes[1..32].iter().all(|code| [0x4, 0x5].contains(code)));
/// # Ok::<(), deepwell_precision::QuantizeError>(())
/// ```
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape, [`QuantizeError::Format`] unless
/// the format is MX with 1 x 32 blocks; nothing is written in these cases.
pub fn quantize_rows_stochastic<S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    format: &QuantFormat,
    philox: Philox,
    data: &mut [u8],
    scales: &mut [u8],
) -> Result<QuantStats, QuantizeError> {
    let shape = Shape::new(rows, cols)?;
    shape.expect("src", rows * cols, src.len())?;
    shape.expect("data", rows * cols, data.len())?;
    shape.expect("scales", scales_len(rows, cols), scales.len())?;
    let spec = format.mx_spec()?;
    if format.block != Block::row(BLOCK as u16) {
        return Err(format.refused("blocks of 1x32 for stochastic rounding"));
    }
    if spec.scale_rule == ScaleRule::MinError {
        return Err(format.refused("scales by the largest magnitude for stochastic rounding"));
    }
    let elements = src.len() as u64;
    if src.is_empty() {
        return Ok(QuantStats::default());
    }
    let stats = rows_at_random(S::values(src), cols, spec, philox, data, scales);
    Ok(QuantStats { elements, ..stats })
}

fn rows_at_random(
    src: Values<'_>,
    cols: usize,
    spec: MxSpec,
    philox: Philox,
    data: &mut [u8],
    scales: &mut [u8],
) -> QuantStats {
    let first = 0;
    match src {
        Values::F32(src) => StochasticTask { src, cols, first, spec, philox, data, scales }.run(),
        Values::Bf16(src) => StochasticTask { src, cols, first, spec, philox, data, scales }.run(),
    }
}

/// Words generated together, for a whole number of blocks.
const WORDS: usize = 8 * BLOCK;

/// Whole rows of a matrix, and the destination of its operand.
struct StochasticTask<'a, S> {
    src: &'a [S],
    cols: usize,
    /// Index of the first element.
    first: u64,
    spec: MxSpec,
    philox: Philox,
    data: &'a mut [u8],
    scales: &'a mut [u8],
}

impl<S: Source> StochasticTask<'_, S> {
    /// Halves the rows until tasks are small, then runs the kernel.
    fn run(self) -> QuantStats {
        let Self { src, cols, first, spec, philox, data, scales } = self;
        let rows = src.len() / cols;
        if rows == 1 || src.len() <= ELEMENTS_PER_TASK {
            let task = StochasticTask { src, cols, first, spec, philox, data, scales };
            return Level::Native.run(task);
        }
        let half = rows / 2 * cols;
        let (src, src_rest) = src.split_at(half);
        let (data, data_rest) = data.split_at_mut(half);
        let (scales, scales_rest) = scales.split_at_mut(rows / 2 * cols.div_ceil(BLOCK));
        let (left, right) = join(
            || StochasticTask { src, cols, first, spec, philox, data, scales }.run(),
            || {
                let first = first + half as u64;
                let (src, data, scales) = (src_rest, data_rest, scales_rest);
                StochasticTask { src, cols, first, spec, philox, data, scales }.run()
            },
        );
        left.merged(right)
    }

    #[inline(always)]
    fn kernel<E: Element>(self) -> QuantStats {
        let mut counters = Counters::new();
        let rows = self.src.chunks_exact(self.cols).zip(self.data.chunks_exact_mut(self.cols));
        let mut scales = self.scales.iter_mut();
        let mut index = self.first;
        let mut words = [0; WORDS];
        for (src, data) in rows {
            let blocks = src.chunks(BLOCK).zip(data.chunks_mut(BLOCK)).enumerate();
            for ((block, (src, data)), scale) in blocks.zip(&mut scales) {
                let place = block * BLOCK % WORDS;
                if place == 0 {
                    self.philox.fill(index, &mut words);
                }
                let words: &[u32; BLOCK] = &words.as_chunks::<BLOCK>().0[place / BLOCK];
                let mut x = [0.0; BLOCK];
                for (x, src) in x.iter_mut().zip(src) {
                    *x = src.to_f32();
                }
                let amax = block_amax(&x);
                *scale = if amax < INFINITY_BITS {
                    counters.totals.amax = counters.totals.amax.max(f32::from_bits(amax));
                    let scale = finite_scale(amax, E::CONSTANTS, self.spec.scale_rule);
                    counters.totals.scale_clamps += u64::from(scale.clamped);
                    scale.code as u8
                } else {
                    survey_any(&x[..src.len()], &mut counters.totals);
                    e8m0::from_amax_for(f32::from_bits(amax), E::FORMAT, self.spec.scale_rule)
                };
                let factor = e8m0::reciprocal(*scale);
                let mut codes = [0; BLOCK];
                if amax < INFINITY_BITS {
                    for lane in 0..LANES {
                        codes[lane] = encode_stochastic_lane::<E>(
                            x[lane],
                            factor,
                            words[lane],
                            &mut counters.underflows[lane],
                            &mut counters.saturations[lane],
                        );
                    }
                } else {
                    encode_any::<E>(&x, factor, words, &mut codes, &mut counters.totals);
                }
                data.copy_from_slice(&codes[..data.len()]);
                index += src.len() as u64;
            }
        }
        counters.flush();
        if self.spec.scale_rule == ScaleRule::Rceil {
            // Magnitudes that exceed the limit by one part in 2^23, see `e8m0`, have not saturated.
            counters.totals.saturations = 0;
        }
        counters.totals
    }
}

/// Encodes a block with NaN or infinite elements.
#[inline(never)]
#[cold]
fn encode_any<E: Element>(
    x: &[f32; BLOCK],
    factor: f32,
    words: &[u32; BLOCK],
    codes: &mut [u8; BLOCK],
    totals: &mut QuantStats,
) {
    for ((code, &x), &word) in codes.iter_mut().zip(x).zip(words) {
        *code = E::FORMAT.encode_stochastic(x * factor, word);
        totals.underflows += u64::from(x != 0.0 && *code & E::MAGNITUDE == 0);
        let beyond = (x * factor).abs() > f32::from_bits(E::MAX_BITS);
        totals.saturations += u64::from(x.is_finite() && beyond);
    }
}

impl<S: Source> Kernel for StochasticTask<'_, S> {
    type Output = QuantStats;

    #[inline(always)]
    fn call(self) -> QuantStats {
        match self.spec.element {
            ElementFormat::E4M3 => self.kernel::<E4m3>(),
            ElementFormat::E5M2 => self.kernel::<E5m2>(),
            ElementFormat::E3M2 => self.kernel::<E3m2>(),
            ElementFormat::E2M3 => self.kernel::<E2m3>(),
            ElementFormat::E2M1 => self.kernel::<E2m1>(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lanes and the scalar encoder on all bf16 inputs, with words at and next to their shares.
    #[test]
    fn lanes_follow_the_scalar_encoder() {
        fn check<E: Element>() {
            for bits in 0..=u16::MAX {
                let x = f32::from_bits(u32::from(bits) << 16 | u32::from(bits));
                if !x.is_finite() {
                    continue;
                }
                let mixed = u32::from(bits).wrapping_mul(0x9E37_79B9);
                for word in [0, 1, u32::MAX, 1 << 31, (1 << 31) - 1, mixed] {
                    let (mut underflows, mut saturations) = (0, 0);
                    let (u, s) = (&mut underflows, &mut saturations);
                    let got = encode_stochastic_lane::<E>(x, 1.0, word, u, s);
                    let expected = E::FORMAT.encode_stochastic(x, word);
                    assert_eq!(got, expected, "{} {x:e} {word:#x}", E::FORMAT);
                    let lost = x != 0.0 && expected & E::MAGNITUDE == 0;
                    assert_eq!(underflows, u32::from(lost), "{} {x:e}", E::FORMAT);
                    assert_eq!(saturations, u32::from(x.abs() > E::FORMAT.max()));
                }
            }
        }
        check::<E4m3>();
        check::<E5m2>();
        check::<E3m2>();
        check::<E2m3>();
        check::<E2m1>();
    }

    /// Whole matrices against the definition, at ragged widths and over several tasks.
    #[test]
    fn matrices_follow_the_definition() {
        let philox = Philox { seed: 3, stream: 9 };
        for (rows, cols) in [(1, 1), (3, 33), (2, 64), (5, 100), (700, 130), (0, 4), (4, 0)] {
            let src: Vec<f32> = (0..rows * cols)
                .map(|i| match i % 977 {
                    900 => f32::NAN,
                    950 => f32::NEG_INFINITY,
                    _ => (i as f32 * 0.7).sin() * 2.0_f32.powi((i % 13) as i32 - 6),
                })
                .collect();
            for &element in ElementFormat::ALL {
                let spec = QuantFormat { element, ..QuantFormat::MXFP8 };
                let (mut data, mut scales) =
                    (vec![0xEE; rows * cols], vec![0xEE; scales_len(rows, cols)]);
                let (mut nearest, mut expected_scales) = (data.clone(), scales.clone());
                let stats = quantize_rows_stochastic(
                    &src,
                    rows,
                    cols,
                    &spec,
                    philox,
                    &mut data,
                    &mut scales,
                )
                .unwrap();
                crate::quantize_rows(&src, rows, cols, &spec, &mut nearest, &mut expected_scales)
                    .unwrap();
                assert_eq!(scales, expected_scales);
                let mut expected = QuantStats { elements: src.len() as u64, ..stats };
                (expected.underflows, expected.nonfinite) = (0, 0);
                for (i, (&x, &code)) in src.iter().zip(&data).enumerate() {
                    let scale = scales[i / cols * cols.div_ceil(BLOCK) + i % cols / BLOCK];
                    let word = philox.word(i as u64);
                    let definition = element.encode_stochastic(x * e8m0::reciprocal(scale), word);
                    assert_eq!(code, definition, "{element} {i}");
                    let zero = element.decode(code) == 0.0;
                    expected.underflows += u64::from(zero && x != 0.0);
                    expected.nonfinite += u64::from(!x.is_finite());
                }
                assert_eq!(stats, expected);
            }
        }
    }

    #[test]
    fn formats_that_are_refused() {
        for (spec, expected) in [
            (
                QuantFormat::MXFP8.square(),
                "expected blocks of 1x32 for stochastic rounding, got `mxfp8 32x32`",
            ),
            (
                QuantFormat::MXFP8.with_scale_rule(ScaleRule::MinError),
                "expected scales by the largest magnitude for stochastic rounding, \
                 got `mxfp8 1x32`",
            ),
        ] {
            let philox = Philox::default();
            let error =
                quantize_rows_stochastic(&[0.0_f32], 1, 1, &spec, philox, &mut [0], &mut [0]);
            assert_eq!(error.unwrap_err().to_string(), expected);
        }
    }
}
