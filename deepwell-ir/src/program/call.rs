//! One kernel call: what is computed, by which kernel, on which values, and when.

use serde::{Deserialize, Serialize};

use super::{ByteRange, Instance, Program, ValueId};
use crate::ops::{AdamW, CopyKind, Quantize};
use crate::{KernelChoice, MathUnit, NodeId, Op, Phase, Rejected, Tag, TensorId};

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

/// When a call adds to its accumulators (the loss, gradients of parameters) and when it overwrites
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accumulate {
    /// It overwrites, or has none.
    #[default]
    Never,
    /// It overwrites in the first micro-batch of a step and adds in the others.
    AfterFirst,
    /// It adds: a call before it in the same body has written.
    Always,
}

impl Accumulate {
    /// Whether it adds in an instance.
    pub fn adds(self, instance: Instance) -> bool {
        match self {
            Accumulate::Never => false,
            Accumulate::AfterFirst => !instance.is_first,
            Accumulate::Always => true,
        }
    }
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
    /// Bytes through the link to other ranks, in its busier direction.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_on_link: u64,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

fn whole() -> f64 {
    1.0
}

fn is_whole(share: &f64) -> bool {
    *share == 1.0
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
    /// Unique name: the node's.
    pub name: String,
    /// What is computed.
    pub op: Op,
    /// Which kernel computes it.
    pub choice: KernelChoice,
    /// Inputs, then outputs, in the op's order.
    pub operands: Vec<Operand>,
    /// How many of the operands are inputs.
    pub input_count: usize,
    /// When outputs that are accumulators add to what is there.
    pub accumulate: Accumulate,
    /// Whether it runs in the last micro-batch of a step alone: a sum over ranks of what all
    /// micro-batches have added up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub last_only: bool,
    /// Whether a step leaves it out: it makes copies of weights that the optimizer's calls write
    /// within a step, and runs where its body runs alone, after weights were loaded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub alone_only: bool,
    /// Scratch, `choice.workspace_bytes` long.
    pub workspace: ByteRange,
    /// When it runs.
    pub phase: Phase,
    /// Part of the model.
    pub tag: Tag,
    /// Transformer layer.
    pub layer: Option<u32>,
    /// Whether it repeats a forward call.
    pub recomputes: bool,
    /// The node of the captured graph that it computes, differentiates, repeats or serves.
    pub source: NodeId,
    /// Unit that does the arithmetic.
    pub unit: MathUnit,
    /// Largest share of the unit's peak in a measurement of the kernel; 1 without a measurement.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub peak_share: f64,
    /// Lower bound of the work of one run, the first of a step.
    pub cost: Cost,
    /// Bytes of accumulators that runs which add to them read beside.
    #[serde(default)]
    pub accumulator_bytes: u64,
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
    /// Whether it runs in an instance of its body.
    pub fn runs_in(&self, instance: Instance) -> bool {
        (instance.is_last || !self.last_only) && (instance.is_alone || !self.alone_only)
    }

    /// How often a step runs it, of whose body it has so many runs.
    pub fn runs_of(&self, body_runs: usize) -> usize {
        match (self.alone_only, self.last_only) {
            (true, _) => 0,
            (false, true) => body_runs.min(1),
            (false, false) => body_runs,
        }
    }

    /// Lower bound of the work of one run.
    pub fn cost_in(&self, instance: Instance) -> Cost {
        let adds = self.accumulate == Accumulate::AfterFirst && !instance.is_first;
        let bytes = if adds { self.accumulator_bytes } else { 0 };
        Cost { bytes_read: self.cost.bytes_read + bytes, ..self.cost }
    }

    /// Bytes that so many runs in a step move.
    pub fn bytes_in_step(&self, runs: usize) -> u64 {
        let bytes = |is_first| self.cost_in(Instance { is_first, ..Instance::ONLY }).bytes();
        match runs {
            0 => 0,
            _ => bytes(true) + bytes(false) * (runs as u64 - 1),
        }
    }

    /// The inputs.
    pub fn inputs(&self) -> &[Operand] {
        &self.operands[..self.input_count]
    }

    /// The outputs.
    pub fn outputs(&self) -> &[Operand] {
        &self.operands[self.input_count..]
    }

    /// The casts that the call does: what is cast, and to which value.
    pub fn casts(&self) -> Vec<(ValueId, ValueId)> {
        match (&self.op, self.inputs(), self.outputs()) {
            (Op::Cast(_), [source], [copy]) => vec![(source.value, copy.value)],
            (Op::AdamW(op), ..) => {
                let casts = op
                    .copies_with_outputs()
                    .filter(|(copy, _)| matches!(copy.kind, CopyKind::Cast(_)));
                casts
                    .filter_map(|(copy, outputs)| {
                        let master = self.operands.get(AdamW::master(copy.parameter))?;
                        Some((master.value, self.outputs().get(outputs.start)?.value))
                    })
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    /// The block quantizations that the call does, be it one itself, in its epilogue, or of weights
    /// that it updates.
    pub fn quantizations(&self) -> Vec<Quantization<'_>> {
        let outputs = self.outputs();
        match &self.op {
            Op::Quantize(quantize) => {
                let source = self.operands.first().map(|operand| operand.value);
                vec![Quantization { quantize, source, outputs }]
            }
            Op::Fused(op) => op
                .quantizations()
                .filter_map(|step| {
                    let source = op.position(step.of).and_then(|at| outputs.get(at));
                    Some(Quantization {
                        quantize: step.quantize,
                        source: source.map(|operand| operand.value),
                        outputs: outputs.get(step.positions)?,
                    })
                })
                .collect(),
            Op::AdamW(op) => op
                .copies_with_outputs()
                .filter_map(|(copy, places)| {
                    let CopyKind::Quantize(quantize) = &copy.kind else { return None };
                    let master = self.operands.get(AdamW::master(copy.parameter));
                    let source = master.map(|operand| operand.value);
                    Some(Quantization { quantize, source, outputs: outputs.get(places)? })
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
    /// Rowwise data and scales, columnwise data and scales, counters: those that there are.
    pub outputs: &'a [Operand],
}

impl Quantization<'_> {
    /// Data and scales.
    pub fn quantized_operands(&self) -> &[Operand] {
        self.outputs.split_last().map_or(&[], |(_, operands)| operands)
    }

    /// The counters.
    pub fn statistics(&self) -> Option<ValueId> {
        self.outputs.last().map(|operand| operand.value)
    }

    /// The tensor that is quantized, by the link of what is made of it.
    pub fn tensor(&self, program: &Program) -> Option<TensorId> {
        let data = self.outputs.first()?;
        program.value(data.value).link.map(|link| link.of)
    }

    /// Name of what is quantized, stored or not.
    pub fn source_name<'p>(&self, program: &'p Program) -> &'p str {
        match self.source {
            Some(source) => &program.value(source).name,
            None => self.tensor(program).and_then(|id| program.tensor_name(id)).unwrap_or("?"),
        }
    }
}
