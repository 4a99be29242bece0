//! Models without some of their layers.

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{Graph, differentiate, keep_layers, layer_kinds};

/// Ops with the shapes that they read and make, and the layers that they stand in.
fn ops(graph: &Graph) -> Vec<String> {
    let node = |node: &deepwell_ir::Node| {
        let operands = node.inputs.iter().chain(&node.outputs);
        let shapes: Vec<String> = operands.map(|&id| graph.tensor(id).shape.to_string()).collect();
        format!("{} {:?} {}", node.op.name(), node.layer, shapes.join(" "))
    };
    graph.nodes.iter().map(node).collect()
}

/// Layers that are kept make the model that has as many.
#[test]
fn kept_layers_are_a_shorter_model() {
    let check = |preset: &str, kept: &[usize]| {
        let config = LlamaConfig::preset(preset).unwrap();
        let short = LlamaConfig { num_layers: kept.len(), ..config.clone() };
        let (found, expected) =
            (keep_layers(&capture(&config).unwrap(), kept).unwrap(), capture(&short).unwrap());
        assert_eq!(ops(&found), ops(&expected), "{preset} {kept:?}");
        assert_eq!(found.parameters().count(), expected.parameters().count());
    };
    for kept in [&[0][..], &[3], &[0, 3], &[1, 2], &[0, 1, 2, 3]] {
        check("parity-3m", kept);
    }
    check("moe-1b-a300m", &[0, 2, 3, 9]);
    let graph = capture(&LlamaConfig::preset("parity-3m").unwrap()).unwrap();
    differentiate(&keep_layers(&graph, &[0, 3]).unwrap()).unwrap();
}

#[test]
fn layers_that_cannot_be_kept() {
    let graph = capture(&LlamaConfig::preset("parity-3m").unwrap()).unwrap();
    for kept in [&[][..], &[4], &[1, 0], &[2, 2]] {
        let error = keep_layers(&graph, kept).unwrap_err().to_string();
        assert!(error.contains("expected some of the 4 layers in rising order"), "{error}");
    }
}

#[test]
fn layers_of_a_kind_have_the_same_ops_and_parameters() {
    let kinds = |preset: &str| {
        let kinds = layer_kinds(&capture(&LlamaConfig::preset(preset).unwrap()).unwrap());
        let first = kinds.iter().take_while(|kind| **kind == 0).count();
        (kinds.len(), first, kinds.iter().max().copied())
    };
    assert_eq!(kinds("parity-3m"), (4, 4, Some(0)));
    // Three dense layers, then experts.
    assert_eq!(kinds("deepseek-v3"), (61, 3, Some(1)));
}
