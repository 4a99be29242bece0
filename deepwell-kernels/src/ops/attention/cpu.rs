//! Causal, windowed or full attention with grouped query heads, by tiles of queries and keys.
//!
//! Forward: `out = softmax(scale q k^T) v` for each head, with the softmax computed online over
//! tiles of keys, so that only one tile of scores exists at a time (Dao et al., "FlashAttention",
//! arXiv 2205.14135, algorithm 1, and 2307.08691 for the order of loops). The forward saves `lse`,
//! the logarithm of each row's sum of exponentials. The backward recomputes the probabilities from
//! q, k and lse, tile by tile.
//!
//! Layouts, row-major, with tokens = batch * seq:
//!
//! | tensor | shape |
//! |---|---|
//! | q and its gradient | `[tokens, heads * head_dim]` |
//! | k and its gradient | `[tokens, kv_heads * head_dim]` |
//! | v and its gradient | `[tokens, kv_heads * value_dim]` |
//! | out and its gradient | `[tokens, heads * value_dim]` |
//! | sinks and their gradient, if present | `[heads]`, `f32` |
//! | lse | `[batch, heads, seq]`, `f32`, natural logarithm |
//! | documents, if separated | `[tokens, 2]`, `i32`: begin and end of a token's document |
//!
//! Operands named by `heads_first` are `[batch, heads, seq, width]` instead.
//!
//! Query head `h` reads key and value head `h / (heads / kv_heads)`. The online softmax of a head
//! starts from its sink: a score before all keys, with a value of zero. Tiles of keys before the
//! windows, or the documents, of all queries of a tile are skipped.
//!
//! # Numerics
//!
//! GEMMs sum in FP32 on the given [`Tier`] and softmax is FP32; its exponential is within two units
//! in the last place ([`exp`](crate::cpu::vector_math::exp)), and zero below e^-87. With BF16
//! storage the probabilities and the gradients of the scores are rounded to BF16 before they are
//! multiplied, as in the tensor-core kernels; with F32 storage nothing is rounded.
//!
//! A hidden key has a weight of zero, but this zero still multiplies the key's value if key and
//! query share a tile: a non-finite value reaches every query of its tile.
//!
//! # Threads
//!
//! One task per (sequence, key head) computes all query heads of the key head. Only this task
//! writes the heads' rows of the outputs, so results have the same bits at any number of threads.
//! Each working thread has a slot of the workspace.
#![allow(unsafe_code)]

mod backward;
mod forward;
mod merge;
#[cfg(test)]
mod parts_tests;
mod prepare;
mod sinks;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use deepwell_ir::ops::{AttentionHeads, HeadsFirst, KeySource, PartPlaces};

use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::{self, ALIGNMENT, DataKind, GemmError, Operand, Tier};
pub use backward::{attention_backward, attention_backward_on, backward_workspace_bytes};
pub use forward::{attention_forward, attention_forward_on, forward_workspace_bytes};
pub use merge::merge_attention;
pub(super) use prepare::{
    backward_workspace, forward_workspace, prepare_backward, prepare_forward, prepare_merge,
};
pub use sinks::sink_gradients;

/// Queries of a tile: with [`KEY_TILE`] keys the scores take 64 KiB, which leaves room for the
/// operands in a second-level cache of 1 MiB.
const QUERY_TILE: usize = 128;

/// Keys of a tile.
const KEY_TILE: usize = 128;

/// Sizes and settings of an attention op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a query and of a key.
    pub head_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Factor on the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Whether a token sees only itself and earlier tokens of its sequence.
    pub causal: bool,
    /// Number of tokens that a token sees, counting back from itself; all if `None`.
    pub window: Option<usize>,
    /// The rank whose keys these are. For another rank's keys the mask is by halves of the
    /// sequence.
    pub keys: KeySource,
    /// Where queries and keys are in the whole sequence, for a window on several ranks.
    pub places: Option<PartPlaces>,
    /// Operands that have the heads before the tokens.
    pub heads_first: HeadsFirst,
}

impl AttentionShape {
    /// Elements of q.
    #[must_use]
    pub fn query_len(&self) -> usize {
        self.batch * self.seq * self.heads * self.head_dim
    }

    /// Elements of k.
    #[must_use]
    pub fn key_len(&self) -> usize {
        self.batch * self.seq * self.kv_heads * self.head_dim
    }

    /// Elements of v.
    #[must_use]
    pub fn value_len(&self) -> usize {
        self.batch * self.seq * self.kv_heads * self.value_dim
    }

    /// Elements of out.
    #[must_use]
    pub fn out_len(&self) -> usize {
        self.batch * self.seq * self.heads * self.value_dim
    }

    /// Elements of lse.
    #[must_use]
    pub fn lse_len(&self) -> usize {
        self.batch * self.heads * self.seq
    }

    /// Order of the vectors of q.
    fn query_order(&self) -> Order {
        Order::new(self.seq, self.heads, self.head_dim, self.heads_first.q)
    }

    /// Order of the vectors of k.
    fn key_order(&self) -> Order {
        Order::new(self.seq, self.kv_heads, self.head_dim, self.heads_first.k)
    }

    /// Order of the vectors of v.
    fn value_order(&self) -> Order {
        Order::new(self.seq, self.kv_heads, self.value_dim, self.heads_first.v)
    }

    /// Order of the vectors of out.
    fn out_order(&self) -> Order {
        Order::new(self.seq, self.heads, self.value_dim, self.heads_first.o)
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn check(&self, tensors: &[(&'static str, usize, usize)]) -> Result<(), AttentionError> {
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(AttentionError::Heads { heads: self.heads, kv_heads: self.kv_heads });
        }
        match tensors.iter().find(|(_, got, expected)| got != expected) {
            Some(&(tensor, got, expected)) => Err(AttentionError::Length { tensor, expected, got }),
            None => Ok(()),
        }
    }

    /// The tiles of all queries.
    fn query_tiles(&self) -> impl Iterator<Item = Tile> {
        Self::tiles(0, self.seq, QUERY_TILE)
    }

    /// The tiles of keys that any query of a tile sees, at multiples of the tile width.
    fn key_tiles(
        &self,
        queries: Tile,
        documents: Documents<'_>,
    ) -> impl Iterator<Item = Tile> + use<> {
        let first = self.first_seen(queries.first, documents) / KEY_TILE * KEY_TILE;
        // Later queries see at least as far.
        let end = self.end_seen(queries.end().saturating_sub(1), documents);
        Self::tiles(first, end, KEY_TILE)
    }

    /// The first key that the query at `token` sees.
    fn first_seen(&self, token: usize, documents: Documents<'_>) -> usize {
        let window = match (self.window, self.places) {
            (Some(window), Some(places)) => places.first_in_window(token, window, self.seq),
            (Some(window), None) => (token + 1).saturating_sub(window),
            (None, _) => 0,
        };
        window.max(documents.begin(token))
    }

    /// One past the last key that the query at `token` sees.
    fn end_seen(&self, token: usize, documents: Documents<'_>) -> usize {
        self.keys.seen(token, self.seq, self.causal).min(documents.end(token))
    }

    /// The keys of a tile that the query at `token` sees, as indices in the tile.
    #[inline(always)]
    fn visible(&self, token: usize, keys: Tile, documents: Documents<'_>) -> Range<usize> {
        let end = self.end_seen(token, documents).saturating_sub(keys.first).min(keys.count);
        self.first_seen(token, documents).saturating_sub(keys.first).min(end)..end
    }

    /// The documents of sequence `batch` of `all`.
    fn documents_of<'a>(&self, all: Option<&'a [i32]>, batch: usize) -> Documents<'a> {
        Documents(all.map(|all| &all.as_chunks::<2>().0[batch * self.seq..][..self.seq]))
    }

    /// Elements of the documents tensor.
    fn documents_len(&self) -> usize {
        2 * self.batch * self.seq
    }

    fn tiles(first: usize, end: usize, width: usize) -> impl Iterator<Item = Tile> {
        (first..end).step_by(width).map(move |first| Tile { first, count: width.min(end - first) })
    }
}

/// Begin and end of each token's document in its sequence, if documents are separated.
#[derive(Clone, Copy)]
struct Documents<'a>(Option<&'a [[i32; 2]]>);

impl Documents<'_> {
    #[inline(always)]
    fn begin(self, token: usize) -> usize {
        self.0.map_or(0, |of| of[token][0] as usize)
    }

    #[inline(always)]
    fn end(self, token: usize) -> usize {
        self.0.map_or(usize::MAX, |of| of[token][1] as usize)
    }
}

/// A range of tokens of a sequence.
#[derive(Clone, Copy, Debug)]
struct Tile {
    first: usize,
    count: usize,
}

impl Tile {
    fn end(self) -> usize {
        self.first + self.count
    }
}

/// Distances in an operand, in elements.
#[derive(Clone, Copy, Debug)]
struct Order {
    /// Between sequences.
    sequence: usize,
    /// Between heads of a token.
    head: usize,
    /// Between tokens of a head.
    token: usize,
}

impl Order {
    fn new(seq: usize, heads: usize, width: usize, heads_first: bool) -> Order {
        let [head, token] = if heads_first { [seq * width, width] } else { [width, heads * width] };
        Order { sequence: seq * heads * width, head, token }
    }

    #[inline(always)]
    fn offset(self, batch: usize, head: usize, token: usize) -> usize {
        batch * self.sequence + head * self.head + token * self.token
    }
}

/// One (sequence, query head) and the corresponding key head.
#[derive(Clone, Copy)]
struct Head {
    batch: usize,
    head: usize,
    kv_head: usize,
}

impl Head {
    /// Offset of a token's vector of this head in q.
    fn query_offset(self, shape: &AttentionShape, token: usize) -> usize {
        shape.query_order().offset(self.batch, self.head, token)
    }

    /// Offset of a token's vector of this head's key head in k.
    fn key_offset(self, shape: &AttentionShape, token: usize) -> usize {
        shape.key_order().offset(self.batch, self.kv_head, token)
    }

    /// Offset of a token's vector of this head in out.
    fn out_offset(self, shape: &AttentionShape, token: usize) -> usize {
        shape.out_order().offset(self.batch, self.head, token)
    }

    /// Offset of a token's vector of this head's value head in v.
    fn value_offset(self, shape: &AttentionShape, token: usize) -> usize {
        shape.value_order().offset(self.batch, self.kv_head, token)
    }

    /// Offset of this head's tokens in lse.
    fn lse_offset(self, shape: &AttentionShape) -> usize {
        (self.batch * shape.heads + self.head) * shape.seq
    }

    /// The tile of q as `[count, head_dim]`.
    fn query_rows<'a, E: Element>(
        self,
        shape: &AttentionShape,
        data: &'a [E],
        tile: Tile,
    ) -> Operand<'a> {
        Operand::rows(&data[self.query_offset(shape, tile.first)..], shape.query_order().token)
    }

    /// The tile of dout as `[count, value_dim]`.
    fn out_rows<'a, E: Element>(
        self,
        shape: &AttentionShape,
        data: &'a [E],
        tile: Tile,
    ) -> Operand<'a> {
        Operand::rows(&data[self.out_offset(shape, tile.first)..], shape.out_order().token)
    }

    /// The tile of v as `[count, value_dim]`.
    fn value_rows<'a, E: Element>(
        self,
        shape: &AttentionShape,
        data: &'a [E],
        tile: Tile,
    ) -> Operand<'a> {
        Operand::rows(&data[self.value_offset(shape, tile.first)..], shape.value_order().token)
    }

    /// The tile of k as `[count, head_dim]`.
    fn key_rows<'a, E: Element>(
        self,
        shape: &AttentionShape,
        data: &'a [E],
        tile: Tile,
    ) -> Operand<'a> {
        Operand::rows(&data[self.key_offset(shape, tile.first)..], shape.key_order().token)
    }
}

/// Reason for refusing an attention. In all cases nothing has been written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttentionError {
    /// The query heads cannot be divided among the key heads.
    #[error("attention: expected `heads` a multiple of `kv_heads`, got {heads} and {kv_heads}")]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key and value heads.
        kv_heads: usize,
    },
    /// A tensor's number of elements differs from the shape's.
    #[error("attention: tensor `{tensor}`: expected {expected} elements, got {got}")]
    Length {
        /// The tensor's name.
        tensor: &'static str,
        /// Elements required by the shape.
        expected: usize,
        /// Elements of the slice.
        got: usize,
    },
    /// The workspace does not hold one thread's buffers.
    #[error(
        "attention: workspace: expected at least {needed} bytes, got {got}\n\
         hint: size it with the workspace function for one thread or more"
    )]
    WorkspaceTooSmall {
        /// Bytes for one thread.
        needed: usize,
        /// Bytes given.
        got: usize,
    },
    /// The GEMMs cannot run.
    #[error(transparent)]
    Gemm(#[from] GemmError),
}

/// Workspace of a GEMM of two `E` operands on the most demanding tier, so that a plan is valid on
/// any machine.
fn gemm_bytes<E: Element>(m: usize, n: usize, k: usize) -> usize {
    let kind = DataKind::of::<E>();
    let on_tier = |tier| gemm::workspace_bytes(tier, m, n, k, kind, kind);
    Tier::ALL.into_iter().map(on_tier).max().unwrap_or(0)
}

/// Bytes of the slots of `threads` threads; at most one thread per task works.
fn slots_bytes(shape: &AttentionShape, slot_bytes: usize, threads: usize) -> usize {
    let tasks = shape.batch * shape.kv_heads;
    threads.clamp(1, tasks.max(1)) * slot_bytes + ALIGNMENT
}

/// Runs `task(batch, kv_head, slot)` for every sequence and key head, on as many threads as the
/// pool and the workspace allow. Threads take the next task as they become free.
///
/// Returns the first error of any task; the other threads still run (they would fail alike).
fn for_each_task(
    shape: &AttentionShape,
    slot_bytes: usize,
    workspace: &mut [u8],
    task: impl Fn(usize, usize, &mut [u8]) -> Result<(), AttentionError> + Sync,
) -> Result<(), AttentionError> {
    use rayon::prelude::*;

    let tasks = shape.batch * shape.kv_heads;
    let threads = rayon::current_num_threads().min(tasks.max(1));
    // Slots are whole cache lines, so that threads share no cache line.
    let aligned = workspace.as_ptr().align_offset(ALIGNMENT).min(workspace.len());
    let (got, workspace) = (workspace.len(), &mut workspace[aligned..]);
    let slots = (workspace.len() / slot_bytes).min(threads);
    if slots == 0 {
        return Err(AttentionError::WorkspaceTooSmall { needed: slot_bytes + ALIGNMENT, got });
    }
    let next = AtomicUsize::new(0);
    workspace.par_chunks_exact_mut(slot_bytes).take(slots).try_for_each(|slot| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= tasks {
                return Ok(());
            }
            task(index / shape.kv_heads, index % shape.kv_heads, slot)?;
        }
    })
}

/// An output of which tasks write disjoint, non-contiguous parts.
struct SharedOutput<'a, T> {
    data: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: a mutable slice that hands out disjoint parts, as the contract of `part` requires;
// threads may hold these like parts of a split slice.
unsafe impl<T: Send> Sync for SharedOutput<'_, T> {}

impl<'a, T> SharedOutput<'a, T> {
    fn new(data: &'a mut [T]) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), owner: PhantomData }
    }

    /// The elements `first..first + count`.
    ///
    /// # Safety
    ///
    /// No other part in use overlaps this part.
    #[expect(clippy::mut_from_ref, reason = "disjoint parts of a mutable slice, as promised")]
    unsafe fn part(&self, first: usize, count: usize) -> &mut [T] {
        assert!(first <= self.len && count <= self.len - first);
        // SAFETY: inside the slice by the assertion, and unaliased by the caller's promise.
        unsafe { core::slice::from_raw_parts_mut(self.data.add(first), count) }
    }
}

/// Translates a call's attributes to the kernel's shape.
fn attention_shape(
    heads: &AttentionHeads,
    (keys, places): (KeySource, Option<PartPlaces>),
    (batch, seq): (usize, usize),
) -> AttentionShape {
    AttentionShape {
        keys,
        places,
        batch,
        seq,
        heads: heads.heads,
        kv_heads: heads.kv_heads,
        head_dim: heads.head_dim,
        value_dim: heads.value_dim(),
        scale: heads.scale as f32,
        causal: heads.causal,
        window: heads.window,
        heads_first: heads.heads_first,
    }
}
