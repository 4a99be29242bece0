//! The lowered step: a list of kernel calls over byte ranges of one arena.
//!
//! A [`Program`] is plain data. It is made by `deepwell-plan`, read by `dryrun`, and run by the
//! `Executor` of `deepwell-kernels`: what is predicted is what is run.

use serde::{Deserialize, Serialize};

use crate::ops::Quantize;
use crate::{DType, KernelChoice, MathUnit, Op, Phase, Rejected, Tag, Target, TensorPrecision};

/// Index of a value in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ValueId(pub u32);

impl ValueId {
    /// As an index into [`Program::values`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What memory is spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// Master weights, moments, scalars of the optimizer.
    Optimizer,
    /// Parameter gradients.
    Gradients,
    /// Compute copies of the weights.
    Weights,
    /// Tokens, targets and scalars from the host; loss, norm and counters back to it.
    Host,
    /// Between calls.
    Activations,
    /// Scratch of single calls.
    Workspace,
}

impl MemoryKind {
    /// All kinds, in the order they stand in the arena.
    pub const ALL: [MemoryKind; 6] = [
        MemoryKind::Optimizer,
        MemoryKind::Gradients,
        MemoryKind::Weights,
        MemoryKind::Host,
        MemoryKind::Activations,
        MemoryKind::Workspace,
    ];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            MemoryKind::Optimizer => "optimizer",
            MemoryKind::Gradients => "gradients",
            MemoryKind::Weights => "weights",
            MemoryKind::Host => "host",
            MemoryKind::Activations => "activations",
            MemoryKind::Workspace => "workspace",
        }
    }

    /// Whether values of the kind outlive the step.
    pub const fn is_persistent(self) -> bool {
        !matches!(self, MemoryKind::Activations | MemoryKind::Workspace)
    }
}

/// Bytes `[offset, offset + bytes)` of the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ByteRange {
    /// First byte.
    pub offset: usize,
    /// Length.
    pub bytes: usize,
}

impl ByteRange {
    /// One past the last byte; the largest number where that is more.
    pub fn end(&self) -> usize {
        self.offset.saturating_add(self.bytes)
    }

    /// Whether two ranges share a byte.
    pub fn overlaps(&self, other: &ByteRange) -> bool {
        self.bytes > 0 && other.bytes > 0 && self.offset < other.end() && other.offset < self.end()
    }
}

/// A tensor with a place in the arena.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// Unique name. Micro-batch `m` of several appends `@m`.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// What the memory is spent on.
    pub memory: MemoryKind,
    /// Its place. Ranges of values whose lives do not meet may overlap.
    pub range: ByteRange,
}

impl Value {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// How a call touches an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// Only read.
    Read,
    /// Every byte written, nothing read.
    Write,
    /// Read and written: accumulators, in-place updates.
    Update,
}

/// A value and what the call does with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operand {
    /// Which value.
    pub value: ValueId,
    /// What for.
    pub access: Access,
}

/// What a call costs at least.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// Floating-point operations, a multiply-add counted as two.
    pub flops: u64,
    /// Bytes read from memory, each operand once.
    pub bytes_read: u64,
    /// Bytes written to memory.
    pub bytes_written: u64,
}

impl Cost {
    /// Bytes moved.
    pub fn bytes(&self) -> u64 {
        self.bytes_read + self.bytes_written
    }
}

/// Queue that a call is issued on. Stream 0 computes.
pub type StreamId = u32;
/// A point in a stream that another stream can wait for.
pub type EventId = u32;

/// One kernel launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// Unique name: the node's, with `@m` for micro-batch `m` of several.
    pub name: String,
    /// What is computed.
    pub op: Op,
    /// Which kernel computes it.
    pub choice: KernelChoice,
    /// Inputs, then outputs, in the op's order.
    pub operands: Vec<Operand>,
    /// How many of the operands are inputs.
    pub input_count: usize,
    /// Outputs that are accumulators add to what is there; else they overwrite it.
    pub accumulate: bool,
    /// Scratch, `choice.workspace_bytes` long.
    pub workspace: ByteRange,
    /// When it runs.
    pub phase: Phase,
    /// Micro-batch, counted from 0.
    pub micro_batch: u32,
    /// Part of the model.
    pub tag: Tag,
    /// Transformer layer.
    pub layer: Option<u32>,
    /// Whether it repeats a forward call.
    pub recomputes: bool,
    /// Unit that does the arithmetic.
    pub unit: MathUnit,
    /// Lower bound of the work.
    pub cost: Cost,
    /// Queue.
    pub stream: StreamId,
    /// Events to wait for first.
    pub waits: Vec<EventId>,
    /// Event to record afterwards.
    pub records: Option<EventId>,
    /// Kernels that would have been preferred or cannot serve, and why.
    pub rejected: Vec<Rejected>,
}

impl Call {
    /// The inputs.
    pub fn inputs(&self) -> &[Operand] {
        &self.operands[..self.input_count]
    }

    /// The outputs.
    pub fn outputs(&self) -> &[Operand] {
        &self.operands[self.input_count..]
    }

    /// The block quantizations that the call does, be it one itself or with its producer.
    pub fn quantizations(&self) -> Vec<Quantization<'_>> {
        let outputs = self.outputs();
        match &self.op {
            Op::Quantize(quantize) => {
                let source = self.operands.first().map(|operand| operand.value);
                vec![Quantization { quantize, source, outputs }]
            }
            Op::WithQuantize(op) => (0..op.quantized.len())
                .filter_map(|index| {
                    let entry = &op.quantized[index];
                    let source = op.position_of_output(entry.output);
                    Some(Quantization {
                        quantize: &entry.quantize,
                        source: source.and_then(|at| outputs.get(at)).map(|source| source.value),
                        outputs: outputs.get(op.positions_of_quantized(index))?,
                    })
                })
                .collect(),
            _ => Vec::new(),
        }
    }
}

/// One block quantization of a [`Call`].
#[derive(Clone, Copy, Debug)]
pub struct Quantization<'a> {
    /// How.
    pub quantize: &'a Quantize,
    /// What is quantized; none when the call does not store it.
    pub source: Option<ValueId>,
    /// Row codes and scales, column codes and scales, counters: those that there are.
    pub outputs: &'a [Operand],
}

impl Quantization<'_> {
    /// Codes and scales.
    pub fn copies(&self) -> &[Operand] {
        self.outputs.split_last().map_or(&[], |(_, copies)| copies)
    }

    /// The counters.
    pub fn statistics(&self) -> Option<ValueId> {
        self.outputs.last().map(|operand| operand.value)
    }

    /// Name of what is quantized: of its value, or where it is not stored the name that its
    /// copies are named after (`x@1` of codes `x.mx.row@1`).
    pub fn source_name(&self, program: &Program) -> String {
        if let Some(source) = self.source {
            return program.value(source).name.clone();
        }
        let codes = self.outputs.first().map_or("", |operand| &program.value(operand.value).name);
        let (name, micro_batch) = match codes.split_once('@') {
            Some((name, micro_batch)) => (name, format!("@{micro_batch}")),
            None => (codes, String::new()),
        };
        let end = name.rfind(".mx").unwrap_or(name.len());
        format!("{}{micro_batch}", &name[..end])
    }
}

/// What a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Forward, backward and optimizer.
    Train,
    /// Forward and loss.
    Evaluate,
}

/// The arena: persistent values first, then what lives within a step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arena {
    /// Whole size.
    pub bytes: usize,
    /// Where values that live within a step begin.
    pub transient_offset: usize,
    /// Largest sum of transient values and workspaces alive at one call: no plan can do with
    /// less.
    pub transient_lower_bound_bytes: usize,
}

impl Arena {
    /// Size of the part that is reused within a step.
    pub fn transient_bytes(&self) -> usize {
        self.bytes - self.transient_offset
    }
}

/// Values that the host writes and reads, by what they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInterface {
    /// Token ids i32 `[B·S]` of each micro-batch.
    pub tokens: Vec<ValueId>,
    /// Targets i32 `[B·S]` of each micro-batch.
    pub targets: Vec<ValueId>,
    /// f32 `[1]`: one over the tokens of the step that count.
    pub loss_scale: Option<ValueId>,
    /// f32 `[2]`: learning rate and largest gradient norm.
    pub schedule: Option<ValueId>,
    /// u64 `[2]`: seed and number of the step, for rounding at random; none where nothing is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounding_key: Option<ValueId>,
    /// u64 `[2]`: applied and skipped steps.
    pub counters: Option<ValueId>,
    /// f32 `[1]`.
    pub loss: Option<ValueId>,
    /// f32 `[1]`, before clipping.
    pub grad_norm: Option<ValueId>,
    /// Counters of each quantization: name of the quantized tensor and its u64 values.
    pub statistics: Vec<(String, ValueId)>,
}

/// A parameter with everything that training keeps for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterState {
    /// Name of the parameter in the source model.
    pub name: String,
    /// FP32 master weight.
    pub master: ValueId,
    /// First moment; none in a program that only evaluates.
    pub first_moment: Option<ValueId>,
    /// Second moment.
    pub second_moment: Option<ValueId>,
    /// FP32 gradient.
    pub gradient: Option<ValueId>,
}

/// The step of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Name of the model.
    pub name: String,
    /// What it is for.
    pub mode: Mode,
    /// Rank it is for.
    pub rank: u32,
    /// What it runs on.
    pub target: Target,
    /// Sequences per micro-batch.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Micro-batches per step.
    pub micro_batches: usize,
    /// Tensors with their places.
    pub values: Vec<Value>,
    /// Kernel calls in issue order. Calls of [`Phase::Weights`] stand last in a training step
    /// (they make the copies for the next one) and are also run alone after weights are loaded.
    pub calls: Vec<Call>,
    /// The arena.
    pub arena: Arena,
    /// What the host writes and reads.
    pub host: HostInterface,
    /// Parameters in canonical order.
    pub parameters: Vec<ParameterState>,
    /// What each parameter got from the policy.
    pub precision: Vec<TensorPrecision>,
    /// Bytes that the backend holds beside the arena.
    pub fixed_overhead_bytes: usize,
}

impl Program {
    /// The value behind an id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// Finds a value by its name.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.values.iter().position(|value| value.name == name).map(|i| ValueId(i as u32))
    }

    /// Tokens per step.
    pub fn tokens_per_step(&self) -> usize {
        self.batch * self.seq * self.micro_batches
    }

    /// FLOPs of all calls.
    pub fn flops(&self) -> u64 {
        self.calls.iter().map(|call| call.cost.flops).sum()
    }

    /// The values whose memory is spent on `kind`.
    pub fn values_of(&self, kind: MemoryKind) -> impl Iterator<Item = &Value> {
        self.values.iter().filter(move |value| value.memory == kind)
    }

    /// The program as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a program holds only plain data")
    }

    /// Reads [`Program::to_json`] back, verified.
    ///
    /// # Errors
    /// Text that is no program, or a program that breaks a rule of
    /// [`crate::verify_program`].
    pub fn from_json(text: &str) -> Result<Program, crate::IrError> {
        let program: Program = serde_json::from_str(text)
            .map_err(|source| crate::IrError::Json { what: "program", source })?;
        crate::verify_program(&program)?;
        Ok(program)
    }
}
