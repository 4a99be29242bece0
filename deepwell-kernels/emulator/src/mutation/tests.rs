//! Deletions of single instructions, and of those of a whole kernel.

use super::{deletions, without};
use crate::decode::{GlobalAddresses, Program, decode};
use crate::launch::{Arguments, Emulator, LaunchSpec, Settings};
use crate::ptx;

fn program(body: &str) -> Program {
    let text = format!(
        ".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k()\n{{\n\
         .reg .pred %p<4>;\n.reg .b32 %r<8>;\n.reg .b64 %d<8>;\n.shared .align 8 .b8 s[64];\n\
         {body}\nret;\n}}\n"
    );
    decode(&ptx::parse(&text).unwrap(), "k", &GlobalAddresses::new()).unwrap()
}

#[test]
fn what_synchronizes_has_a_name() {
    let check = |line: &str, expected: &[&str]| {
        let program = program(line);
        let found = deletions(&program);
        let names: Vec<&str> = found.iter().map(|deletion| deletion.what).collect();
        assert_eq!(names, expected, "{line}");
        for deletion in &found {
            assert_eq!(deletion.ptx_line, 10, "{line}");
            let left = deletions(&without(&program, deletion));
            assert!(left.iter().all(|left| left.what != deletion.what), "{line}: {left:?}");
        }
    };
    check("bar.sync 0;", &["bar.sync"]);
    check("barrier.cta.arrive 1, 64;", &["bar.arrive"]);
    check("bar.red.or.pred %p1, 0, %p2;", &["bar.red"]);
    check("bar.red.popc.u32 %r1, 0, %p2;", &[]);
    check("bar.warp.sync -1;", &["bar.warp.sync"]);
    check("barrier.cluster.arrive.relaxed.aligned;", &["barrier.cluster.arrive"]);
    check("barrier.cluster.wait.acquire.aligned;", &["barrier.cluster.wait"]);
    check("fence.acq_rel.gpu;", &["fence"]);
    check("membar.gl;", &["fence"]);
    check("fence.mbarrier_init.release.cluster;", &["fence.mbarrier_init"]);
    check("fence.proxy.async.shared::cta;", &["fence.proxy.async"]);
    check("griddepcontrol.wait;", &["griddepcontrol.wait"]);
    check("griddepcontrol.launch_dependents;", &[]);
    check("mbarrier.init.shared::cta.b64 [s], 1;", &["mbarrier.init"]);
    check("mbarrier.inval.shared::cta.b64 [s];", &[]);
    check("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [s], 16;", &["mbarrier.expect_tx"]);
    check("mbarrier.arrive.shared::cta.b64 %d1, [s];", &["mbarrier.arrive"]);
    check(
        "mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [s], 16;",
        &["mbarrier.arrive.expect_tx", "bytes of mbarrier.arrive.expect_tx"],
    );
    check("mbarrier.try_wait.parity.shared::cta.b64 %p1, [s], 0;", &["mbarrier.wait"]);
    check("mbarrier.test_wait.shared::cta.b64 %p1, [s], %d1;", &["mbarrier.wait"]);
    check("cp.async.commit_group;", &["cp.async.commit_group"]);
    check("cp.async.wait_group 1;", &["cp.async.wait_group"]);
    check("cp.async.bulk.commit_group;", &["cp.async.bulk.commit_group"]);
    check("cp.async.bulk.wait_group.read 0;", &["cp.async.bulk.wait_group"]);
    check("tcgen05.wait::ld.sync.aligned;", &["tcgen05.wait::ld"]);
    check("tcgen05.wait::st.sync.aligned;", &["tcgen05.wait::st"]);
    check("tcgen05.fence::before_thread_sync;", &["tcgen05.fence::before_thread_sync"]);
    check("tcgen05.fence::after_thread_sync;", &["tcgen05.fence::after_thread_sync"]);
    check(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [s];",
        &["tcgen05.commit"],
    );
    check("ld.acquire.gpu.global.u32 %r1, [%d1];", &["order of ld"]);
    check("st.release.gpu.global.u32 [%d1], %r1;", &["order of st"]);
    check("atom.acq_rel.gpu.global.add.u32 %r1, [%d1], 1;", &["order of atom"]);
    check("atom.relaxed.gpu.global.add.u32 %r1, [%d1], 1;", &[]);
    check("ld.global.u32 %r1, [%d1];", &[]);
    check("shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;", &[]);
}

/// Warps hand a number over through an mbarrier and shared memory.
const HAND_OVER: &str = "
.version 9.0
.target sm_90a
.address_size 64
.visible .entry hand_over(.param .u64 out)
{
    .reg .pred %p<4>;
    .reg .b32 %r<8>;
    .reg .b64 %d<4>;
    .shared .align 8 .b8 barrier[8];
    .shared .align 8 .b8 number[8];
    ld.param.u64 %d1, [out];
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [barrier], 1;
READY:
    bar.sync 0;
    setp.eq.u32 %p2, %r1, 32;
    @%p2 bra TAKE;
    @%p1 bra DONE;
    st.shared.u32 [number], 7;
    mbarrier.arrive.shared::cta.b64 _, [barrier];
    bra DONE;
TAKE:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [barrier], 0;
    @!%p3 bra TAKE;
    ld.shared.u32 %r2, [number];
    st.global.u32 [%d1], %r2;
DONE:
    ret;
}
";

#[test]
fn every_deletion_of_a_small_kernel_is_noticed() {
    let settings = Settings { step_limit: 10_000, ..Settings::default() };
    let mut emulator = Emulator::new(settings);
    let module = emulator.load_kernel(HAND_OVER, "hand_over").unwrap();
    let out = emulator.allocate(4, "out");
    let spec = LaunchSpec {
        kernel: "hand_over".to_owned(),
        grid: [1, 1, 1],
        block: [64, 1, 1],
        cluster: [1, 1, 1],
        shared_bytes: 0,
        arguments: Arguments::new().u64(out).bytes(),
        programmatic: false,
    };
    let fresh = emulator.clone();
    let report = emulator.launch(module, &spec).unwrap();
    assert!(report.is_clean());
    assert_eq!(emulator.read(out, 4).unwrap(), [7, 0, 0, 0]);
    let program = fresh.program(module, "hand_over").unwrap();
    let found = deletions(program);
    let names: Vec<&str> = found.iter().map(|deletion| deletion.what).collect();
    assert_eq!(names, ["mbarrier.init", "bar.sync", "mbarrier.arrive", "mbarrier.wait"]);
    for deletion in &found {
        assert!(deletion.ran(&report.counts.executed), "{deletion:?}");
        assert!(!deletion.ran(&vec![0; program.steps.len()]), "{deletion:?}");
        let mut mutant = fresh.clone();
        mutant.replace_program(module, without(program, deletion));
        let mut stopped = mutant.clone();
        stopped.settings.stop_at_hazard = true;
        let result = mutant.launch(module, &spec);
        // A launch that ends early ends because of what the whole one tells.
        if let (Ok(whole), Ok(part)) = (&result, stopped.launch(module, &spec)) {
            assert_eq!(whole.hazards[..part.hazards.len()], part.hazards, "{deletion:?}");
            assert_eq!(whole.hazards.is_empty(), part.hazards.is_empty(), "{deletion:?}");
            assert!(part.counts.instructions <= whole.counts.instructions, "{deletion:?}");
        }
        assert!(!result.is_ok_and(|report| report.is_clean()), "{deletion:?}");
    }
}
