//! The counts of quantized GEMMs are of what ran.

use bytemuck::cast_slice;
use deepwell_ir::capture::{LlamaConfig, capture_for_sequence};
use deepwell_ir::{Call, GemmKind, Instance, Op, Program};
use deepwell_kernels::{Backend, KernelError, Observer};
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::{CompileOptions, Engine, GemmCounts, compile};

const SEQ: usize = 32;
const BATCH: usize = 2;

/// Counts the quantized GEMMs that a backend runs.
#[derive(Default)]
struct Seen(GemmCounts);

impl Observer for Seen {
    fn after(
        &mut self,
        _program: &Program,
        call: &Call,
        _instance: Instance,
        _backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        if let Op::ScaledGemm(op) = call.op.leading() {
            match op.kind {
                GemmKind::Fprop => self.0.fprop += 1,
                GemmKind::Dgrad => self.0.dgrad += 1,
                GemmKind::Wgrad => self.0.wgrad += 1,
            }
        }
        Ok(())
    }
}

fn engine(policy: PrecisionPolicy) -> Engine {
    let config = LlamaConfig::preset("llama-micro").expect("a preset");
    let graph = capture_for_sequence(&config, SEQ).expect("a graph");
    let options =
        CompileOptions { micro_batch: Some(1), ..CompileOptions::new(policy, SEQ, BATCH) };
    let mut engine = compile(graph, deepwell_probe::probe(), &options).expect("an engine");
    engine.initialize(0).expect("weights");
    engine
}

/// What a step is seen to run, after a check that the engine counts the same.
fn step(engine: &mut Engine) -> (GemmCounts, bool) {
    let tokens: Vec<i32> = (0..SEQ * BATCH).map(|index| (index * 31 % 256) as i32).collect();
    let (before, mut seen) = (engine.counts().quantized_gemms, Seen::default());
    let outcome = engine.step_observed(&tokens, &tokens, 1e-3, 1.0, &mut seen).expect("a step");
    let after = engine.counts().quantized_gemms;
    let counted = GemmCounts {
        fprop: after.fprop - before.fprop,
        dgrad: after.dgrad - before.dgrad,
        wgrad: after.wgrad - before.wgrad,
    };
    assert_eq!(counted, seen.0);
    (counted, outcome.skipped)
}

/// Policies whose GEMMs are quantized.
fn policies() -> [PrecisionPolicy; 2] {
    ["mxfp8", "nvfp4"].map(|name| PrecisionPolicy::preset(name).expect("a preset"))
}

#[test]
fn steps_count_by_the_program_that_they_ran() {
    policies().into_iter().for_each(check_steps);
}

fn check_steps(policy: PrecisionPolicy) {
    let mut engine = engine(policy);
    let (quantized, _) = step(&mut engine);
    assert!(quantized.fprop > 0 && quantized.dgrad > 0 && quantized.wgrad > 0);
    let planned = engine.quantized_flop_share_planned();
    assert_eq!(engine.counts().quantized_flop_share(), planned);

    // One of two layers in BF16, then the other too: their GEMMs are missed from then on.
    let layer = |index: usize| (7 * index..7 * (index + 1)).collect::<Vec<usize>>();
    engine.fall_back(&layer(0), "a test").expect("a program");
    let (with_one, _) = step(&mut engine);
    assert!(0 < with_one.total() && with_one.total() < quantized.total());
    engine.fall_back(&[layer(0), layer(1)].concat(), "a test").expect("a program");
    assert_eq!(step(&mut engine).0.total(), 0);
    engine.fall_back(&[], "a test").expect("a program");
    assert_eq!(step(&mut engine).0, quantized);
    let (share, _) = engine.counts().quantized_flop_share();
    assert!(0.5 * planned.0 < share && share < planned.0, "{share} of {planned:?}");
    assert_eq!(engine.quantized_flop_share_planned(), planned);

    // A step that ends in NaN is left out of the weights, not of the counts.
    let state = engine.program().parameters[0].clone();
    let values = vec![f32::NAN; engine.program().value(state.master.value()).elements()];
    engine.write_value(state.master.value(), cast_slice(&values)).expect("a value");
    engine.refresh_weight_copies().expect("copies");
    assert_eq!(step(&mut engine), (quantized, true));
}

#[test]
fn evaluations_count_their_forward_pass() {
    policies().into_iter().for_each(check_evaluation);
}

fn check_evaluation(policy: PrecisionPolicy) {
    let mut engine = engine(policy);
    let rows = engine.evaluation_rows();
    let tokens = vec![1; rows * SEQ];
    engine.evaluate(&tokens, &tokens).expect("a loss");
    let counts = engine.counts();
    assert!(counts.quantized_gemms.fprop > 0 && counts.quantized_bytes.fprop > 0);
    assert_eq!((counts.quantized_gemms.dgrad, counts.quantized_gemms.wgrad), (0, 0));
    assert_eq!(counts.linear_flops, 0.0, "shares are of steps");
}

#[test]
fn bf16_runs_nothing_quantized() {
    let mut engine = engine(PrecisionPolicy::bf16());
    assert_eq!(step(&mut engine).0.total(), 0);
    let counts = engine.counts();
    assert_eq!(counts.quantized_bytes.total(), 0);
    assert!(counts.linear_flops > 0.0);
    assert_eq!(counts.quantized_flop_share(), (0.0, 0.0));
}
