//! Shards, buckets and gathers of a program with sharded optimizer state.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{Graph, GroupId, Phase, Shard, SplitOver, TensorId, ValueId};

use crate::lower::builder::ProgramBuilder;

/// Slices are a multiple of this many elements, so that each is aligned in BF16 too.
pub(super) const SLICE_ELEMENTS: usize = deepwell_ir::ALIGNMENT_BYTES / 2;

/// The shards of a program, and the buffers of their buckets.
#[derive(Default)]
pub(in crate::lower) struct Zero {
    pub(in crate::lower) shards: Vec<Shard>,
    /// The bucket of each shard.
    pub(in crate::lower) buckets: Vec<Bucket>,
    /// Weight copies that are all-gathered from slices.
    pub(in crate::lower) gathered_copies: HashSet<TensorId>,
    /// State of the gathers and scatters.
    pub(in crate::lower) gathers: Gathers,
}

/// A bucket of parameters during a step.
pub(in crate::lower) struct Bucket {
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
    pub(super) weight_decay: f32,
    pub(super) split: Option<SplitOver>,
    /// Whether another pipeline stage counts the bucket in the norm.
    pub(super) is_tied_copy: bool,
}

impl Bucket {
    /// Whether BF16 copies are gathered in place of masters.
    pub(super) fn gathers_copies(&self) -> bool {
        self.gathered_as != self.parameters
    }
}

/// State of the gathers and scatters of a program.
#[derive(Default)]
pub(in crate::lower) struct Gathers {
    /// The bucket of each gathered parameter and of its copies.
    pub(super) bucket_of: HashMap<TensorId, usize>,
    /// The nodes that make the copies of a bucket, by index in the graph.
    pub(super) copies: HashMap<usize, Vec<usize>>,
    /// Buckets already gathered in the current body.
    pub(super) gathered: HashSet<usize>,
    /// Buckets whose copies are already made in the current body.
    pub(super) copied: HashSet<usize>,
    /// The buckets whose gradients are complete after a node.
    pub(super) complete_after: HashMap<usize, Vec<usize>>,
    /// Lists of values that are contiguous in memory.
    pub(in crate::lower) contiguous: Vec<Vec<ValueId>>,
    /// The parts of a bucket that are gathered, and the tensor that each becomes.
    pub(super) parts: HashMap<usize, Vec<(ValueId, TensorId)>>,
    /// Slices of planes for the next all-gather.
    pub(super) planes: Vec<Planes>,
}

impl Gathers {
    /// Records the copies of each gathered bucket's parameters, and the node after which the
    /// gradients of each scattered bucket are complete.
    pub(super) fn plan(graph: &Graph, build: &ProgramBuilder<'_>, buckets: &[Bucket]) -> Gathers {
        let mut gathers = Gathers::default();
        let mut bucket_of_gradient = HashMap::new();
        for (index, bucket) in buckets.iter().enumerate() {
            if bucket.is_gathered {
                gathers.bucket_of.extend(bucket.parameters.iter().map(|&id| (id, index)));
            }
            if bucket.scattered.is_some() {
                bucket_of_gradient.extend(bucket.gradients.iter().map(|&value| (value, index)));
                gathers.contiguous.push(bucket.gradients.clone());
            }
        }
        let mut last: HashMap<usize, usize> = HashMap::new();
        for (at, node) in graph.nodes.iter().enumerate() {
            let bucket = node.inputs.iter().find_map(|id| gathers.bucket_of.get(id).copied());
            if let (Phase::Weights, Some(bucket)) = (node.phase, bucket) {
                gathers.copies.entry(bucket).or_default().push(at);
                gathers.bucket_of.extend(node.outputs.iter().map(|&id| (id, bucket)));
            }
            let values = node.outputs.iter().filter_map(|&id| build.value_if_made(id));
            let scattered = values.filter_map(|value| bucket_of_gradient.get(&value));
            last.extend(scattered.map(|&bucket| (bucket, at)));
        }
        for (bucket, at) in last {
            gathers.complete_after.entry(at).or_default().push(bucket);
        }
        gathers.complete_after.values_mut().for_each(|buckets| buckets.sort_unstable());
        gathers
    }
}

/// Slices of data and scales for one all-gather.
pub(super) struct Planes {
    pub(super) group: (GroupId, u32),
    /// The first bucket of the slices.
    pub(super) bucket: usize,
    /// Each slice, and the destination of its all-gather.
    pub(super) pairs: Vec<(ValueId, ValueId)>,
}
