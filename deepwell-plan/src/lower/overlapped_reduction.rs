//! Gradients that are summed over ranks while the backward pass goes on.
//!
//! A bucket is summed behind the call that writes the last of it, beside what then computes, and
//! the optimizer finds it done. Where a step has several micro-batches the sum is of all of them:
//! its calls stand in the body of the backward, which is there once, and run in the last
//! micro-batch alone. What tensor-parallel ranks have whole they sum there first, in the order that
//! the optimizer has. The sums of tables that two stages have, and of how often experts were
//! chosen, stay with it.
//!
//! The sums, their operands and their order within a bucket are those of the optimizer's body: the
//! bits of a step do not change.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{Node, Phase, ValueId};

use super::Lowering;
use crate::PlanError;

/// Which buckets are summed early. Buckets are those of shards where ranks share the optimizer
/// state, else those of the optimizer.
#[derive(Default)]
pub(super) struct OverlappedReduction {
    /// The buckets whose gradients are whole behind a node, by index in the graph.
    behind: HashMap<usize, Vec<usize>>,
    /// Buckets that are summed.
    done: HashSet<usize>,
    /// Buckets whose sums over tensor-parallel ranks are made.
    over_tensor: HashSet<usize>,
    /// This rank's slices of buckets that ranks share.
    slices: HashMap<usize, ValueId>,
}

impl OverlappedReduction {
    /// Whether a bucket is summed already.
    pub(super) fn has(&self, bucket: usize) -> bool {
        self.done.contains(&bucket)
    }

    /// Whether a bucket is summed over tensor-parallel ranks already.
    pub(super) fn has_over_tensor(&self, bucket: usize) -> bool {
        self.over_tensor.contains(&bucket)
    }

    /// This rank's slice of a bucket that is summed already.
    pub(super) fn slice(&self, bucket: usize) -> Option<ValueId> {
        self.slices.get(&bucket).copied()
    }
}

impl Lowering<'_> {
    /// Notes behind which node each bucket of gradients is whole.
    pub(super) fn plan_overlapped_reduction(&mut self) {
        if !self.overlaps {
            return;
        }
        let mut bucket_of: HashMap<ValueId, usize> = HashMap::new();
        let mut left = HashSet::new();
        for (index, members) in self.buckets_to_sum().into_iter().enumerate() {
            for parameter in members {
                let state = &self.parameters[parameter];
                if self.is_counted[parameter] || self.is_shared(&state.name) {
                    left.insert(index);
                }
                bucket_of.extend(state.gradient.map(|gradient| (gradient, index)));
            }
        }
        // The pass that runs last in a step, and in it the last call.
        let mut last: HashMap<usize, (usize, usize)> = HashMap::new();
        for (at, node) in self.graph.nodes.iter().enumerate() {
            let Some(place) = self.last_pass(node) else { continue };
            let values = node.outputs.iter().filter_map(|id| self.value_of.get(id));
            for bucket in values.filter_map(|value| bucket_of.get(value)) {
                let latest = last.entry(*bucket).or_default();
                *latest = (*latest).max((place, at));
            }
        }
        let mut behind: HashMap<usize, Vec<usize>> = HashMap::new();
        for (bucket, (_, at)) in last.into_iter().filter(|(bucket, _)| !left.contains(bucket)) {
            if self.closes(at) {
                behind.entry(at).or_default().push(bucket);
            }
        }
        behind.values_mut().for_each(|buckets| buckets.sort_unstable());
        self.reduction.behind = behind;
    }

    /// Where in the schedule the body of a node runs for the last time.
    fn last_pass(&self, node: &Node) -> Option<usize> {
        self.last_run(node.phase, self.chunk_of(node))
    }

    fn last_run(&self, phase: Phase, chunk: u32) -> Option<usize> {
        self.passes.passes.iter().rposition(|pass| (pass.phase, pass.chunk) == (phase, chunk))
    }

    /// Whether, behind the last run of a node's body, no body runs that stands before it.
    pub(super) fn closes(&self, at: usize) -> bool {
        let node = &self.graph.nodes[at];
        let (phase, chunk) = (node.phase, self.chunk_of(node));
        let Some(own) = self.last_run(phase, chunk) else { return false };
        // Bodies stand chunk by chunk, the last one first.
        let stands_before = |pass: &deepwell_ir::Slotted| {
            pass.chunk > chunk || pass.chunk == chunk && pass.phase < phase
        };
        !self.passes.passes[own + 1..].iter().any(stands_before)
    }

    /// The parameters of each bucket that is summed whole; of those that are scattered while they
    /// come none.
    fn buckets_to_sum(&self) -> Vec<Vec<usize>> {
        if self.sharing().is_none() {
            let buckets = self.buckets(self.plan.bucket_bytes).into_iter();
            return buckets.map(|bucket| bucket.collect()).collect();
        }
        let of_shard = |(index, shard): (usize, &deepwell_ir::Shard)| {
            let comes_in_slices = self.shared[index].scattered.is_some();
            let parameters = shard.parameters.iter().map(|&(parameter, _)| parameter);
            if comes_in_slices { Vec::new() } else { parameters.collect() }
        };
        self.shards.iter().enumerate().map(of_shard).collect()
    }

    /// Sums the buckets that are whole behind a node.
    pub(super) fn sum_after(&mut self, at: usize) -> Result<(), PlanError> {
        let phase: Phase = self.graph.nodes[at].phase;
        for bucket in self.reduction.behind.get(&at).cloned().unwrap_or_default() {
            self.in_last_micro_batch(|this| {
                this.sum_bucket_over_tensor(bucket, phase)?;
                this.reduction.over_tensor.insert(bucket);
                if this.sharing().is_some() {
                    let slice = this.scatter_bucket(bucket, phase)?;
                    this.reduction.slices.insert(bucket, slice);
                } else if this.sum_bucket(bucket, phase)? {
                    this.reduction.done.insert(bucket);
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Sums this rank's slice of a bucket that was scattered behind a node over tensor-parallel
    /// ranks, if they have the bucket whole.
    pub(super) fn sum_slice_after(&mut self, at: usize, bucket: usize) -> Result<(), PlanError> {
        if !self.overlaps || !self.closes(at) {
            return Ok(());
        }
        let phase = self.graph.nodes[at].phase;
        self.reduction.over_tensor.insert(bucket);
        self.in_last_micro_batch(|this| this.sum_bucket_over_tensor(bucket, phase))
    }

    /// Lowers calls that run once in a step, in the last micro-batch.
    fn in_last_micro_batch(
        &mut self,
        lower: impl FnOnce(&mut Self) -> Result<(), PlanError>,
    ) -> Result<(), PlanError> {
        let begin = self.calls.len();
        lower(self)?;
        let has_several = self.plan.micro_batches > 1;
        self.calls[begin..].iter_mut().for_each(|call| call.last_only = has_several);
        Ok(())
    }
}
