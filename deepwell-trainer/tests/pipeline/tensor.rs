//! Stages whose layers are split over tensor-parallel ranks: the bits of those ranks without
//! stages.

use std::collections::BTreeMap;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{Call, Graph, Program};
use deepwell_kernels::{Backend, CallAction};
use deepwell_trainer::{CompileOptions, Engine, Parallel, World};

use super::apart::Apart;
use super::observers::Before;
use super::ranks::hardware;
use super::{Bits, CLIP, LAYERS, LEARNING_RATE, SEED, batch, options, tensors, train};

/// Two ranks have a head of keys each, and slices of whole blocks of 32.
fn graph(tie_word_embeddings: bool) -> Graph {
    let config = LlamaConfig {
        num_layers: LAYERS,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 32,
        intermediate_size: 128,
        tie_word_embeddings,
        ..LlamaConfig::preset("llama-micro").expect("a preset")
    };
    capture(&config).expect("a graph")
}

fn run(graph: &Graph, options: &CompileOptions, is_reference: bool) -> Vec<Bits> {
    let world = World::compile(graph.clone(), hardware(), options).expect("a world");
    let apart = |engine: &Engine| Apart::of(engine.program()).filter(|_| is_reference);
    train(world, apart)
}

/// Each rank has the steps of all, and the slices that the tensor-parallel rank at its place has
/// without stages; where ranks share the optimizer state, moments are not looked at.
fn check(got: &[Bits], expected: &[Bits], parallel: Parallel, what: &str) {
    let mut seen = BTreeMap::new();
    for (rank, got) in got.iter().enumerate() {
        let place = parallel.tensor_place(rank);
        // Of ranks that split the batch, too, the first at each place stand first.
        let expected = &expected[place];
        assert_eq!(got.steps, expected.steps, "{what}: loss and norm on rank {rank}");
        for (name, bits) in &got.tensors {
            assert!(expected.tensors.get(name) == Some(bits), "{what}: `{name}` on rank {rank}");
            seen.insert((place, name), ());
        }
    }
    let is_master = |name: &&String| !name.starts_with("moment");
    let masters = expected[0].tensors.keys().filter(is_master).count();
    let seen = seen.keys().filter(|(_, name)| is_master(name)).count();
    assert_eq!(seen, masters * parallel.tensor, "{what}: all masters are somewhere");
}

#[test]
fn stages_of_tensor_parallel_ranks_train_as_those_ranks_do() {
    for (precision, is_tied, data, zero, cut) in [
        ("f32", false, 1, 0, None),
        ("bf16", true, 1, 0, Some(vec![1, 2, 1])),
        ("mxfp8", true, 1, 0, None),
        ("mxfp8", true, 2, 0, None),
        ("mxfp8", true, 2, 1, Some(vec![3, 1])),
    ] {
        let graph = graph(is_tied);
        let split = Parallel { tensor: 2, ..Parallel::data(data) };
        let expected = run(&graph, &options(precision, split), true);
        let pipeline = cut.as_ref().map_or(2, Vec::len);
        let parallel = Parallel { pipeline, zero, ..split };
        let options = CompileOptions { stage_layers: cut, ..options(precision, parallel) };
        let what = format!("{precision}, {parallel}");
        check(&run(&graph, &options, false), &expected, parallel, &what);
    }
}

/// A sum or a gather of the first step is left out.
#[test]
fn exchanges_that_are_left_out_are_seen() {
    let parallel = Parallel { tensor: 2, pipeline: 2, ..Parallel::data(1) };
    let step = |name: &'static str| {
        let options = options("bf16", parallel);
        let mut world = World::compile(graph(true), hardware(), &options).expect("a world");
        let done = world.on_all(|engine| {
            engine.initialize(SEED)?;
            let (inputs, targets) = batch(0);
            let mut left_out = 0;
            let mut without = Before(|_: &Program, call: &Call, _: &mut dyn Backend| {
                let is_it = call.name.starts_with(name);
                left_out += usize::from(is_it);
                Ok(if is_it { CallAction::Skip } else { CallAction::Run })
            });
            let outcome =
                engine.step_observed(&inputs, &targets, LEARNING_RATE, CLIP, &mut without)?;
            Ok(([outcome.loss.to_bits(), outcome.grad_norm.to_bits()], tensors(engine)?, left_out))
        });
        done.expect("a step")
    };
    let sound = step("nothing");
    for name in [
        "all_reduce.tied.",
        "all_reduce.gradients.tensor.",
        "all_gather.grad_norm.tensor",
        "all_gather.grad_norm.stages",
        "all_reduce.loss.pipeline",
    ] {
        let without = step(name);
        assert!(without.iter().any(|rank| rank.2 > 0), "no rank has `{name}`");
        let is_seen = without.iter().zip(&sound).any(|(a, b)| a.0 != b.0 || a.1 != b.1);
        assert!(is_seen, "without `{name}` nothing changes");
    }
}
