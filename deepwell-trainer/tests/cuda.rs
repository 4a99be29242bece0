//! Whole steps on a GPU beside the same on the CPU. Without a GPU each test is reported as ignored;
//! with `DEEPWELL_REQUIRE_GPU` set that is a failure.

#[macro_use]
extern crate deepwell_trials;

mod gradients;

use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{Graph, Recompute};
use deepwell_moe::{RouterTraining, with_router_training};
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::run::{RunOptions, run};
use deepwell_trainer::{
    CompileOptions, Device, Engine, Record, Settings, Start, StepOutcome, Trainer, compile,
};
use deepwell_trials::skip;

use crate::gradients::{BF16, MXFP8, assert_gradients, assert_outcome, gradients};

const SEQ: usize = 128;
const BATCH: usize = 4;

/// Skips the test where there is no GPU.
fn need_gpu() {
    let hardware = deepwell_probe::probe();
    if hardware.gpus.is_empty() {
        let required = std::env::var_os("DEEPWELL_REQUIRE_GPU").is_some();
        let reason = hardware.gpus_absent.map_or("no GPU".to_string(), |absence| absence.reason);
        assert!(!required, "DEEPWELL_REQUIRE_GPU is set, and there is no GPU: {reason}");
        skip(reason);
    }
}

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

/// The command. A bundle has it beside its tests and says where.
fn deepwell() -> std::ffi::OsString {
    std::env::var_os("DEEPWELL_COMMAND").unwrap_or(env!("CARGO_BIN_EXE_deepwell").into())
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

trial!(the_default_comparison_ends_with_a_verdict);
/// `deepwell parity` as a new user calls it, with fewer steps and seeds: the audit of the first
/// step once ended it with an error on every device but the CPU.
fn the_default_comparison_ends_with_a_verdict() {
    need_gpu();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let data = folder.path().join("data.txt");
    let words = (0..60_000u32).map(|index| format!("{} ", index.wrapping_mul(2_654_435_761)));
    std::fs::write(&data, words.collect::<String>()).expect("a temporary folder can be written");
    let output = Command::new(deepwell())
        .args(["parity", "--json", "--device", "cuda", "--steps", "20", "--seeds", "2", "--data"])
        .arg(&data)
        .args(["--eval-tokens", "16384", "--cache-dir"])
        .arg(folder.path().join("cache"))
        .arg("--out")
        .arg(folder.path().join("out"))
        .output()
        .expect("the command starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    let report: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"));
    // Twenty steps of two pairs may be too few to tell, which is 3.
    assert!(matches!(output.status.code(), Some(0 | 3)), "{report}");
    let checks = report["checks"].as_array().expect("checks");
    for name in ["audit of the first step in low precision", "quantized GEMMs ran as planned"] {
        let is_this =
            |check: &&serde_json::Value| check["name"].as_str().unwrap_or("").starts_with(name);
        let check = checks.iter().find(is_this).unwrap_or_else(|| panic!("no `{name}`: {report}"));
        assert_eq!(check["status"], "holds", "{check}");
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

/// A text that is not trivial to predict.
fn write_corpus(path: &Path) {
    let mut state = 1u64;
    let mut text = String::new();
    for line in 0..4000 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let word = ["alpha", "beta", "gamma", "delta"][(state >> 60) as usize % 4];
        text.push_str(&format!("line {line} of {word} says {:04x} and ends here\n", state >> 48));
    }
    std::fs::write(path, text).expect("a temporary folder can be written");
}

/// Step, and the bits of the loss.
fn loss_bits(out: &Path) -> Vec<(u64, u64)> {
    let text = std::fs::read_to_string(Trainer::metrics_path(out)).expect("metrics are there");
    text.lines()
        .map(|line| serde_json::from_str::<Record>(line).expect("whole lines"))
        .filter_map(|record| Some((record.step, record.loss?.to_bits())))
        .collect()
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

/// A folder with a text.
fn folder_with_text() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write_corpus(&folder.path().join("corpus.txt"));
    folder
}

/// Trains the micro model by the command, with these variables and arguments. Bits of the losses,
/// or what it wrote to standard error.
fn train(
    folder: &Path,
    out: &str,
    variables: &[(&str, &str)],
    arguments: &[&str],
) -> Result<Vec<(u64, u64)>, String> {
    let path = |name: &str| folder.join(name).display().to_string();
    let mut command = Command::new(deepwell());
    command.args(["train", "--model", "llama-micro", "--seq-len", "64"]);
    if !arguments.contains(&"--steps") {
        command.args(["--steps", "6"]);
    }
    command.args(["--batch-size", "4", "--micro-batch", "2", "--recompute", "none"]);
    command.args(["--eval-tokens", "1024", "--checkpoint-every", "3"]);
    command.args(["--data", &path("corpus.txt"), "--cache-dir", &path("cache")]);
    command.args(["--out", &path(out)]).args(arguments).envs(variables.iter().copied());
    let output = command.output().expect("the command runs");
    match output.status.success() {
        true => Ok(loss_bits(&folder.join(out))),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// What a launcher says to one rank that is alone, on a port of its own.
fn alone(port: &str) -> [(&str, &str); 6] {
    [
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", port),
    ]
}

/// Skips the test where there is no NCCL.
fn need_nccl() {
    if let Err(error) = deepwell_kernels::cuda::NcclId::new() {
        skip(error.to_string());
    }
}

trial!(a_launched_rank_trains_as_one_that_is_not);
/// All of it but other ranks: a launcher's environment, NCCL, what hosts tell each other.
fn a_launched_rank_trains_as_one_that_is_not() {
    need_gpu();
    need_nccl();
    let folder = folder_with_text();
    for precision in ["bf16", "mxfp8"] {
        let arguments = ["--device", "cuda", "--precision", precision];
        let name = |kind: &str| format!("{precision}-{kind}");
        let expected = train(folder.path(), &name("plain"), &[], &arguments).expect("a run");
        let launched = [&arguments[..], &["--launched"]].concat();
        let got = train(folder.path(), &name("launched"), &alone("29610"), &launched);
        assert_eq!(got, Ok(expected), "{precision}");
        // And goes on where it has ended.
        let longer = [&launched[..], &["--resume", "--accept-changes", "--steps", "8"]].concat();
        let got = train(folder.path(), &name("launched"), &alone("29612"), &longer).expect("a run");
        assert_eq!(got.len(), 8, "{precision}");
    }
}

trial!(gpus_that_are_not_there_are_refused);
fn gpus_that_are_not_there_are_refused() {
    need_gpu();
    let folder = folder_with_text();
    let count = deepwell_probe::probe().gpus.len();
    let devices: Vec<String> = (0..=count).map(|index| format!("cuda:{index}")).collect();
    let arguments = ["--devices", &devices.join(",")];
    let error = train(folder.path(), "out", &[], &arguments).expect_err("one GPU too many");
    let expected = format!("error: device: expected a GPU for `cuda:{count}`");
    assert!(error.starts_with(&expected), "{error}");
}

/// Skips the test where there are fewer than two GPUs.
fn need_two_gpus() {
    need_gpu();
    need_nccl();
    if deepwell_probe::gpu_memory_used_bytes(1).is_none() {
        skip("there is one GPU of 2, or one that this process may see");
    }
}

trial!(two_gpus_train_as_one_does);
/// Each rank has two sequences of four. Two summands have one order, so that sharing the optimizer
/// state and running again change no bit; the gradients of an embedding's rows are summed in
/// another order than by one GPU.
fn two_gpus_train_as_one_does() {
    need_two_gpus();
    let folder = folder_with_text();
    for precision in ["bf16", "mxfp8"] {
        let run = |name: &str, arguments: &[&str]| {
            let arguments = [arguments, &["--precision", precision]].concat();
            train(folder.path(), &format!("{precision}-{name}"), &[], &arguments).expect("a run")
        };
        let devices = ["--devices", "cuda:0,cuda:1"];
        let one = run("one", &["--device", "cuda:0"]);
        let two = run("two", &devices);
        assert_eq!(run("again", &devices), two, "{precision}: the same bits");
        let shared = run("shared", &[&devices[..], &["--zero", "1"]].concat());
        assert_eq!(shared, two, "{precision}: ZeRO 1 changes no bit");
        assert_eq!(one.len(), two.len());
        for ((step, a), (_, b)) in two.iter().zip(&one) {
            let (a, b) = (f64::from_bits(*a), f64::from_bits(*b));
            // Six steps from the same weights: rounding alone, which BF16 weights make larger.
            assert!((a - b).abs() < 1e-3 * b, "{precision}, step {step}: {a} against {b}");
        }
    }
}

trial!(a_rank_that_fails_ends_its_run);
/// One of two ranks names another seed: the run is refused, with one message.
fn a_rank_that_fails_ends_its_run() {
    need_two_gpus();
    let folder = folder_with_text();
    let start = |rank: &'static str, seed: &'static str| {
        let folder = folder.path().to_path_buf();
        std::thread::spawn(move || {
            let variables = [
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", "2"),
                ("LOCAL_WORLD_SIZE", "2"),
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", "29620"),
            ];
            let arguments = ["--launched", "--device", "cuda", "--seed", seed];
            train(&folder, "out", &variables, &arguments).expect_err("two runs")
        })
    };
    let (first, second) = (start("0", "1"), start("1", "2"));
    let (first, second) = (first.join().expect("rank 0"), second.join().expect("rank 1"));
    assert!(first.contains("expected the same on all ranks"), "{first}");
    assert!(!second.contains("error:"), "{second}");
}

fn main() -> ExitCode {
    deepwell_trials::run()
}
