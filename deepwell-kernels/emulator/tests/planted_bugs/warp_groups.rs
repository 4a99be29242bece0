//! `wgmma`: registers in flight, shared memory that is read late, descriptors.

use crate::{Bug, Program, check};

/// Two MMAs from two stages that the threads fill; D is 64 x 8.
const WGMMAS: Program = Program::of(
    128,
    ".shared .align 1024 .b8 a[4096];\n.shared .align 1024 .b8 b[512];",
    "mov.u32 %r1, a;
     mov.u32 %r2, b;
     shl.b32 %r3, %r0, 4;
     add.s32 %r4, %r1, %r3;
     shl.b32 %r5, %r0, 2;
     add.s32 %r6, %r2, %r5;
     mov.u32 %r7, 0;
     st.shared.v4.u32 [%r4], {%r7, %r7, %r7, %r7};
     st.shared.v4.u32 [%r4+2048], {%r7, %r7, %r7, %r7};
     st.shared.u32 [%r6], %r7;
     fence.proxy.async.shared::cta; // @proxy
     bar.sync 0; // @sync
     shr.u32 %r8, %r1, 4;
     and.b32 %r8, %r8, 16383;
     cvt.u64.u32 %rd3, %r8;
     shr.u32 %r9, %r2, 4;
     and.b32 %r9, %r9, 16383;
     cvt.u64.u32 %rd4, %r9;
     mov.b64 %rd5, 0x0000001000080000; // @strides
     or.b64 %rd3, %rd3, %rd5;
     or.b64 %rd4, %rd4, %rd5;
     add.s64 %rd6, %rd3, 128; // @second
     add.s64 %rd7, %rd4, 16;
     mov.f32 %f0, 0f00000000;
     mov.f32 %f1, 0f00000000;
     mov.f32 %f2, 0f00000000;
     mov.f32 %f3, 0f00000000;
     mov.f32 %f5, 0f3F800000;
     wgmma.fence.sync.aligned; // @fence
     wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd3, %rd4, 1, 1, \
       1, 0, 0; // @mma
     wgmma.commit_group.sync.aligned; // @commit first
     wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd6, %rd7, 1, 1, \
       1, 0, 0;
     wgmma.commit_group.sync.aligned; // @commit second
     wgmma.wait_group.sync.aligned 1; // @wait first
     bar.sync 0; // @sync first
     st.shared.v4.u32 [%r4], {%r7, %r7, %r7, %r7}; // @refill
     wgmma.wait_group.sync.aligned 0; // @wait second
     add.f32 %f4, %f0, %f1; // @use
     st.shared.v4.u32 [%r4+2048], {%r7, %r7, %r7, %r7};",
);

#[test]
fn wgmmas_of_a_warp_group() {
    // Zeros are no numbers that a wrong address would change: what is wrong has to have a name.
    check(
        &WGMMAS,
        &[
            Bug("no proxy fence", &[("proxy", "")], "missing-proxy-fence"),
            Bug("no barrier", &[("sync", "")], "missing-synchronization"),
            Bug("no fence of registers", &[("fence", "")], "missing-warp-group-fence"),
            Bug("the first is not committed", &[("commit first", "")], "missing-group-wait"),
            Bug(
                "nothing is committed",
                &[("commit first", ""), ("commit second", "")],
                "register-in-flight",
            ),
            Bug("no wait before the refill", &[("wait first", "")], "missing-group-wait"),
            Bug(
                "a wait of one too few before the refill",
                &[("wait first", "wgmma.wait_group.sync.aligned 2;")],
                "missing-group-wait",
            ),
            Bug("no wait for the result", &[("wait second", "")], "register-in-flight"),
            Bug(
                "a wait that leaves one",
                &[("wait second", "wgmma.wait_group.sync.aligned 1;")],
                "register-in-flight",
            ),
            Bug(
                "the result before the wait",
                &[
                    ("wait second", "add.f32 %f4, %f0, %f1;"),
                    ("use", "wgmma.wait_group.sync.aligned 0;"),
                ],
                "register-in-flight",
            ),
            Bug(
                "registers touched between wgmmas",
                &[("commit first", "wgmma.commit_group.sync.aligned; add.f32 %f0, %f0, %f5;")],
                "register-in-flight",
            ),
            Bug(
                "a matrix past the written bytes",
                &[("second", "add.s64 %rd6, %rd3, 192;")],
                "shared-out-of-range",
            ),
            Bug(
                "a matrix past shared memory",
                &[("second", "add.s64 %rd6, %rd3, 16000;")],
                "shared-out-of-range",
            ),
            Bug(
                "a stride that leaves the tile",
                &[("strides", "mov.b64 %rd5, 0x0000010000080000;")],
                "shared-out-of-range",
            ),
            Bug(
                "a swizzle of 128 bytes",
                &[("strides", "mov.b64 %rd5, 0x4000001000080000;")],
                "shared-out-of-range",
            ),
            Bug(
                "a descriptor that is none",
                &[("strides", "mov.b64 %rd5, 0x0010001000080000;")],
                "wgmma-descriptor",
            ),
            Bug(
                "half of the warp group",
                &[(
                    "mma",
                    "setp.lt.u32 %p9, %r0, 64; @%p9 wgmma.mma_async.sync.aligned\
                  .m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd3, %rd4, 1, 1, 1, 0, 0;",
                )],
                "wgmma-warp-group",
            ),
        ],
    );
}
