//! Gradients that are summed over ranks while the backward pass goes on.
//!
//! Where a step has one micro-batch a bucket is summed behind the call that writes the last of it,
//! beside what then computes, and the optimizer finds it done. With several the sums are of all
//! micro-batches and stay with the optimizer, as do buckets that another group sums first: those
//! of tensor-parallel ranks, and of tables that two stages have.
//!
//! The sums, their operands and their order within a bucket are those of the optimizer's body: the
//! bits of a step do not change.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{Phase, ProcessGroup, ValueId};

use super::Lowering;
use crate::PlanError;

/// Which buckets are summed early.
#[derive(Default)]
pub(super) struct EarlySums {
    /// The buckets whose gradients are whole behind a node, by index in the graph.
    behind: HashMap<usize, Vec<usize>>,
    /// Buckets that are summed.
    done: HashSet<usize>,
    /// This rank's slices of buckets that ranks share.
    slices: HashMap<usize, ValueId>,
}

impl EarlySums {
    /// Whether a bucket is summed already.
    pub(super) fn has(&self, bucket: usize) -> bool {
        self.done.contains(&bucket)
    }

    /// This rank's slice of a bucket that is summed already.
    pub(super) fn slice(&self, bucket: usize) -> Option<ValueId> {
        self.slices.get(&bucket).copied()
    }
}

impl Lowering<'_> {
    /// Notes behind which node each bucket of gradients is whole.
    pub(super) fn plan_early_sums(&mut self) {
        let is_split = self.target.ranks.named(ProcessGroup::TENSOR).is_some();
        if !self.overlaps || is_split || self.plan.micro_batches > 1 {
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
        let mut last: HashMap<usize, usize> = HashMap::new();
        for (at, node) in self.graph.nodes.iter().enumerate() {
            let values = node.outputs.iter().filter_map(|id| self.value_of.get(id));
            last.extend(values.filter_map(|value| Some((*bucket_of.get(value)?, at))));
        }
        let mut behind: HashMap<usize, Vec<usize>> = HashMap::new();
        for (bucket, at) in last.into_iter().filter(|(bucket, _)| !left.contains(bucket)) {
            behind.entry(at).or_default().push(bucket);
        }
        behind.values_mut().for_each(|buckets| buckets.sort_unstable());
        self.early.behind = behind;
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
    pub(super) fn sum_behind(&mut self, at: usize) -> Result<(), PlanError> {
        let phase: Phase = self.graph.nodes[at].phase;
        for bucket in self.early.behind.get(&at).cloned().unwrap_or_default() {
            if self.sharing().is_some() {
                let slice = self.scatter_bucket(bucket, phase)?;
                self.early.slices.insert(bucket, slice);
            } else if self.sum_bucket(bucket, phase)? {
                self.early.done.insert(bucket);
            }
        }
        Ok(())
    }
}
