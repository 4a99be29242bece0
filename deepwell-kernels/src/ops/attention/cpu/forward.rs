//! The forward: online softmax over tiles of keys.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{
    ALIGNMENT, AttentionError, AttentionShape, Documents, Head, KEY_TILE, QUERY_TILE, SharedOutput,
    Tile, for_each_task, gemm_bytes, slots_bytes,
};
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::{
    Carver, Operand, Output, Tier, best_tier, carved_bytes, gemm_serial,
};
use crate::runtime::cpu::parallel::{LANES, sum_lanes, vectorized};
use crate::runtime::cpu::softmax::{exp_or_zero, greater, greatest_lane};

/// Bytes of workspace for [`attention_forward`] on up to `threads` threads: per thread one tile of
/// scores in `f32`, one in `E`, one tile of the output in `f32` and the GEMMs' packing.
#[must_use]
pub fn forward_workspace_bytes<E: Element>(shape: &AttentionShape, threads: usize) -> usize {
    slots_bytes(shape, slot_bytes::<E>(shape), threads)
}

fn slot_bytes<E: Element>(shape: &AttentionShape) -> usize {
    let queries = QUERY_TILE.min(shape.seq);
    let keys = KEY_TILE.min(shape.seq);
    let scores = gemm_bytes::<E>(queries, keys, shape.head_dim);
    let values = gemm_bytes::<E>(queries, shape.value_dim, keys);
    carved_bytes::<f32>(queries * keys)
        + carved_bytes::<E>(queries * keys)
        + carved_bytes::<f32>(queries * shape.value_dim)
        + 2 * carved_bytes::<f32>(queries)
        + scores.max(values).next_multiple_of(ALIGNMENT)
        + ALIGNMENT
}

/// Writes `out` and `lse`, with the GEMMs on the best tier; layouts as in the [module](super)'s
/// table.
///
/// `sinks` has the score of each head's sink, if present, in the scale of scaled scores.
///
/// A row whose scores include a NaN or a positive infinity becomes NaN.
///
/// # Errors
///
/// [`AttentionError`] if the heads do not divide, a slice does not fit the shape, or the workspace
/// is smaller than [`forward_workspace_bytes`] for one thread. (A workspace for fewer threads than
/// the pool's reduces the number of working threads.)
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub fn attention_forward<E: Element>(
    shape: &AttentionShape,
    q: &[E],
    k: &[E],
    v: &[E],
    sinks: Option<&[f32]>,
    out: &mut [E],
    lse: &mut [f32],
    workspace: &mut [u8],
) -> Result<(), AttentionError> {
    attention_forward_on(best_tier(), shape, q, k, v, sinks, None, out, lse, workspace)
}

/// [`attention_forward`] with the GEMMs on a given tier, a separate type of `out`, and optional
/// documents.
///
/// A query that sees no key, as is possible with another rank's keys, gets zeros, and -∞ in `lse`.
///
/// # Errors
///
/// As [`attention_forward`], and if `tier` is not available.
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub fn attention_forward_on<E: Element, O: Element>(
    tier: Tier,
    shape: &AttentionShape,
    q: &[E],
    k: &[E],
    v: &[E],
    sinks: Option<&[f32]>,
    documents: Option<&[i32]>,
    out: &mut [O],
    lse: &mut [f32],
    workspace: &mut [u8],
) -> Result<(), AttentionError> {
    shape.check(&[
        ("q", q.len(), shape.query_len()),
        ("k", k.len(), shape.key_len()),
        ("v", v.len(), shape.value_len()),
        ("sinks", sinks.map_or(shape.heads, <[f32]>::len), shape.heads),
        ("documents", documents.map_or(shape.documents_len(), <[i32]>::len), shape.documents_len()),
        ("out", out.len(), shape.out_len()),
        ("lse", lse.len(), shape.lse_len()),
    ])?;
    let (out, lse) = (SharedOutput::new(out), SharedOutput::new(lse));
    let slot = slot_bytes::<E>(shape);
    for_each_task(shape, slot, workspace, |batch, kv_head, slot| {
        let mut buffers = Buffers::<E>::carve(shape, slot);
        let documents = shape.documents_of(documents, batch);
        for head in kv_head * shape.group()..(kv_head + 1) * shape.group() {
            let head = Head { batch, head, kv_head };
            for queries in shape.query_tiles() {
                // A sink is the first score of each query of its head.
                let (greatest, total) = match sinks {
                    Some(sinks) => (sinks[head.head], 1.0),
                    None => (f32::NEG_INFINITY, 0.0),
                };
                buffers.greatest.fill(greatest);
                buffers.total.fill(total);
                forward_tile(tier, shape, head, queries, documents, q, k, v, &mut buffers)?;
                // SAFETY: these rows of this head belong to this task alone, and no other part of
                // the rows is held.
                unsafe { buffers.finish(shape, head, queries, &out, &lse) };
            }
        }
        Ok(())
    })
}

/// Buffers of a thread, for one tile of queries.
struct Buffers<'a, E> {
    /// `[queries, keys]`.
    scores: &'a mut [f32],
    /// `[queries, keys]`, the exponentials relative to the greatest score so far.
    weights: &'a mut [E],
    /// `[queries, value_dim]`, the weighted sum of values so far.
    sum: &'a mut [f32],
    /// The greatest scaled score of each query so far.
    greatest: &'a mut [f32],
    /// The sum of weights of each query so far.
    total: &'a mut [f32],
    gemm: &'a mut [u8],
}

impl<'a, E: Element> Buffers<'a, E> {
    fn carve(shape: &AttentionShape, slot: &'a mut [u8]) -> Self {
        let queries = QUERY_TILE.min(shape.seq);
        let keys = KEY_TILE.min(shape.seq);
        let mut carver = Carver::new(slot);
        Self {
            scores: carver.take(queries * keys),
            weights: carver.take(queries * keys),
            sum: carver.take(queries * shape.value_dim),
            greatest: carver.take(queries),
            total: carver.take(queries),
            gemm: carver.rest(),
        }
    }

    /// Divides by the totals and writes the tile's rows of `out` and `lse`.
    ///
    /// # Safety
    ///
    /// No part of these rows of either output is held elsewhere.
    unsafe fn finish<O: Element>(
        &self,
        shape: &AttentionShape,
        head: Head,
        queries: Tile,
        out: &SharedOutput<'_, O>,
        lse: &SharedOutput<'_, f32>,
    ) {
        let first = head.lse_offset(shape) + queries.first;
        // SAFETY: the caller's promise.
        let lse = unsafe { lse.part(first, queries.count) };
        vectorized(
            #[inline(always)]
            || {
                for (row, lse) in lse.iter_mut().enumerate() {
                    *lse = self.greatest[row] + self.total[row].ln();
                    let offset = head.out_offset(shape, queries.first + row);
                    // SAFETY: the caller's promise; the rows do not overlap.
                    let out = unsafe { out.part(offset, shape.value_dim) };
                    if self.total[row] == 0.0 {
                        // The query sees no key.
                        out.fill(O::from_f32(0.0));
                        continue;
                    }
                    let scale = 1.0 / self.total[row];
                    let sum = &self.sum[row * shape.value_dim..][..shape.value_dim];
                    for (out, &sum) in out.iter_mut().zip(sum) {
                        *out = O::from_f32(sum * scale);
                    }
                }
            },
        );
    }
}

/// Processes all tiles of visible keys.
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
fn forward_tile<E: Element>(
    tier: Tier,
    shape: &AttentionShape,
    head: Head,
    queries: Tile,
    documents: Documents<'_>,
    q: &[E],
    k: &[E],
    v: &[E],
    buffers: &mut Buffers<'_, E>,
) -> Result<(), AttentionError> {
    let (width, value_width) = (shape.head_dim, shape.value_dim);
    for (index, keys) in shape.key_tiles(queries, documents).enumerate() {
        let is_first = index == 0;
        let q = head.query_rows(shape, q, queries);
        let k = head.key_rows(shape, k, keys);
        let scores = &mut buffers.scores[..queries.count * keys.count];
        let out = Output::F32 { data: scores, accumulate: false };
        gemm_serial(tier, queries.count, keys.count, width, q, k, out, buffers.gemm)?;
        vectorized(
            #[inline(always)]
            || soften(shape, queries, keys, documents, is_first, buffers),
        );

        let weights = Operand::rows(&buffers.weights[..queries.count * keys.count], keys.count);
        let values = head.value_rows(shape, v, keys).transposed();
        let sum = &mut buffers.sum[..queries.count * value_width];
        let out = Output::F32 { data: sum, accumulate: !is_first };
        let (m, n, k) = (queries.count, value_width, keys.count);
        gemm_serial(tier, m, n, k, weights, values, out, buffers.gemm)?;
    }
    Ok(())
}

/// Turns a tile of scores into weights and updates the running statistics.
#[inline(always)]
fn soften<E: Element>(
    shape: &AttentionShape,
    queries: Tile,
    keys: Tile,
    documents: Documents<'_>,
    is_first: bool,
    buffers: &mut Buffers<'_, E>,
) {
    for row in 0..queries.count {
        let seen = shape.visible(queries.first + row, keys, documents);
        let scores = &buffers.scores[row * keys.count..][..keys.count];
        let weights = &mut buffers.weights[row * keys.count..][..keys.count];
        let (greatest, total) = (&mut buffers.greatest[row], &mut buffers.total[row]);
        let shrink = soften_row(scores, seen, shape.scale, greatest, total, weights);
        if !is_first && shrink != 1.0 {
            for sum in &mut buffers.sum[row * shape.value_dim..][..shape.value_dim] {
                *sum *= shrink;
            }
        }
    }
}

/// One row of a tile: weights `exp(scale * score - greatest)`, zero outside of `seen`. Returns the
/// factor by which earlier sums shrink.
#[inline(always)]
fn soften_row<E: Element>(
    scores: &[f32],
    seen: Range<usize>,
    scale: f32,
    greatest: &mut f32,
    total: &mut f32,
    weights: &mut [E],
) -> f32 {
    if seen.is_empty() {
        weights.fill(E::from_f32(0.0));
        return 1.0;
    }
    // A fixed-length copy, so that all loops run over whole vectors.
    let mut row = [0.0f32; KEY_TILE];
    row[..seen.end].copy_from_slice(&scores[..seen.end]);
    let used = seen.end.next_multiple_of(LANES).min(KEY_TILE);
    let blocks = row[..used].as_chunks_mut::<LANES>().0;

    let mut greatest_lanes = [f32::NEG_INFINITY; LANES];
    for (index, block) in blocks.iter_mut().enumerate() {
        for lane in 0..LANES {
            let is_seen = seen.contains(&(index * LANES + lane));
            block[lane] = if is_seen { block[lane] * scale } else { f32::NEG_INFINITY };
            greatest_lanes[lane] = greater(greatest_lanes[lane], block[lane]);
        }
    }
    let before = *greatest;
    // Comparisons ignore NaN; the exponentials below restore it.
    *greatest = greater(before, greatest_lane(greatest_lanes));

    let mut total_lanes = [0.0f32; LANES];
    let mut rounded = [E::from_f32(0.0); KEY_TILE];
    for (block, rounded) in blocks.iter().zip(rounded.as_chunks_mut::<LANES>().0) {
        for lane in 0..LANES {
            let weight = exp_or_zero(block[lane] - *greatest);
            total_lanes[lane] += weight;
            rounded[lane] = E::from_f32(weight);
        }
    }
    weights.copy_from_slice(&rounded[..weights.len()]);
    let shrink = exp_or_zero(before - *greatest);
    *total = *total * shrink + sum_lanes(total_lanes);
    shrink
}
