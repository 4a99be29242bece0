//! The backward: recomputed probabilities, tile by tile, and the five GEMMs.
//!
//! With `p = exp(scale q k^T - lse)` and `delta = sum over value_dim of dout * out`:
//! `dv = p^T dout`, `dp = dout v^T`, `ds = scale * p * (dp - delta)`, `dq = ds k`, `dk = ds^T q`.
#![allow(unsafe_code)]

use super::{
    ALIGNMENT, AttentionError, AttentionShape, Documents, Head, KEY_TILE, QUERY_TILE, SharedOutput,
    Tile, for_each_task, gemm_bytes, slots_bytes,
};
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::{
    Carver, Operand, Output, Tier, best_tier, carved_bytes, gemm_serial,
};
use crate::runtime::cpu::parallel::{LANES, sum_lanes, vectorized};
use crate::runtime::cpu::softmax::exp_or_zero;

/// Bytes of workspace for [`attention_backward`] on up to `threads` threads: per thread two tiles
/// of scores in `f32` and two in `E`, one tile of dq and a whole sequence of dk and dv of one head
/// in `f32`, and the GEMMs' packing.
#[must_use]
pub fn backward_workspace_bytes<E: Element>(shape: &AttentionShape, threads: usize) -> usize {
    slots_bytes(shape, slot_bytes::<E>(shape), threads)
}

fn slot_bytes<E: Element>(shape: &AttentionShape) -> usize {
    let queries = QUERY_TILE.min(shape.seq);
    let keys = KEY_TILE.min(shape.seq);
    let (width, value_width) = (shape.head_dim, shape.value_dim);
    let gemms = gemm_bytes::<E>(queries, keys, width)
        .max(gemm_bytes::<E>(queries, keys, value_width))
        .max(gemm_bytes::<E>(queries, width, keys))
        .max(gemm_bytes::<E>(keys, width, queries))
        .max(gemm_bytes::<E>(keys, value_width, queries));
    2 * carved_bytes::<f32>(queries * keys)
        + 2 * carved_bytes::<E>(queries * keys)
        + carved_bytes::<f32>(queries)
        + carved_bytes::<f32>(queries * width)
        + carved_bytes::<f32>(shape.seq * width)
        + carved_bytes::<f32>(shape.seq * value_width)
        + gemms.next_multiple_of(ALIGNMENT)
        + ALIGNMENT
}

/// Writes `dq`, `dk` and `dv`, with the GEMMs on the best tier; layouts as in the [module](super)'s
/// table. `out` and `lse` are the forward's results for the same q, k and v.
///
/// # Errors
///
/// As [`attention_forward`](super::attention_forward), with [`backward_workspace_bytes`].
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub fn attention_backward<E: Element>(
    shape: &AttentionShape,
    dout: &[E],
    q: &[E],
    k: &[E],
    v: &[E],
    out: &[E],
    lse: &[f32],
    dq: &mut [E],
    dk: &mut [E],
    dv: &mut [E],
    workspace: &mut [u8],
) -> Result<(), AttentionError> {
    let tier = best_tier();
    attention_backward_on(tier, shape, dout, q, k, v, out, lse, None, dq, dk, dv, workspace)
}

/// [`attention_backward`] with the GEMMs on a given tier, a separate type of the gradients, and
/// optional documents.
///
/// If the keys are one rank's, `out` and `lse` are still those of attention to all keys.
///
/// # Errors
///
/// As [`attention_backward`], and if `tier` is not available.
#[expect(clippy::too_many_arguments, reason = "shapes and slices are plain arguments, as in BLAS")]
pub fn attention_backward_on<E: Element, O: Element>(
    tier: Tier,
    shape: &AttentionShape,
    dout: &[E],
    q: &[E],
    k: &[E],
    v: &[E],
    out: &[E],
    lse: &[f32],
    documents: Option<&[i32]>,
    dq: &mut [O],
    dk: &mut [O],
    dv: &mut [O],
    workspace: &mut [u8],
) -> Result<(), AttentionError> {
    shape.check(&[
        ("dout", dout.len(), shape.out_len()),
        ("q", q.len(), shape.query_len()),
        ("k", k.len(), shape.key_len()),
        ("v", v.len(), shape.value_len()),
        ("out", out.len(), shape.out_len()),
        ("lse", lse.len(), shape.lse_len()),
        ("documents", documents.map_or(shape.documents_len(), <[i32]>::len), shape.documents_len()),
        ("dq", dq.len(), shape.query_len()),
        ("dk", dk.len(), shape.key_len()),
        ("dv", dv.len(), shape.value_len()),
    ])?;
    let inputs = Inputs { dout, q, k, v, out, lse };
    let dq = SharedOutput::new(dq);
    let (dk, dv) = (SharedOutput::new(dk), SharedOutput::new(dv));
    let slot = slot_bytes::<E>(shape);
    for_each_task(shape, slot, workspace, |batch, kv_head, slot| {
        let mut buffers = Buffers::<E>::carve(shape, slot);
        buffers.dk.fill(0.0);
        buffers.dv.fill(0.0);
        let documents = shape.documents_of(documents, batch);
        for head in kv_head * shape.group()..(kv_head + 1) * shape.group() {
            let head = Head { batch, head, kv_head };
            for queries in shape.query_tiles() {
                backward_tile(tier, shape, head, queries, documents, &inputs, &mut buffers)?;
                for row in 0..queries.count {
                    let offset = head.query_offset(shape, queries.first + row);
                    // SAFETY: this row of this head belongs to this task alone, and no other part
                    // of the row is held.
                    let target = unsafe { dq.part(offset, shape.head_dim) };
                    store(&buffers.dq[row * shape.head_dim..], target);
                }
            }
        }
        let head = Head { batch, head: 0, kv_head };
        for token in 0..shape.seq {
            for (sum, target, offset, width) in [
                (&*buffers.dk, &dk, head.key_offset(shape, token), shape.head_dim),
                (&*buffers.dv, &dv, head.value_offset(shape, token), shape.value_dim),
            ] {
                // SAFETY: this token's row of this key head belongs to this task alone.
                let target = unsafe { target.part(offset, width) };
                store(&sum[token * width..], target);
            }
        }
        Ok(())
    })
}

/// Rounds the first elements of `source` to `target`.
fn store<E: Element>(source: &[f32], target: &mut [E]) {
    vectorized(
        #[inline(always)]
        || {
            for (target, &source) in target.iter_mut().zip(source) {
                *target = E::from_f32(source);
            }
        },
    );
}

#[derive(Clone, Copy)]
struct Inputs<'a, E> {
    dout: &'a [E],
    q: &'a [E],
    k: &'a [E],
    v: &'a [E],
    out: &'a [E],
    lse: &'a [f32],
}

/// One thread's buffers.
struct Buffers<'a, E> {
    /// `[queries, keys]`.
    scores: &'a mut [f32],
    /// `[queries, keys]`, the gradient of the probabilities.
    dp: &'a mut [f32],
    /// `[queries, keys]`, the probabilities.
    p: &'a mut [E],
    /// `[queries, keys]`, the gradient of the unscaled scores.
    ds: &'a mut [E],
    /// `[queries]`, the sum of `dout * out` of each query.
    delta: &'a mut [f32],
    /// `[queries, head_dim]`.
    dq: &'a mut [f32],
    /// `[seq, head_dim]`, summed over the group's query heads.
    dk: &'a mut [f32],
    /// `[seq, value_dim]`, as `dk`.
    dv: &'a mut [f32],
    gemm: &'a mut [u8],
}

impl<'a, E: Element> Buffers<'a, E> {
    fn carve(shape: &AttentionShape, slot: &'a mut [u8]) -> Self {
        let queries = QUERY_TILE.min(shape.seq);
        let keys = KEY_TILE.min(shape.seq);
        let mut carver = Carver::new(slot);
        Self {
            scores: carver.take(queries * keys),
            dp: carver.take(queries * keys),
            p: carver.take(queries * keys),
            ds: carver.take(queries * keys),
            delta: carver.take(queries),
            dq: carver.take(queries * shape.head_dim),
            dk: carver.take(shape.seq * shape.head_dim),
            dv: carver.take(shape.seq * shape.value_dim),
            gemm: carver.rest(),
        }
    }
}

/// Processes one tile of queries against all tiles of visible keys: writes the buffer dq, adds to
/// the buffers dk and dv.
fn backward_tile<E: Element>(
    tier: Tier,
    shape: &AttentionShape,
    head: Head,
    queries: Tile,
    documents: Documents<'_>,
    inputs: &Inputs<'_, E>,
    buffers: &mut Buffers<'_, E>,
) -> Result<(), AttentionError> {
    let (width, value_width) = (shape.head_dim, shape.value_dim);
    let q = head.query_rows(shape, inputs.q, queries);
    let dout = head.out_rows(shape, inputs.dout, queries);
    let lse = &inputs.lse[head.lse_offset(shape) + queries.first..][..queries.count];
    vectorized(
        #[inline(always)]
        || {
            for (row, delta) in buffers.delta[..queries.count].iter_mut().enumerate() {
                let offset = head.out_offset(shape, queries.first + row);
                let (dout, out) = (&inputs.dout[offset..], &inputs.out[offset..]);
                *delta = sum_of_products(&dout[..value_width], &out[..value_width]);
            }
        },
    );
    if shape.key_tiles(queries, documents).next().is_none() {
        buffers.dq[..queries.count * width].fill(0.0);
    }
    for (index, keys) in shape.key_tiles(queries, documents).enumerate() {
        let k = head.key_rows(shape, inputs.k, keys);
        let v = head.value_rows(shape, inputs.v, keys);
        let count = queries.count * keys.count;
        let out = Output::F32 { data: &mut buffers.scores[..count], accumulate: false };
        gemm_serial(tier, queries.count, keys.count, width, q, k, out, buffers.gemm)?;
        let out = Output::F32 { data: &mut buffers.dp[..count], accumulate: false };
        gemm_serial(tier, queries.count, keys.count, value_width, dout, v, out, buffers.gemm)?;
        vectorized(
            #[inline(always)]
            || differentiate(shape, queries, keys, documents, lse, buffers),
        );

        let p = Operand::rows(&buffers.p[..count], keys.count);
        let ds = Operand::rows(&buffers.ds[..count], keys.count);
        let rows = |width: usize| keys.first * width..keys.end() * width;
        let dv = &mut buffers.dv[rows(value_width)];
        let dk = &mut buffers.dk[rows(width)];
        let out = Output::F32 { data: dv, accumulate: true };
        let p = p.transposed();
        let dout = dout.transposed();
        let q = q.transposed();
        gemm_serial(tier, keys.count, value_width, queries.count, p, dout, out, buffers.gemm)?;
        let out = Output::F32 { data: dk, accumulate: true };
        let ds_transposed = ds.transposed();
        gemm_serial(tier, keys.count, width, queries.count, ds_transposed, q, out, buffers.gemm)?;
        let dq = &mut buffers.dq[..queries.count * width];
        let out = Output::F32 { data: dq, accumulate: index > 0 };
        let k = k.transposed();
        gemm_serial(tier, queries.count, width, keys.count, ds, k, out, buffers.gemm)?;
    }
    Ok(())
}

/// The sum of `a * b` over two rows.
#[inline(always)]
fn sum_of_products<E: Element>(a: &[E], b: &[E]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for lane in 0..LANES {
            lanes[lane] += a[lane].to_f32() * b[lane].to_f32();
        }
    }
    for ((lane, &a), &b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += a.to_f32() * b.to_f32();
    }
    sum_lanes(lanes)
}

/// Turns a tile of scores and of dp into p and ds, with zeros at hidden keys.
#[inline(always)]
fn differentiate<E: Element>(
    shape: &AttentionShape,
    queries: Tile,
    keys: Tile,
    documents: Documents<'_>,
    lse: &[f32],
    buffers: &mut Buffers<'_, E>,
) {
    for (row, &lse) in lse.iter().enumerate() {
        let seen = shape.visible(queries.first + row, keys, documents);
        let delta = buffers.delta[row];
        let range = row * keys.count..(row + 1) * keys.count;
        // Fixed-length copies, so that all loops run over whole vectors.
        let mut scores = [0.0f32; KEY_TILE];
        let mut dp = [0.0f32; KEY_TILE];
        scores[..seen.end].copy_from_slice(&buffers.scores[range.clone()][..seen.end]);
        dp[..seen.end].copy_from_slice(&buffers.dp[range.clone()][..seen.end]);
        let zero = E::from_f32(0.0);
        let (mut p_row, mut ds_row) = ([zero; KEY_TILE], [zero; KEY_TILE]);
        let blocks = scores.as_chunks::<LANES>().0.iter().zip(dp.as_chunks::<LANES>().0);
        let outputs = p_row.as_chunks_mut::<LANES>().0.iter_mut();
        let outputs = outputs.zip(ds_row.as_chunks_mut::<LANES>().0);
        let used = seen.end.div_ceil(LANES);
        for (index, ((scores, dp), (p_row, ds_row))) in blocks.zip(outputs).take(used).enumerate() {
            for lane in 0..LANES {
                let p = exp_or_zero(scores[lane] * shape.scale - lse);
                let ds = shape.scale * (p * (dp[lane] - delta));
                let is_seen = seen.contains(&(index * LANES + lane));
                p_row[lane] = E::from_f32(if is_seen { p } else { 0.0 });
                ds_row[lane] = E::from_f32(if is_seen { ds } else { 0.0 });
            }
        }
        buffers.p[range.clone()].copy_from_slice(&p_row[..keys.count]);
        buffers.ds[range].copy_from_slice(&ds_row[..keys.count]);
    }
}
