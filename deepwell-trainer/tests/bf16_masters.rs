//! Master weights in BF16, rounded stochastically: half of their memory, and no BF16 copies.

mod kernels_needed;

use deepwell_ir::capture::{LlamaConfig, ModelConfig};
use deepwell_ir::ops::{MasterFormat, MomentFormat};
use deepwell_ir::{DType, Graph, MemoryKind, Op, Phase, Program};
use deepwell_kernels::cuda::Architecture;
use deepwell_plan::{OptimizerSpec, Parallel};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Device, Engine, TrainError, compile};

use crate::kernels_needed::need_kernels;

const SEQ: usize = 32;
const ROWS: usize = 4;

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

fn graph(model: &str) -> Graph {
    let config = ModelConfig::preset(model).expect("a preset");
    config.capture(Some(SEQ)).expect("a graph")
}

fn engine(
    graph: &Graph,
    precision: &str,
    optimizer: OptimizerSpec,
    device: Device,
) -> Result<Engine, TrainError> {
    let policy = PrecisionPolicy::preset(precision).expect("a preset");
    let options = CompileOptions::new(policy, SEQ, ROWS);
    let options = CompileOptions { optimizer, device, ..options };
    let mut engine = compile(graph.clone(), hardware(), &options)?;
    engine.initialize(5)?;
    Ok(engine)
}

/// Losses of steps on one batch, which a model learns, without clipping.
fn losses(engine: &mut Engine) -> Vec<f32> {
    let token = |at: usize| ((at * at * 31 + at * 7) % 256) as i32;
    let inputs: Vec<i32> = (0..ROWS * SEQ).map(token).collect();
    let targets: Vec<i32> = (0..ROWS * SEQ).map(|at| token(at + 1)).collect();
    (0..8).map(|_| engine.step(&inputs, &targets, 2e-3, 1e30).expect("a step").loss).collect()
}

/// Bytes of the state of the optimizer.
fn state_bytes(program: &Program) -> usize {
    program.values_of(MemoryKind::Optimizer).map(|value| value.range.bytes).sum()
}

fn masters(program: &Program, dtype: DType) -> impl Iterator<Item = usize> {
    let of = move |id| Some(program.value(id)).filter(|value| value.dtype == dtype);
    program.parameters.iter().filter_map(move |it| of(it.master.value())).map(|it| it.elements())
}

#[test]
fn a_model_learns_with_half_of_the_memory() {
    for model in ["llama-micro", "gpt2-micro", "moe-micro"] {
        let graph = graph(model);
        for precision in ["bf16", "mxfp8", "nvfp4"] {
            for moments in [MomentFormat::Fp32, MomentFormat::Fp8] {
                let what = format!("{model}, {precision}, {moments}");
                let run = |masters: MasterFormat| {
                    let optimizer = OptimizerSpec { masters, moments, ..OptimizerSpec::default() };
                    let mut engine = engine(&graph, precision, optimizer, Device::Cpu);
                    let engine = engine.as_mut().expect("an engine");
                    (losses(engine), engine.program().clone())
                };
                let (wide, before) = run(MasterFormat::Fp32);
                let (narrow, after) = run(MasterFormat::Bf16);
                let matrices: usize = masters(&after, DType::Bf16).sum();
                assert!(matrices * 10 > masters(&before, DType::F32).sum::<usize>() * 9, "{what}");
                assert_eq!(state_bytes(&before) - state_bytes(&after), 2 * matrices, "{what}");
                // Before the first update the weights differ by a rounding.
                assert!((narrow[0] - wide[0]).abs() < 2e-3, "{what}: {narrow:?} {wide:?}");
                let learned = wide[0] - wide[7];
                assert!(learned > 0.3, "{what}: {wide:?}");
                assert!(
                    (narrow[7] - wide[7]).abs() < 0.15 * learned,
                    "{what}: {narrow:?} {wide:?}"
                );
            }
        }
    }
}

#[test]
fn no_call_copies_a_master_to_bf16() {
    let graph = graph("llama-micro");
    for precision in ["bf16", "mxfp8"] {
        let optimizer = OptimizerSpec { masters: MasterFormat::Bf16, ..OptimizerSpec::default() };
        let engine = engine(&graph, precision, optimizer, Device::Cpu).expect("an engine");
        for program in [engine.program(), engine.evaluation_program()] {
            let is_cast = |call: &&deepwell_ir::Call| {
                let is_matrix = program.value(call.operands[0].value).shape.len() > 1;
                call.phase == Phase::Weights && matches!(call.op, Op::Cast(_)) && is_matrix
            };
            let casts: Vec<&str> =
                program.calls.iter().filter(is_cast).map(|call| &*call.name).collect();
            assert_eq!(casts, [""; 0], "{precision}");
        }
        let vectors: Vec<usize> = masters(engine.program(), DType::F32).collect();
        assert!(!vectors.is_empty(), "norms keep FP32");
    }
}

/// Steps of updates in the backward pass have the bits of later updates: the random bits follow
/// from step, parameter and element.
#[test]
fn updates_in_the_backward_pass_and_on_the_host_round_alike() {
    let graph = graph("llama-micro");
    let masters = MasterFormat::Bf16;
    for moments in [MomentFormat::Fp32, MomentFormat::Fp8] {
        let spec = OptimizerSpec { masters, moments, ..OptimizerSpec::default() };
        let run = |in_backward: bool, on_host: bool| {
            let optimizer = OptimizerSpec { in_backward, on_host, ..spec.clone() };
            let mut engine = engine(&graph, "mxfp8", optimizer, Device::Cpu).expect("an engine");
            losses(&mut engine)
        };
        let expected = run(false, false);
        for (in_backward, on_host) in [(true, false), (false, true), (true, true)] {
            assert_eq!(run(in_backward, on_host), expected, "{moments} {in_backward} {on_host}");
        }
    }
}

#[test]
fn guards_move_a_gemm_and_masters_stay() {
    let graph = graph("llama-micro");
    let optimizer = OptimizerSpec { masters: MasterFormat::Bf16, ..OptimizerSpec::default() };
    let mut engine = engine(&graph, "mxfp8", optimizer, Device::Cpu).expect("an engine");
    let before = losses(&mut engine);
    engine.fall_back(&[0, 3], "a test").expect("GEMMs in BF16");
    let after = losses(&mut engine);
    assert!(after[0] < before[7] + 0.05, "{before:?} {after:?}");
}

#[test]
fn an_emulated_gpu_trains_as_a_cpu_does() {
    need_kernels((9, 0));
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
    for (moments, in_backward) in [(MomentFormat::Fp32, false), (MomentFormat::Fp8, true)] {
        let masters = MasterFormat::Bf16;
        let optimizer = OptimizerSpec { masters, moments, in_backward, ..OptimizerSpec::default() };
        let run = |device: Device| {
            let engine = engine(&graph, "mxfp8-128", optimizer.clone(), device);
            let mut engine = engine.expect("an engine");
            let token = |at: usize| ((at * at * 31 + at * 7) % 256) as i32;
            let inputs: Vec<i32> = (0..ROWS * SEQ).map(token).collect();
            let targets: Vec<i32> = (0..ROWS * SEQ).map(|at| token(at + 1)).collect();
            let mut step = || engine.step(&inputs, &targets, 2e-3, 1e30).expect("a step").loss;
            [step(), step(), step()]
        };
        let (cpu, gpu) = (run(Device::Cpu), run(Device::Emulated(Architecture::Sm90a)));
        for (cpu, gpu) in cpu.iter().zip(&gpu) {
            // The limit of two architectures' losses in `emulated.rs`.
            assert!((cpu - gpu).abs() < 5e-3 * cpu, "{moments}: {cpu} {gpu}");
        }
    }
}

#[test]
fn other_plans_are_refused_with_a_reason() {
    let graph = graph("llama-micro");
    let optimizer = OptimizerSpec { masters: MasterFormat::Bf16, ..OptimizerSpec::default() };
    let error = engine(&graph, "f32", optimizer.clone(), Device::Cpu).err().expect("FP32");
    assert!(error.to_string().contains("calls that read FP32"), "{error}");
    let options = CompileOptions {
        optimizer,
        parallel: Parallel { zero: 1, ..Parallel::data(2) },
        ..CompileOptions::new(PrecisionPolicy::preset("bf16").expect("a preset"), SEQ, ROWS)
    };
    let error = deepwell_trainer::World::compile(graph, hardware(), &options).err();
    let error = error.expect("sharded masters").to_string();
    assert!(error.contains("ZeRO stage 0"), "{error}");
}
