//! Operations on one element of a block, without branches, so that loops vectorize.
//!
//! # Rounding by one addition
//!
//! Codes of one binade are evenly spaced, and subnormal codes have the spacing of the smallest
//! normal binade. Let 2^e be the binade of |x|, or the smallest normal binade if |x| lies below it.
//! Adding 2^(e + 23 - m) to |x|, with m the fraction bits of the format, makes one unit in the last
//! place of the sum one unit of the code, so that the addition rounds to nearest even. The low bits
//! of the sum then count units n, and the code is `n + ((e - e_min) << m)`; a carry into the next
//! binade is correct. The constant part of the shifted exponent is added to the magic number
//! beforehand: this part is even, so ties are not affected.

use crate::e8m0::ScaleConstants;
use crate::{ElementFormat, Overflow, QuantStats, Rounding, Source, e2m1, e2m3, e3m2, e4m3, e5m2};

/// Bits of f32 infinity. Larger magnitudes need [`encode_any`]; see [`largest_of_lanes`].
pub(crate) const INFINITY_BITS: u32 = 0x7F80_0000;
/// Lanes of the counters: one block, two AVX-512 registers.
pub(crate) const LANES: usize = 32;

/// An element format as constants.
pub(crate) trait Element: Copy {
    const FORMAT: ElementFormat;
    const MANTISSA_BITS: u32;
    /// Bits of the smallest normal value, as f32.
    const MIN_NORMAL_BITS: u32;
    /// Bits of the largest finite value, as f32.
    const MAX_BITS: u32;
    /// Position of the sign bit in the code.
    const SIGN_BIT: u32 = 7;
    /// Code bits without the sign.
    const MAGNITUDE: u8 = (1 << Self::SIGN_BIT) - 1;

    const CONSTANTS: ScaleConstants = ScaleConstants::new(Self::FORMAT);
    /// Right shift that moves the exponent above the code's fraction.
    const SHIFT: u32 = 23 - Self::MANTISSA_BITS;
    /// Added to the bits of 2^e: 23 - m binades up, plus the constant part of the code.
    const MAGIC: u32 =
        (Self::SHIFT << 23) + ((Self::MIN_NORMAL_BITS >> Self::SHIFT).wrapping_neg() & 0xFF);
    /// Magnitudes up to this (half the smallest subnormal) become zero.
    const ZERO_BITS: u32 = Self::MIN_NORMAL_BITS - ((Self::MANTISSA_BITS + 1) << 23);

    fn encode_any(x: f32) -> u8;
}

#[derive(Clone, Copy)]
pub(crate) struct E4m3;
#[derive(Clone, Copy)]
pub(crate) struct E5m2;
#[derive(Clone, Copy)]
pub(crate) struct E3m2;
#[derive(Clone, Copy)]
pub(crate) struct E2m3;
#[derive(Clone, Copy)]
pub(crate) struct E2m1;

impl Element for E4m3 {
    const FORMAT: ElementFormat = ElementFormat::E4M3;
    const MANTISSA_BITS: u32 = e4m3::MANTISSA_BITS;
    const MIN_NORMAL_BITS: u32 = e4m3::MIN_NORMAL.to_bits();
    const MAX_BITS: u32 = e4m3::MAX.to_bits();

    fn encode_any(x: f32) -> u8 {
        e4m3::encode(x, Rounding::NearestEven, Overflow::Saturate)
    }
}

impl Element for E5m2 {
    const FORMAT: ElementFormat = ElementFormat::E5M2;
    const MANTISSA_BITS: u32 = e5m2::MANTISSA_BITS;
    const MIN_NORMAL_BITS: u32 = e5m2::MIN_NORMAL.to_bits();
    const MAX_BITS: u32 = e5m2::MAX.to_bits();

    fn encode_any(x: f32) -> u8 {
        e5m2::encode(x, Rounding::NearestEven, Overflow::Saturate)
    }
}

impl Element for E3m2 {
    const FORMAT: ElementFormat = ElementFormat::E3M2;
    const MANTISSA_BITS: u32 = e3m2::MANTISSA_BITS;
    const MIN_NORMAL_BITS: u32 = e3m2::MIN_NORMAL.to_bits();
    const MAX_BITS: u32 = e3m2::MAX.to_bits();
    const SIGN_BIT: u32 = e3m2::SIGN_BIT;

    fn encode_any(x: f32) -> u8 {
        e3m2::encode(x, Rounding::NearestEven, Overflow::Saturate)
    }
}

impl Element for E2m3 {
    const FORMAT: ElementFormat = ElementFormat::E2M3;
    const MANTISSA_BITS: u32 = e2m3::MANTISSA_BITS;
    const MIN_NORMAL_BITS: u32 = e2m3::MIN_NORMAL.to_bits();
    const MAX_BITS: u32 = e2m3::MAX.to_bits();
    const SIGN_BIT: u32 = e2m3::SIGN_BIT;

    fn encode_any(x: f32) -> u8 {
        e2m3::encode(x, Rounding::NearestEven, Overflow::Saturate)
    }
}

impl Element for E2m1 {
    const FORMAT: ElementFormat = ElementFormat::E2M1;
    const MANTISSA_BITS: u32 = e2m1::MANTISSA_BITS;
    const MIN_NORMAL_BITS: u32 = e2m1::MIN_NORMAL.to_bits();
    const MAX_BITS: u32 = e2m1::MAX.to_bits();
    const SIGN_BIT: u32 = e2m1::SIGN_BIT;

    fn encode_any(x: f32) -> u8 {
        e2m1::encode(x, Rounding::NearestEven, Overflow::Saturate)
    }
}

const _: () = assert!(f32::from_bits(E4m3::ZERO_BITS) == e4m3::MIN_SUBNORMAL / 2.0);
const _: () = assert!(f32::from_bits(E5m2::ZERO_BITS) == e5m2::MIN_SUBNORMAL / 2.0);
const _: () = assert!(f32::from_bits(E3m2::ZERO_BITS) == e3m2::MIN_SUBNORMAL / 2.0);
const _: () = assert!(f32::from_bits(E2m3::ZERO_BITS) == e2m3::MIN_SUBNORMAL / 2.0);
const _: () = assert!(f32::from_bits(E2m1::ZERO_BITS) == e2m1::MIN_SUBNORMAL / 2.0);
const _: () = assert!(E4m3::MAGIC & 1 == 0 && E5m2::MAGIC & 1 == 0);
const _: () = assert!(E3m2::MAGIC & 1 == 0 && E2m3::MAGIC & 1 == 0 && E2m1::MAGIC & 1 == 0);

/// Counters of one task: a lane per counter element, so that counting takes an addition without a
/// reduction across lanes.
#[derive(Clone)]
pub(crate) struct Counters {
    pub(crate) underflows: [u32; LANES],
    pub(crate) saturations: [u32; LANES],
    /// Rare events, and counts that are already a single number.
    pub(crate) totals: QuantStats,
}

impl Counters {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self { underflows: [0; LANES], saturations: [0; LANES], totals: QuantStats::default() }
    }

    /// Moves the lanes into the totals. Must be called before a lane has counted 2^32 elements.
    #[inline(always)]
    pub(crate) fn flush(&mut self) {
        let sum = |lanes: &[u32; LANES]| lanes.iter().map(|&n| u64::from(n)).sum::<u64>();
        self.totals.underflows += sum(&self.underflows);
        self.totals.saturations += sum(&self.saturations);
        self.underflows = [0; LANES];
        self.saturations = [0; LANES];
    }
}

/// Largest magnitude of a block, as bits; the order is finite, infinity, NaN.
#[inline(always)]
pub(crate) fn block_amax<S: Source>(block: &[S; LANES]) -> u32 {
    // `black_box` keeps the optimizer from computing the maxima of sixteen blocks at once with
    // gathers. For data in cache, as in training, gathers made rows slower: 13.4 instead of 18.3
    // GB/s from f32, 4.1 instead of 7.9 from bf16. From memory gathers are faster for f32 (8.9 to
    // 10.7 against 5.6 to 7.6) and slower for bf16.
    let block = core::hint::black_box(block);
    block.iter().fold(0, |amax, x| amax.max(x.to_f32().to_bits() & 0x7FFF_FFFF))
}

/// Encodes one lane of finite `x` after multiplication by a power of two. The scaled value must not
/// round beyond the largest finite element, unless `CLIP`, which also counts saturations.
#[inline(always)]
pub(crate) fn encode_lane<E: Element, const CLIP: bool>(
    x: f32,
    reciprocal: f32,
    underflows: &mut u32,
    saturations: &mut u32,
) -> u8 {
    let bits = (x * reciprocal).to_bits();
    let mut magnitude = bits & 0x7FFF_FFFF;
    // Compares with x, not with the product, which may have underflowed itself.
    *underflows += u32::from((magnitude <= E::ZERO_BITS) & (x != 0.0));
    if CLIP {
        *saturations += u32::from(magnitude > E::MAX_BITS);
        magnitude = magnitude.min(E::MAX_BITS);
    }
    let binade = magnitude.max(E::MIN_NORMAL_BITS) & 0x7F80_0000;
    let sum = f32::from_bits(magnitude) + f32::from_bits(binade + E::MAGIC);
    let code = sum.to_bits().wrapping_add(binade >> E::SHIFT);
    // The low bits of `code` are the code without its sign.
    ((code & u32::from(E::MAGNITUDE)) | ((bits >> 31) << E::SIGN_BIT)) as u8
}

/// Bits of the largest magnitude that [`encode_lane`] accepts. Without `CLIP` the limit is where
/// RCEIL lets elements saturate; larger magnitudes need [`encode_any`].
#[inline(always)]
pub(crate) fn largest_of_lanes<E: Element, const CLIP: bool>() -> u32 {
    if CLIP { INFINITY_BITS - 1 } else { E::CONSTANTS.amax_bits_max }
}

/// Encodes one block of finite elements with a common factor.
#[inline(always)]
pub(crate) fn encode_block<E: Element, const CLIP: bool>(
    x: &[f32; LANES],
    reciprocal: f32,
    out: &mut [u8; LANES],
    counters: &mut Counters,
) {
    encode_lanes::<E, CLIP>(x, &[reciprocal; LANES], out, counters);
}

/// Encodes finite elements with individual factors.
#[inline(always)]
pub(crate) fn encode_lanes<E: Element, const CLIP: bool>(
    x: &[f32; LANES],
    reciprocals: &[f32; LANES],
    out: &mut [u8; LANES],
    counters: &mut Counters,
) {
    for i in 0..LANES {
        out[i] = encode_lane::<E, CLIP>(
            x[i],
            reciprocals[i],
            &mut counters.underflows[i],
            &mut counters.saturations[i],
        );
    }
}

/// Encodes elements that may be NaN, infinite or too large for their scale; `count_saturations`
/// under the floor rule.
#[inline(never)]
#[cold]
pub(crate) fn encode_any<E: Element>(
    x: &[f32],
    reciprocals: &[f32],
    count_saturations: bool,
    out: &mut [u8],
    totals: &mut QuantStats,
) {
    for ((&x, &reciprocal), code) in x.iter().zip(reciprocals).zip(out) {
        let scaled = x * reciprocal;
        *code = E::encode_any(scaled);
        totals.underflows += u64::from(x != 0.0 && *code & E::MAGNITUDE == 0);
        let saturated = x.is_finite() && scaled.abs() > f32::from_bits(E::MAX_BITS);
        totals.saturations += u64::from(count_saturations && saturated);
    }
}

/// Adds the non-finite elements and the largest finite magnitude of `x` to `totals`.
#[inline(never)]
#[cold]
pub(crate) fn survey_any(x: &[f32], totals: &mut QuantStats) {
    for x in x {
        if x.is_finite() {
            totals.amax = totals.amax.max(x.abs());
        } else {
            totals.nonfinite += 1;
        }
    }
}
