//! `cp.async`: groups and mbarriers.

use crate::{Bug, Program, check};

#[test]
fn cp_async_in_two_stages() {
    let program = Program::of(
        64,
        ".shared .align 16 .b8 stage[2048];",
        "mov.u32 %r1, stage;
         shl.b32 %r2, %r0, 4;
         add.s32 %r3, %r1, %r2;
         xor.b32 %r4, %r2, 1008;
         add.s32 %r4, %r1, %r4;
         cvt.u64.u32 %rd3, %r2;
         add.s64 %rd3, %rd0, %rd3;
         cp.async.cg.shared.global [%r3], [%rd3], 16; // @first copy
         cp.async.commit_group; // @commit first
         cp.async.cg.shared.global [%r3+1024], [%rd3+1024], 16;
         cp.async.commit_group; // @commit second
         cp.async.wait_group 1; // @wait first
         bar.sync 0; // @sync first
         ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r4];
         bar.sync 0; // @sync reads
         cp.async.cg.shared.global [%r3], [%rd3+2048], 16;
         cp.async.commit_group; // @commit third
         cp.async.wait_group 1; // @wait second
         bar.sync 0; // @sync second
         ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r4+1024];
         cp.async.wait_all; // @wait third
         bar.sync 0; // @sync third
         ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r4];",
    );
    check(
        &program,
        &[
            Bug("no wait", &[("wait first", "")], "missing-group-wait"),
            Bug(
                "a wait for one too few",
                &[("wait first", "cp.async.wait_group 2;")],
                "missing-group-wait",
            ),
            Bug(
                "a wait for the second that is of one less",
                &[("wait second", "cp.async.wait_group 2;")],
                "missing-group-wait",
            ),
            Bug("no wait for the third", &[("wait third", "")], "missing-group-wait"),
            Bug("no commit", &[("commit first", "")], "missing-group-wait"),
            Bug(
                "two copies in one group",
                &[
                    ("commit first", "cp.async.commit_group; cp.async.commit_group;"),
                    ("commit second", ""),
                    ("wait second", "cp.async.wait_group 3;"),
                ],
                "missing-group-wait",
            ),
            Bug("no barrier", &[("sync first", "")], "missing-synchronization"),
            Bug(
                "the barrier before the wait",
                &[("wait first", "bar.sync 0;"), ("sync first", "cp.async.wait_group 1;")],
                "missing-synchronization",
            ),
            Bug(
                "a stage filled while it is read",
                &[("sync reads", "")],
                "missing-synchronization",
            ),
            Bug("no barrier for the second", &[("sync second", "")], "missing-synchronization"),
            Bug("no barrier for the third", &[("sync third", "")], "missing-synchronization"),
            Bug(
                "an address out of line",
                &[("first copy", "cp.async.cg.shared.global [%r3+8], [%rd3], 16;")],
                "misaligned-address",
            ),
            Bug(
                "a source past its end",
                &[("first copy", "cp.async.cg.shared.global [%r3], [%rd3+65536], 16;")],
                "global-out-of-range",
            ),
            Bug(
                "eight bytes past the L1",
                &[("first copy", "cp.async.cg.shared.global [%r3], [%rd3], 8;")],
                "refused",
            ),
        ],
    );
}

#[test]
fn cp_async_that_arrives_at_an_mbarrier() {
    let program = Program::of(
        64,
        ".shared .align 16 .b8 stage[1024];\n.shared .align 8 .b8 full[8];",
        "mov.u32 %r1, stage;
         mov.u32 %r9, full;
         shl.b32 %r2, %r0, 4;
         add.s32 %r3, %r1, %r2;
         xor.b32 %r4, %r2, 1008;
         add.s32 %r4, %r1, %r4;
         cvt.u64.u32 %rd3, %r2;
         add.s64 %rd3, %rd0, %rd3;
         setp.ne.u32 %p0, %r0, 0;
         @%p0 bra MEET;
         mbarrier.init.shared::cta.b64 [%r9], 64; // @init
         MEET:
         bar.sync 0; // @sync
         cp.async.ca.shared.global [%r3], [%rd3], 16;
         cp.async.mbarrier.arrive.noinc.shared.b64 [%r9]; // @arrive
         WAIT [%r9], 0; // @wait
         ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r4];",
    );
    check(
        &program,
        &[
            Bug("no wait", &[("wait", "")], "missing-group-wait"),
            Bug("the other phase", &[("wait", "WAIT [%r9], 1;")], "deadlock"),
            Bug("no arrival", &[("arrive", "")], "deadlock"),
            Bug(
                "an arrival that raises the count",
                &[("arrive", "cp.async.mbarrier.arrive.shared.b64 [%r9];")],
                "deadlock",
            ),
            Bug(
                "an arrival that does not wait for copies",
                &[("arrive", "mbarrier.arrive.shared.b64 _, [%r9];")],
                "missing-group-wait",
            ),
            Bug(
                "a count too small",
                &[("init", "mbarrier.init.shared::cta.b64 [%r9], 63;")],
                "missing-group-wait",
            ),
            Bug(
                "a count too large",
                &[("init", "mbarrier.init.shared::cta.b64 [%r9], 65;")],
                "deadlock",
            ),
            Bug(
                "no barrier after the initialization",
                &[("sync", "")],
                "missing-mbarrier-init-sync",
            ),
            Bug("no initialization", &[("init", "")], "mbarrier-uninitialized"),
            Bug(
                "initialized as data",
                &[("init", "st.shared.u64 [%r9], %rd2;")],
                "mbarrier-uninitialized",
            ),
        ],
    );
}
