//! Ops of mixtures: what they take and give, and what they cost.

use deepwell_ir::ops::RowsOf;
use deepwell_ir::{DType, GemmKind, NoKernel, Op, OperandType, Rejected, ops};
use deepwell_precision::QuantFormat;

fn operand(dtype: DType, shape: &[usize]) -> OperandType {
    OperandType { dtype, shape: shape.to_vec() }
}

fn route() -> ops::Route {
    ops::Route {
        experts: 8,
        top_k: 3,
        score: ops::RouteScore::Sigmoid,
        normalize: true,
        scaling: 2.5,
        groups: Some(ops::RouteGroups { count: 4, chosen: 2 }),
        selection_bias: true,
    }
}

fn heads() -> ops::AttentionHeads {
    ops::AttentionHeads {
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        scale: 0.25,
        causal: true,
        window: Some(4),
        sinks: true,
        ..ops::AttentionHeads::default()
    }
}

fn latent() -> ops::LatentKeyValue {
    ops::LatentKeyValue { heads: 4, plain_dim: 16, rope_dim: 8, value_dim: 24 }
}

const GROUPED: ops::GroupedRows = ops::GroupedRows::new(8, 32);

fn scaled(kind: GemmKind) -> ops::ScaledGroupedGemm {
    let (output, format) = (DType::Bf16, QuantFormat::MXFP8);
    ops::ScaledGroupedGemm { kind, grouped: GROUPED, output, a: format, b: format }
}

const SWIGLU: ops::ExpertActivation = ops::ExpertActivation::SwiGlu;

fn dispatch(capacity_factor: Option<f64>, rows_of: RowsOf) -> ops::Dispatch {
    ops::Dispatch { grouped: GROUPED, capacity_factor, rows_of }
}

/// Operands of experts: 10 tokens of 64, 3 of 8 experts of width 32 each.
fn expert_operands(bias: bool) -> Vec<OperandType> {
    let mut all = vec![
        operand(DType::F32, &[10, 64]),
        operand(DType::F32, &[10, 3]),
        operand(DType::I32, &[10, 3]),
        operand(DType::F32, &[8, 32, 64]),
        operand(DType::F32, &[8, 32, 64]),
        operand(DType::F32, &[8, 64, 32]),
    ];
    if bias {
        all.extend([
            operand(DType::F32, &[8, 32]),
            operand(DType::F32, &[8, 32]),
            operand(DType::F32, &[8, 64]),
        ]);
    }
    all
}

/// Operands of a bias of the experts' up projections.
fn bias_operands() -> Vec<OperandType> {
    vec![
        operand(DType::F32, &[288, 96]),
        operand(DType::F32, &[8, 96]),
        operand(DType::I32, &[9]),
        operand(DType::F32, &[10, 3]),
        operand(DType::I32, &[10, 3]),
        operand(DType::I32, &[288]),
    ]
}

#[test]
fn outputs_and_costs() {
    let f32s = |shape: &[usize]| operand(DType::F32, shape);
    type Row = (Op, Vec<OperandType>, &'static [&'static [usize]], u64);
    let i32s = |shape: &[usize]| operand(DType::I32, shape);
    let maps = [i32s(&[10, 3]), i32s(&[288])];
    let rows: [Row; 30] = [
        (route().into(), vec![f32s(&[10, 8]), f32s(&[8])], &[&[10, 3], &[10, 3]], 5 * 80),
        (
            ops::Experts { activation: SWIGLU, bias: false, capacity_factor: None }.into(),
            expert_operands(false),
            &[&[10, 64]],
            // 30 pairs of token and expert, three GEMMs of 64 by 32 each.
            30 * (3 * 2 * 64 * 32 + 5 * 32),
        ),
        (
            ops::Experts { activation: SWIGLU, bias: true, capacity_factor: None }.into(),
            expert_operands(true),
            &[&[10, 64]],
            30 * (3 * 2 * 64 * 32 + 5 * 32),
        ),
        // 30 pairs in 8 groups of whole 32 rows are 32 + 248, in whole 32: 288.
        (
            dispatch(None, RowsOf::All).into(),
            vec![i32s(&[10, 3])],
            &[&[9], &[2, 8], &[10, 3], &[288]],
            60,
        ),
        // Of two ranks with four experts each a token can want three: 30 rows for each.
        (
            ops::DispatchToRanks { experts: 8, ranks: 2, capacity_factor: None }.into(),
            vec![i32s(&[10, 3])],
            &[&[10, 3], &[2, 8], &[60], &[60, 3]],
            60,
        ),
        // The rows that came have a pair each.
        (
            dispatch(None, RowsOf::Sent { of_expert: 60.into() }).into(),
            vec![i32s(&[60, 3])],
            &[&[9], &[2, 8], &[60, 3], &[320]],
            360,
        ),
        // At most 20 of them for each of the eight experts, in whole 32.
        (
            dispatch(None, RowsOf::Sent { of_expert: 20.into() }).into(),
            vec![i32s(&[60, 3])],
            &[&[9], &[2, 8], &[60, 3], &[256]],
            360,
        ),
        // With a capacity of four pairs for each of eight experts, in whole 32.
        (
            dispatch(Some(1.0), RowsOf::All).into(),
            vec![i32s(&[10, 3])],
            &[&[9], &[2, 8], &[10, 3], &[256]],
            60,
        ),
        (
            ops::DispatchToRanks { experts: 8, ranks: 2, capacity_factor: Some(0.25) }.into(),
            vec![i32s(&[10, 3])],
            &[&[10, 3], &[2, 8], &[8], &[8, 3]],
            60,
        ),
        // Of 20 tokens each can want three of the eight experts here.
        (
            dispatch(None, RowsOf::Here { first: 8, experts: 16 }).into(),
            vec![i32s(&[20, 3])],
            &[&[9], &[2, 16], &[20, 3], &[320]],
            120,
        ),
        // Nine of nine, and there are eight here.
        (
            dispatch(None, RowsOf::Here { first: 1, experts: 9 }).into(),
            vec![i32s(&[20, 9])],
            &[&[9], &[2, 9], &[20, 9], &[416]],
            360,
        ),
        (ops::Permute {}.into(), [&[f32s(&[10, 64])], &maps[..]].concat(), &[&[288, 64]], 0),
        (
            ops::Unpermute {}.into(),
            [&[f32s(&[288, 64])], &maps[..]].concat(),
            &[&[10, 64]],
            30 * 64,
        ),
        (
            ops::AddUnpermute {}.into(),
            [&[f32s(&[288, 64]), f32s(&[288, 64])], &maps[..]].concat(),
            &[&[10, 64]],
            (30 + 288) * 64,
        ),
        // Of 288 rows 256 are padding at most: what counts are the other 32.
        (
            ops::GroupedGemm { grouped: GROUPED }.into(),
            vec![f32s(&[288, 64]), f32s(&[8, 96, 64]), i32s(&[9])],
            &[&[288, 96]],
            2 * 32 * 64 * 96,
        ),
        (
            ops::GroupedGemmDgrad { grouped: GROUPED }.into(),
            vec![f32s(&[288, 96]), f32s(&[8, 96, 64]), i32s(&[9])],
            &[&[288, 64]],
            2 * 32 * 64 * 96,
        ),
        (
            ops::GroupedGemmWgrad { grouped: GROUPED }.into(),
            vec![f32s(&[288, 96]), f32s(&[288, 64]), i32s(&[9])],
            &[&[8, 96, 64]],
            2 * 32 * 64 * 96,
        ),
        (
            scaled(GemmKind::Fprop).into(),
            vec![
                operand(DType::E4m3, &[288, 64]),
                operand(DType::E8m0, &[3, 1, 512]),
                operand(DType::E4m3, &[8, 96, 64]),
                operand(DType::E8m0, &[8, 1, 1, 512]),
                i32s(&[9]),
            ],
            &[&[288, 96]],
            2 * 32 * 64 * 96,
        ),
        (
            scaled(GemmKind::Wgrad).into(),
            vec![
                operand(DType::E4m3, &[96, 288]),
                operand(DType::E8m0, &[1, 3, 512]),
                operand(DType::E4m3, &[64, 288]),
                operand(DType::E8m0, &[1, 3, 512]),
                i32s(&[9]),
            ],
            &[&[8, 96, 64]],
            2 * 32 * 64 * 96,
        ),
        (
            ops::ExpertSwiGlu { activation: SWIGLU }.into(),
            [&[f32s(&[288, 96]), f32s(&[288, 96]), f32s(&[10, 3])], &maps[..]].concat(),
            &[&[288, 96]],
            6 * 288 * 96,
        ),
        (
            ops::RouterLogits { bias: false }.into(),
            vec![operand(DType::Bf16, &[10, 64]), f32s(&[8, 64])],
            &[&[10, 8]],
            2 * 10 * 64 * 8,
        ),
        (
            ops::SplitColumns { columns: 40 }.into(),
            vec![f32s(&[10, 48])],
            &[&[10, 40], &[10, 8]],
            0,
        ),
        (ops::JoinColumns {}.into(), vec![f32s(&[10, 40]), f32s(&[10, 8])], &[&[10, 48]], 0),
        (
            ops::JoinParts { parts: 3 }.into(),
            vec![operand(DType::E8m0, &[6, 4, 512])],
            &[&[2, 12, 512]],
            0,
        ),
        (latent().into(), vec![f32s(&[10, 160]), f32s(&[10, 8])], &[&[10, 96], &[10, 96]], 0),
        (
            ops::LatentKeyValueBackward { forward: latent() }.into(),
            vec![f32s(&[10, 96]), f32s(&[10, 96])],
            &[&[10, 160], &[10, 8]],
            // 10 tokens, 8 columns, 4 heads.
            320,
        ),
        (
            ops::GroupedBias { grouped: GROUPED, gated: true }.into(),
            bias_operands(),
            &[&[288, 96]],
            2 * 288 * 96,
        ),
        (
            ops::GroupedBiasBackward {
                forward: ops::GroupedBias { grouped: GROUPED, gated: true },
            }
            .into(),
            bias_operands(),
            &[&[8, 96], &[10, 3]],
            4 * 288 * 96,
        ),
        (
            ops::Attention {
                heads: ops::AttentionHeads {
                    kv_heads: 4,
                    value_dim: Some(24),
                    window: None,
                    sinks: false,
                    ..heads()
                },
            }
            .into(),
            vec![f32s(&[10, 64]), f32s(&[10, 64]), f32s(&[10, 96])],
            &[&[10, 96]],
            // 55 scores a head of 16 multiply-adds, and as many products with 24 values.
            2 * 4 * 55 * (16 + 24),
        ),
        (
            ops::Attention { heads: heads() }.into(),
            vec![f32s(&[10, 64]), f32s(&[10, 32]), f32s(&[10, 32]), f32s(&[4])],
            &[&[10, 64]],
            // 1 + 2 + 3 and seven windows of 4 are 34 scores a head.
            2 * 2 * 4 * 34 * 16,
        ),
    ];
    for (op, inputs, expected, flops) in rows {
        let outputs = op.outputs_of(&inputs).unwrap();
        let mut shapes: Vec<Vec<usize>> = inputs.iter().map(|input| input.shape.clone()).collect();
        for (output, shape) in outputs.iter().zip(expected) {
            assert_eq!(output.shape, *shape, "{}", op.name());
            shapes.push(output.shape.clone());
        }
        // Sizes of batch and sequence are open in the type of lse: one sequence of 10 tokens here.
        if outputs.len() > expected.len() {
            shapes.push(vec![1, 4, 10]);
        }
        assert_eq!(op.rule().flops(&shapes), flops, "{}", op.name());
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let f32s = |shape: &[usize]| operand(DType::F32, shape);
    let changed = |index: usize, to: OperandType| {
        let mut all = expert_operands(false);
        all[index] = to;
        all
    };
    let experts: Op =
        ops::Experts { activation: SWIGLU, bias: false, capacity_factor: None }.into();
    let wide = ops::Route { top_k: 5, ..route() };
    let endless = Some(ops::RouteGroups { count: 4, chosen: usize::MAX });
    let endless = ops::Route { groups: endless, ..route() };
    let uneven = ops::Route { groups: Some(ops::RouteGroups { count: 3, chosen: 2 }), ..route() };
    let short = ops::Rope {
        heads: 4,
        head_dim: 24,
        plain_dim: 16,
        inverse_frequencies: vec![1.0],
        ..ops::Rope::default()
    };
    let full = ops::AttentionHeads { causal: false, sinks: false, ..heads() };
    let empty = ops::AttentionHeads { window: Some(0), sinks: false, ..heads() };
    let three = || vec![f32s(&[10, 64]), f32s(&[10, 32]), f32s(&[10, 32])];
    let sinks = ops::Attention { heads: heads() };
    for (op, inputs, expected) in [
        (route().into(), vec![f32s(&[10, 8])], "expected 2 operands (logits, bias), got 1"),
        (route().into(), vec![f32s(&[10, 9]), f32s(&[8])], "expected operand 0 [10, 8]"),
        (wide.into(), vec![f32s(&[10, 8]), f32s(&[8])], "1 to 4 chosen groups with 5 experts"),
        // Found by fuzzing: the experts of so many groups overflowed.
        (endless.into(), vec![f32s(&[10, 8]), f32s(&[8])], "1 to 4 chosen groups with 3 experts"),
        (uneven.into(), vec![f32s(&[10, 8]), f32s(&[8])], "groups that divide 8 experts, got 3"),
        (experts.clone(), changed(2, f32s(&[10, 3])), "expected operand 2 as i32, got f32"),
        (experts.clone(), changed(1, f32s(&[9, 3])), "expected operand 1 [10, 3], got [9, 3]"),
        (experts.clone(), changed(5, f32s(&[8, 32, 64])), "expected operand 5 [8, 64, 32]"),
        (experts, expert_operands(true), "expected 6 operands"),
        (
            ops::Route { selection_bias: false, ..route() }.into(),
            vec![operand(DType::Bf16, &[10, 8])],
            "expected operand 0 as f32, got bf16",
        ),
        (
            dispatch(Some(0.0), RowsOf::All).into(),
            vec![operand(DType::I32, &[10, 3])],
            "expected a finite capacity factor over 0, got 0",
        ),
        (
            dispatch(Some(1.0), RowsOf::Here { first: 0, experts: 16 }).into(),
            vec![operand(DType::I32, &[10, 3])],
            "expected no capacity factor where tokens of all ranks are sorted, got 1",
        ),
        (
            dispatch(None, RowsOf::Here { first: 9, experts: 16 }).into(),
            vec![operand(DType::I32, &[10, 3])],
            "expected experts of a rank among the layer's 16, got 8 from 9 on",
        ),
        (
            ops::GroupedGemm { grouped: GROUPED }.into(),
            vec![f32s(&[288, 64]), f32s(&[8, 96, 64]), operand(DType::I32, &[8])],
            "expected operand 2 [9], got [8]",
        ),
        (
            ops::GroupedGemm { grouped: ops::GroupedRows::new(8, 0) }.into(),
            vec![f32s(&[288, 64]), f32s(&[8, 96, 64]), operand(DType::I32, &[9])],
            "expected at least 1 group of a multiple of 1 row",
        ),
        (
            // Where 128 elements share an exponent, groups of 32 rows would share it too.
            ops::ScaledGroupedGemm {
                a: QuantFormat::MXFP8_128,
                b: QuantFormat::MXFP8_128,
                ..scaled(GemmKind::Wgrad)
            }
            .into(),
            vec![
                operand(DType::E4m3, &[96, 288]),
                operand(DType::E8m0, &[1, 3, 512]),
                operand(DType::E4m3, &[64, 288]),
                operand(DType::E8m0, &[1, 3, 512]),
                operand(DType::I32, &[9]),
            ],
            "expected groups of a multiple of 128 rows, which share a scale",
        ),
        (
            ops::RouterLogits { bias: false }.into(),
            vec![operand(DType::Bf16, &[10, 64]), operand(DType::Bf16, &[8, 64])],
            "expected operand 1 as f32, got bf16",
        ),
        (
            ops::SplitColumns { columns: 48 }.into(),
            vec![f32s(&[10, 48])],
            "expected a cut inside of 48 columns, got 48",
        ),
        (
            ops::JoinParts { parts: 4 }.into(),
            vec![operand(DType::E4m3, &[6, 64])],
            "expected a first dimension of 4 parts, got 6",
        ),
        (
            ops::JoinParts { parts: 2 }.into(),
            vec![operand(DType::E2m1, &[6, 3])],
            "expected a last dimension of whole bytes",
        ),
        (ops::JoinParts { parts: 2 }.into(), vec![f32s(&[6])], "expected at least two dimensions"),
        (
            short.into(),
            vec![f32s(&[10, 96])],
            "with head_dim/2 inverse frequencies, got 24 of which 16 do not turn with 1",
        ),
        (
            latent().into(),
            vec![f32s(&[10, 160]), f32s(&[9, 8])],
            "expected operand 1 [10, 8], got [9, 8]",
        ),
        (ops::Attention { heads: empty }.into(), three(), "a window of 1 token or more, got 0"),
        (
            ops::Attention { heads: full }.into(),
            three(),
            "expected a causal mask where there is a window, got none",
        ),
        (
            ops::Attention { heads: heads() }.into(),
            three(),
            "expected 4 operands (q, k, v, sinks), got 3",
        ),
        (
            ops::Attention { heads: heads() }.into(),
            [three(), vec![operand(DType::Bf16, &[4])]].concat(),
            "expected operand 3 as f32, got bf16",
        ),
        (
            sinks.into(),
            vec![f32s(&[10, 64]), f32s(&[10, 32]), f32s(&[10, 32]), f32s(&[2])],
            "expected operand 3 [4], got [2]",
        ),
    ] {
        let error = op.outputs_of(&inputs).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_catalog_without_a_kernel_says_so() {
    let check = |rejected: &[&str], others: &[&str], expected: &str| {
        let rejected = rejected.iter().map(|reason| Rejected {
            kernel: "a_kernel".to_string(),
            reason: (*reason).to_string(),
        });
        let error = NoKernel {
            op: "route".to_string(),
            arch: "cpu".to_string(),
            rejected: rejected.collect(),
            others: others.iter().map(ToString::to_string).collect(),
        };
        assert_eq!(error.to_string(), format!("no kernel for `route` on `cpu`\n{expected}"));
    };
    check(
        &[],
        &[],
        "hint: no target has a kernel of this op; a graph that holds it can be captured and \
         counted, not run",
    );
    check(&[], &["hopper-sm90", "b"], "hint: there is a kernel on `hopper-sm90`, `b`");
    check(&["is small"], &[], "  a_kernel: is small");
    check(&["is small"], &["b"], "  a_kernel: is small\nhint: there is a kernel on `b`");
}
