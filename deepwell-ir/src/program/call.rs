//! One kernel call: operation, kernel, operands, and position in the step.

use serde::{Deserialize, Serialize};

use super::{ByteRange, Instance, Program, ValueId};
use crate::ops::{AdamW, CopyKind, Quantize};
use crate::{KernelChoice, MathUnit, NodeId, Op, Phase, Rejected, Tag, TensorId};

/// Access of a call to an operand.
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

/// When a call adds to its accumulators (loss, parameter gradients) and when it overwrites.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accumulate {
    /// Always overwrites, or has no accumulator.
    #[default]
    Never,
    /// Overwrites in the first micro-batch of a step and adds in all others.
    AfterFirst,
    /// Always adds: an earlier call of the same body has written.
    Always,
}

impl Accumulate {
    /// Whether the call adds in an instance.
    pub fn adds(self, instance: Instance) -> bool {
        match self {
            Accumulate::Never => false,
            Accumulate::AfterFirst => !instance.is_first,
            Accumulate::Always => true,
        }
    }
}

/// A value and the call's access to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operand {
    /// The value.
    pub value: ValueId,
    /// The access.
    pub access: Access,
}

/// Lower bounds of a call's cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// Floating-point operations, a multiply-add counted as two.
    pub flops: u64,
    /// Bytes read from memory, each operand once.
    pub bytes_read: u64,
    /// Bytes written to memory.
    pub bytes_written: u64,
    /// Bytes over the link to other ranks, in the busier direction.
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

/// Queue that a call is issued on. Stream 0 is the compute stream.
pub type StreamId = u32;
/// A point in a stream that another stream can wait for.
pub type EventId = u32;

/// One kernel launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// Unique name, equal to the node's name.
    pub name: String,
    /// The operation.
    pub op: Op,
    /// The kernel.
    pub choice: KernelChoice,
    /// Inputs, then outputs, in the op's order.
    pub operands: Vec<Operand>,
    /// Number of inputs among the operands.
    pub input_count: usize,
    /// When accumulator outputs are added to.
    pub accumulate: Accumulate,
    /// Whether the call runs only in the last micro-batch of a step: a sum over ranks of gradients
    /// accumulated over all micro-batches.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub last_only: bool,
    /// Whether a step skips the call: within a step, the optimizer's calls write these weight
    /// copies. The call runs if its body runs alone, after weights are loaded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub alone_only: bool,
    /// Scratch of `choice.workspace_bytes` bytes.
    pub workspace: ByteRange,
    /// Phase of the step.
    pub phase: Phase,
    /// Part of the model.
    pub tag: Tag,
    /// Transformer layer.
    pub layer: Option<u32>,
    /// Whether the call repeats a forward call.
    pub recomputes: bool,
    /// Node of the captured graph that the call computes, differentiates, repeats or serves.
    pub source: NodeId,
    /// Unit that executes the arithmetic.
    pub unit: MathUnit,
    /// Largest measured fraction of the unit's peak for the kernel; 1 without a measurement.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub peak_share: f64,
    /// Lower bound of the cost of the first run in a step.
    pub cost: Cost,
    /// Additional bytes read by runs that add to accumulators.
    #[serde(default)]
    pub accumulator_bytes: u64,
    /// Queue.
    pub stream: StreamId,
    /// Events to wait for before the call.
    pub waits: Vec<EventId>,
    /// Event to record after the call.
    pub records: Option<EventId>,
    /// Kernels that were not selected, and why.
    pub rejected: Vec<Rejected>,
}

impl Call {
    /// Whether the call runs in an instance of its body.
    pub fn runs_in(&self, instance: Instance) -> bool {
        (instance.is_last || !self.last_only) && (instance.is_alone || !self.alone_only)
    }

    /// Number of runs of the call in a step with `body_runs` runs of its body.
    pub fn runs_of(&self, body_runs: usize) -> usize {
        match (self.alone_only, self.last_only) {
            (true, _) => 0,
            (false, true) => body_runs.min(1),
            (false, false) => body_runs,
        }
    }

    /// Lower bound of the cost of one run.
    pub fn cost_in(&self, instance: Instance) -> Cost {
        let adds = self.accumulate == Accumulate::AfterFirst && !instance.is_first;
        let bytes = if adds { self.accumulator_bytes } else { 0 };
        Cost { bytes_read: self.cost.bytes_read + bytes, ..self.cost }
    }

    /// Bytes moved by `runs` runs in a step.
    pub fn bytes_in_step(&self, runs: usize) -> u64 {
        let bytes = |is_first| self.cost_in(Instance { is_first, ..Instance::ONLY }).bytes();
        match runs {
            0 => 0,
            _ => bytes(true) + bytes(false) * (runs as u64 - 1),
        }
    }

    /// Input operands.
    pub fn inputs(&self) -> &[Operand] {
        &self.operands[..self.input_count]
    }

    /// Output operands.
    pub fn outputs(&self) -> &[Operand] {
        &self.operands[self.input_count..]
    }

    /// Casts in the call: source value and destination value.
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

    /// Block quantizations in the call: the op itself, in the epilogue, or of updated weights.
    pub fn quantizations(&self) -> Vec<Quantization<'_>> {
        let outputs = self.outputs();
        match &self.op {
            Op::Quantize(quantize) => {
                let source = self.operands.first().map(|operand| operand.value);
                vec![Quantization { quantize, source, outputs }]
            }
            Op::QuantizeOperands(op) => {
                let source = self.operands.first().map(|operand| operand.value);
                let outputs = outputs.chunks(op.outputs_of_operand());
                let of = |(quantize, outputs)| Quantization { quantize, source, outputs };
                op.operands().into_iter().zip(outputs).map(of).collect()
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
    /// Format and axes.
    pub quantize: &'a Quantize,
    /// Source value; `None` if the call does not store the source.
    pub source: Option<ValueId>,
    /// Existing outputs, in order: rowwise data and scales, columnwise data and scales, counters.
    pub outputs: &'a [Operand],
}

impl Quantization<'_> {
    /// Data and scales.
    pub fn quantized_operands(&self) -> &[Operand] {
        self.outputs.split_last().map_or(&[], |(_, operands)| operands)
    }

    /// Counters.
    pub fn statistics(&self) -> Option<ValueId> {
        self.outputs.last().map(|operand| operand.value)
    }

    /// The quantized tensor, from the link of the quantized data.
    pub fn tensor(&self, program: &Program) -> Option<TensorId> {
        let data = self.outputs.first()?;
        program.value(data.value).link.map(|link| link.of)
    }

    /// Name of the quantized tensor, stored or not.
    pub fn source_name<'p>(&self, program: &'p Program) -> &'p str {
        match self.source {
            Some(source) => &program.value(source).name,
            None => self.tensor(program).and_then(|id| program.tensor_name(id)).unwrap_or("?"),
        }
    }
}
