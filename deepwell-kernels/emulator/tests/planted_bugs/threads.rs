//! Threads of a CTA and of a grid: barriers, warps, flags.

use deepwell_emulator::hazard::{Lanes, Rules};
use deepwell_emulator::launch::Settings;
use deepwell_emulator::tcgen05::LaneBits;

use crate::tensor_memory::TILES;
use crate::{Bug, Program, check, findings_with};

#[test]
fn named_barriers_hand_a_buffer_to_and_fro() {
    let program = Program::of(
        64,
        ".shared .align 16 .b8 mail[128];",
        "mov.u32 %r1, mail;
         and.b32 %r2, %r0, 31;
         shl.b32 %r2, %r2, 2;
         add.s32 %r3, %r1, %r2;
         xor.b32 %r4, %r2, 4;
         add.s32 %r4, %r1, %r4;
         setp.ge.u32 %p0, %r0, 32;
         @%p0 bra READER;
         st.shared.u32 [%r3], 1; // @store
         bar.arrive 1, 64; // @arrive
         bar.sync 2, 64; // @wait free
         st.shared.u32 [%r3], 2;
         bar.arrive 1, 64;
         ret;
         READER:
         bar.sync 1, 64; // @wait full
         ld.shared.u32 %r5, [%r4]; // @load
         bar.arrive 2, 64; // @free
         bar.sync 1, 64; // @wait again
         ld.shared.u32 %r6, [%r4];",
    );
    check(
        &program,
        &[
            Bug("no arrival", &[("arrive", "")], "deadlock"),
            Bug("another barrier", &[("arrive", "bar.arrive 3, 64;")], "deadlock"),
            Bug(
                "a thread count too large",
                &[("wait full", "bar.sync 1, 96;")],
                "barrier-thread-count-differs",
            ),
            Bug("nobody waits", &[("wait full", "")], "missing-synchronization"),
            Bug("nobody waits until it is free", &[("wait free", "")], "deadlock"),
            Bug(
                "arrival before the store",
                &[("store", "bar.arrive 1, 64;"), ("arrive", "st.shared.u32 [%r3], 1;")],
                "missing-synchronization",
            ),
            Bug(
                "free before the load",
                &[("load", "bar.arrive 2, 64;"), ("free", "ld.shared.u32 %r5, [%r4];")],
                "missing-synchronization",
            ),
            Bug(
                "a count that one warp makes",
                &[("wait full", "bar.sync 1, 32;")],
                "barrier-thread-count-differs",
            ),
            Bug("a barrier past 15", &[("wait full", "bar.sync 16, 64;")], "refused"),
            Bug("a count that is no multiple", &[("wait full", "bar.sync 1, 65;")], "refused"),
        ],
    );
}

#[test]
fn lanes_exchange_through_shared_memory() {
    let program = Program::of(
        32,
        ".shared .align 16 .b8 mail[128];",
        "mov.u32 %r1, mail;
         shl.b32 %r2, %r0, 2;
         add.s32 %r3, %r1, %r2;
         xor.b32 %r4, %r2, 4;
         add.s32 %r4, %r1, %r4;
         st.shared.u32 [%r3], %r0; // @store
         bar.warp.sync -1; // @sync
         ld.shared.u32 %r5, [%r4]; // @load
         bar.warp.sync -1; // @sync again
         st.shared.u32 [%r3], %r5;",
    );
    check(
        &program,
        &[
            Bug("no bar.warp.sync", &[("sync", "")], "missing-warp-sync"),
            Bug("none before the next store", &[("sync again", "")], "missing-warp-sync"),
            Bug(
                "half of the lanes",
                &[("sync", "bar.warp.sync 65535;")],
                "sync-mask-without-own-lane",
            ),
            Bug(
                "a vote is no barrier",
                &[("sync", "vote.sync.any.pred %p1, 1, -1;")],
                "missing-warp-sync",
            ),
            Bug(
                "shared memory past its end",
                &[("load", "ld.shared.u32 %r5, [%r4+256];")],
                "shared-out-of-range",
            ),
            Bug(
                "an address out of line",
                &[("load", "ld.shared.u32 %r5, [%r4+2];")],
                "misaligned-address",
            ),
            Bug("nobody wrote it", &[("store", "")], "unwritten"),
        ],
    );
}

#[test]
fn block_reduction() {
    let program = Program::of(
        64,
        ".shared .align 16 .b8 sums[16];",
        "mov.u32 %r1, sums;
         setp.ne.u32 %p0, %r0, 0;
         @%p0 bra ADD;
         st.shared.u32 [%r1], 0; // @clear
         ADD:
         bar.sync 0; // @sync
         atom.shared.add.u32 %r2, [%r1], 1; // @add
         bar.sync 0; // @sync again
         ld.shared.u32 %r3, [%r1];
         bar.sync 0; // @sync at last
         @%p0 bra END;
         st.shared.u32 [%r1], 7;
         END:",
    );
    check(
        &program,
        &[
            Bug("not cleared", &[("clear", "")], "unwritten"),
            Bug("no barrier after clearing", &[("sync", "")], "missing-warp-sync"),
            Bug("no barrier after adding", &[("sync again", "")], "missing-synchronization"),
            Bug("no barrier after reading", &[("sync at last", "")], "missing-synchronization"),
            Bug(
                "a plain addition",
                &[(
                    "add",
                    "{.reg .b32 t; ld.shared.u32 t, [%r1]; add.s32 t, t, 1; \
                  st.shared.u32 [%r1], t;}",
                )],
                "missing-synchronization",
            ),
            Bug(
                "a barrier that half of the threads meet",
                &[("sync at last", "@%p0 bar.sync 0;")],
                "aligned-without-lanes",
            ),
        ],
    );
}

#[test]
fn a_flag_between_ctas() {
    let program = Program {
        grid: 2,
        ..Program::of(
            32,
            "",
            "mov.u32 %r1, %ctaid.x;
             setp.ne.u32 %p0, %r0, 0;
             @%p0 bra END;
             setp.ne.u32 %p1, %r1, 0;
             @%p1 bra READ;
             st.global.u32 [%rd1], 5; // @data
             st.release.gpu.global.u32 [%rd1+64], 1; // @flag
             bra END;
             READ:
             SPIN:
             ld.acquire.gpu.global.u32 %r2, [%rd1+64]; // @look
             setp.eq.u32 %p2, %r2, 0;
             @%p2 bra SPIN; // @spin
             // @fence
             ld.global.u32 %r3, [%rd1];
             END:",
        )
    };
    check(
        &program,
        &[
            Bug(
                "a weak flag",
                &[("flag", "st.global.u32 [%rd1+64], 1;")],
                "missing-synchronization",
            ),
            Bug(
                "a relaxed flag",
                &[("flag", "st.relaxed.gpu.global.u32 [%rd1+64], 1;")],
                "missing-synchronization",
            ),
            Bug(
                "a volatile flag",
                &[("flag", "st.volatile.global.u32 [%rd1+64], 1;")],
                "missing-synchronization",
            ),
            Bug(
                "a relaxed look",
                &[("look", "ld.relaxed.gpu.global.u32 %r2, [%rd1+64];")],
                "missing-synchronization",
            ),
            Bug(
                "a flag for the CTA",
                &[("flag", "st.release.cta.global.u32 [%rd1+64], 1;")],
                "scope-too-narrow",
            ),
            Bug(
                "a look within the CTA",
                &[("look", "ld.acquire.cta.global.u32 %r2, [%rd1+64];")],
                "scope-too-narrow",
            ),
            Bug("nobody looks again", &[("spin", ""), ("look", "")], "missing-synchronization"),
            Bug(
                "data after the flag",
                &[
                    ("data", "st.release.gpu.global.u32 [%rd1+64], 1;"),
                    ("flag", "st.global.u32 [%rd1], 5;"),
                ],
                "missing-synchronization",
            ),
            Bug(
                "a fence for the CTA",
                &[
                    ("look", "ld.relaxed.gpu.global.u32 %r2, [%rd1+64];"),
                    ("fence", "fence.acq_rel.cta;"),
                ],
                "missing-synchronization",
            ),
            Bug(
                "a proxy fence is no fence",
                &[
                    ("look", "ld.relaxed.gpu.global.u32 %r2, [%rd1+64];"),
                    ("fence", "fence.proxy.async;"),
                ],
                "missing-synchronization",
            ),
        ],
    );
}

#[test]
fn fences_around_an_arrival_of_one_thread() {
    let program = Program {
        grid: 3,
        ..Program::of(
            64,
            ".shared .align 4 .b8 before[4];",
            "mov.u32 %r1, %ctaid.x;
             shl.b32 %r2, %r1, 8;
             shl.b32 %r3, %r0, 2;
             add.s32 %r2, %r2, %r3;
             cvt.u64.u32 %rd3, %r2;
             add.s64 %rd3, %rd1, %rd3;
             st.global.u32 [%rd3], %r0;
             membar.gl; // @fence
             bar.sync 0; // @sync
             setp.ne.u32 %p0, %r0, 0;
             @%p0 bra MEET;
             atom.global.add.u32 %r4, [%rd1+4096], 1; // @arrive
             mov.u32 %r5, before;
             st.shared.u32 [%r5], %r4;
             MEET:
             bar.sync 0; // @meet
             ld.shared.u32 %r6, [before];
             setp.ne.u32 %p1, %r6, 2;
             @%p1 bra END;
             membar.gl; // @fence of the last
             xor.b32 %r7, %r3, 252;
             cvt.u64.u32 %rd4, %r7;
             add.s64 %rd4, %rd1, %rd4;
             ld.global.u32 %r8, [%rd4];
             ld.global.u32 %r9, [%rd4+256];
             END:",
        )
    };
    check(
        &program,
        &[
            Bug("no fence", &[("fence", "")], "missing-synchronization"),
            Bug("a fence for the CTA", &[("fence", "membar.cta;")], "missing-synchronization"),
            Bug("no barrier before the arrival", &[("sync", "")], "missing-synchronization"),
            Bug("no barrier after it", &[("meet", "")], "missing-synchronization"),
            Bug(
                "the last CTA has no fence",
                &[("fence of the last", "")],
                "missing-synchronization",
            ),
            Bug(
                "a fence for its CTA",
                &[("fence of the last", "membar.cta;")],
                "missing-synchronization",
            ),
            Bug(
                "an arrival for the CTA only",
                &[("arrive", "atom.relaxed.cta.global.add.u32 %r4, [%rd1+4096], 1;")],
                "scope-too-narrow",
            ),
            Bug(
                "no order of two instructions",
                &[(
                    "arrive",
                    "{ld.global.u32 %r4, [%rd1+4096]; add.s32 %r10, %r4, 1; \
                  st.global.u32 [%rd1+4096], %r10;}",
                )],
                "missing-synchronization",
            ),
        ],
    );
}

/// What each setting leaves unreported, and nothing else.
#[test]
fn what_settings_allow() {
    let warp = Program::of(
        32,
        ".shared .align 16 .b8 mail[128];",
        "mov.u32 %r1, mail;
         shl.b32 %r2, %r0, 2;
         add.s32 %r3, %r1, %r2;
         xor.b32 %r4, %r2, 4;
         add.s32 %r4, %r1, %r4;
         st.shared.u32 [%r3], %r0;
         bar.warp.sync -1; // @sync
         ld.shared.u32 %r5, [%r4];",
    );
    let one_barrier = Program::of(
        32,
        ".shared .align 8 .b8 full[8];",
        "mov.u32 %r1, full;
         setp.eq.u32 %p1, %r0, 0;
         @%p1 mbarrier.init.shared.b64 [%r1], 32; // @init
         fence.mbarrier_init.release.cluster;
         bar.sync 0;
         mbarrier.arrive.shared.b64 %rd9, [%r1];
         WAIT [%r1], 0;",
    );
    let pair = Program {
        grid: 2,
        cluster: 2,
        ..Program::of(
            64,
            ".shared .align 16 .b8 mail[128];",
            "mov.u32 %r1, mail;
             setp.eq.u32 %p1, %r0, 0;
             @%p1 st.shared.u32 [%r1], %r0;
             barrier.cluster.arrive.aligned; // @arrive
             barrier.cluster.wait.aligned;
             @!%p1 ld.shared.u32 %r2, [%r1];",
        )
    };
    let rules = |rules| Settings { rules, ..Settings::default() };
    let arrivals = rules(Rules {
        relaxed_cluster_arrivals: false,
        lanes: Lanes::AsOneThread,
        ..Rules::default()
    });
    let relaxed: &[_] = &[("arrive", "barrier.cluster.arrive.relaxed.aligned;")];
    let as_one = rules(Rules { lanes: Lanes::AsOneThread, ..Rules::default() });
    let no_fences = rules(Rules { tensor_fences: false, ..Rules::default() });
    let any_lanes = Settings { lane_bits: LaneBits::Ignored, ..Settings::default() };
    let one_address: &[_] = &[("lanes", "mov.u32 %r12, %r10;")];
    for (program, bug, settings) in [
        (&warp, &[("sync", "")] as &[_], &as_one),
        (&TILES, &[("after full", "")], &no_fences),
        (&TILES, &[("after empty", "")], &no_fences),
        (&TILES, &[("before", "")], &no_fences),
        (&TILES, one_address, &any_lanes),
        (&one_barrier, &[("init", "mbarrier.init.shared.b64 [%r1], 32;")], &as_one),
        (&pair, relaxed, &arrivals),
    ] {
        assert!(!findings_with(program, bug, Settings::default()).is_empty(), "{bug:?}");
        assert_eq!(findings_with(program, bug, settings.clone()), [""; 0], "{bug:?}");
    }
    let no_wait = [("wait full", "")];
    let found = findings_with(&TILES, &no_wait, no_fences);
    assert!(found.iter().any(|of| of == "missing-tensor-commit-wait"), "{found:?}");
}
