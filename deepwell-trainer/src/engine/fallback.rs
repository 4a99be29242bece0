//! Which tensors a layer's fall back to BF16 is about.

use std::collections::HashMap;

use deepwell_ir::{Graph, TensorId};

/// The parameters of `layers` that a policy can quantize: matrices, and stacks of matrices as
/// experts have them. A parameter is of the layer of the first node that reads it.
pub(super) fn tensors_of_layers<'a>(graph: &'a Graph, layers: &[usize]) -> Vec<&'a str> {
    let mut layer_of: HashMap<TensorId, Option<u32>> = HashMap::new();
    for node in &graph.nodes {
        for &input in &node.inputs {
            layer_of.entry(input).or_insert(node.layer);
        }
    }
    let is_of_layers = |id: TensorId| {
        let layer = layer_of.get(&id).copied().flatten();
        layer.is_some_and(|layer| layers.contains(&(layer as usize)))
    };
    graph
        .parameters()
        .filter(|(id, tensor)| tensor.shape.rank() >= 2 && is_of_layers(*id))
        .map(|(_, tensor)| tensor.name.as_str())
        .collect()
}

#[cfg(test)]
mod tests {
    use deepwell_ir::capture::{LlamaConfig, capture};

    use super::*;

    #[test]
    fn experts_fall_back_with_their_layer() {
        let text = r#"{
            "model_type": "mixtral", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
            "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 128
        }"#;
        let graph = capture(&LlamaConfig::from_json(text, "config.json").unwrap().0).unwrap();
        let of = |layers: &[usize]| tensors_of_layers(&graph, layers);
        // Four projections, the router and three stacks of experts; no norm.
        let second = of(&[1]);
        assert_eq!(second.len(), 8, "{second:?}");
        assert!(second.iter().all(|name| name.starts_with("model.layers.1.")), "{second:?}");
        assert_eq!(second.iter().filter(|name| name.contains("experts")).count(), 3);
        assert_eq!(of(&[0, 2]).len(), 16);
        assert_eq!(of(&[]), [""; 0]);
    }
}
