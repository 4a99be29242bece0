//! Global memory: arrival counters, tensor maps, grids, scopes.

use super::*;
use Direction::{Read, Write};

const COUNTER: Place = Place::Global(64);

/// The machine has two clusters of one CTA here.
fn two_ctas(m: &mut Machine) -> [WarpId; 2] {
    let other = m.tracker.add_cluster(1, 1);
    [m.tracker.warp(0, 0, 0), m.tracker.warp(other, 0, 0)]
}

fn thread(m: &mut Machine, warp: WarpId, lanes: u32) -> Thread {
    Thread { warp, ..m.at(0, lanes) }
}

fn global(m: &mut Machine, thread: Thread, direction: Direction, address: u64) {
    let places: Vec<_> =
        (0..32u32).map(|lane| (lane, Place::Global(address + u64::from(lane) * 4))).collect();
    m.tracker.access(thread, direction, None, 4, &places);
}

fn atomic(m: &mut Machine, thread: Thread, order: Order) {
    let lane = thread.lanes.trailing_zeros();
    m.tracker.access(thread, Write, Some(Scope::Device), 4, &[(lane, COUNTER)]);
    m.tracker.synchronize(thread, COUNTER, StrongAccess::Atomic, order, Scope::Device);
}

#[test]
fn the_last_cta_reads_what_others_wrote() {
    let sequence = |m: &mut Machine| {
        let warps = two_ctas(m);
        for (at, warp) in warps.into_iter().enumerate() {
            let all = thread(m, warp, ALL);
            global(m, all, Write, 4096 + at as u64 * 128);
            if m.does("__threadfence") {
                let all = thread(m, warp, ALL);
                m.tracker.fence(all, Order::AcquireRelease, Scope::Device);
            }
            if m.does("__syncwarp before the arrival") {
                let all = thread(m, warp, ALL);
                m.tracker.warp_barrier(all);
            }
            let one = thread(m, warp, ONE);
            atomic(m, one, Order::Relaxed);
        }
        let last = warps[1];
        if m.does("__threadfence of the last CTA") {
            let one = thread(m, last, ONE);
            m.tracker.fence(one, Order::AcquireRelease, Scope::Device);
        }
        if m.does("__syncwarp after the arrival") {
            let all = thread(m, last, ALL);
            m.tracker.warp_barrier(all);
        }
        let all = thread(m, last, ALL);
        global(m, all, Read, 4096);
    };
    check(
        (1, 1),
        sequence,
        &[
            ("__threadfence", "missing-synchronization"),
            ("__syncwarp before the arrival", "missing-synchronization"),
            ("__threadfence of the last CTA", "missing-synchronization"),
            ("__syncwarp after the arrival", "missing-synchronization"),
        ],
    );
}

/// `st`, `membar.gl`, `bar.sync`, an atomic of one thread, `bar.sync`, `membar.gl`, `ld`: the
/// fences are those of all threads, and the atomic is one thread's.
#[test]
fn fences_of_all_threads_around_an_atomic_of_one() {
    let sequence = |m: &mut Machine| {
        let other = m.tracker.add_cluster(1, 2);
        for (cta, cluster) in [0, other].into_iter().enumerate() {
            let warps = [0, 1].map(|warp| m.tracker.warp(cluster, 0, warp));
            let all = warps.map(|warp| thread(m, warp, ALL));
            for (at, warp) in all.into_iter().enumerate() {
                global(m, warp, Write, 4096 + cta as u64 * 256 + at as u64 * 128);
                if m.does("membar.gl before the arrival") {
                    m.tracker.fence(warp, Order::AcquireRelease, Scope::Device);
                }
            }
            if m.does("bar.sync before the arrival") {
                meet(m, &all);
            }
            let one = thread(m, warps[0], ONE);
            atomic(m, one, Order::Relaxed);
            let all = warps.map(|warp| thread(m, warp, ALL));
            if m.does("bar.sync after the arrival") {
                meet(m, &all);
            }
            if m.does("membar.gl after the arrival") {
                for warp in all {
                    m.tracker.fence(warp, Order::AcquireRelease, Scope::Device);
                }
            }
            if cta == 1 {
                for (at, warp) in all.into_iter().enumerate() {
                    global(m, warp, Read, 4096 + 128 - at as u64 * 128);
                }
            }
        }
    };
    check(
        (1, 2),
        sequence,
        &[
            ("membar.gl before the arrival", "missing-synchronization"),
            ("bar.sync before the arrival", "missing-synchronization"),
            ("bar.sync after the arrival", "missing-synchronization"),
            ("membar.gl after the arrival", "missing-synchronization"),
        ],
    );
}

/// `bar.sync 0` of warps of one CTA.
fn meet(m: &mut Machine, threads: &[Thread]) {
    for thread in threads {
        m.tracker.barrier_arrive(*thread, 0);
    }
    let waiters: Vec<_> = threads.iter().map(|thread| (thread.warp, thread.lanes)).collect();
    m.tracker.barrier_complete(&waiters, 0);
}

#[test]
fn release_and_acquire_without_fences() {
    for (order, reported) in [(Order::AcquireRelease, 0), (Order::Relaxed, 1)] {
        let mut m = Machine::new(1, 1, None);
        let [first, second] = two_ctas(&mut m);
        let one = thread(&mut m, first, ONE);
        global(&mut m, one, Write, 4096);
        atomic(&mut m, one, order);
        let one = thread(&mut m, second, ONE);
        atomic(&mut m, one, order);
        global(&mut m, one, Read, 4096);
        assert_eq!(m.kinds().len(), reported, "{order:?}");
    }
}

#[test]
fn scopes_must_have_both_threads() {
    let mut m = Machine::new(1, 1, None);
    let [first, second] = two_ctas(&mut m);
    for warp in [first, second] {
        let one = thread(&mut m, warp, ONE);
        global(&mut m, one, if warp == first { Write } else { Read }, 4096);
        m.tracker.access(one, Write, Some(Scope::Cta), 4, &[(0, COUNTER)]);
        let (atomic, order) = (StrongAccess::Atomic, Order::AcquireRelease);
        m.tracker.synchronize(one, COUNTER, atomic, order, Scope::Cta);
    }
    let kinds = m.kinds();
    assert!(kinds.contains(&"scope-too-narrow"), "{kinds:?}");
    assert!(kinds.contains(&"missing-synchronization"), "{kinds:?}");
}

#[test]
fn many_atomics_on_one_word_are_no_race_and_a_plain_read_is() {
    let mut m = Machine::new(1, 1, None);
    let [first, second] = two_ctas(&mut m);
    for _ in 0..3 {
        for warp in [first, second] {
            let places: Vec<_> = (0..32).map(|lane| (lane, COUNTER)).collect();
            let all = thread(&mut m, warp, ALL);
            m.tracker.access(all, Write, Some(Scope::Device), 4, &places);
        }
    }
    assert_eq!(m.kinds(), Vec::<&str>::new());
    let one = thread(&mut m, second, ONE);
    m.tracker.access(one, Read, None, 4, &[(0, COUNTER)]);
    assert_eq!(m.kinds(), ["missing-synchronization", "missing-warp-sync"]);
}

#[test]
fn global_memory_written_by_threads_and_loaded_by_tma() {
    let sequence = |m: &mut Machine| {
        let one = m.at(0, ONE);
        m.init(one, 0, 4096, 1);
        m.tracker.fence_mbarrier_init(one);
        let all = m.at(0, ALL);
        global(m, all, Write, 1 << 20);
        if m.does("fence.proxy.async.global") {
            m.tracker.fence_proxy_async(all, false, true);
        }
        if m.does("bar.warp.sync") {
            m.tracker.warp_barrier(all);
        }
        let one = m.at(0, ONE);
        m.expect(one, 0, 4096, 128);
        m.load(one, 0, 0, 128, (0, 4096));
        m.wait(one, 0, 4096, 0);
        m.shared(one, Read, 0, 4);
    };
    check(
        (1, 1),
        sequence,
        &[
            ("fence.proxy.async.global", "missing-proxy-fence"),
            ("bar.warp.sync", "missing-synchronization"),
        ],
    );
}

#[test]
fn a_tensor_map_changed_by_threads() {
    const MAP: u64 = 1 << 16;
    let sequence = |m: &mut Machine| {
        let one = m.at(0, ONE);
        m.init(one, 0, 4096, 2);
        m.tracker.fence_mbarrier_init(one);
        m.sync(&[0, 1], 0);
        for round in 0..2 {
            let all = m.at(0, ALL);
            global(m, all, Write, MAP);
            m.tracker.warp_barrier(all);
            let all = m.at(0, ALL);
            if m.does("fence.proxy.tensormap release") {
                m.tracker.fence_tensor_map_release(all, Scope::Device);
            }
            m.sync(&[0, 1], 0);
            let one = m.at(1, ONE);
            if m.does("fence.proxy.tensormap acquire") {
                m.tracker.fence_tensor_map_acquire(one, MAP, Scope::Device);
            }
            m.expect(one, 0, 4096, 128);
            m.arrive(one, 0, 4096);
            let operation = m.tracker.issue(one, Unit::BulkLoad);
            m.tracker.access_tensor_map(operation, MAP);
            let place = Place::Shared { rank: 0, offset: 0 };
            m.tracker.access_operation(operation, Write, place, 128);
            m.tracker.ran(operation);
            let arrival = m.mbarriers.complete_tx(0, 4096, 128).unwrap();
            m.tracker.complete_tx(operation, 0, 4096, arrival);
            if m.does("wait for the load") {
                m.wait(one, 0, 4096, round & 1);
            }
            m.sync(&[0, 1], 0);
        }
    };
    check(
        (1, 2),
        sequence,
        &[
            ("fence.proxy.tensormap release", "missing-tensor-map-fence"),
            ("fence.proxy.tensormap acquire", "missing-tensor-map-fence"),
            ("wait for the load", "missing-mbarrier-wait"),
        ],
    );
}

/// A load's map may be changed once the load's group is waited for, its source may not.
#[test]
fn a_tensor_map_that_a_group_has_read() {
    const MAP: u64 = 1 << 16;
    for (address, commits, expected) in [
        (MAP, true, &[][..]),
        (MAP + 112, true, &[]),
        (MAP, false, &["missing-mbarrier-wait"]),
        (MAP + 128, true, &["missing-mbarrier-wait"]),
    ] {
        let mut m = Machine::new(1, 1, None);
        let one = m.at(0, ONE);
        m.init(one, 0, 4096, 2);
        m.tracker.fence_mbarrier_init(one);
        m.expect(one, 0, 4096, 128);
        m.arrive(one, 0, 4096);
        let operation = m.tracker.issue(one, Unit::BulkLoad);
        m.tracker.access_tensor_map(operation, MAP);
        m.tracker.access_operation(operation, Read, Place::Global(MAP + 128), 128);
        m.tracker.access_operation(operation, Write, Place::Shared { rank: 0, offset: 0 }, 128);
        m.tracker.ran(operation);
        let arrival = m.mbarriers.complete_tx(0, 4096, 128).unwrap();
        m.tracker.complete_tx(operation, 0, 4096, arrival);
        if commits {
            m.tracker.commit_group(one, Group::Bulk);
        }
        m.tracker.wait_group(one, Group::Bulk, 0, true);
        let one = m.at(0, ONE);
        m.tracker.access(one, Write, None, 4, &[(0, Place::Global(address))]);
        assert_eq!(m.kinds(), expected, "{address:#x}, committed: {commits}");
    }
}

#[test]
fn the_previous_grid_is_waited_for() {
    let sequence = |m: &mut Machine| {
        m.tracker.previous_grid(4096..8192, Write);
        m.tracker.previous_grid(8192..12288, Read);
        let all = m.at(0, ALL);
        global(m, all, Read, 1 << 14);
        if m.does("griddepcontrol.wait") {
            m.tracker.grid_dependency_wait(all);
        }
        global(m, all, Read, 4096);
        global(m, all, Read, 8192);
        global(m, all, Write, 8192);
        let one = m.at(0, ONE);
        let operation = m.tracker.issue(one, Unit::BulkLoad);
        m.tracker.access_operation(operation, Read, Place::Global(4096 + 512), 256);
    };
    check((1, 1), sequence, &[("griddepcontrol.wait", "missing-grid-dependency-wait")]);
}

#[test]
fn reductions_by_tma_do_not_race_with_each_other() {
    let mut m = Machine::new(1, 2, None);
    for warp in 0..2 {
        let one = m.at(warp, ONE);
        let operation = m.tracker.issue(one, Unit::BulkStore);
        m.tracker.is_reduction(operation);
        m.tracker.access_operation(operation, Write, Place::Global(4096), 256);
        m.tracker.ran(operation);
    }
    assert_eq!(m.kinds(), Vec::<&str>::new());
    let one = m.at(0, ONE);
    m.tracker.access(one, Read, None, 4, &[(0, Place::Global(4096))]);
    assert_eq!(m.kinds(), ["missing-group-wait", "missing-group-wait"]);
}

#[test]
fn a_store_is_visible_after_the_full_wait_only() {
    for (read, reported) in [(false, 0), (true, 1)] {
        let mut m = Machine::new(1, 1, None);
        let one = m.at(0, ONE);
        let operation = m.tracker.issue(one, Unit::BulkStore);
        m.tracker.access_operation(operation, Write, Place::Global(4096), 256);
        m.tracker.commit_group(one, Group::Bulk);
        m.tracker.wait_group(one, Group::Bulk, 0, read);
        m.tracker.access(one, Read, None, 4, &[(0, Place::Global(4096))]);
        assert_eq!(m.kinds().len(), reported, "read {read}");
    }
}
