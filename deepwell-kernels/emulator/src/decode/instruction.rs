//! Typed instructions. Registers are indices; labels are positions in
//! [`crate::decode::Program::steps`].
//!
//! The decoder checks forms and shapes against the ISA tables, so that an [`Instruction`] is always
//! legal in form. The engine does not repeat these checks.

use super::copy_instruction::{BulkCopy, StoreAsync, TensorCopy, TensorMapReplace};
use super::matrix_instruction::{LoadMatrix, StoreMatrix, WarpGroupMma, WarpMma};
use super::memory_instruction::{Atomic, Load, Store};
use super::scalar_instruction::{ReductionOperation, ScalarInstruction};
use super::synchronize_instruction::{CtaBarrier, Fence, Match, Mbarrier, Shuffle, Vote};
use super::tensor_instruction::Tcgen05;
use super::types::{Address, Barrier64, PredicateSource, Register, Scope, Source, Space, Type};

/// A decoded instruction with its guard and source location.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Guard predicate; `None` if all lanes take part.
    pub guard: Option<PredicateSource>,
    /// The instruction.
    pub instruction: Instruction,
    /// Line of the PTX text, from 1.
    pub ptx_line: u32,
    /// File (an index into [`crate::ptx::Module::files`]) and line of the source, from `.loc`.
    pub source: Option<(u32, u32)>,
}

/// All instructions that the engine runs.
#[derive(Clone, Debug, PartialEq)]
pub enum Instruction {
    /// Per-lane arithmetic, executed by [`crate::scalar::execute`].
    Scalar(ScalarInstruction),
    /// Reads a special register. The destination has the width of the register's declared type.
    Special {
        /// Destination register.
        destination: Register,
        /// Special register.
        register: SpecialRegister,
    },
    /// Branch. With `uniform`, the author asserts that all active lanes take the same path.
    Branch {
        /// Position in the program.
        target: u32,
        /// `.uni`.
        uniform: bool,
    },
    /// `brx.idx`: branch through a table; an index out of range is undefined behavior.
    BranchIndexed {
        /// Positions in the program.
        targets: Box<[u32]>,
        /// Index into the targets.
        index: Source,
        /// `.uni`.
        uniform: bool,
    },
    /// `exit`, or `ret` of the kernel.
    Exit,
    /// `trap` or `brkpt`: ends the launch with an error.
    Trap,
    /// Call of a runtime function. Functions of the module are inlined.
    ExternalCall(ExternalCall),
    /// `nanosleep`, and hints without effect (`pragma`, `prefetch`, `discard` of policies).
    Hint,

    /// `ld`, `ldu`.
    Load(Load),
    /// `st`.
    Store(Store),
    /// `atom` and `red`.
    Atomic(Atomic),
    /// `cvta`: converts between window and generic addresses.
    ConvertAddress {
        /// Destination register.
        destination: Register,
        /// The address.
        source: Source,
        /// The window.
        space: Space,
        /// Generic to window (`.to`); otherwise window to generic.
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
        /// Destination register.
        destination: Register,
        /// Shared window address, or a generic address if `space` is [`Space::Generic`].
        source: Source,
        /// Rank of the CTA in the cluster.
        rank: Source,
        /// [`Space::Generic`] or [`Space::SharedCluster`].
        space: Space,
    },
    /// `getctarank`: rank of the CTA whose shared memory holds an address.
    CtaRank {
        /// Destination register.
        destination: Register,
        /// The address.
        source: Source,
        /// [`Space::Generic`] or [`Space::SharedCluster`].
        space: Space,
    },
    /// `createpolicy`: the destination gets an opaque value that no instruction reads.
    CreatePolicy {
        /// Destination register.
        destination: Register,
    },
    /// `bar`, `barrier`.
    Barrier(CtaBarrier),
    /// `bar.warp.sync`.
    WarpBarrier {
        /// Participating lanes.
        mask: Source,
    },
    /// `barrier.cluster.arrive`.
    ClusterArrive {
        /// `.relaxed`: no ordering. Otherwise the arrival releases.
        relaxed: bool,
        /// Whether all lanes of the warp execute it together.
        aligned: bool,
    },
    /// `barrier.cluster.wait`.
    ClusterWait {
        /// `.acquire`, the default and only order.
        acquire: bool,
        /// Whether all lanes of the warp execute it together.
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
        /// Destination register.
        destination: Register,
    },
    /// `elect.sync`: elects the lowest lane of `mask`.
    Elect {
        /// Index of the elected lane.
        destination: Option<Register>,
        /// True in the elected lane.
        predicate: Option<u32>,
        /// Participating lanes.
        mask: Source,
    },
    /// `redux.sync`: reduces over `mask`; every lane gets the result.
    Redux {
        /// Destination register.
        destination: Register,
        /// One value per lane.
        source: Source,
        /// Participating lanes.
        mask: Source,
        /// Reduction operation.
        operation: ReductionOperation,
        /// Type of the values.
        value_type: Type,
        /// `.abs`, for floats.
        absolute: bool,
        /// `.NaN`: NaN propagates.
        propagate_nan: bool,
    },
    /// `setmaxnreg`.
    SetMaxRegisters {
        /// `.inc` waits for registers; `.dec` frees them.
        increase: bool,
        /// Registers per thread, 24 to 256 in steps of 8.
        count: u32,
    },
    /// `griddepcontrol.launch_dependents`.
    LaunchDependents,
    /// `griddepcontrol.wait`.
    DependencyWait,
    /// `clusterlaunchcontrol.try_cancel`.
    TryCancel {
        /// 16 bytes of shared memory for the response.
        response: Address,
        /// Space of both addresses: [`Space::Shared`] or [`Space::Generic`].
        space: Space,
        /// The mbarrier that gets 16 bytes of `complete_tx`.
        barrier: Address,
        /// `.multicast::cluster::all`: every CTA of the cluster gets the response.
        multicast: bool,
    },
    /// `clusterlaunchcontrol.query_cancel.is_canceled`.
    QueryCanceled {
        /// The predicate register.
        destination: u32,
        /// The 128 bits of the response, low half first.
        response: [Source; 2],
    },
    /// `clusterlaunchcontrol.query_cancel.get_first_ctaid`. Undefined if nothing was canceled.
    QueryFirstCta {
        /// x, y, z of the canceled cluster's first CTA, and one unused word.
        destinations: [Option<Register>; 4],
        /// The 128 bits of the response, low half first.
        response: [Source; 2],
    },

    /// `mbarrier.*`.
    Mbarrier(Mbarrier),

    /// `cp.async`: copies 4, 8 or 16 bytes per thread.
    CopyAsync {
        /// Address in shared memory.
        target: Address,
        /// Address in global memory.
        source: Address,
        /// Bytes written: 4, 8 or 16.
        bytes: u32,
        /// Bytes read; the remaining bytes are zero. `None` reads all bytes.
        source_bytes: Option<Source>,
        /// If true, nothing is read and zeros are written.
        ignore_source: Option<PredicateSource>,
    },
    /// `cp.async.commit_group`.
    CopyAsyncCommit,
    /// `cp.async.wait_group N`; `None` is `wait_all`.
    CopyAsyncWait {
        /// Groups that may stay pending.
        pending: Option<u32>,
    },
    /// `cp.async.mbarrier.arrive`.
    CopyAsyncArrive {
        /// The mbarrier.
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
        /// Groups that may stay pending.
        pending: u32,
        /// `.read`: waits only until the sources have been read.
        read: bool,
    },
    /// `tensormap.replace`.
    TensorMapReplace(TensorMapReplace),
    /// `tensormap.cp_fenceproxy`: copies 128 bytes and makes them visible to the tensormap proxy.
    TensorMapCopyFence {
        /// Address in global memory.
        target: Address,
        /// Address in shared memory.
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
        /// Destination register.
        destination: Register,
        /// One row of two 16-bit elements per lane.
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
        /// Groups that may stay pending.
        pending: u32,
    },
    /// `tcgen05.*`.
    Tcgen05(Tcgen05),
}

/// Special registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum SpecialRegister {
    /// `%tid` along axis 0 to 2. Axis 3 is 0, here and in the next registers.
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
    /// `%reserved_smem_offset_begin` and related registers: always 0.
    ReservedShared,
    /// `%envreg<n>`: always 0.
    Environment(u8),
    /// `%pm<n>`: always 0.
    PerformanceMonitor(u8),
    /// Not a register of the ISA: the shared window address of a byte of the CTA's own shared
    /// memory, including the CTA's rank in the cluster. `mov` of a shared variable's address reads
    /// it.
    SharedVariable(u32),
    /// Not a register of the ISA: the generic address of a byte of the kernel's parameters.
    ParameterVariable(u32),
    /// Not a register of the ISA: the generic address of a byte of the constants.
    ConstantVariable(u32),
}

/// Functions of the device runtime.
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
    /// Called function.
    pub function: ExternalFunction,
    /// Local-memory slot of each argument.
    pub arguments: Box<[LocalSlot]>,
    /// Local-memory slot of the result.
    pub result: Option<LocalSlot>,
}

/// A range of a thread's local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalSlot {
    /// First byte.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
}
