//! Gradient reduction overlapped with the backward pass.
//!
//! A bucket is summed after the call that writes its last gradient, overlapped with the rest of the
//! pass; the optimizer finds the sum done. With several micro-batches, gradients are accumulated
//! first: the reduction's calls are in the only backward body and run in the last micro-batch
//! alone. Gradients whole on tensor-parallel ranks are summed over those ranks first, in the
//! optimizer's order. The optimizer still sums tied embedding tables of two stages, and the counts
//! of chosen experts.
//!
//! Sums have the same operands and the same order within a bucket as in the optimizer's body, so
//! the bits of a step do not change.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{Phase, ValueId};

use super::lowering::Lowering;
use crate::PlanError;

impl Lowering<'_> {
    /// Finds the node after which each bucket of gradients is complete.
    pub(super) fn plan_overlapped_reduction(&mut self) {
        if !self.rank.overlaps {
            return;
        }
        let mut bucket_of: HashMap<ValueId, usize> = HashMap::new();
        let mut left = HashSet::new();
        for (index, members) in self.buckets_to_sum().into_iter().enumerate() {
            for parameter in members {
                let state = &self.parameters.states[parameter];
                if self.parameters.is_selection_bias[parameter] || self.rank.is_tied(&state.name) {
                    left.insert(index);
                }
                bucket_of.extend(state.gradient.map(|gradient| (gradient, index)));
            }
        }
        // Last pass of a step with a write to the bucket, and the last such node in the pass.
        let mut last: HashMap<usize, (usize, usize)> = HashMap::new();
        for (at, node) in self.rank.graph.nodes.iter().enumerate() {
            let Some(place) = self.rank.last_pass(node) else { continue };
            let values = node.outputs.iter().filter_map(|&id| self.build.value_if_made(id));
            for bucket in values.filter_map(|value| bucket_of.get(&value)) {
                let latest = last.entry(*bucket).or_default();
                *latest = (*latest).max((place, at));
            }
        }
        let mut complete_after: HashMap<usize, Vec<usize>> = HashMap::new();
        for (bucket, (_, at)) in last.into_iter().filter(|(bucket, _)| !left.contains(bucket)) {
            if self.rank.closes(at) {
                complete_after.entry(at).or_default().push(bucket);
            }
        }
        complete_after.values_mut().for_each(|buckets| buckets.sort_unstable());
        self.reduction.complete_after = complete_after;
    }

    /// The parameters of each bucket. Empty for buckets reduce-scattered during the backward pass.
    fn buckets_to_sum(&self) -> Vec<Vec<usize>> {
        if self.rank.zero_group().is_none() {
            return self.parameters.buckets.iter().map(|bucket| bucket.clone().collect()).collect();
        }
        let of_shard = |(index, shard): (usize, &deepwell_ir::Shard)| {
            let comes_in_slices = self.zero.buckets[index].scattered.is_some();
            let parameters = shard.parameters.iter().map(|&(parameter, _)| parameter);
            if comes_in_slices { Vec::new() } else { parameters.collect() }
        };
        self.zero.shards.iter().enumerate().map(of_shard).collect()
    }

    /// Sums the buckets complete after a node.
    pub(super) fn sum_after(&mut self, at: usize) -> Result<(), PlanError> {
        let phase: Phase = self.rank.graph.nodes[at].phase;
        for bucket in self.reduction.complete_after.get(&at).cloned().unwrap_or_default() {
            self.in_last_micro_batch(|this| {
                this.sum_bucket_over_tensor(bucket, phase)?;
                this.reduction.over_tensor.insert(bucket);
                if this.rank.zero_group().is_some() {
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

    /// Sums this rank's slice of a bucket reduce-scattered after a node over tensor-parallel ranks,
    /// if these hold the bucket whole.
    pub(super) fn sum_slice_after(&mut self, at: usize, bucket: usize) -> Result<(), PlanError> {
        if !self.rank.overlaps || !self.rank.closes(at) {
            return Ok(());
        }
        let phase = self.rank.graph.nodes[at].phase;
        self.reduction.over_tensor.insert(bucket);
        self.in_last_micro_batch(|this| this.sum_bucket_over_tensor(bucket, phase))
    }

    /// Lowers calls for the last micro-batch only.
    fn in_last_micro_batch(
        &mut self,
        lower: impl FnOnce(&mut Self) -> Result<(), PlanError>,
    ) -> Result<(), PlanError> {
        let begin = self.build.calls.len();
        lower(self)?;
        let has_several = self.rank.plan.micro_batches > 1;
        self.build.calls[begin..].iter_mut().for_each(|call| call.last_only = has_several);
        Ok(())
    }
}
