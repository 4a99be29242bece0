//! Updates in the backward pass: without clipping the bits are those of updates after it, and
//! gradients need little memory.

use deepwell_ir::Graph;
use deepwell_ir::capture::ModelConfig;
use deepwell_ir::ops::MomentFormat;
use deepwell_plan::OptimizerSpec;
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Engine, TrainError, compile};

const SEQ: usize = 32;
const ROWS: usize = 4;

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30))
}

fn graph(model: &str) -> Graph {
    let config = ModelConfig::preset(model).expect("a preset");
    config.capture(Some(SEQ)).expect("a graph")
}

fn engine(
    graph: &Graph,
    precision: &str,
    micro_batch: Option<usize>,
    optimizer: OptimizerSpec,
) -> Result<Engine, TrainError> {
    let policy = PrecisionPolicy::preset(precision).expect("a preset");
    let options = CompileOptions::new(policy, SEQ, ROWS);
    let options = CompileOptions { micro_batch, optimizer, ..options };
    let mut engine = compile(graph.clone(), hardware(), &options)?;
    engine.initialize(5)?;
    Ok(engine)
}

/// Losses and gradient norms of steps whose gradients are clipped to `max_norm`.
fn steps(engine: &mut Engine, max_norm: f64) -> Vec<(u32, f32)> {
    (0..4)
        .map(|step| {
            let token = |at: usize| ((step * 7919 + at * at * 31 + at * 7) % 256) as i32;
            let inputs: Vec<i32> = (0..ROWS * SEQ).map(token).collect();
            let targets: Vec<i32> = (0..ROWS * SEQ).map(|at| token(at + 1)).collect();
            let outcome = engine.step(&inputs, &targets, 1e-2, max_norm).expect("a step");
            (outcome.loss.to_bits(), outcome.grad_norm)
        })
        .collect()
}

#[test]
fn without_clipping_the_bits_are_those_of_later_updates() {
    for model in ["llama-micro", "gpt2-micro", "moe-micro"] {
        let graph = graph(model);
        for precision in ["bf16", "mxfp8"] {
            for moments in [MomentFormat::Fp32, MomentFormat::Fp8] {
                let what = format!("{model}, {precision}, {moments}");
                let run = |in_backward: bool| {
                    let optimizer =
                        OptimizerSpec { moments, in_backward, ..OptimizerSpec::default() };
                    let mut engine = engine(&graph, precision, None, optimizer).expect("an engine");
                    (steps(&mut engine, 1e30), engine.program().arena.bytes)
                };
                let ((later, peak), (within, lower_peak)) = (run(false), run(true));
                let bits = |steps: &[(u32, f32)]| steps.iter().map(|it| it.0).collect::<Vec<_>>();
                assert_eq!(bits(&within), bits(&later), "{what}");
                for (got, expected) in within.iter().zip(&later) {
                    // Both are sums in FP64, in another order.
                    let tolerance = 1e-6 * expected.1;
                    assert!((got.1 - expected.1).abs() <= tolerance, "{what}: {got:?}");
                }
                assert!(lower_peak < peak, "{what}: {lower_peak} of {peak} bytes");
            }
        }
    }
}

/// The second update is clipped by the norm of the first step. Clipping by the norm of the step
/// before trains as clipping by the step's own norm does.
#[test]
fn gradients_are_clipped_by_the_norm_of_the_step_before() {
    let graph = graph("llama-micro");
    let run = |in_backward: bool, max_norm: f64| {
        let optimizer = OptimizerSpec { in_backward, ..OptimizerSpec::default() };
        let mut engine = engine(&graph, "bf16", None, optimizer).expect("an engine");
        let steps = steps(&mut engine, max_norm);
        steps.into_iter().map(|(loss, _)| f32::from_bits(loss)).collect::<Vec<f32>>()
    };
    let (free, clipped, by_own_norm) = (run(true, 1e30), run(true, 0.01), run(false, 0.01));
    assert_eq!(free[0], clipped[0], "before the first update");
    assert_ne!(free[2], clipped[2], "after the second");
    for (step, (clipped, own)) in clipped.iter().zip(&by_own_norm).enumerate() {
        assert!((clipped / own - 1.0).abs() < 0.05, "step {step}: {clipped}, not {own}");
    }
}

#[test]
fn other_plans_are_refused_with_a_reason() {
    let graph = graph("llama-micro");
    let optimizer = OptimizerSpec { in_backward: true, ..OptimizerSpec::default() };
    let error = engine(&graph, "bf16", Some(2), optimizer).err().expect("two micro-batches");
    let text = error.to_string();
    assert!(text.contains("one micro-batch per step"), "{text}");
    assert!(text.contains("2 micro-batches"), "{text}");
}
