//! The memory and the time that a search counts for a plan of the trainer, beside those of its
//! lowered programs.

mod bounds;
mod draws;

use deepwell_ir::capture::ModelConfig;
use deepwell_ir::{MemoryKind, Program};
use deepwell_plan::{
    KnownKernels, ModelShape, OptimizerSpec, PlanRequest, ProgramBytes, ProgramMemory, Strategy,
    arena_bytes_with_fallback, lower, lower_fallback,
};
use deepwell_precision::{Format, PrecisionPolicy};
use deepwell_probe::Hardware;
use deepwell_trainer::Device;

use draws::{Draws, count, graph, strategy};

/// Kinds of memory, each as counted and as in a program.
fn parts(counted: &ProgramBytes, program: &Program) -> [(&'static str, u64, u64); 5] {
    let own = |kind| program.values_of(kind).map(|value| value.range.bytes as u64).sum::<u64>();
    [
        ("optimizer", counted.optimizer, own(MemoryKind::Optimizer)),
        ("gradients", counted.gradients, own(MemoryKind::Gradients)),
        ("weights", counted.weights, own(MemoryKind::Weights)),
        ("transient", counted.transient, program.arena.transient_bytes() as u64),
        ("backend", counted.backend, program.fixed_overhead_bytes as u64),
    ]
}

/// A model on GPUs, and a rule of its policy.
struct Case {
    model: &'static str,
    gpus: &'static str,
    seq: usize,
    /// Tensors in BF16.
    in_bf16: Option<&'static str>,
}

/// The largest relative difference of a strategy's memory from that of its lowered program.
///
/// After an update, ranks of ZeRO-2 gather all weights, overlapped with quantization. How far
/// gathers run ahead of it grows with the first layers and not evenly, so the copies of a model of
/// which only a few layers are lowered differ: by 5.3 % at most in 304 draws.
fn allowance(at: &Strategy, is_whole: bool) -> f64 {
    if at.zero == 2 && !is_whole { 0.06 } else { 0.01 }
}

/// Strategies of a model drawn at random, each with a stage.
fn drawn(case: &Case, seed: usize, count: usize) -> Vec<(Strategy, usize)> {
    let shape = shape(case.model);
    let mut random = Draws(seed as u64);
    let one = |_| {
        let at = strategy(&mut random, &shape);
        (at, (random.next() % at.pp as u64) as usize)
    };
    (0..count).map(one).collect()
}

fn shape(model: &str) -> ModelShape {
    ModelShape::of(model, &ModelConfig::preset(model).unwrap()).unwrap()
}

/// Compares a stage of each strategy with its lowered program. Returns how many were lowered, and
/// those with a larger difference than allowed.
fn compare(case: &Case, strategies: &[(Strategy, usize)]) -> (usize, Vec<String>) {
    let Case { model, gpus, seq, in_bf16 } = *case;
    let (hardware, device) = (Hardware::preset(gpus).unwrap(), Device::Cuda(0));
    let target = device.target(&hardware).unwrap();
    let precision = if gpus.starts_with('h') { "mxfp8-128" } else { "mxfp8" };
    let policy = PrecisionPolicy::preset(precision).unwrap();
    let policy = in_bf16
        .iter()
        .fold(policy, |policy, tensors| policy.with_rule(tensors, Format::Bf16).unwrap());
    let request = PlanRequest {
        seq,
        global_batch: 1,
        policy,
        optimizer: OptimizerSpec::default(),
        memory_limit_bytes: None,
        micro_batch: None,
        recompute: None,
        saved_activations: Default::default(),
    };
    let (shape, graph) = (shape(model), graph(model, seq));
    let catalog = KnownKernels::new(device.catalog());
    let targets = [target.clone(), device.among_ranks(target)];
    let memory = ProgramMemory::new(&graph, &request, &catalog, targets);
    // All layers of smaller models are lowered.
    let is_whole = shape.parameters() < 2e9;
    let (mut found, mut lowered) = (Vec::new(), 0);
    for &(at, stage) in strategies {
        let plan = memory.plan_of(&shape, &at).unwrap();
        let rank = stage * at.gpus() / at.pp;
        let target = if at.gpus() == 1 { &memory.alone } else { &memory.among_ranks };
        let target = target.clone().as_rank(plan.parallel.ranks(rank));
        let counted =
            memory.of_strategy(&shape, &at, u64::MAX).map(|counted| counted.expect("no limit"));
        let program = lower(&graph, &plan, &catalog, &target);
        let (program, counted) = match (program, counted) {
            (Ok(program), Ok(counted)) => (program, counted),
            (Err(_), Err(_)) => continue,
            (program, counted) => {
                let (lowered, counted) = (program.err(), counted.err());
                found
                    .push(format!("{model} {at}, stage {stage}: {lowered:?}, counted {counted:?}"));
                continue;
            }
        };
        lowered += 1;
        let fallback = lower_fallback(&graph, &plan, &program, &catalog, &target).unwrap();
        let exact =
            arena_bytes_with_fallback(&program, fallback.as_ref()) + program.fixed_overhead_bytes;
        let difference = |counted: u64, own: u64| counted as f64 / own.max(1) as f64 - 1.0;
        let of_peak = difference(counted[stage].peak(), exact as u64);
        let parts = parts(&counted[stage], &program);
        // Alignment to 256 bytes is not in `own`.
        let outlives = parts[..3].iter().all(|&(_, counted, own)| {
            counted.abs_diff(own) < (1 << 20) || difference(counted, own).abs() < 0.001
        });
        if of_peak.abs() > allowance(&at, is_whole) || !outlives {
            let gb = |bytes: u64| bytes as f64 / 1e9;
            found.push(format!(
                "{model} {gpus} {at}, stage {stage}: {:.3} GB, lowered {:.3} ({:+.2} %): {parts:?}",
                gb(counted[stage].peak()),
                gb(exact as u64),
                100.0 * of_peak,
            ));
        }
    }
    (lowered, found)
}

/// Compares `draws` of each case, one thread a case. Returns how many were lowered.
fn check(cases: &[Case], draws: usize) -> usize {
    let results: Vec<(usize, Vec<String>)> = std::thread::scope(|scope| {
        let one = |(seed, case)| scope.spawn(move || compare(case, &drawn(case, seed, draws)));
        let threads: Vec<_> = cases.iter().enumerate().map(one).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let found: Vec<&String> = results.iter().flat_map(|(_, found)| found).collect();
    assert!(found.is_empty(), "{found:#?}");
    results.iter().map(|(lowered, _)| lowered).sum()
}

/// Search and lowered programs disagreed by up to 90 %, then by up to 14 % for interleaved chunks
/// and 10 % for layers that do not fill a bucket of gradients.
#[test]
fn search_counts_what_lowered_programs_need() {
    let case = |(model, gpus, seq)| Case { model, gpus, seq, in_bf16: None };
    let cases = [
        ("llama-134m", "h100-x8", 1024),
        ("qwen3-0.6b", "b200-x8", 2048),
        ("llama-1.1b", "h200-x8", 2048),
        ("moe-1b-a300m", "b200-x8", 2048),
        ("llama-3-8b", "h100-x8", 2048),
        ("mixtral-8x7b", "b200-x8", 2048),
        ("gpt2", "h100-x8", 1024),
        ("deepseek-micro", "h100-x8", 128),
    ];
    let cases = cases.map(case);
    let draws = count(cases.len());
    let lowered = check(&cases, draws);
    println!("{lowered} of {} draws lowered", draws * cases.len());
    assert!(lowered * 2 > draws * cases.len(), "{lowered}");
}

/// Regression: layers of several formats were extrapolated as if all were like the first.
#[test]
fn layers_in_other_formats_are_counted() {
    let at = Strategy { dp: 2, zero: 1, micro_batch: 8, micro_batches: 2, ..Strategy::SINGLE };
    for in_bf16 in ["*layers.{1?,2?,3?}.*", "*layers.?.*"] {
        let (model, gpus) = ("llama-3-8b", "h100-x8");
        let case = Case { model, gpus, seq: 2048, in_bf16: Some(in_bf16) };
        assert_eq!(compare(&case, &[(at, 0)]), (1, Vec::new()), "{in_bf16}");
    }
}
