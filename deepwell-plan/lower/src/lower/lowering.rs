//! A program under construction.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{
    Arena, DType, MemoryKind, Mode, Phase, Program, Slotted, Tensor, TensorId, TensorPrecision,
    Unstored, ValueId,
};

use super::builder::ProgramBuilder;
use super::copies::UpdateCopies;
use super::handover;
use super::parameters::Parameters;
use super::place_values::place_values;
use super::rank::RankContext;
use super::zero::Zero;
use crate::PlanError;

/// A program, not yet verified.
pub struct Counted {
    /// The program.
    pub program: Program,
    /// Live bytes at each call, of the transient values outside of slots.
    pub alive_bytes: Vec<usize>,
}

/// A program under construction.
pub(super) struct Lowering<'a> {
    pub(super) rank: RankContext<'a>,
    pub(super) build: ProgramBuilder<'a>,
    pub(super) parameters: Parameters,
    /// Shards of the optimizer state, and the weights and gradients that are whole for a time.
    pub(super) zero: Zero,
    /// Gradient reductions before the optimizer's body.
    pub(super) reduction: OverlappedReduction,
    /// Weight copies written by the optimizer.
    pub(super) update_copies: UpdateCopies,
    /// Updates before the optimizer's body.
    pub(super) updates: UpdatesInBackward,
    /// The only gradient without elements, made on first use.
    pub(super) no_gradient: Option<ValueId>,
}

/// The buckets summed during the backward pass. With sharded optimizer state these are the buckets
/// of the shards, otherwise the optimizer's buckets.
#[derive(Default)]
pub(super) struct OverlappedReduction {
    /// The buckets whose gradients are complete after a node, by index in the graph.
    pub(super) complete_after: HashMap<usize, Vec<usize>>,
    /// Buckets summed over the data-parallel ranks.
    pub(super) done: HashSet<usize>,
    /// Buckets summed over the tensor-parallel ranks.
    pub(super) over_tensor: HashSet<usize>,
    /// Number of sums over tensor-parallel ranks so far.
    pub(super) tensor_sums: usize,
    /// This rank's slices of sharded buckets.
    pub(super) slices: HashMap<usize, ValueId>,
}

/// Updates of parameters in the backward pass.
#[derive(Default)]
pub(super) struct UpdatesInBackward {
    /// The parameters to update after a node, both by index.
    pub(super) after: HashMap<usize, Vec<usize>>,
    /// Sums of squares of the gradients so far.
    pub(super) sums: Vec<ValueId>,
}

impl OverlappedReduction {
    /// Whether a bucket is already summed.
    pub(super) fn has(&self, bucket: usize) -> bool {
        self.done.contains(&bucket)
    }

    /// Whether a bucket is already summed over tensor-parallel ranks.
    pub(super) fn has_over_tensor(&self, bucket: usize) -> bool {
        self.over_tensor.contains(&bucket)
    }

    /// This rank's slice of an already summed bucket.
    pub(super) fn slice(&self, bucket: usize) -> Option<ValueId> {
        self.slices.get(&bucket).copied()
    }
}

impl<'a> Lowering<'a> {
    pub(super) fn new(rank: RankContext<'a>) -> Lowering<'a> {
        Lowering {
            rank,
            build: ProgramBuilder::new(rank),
            parameters: Parameters::of(rank.graph),
            zero: Zero::default(),
            reduction: OverlappedReduction::default(),
            update_copies: UpdateCopies::default(),
            updates: UpdatesInBackward::default(),
            no_gradient: None,
        }
    }

    /// Adds persistent values that no call makes first.
    pub(super) fn persistent_values(&mut self, mode: Mode) {
        match (self.rank.zero_group(), mode) {
            (None, _) => self.parameters.add_whole(&self.rank, &mut self.build),
            (Some(_), Mode::Train) => self.add_sharded(),
            // The evaluation has slices of weights, too.
            (Some(_), Mode::Evaluate) if self.rank.shards_weights() => self.add_sharded(),
            // The evaluation reads the training program's weight copies, made on first use.
            (Some(_), Mode::Evaluate) => {}
        }
        self.parameters.group_to_buckets(&self.build, self.rank.plan.bucket_bytes);
        let mut add = |name: &str, dtype, elements, memory| {
            Some(self.build.add(name.to_string(), dtype, vec![elements], memory))
        };
        let schedule = add("schedule", DType::F32, 2, MemoryKind::Optimizer);
        let counters = add("counters", DType::U64, 2, MemoryKind::Optimizer);
        let grad_norm = add("grad_norm", DType::F32, 1, MemoryKind::Host);
        let host = &mut self.build.host;
        (host.schedule, host.counters, host.grad_norm) = (schedule, counters, grad_norm);
    }

    fn add_sharded(&mut self) {
        self.zero = Zero::of(self.rank, &mut self.build, &mut self.parameters);
    }

    /// Returns the program, not yet verified.
    pub(super) fn finish(
        self,
        mode: Mode,
        precision: Vec<TensorPrecision>,
        training: Option<&Program>,
    ) -> Result<Counted, PlanError> {
        let RankContext { graph, plan, catalog, target, passes, handover, .. } = self.rank;
        let is_forward = |pass: &&Slotted| (pass.phase, pass.chunk) == (Phase::Forward, 0);
        let micro_batches = passes.passes.iter().filter(is_forward).count().max(1);
        let (schedule, unstored) = (self.invocations(), self.unstored());
        let ProgramBuilder { values, calls, bodies, host, .. } = self.build;
        let mut program = Program {
            name: graph.name.clone(),
            mode,
            rank: target.ranks.rank,
            target: target.clone(),
            batch: plan.micro_batch,
            seq: plan.rank_seq(),
            micro_batches,
            slots: passes.slots,
            values,
            fixed_overhead_bytes: catalog.fixed_overhead_bytes(target, &calls),
            calls,
            bodies,
            schedule,
            handover: None,
            arena: Arena::default(),
            host,
            parameters: self.parameters.states,
            shards: self.zero.shards,
            precision,
            unstored,
        };
        let alive_bytes = place_values(&mut program, &self.zero.gathers.contiguous, training)?;
        if let Some(stage) = handover {
            handover::hand_over(&mut program, passes, stage);
        }
        Ok(Counted { program, alive_bytes })
    }

    /// Targets of links that have no value.
    pub(super) fn unstored(&self) -> Vec<Unstored> {
        let links = self.build.values.iter().filter_map(|value| value.link);
        let stored: HashSet<TensorId> =
            self.build.values.iter().filter_map(|value| value.tensor).collect();
        let mut ids: Vec<TensorId> =
            links.map(|link| link.of).filter(|id| !stored.contains(id)).collect();
        ids.sort_unstable();
        ids.dedup();
        let unstored = |tensor: TensorId| {
            let Tensor { name, link, .. } = self.rank.graph.tensor(tensor).clone();
            Unstored { tensor, name, link }
        };
        ids.into_iter().map(unstored).collect()
    }
}
