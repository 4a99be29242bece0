//! One rank of a tensor-parallel group: its part of the graph, and the sums over ranks before the
//! update.
//!
//! A rank holds one slice of each split parameter, with the complete gradient of the slice. All
//! other parameters are whole on each rank and are read with the rank's tokens or heads: their
//! gradients are summed over the ranks, and only the first rank counts them in the norm.

use deepwell_ir::ops::{Collective, CollectiveKind, NormOfSums, SumsOfSquares};
use deepwell_ir::{
    DType, Graph, GroupId, GroupRank, MemoryKind, Phase, ProcessGroup, SplitOver, Target, ValueId,
    check_split_blocks, tensor_parallel,
};

use super::builder::{read, write};
use super::lowering::Lowering;
use super::rank::RankContext;
use super::splits::{NormTerms, Splits};
use crate::{Plan, PlanError};

/// Returns this rank's part of the graph, and its slices of the parameters.
pub(super) fn split(
    graph: &Graph,
    plan: &Plan,
    target: &Target,
) -> Result<(Graph, Splits), PlanError> {
    let Some(rank) = target.ranks.member_of(ProcessGroup::TENSOR) else {
        return Ok((graph.clone(), Splits::new()));
    };
    let tokens = plan.micro_batch * plan.rank_seq();
    if !tokens.is_multiple_of(rank.ranks) {
        return Err(PlanError::Request {
            what: "tokens of a micro-batch",
            expected: format!("a multiple of the {} tensor-parallel ranks", rank.ranks),
            got: format!("{} x {} = {tokens}", plan.micro_batch, plan.rank_seq()),
        });
    }
    let (own, splits) = tensor_parallel(graph, rank)?;
    check_split_blocks(&own, &splits, &plan.policy)?;
    let names = own.parameters().map(|(_, tensor)| tensor.name.clone());
    let splits = names.zip(splits).filter_map(|(name, split)| Some((name, split?))).collect();
    Ok((own, splits))
}

impl RankContext<'_> {
    /// The groups whose ranks hold different parts of a stage's gradients. Some ranks hold a given
    /// slice, and all ranks hold a replicated parameter: see [`RankContext::counts`].
    fn groups_of_slices(&self) -> Vec<(GroupId, u32)> {
        let ranks = &self.target.ranks;
        let names: &[&str] =
            match (ranks.member_of(ProcessGroup::TENSOR), ranks.member_of(ProcessGroup::EXPERT)) {
                // Slices of each parameter are spread over the data-parallel ranks.
                _ if self.zero_group().is_some() => &[ProcessGroup::TENSOR],
                (None, _) => &[ProcessGroup::EXPERT],
                (Some(_), None) => &[ProcessGroup::TENSOR],
                // Experts may span several tensor-parallel groups; the two groups include all of
                // these ranks.
                (Some(_), Some(_)) => &[ProcessGroup::TENSOR, ProcessGroup::DATA],
            };
        let named = names.iter().filter_map(|name| ranks.named(name));
        named.map(|(id, group)| (id, group.ranks.len() as u32)).collect()
    }

    /// Whether this rank counts a parameter in sums over ranks: the first of all ranks with the
    /// same part of the parameter does.
    pub(super) fn counts(&self, split: Option<SplitOver>) -> bool {
        let (parallel, rank) = (&self.plan.parallel, self.target.ranks.rank as usize);
        let is_first_slice = parallel.tensor_place(rank) == 0;
        if self.zero_group().is_some() {
            return split.is_some() || is_first_slice;
        }
        let experts_are_apart = self.target.ranks.member_of(ProcessGroup::EXPERT).is_some();
        if !experts_are_apart {
            return split.is_some() || is_first_slice;
        }
        match (split, parallel.tensor > 1) {
            (Some(SplitOver::Expert), true) => parallel.shard_place(rank, SplitOver::Expert) == 0,
            (Some(SplitOver::Expert), false) => true,
            (Some(SplitOver::Tensor), _) => parallel.data_place(rank) == 0,
            (None, true) => parallel.token_place(rank) == 0,
            (None, false) => parallel.expert_place(rank) == 0,
        }
    }
}

impl Lowering<'_> {
    /// Sums the gradients of parameters replicated on tensor-parallel ranks, bucket by bucket,
    /// unless the backward pass has done so.
    pub(super) fn sum_over_tensor_ranks(&mut self) -> Result<(), PlanError> {
        if self.rank.target.ranks.member_of(ProcessGroup::TENSOR).is_none() {
            return Ok(());
        }
        if self.rank.zero_group().is_none() {
            for bucket in 0..self.parameters.buckets.len() {
                if !self.reduction.has_over_tensor(bucket) {
                    self.sum_bucket_over_tensor(bucket, Phase::Optimizer)?;
                }
            }
            return Ok(());
        }
        for bucket in 0..self.zero.buckets.len() {
            if !self.reduction.has_over_tensor(bucket) {
                self.sum_bucket_over_tensor(bucket, Phase::Optimizer)?;
            }
        }
        // Counts are in no bucket of the shards.
        let is_selection_bias = |&index: &usize| self.parameters.is_selection_bias[index];
        let counted = (0..self.parameters.states.len()).filter(is_selection_bias);
        let counts = self.parameters.gradients(counted);
        counts
            .into_iter()
            .try_for_each(|counts| self.sum_tensor_run(vec![counts], Phase::Optimizer))
    }

    /// Sums the replicated parameters of a bucket, one collective for each contiguous run.
    pub(super) fn sum_bucket_over_tensor(
        &mut self,
        bucket: usize,
        phase: Phase,
    ) -> Result<(), PlanError> {
        if self.rank.target.ranks.member_of(ProcessGroup::TENSOR).is_none() {
            return Ok(());
        }
        if self.rank.zero_group().is_some() {
            let whole = self.whole_bucket(bucket);
            return whole.map_or(Ok(()), |gradients| self.sum_tensor_run(gradients, phase));
        }
        let bucket = self.parameters.buckets.get(bucket).cloned().unwrap_or_default();
        let places: Vec<usize> = bucket.collect();
        let is_whole = |index: usize| {
            let state = &self.parameters.states[index];
            state.gradient.is_some() && state.split.is_none()
        };
        let runs = places.chunk_by(|&a, &b| is_whole(a) == is_whole(b));
        let runs = runs.filter(|run| is_whole(run[0])).map(|run| {
            run.iter()
                .filter_map(|&index| self.parameters.states[index].gradient)
                .collect::<Vec<_>>()
        });
        let runs: Vec<Vec<ValueId>> = runs.collect();
        runs.into_iter().try_for_each(|gradients| self.sum_tensor_run(gradients, phase))
    }

    fn sum_tensor_run(&mut self, gradients: Vec<ValueId>, phase: Phase) -> Result<(), PlanError> {
        let Some(GroupRank { group, ranks, .. }) =
            self.rank.target.ranks.member_of(ProcessGroup::TENSOR)
        else {
            return Ok(());
        };
        let name = format!("all_reduce.gradients.tensor.{}", self.reduction.tensor_sums);
        self.reduction.tensor_sums += 1;
        self.sum_over(&name, gradients, (group, ranks as u32), phase)
    }

    /// Computes the norm of gradients distributed over the ranks of `groups`, of the
    /// tensor-parallel group and of the pipeline.
    ///
    /// Stages come first: each tensor-parallel rank adds up all layers as without stages, to the
    /// same bits. With several chunks per stage, each chunk has its own all-gather, because a chunk
    /// of all stages precedes the next chunk of any stage.
    pub(super) fn norm_of_terms(&mut self, parts: NormTerms) -> Result<(), PlanError> {
        let NormTerms { mut gradients, mut groups } = parts;
        groups.extend(self.fill_up_for_stages(&mut gradients));
        groups.extend(self.rank.groups_of_slices());
        let mut lists = Vec::with_capacity(gradients.len());
        for (chunk, gradients) in gradients.into_iter().enumerate() {
            let suffix = if chunk == 0 { String::new() } else { format!(".{chunk}") };
            lists.push(self.squares_of_all(gradients, &groups, &suffix)?);
        }
        let norm = self.build.host.grad_norm.map(write).into_iter().collect();
        let lists = lists.into_iter().map(read).collect();
        self.build.optimizer_call("grad_norm", NormOfSums {}.into(), lists, norm)
    }

    /// Computes the sums of squares of gradients and all-gathers them over the groups.
    fn squares_of_all(
        &mut self,
        gradients: Vec<ValueId>,
        groups: &[(GroupId, u32)],
        suffix: &str,
    ) -> Result<ValueId, PlanError> {
        let mut count = gradients.len();
        let sums = |this: &mut Self, name: &str, count| {
            let name = format!("{name}{suffix}");
            this.build.add(name, DType::U64, vec![count], MemoryKind::Activations)
        };
        let mut all = sums(self, "grad_norm.squares", count);
        let gradients = gradients.into_iter().map(read).collect();
        let name = format!("grad_norm.squares{suffix}");
        self.build.optimizer_call(&name, SumsOfSquares {}.into(), gradients, vec![write(all)])?;
        for &(group, ranks) in groups {
            let name = self.rank.target.ranks.group(group).map_or("", |group| group.name.as_str());
            let [of_value, of_call] = match name {
                ProcessGroup::DATA => ["grad_norm.squares.ranks", "all_gather.grad_norm"],
                ProcessGroup::PIPELINE => {
                    ["grad_norm.squares.stages", "all_gather.grad_norm.stages"]
                }
                ProcessGroup::EXPERT => {
                    ["grad_norm.squares.experts", "all_gather.grad_norm.experts"]
                }
                _ => ["grad_norm.squares.tensor", "all_gather.grad_norm.tensor"],
            };
            count *= ranks as usize;
            let gathered = sums(self, of_value, count);
            let gather = Collective::new(CollectiveKind::AllGather, group, ranks);
            let name = format!("{of_call}{suffix}");
            self.build.optimizer_call(
                &name,
                gather.into(),
                vec![read(all)],
                vec![write(gathered)],
            )?;
            all = gathered;
        }
        Ok(all)
    }

    /// Returns the gradient, or an empty gradient if another rank counts it: a sum of no squares is
    /// zero, and all ranks give equally many sums.
    pub(super) fn counted(&mut self, gradient: ValueId, split: Option<SplitOver>) -> ValueId {
        if self.rank.counts(split) { gradient } else { self.no_gradient() }
    }

    /// Returns the only gradient without elements.
    pub(super) fn no_gradient(&mut self) -> ValueId {
        let build = &mut self.build;
        *self.no_gradient.get_or_insert_with(|| {
            let name = "grad_norm.nothing".to_string();
            build.add(name, DType::F32, vec![0], MemoryKind::Activations)
        })
    }
}
