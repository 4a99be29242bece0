//! A block in the manner of GPT-2 (layer normalization with biases, GELU) through all passes,
//! and the fusion of ops with what follows them.

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{
    Graph, GraphBuilder, Init, IrError, Op, PrecisionPolicy, Recompute, Role, Shape, Tag, TensorId,
    TensorType, apply_precision, differentiate, fuse, ops, recompute,
};
use deepwell_precision::Format;

const WIDTH: usize = 64;

/// A linear layer with a bias.
fn linear(
    b: &mut GraphBuilder,
    name: &str,
    x: TensorId,
    [outputs, inputs]: [usize; 2],
) -> Result<TensorId, IrError> {
    let init = Init::Normal { std: 0.02 };
    let w = b.parameter(
        &format!("{name}_proj.weight"),
        Shape::new([outputs, inputs]),
        init,
        Role::Linear,
    );
    let bias =
        b.parameter(&format!("{name}_proj.bias"), Shape::new([outputs]), Init::Zeros, Role::Linear);
    Ok(b.op(name, ops::Linear { bias: true }, &[x, w, bias])?[0])
}

fn norm(b: &mut GraphBuilder, name: &str, x: TensorId) -> Result<TensorId, IrError> {
    let w = b.parameter(&format!("{name}.weight"), Shape::new([WIDTH]), Init::Ones, Role::Norm);
    let bias = b.parameter(&format!("{name}.bias"), Shape::new([WIDTH]), Init::Zeros, Role::Norm);
    Ok(b.op(name, ops::LayerNorm { eps: 1e-5 }, &[x, w, bias])?[0])
}

/// Embedding, `layers` feed-forward blocks with residual adds, final norm, head.
fn gpt(layers: u32) -> Result<Graph, IrError> {
    let mut b = GraphBuilder::new("gpt");
    let tokens = b.tokens();
    let targets = b.targets();
    let scale = b.loss_scale();
    let init = Init::Normal { std: 0.02 };
    let table = b.parameter("table", Shape::new([96, WIDTH]), init, Role::Embedding);
    let head = b.parameter("head", Shape::new([96, WIDTH]), init, Role::Head);
    let mut x = b.op("embed", ops::Embedding::default(), &[tokens, table])?[0];
    for layer in 0..layers {
        b.scope(Tag::Mlp, Some(layer));
        let name = |part: &str| format!("layers.{layer}.{part}");
        let h = norm(&mut b, &name("ln"), x)?;
        let h = linear(&mut b, &name("up"), h, [4 * WIDTH, WIDTH])?;
        let h = b.op(&name("gelu"), ops::Gelu { tanh: layer == 0 }, &[h])?[0];
        let h = linear(&mut b, &name("down"), h, [WIDTH, 4 * WIDTH])?;
        x = b.op(&name("residual"), ops::Add {}, &[x, h])?[0];
    }
    b.scope(Tag::Norm, None);
    let x = norm(&mut b, "ln_f", x)?;
    b.scope(Tag::Head, None);
    let loss = ops::LinearCrossEntropy {};
    b.op("loss", loss, &[x, head, targets, scale])?;
    b.finish()
}

fn all_mxfp8() -> PrecisionPolicy {
    PrecisionPolicy::mxfp8().with_rule("*_proj.weight", Format::MXFP8).unwrap()
}

fn quantized(graph: &Graph, rule: Recompute) -> Graph {
    let graph = recompute(&differentiate(graph).unwrap(), rule).unwrap();
    apply_precision(&graph, &all_mxfp8()).unwrap().0
}

fn takes_sum(op: &Op) -> bool {
    op.name() == "scaled_gemm_residual"
}

/// A prediction by which fused ops that `fuses` wants take no time, and all others the same.
fn wanting<'a>(
    fuses: impl Fn(&Op, &[TensorType]) -> bool + 'a,
) -> impl Fn(&Op, &[TensorType], &[TensorType]) -> Option<f64> + 'a {
    move |op, inputs, _| match op {
        Op::Fused(_) => fuses(op, inputs).then_some(0.0),
        _ => Some(1.0),
    }
}

#[test]
fn gpt_block_as_text() {
    let graph = gpt(2).unwrap();
    insta::assert_snapshot!("gpt_differentiated", differentiate(&graph).unwrap().to_string());
    let quantized = quantized(&graph, Recompute::Selective);
    insta::assert_snapshot!(
        "gpt_fused",
        fuse(&quantized, &wanting(|_, _| true)).unwrap().to_string()
    );
}

fn llama() -> Graph {
    capture(&LlamaConfig { num_layers: 2, ..LlamaConfig::preset("llama-micro").unwrap() }).unwrap()
}

#[test]
fn fused_graphs_compute_the_same_tensors() {
    for graph in [gpt(2).unwrap(), llama()] {
        for rule in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let quantized = quantized(&graph, rule);
            let apart = fuse(&quantized, &wanting(|_, _| false)).unwrap();
            // A sum that a GEMM took is not the norm's.
            let fused = fuse(&quantized, &wanting(|op, _| !takes_sum(op))).unwrap();
            assert_eq!(Graph::from_json(&fused.to_json()).unwrap(), fused);
            // A quantization without anything before it stays: weights.
            for node in &fused.nodes {
                let before = apart.nodes.iter().find(|other| other.name == node.name).unwrap();
                assert_eq!(*node.op.leading(), before.op);
                assert!(node.inputs.starts_with(&before.inputs), "`{}`", node.name);
                let Op::Fused(op) = &node.op else { continue };
                let stored = (0..op.result_count()).filter(|&result| op.is_stored(result));
                assert_eq!(stored.count(), node.outputs.len());
            }
            // What is not written any more was read only by what is merged with its producer.
            let written = |graph: &Graph| -> Vec<TensorId> {
                graph.nodes.iter().flat_map(|node| node.outputs.iter().copied()).collect()
            };
            let (all, left) = (written(&apart), written(&fused));
            let gone: Vec<TensorId> = all.iter().filter(|id| !left.contains(id)).copied().collect();
            assert!(!gone.is_empty(), "{rule}");
            assert_eq!(all.len(), left.len() + gone.len(), "{rule}");
            let readers =
                apart.nodes.iter().filter(|node| node.inputs.iter().any(|id| gone.contains(id)));
            for node in readers {
                let merged = matches!(
                    node.op,
                    Op::Quantize(_)
                        | Op::Gelu(_)
                        | Op::GeluBackward(_)
                        | Op::SwiGlu(_)
                        | Op::Add(_)
                );
                assert!(merged, "`{}`", node.name);
                assert!(!fused.nodes.iter().any(|other| other.name == node.name));
            }
            for node in &fused.nodes {
                assert!(node.inputs.iter().all(|id| !gone.contains(id)), "`{}`", node.name);
            }
        }
    }
}

#[test]
fn only_what_the_catalog_has_is_fused() {
    let quantized = quantized(&llama(), Recompute::None);
    let names = |fuses: &dyn Fn(&Op, &[TensorType]) -> bool| -> Vec<String> {
        let graph = fuse(&quantized, &wanting(fuses)).unwrap();
        let mut names: Vec<_> = graph
            .nodes
            .iter()
            .filter(|node| matches!(node.op, Op::Fused(_)))
            .map(|node| node.op.name().to_string())
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    };
    assert_eq!(names(&|_, _| false), Vec::<String>::new());
    assert_eq!(names(&|op, _| op.name() == "swiglu_quantize"), ["swiglu_quantize"]);
    assert_eq!(
        names(&|_, _| true),
        [
            "attention_backward_quantize",
            "attention_quantize",
            "rms_norm_backward_quantize",
            "rms_norm_quantize",
            "rope_backward_quantize",
            // Its result is the second term of a sum.
            "scaled_gemm_residual",
            "swiglu_backward_quantize",
            "swiglu_quantize",
        ]
    );
}

#[test]
fn a_high_precision_output_stays_where_it_is_read() {
    let policy =
        all_mxfp8().with_rule("model.layers.1.self_attn.q_proj.weight", Format::Bf16).unwrap();
    let graph = recompute(&differentiate(&llama()).unwrap(), Recompute::None).unwrap();
    let graph =
        fuse(&apply_precision(&graph, &policy).unwrap().0, &wanting(|op, _| !takes_sum(op)))
            .unwrap();
    let fused = |name: &str| {
        let node = graph.nodes.iter().find(|node| node.name == name).unwrap();
        let Op::Fused(op) = &node.op else { panic!("`{name}` is `{}`", node.op.name()) };
        op.quantizations().map(|step| (step.of, op.is_stored(step.of))).collect::<Vec<_>>()
    };
    assert_eq!(fused("layers.0.mlp.swiglu"), [(0, false)]);
    assert_eq!(fused("layers.0.mlp.swiglu.backward"), [(0, false), (1, false)]);
    // The gradient of the residual stream goes on to the layer before.
    assert_eq!(fused("layers.1.input_layernorm.backward"), [(0, true)]);
    // The projection in BF16 reads the norm's output as it is, its neighbours read quantized data.
    assert_eq!(fused("layers.0.post_attention_layernorm"), [(1, false)]);
    assert_eq!(fused("layers.1.input_layernorm"), [(1, true)]);
}

/// A GEMM, the activation behind it and the quantization of that become one op, and the GEMM stays
/// where the backward pass reads it; where the catalog lacks the whole, its parts are asked for.
#[test]
fn activations_are_fused_with_their_gemms() {
    let graph = gpt(2).unwrap();
    let names = |fuses: &dyn Fn(&Op, &[TensorType]) -> bool| -> Vec<String> {
        let graph = fuse(&quantized(&graph, Recompute::None), &wanting(fuses)).unwrap();
        let name = |node: &deepwell_ir::Node| {
            let of_layer = node.name.starts_with("layers.1.") && node.op.name().contains("gelu");
            of_layer.then(|| node.op.name().to_string())
        };
        graph.nodes.iter().filter_map(name).collect()
    };
    let whole = ["scaled_gemm_gelu_quantize", "scaled_gemm_gelu_backward_quantize"];
    assert_eq!(names(&|_, _| true), whole);
    let apart = ["gelu", "gelu_backward"];
    assert_eq!(names(&|_, _| false), apart);
    // No GEMM with a quantization: then an activation has its own.
    let of_elements = ["gelu_quantize", "gelu_backward_quantize"];
    assert_eq!(names(&|op, _| !op.name().starts_with("scaled_gemm")), of_elements);
    // Widths are known, numbers of tokens are not.
    let wide = |_: &Op, inputs: &[TensorType]| {
        let sizes = |tensor: &TensorType| tensor.shape.as_fixed();
        assert!(inputs.iter().any(|tensor| sizes(tensor).is_none()));
        inputs.iter().filter_map(sizes).any(|sizes| sizes[0] == 4 * WIDTH)
    };
    assert_eq!(names(&wide)[0], whole[0]);
    // In BF16 nothing is quantized.
    let differentiated = recompute(&differentiate(&graph).unwrap(), Recompute::None).unwrap();
    let in_bf16 = apply_precision(&differentiated, &PrecisionPolicy::bf16()).unwrap().0;
    let fused = fuse(&in_bf16, &wanting(|op, _| op.name().contains("gelu"))).unwrap();
    let found: Vec<&Op> =
        fused.nodes.iter().map(|node| &node.op).filter(|op| matches!(op, Op::Fused(_))).collect();
    assert_eq!(found.len(), 4);
    let keeps = |op: &&Op| matches!(op, Op::Fused(op) if op.skipped.is_empty());
    assert_eq!(found.iter().filter(|op| keeps(op)).count(), 2);
    assert!(found[2..].iter().all(|op| op.name() == "linear_dgrad_gelu_backward"));
}

/// Of two ways to cut the same nodes the faster one is taken, though it does not begin with the
/// longest fused op; and a fused op that is no faster than its parts is not made.
#[test]
fn the_fastest_cut_is_taken() {
    let quantized = quantized(&gpt(2).unwrap(), Recompute::None);
    let up = |times: &dyn Fn(&str) -> f64| -> Vec<String> {
        let graph = fuse(&quantized, &|op, _, _| match op {
            Op::Fused(_) => Some(times(&op.name())),
            _ => Some(1.0),
        })
        .unwrap();
        let of_up = graph.nodes.iter().filter(|node| {
            ["layers.1.up", "layers.1.gelu"].contains(&node.name.as_str())
                || node.name.starts_with("layers.1.gelu.mx")
                || node.name.starts_with("layers.1.gelu.quantize")
        });
        of_up.map(|node| node.op.name().to_string()).collect()
    };
    let parts = ["scaled_gemm", "gelu", "quantize"];
    let times = |whole: f64, front: f64, back: f64| {
        move |name: &str| match name {
            "scaled_gemm_gelu_quantize" => whole,
            "scaled_gemm_gelu" => front,
            "gelu_quantize" => back,
            _ => f64::INFINITY,
        }
    };
    assert_eq!(up(&times(3.0, 2.0, 2.0)), parts);
    assert_eq!(up(&times(2.9, 2.0, 2.0)), ["scaled_gemm_gelu_quantize"]);
    assert_eq!(up(&times(2.9, 1.5, 2.0)), ["scaled_gemm_gelu", "quantize"]);
    assert_eq!(up(&times(2.9, 1.5, 1.4)), ["scaled_gemm", "gelu_quantize"]);
}

/// The number of questions grows with the layers, not with their square.
#[test]
fn as_many_questions_for_each_layer() {
    let questions = |layers| {
        let quantized = quantized(&gpt(layers).unwrap(), Recompute::None);
        let asked = std::cell::Cell::new(0);
        let count = |_: &Op, _: &[TensorType], _: &[TensorType]| {
            asked.set(asked.get() + 1);
            Some(1.0)
        };
        fuse(&quantized, &count).unwrap();
        asked.get()
    };
    let of = [2, 4, 8].map(questions);
    assert_eq!(of[2] - of[1], 2 * (of[1] - of[0]), "{of:?}");
}

/// A residual sum is the norm's or the GEMM's before it, whichever takes less time.
#[test]
fn a_sum_goes_where_it_takes_less_time() {
    let quantized = quantized(&llama(), Recompute::None);
    let names = |gemm: f64, norm_of_sum: f64, norm: f64| -> Vec<String> {
        let graph = fuse(&quantized, &|op, _, _| match &*op.name() {
            "scaled_gemm_residual" => Some(gemm),
            "add_rms_norm_quantize" => Some(norm_of_sum),
            "rms_norm_quantize" => Some(norm),
            _ if matches!(op, Op::Fused(_)) => None,
            _ => Some(1.0),
        })
        .unwrap();
        let is_here = |name: &str| {
            ["layers.0.self_attn.o_proj", "layers.0.self_attn.residual"].contains(&name)
                || name.starts_with("layers.0.post_attention_layernorm")
        };
        let forward = graph.nodes.iter().filter(|node| is_here(&node.name));
        let forward = forward.filter(|node| !node.name.contains("backward"));
        forward.map(|node| node.op.name().to_string()).collect()
    };
    let together = ["scaled_gemm", "add_rms_norm_quantize"];
    let apart = ["scaled_gemm_residual", "rms_norm_quantize"];
    assert_eq!(names(1.2, 1.5, 1.2), apart);
    assert_eq!(names(1.2, 1.5, 1.4), together);
    assert_eq!(names(1.3, 1.5, 1.2), together);
    assert_eq!(names(f64::INFINITY, 1.5, 0.6), together);
    assert_eq!(names(1.2, f64::INFINITY, 1.4), apart);
}
