//! What a quantized graph keeps between its passes, by storage of activations.

use deepwell_ir::capture::{Gpt2Config, LlamaConfig, capture, capture_gpt2};
use deepwell_ir::ops::Axis;
use deepwell_ir::{
    Derivation, Graph, IrError, Node, Op, Phase, PrecisionPolicy, Recompute, SavedActivations,
    TensorId, apply_precision, differentiate, fuse, recompute, save_activations,
};
use deepwell_precision::Format;

fn quantized(graph: &Graph, rule: Recompute, preset: &str) -> Graph {
    let graph = recompute(&differentiate(graph).unwrap(), rule).unwrap();
    let policy = PrecisionPolicy::preset(preset).unwrap();
    let policy = match preset {
        "bf16" => policy,
        _ => policy.with_rule("*_proj.weight", Format::MXFP8).unwrap(),
    };
    apply_precision(&graph, &policy).unwrap().0
}

fn llama() -> Graph {
    let config = LlamaConfig { num_layers: 1, ..LlamaConfig::preset("llama-micro").unwrap() };
    capture(&config).unwrap()
}

fn saved(rule: Recompute, preset: &str, saved: SavedActivations) -> Graph {
    save_activations(&quantized(&llama(), rule, preset), saved).unwrap()
}

/// Data and activations of a layer that are written in the forward pass and read in the backward
/// pass.
fn kept(graph: &Graph) -> Vec<&str> {
    let of = |phase: Phase, ids: fn(&Node) -> &Vec<TensorId>| -> Vec<TensorId> {
        let nodes = graph.nodes.iter().filter(|node| node.phase == phase);
        nodes.flat_map(ids).copied().collect()
    };
    let written = of(Phase::Forward, |node| &node.outputs);
    let read = of(Phase::Backward, |node| &node.inputs);
    let both = written.iter().filter(|id| read.contains(id)).map(|&id| graph.tensor(id));
    let names = both.map(|tensor| tensor.name.as_str());
    let is_matrix = |name: &&str| ![".scale", ".rstd", ".lse"].iter().any(|it| name.ends_with(it));
    let of_layer = names.filter(|name| name.starts_with("layers.0.") && is_matrix(name));
    of_layer.map(|name| &name["layers.0.".len()..]).collect()
}

#[test]
fn tensors_that_are_kept() {
    use SavedActivations::{Exact, Mxfp8, Once};
    let attention = ["self_attn.v_proj", "self_attn.q_rope", "self_attn.k_rope"];
    let check = |rule, preset, storage, rest: &[&str]| {
        let mut expected = [&attention[..], rest].concat();
        expected.extend(["self_attn.attention", "self_attn.residual", "mlp.residual"]);
        let graph = saved(rule, preset, storage);
        let mut found = kept(&graph);
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected, "{rule} {preset} {storage}");
    };
    let [x, y, o] =
        ["input_layernorm.mx.col", "post_attention_layernorm.mx.col", "self_attn.attention.mx.col"];
    let [gate, up, out] = ["mlp.gate_proj", "mlp.up_proj", "mlp.swiglu.mx.col"];
    let stored = ["mlp.gate_proj.saved.row", "mlp.up_proj.saved.row"];
    let none = Recompute::None;
    check(none, "mxfp8", Exact, &[x, y, o, gate, up, out]);
    check(none, "mxfp8", Once, &[x, y, gate, up, out]);
    check(none, "mxfp8", Mxfp8, &[x, y, out, stored[0], stored[1]]);
    check(Recompute::Norms, "mxfp8", Mxfp8, &[out, stored[0], stored[1]]);
    check(Recompute::Selective, "mxfp8", Mxfp8, &stored);
    let of_bf16 = ["input_layernorm", "post_attention_layernorm", "mlp.swiglu"];
    check(none, "bf16", Once, &[&of_bf16[..], &[gate, up]].concat());
    check(none, "bf16", Mxfp8, &[&of_bf16[..], &stored].concat());
}

/// Each restored tensor comes from the planes of the tensor that it takes the place of.
#[test]
fn readers_have_the_tensor_that_they_had() {
    let before = quantized(&llama(), Recompute::Selective, "mxfp8");
    let after = save_activations(&before, SavedActivations::Mxfp8).unwrap();
    let mut restored = 0;
    for node in &before.nodes {
        let now = after.nodes.iter().find(|now| now.name == node.name).unwrap();
        for (&was, &is) in node.inputs.iter().zip(&now.inputs) {
            if was == is {
                continue;
            }
            assert_eq!(node.phase, Phase::Backward, "{}", node.name);
            let tensor = after.tensor(is);
            let link = tensor.link.unwrap();
            assert_eq!((link.of, &tensor.shape), (was, &before.tensor(was).shape));
            assert_eq!(link.derivation, Derivation::Dequantized { axis: Axis::Row });
            let writer = after.nodes.iter().find(|node| node.outputs.contains(&is)).unwrap();
            let of = after.tensor(writer.inputs[0]).link.unwrap().of;
            assert_eq!(of, was, "{}", tensor.name);
            restored += 1;
        }
    }
    // Gate and up, of the derivative and of the repeated function.
    assert_eq!(restored, 4);
}

#[test]
fn one_dequantization_serves_all_readers() {
    let count =
        |graph: &Graph, op: fn(&Op) -> bool| graph.nodes.iter().filter(|node| op(&node.op)).count();
    for (rule, restored) in [(Recompute::None, 2), (Recompute::Selective, 2), (Recompute::Full, 0)]
    {
        let graph = saved(rule, "mxfp8", SavedActivations::Mxfp8);
        assert_eq!(count(&graph, |op| matches!(op, Op::Dequantize(_))), restored, "{rule}");
    }
    let config = Gpt2Config { num_layers: 1, ..Gpt2Config::preset("gpt2-micro").unwrap() };
    let graph = quantized(&capture_gpt2(&config).unwrap(), Recompute::None, "bf16");
    let graph = save_activations(&graph, SavedActivations::Mxfp8).unwrap();
    assert_eq!(count(&graph, |op| matches!(op, Op::Dequantize(_))), 1, "input of GELU");
}

/// Kernels that read stored inputs take the place of the dequantizations, if all readers have one.
#[test]
fn activation_functions_read_what_is_stored() {
    let names = |rule, without: &str| -> Vec<String> {
        let graph = saved(rule, "mxfp8", SavedActivations::Mxfp8);
        let has_kernel = |op: &Op| op.name() != without && op.epilogue().is_empty();
        let graph = fuse(&graph, &|op, _, _| has_kernel(op).then_some(1e-6)).unwrap();
        let ops = graph.nodes.iter().map(|node| node.op.name().to_string());
        ops.filter(|name| name.contains("swiglu") || name == "dequantize").collect()
    };
    let [first, again, backward] = ["swiglu", "stored_swiglu", "stored_swiglu_backward"];
    let apart = ["swiglu", "dequantize", "dequantize", "swiglu", "swiglu_backward"];
    assert_eq!(names(Recompute::None, ""), [first, backward]);
    assert_eq!(names(Recompute::Selective, ""), [first, again, backward]);
    for without in [again, backward] {
        assert_eq!(names(Recompute::Selective, without), apart, "without {without}");
    }
}

#[test]
fn storage_as_text() {
    for saved in SavedActivations::ALL {
        assert_eq!(saved.to_string().parse(), Ok(saved));
        let json = serde_json::to_string(&saved).unwrap();
        assert_eq!(json, format!("\"{saved}\""));
    }
    let error = "fp8".parse::<SavedActivations>().unwrap_err();
    assert_eq!(error, "expected `exact`, `once` or `mxfp8`, got `fp8`");
    let graph = llama();
    let error = save_activations(&graph, SavedActivations::Once).unwrap_err();
    assert!(matches!(error, IrError::Stage { pass: "saved_activations", .. }), "{error}");
}
