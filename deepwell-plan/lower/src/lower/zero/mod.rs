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
mod values;

use std::collections::HashSet;

use deepwell_ir::{GroupId, Shard, SplitOver, TensorId, ValueId};

use self::gather_per_layer::Gathers;
pub use self::quantized_all_gather::block_slice;

/// Slices are a multiple of this many elements, so that each is aligned in BF16 too.
const SLICE_ELEMENTS: usize = deepwell_ir::ALIGNMENT_BYTES / 2;

/// The shards of a program, and the buffers of their buckets.
#[derive(Default)]
pub(super) struct Zero {
    pub(in crate::lower) shards: Vec<Shard>,
    /// The bucket of each shard.
    pub(in crate::lower) buckets: Vec<Bucket>,
    /// Weight copies that are all-gathered from slices.
    pub(in crate::lower) gathered_copies: HashSet<TensorId>,
    /// State of the gathers and scatters.
    pub(in crate::lower) gathers: Gathers,
}

/// A bucket of parameters during a step.
pub(super) struct Bucket {
    /// Gradients, and the padding of the last slices.
    pub(in crate::lower) gradients: Vec<ValueId>,
    /// The gathered masters, copies or quantized data, with padding.
    pub(in crate::lower) gathered: Vec<ValueId>,
    /// The parameters of the bucket.
    pub(in crate::lower) parameters: Vec<TensorId>,
    /// The gathered tensors: the parameters, their BF16 copies, or the quantized data of one
    /// parameter.
    pub(in crate::lower) gathered_as: Vec<TensorId>,
    /// For a bucket of one parameter whose quantized data and scales are gathered: the quantizing
    /// node, by index in the graph.
    pub(in crate::lower) quantized_by: Option<usize>,
    /// This rank's slice of the masters.
    pub(in crate::lower) master: ValueId,
    /// This rank's slice of the gradients, if these are reduce-scattered during the backward pass.
    pub(in crate::lower) scattered: Option<ValueId>,
    /// Whether the bucket is gathered per layer, into memory shared by lifetime.
    pub(in crate::lower) is_gathered: bool,
    /// The group sharing the bucket, with the group's size.
    pub(in crate::lower) group: (GroupId, u32),
    weight_decay: f32,
    split: Option<SplitOver>,
    /// Whether another pipeline stage counts the bucket in the norm.
    is_copy: bool,
}

impl Bucket {
    /// Whether BF16 copies are gathered in place of masters.
    fn gathers_copies(&self) -> bool {
        self.gathered_as != self.parameters
    }
}
