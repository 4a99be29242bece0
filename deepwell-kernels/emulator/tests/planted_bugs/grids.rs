//! What other grids and the launch itself do: dependent launches, cluster launch control, tensor
//! maps that change.

use deepwell_emulator::bulk::Swizzle;
use deepwell_emulator::launch::{Completion, Settings};

use crate::{Bug, Program, check, launch};

#[test]
fn a_tensor_map_is_changed() {
    // The map is copied to the output, which is aligned as a map must be, and changed there.
    let program = Program::of(
        32,
        ".shared .align 128 .b8 map_here[128];\n.shared .align 128 .b8 tile[1024];\n\
         .shared .align 8 .b8 full[8];",
        "mov.u32 %r1, tile;
         mov.u32 %r2, full;
         mov.u32 %r3, map_here;
         shl.b32 %r4, %r0, 2;
         add.s32 %r5, %r3, %r4;
         cvt.u64.u32 %rd3, %r4;
         add.s64 %rd4, %rd2, %rd3;
         ld.param.u32 %r6, [%rd4];
         st.shared.u32 [%r5], %r6;
         setp.ne.u32 %p0, %r0, 0;
         @%p0 bra MEET;
         mbarrier.init.shared::cta.b64 [%r2], 1;
         fence.mbarrier_init.release.cluster;
         MEET:
         bar.warp.sync -1; // @sync
         @%p0 bra COPY;
         tensormap.replace.tile.global_address.shared::cta.b1024.b64 [map_here], %rd0; // @replace
         COPY:
         bar.warp.sync -1; // @sync again
         tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned \
           [%rd1], [map_here], 128; // @release
         fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128; // @acquire
         @%p0 bra WAITING;
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;
         mov.u32 %r7, 0;
         cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], \
           [%rd1, {%r7, %r7}], [%r2]; // @copy
         WAITING:
         bar.warp.sync -1;
         WAIT [%r2], 0; // @wait
         ld.shared.u32 %r8, [%r1];",
    );
    check(
        &program,
        &[
            Bug("no acquire", &[("acquire", "")], "missing-tensor-map-fence"),
            Bug(
                "an acquire of another map",
                &[("acquire", "fence.proxy.tensormap::generic.acquire.gpu [%rd1+128], 128;")],
                "missing-tensor-map-fence",
            ),
            Bug("lanes do not meet before the change", &[("sync", "")], "missing-warp-sync"),
            Bug("lanes do not meet before the copy", &[("sync again", "")], "missing-warp-sync"),
            Bug(
                "copied by stores, without a release",
                &[(
                    "release",
                    "ld.shared.u32 %r9, [%r5]; add.s64 %rd6, %rd1, %rd3; \
                  st.global.u32 [%rd6], %r9; bar.warp.sync -1;",
                )],
                "missing-tensor-map-fence",
            ),
            Bug(
                "an address out of line",
                &[(
                    "replace",
                    "{.reg .b64 a; add.s64 a, %rd0, 8; tensormap.replace.tile\
                  .global_address.shared::cta.b1024.b64 [map_here], a;}",
                )],
                "tensor-map-global-address",
            ),
            Bug("no wait", &[("wait", "")], "missing-mbarrier-wait"),
        ],
    );
}

#[test]
fn launch_control_answers() {
    let program = Program {
        target: "sm_100a",
        grid: 32,
        ..Program::of(
            32,
            ".shared .align 16 .b8 answer[64];\n.shared .align 8 .b8 told[8];\n.reg .b128 %q1;",
            "mov.u32 %r1, answer;
             mov.u32 %r2, told;
             setp.ne.u32 %p0, %r0, 0;
             @%p0 bra MEET;
             mbarrier.init.shared::cta.b64 [%r2], 1;
             fence.mbarrier_init.release.cluster; // @init fence
             mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16; // @expect
             clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 \
               [%r1], [%r2]; // @ask
             MEET:
             bar.warp.sync -1;
             WAIT [%r2], 0; // @wait
             ld.shared.b128 %q1, [%r1]; // @read
             clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q1;
             @!%p1 bra END; // @over
             fence.proxy.async.shared::cta; // @proxy
             bar.warp.sync -1; // @sync
             @%p0 bra AGAIN;
             mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
             clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 \
               [%r1], [%r2];
             AGAIN:
             bar.warp.sync -1;
             WAIT [%r2], 1; // @wait again
             END:",
        )
    };
    check(
        &program,
        &[
            Bug("no wait", &[("wait", "")], "missing-mbarrier-wait"),
            Bug(
                "too few bytes",
                &[("expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 8;")],
                "mbarrier-more-bytes-than-expected",
            ),
            Bug(
                "too many bytes",
                &[("expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 32;")],
                "deadlock",
            ),
            Bug("asked again while others read", &[("sync", "")], "missing-synchronization"),
            Bug("no fence between the proxies", &[("proxy", "")], "missing-proxy-fence"),
            Bug(
                "an answer out of line",
                &[(
                    "ask",
                    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier\
                  ::complete_tx::bytes.b128 [%r1+8], [%r2];",
                )],
                "launch-control-alignment",
            ),
            Bug("asked again after a failure", &[("over", "")], "launch-control-after-failure"),
            Bug("the end before the answer", &[("wait again", "")], "unfinished-at-exit"),
        ],
    );
}

/// Each CTA cancels clusters until an answer has none, and counts itself and each of them.
const WORKERS: Program = Program {
    target: "sm_100a",
    grid: 64,
    ..Program::of(
        32,
        ".shared .align 16 .b8 answer[16];\n.shared .align 8 .b8 told[8];\n.reg .b128 %q1;",
        "setp.ne.u32 %p0, %r0, 0;
         @%p0 bra END;
         mov.u32 %r1, answer;
         mov.u32 %r2, told;
         mov.u32 %r3, 0;
         mbarrier.init.shared::cta.b64 [%r2], 1;
         fence.mbarrier_init.release.cluster;
         NEXT:
         atom.global.add.u32 %r4, [%rd1], 1;
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
         clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 \
           [%r1], [%r2];
         WAIT [%r2], %r3;
         xor.b32 %r3, %r3, 1;
         ld.shared.b128 %q1, [%r1];
         clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q1;
         fence.proxy.async.shared::cta;
         @%p1 bra NEXT;
         END:",
    )
};

#[test]
fn launch_control_fails_with_clusters_left() {
    // Without failures the first 8 CTAs cancel the others; every CTA's work is done either way.
    for (completion, more_ctas) in
        [(Completion::Eager, false), (Completion::Lazy { seed: 1 }, true)]
    {
        let settings = Settings { completion, ..Settings::default() };
        let (report, output) = launch(&WORKERS, &[], Swizzle::None, settings).unwrap();
        assert_eq!(output[0], 64, "{completion:?}");
        assert_eq!(report.counts.ctas > 8, more_ctas, "{completion:?}: {}", report.counts.ctas);
    }
}

#[test]
fn an_mbarrier_becomes_data() {
    let program = Program::of(
        32,
        ".shared .align 8 .b8 word[16];",
        "mov.u32 %r1, word;
         setp.ne.u32 %p0, %r0, 0;
         @%p0 bra MEET;
         mbarrier.init.shared::cta.b64 [%r1], 32; // @init
         MEET:
         bar.warp.sync -1; // @sync
         mbarrier.arrive.shared::cta.b64 %rd3, [%r1]; // @arrive
         LOOP:
         mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %rd3; // @test
         @!%p1 bra LOOP;
         bar.warp.sync -1; // @sync again
         @%p0 bra END;
         mbarrier.inval.shared::cta.b64 [%r1]; // @inval
         st.shared.u32 [%r1], 5; // @data
         END:",
    );
    check(
        &program,
        &[
            Bug("still live", &[("inval", "")], "mbarrier-overwritten"),
            Bug(
                "used after its end",
                &[("data", "mbarrier.arrive.shared::cta.b64 %rd3, [%r1];")],
                "mbarrier-uninitialized",
            ),
            Bug(
                "initialized over a live one",
                &[("inval", "mbarrier.init.shared::cta.b64 [%r1], 1;")],
                "mbarrier-reinitialized",
            ),
            Bug(
                "a count of none",
                &[("init", "mbarrier.init.shared::cta.b64 [%r1], 0;")],
                "mbarrier-count-out-of-range",
            ),
            Bug(
                "a count past its limit",
                &[("init", "mbarrier.init.shared::cta.b64 [%r1], 1048576;")],
                "mbarrier-count-out-of-range",
            ),
            Bug(
                "out of line",
                &[("init", "mbarrier.init.shared::cta.b64 [%r1+4], 32;")],
                "mbarrier-misaligned",
            ),
            Bug("read as data", &[("arrive", "ld.shared.u64 %rd3, [%r1];")], "mbarrier-read"),
            Bug("ended while others may wait", &[("sync again", "")], "missing-synchronization"),
            Bug(
                "more arrivals than it counts",
                &[("arrive", "mbarrier.arrive.noComplete.shared::cta.b64 %rd3, [%r1], 2;")],
                "mbarrier-no-complete-completed",
            ),
        ],
    );
}
