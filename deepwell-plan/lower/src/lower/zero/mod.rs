//! Optimizer state sharded over the data-parallel ranks (ZeRO, Rajbhandari et al., arXiv
//! 1910.02054).
//!
//! A rank holds one slice of each bucket's master weights and moments. Gradients are whole on each
//! rank during the backward pass and reduce-scattered before the update. Their memory is then idle:
//! the masters are gathered there, for the calls making the compute copies of the weights. Masters
//! read by calls of other bodies have their own memory.
//!
//! Ranks with the same parameters share state: for experts the ranks with the same experts, for all
//! other parameters the ranks that split the batch.
//!
//! With ZeRO 2 and 3 fewer buffers are whole, and for a shorter time: see [`gather_per_layer`].
//! If calls read a bucket only as BF16 copies, each rank casts its slice, and the casts are
//! gathered into the copies: half the bytes, and the same bits. If a quantized weight can be cut
//! between its blocks, the ranks gather data and scales: see [`quantized_all_gather`]. With
//! ZeRO 1 masters are whole between steps.
//!
//! A step gives the same bits as without shards, because sums over ranks keep their order and AdamW
//! is elementwise. Only the norm differs: squares are summed by slice instead of by parameter, in
//! `f64`, and rounded to `f32`.

mod buckets;
mod gather_masters;
mod gather_per_layer;
mod quantized_all_gather;
mod reduce_scatter;
mod state;
mod values;

pub use self::quantized_all_gather::block_slice;
pub(in crate::lower) use self::state::Zero;
