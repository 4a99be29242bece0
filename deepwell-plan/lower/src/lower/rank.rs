//! The graph of a rank and the place of the rank in the world: the inputs of lowering.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{
    Binding, Graph, GroupId, KernelCatalog, Node, OperandType, Phase, ProcessGroup, Schedule,
    Split, SplitOver, Target, TensorId,
};

use super::splits::Splits;
use super::stage::Pipeline;
use crate::Plan;
use crate::schedule::StageHandover;

/// The inputs of a lowering. Nothing here changes while a program is built.
#[derive(Clone, Copy)]
pub(super) struct RankContext<'a> {
    pub(super) graph: &'a Graph,
    pub(super) plan: &'a Plan,
    pub(super) catalog: &'a dyn KernelCatalog,
    pub(super) target: &'a Target,
    pub(super) binding: Binding,
    pub(super) passes: &'a Schedule,
    /// The rank's place in a pipeline of several stages.
    pub(super) pipeline: Option<&'a Pipeline>,
    /// Receives of the stage between bodies.
    pub(super) handover: Option<&'a StageHandover>,
    /// The rank's slices of parameters, by name; `None` if all parameters are whole.
    pub(super) splits: Option<&'a Splits>,
    /// Whether collectives overlap with compute.
    pub(super) overlaps: bool,
}

impl<'a> RankContext<'a> {
    /// A rank that is not a stage of a pipeline, with whole parameters and sequential calls.
    pub(super) fn new(
        graph: &'a Graph,
        plan: &'a Plan,
        catalog: &'a dyn KernelCatalog,
        target: &'a Target,
        passes: &'a Schedule,
    ) -> RankContext<'a> {
        RankContext {
            graph,
            plan,
            catalog,
            target,
            binding: Binding { batch: plan.micro_batch, seq: plan.rank_seq() },
            passes,
            pipeline: None,
            handover: None,
            splits: None,
            overlaps: false,
        }
    }

    /// The rank's slice of a parameter; `None` if the parameter is whole.
    pub(super) fn split_of(&self, parameter: &str) -> Option<Split> {
        self.splits?.get(parameter).copied()
    }

    /// A group of this rank and the group's size.
    pub(super) fn named_group(&self, name: &str) -> Option<(GroupId, u32)> {
        let (id, group) = self.target.ranks.named(name)?;
        Some((id, group.ranks.len() as u32))
    }

    /// The group whose ranks share the optimizer state, if any do.
    pub(super) fn zero_group(&self) -> Option<(GroupId, u32)> {
        self.plan.parallel.shards_optimizer().then(|| self.zero_group_of(None))?
    }

    /// The group whose ranks share the optimizer state of parameters with this split.
    pub(super) fn zero_group_of(&self, split: Option<SplitOver>) -> Option<(GroupId, u32)> {
        self.named_group(match split {
            Some(SplitOver::Expert) => ProcessGroup::EXPERT_DATA,
            _ => ProcessGroup::DATA,
        })
    }

    /// Whether gradients are reduce-scattered during the backward pass (ZeRO 2 and 3).
    pub(super) fn shards_gradients(&self) -> bool {
        self.plan.parallel.shards_gradients()
    }

    /// Whether weights are sharded and gathered per layer (ZeRO 3).
    pub(super) fn shards_weights(&self) -> bool {
        self.plan.parallel.shards_weights()
    }

    /// Whether weights are gathered in a phase.
    pub(super) fn gathers_weights_in(&self, phase: Phase) -> bool {
        let passes = [Phase::Forward, Phase::Backward];
        if self.shards_weights() { passes.contains(&phase) } else { phase == Phase::Weights }
    }

    /// Number of this rank's chunks of layers.
    pub(super) fn chunks(&self) -> u32 {
        self.pipeline.map_or(1, Pipeline::chunks)
    }

    /// The chunk of layers that a node belongs to.
    pub(super) fn chunk_of(&self, node: &Node) -> u32 {
        self.pipeline.map_or(0, |pipeline| pipeline.chunk_of_node(node))
    }

    /// Whether an earlier stage of the pipeline holds the parameter as well.
    pub(super) fn is_tied_copy(&self, parameter: &str) -> bool {
        self.pipeline.is_some_and(|pipeline| pipeline.is_tied_copy(parameter))
    }

    /// Whether another stage of the pipeline holds the parameter as well.
    pub(super) fn is_tied(&self, parameter: &str) -> bool {
        self.pipeline.is_some_and(|pipeline| pipeline.is_tied(parameter))
    }

    /// Index in the schedule of the last run of a node's body.
    pub(super) fn last_pass(&self, node: &Node) -> Option<usize> {
        self.last_run(node.phase, self.chunk_of(node))
    }

    fn last_run(&self, phase: Phase, chunk: u32) -> Option<usize> {
        self.passes.passes.iter().rposition(|pass| (pass.phase, pass.chunk) == (phase, chunk))
    }

    /// Whether no earlier body runs after the last run of the node's body.
    pub(super) fn closes(&self, node: usize) -> bool {
        let node = &self.graph.nodes[node];
        let (phase, chunk) = (node.phase, self.chunk_of(node));
        let Some(last) = self.last_run(phase, chunk) else { return false };
        // Bodies are ordered chunk by chunk, the last chunk first.
        let stands_before = |pass: &deepwell_ir::Slotted| {
            pass.chunk > chunk || pass.chunk == chunk && pass.phase < phase
        };
        !self.passes.passes[last + 1..].iter().any(stands_before)
    }

    /// Types of tensors in the sizes of a micro-batch.
    pub(super) fn types_of<'t>(&self, ids: impl Iterator<Item = &'t TensorId>) -> Vec<OperandType> {
        let tensors = ids.map(|&id| self.graph.tensor(id));
        tensors
            .map(|it| OperandType { dtype: it.dtype, shape: it.shape.bind(&self.binding) })
            .collect()
    }

    /// The layer of each parameter inside a layer, taken from the first forward node reading the
    /// parameter or a copy of the parameter.
    pub(super) fn layers_of_parameters(&self) -> HashMap<TensorId, u32> {
        let parents = parents(self.graph);
        let mut layers = HashMap::new();
        for node in self.graph.nodes.iter().filter(|node| node.phase == Phase::Forward) {
            for id in &node.inputs {
                let parameter = parents.get(id).unwrap_or(id);
                if let Some(layer) = node.layer {
                    layers.entry(*parameter).or_insert(layer);
                }
            }
        }
        layers
    }

    /// Gradients written by the same call as the loss. With several micro-batches the call
    /// accumulates the loss, and therefore these gradients too.
    pub(super) fn gradients_written_with_loss(&self) -> HashSet<TensorId> {
        if self.plan.micro_batches < 2 {
            return HashSet::new();
        }
        let writes_loss = |node: &&Node| node.outputs.iter().any(|id| Some(*id) == self.graph.loss);
        let nodes = self.graph.nodes.iter().filter(writes_loss);
        nodes.flat_map(|node| node.outputs.iter().copied()).collect()
    }
}

/// The parameter from which each copy is made.
pub(super) fn parents(graph: &Graph) -> HashMap<TensorId, TensorId> {
    let mut parents = HashMap::new();
    for node in graph.nodes.iter().filter(|node| node.phase == Phase::Weights) {
        let Some(first) = node.inputs.first() else { continue };
        let parent = *parents.get(first).unwrap_or(first);
        parents.extend(node.outputs.iter().map(|&id| (id, parent)));
    }
    parents
}
