//! Whole steps on a GPU beside the same on the CPU. Without a GPU each test is reported as ignored;
//! with `DEEPWELL_REQUIRE_GPU` set that is a failure.

#[macro_use]
extern crate deepwell_trials;

mod gpu_runs;
mod gradients;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::gpu_runs::{loss_bits, need_gpu, write_corpus};
use crate::gradients::{BF16, MXFP8, assert_gradients, assert_outcome, gradients};
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{Graph, Recompute};
use deepwell_moe::{RouterTraining, with_router_training};
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::run::{RunOptions, run};
use deepwell_trainer::{
    CompileOptions, Device, Engine, Settings, Start, StepOutcome, Trainer, compile,
};

const SEQ: usize = 128;
const BATCH: usize = 4;

/// Two layers with grouped query heads of width 64, sizes of whole 128-blocks.
fn config() -> LlamaConfig {
    LlamaConfig {
        hidden_size: 256,
        intermediate_size: 512,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        vocab_size: 384,
        ..LlamaConfig::preset("llama-micro").expect("a preset")
    }
}

fn engine(policy: &PrecisionPolicy, device: Device, micro_batch: usize, rule: Recompute) -> Engine {
    let graph = capture(&config()).expect("the model can be captured");
    engine_of(graph, policy, device, micro_batch, rule)
}

fn engine_of(
    graph: Graph,
    policy: &PrecisionPolicy,
    device: Device,
    micro_batch: usize,
    rule: Recompute,
) -> Engine {
    let options = CompileOptions {
        micro_batch: Some(micro_batch),
        recompute: Some(rule),
        device,
        ..CompileOptions::new(policy.clone(), SEQ, BATCH)
    };
    let mut engine = compile(graph, deepwell_probe::probe(), &options).expect("it compiles");
    engine.initialize(7).expect("weights");
    engine
}

fn batch(step: usize) -> (Vec<i32>, Vec<i32>) {
    let token = |index: usize| {
        let index = index + step * 7919;
        ((index * index * 31 + index * 7 + 3) % 384) as i32
    };
    let inputs = (0..BATCH * SEQ).map(token).collect();
    // Some targets do not count.
    let target = |index: usize| if index % 13 == 5 { -100 } else { token(index) };
    (inputs, (1..=BATCH * SEQ).map(target).collect())
}

trial!(a_step_is_that_of_the_cpu);
fn a_step_is_that_of_the_cpu() {
    need_gpu();
    let preset = |name| PrecisionPolicy::preset(name).expect("a preset");
    let rows = [
        (PrecisionPolicy::bf16(), BF16),
        (PrecisionPolicy::mxfp8(), MXFP8),
        (preset("mxfp8-128"), MXFP8),
        (preset("mxfp8-2d"), MXFP8),
    ];
    for (policy, tolerances) in rows {
        for (micro_batch, rule) in [(BATCH, Recompute::None), (BATCH / 2, Recompute::Full)] {
            let name = format!("{policy:?} micro-batch {micro_batch} recompute {rule}");
            let mut cpu = engine(&policy, Device::Cpu, micro_batch, rule);
            let mut gpu = engine(&policy, Device::Cuda(0), micro_batch, rule);
            let (inputs, targets) = batch(0);
            let expected = cpu.step(&inputs, &targets, 1e-3, 1.0).expect("a step");
            let got = gpu.step(&inputs, &targets, 1e-3, 1.0).expect("a step");
            assert_outcome(&name, &got, &expected, tolerances);
            let (expected, got) = (gradients(&mut cpu), gradients(&mut gpu));
            assert_gradients(&name, &got, &expected, tolerances);
        }
    }
}

/// A micro mixture and its vocabulary. A token visits all experts: where it chose some, scores that
/// nearly tie would send it to another on one of the devices, and no tolerance would tell that from
/// a fault. `training`: both losses of routers and a limit that drops pairs.
fn mixture(name: &str, training: Option<RouterTraining>) -> (Graph, usize) {
    let mut config = LlamaConfig::preset(name).expect("a preset");
    let experts = config.experts.as_mut().expect("it is a mixture");
    experts.experts_per_token = experts.num_experts;
    if let Some(groups) = &mut experts.groups {
        groups.chosen = groups.count;
    }
    let graph = capture(&config).expect("the model can be captured");
    let graph = match training {
        Some(training) => with_router_training(&graph, &training).expect("it has routers"),
        None => graph,
    };
    (graph, config.vocab_size)
}

fn check_mixture(name: &str, training: Option<RouterTraining>) {
    need_gpu();
    let preset = |name| PrecisionPolicy::preset(name).expect("a preset");
    let (graph, vocabulary) = mixture(name, training);
    let token = |index: usize| ((index * index * 31 + index * 7 + 3) % vocabulary) as i32;
    let inputs: Vec<i32> = (0..BATCH * SEQ).map(token).collect();
    let targets: Vec<i32> = (1..=BATCH * SEQ).map(token).collect();
    for (policy, tolerances) in [
        (PrecisionPolicy::bf16(), BF16),
        (PrecisionPolicy::mxfp8(), MXFP8),
        (preset("mxfp8-128"), MXFP8),
    ] {
        for (micro_batch, rule) in [(BATCH, Recompute::None), (BATCH / 2, Recompute::Full)] {
            let what = format!("{name} {policy:?} micro-batch {micro_batch} recompute {rule}");
            let engine_on = |device| engine_of(graph.clone(), &policy, device, micro_batch, rule);
            let (mut cpu, mut gpu) = (engine_on(Device::Cpu), engine_on(Device::Cuda(0)));
            let expected = cpu.step(&inputs, &targets, 1e-3, 1.0).expect("a step");
            let got = gpu.step(&inputs, &targets, 1e-3, 1.0).expect("a step");
            assert_outcome(&what, &got, &expected, tolerances);
            let (expected, got) = (gradients(&mut cpu), gradients(&mut gpu));
            assert_gradients(&what, &got, &expected, tolerances);
        }
    }
}

trial!(a_step_of_a_mixture_is_that_of_the_cpu);
fn a_step_of_a_mixture_is_that_of_the_cpu() {
    let training = RouterTraining { balance: 0.01, z: 0.001, capacity_factor: Some(0.75) };
    check_mixture("moe-micro", Some(training));
}

trial!(a_step_of_the_mixture_deepseek_is_that_of_the_cpu);
fn a_step_of_the_mixture_deepseek_is_that_of_the_cpu() {
    check_mixture("deepseek-micro", None);
}

trial!(a_step_of_the_mixture_gpt_oss_is_that_of_the_cpu);
fn a_step_of_the_mixture_gpt_oss_is_that_of_the_cpu() {
    check_mixture("gpt-oss-micro", None);
}

trial!(a_mixture_gives_the_same_bits_again);
fn a_mixture_gives_the_same_bits_again() {
    need_gpu();
    for name in ["moe-micro", "deepseek-micro", "gpt-oss-micro"] {
        let config = LlamaConfig::preset(name).expect("a preset");
        let graph = capture(&config).expect("the model can be captured");
        let token = |index: usize| ((index * 31 + index / 7) % config.vocab_size) as i32;
        let inputs: Vec<i32> = (0..BATCH * SEQ).map(token).collect();
        let targets: Vec<i32> = (1..=BATCH * SEQ).map(token).collect();
        for policy in [PrecisionPolicy::bf16(), PrecisionPolicy::mxfp8()] {
            let losses = || -> Vec<StepOutcome> {
                let device = Device::Cuda(0);
                let mut engine = engine_of(graph.clone(), &policy, device, BATCH, Recompute::None);
                let step = |_| engine.step(&inputs, &targets, 3e-3, 1.0).expect("a step");
                (0..20).map(step).collect()
            };
            let first = losses();
            assert!(first[19].loss < first[0].loss, "{name}: {first:?}");
            assert_eq!(first, losses(), "{name} {:?}", policy.format());
        }
    }
}

fn losses(policy: &PrecisionPolicy, pipelined: bool) -> Vec<StepOutcome> {
    let mut engine = engine(policy, Device::Cuda(0), BATCH, Recompute::None);
    let mut outcomes = Vec::new();
    let mut pending = None;
    for step in 0..20 {
        let (inputs, targets) = batch(step);
        let started = engine.start_step(&inputs, &targets, 1e-3, 1.0).expect("a step");
        if let Some(before) = pending.replace(started) {
            outcomes.push(engine.finish_step(before).expect("a step"));
        }
        if !pipelined {
            let now = pending.take().expect("it was started");
            outcomes.push(engine.finish_step(now).expect("a step"));
        }
    }
    outcomes.extend(pending.map(|last| engine.finish_step(last).expect("a step")));
    outcomes
}

trial!(the_same_seed_gives_the_same_bits);
fn the_same_seed_gives_the_same_bits() {
    need_gpu();
    for policy in [PrecisionPolicy::bf16(), PrecisionPolicy::mxfp8()] {
        let first = losses(&policy, false);
        assert_eq!(first.len(), 20);
        assert!(first[19].loss < first[0].loss, "{first:?}");
        assert_eq!(first, losses(&policy, true), "{:?}", policy.format());
    }
}

trial!(runs_resume_to_the_same_bits_and_move_between_devices);
fn runs_resume_to_the_same_bits_and_move_between_devices() {
    need_gpu();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    write_corpus(&folder.join("corpus.txt"));
    let settings = |out: &str, device: Device| Settings {
        model: "llama-micro".to_string(),
        data: vec![folder.join("corpus.txt")],
        cache_dir: folder.join("cache"),
        out: folder.join(out),
        device,
        precision: "mxfp8".to_string(),
        steps: 30,
        seq_len: 64,
        batch_size: 4,
        eval_tokens: 1024,
        checkpoint_every: Some(10),
        keep_last: 10,
        ..Settings::default()
    };
    let go = |settings: &Settings, start: Start| {
        let stop = Arc::new(AtomicBool::new(false));
        run(settings, RunOptions { start, ..RunOptions::default() }, stop, &mut ()).expect("a run")
    };
    let forget_after = |out: &str, step: u64| {
        let root = Trainer::checkpoints_path(&folder.join(out));
        for entry in deepwell_ckpt::list(&root).expect("checkpoints") {
            if entry.step > step {
                std::fs::remove_dir_all(&entry.path).expect("a checkpoint");
            }
        }
    };
    go(&settings("whole", Device::Cuda(0)), Start::New);
    let whole = loss_bits(&folder.join("whole"));
    assert_eq!(whole.len(), 30);
    forget_after("whole", 20);
    let again = go(&settings("whole", Device::Cuda(0)), Start::Resume);
    assert_eq!(again.fit.resumed_after, Some(20));
    assert_eq!(loss_bits(&folder.join("whole")), whole);

    // From the CPU to the GPU and back: the losses go on where they were.
    go(&settings("moved", Device::Cpu), Start::New);
    let on_cpu = loss_bits(&folder.join("moved"));
    forget_after("moved", 10);
    go(&settings("moved", Device::Cuda(0)), Start::ResumeChanged);
    forget_after("moved", 20);
    let back = go(&settings("moved", Device::Cpu), Start::ResumeChanged);
    assert_eq!(back.fit.resumed_after, Some(20));
    let moved = loss_bits(&folder.join("moved"));
    for ((step, a), (_, b)) in moved.iter().zip(&on_cpu) {
        let (a, b) = (f64::from_bits(*a), f64::from_bits(*b));
        assert!((a - b).abs() < 0.01 * b, "step {step}: {a} against {b}");
    }
    assert_eq!(moved[..10], on_cpu[..10]);
}

fn main() -> ExitCode {
    deepwell_trials::run()
}
