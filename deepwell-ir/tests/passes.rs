//! A one-layer model after each pass, as text, JSON and DOT.

use std::num::NonZeroU32;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{
    GemmKind, Graph, IrError, Node, Op, OpRule, Phase, PrecisionPolicy, Recompute, Stage,
    TensorKind, apply_precision, defer_weight_gradients, differentiate, fuse, recompute,
};
use deepwell_precision::{Format, RecipePart};

fn micro() -> LlamaConfig {
    LlamaConfig { num_layers: 1, ..LlamaConfig::preset("llama-micro").unwrap() }
}

fn differentiated(config: &LlamaConfig) -> Graph {
    differentiate(&capture(config).unwrap()).unwrap()
}

/// MXFP8 for the first and the last linear tensor too.
fn all_mxfp8() -> PrecisionPolicy {
    PrecisionPolicy::mxfp8().with_rule("*_proj.weight", Format::MXFP8).unwrap()
}

/// The graph through all passes.
fn fused(config: &LlamaConfig, rule: Recompute, policy: &PrecisionPolicy) -> Graph {
    let graph = recompute(&differentiated(config), rule).unwrap();
    fuse(&apply_precision(&graph, policy).unwrap().0, &|_, _, _| None).unwrap()
}

#[test]
fn each_stage_as_text() {
    let captured = capture(&micro()).unwrap();
    let gradient = differentiate(&captured).unwrap();
    let plain = recompute(&gradient, Recompute::None).unwrap();
    let (mxfp8, precision) = apply_precision(&plain, &all_mxfp8()).unwrap();
    insta::assert_snapshot!("captured", captured.to_string());
    insta::assert_snapshot!("differentiated", gradient.to_string());
    for rule in [Recompute::None, Recompute::Selective, Recompute::Full] {
        let name = format!("recompute_{rule}");
        insta::assert_snapshot!(name, recompute(&gradient, rule).unwrap().to_string());
    }
    insta::assert_snapshot!("mxfp8", mxfp8.to_string());
    insta::assert_snapshot!("fused", fuse(&mxfp8, &|_, _, _| None).unwrap().to_string());
    let lines: Vec<String> = precision
        .iter()
        .map(|tensor| format!("{}: {} ({})", tensor.tensor, tensor.format, tensor.reason))
        .collect();
    insta::assert_snapshot!("precision", lines.join("\n"));
}

#[test]
fn json_gives_the_graph_back() {
    let tied = LlamaConfig {
        tie_word_embeddings: true,
        attention_bias: true,
        mlp_bias: true,
        // One over the root of 24, and this epsilon, need all digits of an f64.
        head_dim: 24,
        num_heads: 4,
        num_kv_heads: 4,
        rms_norm_eps: 1.000_000_000_000_000_3e-6,
        ..micro()
    };
    for config in [micro(), tied] {
        let captured = capture(&config).unwrap();
        let gradient = differentiate(&captured).unwrap();
        let mut graphs = vec![captured, gradient.clone()];
        for rule in [Recompute::None, Recompute::Selective, Recompute::Full] {
            graphs.push(recompute(&gradient, rule).unwrap());
            for policy in [PrecisionPolicy::f32(), PrecisionPolicy::bf16(), all_mxfp8()] {
                graphs.push(fused(&config, rule, &policy));
            }
        }
        for graph in graphs {
            let back = Graph::from_json(&graph.to_json()).unwrap();
            assert_eq!(back.to_json(), graph.to_json(), "{:?}", graph.stage);
            assert!(back == graph, "{:?}", graph.stage);
        }
    }
}

#[test]
fn json_that_is_no_graph_is_refused() {
    let text = capture(&micro()).unwrap().to_json();
    let check = |text: &str, expected: &str| {
        let message = Graph::from_json(text).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    check("{}", "not a valid graph: missing field `name`");
    check(&text[..text.len() / 2], "not a valid graph: EOF");
    check(&text.replace("\"op\": \"add\"", "\"op\": \"sub\""), "unknown variant `sub`");
    check(&text.replace("\"name\": \"norm\"", "\"name\": \"targets\""), "are named `targets`");
}

#[test]
fn dot_has_a_cluster_per_layer_and_an_edge_per_use() {
    let config = LlamaConfig { num_layers: 3, ..micro() };
    let graph = differentiated(&config);
    let dot = graph.to_dot();
    for layer in 0..3 {
        assert_eq!(dot.matches(&format!("subgraph \"cluster_{layer}\" {{")).count(), 1);
        assert_eq!(dot.matches(&format!("label=\"layer {layer}\"")).count(), 1);
    }
    assert_eq!(dot.matches("subgraph").count(), 3);
    assert_eq!(dot.matches(" -> ").count(), graph.dependencies().edge_count());
    for (index, node) in graph.nodes.iter().enumerate() {
        let line = format!("n{index} [label=\"{}\\n{}\"];", node.name, node.op.name());
        assert_eq!(dot.matches(&line).count(), 1, "{line}");
    }
    assert_eq!(dot.matches('{').count(), dot.matches('}').count());
    let edge = |from: &str, to: &str, tensor: &str| {
        let at = |name: &str| graph.nodes.iter().position(|node| node.name == name).unwrap();
        format!("n{} -> n{} [label={tensor:?}];", at(from), at(to))
    };
    let carried =
        edge("layers.0.mlp.residual", "layers.1.input_layernorm", "layers.0.mlp.residual");
    assert!(dot.contains(&carried), "{carried}");
}

fn names(graph: &Graph, wanted: impl Fn(&Node) -> bool) -> Vec<&str> {
    graph.nodes.iter().filter(|node| wanted(node)).map(|node| node.name.as_str()).collect()
}

#[test]
fn rules_of_recomputation_as_text() {
    for text in ["none", "norms", "activations", "selective", "full:1", "full:22", "full"] {
        let rule: Recompute = text.parse().unwrap();
        assert_eq!(rule.to_string(), text);
        let json = serde_json::to_string(&rule).unwrap();
        assert_eq!(json, format!("\"{text}\""));
        assert_eq!(serde_json::from_str::<Recompute>(&json).unwrap(), rule);
    }
    for text in ["", "all", "full:", "full:0", "full:-1", "full:1.5", "selective:3"] {
        let error = text.parse::<Recompute>().unwrap_err();
        assert!(error.starts_with("expected `none`, "), "{error}");
        assert!(error.ends_with(&format!("got `{text}`")), "{error}");
    }
}

/// Layers that are recomputed lie apart, so that each pipeline stage has its share. Recomputing the
/// last layer raised the peak.
#[test]
fn recomputed_layers_are_spread_evenly() {
    let graph = differentiated(&LlamaConfig { num_layers: 8, ..micro() });
    let whole_layers = |count| {
        let rule = Recompute::FullOf(NonZeroU32::new(count).unwrap());
        let graph = recompute(&graph, rule).unwrap();
        let is_whole = |layer: &u32| {
            let mut nodes = graph.nodes.iter().filter(|node| node.layer == Some(*layer));
            nodes.any(|node| node.recompute && matches!(node.op, Op::Attention(_)))
        };
        (0..8).filter(is_whole).collect::<Vec<u32>>()
    };
    assert_eq!(whole_layers(1), [0]);
    assert_eq!(whole_layers(2), [0, 4]);
    assert_eq!(whole_layers(3), [0, 2, 5]);
    assert_eq!(whole_layers(4), [0, 2, 4, 6]);
    assert_eq!(whole_layers(7), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(whole_layers(8), [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn recompute_repeats_what_its_rule_says() {
    let graph = differentiated(&LlamaConfig { num_layers: 2, ..micro() });
    let repeated = |rule| {
        let graph = recompute(&graph, rule).unwrap();
        let is_repeated = |node: &Node| node.repeats;
        for again in graph.nodes.iter().filter(|node| is_repeated(node)) {
            let is_first = |node: &Node| node.recompute && node.source == again.source;
            assert_eq!(names(&graph, is_first).len(), 1, "{}", again.name);
        }
        names(&graph, is_repeated).len()
    };
    assert_eq!(repeated(Recompute::None), 0);
    // Two norms and a SwiGLU per layer.
    assert_eq!(repeated(Recompute::Norms), 2 * 2);
    assert_eq!(repeated(Recompute::Activations), 2);
    assert_eq!(repeated(Recompute::Selective), 2 * 3);
    // All 15 of a layer but the residual that leaves it; of those the down projection is not
    // read by any gradient.
    assert_eq!(repeated(Recompute::Full), 2 * 13);
    let full_of = |layers| Recompute::FullOf(NonZeroU32::new(layers).unwrap());
    assert_eq!(repeated(full_of(1)), 13 + 3);
    assert_eq!(repeated(full_of(2)), 2 * 13);
    let message = recompute(&graph, full_of(3)).unwrap_err().to_string();
    assert_eq!(message, "recompute full:3: expected at most 2 layers");
    let full = recompute(&graph, Recompute::Full).unwrap();
    // No activation of a layer but the one that leaves it reaches from the forward to the backward.
    for node in full.nodes.iter().filter(|node| node.phase == Phase::Backward) {
        for &id in &node.inputs {
            let writer = full.nodes.iter().find(|node| node.outputs.contains(&id));
            let Some(writer) = writer.filter(|writer| writer.phase == Phase::Forward) else {
                continue;
            };
            let leaves = writer.layer.is_none() || writer.name.ends_with("mlp.residual");
            assert!(leaves, "`{}` reads `{}`", node.name, writer.name);
        }
    }
}

#[test]
fn tied_table_has_one_gradient_that_both_uses_add_to() {
    let graph = differentiated(&LlamaConfig { tie_word_embeddings: true, ..micro() });
    let gradient = graph.find("grad.model.embed_tokens.weight").unwrap();
    assert_eq!(
        names(&graph, |node| node.outputs.contains(&gradient)),
        ["lm_head.backward", "embed_tokens.backward"]
    );
    assert_eq!(graph.parameter_gradients().len(), graph.parameters().count());
}

#[test]
fn mxfp8_gemms_read_quantized_data_only() {
    let graph = fused(&micro(), Recompute::None, &all_mxfp8());
    let gemms = names(&graph, |node| matches!(node.op, Op::ScaledGemm(_)));
    // Seven linear layers, three GEMMs each.
    assert_eq!(gemms.len(), 21);
    let left =
        |node: &Node| matches!(node.op, Op::Linear(_) | Op::LinearDgrad(_) | Op::LinearWgrad(_));
    assert_eq!(names(&graph, left), Vec::<&str>::new());
    // A parameter is read by its cast or quantization alone.
    for node in graph.nodes.iter().filter(|node| node.phase != Phase::Weights) {
        for &id in &node.inputs {
            let tensor = graph.tensor(id);
            let is_parameter = matches!(tensor.kind, TensorKind::Parameter { .. });
            assert!(!is_parameter, "`{}` reads `{}`", node.name, tensor.name);
        }
    }
}

#[test]
fn gemms_carry_the_blocks_of_the_policy() {
    for (preset, [fprop, dgrad, wgrad]) in [
        ("mxfp8", ["fprop", "dgrad", "wgrad"]),
        ("mxfp8-floor", ["fprop", "dgrad", "wgrad"]),
        ("mxfp8-2d", ["fprop blocks=1x32*32x32", "dgrad blocks=1x32*32x32", "wgrad"]),
        (
            "mxfp8-128",
            [
                "fprop blocks=1x128*128x128",
                "dgrad blocks=1x128*128x128",
                "wgrad blocks=1x128*1x128",
            ],
        ),
        (
            "nvfp4",
            [
                "fprop nvfp4 blocks=1x16*16x16",
                "dgrad nvfp4 blocks=1x16*16x16",
                "wgrad nvfp4 hadamard",
            ],
        ),
    ] {
        let policy = PrecisionPolicy::preset(preset).unwrap();
        let policy = policy.without_part(RecipePart::LastBlocks);
        let graph = fused(&micro(), Recompute::None, &policy);
        for node in &graph.nodes {
            let Op::ScaledGemm(op) = &node.op else { continue };
            let expected = match op.kind {
                GemmKind::Fprop => fprop,
                GemmKind::Dgrad => dgrad,
                GemmKind::Wgrad => wgrad,
            };
            assert_eq!(op.attributes(), expected, "{preset}: {}", node.name);
        }
    }
}

/// One tensor in three GEMMs of three kinds: MXFP8, with one operand dequantized, in BF16.
fn v_proj_mixed() -> PrecisionPolicy {
    let text = "keep_first_last_bf16 = false\n\
                [[rule]]\ntensors = '*'\nfprop = 'bf16'\ndgrad = 'bf16'\nwgrad = 'bf16'\n\
                [[rule]]\ntensors = '*.v_proj.weight'\n\
                fprop = 'mxfp8'\ndgrad.weight = 'mxfp8'";
    PrecisionPolicy::from_toml(text, "policy").unwrap()
}

#[test]
fn gemms_of_one_tensor_in_several_precisions() {
    let gradient = differentiated(&micro());
    let plain = recompute(&gradient, Recompute::None).unwrap();
    let (mixed, precision) = apply_precision(&plain, &v_proj_mixed()).unwrap();
    let v_proj = |node: &Node| {
        let names = node.inputs.iter().chain(&node.outputs).map(|&id| &mixed.tensor(id).name);
        node.name.contains("v_proj") || names.into_iter().any(|name| name.contains("v_proj"))
    };
    let part = Graph {
        nodes: mixed.nodes.iter().filter(|node| v_proj(node)).cloned().collect(),
        ..mixed.clone()
    };
    insta::assert_snapshot!("v_proj_mixed", part.to_string());
    let of_v = precision.iter().find(|tensor| tensor.tensor.contains("v_proj")).unwrap();
    assert_eq!(
        of_v.explanation(),
        "default of precision `mxfp8`, operands by rule `*`, operands by rule \
         `*.v_proj.weight`; dgrad emulated: weight in MXFP8, GEMM in BF16; wgrad in BF16"
    );
}

/// What nobody reads is not made, and what is made is read.
#[test]
fn nothing_is_quantized_that_nobody_reads() {
    use deepwell_precision::{GemmMode, OperandClass};
    let all = all_mxfp8();
    let policies = OperandClass::ALL
        .iter()
        .flat_map(|&class| [all.clone().only(&[class]), all.clone().without(&[class])]);
    let emulated = all.clone().with_gemm(GemmMode::Emulated);
    for policy in policies.chain([v_proj_mixed(), emulated]) {
        for rule in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let graph = fused(&micro(), rule, &policy);
            for node in &graph.nodes {
                let is_made = matches!(node.op, Op::Quantize(_) | Op::Dequantize(_) | Op::Cast(_));
                let outputs = node
                    .outputs
                    .iter()
                    .filter(|id| graph.tensor(**id).dtype != deepwell_ir::DType::U64 && is_made);
                for id in outputs {
                    let is_read = graph.nodes.iter().any(|reader| reader.inputs.contains(id));
                    let (name, policy) = (&graph.tensor(*id).name, policy.to_toml());
                    assert!(is_read, "nobody reads `{name}` under recompute {rule}\n{policy}");
                }
            }
        }
    }
}

#[test]
fn passes_refuse_graphs_of_the_wrong_stage() {
    let captured = capture(&micro()).unwrap();
    let gradient = differentiate(&captured).unwrap();
    let quantized = apply_precision(&gradient, &PrecisionPolicy::bf16()).unwrap().0;
    let check = |result: Result<Graph, IrError>, pass: &str, wanted: Stage, had: Stage| {
        let Err(IrError::Stage { pass: name, wants, got }) = result else {
            panic!("`{pass}` took a graph at stage {had:?}")
        };
        assert_eq!((name, wants, got), (pass, wanted, had));
    };
    check(differentiate(&gradient), "differentiate", Stage::Captured, Stage::Differentiated);
    check(
        recompute(&captured, Recompute::Full),
        "recompute",
        Stage::Differentiated,
        Stage::Captured,
    );
    check(
        apply_precision(&quantized, &PrecisionPolicy::bf16()).map(|made| made.0),
        "precision",
        Stage::Recomputed,
        Stage::Quantized,
    );
    check(fuse(&gradient, &|_, _, _| None), "fuse", Stage::Quantized, Stage::Differentiated);
}

#[test]
fn a_rule_that_puts_the_head_in_mxfp8_was_accepted_and_ignored() {
    let config = LlamaConfig::preset("llama-micro").expect("a preset");
    let graph = capture(&config).expect("it captures");
    let policy =
        PrecisionPolicy::mxfp8().with_rule("lm_head*", Format::MXFP8).expect("a valid glob");
    let error = apply_precision(&graph, &policy).expect_err("the head has no such kind");
    assert_eq!(
        error.to_string(),
        "tensor `lm_head.weight`: expected f32 or bf16 for a tensor of role Head, got mxfp8\n\
         hint: only linear and expert tensors have mxfp8 GEMMs; narrow the rule"
    );
}

/// The names of what is deferred, of one layer and of what stands around it.
#[test]
fn gradients_of_weights_alone_are_deferred() {
    let check = |graph: &Graph, expected: &[&str]| {
        let deferred = defer_weight_gradients(graph).unwrap();
        let is_deferred = |node: &Node| node.phase == Phase::WeightGradients;
        let mut found = names(&deferred, is_deferred);
        found.sort_unstable();
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        assert_eq!(found, expected);
        // All else is there, in the order that it had.
        let kept = names(&deferred, |node| !is_deferred(node));
        let of_graph = names(graph, |node| !found.contains(&node.name.as_str()));
        assert_eq!(kept, of_graph);
    };
    let of_layer = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        .map(|name| format!("layers.0.{}.{name}.wgrad", block_of(name)));
    let mut gemms: Vec<&str> = of_layer.iter().map(String::as_str).collect();
    // Both of its writers are deferred, or neither: the head's comes with the loss.
    let tied = LlamaConfig { tie_word_embeddings: true, ..micro() };
    check(&differentiated(&tied), &gemms);
    gemms.push("embed_tokens.backward");
    let plain = differentiated(&micro());
    check(&plain, &gemms);
    // What is computed again for such a gradient alone, and reads no weight.
    let again = [gemms.as_slice(), &["layers.0.mlp.swiglu.recomputed"]].concat();
    check(&recompute(&plain, Recompute::Full).unwrap(), &again);
    check(&fused(&micro(), Recompute::Selective, &all_mxfp8()), &gemms);
    let error = defer_weight_gradients(&capture(&micro()).unwrap()).unwrap_err().to_string();
    assert!(error.contains("defer_weight_gradients"), "{error}");
}

fn block_of(projection: &str) -> &'static str {
    if projection.len() == "q_proj".len() { "self_attn" } else { "mlp" }
}
