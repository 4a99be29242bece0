//! What the passes make of mixtures of experts before they are expanded: the router trains, and the
//! precision report claims only what is computed.

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{
    DType, Dim, Graph, GraphBuilder, Init, Op, PrecisionPolicy, Role, Shape, Tag, apply_precision,
    differentiate, ops,
};
use deepwell_precision::Format;

/// Mixtral with 2 layers of 8 experts of width 64.
fn mixtral() -> Graph {
    let text = r#"{
        "model_type": "mixtral", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 128
    }"#;
    capture(&LlamaConfig::from_json(text, "config.json").unwrap().0).unwrap()
}

/// Experts have no MXFP8 GEMM, so nobody says that they are in MXFP8, and their number need not be
/// whole blocks.
#[test]
fn experts_are_not_said_to_be_in_mxfp8() {
    let (graph, report) = apply_precision(&mixtral(), &PrecisionPolicy::mxfp8()).unwrap();
    let is_expert = |name: &str| name.contains("experts");
    let experts: Vec<_> = report.iter().filter(|tensor| is_expert(&tensor.tensor)).collect();
    assert_eq!(experts.len(), 2 * 3);
    // The last one would stay in BF16 anyway.
    for (index, tensor) in experts.into_iter().enumerate() {
        assert_eq!((tensor.format, tensor.gemms), (Format::Bf16, None), "{}", tensor.tensor);
        let words = match index {
            5 => "last linear tensor",
            _ => "`experts` has no GEMM of mxfp8 operands; asked for by: ",
        };
        assert!(tensor.reason.starts_with(words), "{}", tensor.reason);
    }
    // What is said to be in MXFP8 is.
    let claimed = report.iter().filter(|tensor| tensor.format.is_quantized()).count();
    let gemms = graph.nodes.iter().filter(|node| matches!(node.op, Op::ScaledGemm(_))).count();
    assert_eq!(claimed, gemms);
    assert!(claimed > 0);
}

/// A loss of the gates alone: the router's weights get their gradient through them.
#[test]
fn the_router_has_a_gradient() {
    let mut b = GraphBuilder::new("router");
    let tokens = b.input("tokens", Shape(vec![Dim::TOKENS]), DType::I32);
    let normal = Init::Normal { std: 0.02 };
    let table = b.parameter("table", Shape::new([96usize, 32]), normal, Role::Embedding);
    let x = b.op("embed", ops::Embedding::default(), &[tokens, table]).unwrap()[0];
    b.scope(Tag::Router, Some(0));
    let weight = b.parameter("router", Shape::new([8usize, 32]), normal, Role::Router);
    let logits = b.op("logits", ops::Linear { bias: false }, &[x, weight]).unwrap()[0];
    let route = ops::Route {
        experts: 8,
        top_k: 2,
        score: ops::RouteScore::Softmax,
        normalize: true,
        scaling: 1.0,
        groups: None,
        selection_bias: false,
    };
    let gates = b.op("route", route, &[logits]).unwrap()[0];
    let head = b.parameter("head", Shape::new([96usize, 2]), normal, Role::Head);
    let targets = b.input("targets", Shape(vec![Dim::TOKENS]), DType::I32);
    let scale = b.input("loss_scale", Shape::new([1usize]), DType::F32);
    b.op("loss", ops::LinearCrossEntropy {}, &[gates, head, targets, scale]).unwrap();
    let graph = differentiate(&b.finish().unwrap()).unwrap();
    let text = graph.to_string();
    let backward = "route.backward.dlogits: f32[B*S, 8] = route_backward(loss.backward.dx, logits, \
                    route.experts) experts=8 top_k=2 softmax normalize";
    assert!(text.contains(backward), "{text}");
    let wgrad = "+grad.router: f32[8, 32] = linear_wgrad(route.backward.dlogits, embed)";
    assert!(text.contains(wgrad), "{text}");
}
