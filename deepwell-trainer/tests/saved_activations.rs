//! Storage of activations between the forward and the backward pass: what it saves, and how far
//! gradients are from those of exact activations.

mod kernels_needed;
mod observers;

use std::collections::{BTreeMap, BTreeSet};

use bytemuck::cast_slice_mut;
use deepwell_ir::capture::{LlamaConfig, ModelConfig};
use deepwell_ir::{Access, Call, Graph, Op, Phase, Program, Recompute, SavedActivations, Value};
use deepwell_kernels::cuda::Architecture;
use deepwell_kernels::{Backend, CallAction, Observer};
use deepwell_plan::Parallel;
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Device, Engine, TrainError, World};

use crate::kernels_needed::need_kernels;
use crate::observers::Before;

const SEQ: usize = 32;
const ROWS: usize = 4;
const CLIP: f64 = 1e30;

/// Largest error of an element in E4M3, which has three bits after the point, as a share of it.
const ELEMENT_ERROR: f64 = 1.0 / 16.0;

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

fn graph(model: &str) -> Graph {
    let config = ModelConfig::preset(model).expect("a preset");
    config.capture(Some(SEQ)).expect("a graph")
}

fn options(precision: &str, saved_activations: SavedActivations) -> CompileOptions {
    let policy = PrecisionPolicy::preset(precision).expect("a preset");
    CompileOptions { saved_activations, ..CompileOptions::new(policy, SEQ, ROWS) }
}

fn batch(step: usize) -> (Vec<i32>, Vec<i32>) {
    let token = |at: usize| ((step * 7919 + at * at * 31 + at * 7) % 256) as i32;
    let inputs = (0..ROWS * SEQ).map(token).collect();
    (inputs, (0..ROWS * SEQ).map(|at| token(at + 1)).collect())
}

/// Loss of a step, and the gradients that rank 0 has.
struct Step {
    loss: f32,
    gradients: BTreeMap<String, Vec<f32>>,
    program: Program,
}

fn gradients(engine: &mut Engine) -> Result<BTreeMap<String, Vec<f32>>, TrainError> {
    let states = engine.program().parameters.clone();
    let of = |state: deepwell_ir::ParameterState| {
        let id = state.gradient?;
        let mut values = vec![0f32; engine.program().value(id).elements()];
        let read = engine.read_value(id, cast_slice_mut(&mut values));
        Some(read.map(|()| (state.name, values)))
    };
    states.into_iter().filter_map(of).collect()
}

fn first_step(graph: &Graph, options: &CompileOptions, mut observer: impl Observer) -> Step {
    let mut world = World::compile(graph.clone(), hardware(), options).expect("a world");
    assert_eq!(world.first().plan().saved_activations, options.saved_activations);
    let (inputs, targets) = batch(0);
    let first = |engine: &mut Engine| {
        engine.initialize(7)?;
        let loss = engine.step_observed(&inputs, &targets, 1e-3, CLIP, &mut observer)?.loss;
        Ok((loss, gradients(engine)?))
    };
    let other = |engine: &mut Engine| {
        engine.initialize(7)?;
        let loss = engine.step(&inputs, &targets, 1e-3, CLIP)?.loss;
        Ok((loss, gradients(engine)?))
    };
    let mut ranks = world.with_first(first, other).expect("a step");
    let (loss, gradients) = ranks.swap_remove(0);
    let program = world.first().program().clone();
    Step { loss, gradients, program }
}

fn nothing() -> impl Observer {
    Before(|_: &Program, _: &Call, _: &mut dyn Backend| Ok(CallAction::Run))
}

/// Values that live from the forward to the backward pass.
fn kept(program: &Program) -> Vec<&Value> {
    let of = |phase: Phase, access: &dyn Fn(Access) -> bool| -> BTreeSet<_> {
        let calls = program.calls.iter().filter(|call| call.phase == phase);
        let operands = calls.flat_map(|call| &call.operands);
        operands.filter(|it| access(it.access)).map(|it| it.value).collect()
    };
    let written = of(Phase::Forward, &|access| access != Access::Read);
    let read = of(Phase::Backward, &|access| access != Access::Write);
    let both = written.intersection(&read).map(|&id| program.value(id));
    both.filter(|value| value.memory == deepwell_ir::MemoryKind::Activations).collect()
}

fn kept_bytes(program: &Program) -> usize {
    kept(program).iter().map(|value| value.range.bytes).sum()
}

/// The norm of the difference of two gradients, as a share of the norm of the first.
fn relative_error(expected: &[f32], got: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let both = expected.iter().zip(got);
    let error = norm(&mut both.map(|(&a, &b)| f64::from(a) - f64::from(b)));
    error / norm(&mut expected.iter().map(|&a| f64::from(a))).max(f64::MIN_POSITIVE)
}

/// Errors of all gradients that differ at all.
fn errors(exact: &Step, stored: &Step) -> BTreeMap<String, f64> {
    let names = exact.gradients.iter().zip(&stored.gradients);
    let differing = names.filter(|(exact, stored)| exact.1 != stored.1);
    differing
        .map(|((name, exact), (_, stored))| (name.clone(), relative_error(exact, stored)))
        .collect()
}

#[test]
fn nothing_kept_twice_leaves_all_bits() {
    for model in ["llama-micro", "gpt2-micro", "moe-micro", "deepseek-micro"] {
        let graph = graph(model);
        for precision in ["bf16", "mxfp8", "mxfp8-128", "nvfp4"] {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                let what = format!("{model}, {precision}, {recompute}");
                let run = |saved| {
                    let options = options(precision, saved);
                    let options = CompileOptions { recompute: Some(recompute), ..options };
                    first_step(&graph, &options, nothing())
                };
                let (exact, once) = (run(SavedActivations::Exact), run(SavedActivations::Once));
                assert_eq!(exact.loss.to_bits(), once.loss.to_bits(), "{what}");
                assert_eq!(errors(&exact, &once), BTreeMap::new(), "{what}");
                let saves = kept_bytes(&exact.program) > kept_bytes(&once.program);
                let quantizes = precision != "bf16" && recompute != Recompute::Full;
                assert!(saves || !quantizes, "{what}: the same bytes");
            }
        }
    }
}

/// The forward pass stays as it was. Gradients that come through no activation function have the
/// same bits. An element of the others has an error of up to [`ELEMENT_ERROR`] for each layer with
/// stored inputs that its gradient comes through; GEMMs with quantized operands round it again.
#[test]
fn gradients_are_off_by_the_error_of_the_format() {
    for (model, precision, roundings) in [
        ("llama-micro", "f32", 1.0),
        ("llama-micro", "bf16", 1.0),
        ("gpt2-micro", "bf16", 1.0),
        ("moe-micro", "bf16", 1.0),
        ("llama-micro", "mxfp8", 2.0),
        ("gpt2-micro", "mxfp8", 2.0),
        ("moe-micro", "mxfp8", 2.0),
    ] {
        let graph = graph(model);
        let what = format!("{model}, {precision}");
        let run = |saved| first_step(&graph, &options(precision, saved), nothing());
        let (exact, stored) = (run(SavedActivations::Exact), run(SavedActivations::Mxfp8));
        assert_eq!(exact.loss.to_bits(), stored.loss.to_bits(), "{what}");
        let errors = errors(&exact, &stored);
        let last = graph.layer_count() - 1;
        // Attention does not depend on a bias of keys; its gradient is rounding alone.
        let names = exact.gradients.keys().filter(|name| !name.ends_with("attn.k.bias"));
        for name in names {
            let error = errors.get(name).copied();
            match layers_through(name, last) {
                0 => assert_eq!(error, None, "{what}: `{name}`"),
                layers => {
                    let bound = layers as f64 * roundings * ELEMENT_ERROR;
                    let error = error.unwrap_or(0.0);
                    assert!(error <= bound, "{what}: `{name}` is off by {error}, not {bound}");
                }
            }
        }
        let most = errors.values().copied().fold(0.0, f64::max);
        assert!(most > ELEMENT_ERROR / 16.0, "{what}: {most}");
    }
}

/// The layers whose activation functions lie between the loss and a parameter.
fn layers_through(parameter: &str, last: usize) -> usize {
    let layer = parameter.split('.').find_map(|part| part.parse::<usize>().ok());
    let is_behind = ["down_proj", "w2", "mlp.c_proj"].iter().any(|it| parameter.contains(it));
    match layer {
        Some(layer) => last - layer + usize::from(!is_behind),
        None if ["embed_tokens", "wte", "wpe"].iter().any(|it| parameter.contains(it)) => last + 1,
        None => 0,
    }
}

#[test]
fn faults_are_far_outside_of_the_bound() {
    let graph = graph("llama-micro");
    let exact = first_step(&graph, &options("bf16", SavedActivations::Exact), nothing());
    let options = options("bf16", SavedActivations::Mxfp8);
    let reads_stored = |call: &Call| matches!(call.op, Op::StoredSwiGluBackward(_));
    let most = |fault: &dyn Fn(&mut [Vec<u8>; 4])| {
        let mut planted = 0;
        let before = Before(|program: &Program, call: &Call, backend: &mut dyn Backend| {
            if reads_stored(call) {
                // Data and scales of gate, then of up.
                let ranges = [1, 2, 3, 4].map(|at| program.value(call.operands[at].value).range);
                let mut planes = ranges.map(|range| vec![0; range.bytes]);
                for (range, plane) in ranges.into_iter().zip(&mut planes) {
                    backend.read(range, plane)?;
                }
                fault(&mut planes);
                for (range, plane) in ranges.into_iter().zip(&planes) {
                    backend.write(range, plane)?;
                }
                planted += 1;
            }
            Ok(CallAction::Run)
        });
        let stored = first_step(&graph, &options, before);
        assert_eq!(planted, graph.layer_count());
        errors(&exact, &stored).into_values().fold(0.0, f64::max)
    };
    let bound = graph.layer_count() as f64 * ELEMENT_ERROR;
    assert!(most(&|_| {}) <= bound);
    let of_other_tensor = most(&|planes| {
        planes.swap(0, 2);
        planes.swap(1, 3);
    });
    assert!(of_other_tensor > 2.0 * bound, "{of_other_tensor}");
    // Scales at other places, as of another axis.
    let of_other_axis = most(&|planes| planes[1].reverse());
    assert!(of_other_axis > 2.0 * bound, "{of_other_axis}");
    // As if nothing was stored.
    let left_out = most(&|planes| planes.iter_mut().for_each(|plane| plane.fill(0)));
    assert!(left_out > 2.0 * bound, "{left_out}");
}

#[test]
fn inputs_of_activation_functions_take_half_of_the_bytes() {
    let graph = graph("llama-micro");
    for precision in ["bf16", "mxfp8"] {
        let run = |saved| first_step(&graph, &options(precision, saved), nothing()).program;
        let [exact, stored] = [SavedActivations::Once, SavedActivations::Mxfp8].map(run);
        let of_inputs = |program: &Program| -> (usize, usize) {
            let is_input = |value: &&&Value| {
                value.name.contains("gate_proj") || value.name.contains("up_proj")
            };
            let kept = kept(program);
            let inputs = kept.iter().filter(is_input);
            (inputs.clone().count(), inputs.map(|value| value.elements()).sum())
        };
        let ((before, elements), (after, _)) = (of_inputs(&exact), of_inputs(&stored));
        assert_eq!((before, after), (2 * graph.layer_count(), 4 * graph.layer_count()));
        let saved = kept_bytes(&exact) - kept_bytes(&stored);
        // Two bytes become one and a scale for 32; tiles of scales are padded.
        assert!(saved > elements / 2 && saved < elements, "{saved} of {elements} elements");
    }
}

#[test]
fn a_model_learns_and_falls_back() {
    for model in ["llama-micro", "gpt2-micro", "moe-micro"] {
        let graph = graph(model);
        for (precision, recompute) in
            [("bf16", Recompute::None), ("mxfp8", Recompute::None), ("mxfp8", Recompute::Selective)]
        {
            let what = format!("{model}, {precision}, {recompute}");
            let run = |saved| {
                let options = options(precision, saved);
                let options = CompileOptions { recompute: Some(recompute), ..options };
                let mut world = World::compile(graph.clone(), hardware(), &options).expect("it");
                let engine = &mut world.engines_mut()[0];
                engine.initialize(5).expect("weights");
                let (inputs, targets) = batch(0);
                let step =
                    |engine: &mut Engine| engine.step(&inputs, &targets, 2e-3, CLIP).unwrap().loss;
                let mut losses: Vec<f32> = (0..8).map(|_| step(engine)).collect();
                if precision == "mxfp8" {
                    engine.fall_back(&[0, 3], "a test").expect("GEMMs in BF16");
                    losses.push(step(engine));
                }
                losses
            };
            let (exact, stored) = (run(SavedActivations::Exact), run(SavedActivations::Mxfp8));
            let learned = exact[0] - exact[7];
            assert!(learned > 0.3, "{what}: {exact:?}");
            for (exact, stored) in exact.iter().zip(&stored) {
                assert!((exact - stored).abs() < 0.1 * learned, "{what}: {exact} {stored}");
            }
        }
    }
}

/// Ranks store what one rank stores: rows of tokens and columns of gate and up are theirs.
#[test]
fn ranks_train_as_one_rank_does() {
    let config = LlamaConfig {
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 32,
        intermediate_size: 128,
        ..LlamaConfig::preset("llama-micro").expect("a preset")
    };
    let graph = ModelConfig::from(config).capture(Some(SEQ)).expect("a graph");
    let of =
        |data, tensor, pipeline, zero| Parallel { tensor, pipeline, zero, ..Parallel::data(data) };
    let run = |parallel: Parallel, saved| {
        let options = options("mxfp8", saved);
        let options = CompileOptions { parallel, micro_batch: Some(1), ..options };
        let mut world = World::compile(graph.clone(), hardware(), &options).expect("a world");
        let losses = world.on_all(|engine| {
            engine.initialize(7)?;
            let step = |at| {
                let (inputs, targets) = batch(at);
                Ok(engine.step(&inputs, &targets, 2e-3, CLIP)?.loss)
            };
            (0..4).map(step).collect::<Result<Vec<f32>, TrainError>>()
        });
        losses.expect("steps").swap_remove(0)
    };
    let alone = run(Parallel::default(), SavedActivations::Mxfp8);
    for parallel in [of(1, 2, 1, 0), of(1, 1, 2, 0), of(2, 1, 1, 2), of(1, 2, 2, 0)] {
        let ranks = run(parallel, SavedActivations::Mxfp8);
        if parallel.tensor == 1 && parallel.data == 1 {
            assert_eq!(ranks, alone, "{parallel}: stages change no sum");
        }
        for (ranks, alone) in ranks.iter().zip(&alone) {
            // Sums in another order, as for exact activations in `worlds`.
            assert!((ranks - alone).abs() < 2e-3 * alone, "{parallel}: {ranks} {alone}");
        }
        let once = run(parallel, SavedActivations::Once);
        assert_eq!(once, run(parallel, SavedActivations::Exact), "{parallel}");
    }
}

#[test]
fn an_emulated_gpu_trains_as_a_cpu_does() {
    need_kernels((9, 0));
    need_kernels((10, 0));
    let config = LlamaConfig {
        hidden_size: 128,
        intermediate_size: 256,
        num_layers: 2,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 64,
        ..LlamaConfig::preset("llama-micro").expect("a preset")
    };
    let graph = ModelConfig::from(config).capture(Some(SEQ)).expect("a graph");
    let run = |device, precision| {
        let options = CompileOptions { device, ..options(precision, SavedActivations::Mxfp8) };
        let mut world = World::compile(graph.clone(), hardware(), &options).expect("a world");
        let engine = &mut world.engines_mut()[0];
        engine.initialize(5).expect("weights");
        let (inputs, targets) = batch(0);
        let mut step = || engine.step(&inputs, &targets, 2e-3, CLIP).expect("a step").loss;
        [step(), step(), step()]
    };
    for (architecture, precision) in
        [(Architecture::Sm90a, "mxfp8-128"), (Architecture::Sm100a, "mxfp8")]
    {
        let cpu = run(Device::Cpu, precision);
        let gpu = run(Device::Emulated(architecture), precision);
        for (cpu, gpu) in cpu.iter().zip(&gpu) {
            // The limit of two architectures' losses in `emulated.rs`.
            assert!((cpu - gpu).abs() < 5e-3 * cpu, "{precision}: {cpu} {gpu}");
        }
    }
}
