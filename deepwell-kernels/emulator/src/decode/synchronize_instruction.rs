//! Barriers, fences and warp-level exchanges.

use super::types::{
    Address, Barrier64, PredicateSource, Register, Scope, Semantics, Source, Space,
};

/// `bar` or `barrier` of a CTA.
#[derive(Clone, Debug, PartialEq)]
pub struct CtaBarrier {
    /// Barrier number, 0 to 15.
    pub barrier: Source,
    /// Number of participating threads, a multiple of 32; `None` is the whole CTA.
    pub threads: Option<Source>,
    /// Action of the instruction.
    pub action: BarrierAction,
    /// Whether all lanes of a warp execute it together (`bar` always).
    pub aligned: bool,
}

/// Actions of a barrier instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarrierAction {
    /// Arrive and wait.
    Sync,
    /// Arrive only.
    Arrive,
    /// Arrive, wait, and count the threads whose predicate is true.
    CountPredicates {
        /// Destination register.
        destination: Register,
        /// Predicate of each lane.
        predicate: PredicateSource,
    },
    /// Arrive, wait, and combine predicates.
    CombinePredicates {
        /// All (`.and`); otherwise any (`.or`).
        all: bool,
        /// The predicate register.
        destination: u32,
        /// Predicate of each lane.
        predicate: PredicateSource,
    },
}

/// Fences.
#[derive(Clone, Debug, PartialEq)]
pub enum Fence {
    /// `fence.{sc,acq_rel,acquire,release}` and `membar`.
    Thread {
        /// Memory order.
        semantics: Semantics,
        /// Scope.
        scope: Scope,
    },
    /// `fence.{acquire,release}.sync_restrict::shared::*`: only for mbarriers in shared memory.
    SyncRestrict {
        /// [`Semantics::Acquire`] (of remote `shared::cluster`) or [`Semantics::Release`].
        semantics: Semantics,
        /// Scope.
        scope: Scope,
        /// `fence.proxy.async::generic.*`: also orders the async and the generic proxy.
        async_generic: bool,
    },
    /// `fence.mbarrier_init.release.cluster`.
    MbarrierInit,
    /// `fence.proxy.alias`.
    ProxyAlias,
    /// `fence.proxy.async`: orders the generic and the async proxy in both directions.
    ProxyAsync {
        /// Affected space; `None` is all spaces.
        space: Option<Space>,
    },
    /// `fence.proxy.tensormap::generic.release`.
    TensorMapRelease {
        /// Scope.
        scope: Scope,
    },
    /// `fence.proxy.tensormap::generic.acquire [address], 128`.
    TensorMapAcquire {
        /// Scope.
        scope: Scope,
        /// Generic address of the map.
        address: Address,
        /// Number of bytes: 128.
        bytes: Source,
    },
}

/// Selection of the source lane.
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
    /// Selection of the source lane.
    pub mode: ShuffleMode,
    /// Destination register; `None` is `_`.
    pub destination: Option<Register>,
    /// Predicate: whether the source lane was in range.
    pub in_range: Option<u32>,
    /// Value that each lane supplies.
    pub source: Source,
    /// Lane or distance.
    pub lane: Source,
    /// Clamp in bits 0 to 4, segment mask in bits 8 to 12.
    pub control: Source,
    /// Participating lanes.
    pub mask: Source,
}

/// `vote.sync`.
#[derive(Clone, Debug, PartialEq)]
pub struct Vote {
    /// Vote mode.
    pub mode: VoteMode,
    /// Predicate of each lane.
    pub predicate: PredicateSource,
    /// Participating lanes.
    pub mask: Source,
}

/// Modes of `vote`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VoteMode {
    /// `.all`, into a predicate register.
    All(u32),
    /// `.any`, into a predicate register.
    Any(u32),
    /// `.uni`: all equal, into a predicate register.
    Uniform(u32),
    /// `.ballot`: one bit per lane.
    Ballot(Register),
}

/// `match.sync`.
#[derive(Clone, Debug, PartialEq)]
pub struct Match {
    /// `.all`: the mask if all lanes agree, otherwise 0. Without it, `.any`: lanes with the same
    /// value.
    pub all: bool,
    /// Destination register; `None` is `_`.
    pub destination: Option<Register>,
    /// `.all`: whether all lanes agree.
    pub predicate: Option<u32>,
    /// 32 or 64 bits.
    pub source: Source,
    /// Participating lanes.
    pub mask: Source,
}

/// `mbarrier.*`.
#[derive(Clone, Debug, PartialEq)]
pub enum Mbarrier {
    /// `init`.
    Init {
        /// The mbarrier.
        barrier: Barrier64,
        /// Expected arrivals.
        count: Source,
    },
    /// `inval`.
    Invalidate {
        /// The mbarrier.
        barrier: Barrier64,
    },
    /// `expect_tx`.
    ExpectTransaction {
        /// The mbarrier.
        barrier: Barrier64,
        /// Number of bytes.
        bytes: Source,
    },
    /// `complete_tx`.
    CompleteTransaction {
        /// The mbarrier.
        barrier: Barrier64,
        /// Number of bytes.
        bytes: Source,
    },
    /// `arrive`, `arrive_drop`, with or without `.expect_tx`, `.noComplete`.
    Arrive {
        /// The mbarrier.
        barrier: Barrier64,
        /// Register for the state before the arrival; `None` is `_`, or a remote mbarrier.
        state: Option<Register>,
        /// Number of arrivals; `None` is 1.
        count: Option<Source>,
        /// Bytes to expect before arriving.
        expect_bytes: Option<Source>,
        /// `arrive_drop`.
        drop: bool,
        /// `.noComplete`.
        no_complete: bool,
        /// [`Semantics::Release`] or [`Semantics::Relaxed`].
        semantics: Semantics,
        /// Scope of the release.
        scope: Scope,
    },
    /// `test_wait`, `try_wait`.
    Wait {
        /// The mbarrier.
        barrier: Barrier64,
        /// Predicate register: whether the phase has completed.
        destination: u32,
        /// Tested phase.
        phase: MbarrierPhase,
        /// `try_wait`: may block for some time.
        may_block: bool,
        /// [`Semantics::Acquire`] or [`Semantics::Relaxed`].
        semantics: Semantics,
        /// Scope of the acquire.
        scope: Scope,
    },
    /// `pending_count`.
    PendingCount {
        /// Destination register.
        destination: Register,
        /// State returned by an arrival.
        state: Source,
    },
}

/// The phase of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MbarrierPhase {
    /// The phase of an arrival's 64-bit state.
    State(Source),
    /// The phase of a parity, 0 or 1.
    Parity(Source),
}
