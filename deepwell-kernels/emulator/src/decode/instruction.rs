//! Typed instructions: what a line of PTX asks for, with registers as indexes and labels as
//! positions in [`crate::decode::Program::steps`].
//!
//! Nothing here is checked again by what runs it: a form that a family does not have, or a shape
//! that a table of the ISA does not list, never becomes an [`Instruction`].

use super::copy_instruction::{BulkCopy, StoreAsync, TensorCopy, TensorMapReplace};
use super::matrix_instruction::{LoadMatrix, StoreMatrix, WarpGroupMma, WarpMma};
use super::memory_instruction::{Atomic, Load, Store};
use super::scalar_instruction::{ReductionOperation, ScalarInstruction};
use super::synchronize_instruction::{CtaBarrier, Fence, Match, Mbarrier, Shuffle, Vote};
use super::tensor_instruction::Tcgen05;
use super::types::{Address, Barrier64, PredicateSource, Register, Scope, Source, Space, Type};

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
    /// `mapa`: the same offset in shared memory of another CTA of the cluster.
    MapAddress {
        /// Where to.
        destination: Register,
        /// Shared window address, or generic when `space` is [`Space::Generic`].
        source: Source,
        /// Rank of the CTA in the cluster.
        rank: Source,
        /// [`Space::Generic`] or [`Space::SharedCluster`].
        space: Space,
    },
    /// `getctarank`: the CTA whose shared memory holds an address.
    CtaRank {
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
    Barrier(CtaBarrier),
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
        /// `.multicast::cluster::all`: every CTA of the cluster gets the answer.
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
    QueryFirstCta {
        /// x, y, z of the canceled cluster's first CTA, and one unused word.
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
    CtaSize(u8),
    /// `%ctaid`.
    CtaIndex(u8),
    /// `%nctaid`.
    GridSize(u8),
    /// `%clusterid`.
    ClusterIndex(u8),
    /// `%nclusterid`.
    ClusterCount(u8),
    /// `%cluster_ctaid`.
    CtaInCluster(u8),
    /// `%cluster_nctaid`.
    ClusterSize(u8),
    /// `%cluster_ctarank`.
    CtaRank,
    /// `%cluster_nctarank`.
    ClusterCtas,
    /// `%is_explicit_cluster` (a predicate in the ISA; read as 0 or 1).
    IsExplicitCluster,
    /// `%laneid`.
    Lane,
    /// `%warpid`.
    Warp,
    /// `%nwarpid`.
    WarpCount,
    /// `%smid`.
    SmId,
    /// `%nsmid`.
    SmCount,
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
    /// `%total_smem_size`: static and dynamic bytes of the CTA.
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
    /// CTA's shared memory, which holds the rank of the CTA in its cluster. What `mov` takes
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
