//! Values and where they lie in the arena.

use serde::{Deserialize, Serialize};

use super::ALIGNMENT_BYTES;
use crate::{DType, Link, TensorId, storage_bytes};

/// Index of a value in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ValueId(pub u32);

impl ValueId {
    /// As an index into [`Program::values`](crate::Program::values).
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

    /// From the first byte of the first range to the last of the last, of ranges that lie one
    /// behind the other: each begins at the next multiple of [`ALIGNMENT_BYTES`]. None of others.
    pub fn spanning(ranges: &[ByteRange]) -> Option<ByteRange> {
        let (first, last) = (ranges.first()?, ranges.last()?);
        let follows = |pair: &[ByteRange]| {
            let expected = pair[0].end().checked_next_multiple_of(ALIGNMENT_BYTES);
            expected == Some(pair[1].offset)
        };
        let span = ByteRange { offset: first.offset, bytes: last.end() - first.offset };
        ranges.windows(2).all(follows).then_some(span)
    }

    /// Whether two ranges share a byte.
    pub fn overlaps(&self, other: &ByteRange) -> bool {
        self.bytes > 0 && other.bytes > 0 && self.offset < other.end() && other.offset < self.end()
    }
}

/// A tensor with a place in the arena.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// Unique name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// What the memory is spent on.
    pub memory: MemoryKind,
    /// Its place in slot 0. Ranges of values whose lives do not meet may overlap.
    pub range: ByteRange,
    /// From its place in one slot to that in the next; 0 where all slots share one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub slot_stride_bytes: usize,
    /// The tensor of the graph that it is; none for what lowering adds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor: Option<TensorId>,
    /// What it holds of another tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
}

fn is_zero(bytes: &usize) -> bool {
    *bytes == 0
}

impl Value {
    /// A value that stands for no tensor of a graph, at one place for all slots.
    pub fn new(
        name: impl Into<String>,
        dtype: DType,
        shape: Vec<usize>,
        memory: MemoryKind,
        range: ByteRange,
    ) -> Value {
        let (name, tensor, link) = (name.into(), None, None);
        Value { name, dtype, shape, memory, range, slot_stride_bytes: 0, tensor, link }
    }

    /// Bytes that its type and shape take; none where that is more than an address can count.
    pub fn storage_bytes(&self) -> Option<usize> {
        storage_bytes(self.dtype, &self.shape)
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its place in a slot.
    pub fn range_in(&self, slot: u32) -> ByteRange {
        let offset = self.range.offset + slot as usize * self.slot_stride_bytes;
        ByteRange { offset, bytes: self.range.bytes }
    }
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
