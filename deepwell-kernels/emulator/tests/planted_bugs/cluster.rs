//! CTAs of a cluster: distributed shared memory, remote arrivals, `st.async`, multicast.

use deepwell_emulator::hazard::Rules;
use deepwell_emulator::launch::Settings;

use crate::{Bug, Program, check, findings_with};

/// Two CTAs of so many threads.
const fn pair(threads: u32, shared: &'static str, body: &'static str) -> Program {
    let program = Program::of(threads, shared, body);
    Program { grid: 2, cluster: 2, ..program }
}

#[test]
fn ctas_write_to_each_other() {
    let program = pair(
        32,
        ".shared .align 16 .b8 mail[128];",
        "mov.u32 %r1, mail;
         shl.b32 %r2, %r0, 2;
         add.s32 %r3, %r1, %r2;
         mov.u32 %r4, %cluster_ctarank;
         xor.b32 %r5, %r4, 1;
         mapa.shared::cluster.u32 %r6, %r3, %r5; // @map
         barrier.cluster.arrive.aligned; // @arrive start
         barrier.cluster.wait.aligned; // @wait start
         st.shared::cluster.u32 [%r6], %r0; // @store
         barrier.cluster.arrive.aligned; // @arrive
         barrier.cluster.wait.aligned; // @wait
         ld.shared.u32 %r7, [%r3];
         ld.shared::cluster.u32 %r8, [%r6]; // @load
         barrier.cluster.arrive.aligned; // @arrive end
         barrier.cluster.wait.aligned; // @wait end",
    );
    check(
        &program,
        &[
            Bug(
                "no barrier before the end",
                &[("arrive end", ""), ("wait end", "")],
                "shared-of-exited-cta",
            ),
            Bug("no barrier", &[("arrive", ""), ("wait", "")], "missing-synchronization"),
            Bug(
                "the other CTA may not run yet",
                &[("arrive start", ""), ("wait start", "")],
                "peer-not-started",
            ),
            Bug("no wait", &[("wait", "")], "cluster-barrier-arrived-twice"),
            Bug("no arrival", &[("arrive", "")], "cluster-barrier-wait-without-arrival"),
            Bug(
                "a relaxed arrival",
                &[("arrive", "barrier.cluster.arrive.relaxed.aligned;")],
                "missing-synchronization",
            ),
            Bug(
                "a barrier of the CTA",
                &[("arrive", "bar.sync 0;"), ("wait", "")],
                "missing-synchronization",
            ),
            Bug(
                "a CTA that is not there",
                &[("map", "mapa.shared::cluster.u32 %r6, %r3, 2;")],
                "shared-rank-out-of-range",
            ),
            Bug(
                "the own CTA",
                &[
                    ("map", "mapa.shared::cluster.u32 %r6, %r3, %r4;"),
                    ("store", "setp.eq.u32 %p1, %r0, 40; @%p1 st.shared::cluster.u32 [%r6], %r0;"),
                ],
                "unwritten",
            ),
        ],
    );
}

#[test]
fn remote_arrivals_hand_on_what_was_stored() {
    let program = pair(
        32,
        ".shared .align 16 .b8 mail[128];\n.shared .align 8 .b8 full[8];",
        "mov.u32 %r1, mail;
         mov.u32 %r9, full;
         shl.b32 %r2, %r0, 2;
         add.s32 %r3, %r1, %r2;
         mov.u32 %r4, %cluster_ctarank;
         xor.b32 %r5, %r4, 1;
         mapa.shared::cluster.u32 %r6, %r3, %r5;
         mapa.shared::cluster.u32 %r10, %r9, %r5; // @map
         setp.ne.u32 %p0, %r0, 0;
         @%p0 bra MEET;
         mbarrier.init.shared::cta.b64 [%r9], 32; // @init
         fence.mbarrier_init.release.cluster; // @fence
         MEET:
         barrier.cluster.arrive.aligned; // @arrive start
         barrier.cluster.wait.aligned; // @wait start
         st.shared::cluster.u32 [%r6], %r0; // @store
         mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10]; // @arrive
         WAIT [%r9], 0; // @wait
         ld.shared.u32 %r7, [%r3];
         barrier.cluster.arrive.aligned; // @arrive end
         barrier.cluster.wait.aligned; // @wait end",
    );
    check(
        &program,
        &[
            Bug("no wait", &[("wait", "")], "missing-synchronization"),
            Bug(
                "a relaxed arrival",
                &[("arrive", "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r10];")],
                "missing-synchronization",
            ),
            Bug(
                "an arrival for the own CTA",
                &[("arrive", "mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r10];")],
                "missing-synchronization",
            ),
            Bug(
                "a wait for the own CTA",
                &[(
                    "wait",
                    "{ .reg .pred q; W: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 q, \
                     [%r9], 0; @!q bra W; }",
                )],
                "missing-synchronization",
            ),
            Bug(
                "arrival before the store",
                &[
                    ("store", "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10];"),
                    ("arrive", "st.shared::cluster.u32 [%r6], %r0;"),
                ],
                "missing-synchronization",
            ),
            Bug(
                "arrival at the own barrier",
                &[("map", "mapa.shared::cluster.u32 %r10, %r9, %r4;")],
                "missing-synchronization",
            ),
            Bug(
                "the initialization is not announced",
                &[("arrive start", ""), ("wait start", "")],
                "mbarrier-uninitialized",
            ),
            Bug(
                "a relaxed barrier after it, and no fence",
                &[("fence", ""), ("arrive start", "barrier.cluster.arrive.relaxed.aligned;")],
                "missing-mbarrier-init-sync",
            ),
            Bug(
                "a count of both CTAs",
                &[("init", "mbarrier.init.shared::cta.b64 [%r9], 64;")],
                "deadlock",
            ),
        ],
    );
    // Without the rule the scope does not count.
    let rules = Rules { mbarrier_scopes: false, ..Rules::default() };
    let narrow = [("arrive", "mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r10];")];
    let found = findings_with(&program, &narrow, Settings { rules, ..Settings::default() });
    assert_eq!(found, [""; 0]);
}

#[test]
fn stores_that_arrive() {
    let program = pair(
        32,
        ".shared .align 16 .b8 mail[128];\n.shared .align 8 .b8 full[8];",
        "mov.u32 %r1, mail;
         mov.u32 %r9, full;
         shl.b32 %r2, %r0, 2;
         add.s32 %r3, %r1, %r2;
         mov.u32 %r4, %cluster_ctarank;
         xor.b32 %r5, %r4, 1;
         mapa.shared::cluster.u32 %r6, %r3, %r5;
         mapa.shared::cluster.u32 %r10, %r9, %r5; // @map
         setp.ne.u32 %p0, %r0, 0;
         @%p0 bra MEET;
         mbarrier.init.shared::cta.b64 [%r9], 1;
         fence.mbarrier_init.release.cluster;
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 128; // @expect
         MEET:
         barrier.cluster.arrive.aligned; // @arrive start
         barrier.cluster.wait.aligned; // @wait start
         st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r6], %r0, [%r10]; // @store
         WAIT [%r9], 0; // @wait
         ld.shared.u32 %r7, [%r3];
         barrier.cluster.arrive.aligned; // @arrive end
         barrier.cluster.wait.aligned; // @wait end",
    );
    check(
        &program,
        &[
            Bug("no wait", &[("wait", "")], "missing-mbarrier-wait"),
            Bug(
                "too many bytes announced",
                &[("expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 256;")],
                "deadlock",
            ),
            Bug(
                "too few bytes announced",
                &[("expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 64;")],
                "missing-mbarrier-wait",
            ),
            Bug(
                "data there, the barrier here",
                &[("map", "mapa.shared::cluster.u32 %r10, %r9, %r4;")],
                "bulk-copy-barrier-of-another-cta",
            ),
            Bug(
                "the other CTA may not run yet",
                &[("arrive start", ""), ("wait start", "")],
                "mbarrier-uninitialized",
            ),
        ],
    );
}

#[test]
fn a_copy_to_both_ctas() {
    let program = pair(
        32,
        ".shared .align 128 .b8 tile[1024];\n.shared .align 8 .b8 full[8];",
        "mov.u32 %r1, tile;
         mov.u32 %r2, full;
         shl.b32 %r3, %r0, 2;
         add.s32 %r3, %r1, %r3;
         mov.u32 %r4, %cluster_ctarank;
         setp.ne.u32 %p0, %r0, 0;
         @%p0 bra MEET;
         mbarrier.init.shared::cta.b64 [%r2], 1;
         fence.mbarrier_init.release.cluster; // @fence
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024; // @expect
         MEET:
         barrier.cluster.arrive.aligned; // @arrive start
         barrier.cluster.wait.aligned; // @wait start
         setp.ne.u32 %p1, %r4, 0;
         or.pred %p2, %p0, %p1;
         @%p2 bra WAITING;
         mov.u32 %r5, 0;
         mov.u16 %r50h, 3; // @mask
         MULTICAST [%r1], [%rd2, {%r5, %r5}], [%r2], %r50h; // @copy
         WAITING:
         WAIT [%r2], 0; // @wait
         ld.shared.u32 %r7, [%r3];
         barrier.cluster.arrive.aligned; // @arrive end
         barrier.cluster.wait.aligned; // @wait end",
    );
    let program = Program {
        shared: ".shared .align 128 .b8 tile[1024];\n.shared .align 8 .b8 full[8];\n\
                 .reg .b16 %r50h;",
        ..program
    };
    check(
        &program,
        &[
            Bug("no wait", &[("wait", "")], "missing-mbarrier-wait"),
            Bug("one CTA only", &[("mask", "mov.u16 %r50h, 1;")], "deadlock"),
            Bug("a CTA that is not there", &[("mask", "mov.u16 %r50h, 7;")], "multicast-mask"),
            Bug(
                "half the bytes",
                &[("expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512;")],
                "mbarrier-more-bytes-than-expected",
            ),
            Bug(
                "both CTAs copy to both",
                &[(
                    "copy",
                    "WAIT [%r2], 1; cp.async.bulk.tensor.2d.shared::cluster.global.tile\
                  .mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%rd2, {%r5, %r5}], \
                  [%r2], %r50h; cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier\
                  ::complete_tx::bytes.multicast::cluster [%r1], [%rd2, {%r5, %r5}], [%r2], \
                  %r50h;",
                )],
                "deadlock",
            ),
            Bug(
                "the other CTA may not be ready",
                &[("arrive start", ""), ("wait start", "")],
                "mbarrier-uninitialized",
            ),
            Bug(
                "no fence after the initialization",
                &[("fence", "")],
                "missing-mbarrier-init-fence",
            ),
        ],
    );
}

/// CTA 0 copies to both CTAs twice: it must know that the other CTA has read.
#[test]
fn a_copy_to_both_ctas_again() {
    let program = pair(
        32,
        ".shared .align 128 .b8 tile[1024];\n.shared .align 8 .b8 full[8];\n\
         .shared .align 8 .b8 empty[8];\n.reg .b16 %h1;",
        "mov.u32 %r1, tile;
         mov.u32 %r2, full;
         mov.u32 %r3, empty;
         shl.b32 %r4, %r0, 2;
         add.s32 %r4, %r1, %r4;
         mov.u32 %r5, %cluster_ctarank;
         setp.ne.u32 %p0, %r0, 0;
         setp.ne.u32 %p1, %r5, 0;
         or.pred %p2, %p0, %p1;
         mov.u16 %h1, 3;
         mov.u32 %r6, 0;
         mov.u32 %r7, 0;
         mapa.shared::cluster.u32 %r8, %r3, 0; // @map
         @%p0 bra MEET;
         mbarrier.init.shared::cta.b64 [%r2], 1;
         mbarrier.init.shared::cta.b64 [%r3], 2; // @init empty
         fence.mbarrier_init.release.cluster;
         MEET:
         barrier.cluster.arrive.aligned;
         barrier.cluster.wait.aligned;
         ROUND:
         @%p0 bra ASKED;
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;
         ASKED:
         @%p2 bra TAKE;
         xor.b32 %r9, %r7, 1;
         WAIT [%r3], %r9; // @wait empty
         MULTICAST [%r1], [%rd2, {%r6, %r6}], [%r2], %h1;
         TAKE:
         bar.warp.sync -1;
         WAIT [%r2], %r7; // @wait full
         ld.shared.u32 %r10, [%r4];
         bar.warp.sync -1; // @sync
         @%p0 bra TOLD;
         mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8]; // @arrive
         TOLD:
         add.s32 %r7, %r7, 1;
         setp.lt.u32 %p3, %r7, 2;
         @%p3 bra ROUND;
         barrier.cluster.arrive.aligned; // @arrive end
         barrier.cluster.wait.aligned; // @wait end",
    );
    check(
        &program,
        &[
            Bug("no wait for readers", &[("wait empty", "")], "missing-mbarrier-wait"),
            Bug(
                "readers of the own CTA only",
                &[
                    ("init empty", "mbarrier.init.shared::cta.b64 [%r3], 1;"),
                    ("map", "mapa.shared::cluster.u32 %r8, %r3, %r5;"),
                ],
                "missing-mbarrier-wait",
            ),
            Bug("one lane's read counts for the warp", &[("sync", "")], "missing-synchronization"),
            Bug("no wait for the copy", &[("wait full", "")], "mbarrier-arrived-too-often"),
            Bug(
                "a relaxed arrival",
                &[("arrive", "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r8];")],
                "missing-synchronization",
            ),
            Bug("no arrival", &[("arrive", "")], "deadlock"),
            Bug(
                "the end while others arrive",
                &[("arrive end", ""), ("wait end", "")],
                "shared-of-exited-cta",
            ),
        ],
    );
}
