//! Lines, the forms that they become, and the reasons why some do not.

use super::*;
use crate::ptx;

mod calls;
mod copies;

const DECLARATIONS: &str = ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; \
    .reg .b64 %l<9>; .reg .b128 %q<3>; .shared .align 16 .b8 tile[64];";

fn program_of(text: &str, globals: &GlobalAddresses) -> Result<Program, DecodeError> {
    let text = format!(".version 9.0\n.target sm_100a\n.address_size 64\n{text}");
    let module = ptx::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    decode(&module, "k", globals)
}

fn lines(text: &str) -> Result<Program, DecodeError> {
    let text = format!(
        ".visible .entry k(.param .u64 \
            k_param_0)\n{{\n{DECLARATIONS}\n{text}\n}}"
    );
    program_of(&text, &GlobalAddresses::new())
}

/// What a line becomes, without the exit at the end.
fn steps(text: &str) -> Vec<Instruction> {
    let program = lines(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let count = program.steps.len() - 1;
    program.steps.into_iter().take(count).map(|step| step.instruction).collect()
}

fn one(text: &str) -> Instruction {
    steps(text).pop().unwrap_or_else(|| panic!("{text}: nothing"))
}

fn list(count: usize) -> String {
    let names: Vec<String> = (0..count).map(|index| format!("%r{index}")).collect();
    format!("{{{}}}", names.join(","))
}

#[test]
fn forms_that_compilers_and_authors_write() {
    let four = list(4);
    let rows = [
        // Modifiers stand in any order.
        format!("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {four}, [%r9];"),
        format!("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {four}, [%r9];"),
        "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%r1,%r2,%r3,%r4}, [%r9];".into(),
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 %r1, [%r9];".into(),
        "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r9], {%r1,%r2};".into(),
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r9], {%r1};".into(),
        "movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;".into(),
        "ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%r1,%r2,%r3,_}, [%l1];".into(),
        "ld.global.L1::no_allocate.v8.f32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%l1];".into(),
        "ld.global.b128 %q1, [%l1+16];".into(),
        "ld.relaxed.gpu.global.u32 %r1, [%l1];".into(),
        "ld.acquire.sys.global.L2::cache_hint.u64 %l2, [%l1], %l3;".into(),
        "ld.volatile.shared.u32 %r1, [tile+4];".into(),
        "ld.mmio.relaxed.sys.global.u32 %r1, [%l1];".into(),
        "st.release.cluster.shared::cluster.b32 [%r1], %r2;".into(),
        "st.global.L1::no_allocate.v2.b64 [%l1], {%l2, 0};".into(),
        "st.shared.v4.b32 [tile], {0, 0f00000000, %r1, %r2};".into(),
        "st.shared.u8 [%r1], %h1;".into(),
        "atom.global.add.u32 _, [%l1], 1;".into(),
        "atom.acq_rel.gpu.global.cas.b64 %l2, [%l1], %l3, %l4;".into(),
        "atom.shared.cas.b16 %h1, [%r1], %h2, %h3;".into(),
        "atom.relaxed.sys.global.exch.b128 %q1, [%l1], %q2;".into(),
        "atom.add.noftz.bf16x2 %r1, [%l1], %r2;".into(),
        "red.global.add.v4.f32 [%l1], {%r1,%r2,%r3,%r4};".into(),
        "red.release.gpu.global.add.s32 [%l1], -1;".into(),
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 \
            [%r1], %r2, [%r3];"
            .into(),
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 \
            [%r1], {%r2, %r3}, [%r4];"
            .into(),
        "cvta.to.global.u64 %l1, %l2;".into(),
        "cvta.shared.u64 %l1, tile;".into(),
        "isspacep.shared %p1, %l1;".into(),
        "mapa.shared::cluster.u32 %r1, %r2, 1;".into(),
        "getctarank.shared::cluster.u32 %r1, %r2;".into(),
        "createpolicy.fractional.L2::evict_first.b64 %l1, 1.0;".into(),
        "prefetch.global.L2 [%l1];".into(),
        "prefetch.tensormap [%l1];".into(),
        "prefetch.param.tensormap [k_param_0];".into(),
        "bar.sync 0;".into(),
        "bar.sync %r1, 64;".into(),
        "barrier.cta.arrive.aligned 3, 128;".into(),
        "bar.red.popc.u32 %r1, 0, %p1;".into(),
        "barrier.red.or.pred.aligned %p1, 0, 64, !%p2;".into(),
        "bar.warp.sync -1;".into(),
        "barrier.cluster.arrive.release.aligned;".into(),
        "barrier.cluster.wait.acquire.aligned;".into(),
        "membar.gl;".into(),
        "fence.acq_rel.gpu;".into(),
        "fence.sc.cluster;".into(),
        "fence.mbarrier_init.release.cluster;".into(),
        "fence.proxy.async.shared::cta;".into(),
        "fence.proxy.async;".into(),
        "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;".into(),
        "fence.release.sync_restrict::shared::cta.cluster;".into(),
        "fence.proxy.tensormap::generic.acquire.gpu [%l1], 128;".into(),
        "shfl.sync.bfly.b32 %r1|%p1, %r2, 16, 31, -1;".into(),
        "vote.sync.ballot.b32 %r1, !%p1, -1;".into(),
        "vote.sync.any.pred %p1, %p2, %r1;".into(),
        "match.all.sync.b64 %r1|%p1, %l1, -1;".into(),
        "match.any.sync.b32 %r1, %r2, -1;".into(),
        "elect.sync _|%p1, 0xFFFFFFFF;".into(),
        "redux.sync.min.abs.NaN.f32 %r1, %r2, -1;".into(),
        "activemask.b32 %r1;".into(),
        "setmaxnreg.inc.sync.aligned.u32 232;".into(),
        "griddepcontrol.launch_dependents;".into(),
        "griddepcontrol.wait;".into(),
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes\
            .multicast::cluster::all.b128 [%r1], [%r2];"
            .into(),
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q1;".into(),
        "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r1,%r2,%r3,_}, \
            %q1;"
            .into(),
        "clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r1, %q1;".into(),
        "mbarrier.init.shared::cta.b64 [%r1], 1;".into(),
        "mbarrier.inval.shared.b64 [tile];".into(),
        "mbarrier.arrive.shared.b64 %l1, [%r1];".into(),
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1], 2;".into(),
        "mbarrier.arrive.shared::cluster.b64 _, [%r1];".into(),
        "mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 _, [%r1], %r2;".into(),
        "mbarrier.arrive_drop.noComplete.release.cta.shared.b64 %l1, [%r1], 1;".into(),
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 128;".into(),
        "mbarrier.test_wait.shared.b64 %p1, [%r1], %l1;".into(),
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1], %r2, \
            0x989680;"
            .into(),
        "mbarrier.pending_count.b64 %r1, %l1;".into(),
        "cp.async.cg.shared.global.L2::128B [%r1], [%l1], 16, %r2;".into(),
        "cp.async.ca.shared.global [%r1], [%l1], 4, %p1;".into(),
        "cp.async.wait_group 2;".into(),
        "cp.async.wait_all;".into(),
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1];".into(),
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster\
            .L2::cache_hint [%r1], [%l1], %r2, [%r3], %h1, %l2;"
            .into(),
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%l1], 64, \
            [%r3];"
            .into(),
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%l1], [%r1], %r2, %h1;".into(),
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%l1], [%r1], \
            64;"
        .into(),
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.max.s32 \
            [%r1], [%r2], 64, [%r3];"
            .into(),
        "cp.async.bulk.prefetch.L2.global [%l1], 64;".into(),
        "cp.async.bulk.commit_group;".into(),
        "cp.async.bulk.wait_group.read 0;".into(),
        "cp.async.bulk.tensor.3d.cta_group::2.shared::cluster.global.tile\
            .mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint \
            [%r1], [%l1, {%r2,%r3,%r4}], [%r5], %h1, %l2;"
            .into(),
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes \
            [%r1], [%l1, {%r2,%r3,%r4,%r5,%r6}], [%r7];"
            .into(),
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes \
            [%r1], [%l1, {%r2,%r3,%r4,%r5}], [%r7], {%h1, %h2};"
            .into(),
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%l1, {%r2,%r3,%r4,%r5,%r6}], \
            [%r1];"
            .into(),
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%l1, {%r2}], \
            [%r1];"
            .into(),
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%l1, {%r2, %r3}];".into(),
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1], %l1;".into(),
        "tensormap.replace.tile.global_dim.global.b1024.b32 [%l1], 1, %r1;".into(),
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned \
            [%l1], [%r1], 128;"
            .into(),
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1,%r2,%r3,%r4}, \
            {%r5,%r6,%r7,%r8}, \
            {%r9,%r10}, {%r1,%r2,%r3,%r4};"
            .into(),
        "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col\
            .f32.e2m1.e2m1.f32.ue4m3 {%r1,%r2,%r3,%r4}, {%r5,%r6,%r7,%r8}, {%r9,%r10}, \
            {0f00000000,0f00000000,0f00000000,%r4}, \
            %r11, {0, 0}, %r12, {%h1, 0};"
            .into(),
        "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%l1,%l2,%l3,%l4}, {%l5,%l6}, {%l7}, \
            {%l1,%l2,%l3,%l4};"
            .into(),
        "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.u8.s32 {%r1,%r2,%r3,%r4}, \
            {%r5,%r6,%r7,%r8}, {%r9,%r10}, {%r1,%r2,%r3,%r4};"
            .into(),
        "wgmma.fence.sync.aligned;".into(),
        "wgmma.commit_group.sync.aligned;".into(),
        "wgmma.wait_group.sync.aligned 1;".into(),
        format!(
            "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {}, %l1, %l2, %p1, 1, \
            -1;",
            list(32)
        ),
        format!(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {}, {four}, %l2, 1, 1, \
            1, 0;",
            list(16)
        ),
        format!(
            "wgmma.mma_async.sync.aligned.m64n16k16.f16.f16.f16 {four}, %l1, %l2, 0, 1, 1, \
            0, 1;"
        ),
        format!("wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {four}, %l1, %l2, %p1;"),
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [tile], 512;".into(),
        "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r1, %r2;".into(),
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;".into(),
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r1], %l1;".into(),
        "tcgen05.cp.cta_group::2.64x128b.warpx2::01_23.b8x16.b4x16_p64 [%r1], %l1;".into(),
        "tcgen05.shift.cta_group::1.down [%r1];".into(),
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 \
            [%r1], %h1;"
            .into(),
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %l1, %l2, %r2, %p1;".into(),
        "tcgen05.mma.cta_group::1.kind::tf32.collector::a::lastuse [%r1], [%r3], %l2, %r2, \
            {%r4,%r5,%r6,%r7}, %p1, 3;"
            .into(),
        "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32 [%r1], %l1, %l2, %r2, \
            [%r3], [%r4], 1;"
            .into(),
        "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r1,%r2,%r3,%r4}, [%r9+16];".into(),
        "tcgen05.ld.sync.aligned.16x32bx2.x2.pack::16b.b32 {%r1,%r2}, [%r9], 16;".into(),
        format!("tcgen05.st.sync.aligned.16x256b.x1.unpack::16b.b32 [%r9], {four};"),
        "tcgen05.wait::ld.sync.aligned;".into(),
        "tcgen05.fence::after_thread_sync;".into(),
        "nanosleep.u32 32;".into(),
        "trap;".into(),
        "exit;".into(),
        "mov.b128 %q1, {%l1, %l2};".into(),
        "mov.b128 {%l1, %l2}, %q1;".into(),
        "mov.u32 %r1, tile;".into(),
        "mov.u32 %r1, %clock;".into(),
        "mov.u32 %r1, %cluster_ctarank;".into(),
        "mov.u64 %l1, %globaltimer;".into(),
        "add.s32 %r1, %laneid, 4;".into(),
        "mov.pred %p1, %is_explicit_cluster;".into(),
    ];
    for text in rows {
        assert!(!steps(&text).is_empty(), "{text}");
    }
}

#[test]
fn forms_that_are_refused_say_why() {
    let rows = [
        ("frobnicate.u32 %r1, %r2;", "the instruction is not known"),
        ("add.wat.s32 %r1, %r2, %r3;", "`.wat` not known here"),
        ("add.s32 %r1, %r2;", "3 operands are expected, 2 are given"),
        ("add.s32 %r1, %r2, %l1;", "`%l1` has 64 bits, `.s32` has 32"),
        ("add.s32 %r1, %r2, %r99;", "`%r99` is not declared"),
        ("add.s32 %r1, %r2, %p1;", "`%p1` is a predicate, a value is expected"),
        ("add.f32 %r1, %r2, 3;", "`3` is an integer, `.f32` is expected"),
        ("add.rm.bf16x2 %r1, %r2, %r3;", "`.bf16x2` is only rounded to the nearest"),
        ("@%r1 add.s32 %r1, %r2, %r3;", "guard `%r1` is no predicate register"),
        ("bra nowhere;", "label `nowhere` is not there"),
        ("setp.lo.u32 %p1, %r1, %l2;", "`%l2` has 64 bits, `.u32` has 32"),
        ("setp.ltu.s32 %p1, %r1, %r2;", "only there for floats"),
        ("cvt.e4m3x2.f32 %h1, %r1, %r2;", "needs `.satfinite`"),
        ("cvt.rz.satfinite.e4m3x2.f32 %h1, %r1, %r2;", "this rounding is not there"),
        ("cvt.f32.s32 %r1, %r2;", "needs a rounding"),
        ("cvt.rn.satfinite.ue8m0x2.f32 %h1, %r1, %r2;", "this rounding is not there"),
        (
            "ld.global.v8.b64 {%l1,%l2,%l3,%l4,%l5,%l6,%l7,%l8}, [%l0];",
            "more than a vector \
            holds",
        ),
        ("ld.shared.nc.u32 %r1, [%r2];", "`.nc` is only there for global memory"),
        ("ld.global.u32 %r1, [tile];", "the variable is in Shared"),
        ("ld.relaxed.global.u32 %r1, [%l1];", "a scope is missing"),
        ("st.acquire.gpu.global.u32 [%l1], %r1;", "a store does not acquire"),
        ("atom.global.add.b32 %r1, [%l1], 1;", "type `.b32` is not known"),
        ("bar.sync 16;", "none of 0 to 15"),
        ("bar.sync 1, 33;", "no whole warps"),
        ("setmaxnreg.dec.sync.aligned.u32 20;", "20 registers"),
        ("mbarrier.init.shared::cluster.b64 [%r1], 1;", "not there for this action"),
        ("cp.async.cg.shared.global [%r1], [%l1], 8;", "8 bytes"),
        (
            "cp.async.bulk.global.shared::cta.mbarrier::complete_tx::bytes [%l1], [%r1], 16, \
            [%r2];",
            "`.bulk_group` belongs",
        ),
        (
            "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes\
            .multicast::cluster \
            [%r1], [%l1, {%r2,%r3}], [%r4], %h1;",
            "needs `.shared::cluster`",
        ),
        (
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%l1, {%r2}], [%r1];",
            "2 coordinates are expected, not 1",
        ),
        ("tensormap.replace.tile.rank.shared::cta.b1024.b64 [%r1], %l1;", "type `.b64`"),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.e4m3.bf16.f32 {%r1,%r2,%r3,%r4}, {%r5,%r6}, \
            {%r7}, \
            {%r1,%r2,%r3,%r4};",
            "is not known",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4,%r5,%r6}, \
            %l1, %l2, \
            1, 1, 1, 0, 0;",
            "N is 8 to 256",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, %l1, %l2, \
            1, 2, 1, \
            0, 0;",
            "scale 2 is neither 1 nor -1",
        ),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 48;", "no power of two"),
        (
            "tcgen05.mma.cta_group::1.kind::mxf8f6f4 [%r1], %l1, %l2, %r2, %p1;",
            "`.block_scale` belongs",
        ),
        (
            "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block16 [%r1], %l1, %l2, %r2, \
            [%r3], \
            [%r4], %p1;",
            "this size of scales",
        ),
        ("tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %l1, %l2, %r2, %p1;", "weight-stationary"),
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %l1, %l2, [%r4], %r2, %p1;", "sparse"),
        (
            "tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r1}, [%r2];",
            "256 registers are more than 128",
        ),
        ("tcgen05.cp.cta_group::1.32x128b [%r1], %l1;", "`.warpx4` is missing"),
        ("tex.2d.v4.f32.f32 {%r1,%r2,%r3,%r4}, [%l1, {%r5,%r6}];", "not known"),
        ("call.uni nobody, ();", "`nobody` is no function here"),
        ("lop3.b32 %r1, %r2, %r3, %r4, 256;", "truth table 256"),
    ];
    for (text, reason) in rows {
        match lines(text) {
            Err(DecodeError::UnknownForms(forms)) => {
                assert_eq!(forms.len(), 1, "{text}: {forms:?}");
                assert!(forms[0].reason.contains(reason), "{text}: {}", forms[0].reason);
                assert_eq!(forms[0].ptx_line, 7, "{text}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn unknown_forms_are_listed_together() {
    let error =
        lines("foo.u32 %r1;\nfoo.u32 %r2;\nadd.s32 %r1, %r2, 3;\nbar.baz;\n").expect_err("two");
    let text = error.to_string();
    assert!(text.starts_with("2 forms are not known:"), "{text}");
    assert!(text.contains("PTX line 7: `foo.u32 %r1;`") && text.contains("(2 times)"), "{text}");
    assert!(text.contains("PTX line 10: `bar.baz;`"), "{text}");
}

#[test]
fn labels_belong_to_their_scopes() {
    let program = lines(
        "W: add.s32 %r1, %r1, 1;\n{ .reg .pred p; W: setp.eq.s32 p, %r1, 3; @!p bra W; bra.uni \
            E; }\n\
         bra W;\nE: ret;",
    )
    .expect("known");
    let targets: Vec<(u32, bool)> = program
        .steps
        .iter()
        .filter_map(|step| match step.instruction {
            Instruction::Branch { target, uniform } => Some((target, uniform)),
            _ => None,
        })
        .collect();
    assert_eq!(targets, [(1, false), (5, true), (0, false)]);
    assert_eq!(
        program.steps[2].guard,
        // After the nine of the kernel.
        Some(PredicateSource::Register { index: 9, negated: true })
    );
    assert_eq!(program.predicate_count, 10);
}

#[test]
fn branches_through_tables_know_their_targets() {
    let program =
        lines("A: add.s32 %r1, %r1, 1;\nT: .branchtargets A, B, A;\nbrx.idx.uni %r1, T;\nB: ret;")
            .expect("known");
    let Instruction::BranchIndexed { targets, uniform: true, .. } = &program.steps[1].instruction
    else {
        panic!("{:?}", program.steps[1]);
    };
    assert_eq!(**targets, [0, 2, 0]);
}

#[test]
fn variables_are_placed() {
    let text = ".extern .shared .align 1024 .b8 dynamic[];\n.shared .align 8 .b8 unused[4096];\n\
        .shared .align 16 .b8 tile[20];\n.global .align 8 .u64 counter = 7;\n\
        .const .align 4 .b32 table[3] = {1, 2, 0x3F800000};\n.global .u64 link = counter+4;\n\
        .visible .entry k(.param .u32 a, .param .align 64 .b8 map[128], .param .u64 b)\n\
        .reqntid 32, 2\n.maxntid 64\n.reqnctapercluster 2, 1, 1\n{\n\
        .reg .b32 %r<2>; .reg .b64 %l<2>;\n\
        .shared .align 4 .b8 inner[4];\n.local .align 16 .b8 depot[24];\n\
        mov.u32 %r0, tile;\nmov.u32 %r0, inner;\nmov.u32 %r0, dynamic;\nmov.u64 %l0, counter;\n\
        mov.u64 %l0, table;\nmov.b64 %l0, map;\nmov.u64 %l0, depot;\nmov.u64 %l0, counter+8;\n\
        ld.const.u32 %r0, [table+8];\nld.param.u64 %l0, [b];\n\
        ld.global.u64 %l1, [counter];\nret;\n}";
    let globals =
        GlobalAddresses::from([("counter".to_string(), 0x1000), ("link".to_string(), 0x1008)]);
    let program = program_of(text, &globals).expect("known");
    let values: Vec<u64> = program
        .steps
        .iter()
        .filter_map(|step| match &step.instruction {
            Instruction::Scalar(ScalarInstruction::Move {
                source: Source::Immediate(value),
                ..
            }) => Some(*value),
            Instruction::Special {
                register:
                    SpecialRegister::SharedVariable(offset)
                    | SpecialRegister::ParameterVariable(offset)
                    | SpecialRegister::ConstantVariable(offset),
                ..
            } => Some(u64::from(*offset)),
            Instruction::Load(load) => Some(load.address.offset as u64),
            _ => None,
        })
        .collect();
    // Neither more nor fewer instructions than lines, and the exit.
    assert_eq!(program.steps.len(), 13);
    assert_eq!(values, [0, 20, 1024, 0x1000, 0, 64, 0, 0x1008, 8, 192, 0x1000]);
    assert_eq!(program.shared_static_bytes, 1024);
    assert_eq!((program.local_bytes, program.parameter_bytes), (24, 200));
    assert_eq!(program.constants[8..], 1.0f32.to_le_bytes());
    assert_eq!(program.required_threads, Some([32, 2, 1]));
    assert_eq!(program.max_threads, Some([64, 1, 1]));
    assert_eq!(program.required_cluster, Some([2, 1, 1]));
    let module = ptx::parse(&format!(".version 9.0\n.target sm_100a\n.address_size 64\n{text}"))
        .expect("PTX");
    let images = global_images(&module, &globals).expect("images");
    assert_eq!(images[0], ("counter".to_string(), 7u64.to_le_bytes().to_vec()));
    assert_eq!(images[1], ("link".to_string(), 0x1004u64.to_le_bytes().to_vec()));
    let names: Vec<(String, u64)> = global_variables(&module)
        .into_iter()
        .map(|variable| (variable.name, variable.bytes))
        .collect();
    assert_eq!(names, [("counter".to_string(), 8), ("link".to_string(), 8)]);
}

#[test]
fn operands_become_what_families_need() {
    let Instruction::TensorCopy(copy) = one(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2 \
         [%r1+64], [%l1+128, {%r2, 3}], [tile+8];",
    ) else {
        panic!("a copy")
    };
    assert_eq!((copy.rank, copy.cta_group), (2, Some(2)));
    assert_eq!(copy.coordinates[1], Source::Immediate(3));
    assert_eq!(copy.map.offset, 128);
    assert_eq!(
        copy.completion,
        BulkCompletion::Mbarrier(Address { base: Source::Immediate(0), offset: 8 })
    );
    let Instruction::Mbarrier(Mbarrier::Arrive { count, expect_bytes, state, .. }) =
        one("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 512;")
    else {
        panic!("an arrival")
    };
    assert_eq!((count, expect_bytes, state), (None, Some(Source::Immediate(512)), None));
    let Instruction::Tcgen05(Tcgen05::Mma(mma)) = one(
        "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.scale_vec::4X [%r1], %l1, %l2, %r2, \
         [%r3], [%r4+4], !%p1;",
    ) else {
        panic!("a multiplication")
    };
    let scales = mma.scales.expect("scales");
    assert_eq!((scales.vector, scales.block, scales.b.offset), (4, 16, 4));
    assert!(matches!(mma.enable_input_d, PredicateSource::Register { negated: true, .. }));
    let Instruction::Load(load) = one("ld.global.b128 %q1, [%l1];") else { panic!("a load") };
    assert_eq!((load.element, load.destinations.len()), (Type::B64, 2));
    let Instruction::CopyAsync { source_bytes, ignore_source, .. } =
        one("cp.async.ca.shared.global [%r1], [%l1], 4, %p1;")
    else {
        panic!("a copy")
    };
    assert!(source_bytes.is_none() && ignore_source.is_some());
    // A special register that is no `mov` goes through a register of its own.
    assert_eq!(steps("add.s32 %r1, %laneid, 4;").len(), 2);
}

#[test]
fn names_of_types_and_back() {
    for name in ["pred", "b128", "bf16x2", "e2m1x4", "ue8m0", "s2f6x2", "f32x2"] {
        assert_eq!(Type::from_name(name).map(Type::name), Some(name));
    }
    assert_eq!(Type::from_name("b33"), None);
}

#[test]
fn kernels_that_are_not_there_are_named() {
    let module = ptx::parse(".version 9.0\n.target sm_90a\n.address_size 64\n.entry a() { ret; }")
        .expect("PTX");
    let error = decode(&module, "b", &GlobalAddresses::new()).expect_err("no kernel");
    assert_eq!(error.to_string(), "no kernel is named `b`; there are `a`");
}

#[test]
fn products_and_sums_are_fused_as_by_ptxas() {
    // (lines, what the sums become: `+` a sum, `f` fused; seen in SASS of sm_90a and
    // sm_100a).
    let rows = [
        ("mul.f32 %r5,%r1,%r2; add.f32 %r6,%r5,%r3;", "f"),
        ("mul.f32 %r5,%r1,%r2; add.f32 %r6,%r3,%r5;", "f"),
        ("mul.f32 %r5,%r1,%r2; sub.f32 %r6,%r3,%r5;", "f"),
        ("mul.f32 %r5,%r1,0f40000000; add.f32 %r6,%r5,%r3;", "f"),
        ("mul.rn.f32 %r5,%r1,%r2; add.f32 %r6,%r5,%r3;", "+"),
        ("mul.f32 %r5,%r1,%r2; add.rn.f32 %r6,%r5,%r3;", "+"),
        ("mul.ftz.f32 %r5,%r1,%r2; add.f32 %r6,%r5,%r3;", "+"),
        ("mul.f32 %r5,%r1,%r2; add.sat.f32 %r6,%r5,%r3;", "f"),
        ("mul.f64 %l5,%l1,%l2; add.f64 %l6,%l5,%l3;", "f"),
        ("mul.bf16x2 %r5,%r1,%r2; add.bf16x2 %r6,%r5,%r3;", "f"),
        ("mul.rn.bf16x2 %r5,%r1,%r2; add.rn.bf16x2 %r6,%r5,%r3;", "+"),
        ("mul.f32 %r5,%r1,%r2; add.f32 %r6,%r5,%r3; st.shared.f32 [tile],%r5;", "+"),
        ("mul.f32 %r5,%r1,%r2; add.f32 %r6,%r5,%r3; add.f32 %r7,%r5,%r4;", "ff"),
        ("mul.f32 %r5,%r1,%r2; add.f32 %r6,%r5,%r5;", "+"),
        ("mul.f32 %r5,%r1,%r2; @%p1 add.f32 %r6,%r5,%r3;", "f"),
        ("@%p1 mul.f32 %r5,%r1,%r2; @%p1 add.f32 %r6,%r5,%r3;", "+"),
        ("mul.f32 %r5,%r1,%r2; @%p1 bra L; add.f32 %r6,%r5,%r3; L:", "+"),
        ("mul.f32 %r5,%r1,%r2; bar.sync 0; add.f32 %r6,%r3,%r5;", "f"),
        ("mul.f32 %r5,%r1,%r2; selp.f32 %r6,%r5,%r3,%p1; add.f32 %r7,%r6,%r4;", "+"),
        // Registers that are written twice are left alone.
        ("mov.b32 %r1,0; mul.f32 %r5,%r1,%r2; mov.b32 %r1,1; add.f32 %r6,%r5,%r3;", "+"),
    ];
    for (text, expected) in rows {
        let found: String = steps(text)
            .iter()
            .filter_map(|step| match step {
                Instruction::Scalar(ScalarInstruction::Ternary { .. }) => Some('f'),
                Instruction::Scalar(ScalarInstruction::Binary {
                    operation: BinaryOperation::FloatAdd(_) | BinaryOperation::FloatSubtract(_),
                    ..
                }) => Some('+'),
                _ => None,
            })
            .collect();
        assert_eq!(found, expected, "{text}");
    }
    // Of two products the first operand's, or that with fewer uses: (lines, fused operands).
    let rows: [(&str, &[u32]); 3] = [
        ("mul.f32 %r5,%r1,%r2; mul.f32 %r6,%r3,%r4; add.f32 %r7,%r6,%r5;", &[3]),
        ("mul.f32 %r5,%r1,%r2; mul.f32 %r6,%r3,%r4; sub.f32 %r7,%r5,%r6;", &[1]),
        (
            "mul.f32 %r5,%r1,%r2; mul.f32 %r6,%r3,%r4; add.f32 %r7,%r6,%r5; add.f32 %r8,%r6,%r1;",
            &[1],
        ),
    ];
    for (text, expected) in rows {
        let found: Vec<u32> = steps(text)
            .iter()
            .filter_map(|step| match step {
                // Nine rows of halves come first.
                Instruction::Scalar(ScalarInstruction::Ternary {
                    a: Source::Register(Register::Word(index)),
                    ..
                }) => Some(index - 9),
                _ => None,
            })
            .collect();
        assert_eq!(found, expected, "{text}");
    }
    let text = ".version 9.0\n.target sm_90a\n.address_size 64\n.entry k() { .reg .b32 %r<9>;\n\
        mul.f32 %r5,%r1,%r2; add.f32 %r6,%r5,%r3; ret; }";
    let module = ptx::parse(text).expect("PTX");
    let options = DecodeOptions { contract_products: false };
    let program = decode_with(&module, "k", &GlobalAddresses::new(), options).expect("known");
    assert!(matches!(
        program.steps[1].instruction,
        Instruction::Scalar(ScalarInstruction::Binary { .. })
    ));
}
