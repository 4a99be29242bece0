//! From a captured graph and a plan to the program of one rank.

use std::collections::HashMap;

use deepwell_ir::ops::{AdamW, GradNorm};
use deepwell_ir::{
    Access, Arena, Binding, ByteRange, Call, Cost, DType, Graph, HostInterface, KernelCatalog,
    KernelRequest, MemoryKind, Mode, Node, Op, Operand, OperandType, ParameterState, Phase,
    Program, Recompute, Tag, Target, TensorId, TensorKind, TensorPrecision, Value, ValueId,
    apply_precision, differentiate, fuse, recompute, verify_program,
};
use deepwell_precision::{Format, PrecisionPolicy};

use crate::arena::{Lifetime, align, pack};
use crate::{Plan, PlanError};

mod inference;

pub use self::inference::{Inference, lower_inference};

/// Lowers the training step: forward and backward of each micro-batch, gradient norm, optimizer,
/// and the compute copies of the weights for the next step.
///
/// # Errors
/// A pass that refuses the graph or the policy, or an op without a kernel on `target`.
pub fn lower(
    graph: &Graph,
    plan: &Plan,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Program, PlanError> {
    let differentiated = recompute(&differentiate(graph)?, plan.recompute)?;
    let (quantized, precision) = apply_precision(&differentiated, &plan.policy)?;
    let graph = fuse(&quantized, &|op, inputs| catalog.fuses(op, inputs, target))?;
    let mut lowering = Lowering::new(&graph, plan, catalog, target, plan.micro_batches);
    lowering.persistent_values();
    for micro_batch in 0..plan.micro_batches as u32 {
        for phase in [Phase::Forward, Phase::Backward] {
            lowering.phase(phase, micro_batch)?;
        }
    }
    lowering.optimizer(plan)?;
    lowering.phase(Phase::Weights, 0)?;
    lowering.finish(Mode::Train, precision, None)
}

/// Lowers the evaluation of one micro-batch over the weights of a training program: it reads the
/// training program's weight copies where they lie, and reuses the part of the arena that lives
/// within a step.
///
/// # Errors
/// As [`lower`].
pub fn lower_evaluation(
    graph: &Graph,
    plan: &Plan,
    training: &Program,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<Program, PlanError> {
    let (quantized, precision) = apply_precision(graph, &plan.policy)?;
    let graph = fuse(&quantized, &|op, inputs| catalog.fuses(op, inputs, target))?;
    let mut lowering = Lowering::new(&graph, plan, catalog, target, 1);
    lowering.persistent_values();
    lowering.phase(Phase::Forward, 0)?;
    lowering.finish(Mode::Evaluate, precision, Some(training))
}

struct Lowering<'a> {
    graph: &'a Graph,
    plan: &'a Plan,
    catalog: &'a dyn KernelCatalog,
    target: &'a Target,
    binding: Binding,
    micro_batches: usize,
    values: Vec<Value>,
    calls: Vec<Call>,
    host: HostInterface,
    parameters: Vec<ParameterState>,
    /// Value of a tensor, for a micro-batch; persistent tensors stand under micro-batch 0.
    value_of: HashMap<(TensorId, u32), ValueId>,
    /// Accumulators that a call of this step has written.
    written: Vec<ValueId>,
}

impl<'a> Lowering<'a> {
    fn new(
        graph: &'a Graph,
        plan: &'a Plan,
        catalog: &'a dyn KernelCatalog,
        target: &'a Target,
        micro_batches: usize,
    ) -> Lowering<'a> {
        Lowering {
            graph,
            plan,
            catalog,
            target,
            binding: Binding { batch: plan.micro_batch, seq: plan.seq },
            micro_batches,
            values: Vec::new(),
            calls: Vec::new(),
            host: HostInterface::default(),
            parameters: Vec::new(),
            value_of: HashMap::new(),
            written: Vec::new(),
        }
    }

    fn add(
        &mut self,
        name: String,
        dtype: DType,
        shape: Vec<usize>,
        memory: MemoryKind,
    ) -> ValueId {
        let bytes = shape.iter().product::<usize>() * dtype.size_bytes();
        let range = ByteRange { offset: 0, bytes };
        self.values.push(Value { name, dtype, shape, memory, range });
        ValueId(self.values.len() as u32 - 1)
    }

    /// Parameters, their state and gradients, in canonical order, so that a program compiled
    /// under another policy keeps them at the same offsets.
    fn persistent_values(&mut self) {
        let graph = self.graph;
        let gradients: HashMap<_, _> = graph.parameter_gradients().into_iter().collect();
        let parameters: Vec<_> = graph
            .parameters()
            .map(|(id, tensor)| (id, tensor.name.clone(), tensor.shape.bind(&self.binding)))
            .collect();
        let mut columns = [Vec::new(), Vec::new(), Vec::new()];
        for (column, prefix) in ["", "moment1.", "moment2."].iter().enumerate() {
            for (_, name, shape) in &parameters {
                let name = format!("{prefix}{name}");
                let value = self.add(name, DType::F32, shape.clone(), MemoryKind::Optimizer);
                columns[column].push(value);
            }
        }
        for (index, (id, name, shape)) in parameters.iter().enumerate() {
            self.value_of.insert((*id, 0), columns[0][index]);
            let gradient = gradients.get(id).map(|&gradient| {
                let name = format!("grad.{name}");
                let value = self.add(name, DType::F32, shape.clone(), MemoryKind::Gradients);
                self.value_of.insert((gradient, 0), value);
                value
            });
            self.parameters.push(ParameterState {
                name: name.clone(),
                master: columns[0][index],
                first_moment: Some(columns[1][index]),
                second_moment: Some(columns[2][index]),
                gradient,
            });
        }
        self.host.schedule =
            Some(self.add("schedule".to_string(), DType::F32, vec![2], MemoryKind::Optimizer));
        self.host.counters =
            Some(self.add("counters".to_string(), DType::U64, vec![2], MemoryKind::Optimizer));
        self.host.grad_norm =
            Some(self.add("grad_norm".to_string(), DType::F32, vec![1], MemoryKind::Host));
    }

    /// The value that stands for a tensor in a micro-batch, made on first use.
    fn value(&mut self, id: TensorId, micro_batch: u32) -> ValueId {
        let tensor = self.graph.tensor(id);
        let is_statistics = tensor.kind == TensorKind::Statistic && tensor.dtype == DType::U64;
        let memory = match tensor.kind {
            TensorKind::Parameter { .. } | TensorKind::ParameterGradient { .. } => {
                MemoryKind::Optimizer
            }
            TensorKind::WeightCopy => MemoryKind::Weights,
            TensorKind::Input | TensorKind::Loss => MemoryKind::Host,
            TensorKind::Statistic if is_statistics => MemoryKind::Host,
            TensorKind::Activation | TensorKind::Statistic => MemoryKind::Activations,
        };
        let is_scalar_input = tensor.kind == TensorKind::Input && tensor.shape.as_fixed().is_some();
        let per_micro_batch = match memory {
            MemoryKind::Activations => true,
            MemoryKind::Host => tensor.kind != TensorKind::Loss && !is_scalar_input,
            _ => false,
        };
        let slot = if per_micro_batch { micro_batch } else { 0 };
        if let Some(&value) = self.value_of.get(&(id, slot)) {
            return value;
        }
        let name = if per_micro_batch && self.micro_batches > 1 {
            format!("{}@{slot}", tensor.name)
        } else {
            tensor.name.clone()
        };
        let value = self.add(name.clone(), tensor.dtype, tensor.shape.bind(&self.binding), memory);
        self.value_of.insert((id, slot), value);
        if is_statistics {
            self.host.statistics.push((name, value));
        }
        match (&tensor.kind, tensor.name.as_str()) {
            (TensorKind::Input, "tokens") => self.host.tokens.push(value),
            (TensorKind::Input, "targets") => self.host.targets.push(value),
            (TensorKind::Input, "loss_scale") => self.host.loss_scale = Some(value),
            (TensorKind::Input, "rounding_key") => self.host.rounding_key = Some(value),
            (TensorKind::Loss, _) => self.host.loss = Some(value),
            _ => {}
        }
        value
    }

    fn phase(&mut self, phase: Phase, micro_batch: u32) -> Result<(), PlanError> {
        for node in self.graph.nodes.iter().filter(|node| node.phase == phase) {
            self.node(node, micro_batch)?;
        }
        Ok(())
    }

    fn node(&mut self, node: &Node, micro_batch: u32) -> Result<(), PlanError> {
        let mut operands: Vec<Operand> = node
            .inputs
            .iter()
            .map(|&id| Operand { value: self.value(id, micro_batch), access: Access::Read })
            .collect();
        let mut accumulate = false;
        for &id in &node.outputs {
            let value = self.value(id, micro_batch);
            let mut access = Access::Write;
            if self.graph.tensor(id).kind.is_accumulator() {
                if self.written.contains(&value) {
                    accumulate = true;
                    access = Access::Update;
                } else {
                    self.written.push(value);
                }
            }
            operands.push(Operand { value, access });
        }
        let per_step = matches!(node.phase, Phase::Weights | Phase::Optimizer);
        let name = if per_step || self.micro_batches == 1 {
            node.name.clone()
        } else {
            format!("{}@{micro_batch}", node.name)
        };
        self.call(NewCall {
            name,
            op: node.op.clone(),
            operands,
            input_count: node.inputs.len(),
            accumulate,
            phase: node.phase,
            micro_batch,
            tag: node.tag,
            layer: node.layer,
            recomputes: node.name.ends_with(".recomputed"),
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
            cost: self.cost(&new.op, &new.operands, rule.flops(&shapes)),
            unit: rule.unit(&dtypes),
            name: new.name,
            op: new.op,
            choice: selection.choice,
            operands: new.operands,
            input_count: new.input_count,
            accumulate: new.accumulate,
            workspace,
            phase: new.phase,
            micro_batch: new.micro_batch,
            tag: new.tag,
            layer: new.layer,
            recomputes: new.recomputes,
            stream: 0,
            waits: Vec::new(),
            records: None,
            rejected: selection.rejected,
        });
        Ok(())
    }

    /// Each operand read or written once; of an embedding table only the rows that are looked up.
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

    fn optimizer(&mut self, plan: &Plan) -> Result<(), PlanError> {
        let trained: Vec<ParameterState> =
            self.parameters.iter().filter(|state| state.gradient.is_some()).cloned().collect();
        let read = |value: Option<ValueId>| {
            value.map(|value| Operand { value, access: Access::Read }).into_iter()
        };
        let update = |value: Option<ValueId>| {
            value.map(|value| Operand { value, access: Access::Update }).into_iter()
        };
        let mut operands: Vec<Operand> = trained.iter().flat_map(|s| read(s.gradient)).collect();
        let input_count = operands.len();
        let norm = self.host.grad_norm;
        operands.extend(norm.map(|value| Operand { value, access: Access::Write }));
        let call = |name: &str, op: Op, operands, input_count| NewCall {
            name: name.to_string(),
            op,
            operands,
            input_count,
            accumulate: false,
            phase: Phase::Optimizer,
            micro_batch: 0,
            tag: Tag::Head,
            layer: None,
            recomputes: false,
        };
        self.call(call("grad_norm", GradNorm {}.into(), operands, input_count))?;
        let mut operands: Vec<Operand> = Vec::new();
        operands.extend(read(norm));
        operands.extend(read(self.host.schedule));
        operands.extend(update(self.host.counters));
        let mut weight_decay = Vec::with_capacity(trained.len());
        for state in &trained {
            operands.extend(read(state.gradient));
            operands.extend(update(Some(state.master)));
            operands.extend(update(state.first_moment));
            operands.extend(update(state.second_moment));
            let is_matrix = self.values[state.master.index()].shape.len() > 1;
            weight_decay.push(if is_matrix { plan.optimizer.weight_decay } else { 0.0 });
        }
        let op = AdamW {
            beta1: plan.optimizer.beta1,
            beta2: plan.optimizer.beta2,
            eps: plan.optimizer.eps,
            weight_decay,
        };
        let input_count = operands.len();
        self.call(call("adamw", op.into(), operands, input_count))
    }

    fn finish(
        mut self,
        mode: Mode,
        precision: Vec<TensorPrecision>,
        training: Option<&Program>,
    ) -> Result<Program, PlanError> {
        let transient_offset = match training {
            None => self.place_persistent(),
            Some(training) => self.place_as_in(training)?,
        };
        let arena = self.place_transient(transient_offset);
        let program = Program {
            name: self.graph.name.clone(),
            mode,
            rank: 0,
            target: self.target.clone(),
            batch: self.plan.micro_batch,
            seq: self.plan.seq,
            micro_batches: self.micro_batches,
            values: self.values,
            calls: self.calls,
            arena,
            host: self.host,
            parameters: self.parameters,
            precision,
            fixed_overhead_bytes: self.catalog.fixed_overhead_bytes(self.target),
        };
        verify_program(&program)?;
        Ok(program)
    }

    fn place_persistent(&mut self) -> usize {
        let mut offset = 0;
        for kind in MemoryKind::ALL.into_iter().filter(|kind| kind.is_persistent()) {
            for value in self.values.iter_mut().filter(|value| value.memory == kind) {
                value.range.offset = offset;
                offset += align(value.range.bytes);
            }
        }
        offset
    }

    /// Persistent values lie where the training program has them; what it does not have (the
    /// counters of quantizations that only evaluation makes) goes first into the transient part.
    fn place_as_in(&mut self, training: &Program) -> Result<usize, PlanError> {
        let ranges: HashMap<&str, ByteRange> = training
            .values
            .iter()
            .filter(|value| value.memory.is_persistent())
            .map(|value| (value.name.as_str(), value.range))
            .collect();
        for value in self.values.iter_mut().filter(|value| value.memory.is_persistent()) {
            // Micro-batch 0 of several: evaluation has only one.
            let known = ranges
                .get(value.name.as_str())
                .or_else(|| ranges.get(format!("{}@0", value.name).as_str()));
            match known {
                Some(range) if range.bytes == value.range.bytes => value.range = *range,
                _ if value.memory == MemoryKind::Host => value.memory = MemoryKind::Activations,
                _ => {
                    return Err(PlanError::Request {
                        what: "evaluation program",
                        expected: format!("value `{}` in the training program", value.name),
                        got: "none of that size".to_string(),
                    });
                }
            }
        }
        Ok(training.arena.transient_offset)
    }

    fn place_transient(&mut self, transient_offset: usize) -> Arena {
        let mut lives: Vec<Option<(usize, usize)>> = vec![None; self.values.len()];
        for (index, call) in self.calls.iter().enumerate() {
            for operand in &call.operands {
                let life = lives[operand.value.index()].get_or_insert((index, index));
                life.1 = index;
            }
        }
        let transient: Vec<usize> = (0..self.values.len())
            .filter(|&index| !self.values[index].memory.is_persistent())
            .collect();
        let mut lifetimes: Vec<Lifetime> = transient
            .iter()
            .map(|&index| {
                let (first, last) = lives[index].unwrap_or((0, 0));
                Lifetime { bytes: self.values[index].range.bytes, first, last }
            })
            .collect();
        lifetimes.extend(self.calls.iter().enumerate().map(|(index, call)| Lifetime {
            bytes: call.workspace.bytes,
            first: index,
            last: index,
        }));
        let packing = pack(&lifetimes);
        let (of_values, of_calls) = packing.offsets.split_at(transient.len());
        for (&index, offset) in transient.iter().zip(of_values) {
            self.values[index].range.offset = transient_offset + offset;
        }
        for (call, offset) in self.calls.iter_mut().zip(of_calls) {
            call.workspace.offset = transient_offset + offset;
        }
        Arena {
            bytes: transient_offset + packing.bytes,
            transient_offset,
            transient_lower_bound_bytes: packing.lower_bound_bytes,
        }
    }
}

struct NewCall {
    name: String,
    op: Op,
    operands: Vec<Operand>,
    input_count: usize,
    accumulate: bool,
    phase: Phase,
    micro_batch: u32,
    tag: Tag,
    layer: Option<u32>,
    recomputes: bool,
}

/// Size of an arena in which `program`, lowered from `plan`, can be lowered again after some of its
/// layers have fallen back to BF16: its persistent part is largest with every copy in MXFP8, its
/// transient part with every activation in BF16. The program's own size where nothing is in MXFP8.
///
/// # Errors
/// As [`lower`].
pub fn arena_bytes_with_fallback(
    graph: &Graph,
    plan: &Plan,
    program: &Program,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Result<usize, PlanError> {
    if program.precision.iter().all(|tensor| tensor.format != Format::Mxfp8) {
        return Ok(program.arena.bytes);
    }
    let in_bf16 = Plan { policy: PrecisionPolicy::bf16(), ..plan.clone() };
    let fallback = lower(graph, &in_bf16, catalog, target)?;
    let persistent = program.arena.transient_offset.max(fallback.arena.transient_offset);
    let transient = program.arena.transient_bytes().max(fallback.arena.transient_bytes());
    Ok(persistent + transient)
}

/// FLOPs of the GEMMs of linear layers in one run of a program. Recomputed calls do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinearFlops {
    /// Those that run in MXFP8.
    pub mxfp8: u64,
    /// All of the blocks.
    pub blocks: u64,
    /// All of the blocks and of the output head.
    pub with_head: u64,
}

/// Adds up the GEMMs of linear layers of a program.
pub fn linear_flops(program: &Program) -> LinearFlops {
    let mut sums = LinearFlops::default();
    for call in program.calls.iter().filter(|call| !call.recomputes) {
        // Of a GEMM with what follows it, the GEMM alone.
        let leading = call.op.leading();
        let shapes: Vec<Vec<usize>> = call
            .inputs()
            .iter()
            .map(|operand| program.value(operand.value).shape.clone())
            .collect();
        let flops = match leading == &call.op {
            true => call.cost.flops,
            false => leading.rule().flops(&shapes),
        };
        match leading {
            Op::MxGemm(_) => {
                sums.mxfp8 += flops;
                sums.blocks += flops;
                sums.with_head += flops;
            }
            Op::Linear(_) | Op::LinearInputGrad(_) | Op::LinearWeightGrad(_) => {
                sums.blocks += flops;
                sums.with_head += flops;
            }
            Op::LinearCrossEntropy(_) | Op::LinearCrossEntropyGrad(_) => sums.with_head += flops,
            _ => {}
        }
    }
    sums
}

/// Share of the FLOPs of linear layers that run in MXFP8, of those of the blocks and of all
/// (the head included), see [`linear_flops`].
pub fn mxfp8_flop_share(program: &Program) -> (f64, f64) {
    let LinearFlops { mxfp8, blocks, with_head } = linear_flops(program);
    let share = |total: u64| if total == 0 { 0.0 } else { mxfp8 as f64 / total as f64 };
    (share(blocks), share(with_head))
}

/// Bytes of codes and scales that the quantizations of one step write.
pub fn quantized_bytes(program: &Program) -> u64 {
    program
        .calls
        .iter()
        .flat_map(|call| call.quantizations())
        .flat_map(|quantization| quantization.outputs)
        .map(|operand| program.value(operand.value).range.bytes as u64)
        .sum()
}

/// The plan for one device that [`crate::autoplan`] varies.
pub(crate) fn with_batches(
    plan: &Plan,
    micro_batch: usize,
    micro_batches: usize,
    rule: Recompute,
) -> Plan {
    Plan { micro_batch, micro_batches, recompute: rule, ..plan.clone() }
}
