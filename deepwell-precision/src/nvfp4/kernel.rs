//! Up to sixteen blocks of up to sixteen rows: scales, elements and counters.

use super::four_six::four_or_six;
use super::{BLOCK, Nvfp4Spec, ScaleOrder};
use crate::quantize::lanes::{Counters, E2m1, INFINITY_BITS, LANES, encode_lanes, survey_any};
use crate::quantize::stochastic::encode_stochastic_lane;
use crate::{ElementFormat, Overflow, QuantStats, Rounding, Source, e2m1, packed, ue4m3};

/// Blocks along the contraction that are processed together, with scales in one AVX-512 register.
const SEGMENT_BLOCKS: usize = 16;
/// Elements along the contraction that are processed together.
pub(super) const SEGMENT: usize = SEGMENT_BLOCKS * BLOCK;

/// Blocks whose elements are encoded together.
const PAIR: usize = LANES / BLOCK;

const _: () = assert!(PAIR == 2);

/// Constants of a tensor.
#[derive(Clone, Copy)]
pub(super) struct Constants {
    pub(super) encode_scale: f32,
    /// The tensor scale, 1 / `encode_scale`.
    pub(super) decode_scale: f32,
    pub(super) spec: Nvfp4Spec,
    /// Elements of a row of the operand.
    pub(super) cols: usize,
}

impl Constants {
    pub(super) fn new(encode_scale: f32, spec: Nvfp4Spec, cols: usize) -> Self {
        Self { encode_scale, decode_scale: 1.0 / encode_scale, spec, cols }
    }
}

/// Destination of a segment, in an operand or in whole rows of one.
pub(super) struct Out<'a> {
    pub(super) bytes: &'a mut [u8],
    pub(super) scales: &'a mut [u8],
    /// Row of the operand at which the slices start.
    pub(super) first_row: usize,
}

/// Scale bytes of a segment, and the factors of its elements.
pub(super) struct Scales {
    pub(super) bytes: [u8; SEGMENT_BLOCKS],
    pub(super) factors: [f32; SEGMENT_BLOCKS],
}

/// Quantizes a segment: `rows` holds the same columns, from `col` on, of neighbouring rows of the
/// operand with common scales. `row` is the first of these rows, relative to the start of `out`.
#[inline(always)]
pub(super) fn segment<S: Source, const STOCHASTIC: bool>(
    rows: &[&[S]],
    row: usize,
    col: usize,
    constants: &Constants,
    out: &mut Out<'_>,
    counters: &mut Counters,
) {
    let mut amax = [0_u32; SEGMENT_BLOCKS];
    for src in rows {
        let (blocks, rest) = src.as_chunks::<BLOCK>();
        for (amax, block) in amax.iter_mut().zip(blocks) {
            // `black_box` for the reason given at `quantize::lanes::block_amax`.
            *amax = (*amax).max(block_amax(core::hint::black_box(block)));
        }
        if !rest.is_empty() {
            let amax = &mut amax[blocks.len()];
            *amax = (*amax).max(block_amax(rest));
        }
    }
    let largest = amax.iter().fold(0, |a: u32, &b| a.max(b));
    let mut scales = if largest < INFINITY_BITS {
        counters.totals.amax = counters.totals.amax.max(f32::from_bits(largest));
        finite_scales(&amax, constants, &mut counters.totals)
    } else {
        rows.iter().for_each(|src| survey_wide(src, &mut counters.totals));
        any_scales(&amax, constants, &mut counters.totals)
    };
    if constants.spec.four_six {
        four_or_six(rows[0], &amax, constants, &mut scales, &mut counters.totals);
    }

    let (blocks, row_bytes) = (constants.cols.div_ceil(BLOCK), constants.cols.div_ceil(2));
    for (i, src) in rows.iter().enumerate() {
        let row = row + i;
        let out_scales = &mut out.scales[row * blocks + col / BLOCK..];
        let len = src.len().div_ceil(BLOCK);
        out_scales[..len].copy_from_slice(&scales.bytes[..len]);
        let out_bytes = &mut out.bytes[row * row_bytes + col / 2..][..src.len().div_ceil(2)];
        let (first_word, stride) = constants.spec.words;
        let index = first_word + (out.first_row + row) as u64 * stride + col as u64;
        if largest < INFINITY_BITS {
            encode_row::<S, STOCHASTIC>(src, index, &scales, constants, out_bytes, counters);
        } else {
            encode_row_any(src, index, &scales, constants, out_bytes, &mut counters.totals);
        }
    }
}

/// Largest magnitude, as bits; the order is finite, infinity, NaN.
#[inline(always)]
fn block_amax<S: Source>(block: &[S]) -> u32 {
    block.iter().fold(0, |amax, x| amax.max(x.to_f32().to_bits() & 0x7FFF_FFFF))
}

/// Scales of finite blocks.
#[inline(always)]
fn finite_scales(
    amax: &[u32; SEGMENT_BLOCKS],
    constants: &Constants,
    totals: &mut QuantStats,
) -> Scales {
    let encode_scale = constants.encode_scale;
    // The one quotient of a tensor.
    let sixth_of_encode = encode_scale * (1.0 / e2m1::MAX);
    let is_multiplied = constants.spec.order == ScaleOrder::Te && !constants.spec.four_six;
    let mut scales = Scales { bytes: [0; SEGMENT_BLOCKS], factors: [0.0; SEGMENT_BLOCKS] };
    let mut clamps = 0;
    let outs = scales.bytes.iter_mut().zip(&mut scales.factors);
    for (&amax, (code, factor)) in amax.iter().zip(outs) {
        let largest = f32::from_bits(amax);
        let wanted = match is_multiplied {
            true => largest * sixth_of_encode,
            false => largest / e2m1::MAX * encode_scale,
        };
        (*code, *factor) = constants.scale(wanted);
        clamps += u32::from((*code == 0) & (amax != 0));
    }
    totals.scale_clamps += u64::from(clamps);
    scales
}

/// [`finite_scales`] for blocks with NaN or infinities.
#[inline(never)]
#[cold]
fn any_scales(
    amax: &[u32; SEGMENT_BLOCKS],
    constants: &Constants,
    totals: &mut QuantStats,
) -> Scales {
    let finite = amax.map(|bits| if bits < INFINITY_BITS { bits } else { 0 });
    let mut scales = finite_scales(&finite, constants, totals);
    for (i, &bits) in amax.iter().enumerate() {
        if bits >= INFINITY_BITS {
            (scales.bytes[i], scales.factors[i]) = (ue4m3::CODE_NAN, f32::NAN);
        }
    }
    scales
}

/// Encodes a row of finite elements into packed bytes.
#[inline(always)]
fn encode_row<S: Source, const STOCHASTIC: bool>(
    src: &[S],
    index: u64,
    scales: &Scales,
    constants: &Constants,
    bytes: &mut [u8],
    counters: &mut Counters,
) {
    let mut words = [0; SEGMENT];
    if STOCHASTIC && let Some(philox) = constants.spec.stochastic {
        philox.fill(index, &mut words[..src.len()]);
    }
    let chunks = src
        .chunks(LANES)
        .zip(bytes.chunks_mut(LANES / 2))
        .zip(words.as_chunks::<LANES>().0)
        .zip(scales.factors.as_chunks::<PAIR>().0);
    for (((src, bytes), words), factors) in chunks {
        let mut x = [0.0; LANES];
        match src.as_array::<LANES>() {
            Some(src) => {
                for lane in 0..LANES {
                    x[lane] = src[lane].to_f32();
                }
            }
            None => {
                for (x, src) in x.iter_mut().zip(src) {
                    *x = src.to_f32();
                }
            }
        }
        let mut by_lane = [0.0; LANES];
        for lane in 0..LANES {
            by_lane[lane] = factors[lane / BLOCK];
        }
        let mut elements = [0; LANES];
        if STOCHASTIC {
            for lane in 0..LANES {
                elements[lane] = encode_stochastic_lane::<E2m1>(
                    x[lane],
                    by_lane[lane],
                    words[lane],
                    &mut counters.underflows[lane],
                    &mut counters.saturations[lane],
                );
            }
        } else {
            encode_lanes::<E2m1, true>(&x, &by_lane, &mut elements, counters);
        }
        let pairs = packed::pack_pairs(&elements);
        match bytes.as_mut_array::<{ LANES / 2 }>() {
            Some(bytes) => *bytes = pairs,
            None => bytes.copy_from_slice(&pairs[..bytes.len()]),
        }
    }
}

/// [`encode_row`] for rows with NaN or infinities.
#[inline(never)]
#[cold]
fn encode_row_any<S: Source>(
    src: &[S],
    index: u64,
    scales: &Scales,
    constants: &Constants,
    bytes: &mut [u8],
    totals: &mut QuantStats,
) {
    bytes.fill(0);
    for (i, x) in src.iter().enumerate() {
        let x = x.to_f32();
        let scaled = x * scales.factors[i / BLOCK];
        let code = match constants.spec.stochastic {
            Some(philox) => {
                ElementFormat::E2M1.encode_stochastic(scaled, philox.word(index + i as u64))
            }
            None => e2m1::encode(scaled, Rounding::NearestEven, Overflow::Saturate),
        };
        bytes[i / 2] |= code << (i % 2 * 4);
        totals.underflows += u64::from(x != 0.0 && code & e2m1::CODE_MAX == 0);
        totals.saturations += u64::from(x.is_finite() && scaled.abs() > e2m1::MAX);
    }
}

/// [`survey_any`] of elements of any type.
#[inline(never)]
#[cold]
fn survey_wide<S: Source>(src: &[S], totals: &mut QuantStats) {
    src.iter().for_each(|x| survey_any(&[x.to_f32()], totals));
}
