//! The graph shared by the stages of a pipeline.
//!
//! Ranks at the same place among data-, tensor- and expert-parallel ranks have the same graph until
//! each takes the nodes of a stage. Planning lowers all stages, so the passes before this cut run
//! once: over the whole model they take longer than all later passes of a stage. The passes before
//! precision are common to all policies.

use std::borrow::Cow;
use std::cell::{OnceCell, RefCell};
use std::rc::Rc;

use deepwell_ir::{
    Binding, Graph, GroupId, KernelCatalog, Mode, Phase, ProcessGroup, Program, Target,
    TensorPrecision, apply_precision_of_rank, defer_weight_gradients, differentiate,
    expert_row_alignment, measure_products, recompute, save_activations, verify_program,
};
use deepwell_precision::{QuantFormat, Role};

use super::builder::ProgramBuilder;
use super::context;
use super::handover::receive_first_and_send_last;
use super::lowering::Counted;
use super::lowering::Lowering;
use super::masters::with_masters;
use super::overlap_collectives;
use super::rank::RankContext;
use super::rank_graph::check_ranks;
use super::rank_graph::fuse_for;
use super::rank_graph::part_of_layers;
use super::scheduling::Scheduling;
use super::splits::Splits;
use super::splits::slices;
use super::stage;
use super::stage::Pipeline;
use super::stage::part_of_rank;
use super::streams;
use crate::stages::{StagePasses, passes_of_stages};
use crate::{Plan, PlanError};

/// The training graph of a model in high precision, cut into stages.
pub struct Differentiated {
    graph: Graph,
    splits: Splits,
    pipeline: Option<Pipeline>,
    /// Row alignment of the groups of experts' rows, given by the precision.
    align: usize,
    /// The rank for which the passes were run.
    rank: usize,
    /// Passes of each stage, computed on first use.
    passes: OnceCell<Vec<StagePasses>>,
}

impl Differentiated {
    fn of(graph: &Graph, plan: &Plan, target: &Target) -> Result<Differentiated, PlanError> {
        plan.parallel.check()?;
        check_ranks(plan, target)?;
        let align = expert_row_alignment(graph, &plan.policy)?;
        let (own, splits) = part_of_layers(graph, plan, align, target)?;
        let (cut, pipeline) = stage::cut(&own, plan, target)?;
        let graph = recompute(&differentiate(&cut)?, plan.recompute)?;
        let rank = target.ranks.rank as usize;
        Ok(Differentiated { graph, splits, pipeline, align, rank, passes: OnceCell::new() })
    }

    fn passes_of_stages(&self, plan: &Plan) -> Result<&[StagePasses], PlanError> {
        if let Some(known) = self.passes.get() {
            return Ok(known);
        }
        let passes = passes_of_stages(plan)?;
        Ok(self.passes.get_or_init(|| passes))
    }
}

/// The training graph of a model, cut into stages and quantized.
pub struct SharedGraph<'a> {
    plan: &'a Plan,
    differentiated: Rc<Differentiated>,
    quantized: Graph,
    precision: Vec<TensorPrecision>,
    /// Graphs of context-parallel ranks, by group: the ends of a pipeline are in one more group.
    of_sequences: RefCell<Vec<(GroupId, Rc<Graph>)>>,
}

impl<'a> SharedGraph<'a> {
    /// Builds the graph for `target`'s rank and for the ranks at the same place in other stages.
    ///
    /// # Errors
    /// Errors of a pass for an unsupported graph or policy.
    pub fn of(
        graph: &Graph,
        plan: &'a Plan,
        catalog: &dyn KernelCatalog,
        target: &Target,
    ) -> Result<SharedGraph<'a>, PlanError> {
        let differentiated = Rc::new(Differentiated::of(graph, plan, target)?);
        SharedGraph::quantized(differentiated, plan, catalog, target)
    }

    /// Builds the graph of `plan`, which may differ from the plan of `other` in precision only.
    ///
    /// # Errors
    /// As [`SharedGraph::of`].
    pub fn in_precision(
        other: &Rc<Differentiated>,
        graph: &Graph,
        plan: &'a Plan,
        catalog: &dyn KernelCatalog,
        target: &Target,
    ) -> Result<SharedGraph<'a>, PlanError> {
        if expert_row_alignment(graph, &plan.policy)? != other.align {
            return SharedGraph::of(graph, plan, catalog, target);
        }
        SharedGraph::quantized(other.clone(), plan, catalog, target)
    }

    fn quantized(
        differentiated: Rc<Differentiated>,
        plan: &'a Plan,
        catalog: &dyn KernelCatalog,
        target: &Target,
    ) -> Result<SharedGraph<'a>, PlanError> {
        let serves = |format: &QuantFormat, role: Role| catalog.serves(format, role, target);
        let slices = slices(&differentiated.splits, target);
        let (quantized, precision) =
            apply_precision_of_rank(&differentiated.graph, &plan.policy, &serves, slices)?;
        let quantized = match plan.saved_activations.is_exact() {
            true => quantized,
            false => save_activations(&quantized, plan.saved_activations)?,
        };
        let quantized = with_masters(quantized, plan)?;
        let quantized = match plan.measures_products {
            true => measure_products(&quantized)?,
            false => quantized,
        };
        Ok(SharedGraph {
            plan,
            differentiated,
            quantized,
            precision,
            of_sequences: RefCell::default(),
        })
    }

    /// The part reused by [`SharedGraph::in_precision`].
    pub fn differentiated(&self) -> Rc<Differentiated> {
        self.differentiated.clone()
    }

    /// Lowers the program of `target`'s stage.
    ///
    /// # Errors
    /// Errors of a pass for an unsupported graph, or an op without a kernel on `target`.
    pub fn lower_stage(
        &self,
        catalog: &dyn KernelCatalog,
        target: &Target,
    ) -> Result<Program, PlanError> {
        self.lower_scheduled(&self.scheduling(target)?, catalog, target)
    }

    /// [`SharedGraph::lower_stage`] without verification, for counting memory: no rank runs the
    /// program.
    ///
    /// # Errors
    /// As [`SharedGraph::lower_stage`].
    pub fn count_stage(
        &self,
        catalog: &dyn KernelCatalog,
        target: &Target,
    ) -> Result<Counted, PlanError> {
        self.lower_unverified(&self.scheduling(target)?, catalog, target)
    }

    /// [`SharedGraph::lower_stage`] with another scheduling.
    ///
    /// # Errors
    /// As [`SharedGraph::lower_stage`].
    pub(super) fn lower_scheduled(
        &self,
        scheduling: &Scheduling<'_>,
        catalog: &dyn KernelCatalog,
        target: &Target,
    ) -> Result<Program, PlanError> {
        let Counted { program, .. } = self.lower_unverified(scheduling, catalog, target)?;
        verify_program(&program)?;
        Ok(program)
    }

    fn scheduling(&self, target: &Target) -> Result<Scheduling<'static>, PlanError> {
        check_ranks(self.plan, target)?;
        let stage = self.plan.parallel.pipeline_place(target.ranks.rank as usize);
        let passes = self.differentiated.passes_of_stages(self.plan)?[stage].clone();
        Ok(Scheduling::of_stage(passes, target))
    }

    fn lower_unverified(
        &self,
        scheduling: &Scheduling<'_>,
        catalog: &dyn KernelCatalog,
        target: &Target,
    ) -> Result<Counted, PlanError> {
        let plan = self.plan;
        let Differentiated { splits, pipeline, .. } = &*self.differentiated;
        check_ranks(plan, target)?;
        self.check_place(target)?;
        let pipeline = pipeline.as_ref().map(|pipeline| pipeline.of_rank(plan, target));
        let of_sequences = self.of_sequences(target)?;
        let whole = Cow::Borrowed(of_sequences.as_deref().unwrap_or(&self.quantized));
        let own = part_of_rank(whole, pipeline.as_ref())?;
        let mut graph = fuse_for(&own, plan, catalog, target)?;
        if scheduling.passes.defers_weight_gradients() {
            graph = defer_weight_gradients(&graph)?;
        }
        if scheduling.overlaps {
            let binding = Binding { batch: plan.micro_batch, seq: plan.rank_seq() };
            graph = overlap_collectives::order_for_overlap(&graph, &binding);
        }
        let rank = RankContext {
            pipeline: pipeline.as_ref(),
            splits: Some(splits),
            overlaps: scheduling.overlaps,
            handover: scheduling.handover.as_ref(),
            ..RankContext::new(&graph, plan, catalog, target, &scheduling.passes)
        };
        rank.check_updates_in_backward()?;
        let mut lowering = Lowering::new(rank);
        lowering.persistent_values(Mode::Train);
        lowering.plan_overlapped_reduction();
        lowering.plan_updates_in_backward();
        // Chunk by chunk, because chunks share the slots of activations. The last chunk comes
        // first, as its backward pass begins a step: the last chunk overwrites the loss, other
        // chunks add.
        for chunk in (0..rank.chunks()).rev() {
            lowering.body_of_chunk(Phase::Forward, chunk)?;
            lowering.body_of_chunk(Phase::Backward, chunk)?;
            lowering.body_of_chunk(Phase::WeightGradients, chunk)?;
        }
        lowering.optimizer()?;
        lowering.gather_masters()?;
        lowering.body(Phase::Weights)?;
        std::mem::take(&mut lowering.update_copies).leave_out(&mut lowering.build);
        lowering.offload_state()?;
        let ProgramBuilder { calls, bodies, values, .. } = &mut lowering.build;
        if scheduling.handover.is_some() {
            receive_first_and_send_last(calls, bodies, &target.ranks);
        }
        match scheduling.stream_of {
            Some(stream_of) => streams::assign(calls, bodies, stream_of),
            None if target.arch == "cpu" => streams::assign(calls, bodies, &|_| 0),
            None => streams::assign_on_gpu(calls, bodies, values, plan),
        }
        lowering.finish(Mode::Train, self.precision.clone(), None)
    }

    /// The graph of a context-parallel rank; `None` if sequences are whole.
    fn of_sequences(&self, target: &Target) -> Result<Option<Rc<Graph>>, PlanError> {
        let Some((group, _)) = target.ranks.named(ProcessGroup::CONTEXT) else { return Ok(None) };
        let known = self.of_sequences.borrow().iter().find(|known| known.0 == group).cloned();
        if let Some((_, graph)) = known {
            return Ok(Some(graph));
        }
        let whole = Cow::Borrowed(&self.quantized);
        let graph = Rc::new(context::part_of_sequences(whole, self.plan, target)?.into_owned());
        self.of_sequences.borrow_mut().push((group, graph.clone()));
        Ok(Some(graph))
    }

    /// Checks the rank's place: ranks at other places have other slices of the layers.
    fn check_place(&self, target: &Target) -> Result<(), PlanError> {
        let ranks_of_stage = self.plan.parallel.world_size() / self.plan.parallel.pipeline;
        let rank = target.ranks.rank as usize;
        let own = self.differentiated.rank;
        if rank % ranks_of_stage == own % ranks_of_stage {
            return Ok(());
        }
        Err(PlanError::Request {
            what: "rank of the target",
            expected: format!("one at the place of rank {own} in its stage"),
            got: rank.to_string(),
        })
    }
}
