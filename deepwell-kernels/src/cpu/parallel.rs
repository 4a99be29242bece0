//! How the element-wise kernels divide their work: sizes of the chunks, and one level of SIMD.
//!
//! The chunks depend on the shapes alone. Threads take chunks as they come, yet a result never
//! depends on who took what: chunks write to disjoint outputs, and sums over chunks are added in
//! one fixed order. That is what makes a run bit-identical at any number of threads.

/// Rows in one chunk of a kernel that works by rows.
///
/// 64 rows of 256 BF16 numbers are 32 KiB, which is what a first-level cache holds.
pub(crate) const ROWS_PER_CHUNK: usize = 64;

/// Numbers in one chunk of a kernel that does not care for rows.
pub(crate) const ELEMENTS_PER_CHUNK: usize = 16 * 1024;

/// Running sums that one reduction keeps: enough for two of the widest vectors, so that an
/// addition need not wait for the one before it. Fixed, so that every SIMD level adds alike.
pub(crate) const LANES: usize = 32;

/// Runs `work` compiled for the widest vectors that this CPU has.
///
/// `work` and what it calls must be `#[inline(always)]` to profit.
#[inline]
pub(crate) fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

/// Elements of one chunk of rows, never zero, so that it can be a chunk length.
#[inline]
pub(crate) fn chunk_elements(columns: usize) -> usize {
    (ROWS_PER_CHUNK * columns).max(1)
}

/// Adds up the lanes, halving their number each time.
#[inline(always)]
pub(crate) fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The start of a reduction's last block: what is left of a row, followed by zeros.
///
/// A whole block of its own, because lanes that a loop reaches by a run-time index have to live
/// in memory, in every iteration of the loop before it too.
#[inline(always)]
pub(crate) fn padded_block<E: bytemuck::Zeroable + Copy>(rest: &[E]) -> [E; LANES] {
    let mut block = [E::zeroed(); LANES];
    block[..rest.len()].copy_from_slice(rest);
    block
}

/// Adds the partial rows `[parts, columns]` in order into `total`, over or instead of what it
/// holds. Threads share the columns; each column is one chain of additions.
pub(crate) fn sum_partial_rows(partial: &[f32], total: &mut [f32], accumulate: bool) {
    use rayon::prelude::*;

    const COLUMNS_PER_CHUNK: usize = 256;
    let columns = total.len();
    total.par_chunks_mut(COLUMNS_PER_CHUNK).enumerate().for_each(|(chunk, total)| {
        let first = chunk * COLUMNS_PER_CHUNK;
        vectorized(
            #[inline(always)]
            || {
                if !accumulate {
                    total.fill(0.0);
                }
                for row in partial.chunks_exact(columns) {
                    for (sum, &term) in total.iter_mut().zip(&row[first..]) {
                        *sum += term;
                    }
                }
            },
        );
    });
}
