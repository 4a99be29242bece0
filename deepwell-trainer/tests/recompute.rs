//! Making activations again gives the bits that keeping them gives.

use std::num::NonZeroU32;

use bytemuck::cast_slice_mut;
use deepwell_ir::Recompute;
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_precision::{OperandClass, PrecisionPolicy};
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, compile};

const SEQ: usize = 48;
const BATCH: usize = 4;

/// Bits of the loss, and of each gradient by its parameter's name, of the first step.
struct Step {
    loss_bits: u32,
    grad_norm_bits: u32,
    gradients: Vec<(String, Vec<u32>)>,
    /// Calls that repeat a forward call.
    repeated_calls: usize,
}

fn first_step(policy: &PrecisionPolicy, rule: Recompute, micro_batch: usize) -> Step {
    let config = LlamaConfig {
        tie_word_embeddings: true,
        attention_bias: true,
        ..LlamaConfig::preset("llama-micro").unwrap()
    };
    let options = CompileOptions {
        micro_batch: Some(micro_batch),
        recompute: Some(rule),
        ..CompileOptions::new(policy.clone(), SEQ, BATCH)
    };
    let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
    let mut engine = compile(capture(&config).unwrap(), Hardware::cpu_only(cpu), &options).unwrap();
    engine.initialize(7).unwrap();
    assert_eq!(engine.plan().recompute, rule);
    let token = |index: usize| (index * index * 31 + index * 7 + 3) as i32 % 256;
    let inputs: Vec<i32> = (0..BATCH * SEQ).map(token).collect();
    let targets: Vec<i32> = (1..=BATCH * SEQ).map(token).collect();
    let outcome = engine.step(&inputs, &targets, 1e-3, 1.0).unwrap();
    assert!(outcome.loss.is_finite() && outcome.grad_norm > 0.0 && !outcome.skipped);
    let repeated_calls = engine.program().calls.iter().filter(|call| call.recomputes).count();
    let mut gradients = Vec::new();
    for state in engine.program().parameters.clone() {
        let id = state.gradient.unwrap();
        let mut bits = vec![0u32; engine.program().value(id).elements()];
        engine.read_value(id, cast_slice_mut(&mut bits)).unwrap();
        assert!(bits.iter().any(|&bits| bits != 0), "gradient of `{}` is zero", state.name);
        gradients.push((state.name, bits));
    }
    Step {
        loss_bits: outcome.loss.to_bits(),
        grad_norm_bits: outcome.grad_norm.to_bits(),
        gradients,
        repeated_calls,
    }
}

#[test]
fn every_rule_gives_the_same_bits() {
    let mxfp8 = PrecisionPolicy::mxfp8();
    let nvfp4 = PrecisionPolicy::preset("nvfp4").expect("a preset");
    // Operands that are dequantized in the forward and again in the backward.
    let mixed = mxfp8.clone().only(&[OperandClass::FpropActivation, OperandClass::WgradGradient]);
    for policy in [PrecisionPolicy::f32(), PrecisionPolicy::bf16(), mxfp8, mixed, nvfp4] {
        for micro_batch in [BATCH, BATCH / 2] {
            let kept = first_step(&policy, Recompute::None, micro_batch);
            assert_eq!(kept.repeated_calls, 0);
            let one_layer = Recompute::FullOf(NonZeroU32::MIN);
            for rule in [Recompute::Norms, Recompute::Activations, one_layer, Recompute::Full] {
                let run = format!("{} {rule} micro-batch {micro_batch}", policy.format());
                let made_again = first_step(&policy, rule, micro_batch);
                assert!(made_again.repeated_calls > 0, "{run} repeats nothing");
                for ((name, kept), (_, made)) in kept.gradients.iter().zip(&made_again.gradients) {
                    let differing = kept.iter().zip(made).filter(|(a, b)| a != b).count();
                    assert_eq!(differing, 0, "{run}: elements of the gradient of `{name}`");
                }
                assert_eq!(made_again.loss_bits, kept.loss_bits, "{run}: loss");
                assert_eq!(made_again.grad_norm_bits, kept.grad_norm_bits, "{run}: norm");
            }
        }
    }
}
