//! Ranks on emulated GPUs: the programs and kernels of several GPUs, with the exchanges of threads
//! in the place of NCCL. Where the kernels were not compiled a test is reported as ignored.

#[macro_use]
extern crate deepwell_trials;

mod gradients;
mod kernels_needed;
mod layouts;
mod rank_faults;
mod ranks;
mod shard_slices;

use std::process::ExitCode;
use std::time::Duration;

use deepwell_ir::capture::{Gpt2Config, LlamaConfig, ModelConfig};
use deepwell_ir::ops::CollectiveKind;
use deepwell_ir::{DType, Graph, ProcessGroup};
use deepwell_kernels::cuda::Architecture;
use deepwell_kernels::{Comm, Exchange, InProcess};
use deepwell_moe::{RouterTraining, with_router_training};
use deepwell_plan::schedule::PipelineSchedule;
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::{CompileOptions, Device, Devices, Engine, Parallel, StepOutcome, World};

use crate::gradients::{BF16, MXFP8, assert_gradients, assert_outcome, gradients};
use crate::kernels_needed::need_kernels;
use crate::rank_faults::{Tampered, relative_norm};
use crate::ranks::reference::{Bits, CLIP, Case, LEARNING_RATE, SEED, batch};
use crate::shard_slices::{masters, slices};

/// How long a rank waits for another; longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Trains the micro model on the ranks that `devices` names, with `sequences` in all, each a
/// micro-batch, and gives what each has; moments are left out.
fn bits_of_ranks(
    devices: &str,
    parallel: Parallel,
    precision: &str,
    sequences: usize,
    steps: usize,
) -> Vec<Bits> {
    let seq = 32;
    let Devices { device, .. } = devices.parse().expect("devices");
    let policy = PrecisionPolicy::preset(precision).expect("a preset");
    let options = CompileOptions {
        micro_batch: Some(1),
        device,
        parallel,
        ..CompileOptions::new(policy, seq, sequences)
    };
    let graph = ranks::graph();
    let mut world = World::compile(graph, ranks::hardware(), &options).expect("it compiles");
    let train = |engine: &mut Engine| {
        engine.initialize(SEED)?;
        let mut bits = Bits { steps: Vec::new(), masters: Vec::new(), moments: Vec::new() };
        for step in 0..steps {
            let (inputs, targets) = batch(step, sequences, seq);
            let (rate, clip) = (f64::from(LEARNING_RATE), f64::from(CLIP));
            let outcome = engine.step(&inputs, &targets, rate, clip)?;
            bits.steps.push([outcome.loss.to_bits(), outcome.grad_norm.to_bits()]);
        }
        for master in ranks::masters_of(engine.program()) {
            let mut values = vec![0u32; engine.program().value(master).elements()];
            engine.read_value(master, bytemuck::cast_slice_mut(&mut values))?;
            bits.masters.extend(values);
        }
        Ok(bits)
    };
    world.on_all(train).expect("steps")
}

trial!(ranks_on_emulated_gpus_train_as_one_does);
/// Two ranks give the bits of one that runs the parts of both and adds them up in their order.
fn ranks_on_emulated_gpus_train_as_one_does() {
    need_kernels((9, 0));
    let (device, seq, steps) = (Device::Emulated(Architecture::Sm90a), 32, 2);
    // With three micro-batches there is one between the first, which overwrites, and the last, in
    // which gradients are summed.
    for (precision, rows, zero) in
        layouts::rows(&[("bf16", 3, 1), ("mxfp8", 1, 0)], &[("bf16", 3, 0), ("mxfp8", 1, 1)])
    {
        let one = Case { device, precision, seq, parts: 2, rows, steps }.run();
        let parallel = Parallel { zero, ..Parallel::data(2) };
        let two = bits_of_ranks("emulated:sm90:2", parallel, precision, 2 * rows, steps);
        assert_eq!(two.len(), 2);
        for (rank, bits) in two.iter().enumerate() {
            let what = format!("{precision}, {rows} rows, ZeRO {zero}, rank {rank}");
            assert_eq!(bits.steps, one.steps, "{what}: loss and norm");
            assert!(bits.masters == one.masters, "{what}: masters");
        }
    }
}

/// What goes wrong between ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// Gradients are each rank's own alone.
    NoSum,
    /// Gathered masters are the first rank's, in each slice.
    MastersOfFirst,
    /// Rows do not go to the rank that has their experts.
    RowsStay,
    /// Which experts rows want does not.
    ChoicesStay,
    /// What experts of another rank give tokens does not come back.
    NotReturned,
    /// Keys and values that go around a ring are lost, or their gradients are.
    RingLoses(DType),
}

impl Fault {
    /// What it does to the result of an exchange.
    fn tamper(self, rank: u32, exchange: &Exchange, input: &[u8], output: &mut [u8]) {
        let is_data = exchange.group.name == ProcessGroup::DATA;
        let is_expert = exchange.group.name == ProcessGroup::EXPERT;
        match (self, &exchange.kind) {
            (Fault::NoSum, CollectiveKind::ReduceScatter { .. }) if is_data => {
                rank_faults::own_part(rank, exchange, input, output);
            }
            (Fault::MastersOfFirst, CollectiveKind::AllGather) if is_data && input.len() > 1024 => {
                rank_faults::first_for_all(input, output);
            }
            (Fault::RingLoses(what), CollectiveKind::Shift { .. }) if exchange.dtype == what => {
                output.fill(0);
            }
            (Fault::RowsStay, CollectiveKind::AllToAll) if exchange.dtype == DType::Bf16 => {
                output.copy_from_slice(input);
            }
            (Fault::ChoicesStay, CollectiveKind::AllToAll) if exchange.dtype == DType::I32 => {
                output.copy_from_slice(input);
            }
            (Fault::RowsStay, CollectiveKind::AllGather)
                if is_expert && exchange.dtype == DType::Bf16 =>
            {
                rank_faults::own_for_all(input, output);
            }
            (Fault::NotReturned, CollectiveKind::ReduceScatter { .. })
                if is_expert && exchange.dtype == DType::Bf16 =>
            {
                rank_faults::own_part(rank, exchange, input, output);
            }
            _ => {}
        }
    }

    /// The exchanges of a rank, with what goes wrong.
    fn wrap(self) -> impl Fn(InProcess) -> Box<dyn Comm> {
        move |comm| {
            Tampered::wrap(
                comm,
                move |rank, exchange: &Exchange, input: &[u8], output: &mut [u8]| {
                    self.tamper(rank, exchange, input, output);
                },
            )
        }
    }
}

/// Trains the micro model with ZeRO 2 or 3, `rows` sequences for each rank, one a micro-batch: loss
/// and norm of each step, and whole masters after the last.
fn with_slices(precision: &str, zero: u8, (ranks, rows): (usize, usize), fault: Fault) -> Bits {
    let (seq, steps) = (32, 2);
    let options = CompileOptions {
        micro_batch: Some(1),
        device: Device::Emulated(Architecture::Sm90a),
        parallel: Parallel { zero, ..Parallel::data(ranks) },
        ..CompileOptions::new(PrecisionPolicy::preset(precision).unwrap(), seq, ranks * rows)
    };
    let comms = InProcess::world(ranks as u32, PATIENCE);
    let mut world =
        World::compile_on(comms, &fault.wrap(), ranks::graph(), ranks::hardware(), &options)
            .unwrap();
    let program = world.first().program().clone();
    let ends = world.on_all(|engine| {
        engine.initialize(SEED)?;
        let mut outcomes = Vec::new();
        for step in 0..steps {
            let (inputs, targets) = batch(step, ranks * rows, seq);
            let (rate, clip) = (f64::from(LEARNING_RATE), f64::from(CLIP));
            let outcome = engine.step(&inputs, &targets, rate, clip)?;
            outcomes.push([outcome.loss.to_bits(), outcome.grad_norm.to_bits()]);
        }
        Ok((outcomes, slices(engine)?))
    });
    let (outcomes, of_ranks): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
    let are_equal = outcomes.iter().all(|of| *of == outcomes[0]);
    assert!(fault != Fault::None || are_equal, "ranks saw other losses");
    Bits { steps: outcomes[0].clone(), masters: masters(&program, &of_ranks), moments: Vec::new() }
}

trial!(slices_of_gradients_and_weights_train_as_whole_ones_do);
/// ZeRO 2 and 3 give the bits of one rank that runs the parts of both. With two micro-batches a
/// gradient is summed over the ranks first, as the reference then sums; three ranks fill the last
/// slice of a bucket up.
fn slices_of_gradients_and_weights_train_as_whole_ones_do() {
    need_kernels((9, 0));
    let covering = [("mxfp8", 2, 1, 3), ("bf16", 3, 2, 2)];
    let others = [("mxfp8", 2, 1, 2), ("bf16", 3, 2, 3)];
    for (precision, ranks, rows, zero) in layouts::rows(&covering, &others) {
        let (device, seq, steps) = (Device::Emulated(Architecture::Sm90a), 32, 2);
        let case = Case { device, precision, seq, parts: ranks, rows, steps };
        let one = if rows == 1 { case.run() } else { case.run_by_micro_batch() };
        let what = format!("ZeRO {zero}, {precision}, {ranks} ranks, {rows} rows");
        let two = with_slices(precision, zero, (ranks, rows), Fault::None);
        for (got, expected) in two.steps.iter().zip(&one.steps) {
            assert_eq!(got[1], expected[1], "{what}: norm");
            let [loss, expected] = [got[0], expected[0]].map(f32::from_bits);
            // With several micro-batches a loss is rounded in each, and sums of them are.
            let parts = if rows == 1 { 0 } else { ranks * rows };
            let bound = parts as f32 * f32::EPSILON * expected;
            assert!((loss - expected).abs() <= bound, "{what}: {loss} beside {expected}");
        }
        assert!(two.masters == one.masters, "{what}: masters");
    }
}

trial!(quantized_weights_train_as_those_of_whole_masters_do);
/// Data and scales that are gathered give the bits of weights that each rank quantizes whole.
fn quantized_weights_train_as_those_of_whole_masters_do() {
    need_kernels((9, 0));
    let steps = |zero: u8| {
        let parallel = Parallel { zero, ..Parallel::data(2) };
        let policy = PrecisionPolicy::mxfp8();
        let ends = steps_of_ranks("emulated:sm90:2", llama(), parallel, &policy, (Fault::None, 2));
        let of_rank = |(steps, _): &StepsAndGradients| -> Vec<[u32; 2]> {
            steps.iter().map(|it| [it.loss, it.grad_norm].map(f32::to_bits)).collect()
        };
        ends.iter().map(of_rank).collect::<Vec<_>>()
    };
    let expected = steps(0);
    for zero in layouts::rows(&[3], &[2]) {
        assert_eq!(steps(zero), expected, "ZeRO {zero}");
    }
}

trial!(faults_between_emulated_gpus_are_seen);
fn faults_between_emulated_gpus_are_seen() {
    need_kernels((9, 0));
    for zero in layouts::rows(&[3], &[2]) {
        let sound = with_slices("bf16", zero, (2, 2), Fault::None);
        for fault in [Fault::NoSum, Fault::MastersOfFirst] {
            let got = with_slices("bf16", zero, (2, 2), fault);
            assert!(got.steps != sound.steps, "ZeRO {zero}, {fault:?}: the same losses");
        }
    }
}

trial!(stages_on_emulated_gpus_train_as_one_does);
/// Two stages give the bits of one rank, each of what it has, by each schedule.
fn stages_on_emulated_gpus_train_as_one_does() {
    use PipelineSchedule::{OneFOneB, ZbH1};
    let covering =
        [("emulated:sm90", (9, 0), "mxfp8", OneFOneB), ("emulated:sm100", (10, 0), "bf16", ZbH1)];
    let others =
        [("emulated:sm90", (9, 0), "bf16", OneFOneB), ("emulated:sm90", (9, 0), "mxfp8", ZbH1)];
    for (device, version, precision, schedule) in layouts::rows(&covering, &others) {
        need_kernels(version);
        let one = bits_of_ranks(device, Parallel::data(1), precision, 2, 2);
        let what = format!("{device}, {precision}, {schedule}");
        let stages = Parallel { pipeline: 2, schedule, ..Parallel::data(1) };
        let two = bits_of_ranks(&format!("{device}:2"), stages, precision, 2, 2);
        assert!(two.iter().all(|rank| rank.steps == one[0].steps), "{what}: loss and norm");
        let masters: Vec<u32> = two.iter().flat_map(|rank| rank.masters.clone()).collect();
        assert!(masters == one[0].masters, "{what}: masters");
    }
}

trial!(stages_of_ranks_with_slices_train_as_one_does);
/// Two stages of two ranks that have slices of the optimizer state: with several micro-batches in
/// flight the slices of the sums have one place.
fn stages_of_ranks_with_slices_train_as_one_does() {
    need_kernels((9, 0));
    let (device, precision) = (Device::Emulated(Architecture::Sm90a), "bf16");
    let one = Case { device, precision, seq: 32, parts: 2, rows: 2, steps: 2 }.run();
    let parallel = Parallel { zero: 1, pipeline: 2, ..Parallel::data(2) };
    for rank in bits_of_ranks("emulated:sm90:4", parallel, precision, 4, 2) {
        let norms = |steps: &[[u32; 2]]| steps.iter().map(|it| it[1]).collect::<Vec<_>>();
        assert_eq!(rank.steps[0][0], one.steps[0][0], "loss before any update");
        assert_eq!(norms(&rank.steps), norms(&one.steps), "norm");
        assert_eq!(rank.steps[1][0], one.steps[1][0], "loss behind an update");
    }
}

/// A Llama of two layers that two ranks can split, and the size of its vocabulary.
fn llama() -> (Graph, usize) {
    let config = LlamaConfig {
        hidden_size: 128,
        intermediate_size: 256,
        num_layers: 2,
        num_heads: 2,
        num_kv_heads: 2,
        head_dim: 64,
        ..LlamaConfig::preset("llama-micro").expect("a preset")
    };
    model(config)
}

/// The model and the size of its vocabulary.
fn model(config: impl Into<ModelConfig>) -> (Graph, usize) {
    let config = config.into();
    (config.capture(Some(128)).expect("the model can be captured"), config.vocab_size())
}

/// The outcomes of a rank's steps, and the gradients of the first one by name.
type StepsAndGradients = (Vec<StepOutcome>, Vec<(String, Vec<f32>)>);

/// Steps of ranks that split each layer, or have some of the experts each, for each rank.
fn steps_of_ranks(
    devices: &str,
    (graph, vocabulary): (Graph, usize),
    parallel: Parallel,
    policy: &PrecisionPolicy,
    (fault, steps): (Fault, usize),
) -> Vec<StepsAndGradients> {
    const ROWS: usize = 2;
    let Devices { device, .. } = devices.parse().expect("devices");
    let options = CompileOptions {
        micro_batch: Some(1),
        device,
        parallel,
        ..CompileOptions::new(policy.clone(), 32, ROWS)
    };
    let comms = InProcess::world(parallel.world_size() as u32, PATIENCE);
    let mut world =
        World::compile_on(comms, &fault.wrap(), graph, ranks::hardware(), &options).unwrap();
    let train = |engine: &mut Engine| {
        engine.initialize(SEED)?;
        let (mut outcomes, mut of_first) = (Vec::new(), Vec::new());
        for step in 0..steps {
            let (mut inputs, mut targets) = batch(step, ROWS, 32);
            let within = |token: &mut i32| *token = (*token).min(vocabulary as i32 - 1);
            inputs.iter_mut().chain(&mut targets).for_each(within);
            outcomes.push(engine.step(&inputs, &targets, 1e-3, 1.0)?);
            if step == 0 {
                of_first = gradients(engine);
            }
        }
        Ok((outcomes, of_first))
    };
    world.on_all(train).expect("steps")
}

/// Compares ranks on emulated GPUs with the same ranks on the CPU.
fn check_ranks(model: &(Graph, usize), parallel: Parallel, policy: &PrecisionPolicy) {
    let is_bf16 = policy.format() == PrecisionPolicy::bf16().format();
    let tolerances = if is_bf16 { BF16 } else { MXFP8 };
    let on = |device: &str| {
        let devices = format!("{device}:{}", parallel.world_size());
        steps_of_ranks(&devices, model.clone(), parallel, policy, (Fault::None, 2))
    };
    let (got, expected) = (on("emulated:sm90"), on("cpu"));
    for (rank, (got, expected)) in got.iter().zip(&expected).enumerate() {
        let what = format!("{parallel}, {:?}, rank {rank}", policy.format());
        for (got, expected) in got.0.iter().zip(&expected.0) {
            assert_outcome(&what, got, expected, tolerances);
        }
        assert_gradients(&what, &got.1, &expected.1, tolerances);
    }
}

trial!(tensor_ranks_on_emulated_gpus_train_as_on_the_cpu);
/// Slices of layers, of the embedding and of the head, alone and in two stages.
fn tensor_ranks_on_emulated_gpus_train_as_on_the_cpu() {
    need_kernels((9, 0));
    let split = Parallel { tensor: 2, ..Parallel::data(1) };
    let staged = Parallel { pipeline: 2, ..split };
    for (parallel, precision) in
        layouts::rows(&[(split, "mxfp8"), (staged, "bf16")], &[(split, "bf16")])
    {
        check_ranks(&llama(), parallel, &PrecisionPolicy::preset(precision).unwrap());
    }
}

trial!(tensor_ranks_of_models_with_biases_train_as_on_the_cpu);
/// A GPT-2: its biases are added once, and each rank adds the positions of its own tokens.
fn tensor_ranks_of_models_with_biases_train_as_on_the_cpu() {
    need_kernels((9, 0));
    let preset = Gpt2Config::preset("gpt2-micro").expect("a preset");
    let gpt2 = model(Gpt2Config { intermediate_size: 128, ..preset });
    let split = Parallel { tensor: 2, ..Parallel::data(1) };
    for precision in layouts::rows(&["mxfp8"], &["bf16"]) {
        check_ranks(&gpt2, split, &PrecisionPolicy::preset(precision).unwrap());
    }
}

trial!(rings_on_emulated_gpus_train_as_on_the_cpu);
/// Ranks that have a part of each sequence, of two and of four: also keys of earlier and of later
/// places in one ring. One rank with whole sequences gives the same but for roundings.
fn rings_on_emulated_gpus_train_as_on_the_cpu() {
    need_kernels((9, 0));
    let ring = |context| Parallel { context, ..Parallel::data(context) };
    let bf16 = PrecisionPolicy::bf16();
    let mixed = Parallel { tensor: 2, zero: 1, ..ring(2) };
    for (parallel, precision) in
        layouts::rows(&[(ring(2), "mxfp8"), (mixed, "bf16")], &[(ring(2), "bf16")])
    {
        check_ranks(&llama(), parallel, &PrecisionPolicy::preset(precision).unwrap());
    }
    let of = |parallel: Parallel, fault, steps| {
        let devices = format!("emulated:sm90:{}", parallel.world_size());
        steps_of_ranks(&devices, llama(), parallel, &bf16, (fault, steps))
    };
    let alone = of(Parallel::data(1), Fault::None, 2);
    for context in layouts::rows(&[4], &[2]) {
        for rank in of(ring(context), Fault::None, 2) {
            for (got, expected) in rank.0.iter().zip(&alone[0].0) {
                assert_outcome(&format!("a ring of {context}"), got, expected, BF16);
            }
        }
    }
    // What is lost on the way is beyond the tolerances by far.
    for what in [DType::Bf16, DType::F32] {
        let lossy = of(ring(2), Fault::RingLoses(what), 1);
        let [got, expected] = [&lossy, &alone].map(|of| f64::from(of[0].0[0].grad_norm));
        let distance = (got - expected).abs() / expected;
        assert!(distance > 10.0 * BF16.grad_norm, "{what} lost: norms {got} and {expected}");
    }
}

/// A mixture of four experts with the losses of routers and perhaps a limit that drops pairs. A
/// token visits all experts: scores that nearly tie would send it to another on one of the devices.
fn mixture(capacity_factor: Option<f64>) -> (Graph, usize) {
    // Heads that two ranks can split.
    let preset = LlamaConfig::preset("moe-micro").expect("a preset");
    let mut config = LlamaConfig { num_heads: 2, num_kv_heads: 2, ..preset };
    let experts = config.experts.as_mut().expect("it is a mixture");
    (experts.num_experts, experts.experts_per_token) = (4, 4);
    let (graph, vocabulary) = model(config);
    let training = RouterTraining { balance: 0.01, z: 0.001, capacity_factor };
    (with_router_training(&graph, &training).expect("it has routers"), vocabulary)
}

trial!(tensor_ranks_of_mixtures_train_as_on_the_cpu);
/// Routers with losses, of all tokens of a micro-batch.
fn tensor_ranks_of_mixtures_train_as_on_the_cpu() {
    need_kernels((9, 0));
    let split = Parallel { tensor: 2, ..Parallel::data(1) };
    check_ranks(&mixture(Some(0.75)), split, &PrecisionPolicy::bf16());
}

trial!(expert_ranks_on_emulated_gpus_train_as_on_the_cpu);
/// Tokens are gathered, and what experts give them is summed; with a limit rows go to the ranks
/// that have their experts, and come back.
fn expert_ranks_on_emulated_gpus_train_as_on_the_cpu() {
    need_kernels((9, 0));
    let experts = Parallel { expert: 2, ..Parallel::data(2) };
    for limit in [None, Some(0.75)] {
        let mixture = mixture(limit);
        let (covered, other) = if limit.is_some() { ("mxfp8", "bf16") } else { ("bf16", "mxfp8") };
        for precision in layouts::rows(&[covered], &[other]) {
            check_ranks(&mixture, experts, &PrecisionPolicy::preset(precision).unwrap());
        }
        // What goes wrong between them is beyond the tolerances by far.
        let gradients = |fault| {
            let (policy, devices) = (PrecisionPolicy::bf16(), "emulated:sm90:2");
            let mut ranks = steps_of_ranks(devices, mixture.clone(), experts, &policy, (fault, 1));
            ranks.swap_remove(0).1
        };
        let sound = gradients(Fault::None);
        let last = if limit.is_some() { Fault::ChoicesStay } else { Fault::NotReturned };
        for fault in [Fault::RowsStay, last] {
            let got = gradients(fault);
            let pairs = got.iter().zip(&sound);
            let distances = pairs.map(|(got, sound)| relative_norm(&got.1, &sound.1));
            let furthest = distances.fold(0.0, f64::max);
            assert!(furthest > 10.0 * BF16.gradients.distance, "{fault:?}: {furthest}");
        }
    }
}

fn main() -> ExitCode {
    deepwell_trials::run()
}
