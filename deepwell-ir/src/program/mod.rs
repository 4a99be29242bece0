//! The lowered step of one rank: bodies of kernel calls over byte ranges of one arena, and the
//! schedule that invokes them.
//!
//! A [`Program`] is plain data. It is made by `deepwell-plan`, read by `dryrun`, and run by the
//! `Executor` of `deepwell-kernels`: what is predicted is what is run. A body (the forward pass,
//! the backward pass, the optimizer, the weights' compute copies) stands once, however often the
//! schedule invokes it: the cost of a program does not grow with its micro-batches.

mod call;
mod gemms;
mod handover;
mod memory;
mod order;
mod schedule;
mod text;
mod verify;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

pub use self::call::{Access, Accumulate, Call, Cost, EventId, Operand, Quantization, StreamId};
pub use self::handover::{Arrival, Handover, Meeting};
pub use self::memory::{Arena, ByteRange, MemoryKind, Value, ValueId};
pub use self::order::Order;
pub use self::schedule::{Body, BodyId, Instance, Invocation, Schedule, Slotted};
pub use self::verify::{ALIGNMENT_BYTES, verify_program};
use crate::{Link, Part, Phase, Ranks, Split, Target, TensorId, TensorPrecision};

/// What a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Forward, backward and optimizer.
    Train,
    /// Forward and loss.
    Evaluate,
}

/// Values that the host writes and reads, by what they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInterface {
    /// Token ids i32 `[B·S]` of a micro-batch.
    pub tokens: Option<ValueId>,
    /// Targets i32 `[B·S]` of a micro-batch.
    pub targets: Option<ValueId>,
    /// f32 `[1]`: one over the tokens of the step that count.
    pub loss_scale: Option<ValueId>,
    /// f32 `[2]`: learning rate and largest gradient norm.
    pub schedule: Option<ValueId>,
    /// u64 `[2]`: seed and number of the step, for rounding at random; none where nothing is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounding_key: Option<ValueId>,
    /// i32 `[B·S, 2]`, where the document of each token of a micro-batch begins and ends; none
    /// where documents are joined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub documents: Option<ValueId>,
    /// i32 `[B·S]`, the place of each token in its document, for learned positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub positions: Option<ValueId>,
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
    /// FP32 master weight. Where ranks have a part each, see [`Shard`], it is gathered here: by the
    /// body of [`Phase::Weights`], for it to be here between steps, or where a pass needs it; in
    /// BF16, or as rowwise data, where such copies are all that calls read.
    pub master: ValueId,
    /// First moment; none in a program that only evaluates, or where ranks have a part each.
    pub first_moment: Option<ValueId>,
    /// Second moment.
    pub second_moment: Option<ValueId>,
    /// FP32 gradient.
    pub gradient: Option<ValueId>,
    /// Which slice of it tensor-parallel ranks have each; none where all have it whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
}

/// A bucket of parameters of whose optimizer state each rank of a group has one slice (ZeRO,
/// Rajbhandari et al., arXiv 1910.02054).
///
/// The parameters lie one behind the other in the bucket, each from a multiple of
/// [`ALIGNMENT_BYTES`] on; slices are equally long, and the last ones may hold zeros. Slice `p` is
/// that of place `p` in the group. A slice is flat, `[m]`, and may end within a parameter; of a
/// parameter alone it may be whole rows, or whole matrices of a stack, in their shape.
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
    /// The parameters, as indices into [`Program::parameters`], and the element of the bucket that
    /// each begins at.
    pub parameters: Vec<(usize, usize)>,
}

/// A tensor that calls quantize without storing it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unstored {
    /// Which one.
    pub tensor: TensorId,
    /// Its name.
    pub name: String,
    /// What it holds of another tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
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
    /// Passes of micro-batches through chunks whose activations are in flight at a time.
    pub slots: u32,
    /// Kernel calls, body after body, each in issue order.
    pub calls: Vec<Call>,
    /// Ranges of calls that run together, at most one of each phase and chunk, which cover all
    /// calls in order. That of [`Phase::Weights`] makes the compute copies for the next step, and
    /// is also run alone after weights are loaded: then with those that the optimizer's calls
    /// write within a step, see [`Call::alone_only`].
    pub bodies: Vec<Body>,
    /// What a step runs, in order.
    pub schedule: Vec<Invocation>,
    /// How stages hand over what they send each other; none where bodies do so themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handover: Option<Handover>,
    /// The arena.
    pub arena: Arena,
    /// What the host writes and reads.
    pub host: HostInterface,
    /// Parameters in canonical order.
    pub parameters: Vec<ParameterState>,
    /// Buckets of parameters whose optimizer state the ranks share.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<Shard>,
    /// What each parameter got from the policy.
    pub precision: Vec<TensorPrecision>,
    /// Tensors that links lead to and that have no value.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unstored: Vec<Unstored>,
    /// Bytes that the backend holds beside the arena.
    pub fixed_overhead_bytes: usize,
}

impl Program {
    /// The same program for another rank of its class: calls, values and places are those of all.
    pub fn for_rank(&self, ranks: Ranks) -> Program {
        let target = self.target.clone().as_rank(ranks);
        Program { rank: target.ranks.rank, target, ..self.clone() }
    }

    /// Shape of a parameter, of which this rank may have a slice.
    pub fn whole_shape(&self, state: &ParameterState) -> Vec<usize> {
        let own = &self.value(state.master).shape;
        state.split.map_or_else(|| own.clone(), |split| split.whole_shape(own))
    }

    /// The value behind an id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// Finds a value by its name.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.values.iter().position(|value| value.name == name).map(|i| ValueId(i as u32))
    }

    /// Name of a tensor: that of its value, or its own where it is not stored.
    pub fn tensor_name(&self, id: TensorId) -> Option<&str> {
        let value = self.values.iter().find(|value| value.tensor == Some(id));
        let unstored = || self.unstored.iter().find(|unstored| unstored.tensor == id);
        value.map(|value| &*value.name).or_else(|| unstored().map(|unstored| &*unstored.name))
    }

    /// The tensor that the forward made, of one that the backward may have made again.
    pub fn first_run(&self, id: TensorId) -> TensorId {
        let value = self.values.iter().find(|value| value.tensor == Some(id));
        let unstored = || self.unstored.iter().find(|unstored| unstored.tensor == id);
        let link = value.map_or_else(|| unstored().and_then(|it| it.link), |value| value.link);
        match link {
            Some(Link { of, part: Part::Recomputed }) => of,
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

    /// The body of a phase; of several chunks that which stands first.
    pub fn body_of(&self, phase: Phase) -> Option<BodyId> {
        self.bodies.iter().position(|body| body.phase == phase).map(|i| BodyId(i as u32))
    }

    /// What has to be known to prepare the calls of an invocation. Micro-batches go through a body
    /// in their order.
    pub fn instance(&self, invocation: &Invocation) -> Instance {
        let is_last = match self.bodies.get(invocation.body.index()).map(|body| body.phase) {
            // They run once in a step.
            Some(Phase::Optimizer | Phase::Weights) => true,
            _ => invocation.micro_batch as usize + 1 == self.micro_batches,
        };
        let is_first = invocation.micro_batch == 0;
        Instance { slot: invocation.slot, is_first, is_last, is_alone: false }
    }

    /// The instance of a body that stands for `instance`: where nothing is accumulated, nothing
    /// waits for the last micro-batch and a step leaves nothing out, all run alike.
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

    /// The instances of bodies that a step runs, and those that run alone.
    pub fn instances(&self) -> BTreeSet<(BodyId, Instance)> {
        let of_schedule = self.schedule.iter().map(|it| (it.body, self.instance(it)));
        let alone = self.body_of(Phase::Weights).map(|body| (body, Instance::ALONE));
        of_schedule
            .chain(alone)
            .map(|(body, instance)| (body, self.instance_of(body, instance)))
            .collect()
    }

    /// How often a step runs each body.
    pub fn runs_per_step(&self) -> Vec<usize> {
        let mut runs = vec![0; self.bodies.len()];
        for invocation in &self.schedule {
            runs[invocation.body.index()] += 1;
        }
        runs
    }

    /// Each call, with how often a step runs it.
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

    /// Bytes that the calls of a step move.
    pub fn bytes_moved(&self) -> u64 {
        self.calls_with_runs().map(|(call, runs)| call.bytes_in_step(runs)).sum()
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
