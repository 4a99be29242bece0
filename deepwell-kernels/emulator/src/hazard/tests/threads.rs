//! Threads, warps, CTAs and clusters without asynchronous operations.

use super::*;
use Direction::{Read, Write};

#[test]
fn ctas_exchange_through_shared_memory() {
    let sequence = |m: &mut Machine| {
        for _ in 0..2 {
            let writer = m.at(0, ALL);
            m.shared(writer, Write, 0, 4);
            if m.does("bar.sync after the write") {
                m.sync(&[0, 1], 0);
            }
            let reader = m.at(1, ALL);
            m.shared(reader, Read, 0, 4);
            if m.does("bar.sync before the next round") {
                m.sync(&[0, 1], 0);
            }
        }
    };
    check(
        (1, 2),
        sequence,
        &[
            ("bar.sync after the write", "missing-synchronization"),
            ("bar.sync before the next round", "missing-synchronization"),
        ],
    );
}

#[test]
fn named_barriers_with_arrive() {
    let sequence = |m: &mut Machine| {
        for _ in 0..2 {
            let producer = m.at(0, ALL);
            m.shared(producer, Write, 0, 16);
            let producer = m.at(0, ALL);
            let consumer = m.at(1, ALL);
            if m.does("bar.arrive") {
                m.tracker.barrier_arrive(producer, 1);
            }
            m.tracker.barrier_arrive(consumer, 1);
            m.tracker.barrier_complete(&[(consumer.warp, ALL)], 1);
            let consumer = m.at(1, ALL);
            m.shared(consumer, Read, 0, 16);
            let consumer = m.at(1, ALL);
            let producer = m.at(0, ALL);
            m.tracker.barrier_arrive(consumer, 2);
            m.tracker.barrier_arrive(producer, 2);
            if m.does("bar.sync of the producer") {
                m.tracker.barrier_complete(&[(producer.warp, ALL)], 2);
            }
        }
    };
    check(
        (1, 2),
        sequence,
        &[
            ("bar.arrive", "missing-synchronization"),
            ("bar.sync of the producer", "missing-synchronization"),
        ],
    );
}

#[test]
fn lanes_of_a_warp_need_syncwarp() {
    let sequence = |m: &mut Machine| {
        for _ in 0..2 {
            let all = m.at(0, ALL);
            m.shared(all, Write, 0, 4);
            if m.does("first bar.warp.sync") {
                let all = m.at(0, ALL);
                m.tracker.warp_barrier(all);
            }
            // A transposition: lane i reads what lane 31 - i wrote.
            let all = m.at(0, ALL);
            let places: Vec<_> = (0..32)
                .map(|lane| (lane, Place::Shared { rank: 0, offset: (31 - lane) * 4 }))
                .collect();
            m.tracker.access(all, Read, None, 4, &places);
            if m.does("second bar.warp.sync") {
                let all = m.at(0, ALL);
                m.tracker.warp_barrier(all);
            }
        }
    };
    check(
        (1, 1),
        sequence,
        &[
            ("first bar.warp.sync", "missing-warp-sync"),
            ("second bar.warp.sync", "missing-warp-sync"),
        ],
    );
}

#[test]
fn own_bytes_need_nothing_in_any_width() {
    for bytes in [1, 2, 4, 8, 16] {
        let mut m = Machine::new(1, 2, None);
        for _ in 0..3 {
            for warp in 0..2 {
                // The warps' bytes meet in one cell.
                let thread = m.at(warp, ALL);
                m.shared(thread, Write, 4 + warp * 32 * bytes, bytes);
                let thread = m.at(warp, ALL);
                m.shared(thread, Read, 4 + warp * 32 * bytes, bytes);
                // Diverged lanes go on alone.
                let thread = m.at(warp, 0x5555_5555);
                m.shared(thread, Write, 4 + warp * 32 * bytes, bytes);
            }
        }
        assert_eq!(m.kinds(), Vec::<&str>::new(), "{bytes} bytes");
    }
}

#[test]
fn a_shared_word_of_partial_sums() {
    let sequence = |m: &mut Machine| {
        for warp in 0..4 {
            let thread = m.at(warp, ONE);
            m.shared(thread, Write, warp * 4, 4);
        }
        if m.does("bar.sync") {
            m.sync(&[0, 1, 2, 3], 0);
        }
        for warp in 0..4 {
            let thread = m.at(warp, ALL);
            let places: Vec<_> =
                (0..32).map(|lane| (lane, Place::Shared { rank: 0, offset: 0 })).collect();
            m.tracker.access(thread, Read, None, 16, &places);
        }
        if m.does("bar.sync before reuse") {
            m.sync(&[0, 1, 2, 3], 0);
        }
        let thread = m.at(2, ALL);
        m.shared(thread, Write, 0, 4);
    };
    check(
        (1, 4),
        sequence,
        &[
            ("bar.sync", "missing-synchronization"),
            ("bar.sync before reuse", "missing-synchronization"),
        ],
    );
}

#[test]
fn distributed_shared_memory() {
    let sequence = |m: &mut Machine| {
        if m.does("barrier.cluster at the start") {
            m.cluster_sync(2, 1, false);
        }
        for rank in 0..2 {
            let thread = m.of(rank, 0, ALL);
            m.remote(thread, Write, 1 - rank, 0, 4);
        }
        if m.does("barrier.cluster") {
            m.cluster_sync(2, 1, true);
        }
        for rank in 0..2 {
            let thread = m.of(rank, 0, ALL);
            m.remote(thread, Read, rank, 0, 4);
        }
        m.tracker.remove_cluster(0);
    };
    check(
        (2, 1),
        sequence,
        &[
            ("barrier.cluster at the start", "peer-not-started"),
            ("barrier.cluster", "missing-synchronization"),
        ],
    );
}

#[test]
fn a_cta_outlives_what_others_do_to_it() {
    let sequence = |m: &mut Machine| {
        let thread = m.of(1, 0, ONE);
        m.init(thread, 1, 4096, 1);
        m.cluster_sync(2, 1, true);
        let thread = m.of(0, 0, ALL);
        m.remote(thread, Read, 1, 0, 4);
        let thread = m.of(0, 0, ONE);
        m.arrive(thread, 1, 4096);
        if m.does("last barrier.cluster") {
            m.cluster_sync(2, 1, true);
        }
        m.tracker.remove_cluster(0);
        let arrivals = m.tracker.hazards_of(HazardKind::UnfinishedAtExit);
        let both = if m.left_out.is_some() { 2 } else { 0 };
        assert_eq!(arrivals.count(), both);
    };
    check((2, 1), sequence, &[("last barrier.cluster", "unfinished-at-exit")]);
}

#[test]
fn a_relaxed_cluster_barrier_needs_a_fence() {
    let sequence = |m: &mut Machine| {
        m.cluster_sync(2, 1, false);
        let writer = m.of(0, 0, ALL);
        m.remote(writer, Write, 1, 0, 4);
        if m.does("fence.acq_rel.cluster") {
            let writer = m.of(0, 0, ALL);
            m.tracker.fence(writer, Order::AcquireRelease, Scope::Cluster);
        }
        m.cluster_sync(2, 1, false);
        let reader = m.of(1, 0, ALL);
        m.remote(reader, Read, 1, 0, 4);
    };
    check((2, 1), sequence, &[("fence.acq_rel.cluster", "missing-synchronization")]);
}

#[test]
fn mbarriers_of_threads() {
    let sequence = |m: &mut Machine| {
        let thread = m.at(0, ONE);
        m.init(thread, 0, 4096, 32);
        let thread = m.at(0, ONE);
        m.init(thread, 0, 4104, 32);
        if m.does("bar.sync after init") {
            m.sync(&[0, 1], 0);
        }
        for round in 0..3 {
            let producer = m.at(0, ALL);
            if m.does("wait of the producer") {
                m.wait(producer, 0, 4104, round & 1 ^ 1);
            }
            m.shared(producer, Write, 0, 4);
            let producer = m.at(0, ALL);
            m.arrive(producer, 0, 4096);
            let consumer = m.at(1, ALL);
            if m.does("wait of the consumer") {
                m.wait(consumer, 0, 4096, round & 1);
            }
            m.shared(consumer, Read, 0, 4);
            let consumer = m.at(1, ALL);
            m.arrive(consumer, 0, 4104);
        }
    };
    check(
        (1, 2),
        sequence,
        &[
            ("bar.sync after init", "missing-mbarrier-init-sync"),
            ("wait of the producer", "missing-synchronization"),
            ("wait of the consumer", "missing-synchronization"),
            ("wait of the consumer", "phase-unobserved"),
        ],
    );
}

#[test]
fn a_wait_by_one_lane_needs_syncwarp() {
    let sequence = |m: &mut Machine| {
        let thread = m.at(0, ONE);
        m.init(thread, 0, 4096, 32);
        m.sync(&[0, 1], 0);
        let producer = m.at(0, ALL);
        m.shared(producer, Write, 0, 4);
        let producer = m.at(0, ALL);
        m.arrive(producer, 0, 4096);
        let consumer = m.at(1, ONE);
        m.wait(consumer, 0, 4096, 0);
        if m.does("bar.warp.sync") {
            let consumer = m.at(1, ALL);
            m.tracker.warp_barrier(consumer);
        }
        let consumer = m.at(1, ALL);
        m.shared(consumer, Read, 0, 4);
    };
    check((1, 2), sequence, &[("bar.warp.sync", "missing-synchronization")]);
}

#[test]
fn lanes_meet_again_as_one_group() {
    let mut m = Machine::new(1, 1, None);
    for lane in 0..32 {
        let thread = m.at(0, 1 << lane);
        m.tracker.fence_proxy_async(thread, true, true);
    }
    assert_eq!(m.tracker.warps[0].group_count(), 32);
    let all = m.at(0, ALL);
    m.tracker.warp_barrier(all);
    assert_eq!(m.tracker.warps[0].group_count(), 1);
}
