//! Modes: the order of MMAs by the text of the ISA, copies that complete late, warnings that fail.

use deepwell_emulator::bulk::Swizzle;
use deepwell_emulator::hazard::Rules;
use deepwell_emulator::launch::{Completion, Settings};

use crate::tensor_memory::MATRIX;
use crate::{Program, findings_with, launch};

const COMMIT: &str = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];";

/// The ISA orders MMAs of one accumulator and shape only.
#[test]
fn order_of_mmas() {
    let mma = |operands: &str| {
        format!("tcgen05.mma.cta_group::1.kind::f16 {operands}, %rd4, %r16, %p4;\n{COMMIT}")
    };
    for (name, next, strict) in [
        ("the same accumulator", mma("[%r10], [%r17]"), ""),
        ("over the A of the first", mma("[%r17], [%r10]"), "missing-tensor-commit-wait"),
        (
            "another shape",
            format!("mov.u32 %r16, 0x04020490;\n{}", mma("[%r10], [%r17]")),
            "missing-tensor-commit-wait",
        ),
    ] {
        for (strict_mma_order, expected) in [(false, ""), (true, strict)] {
            let rules = Rules { strict_mma_order, ..Rules::default() };
            let settings = Settings { rules, ..Settings::default() };
            let found = findings_with(&MATRIX, &[("commit", &next)], settings);
            assert_eq!(found.concat(), expected, "{name}, strict {strict_mma_order}");
        }
    }
}

/// Thread 0 copies A and B and multiplies.
const COPIED: Program = Program {
    target: "sm_100a",
    ..Program::of(
        32,
        ".shared .align 1024 .b8 a[4096];\n.shared .align 1024 .b8 b[256];\n\
         .shared .align 8 .b8 full[8];\n.shared .align 8 .b8 done[8];\n\
         .shared .align 4 .b8 base[4];",
        "mov.u32 %r1, a;
         mov.u32 %r2, b;
         mov.u32 %r3, full;
         mov.u32 %r4, done;
         mov.u32 %r5, base;
         setp.ne.u32 %p0, %r0, 0;
         tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 32;
         @%p0 bra MEET;
         mbarrier.init.shared::cta.b64 [%r3], 1;
         mbarrier.init.shared::cta.b64 [%r4], 1;
         fence.mbarrier_init.release.cluster; // @init fence
         MEET:
         bar.warp.sync -1;
         ld.shared.u32 %r10, [%r5];
         @%p0 bra WAITING;
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 4352;
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd0], 4096, \
           [%r3];
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd0], 256, \
           [%r3];
         WAIT [%r3], 0; // @wait
         shr.u32 %r14, %r1, 4;
         cvt.u64.u32 %rd3, %r14;
         shr.u32 %r15, %r2, 4;
         cvt.u64.u32 %rd4, %r15;
         mov.b64 %rd5, 0x0000401000080000;
         or.b64 %rd3, %rd3, %rd5;
         or.b64 %rd4, %rd4, %rd5;
         mov.u32 %r16, 0x08020490;
         setp.ne.u32 %p4, %r0, 0;
         tcgen05.mma.cta_group::1.kind::f16 [%r10], %rd3, %rd4, %r16, %p4;
         tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4]; // @commit
         WAITING:
         WAIT [%r4], 0;
         tcgen05.fence::after_thread_sync;
         bar.warp.sync -1;
         tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;",
    )
};

/// A wait for the copy after the MMA that reads it: only with late copies are the values wrong.
#[test]
fn mmas_before_their_copies() {
    let late: [(&str, &str); 2] = [
        ("wait", ""),
        (
            "commit",
            "WAIT [%r3], 0;\n\
             tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];",
        ),
    ];
    for (completion, expected) in
        [(Completion::Eager, ""), (Completion::Demand, ""), (Completion::LateCopies, "unwritten")]
    {
        let found = |edits: &[_], tracker| {
            let settings = Settings { completion, tracker, ..Settings::default() };
            findings_with(&COPIED, edits, settings).concat()
        };
        assert_eq!(found(&[], true), "", "{completion:?}");
        assert_eq!(found(&late, false), expected, "{completion:?}");
    }
}

#[test]
fn warnings_that_fail() {
    for (edits, warnings_fail, is_clean) in [
        (&[][..], true, true),
        (&[("init fence", "")], false, true),
        (&[("init fence", "")], true, false),
    ] {
        let rules = Rules { warnings_fail, ..Rules::default() };
        let settings = Settings { rules, ..Settings::default() };
        let (report, _) = launch(&COPIED, edits, Swizzle::None, settings).unwrap();
        assert_eq!(report.is_clean(), is_clean, "{edits:?} {warnings_fail}");
    }
}
