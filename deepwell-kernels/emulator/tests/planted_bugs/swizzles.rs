//! A tensor copy writes a matrix and an MMA reads it: both have a swizzle.

use deepwell_emulator::bulk::Swizzle;
use deepwell_emulator::launch::Settings;

use crate::{Bug, Program, check_with_map, findings_of};

/// A of 64 x 16 and B of 8 x 16 from one box of 64 columns and 8 rows of BF16: A's rows repeat.
const MMA: Program = Program::of(
    128,
    ".shared .align 1024 .b8 tile[1024];\n.shared .align 8 .b8 full[8];",
    "mov.u32 %r1, tile;
     mov.u32 %r2, full;
     setp.ne.u32 %p0, %r0, 0;
     @%p0 bra MEET;
     mbarrier.init.shared::cta.b64 [%r2], 1;
     fence.mbarrier_init.release.cluster;
     mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;
     mov.u32 %r4, 0;
     cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], \
       [%rd2, {%r4, %r4}], [%r2]; // @copy
     MEET:
     bar.sync 0;
     WAIT [%r2], 0; // @wait
     // @between
     shr.u32 %r8, %r1, 4;
     and.b32 %r8, %r8, 16383;
     cvt.u64.u32 %rd3, %r8;
     mov.b64 %rd5, 0x4000000000010000; // @descriptor
     or.b64 %rd3, %rd3, %rd5;
     mov.f32 %f0, 0f00000000;
     mov.f32 %f1, 0f00000000;
     mov.f32 %f2, 0f00000000;
     mov.f32 %f3, 0f00000000;
     wgmma.fence.sync.aligned;
     wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd3, %rd3, 1, 1, \
       1, 0, 0;
     wgmma.commit_group.sync.aligned;
     wgmma.wait_group.sync.aligned 0;",
);

#[test]
fn the_map_and_the_descriptor_agree() {
    let bugs = &[
        Bug(
            "64 bytes read",
            &[("descriptor", "mov.b64 %rd5, 0x8000000000010000;")],
            "swizzle-mismatch",
        ),
        Bug(
            "32 bytes read",
            &[("descriptor", "mov.b64 %rd5, 0xc000000000010000;")],
            "swizzle-mismatch",
        ),
        Bug(
            "none read",
            &[("descriptor", "mov.b64 %rd5, 0x0000000000010000;")],
            "swizzle-mismatch",
        ),
        Bug("no wait", &[("wait", "")], "missing-mbarrier-wait"),
    ];
    check_with_map(&MMA, Swizzle::Bytes128, bugs);
    // The same kernel with a map that says nothing of a swizzle.
    let found = findings_of(&MMA, &[], Swizzle::None, Settings::default());
    assert_eq!(found, ["swizzle-missing"]);
}

/// What threads wrote themselves may be permuted in any way.
#[test]
fn stores_of_threads_have_any_swizzle() {
    let again = "shl.b32 %r20, %r0, 2;
        add.s32 %r20, %r1, %r20;
        ld.shared.u32 %r21, [%r20];
        st.shared.u32 [%r20], %r21;
        ld.shared.u32 %r21, [%r20+512];
        st.shared.u32 [%r20+512], %r21;
        fence.proxy.async.shared::cta;
        bar.sync 0;";
    let found = findings_of(&MMA, &[("between", again)], Swizzle::None, Settings::default());
    assert_eq!(found, [""; 0]);
}
