//! The captured graph, and the configurations that transformers wrote for the outside oracle.

use std::path::PathBuf;

use deepwell_ir::capture::{LlamaConfig, Rope, RopeScaling, capture, capture_for_sequence};
use deepwell_ir::{Binding, Op, Tag, TensorKind, differentiate};
use safetensors::SafeTensors;

/// Rounding of PyTorch's own f32 arithmetic: a power, a quotient and an interpolation, a few
/// units in the last place (6e-8 each).
const FREQUENCY_TOLERANCE: f32 = 1e-6;

fn oracle_file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deepwell-trainer/tests/oracle").join(name)
}

fn f32_values(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let data = file.tensor(name).unwrap().data();
    data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn oracle_configs_have_the_weights_and_frequencies_of_transformers() {
    for case in 0..10 {
        let path = oracle_file(&format!("case_{case:02}.config.json"));
        let (config, notes) = LlamaConfig::from_path(&path).unwrap();
        assert_eq!(notes.remarks, Vec::<String>::new(), "case {case}");
        let bytes = std::fs::read(oracle_file(&format!("case_{case:02}.safetensors"))).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();

        let mut stored: Vec<(String, Vec<usize>)> = file
            .iter()
            .filter_map(|(name, view)| {
                Some((name.strip_prefix("weight.")?.to_string(), view.shape().to_vec()))
            })
            .collect();
        stored.sort();
        let mut listed: Vec<(String, Vec<usize>)> =
            config.parameters().into_iter().map(|spec| (spec.name, spec.shape)).collect();
        listed.sort();
        assert_eq!(listed, stored, "case {case}");

        let seq_len = file.tensor("input_ids").unwrap().shape()[1];
        let expected = f32_values(&file, "rope.inverse_frequencies");
        let frequencies = config.inverse_frequencies(seq_len);
        assert_eq!(frequencies.len(), expected.len(), "case {case}");
        for (pair, (got, want)) in frequencies.iter().zip(&expected).enumerate() {
            let relative = (got - want).abs() / want;
            assert!(relative <= FREQUENCY_TOLERANCE, "case {case} pair {pair}: {got} for {want}");
        }
        let factor = f32_values(&file, "rope.attention_factor")[0];
        assert!((config.attention_factor() - factor).abs() <= FREQUENCY_TOLERANCE, "case {case}");

        let graph = capture_for_sequence(&config, seq_len).unwrap();
        assert_eq!(graph.parameter_count(), config.parameter_count());
        differentiate(&graph).unwrap();
    }
}

#[test]
fn graph_parameters_are_those_of_the_config() {
    let mut configs: Vec<LlamaConfig> =
        ["llama-micro", "parity-3m", "llama-134m", "tinyllama-1.1b", "llama-7b", "llama-3-8b"]
            .into_iter()
            .map(|name| LlamaConfig::preset(name).unwrap())
            .collect();
    configs.push(LlamaConfig {
        attention_bias: true,
        mlp_bias: true,
        tie_word_embeddings: true,
        head_dim: 24,
        ..configs[0].clone()
    });
    for config in configs {
        let graph = capture(&config).unwrap();
        let specs = config.parameters();
        assert_eq!(graph.parameters().count(), specs.len());
        for ((_, tensor), spec) in graph.parameters().zip(specs) {
            assert_eq!(tensor.name, spec.name);
            assert_eq!(tensor.shape.as_fixed(), Some(spec.shape));
            let (init, role) = (spec.init, spec.role.precision_role());
            assert_eq!(tensor.kind, TensorKind::Parameter { init, role });
        }
        assert_eq!(graph.parameter_count(), config.parameter_count());
    }
}

#[test]
fn micro_model_as_text() {
    let config = LlamaConfig { num_layers: 1, ..LlamaConfig::preset("llama-micro").unwrap() };
    insta::assert_snapshot!(capture(&config).unwrap().to_string());
}

#[test]
fn tied_model_with_biases_as_text() {
    let config = LlamaConfig {
        num_layers: 1,
        attention_bias: true,
        mlp_bias: true,
        tie_word_embeddings: true,
        ..LlamaConfig::preset("llama-micro").unwrap()
    };
    insta::assert_snapshot!(capture(&config).unwrap().to_string());
}

#[test]
fn nodes_carry_tag_layer_and_scales() {
    let config = LlamaConfig::preset("parity-3m").unwrap();
    let graph = capture(&config).unwrap();
    // Per layer: two norms; three projections, two rotations, attention, output, residual; gate,
    // up, SwiGLU, down, residual. Around them: embedding, final norm, head.
    for (tag, count) in
        [(Tag::Embed, 1), (Tag::Norm, 9), (Tag::Attn, 32), (Tag::Mlp, 20), (Tag::Head, 1)]
    {
        assert_eq!(graph.nodes.iter().filter(|node| node.tag == tag).count(), count, "{tag}");
    }
    for layer in 0..4 {
        assert_eq!(graph.nodes.iter().filter(|node| node.layer == Some(layer)).count(), 15);
    }
    let attention = graph.nodes.iter().find(|node| node.op.name() == "attention").unwrap();
    let Op::Attention(op) = &attention.op else { panic!("not an attention") };
    assert_eq!(op.heads.scale, 0.125);
    assert_eq!((op.heads.heads, op.heads.kv_heads, op.heads.head_dim), (4, 2, 64));
    let binding = Binding { batch: 8, seq: 128 };
    let lse = graph.tensor(attention.outputs[1]);
    assert_eq!(lse.shape.bind(&binding), [8, 4, 128]);
}

#[test]
fn dynamic_rope_needs_the_length_of_the_sequence() {
    let config = LlamaConfig {
        rope: Rope { theta: 10000.0, scaling: RopeScaling::Dynamic { factor: 2.0 } },
        max_position_embeddings: 16,
        ..LlamaConfig::preset("llama-micro").unwrap()
    };
    assert_eq!(
        capture(&config).unwrap_err().to_string(),
        "rope_type `dynamic` turns at frequencies that depend on the sequence length\n\
         hint: say for how many tokens: `--seq TOKENS` on the command line"
    );
    let short = config.inverse_frequencies(16);
    assert_eq!(short, LlamaConfig::preset("llama-micro").unwrap().inverse_frequencies(16));
    assert_ne!(config.inverse_frequencies(17), short);
    let graph = capture_for_sequence(&config, 33).unwrap();
    let rope = graph.nodes.iter().find_map(|node| match &node.op {
        Op::Rope(rope) => Some(rope),
        _ => None,
    });
    assert_eq!(rope.unwrap().inverse_frequencies, config.inverse_frequencies(33));
}
