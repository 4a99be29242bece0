//! Barriers, fences, and what a warp agrees on.

use super::types::{
    Address, Barrier64, PredicateSource, Register, Scope, Semantics, Source, Space,
};

/// `bar` and `barrier` of a CTA.
#[derive(Clone, Debug, PartialEq)]
pub struct CtaBarrier {
    /// Name, 0 to 15.
    pub barrier: Source,
    /// Threads that take part, a multiple of 32; `None` is all of the CTA.
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
