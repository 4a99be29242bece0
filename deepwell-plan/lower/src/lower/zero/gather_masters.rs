//! All-gathers of whole buckets for the calls that make the compute copies of weights.

use deepwell_ir::ops::{Cast, Collective, CollectiveKind};
use deepwell_ir::{DType, MemoryKind, Phase, ValueId};

use super::gather_per_layer::suffix_of;
use super::state::Bucket;
use crate::PlanError;
use crate::lower::builder::{NewCall, read, write};
use crate::lower::lowering::Lowering;

impl Lowering<'_> {
    /// Gathers the masters that the following weight-copy calls read, or the casts of each rank's
    /// slice.
    pub(in crate::lower) fn gather_masters(&mut self) -> Result<(), PlanError> {
        // The join of parts overlaps with the next all-gather.
        let (mut taken, mut arriving) = (Vec::new(), Vec::new());
        for index in 0..self.zero.buckets.len() {
            let Bucket { gathered, gathered_as, is_gathered, quantized_by, .. } =
                &self.zero.buckets[index];
            if *is_gathered {
                continue;
            }
            if quantized_by.is_some() {
                self.gather_quantized(index, (Phase::Weights, None))?;
                taken.push(index);
                if self.gathered_plane_bytes() >= self.rank.plan.bucket_bytes {
                    self.gather_planes(Phase::Weights)?;
                    for before in std::mem::replace(&mut arriving, std::mem::take(&mut taken)) {
                        self.join_parts(before, (Phase::Weights, None))?;
                    }
                }
                continue;
            }
            let (gathered, gathered_as) = (gathered.clone(), gathered_as.clone());
            for (tensor, &value) in gathered_as.into_iter().zip(&gathered) {
                self.build.rebind(tensor, value);
            }
            self.gather_bucket(index, gathered, (Phase::Weights, None))?;
        }
        self.gather_planes(Phase::Weights)?;
        let mut last = arriving.into_iter().chain(taken);
        last.try_for_each(|bucket| self.join_parts(bucket, (Phase::Weights, None)))
    }

    /// Gathers a bucket from the slices of all ranks: masters, or BF16 casts of them.
    pub(super) fn gather_bucket(
        &mut self,
        index: usize,
        gathered: Vec<ValueId>,
        (phase, layer): (Phase, Option<u32>),
    ) -> Result<(), PlanError> {
        let Bucket { group: (group, ranks), master, .. } = self.zero.buckets[index];
        let suffix = suffix_of(phase);
        let (what, slice) = match self.zero.buckets[index].gathers_copies() {
            true => ("weights", self.cast_slice(index, (phase, layer))?),
            false => ("masters", master),
        };
        let op = Collective::of_bucket(CollectiveKind::AllGather, group, ranks, gathered.len());
        let outputs = gathered.into_iter().map(write).collect();
        let name = format!("all_gather.{what}.{index}{suffix}");
        let inputs = vec![read(slice)];
        let call = self.build.call_without_node((phase, None), &name, op.into(), inputs, outputs);
        let rejected = self.why_not_quantized(index).into_iter().collect();
        self.build.call(NewCall { rejected, ..call })
    }

    /// Casts this rank's slice of a bucket to BF16. The cast overlaps with the calls of `layer`.
    fn cast_slice(
        &mut self,
        index: usize,
        (phase, layer): (Phase, Option<u32>),
    ) -> Result<ValueId, PlanError> {
        let (master, suffix) = (self.zero.buckets[index].master, suffix_of(phase));
        let name = format!("bf16.shard.{index}{suffix}");
        let shape = self.build.values[master.index()].shape.clone();
        let copy = self.build.add(name, DType::Bf16, shape, MemoryKind::Activations);
        let (name, op) = (format!("cast.shard.{index}{suffix}"), Cast { to: DType::Bf16 });
        let (input, output) = (vec![read(master)], vec![write(copy)]);
        self.build.layer_call((phase, layer), &name, op.into(), input, output)?;
        Ok(copy)
    }
}
