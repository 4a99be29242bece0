//! Lowers a captured graph and a plan to the program of one rank.

use std::collections::HashSet;

use deepwell_ir::{
    Arena, Binding, Call, DType, Graph, IrError, KernelCatalog, KernelRequest, MemoryKind, Mode,
    OperandType, Phase, Program, Schedule, Slotted, StreamId, Target, Tensor, TensorId,
    TensorPrecision, TensorType, Unstored, fuse,
};

use crate::schedule::StageHandover;
use crate::stages::StagePasses;
use crate::{Plan, PlanError};

mod bodies;
mod builder;
mod context;
mod copies;
mod evaluation;
mod expert;
mod fallback;
mod flops;
mod handover;
mod inference;
mod optimizer;
mod overlap_collectives;
mod overlapped_reduction;
mod parameters;
mod pipeline;
mod place_values;
mod rank;
mod shared_graph;
mod side_streams;
mod streams;
mod tensor;
mod zero;

use self::builder::ProgramBuilder;
use self::copies::UpdateCopies;
pub use self::evaluation::lower_evaluation;
pub(crate) use self::expert::expand_experts;
use self::expert::expand_for_rank;
pub use self::fallback::{Transient, fallback_plan, further_copy_bytes, shared_operand_lifetimes};
pub use self::fallback::{arena_bytes_with_fallback, lower_fallback, lower_within};
pub use self::flops::{LinearFlops, linear_flops, quantized_bytes, quantized_flop_share};
pub use self::inference::{Inference, lower_inference, lower_scoring};
use self::overlapped_reduction::OverlappedReduction;
use self::parameters::Parameters;
use self::place_values::place_values;
use self::rank::RankContext;
pub use self::shared_graph::Differentiated;
pub use self::shared_graph::SharedGraph;
use self::tensor::Splits;
use self::zero::Zero;
pub use self::zero::block_slice;

/// Lowers the training step: bodies for forward, backward, optimizer (with the gradient norm) and
/// the compute copies of the weights for the next step, and a schedule of forward and backward for
/// each micro-batch.
///
/// # Errors
/// Errors of a pass for an unsupported graph or policy, or an op without a kernel on `target`.
pub fn lower(
    graph: &Graph,
    plan: &Plan,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Program, PlanError> {
    SharedGraph::of(graph, plan, catalog, target)?.lower_stage(catalog, target)
}

/// Order of the passes of a step, streams of the calls, and overlap of collectives.
pub struct Scheduling<'a> {
    /// Forward and backward passes of the micro-batches.
    pub passes: Schedule,
    /// Receives of this pipeline stage between passes; `None` if sends and receives are in the
    /// bodies.
    pub handover: Option<StageHandover>,
    /// The stream of each call; 0 is the main stream. With `None`, a GPU runs independent calls on
    /// several streams and collectives on [`EXCHANGES`]; a CPU has one stream.
    pub stream_of: Option<&'a dyn Fn(&Call) -> StreamId>,
    /// Whether collectives overlap with compute: gradients are reduced as soon as they are
    /// complete, and weights are prefetched one layer ahead.
    pub overlaps: bool,
}

/// The stream of all collectives, of every group: a single stream gives all ranks the same order.
pub const EXCHANGES: StreamId = 1;

impl Scheduling<'_> {
    /// Gradient accumulation with sequential micro-batches and all calls on one stream.
    pub fn of(plan: &Plan) -> Scheduling<'static> {
        Scheduling {
            passes: Schedule::gradient_accumulation(plan.micro_batches),
            handover: None,
            stream_of: None,
            overlaps: false,
        }
    }

    /// The default scheduling of a rank with the passes of its stage.
    fn of_stage((passes, handover): StagePasses, target: &Target) -> Scheduling<'static> {
        // CPU ranks alternate compute and collectives; overlap would only keep buffers alive
        // longer.
        let overlaps = target.arch != "cpu" && target.ranks.world_size > 1;
        Scheduling { passes, handover, stream_of: None, overlaps }
    }
}

/// [`lower`] with another order of the passes, activations of several micro-batches in flight, or
/// calls on several streams. Losses stay the same: gradients are accumulated in micro-batch order.
///
/// # Errors
/// As [`lower`], and a schedule that does not run each micro-batch of the plan exactly once.
pub fn lower_scheduled(
    graph: &Graph,
    plan: &Plan,
    scheduling: &Scheduling<'_>,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Program, PlanError> {
    let shared = SharedGraph::of(graph, plan, catalog, target)?;
    shared.lower_scheduled(scheduling, catalog, target)
}

/// Returns a rank's part of each layer: its tokens, heads, columns and experts. Groups of rows are
/// a multiple of `align`, required by the formats of the whole model and therefore the same on all
/// ranks.
fn part_of_layers(
    graph: &Graph,
    plan: &Plan,
    align: usize,
    target: &Target,
) -> Result<(Graph, Splits), PlanError> {
    let (own, mut splits) = tensor::split(graph, plan, target)?;
    let (own, of_experts) = expand_for_rank(&own, align, target)?;
    splits.extend(of_experts);
    Ok((own, splits))
}

/// Checks that `target`'s rank belongs to the plan's world.
fn check_ranks(plan: &Plan, target: &Target) -> Result<(), PlanError> {
    let expected = plan.parallel.ranks(target.ranks.rank as usize);
    if target.ranks == expected {
        return Ok(());
    }
    Err(PlanError::Request {
        what: "ranks of the target",
        expected: format!("those of the plan, {expected:?}"),
        got: format!("{:?}", target.ranks),
    })
}

/// Fuses nodes if the catalog predicts less time for the sizes of the plan.
fn fuse_for(
    graph: &Graph,
    plan: &Plan,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Graph, IrError> {
    let binding = Binding { batch: plan.micro_batch, seq: plan.rank_seq() };
    fuse(graph, &|op, inputs, outputs| {
        let bind =
            |of: &TensorType| OperandType { dtype: of.dtype, shape: of.shape.bind(&binding) };
        let operands: Vec<OperandType> = inputs.iter().chain(outputs).map(bind).collect();
        let request = KernelRequest { op, operands: &operands, input_count: inputs.len() };
        catalog.predicted_s(&request, target)
    })
}

/// A program, not yet verified.
pub struct Counted {
    /// The program.
    pub program: Program,
    /// Live bytes at each call, of the transient values outside of slots.
    pub alive_bytes: Vec<usize>,
}

/// A program under construction.
struct Lowering<'a> {
    rank: RankContext<'a>,
    build: ProgramBuilder<'a>,
    parameters: Parameters,
    /// Shards of the optimizer state, and the weights and gradients that are whole for a time.
    zero: Zero,
    /// Gradient reductions before the optimizer's body.
    reduction: OverlappedReduction,
    /// Weight copies written by the optimizer.
    update_copies: UpdateCopies,
}

impl<'a> Lowering<'a> {
    fn new(rank: RankContext<'a>) -> Lowering<'a> {
        Lowering {
            rank,
            build: ProgramBuilder::new(rank),
            parameters: Parameters::of(rank.graph),
            zero: Zero::default(),
            reduction: OverlappedReduction::default(),
            update_copies: UpdateCopies::default(),
        }
    }

    /// Adds persistent values that no call makes first.
    fn persistent_values(&mut self, mode: Mode) {
        match (self.rank.sharing(), mode) {
            (None, _) => self.parameters.add_whole(&self.rank, &mut self.build),
            (Some(_), Mode::Train) => self.sharded_values(),
            // The evaluation has slices of weights, too.
            (Some(_), Mode::Evaluate) if self.rank.gathers() => self.sharded_values(),
            // The evaluation reads the training program's weight copies, made on first use.
            (Some(_), Mode::Evaluate) => {}
        }
        let mut add = |name: &str, dtype, elements, memory| {
            Some(self.build.add(name.to_string(), dtype, vec![elements], memory))
        };
        let schedule = add("schedule", DType::F32, 2, MemoryKind::Optimizer);
        let counters = add("counters", DType::U64, 2, MemoryKind::Optimizer);
        let grad_norm = add("grad_norm", DType::F32, 1, MemoryKind::Host);
        let host = &mut self.build.host;
        (host.schedule, host.counters, host.grad_norm) = (schedule, counters, grad_norm);
    }

    /// Returns the program, not yet verified.
    fn finish(
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
    fn unstored(&self) -> Vec<Unstored> {
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
