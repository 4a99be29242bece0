//! Asynchronous stores, bulk copies and tensor maps.

use super::memory_instruction::AtomicOperation;
use super::types::{Address, Source, Space, Type};

/// `st.async` or `red.async`.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreAsync {
    /// Shared memory of a CTA of the cluster.
    pub target: Address,
    /// Type of one element.
    pub element: Type,
    /// One source per element.
    pub sources: Box<[Source]>,
    /// The mbarrier that counts the bytes, in the same CTA as the target.
    pub barrier: Address,
    /// `red.async`: the operation.
    pub reduction: Option<AtomicOperation>,
}

/// Source and target memory of a bulk copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BulkDirection {
    /// Global to shared memory of the cluster.
    GlobalToShared,
    /// Shared to global memory.
    SharedToGlobal,
    /// Shared memory to shared memory of another CTA of the cluster.
    SharedToShared,
    /// Global memory to the L2 cache; no visible effect.
    Prefetch,
}

/// Completion mechanism of a bulk operation.
#[derive(Clone, Debug, PartialEq)]
pub enum BulkCompletion {
    /// `.mbarrier::complete_tx::bytes`: the mbarrier counts the bytes.
    Mbarrier(Address),
    /// `.bulk_group`.
    Group,
    /// None, for prefetches.
    None,
}

/// `cp.async.bulk` or `cp.reduce.async.bulk`.
#[derive(Clone, Debug, PartialEq)]
pub struct BulkCopy {
    /// Source and target memory.
    pub direction: BulkDirection,
    /// First byte written; for [`BulkDirection::Prefetch`] equal to the source.
    pub target: Address,
    /// Whether the target is in the executing CTA's window (`.shared::cta`).
    pub target_is_own_cta: bool,
    /// First byte read.
    pub source: Address,
    /// Number of bytes, a multiple of 16.
    pub bytes: Source,
    /// Completion mechanism.
    pub completion: BulkCompletion,
    /// `.multicast::cluster`: one bit per rank.
    pub multicast: Option<Source>,
    /// `.cp_mask`: one bit per byte of 16.
    pub byte_mask: Option<Source>,
    /// `cp.reduce`: operation and element type.
    pub reduction: Option<(AtomicOperation, Type)>,
}

/// Interpretation of the coordinates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum TensorMode {
    Tile,
    /// Loads four rows of a 2-D tensor; five coordinates.
    Gather4,
    /// Stores four rows of a 2-D tensor; five coordinates.
    Scatter4,
    Im2col,
    Im2colW,
    Im2colW128,
}

/// `cp.async.bulk.tensor` or `cp.reduce.async.bulk.tensor`.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorCopy {
    /// Source and target memory.
    pub direction: BulkDirection,
    /// Dimensions, 1 to 5.
    pub rank: u32,
    /// Interpretation of the coordinates.
    pub mode: TensorMode,
    /// Generic address of the 128-byte map.
    pub map: Address,
    /// Coordinates, innermost first.
    pub coordinates: Box<[Source]>,
    /// Address in shared memory; zero for prefetches.
    pub shared: Address,
    /// Whether the shared address is in the executing CTA's window (`.shared::cta`).
    pub shared_is_own_cta: bool,
    /// Completion mechanism.
    pub completion: BulkCompletion,
    /// Offsets of the im2col modes.
    pub im2col: Box<[Source]>,
    /// `.multicast::cluster`: one bit per rank.
    pub multicast: Option<Source>,
    /// `.cta_group`: 1 or 2. With 2, the mbarrier may be in the pair's other CTA.
    pub cta_group: Option<u32>,
    /// `cp.reduce`: the operation.
    pub reduction: Option<AtomicOperation>,
}

/// A field of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum TensorMapField {
    GlobalAddress,
    Rank,
    BoxDimension,
    GlobalDimension,
    GlobalStride,
    ElementStride,
    ElementType,
    InterleaveLayout,
    SwizzleMode,
    FillMode,
    SwizzleAtomicity,
}

/// `tensormap.replace.tile`.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorMapReplace {
    /// Field to replace.
    pub field: TensorMapField,
    /// Dimension, for fields with several values.
    pub ordinal: u32,
    /// The map.
    pub map: Address,
    /// Space of [`TensorMapReplace::map`].
    pub space: Space,
    /// The new value, 32 or 64 bits.
    pub value: Source,
}
