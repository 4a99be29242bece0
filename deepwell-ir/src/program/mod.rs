//! The lowered step of one rank: bodies of kernel calls over byte ranges of one arena, and the
//! schedule that invokes them.
//!
//! A [`Program`] is plain data: made by `deepwell-plan`, read by `dryrun`, and run by the
//! `Executor` of `deepwell-kernels`, so the predicted program is the one that runs. Each body
//! (forward pass, backward pass, optimizer, weight copies) is stored once and invoked as often as
//! the schedule says: the size of a program does not grow with the number of micro-batches.

mod call;
mod gemms;
mod handover;
mod memory;
mod order;
mod schedule;
mod text;
mod verify;

use std::collections::BTreeSet;

use deepwell_precision::moments::Moment;
use serde::{Deserialize, Serialize};

pub use self::call::{Access, Accumulate, Call, Cost, EventId, Operand, Quantization, StreamId};
pub use self::handover::{Arrival, Handover, Meeting};
pub use self::memory::{Arena, ByteRange, MemoryKind, Value, ValueId};
pub use self::order::Order;
pub use self::schedule::{Body, BodyId, Instance, Invocation, Schedule, Slotted};
pub use self::verify::{ALIGNMENT_BYTES, verify_program};
use crate::{Derivation, Link, Phase, Ranks, Split, Target, TensorId, TensorPrecision};

/// Purpose of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Forward, backward and optimizer.
    Train,
    /// Forward and loss.
    Evaluate,
}

/// Values that the host writes and reads, by role.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInterface {
    /// Token ids i32 `[B·S]` of a micro-batch.
    pub tokens: Option<ValueId>,
    /// Targets i32 `[B·S]` of a micro-batch.
    pub targets: Option<ValueId>,
    /// f32 `[1]`: reciprocal of the number of tokens of the step counted in the loss.
    pub loss_scale: Option<ValueId>,
    /// f32 `[2]`: learning rate and largest gradient norm.
    pub schedule: Option<ValueId>,
    /// u64 `[2]`: seed and step number for stochastic rounding, per micro-batch; `None` without
    /// stochastic rounding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounding_key: Option<ValueId>,
    /// i32 `[B·S, 2]`: begin and end of each token's document, per micro-batch; `None` if documents
    /// are joined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub documents: Option<ValueId>,
    /// i32 `[B·S]`: position of each token within its document, for learned positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub positions: Option<ValueId>,
    /// u64 `[2]`: applied and skipped steps.
    pub counters: Option<ValueId>,
    /// f32 `[1]`.
    pub loss: Option<ValueId>,
    /// f32 `[1]`, before clipping.
    pub grad_norm: Option<ValueId>,
    /// Counters of each quantization: name of the quantized tensor, and the u64 counters.
    pub statistics: Vec<(String, ValueId)>,
}

/// A parameter with all training state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterState {
    /// Name of the parameter in the source model.
    pub name: String,
    /// Where the master weight is stored.
    pub master: Master,
    /// First moment; `None` in a program for evaluation and for sharded state.
    pub first_moment: Option<ValueId>,
    /// Second moment.
    pub second_moment: Option<ValueId>,
    /// FP32 gradient.
    pub gradient: Option<ValueId>,
    /// Slice of the parameter on this tensor-parallel rank; `None` if unsplit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
}

impl ParameterState {
    /// Names of the moments, before the name of a parameter and a dot.
    pub const MOMENTS: [&str; 2] = ["moment1", "moment2"];

    /// Name of a parameter's moment.
    pub fn moment_name(moment: Moment, parameter: &str) -> String {
        format!("{}.{parameter}", ParameterState::MOMENTS[moment as usize])
    }
}

/// Where a rank stores the master weight of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Master {
    /// Whole, in FP32 or BF16.
    Whole(ValueId),
    /// In FP32 as one slice per rank, this rank's in a [`Shard`]. Calls read what ranks gather.
    Sharded {
        /// Index in [`Program::shards`].
        shard: usize,
        /// The gathered weight.
        gathered: ValueId,
        /// What is gathered, and when.
        form: Gathered,
    },
}

/// The form in which ranks gather a sharded weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gathered {
    /// The FP32 master, by the body of [`Phase::Weights`], kept between steps.
    Kept,
    /// The FP32 master, where a pass needs the weight.
    Fp32,
    /// A copy in BF16, because calls read no other form.
    Bf16,
    /// Rowwise quantized data, because calls read only quantized copies.
    Quantized,
}

impl Master {
    /// The whole weight in the form of calls: the master or the gathered weight. Its shape is the
    /// shape of the parameter on this rank.
    pub fn value(self) -> ValueId {
        match self {
            Master::Whole(value) | Master::Sharded { gathered: value, .. } => value,
        }
    }

    /// The shard of the master, by index, if only slices of the FP32 master exist between steps.
    pub fn only_in_shard(self) -> Option<usize> {
        match self {
            Master::Sharded { shard, form, .. } if form != Gathered::Kept => Some(shard),
            _ => None,
        }
    }
}

/// A bucket of parameters whose optimizer state is sharded, one slice per rank of a group (ZeRO,
/// Rajbhandari et al., arXiv 1910.02054).
///
/// The parameters are consecutive in the bucket, each aligned to [`ALIGNMENT_BYTES`]; slices have
/// equal length, and the last slices may be padded with zeros. Slice `p` belongs to place `p` of
/// the group. A slice is flat, `[m]`, and may end within a parameter; if a bucket holds a single
/// parameter, a slice may be whole rows, or whole matrices of a stack, in their shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Name of the group.
    pub group: String,
    /// Slice of the FP32 master weights.
    pub master: ValueId,
    /// Slice of the first moments.
    pub first_moment: ValueId,
    /// Slice of the second moments.
    pub second_moment: ValueId,
    /// The parameters, as indices into [`Program::parameters`], each with its first element in the
    /// bucket.
    pub parameters: Vec<(usize, usize)>,
}

/// A tensor quantized by calls without being stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unstored {
    /// The tensor.
    pub tensor: TensorId,
    /// Name of the tensor.
    pub name: String,
    /// Source tensor that this tensor is derived from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
}

/// The step of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Name of the model.
    pub name: String,
    /// Purpose of the program.
    pub mode: Mode,
    /// Rank that the program is for.
    pub rank: u32,
    /// Device that the program runs on.
    pub target: Target,
    /// Sequences per micro-batch.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Micro-batches per step.
    pub micro_batches: usize,
    /// Tensors with their arena ranges.
    pub values: Vec<Value>,
    /// Number of activation slots: passes of micro-batches through chunks that are in flight at a
    /// time.
    pub slots: u32,
    /// Kernel calls, body after body, each in issue order.
    pub calls: Vec<Call>,
    /// Ranges of calls that run together, at most one per phase and chunk, which cover all calls in
    /// order. The body of [`Phase::Weights`] makes the compute copies for the next step. After
    /// weights are loaded, this body also runs alone, including copies that the optimizer's calls
    /// write within a step, see [`Call::alone_only`].
    pub bodies: Vec<Body>,
    /// Invocations of a step, in order.
    pub schedule: Vec<Invocation>,
    /// Transfers between stages; `None` if bodies contain their transfers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handover: Option<Handover>,
    /// The arena.
    pub arena: Arena,
    /// Values that the host writes and reads.
    pub host: HostInterface,
    /// Parameters in canonical order.
    pub parameters: Vec<ParameterState>,
    /// Buckets of parameters with sharded optimizer state.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<Shard>,
    /// Result of the precision policy for each parameter.
    pub precision: Vec<TensorPrecision>,
    /// Targets of links without a value.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unstored: Vec<Unstored>,
    /// Bytes that the backend holds in addition to the arena.
    pub fixed_overhead_bytes: usize,
}

impl Program {
    /// The program for another rank with identical calls, values and ranges.
    pub fn for_rank(&self, ranks: Ranks) -> Program {
        let target = self.target.clone().as_rank(ranks);
        Program { rank: target.ranks.rank, target, ..self.clone() }
    }

    /// Shape of the whole parameter, also if this rank has a slice.
    pub fn whole_shape(&self, state: &ParameterState) -> Vec<usize> {
        let own = &self.value(state.master.value()).shape;
        state.split.map_or_else(|| own.clone(), |split| split.whole_shape(own))
    }

    /// Returns the value with this id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// Finds a value by its name.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.values.iter().position(|value| value.name == name).map(|i| ValueId(i as u32))
    }

    /// Name of a tensor: the value's name, or the stored name of an unstored tensor.
    pub fn tensor_name(&self, id: TensorId) -> Option<&str> {
        let value = self.values.iter().find(|value| value.tensor == Some(id));
        let unstored = || self.unstored.iter().find(|unstored| unstored.tensor == id);
        value.map(|value| &*value.name).or_else(|| unstored().map(|unstored| &*unstored.name))
    }

    /// The forward tensor of a tensor that may be a recomputation.
    pub fn first_run(&self, id: TensorId) -> TensorId {
        let value = self.values.iter().find(|value| value.tensor == Some(id));
        let unstored = || self.unstored.iter().find(|unstored| unstored.tensor == id);
        let link = value.map_or_else(|| unstored().and_then(|it| it.link), |value| value.link);
        match link {
            Some(Link { of, derivation: Derivation::Recomputed }) => of,
            _ => id,
        }
    }

    /// Tokens per step.
    pub fn tokens_per_step(&self) -> usize {
        self.batch * self.seq * self.micro_batches
    }

    /// The calls of a body.
    pub fn calls_of(&self, body: BodyId) -> &[Call] {
        &self.calls[self.bodies[body.index()].calls.clone()]
    }

    /// The body of a phase; the first body if the rank has several chunks.
    pub fn body_of(&self, phase: Phase) -> Option<BodyId> {
        self.bodies.iter().position(|body| body.phase == phase).map(|i| BodyId(i as u32))
    }

    /// The instance in which an invocation runs. Micro-batches go through a body in order.
    pub fn instance(&self, invocation: &Invocation) -> Instance {
        let is_last = match self.bodies.get(invocation.body.index()).map(|body| body.phase) {
            // These bodies run once per step.
            Some(Phase::Optimizer | Phase::Weights) => true,
            _ => invocation.micro_batch as usize + 1 == self.micro_batches,
        };
        let is_first = invocation.micro_batch == 0;
        Instance { slot: invocation.slot, is_first, is_last, is_alone: false }
    }

    /// Canonical instance of a body: instances are equal unless calls of the body depend on the
    /// first micro-batch, on the last one, or on running alone.
    pub fn instance_of(&self, body: BodyId, instance: Instance) -> Instance {
        let calls = self.calls_of(body);
        let adds = calls.iter().any(|call| call.accumulate == Accumulate::AfterFirst);
        let waits = calls.iter().any(|call| call.last_only);
        let leaves_out = calls.iter().any(|call| call.alone_only);
        let Instance { slot, is_first, is_last, is_alone } = instance;
        Instance {
            slot,
            is_first: is_first || !adds,
            is_last: is_last || !waits,
            is_alone: is_alone && leaves_out,
        }
    }

    /// Distinct instances of bodies in a step, and instances that run alone.
    pub fn instances(&self) -> BTreeSet<(BodyId, Instance)> {
        let of_schedule = self.schedule.iter().map(|it| (it.body, self.instance(it)));
        let alone = self.body_of(Phase::Weights).map(|body| (body, Instance::ALONE));
        of_schedule
            .chain(alone)
            .map(|(body, instance)| (body, self.instance_of(body, instance)))
            .collect()
    }

    /// Number of runs of each body in a step.
    pub fn runs_per_step(&self) -> Vec<usize> {
        let mut runs = vec![0; self.bodies.len()];
        for invocation in &self.schedule {
            runs[invocation.body.index()] += 1;
        }
        runs
    }

    /// All calls, each with its number of runs in a step.
    pub fn calls_with_runs(&self) -> impl Iterator<Item = (&Call, usize)> {
        let runs = self.runs_per_step();
        let of_body = move |(body, runs): (&Body, usize)| (body.calls.clone(), runs);
        self.bodies.iter().zip(runs).map(of_body).flat_map(move |(calls, runs)| {
            self.calls[calls].iter().map(move |call| (call, call.runs_of(runs)))
        })
    }

    /// FLOPs of a step.
    pub fn flops(&self) -> u64 {
        self.calls_with_runs().map(|(call, runs)| call.cost.flops * runs as u64).sum()
    }

    /// Bytes moved by the calls of a step.
    pub fn bytes_moved(&self) -> u64 {
        self.calls_with_runs().map(|(call, runs)| call.bytes_in_step(runs)).sum()
    }

    /// Bytes of the arena in the memory of the device. On a CPU that is all of the arena.
    pub fn device_bytes(&self) -> usize {
        if self.target.arch == "cpu" { self.arena.bytes } else { self.arena.device_bytes() }
    }

    /// Values of a memory kind.
    pub fn values_of(&self, kind: MemoryKind) -> impl Iterator<Item = &Value> {
        self.values.iter().filter(move |value| value.memory == kind)
    }

    /// Serializes the program as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a program holds only plain data")
    }

    /// Reads and verifies the output of [`Program::to_json`].
    ///
    /// # Errors
    /// Text that is not a program, or a program that breaks a rule of [`crate::verify_program`].
    pub fn from_json(text: &str) -> Result<Program, crate::IrError> {
        let program: Program = serde_json::from_str(text)
            .map_err(|source| crate::IrError::Json { what: "program", source })?;
        crate::verify_program(&program)?;
        Ok(program)
    }
}
