//! Buckets of parameters that ranks share, as data: the parameters of a rank in classes, in order.

use std::collections::{HashMap, HashSet};

use deepwell_ir::ops::Cast;
use deepwell_ir::{DType, Op, Phase, SplitOver, TensorId};

use super::state::SLICE_ELEMENTS;
use crate::arena::align;
use crate::lower::parameters::Parameters;
use crate::lower::rank::RankContext;

/// FP32 elements per alignment unit.
const ALIGNED_ELEMENTS: usize = deepwell_ir::ALIGNMENT_BYTES / size_of::<f32>();

/// A parameter of a bucket.
#[derive(Clone)]
pub(super) struct Member {
    /// Index of the parameter's state among all parameters.
    pub(super) state: usize,
    pub(super) id: TensorId,
    pub(super) gradient: TensorId,
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) class: Class,
}

/// Properties that all parameters of a bucket have in common.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Class {
    /// Whether weight decay applies.
    pub(super) decays: bool,
    /// Whether other bodies read the master.
    pub(super) is_resident: bool,
    /// The kind of ranks over which the parameter is split.
    pub(super) split: Option<SplitOver>,
    /// Whether another pipeline stage counts the parameter in the norm.
    pub(super) is_tied_copy: bool,
    /// Whether the gradient stays whole until the update, because the call that writes the loss
    /// writes it too, or because another stage's gradient is added.
    pub(super) stays_whole: bool,
    /// The unit of gathers and scatters: a layer, or a parameter outside of layers.
    unit: Option<(Option<u32>, usize)>,
}

impl Member {
    /// Elements in a bucket, with alignment.
    pub(super) fn elements(&self) -> usize {
        let elements: usize = self.shape.iter().product();
        elements.next_multiple_of(ALIGNED_ELEMENTS)
    }
}

/// Classifies the parameters of a rank.
pub(super) struct Classes<'a> {
    rank: RankContext<'a>,
    /// Tensors read by bodies other than the one of weight copies.
    resident: HashSet<TensorId>,
    /// The layer of each parameter, if buckets are cut by layers.
    layers: HashMap<TensorId, u32>,
    /// Gradients that the call of the loss writes.
    with_loss: HashSet<TensorId>,
}

impl<'a> Classes<'a> {
    pub(super) fn of(rank: RankContext<'a>) -> Classes<'a> {
        let other_bodies = rank.graph.nodes.iter().filter(|node| node.phase != Phase::Weights);
        let (layers, with_loss) = match rank.shards_gradients() {
            true => (rank.layers_of_parameters(), rank.gradients_written_with_loss()),
            false => (HashMap::new(), HashSet::new()),
        };
        Classes {
            rank,
            resident: other_bodies.flat_map(|node| node.inputs.iter().copied()).collect(),
            layers,
            with_loss,
        }
    }

    /// The bucket's member for a parameter: `index` among the parameters of the graph, `state`
    /// among those of the program.
    pub(super) fn member(
        &self,
        parameters: &Parameters,
        index: usize,
        state: usize,
        (id, gradient): (TensorId, TensorId),
    ) -> Member {
        let rank = &self.rank;
        let tensor = rank.graph.tensor(id);
        let (name, shape) = (tensor.name.clone(), tensor.shape.bind(&rank.binding));
        let split = rank.split_of(&name).map(|split| split.over);
        let class = Class {
            decays: parameters.decays[index],
            is_resident: self.resident.contains(&id) && !rank.shards_weights(),
            split,
            is_tied_copy: rank.is_tied_copy(&name),
            stays_whole: self.with_loss.contains(&gradient) || rank.is_tied(&name),
            unit: rank.shards_gradients().then(|| match self.layers.get(&id) {
                // A parameter that is cut between blocks has a bucket of its own.
                Some(&layer) if rank.block_slice_of(&shape, split).is_none() => (Some(layer), 0),
                _ => (None, index),
            }),
        };
        Member { state, id, gradient, name, shape, class }
    }
}

impl RankContext<'_> {
    /// The BF16 copies of parameters, if gradients are scattered, calls read each parameter only
    /// through its copy, and every copy ends at an alignment boundary.
    pub(super) fn bf16_copies_of(&self, members: &[Member]) -> Option<Vec<TensorId>> {
        if !self.shards_gradients() {
            return None;
        }
        let copy_of = |member: &Member| {
            let mut readers =
                self.graph.nodes.iter().filter(|node| node.inputs.contains(&member.id));
            let (reader, others) = (readers.next()?, readers.next());
            let to_bf16 = matches!(&reader.op, Op::Cast(Cast { to: DType::Bf16 }));
            let is_copy = reader.phase == Phase::Weights && to_bf16 && others.is_none();
            let elements: usize = member.shape.iter().product();
            (is_copy && elements.is_multiple_of(SLICE_ELEMENTS)).then(|| reader.outputs[0])
        };
        members.iter().map(copy_of).collect()
    }
}

/// Parameters grouped by class, in order, with at most `limit_bytes` of gradients per bucket; a
/// larger parameter has a bucket of its own.
pub(super) fn buckets_of(members: &[Member], limit_bytes: usize) -> Vec<Vec<Member>> {
    let mut buckets: Vec<Vec<Member>> = Vec::new();
    let mut open: HashMap<Class, (usize, usize)> = HashMap::new();
    for member in members {
        let bytes = align(member.elements() * size_of::<f32>());
        match open.get_mut(&member.class) {
            Some((bucket, filled)) if *filled + bytes <= limit_bytes => {
                *filled += bytes;
                buckets[*bucket].push(member.clone());
            }
            _ => {
                open.insert(member.class, (buckets.len(), bytes));
                buckets.push(vec![member.clone()]);
            }
        }
    }
    buckets
}
