//! Builds a program: a value for each tensor on first use, and a call for each node, with the
//! kernel that the catalog selects.

use std::collections::{HashMap, HashSet};

use deepwell_ir::{
    Access, Accumulate, Body, BodyId, ByteRange, Call, Cost, DType, HostInterface, InputRole,
    KernelRequest, MemoryKind, Node, NodeId, Op, Operand, OperandType, Phase, Plane, Rejected, Tag,
    Tensor, TensorId, TensorKind, Value, ValueId, storage_bytes,
};

use super::rank::RankContext;
use crate::PlanError;

/// The values, calls and bodies of a program.
pub(super) struct ProgramBuilder<'a> {
    rank: RankContext<'a>,
    pub(super) values: Vec<Value>,
    pub(super) calls: Vec<Call>,
    pub(super) bodies: Vec<Body>,
    pub(super) host: HostInterface,
    /// The value that the next calls read or write for each tensor.
    value_of: HashMap<TensorId, ValueId>,
    /// Accumulators already written by a call.
    written: HashSet<ValueId>,
}

/// A call without its kernel.
pub(super) struct NewCall {
    pub(super) name: String,
    pub(super) op: Op,
    pub(super) operands: Vec<Operand>,
    pub(super) input_count: usize,
    pub(super) accumulate: Accumulate,
    pub(super) accumulator_bytes: u64,
    pub(super) phase: Phase,
    pub(super) tag: Tag,
    pub(super) layer: Option<u32>,
    pub(super) source: NodeId,
    pub(super) recomputes: bool,
    /// See [`Call::last_only`].
    pub(super) last_only: bool,
    /// See [`Call::alone_only`].
    pub(super) alone_only: bool,
    /// Rejections that lowering adds to those of the catalog.
    pub(super) rejected: Vec<Rejected>,
}

pub(super) fn read(value: ValueId) -> Operand {
    Operand { value, access: Access::Read }
}

pub(super) fn write(value: ValueId) -> Operand {
    Operand { value, access: Access::Write }
}

pub(super) fn update(value: ValueId) -> Operand {
    Operand { value, access: Access::Update }
}

impl<'a> ProgramBuilder<'a> {
    pub(super) fn new(rank: RankContext<'a>) -> ProgramBuilder<'a> {
        ProgramBuilder {
            rank,
            values: Vec::new(),
            calls: Vec::new(),
            bodies: Vec::new(),
            host: HostInterface::default(),
            value_of: HashMap::new(),
            written: HashSet::new(),
        }
    }

    /// Adds a value of no tensor.
    pub(super) fn add(
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

    /// The value of a tensor, if it is made.
    pub(super) fn value_if_made(&self, tensor: TensorId) -> Option<ValueId> {
        self.value_of.get(&tensor).copied()
    }

    /// Lets the next calls use `value` for a tensor, in place of the value that [stores] it.
    ///
    /// [stores]: ProgramBuilder::store
    pub(super) fn rebind(&mut self, tensor: TensorId, value: ValueId) {
        self.value_of.insert(tensor, value);
    }

    /// Forgets the value of a tensor: the next call that uses the tensor makes another.
    pub(super) fn forget(&mut self, tensor: TensorId) {
        self.value_of.remove(&tensor);
    }

    /// Makes `value` the value of a tensor.
    pub(super) fn store(&mut self, tensor: TensorId, value: ValueId) {
        self.value_of.insert(tensor, value);
        self.values[value.index()].tensor = Some(tensor);
    }

    /// The value of a tensor, made on first use.
    pub(super) fn value(&mut self, id: TensorId) -> ValueId {
        self.value_with_suffix(id, "")
    }

    /// [`ProgramBuilder::value`]; a new value of a weight copy gets a suffix to its name.
    pub(super) fn value_with_suffix(&mut self, id: TensorId, suffix: &str) -> ValueId {
        if let Some(&value) = self.value_of.get(&id) {
            return value;
        }
        let tensor = self.rank.graph.tensor(id);
        let suffix = if tensor.kind == TensorKind::WeightCopy { suffix } else { "" };
        let name = format!("{}{suffix}", tensor.name);
        let shape = tensor.shape.bind(&self.rank.binding);
        let value = self.add(name.clone(), tensor.dtype, shape, self.memory_of(tensor));
        self.values[value.index()].link = tensor.link;
        self.store(id, value);
        if is_statistics(tensor) {
            self.host.statistics.push((name, value));
        }
        match tensor.kind {
            TensorKind::Input { role } => self.set_host_input(role, value),
            TensorKind::Loss => self.host.loss = Some(value),
            _ => {}
        }
        value
    }

    fn memory_of(&self, tensor: &Tensor) -> MemoryKind {
        match tensor.kind {
            TensorKind::Parameter { .. } | TensorKind::ParameterGradient { .. } => {
                MemoryKind::Optimizer
            }
            TensorKind::WeightCopy if self.rank.shards_weights() => MemoryKind::Activations,
            TensorKind::WeightCopy => MemoryKind::Weights,
            TensorKind::Input { .. } | TensorKind::Loss => MemoryKind::Host,
            TensorKind::Statistic if is_statistics(tensor) => MemoryKind::Host,
            TensorKind::Activation | TensorKind::Statistic => MemoryKind::Activations,
        }
    }

    fn set_host_input(&mut self, role: InputRole, value: ValueId) {
        let host = &mut self.host;
        let input = match role {
            InputRole::Tokens => &mut host.tokens,
            InputRole::Targets => &mut host.targets,
            InputRole::LossScale => &mut host.loss_scale,
            InputRole::RoundingKey => &mut host.rounding_key,
            InputRole::Documents => &mut host.documents,
            InputRole::Positions => &mut host.positions,
            InputRole::Other => return,
        };
        *input = Some(value);
    }

    /// Adds the call of a node.
    pub(super) fn node(&mut self, node: &Node) -> Result<(), PlanError> {
        self.node_with_suffix(node, "")
    }

    /// [`ProgramBuilder::node`]; new values of weight copies get a suffix to their names.
    pub(super) fn node_with_suffix(&mut self, node: &Node, suffix: &str) -> Result<(), PlanError> {
        let host_reads = match node.op {
            // The number of tokens of each expert, and the number of used rows.
            Op::Dispatch(_) | Op::DispatchToRanks(_) => Some(node.outputs[1]),
            Op::ProductError(_) => Some(node.outputs[0]),
            _ => None,
        };
        if let Some(id) = host_reads {
            let value = self.value_with_suffix(id, suffix);
            self.values[value.index()].memory = MemoryKind::Host;
        }
        let mut operands: Vec<Operand> =
            node.inputs.iter().map(|&id| read(self.value_with_suffix(id, suffix))).collect();
        let (mut accumulate, mut accumulator_bytes) = (Accumulate::Never, 0);
        for &id in &node.outputs {
            let value = self.value_with_suffix(id, suffix);
            let mut access = Access::Write;
            if self.rank.graph.tensor(id).kind.is_accumulator() {
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
            last_only: false,
            alone_only: false,
            rejected: Vec::new(),
        })
    }

    /// A call without a node in the graph.
    pub(super) fn call_without_node(
        &self,
        (phase, layer): (Phase, Option<u32>),
        name: &str,
        op: Op,
        inputs: Vec<Operand>,
        outputs: Vec<Operand>,
    ) -> NewCall {
        NewCall {
            name: name.to_string(),
            op,
            input_count: inputs.len(),
            operands: [inputs, outputs].concat(),
            accumulate: Accumulate::Never,
            accumulator_bytes: 0,
            phase,
            tag: Tag::Head,
            layer,
            source: NodeId(self.rank.graph.nodes.len() as u32),
            recomputes: false,
            last_only: false,
            alone_only: false,
            rejected: Vec::new(),
        }
    }

    /// Adds a [call without a node](ProgramBuilder::call_without_node).
    pub(super) fn phase_call(
        &mut self,
        phase: Phase,
        name: &str,
        op: Op,
        inputs: Vec<Operand>,
        outputs: Vec<Operand>,
    ) -> Result<(), PlanError> {
        self.layer_call((phase, None), name, op, inputs, outputs)
    }

    /// [`ProgramBuilder::phase_call`] for a layer.
    pub(super) fn layer_call(
        &mut self,
        pass: (Phase, Option<u32>),
        name: &str,
        op: Op,
        inputs: Vec<Operand>,
        outputs: Vec<Operand>,
    ) -> Result<(), PlanError> {
        self.call(self.call_without_node(pass, name, op, inputs, outputs))
    }

    /// [`ProgramBuilder::phase_call`] in the optimizer's body.
    pub(super) fn optimizer_call(
        &mut self,
        name: &str,
        op: Op,
        inputs: Vec<Operand>,
        outputs: Vec<Operand>,
    ) -> Result<(), PlanError> {
        self.phase_call(Phase::Optimizer, name, op, inputs, outputs)
    }

    /// Adds a call with the kernel that the catalog selects.
    pub(super) fn call(&mut self, new: NewCall) -> Result<(), PlanError> {
        let types: Vec<OperandType> = new
            .operands
            .iter()
            .map(|operand| {
                let value = &self.values[operand.value.index()];
                OperandType { dtype: value.dtype, shape: value.shape.clone() }
            })
            .collect();
        let RankContext { catalog, target, .. } = self.rank;
        let request = KernelRequest { op: &new.op, operands: &types, input_count: new.input_count };
        let selection = catalog
            .select(&request, target)
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
            unit: catalog.unit_of(&selection.choice.kernel, rule.unit(&dtypes)),
            peak_share: catalog.peak_share(&selection.choice.kernel, target),
            name: new.name,
            op: new.op,
            choice: selection.choice,
            operands: new.operands,
            input_count: new.input_count,
            accumulate: new.accumulate,
            last_only: new.last_only,
            alone_only: new.alone_only,
            workspace,
            phase: new.phase,
            tag: new.tag,
            layer: new.layer,
            source: new.source,
            recomputes: new.recomputes,
            stream: 0,
            waits: Vec::new(),
            records: None,
            rejected: [selection.rejected, new.rejected].concat(),
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

    /// Adds a body with the calls since the previous body, if there are any.
    pub(super) fn end_body(&mut self, phase: Phase, chunk: u32) {
        let begin = self.bodies.last().map_or(0, |body| body.calls.end);
        if begin < self.calls.len() {
            self.bodies.push(Body { phase, chunk, calls: begin..self.calls.len() });
        }
    }

    /// The body of a phase of one of this rank's chunks, if the body has any calls.
    pub(super) fn body_of(&self, phase: Phase, chunk: u32) -> Option<BodyId> {
        let is_it = |body: &Body| (body.phase, body.chunk) == (phase, chunk);
        Some(BodyId(self.bodies.iter().position(is_it)? as u32))
    }
}

/// Whether a tensor is the counters of a quantization, which the host reads.
fn is_statistics(tensor: &Tensor) -> bool {
    tensor.link.and_then(|link| link.plane()) == Some(Plane::Counters)
}
