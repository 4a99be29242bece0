//! Mistakes in synchronizing instructions: parities, counts, orders, scopes, masks.

use super::operands::{Change, Spare};
use super::{Class, Edit, Replacement};
use crate::decode::{
    Atomic, CtaBarrier, Fence, Instruction, Load, Mbarrier, MbarrierPhase, Scope, Semantics,
    Source, Space, Store,
};

/// Name of a wait that always tests parity 0; it differs from the original at parity 1.
pub(super) const STUCK_AT_0: &str = "parity 0 of mbarrier.wait";
/// Name of a wait that always tests parity 1.
pub(super) const STUCK_AT_1: &str = "parity 1 of mbarrier.wait";

const LAST_LANE: Change = Change::Invert(1 << 31);

pub(super) fn edits(instruction: &Instruction, spare: Spare, found: &mut Vec<Edit>) {
    use Instruction as I;
    match instruction {
        I::Barrier(barrier) => of_barrier(barrier, spare, found),
        I::ClusterArrive { relaxed: false, aligned } => {
            let relaxed = I::ClusterArrive { relaxed: true, aligned: *aligned };
            found.push(Edit::new(Class::Order, "release of barrier.cluster.arrive", relaxed));
        }
        I::Fence(fence) => of_fence(fence, found),
        I::TensorMapCopyFence { target, source, scope } if narrows(*scope) => {
            let (target, source) = (*target, *source);
            let narrow = I::TensorMapCopyFence { target, source, scope: Scope::Cta };
            found.push(Edit::new(Class::Order, "scope of tensormap.cp_fenceproxy", narrow));
        }
        I::Mbarrier(mbarrier) => of_mbarrier(mbarrier, spare, found),
        I::CopyAsyncWait { pending } => {
            let pending = Some(pending.unwrap_or(0) + 1);
            let later = I::CopyAsyncWait { pending };
            found.push(Edit::new(Class::Count, "one group fewer of cp.async.wait_group", later));
        }
        I::BulkWait { pending, read } => {
            let later = I::BulkWait { pending: pending + 1, read: *read };
            let what = "one group fewer of cp.async.bulk.wait_group";
            found.push(Edit::new(Class::Count, what, later));
            if !read {
                let only_read = I::BulkWait { pending: *pending, read: true };
                let what = "writes of cp.async.bulk.wait_group";
                found.push(Edit::new(Class::Order, what, only_read));
            }
        }
        I::WarpGroupWait { pending } => {
            let later = I::WarpGroupWait { pending: pending + 1 };
            found.push(Edit::new(Class::Count, "one group fewer of wgmma.wait_group", later));
        }
        I::Load(load) if is_strong(load.semantics) && narrows(load.scope) => {
            let narrow = Load { scope: Scope::Cta, ..load.clone() };
            found.push(Edit::new(Class::Order, "scope of ld", I::Load(narrow)));
        }
        I::Store(store) if is_strong(store.semantics) && narrows(store.scope) => {
            let narrow = Store { scope: Scope::Cta, ..store.clone() };
            found.push(Edit::new(Class::Order, "scope of st", I::Store(narrow)));
        }
        I::Atomic(atomic) if narrows(atomic.scope) => {
            let narrow = Atomic { scope: Scope::Cta, ..atomic.clone() };
            found.push(Edit::new(Class::Order, "scope of atom", I::Atomic(narrow)));
        }
        _ => {}
    }
}

/// Mistakes in the lane masks of warp instructions.
pub(super) fn masks(instruction: &Instruction, spare: Spare, found: &mut Vec<Edit>) {
    use Instruction as I;
    let mut changed = instruction.clone();
    let (what, mask) = match &mut changed {
        I::WarpBarrier { mask } => ("lane 31 of bar.warp.sync", mask),
        I::Shuffle(shuffle) => ("lane 31 of shfl.sync", &mut shuffle.mask),
        I::Vote(vote) => ("lane 31 of vote.sync", &mut vote.mask),
        I::Match(of) => ("lane 31 of match.sync", &mut of.mask),
        I::Elect { mask, .. } => ("lane 31 of elect.sync", mask),
        I::Redux { mask, .. } => ("lane 31 of redux.sync", mask),
        _ => return,
    };
    let (before, edited) = spare.changed(*mask, LAST_LANE);
    *mask = edited;
    let steps = before.into_iter().chain([changed]).collect();
    found.push(Edit { class: Class::Mask, what, replacement: Replacement::Steps(steps) });
}

/// Whether `scope` is wider than the CTA.
fn narrows(scope: Scope) -> bool {
    scope != Scope::Cta
}

fn is_strong(semantics: Semantics) -> bool {
    !matches!(semantics, Semantics::Weak | Semantics::Volatile | Semantics::Mmio)
}

fn of_barrier(barrier: &CtaBarrier, spare: Spare, found: &mut Vec<Edit>) {
    if let Some(threads) = barrier.threads {
        let what = "more threads of bar.sync";
        found.push(spare.edit(Class::Count, what, threads, Change::Add(32), |threads| {
            Instruction::Barrier(CtaBarrier { threads: Some(threads), ..barrier.clone() })
        }));
    }
    if !barrier.aligned {
        let aligned = CtaBarrier { aligned: true, ..barrier.clone() };
        found.push(Edit::new(Class::Order, "aligned of barrier", Instruction::Barrier(aligned)));
    }
}

fn of_fence(fence: &Fence, found: &mut Vec<Edit>) {
    let mut push = |what, fence| {
        found.push(Edit::new(Class::Order, what, Instruction::Fence(fence)));
    };
    let scope = Scope::Cta;
    match fence {
        Fence::Thread { semantics, scope: of } if narrows(*of) => {
            push("scope of fence", Fence::Thread { semantics: *semantics, scope });
        }
        Fence::SyncRestrict { semantics, scope: of, async_generic } if narrows(*of) => {
            let (semantics, async_generic) = (*semantics, *async_generic);
            push("scope of fence", Fence::SyncRestrict { semantics, scope, async_generic });
        }
        Fence::TensorMapRelease { scope: of } if narrows(*of) => {
            push("scope of fence.proxy.tensormap.release", Fence::TensorMapRelease { scope });
        }
        Fence::TensorMapAcquire { scope: of, address, bytes } if narrows(*of) => {
            let (address, bytes) = (*address, *bytes);
            let narrow = Fence::TensorMapAcquire { scope, address, bytes };
            push("scope of fence.proxy.tensormap.acquire", narrow);
        }
        Fence::ProxyAsync { space } => {
            if *space != Some(Space::Global) {
                let global = Fence::ProxyAsync { space: Some(Space::Global) };
                push("shared memory of fence.proxy.async", global);
            }
            if !matches!(space, Some(Space::Shared | Space::SharedCluster)) {
                let shared = Fence::ProxyAsync { space: Some(Space::Shared) };
                push("global memory of fence.proxy.async", shared);
            }
        }
        _ => {}
    }
}

fn of_mbarrier(mbarrier: &Mbarrier, spare: Spare, found: &mut Vec<Edit>) {
    let put = |changed: Mbarrier| Instruction::Mbarrier(changed);
    match mbarrier {
        Mbarrier::Init { barrier, count } => {
            let init = |count| put(Mbarrier::Init { barrier: *barrier, count });
            for (what, by) in [("mbarrier.init of one more", 1), ("mbarrier.init of one less", -1)]
            {
                found.push(spare.edit(Class::Count, what, *count, Change::Add(by), init));
            }
        }
        Mbarrier::ExpectTransaction { barrier, bytes } => {
            let expect = |bytes| put(Mbarrier::ExpectTransaction { barrier: *barrier, bytes });
            let names = ["16 more of mbarrier.expect_tx", "16 less of mbarrier.expect_tx"];
            for (what, by) in names.into_iter().zip([16, -16]) {
                found.push(spare.edit(Class::Bytes, what, *bytes, Change::Add(by), expect));
            }
        }
        Mbarrier::Arrive { .. } => of_arrive(mbarrier, spare, found),
        Mbarrier::Wait { phase, semantics, scope, .. } => {
            let with = |changed: MbarrierPhase| {
                let mut wait = mbarrier.clone();
                if let Mbarrier::Wait { phase, .. } = &mut wait {
                    *phase = changed;
                }
                put(wait)
            };
            let stuck = |at| with(MbarrierPhase::Parity(Source::Immediate(at)));
            match phase {
                MbarrierPhase::Parity(Source::Immediate(parity)) => {
                    let other = stuck(parity ^ 1);
                    found.push(Edit::new(Class::Parity, "parity of mbarrier.wait", other));
                }
                MbarrierPhase::Parity(Source::Register(_)) => {
                    found.push(Edit::new(Class::Parity, STUCK_AT_0, stuck(0)));
                    found.push(Edit::new(Class::Parity, STUCK_AT_1, stuck(1)));
                }
                MbarrierPhase::State(_) => {}
            }
            let ordered = |to: Semantics, among: Scope| {
                let mut wait = mbarrier.clone();
                if let Mbarrier::Wait { semantics, scope, .. } = &mut wait {
                    (*semantics, *scope) = (to, among);
                }
                put(wait)
            };
            if *semantics != Semantics::Relaxed {
                let relaxed = ordered(Semantics::Relaxed, *scope);
                found.push(Edit::new(Class::Order, "acquire of mbarrier.wait", relaxed));
                if narrows(*scope) {
                    let narrow = ordered(*semantics, Scope::Cta);
                    found.push(Edit::new(Class::Order, "scope of mbarrier.wait", narrow));
                }
            }
        }
        Mbarrier::CompleteTransaction { .. }
        | Mbarrier::Invalidate { .. }
        | Mbarrier::PendingCount { .. } => {}
    }
}

fn of_arrive(mbarrier: &Mbarrier, spare: Spare, found: &mut Vec<Edit>) {
    let Mbarrier::Arrive { count, expect_bytes, semantics, scope, .. } = mbarrier else { return };
    let with = |change: &dyn Fn(&mut Option<Source>, &mut Option<Source>)| {
        let mut arrive = mbarrier.clone();
        if let Mbarrier::Arrive { count, expect_bytes, .. } = &mut arrive {
            change(count, expect_bytes);
        }
        Instruction::Mbarrier(arrive)
    };
    if let Some(count) = count {
        let what = "mbarrier.arrive of one more";
        found.push(spare.edit(Class::Count, what, *count, Change::Add(1), |changed| {
            with(&|count, _| *count = Some(changed))
        }));
    }
    if let Some(bytes) = expect_bytes {
        let names =
            ["16 more of mbarrier.arrive.expect_tx", "16 less of mbarrier.arrive.expect_tx"];
        for (what, by) in names.into_iter().zip([16, -16]) {
            found.push(spare.edit(Class::Bytes, what, *bytes, Change::Add(by), |changed| {
                with(&|_, bytes| *bytes = Some(changed))
            }));
        }
    }
    let ordered = |to: Semantics, among: Scope| {
        let mut arrive = mbarrier.clone();
        if let Mbarrier::Arrive { semantics, scope, .. } = &mut arrive {
            (*semantics, *scope) = (to, among);
        }
        Instruction::Mbarrier(arrive)
    };
    if *semantics != Semantics::Relaxed {
        let relaxed = ordered(Semantics::Relaxed, *scope);
        found.push(Edit::new(Class::Order, "release of mbarrier.arrive", relaxed));
        if narrows(*scope) {
            let narrow = ordered(*semantics, Scope::Cta);
            found.push(Edit::new(Class::Order, "scope of mbarrier.arrive", narrow));
        }
    }
}
