//! tcgen05: allocation, MMAs, loads and stores, what orders them.

use crate::{Bug, Program, check};

/// Two tiles of 128 x 8 in one accumulator, A and B in shared memory: thread 0 multiplies, all
/// read. A core matrix is 8 rows of 16 bytes; K is 16.
pub(crate) const TILES: Program = Program {
    target: "sm_100a",
    grid: 1,
    cluster: 1,
    threads: 128,
    shared: ".reg .b16 %h1;\n.shared .align 1024 .b8 a[4096];\n.shared .align 1024 .b8 b[256];\n\
             .shared .align 8 .b8 full[8];\n.shared .align 8 .b8 empty[8];\n\
             .shared .align 4 .b8 base[4];",
    body: "mov.u32 %r1, a;
     mov.u32 %r2, b;
     mov.u32 %r3, full;
     mov.u32 %r4, empty;
     mov.u32 %r5, base;
     shl.b32 %r6, %r0, 4;
     add.s32 %r7, %r1, %r6;
     shl.b32 %r8, %r0, 1;
     add.s32 %r8, %r2, %r8;
     mov.u32 %r9, 0;
     cvt.u16.u32 %h1, %r9;
     st.shared.v4.u32 [%r7], {%r9, %r9, %r9, %r9};
     st.shared.v4.u32 [%r7+2048], {%r9, %r9, %r9, %r9};
     st.shared.u16 [%r8], %h1;
     setp.ne.u32 %p0, %r0, 0;
     setp.ge.u32 %p1, %r0, 32;
     @%p1 bra MEET;
     tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 32; // @alloc
     tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; // @relinquish
     @%p0 bra MEET;
     mbarrier.init.shared::cta.b64 [%r3], 1; // @init full
     mbarrier.init.shared::cta.b64 [%r4], 128; // @init empty
     fence.mbarrier_init.release.cluster; // @init fence
     MEET:
     fence.proxy.async.shared::cta; // @proxy
     bar.sync 0; // @sync
     ld.shared.u32 %r10, [%r5];
     mov.u32 %r11, 0;
     shr.u32 %r12, %r0, 5;
     shl.b32 %r12, %r12, 21;
     add.s32 %r12, %r12, %r10; // @lanes
     TILE:
     @%p0 bra READ;
     xor.b32 %r13, %r11, 1;
     WAIT [%r4], %r13; // @wait empty
     tcgen05.fence::after_thread_sync; // @after empty
     shr.u32 %r14, %r1, 4;
     and.b32 %r14, %r14, 16383;
     cvt.u64.u32 %rd3, %r14;
     shr.u32 %r15, %r2, 4;
     and.b32 %r15, %r15, 16383;
     cvt.u64.u32 %rd4, %r15;
     mov.b64 %rd5, 0x0000401000080000; // @descriptor
     or.b64 %rd3, %rd3, %rd5;
     or.b64 %rd4, %rd4, %rd5;
     mov.u32 %r16, 0x08020490; // @instruction
     mov.u32 %r17, %r10; // @target
     setp.eq.u32 %p4, %r9, 1;
     tcgen05.mma.cta_group::1.kind::f16 [%r17], %rd3, %rd4, %r16, %p4; // @mma
     tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3]; // @commit
     READ:
     WAIT [%r3], %r11; // @wait full
     tcgen05.fence::after_thread_sync; // @after full
     bar.warp.sync -1;
     tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}, \
       [%r12]; // @load
     tcgen05.wait::ld.sync.aligned; // @wait load
     add.s32 %r28, %r20, %r27; // @use
     tcgen05.fence::before_thread_sync; // @before
     mbarrier.arrive.shared::cta.b64 _, [%r4]; // @arrive
     add.s32 %r11, %r11, 1;
     setp.lt.u32 %p2, %r11, 2;
     @%p2 bra TILE;
     bar.sync 0; // @sync end
     @%p1 bra END;
     tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32; // @dealloc
     END:",
};

#[test]
fn tiles_in_one_accumulator() {
    check(
        &TILES,
        &[
            // Order.
            Bug("no proxy fence", &[("proxy", "")], "missing-proxy-fence"),
            Bug("no barrier", &[("sync", "")], "missing-synchronization"),
            Bug("no commit", &[("commit", "")], "deadlock"),
            Bug("no wait for the MMA", &[("wait full", "")], "missing-tensor-commit-wait"),
            Bug("the phase never changes", &[("wait full", "WAIT [%r3], 0;")], "deadlock"),
            Bug("no fence after the wait", &[("after full", "")], "missing-tensor-fence-after"),
            Bug("no wait for the load", &[("wait load", "")], "missing-tensor-wait-load"),
            Bug(
                "a register written before the wait",
                &[("wait load", "mul.lo.s32 %r20, %r0, 2;\ntcgen05.wait::ld.sync.aligned;")],
                "register-in-flight",
            ),
            Bug(
                "a wait for stores",
                &[("wait load", "tcgen05.wait::st.sync.aligned;")],
                "missing-tensor-wait-load",
            ),
            Bug("no fence before the arrival", &[("before", "")], "missing-tensor-fence-before"),
            Bug("no arrival", &[("arrive", "")], "deadlock"),
            Bug("no wait for the readers", &[("wait empty", "")], "deadlock"),
            Bug("no fence after that wait", &[("after empty", "")], "missing-tensor-fence-after"),
            Bug(
                "a count of readers too small",
                &[("init empty", "mbarrier.init.shared::cta.b64 [%r4], 64;")],
                "deadlock",
            ),
            Bug(
                "a count of readers too large",
                &[("init empty", "mbarrier.init.shared::cta.b64 [%r4], 129;")],
                "deadlock",
            ),
            Bug(
                "a count of commits too large",
                &[("init full", "mbarrier.init.shared::cta.b64 [%r3], 2;")],
                "deadlock",
            ),
            Bug(
                "a commit of another thread",
                &[
                    ("commit", ""),
                    (
                        "wait full",
                        "setp.eq.u32 %p8, %r0, 32; @%p8 tcgen05.commit.cta_group::1\
                  .mbarrier::arrive::one.shared::cluster.b64 [%r3]; bar.sync 0;\n\
                  WAIT [%r3], %r11;",
                    ),
                ],
                "missing-tensor-commit-wait",
            ),
            Bug(
                "a commit to another barrier",
                &[(
                    "commit",
                    "tcgen05.commit.cta_group::1.mbarrier::arrive::one\
                  .shared::cluster.b64 [%r4];",
                )],
                "deadlock",
            ),
            Bug("freed while others read", &[("sync end", "")], "tensor-memory-freed-in-use"),
            // Memory.
            Bug("not freed", &[("dealloc", "")], "tensor-memory-not-freed"),
            Bug(
                "freed in part",
                &[("dealloc", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 16;")],
                "refused",
            ),
            Bug(
                "more freed than there is",
                &[("dealloc", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;")],
                "tensor-dealloc-unknown",
            ),
            Bug(
                "freed twice",
                &[(
                    "dealloc",
                    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;
                     tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;",
                )],
                "tensor-dealloc-unknown",
            ),
            Bug(
                "48 columns",
                &[("alloc", "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 48;")],
                "refused",
            ),
            Bug(
                "allocated after the permit is given up",
                &[
                    ("alloc", "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"),
                    (
                        "relinquish",
                        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 32;",
                    ),
                ],
                "tensor-alloc-after-relinquish",
            ),
            Bug(
                "two groups",
                &[("dealloc", "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r10, 32;")],
                "tcgen05-group-mixed",
            ),
            Bug(
                "columns that are not allocated",
                &[("target", "add.u32 %r17, %r10, 32;")],
                "tensor-memory-not-allocated",
            ),
            Bug(
                "the end of what is allocated",
                &[("target", "add.u32 %r17, %r10, 28;")],
                "tensor-memory-not-allocated",
            ),
            Bug("another column", &[("target", "add.u32 %r17, %r10, 8;")], "unwritten"),
            Bug(
                "lanes of another warp",
                &[("lanes", "mov.u32 %r12, %r10;")],
                "tensor-lane-of-another-warp",
            ),
            Bug(
                "an MMA to lane 16",
                &[("target", "add.u32 %r17, %r10, 1048576;")],
                "tensor-lane-alignment",
            ),
            Bug(
                "read columns that nobody wrote",
                &[(
                    "load",
                    "tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r20, %r21, %r22, %r23, %r24, \
                  %r25, %r26, %r27}, [%r12+4];",
                )],
                "unwritten",
            ),
            Bug(
                "accumulated on what nobody wrote",
                &[(
                    "mma",
                    "setp.ne.u32 %p5, %r9, 1; tcgen05.mma.cta_group::1.kind::f16 \
                  [%r17], %rd3, %rd4, %r16, %p5;",
                )],
                "unwritten",
            ),
            Bug(
                "half of the lanes load",
                &[(
                    "load",
                    "setp.lt.u32 %p9, %r0, 16; @%p9 tcgen05.ld.sync.aligned.32x32b.x8.b32 \
                  {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}, [%r12];",
                )],
                "deadlock",
            ),
            // Descriptors.
            Bug("M of 96", &[("instruction", "mov.u32 %r16, 0x06020490;")], "mma-shape-m"),
            Bug(
                "N of 16, of which B has 8",
                &[("instruction", "mov.u32 %r16, 0x08040490;")],
                "mbarrier-read",
            ),
            Bug(
                "types that the kind does not have",
                &[("instruction", "mov.u32 %r16, 0x08020d90;")],
                "instruction-descriptor-type",
            ),
            Bug(
                "no version",
                &[("descriptor", "mov.b64 %rd5, 0x0000001000080000;")],
                "shared-descriptor-version",
            ),
            Bug(
                "a swizzle that is none",
                &[("descriptor", "mov.b64 %rd5, 0x6000401000080000;")],
                "shared-descriptor-swizzle",
            ),
            Bug(
                "a swizzle of 128 bytes",
                &[("descriptor", "mov.b64 %rd5, 0x4000401000080000;")],
                "shared-out-of-range",
            ),
            Bug(
                "a stride too large",
                &[("descriptor", "mov.b64 %rd5, 0x0000408000080000;")],
                "shared-out-of-range",
            ),
        ],
    );
}

/// One warp stores to tensor memory and loads again.
#[test]
fn stores_to_tensor_memory() {
    let program = Program {
        target: "sm_100a",
        ..Program::of(
            32,
            ".shared .align 4 .b8 base[4];",
            "mov.u32 %r5, base;
             tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 32;
             bar.warp.sync -1; // @sync
             ld.shared.u32 %r10, [%r5];
             tcgen05.st.sync.aligned.32x32b.x2.b32 [%r10], {%r0, %r0};
             tcgen05.wait::st.sync.aligned; // @wait
             tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r11, %r12}, [%r10];
             tcgen05.wait::ld.sync.aligned; // @wait load
             add.s32 %r13, %r11, %r12;
             tcgen05.st.sync.aligned.32x32b.x2.b32 [%r10], {%r0, %r0};
             tcgen05.wait::st.sync.aligned; // @wait end
             bar.warp.sync -1;
             tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;",
        )
    };
    check(
        &program,
        &[
            Bug("no wait for the store", &[("wait", "")], "missing-tensor-wait-store"),
            Bug("no wait for the load", &[("wait load", "")], "missing-tensor-wait-load"),
            Bug("freed while it is stored", &[("wait end", "")], "tensor-memory-freed-in-use"),
            Bug("the address before it is there", &[("sync", "")], "missing-warp-sync"),
        ],
    );
}

/// A in tensor memory: all warps store it, thread 0 multiplies, and the stored place is used again.
pub(crate) const MATRIX: Program = Program {
    target: "sm_100a",
    ..Program::of(
        128,
        ".reg .b16 %h1;\n.shared .align 1024 .b8 b[256];\n.shared .align 8 .b8 full[8];\n\
             .shared .align 4 .b8 base[4];",
        "mov.u32 %r2, b;
             mov.u32 %r3, full;
             mov.u32 %r5, base;
             shl.b32 %r8, %r0, 1;
             add.s32 %r8, %r2, %r8;
             mov.u32 %r9, 0;
             cvt.u16.u32 %h1, %r9;
             st.shared.u16 [%r8], %h1;
             setp.ne.u32 %p0, %r0, 0;
             setp.ge.u32 %p1, %r0, 32;
             @%p1 bra MEET;
             tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 32;
             @%p0 bra MEET;
             mbarrier.init.shared::cta.b64 [%r3], 1;
             fence.mbarrier_init.release.cluster;
             MEET:
             fence.proxy.async.shared::cta;
             bar.sync 0;
             ld.shared.u32 %r10, [%r5];
             shr.u32 %r12, %r0, 5;
             shl.b32 %r12, %r12, 21;
             add.s32 %r12, %r12, %r10;
             add.s32 %r13, %r12, 8;
             tcgen05.st.sync.aligned.32x32b.x8.b32 [%r13], {%r9, %r9, %r9, %r9, %r9, %r9, %r9, %r9};
             tcgen05.wait::st.sync.aligned; // @wait store
             tcgen05.fence::before_thread_sync; // @before
             bar.sync 0; // @sync
             @%p0 bra READ;
             tcgen05.fence::after_thread_sync; // @after
             shr.u32 %r15, %r2, 4;
             and.b32 %r15, %r15, 16383;
             cvt.u64.u32 %rd4, %r15;
             mov.b64 %rd5, 0x0000401000080000;
             or.b64 %rd4, %rd4, %rd5;
             mov.u32 %r16, 0x08020490;
             add.s32 %r17, %r10, 8; // @place
             setp.eq.u32 %p4, %r9, 1;
             tcgen05.mma.cta_group::1.kind::f16 [%r10], [%r17], %rd4, %r16, %p4;
             tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3]; // @commit
             READ:
             WAIT [%r3], 0; // @wait
             tcgen05.fence::after_thread_sync; // @after wait
             bar.warp.sync -1;
             tcgen05.st.sync.aligned.32x32b.x8.b32 [%r13], {%r9, %r9, %r9, %r9, %r9, %r9, %r9, %r9};
             tcgen05.wait::st.sync.aligned; // @wait end
             bar.sync 0;
             @%p1 bra END;
             tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;
             END:",
    )
};

#[test]
fn a_matrix_in_tensor_memory() {
    check(
        &MATRIX,
        &[
            Bug("no wait for the store", &[("wait store", "")], "missing-tensor-wait-store"),
            Bug("no fence before", &[("before", "")], "missing-tensor-fence-before"),
            Bug("no barrier", &[("sync", "")], "missing-synchronization"),
            Bug("no fence after", &[("after", "")], "missing-tensor-fence-after"),
            Bug("no commit", &[("commit", "")], "deadlock"),
            Bug("stored again while it is read", &[("wait", "")], "missing-tensor-commit-wait"),
            Bug("no fence after that wait", &[("after wait", "")], "missing-tensor-fence-after"),
            Bug("no wait at the end", &[("wait end", "")], "tensor-memory-freed-in-use"),
            Bug("another column", &[("place", "add.s32 %r17, %r10, 12;")], "unwritten"),
            Bug("D over A", &[("place", "add.s32 %r17, %r10, 4;")], "tensor-operands-overlap"),
        ],
    );
}
