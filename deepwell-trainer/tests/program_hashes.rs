//! Programs of models, devices and degrees of parallelism by their hashes: lowering gives the same
//! program each time.
//!
//! A change of lowering that must not change any program is checked with a file of hashes:
//! `DEEPWELL_PROGRAM_HASHES=FILE cargo test --workspace --test program_hashes` writes the file if
//! it is missing, and else compares every program with it. Make the file before the change.

use deepwell_ir::capture::ModelConfig;
use deepwell_ir::{Graph, KernelCatalog, Program, Recompute, Target};
use deepwell_moe::RouterTraining;
use deepwell_plan::schedule::PipelineSchedule;
use deepwell_plan::{Parallel, Plan, PlanError, lower, lower_evaluation, lower_fallback};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::Hardware;
use deepwell_trainer::{Device, with_routers};

/// Tokens per sequence.
const SEQ: usize = 256;

/// Device, hardware preset and policy preset.
const TARGETS: [(Device, &str, &str); 3] = [
    (Device::Cpu, "h200", "mxfp8"),
    (Device::Cuda(0), "h200", "mxfp8-128"),
    (Device::Cuda(0), "b200", "mxfp8"),
];

const MODELS: [&str; 4] = ["parity-3m", "gpt2-micro", "moe-tiny", "deepseek-micro"];

/// Degrees of parallelism, without ZeRO.
fn degrees(has_experts: bool) -> Vec<Parallel> {
    let of = |data, tensor, pipeline, chunks| Parallel {
        tensor,
        pipeline,
        chunks,
        ..Parallel::data(data)
    };
    let mut all = vec![of(1, 1, 1, 1), of(4, 1, 1, 1), of(2, 2, 1, 1), of(2, 1, 2, 1)];
    all.push(Parallel { context: 2, ..of(2, 1, 1, 1) });
    all.push(Parallel { schedule: PipelineSchedule::ZbH1, ..of(1, 2, 2, 1) });
    all.push(of(2, 1, 2, 2));
    if has_experts {
        all.push(Parallel { expert: 2, ..of(2, 1, 1, 1) });
        all.push(Parallel { expert: 2, ..of(2, 2, 2, 1) });
    }
    all
}

fn plan(
    graph: &Graph,
    (device, target): (Device, &Target),
    policy: &PrecisionPolicy,
    parallel: Parallel,
) -> Plan {
    let stages = match parallel.stages() {
        1 => Vec::new(),
        stages => {
            let layers = graph.nodes.iter().filter_map(|node| node.layer).max().unwrap_or(0) + 1;
            let layers = layers as usize;
            (0..stages).map(|at| (at + 1) * layers / stages - at * layers / stages).collect()
        }
    };
    Plan {
        model: graph.name.clone(),
        device: device.to_string(),
        arch: target.arch.clone(),
        seq: SEQ,
        micro_batch: 2,
        micro_batches: parallel.pipeline * 2,
        recompute: if parallel.tensor > 1 { Recompute::Full } else { Recompute::None },
        saved_activations: Default::default(),
        policy: policy.clone(),
        precision: Vec::new(),
        kernels: Vec::new(),
        optimizer: Default::default(),
        bucket_bytes: 4 << 20,
        capacity_factor: None,
        measures_products: false,
        one_stream: false,
        parallel,
        stages,
        tuned: Vec::new(),
    }
}

/// A line with the hash of a program, or its error.
fn line(name: &str, program: &Result<Program, PlanError>) -> String {
    match program {
        Ok(program) => {
            let json = serde_json::to_vec(program).unwrap();
            format!("{name}: {}", &blake3::hash(&json).to_hex()[..16])
        }
        Err(error) => format!("{name}: {}", error.to_string().replace('\n', " ")),
    }
}

/// The training programs of the last rank, and of the first if there is a pipeline; evaluation and
/// BF16 fallback without ZeRO and with its last stage.
fn lines_of_ranks(
    name: &str,
    graph: &Graph,
    plan: &Plan,
    catalog: &dyn KernelCatalog,
    target: &Target,
) -> Vec<String> {
    let mut lines = Vec::new();
    let first = (plan.parallel.pipeline > 1).then_some(0);
    for rank in first.into_iter().chain([plan.parallel.world_size() - 1]) {
        let name = format!("{name}, rank {rank}");
        let target = target.clone().as_rank(plan.parallel.ranks(rank));
        let program = lower(graph, plan, catalog, &target);
        lines.push(line(&name, &program));
        let Ok(program) = program else { continue };
        if !plan.parallel.zero.is_multiple_of(3) {
            continue;
        }
        let evaluation = lower_evaluation(graph, plan, &program, catalog, &target);
        lines.push(line(&format!("{name}, evaluation"), &evaluation));
        let fallback = lower_fallback(graph, plan, &program, catalog, &target).transpose();
        lines.extend(fallback.map(|fallback| line(&format!("{name}, fallback"), &fallback)));
    }
    lines
}

/// The lines of a model's programs on some devices, with some stages of ZeRO.
fn lines_of(model: &str, targets: &[(Device, &str, &str)], stages: &[u8]) -> Vec<String> {
    let graph = ModelConfig::preset(model).unwrap().capture(Some(SEQ)).unwrap();
    let graph = with_routers(&graph, &RouterTraining::default()).unwrap();
    let has_experts = model.contains("moe") || model.contains("deepseek");
    let mut lines = Vec::new();
    for &(device, hardware, policy) in targets {
        let target = device.target(&Hardware::preset(hardware).unwrap()).unwrap();
        let target = Target { workers: target.workers.max(2), ..target };
        let catalog = device.catalog();
        let policy = PrecisionPolicy::preset(policy).unwrap();
        for degrees in degrees(has_experts) {
            for &zero in stages.iter().filter(|&&zero| zero == 0 || degrees.data > 1) {
                let parallel = Parallel { zero, ..degrees };
                let target = match parallel.is_single() {
                    true => target.clone(),
                    false => device.among_ranks(target.clone()),
                };
                let plan = plan(&graph, (device, &target), &policy, parallel);
                let name = format!("{model} {} {parallel}", target.arch);
                lines.extend(lines_of_ranks(&name, &graph, &plan, &*catalog, &target));
            }
        }
    }
    lines
}

#[test]
fn lowering_gives_the_same_programs_each_time() {
    let Some(path) = std::env::var_os("DEEPWELL_PROGRAM_HASHES") else {
        let once = || lines_of("moe-micro", &TARGETS[1..2], &[0, 3]);
        assert_eq!(once(), once());
        return;
    };
    let lines: Vec<String> =
        MODELS.iter().flat_map(|model| lines_of(model, &TARGETS, &[0, 1, 2, 3])).collect();
    match std::fs::read_to_string(&path) {
        Ok(before) => {
            assert_eq!(before.lines().count(), lines.len());
            let lines = before.lines().zip(&lines);
            let changed: Vec<_> = lines.filter(|(before, now)| before != now).collect();
            assert!(changed.is_empty(), "{} programs differ: {changed:#?}", changed.len());
        }
        Err(_) => std::fs::write(&path, lines.join("\n") + "\n").unwrap(),
    }
}
