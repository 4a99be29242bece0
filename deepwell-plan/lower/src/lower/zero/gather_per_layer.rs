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

use deepwell_ir::{MemoryKind, Node, Phase, TensorId, TensorKind, Value, ValueId};

use crate::PlanError;
use crate::lower::lowering::Lowering;

/// Suffix of the names of values and calls that a backward pass makes again.
pub(super) fn suffix_of(phase: Phase) -> &'static str {
    if phase == Phase::Backward { ".again" } else { "" }
}

impl Lowering<'_> {
    /// Forgets the gathers of the previous body: every body gathers its weights itself.
    pub(in crate::lower) fn begin_gathers(&mut self, phase: Phase) {
        self.zero.gathers.gathered.clear();
        self.zero.gathers.copied.clear();
        if phase != Phase::Backward || !self.rank.shards_weights() {
            return;
        }
        let graph = self.rank.graph;
        let is_whole = |id: &TensorId| graph.tensor(*id).kind != TensorKind::Statistic;
        for id in self.zero.gathers.bucket_of.keys().filter(|id| is_whole(id)) {
            self.build.forget(*id);
        }
    }

    /// Whether a node of the weights body is lowered where its weight is gathered instead.
    pub(in crate::lower) fn comes_with_gather(&self, node: &Node) -> bool {
        let is_gathered = |id: &TensorId| {
            let in_pass =
                self.rank.shards_weights() && self.zero.gathers.bucket_of.contains_key(id);
            in_pass || self.zero.gathered_copies.contains(id)
        };
        node.phase == Phase::Weights && node.outputs.iter().any(is_gathered)
    }

    /// Gathers the buckets that a node reads and that are missing, overlapped with the calls of
    /// `layer`.
    pub(in crate::lower) fn prefetch_for(
        &mut self,
        node: &Node,
        layer: Option<u32>,
    ) -> Result<(), PlanError> {
        if !self.rank.gathers_weights_in(node.phase) {
            return Ok(());
        }
        for id in &node.inputs {
            let Some(&bucket) = self.zero.gathers.bucket_of.get(id) else { continue };
            self.gather_once(bucket, node.phase, layer)?;
        }
        Ok(())
    }

    /// Gathers the missing buckets read by a node, and makes the missing copies.
    pub(in crate::lower) fn gather_for(&mut self, node: &Node) -> Result<(), PlanError> {
        if !self.rank.gathers_weights_in(node.phase) {
            return Ok(());
        }
        for id in &node.inputs {
            let Some(&bucket) = self.zero.gathers.bucket_of.get(id) else { continue };
            self.gather_once(bucket, node.phase, node.layer)?;
            self.gather_planes(node.phase)?;
            if self.zero.gathers.copied.insert(bucket) {
                self.make_copies(bucket, node)?;
            }
        }
        Ok(())
    }

    fn gather_once(
        &mut self,
        bucket: usize,
        phase: Phase,
        layer: Option<u32>,
    ) -> Result<(), PlanError> {
        if !self.zero.gathers.gathered.insert(bucket) {
            return Ok(());
        }
        if self.zero.buckets[bucket].quantized_by.is_some() {
            return self.gather_quantized(bucket, (phase, layer));
        }
        let mut gathered = self.zero.buckets[bucket].gathered.clone();
        if phase == Phase::Backward {
            let again = |this: &mut Self, value: &ValueId| {
                let Value { name, dtype, shape, link, .. } =
                    this.build.values[value.index()].clone();
                let memory = MemoryKind::Activations;
                let again = this.build.add(format!("{name}.again"), dtype, shape, memory);
                this.build.values[again.index()].link = link;
                again
            };
            gathered = gathered.iter().map(|value| again(self, value)).collect();
        }
        for (&id, &value) in self.zero.buckets[bucket].gathered_as.iter().zip(&gathered) {
            self.build.store(id, value);
        }
        self.gather_bucket(bucket, gathered.clone(), (phase, layer))?;
        self.zero.gathers.contiguous.push(gathered);
        Ok(())
    }

    /// Makes the copies of a gathered bucket for `reader`, the first node that reads them.
    fn make_copies(&mut self, bucket: usize, reader: &Node) -> Result<(), PlanError> {
        if self.zero.buckets[bucket].quantized_by.is_some() {
            return self.join_parts(bucket, (reader.phase, reader.layer));
        }
        if !self.rank.shards_weights() || self.zero.buckets[bucket].gathers_copies() {
            return Ok(());
        }
        let suffix = suffix_of(reader.phase);
        for at in self.zero.gathers.copies.get(&bucket).cloned().unwrap_or_default() {
            let node = &self.rank.graph.nodes[at];
            let name = format!("{}{suffix}", node.name);
            let layer = if self.rank.overlaps { reader.layer } else { node.layer };
            let copied = Node { phase: reader.phase, name, layer, ..node.clone() };
            self.build.node_with_suffix(&copied, suffix)?;
        }
        Ok(())
    }
}
