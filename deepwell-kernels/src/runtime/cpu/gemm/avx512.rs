//! AVX-512: detection, the 32 x 32 kernels on `vdpbf16ps` and on FP32 fused multiply-add, and the
//! store of a finished block to the output.
#![allow(unsafe_code)]

use core::arch::x86_64::*;
use std::sync::OnceLock;

use super::bf16_path::{Block, Destination};

/// Whether the CPU has AVX-512 F, BW and VL (and the operating system saves the state).
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
    })
}

/// Whether the CPU also has AVX512-BF16.
pub(super) fn has_bf16() -> bool {
    is_available() && is_x86_feature_detected!("avx512bf16")
}

/// Rows that are summed at once: 8 rows by two vectors of 16 columns occupy 16 of the 32 registers,
/// enough to hide the instruction's latency; B's two vectors are then loaded once per 8 rows.
const ROWS: usize = 8;

/// Writes one 32 x 32 block of the result.
///
/// # Safety
///
/// [`has_bf16`] has returned true; `block` satisfies the contract of the AMX kernel.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn multiply_block(block: &Block) {
    for first_row in (0..32).step_by(ROWS) {
        let half = if first_row < 16 { block.a_upper } else { block.a_lower };
        let a = half.wrapping_byte_add((first_row % 16) * block.a_row_bytes);
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        for step in 0..block.steps {
            let a = a.wrapping_byte_add(step * block.a_step_bytes);
            let b = block.b.wrapping_byte_add(step * 2048);
            for pair in 0..16 {
                // SAFETY: row `pair` of this step's two B tiles; the caller guarantees that B is
                // readable.
                let (b_left, b_right) = unsafe {
                    (
                        _mm512_loadu_si512(b.byte_add(pair * 64).cast()),
                        _mm512_loadu_si512(b.byte_add(1024 + pair * 64).cast()),
                    )
                };
                for (row, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: pair `pair` of one of the 32 rows of A of this step.
                    let a_pair = unsafe {
                        a.byte_add(row * block.a_row_bytes + pair * 4)
                            .cast::<i32>()
                            .read_unaligned()
                    };
                    let a_pair = as_bf16(_mm512_set1_epi32(a_pair));
                    sums[0] = _mm512_dpbf16_ps(sums[0], a_pair, as_bf16(b_left));
                    sums[1] = _mm512_dpbf16_ps(sums[1], a_pair, as_bf16(b_right));
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            let c = block.c.wrapping_byte_add((first_row + row) * block.c_row_bytes);
            // SAFETY: one of the 32 rows of 128 bytes; the caller guarantees that all are writable.
            unsafe {
                _mm512_storeu_ps(c, sums[0]);
                _mm512_storeu_ps(c.add(16), sums[1]);
            }
        }
    }
}

/// The same bits, as pairs of BF16.
#[inline(always)]
fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes without invalid patterns.
    unsafe { core::mem::transmute(bits) }
}

/// Writes one 32 x 32 block of the result for a widened A: B's pairs are widened in registers to
/// the numbers at even and at odd `k`.
///
/// # Safety
///
/// [`is_available`] has returned true; `block` satisfies the contract of the AMX kernel, with FP32
/// in A.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn multiply_wide_block(block: &Block) {
    let odd_bits = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    for first_row in (0..32).step_by(ROWS) {
        let half = if first_row < 16 { block.a_upper } else { block.a_lower };
        let a = half.wrapping_byte_add((first_row % 16) * block.a_row_bytes);
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        for step in 0..block.steps {
            let a = a.wrapping_byte_add(step * block.a_step_bytes);
            let b = block.b.wrapping_byte_add(step * 2048);
            for pair in 0..16 {
                // SAFETY: row `pair` of this step's two B tiles; the caller guarantees that B is
                // readable.
                let pairs = unsafe {
                    [
                        _mm512_loadu_si512(b.byte_add(pair * 64).cast()),
                        _mm512_loadu_si512(b.byte_add(1024 + pair * 64).cast()),
                    ]
                };
                let even = pairs.map(|it| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(it)));
                let odd = pairs.map(|it| _mm512_castsi512_ps(_mm512_and_si512(it, odd_bits)));
                for (k, b) in [even, odd].into_iter().enumerate() {
                    for (row, sums) in sums.iter_mut().enumerate() {
                        // SAFETY: number `2 pair + k` of one of the 32 rows of A of this step.
                        let a = unsafe {
                            a.byte_add(row * block.a_row_bytes + (2 * pair + k) * 4)
                                .cast::<f32>()
                                .read_unaligned()
                        };
                        let a = _mm512_set1_ps(a);
                        sums[0] = _mm512_fmadd_ps(a, b[0], sums[0]);
                        sums[1] = _mm512_fmadd_ps(a, b[1], sums[1]);
                    }
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            let c = block.c.wrapping_byte_add((first_row + row) * block.c_row_bytes);
            // SAFETY: one of the 32 rows of 128 bytes; the caller guarantees that all are writable.
            unsafe {
                _mm512_storeu_ps(c, sums[0]);
                _mm512_storeu_ps(c.add(16), sums[1]);
            }
        }
    }
}

/// The rows and columns to store, at most 32 each, of a finished row-major 32 x 32 block.
#[derive(Clone, Copy)]
pub(super) struct BlockRegion<'a> {
    pub(super) block: &'a [f32; 1024],
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// Stores a part of a finished block to the output, rounded by `vcvtneps2bf16`.
///
/// # Safety
///
/// [`has_bf16`] has returned true; the `rows x columns` elements at `destination` (`row_stride`
/// elements apart) belong to the caller alone.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn store_block(
    region: BlockRegion<'_>,
    destination: Destination,
    row_stride: usize,
) {
    // SAFETY: the features are enabled, and the caller promises the rest.
    unsafe {
        store_with(region, destination, row_stride, |sum| {
            core::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(sum))
        });
    }
}

/// Stores a part of a finished block to the output, rounded to nearest even in integer arithmetic.
///
/// # Safety
///
/// As for [`store_block`], with [`is_available`] in place of [`has_bf16`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn store_rounded(
    region: BlockRegion<'_>,
    destination: Destination,
    row_stride: usize,
) {
    // SAFETY: the features are enabled, and the caller promises the rest.
    unsafe {
        store_with(region, destination, row_stride, |sum| {
            let bits = _mm512_castps_si512(sum);
            let upper = _mm512_srli_epi32::<16>(bits);
            let last = _mm512_and_si512(upper, _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
            // A NaN keeps its upper bits and is quiet.
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(sum, sum);
            let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
            _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, quiet))
        });
    }
}

/// Stores a part of a finished block to the output.
///
/// # Safety
///
/// AVX-512 F, BW, VL and all features that `round` needs are enabled in the caller; the `rows x
/// columns` elements at `destination` (`row_stride` elements apart) belong to the caller alone.
#[inline(always)]
unsafe fn store_with(
    BlockRegion { block, rows, columns }: BlockRegion<'_>,
    destination: Destination,
    row_stride: usize,
    round: impl Fn(__m512) -> __m256i,
) {
    for half in 0..2 {
        let width = columns.saturating_sub(half * 16).min(16);
        if width == 0 {
            continue;
        }
        let mask = (0xffff_u32 >> (16 - width)) as __mmask16;
        for row in 0..rows {
            let offset = row * row_stride + half * 16;
            // SAFETY: inside the block of 32 x 32; the mask keeps every access of the output within
            // the row's `columns` elements.
            unsafe {
                let sum = _mm512_loadu_ps(block.as_ptr().add(row * 32 + half * 16));
                match destination {
                    Destination::F32 { data, accumulate: false } => {
                        _mm512_mask_storeu_ps(data.add(offset), mask, sum);
                    }
                    Destination::F32 { data, accumulate: true } => {
                        let before = _mm512_maskz_loadu_ps(mask, data.add(offset));
                        let after = _mm512_add_ps(before, sum);
                        _mm512_mask_storeu_ps(data.add(offset), mask, after);
                    }
                    Destination::Bf16 { data } => {
                        _mm256_mask_storeu_epi16(data.add(offset).cast(), mask, round(sum));
                    }
                }
            }
        }
    }
}
