//! Synchronizing instructions, and their replacements when synchronization is deleted.

use super::Replacement;
use crate::decode::{
    Atomic, BarrierAction, Fence, Instruction, Load, Mbarrier, PredicateSource, ScalarInstruction,
    Semantics, Store, Tcgen05,
};

/// Returns the ways to delete (a part of) an instruction, each with its name; empty for
/// instructions that do not synchronize.
pub(super) fn replacements(instruction: &Instruction) -> Vec<(&'static str, Replacement)> {
    use Instruction as I;
    let whole = |what| vec![(what, Replacement::Nothing)];
    match instruction {
        I::Barrier(barrier) => match barrier.action {
            BarrierAction::Sync => whole("bar.sync"),
            BarrierAction::Arrive => whole("bar.arrive"),
            // Each thread gets its own predicate.
            BarrierAction::CombinePredicates { destination, predicate, .. } => {
                vec![("bar.red", predicate_is(destination, predicate))]
            }
            // The count over the other threads has no replacement.
            BarrierAction::CountPredicates { .. } => Vec::new(),
        },
        I::WarpBarrier { .. } => whole("bar.warp.sync"),
        I::ClusterArrive { .. } => whole("barrier.cluster.arrive"),
        I::ClusterWait { .. } => whole("barrier.cluster.wait"),
        I::Fence(fence) => whole(fence_name(fence)),
        I::DependencyWait => whole("griddepcontrol.wait"),
        I::Mbarrier(mbarrier) => of_mbarrier(mbarrier),
        I::CopyAsyncCommit => whole("cp.async.commit_group"),
        I::CopyAsyncWait { .. } => whole("cp.async.wait_group"),
        I::CopyAsyncArrive { .. } => whole("cp.async.mbarrier.arrive"),
        I::BulkCommit => whole("cp.async.bulk.commit_group"),
        I::BulkWait { .. } => whole("cp.async.bulk.wait_group"),
        I::TensorMapCopyFence { .. } => whole("tensormap.cp_fenceproxy"),
        I::WarpGroupFence => whole("wgmma.fence"),
        I::WarpGroupCommit => whole("wgmma.commit_group"),
        I::WarpGroupWait { .. } => whole("wgmma.wait_group"),
        I::Tcgen05(Tcgen05::Commit { .. }) => whole("tcgen05.commit"),
        I::Tcgen05(Tcgen05::WaitLoad) => whole("tcgen05.wait::ld"),
        I::Tcgen05(Tcgen05::WaitStore) => whole("tcgen05.wait::st"),
        I::Tcgen05(Tcgen05::FenceBefore) => whole("tcgen05.fence::before_thread_sync"),
        I::Tcgen05(Tcgen05::FenceAfter) => whole("tcgen05.fence::after_thread_sync"),
        I::Load(load) if orders(load.semantics) => {
            let relaxed = Load { semantics: Semantics::Relaxed, ..load.clone() };
            vec![("order of ld", other(I::Load(relaxed)))]
        }
        I::Store(store) if orders(store.semantics) => {
            let relaxed = Store { semantics: Semantics::Relaxed, ..store.clone() };
            vec![("order of st", other(I::Store(relaxed)))]
        }
        I::Atomic(atomic) if orders(atomic.semantics) => {
            let relaxed = Atomic { semantics: Semantics::Relaxed, ..atomic.clone() };
            vec![("order of atom", other(I::Atomic(relaxed)))]
        }
        _ => Vec::new(),
    }
}

fn other(instruction: Instruction) -> Replacement {
    Replacement::Steps(vec![instruction])
}

fn predicate_is(destination: u32, source: PredicateSource) -> Replacement {
    other(Instruction::Scalar(ScalarInstruction::MovePredicate { destination, source }))
}

fn orders(semantics: Semantics) -> bool {
    use Semantics as S;
    matches!(semantics, S::Acquire | S::Release | S::AcquireRelease | S::SequentiallyConsistent)
}

fn of_mbarrier(mbarrier: &Mbarrier) -> Vec<(&'static str, Replacement)> {
    let whole = |what| vec![(what, Replacement::Nothing)];
    match mbarrier {
        Mbarrier::Init { .. } => whole("mbarrier.init"),
        Mbarrier::ExpectTransaction { .. } => whole("mbarrier.expect_tx"),
        Mbarrier::CompleteTransaction { .. } => whole("mbarrier.complete_tx"),
        Mbarrier::Arrive { expect_bytes: None, .. } => whole("mbarrier.arrive"),
        Mbarrier::Arrive { expect_bytes: Some(_), .. } => {
            let mut bare = mbarrier.clone();
            if let Mbarrier::Arrive { expect_bytes, .. } = &mut bare {
                *expect_bytes = None;
            }
            vec![
                ("mbarrier.arrive.expect_tx", Replacement::Nothing),
                ("bytes of mbarrier.arrive.expect_tx", other(Instruction::Mbarrier(bare))),
            ]
        }
        Mbarrier::Wait { destination, .. } => {
            vec![("mbarrier.wait", predicate_is(*destination, PredicateSource::Constant(true)))]
        }
        Mbarrier::Invalidate { .. } | Mbarrier::PendingCount { .. } => Vec::new(),
    }
}

fn fence_name(fence: &Fence) -> &'static str {
    match fence {
        Fence::Thread { .. } => "fence",
        Fence::SyncRestrict { async_generic: false, .. } => "fence.sync_restrict",
        Fence::SyncRestrict { async_generic: true, .. } => "fence.proxy.async::generic",
        Fence::MbarrierInit => "fence.mbarrier_init",
        Fence::ProxyAlias => "fence.proxy.alias",
        Fence::ProxyAsync { .. } => "fence.proxy.async",
        Fence::TensorMapRelease { .. } => "fence.proxy.tensormap.release",
        Fence::TensorMapAcquire { .. } => "fence.proxy.tensormap.acquire",
    }
}
