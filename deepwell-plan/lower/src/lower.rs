//! Lowers a captured graph and a plan to the program of one rank.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{
    Access, Accumulate, Binding, Body, ByteRange, Call, Cost, DType, Graph, HostInterface,
    InputRole, IrError, KernelCatalog, KernelRequest, MemoryKind, Mode, Node, NodeId, Op, Operand,
    OperandType, Order, ParameterState, Phase, Plane, Program, Schedule, Shard, Slotted, StreamId,
    Tag, Target, Tensor, TensorId, TensorKind, TensorPrecision, TensorType, Unstored, Value,
    ValueId, fuse, storage_bytes,
};

use crate::schedule::StageHandover;
use crate::stages::StagePasses;
use crate::{Plan, PlanError};

mod bodies;
mod context;
mod copies;
mod evaluation;
mod expert;
mod fallback;
mod flops;
mod handover;
mod inference;
mod memory_layout;
mod optimizer;
mod overlap_collectives;
mod overlapped_reduction;
mod pipeline;
mod quantized_all_gather;
mod shard;
mod shared_graph;
mod side_streams;
mod streams;
mod tensor;
mod zero3_gather;

pub use self::evaluation::lower_evaluation;
pub(crate) use self::expert::expand_experts;
use self::expert::expand_for_rank;
pub use self::fallback::{Transient, fallback_plan, further_copy_bytes, shared_operand_lifetimes};
pub use self::fallback::{arena_bytes_with_fallback, lower_fallback, lower_within};
pub use self::flops::{LinearFlops, linear_flops, quantized_bytes, quantized_flop_share};
pub use self::inference::{Inference, lower_inference, lower_scoring};
use self::pipeline::Pipeline;
pub use self::quantized_all_gather::block_slice;
pub use self::shared_graph::Differentiated;
pub use self::shared_graph::SharedGraph;
use self::tensor::Splits;

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

struct Lowering<'a> {
    graph: &'a Graph,
    plan: &'a Plan,
    catalog: &'a dyn KernelCatalog,
    target: &'a Target,
    binding: Binding,
    passes: &'a Schedule,
    /// This rank's place in a pipeline of several stages.
    pipeline: Option<&'a Pipeline>,
    /// Receives of the stage between bodies.
    handover: Option<&'a StageHandover>,
    /// This rank's slices of parameters.
    splits: Splits,
    values: Vec<Value>,
    calls: Vec<Call>,
    bodies: Vec<Body>,
    host: HostInterface,
    parameters: Vec<ParameterState>,
    /// For each parameter, whether it is a selection bias: updated by counts, not by AdamW.
    is_counted: Vec<bool>,
    /// For each parameter, whether weight decay applies.
    decays: Vec<bool>,
    shards: Vec<Shard>,
    /// The buckets of the shards.
    shared: Vec<shard::Bucket>,
    /// Weight copies that are all-gathered from slices.
    gathered_copies: HashSet<TensorId>,
    /// State of the ZeRO gathers and scatters.
    transient: zero3_gather::TransientWeights,
    /// Whether collectives overlap with compute.
    overlaps: bool,
    /// Gradient reductions before the optimizer's body.
    reduction: overlapped_reduction::OverlappedReduction,
    /// Weight copies written by the optimizer.
    update_copies: copies::UpdateCopies,
    /// Number of sums over tensor-parallel ranks so far.
    tensor_sums: usize,
    value_of: HashMap<TensorId, ValueId>,
    /// Accumulators already written by a call.
    written: HashSet<ValueId>,
}

impl<'a> Lowering<'a> {
    fn new(
        graph: &'a Graph,
        plan: &'a Plan,
        catalog: &'a dyn KernelCatalog,
        target: &'a Target,
        passes: &'a Schedule,
    ) -> Lowering<'a> {
        let selection_biases = graph.selection_biases();
        let is_counted = graph.parameters().map(|(id, _)| selection_biases.contains(&id)).collect();
        let decaying = graph.decaying();
        let decays = graph.parameters().map(|(id, _)| decaying.contains(&id)).collect();
        Lowering {
            graph,
            plan,
            catalog,
            target,
            binding: Binding { batch: plan.micro_batch, seq: plan.rank_seq() },
            passes,
            pipeline: None,
            handover: None,
            splits: Splits::new(),
            values: Vec::new(),
            calls: Vec::new(),
            bodies: Vec::new(),
            host: HostInterface::default(),
            parameters: Vec::new(),
            is_counted,
            decays,
            shards: Vec::new(),
            shared: Vec::new(),
            gathered_copies: HashSet::new(),
            transient: zero3_gather::TransientWeights::default(),
            overlaps: false,
            reduction: overlapped_reduction::OverlappedReduction::default(),
            update_copies: copies::UpdateCopies::default(),
            tensor_sums: 0,
            value_of: HashMap::new(),
            written: HashSet::new(),
        }
    }

    fn add(
        &mut self,
        name: String,
        dtype: DType,
        shape: Vec<usize>,
        memory: MemoryKind,
    ) -> ValueId {
        // The verifier rejects a size that overflows.
        let bytes = storage_bytes(dtype, &shape).unwrap_or(usize::MAX);
        let range = ByteRange { offset: 0, bytes };
        self.values.push(Value::new(name, dtype, shape, memory, range));
        ValueId(self.values.len() as u32 - 1)
    }

    /// Adds persistent values that no call makes first.
    fn persistent_values(&mut self, mode: Mode) {
        match (self.sharing(), mode) {
            (None, _) => self.parameter_values(),
            (Some(_), Mode::Train) => self.sharded_values(),
            // The evaluation has slices of weights, too.
            (Some(_), Mode::Evaluate) if self.gathers() => self.sharded_values(),
            // The evaluation reads the training program's weight copies, made on first use.
            (Some(_), Mode::Evaluate) => {}
        }
        self.host.schedule =
            Some(self.add("schedule".to_string(), DType::F32, vec![2], MemoryKind::Optimizer));
        self.host.counters =
            Some(self.add("counters".to_string(), DType::U64, vec![2], MemoryKind::Optimizer));
        self.host.grad_norm =
            Some(self.add("grad_norm".to_string(), DType::F32, vec![1], MemoryKind::Host));
    }

    /// Adds parameters, their state and gradients in canonical order, so that a program compiled
    /// under another policy has them at the same offsets.
    fn parameter_values(&mut self) {
        let graph = self.graph;
        let gradients: HashMap<_, _> = graph.parameter_gradients().into_iter().collect();
        let parameters: Vec<_> = graph
            .parameters()
            .map(|(id, tensor)| (id, tensor.name.clone(), tensor.shape.bind(&self.binding)))
            .collect();
        let mut columns = [Vec::new(), Vec::new(), Vec::new()];
        for (column, prefix) in ["", "moment1.", "moment2."].iter().enumerate() {
            for (index, (_, name, shape)) in parameters.iter().enumerate() {
                // Parameters not updated by AdamW have no moments.
                let is_there = column == 0 || !self.is_counted[index];
                columns[column].push(is_there.then(|| {
                    let name = format!("{prefix}{name}");
                    self.add(name, DType::F32, shape.clone(), MemoryKind::Optimizer)
                }));
            }
        }
        for (index, (id, name, shape)) in parameters.iter().enumerate() {
            let [Some(master), first_moment, second_moment] =
                columns.each_ref().map(|column| column[index])
            else {
                unreachable!("every parameter has a master");
            };
            self.value_of.insert(*id, master);
            self.values[master.index()].tensor = Some(*id);
            let gradient = gradients.get(id).map(|&gradient| {
                let name = format!("grad.{name}");
                let value = self.add(name, DType::F32, shape.clone(), MemoryKind::Gradients);
                self.value_of.insert(gradient, value);
                self.values[value.index()].tensor = Some(gradient);
                value
            });
            self.parameters.push(ParameterState {
                name: name.clone(),
                master,
                first_moment,
                second_moment,
                gradient,
                split: self.splits.get(name).copied(),
            });
        }
    }

    /// The value of a tensor, made on first use.
    fn value(&mut self, id: TensorId) -> ValueId {
        if let Some(&value) = self.value_of.get(&id) {
            return value;
        }
        let tensor = self.graph.tensor(id);
        let is_statistics = tensor.link.and_then(|link| link.plane()) == Some(Plane::Counters);
        let memory = match tensor.kind {
            TensorKind::Parameter { .. } | TensorKind::ParameterGradient { .. } => {
                MemoryKind::Optimizer
            }
            TensorKind::WeightCopy if self.gathers() => MemoryKind::Activations,
            TensorKind::WeightCopy => MemoryKind::Weights,
            TensorKind::Input { .. } | TensorKind::Loss => MemoryKind::Host,
            TensorKind::Statistic if is_statistics => MemoryKind::Host,
            TensorKind::Activation | TensorKind::Statistic => MemoryKind::Activations,
        };
        let is_copy = tensor.kind == TensorKind::WeightCopy;
        let suffix = if is_copy { self.transient.suffix } else { "" };
        let name = format!("{}{suffix}", tensor.name);
        let value = self.add(name.clone(), tensor.dtype, tensor.shape.bind(&self.binding), memory);
        let added = &mut self.values[value.index()];
        (added.tensor, added.link) = (Some(id), tensor.link);
        self.value_of.insert(id, value);
        if is_statistics {
            self.host.statistics.push((name, value));
        }
        match tensor.kind {
            TensorKind::Input { role: InputRole::Tokens } => self.host.tokens = Some(value),
            TensorKind::Input { role: InputRole::Targets } => self.host.targets = Some(value),
            TensorKind::Input { role: InputRole::LossScale } => self.host.loss_scale = Some(value),
            TensorKind::Input { role: InputRole::RoundingKey } => {
                self.host.rounding_key = Some(value);
            }
            TensorKind::Input { role: InputRole::Documents } => self.host.documents = Some(value),
            TensorKind::Input { role: InputRole::Positions } => self.host.positions = Some(value),
            TensorKind::Loss => self.host.loss = Some(value),
            _ => {}
        }
        value
    }

    fn node(&mut self, node: &Node) -> Result<(), PlanError> {
        if matches!(node.op, Op::Dispatch(_) | Op::DispatchToRanks(_)) {
            // The host reads the number of tokens of each expert, and the number of used rows.
            let load = self.value(node.outputs[1]);
            self.values[load.index()].memory = MemoryKind::Host;
        }
        let mut operands: Vec<Operand> = node
            .inputs
            .iter()
            .map(|&id| Operand { value: self.value(id), access: Access::Read })
            .collect();
        let (mut accumulate, mut accumulator_bytes) = (Accumulate::Never, 0);
        for &id in &node.outputs {
            let value = self.value(id);
            let mut access = Access::Write;
            if self.graph.tensor(id).kind.is_accumulator() {
                accumulator_bytes += self.values[value.index()].range.bytes as u64;
                let is_kept = self.values[value.index()].memory.is_persistent();
                if self.written.insert(value) {
                    if is_kept {
                        accumulate = Accumulate::AfterFirst;
                    }
                } else {
                    accumulate = Accumulate::Always;
                    access = Access::Update;
                }
            }
            operands.push(Operand { value, access });
        }
        self.call(NewCall {
            name: node.name.clone(),
            op: node.op.clone(),
            operands,
            input_count: node.inputs.len(),
            accumulate,
            accumulator_bytes,
            phase: node.phase,
            tag: node.tag,
            layer: node.layer,
            source: node.source,
            recomputes: node.repeats,
        })
    }

    fn call(&mut self, new: NewCall) -> Result<(), PlanError> {
        let types: Vec<OperandType> = new
            .operands
            .iter()
            .map(|operand| {
                let value = &self.values[operand.value.index()];
                OperandType { dtype: value.dtype, shape: value.shape.clone() }
            })
            .collect();
        let request = KernelRequest { op: &new.op, operands: &types, input_count: new.input_count };
        let selection = self
            .catalog
            .select(&request, self.target)
            .map_err(|source| PlanError::NoKernel { call: new.name.clone(), source })?;
        let shapes: Vec<Vec<usize>> = types.iter().map(|t| t.shape.clone()).collect();
        let dtypes: Vec<DType> = types.iter().map(|t| t.dtype).collect();
        let rule = new.op.rule();
        let workspace = ByteRange { offset: 0, bytes: selection.choice.workspace_bytes };
        self.calls.push(Call {
            accumulator_bytes: new.accumulator_bytes,
            cost: Cost {
                bytes_on_link: rule.bytes_on_link(&types),
                ..self.cost(&new.op, &new.operands, rule.flops(&shapes))
            },
            unit: self.catalog.unit_of(&selection.choice.kernel, rule.unit(&dtypes)),
            peak_share: self.catalog.peak_share(&selection.choice.kernel, self.target),
            name: new.name,
            op: new.op,
            choice: selection.choice,
            operands: new.operands,
            input_count: new.input_count,
            accumulate: new.accumulate,
            last_only: false,
            alone_only: false,
            workspace,
            phase: new.phase,
            tag: new.tag,
            layer: new.layer,
            source: new.source,
            recomputes: new.recomputes,
            stream: 0,
            waits: Vec::new(),
            records: None,
            rejected: selection.rejected,
        });
        Ok(())
    }

    /// Cost of a call: each operand is read or written once; of an embedding table only the rows
    /// looked up.
    fn cost(&self, op: &Op, operands: &[Operand], flops: u64) -> Cost {
        let mut cost = Cost { flops, ..Cost::default() };
        for (index, operand) in operands.iter().enumerate() {
            let mut bytes = self.values[operand.value.index()].range.bytes as u64;
            if matches!(op, Op::Embedding(_)) && index == 1 {
                bytes = bytes.min(self.values[operands[2].value.index()].range.bytes as u64);
            }
            if operand.access != Access::Write {
                cost.bytes_read += bytes;
            }
            if operand.access != Access::Read {
                cost.bytes_written += bytes;
            }
        }
        cost
    }

    /// Returns the program, not yet verified.
    fn finish(
        mut self,
        mode: Mode,
        precision: Vec<TensorPrecision>,
        training: Option<&Program>,
    ) -> Result<Counted, PlanError> {
        let transient_offset = match training {
            None => self.layout_persistent(),
            Some(training) => self.layout_as_in(training)?,
        };
        let order = Order::of(&self.calls, &self.bodies)
            .map_err(|what| IrError::Program { program: self.graph.name.clone(), what })?;
        let (mut arena, alive_bytes) = self.layout_transient(transient_offset, &order);
        let schedule = self.invocations();
        let handover = self.hand_over(&schedule, &mut arena);
        let is_forward = |pass: &&Slotted| (pass.phase, pass.chunk) == (Phase::Forward, 0);
        let forwards = self.passes.passes.iter().filter(is_forward);
        let micro_batches = forwards.count().max(1);
        let unstored = self.unstored();
        let program = Program {
            name: self.graph.name.clone(),
            mode,
            rank: self.target.ranks.rank,
            target: self.target.clone(),
            batch: self.plan.micro_batch,
            seq: self.plan.rank_seq(),
            micro_batches,
            slots: self.passes.slots,
            values: self.values,
            fixed_overhead_bytes: self.catalog.fixed_overhead_bytes(self.target, &self.calls),
            calls: self.calls,
            bodies: self.bodies,
            schedule,
            handover,
            arena,
            host: self.host,
            parameters: self.parameters,
            shards: self.shards,
            precision,
            unstored,
        };
        Ok(Counted { program, alive_bytes })
    }

    /// Targets of links that have no value.
    fn unstored(&self) -> Vec<Unstored> {
        let links = self.values.iter().filter_map(|value| value.link);
        let stored: HashSet<TensorId> =
            self.values.iter().filter_map(|value| value.tensor).collect();
        let mut ids: Vec<TensorId> =
            links.map(|link| link.of).filter(|id| !stored.contains(id)).collect();
        ids.sort_unstable();
        ids.dedup();
        let unstored = |tensor: TensorId| {
            let Tensor { name, link, .. } = self.graph.tensor(tensor).clone();
            Unstored { tensor, name, link }
        };
        ids.into_iter().map(unstored).collect()
    }
}

struct NewCall {
    name: String,
    op: Op,
    operands: Vec<Operand>,
    input_count: usize,
    accumulate: Accumulate,
    accumulator_bytes: u64,
    phase: Phase,
    tag: Tag,
    layer: Option<u32>,
    source: NodeId,
    recomputes: bool,
}
