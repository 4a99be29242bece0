//! What the experts of small models become, on one rank and on several.

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::ops::RowsOf;
use deepwell_ir::{
    GroupId, PrecisionPolicy, Recompute, TensorType, apply_precision, differentiate,
    expert_row_alignment, fuse, measure_products, recompute,
};

use super::*;
use crate::{RouterTraining, with_router_training};

fn graph() -> Graph {
    capture(&LlamaConfig::preset("moe-micro").unwrap()).unwrap()
}

fn names(graph: &Graph) -> Vec<&'static str> {
    let of_first = graph.nodes.iter().filter(|node| node.layer == Some(0));
    let of_experts = of_first.skip_while(|node| !matches!(node.op, Op::RouterLogits(_)));
    of_experts.map(|node| node.op.rule().name()).collect()
}

#[test]
fn experts_become_ops() {
    let captured = graph();
    assert_eq!(names(&captured), ["router_logits", "route", "experts", "add"]);
    let expanded = expand(&captured, 32).unwrap();
    let expected = [
        "router_logits",
        "route",
        "dispatch",
        "permute",
        "grouped_gemm",
        "grouped_gemm",
        "expert_swiglu",
        "grouped_gemm",
        "unpermute",
        "add",
    ];
    assert_eq!(names(&expanded), expected);
    // What follows reads the same tensor; parameters are the same; sources are by node.
    assert_eq!(expanded.parameter_count(), captured.parameter_count());
    for (index, node) in expanded.nodes.iter().enumerate() {
        assert_eq!(node.source.0 as usize, index);
    }
    assert_eq!(expand(&expanded, 32).unwrap(), expanded);
    let error = expand(&Graph { stage: Stage::Fused, ..graph() }, 32).unwrap_err();
    assert!(error.to_string().contains("expand"), "{error}");
}

/// Tokens are gathered where none is dropped, and sent where a capacity is of a rank's own.
#[test]
fn ranks_gather_tokens_or_send_them() {
    let rank = GroupRank { group: GroupId(3), place: 1, ranks: 2 };
    let limit = RouterTraining { capacity_factor: Some(1.0), ..RouterTraining::default() };
    let limited = with_router_training(&graph(), &limit).unwrap();
    let middle = ["permute", "grouped_gemm", "grouped_gemm", "expert_swiglu", "grouped_gemm"];
    let gathered = [
        &["router_logits", "route", "all_gather", "all_gather", "all_gather", "dispatch"][..],
        &middle,
        &["unpermute", "reduce_scatter", "add"],
    ];
    let sent = [
        &["router_logits", "route", "dispatch_to_ranks", "permute", "permute"][..],
        &["all_to_all", "all_to_all", "all_to_all", "dispatch"],
        &middle,
        &["unpermute", "all_to_all", "unpermute", "add"],
    ];
    let whole = graph();
    // Two of eight experts for a token: a quarter of the tokens of two ranks.
    let of_expert = Dim::TOKENS.share(1, 4).times(2);
    let experts = |op: &Op| match op {
        Op::Dispatch(op) => Some((op.rows_of, op.capacity_factor)),
        _ => None,
    };
    for (captured, expected, rows_of) in [
        (&whole, gathered.concat(), RowsOf::Here { first: 4, experts: 8 }),
        (&limited, sent.concat(), RowsOf::Sent { of_expert }),
    ] {
        let (expanded, splits) = expand_on_rank(captured, 32, rank).unwrap();
        assert_eq!(names(&expanded), expected);
        assert_eq!(splits.iter().flatten().count(), 6, "three stacks of each of two layers");
        let found: Vec<_> = expanded.nodes.iter().filter_map(|node| experts(&node.op)).collect();
        assert_eq!(found, [(rows_of, None); 2]);
        // Each exchange has a partner in the backward pass, but for that of choices.
        let differentiated = differentiate(&expanded).unwrap();
        let count = |graph: &Graph| {
            graph.nodes.iter().filter(|node| matches!(node.op, Op::Collective(_))).count()
        };
        assert_eq!(count(&differentiated), 2 * count(&expanded) - 2);
    }
}

/// Those of gpt-oss: that of the down projection is multiplied by the gates, and no bias counts
/// as a linear tensor of a policy.
#[test]
fn biases_stand_behind_their_projections() {
    let captured = capture(&LlamaConfig::preset("gpt-oss-micro").unwrap()).unwrap();
    let expanded = expand(&captured, 32).unwrap();
    let gemm_and_bias = ["grouped_gemm", "grouped_bias"];
    let expected = [
        &["router_logits", "route", "dispatch", "permute"][..],
        &gemm_and_bias,
        &gemm_and_bias,
        &["expert_swiglu"],
        &gemm_and_bias,
        &["unpermute", "add"],
    ];
    assert_eq!(names(&expanded), expected.concat());
    let gated = expanded.nodes.iter().filter_map(|node| match &node.op {
        Op::GroupedBias(op) => Some(op.gated),
        _ => None,
    });
    assert_eq!(gated.collect::<Vec<_>>(), [false, false, true, false, false, true]);
    assert_eq!(expanded.parameter_count(), captured.parameter_count());
    let differentiated = differentiate(&expanded).unwrap();
    let (_, report) = apply_precision(&differentiated, &PrecisionPolicy::mxfp8()).unwrap();
    let mut biases = report.iter().filter(|tensor| tensor.tensor.ends_with(".bias"));
    assert!(biases.all(|bias| !bias.format.is_quantized()), "{report:?}");
    let in_bf16 = report
        .iter()
        .filter(|tensor| tensor.tensor.contains("proj") && !tensor.format.is_quantized());
    let in_bf16: Vec<&str> = in_bf16.map(|tensor| tensor.tensor.as_str()).collect();
    let [first, last] = in_bf16.as_slice() else { panic!("{in_bf16:?}") };
    assert!(first.ends_with("layers.0.self_attn.q_proj.weight"), "{first}");
    assert!(last.ends_with("layers.1.mlp.experts.down_proj.weight"), "{last}");
}

#[test]
fn groups_fit_the_blocks_of_a_policy() {
    for (name, rows) in [("bf16", 32), ("mxfp8", 32), ("mxfp8-2d", 32), ("mxfp8-128", 128)] {
        let policy = PrecisionPolicy::preset(name).unwrap();
        let align = expert_row_alignment(&graph(), &policy).unwrap();
        assert_eq!(align, rows, "{name}");
        let expanded = expand(&graph(), align).unwrap();
        apply_precision(&differentiate(&expanded).unwrap(), &policy).unwrap();
    }
}

/// The gradients that both projections give the permuted rows are added where they are brought
/// back to tokens, if something does both, on one rank and on several.
#[test]
fn gradients_of_rows_are_added_on_their_way() {
    let rank = GroupRank { group: GroupId(0), place: 1, ranks: 2 };
    for expanded in [expand(&graph(), 32).unwrap(), expand_on_rank(&graph(), 32, rank).unwrap().0] {
        let differentiated = differentiate(&expanded).unwrap();
        let (quantized, _) = apply_precision(&differentiated, &PrecisionPolicy::mxfp8()).unwrap();
        let count = |graph: &Graph, name: &str| {
            graph.nodes.iter().filter(|node| node.op.rule().name() == name).count()
        };
        let fused = |serves: bool| {
            let time = |op: &Op, _: &[TensorType], _: &[TensorType]| match op {
                Op::Fused(_) => None,
                Op::AddUnpermute(_) => serves.then_some(1.0),
                _ => Some(1.0),
            };
            fuse(&quantized, &time).unwrap()
        };
        let (apart, together) = (fused(false), fused(true));
        assert_eq!(count(&apart, "add_unpermute"), 0);
        assert_eq!(count(&together, "add_unpermute"), 2, "one of each layer");
        for (name, fewer) in [("add", 2), ("unpermute", 2)] {
            assert_eq!(count(&apart, name), count(&together, name) + fewer, "{name}");
        }
        for node in &together.nodes {
            let before = apart.nodes.iter().find(|other| other.name == node.name).unwrap();
            assert_eq!(node.outputs, before.outputs, "`{}`", node.name);
        }
    }
}

/// Experts have NVFP4, with a tensor scale for each, and groups of a multiple of 128 rows.
#[test]
fn experts_are_in_nvfp4() {
    let policy = PrecisionPolicy::nvfp4().without_part(deepwell_precision::RecipePart::LastBlocks);
    let align = expert_row_alignment(&graph(), &policy).unwrap();
    assert_eq!(align, 128);
    let expanded = expand(&graph(), align).unwrap();
    let (quantized, report) = apply_precision(&differentiate(&expanded).unwrap(), &policy).unwrap();
    let is_expert = |it: &&deepwell_ir::TensorPrecision| it.tensor.contains("experts");
    let formats: Vec<&str> = report.iter().filter(is_expert).map(|it| it.format.name()).collect();
    // Two layers of gate, up and down; the last linear tensor of the model stays BF16.
    assert_eq!(formats, ["nvfp4", "nvfp4", "nvfp4", "nvfp4", "nvfp4", "bf16"]);
    let gemms = quantized.nodes.iter().filter(|node| matches!(node.op, Op::ScaledGroupedGemm(_)));
    let scales = gemms.flat_map(|node| [node.inputs[2], node.inputs[5]]);
    let mut count = 0;
    for scale in scales {
        count += 1;
        let shape = quantized.tensor(scale).shape.as_fixed().unwrap();
        assert_eq!(shape[1..], [1], "a tensor scale for each expert: {shape:?}");
        assert!(shape[0] > 1);
    }
    assert_eq!(count, 2 * 3 * 5);
}

/// Every grouped GEMM has its measurement, whose samples and planes are those of the GEMM's groups;
/// also where forward tensors, and with them offsets, are computed again.
#[test]
fn grouped_gemms_are_measured() {
    let policy = PrecisionPolicy::nvfp4().without_part(deepwell_precision::RecipePart::LastBlocks);
    let expanded = expand(&graph(), 128).unwrap();
    for recomputed in [Recompute::None, Recompute::Full] {
        let differentiated = recompute(&differentiate(&expanded).unwrap(), recomputed).unwrap();
        let (quantized, _) = apply_precision(&differentiated, &policy).unwrap();
        let measured = measure_products(&quantized).unwrap();
        let is_gemm = |node: &&Node| matches!(node.op, Op::ScaledGroupedGemm(_));
        let gemms: Vec<&Node> = quantized.nodes.iter().filter(is_gemm).collect();
        assert_eq!(gemms.len(), 15 + if recomputed == Recompute::None { 0 } else { 4 });
        for gemm in gemms {
            let Op::ScaledGroupedGemm(op) = &gemm.op else { unreachable!() };
            let name = format!("{}.product_error", gemm.name);
            let found = measured.nodes.iter().find(|node| node.name == name);
            let error = found.unwrap_or_else(|| panic!("no `{name}`"));
            assert!(matches!(&error.op, Op::ProductError(it) if it.kind == op.kind), "{name}");
            assert_eq!(error.inputs[2..], gemm.inputs, "{name}");
            for sample in &error.inputs[..2] {
                let sample = measured.nodes.iter().find(|node| node.outputs[0] == *sample);
                let sample = sample.expect("a node");
                assert_eq!(sample.op.rule().name(), "sample_operand", "{name}");
                assert_eq!(sample.inputs.get(1), gemm.inputs.last(), "{name}");
            }
        }
    }
}

#[test]
fn a_run_adds_losses_and_a_limit() {
    let training = RouterTraining { balance: 0.01, z: 0.001, capacity_factor: Some(1.25) };
    let with = with_router_training(&graph(), &training).unwrap();
    assert_eq!(with.loss, graph().loss);
    let count = |graph: &Graph, name: &str| {
        graph.nodes.iter().filter(|node| node.op.rule().name() == name).count()
    };
    assert_eq!(count(&with, "router_loss"), 2);
    let expanded = expand(&with, 32).unwrap();
    let limits = expanded.nodes.iter().filter_map(|node| match &node.op {
        Op::Dispatch(op) => op.capacity_factor,
        _ => None,
    });
    assert_eq!(limits.collect::<Vec<_>>(), [1.25; 2]);
    let differentiated = differentiate(&expanded).unwrap();
    assert_eq!(count(&differentiated, "router_loss"), 0);
    assert_eq!(count(&differentiated, "router_loss_grad"), 2);
    // They add behind the head, which overwrites.
    let at =
        |name: &str| differentiated.nodes.iter().position(|node| node.op.rule().name() == name);
    assert!(at("linear_cross_entropy_grad") < at("router_loss_grad"));
    let none = with_router_training(&graph(), &RouterTraining::default()).unwrap();
    assert_eq!(none, graph());
    let dense = capture(&LlamaConfig::preset("llama-micro").unwrap()).unwrap();
    let error = with_router_training(&dense, &training).unwrap_err().to_string();
    assert!(error.contains("expected a model with routers"), "{error}");
}
