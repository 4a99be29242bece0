//! Steps of a micro model on an emulated GPU beside the same on the CPU: the same program, the
//! CUDA backend's kernels as PTX, no GPU. Where the kernels were not compiled the test says that
//! it was skipped.
#![cfg(feature = "emulated")]

use std::collections::BTreeSet;

use deepwell_ir::Recompute;
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_kernels::cuda::{Architecture, KernelImages};
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::{CompileOptions, Device, Engine, compile};

const SEQ: usize = 128;
const BATCH: usize = 1;
const VOCABULARY: usize = 256;
const STEPS: usize = 3;

fn engine(policy: &PrecisionPolicy, device: Device) -> Engine {
    let config = LlamaConfig {
        hidden_size: 128,
        intermediate_size: 256,
        num_layers: 1,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 64,
        vocab_size: VOCABULARY,
        ..LlamaConfig::preset("llama-micro").expect("a preset")
    };
    let options = CompileOptions {
        micro_batch: Some(BATCH),
        recompute: Some(Recompute::None),
        device,
        ..CompileOptions::new(policy.clone(), SEQ, BATCH)
    };
    let graph = capture(&config).expect("the model can be captured");
    let mut engine = compile(graph, deepwell_probe::probe(), &options).expect("it compiles");
    engine.initialize(7).expect("weights");
    engine
}

/// The kernels of a step, and the loss of each.
fn losses(policy: &PrecisionPolicy, device: Device) -> (BTreeSet<String>, Vec<f32>) {
    let mut engine = engine(policy, device);
    let kernels = engine.program().calls.iter().map(|call| call.choice.kernel.clone()).collect();
    let step = |step: usize| {
        let token = |index: usize| {
            let index = index + step * 7919;
            ((index * index * 31 + index * 7 + 3) % VOCABULARY) as i32
        };
        let inputs: Vec<i32> = (0..BATCH * SEQ).map(token).collect();
        let targets: Vec<i32> = (1..=BATCH * SEQ).map(token).collect();
        engine.step(&inputs, &targets, 1e-3, 1.0).expect("a step").loss
    };
    (kernels, (0..STEPS).map(step).collect())
}

/// Compares an architecture with the CPU; `product` is the kernel that MXFP8 products get there.
fn check(architecture: Architecture, capability: (u32, u32), product: &str) {
    if let Err(error) = KernelImages::discover().into_ptx().image("add", capability) {
        let required = std::env::var_os("DEEPWELL_REQUIRE_PTX").is_some();
        assert!(!required, "DEEPWELL_REQUIRE_PTX is set: {error}");
        eprintln!("skipped: {error}");
        return;
    }
    // As on a GPU: both round activations to BF16 at the same places and sum in another order.
    let rows = [(PrecisionPolicy::bf16(), 0.002), (PrecisionPolicy::mxfp8(), 0.005)];
    for (policy, tolerance) in rows {
        let (_, expected) = losses(&policy, Device::Cpu);
        let (kernels, got) = losses(&policy, Device::Emulated(architecture));
        eprintln!("{:?}: {got:?}, on the CPU {expected:?}", policy.format());
        let is_scaled = policy.format() != PrecisionPolicy::bf16().format();
        assert_eq!(kernels.contains(product), is_scaled, "{kernels:?}");
        for (got, expected) in got.iter().zip(&expected) {
            let distance = f64::from((got - expected).abs() / expected.abs());
            assert!(distance < tolerance, "{:?}: {got} is {distance} away", policy.format());
        }
    }
}

#[test]
fn losses_on_hopper_are_those_of_the_cpu() {
    check(Architecture::Sm90a, (9, 0), "cuda_mxfp8_gemm");
}

#[test]
fn losses_on_blackwell_are_those_of_the_cpu() {
    check(Architecture::Sm100a, (10, 0), "cuda_sm100_mxfp8_gemm");
}

#[test]
fn losses_on_blackwell_of_desktops_are_those_of_the_cpu() {
    check(Architecture::Sm120a, (12, 0), "cuda_sm120_mxfp8_gemm");
}
