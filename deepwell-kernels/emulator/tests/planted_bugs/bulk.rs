//! Bulk and tensor copies, and where they meet loads and stores.

use crate::{Bug, Program, check};

/// Thread 0 has four pieces copied through two stages; warp 1 reads them.
const RING: Program = Program::of(
    64,
    ".shared .align 128 .b8 stage[2048];\n.shared .align 8 .b8 full[16];\n\
     .shared .align 8 .b8 empty[16];",
    "mov.u32 %r1, stage;
     mov.u32 %r2, full;
     mov.u32 %r3, empty;
     setp.ne.u32 %p0, %r0, 0;
     @%p0 bra MEET;
     mbarrier.init.shared::cta.b64 [%r2], 1; // @init full
     mbarrier.init.shared::cta.b64 [%r2+8], 1;
     mbarrier.init.shared::cta.b64 [%r3], 32; // @init empty
     mbarrier.init.shared::cta.b64 [%r3+8], 32;
     fence.mbarrier_init.release.cluster; // @init fence
     MEET:
     bar.sync 0; // @sync
     setp.ge.u32 %p1, %r0, 32;
     @%p1 bra READER;
     @%p0 bra END;
     mov.u32 %r4, 0;
     mov.b64 %rd3, %rd0;
     FILL:
     and.b32 %r5, %r4, 1;
     shr.u32 %r6, %r4, 1;
     shl.b32 %r7, %r5, 3;
     shl.b32 %r8, %r5, 10;
     add.s32 %r9, %r2, %r7;
     add.s32 %r10, %r3, %r7;
     add.s32 %r11, %r1, %r8;
     xor.b32 %r12, %r6, 1; // @empty parity
     and.b32 %r12, %r12, 1;
     WAIT [%r10], %r12; // @wait empty
     mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 1024; // @expect
     cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r11], [%rd3], 1024, \
       [%r9]; // @copy
     add.s64 %rd3, %rd3, 1024;
     add.s32 %r4, %r4, 1;
     setp.lt.u32 %p2, %r4, 4;
     @%p2 bra FILL;
     bra END;
     READER:
     and.b32 %r13, %r0, 31;
     shl.b32 %r13, %r13, 4;
     add.s32 %r13, %r1, %r13;
     mov.u32 %r4, 0;
     TAKE:
     and.b32 %r5, %r4, 1;
     shr.u32 %r6, %r4, 1;
     shl.b32 %r7, %r5, 3;
     shl.b32 %r8, %r5, 10;
     add.s32 %r9, %r2, %r7; // @full of
     add.s32 %r10, %r3, %r7;
     add.s32 %r11, %r13, %r8;
     and.b32 %r12, %r6, 1; // @full parity
     WAIT [%r9], %r12; // @wait full
     ld.shared.v4.u32 {%r14, %r15, %r16, %r17}, [%r11];
     ld.shared.v4.u32 {%r14, %r15, %r16, %r17}, [%r11+512]; // @load
     mbarrier.arrive.shared::cta.b64 _, [%r10]; // @arrive
     add.s32 %r4, %r4, 1;
     setp.lt.u32 %p2, %r4, 4;
     @%p2 bra TAKE;
     END:",
);

#[test]
fn a_ring_of_bulk_copies() {
    check(
        &RING,
        &[
            Bug("no wait for the copy", &[("wait full", "")], "deadlock"),
            Bug("no wait for the readers", &[("wait empty", "")], "deadlock"),
            Bug(
                "bytes expected before the wait for the readers",
                &[
                    (
                        "wait empty",
                        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 1024;\n\
                         WAIT [%r10], %r12;",
                    ),
                    ("expect", ""),
                ],
                "phase-unknown",
            ),
            Bug("the wrong phase to read", &[("full parity", "xor.b32 %r12, %r6, 1;")], "deadlock"),
            Bug("the phase never changes", &[("full parity", "mov.u32 %r12, 0;")], "deadlock"),
            Bug(
                "the wrong phase to fill",
                &[("empty parity", "and.b32 %r12, %r6, 1;")],
                "deadlock",
            ),
            Bug(
                "the phase to fill never changes",
                &[("empty parity", "mov.u32 %r12, 1;")],
                "deadlock",
            ),
            Bug(
                "the other stage's barrier",
                &[("full of", "xor.b32 %r7, %r7, 8; add.s32 %r9, %r2, %r7;")],
                "missing-mbarrier-wait",
            ),
            Bug("no arrival of readers", &[("arrive", "")], "deadlock"),
            Bug(
                "arrival before the last read",
                &[
                    ("load", "mbarrier.arrive.shared::cta.b64 _, [%r10];"),
                    ("arrive", "ld.shared.v4.u32 {%r14, %r15, %r16, %r17}, [%r11+512];"),
                ],
                "missing-synchronization",
            ),
            Bug(
                "one reader arrives for all, which wait for none",
                &[
                    (
                        "init empty",
                        "mbarrier.init.shared::cta.b64 [%r3], 1; \
                  mbarrier.init.shared::cta.b64 [%r3+8], 1;",
                    ),
                    (
                        "arrive",
                        "setp.eq.u32 %p3, %r0, 32; \
                  @%p3 mbarrier.arrive.shared::cta.b64 _, [%r10];",
                    ),
                ],
                "mbarrier-reinitialized",
            ),
            Bug(
                "a count of readers too large",
                &[("init empty", "mbarrier.init.shared::cta.b64 [%r3], 33;")],
                "deadlock",
            ),
            Bug(
                "a count of readers too small",
                &[("init empty", "mbarrier.init.shared::cta.b64 [%r3], 31;")],
                "missing-synchronization",
            ),
            Bug(
                "a count of copies too large",
                &[("init full", "mbarrier.init.shared::cta.b64 [%r2], 2;")],
                "deadlock",
            ),
            Bug(
                "too few bytes announced",
                &[("expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 512;")],
                "mbarrier-more-bytes-than-expected",
            ),
            Bug(
                "too many bytes announced",
                &[("expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 2048;")],
                "deadlock",
            ),
            Bug(
                "no bytes announced",
                &[("expect", "mbarrier.arrive.shared::cta.b64 _, [%r9];")],
                "mbarrier-more-bytes-than-expected",
            ),
            Bug(
                "announced without arrival",
                &[("expect", "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r9], 1024;")],
                "deadlock",
            ),
            Bug("no copy", &[("copy", "")], "deadlock"),
            Bug(
                "half a copy",
                &[(
                    "copy",
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
                  [%r11], [%rd3], 512, [%r9];",
                )],
                "deadlock",
            ),
            Bug(
                "a copy out of line",
                &[(
                    "copy",
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
                  [%r11+8], [%rd3], 1024, [%r9];",
                )],
                "bulk-copy-alignment",
            ),
            Bug(
                "a size that is no multiple of 16",
                &[(
                    "copy",
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
                  [%r11], [%rd3], 1020, [%r9];",
                )],
                "bulk-copy-size",
            ),
            Bug(
                "a copy over the barriers",
                &[(
                    "copy",
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
                  [%r11+1040], [%rd3], 1024, [%r9];",
                )],
                "mbarrier-overwritten",
            ),
            Bug(
                "a source past its end",
                &[(
                    "copy",
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
                  [%r11], [%rd3+65536], 1024, [%r9];",
                )],
                "global-out-of-range",
            ),
            Bug(
                "no barrier after the initialization",
                &[("sync", "")],
                "missing-mbarrier-init-sync",
            ),
            Bug(
                "no fence after the initialization",
                &[("init fence", "")],
                "missing-mbarrier-init-fence",
            ),
            Bug("no initialization", &[("init full", "")], "mbarrier-uninitialized"),
        ],
    );
}

#[test]
fn results_go_out_by_bulk_copies() {
    let program = Program::of(
        64,
        ".shared .align 128 .b8 out[256];",
        "mov.u32 %r1, out;
         shl.b32 %r2, %r0, 2;
         add.s32 %r3, %r1, %r2;
         setp.ne.u32 %p0, %r0, 0;
         st.shared.u32 [%r3], %r0;
         fence.proxy.async.shared::cta; // @fence
         bar.sync 0; // @sync
         @%p0 bra MEET;
         cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 256; // @copy
         cp.async.bulk.commit_group; // @commit
         cp.async.bulk.wait_group.read 0; // @wait
         MEET:
         bar.sync 0; // @meet
         st.shared.u32 [%r3], 1;
         fence.proxy.async.shared::cta;
         bar.sync 0;
         @%p0 bra END;
         cp.async.bulk.global.shared::cta.bulk_group [%rd1+256], [%r1], 256;
         cp.async.bulk.commit_group;
         cp.async.bulk.wait_group 0; // @wait all
         ld.global.u32 %r4, [%rd1+256];
         END:",
    );
    check(
        &program,
        &[
            Bug("no fence between the proxies", &[("fence", "")], "missing-proxy-fence"),
            Bug(
                "a fence of global memory",
                &[("fence", "fence.proxy.async.global;")],
                "missing-proxy-fence",
            ),
            Bug("a fence of threads", &[("fence", "fence.acq_rel.cta;")], "missing-proxy-fence"),
            Bug("no barrier", &[("sync", "")], "missing-synchronization"),
            Bug("no wait", &[("wait", "")], "missing-group-wait"),
            Bug("no commit", &[("commit", "")], "missing-group-wait"),
            Bug(
                "a wait that leaves one",
                &[("wait", "cp.async.bulk.wait_group.read 1;")],
                "missing-group-wait",
            ),
            Bug("others do not wait", &[("meet", "")], "missing-synchronization"),
            Bug(
                "read back after the source was read",
                &[("wait all", "cp.async.bulk.wait_group.read 0;")],
                "missing-group-wait",
            ),
            Bug("the CTA ends before", &[("wait all", "bra END;")], "unfinished-at-exit"),
            Bug(
                "a size that is no multiple of 16",
                &[("copy", "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 250;")],
                "bulk-copy-size",
            ),
        ],
    );
}

#[test]
fn a_stage_is_written_by_both_proxies() {
    let program = Program::of(
        32,
        ".shared .align 128 .b8 stage[128];\n.shared .align 8 .b8 full[8];",
        "mov.u32 %r1, stage;
         mov.u32 %r2, full;
         shl.b32 %r3, %r0, 2;
         add.s32 %r3, %r1, %r3;
         setp.ne.u32 %p0, %r0, 0;
         @%p0 bra MEET;
         mbarrier.init.shared::cta.b64 [%r2], 1;
         fence.mbarrier_init.release.cluster;
         MEET:
         st.shared.u32 [%r3], 0;
         fence.proxy.async.shared::cta; // @fence
         bar.warp.sync -1; // @sync
         @%p0 bra WAITING;
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd0], 128, \
           [%r2];
         WAITING:
         bar.warp.sync -1;
         WAIT [%r2], 0; // @wait
         ld.shared.u32 %r4, [%r3];
         st.shared.u32 [%r3], %r4; // @store
         fence.proxy.async.shared::cta; // @fence again
         bar.warp.sync -1; // @sync again
         @%p0 bra END;
         cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 128;
         cp.async.bulk.commit_group;
         cp.async.bulk.wait_group.read 0; // @wait out
         END:",
    );
    check(
        &program,
        &[
            Bug("stores before the copy", &[("fence", "")], "missing-proxy-fence"),
            Bug("no order before the copy", &[("sync", "")], "missing-synchronization"),
            Bug("no wait", &[("wait", "")], "missing-mbarrier-wait"),
            Bug("stores before the copy out", &[("fence again", "")], "missing-proxy-fence"),
            Bug(
                "the fence before the stores",
                &[
                    ("store", "fence.proxy.async.shared::cta;"),
                    ("fence again", "st.shared.u32 [%r3], %r4;"),
                ],
                "missing-proxy-fence",
            ),
            Bug("no order before the copy out", &[("sync again", "")], "missing-synchronization"),
            Bug("the end before it is read", &[("wait out", "")], "unfinished-at-exit"),
        ],
    );
}

#[test]
fn boxes_of_a_tensor() {
    let program = Program::of(
        32,
        ".shared .align 128 .b8 tile[2048];\n.shared .align 8 .b8 full[8];",
        "mov.u32 %r1, tile;
         mov.u32 %r2, full;
         shl.b32 %r3, %r0, 2;
         add.s32 %r3, %r1, %r3;
         setp.ne.u32 %p0, %r0, 0;
         @%p0 bra WAITING;
         mbarrier.init.shared::cta.b64 [%r2], 1;
         fence.mbarrier_init.release.cluster;
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024; // @expect
         mov.u32 %r4, 0;
         mov.u32 %r5, 8;
         cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], \
           [%rd2, {%r4, %r5}], [%r2]; // @copy
         WAITING:
         bar.warp.sync -1;
         WAIT [%r2], 0; // @wait
         ld.shared.u32 %r6, [%r3]; // @load
         bar.warp.sync -1;
         @%p0 bra END;
         cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd2, {%r4, %r5}], [%r1]; // \
           @store
         cp.async.bulk.commit_group; // @commit
         cp.async.bulk.wait_group.read 0;
         END:",
    );
    check(
        &program,
        &[
            Bug(
                "bytes of half a box",
                &[("expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512;")],
                "mbarrier-more-bytes-than-expected",
            ),
            Bug(
                "bytes of two boxes",
                &[("expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;")],
                "deadlock",
            ),
            Bug(
                "a target out of line",
                &[(
                    "copy",
                    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier\
                  ::complete_tx::bytes [%r1+16], [%rd2, {%r4, %r5}], [%r2];",
                )],
                "tensor-copy-shared-alignment",
            ),
            Bug(
                "a box of three dimensions",
                &[(
                    "copy",
                    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier\
                  ::complete_tx::bytes [%r1], [%rd2, {%r4, %r5, %r4}], [%r2];",
                )],
                "tensor-copy-rank",
            ),
            Bug(
                "no tensor map",
                &[(
                    "copy",
                    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier\
                  ::complete_tx::bytes [%r1], [%rd0, {%r4, %r5}], [%r2];",
                )],
                "tensor-map-invalid",
            ),
            Bug("no wait", &[("wait", "")], "missing-mbarrier-wait"),
            Bug("what nobody copied", &[("load", "ld.shared.u32 %r6, [%r3+1024];")], "unwritten"),
            Bug(
                "a box that nobody wrote",
                &[(
                    "store",
                    "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group \
                  [%rd2, {%r4, %r5}], [%r1+1024];",
                )],
                "unwritten",
            ),
            Bug("no group", &[("commit", "")], "unfinished-at-exit"),
        ],
    );
}
