//! Asynchronous stores, bulk copies and tensor maps.

use super::memory_instruction::AtomicOperation;
use super::types::{Address, Source, Space, Type};

/// `st.async`, `red.async`.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreAsync {
    /// In shared memory of the cluster.
    pub target: Address,
    /// Of one element.
    pub element: Type,
    /// One for each element.
    pub sources: Box<[Source]>,
    /// In the same CTA as the target; gets the bytes.
    pub barrier: Address,
    /// `red.async`: how to combine.
    pub reduction: Option<AtomicOperation>,
}

/// Where a bulk copy begins and ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BulkDirection {
    /// Global to shared memory of the cluster.
    GlobalToShared,
    /// Shared to global memory.
    SharedToGlobal,
    /// Shared memory to that of another CTA of the cluster.
    SharedToShared,
    /// Global memory into the L2 cache: nothing that can be seen.
    Prefetch,
}

/// How a bulk operation ends.
#[derive(Clone, Debug, PartialEq)]
pub enum BulkCompletion {
    /// `.mbarrier::complete_tx::bytes`: bytes are counted on the barrier.
    Mbarrier(Address),
    /// `.bulk_group`.
    Group,
    /// Prefetches do not say.
    None,
}

/// `cp.async.bulk`, `cp.reduce.async.bulk`.
#[derive(Clone, Debug, PartialEq)]
pub struct BulkCopy {
    /// From where to where.
    pub direction: BulkDirection,
    /// First byte written. For [`BulkDirection::Prefetch`] the same as the source.
    pub target: Address,
    /// The target is given in the window of the own CTA (`.shared::cta`).
    pub target_is_own_cta: bool,
    /// First byte read.
    pub source: Address,
    /// A multiple of 16.
    pub bytes: Source,
    /// How it ends.
    pub completion: BulkCompletion,
    /// `.multicast::cluster`: a bit for each rank.
    pub multicast: Option<Source>,
    /// `.cp_mask`: a bit for each byte of 16.
    pub byte_mask: Option<Source>,
    /// `cp.reduce`: how to combine and elements of which type.
    pub reduction: Option<(AtomicOperation, Type)>,
}

/// How coordinates find a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum TensorMode {
    Tile,
    /// Four rows of a 2-D tensor; five coordinates.
    Gather4,
    /// Four rows of a 2-D tensor; five coordinates.
    Scatter4,
    Im2col,
    Im2colW,
    Im2colW128,
}

/// `cp.async.bulk.tensor`, `cp.reduce.async.bulk.tensor`.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorCopy {
    /// From where to where.
    pub direction: BulkDirection,
    /// Dimensions, 1 to 5.
    pub rank: u32,
    /// How coordinates find a box.
    pub mode: TensorMode,
    /// Generic address of the 128-byte map.
    pub map: Address,
    /// Innermost first.
    pub coordinates: Box<[Source]>,
    /// In shared memory; a zero for prefetches.
    pub shared: Address,
    /// The shared address is given in the window of the own CTA (`.shared::cta`).
    pub shared_is_own_cta: bool,
    /// How it ends.
    pub completion: BulkCompletion,
    /// Offsets of the im2col modes.
    pub im2col: Box<[Source]>,
    /// `.multicast::cluster`: a bit for each rank.
    pub multicast: Option<Source>,
    /// `.cta_group`: 1 or 2. With 2 the barrier may be that of the pair's other CTA.
    pub cta_group: Option<u32>,
    /// `cp.reduce`: how to combine.
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
    /// Which field.
    pub field: TensorMapField,
    /// Which dimension, for the fields that have several.
    pub ordinal: u32,
    /// The map.
    pub map: Address,
    /// Space of [`TensorMapReplace::map`].
    pub space: Space,
    /// The new value, 32 or 64 bits.
    pub value: Source,
}
