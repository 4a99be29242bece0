//! Collectives: shapes, costs, derivatives, and programs whose ranks or groups do not fit.

use deepwell_ir::ops::{Collective, CollectiveKind, LinearCrossEntropy, Reduction, RmsNorm};
use deepwell_ir::{
    Access, Accumulate, Arena, Body, BodyId, ByteRange, Call, Cost, DType, Dim, Graph,
    GraphBuilder, GroupId, HostInterface, Init, Invocation, KernelChoice, MathUnit, MemoryKind,
    Mode, Op, Operand, OperandType, Phase, PrecisionPolicy, ProcessGroup, Program, Ranks, Role,
    Shape, Tag, Target, Value, ValueId, apply_precision, differentiate, verify_program,
};

const SUM: Reduction = Reduction::Sum;

fn among(ranks: u32, kind: CollectiveKind) -> Collective {
    Collective::new(kind, GroupId(0), ranks)
}

fn recv(from: u32, sizes: &[usize]) -> CollectiveKind {
    let shape = Shape::new(sizes.iter().copied());
    CollectiveKind::Recv { from, shape, dtype: DType::Bf16 }
}

fn bf16(shape: &[usize]) -> OperandType {
    OperandType { dtype: DType::Bf16, shape: shape.to_vec() }
}

#[test]
fn shapes_and_costs() {
    // Ranks, kind, input, output, FLOPs, bytes on the link.
    type Row = (u32, CollectiveKind, &'static [usize], &'static [usize], u64, u64);
    let rows: [Row; 12] = [
        (4, CollectiveKind::AllReduce { reduction: SUM }, &[8, 3], &[8, 3], 18, 72),
        (1, CollectiveKind::AllReduce { reduction: SUM }, &[8, 3], &[8, 3], 0, 0),
        (3, CollectiveKind::AllReduce { reduction: Reduction::Max }, &[], &[], 0, 2),
        (4, CollectiveKind::ReduceScatter { reduction: SUM }, &[8, 3], &[2, 3], 18, 36),
        (4, CollectiveKind::ReduceScatter { reduction: SUM }, &[0, 3], &[0, 3], 0, 0),
        (4, CollectiveKind::AllGather, &[2, 3], &[8, 3], 0, 36),
        (4, CollectiveKind::AllToAll, &[8, 3], &[8, 3], 0, 36),
        (4, CollectiveKind::Broadcast { root: 3 }, &[8, 3], &[8, 3], 0, 48),
        (1, CollectiveKind::Broadcast { root: 0 }, &[8, 3], &[8, 3], 0, 0),
        (3, CollectiveKind::Shift { by: 2 }, &[8, 3], &[8, 3], 0, 48),
        (2, CollectiveKind::Send { to: 1 }, &[8, 3], &[], 0, 48),
        (2, recv(0, &[8, 3]), &[], &[8, 3], 0, 48),
    ];
    for (ranks, kind, input, output, flops, bytes) in rows {
        let op = Op::from(among(ranks, kind.clone()));
        let inputs = match kind {
            CollectiveKind::Recv { .. } => vec![],
            _ => vec![bf16(input)],
        };
        let outputs = op.outputs_of(&inputs).unwrap();
        let expected = match kind {
            CollectiveKind::Send { .. } => vec![],
            _ => vec![bf16(output)],
        };
        assert_eq!(outputs, expected, "{kind:?}");
        let operands = [inputs, outputs].concat();
        let shapes: Vec<_> = operands.iter().map(|operand| operand.shape.clone()).collect();
        assert_eq!(op.rule().flops(&shapes), flops, "{kind:?}");
        assert_eq!(op.rule().bytes_on_link(&operands), bytes, "{kind:?}");
        assert!(Collective::NAMES.contains(&op.rule().name()));
        let json = serde_json::to_string(&op).unwrap();
        assert_eq!(serde_json::from_str::<Op>(&json).unwrap(), op);
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let scatter = CollectiveKind::ReduceScatter { reduction: SUM };
    let data = OperandType { dtype: DType::E4m3, shape: vec![8] };
    for (ranks, kind, inputs, expected) in [
        (3, scatter.clone(), vec![bf16(&[8])], "a first dimension divisible by 3 ranks, got 8"),
        (3, CollectiveKind::AllToAll, vec![bf16(&[8])], "a first dimension divisible by 3 ranks"),
        (2, scatter.clone(), vec![bf16(&[])], "at least one dimension, got a scalar"),
        (2, CollectiveKind::AllGather, vec![bf16(&[])], "at least one dimension, got a scalar"),
        (2, scatter, vec![data], "f32, bf16, i32 or u64, which can be reduced, got e4m3"),
        (0, CollectiveKind::AllGather, vec![bf16(&[8])], "a group of at least 1 rank, got 0"),
        (2, CollectiveKind::Send { to: 2 }, vec![bf16(&[8])], "a place in a group of 2, got 2"),
        (2, CollectiveKind::Broadcast { root: 2 }, vec![bf16(&[8])], "group of 2, got 2"),
        (2, CollectiveKind::Shift { by: 2 }, vec![bf16(&[8])], "group of 2, got 2"),
        (2, recv(2, &[8]), vec![], "a place in a group of 2, got 2"),
        (2, recv(0, &[8]), vec![bf16(&[8])], "expected 0 operands (), got 1"),
        (2, CollectiveKind::AllGather, vec![], "expected 1 operands (x), got 0"),
    ] {
        let op = Op::from(among(ranks, kind.clone()));
        let error = op.outputs_of(&inputs).unwrap_err().to_string();
        assert!(error.contains(expected), "{kind:?}: {error}");
    }
}

/// Slices of a size that depends on the batch make the whole again, and whether they are whole is
/// seen once the size is known.
#[test]
fn slices_of_the_batch() {
    let graph = sharded(4);
    let shape = |name: &str| {
        graph.tensor(graph.find(name).unwrap_or_else(|| panic!("{name}"))).shape.to_string()
    };
    assert_eq!(shape("scatter"), "[B*S:4, 32]");
    assert_eq!(shape("gather"), "[B*S, 32]");
    let scatter = among(4, CollectiveKind::ReduceScatter { reduction: SUM });
    assert!(scatter.check(&[bf16(&[8, 32])], &[bf16(&[2, 32])]).is_ok());
    for (input, output, expected) in [
        (6, 2, "divisible by 4 ranks, got 6"),
        (8, 3, "expected results [OperandType { dtype: Bf16, shape: [2, 32] }]"),
    ] {
        let error = scatter.check(&[bf16(&[input, 32])], &[bf16(&[output, 32])]).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// Received activations, scattered by rows, normalized, gathered, exchanged, all-reduced, and their
/// loss.
fn sharded(ranks: u32) -> Graph {
    let mut b = GraphBuilder::new("sharded");
    let whole = Shape(vec![Dim::TOKENS, Dim::fixed(32)]);
    let kind = CollectiveKind::Recv { from: 1, shape: whole, dtype: DType::F32 };
    let x = b.op("recv", among(ranks, kind), &[]).unwrap()[0];
    b.scope(Tag::Mlp, Some(0));
    let kind = CollectiveKind::ReduceScatter { reduction: SUM };
    let x = b.op("scatter", among(ranks, kind), &[x]).unwrap()[0];
    let gain = b.parameter("norm", Shape::new([32usize]), Init::Ones, Role::Norm);
    let x = b.op("normed", RmsNorm { eps: 1e-5 }, &[x, gain]).unwrap()[0];
    let x = b.op("gather", among(ranks, CollectiveKind::AllGather), &[x]).unwrap()[0];
    let x = b.op("exchange", among(ranks, CollectiveKind::AllToAll), &[x]).unwrap()[0];
    let kind = CollectiveKind::AllReduce { reduction: SUM };
    let x = b.op("sum", among(ranks, kind), &[x]).unwrap()[0];
    b.op("send", among(ranks, CollectiveKind::Send { to: 2 }), &[x]).unwrap();
    let head =
        b.parameter("head", Shape::new([96usize, 32]), Init::Normal { std: 0.02 }, Role::Head);
    let targets = b.input("targets", Shape(vec![Dim::TOKENS]), DType::I32);
    let scale = b.input("loss_scale", Shape::new([1usize]), DType::F32);
    b.op("loss", LinearCrossEntropy {}, &[x, head, targets, scale]).unwrap();
    b.finish().unwrap()
}

#[test]
fn the_backward_runs_the_exchanges_in_reverse() {
    let graph = differentiate(&sharded(4)).unwrap();
    let is_backward = |name: &str| name.ends_with(".backward");
    let exchanges: Vec<String> = (graph.nodes.iter())
        .filter(|node| matches!(node.op, Op::Collective(_)) && is_backward(&node.name))
        .map(|node| format!("{} {}", node.op.name(), node.op.rule().attributes()))
        .collect();
    assert_eq!(
        exchanges,
        [
            "recv group=0 ranks=4 from=2 f32[B*S, 32]",
            "all_reduce sum group=0 ranks=4",
            "all_to_all group=0 ranks=4",
            "reduce_scatter sum group=0 ranks=4",
            "all_gather group=0 ranks=4",
            "send group=0 ranks=4 to=1",
        ]
    );
    // What comes from other ranks is stored as activations are here.
    let (bf16, _) = apply_precision(&graph, &PrecisionPolicy::bf16()).unwrap();
    let text = bf16.to_string();
    assert!(
        text.contains("recv: bf16[B*S, 32] = recv() group=0 ranks=4 from=1 bf16[B*S, 32]"),
        "{text}"
    );
}

#[test]
fn what_has_no_derivative_says_so() {
    for kind in [
        CollectiveKind::AllReduce { reduction: Reduction::Max },
        CollectiveKind::ReduceScatter { reduction: Reduction::Max },
        CollectiveKind::Broadcast { root: 0 },
    ] {
        let mut b = GraphBuilder::new("no derivative");
        let whole = Shape(vec![Dim::TOKENS, Dim::fixed(32)]);
        let x = b.input("x", whole, DType::F32);
        let x = b.op("op", among(1, kind), &[x]).unwrap()[0];
        let init = Init::Normal { std: 0.02 };
        let head = b.parameter("head", Shape::new([96usize, 32]), init, Role::Head);
        let targets = b.input("targets", Shape(vec![Dim::TOKENS]), DType::I32);
        let scale = b.input("loss_scale", Shape::new([1usize]), DType::F32);
        b.op("loss", LinearCrossEntropy {}, &[x, head, targets, scale]).unwrap();
        let error = differentiate(&b.finish().unwrap()).unwrap_err().to_string();
        assert!(error.contains("has no backward rule"), "{error}");
    }
}

/// A program of rank 2 with one reduce-scatter of `[4, 4]` among two of four ranks.
fn program() -> Program {
    let value = |name: &str, rows: usize, offset: usize| Value {
        name: name.to_string(),
        dtype: DType::F32,
        shape: vec![rows, 4],
        memory: MemoryKind::Gradients,
        range: ByteRange { offset, bytes: rows * 16 },
        slot_stride_bytes: 0,
        tensor: None,
        link: None,
    };
    let operand = |id, access| Operand { value: ValueId(id), access };
    let ranks = Ranks {
        rank: 2,
        world_size: 4,
        groups: vec![ProcessGroup { name: "data".to_string(), ranks: vec![0, 2] }],
    };
    Program {
        name: "by hand".to_string(),
        mode: Mode::Train,
        rank: 2,
        target: Target::cpu(1, Vec::new()).as_rank(ranks),
        batch: 1,
        seq: 4,
        micro_batches: 1,
        slots: 1,
        bodies: vec![Body { phase: Phase::Optimizer, chunk: 0, calls: 0..1 }],
        schedule: vec![Invocation { body: BodyId(0), micro_batch: 0, slot: 0 }],
        values: vec![value("whole", 4, 0), value("slice", 2, 64)],
        calls: vec![Call {
            name: "scatter".to_string(),
            op: among(2, CollectiveKind::ReduceScatter { reduction: SUM }).into(),
            choice: KernelChoice { kernel: "kernel".to_string(), tile: None, workspace_bytes: 0 },
            operands: vec![operand(0, Access::Read), operand(1, Access::Write)],
            input_count: 1,
            accumulate: Accumulate::Never,
            last_only: false,
            alone_only: false,
            accumulator_bytes: 0,
            workspace: ByteRange::default(),
            phase: Phase::Optimizer,
            tag: Tag::Mlp,
            layer: None,
            recomputes: false,
            source: deepwell_ir::NodeId(0),
            unit: MathUnit::F32,
            peak_share: 1.0,
            cost: Cost { bytes_on_link: 32, ..Cost::default() },
            stream: 0,
            waits: Vec::new(),
            records: None,
            rejected: Vec::new(),
        }],
        arena: Arena { bytes: 128, transient_offset: 128, ..Arena::default() },
        host: HostInterface::default(),
        parameters: Vec::new(),
        precision: Vec::new(),
        shards: Vec::new(),
        unstored: Vec::new(),
        handover: None,
        fixed_overhead_bytes: 0,
    }
}

#[test]
fn programs_of_ranks_are_verified() {
    let whole = program();
    assert_eq!(Program::from_json(&whole.to_json()).unwrap(), whole);
    let text = whole.to_string();
    assert!(text.contains("rank 2 of 4; group 0 `data`: [0, 2]"), "{text}");
    assert!(text.contains("on_link=32  sum group=0 ranks=2"), "{text}");
    let check = |change: fn(&mut Program), expected: &str| {
        let mut broken = program();
        change(&mut broken);
        let error = verify_program(&broken).unwrap_err().to_string();
        assert!(error.contains(expected), "expected `{expected}` in `{error}`");
    };
    fn op(program: &mut Program, kind: CollectiveKind, ranks: u32) {
        program.calls[0].op = among(ranks, kind).into();
    }
    check(|p| p.rank = 1, "it is for rank 1, its target is rank 2");
    check(|p| p.target.ranks = Ranks::default(), "it is for rank 2, its target is rank 0");
    check(|p| p.target.ranks.groups.clear(), "it is among group 0, its target has 0 groups");
    check(
        |p| p.target.ranks.groups[0].ranks = vec![0, 1],
        "expected rank 2 in its group `data`, got [0, 1]",
    );
    check(|p| p.target.ranks.groups[0].ranks.push(3), "it is among 2 ranks, group `data` has 3");
    check(|p| op(p, CollectiveKind::AllGather, 2), "expected results [OperandType");
    check(|p| p.values[1].dtype = DType::I32, "expected results [OperandType");
    check(
        |p| {
            op(p, recv(0, &[3, 4]), 2);
            p.calls[0].operands.remove(0);
            p.calls[0].input_count = 0;
        },
        "expected no operand and one result in bf16",
    );
    check(
        |p| {
            let (shape, dtype) = (Shape(vec![Dim::SEQ, Dim::fixed(4)]), DType::F32);
            op(p, CollectiveKind::Recv { from: 0, shape, dtype }, 2);
            p.calls[0].operands.remove(0);
            p.calls[0].input_count = 0;
        },
        "it receives [4, 4] into [2, 4]",
    );
}

/// Tensors that are gathered at the same time are of any types, each with its own slice.
#[test]
fn gathers_of_several_tensors() {
    let of = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
    let slices = [of(DType::E4m3, &[4, 6]), of(DType::E8m0, &[1, 2, 512])];
    let whole = [of(DType::E4m3, &[12, 6]), of(DType::E8m0, &[3, 2, 512])];
    let op = Collective::gathers(GroupId(1), 3, 2);
    op.check(&slices, &whole).unwrap();
    assert_eq!(Op::from(op.clone()).rule().attributes(), "group=1 ranks=3 tensors=2");
    // Two thirds of all that comes out.
    let operands = [slices.clone(), whole.clone()].concat();
    assert_eq!(Op::from(op.clone()).rule().bytes_on_link(&operands), 2 * (72 + 3 * 1024) / 3);
    let json = serde_json::to_string(&op).unwrap();
    assert_eq!(serde_json::from_str::<Collective>(&json).unwrap(), op);
    let refuse = |op: &Collective, slices: &[OperandType], whole: &[OperandType], expected| {
        let error = op.check(slices, whole).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    refuse(&op, &slices[..1], &whole, "2 slices and as many tensors, at least 1, got 1 and 2");
    let others = [whole[0].clone(), of(DType::E8m0, &[6, 2, 512])];
    refuse(&op, &slices, &others, "results");
    let kind = CollectiveKind::ReduceScatter { reduction: SUM };
    let scatter = Collective { kind, ..op.clone() };
    refuse(&scatter, &slices, &whole, "an all-gather of tensors by themselves, got reduce_scatter");
    let none = Collective::gathers(GroupId(1), 3, 0);
    refuse(&none, &[], &[], "at least 1, got 0 and 0");
}
