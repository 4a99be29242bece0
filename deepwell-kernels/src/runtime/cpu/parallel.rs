//! Work division of the element-wise kernels: chunk sizes, and one level of SIMD.
//!
//! Chunks depend on the shapes alone. Threads take chunks in any order, yet a result never depends
//! on this order: chunks write to disjoint outputs, and sums over chunks are added in one fixed
//! order. A run is therefore bit-identical at any number of threads.

/// Rows per chunk of a kernel that works by rows.
///
/// 64 rows of 256 BF16 numbers are 32 KiB, the size of a first-level cache.
pub(crate) const ROWS_PER_CHUNK: usize = 64;

/// Numbers per chunk of a kernel that does not work by rows.
pub(crate) const ELEMENTS_PER_CHUNK: usize = 16 * 1024;

/// Running sums of one reduction: enough for two of the widest vectors, so that an addition need
/// not wait for the previous addition. The number is fixed, so every SIMD level sums in the same
/// order.
pub(crate) const LANES: usize = 32;

/// Runs `work` compiled for the widest vectors that this CPU has.
///
/// `work` and its callees must be `#[inline(always)]` to profit.
#[inline]
pub(crate) fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

/// Elements of one chunk of rows; never zero, so that the number is a valid chunk length.
#[inline]
pub(crate) fn chunk_elements(columns: usize) -> usize {
    (ROWS_PER_CHUNK * columns).max(1)
}

/// Sums the lanes, halving their number each time.
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

/// Returns the last block of a reduction: the rest of a row, followed by zeros.
///
/// The rest is a whole block because lanes with a run-time index would have to live in memory, also
/// in every earlier iteration of the loop.
#[inline(always)]
pub(crate) fn padded_block<E: bytemuck::Zeroable + Copy>(rest: &[E]) -> [E; LANES] {
    let mut block = [E::zeroed(); LANES];
    block[..rest.len()].copy_from_slice(rest);
    block
}

/// Adds the partial rows `[parts, columns]` in order into `total`, or overwrites `total` with their
/// sum. Threads share the columns; each column is one chain of additions.
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
