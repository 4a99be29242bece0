//! What training steps become on a GPU. None is needed: planning knows the kernels without one.

use std::collections::BTreeMap;

use deepwell_ir::Program;
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_plan::{OptimizerSpec, PlanRequest, autoplan};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::Hardware;
use deepwell_trainer::Device;

fn program(model: &str, precision: &str) -> Program {
    let hardware = Hardware::preset("h200-x2").unwrap();
    let device = Device::Cuda(0);
    let request = PlanRequest {
        seq: 1024,
        global_batch: 32,
        policy: PrecisionPolicy::preset(precision).unwrap(),
        optimizer: OptimizerSpec::default(),
        memory_limit_bytes: None,
        micro_batch: None,
        recompute: None,
    };
    let graph = capture(&LlamaConfig::preset(model).unwrap()).unwrap();
    let (catalog, target) = (device.catalog(), device.target(&hardware).unwrap());
    autoplan(&graph, &hardware, &request, catalog.as_ref(), &target).unwrap().program
}

/// The ops that quantize, and how often each is called.
fn quantizations(program: &Program) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for call in program.calls.iter().filter(|call| !call.quantizations().is_empty()) {
        *counts.entry(call.op.name()).or_default() += 1;
    }
    counts
}

#[test]
fn quantizations_ride_along_with_their_producers() {
    for precision in ["mxfp8", "mxfp8-128"] {
        let program = program("llama-134m", precision);
        let found = quantizations(&program);
        let expected = [
            // Twelve layers of two norms; the first of all has no sum before it.
            ("rms_norm_quantize", 1),
            ("add_rms_norm_quantize", 23),
            // The last down projection stays in BF16.
            ("swiglu_quantize", 11),
            ("swiglu_backward_quantize", 12),
        ];
        for (name, count) in expected {
            assert_eq!(found.get(name), Some(&count), "{name}: {found:?}");
        }
    }
}
