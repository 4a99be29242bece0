//! AVX-512: detection, the 32 x 32 kernel on `vdpbf16ps`, and the way of a finished block into
//! the output.
#![allow(unsafe_code)]

use core::arch::x86_64::*;
use std::sync::OnceLock;

use super::bf16_path::{Block, Destination};

/// Whether the CPU has AVX-512 F, BW, VL and BF16 (and the operating system saves the state).
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bf16")
    })
}

/// Rows that are summed at once: 8 rows by two vectors of 16 columns are 16 of the 32 registers,
/// which covers the instruction's latency; B's two vectors are then loaded once per 8 rows.
const ROWS: usize = 8;

/// Writes one 32 x 32 block of the result.
///
/// # Safety
///
/// [`is_available`] has returned true; `block` as for the AMX kernel.
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
                // SAFETY: row `pair` of the two B tiles of this step, which the caller says can
                // be read.
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
            // SAFETY: one of the 32 rows of 128 bytes that the caller says can be written.
            unsafe {
                _mm512_storeu_ps(c, sums[0]);
                _mm512_storeu_ps(c.add(16), sums[1]);
            }
        }
    }
}

/// The same bits, seen as pairs of BF16.
#[inline(always)]
fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes without invalid patterns.
    unsafe { core::mem::transmute(bits) }
}

/// Moves `rows x columns` of a finished block (row-major, 32 wide) to the output.
///
/// # Safety
///
/// [`is_available`] has returned true; `rows` and `columns` are at most 32; the `rows x columns`
/// elements at `destination` (`row_stride` elements apart) belong to the caller alone.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn store_block(
    block: &[f32; 1024],
    rows: usize,
    columns: usize,
    destination: Destination,
    row_stride: usize,
) {
    for half in 0..2 {
        let width = columns.saturating_sub(half * 16).min(16);
        if width == 0 {
            continue;
        }
        let mask = (0xffff_u32 >> (16 - width)) as __mmask16;
        for row in 0..rows {
            let offset = row * row_stride + half * 16;
            // SAFETY: inside the block of 32 x 32; the mask keeps every access of the output
            // within the row's `columns` elements.
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
                        let rounded: __m256i = core::mem::transmute(_mm512_cvtneps_pbh(sum));
                        _mm256_mask_storeu_epi16(data.add(offset).cast(), mask, rounded);
                    }
                }
            }
        }
    }
}
