//! The memory and the time that a search counts for a plan of the trainer, beside those of its
//! lowered programs.

mod bounds;
mod draws;

use deepwell_ir::capture::ModelConfig;
use deepwell_ir::{MemoryKind, Program};
use deepwell_plan::{
    ModelShape, OptimizerSpec, PlanRequest, ProgramBytes, ProgramMemory, arena_bytes_with_fallback,
    lower, lower_fallback,
};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::Hardware;
use deepwell_trainer::Device;

use draws::{Draws, count, graph, strategy};

/// By how many megabytes the parts that are counted exceed those of a program.
fn parts(counted: &ProgramBytes, program: &Program) -> String {
    let own = |kind| program.values_of(kind).map(|value| value.range.bytes).sum::<usize>();
    let rows = [
        ("optimizer", counted.optimizer, own(MemoryKind::Optimizer)),
        ("gradients", counted.gradients, own(MemoryKind::Gradients)),
        ("weights", counted.weights, own(MemoryKind::Weights)),
        ("transient", counted.transient, program.arena.transient_bytes()),
        ("backend", counted.backend, program.fixed_overhead_bytes),
    ];
    let row = |(name, counted, own): (&str, u64, usize)| {
        format!("{name} {:+.1}", (counted as f64 - own as f64) / 1e6)
    };
    rows.map(row).join(", ") + " MB, else room for fallbacks"
}

/// Draws strategies of a model, and compares a stage of each with its lowered program. Returns how
/// many were lowered and what differs by more than `tolerance`.
fn compare(
    model: &str,
    gpus: &str,
    seq: usize,
    draws: (u64, usize),
    tolerance: f64,
) -> (usize, Vec<String>) {
    let (hardware, device) = (Hardware::preset(gpus).unwrap(), Device::Cuda(0));
    let target = device.target(&hardware).unwrap();
    let precision = if gpus.starts_with('h') { "mxfp8-128" } else { "mxfp8" };
    let request = PlanRequest {
        seq,
        global_batch: 1,
        policy: PrecisionPolicy::preset(precision).unwrap(),
        optimizer: OptimizerSpec::default(),
        memory_limit_bytes: None,
        micro_batch: None,
        recompute: None,
    };
    let config = ModelConfig::preset(model).unwrap();
    let shape = ModelShape::of(model, &config).unwrap();
    let (graph, catalog) = (graph(model, seq), device.catalog());
    let targets = [target.clone(), device.among_ranks(target)];
    let memory = ProgramMemory::new(&graph, &request, catalog.as_ref(), targets);
    let (mut found, mut lowered, mut random) = (Vec::new(), 0, Draws(draws.0));
    for _ in 0..draws.1 {
        let at = strategy(&mut random, &shape);
        let plan = memory.plan_of(&shape, &at).unwrap();
        let stage = (random.next() % at.pp as u64) as usize;
        let rank = stage * at.gpus() / at.pp;
        let target = if at.gpus() == 1 { &memory.alone } else { &memory.among_ranks };
        let target = target.clone().as_rank(plan.parallel.ranks(rank));
        let counted =
            memory.of_strategy(&shape, &at, u64::MAX).map(|counted| counted.expect("no limit"));
        let program = lower(&graph, &plan, catalog.as_ref(), &target);
        let (program, counted) = match (program, counted) {
            (Ok(program), Ok(counted)) => (program, counted),
            (Err(_), Err(_)) => continue,
            (program, counted) => {
                found.push(format!(
                    "{model} {at}, stage {stage}: {:?}, counted {:?}",
                    program.err(),
                    counted.err()
                ));
                continue;
            }
        };
        lowered += 1;
        let fallback = lower_fallback(&graph, &plan, &program, catalog.as_ref(), &target).unwrap();
        let exact =
            arena_bytes_with_fallback(&program, fallback.as_ref()) + program.fixed_overhead_bytes;
        let ratio = counted[stage].peak() as f64 / exact as f64;
        if (ratio - 1.0).abs() > tolerance {
            let gb = |bytes: u64| bytes as f64 / 1e9;
            found.push(format!(
                "{model} {gpus} {at}, stage {stage}: {:.3} GB, lowered {:.3} ({:+.2} %): {}",
                gb(counted[stage].peak()),
                gb(exact as u64),
                100.0 * (ratio - 1.0),
                parts(&counted[stage], &program)
            ));
        }
    }
    (lowered, found)
}

/// Search and lowered programs disagreed by up to 90 %. By few layers most are within 1 %.
/// What outlives a step is counted exactly in all draws. The allowance of one draw in ten is for
/// room for GEMMs that fall back to BF16, and for what lives within a step of interleaved
/// schedules, of which two chunks are lowered. The plan that a search takes is lowered whole, and
/// its page shows both numbers.
#[test]
fn search_counts_what_lowered_programs_need() {
    let models = [
        ("llama-134m", "h100-x8", 1024),
        ("qwen3-0.6b", "b200-x8", 2048),
        ("llama-1.1b", "h200-x8", 2048),
        ("moe-1b-a300m", "b200-x8", 2048),
        ("gpt2", "h100-x8", 1024),
        ("deepseek-micro", "h100-x8", 128),
    ];
    let (mut lowered, mut found) = (0, Vec::new());
    for (index, (model, gpus, seq)) in models.into_iter().enumerate() {
        let draws = (index as u64, count(models.len()));
        let (of_model, wrong) = compare(model, gpus, seq, draws, 0.01);
        lowered += of_model;
        found.extend(wrong);
    }
    println!("{} of {lowered} differ by more than 1 %:\n{}", found.len(), found.join("\n"));
    assert!(lowered >= 24 && found.len() * 10 <= lowered, "{} of {lowered}", found.len());
    assert!(!found.iter().any(|one| one.contains("counted")), "a plan lowers in one way alone");
}
