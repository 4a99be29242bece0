//! Values and their memory in the arena.

use serde::{Deserialize, Serialize};

use super::ALIGNMENT_BYTES;
use crate::{DType, Link, TensorId, storage_bytes};

/// Index of a value in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ValueId(pub u32);

impl ValueId {
    /// The id as an index into [`Program::values`](crate::Program::values).
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Purpose of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// Master weights and moments in host memory, copied to the device for each call that uses
    /// them.
    Offloaded,
    /// Master weights, moments, scalars of the optimizer.
    Optimizer,
    /// Parameter gradients.
    Gradients,
    /// Compute copies of the weights.
    Weights,
    /// Tokens, targets and scalars from the host; loss, norm and counters to the host.
    Host,
    /// Tensors between calls.
    Activations,
    /// Scratch of single calls.
    Workspace,
}

impl MemoryKind {
    /// All kinds, in arena order.
    pub const ALL: [MemoryKind; 7] = [
        MemoryKind::Offloaded,
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
            MemoryKind::Offloaded => "offloaded",
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
    /// One past the last byte, saturating.
    pub fn end(&self) -> usize {
        self.offset.saturating_add(self.bytes)
    }

    /// The range from the first byte of the first range to the end of the last, if the ranges are
    /// consecutive: each begins at the next multiple of [`ALIGNMENT_BYTES`]. `None` otherwise.
    pub fn spanning(ranges: &[ByteRange]) -> Option<ByteRange> {
        let (first, last) = (ranges.first()?, ranges.last()?);
        let span = ByteRange { offset: first.offset, bytes: last.end() - first.offset };
        ranges.windows(2).all(|pair| pair[0].is_followed_by(&pair[1])).then_some(span)
    }

    /// Whether `next` begins at the next multiple of [`ALIGNMENT_BYTES`].
    fn is_followed_by(&self, next: &ByteRange) -> bool {
        self.end().checked_next_multiple_of(ALIGNMENT_BYTES) == Some(next.offset)
    }

    /// Whether two ranges share a byte.
    pub fn overlaps(&self, other: &ByteRange) -> bool {
        self.bytes > 0 && other.bytes > 0 && self.offset < other.end() && other.offset < self.end()
    }
}

/// A tensor located in the arena.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// Unique name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Purpose of the memory.
    pub memory: MemoryKind,
    /// Bytes in slot 0. Ranges of values with disjoint lifetimes may overlap.
    pub range: ByteRange,
    /// Distance between the value's ranges in consecutive slots; 0 if all slots share one range.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub slot_stride_bytes: usize,
    /// The corresponding tensor of the graph; `None` for values added by lowering.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor: Option<TensorId>,
    /// Source tensor that the value is derived from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
}

fn is_zero(bytes: &usize) -> bool {
    *bytes == 0
}

impl Value {
    /// Creates a value without a graph tensor, at the same range in all slots.
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

    /// Bytes required by type and shape; `None` if the number overflows `usize`.
    pub fn storage_bytes(&self) -> Option<usize> {
        storage_bytes(self.dtype, &self.shape)
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The value's bytes in a slot.
    pub fn range_in(&self, slot: u32) -> ByteRange {
        let offset = self.range.offset + slot as usize * self.slot_stride_bytes;
        ByteRange { offset, bytes: self.range.bytes }
    }
}

/// The arena: persistent values first, then values that live within a step. Offloaded values are
/// the first of all; on a GPU their part of the arena is host memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arena {
    /// Total size.
    pub bytes: usize,
    /// Size of the part for offloaded values.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_bytes: usize,
    /// Begin of values that live within a step.
    pub transient_offset: usize,
    /// Largest sum of transient values and workspaces alive at any call, a lower bound for every
    /// plan.
    pub transient_lower_bound_bytes: usize,
}

impl Arena {
    /// Bytes outside of the part for offloaded values.
    pub fn device_bytes(&self) -> usize {
        self.bytes - self.host_bytes
    }

    /// Bytes reused within a step.
    pub fn transient_bytes(&self) -> usize {
        self.bytes - self.transient_offset
    }
}
