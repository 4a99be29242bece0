//! `cp.async`, bulk copies, `wgmma`, `st.async`.

use super::*;
use Direction::{Read, Write};

/// Every lane copies 16 bytes.
fn copy_async(m: &mut Machine, thread: Thread, offset: u32) {
    let operation = m.tracker.issue(thread, Unit::CopyAsync);
    for lane in (0..32).filter(|lane| thread.lanes >> lane & 1 == 1) {
        let source = Place::Global(4096 + u64::from(lane) * 16);
        let target = Place::Shared { rank: 0, offset: offset + lane * 16 };
        m.tracker.access_operation_lane(operation, Read, lane, source, 16);
        m.tracker.access_operation_lane(operation, Write, lane, target, 16);
    }
    m.tracker.ran(operation);
}

#[test]
fn cp_async_double_buffering() {
    let sequence = |m: &mut Machine| {
        let copy = |m: &mut Machine, round: u32| {
            for warp in 0..2 {
                let thread = m.at(warp, ALL);
                copy_async(m, thread, round % 2 * 1024 + warp * 512);
                if m.does("cp.async.commit_group") {
                    m.tracker.commit_group(thread, Group::CopyAsync);
                }
            }
        };
        copy(m, 0);
        for round in 0..4 {
            copy(m, round + 1);
            for warp in 0..2 {
                let thread = m.at(warp, ALL);
                if m.does("cp.async.wait_group") {
                    m.tracker.wait_group(thread, Group::CopyAsync, 1, false);
                }
            }
            if m.does("bar.sync before use") {
                m.sync(&[0, 1], 0);
            }
            for warp in 0..2 {
                // Another warp's bytes, as ldmatrix reads them.
                let thread = m.at(warp, ALL);
                m.shared(thread, Read, round % 2 * 1024 + (1 - warp) * 512, 16);
            }
            if m.does("bar.sync after use") {
                m.sync(&[0, 1], 0);
            }
        }
    };
    check(
        (1, 2),
        sequence,
        &[
            ("cp.async.commit_group", "missing-group-wait"),
            ("cp.async.wait_group", "missing-group-wait"),
            ("bar.sync before use", "missing-synchronization"),
            ("bar.sync after use", "missing-synchronization"),
        ],
    );
}

#[test]
fn cp_async_with_an_mbarrier() {
    let sequence = |m: &mut Machine| {
        let thread = m.at(0, ONE);
        m.init(thread, 0, 8192, 1);
        m.sync(&[0, 1], 0);
        let thread = m.at(0, ALL);
        copy_async(m, thread, 0);
        let thread = m.at(0, ALL);
        if m.does("cp.async.mbarrier.arrive") {
            let mark = m.tracker.mark(thread, Unit::CopyAsync);
            m.mbarriers.add_pending(0, 8192, 32).unwrap();
            let arrival = m.mbarriers.arrive(0, 8192, 32, false).unwrap();
            m.tracker.arrive_mark(&mark, 0, 8192, arrival);
        }
        let thread = m.at(0, ONE);
        m.arrive(thread, 0, 8192);
        let reader = m.at(1, ALL);
        m.wait(reader, 0, 8192, 0);
        m.shared(reader, Read, 0, 16);
    };
    check((1, 2), sequence, &[("cp.async.mbarrier.arrive", "missing-group-wait")]);
}

#[test]
fn cp_async_into_an_mma_needs_the_proxy_fence() {
    let sequence = |m: &mut Machine| {
        let thread = m.at(0, ALL);
        copy_async(m, thread, 0);
        m.tracker.commit_group(thread, Group::CopyAsync);
        m.tracker.wait_group(thread, Group::CopyAsync, 0, false);
        if m.does("fence.proxy.async") {
            let thread = m.at(0, ALL);
            m.tracker.fence_proxy_async(thread, true, false);
        }
        m.sync(&[0, 1], 0);
        let mma = m.at(1, ALL);
        m.reads(mma, Unit::WarpGroupMma, 0, 512);
    };
    check((1, 2), sequence, &[("fence.proxy.async", "missing-proxy-fence")]);
}

#[test]
fn epilogue_through_shared_memory_and_tma_store() {
    let sequence = |m: &mut Machine| {
        for _ in 0..3 {
            if m.does("cp.async.bulk.wait_group.read") {
                let one = m.at(0, ONE);
                m.tracker.wait_group(one, Group::Bulk, 0, true);
            }
            if m.does("bar.sync before the writes") {
                m.sync(&[0, 1], 0);
            }
            for warp in 0..2 {
                let thread = m.at(warp, ALL);
                m.shared(thread, Write, warp * 512, 16);
                if m.does("fence.proxy.async") {
                    let thread = m.at(warp, ALL);
                    m.tracker.fence_proxy_async(thread, true, false);
                }
            }
            if m.does("bar.sync before the store") {
                m.sync(&[0, 1], 0);
            }
            let one = m.at(0, ONE);
            m.store(one, 0, 1024);
            if m.does("cp.async.bulk.commit_group") {
                m.tracker.commit_group(one, Group::Bulk);
            }
        }
        if m.does("last wait_group") {
            let one = m.at(0, ONE);
            m.tracker.wait_group(one, Group::Bulk, 0, true);
        }
        m.tracker.remove_cluster(0);
    };
    check(
        (1, 2),
        sequence,
        &[
            ("cp.async.bulk.wait_group.read", "missing-group-wait"),
            ("bar.sync before the writes", "missing-synchronization"),
            ("fence.proxy.async", "missing-proxy-fence"),
            ("bar.sync before the store", "missing-synchronization"),
            ("cp.async.bulk.commit_group", "missing-group-wait"),
            ("last wait_group", "unfinished-at-exit"),
        ],
    );
}

#[test]
fn a_proxy_fence_counts_only_after_the_write_and_for_its_space() {
    for (early, shared, reported) in [(false, true, 0), (true, true, 1), (false, false, 1)] {
        let mut m = Machine::new(1, 1, None);
        let thread = m.at(0, ALL);
        if early {
            m.tracker.fence_proxy_async(thread, true, true);
        }
        m.shared(thread, Write, 0, 16);
        if !early {
            m.tracker.fence_proxy_async(thread, shared, !shared);
        }
        m.tracker.warp_barrier(thread);
        let one = m.at(0, ONE);
        m.store(one, 0, 512);
        let kinds = m.kinds();
        assert_eq!(kinds, vec!["missing-proxy-fence"; reported], "{early} {shared}");
    }
}

#[test]
fn tma_and_wgmma_pipeline() {
    // Warps 0 to 3 are a warp group, warp 4 loads.
    const STAGES: u32 = 2;
    let (full, empty) = (|stage: u32| 65536 + stage * 8, |stage: u32| 65600 + stage * 8);
    let sequence = |m: &mut Machine| {
        for stage in 0..STAGES {
            let thread = m.at(4, ONE);
            m.init(thread, 0, full(stage), 1);
            let thread = m.at(4, ONE);
            m.init(thread, 0, empty(stage), 1);
        }
        if m.does("fence.mbarrier_init") {
            let thread = m.at(4, ONE);
            m.tracker.fence_mbarrier_init(thread);
        }
        if m.does("bar.sync after init") {
            m.sync(&[0, 1, 2, 3, 4], 0);
        }
        for round in 0..6 {
            let (stage, phase) = (round % STAGES, (round / STAGES) & 1);
            let producer = m.at(4, ONE);
            if m.does("wait for empty") {
                m.wait(producer, 0, empty(stage), phase ^ 1);
            }
            m.expect(producer, 0, full(stage), 1024);
            m.load(producer, 0, stage * 1024, 1024, (0, full(stage)));
            for warp in 0..4 {
                let thread = m.at(warp, ALL);
                if m.does("wait for full") {
                    m.wait(thread, 0, full(stage), phase);
                }
                m.reads(thread, Unit::WarpGroupMma, stage * 1024, 1024);
                if m.does("wgmma.commit_group") {
                    m.tracker.commit_group(thread, Group::WarpGroup);
                }
                if m.does("wgmma.wait_group") {
                    m.tracker.wait_group(thread, Group::WarpGroup, 0, false);
                }
            }
            // One thread of the warp group tells for all, as the group's MMAs end together.
            let thread = m.at(0, ONE);
            m.arrive(thread, 0, empty(stage));
        }
    };
    check(
        (1, 5),
        sequence,
        &[
            ("fence.mbarrier_init", "missing-mbarrier-init-fence"),
            ("bar.sync after init", "missing-mbarrier-init-sync"),
            ("wait for empty", "missing-synchronization"),
            ("wait for full", "missing-mbarrier-wait"),
            ("wgmma.commit_group", "missing-group-wait"),
            ("wgmma.wait_group", "missing-group-wait"),
        ],
    );
}

#[test]
fn multicast_and_remote_mbarriers() {
    let sequence = |m: &mut Machine| {
        for rank in 0..2 {
            let thread = m.of(rank, 0, ONE);
            m.init(thread, rank, 4096, 1);
            if m.does("fence.mbarrier_init") {
                m.tracker.fence_mbarrier_init(thread);
            }
        }
        let thread = m.of(0, 0, ONE);
        m.init(thread, 0, 4104, 2);
        if m.does("fence.mbarrier_init") {
            m.tracker.fence_mbarrier_init(thread);
        }
        m.cluster_sync(2, 1, false);
        for round in 0..2 {
            let producer = m.of(0, 0, ONE);
            if m.does("wait for both CTAs") {
                m.wait(producer, 0, 4104, round & 1 ^ 1);
            }
            for rank in 0..2 {
                let thread = m.of(rank, 0, ONE);
                m.expect(thread, rank, 4096, 256);
            }
            for rank in 0..2 {
                m.load(producer, rank, 0, 256, (rank, 4096));
            }
            for rank in 0..2 {
                let thread = m.of(rank, 0, ALL);
                if m.does("wait for full") {
                    m.wait(thread, rank, 4096, round & 1);
                }
                m.shared(thread, Read, 0, 8);
                if m.does("bar.warp.sync before the arrival") {
                    m.tracker.warp_barrier(thread);
                }
                let one = m.of(rank, 0, ONE);
                m.arrive(one, 0, 4104);
            }
        }
        if m.does("last wait for both CTAs") {
            let producer = m.of(0, 0, ONE);
            m.wait(producer, 0, 4104, 1);
        }
        m.tracker.remove_cluster(0);
    };
    check(
        (2, 1),
        sequence,
        &[
            ("fence.mbarrier_init", "missing-mbarrier-init-sync"),
            ("wait for both CTAs", "missing-synchronization"),
            ("last wait for both CTAs", "unfinished-at-exit"),
            ("wait for full", "missing-mbarrier-wait"),
            ("bar.warp.sync before the arrival", "missing-synchronization"),
        ],
    );
}

#[test]
fn st_async_completes_on_the_mbarrier() {
    let sequence = |m: &mut Machine| {
        let thread = m.of(1, 0, ONE);
        m.init(thread, 1, 4096, 1);
        m.tracker.fence_mbarrier_init(thread);
        m.cluster_sync(2, 1, true);
        let thread = m.of(1, 0, ONE);
        m.expect(thread, 1, 4096, 8);
        let sender = m.of(0, 0, ONE);
        let operation = m.tracker.issue(sender, Unit::StoreAsync);
        let place = Place::Shared { rank: 1, offset: 0 };
        m.tracker.access_operation(operation, Write, place, 8);
        m.tracker.ran(operation);
        let arrival = m.mbarriers.complete_tx(1, 4096, 8).unwrap();
        m.tracker.complete_tx(operation, 1, 4096, arrival);
        let receiver = m.of(1, 0, ONE);
        if m.does("wait") {
            m.wait(receiver, 1, 4096, 0);
        }
        m.shared(receiver, Read, 0, 8);
    };
    check((2, 1), sequence, &[("wait", "missing-mbarrier-wait")]);
}

#[test]
fn launch_control_response() {
    let sequence = |m: &mut Machine| {
        let thread = m.at(0, ONE);
        m.init(thread, 0, 4096, 1);
        m.tracker.fence_mbarrier_init(thread);
        m.tracker.warp_barrier(thread);
        for round in 0..2 {
            let one = m.at(0, ONE);
            m.expect(one, 0, 4096, 16);
            let operation = m.tracker.issue(one, Unit::LaunchControl);
            let place = Place::Shared { rank: 0, offset: 0 };
            m.tracker.access_operation(operation, Write, place, 16);
            let arrival = m.mbarriers.complete_tx(0, 4096, 16).unwrap();
            m.tracker.complete_tx(operation, 0, 4096, arrival);
            if m.does("wait for the response") {
                m.wait(one, 0, 4096, round & 1);
            }
            m.tracker.access(one, Read, None, 16, &[(0, place)]);
            if m.does("fence.proxy.async after the read") {
                let one = m.at(0, ONE);
                m.tracker.fence_proxy_async(one, true, false);
            }
        }
    };
    check(
        (1, 1),
        sequence,
        &[
            ("wait for the response", "missing-mbarrier-wait"),
            ("fence.proxy.async after the read", "missing-proxy-fence"),
        ],
    );
}

#[test]
fn one_wrong_byte_count_shifts_the_phase() {
    // 128 of 256 bytes are expected: the phase ends before the second load, in eager mode too.
    let mut m = Machine::new(1, 1, None);
    let one = m.at(0, ONE);
    m.init(one, 0, 4096, 1);
    m.tracker.fence_mbarrier_init(one);
    m.expect(one, 0, 4096, 128);
    let one = m.at(0, ONE);
    m.load(one, 0, 0, 128, (0, 4096));
    let one = m.at(0, ONE);
    m.load(one, 0, 128, 128, (0, 4096));
    m.wait(one, 0, 4096, 0);
    let read = m.at(0, ONE);
    m.shared(read, Read, 128, 4);
    assert!(m.kinds().contains(&"missing-mbarrier-wait"), "{:?}", m.kinds());
}

#[test]
fn an_operation_that_runs_late_is_reported_the_same_way() {
    let run = |late: bool, waits: bool| {
        let mut m = Machine::new(1, 2, None);
        let one = m.at(0, ONE);
        let operation = m.tracker.issue(one, Unit::BulkStore);
        m.tracker.commit_group(one, Group::Bulk);
        let source = Place::Shared { rank: 0, offset: 0 };
        let read = |m: &mut Machine| {
            m.tracker.access_operation(operation, Read, source, 512);
            m.tracker.ran(operation);
        };
        if !late || waits {
            read(&mut m);
        }
        if waits {
            m.tracker.wait_group(one, Group::Bulk, 0, true);
        }
        m.sync(&[0, 1], 0);
        let writer = m.at(1, ALL);
        m.shared(writer, Write, 0, 16);
        if late && !waits {
            read(&mut m);
        }
        m.tracker.hazards().to_vec()
    };
    assert!(run(false, true).is_empty() && run(true, true).is_empty());
    let (eager, late) = (run(false, false), run(true, false));
    assert_eq!(eager[0].kind.name(), "missing-group-wait");
    assert_eq!(eager, late);
}
