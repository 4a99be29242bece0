//! Any GEMMs of a step may fall back to BF16: each mixture fits into the memory that is reserved.

use std::sync::LazyLock;

use deepwell_ir::capture::{LlamaConfig, ModelConfig, capture};
use deepwell_ir::{Graph, Recompute, Target, quantizable_weights};
use deepwell_kernels::cuda::{Architecture, COLLECTIVES};
use deepwell_plan::{
    OptimizerSpec, Parallel, Plan, PlanRequest, Planned, arena_bytes_with_fallback, autoplan_ranks,
    lower_evaluation, lower_within,
};
use deepwell_precision::{Fallback, PrecisionPolicy};
use deepwell_probe::Hardware;
use deepwell_trainer::Device;
use proptest::prelude::*;

const SEQ: usize = 128;
const ROWS: usize = 8;

/// A plan and what it was made for.
struct Case {
    name: String,
    graph: Graph,
    device: Device,
    target: Target,
    planned: Planned,
    weights: Vec<String>,
}

impl Case {
    fn new(
        model: &str,
        device: &str,
        precision: &str,
        recompute: Recompute,
        ranks: Parallel,
    ) -> Case {
        let (hardware, device) = match device {
            "cpu" => {
                let cpu = Hardware::preset("h200").unwrap().cpu;
                (Hardware::cpu_only(cpu), Device::Cpu)
            }
            gpu => (Hardware::preset(gpu).unwrap(), Device::Cuda(0)),
        };
        let mut target = device.target(&hardware).unwrap();
        if target.arch != "cpu" && !ranks.is_single() {
            target.libraries.push(COLLECTIVES.to_string());
        }
        let is_hopper = target.arch == Architecture::Sm90a.target_name();
        let name = format!("{model} {precision} on {}, {recompute}, {ranks}", target.arch);
        let precision = match precision {
            "mxfp8" if is_hopper => "mxfp8-128",
            other => other,
        };
        let request = PlanRequest {
            seq: SEQ,
            global_batch: ROWS,
            policy: PrecisionPolicy::preset(precision).unwrap(),
            optimizer: OptimizerSpec::default(),
            memory_limit_bytes: Some(u64::MAX),
            micro_batch: Some(2),
            recompute: Some(recompute),
            saved_activations: Default::default(),
        };
        let graph = graph(model);
        let catalog = device.catalog();
        let planned =
            autoplan_ranks(&graph, &hardware, &request, ranks, catalog.as_ref(), &target).unwrap();
        let of = quantizable_weights(&graph);
        let weights = of.into_iter().map(|(id, _)| graph.tensor(id).name.clone()).collect();
        let target = planned.program.target.clone();
        Case { name, graph, device, target, planned, weights }
    }

    /// Lowers step and evaluation with the GEMMs of some weights in BF16.
    fn check(&self, in_bf16: &[usize]) {
        let Planned { program, fallback, plan, .. } = &self.planned;
        let reserved = arena_bytes_with_fallback(program, fallback.as_ref());
        let names: Vec<&str> = in_bf16.iter().map(|&index| &*self.weights[index]).collect();
        let policy = plan.policy.clone().force_bf16(names.iter().map(|name| (*name, "a test")));
        let plan = Plan { policy, ..plan.clone() };
        let catalog = self.device.catalog();
        let (graph, target) = (&self.graph, &self.target);
        let mixed = lower_within(graph, &plan, reserved, catalog.as_ref(), target).unwrap();
        let evaluation = lower_evaluation(graph, &plan, &mixed, catalog.as_ref(), target).unwrap();
        for (what, program) in [("step", &mixed), ("evaluation", &evaluation)] {
            let bytes = program.arena.bytes;
            let case = &self.name;
            assert!(
                bytes <= reserved,
                "{case}: a {what} of {bytes} bytes, {reserved} reserved, {names:?} in BF16"
            );
        }
        // The host reads no more counters than it did, each for at least one weight.
        let counters = [&mixed, program].map(|program| program.host.statistics.len());
        assert!(counters[0] <= counters[1], "{}: {counters:?} with {names:?}", self.name);
        let readers = mixed.weights_by_operand();
        for quantization in mixed.calls.iter().flat_map(|call| call.quantizations()) {
            let mut planes = quantization.quantized_operands().iter();
            let name = quantization.source_name(&mixed);
            let is_read = planes.any(|plane| readers.contains_key(&plane.value));
            assert!(is_read, "{}: no GEMM reads {name}", self.name);
        }
    }
}

fn graph(model: &str) -> Graph {
    match model {
        "dense" => {
            let micro = LlamaConfig::preset("llama-micro").unwrap();
            let wide = LlamaConfig { num_layers: 4, ..micro };
            capture(&wide).unwrap()
        }
        preset => ModelConfig::preset(preset).unwrap().capture(Some(SEQ)).unwrap(),
    }
}

/// Models, devices, policies, what is recomputed, and ranks.
static CASES: LazyLock<Vec<Case>> = LazyLock::new(|| {
    let mut cases = Vec::new();
    for device in ["cpu", "h200", "b200"] {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            for model in ["dense", "moe-micro"] {
                cases.push(Case::new(model, device, "mxfp8", recompute, Parallel::default()));
            }
        }
        let stages = Parallel { pipeline: 2, ..Parallel::default() };
        cases.push(Case::new("dense", device, "mxfp8", Recompute::None, stages));
        let data = Parallel { zero: 3, ..Parallel::data(2) };
        cases.push(Case::new("dense", device, "mxfp8-2d", Recompute::None, data));
        cases.push(Case::new("gpt2-micro", device, "mxfp8", Recompute::None, Parallel::default()));
    }
    cases.push(Case::new("dense", "cpu", "nvfp4", Recompute::None, Parallel::default()));
    cases
});

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200, failure_persistence: None, ..ProptestConfig::default()
    })]
    #[test]
    fn any_gemms_fit_into_the_reserve(
        case in any::<prop::sample::Index>(),
        bits in any::<u64>(),
        more in any::<u64>(),
    ) {
        // Sets of about a half and of about a quarter of the weights.
        let case = case.get(&CASES);
        for bits in [bits, bits & more] {
            let gemms: Vec<usize> =
                (0..case.weights.len()).filter(|&index| bits >> (index % 64) & 1 == 1).collect();
            case.check(&gemms);
        }
    }
}

/// The fullest mixture: of the weights that share an operand one is in BF16, and all that have one
/// for themselves.
#[test]
fn one_of_each_group_fits_into_the_reserve() {
    for case in CASES.iter() {
        let is_last_of_its_group = |name: &str| {
            !["q_proj", "k_proj", "gate_proj", "w1"].iter().any(|group| name.contains(group))
        };
        for is_kept in [true, false] {
            let names = case.weights.iter().enumerate();
            let gemms = names.filter(|(_, name)| is_last_of_its_group(name) == is_kept);
            case.check(&gemms.map(|(index, _)| index).collect::<Vec<_>>());
        }
    }
}

/// Memory was reserved for GEMMs in BF16 also where the answer of the guards moves none.
#[test]
fn only_guards_that_move_gemms_reserve_memory() {
    let hardware = Hardware::preset("h200").unwrap();
    let device = Device::Cuda(0);
    let (target, catalog) = (device.target(&hardware).unwrap(), device.catalog());
    let graph = graph("dense");
    let reserved = |fallback: Fallback| {
        let request = PlanRequest {
            seq: SEQ,
            global_batch: ROWS,
            policy: PrecisionPolicy::preset("mxfp8-128").unwrap().with_fallback(fallback),
            optimizer: OptimizerSpec::default(),
            memory_limit_bytes: Some(u64::MAX),
            micro_batch: Some(ROWS),
            recompute: Some(Recompute::None),
            saved_activations: Default::default(),
        };
        let one = Parallel::default();
        let planned =
            autoplan_ranks(&graph, &hardware, &request, one, catalog.as_ref(), &target).unwrap();
        let reserved = planned.arena_bytes() - planned.program.arena.bytes;
        assert_eq!(planned.prediction.ranks[0].reserved_bytes, reserved as u64, "{fallback}");
        reserved
    };
    assert!(reserved(Fallback::Safe) > 0);
    assert_eq!([Fallback::Strict, Fallback::Off].map(reserved), [0, 0]);
}
