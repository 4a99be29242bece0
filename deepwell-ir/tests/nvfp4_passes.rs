//! Passes over graphs in NVFP4: quantizations of one tensor become one op, and GEMMs are measured.

use std::collections::BTreeMap;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{
    Graph, Node, Op, PrecisionPolicy, Recompute, TensorType, apply_precision, differentiate, fuse,
    measure_products, recompute,
};
use deepwell_precision::RecipePart;

/// A graph in NVFP4 without exceptions.
fn quantized() -> Graph {
    let graph = capture(&LlamaConfig::preset("llama-micro").unwrap()).unwrap();
    let graph = recompute(&differentiate(&graph).unwrap(), Recompute::None).unwrap();
    let policy = PrecisionPolicy::nvfp4().without_part(RecipePart::LastBlocks);
    apply_precision(&graph, &policy).unwrap().0
}

fn counts(graph: &Graph) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for node in &graph.nodes {
        let name = node.op.name().into_owned();
        if name.contains("quantize") || name == "stochastic_round" || name.contains("product") {
            *counts.entry(name).or_default() += 1;
        }
    }
    counts
}

/// A kernel for both operands that is faster takes all quantizations of activations and gradients;
/// one that is slower takes none, and neither does none.
#[test]
fn quantizations_of_a_tensor_become_one_op_where_that_is_faster() {
    let graph = quantized();
    let apart = counts(&graph);
    for (time_s, is_merged) in [(Some(1.0), true), (Some(9.0), false), (None, false)] {
        let predict = |op: &Op, _: &[TensorType], _: &[TensorType]| match op {
            Op::QuantizeOperands(_) => time_s,
            Op::Fused(_) => None,
            _ => Some(1.0),
        };
        let fused = fuse(&graph, &predict).unwrap();
        let got = counts(&fused);
        if !is_merged {
            assert_eq!(got, apart, "{time_s:?}");
            continue;
        }
        // Two quantizations of an activation or a gradient, and two roundings of a gradient.
        let merged = got["quantize_operands"];
        assert_eq!(got.get("stochastic_round"), None);
        assert_eq!(apart["quantize"], got["quantize"] + 2 * merged);
        for node in &fused.nodes {
            let Op::QuantizeOperands(op) = &node.op else { continue };
            assert_eq!(op.row.format.is_stochastic(), op.streams[0].is_some());
            assert!(op.row.format.hadamard.is_none() && op.column.format.hadamard.is_some());
        }
        // A tensor keeps the elements that its GEMMs read.
        let written: Vec<_> = fused.nodes.iter().flat_map(|node| &node.outputs).collect();
        for node in fused.nodes.iter().filter(|node| matches!(node.op, Op::ScaledGemm(_))) {
            assert!(node.inputs.iter().all(|id| written.contains(&id)), "{}", node.name);
        }
    }
}

/// Each GEMM has its measurement before it, and neighbours that other passes fuse stay neighbours.
#[test]
fn every_gemm_of_two_quantized_matrices_is_measured() {
    let graph = quantized();
    let measured = measure_products(&graph).unwrap();
    let is_gemm = |node: &&Node| matches!(node.op, Op::ScaledGemm(_));
    let gemms: Vec<&str> = graph.nodes.iter().filter(is_gemm).map(|node| &*node.name).collect();
    let errors = measured.nodes.iter().filter(|node| matches!(node.op, Op::ProductError(_)));
    let errors: Vec<&str> =
        errors.map(|node| node.name.strip_suffix(".product_error").unwrap()).collect();
    assert_eq!(errors, gemms);
    let is_added = |node: &Node| matches!(node.op, Op::ProductError(_) | Op::SampleOperand(_));
    let rest: Vec<&Node> = measured.nodes.iter().filter(|node| !is_added(node)).collect();
    assert_eq!(rest, graph.nodes.iter().collect::<Vec<_>>());
    for pair in measured.nodes.windows(2) {
        let follows = |name: &str| graph.nodes.iter().position(|node| node.name == name);
        let [Some(before), Some(after)] = [&pair[0], &pair[1]].map(|node| follows(&node.name))
        else {
            continue;
        };
        assert_eq!(after, before + 1);
    }
    let runs = |graph: &Graph| {
        let pairs = graph.nodes.windows(2);
        pairs.filter(|pair| is_gemm(&&pair[0]) && is_gemm(&&pair[1])).count()
    };
    assert_eq!(runs(&measured), runs(&graph));
    let error = measure_products(&capture(&LlamaConfig::preset("llama-micro").unwrap()).unwrap());
    assert!(error.unwrap_err().to_string().contains("product_errors"));
}
