//! Collectives between the ranks of a process group.
//!
//! Bytes on a link are counted for ring algorithms, as NVIDIA's nccl-tests define "bus bandwidth"
//! (doc/PERFORMANCE.md): among `n` ranks, an all-reduce of `S` bytes counts `2 (n-1)/n · S`, a
//! reduce-scatter or all-gather `(n-1)/n` of the whole tensor, an all-to-all `(n-1)/n · S`, a
//! broadcast, shift, send or receive `S`. The first two are lower bounds for any algorithm
//! (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
//!
//! Derivatives are taken of the sum of the losses of all ranks. The gradient of an all-reduced sum
//! is therefore the all-reduced sum of the gradients. If several ranks compute the same loss, the
//! loss counts once per rank.

use serde::{Deserialize, Serialize};

use super::{Check, product};
use crate::autodiff::BackwardContext;
use crate::op::{OpRule, OutputKind, OutputType, TensorType};
use crate::{DType, Dim, GroupId, IrError, Node, OpError, OperandType, Shape};

/// How values of several ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduction {
    /// Sum in rank order; floats accumulate in FP32.
    Sum,
    /// Maximum; NaN if any value is NaN.
    Max,
}

impl Reduction {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Max => "max",
        }
    }
}

/// The collective. Places are positions in the group, not global rank numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    /// x → x reduced over the ranks, on every rank.
    AllReduce {
        /// The reduction.
        reduction: Reduction,
    },
    /// x `[n·m, ..]` → `[m, ..]`: place `p` gets slice `p` of x reduced over the `n` ranks.
    ReduceScatter {
        /// The reduction.
        reduction: Reduction,
    },
    /// x `[m, ..]` → `[n·m, ..]`: x of every rank, in rank order.
    AllGather,
    /// x `[n·m, ..]` → `[n·m, ..]`: slice `q` of place `p` becomes slice `p` of place `q`.
    AllToAll,
    /// x → the root's x, on every rank.
    Broadcast {
        /// Place of the root.
        root: u32,
    },
    /// x → x of the rank `by` places before, cyclically: place `p` of `n` gets x of place
    /// `(p - by) mod n`. All ranks send and receive at the same time.
    Shift {
        /// Distance in places, less than the size of the group.
        by: u32,
    },
    /// x → no output; another rank receives x.
    Send {
        /// Place of the receiver.
        to: u32,
    },
    /// No input → tensor from another rank.
    Recv {
        /// Place of the sender.
        from: u32,
        /// Shape of the tensor.
        shape: Shape,
        /// Element type of the tensor.
        dtype: DType,
    },
}

/// Element types with reductions.
const SUMS: [DType; 4] = [DType::F32, DType::Bf16, DType::I32, DType::U64];

/// A collective between the ranks of a group. Tensors are sliced along the first dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Collective {
    /// The operation.
    pub kind: CollectiveKind,
    /// The rank's process group.
    pub group: GroupId,
    /// Number of ranks in the group.
    pub ranks: u32,
    /// Number of tensors of the bucket, if the call of a program exchanges a bucket; `None` for one
    /// tensor.
    ///
    /// The tensors are contiguous. An all-reduce works in place and has no results. A
    /// reduce-scatter reads the tensors, an all-gather writes them. The slice of a rank is one
    /// tensor of `m` elements; the bucket has `ranks · m` elements, padding included. If the
    /// tensors are shorter than the bucket, a reduce-scatter over micro-batches reads the rest as
    /// zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket: Option<u32>,
    /// Whether the tensors are gathered individually instead of as one bucket: several all-gathers
    /// at the same time, each from one slice into one tensor.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub each: bool,
}

impl Collective {
    /// Names of all kinds, the keys under which kernels are registered.
    pub const NAMES: [&str; 8] = [
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "all_to_all",
        "broadcast",
        "shift",
        "send",
        "recv",
    ];

    /// A collective on one tensor.
    pub fn new(kind: CollectiveKind, group: GroupId, ranks: u32) -> Collective {
        Collective { kind, group, ranks, bucket: None, each: false }
    }

    /// A collective on a bucket of `tensors` tensors.
    pub fn of_bucket(
        kind: CollectiveKind,
        group: GroupId,
        ranks: u32,
        tensors: usize,
    ) -> Collective {
        Collective { kind, group, ranks, bucket: Some(tensors as u32), each: false }
    }

    /// Simultaneous all-gathers of `tensors` tensors.
    pub fn gathers(group: GroupId, ranks: u32, tensors: usize) -> Collective {
        let gather = Collective::of_bucket(CollectiveKind::AllGather, group, ranks, tensors);
        Collective { each: true, ..gather }
    }

    /// A collective of another kind in the same group.
    fn with(&self, kind: CollectiveKind) -> Collective {
        Collective { kind, ..self.clone() }
    }

    /// The reduction, if the kind has one.
    pub fn reduction(&self) -> Option<Reduction> {
        match self.kind {
            CollectiveKind::AllReduce { reduction }
            | CollectiveKind::ReduceScatter { reduction } => Some(reduction),
            _ => None,
        }
    }

    /// Place of the peer, or distance of a shift.
    fn peer(&self) -> Option<u32> {
        match self.kind {
            CollectiveKind::Broadcast { root } => Some(root),
            CollectiveKind::Shift { by } => Some(by),
            CollectiveKind::Send { to } => Some(to),
            CollectiveKind::Recv { from, .. } => Some(from),
            _ => None,
        }
    }

    /// Checks the operands of a call with known sizes: slices must be whole, and outputs must have
    /// the size that the collective produces.
    ///
    /// # Errors
    /// The expected and the actual operands.
    pub fn check(&self, inputs: &[OperandType], outputs: &[OperandType]) -> Result<(), OpError> {
        if self.each {
            return self.check_each(inputs, outputs);
        }
        if let Some(tensors) = self.bucket {
            return self.check_bucket(tensors as usize, inputs, outputs);
        }
        if let CollectiveKind::Recv { dtype, .. } = self.kind {
            // The caller evaluated the symbolic shape, so only the element type is checked.
            let fits = inputs.is_empty() && outputs.len() == 1 && outputs[0].dtype == dtype;
            let expected = format!("no operand and one result in {dtype}");
            let got = format!("{} and {outputs:?}", inputs.len());
            return if fits { self.check_places() } else { Err(self.error(expected, got)) };
        }
        let types: Vec<TensorType> = inputs
            .iter()
            .map(|input| TensorType {
                shape: Shape::new(input.shape.iter().copied()),
                dtype: input.dtype,
            })
            .collect();
        let expected: Vec<OperandType> = self
            .infer(&types)?
            .into_iter()
            .map(|output| OperandType {
                dtype: output.dtype,
                // All input sizes are fixed, so output sizes are fixed.
                shape: output.shape.as_fixed().unwrap_or_default(),
            })
            .collect();
        if expected != outputs {
            return Err(self.error(format!("results {expected:?}"), format!("{outputs:?}")));
        }
        Ok(())
    }

    fn check_bucket(
        &self,
        tensors: usize,
        inputs: &[OperandType],
        outputs: &[OperandType],
    ) -> Result<(), OpError> {
        let none: &[OperandType] = &[];
        let (bucket, slice) = match self.kind {
            CollectiveKind::AllReduce { .. } if outputs.is_empty() => (inputs, none),
            CollectiveKind::ReduceScatter { .. } => (inputs, outputs),
            CollectiveKind::AllGather => (outputs, inputs),
            _ => {
                let expected = "an all-reduce in place, a reduce-scatter or an all-gather";
                return Err(self.error(expected, format!("{} of a bucket", self.name())));
            }
        };
        if bucket.len() != tensors || tensors == 0 {
            let expected = format!("a bucket of {tensors} tensors, at least 1");
            return Err(self.error(expected, bucket.len().to_string()));
        }
        let dtype = bucket[0].dtype;
        if let Some(other) = bucket.iter().chain(slice).find(|operand| operand.dtype != dtype) {
            return Err(self.error(format!("a bucket in {dtype}"), other.dtype.name()));
        }
        if self.reduction().is_some() && !SUMS.contains(&dtype) {
            return Err(self.error("f32, bf16, i32 or u64, which can be reduced", dtype.name()));
        }
        if matches!(self.kind, CollectiveKind::AllReduce { .. }) {
            return self.check_places();
        }
        let elements: u64 = bucket.iter().map(|tensor| product(&tensor.shape)).sum();
        match slice {
            [OperandType { shape, .. }] if elements <= u64::from(self.ranks) * product(shape) => {
                self.check_places()
            }
            _ => {
                let ranks = self.ranks;
                let expected = format!("one slice of a bucket of {elements} in {ranks} slices");
                Err(self.error(expected, format!("{slice:?}")))
            }
        }
    }

    fn check_each(&self, inputs: &[OperandType], outputs: &[OperandType]) -> Result<(), OpError> {
        let tensors = self.bucket.map_or(0, |tensors| tensors as usize);
        if self.kind != CollectiveKind::AllGather {
            return Err(self.error("an all-gather of tensors by themselves", self.name()));
        }
        if tensors == 0 || [inputs.len(), outputs.len()] != [tensors; 2] {
            let expected = format!("{tensors} slices and as many tensors, at least 1");
            return Err(self.error(expected, format!("{} and {}", inputs.len(), outputs.len())));
        }
        let one = Collective::new(self.kind.clone(), self.group, self.ranks);
        let mut pairs = inputs.chunks(1).zip(outputs.chunks(1));
        pairs.try_for_each(|(input, output)| one.check(input, output))
    }

    fn error(&self, expected: impl Into<String>, got: impl Into<String>) -> OpError {
        OpError { op: self.name(), expected: expected.into(), got: got.into() }
    }

    fn check_places(&self) -> Result<(), OpError> {
        if self.ranks == 0 {
            return Err(self.error("a group of at least 1 rank", "0"));
        }
        match self.peer() {
            Some(peer) if peer >= self.ranks => {
                Err(self.error(format!("a place in a group of {}", self.ranks), peer.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// One rank's slice of the first dimension. [`Collective::check`] checks symbolic sizes once
    /// bound.
    fn slice(&self, whole: Dim) -> Result<Dim, OpError> {
        whole.part_of(self.ranks as usize).ok_or_else(|| {
            let expected = format!("a first dimension divisible by {} ranks", self.ranks);
            let hint = "round it up, see `Dim::round_up_to`, or cut among fewer ranks";
            self.error(expected, format!("{whole}\nhint: {hint}"))
        })
    }

    /// Bytes over this rank's link in the busier direction.
    fn link_bytes(&self, operands: &[OperandType]) -> u64 {
        let bytes = |operand: &OperandType| operand.storage_bytes().unwrap_or(usize::MAX) as u64;
        let ranks = u64::from(self.ranks).max(1);
        let largest = match (&self.kind, self.bucket) {
            // Inputs are the slices, outputs the tensors.
            _ if self.each => operands.iter().skip(operands.len() / 2).map(bytes).sum(),
            (_, None) => operands.iter().map(bytes).max().unwrap_or(0),
            (CollectiveKind::AllReduce { .. }, _) => operands.iter().map(bytes).sum(),
            // The slice is the first operand of an all-gather, the last of a reduce-scatter.
            (CollectiveKind::AllGather, _) => operands.first().map_or(0, bytes) * ranks,
            _ => operands.last().map_or(0, bytes) * ranks,
        };
        let others = largest * (ranks - 1) / ranks;
        match self.kind {
            CollectiveKind::AllReduce { .. } => 2 * largest * (ranks - 1) / ranks,
            CollectiveKind::ReduceScatter { .. }
            | CollectiveKind::AllGather
            | CollectiveKind::AllToAll => others,
            CollectiveKind::Broadcast { .. } if ranks == 1 => 0,
            CollectiveKind::Shift { by: 0 } => 0,
            CollectiveKind::Broadcast { .. }
            | CollectiveKind::Shift { .. }
            | CollectiveKind::Send { .. }
            | CollectiveKind::Recv { .. } => largest,
        }
    }
}

impl OpRule for Collective {
    fn name(&self) -> &'static str {
        match self.kind {
            CollectiveKind::AllReduce { .. } => "all_reduce",
            CollectiveKind::ReduceScatter { .. } => "reduce_scatter",
            CollectiveKind::AllGather => "all_gather",
            CollectiveKind::AllToAll => "all_to_all",
            CollectiveKind::Broadcast { .. } => "broadcast",
            CollectiveKind::Shift { .. } => "shift",
            CollectiveKind::Send { .. } => "send",
            CollectiveKind::Recv { .. } => "recv",
        }
    }

    fn attributes(&self) -> String {
        let mut text = format!("group={} ranks={}", self.group.0, self.ranks);
        if let Some(tensors) = self.bucket {
            let what = if self.each { "tensors" } else { "bucket" };
            text.push_str(&format!(" {what}={tensors}"));
        }
        match &self.kind {
            CollectiveKind::AllReduce { reduction }
            | CollectiveKind::ReduceScatter { reduction } => {
                text = format!("{} {text}", reduction.name());
            }
            CollectiveKind::AllGather | CollectiveKind::AllToAll => {}
            CollectiveKind::Broadcast { root } => text.push_str(&format!(" root={root}")),
            CollectiveKind::Shift { by } => text.push_str(&format!(" by={by}")),
            CollectiveKind::Send { to } => text.push_str(&format!(" to={to}")),
            CollectiveKind::Recv { from, shape, dtype } => {
                text.push_str(&format!(" from={from} {dtype}{shape}"));
            }
        }
        text
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<OutputType>, OpError> {
        if self.bucket.is_some() {
            return Err(self.error("one tensor in a graph", "a bucket, which programs have"));
        }
        let is_recv = matches!(self.kind, CollectiveKind::Recv { .. });
        let names: &[&str] = if is_recv { &[] } else { &["x"] };
        let check = Check::count(self.name(), inputs, names)?;
        self.check_places()?;
        let output = |shape: Shape, dtype| {
            let kind = OutputKind::SameAsInput;
            Ok(vec![OutputType { suffix: "".into(), shape, dtype, kind }])
        };
        if let CollectiveKind::Recv { shape, dtype, .. } = &self.kind {
            return output(shape.clone(), *dtype);
        }
        let TensorType { shape, dtype } = inputs[0].clone();
        if self.reduction().is_some() && !SUMS.contains(&dtype) {
            return Err(check.error("f32, bf16, i32 or u64, which can be reduced", dtype.name()));
        }
        let with_first = |first: &dyn Fn(Dim) -> Result<Dim, OpError>| {
            let Some((&whole, rest)) = shape.0.split_first() else {
                return Err(check.error("a tensor of at least one dimension", "a scalar"));
            };
            Ok(Shape([&[first(whole)?], rest].concat()))
        };
        match self.kind {
            CollectiveKind::AllReduce { .. }
            | CollectiveKind::Broadcast { .. }
            | CollectiveKind::Shift { .. } => output(shape, dtype),
            CollectiveKind::ReduceScatter { .. } => {
                output(with_first(&|whole| self.slice(whole))?, dtype)
            }
            CollectiveKind::AllGather => {
                output(with_first(&|slice| Ok(slice.times(self.ranks as usize)))?, dtype)
            }
            CollectiveKind::AllToAll => {
                with_first(&|whole| self.slice(whole))?;
                output(shape, dtype)
            }
            CollectiveKind::Send { .. } | CollectiveKind::Recv { .. } => Ok(Vec::new()),
        }
    }

    fn flops(&self, shapes: &[Vec<usize>]) -> u64 {
        let ranks = u64::from(self.ranks).max(1);
        let elements = match (&self.kind, self.bucket) {
            (_, None) => shapes.first().map_or(0, |shape| product(shape)),
            (CollectiveKind::AllReduce { .. }, _) => shapes.iter().map(|s| product(s)).sum(),
            _ => shapes.last().map_or(0, |slice| product(slice)) * ranks,
        };
        match self.reduction() {
            Some(_) => elements * (ranks - 1) / ranks,
            None => 0,
        }
    }

    fn bytes_on_link(&self, operands: &[OperandType]) -> u64 {
        self.link_bytes(operands)
    }

    fn backward(&self, node: &Node, context: &mut BackwardContext<'_>) -> Result<(), IrError> {
        let sum = Reduction::Sum;
        let reversed = match &self.kind {
            CollectiveKind::AllReduce { reduction: Reduction::Sum } => self.kind.clone(),
            CollectiveKind::ReduceScatter { reduction: Reduction::Sum } => {
                CollectiveKind::AllGather
            }
            CollectiveKind::AllGather => CollectiveKind::ReduceScatter { reduction: sum },
            CollectiveKind::AllToAll => CollectiveKind::AllToAll,
            CollectiveKind::Shift { by } => {
                CollectiveKind::Shift { by: (self.ranks - by) % self.ranks }
            }
            CollectiveKind::Recv { from, .. } => CollectiveKind::Send { to: *from },
            CollectiveKind::Send { to } => {
                let x = node.inputs[0];
                let shape = context.shape(x).clone();
                let dtype = context.dtype(x);
                let recv = self.with(CollectiveKind::Recv { from: *to, shape, dtype });
                let dx = context.emit_fresh(recv, "", &[])?[0];
                return context.contribute(x, dx);
            }
            _ => {
                let (node, op) = (node.name.clone(), self.name().to_string());
                return Err(IrError::NotDifferentiable { node, op });
            }
        };
        let Some(dy) = context.gradient_of(node.outputs[0]) else { return Ok(()) };
        let dx = context.emit_fresh(self.with(reversed), "", &[dy])?;
        match (node.inputs.first(), dx.first()) {
            (Some(&x), Some(&dx)) => context.contribute(x, dx),
            _ => Ok(()),
        }
    }
}
