//! Mistakes at single instructions, and those of a whole kernel.

use super::{Class, Mutation, mutant, mutations};
use crate::decode::{GlobalAddresses, Instruction, Program, decode};
use crate::launch::{Arguments, Counts, Emulator, LaunchSpec, Settings};
use crate::ptx;

fn program(body: &str) -> Program {
    program_for("sm_100a", body)
}

fn program_for(target: &str, body: &str) -> Program {
    let text = format!(
        ".version 9.0\n.target {target}\n.address_size 64\n.visible .entry k()\n{{\n\
         .reg .pred %p<4>;\n.reg .b32 %r<8>;\n.reg .b64 %d<8>;\n.shared .align 8 .b8 s[64];\n\
         {body}\nret;\n}}\n"
    );
    decode(&ptx::parse(&text).unwrap(), "k", &GlobalAddresses::new()).unwrap()
}

fn deletions(program: &Program) -> Vec<Mutation> {
    let of_class = |mutation: &Mutation| mutation.class == Class::Deletion;
    mutations(program).into_iter().filter(of_class).collect()
}

/// Hopper's copies were given `.cta_group`, which no assembler takes there.
#[test]
fn targets_without_pairs_have_no_cta_groups() {
    let check = |target: &str, expected: bool| {
        let program = program_for(
            target,
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
             [%r1], [%d1, {%r2, %r3}], [s];",
        );
        let mut classes = mutations(&program).into_iter().map(|mutation| mutation.class);
        assert_eq!(classes.any(|class| class == Class::Group), expected, "{target}");
    };
    for (target, expected) in
        [("sm_90a", false), ("sm_100a", true), ("sm_103a", true), ("sm_120a", false)]
    {
        check(target, expected);
    }
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
            let left = deletions(&mutant(&program, deletion));
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

#[test]
fn what_can_be_wrong_has_a_name() {
    let check = |line: &str, expected: &[(Class, &str)]| {
        let program = program(line);
        let found: Vec<Mutation> = mutations(&program)
            .into_iter()
            .filter(|mutation| mutation.class != Class::Deletion)
            .collect();
        let names: Vec<(Class, &str)> =
            found.iter().map(|mutation| (mutation.class, mutation.what)).collect();
        assert_eq!(names, expected, "{line}");
        for mutation in &found {
            assert_ne!(mutant(&program, mutation).steps, program.steps, "{line}: {mutation:?}");
        }
    };
    use Class as C;
    check("bar.sync 0;", &[]);
    check("bar.sync 1, 64;", &[(C::Count, "more threads of bar.sync")]);
    check("bar.warp.sync -1;", &[(C::Mask, "lane 31 of bar.warp.sync")]);
    check("shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;", &[(C::Mask, "lane 31 of shfl.sync")]);
    check(
        "barrier.cluster.arrive.release.aligned;",
        &[(C::Order, "release of barrier.cluster.arrive")],
    );
    check("barrier.cluster.arrive.relaxed.aligned;", &[]);
    check("fence.acq_rel.gpu;", &[(C::Order, "scope of fence")]);
    check("fence.acq_rel.cta;", &[]);
    check(
        "fence.proxy.async;",
        &[
            (C::Order, "shared memory of fence.proxy.async"),
            (C::Order, "global memory of fence.proxy.async"),
        ],
    );
    check("fence.proxy.async.shared::cta;", &[(C::Order, "shared memory of fence.proxy.async")]);
    let init = [(C::Count, "mbarrier.init of one more"), (C::Count, "mbarrier.init of one less")];
    check("mbarrier.init.shared::cta.b64 [s], 2;", &init);
    check("mbarrier.init.shared::cta.b64 [s], %r1;", &init);
    check(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [s];",
        &[(C::Order, "release of mbarrier.arrive"), (C::Order, "scope of mbarrier.arrive")],
    );
    check(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [s], 16;",
        &[
            (C::Bytes, "16 more of mbarrier.arrive.expect_tx"),
            (C::Bytes, "16 less of mbarrier.arrive.expect_tx"),
            (C::Order, "release of mbarrier.arrive"),
        ],
    );
    check(
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [s], %r1;",
        &[
            (C::Parity, "parity 0 of mbarrier.wait"),
            (C::Parity, "parity 1 of mbarrier.wait"),
            (C::Order, "acquire of mbarrier.wait"),
        ],
    );
    check(
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [s], 1;",
        &[
            (C::Parity, "parity of mbarrier.wait"),
            (C::Order, "acquire of mbarrier.wait"),
            (C::Order, "scope of mbarrier.wait"),
        ],
    );
    check(
        "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile\
         .mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%d1, {%r2, %r3}], [%r4], 3;",
        &[
            (C::Coordinate, "coordinate 0 of cp.async.bulk.tensor"),
            (C::Coordinate, "coordinate 1 of cp.async.bulk.tensor"),
            (C::Coordinate, "swapped coordinates of cp.async.bulk.tensor"),
            (C::Mask, "rank 0 of cp.async.bulk.tensor"),
            (C::Mask, "rank 1 of cp.async.bulk.tensor"),
            (C::Group, "cta_group of cp.async.bulk.tensor"),
        ],
    );
    check(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [s];",
        &[(C::Group, "cta_group of tcgen05.commit")],
    );
    check(
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r1], %d1;",
        &[
            (C::Group, "cta_group of tcgen05.cp"),
            (C::Descriptor, "start of tcgen05.cp"),
            (C::Descriptor, "leading offset of tcgen05.cp"),
            (C::Descriptor, "stride of tcgen05.cp"),
            (C::Descriptor, "swizzle of tcgen05.cp"),
        ],
    );
    check(
        "cp.async.bulk.wait_group.read 0;",
        &[(C::Count, "one group fewer of cp.async.bulk.wait_group")],
    );
}

#[test]
fn jumps_go_where_they_went() {
    let program = program(
        "bra OVER;\nBACK: bra DONE;\nOVER: mbarrier.init.shared::cta.b64 [s], %r1;\n\
         bra BACK;\nDONE:",
    );
    let at = |program: &Program| -> Vec<(u32, Instruction)> {
        let jumps = (0..).zip(&program.steps);
        jumps.map(|(position, step)| (position, step.instruction.clone())).collect()
    };
    let init = mutations(&program).into_iter().find(|found| found.class == Class::Count).unwrap();
    let changed = mutant(&program, &init);
    assert_eq!(changed.steps.len(), program.steps.len() + 1);
    let targets = |program: &Program| -> Vec<u32> {
        let target = |(_, instruction)| match instruction {
            Instruction::Branch { target, .. } => Some(target),
            _ => None,
        };
        at(program).into_iter().filter_map(target).collect()
    };
    // To the new instruction before the changed one, and beyond both.
    let (before, after) = (targets(&program), targets(&changed));
    let expected: Vec<u32> =
        before.iter().map(|target| target + u32::from(*target > before[0])).collect();
    assert_eq!(after, expected);
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
        assert!(deletion.ran(&report.counts), "{deletion:?}");
        assert!(!deletion.ran(&Counts::default()), "{deletion:?}");
        let mut device = fresh.clone();
        device.replace_program(module, mutant(program, deletion));
        let mut stopped = device.clone();
        stopped.settings.stop_at_hazard = true;
        let result = device.launch(module, &spec);
        // A launch that ends early ends because of what the whole one tells.
        if let (Ok(whole), Ok(part)) = (&result, stopped.launch(module, &spec)) {
            assert_eq!(whole.hazards[..part.hazards.len()], part.hazards, "{deletion:?}");
            assert_eq!(whole.hazards.is_empty(), part.hazards.is_empty(), "{deletion:?}");
            assert!(part.counts.instructions <= whole.counts.instructions, "{deletion:?}");
        }
        assert!(!result.is_ok_and(|report| report.is_clean()), "{deletion:?}");
    }
}
