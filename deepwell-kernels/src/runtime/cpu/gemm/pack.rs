//! Packing: from an operand's memory to the panels that the 32 x 32 kernels read.
//!
//! A panel holds 32 outer rows over all of `k`, as one 2048-byte step per 32 along `k`. A step is
//! two tiles of 1024 bytes, for outer rows 0-15 and 16-31. A tile is 16 vectors of 64 bytes:
//!
//! - A needs vectors by *row*: vector `i` holds outer row `i`, 32 numbers along `k`;
//! - B needs vectors by *pair*: vector `p` holds, for each of 16 outer rows, the numbers at
//!   `k = 2p` and `2p + 1` (VNNI order);
//! - A widened to FP32 has vectors by row; its vectors, tiles and steps are twice as large.
//!
//! By row and by pair are each other's transpose as 16 x 16 matrices of 32-bit pairs. Memory that
//! is contiguous along `k` is loaded by row, memory that is contiguous along the outer dimension by
//! pair (two rows interleaved); a transposition follows if the panel needs the other form. Elements
//! beyond `outer` or `k` are zero.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use deepwell_precision::{ElementFormat, e8m0};
use half::bf16;

use super::elements::{unpack_block, values_of};
use super::operand::{Operand, OperandData};
use crate::runtime::cpu::element::Element;

/// Elements of one step of a panel.
pub(super) const STEP: usize = 1024;

/// Order of the numbers within a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Form of A.
    ByRow,
    /// Form of A when widened to FP32.
    WideByRow,
    /// Form of B.
    ByPair,
}

impl Form {
    /// Two-byte elements in a step of a panel.
    pub(super) fn step(self) -> usize {
        if self == Form::WideByRow { 2 * STEP } else { STEP }
    }
}

/// Sixteen vectors: one tile.
type Tile = [__m512i; 16];

/// Packs outer rows `first..first + 32` of `operand` (`[outer, k]`, validated) into `panel`.
///
/// # Safety
///
/// The CPU has AVX-512 F, BW and VL; `operand` has been validated for `[outer, k]`;
/// `first < outer`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack_panel(
    operand: &Operand<'_>,
    outer: usize,
    k: usize,
    first: usize,
    form: Form,
    panel: &mut [u16],
) {
    debug_assert_eq!(panel.len(), k.div_ceil(32) * form.step());
    for (step, packed) in panel.chunks_exact_mut(form.step()).enumerate() {
        for (half, packed) in packed.chunks_exact_mut(form.step() / 2).enumerate() {
            let row = first + half * 16;
            let rows = outer.saturating_sub(row).min(16);
            let columns = (k - step * 32).min(32);
            let region = TileRegion { row, rows, column: step * 32, columns };
            // SAFETY: `region` lies inside `[outer, k]`, for which the operand was validated.
            let (mut tile, loaded) = unsafe { load_tile(operand, k, region) };
            if (loaded == Form::ByPair) != (form == Form::ByPair) {
                transpose(&mut tile);
            }
            let vectors = tile.iter().zip(packed.chunks_exact_mut(form.step() / 32));
            if form == Form::WideByRow {
                for (vector, packed) in vectors {
                    let [lower, upper] = widen(*vector);
                    let packed = packed.as_mut_ptr().cast::<f32>();
                    // SAFETY: 64 elements of two bytes.
                    unsafe {
                        _mm512_storeu_ps(packed, lower);
                        _mm512_storeu_ps(packed.add(16), upper);
                    }
                }
            } else {
                for (vector, packed) in vectors {
                    // SAFETY: 32 elements of two bytes.
                    unsafe { _mm512_storeu_si512(packed.as_mut_ptr().cast(), *vector) };
                }
            }
        }
    }
}

/// Widens 32 BF16 numbers to FP32, in order.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn widen(vector: __m512i) -> [__m512; 2] {
    let widen =
        |half: __m256i| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
    [widen(_mm512_castsi512_si256(vector)), widen(_mm512_extracti64x4_epi64::<1>(vector))]
}

/// A region of an operand of at most 16 x 32.
#[derive(Clone, Copy)]
struct TileRegion {
    row: usize,
    rows: usize,
    column: usize,
    columns: usize,
}

/// Loads the tile at `region`, in the form that is cheapest for the memory layout.
///
/// # Safety
///
/// The CPU's features; `operand` has been validated for a matrix that contains `region`, with rows
/// of `k`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load_tile(operand: &Operand<'_>, k: usize, region: TileRegion) -> (Tile, Form) {
    let TileRegion { row, rows, column, columns } = region;
    match operand.data {
        // SAFETY: `region` is inside the validated matrix, in each of the three layouts.
        OperandData::Bf16(data) => unsafe {
            let first = row * operand.outer_stride + column * operand.k_stride;
            let data = data.as_ptr().cast::<u16>().wrapping_add(first);
            if operand.k_stride == 1 {
                (load_rows(data, operand.outer_stride, rows, columns), Form::ByRow)
            } else if operand.outer_stride == 1 {
                (load_pairs(data, operand.k_stride, rows, columns), Form::ByPair)
            } else {
                let strides = (operand.outer_stride, operand.k_stride);
                (gather_rows(data, strides, rows, columns), Form::ByRow)
            }
        },
        OperandData::Mx { element, scales, .. } if element != ElementFormat::E4M3 => {
            let decoded = decode_elements(operand, element, scales, k, region);
            // SAFETY: the local array holds 16 rows of 32.
            (unsafe { load_rows(decoded.as_ptr().cast(), 32, rows, columns) }, Form::ByRow)
        }
        // SAFETY: `region` is inside the validated matrix, and begins at a block of 32.
        OperandData::Mx { data, scales, .. } => unsafe {
            let stride = operand.outer_stride;
            let data = data.as_ptr().wrapping_add(row * stride + column);
            // Within 32 rows, scales are 16 bytes apart; a part begins at such a group of rows.
            debug_assert!(row % 32 + rows <= 32);
            let first = operand.scale_offset(row, column / 32, k);
            let scales = scales.as_ptr().wrapping_add(first);
            (decode_rows(data, stride, scales, 16, rows, columns), Form::ByRow)
        },
        OperandData::F32(_) => unreachable!("F32 operands take the F32 tier"),
    }
}

/// The lowest `count <= 32` bits.
#[inline(always)]
fn mask32(count: usize) -> __mmask32 {
    ((1u64 << count) - 1) as __mmask32
}

/// Loads rows of `columns <= 32` contiguous numbers.
///
/// # Safety
///
/// The CPU's features; `rows` rows of `columns` elements, `stride` apart, can be read.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load_rows(data: *const u16, stride: usize, rows: usize, columns: usize) -> Tile {
    let mut tile = [_mm512_setzero_si512(); 16];
    let mask = mask32(columns);
    for (row, vector) in tile.iter_mut().enumerate().take(rows) {
        // SAFETY: the mask keeps the access within the row.
        *vector = unsafe { _mm512_maskz_loadu_epi16(mask, data.add(row * stride).cast()) };
    }
    tile
}

/// Loads pairs of neighbours along `k` from memory that is contiguous along the outer dimension.
///
/// # Safety
///
/// The CPU's features; `columns` runs of `rows` elements, `stride` apart, can be read.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load_pairs(data: *const u16, stride: usize, rows: usize, columns: usize) -> Tile {
    let mut tile = [_mm512_setzero_si512(); 16];
    let mask = mask32(rows) as __mmask16;
    for (pair, vector) in tile.iter_mut().enumerate().take(columns.div_ceil(2)) {
        let even = data.wrapping_add(2 * pair * stride);
        // SAFETY: the mask keeps the accesses within the runs; the second run is read only if it
        // exists.
        *vector = unsafe {
            let lower = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even.cast()));
            if 2 * pair + 1 < columns {
                let odd = _mm256_maskz_loadu_epi16(mask, even.add(stride).cast());
                let upper = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd));
                _mm512_or_si512(lower, upper)
            } else {
                lower
            }
        };
    }
    tile
}

/// Gathers rows, number by number, from memory that is contiguous in neither direction.
///
/// # Safety
///
/// The CPU's features; all `rows x columns` elements at these (outer, k) strides can be read.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn gather_rows(
    data: *const u16,
    (outer_stride, k_stride): (usize, usize),
    rows: usize,
    columns: usize,
) -> Tile {
    let mut gathered = [[0u16; 32]; 16];
    for (row, gathered) in gathered.iter_mut().enumerate().take(rows) {
        for (column, gathered) in gathered.iter_mut().enumerate().take(columns) {
            // SAFETY: a readable element, as the caller guarantees.
            *gathered = unsafe { data.add(row * outer_stride + column * k_stride).read() };
        }
    }
    // SAFETY: the local array holds 16 rows of 32.
    unsafe { load_rows(gathered.as_ptr().cast(), 32, 16, 32) }
}

/// Decodes a region of an MX operand element by element. Each value is exact in BF16, because
/// `scales::fit_bf16` has checked that nonzero values stay normal.
fn decode_elements(
    operand: &Operand<'_>,
    element: ElementFormat,
    scales: &[u8],
    k: usize,
    TileRegion { row, rows, column, columns }: TileRegion,
) -> [[u16; 32]; 16] {
    let OperandData::Mx { data, .. } = operand.data else { return [[0; 32]; 16] };
    let values = values_of(element);
    let mut decoded = [[0u16; 32]; 16];
    for (row, decoded) in (row..row + rows).zip(&mut decoded) {
        let scale = e8m0::decode(scales[operand.scale_offset(row, column / 32, k)]);
        let mut codes = [0; 32];
        let data = &data[operand.mx_from(row, column)..];
        let codes = unpack_block(element, data, &mut codes[..columns]);
        for (decoded, &code) in decoded.iter_mut().zip(codes) {
            let value: bf16 = Element::from_f32(values[usize::from(code)] * scale);
            *decoded = value.to_bits();
        }
    }
    decoded
}

/// Magnitudes of E4M3's subnormal bit patterns 0 to 7 (multiples of 2^-9), as BF16.
const SUBNORMALS: [u16; 8] = [0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60];

/// A quiet NaN in BF16.
const NAN_BF16: i16 = 0x7fc0;

/// Decodes rows of MXFP8. A tile is as wide as a block, so each row has one scale.
///
/// E4M3 has 4 exponent bits with bias 7 and 3 mantissa bits, BF16 has 8 with bias 127 and 7. A
/// normal element's magnitude shifted left by 4 therefore lacks only `(127 - 7) << 7`; subnormal
/// magnitudes come from a table of eight. Adding the scale's exponent is exact, because
/// `scales::fit_bf16` has checked that nonzero values stay normal.
///
/// # Safety
///
/// The CPU's features; `rows` rows of `columns` elements, `stride` apart, and one scale each,
/// `scale_stride` apart, can be read.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn decode_rows(
    data: *const u8,
    stride: usize,
    scales: *const u8,
    scale_stride: usize,
    rows: usize,
    columns: usize,
) -> Tile {
    let subnormals: [u16; 32] = core::array::from_fn(|index| SUBNORMALS[index % 8]);
    // SAFETY: the local array holds 32 elements.
    let subnormals = unsafe { _mm512_loadu_si512(subnormals.as_ptr().cast()) };
    let magnitude_bits = _mm512_set1_epi16(0x7f);
    let sign_bits = _mm512_set1_epi16(0x80);
    let (eight, bias) = (_mm512_set1_epi16(8), _mm512_set1_epi16(120 << 7));
    let nan = _mm512_set1_epi16(NAN_BF16);
    let mask = mask32(columns);

    let mut tile = [_mm512_setzero_si512(); 16];
    for (row, vector) in tile.iter_mut().enumerate().take(rows) {
        // SAFETY: the mask keeps the access within the row; each row has a scale.
        let (code, scale) = unsafe {
            let code = _mm256_maskz_loadu_epi8(mask, data.add(row * stride).cast());
            (_mm512_cvtepu8_epi16(code), scales.add(row * scale_stride).read())
        };
        if scale == 0xff {
            *vector = _mm512_maskz_mov_epi16(mask, nan);
            continue;
        }
        let exponent = _mm512_set1_epi16((i16::from(scale) - 127) << 7);
        let magnitude = _mm512_and_si512(code, magnitude_bits);
        let sign = _mm512_slli_epi16::<8>(_mm512_and_si512(code, sign_bits));

        let normal = _mm512_add_epi16(_mm512_slli_epi16::<4>(magnitude), bias);
        let subnormal = _mm512_permutexvar_epi16(magnitude, subnormals);
        let is_subnormal = _mm512_cmplt_epu16_mask(magnitude, eight);
        let value = _mm512_mask_mov_epi16(normal, is_subnormal, subnormal);

        let is_nonzero = _mm512_test_epi16_mask(magnitude, magnitude);
        let value = _mm512_mask_add_epi16(value, is_nonzero, value, exponent);
        let is_nan = _mm512_cmpeq_epi16_mask(magnitude, magnitude_bits);
        let value = _mm512_mask_mov_epi16(value, is_nan, nan);
        *vector = _mm512_or_si512(value, sign);
    }
    tile
}

/// Transposes the tile as a 16 x 16 matrix of 32-bit elements, from by row to by pair and back.
///
/// Four rounds: pairs and quadruples of rows are interleaved within the 128-bit lanes, then the
/// lanes are transposed in two rounds.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn transpose(tile: &mut Tile) {
    let mut quads = *tile;
    for group in 0..4 {
        let row = |index: usize| tile[group * 4 + index];
        let low_01 = _mm512_unpacklo_epi32(row(0), row(1));
        let high_01 = _mm512_unpackhi_epi32(row(0), row(1));
        let low_23 = _mm512_unpacklo_epi32(row(2), row(3));
        let high_23 = _mm512_unpackhi_epi32(row(2), row(3));
        // Lane `l` of `quads[4 group + c]`: column `4 l + c` of the group's four rows.
        quads[group * 4] = _mm512_unpacklo_epi64(low_01, low_23);
        quads[group * 4 + 1] = _mm512_unpackhi_epi64(low_01, low_23);
        quads[group * 4 + 2] = _mm512_unpacklo_epi64(high_01, high_23);
        quads[group * 4 + 3] = _mm512_unpackhi_epi64(high_01, high_23);
    }
    for column in 0..4 {
        let group = |index: usize| quads[index * 4 + column];
        // Lanes 0 and 2, then 1 and 3, of two groups at a time.
        let even_01 = _mm512_shuffle_i32x4::<0b10_00_10_00>(group(0), group(1));
        let odd_01 = _mm512_shuffle_i32x4::<0b11_01_11_01>(group(0), group(1));
        let even_23 = _mm512_shuffle_i32x4::<0b10_00_10_00>(group(2), group(3));
        let odd_23 = _mm512_shuffle_i32x4::<0b11_01_11_01>(group(2), group(3));
        tile[column] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even_01, even_23);
        tile[4 + column] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd_01, odd_23);
        tile[8 + column] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even_01, even_23);
        tile[12 + column] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd_01, odd_23);
    }
}
