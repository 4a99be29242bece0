//! Each structural rule of a graph, broken.

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{
    DType, Graph, Node, Op, Phase, PrecisionPolicy, Shape, TensorId, TensorKind, apply_precision,
    differentiate, verify,
};
use deepwell_precision::Granularity;

fn graph() -> Graph {
    let config = LlamaConfig { num_layers: 1, ..LlamaConfig::preset("llama-micro").unwrap() };
    differentiate(&capture(&config).unwrap()).unwrap()
}

fn tensor(graph: &Graph, name: &str) -> TensorId {
    graph.find(name).unwrap_or_else(|| panic!("no tensor `{name}`"))
}

fn node<'a>(graph: &'a mut Graph, name: &str) -> &'a mut Node {
    graph.nodes.iter_mut().find(|node| node.name == name).expect("a node of this name")
}

/// Breaks a sound graph and wants the verifier to say so in these words.
fn check(change: impl FnOnce(&mut Graph), expected: &str) {
    let mut graph = graph();
    verify(&graph).unwrap();
    change(&mut graph);
    let message = verify(&graph).expect_err(expected).to_string();
    assert!(message.contains(expected), "expected `{expected}` in: {message}");
}

fn set_dtype(graph: &mut Graph, name: &str, dtype: DType) {
    let id = tensor(graph, name);
    graph.tensors[id.index()].dtype = dtype;
}

fn set_kind(graph: &mut Graph, name: &str, kind: TensorKind) {
    let id = tensor(graph, name);
    graph.tensors[id.index()].kind = kind;
}

#[test]
fn names_are_unique() {
    check(|g| g.tensors[1].name = "tokens".to_string(), "two tensors are named `tokens`");
    check(|g| g.nodes[4].name = "embed_tokens".to_string(), "two nodes are named `embed_tokens`");
}

#[test]
fn ids_are_in_range() {
    let beyond = TensorId(9999);
    check(|g| node(g, "norm").inputs[0] = beyond, "node `norm` names tensor 9999");
    check(|g| node(g, "norm").outputs[1] = beyond, "node `norm` names tensor 9999");
    check(|g| g.loss = Some(beyond), "the loss is tensor 9999");
    let of_nothing = TensorKind::ParameterGradient { parameter: beyond };
    check(
        |g| set_kind(g, "grad.lm_head.weight", of_nothing),
        "`grad.lm_head.weight` is a gradient of nothing",
    );
}

#[test]
fn tensors_are_written_before_they_are_read_and_once() {
    check(|g| g.nodes.swap(0, 1), "node `layers.0.input_layernorm` reads `embed_tokens` before");
    check(
        |g| {
            g.nodes.remove(0);
        },
        "reads `embed_tokens` before it is written",
    );
    check(
        |g| {
            let again = Node { name: "again".to_string(), ..g.nodes[0].clone() };
            g.nodes.insert(1, again);
        },
        "tensor `embed_tokens` is written twice",
    );
    check(
        |g| {
            let table = tensor(g, "model.layers.0.self_attn.q_proj.weight");
            let again = Node {
                name: "again".to_string(),
                op: deepwell_ir::ops::Add {}.into(),
                inputs: vec![table, table],
                outputs: vec![table],
                ..g.nodes[0].clone()
            };
            g.nodes.insert(1, again);
        },
        "node `again` writes `model.layers.0.self_attn.q_proj.weight`, which is given",
    );
}

#[test]
fn operands_have_the_types_that_ops_say() {
    check(
        |g| set_dtype(g, "embed_tokens", DType::Bf16),
        "node `embed_tokens` gives [B*S, 64] f32, but `embed_tokens` is [B*S, 64] bf16",
    );
    check(
        |g| set_dtype(g, "tokens", DType::F32),
        "node `embed_tokens`: `embedding`: expected operand 0 as i32, got f32",
    );
    check(
        |g| set_dtype(g, "model.layers.0.mlp.up_proj.weight", DType::Bf16),
        "node `layers.0.mlp.up_proj`: `linear`: expected operand 1 as f32, got bf16",
    );
    check(
        |g| {
            let id = tensor(g, "norm");
            g.tensors[id.index()].shape = Shape::new([3usize, 64]);
        },
        "node `norm` gives [B*S, 64] f32, but `norm` is [3, 64] f32",
    );
    check(
        |g| {
            node(g, "norm").inputs.pop();
        },
        "node `norm`: `rms_norm`: expected 2 operands (x, w), got 1",
    );
    check(
        |g| {
            node(g, "norm").outputs.pop();
        },
        "node `norm` has 1 outputs, its op gives 2",
    );
}

#[test]
fn gemms_say_how_their_operands_were_quantized() {
    let policy = PrecisionPolicy::preset("mxfp8-128").unwrap();
    let (mut graph, _) = apply_precision(&graph(), &policy).unwrap();
    verify(&graph).unwrap();
    let name = "layers.0.mlp.up_proj.dgrad";
    let Op::ScaledGemm(gemm) = &mut node(&mut graph, name).op else { panic!("no scaled_gemm") };
    gemm.b = gemm.b.with_granularity(Granularity::G32);
    let message = verify(&graph).unwrap_err().to_string();
    let expected = format!("node `{name}` reads `model.layers.0.mlp.up_proj.weight.mx.col` as ");
    assert!(message.contains(&expected), "{message}");
}

#[test]
fn accumulators_are_used_as_such() {
    check(|g| set_kind(g, "embed_tokens", TensorKind::Loss), "`embed_tokens` must not be");
    check(
        |g| {
            g.loss = None;
            set_kind(g, "lm_head.loss", TensorKind::Activation);
        },
        "`lm_head.loss` must be an accumulator",
    );
    check(
        |g| set_kind(g, "grad.lm_head.weight", TensorKind::Activation),
        "`grad.lm_head.weight` must be an accumulator",
    );
    check(|g| g.loss = g.find("norm"), "the loss is `norm`, which is no loss");
}

#[test]
fn phases_stand_in_order_and_only_forward_nodes_are_recomputed() {
    check(
        |g| g.nodes.last_mut().unwrap().phase = Phase::Forward,
        "node `embed_tokens.backward` of phase forward stands after phase backward",
    );
    check(
        |g| g.nodes.last_mut().unwrap().recompute = true,
        "node `embed_tokens.backward` is recomputed, not forward",
    );
    check(
        |g| {
            g.nodes[0].phase = Phase::Weights;
            g.nodes[0].recompute = true;
        },
        "node `embed_tokens` is recomputed, not forward",
    );
}

#[test]
fn every_parameter_has_one_gradient_of_its_shape() {
    check(
        |g| {
            g.nodes.pop();
        },
        "parameter `model.embed_tokens.weight` has no gradient",
    );
    check(
        |g| {
            let id = tensor(g, "grad.model.norm.weight");
            g.tensors[id.index()].shape = Shape::new([65usize]);
        },
        "gradient `grad.model.norm.weight` is [65], its parameter [64]",
    );
    check(
        |g| {
            let parameter = tensor(g, "norm");
            set_kind(g, "grad.model.norm.weight", TensorKind::ParameterGradient { parameter });
            let shape = g.tensor(parameter).shape.clone();
            let id = tensor(g, "grad.model.norm.weight");
            g.tensors[id.index()].shape = shape;
        },
        "`grad.model.norm.weight` is a gradient of `norm`, which is no parameter",
    );
}
