//! The pipeline of a persistent tcgen05 GEMM: warp 0 loads, warp 1 multiplies, warps 2 and 3 are
//! the epilogue, each of which reads its lanes of tensor memory and stores by TMA.

use super::*;
use Direction::{Read, Write};

const STAGES: u32 = 2;
const BYTES: u32 = 2048;
/// Columns of the two accumulators, and where the scales are.
const COLUMNS: u32 = 64;
const SCALES: std::ops::Range<u32> = 256..260;

fn full(stage: u32) -> u32 {
    65536 + stage * 8
}

fn empty(stage: u32) -> u32 {
    65600 + stage * 8
}

fn accumulator_full(at: u32) -> u32 {
    65664 + at * 8
}

fn accumulator_empty(at: u32) -> u32 {
    65728 + at * 8
}

fn columns(at: u32) -> std::ops::Range<u32> {
    at * COLUMNS..(at + 1) * COLUMNS
}

fn set_up(m: &mut Machine) {
    let one = m.at(0, ONE);
    for stage in 0..STAGES {
        m.init(one, 0, full(stage), 1);
        m.init(one, 0, empty(stage), 1);
    }
    for at in 0..2 {
        m.init(one, 0, accumulator_full(at), 1);
        m.init(one, 0, accumulator_empty(at), 64);
    }
    if m.does("fence.mbarrier_init") {
        m.tracker.fence_mbarrier_init(one);
    }
    if m.does("bar.sync after set-up") {
        m.sync(&[0, 1, 2, 3], 0);
    }
}

fn load(m: &mut Machine, round: u32) {
    let (stage, phase) = (round % STAGES, (round / STAGES) & 1);
    let one = m.at(0, ONE);
    if m.does("wait for an empty stage") {
        m.wait(one, 0, empty(stage), phase ^ 1);
    }
    let one = m.at(0, ONE);
    m.expect(one, 0, full(stage), BYTES);
    for half in 0..2 {
        let one = m.at(0, ONE);
        m.load(one, 0, stage * BYTES + half * BYTES / 2, BYTES / 2, (0, full(stage)));
    }
}

fn multiply(m: &mut Machine, round: u32, at: u32) {
    let (stage, phase) = (round % STAGES, (round / STAGES) & 1);
    let one = m.at(1, ONE);
    if m.does("wait for a full stage") {
        m.wait(one, 0, full(stage), phase);
    }
    // Scales to tensor memory, then the MMA that uses them; the next copy follows in order.
    let one = m.at(1, ONE);
    let copy = m.reads(one, Unit::TensorCopy, stage * BYTES, 512);
    m.tracker.access_tensor(copy, Write, 0, 0..128, SCALES);
    for _ in 0..2 {
        let one = m.at(1, ONE);
        let mma = m.reads(one, Unit::TensorMma, stage * BYTES + 512, BYTES - 512);
        m.tracker.access_tensor(mma, Read, 0, 0..128, SCALES);
        m.tracker.access_tensor(mma, Read, 0, 0..128, columns(at));
        m.tracker.access_tensor(mma, Write, 0, 0..128, columns(at));
        m.tracker.ran(mma);
    }
    let one = m.at(1, ONE);
    if m.does("commit of the stage") {
        m.commit_to(one, 0, empty(stage));
    }
}

fn epilogue(m: &mut Machine, tile: u32) {
    let (at, phase) = (tile % 2, (tile / 2) & 1);
    for warp in 2..4 {
        let all = m.at(warp, ALL);
        if m.does("wait for the accumulator") {
            m.wait(all, 0, accumulator_full(at), phase);
        }
        if m.does("fence::after in the epilogue") {
            m.tracker.tensor_fence_after(all);
        }
        let all = m.at(warp, ALL);
        let lanes = (warp - 2) * 64..(warp - 2) * 64 + 64;
        let load = m.tracker.issue(all, Unit::TensorLoad);
        m.tracker.access_tensor(load, Read, 0, lanes, columns(at));
        m.tracker.ran(load);
        if m.does("tcgen05.wait::ld") {
            m.tracker.tensor_wait_load(all);
        }
        if m.does("fence::before in the epilogue") {
            m.tracker.tensor_fence_before(all);
        }
        if m.does("arrive of the epilogue") {
            let all = m.at(warp, ALL);
            m.arrive(all, 0, accumulator_empty(at));
        }
        let one = m.at(warp, ONE);
        if m.does("wait_group.read") {
            m.tracker.wait_group(one, Group::Bulk, 0, true);
        }
        if m.does("bar.warp.sync before the writes") {
            let all = m.at(warp, ALL);
            m.tracker.warp_barrier(all);
        }
        let all = m.at(warp, ALL);
        m.shared(all, Write, 32768 + (warp - 2) * 512, 16);
        if m.does("fence.proxy.async") {
            m.tracker.fence_proxy_async(all, true, false);
        }
        if m.does("bar.warp.sync before the store") {
            let all = m.at(warp, ALL);
            m.tracker.warp_barrier(all);
        }
        let one = m.at(warp, ONE);
        m.store(one, 32768 + (warp - 2) * 512, 512);
        if m.does("bulk commit_group") {
            m.tracker.commit_group(one, Group::Bulk);
        }
    }
}

fn gemm(m: &mut Machine) {
    set_up(m);
    let mut round = 0;
    for tile in 0..4 {
        let (at, phase) = (tile % 2, (tile / 2) & 1);
        for _ in 0..3 {
            load(m, round);
            if round % 3 == 0 {
                let one = m.at(1, ONE);
                if m.does("wait for an empty accumulator") {
                    m.wait(one, 0, accumulator_empty(at), phase ^ 1);
                }
                if m.does("fence::after in the MMA") {
                    m.tracker.tensor_fence_after(one);
                }
            }
            multiply(m, round, at);
            round += 1;
        }
        let one = m.at(1, ONE);
        if m.does("commit of the accumulator") {
            m.commit_to(one, 0, accumulator_full(at));
        }
        epilogue(m, tile);
    }
    for warp in 2..4 {
        let one = m.at(warp, ONE);
        m.tracker.wait_group(one, Group::Bulk, 0, true);
    }
    if m.does("bar.sync before dealloc") {
        m.sync(&[0, 1, 2, 3], 0);
    }
    let thread = m.at(1, ALL);
    m.tracker.tensor_free(thread, 0..512);
    m.tracker.remove_cluster(0);
}

#[test]
fn every_step_of_a_tensor_memory_gemm_matters() {
    check(
        (1, 4),
        gemm,
        &[
            ("fence.mbarrier_init", "missing-mbarrier-init-fence"),
            ("bar.sync after set-up", "missing-mbarrier-init-sync"),
            ("wait for an empty stage", "missing-tensor-commit-wait"),
            ("wait for a full stage", "missing-mbarrier-wait"),
            ("commit of the stage", "deadlock"),
            ("wait for the accumulator", "missing-tensor-commit-wait"),
            ("fence::after in the epilogue", "missing-tensor-fence-after"),
            ("tcgen05.wait::ld", "missing-tensor-wait-load"),
            ("fence::before in the epilogue", "missing-tensor-fence-before"),
            ("arrive of the epilogue", "deadlock"),
            ("wait_group.read", "missing-group-wait"),
            ("bar.warp.sync before the writes", "missing-warp-sync"),
            ("fence.proxy.async", "missing-proxy-fence"),
            ("bar.warp.sync before the store", "missing-synchronization"),
            ("bulk commit_group", "missing-group-wait"),
            ("wait for an empty accumulator", "missing-synchronization"),
            ("fence::after in the MMA", "missing-tensor-fence-after"),
            ("commit of the accumulator", "deadlock"),
            ("bar.sync before dealloc", "tensor-memory-freed-in-use"),
        ],
    );
}

#[test]
fn a_cta_pair_multiplies_together() {
    const PARTS: std::ops::Range<u32> = 0..2;
    let sequence = |m: &mut Machine| {
        for rank in PARTS {
            let one = m.of(rank, 0, ONE);
            for (mbarrier, count) in [(4096, 2), (4104, 1), (4112, 1), (4120, 64)] {
                m.init(one, rank, mbarrier, count);
            }
            if m.does("fence.mbarrier_init") {
                m.tracker.fence_mbarrier_init(one);
            }
        }
        m.cluster_sync(2, 2, false);
        for round in 0..3 {
            for rank in PARTS {
                let one = m.of(rank, 0, ONE);
                if m.does("wait for empty") {
                    m.wait(one, rank, 4104, round & 1 ^ 1);
                }
                m.expect(one, 0, 4096, BYTES);
                m.load(one, rank, 8192, BYTES, (0, 4096));
            }
            let one = m.of(0, 1, ONE);
            if m.does("wait for full") {
                m.wait(one, 0, 4096, round & 1);
            }
            if m.does("wait for the epilogues") {
                m.wait(one, 0, 4120, round & 1 ^ 1);
            }
            m.tracker.tensor_fence_after(one);
            let mma = m.tracker.issue(one, Unit::TensorMma);
            for rank in PARTS {
                let place = Place::Shared { rank, offset: 8192 };
                m.tracker.access_operation(mma, Read, place, BYTES);
                m.tracker.access_tensor(mma, Write, rank, 0..128, columns(0));
            }
            m.tracker.ran(mma);
            for rank in PARTS {
                m.commit_to(one, rank, 4104);
                m.commit_to(one, rank, 4112);
            }
            for rank in PARTS {
                let all = m.of(rank, 1, ALL);
                if m.does("wait for the MMA") {
                    m.wait(all, rank, 4112, round & 1);
                }
                m.tracker.tensor_fence_after(all);
                let load = m.tracker.issue(all, Unit::TensorLoad);
                m.tracker.access_tensor(load, Read, rank, 0..32, columns(0));
                m.tracker.ran(load);
                m.tracker.tensor_wait_load(all);
                m.tracker.tensor_fence_before(all);
                m.arrive(all, 0, 4120);
            }
        }
        for rank in PARTS {
            let one = m.of(rank, 0, ONE);
            m.wait(one, rank, 4104, 0);
        }
        if m.does("last barrier.cluster") {
            m.cluster_sync(2, 2, true);
        }
        for rank in PARTS {
            let all = m.of(rank, 1, ALL);
            m.tracker.tensor_free(all, 0..512);
        }
        m.tracker.remove_cluster(0);
    };
    check(
        (2, 2),
        sequence,
        &[
            ("fence.mbarrier_init", "missing-mbarrier-init-sync"),
            ("wait for empty", "missing-tensor-commit-wait"),
            ("wait for full", "missing-mbarrier-wait"),
            ("wait for the epilogues", "missing-synchronization"),
            ("wait for the MMA", "missing-tensor-commit-wait"),
            ("last barrier.cluster", "unfinished-at-exit"),
        ],
    );
}

#[test]
fn without_tensor_fences_the_rest_is_still_checked() {
    let run = |left_out| {
        let mut m = Machine::new(1, 4, left_out);
        m.tracker.rules.tensor_fences = false;
        gemm(&mut m);
        m.kinds()
    };
    assert_eq!(run(Some("fence::after in the epilogue")), Vec::<&str>::new());
    assert_eq!(run(Some("fence::before in the epilogue")), Vec::<&str>::new());
    assert!(run(Some("tcgen05.wait::ld")).contains(&"missing-tensor-wait-load"));
    assert!(run(Some("wait for the accumulator")).contains(&"missing-tensor-commit-wait"));
}

#[test]
fn a_in_tensor_memory_is_stored_waited_for_and_fenced() {
    let sequence = |m: &mut Machine| {
        let one = m.at(0, ONE);
        m.init(one, 0, 4096, 32);
        m.sync(&[0, 1], 0);
        let all = m.at(0, ALL);
        let store = m.tracker.issue(all, Unit::TensorStore);
        m.tracker.access_tensor(store, Write, 0, 0..32, 0..64);
        if m.does("tcgen05.wait::st") {
            m.tracker.tensor_wait_store(all);
        }
        if m.does("fence::before") {
            m.tracker.tensor_fence_before(all);
        }
        let all = m.at(0, ALL);
        m.arrive(all, 0, 4096);
        let one = m.at(1, ONE);
        if m.does("wait") {
            m.wait(one, 0, 4096, 0);
        }
        if m.does("fence::after") {
            m.tracker.tensor_fence_after(one);
        }
        let one = m.at(1, ONE);
        let mma = m.tracker.issue(one, Unit::TensorMma);
        m.tracker.access_tensor(mma, Read, 0, 0..32, 0..64);
    };
    check(
        (1, 2),
        sequence,
        &[
            ("tcgen05.wait::st", "missing-tensor-wait-store"),
            ("fence::before", "missing-tensor-fence-before"),
            ("wait", "missing-synchronization"),
            ("fence::after", "missing-tensor-fence-after"),
        ],
    );
}

#[test]
fn a_copy_of_one_thread_before_the_mma_of_another() {
    let sequence = |m: &mut Machine| {
        let one = m.at(0, ONE);
        m.init(one, 0, 4096, 1);
        m.sync(&[0, 1], 0);
        let one = m.at(0, ONE);
        let copy = m.tracker.issue(one, Unit::TensorCopy);
        m.tracker.access_tensor(copy, Write, 0, 0..128, SCALES);
        if m.does("fence::before") {
            m.tracker.tensor_fence_before(one);
        }
        let one = m.at(0, ONE);
        m.arrive(one, 0, 4096);
        let one = m.at(1, ONE);
        m.wait(one, 0, 4096, 0);
        if m.does("fence::after") {
            m.tracker.tensor_fence_after(one);
        }
        let one = m.at(1, ONE);
        let mma = m.tracker.issue(one, Unit::TensorMma);
        m.tracker.access_tensor(mma, Read, 0, 0..128, SCALES);
    };
    check(
        (1, 2),
        sequence,
        &[
            ("fence::before", "missing-tensor-fence-before"),
            ("fence::after", "missing-tensor-fence-after"),
        ],
    );
}

#[test]
fn one_lane_arrives_for_the_loads_of_its_warp() {
    // The fence may be one of all lanes, or of the one that arrives.
    for fence_of_all in [true, false] {
        let sequence = |m: &mut Machine| {
            let one = m.at(0, ONE);
            m.init(one, 0, 4096, 1);
            m.init(one, 0, 4104, 32);
            m.sync(&[0, 1], 0);
            let all = m.at(0, ALL);
            let load = m.tracker.issue(all, Unit::TensorLoad);
            m.tracker.access_tensor(load, Read, 0, 0..32, 0..64);
            m.tracker.ran(load);
            m.tracker.tensor_wait_load(all);
            if fence_of_all {
                m.tracker.tensor_fence_before(all);
            }
            if m.does("bar.warp.sync") {
                m.tracker.warp_barrier(all);
            }
            let one = m.at(0, ONE);
            if !fence_of_all {
                m.tracker.tensor_fence_before(one);
            }
            m.arrive(one, 0, 4096);
            // What comes to the other warp behind its fence is no order of tcgen05.
            let all = m.at(0, ALL);
            m.arrive(all, 0, 4104);
            let one = m.at(1, ONE);
            m.wait(one, 0, 4096, 0);
            m.tracker.tensor_fence_after(one);
            let one = m.at(1, ONE);
            m.wait(one, 0, 4104, 0);
            let one = m.at(1, ONE);
            let mma = m.tracker.issue(one, Unit::TensorMma);
            m.tracker.access_tensor(mma, Write, 0, 0..32, 0..64);
            m.tracker.ran(mma);
        };
        check((1, 2), sequence, &[("bar.warp.sync", "tensor-wait-of-one-lane")]);
    }
}

#[test]
fn a_commit_tracks_its_own_thread_only() {
    let mut m = Machine::new(1, 1, None);
    let one = m.at(0, ONE);
    m.init(one, 0, 4096, 1);
    m.tracker.fence_mbarrier_init(one);
    m.tracker.warp_barrier(Thread { lanes: ALL, ..one });
    let one = m.at(0, ONE);
    let mma = m.tracker.issue(one, Unit::TensorMma);
    m.tracker.access_tensor(mma, Write, 0, 0..128, 0..16);
    let other = m.at(0, 2);
    m.commit_to(other, 0, 4096);
    let all = m.at(0, ALL);
    m.wait(all, 0, 4096, 0);
    m.tracker.tensor_fence_after(all);
    let all = m.at(0, ALL);
    let load = m.tracker.issue(all, Unit::TensorLoad);
    m.tracker.access_tensor(load, Read, 0, 0..32, 0..16);
    assert_eq!(m.kinds(), ["missing-tensor-commit-wait"]);
}

#[test]
fn registers_of_mmas_and_loads() {
    let mut watch = RegisterWatch::default();
    assert_eq!(
        watch.warp_group_mma(&[1], &[9], 10),
        Some((HazardKind::MissingWarpGroupFence, 10, 1))
    );
    let mut watch = RegisterWatch::default();
    assert_eq!(watch.touch(1, Write, 1), None);
    watch.warp_group_fence();
    assert_eq!(watch.warp_group_mma(&[1], &[9], 10), None);
    // A copy in flight is no use; the copy is what the next MMA goes on with.
    watch.copy(1, 2);
    assert_eq!(watch.warp_group_mma(&[2], &[9], 11), None);
    watch.warp_group_commit();
    assert_eq!(watch.touch(9, Read, 12), None);
    assert_eq!(watch.touch(2, Read, 13), Some((HazardKind::RegisterInFlight, 11, 2)));
    watch.warp_group_wait(0);
    assert_eq!(watch.touch(2, Read, 14), None);
    assert_eq!(
        watch.warp_group_mma(&[2], &[], 15),
        Some((HazardKind::MissingWarpGroupFence, 14, 2))
    );
    // To read what a load gives is to wait for it, which is a warning only; to write it is not.
    watch.tensor_load(&[5, 6, 7, 8], 20);
    assert_eq!(watch.touch(5, Read, 21), Some((HazardKind::TensorLoadUnwaited, 20, 5)));
    assert_eq!(watch.touch(8, Read, 21), None);
    assert_eq!(watch.touch(5, Write, 22), None);
    assert_eq!(watch.touch(6, Write, 23), Some((HazardKind::RegisterInFlight, 20, 6)));
    watch.copy(7, 9);
    assert_eq!(watch.touch(7, Write, 24), None);
    assert_eq!(watch.touch(9, Write, 25), None);
    watch.tensor_load(&[5], 26);
    watch.tensor_wait_load();
    assert_eq!(watch.touch(5, Write, 27), None);
}
