//! Typed instructions: what a line of PTX asks for, with registers as indexes and labels as
//! positions in [`crate::decode::Program::steps`].
//!
//! Nothing here is checked again by what runs it: a form that a family does not have, or a shape
//! that a table of the ISA does not list, never becomes an [`Instruction`].

use super::scalar_instruction::{ReductionOperation, ScalarInstruction};
use super::types::{
    Address, Barrier64, PredicateSource, Register, Scope, Semantics, Source, Space, Type,
};

/// One decoded instruction with its guard and where it came from.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Lanes that take part; `None` is all of them.
    pub guard: Option<PredicateSource>,
    /// What they do.
    pub instruction: Instruction,
    /// Line of the PTX text, from 1.
    pub ptx_line: u32,
    /// File (an index into [`crate::ptx::Module::files`]) and line of the source, from `.loc`.
    pub source: Option<(u32, u32)>,
}

/// Every family that the engine runs.
#[derive(Clone, Debug, PartialEq)]
pub enum Instruction {
    /// Arithmetic of single lanes, run by [`crate::scalar::execute`].
    Scalar(ScalarInstruction),
    /// Reads a special register. The destination has the width of the register's declared type.
    Special {
        /// Where to.
        destination: Register,
        /// Which.
        register: SpecialRegister,
    },
    /// Jump. `uniform` says that the author claims all active lanes go the same way.
    Branch {
        /// Position in the program.
        target: u32,
        /// `.uni`.
        uniform: bool,
    },
    /// `brx.idx`: jump through a table; an index outside of it is undefined behavior.
    BranchIndexed {
        /// Positions in the program.
        targets: Box<[u32]>,
        /// Which of them.
        index: Source,
        /// `.uni`.
        uniform: bool,
    },
    /// `exit`, or `ret` of the kernel.
    Exit,
    /// `trap` or `brkpt`: ends the launch with an error.
    Trap,
    /// Call of a function that the device's runtime gives. Other functions are inlined.
    ExternalCall(ExternalCall),
    /// `nanosleep`, and hints that change nothing (`pragma`, `prefetch`, `discard` of policies).
    Hint,

    /// `ld`, `ldu`.
    Load(Load),
    /// `st`.
    Store(Store),
    /// `atom` and `red`.
    Atomic(Atomic),
    /// `cvta`: between a window and generic addresses.
    ConvertAddress {
        /// Where to.
        destination: Register,
        /// The address.
        source: Source,
        /// The window.
        space: Space,
        /// Generic to window (`.to`), else window to generic.
        to_window: bool,
    },
    /// `isspacep`.
    IsSpace {
        /// The predicate register.
        destination: u32,
        /// Generic address.
        source: Source,
        /// The window.
        space: Space,
    },
    /// `mapa`: the same offset in shared memory of another block of the cluster.
    MapAddress {
        /// Where to.
        destination: Register,
        /// Shared window address, or generic when `space` is [`Space::Generic`].
        source: Source,
        /// Rank of the block in the cluster.
        rank: Source,
        /// [`Space::Generic`] or [`Space::SharedCluster`].
        space: Space,
    },
    /// `getctarank`: the block whose shared memory holds an address.
    BlockRank {
        /// Where to.
        destination: Register,
        /// The address.
        source: Source,
        /// [`Space::Generic`] or [`Space::SharedCluster`].
        space: Space,
    },
    /// `createpolicy`: the destination gets an opaque value that nothing reads.
    CreatePolicy {
        /// Where to.
        destination: Register,
    },
    /// `bar`, `barrier`.
    Barrier(BlockBarrier),
    /// `bar.warp.sync`.
    WarpBarrier {
        /// Which lanes.
        mask: Source,
    },
    /// `barrier.cluster.arrive`.
    ClusterArrive {
        /// `.relaxed`: orders nothing. Without it the arrival releases.
        relaxed: bool,
        /// All lanes of the warp come together.
        aligned: bool,
    },
    /// `barrier.cluster.wait`.
    ClusterWait {
        /// `.acquire` is the default; there is no other.
        acquire: bool,
        /// All lanes of the warp come together.
        aligned: bool,
    },
    /// `membar`, `fence`.
    Fence(Fence),
    /// `shfl.sync`.
    Shuffle(Shuffle),
    /// `vote.sync`.
    Vote(Vote),
    /// `match.sync`.
    Match(Match),
    /// `activemask`.
    ActiveMask {
        /// Where to.
        destination: Register,
    },
    /// `elect.sync`: the lowest lane of `mask`.
    Elect {
        /// Gets the lane.
        destination: Option<Register>,
        /// True in the elected lane.
        predicate: Option<u32>,
        /// Which lanes.
        mask: Source,
    },
    /// `redux.sync`: every lane gets the result over `mask`.
    Redux {
        /// Where to.
        destination: Register,
        /// One value a lane.
        source: Source,
        /// Which lanes.
        mask: Source,
        /// How to combine two values.
        operation: ReductionOperation,
        /// Of the values.
        value_type: Type,
        /// `.abs` (of floats).
        absolute: bool,
        /// `.NaN`: a NaN wins.
        propagate_nan: bool,
    },
    /// `setmaxnreg`.
    SetMaxRegisters {
        /// `.inc` waits for registers; `.dec` frees them.
        increase: bool,
        /// Registers a thread, 24 to 256 in steps of 8.
        count: u32,
    },
    /// `griddepcontrol.launch_dependents`.
    LaunchDependents,
    /// `griddepcontrol.wait`.
    DependencyWait,
    /// `clusterlaunchcontrol.try_cancel`.
    TryCancel {
        /// 16 bytes of shared memory that get the answer.
        response: Address,
        /// Space of both addresses: [`Space::Shared`] or [`Space::Generic`].
        space: Space,
        /// Gets 16 bytes of `complete_tx`.
        barrier: Address,
        /// `.multicast::cluster::all`: every block of the cluster gets the answer.
        multicast: bool,
    },
    /// `clusterlaunchcontrol.query_cancel.is_canceled`.
    QueryCanceled {
        /// The predicate register.
        destination: u32,
        /// The 128 bits of the answer, low half first.
        response: [Source; 2],
    },
    /// `clusterlaunchcontrol.query_cancel.get_first_ctaid`. Undefined when nothing was canceled.
    QueryFirstBlock {
        /// x, y, z of the canceled cluster's first block, and one unused word.
        destinations: [Option<Register>; 4],
        /// The 128 bits of the answer, low half first.
        response: [Source; 2],
    },

    /// `mbarrier.*`.
    Mbarrier(Mbarrier),

    /// `cp.async`: 4, 8 or 16 bytes of one thread.
    CopyAsync {
        /// In shared memory.
        target: Address,
        /// In global memory.
        source: Address,
        /// Bytes written: 4, 8 or 16.
        bytes: u32,
        /// Bytes read; the rest are zeros. `None` is all.
        source_bytes: Option<Source>,
        /// When true nothing is read and zeros are written.
        ignore_source: Option<PredicateSource>,
    },
    /// `cp.async.commit_group`.
    CopyAsyncCommit,
    /// `cp.async.wait_group N`; `None` is `wait_all`.
    CopyAsyncWait {
        /// Groups that may stay open.
        pending: Option<u32>,
    },
    /// `cp.async.mbarrier.arrive`.
    CopyAsyncArrive {
        /// The barrier.
        barrier: Barrier64,
        /// `.noinc`: the pending count is not incremented before the arrival.
        no_increment: bool,
    },
    /// `st.async`, `red.async`.
    StoreAsync(StoreAsync),
    /// `cp.async.bulk`, `cp.reduce.async.bulk` of contiguous bytes.
    BulkCopy(BulkCopy),
    /// `cp.async.bulk.tensor`, `cp.reduce.async.bulk.tensor`.
    TensorCopy(TensorCopy),
    /// `cp.async.bulk.commit_group`.
    BulkCommit,
    /// `cp.async.bulk.wait_group`.
    BulkWait {
        /// Groups that may stay open.
        pending: u32,
        /// `.read`: sources were read, writes may not be there yet.
        read: bool,
    },
    /// `tensormap.replace`.
    TensorMapReplace(TensorMapReplace),
    /// `tensormap.cp_fenceproxy`: copies 128 bytes and makes them visible to the tensor-map proxy.
    TensorMapCopyFence {
        /// In global memory.
        target: Address,
        /// In shared memory.
        source: Address,
        /// Scope of the release.
        scope: Scope,
    },

    /// `ldmatrix`.
    LoadMatrix(LoadMatrix),
    /// `stmatrix`.
    StoreMatrix(StoreMatrix),
    /// `movmatrix.sync.aligned.m8n8.trans.b16`.
    MoveMatrix {
        /// Where to.
        destination: Register,
        /// One row of two 16-bit elements a lane.
        source: Source,
    },
    /// `mma.sync`.
    WarpMma(WarpMma),
    /// `wgmma.mma_async`.
    WarpGroupMma(WarpGroupMma),
    /// `wgmma.fence`.
    WarpGroupFence,
    /// `wgmma.commit_group`.
    WarpGroupCommit,
    /// `wgmma.wait_group N`.
    WarpGroupWait {
        /// Groups that may stay open.
        pending: u32,
    },
    /// `tcgen05.*`.
    Tcgen05(Tcgen05),
}

/// Special registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum SpecialRegister {
    /// `%tid` along axis 0 to 2. Axis 3 of this and the next ones is 0.
    ThreadIndex(u8),
    /// `%ntid`.
    BlockSize(u8),
    /// `%ctaid`.
    BlockIndex(u8),
    /// `%nctaid`.
    GridSize(u8),
    /// `%clusterid`.
    ClusterIndex(u8),
    /// `%nclusterid`.
    ClusterCount(u8),
    /// `%cluster_ctaid`.
    BlockInCluster(u8),
    /// `%cluster_nctaid`.
    ClusterSize(u8),
    /// `%cluster_ctarank`.
    BlockRank,
    /// `%cluster_nctarank`.
    ClusterBlocks,
    /// `%is_explicit_cluster` (a predicate in the ISA; read as 0 or 1).
    IsExplicitCluster,
    /// `%laneid`.
    Lane,
    /// `%warpid`.
    Warp,
    /// `%nwarpid`.
    WarpCount,
    /// `%smid`.
    Multiprocessor,
    /// `%nsmid`.
    MultiprocessorCount,
    /// `%gridid`.
    GridId,
    /// `%lanemask_eq`, `_le`, `_lt`, `_ge`, `_gt`.
    LaneMaskEqual,
    LaneMaskLessEqual,
    LaneMaskLess,
    LaneMaskGreaterEqual,
    LaneMaskGreater,
    /// `%clock`, `%clock_hi`, `%clock64`.
    Clock,
    ClockHigh,
    Clock64,
    /// `%globaltimer`, `_lo`, `_hi`.
    GlobalTimer,
    GlobalTimerLow,
    GlobalTimerHigh,
    /// `%total_smem_size`: static and dynamic bytes of the block.
    TotalSharedBytes,
    /// `%aggr_smem_size`.
    AggregateSharedBytes,
    /// `%dynamic_smem_size`.
    DynamicSharedBytes,
    /// `%reserved_smem_offset_begin` and the like: always 0.
    ReservedShared,
    /// `%envreg<n>`: always 0.
    Environment(u8),
    /// `%pm<n>`: always 0.
    PerformanceMonitor(u8),
    /// No register of the ISA: the shared window address of the byte at an offset of the own
    /// block's shared memory, which holds the rank of the block in its cluster. What `mov` takes
    /// the address of a shared variable to be.
    SharedVariable(u32),
    /// The same for a parameter of the kernel: the generic address of a byte of them.
    ParameterVariable(u32),
    /// The same for constants.
    ConstantVariable(u32),
}

/// Functions that the device's runtime gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExternalFunction {
    /// `vprintf(format, arguments)`: both generic 64-bit addresses; returns a 32-bit count.
    Printf,
    /// `__assertfail(message, file, line, function, char_size)`.
    AssertFail,
    /// `malloc(bytes)`.
    Malloc,
    /// `free(pointer)`.
    Free,
}

/// A call of an [`ExternalFunction`].
#[derive(Clone, Debug, PartialEq)]
pub struct ExternalCall {
    /// Which.
    pub function: ExternalFunction,
    /// Where each argument lies in local memory: first byte and size.
    pub arguments: Box<[LocalSlot]>,
    /// Where the result goes in local memory.
    pub result: Option<LocalSlot>,
}

/// Bytes of a thread's local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalSlot {
    /// First byte.
    pub offset: u32,
    /// Bytes.
    pub bytes: u32,
}

/// `ld`. The element of 128 bits is given as two of 64.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Where from.
    pub space: Space,
    /// Order.
    pub semantics: Semantics,
    /// Of [`Load::semantics`].
    pub scope: Scope,
    /// `.nc`: the bytes may not be written while the kernel runs.
    pub read_only: bool,
    /// Of one element. Signed elements are sign-extended to the register, others zero-extended.
    pub element: Type,
    /// One for each element; `None` is `_`.
    pub destinations: Box<[Option<Register>]>,
    /// First byte.
    pub address: Address,
}

/// `st`. The element of 128 bits is given as two of 64.
#[derive(Clone, Debug, PartialEq)]
pub struct Store {
    /// Where to.
    pub space: Space,
    /// Order.
    pub semantics: Semantics,
    /// Of [`Store::semantics`].
    pub scope: Scope,
    /// Of one element; registers are cut to it.
    pub element: Type,
    /// One for each element.
    pub sources: Box<[Source]>,
    /// First byte.
    pub address: Address,
}

/// What `atom` and `red` do with the old value and the operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum AtomicOperation {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    /// `old >= operand ? 0 : old + 1`.
    Increment,
    /// `old == 0 || old > operand ? operand : old - 1`.
    Decrement,
    Exchange,
    CompareAndSwap,
}

/// `atom`, `red`.
#[derive(Clone, Debug, PartialEq)]
pub struct Atomic {
    /// Where.
    pub space: Space,
    /// Order.
    pub semantics: Semantics,
    /// Of [`Atomic::semantics`].
    pub scope: Scope,
    /// What.
    pub operation: AtomicOperation,
    /// Of one element. For [`Type::B128`] every value is two sources, low half first.
    pub element: Type,
    /// Old values, one for each element; empty for `red` or for `_`.
    pub destinations: Box<[Option<Register>]>,
    /// First byte.
    pub address: Address,
    /// Operands, one for each element.
    pub values: Box<[Source]>,
    /// What [`AtomicOperation::CompareAndSwap`] compares with; else empty.
    pub compare: Box<[Source]>,
}

/// `bar` and `barrier` of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockBarrier {
    /// Name, 0 to 15.
    pub barrier: Source,
    /// Threads that take part, a multiple of 32; `None` is all of the block.
    pub threads: Option<Source>,
    /// What is done.
    pub action: BarrierAction,
    /// All lanes of a warp run it together (`bar` always).
    pub aligned: bool,
}

/// What a barrier does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarrierAction {
    /// Arrive and wait.
    Sync,
    /// Arrive only.
    Arrive,
    /// Arrive, wait and count the lanes whose predicate is true.
    CountPredicates {
        /// Where to.
        destination: Register,
        /// Of each lane.
        predicate: PredicateSource,
    },
    /// Arrive, wait and combine predicates.
    CombinePredicates {
        /// All (`.and`), else any (`.or`).
        all: bool,
        /// The predicate register.
        destination: u32,
        /// Of each lane.
        predicate: PredicateSource,
    },
}

/// What a fence orders.
#[derive(Clone, Debug, PartialEq)]
pub enum Fence {
    /// `fence.{sc,acq_rel,acquire,release}` and `membar`.
    Thread {
        /// How strong.
        semantics: Semantics,
        /// Among whom.
        scope: Scope,
    },
    /// `fence.{acquire,release}.sync_restrict::shared::*`: only for mbarriers in shared memory.
    SyncRestrict {
        /// [`Semantics::Acquire`] (of remote `shared::cluster`) or [`Semantics::Release`].
        semantics: Semantics,
        /// Among whom.
        scope: Scope,
        /// `fence.proxy.async::generic.*`: between the async and the generic proxy as well.
        async_generic: bool,
    },
    /// `fence.mbarrier_init.release.cluster`.
    MbarrierInit,
    /// `fence.proxy.alias`.
    ProxyAlias,
    /// `fence.proxy.async`: both directions between generic and async proxy.
    ProxyAsync {
        /// Only for this space; `None` is all.
        space: Option<Space>,
    },
    /// `fence.proxy.tensormap::generic.release`.
    TensorMapRelease {
        /// Among whom.
        scope: Scope,
    },
    /// `fence.proxy.tensormap::generic.acquire [address], 128`.
    TensorMapAcquire {
        /// Among whom.
        scope: Scope,
        /// Generic address of the map.
        address: Address,
        /// Bytes; 128.
        bytes: Source,
    },
}

/// How lanes are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

/// `shfl.sync`.
#[derive(Clone, Debug, PartialEq)]
pub struct Shuffle {
    /// How.
    pub mode: ShuffleMode,
    /// Where to; `None` is `_`.
    pub destination: Option<Register>,
    /// True where the source lane was in range.
    pub in_range: Option<u32>,
    /// What is sent.
    pub source: Source,
    /// Lane or distance.
    pub lane: Source,
    /// Clamp in bits 0 to 4, segment mask in bits 8 to 12.
    pub control: Source,
    /// Which lanes.
    pub mask: Source,
}

/// `vote.sync`.
#[derive(Clone, Debug, PartialEq)]
pub struct Vote {
    /// What the lanes ask.
    pub mode: VoteMode,
    /// Of each lane.
    pub predicate: PredicateSource,
    /// Which lanes.
    pub mask: Source,
}

/// What lanes ask by `vote`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VoteMode {
    /// `.all`, into a predicate register.
    All(u32),
    /// `.any`, into a predicate register.
    Any(u32),
    /// `.uni`: all equal, into a predicate register.
    Uniform(u32),
    /// `.ballot`: one bit a lane.
    Ballot(Register),
}

/// `match.sync`.
#[derive(Clone, Debug, PartialEq)]
pub struct Match {
    /// `.all`: the mask if all are equal, else 0; otherwise `.any`: lanes with the same value.
    pub all: bool,
    /// Where to; `None` is `_`.
    pub destination: Option<Register>,
    /// `.all`: whether all are equal.
    pub predicate: Option<u32>,
    /// 32 or 64 bits.
    pub source: Source,
    /// Which lanes.
    pub mask: Source,
}

/// `mbarrier.*`.
#[derive(Clone, Debug, PartialEq)]
pub enum Mbarrier {
    /// `init`.
    Init {
        /// The barrier.
        barrier: Barrier64,
        /// Expected arrivals.
        count: Source,
    },
    /// `inval`.
    Invalidate {
        /// The barrier.
        barrier: Barrier64,
    },
    /// `expect_tx`.
    ExpectTransaction {
        /// The barrier.
        barrier: Barrier64,
        /// Bytes.
        bytes: Source,
    },
    /// `complete_tx`.
    CompleteTransaction {
        /// The barrier.
        barrier: Barrier64,
        /// Bytes.
        bytes: Source,
    },
    /// `arrive`, `arrive_drop`, with or without `.expect_tx`, `.noComplete`.
    Arrive {
        /// The barrier.
        barrier: Barrier64,
        /// Gets the state before the arrival; `None` is `_`, or a remote barrier.
        state: Option<Register>,
        /// Arrivals; 1 when `None`.
        count: Option<Source>,
        /// Bytes to expect first.
        expect_bytes: Option<Source>,
        /// `arrive_drop`.
        drop: bool,
        /// `.noComplete`.
        no_complete: bool,
        /// [`Semantics::Release`] or [`Semantics::Relaxed`].
        semantics: Semantics,
        /// Of the release.
        scope: Scope,
    },
    /// `test_wait`, `try_wait`.
    Wait {
        /// The barrier.
        barrier: Barrier64,
        /// The predicate register that gets whether the phase completed.
        destination: u32,
        /// Which phase.
        phase: MbarrierPhase,
        /// `try_wait`: may wait for a while.
        may_block: bool,
        /// [`Semantics::Acquire`] or [`Semantics::Relaxed`].
        semantics: Semantics,
        /// Of the acquire.
        scope: Scope,
    },
    /// `pending_count`.
    PendingCount {
        /// Where to.
        destination: Register,
        /// A state that an arrival gave.
        state: Source,
    },
}

/// Which phase is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MbarrierPhase {
    /// By the 64-bit state of an arrival.
    State(Source),
    /// By parity, 0 or 1.
    Parity(Source),
}

/// `st.async`, `red.async`.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreAsync {
    /// In shared memory of the cluster.
    pub target: Address,
    /// Of one element.
    pub element: Type,
    /// One for each element.
    pub sources: Box<[Source]>,
    /// In the same block as the target; gets the bytes.
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
    /// Shared memory to that of another block of the cluster.
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
    /// The target is given in the window of the own block (`.shared::cta`).
    pub target_is_own_block: bool,
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
    /// The shared address is given in the window of the own block (`.shared::cta`).
    pub shared_is_own_block: bool,
    /// How it ends.
    pub completion: BulkCompletion,
    /// Offsets of the im2col modes.
    pub im2col: Box<[Source]>,
    /// `.multicast::cluster`: a bit for each rank.
    pub multicast: Option<Source>,
    /// `.cta_group`: 1 or 2. With 2 the barrier may be that of the pair's other block.
    pub block_group: Option<u32>,
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

/// Shape of one matrix of `ldmatrix` and `stmatrix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum MatrixShape {
    M8n8,
    M8n16,
    M16n8,
    M16n16,
}

/// Elements of `ldmatrix` and `stmatrix`, as in memory and as in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixElement {
    /// 16 bits.
    B16,
    /// 8 bits.
    B8,
    /// 8 bits in registers, 16 of 6 bits and 4 bytes of padding in memory (`.b6x16_p32`).
    B8FromB6,
    /// 8 bits in registers, 16 of 4 bits and 8 bytes of padding in memory (`.b4x16_p64`).
    B8FromB4,
}

/// `ldmatrix`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadMatrix {
    /// Of one matrix.
    pub shape: MatrixShape,
    /// Matrices: 1, 2 or 4.
    pub count: u32,
    /// `.trans`.
    pub transpose: bool,
    /// Elements.
    pub element: MatrixElement,
    /// Registers of 32 bits.
    pub destinations: Box<[Option<Register>]>,
    /// Of one row, by lane.
    pub address: Address,
    /// [`Space::Generic`], [`Space::Shared`].
    pub space: Space,
}

/// `stmatrix`.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreMatrix {
    /// Of one matrix.
    pub shape: MatrixShape,
    /// Matrices: 1, 2 or 4.
    pub count: u32,
    /// `.trans`.
    pub transpose: bool,
    /// Elements.
    pub element: MatrixElement,
    /// Registers of 32 bits.
    pub sources: Box<[Source]>,
    /// Of one row, by lane.
    pub address: Address,
    /// [`Space::Generic`], [`Space::Shared`].
    pub space: Space,
}

/// M, N and K of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub struct MmaShape {
    pub m: u32,
    pub n: u32,
    pub k: u32,
}

/// `.kind::` of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum MmaKind {
    F16,
    Tf32,
    F8f6f4,
    I8,
    Mxf8f6f4,
    Mxf4,
    Mxf4nvf4,
}

/// Scales of one side of a `mma.sync` with block scales.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpMmaScale {
    /// 32 bits that hold the scales of a lane.
    pub data: Source,
    /// Which byte (or half) of them.
    pub byte_id: Source,
    /// Which threads of four (two) give them.
    pub thread_id: Source,
}

/// `mma.sync`.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpMma {
    /// Shape.
    pub shape: MmaShape,
    /// `.row`/`.col` of A and B: true where row. Only row by column for most.
    pub a_is_row: bool,
    /// See [`WarpMma::a_is_row`].
    pub b_is_row: bool,
    /// Type of D.
    pub d_type: Type,
    /// Element of A.
    pub a_type: Type,
    /// Element of B.
    pub b_type: Type,
    /// Type of C.
    pub c_type: Type,
    /// `.satfinite`.
    pub saturate: bool,
    /// `.kind::`.
    pub kind: Option<MmaKind>,
    /// Elements along K that share a scale, the type of scales, and scales of A and B.
    pub scales: Option<Box<WarpMmaScales>>,
    /// Registers of D.
    pub d: Box<[Option<Register>]>,
    /// Registers of A.
    pub a: Box<[Source]>,
    /// Registers of B.
    pub b: Box<[Source]>,
    /// Registers of C.
    pub c: Box<[Source]>,
}

/// Block scales of `mma.sync`.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpMmaScales {
    /// Scales along K: 1, 2 or 4 (`.scale_vec::nX`).
    pub vector: u32,
    /// [`Type::Ue8m0`] or [`Type::Ue4m3`].
    pub scale_type: Type,
    /// Of A.
    pub a: WarpMmaScale,
    /// Of B.
    pub b: WarpMmaScale,
}

/// A of `wgmma`.
#[derive(Clone, Debug, PartialEq)]
pub enum WarpGroupOperand {
    /// Matrix descriptor, 64 bits.
    Descriptor(Source),
    /// Fragments in registers, 32 bits each.
    Registers(Box<[Source]>),
}

/// `wgmma.mma_async`.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpGroupMma {
    /// m64nNkK.
    pub shape: MmaShape,
    /// Type of D.
    pub d_type: Type,
    /// Element of A.
    pub a_type: Type,
    /// Element of B.
    pub b_type: Type,
    /// `.satfinite` (integers).
    pub saturate: bool,
    /// Registers of D, read and written.
    pub d: Box<[Register]>,
    /// A.
    pub a: WarpGroupOperand,
    /// B's descriptor.
    pub b: Source,
    /// False: D is not added.
    pub scale_d: PredicateSource,
    /// A is negated.
    pub negate_a: bool,
    /// B is negated.
    pub negate_b: bool,
    /// A is M-major.
    pub transpose_a: bool,
    /// B is N-major.
    pub transpose_b: bool,
}

/// `tcgen05.*`. `group` is 1 or 2 blocks (`.cta_group`).
#[derive(Clone, Debug, PartialEq)]
pub enum Tcgen05 {
    /// `alloc`: writes the address of the columns to shared memory.
    Allocate {
        /// Blocks.
        group: u32,
        /// In shared memory, 4 bytes.
        target: Address,
        /// [`Space::Shared`] or [`Space::Generic`].
        space: Space,
        /// A power of two, 32 to 512.
        columns: Source,
    },
    /// `dealloc`.
    Deallocate {
        /// Blocks.
        group: u32,
        /// Tensor memory address.
        address: Source,
        /// A power of two, 32 to 512.
        columns: Source,
    },
    /// `relinquish_alloc_permit`.
    Relinquish {
        /// Blocks.
        group: u32,
    },
    /// `mma`.
    Mma(Box<Tcgen05Mma>),
    /// `cp`.
    Copy {
        /// Blocks.
        group: u32,
        /// Shape and multicast.
        shape: Tcgen05CopyShape,
        /// Decompression to 8 bits.
        source_format: Tcgen05CopyFormat,
        /// Tensor memory address.
        target: Address,
        /// Matrix descriptor.
        descriptor: Source,
    },
    /// `shift.down`.
    Shift {
        /// Blocks.
        group: u32,
        /// Tensor memory address.
        address: Address,
    },
    /// `commit`.
    Commit {
        /// Blocks.
        group: u32,
        /// The barrier that gets one arrival.
        barrier: Address,
        /// [`Space::SharedCluster`] or [`Space::Generic`].
        space: Space,
        /// `.multicast::cluster`: a bit for each rank.
        multicast: Option<Source>,
    },
    /// `ld`.
    Load {
        /// Which lanes and columns.
        shape: Tcgen05Shape,
        /// `.x1` to `.x128`.
        repeat: u32,
        /// `.pack::16b`.
        pack: bool,
        /// Offset of the second half of `.16x32bx2`, in columns.
        half_offset: u32,
        /// Registers of 32 bits.
        destinations: Box<[Option<Register>]>,
        /// Tensor memory address.
        address: Address,
    },
    /// `st`.
    Store {
        /// Which lanes and columns.
        shape: Tcgen05Shape,
        /// `.x1` to `.x128`.
        repeat: u32,
        /// `.unpack::16b`.
        unpack: bool,
        /// Offset of the second half of `.16x32bx2`, in columns.
        half_offset: u32,
        /// Registers of 32 bits.
        sources: Box<[Source]>,
        /// Tensor memory address.
        address: Address,
    },
    /// `wait::ld`.
    WaitLoad,
    /// `wait::st`.
    WaitStore,
    /// `fence::before_thread_sync`.
    FenceBefore,
    /// `fence::after_thread_sync`.
    FenceAfter,
}

/// A of `tcgen05.mma`.
#[derive(Clone, Debug, PartialEq)]
pub enum Tcgen05Operand {
    /// Matrix descriptor, 64 bits.
    Descriptor(Source),
    /// Tensor memory address.
    Tensor(Address),
}

/// `tcgen05.mma`.
#[derive(Clone, Debug, PartialEq)]
pub struct Tcgen05Mma {
    /// Blocks.
    pub group: u32,
    /// Kind.
    pub kind: MmaKind,
    /// Tensor memory address of D.
    pub d: Address,
    /// A.
    pub a: Tcgen05Operand,
    /// B's descriptor.
    pub b: Source,
    /// Instruction descriptor, 32 bits.
    pub instruction_descriptor: Source,
    /// Lanes of D that are not written: 4 words, or 8 with a group of 2; empty is none.
    pub disable_output_lanes: Box<[Source]>,
    /// False: D is not added.
    pub enable_input_d: PredicateSource,
    /// D is multiplied by 2 to the minus this, 0 to 15.
    pub scale_input_d: u32,
    /// `.ashift`.
    pub shift_a: bool,
    /// `.block_scale`.
    pub scales: Option<Tcgen05Scales>,
}

/// Block scales of `tcgen05.mma`.
#[derive(Clone, Debug, PartialEq)]
pub struct Tcgen05Scales {
    /// Scales along K of one instruction: 1, 2 or 4 (`.scale_vec::nX`, from `.block16`/`.block32`).
    pub vector: u32,
    /// Elements along K that share a scale: 16 or 32.
    pub block: u32,
    /// Tensor memory address of A's scales.
    pub a: Address,
    /// Tensor memory address of B's scales.
    pub b: Address,
}

/// `.shape{.multicast}` of `tcgen05.cp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tcgen05CopyShape {
    /// `.128x256b`.
    Rows128Bits256,
    /// `.4x256b`.
    Rows4Bits256,
    /// `.128x128b`.
    Rows128Bits128,
    /// `.64x128b.warpx2::02_13`.
    Rows64Bits128Warps02And13,
    /// `.64x128b.warpx2::01_23`.
    Rows64Bits128Warps01And23,
    /// `.32x128b.warpx4`.
    Rows32Bits128AllWarps,
}

/// What `tcgen05.cp` reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tcgen05CopyFormat {
    /// As it is.
    Same,
    /// `.b8x16.b6x16_p32`.
    B6,
    /// `.b8x16.b4x16_p64`.
    B4,
}

/// `.shape` of `tcgen05.ld` and `tcgen05.st`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Tcgen05Shape {
    S32x32b,
    S16x64b,
    S16x128b,
    S16x256b,
    S16x32bx2,
}

impl Tcgen05Shape {
    /// Registers of 32 bits that one lane holds at `.x1`.
    pub fn registers(self) -> u32 {
        match self {
            Tcgen05Shape::S32x32b | Tcgen05Shape::S16x64b | Tcgen05Shape::S16x32bx2 => 1,
            Tcgen05Shape::S16x128b => 2,
            Tcgen05Shape::S16x256b => 4,
        }
    }
}
