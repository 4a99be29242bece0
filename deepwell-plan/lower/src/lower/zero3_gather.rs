//! Weights and gradients that are whole only while a layer needs them (ZeRO 2 and 3).
//!
//! A bucket holds parameters of one layer. With ZeRO 2 a bucket's gradients are reduce-scattered
//! after the backward call that writes the last of them, and a rank adds its slice to the sum of
//! the previous micro-batches. With ZeRO 3 the sharded masters are gathered before the first
//! forward call that reads them, and again before the first backward call that reads them. The
//! compute copies are made there, unless the copies themselves are gathered. Whole buffers lie in
//! the part of the arena that is shared by lifetime.
//!
//! A gradient is thus summed over ranks first and then over micro-batches; ZeRO 0 and 1 sum over
//! micro-batches first. With one micro-batch per step the bits are the same.

use std::collections::{HashMap, HashSet};

use deepwell_ir::ops::{Collective, CollectiveKind, Reduction};
use deepwell_ir::{
    Accumulate, Graph, MemoryKind, Node, NodeId, Op, Phase, Tag, TensorId, TensorKind, Value,
    ValueId,
};

use super::optimizer::{read, update, write};
use super::{Lowering, NewCall};
use crate::PlanError;

/// State of the gathers and scatters of a program.
#[derive(Default)]
pub(super) struct TransientWeights {
    /// The bucket of each gathered parameter and of its copies.
    bucket_of: HashMap<TensorId, usize>,
    /// The nodes that make the copies of a bucket, by index in the graph.
    copies: HashMap<usize, Vec<usize>>,
    /// Buckets already gathered in the current body.
    fetched: HashSet<usize>,
    /// Buckets whose copies are already made in the current body.
    copied: HashSet<usize>,
    /// The buckets whose gradients are complete after a node.
    complete_after: HashMap<usize, Vec<usize>>,
    /// Lists of values that are contiguous in memory.
    pub(super) contiguous: Vec<Vec<ValueId>>,
    /// Suffix of the names of values that a body makes again.
    pub(super) suffix: &'static str,
    /// The parts of a bucket that are gathered, and the tensor that each becomes.
    pub(super) parts: HashMap<usize, Vec<(ValueId, TensorId)>>,
    /// Slices of planes for the next all-gather.
    pub(super) planes: Vec<super::quantized_all_gather::Planes>,
}

impl Lowering<'_> {
    /// Whether gradients are reduce-scattered during the backward pass (ZeRO 2 and 3).
    pub(super) fn scatters(&self) -> bool {
        self.plan.parallel.zero >= 2 && self.sharing().is_some()
    }

    /// Whether weights are sharded and gathered per layer (ZeRO 3).
    pub(super) fn gathers(&self) -> bool {
        self.plan.parallel.zero >= 3 && self.sharing().is_some()
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

    /// Records the copies of each gathered bucket's parameters, and the node after which the
    /// gradients of each scattered bucket are complete.
    pub(super) fn plan_gathers(&mut self) {
        let mut transient = TransientWeights::default();
        let mut bucket_of_gradient = HashMap::new();
        for (index, bucket) in self.shared.iter().enumerate() {
            if bucket.is_gathered {
                transient.bucket_of.extend(bucket.parameters.iter().map(|&id| (id, index)));
            }
            if bucket.scattered.is_some() {
                bucket_of_gradient.extend(bucket.gradients.iter().map(|&value| (value, index)));
                transient.contiguous.push(bucket.gradients.clone());
            }
        }
        for (at, node) in self.graph.nodes.iter().enumerate() {
            let bucket = node.inputs.iter().find_map(|id| transient.bucket_of.get(id).copied());
            if let (Phase::Weights, Some(bucket)) = (node.phase, bucket) {
                transient.copies.entry(bucket).or_default().push(at);
                transient.bucket_of.extend(node.outputs.iter().map(|&id| (id, bucket)));
            }
        }
        let mut last: HashMap<usize, usize> = HashMap::new();
        for (at, node) in self.graph.nodes.iter().enumerate() {
            for id in &node.outputs {
                let value = self.value_of.get(id);
                if let Some(&bucket) = value.and_then(|value| bucket_of_gradient.get(value)) {
                    last.insert(bucket, at);
                }
            }
        }
        for (bucket, at) in last {
            transient.complete_after.entry(at).or_default().push(bucket);
        }
        transient.complete_after.values_mut().for_each(|buckets| buckets.sort_unstable());
        self.transient = transient;
    }

    /// Forgets the gathers of the previous body: every body gathers its weights itself.
    pub(super) fn begin_gathers(&mut self, phase: Phase) {
        self.transient.fetched.clear();
        self.transient.copied.clear();
        if phase != Phase::Backward || !self.gathers() {
            return;
        }
        let graph = self.graph;
        let is_whole = |id: &TensorId| graph.tensor(*id).kind != TensorKind::Statistic;
        for id in self.transient.bucket_of.keys().filter(|id| is_whole(id)) {
            self.value_of.remove(id);
        }
    }

    /// Whether a node of the weights body is lowered where its weight is gathered instead.
    pub(super) fn comes_with_gather(&self, node: &Node) -> bool {
        let is_gathered = |id: &TensorId| {
            let in_pass = self.gathers() && self.transient.bucket_of.contains_key(id);
            in_pass || self.gathered_copies.contains(id)
        };
        node.phase == Phase::Weights && node.outputs.iter().any(is_gathered)
    }

    /// Whether weights are gathered in a phase.
    fn gathers_in(&self, phase: Phase) -> bool {
        let passes = [Phase::Forward, Phase::Backward];
        if self.gathers() { passes.contains(&phase) } else { phase == Phase::Weights }
    }

    /// Gathers the buckets that a node reads and that are missing, overlapped with the calls of
    /// `layer`.
    pub(super) fn fetch_for(&mut self, node: &Node, layer: Option<u32>) -> Result<(), PlanError> {
        if !self.gathers_in(node.phase) {
            return Ok(());
        }
        for id in &node.inputs {
            let Some(&bucket) = self.transient.bucket_of.get(id) else { continue };
            self.fetch(bucket, node.phase, layer)?;
        }
        Ok(())
    }

    /// Gathers the missing buckets read by a node, and makes the missing copies.
    pub(super) fn gather_for(&mut self, node: &Node) -> Result<(), PlanError> {
        if !self.gathers_in(node.phase) {
            return Ok(());
        }
        for id in &node.inputs {
            let Some(&bucket) = self.transient.bucket_of.get(id) else { continue };
            self.fetch(bucket, node.phase, node.layer)?;
            self.gather_planes(node.phase)?;
            if self.transient.copied.insert(bucket) {
                self.make_copies(bucket, node)?;
            }
        }
        Ok(())
    }

    fn fetch(&mut self, bucket: usize, phase: Phase, layer: Option<u32>) -> Result<(), PlanError> {
        if !self.transient.fetched.insert(bucket) {
            return Ok(());
        }
        if self.shared[bucket].quantized_by.is_some() {
            return self.gather_quantized(bucket, (phase, layer));
        }
        let mut gathered = self.shared[bucket].gathered.clone();
        if phase == Phase::Backward {
            let again = |this: &mut Self, value: &ValueId| {
                let Value { name, dtype, shape, link, .. } = this.values[value.index()].clone();
                let memory = MemoryKind::Activations;
                let again = this.add(format!("{name}.again"), dtype, shape, memory);
                this.values[again.index()].link = link;
                again
            };
            gathered = gathered.iter().map(|value| again(self, value)).collect();
        }
        for (&id, &value) in self.shared[bucket].gathered_as.iter().zip(&gathered) {
            self.value_of.insert(id, value);
            self.values[value.index()].tensor = Some(id);
        }
        let suffix = if phase == Phase::Backward { ".again" } else { "" };
        self.gather_bucket(bucket, gathered.clone(), (phase, layer), suffix)?;
        self.transient.contiguous.push(gathered);
        Ok(())
    }

    /// Makes the copies of a gathered bucket for `reader`, the first node that reads them.
    fn make_copies(&mut self, bucket: usize, reader: &Node) -> Result<(), PlanError> {
        if self.shared[bucket].quantized_by.is_some() {
            return self.join_parts(bucket, (reader.phase, reader.layer));
        }
        if !self.gathers() || self.shared[bucket].gathers_copies() {
            return Ok(());
        }
        let (phase, layer) = (reader.phase, reader.layer);
        let suffix = if phase == Phase::Forward { "" } else { ".again" };
        self.transient.suffix = suffix;
        for at in self.transient.copies.get(&bucket).cloned().unwrap_or_default() {
            let node = &self.graph.nodes[at];
            let name = format!("{}{suffix}", node.name);
            let layer = if self.overlaps { layer } else { node.layer };
            self.node(&Node { phase, name, layer, ..node.clone() })?;
        }
        self.transient.suffix = "";
        Ok(())
    }

    /// Reduce-scatters the buckets whose gradients are complete after a node.
    pub(super) fn scatter_after(&mut self, at: usize) -> Result<(), PlanError> {
        for bucket in self.transient.complete_after.get(&at).cloned().unwrap_or_default() {
            let (group, ranks) = self.shared[bucket].group;
            let gradients = self.shared[bucket].gradients.clone();
            let Some(own) = self.shared[bucket].scattered else { continue };
            let kind = CollectiveKind::ReduceScatter { reduction: Reduction::Sum };
            let op = Collective::of_bucket(kind, group, ranks, gradients.len());
            // On devices a sum that is accumulated arrives in this bucket first.
            let adds = self.target.arch != "cpu" && self.plan.micro_batches > 1;
            let parameters = self.shared[bucket].parameters.len();
            let operand = |(index, value)| match adds {
                _ if index >= parameters => write(value),
                true => update(value),
                false => read(value),
            };
            let mut operands: Vec<_> = gradients.into_iter().enumerate().map(operand).collect();
            operands.push(write(own));
            self.call(NewCall {
                name: format!("reduce_scatter.gradients.{bucket}"),
                op: Op::from(op),
                input_count: operands.len() - 1,
                operands,
                accumulate: Accumulate::AfterFirst,
                accumulator_bytes: self.values[own.index()].range.bytes as u64,
                phase: self.graph.nodes[at].phase,
                tag: Tag::Head,
                layer: None,
                source: NodeId(self.graph.nodes.len() as u32),
                recomputes: false,
            })?;
            self.sum_slice_after(at, bucket)?;
        }
        Ok(())
    }
}

/// The parameter from which each copy is made.
fn parents(graph: &Graph) -> HashMap<TensorId, TensorId> {
    let mut parents = HashMap::new();
    for node in graph.nodes.iter().filter(|node| node.phase == Phase::Weights) {
        let Some(first) = node.inputs.first() else { continue };
        let parent = *parents.get(first).unwrap_or(first);
        parents.extend(node.outputs.iter().map(|&id| (id, parent)));
    }
    parents
}
