//! The recipe of NVFP4 in training: what each GEMM reads, and that a step repeats to the bit.

use std::collections::BTreeSet;

use bytemuck::cast_slice_mut;
use deepwell_ir::capture::{LlamaConfig, capture_for_sequence};
use deepwell_ir::{Call, GemmKind, Instance, Op, PrecisionPolicy, Program};
use deepwell_kernels::{Backend, KernelError, Observer};
use deepwell_precision::nvfp4::ScaleOrder;
use deepwell_precision::{GemmMode, OperandClass, OperandSetting, QuantFormat, RecipePart};
use deepwell_trainer::audit::Audit;
use deepwell_trainer::{CompileOptions, Engine, compile};

const SEQ: usize = 48;
const BATCH: usize = 2;

/// The recipe without exceptions: two blocks have no room for any.
fn recipe() -> PrecisionPolicy {
    PrecisionPolicy::from_toml("precision = 'nvfp4'\nkeep_first_last_bf16 = false", "policy")
        .unwrap()
        .without_part(RecipePart::LastBlocks)
}

fn try_engine_of(
    policy: &PrecisionPolicy,
    layers: usize,
    (seq, micro_batch): (usize, usize),
) -> Result<Engine, String> {
    let config = LlamaConfig { num_layers: layers, ..LlamaConfig::preset("llama-micro").unwrap() };
    let graph = capture_for_sequence(&config, seq).unwrap();
    let options = CompileOptions {
        micro_batch: Some(micro_batch),
        ..CompileOptions::new(policy.clone(), seq, BATCH)
    };
    let mut engine =
        compile(graph, deepwell_probe::probe(), &options).map_err(|error| error.to_string())?;
    engine.initialize(7).map_err(|error| error.to_string())?;
    Ok(engine)
}

fn engine_of(policy: &PrecisionPolicy, micro_batch: usize) -> Engine {
    try_engine_of(policy, 2, (SEQ, micro_batch)).unwrap()
}

fn tokens(step: i32) -> Vec<i32> {
    (0..=(BATCH * SEQ) as i32).map(|index| (index * index * 31 + 17 * index + step) % 256).collect()
}

struct Nobody;

impl Observer for Nobody {
    fn after(
        &mut self,
        _program: &Program,
        _call: &Call,
        _instance: Instance,
        _backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        Ok(())
    }
}

/// Bits of loss and gradient norm of the steps.
fn run(
    engine: &mut Engine,
    steps: std::ops::Range<i32>,
    observer: &mut dyn Observer,
) -> Vec<[u32; 2]> {
    let one = |step: i32| {
        let tokens = tokens(step);
        let (inputs, targets) = (&tokens[..BATCH * SEQ], &tokens[1..]);
        let outcome = engine.step_observed(inputs, targets, 1e-3, 1.0, observer).unwrap();
        assert!(outcome.loss.is_finite() && !outcome.skipped);
        [outcome.loss.to_bits(), outcome.grad_norm.to_bits()]
    };
    steps.map(one).collect()
}

/// The formats of both operands of a GEMM, over all layers.
fn formats(engine: &Engine, kind: GemmKind) -> Vec<String> {
    let gemms = engine.program().calls.iter().filter_map(|call| match call.op.leading() {
        Op::ScaledGemm(op) if op.kind == kind => Some(format!("{} * {}", op.a, op.b)),
        _ => None,
    });
    gemms.collect::<BTreeSet<_>>().into_iter().collect()
}

#[test]
fn each_gemm_reads_what_the_recipe_says() {
    use RecipePart::{FourSix, Hadamard, SquareWeights, StochasticRounding};
    let all = [
        "nvfp4 1x16 4/6 * nvfp4 16x16",
        "nvfp4 1x16 stochastic * nvfp4 16x16",
        "nvfp4 1x16 stochastic hadamard * nvfp4 1x16 hadamard",
    ];
    for (left_out, expected) in [
        (None, all),
        (Some(FourSix), ["nvfp4 1x16 * nvfp4 16x16", all[1], all[2]]),
        (Some(Hadamard), [all[0], all[1], "nvfp4 1x16 stochastic * nvfp4 1x16"]),
        (
            Some(StochasticRounding),
            [all[0], "nvfp4 1x16 * nvfp4 16x16", "nvfp4 1x16 hadamard * nvfp4 1x16 hadamard"],
        ),
        (
            Some(SquareWeights),
            ["nvfp4 1x16 4/6 * nvfp4 1x16", "nvfp4 1x16 stochastic * nvfp4 1x16", all[2]],
        ),
    ] {
        let policy = left_out.map_or_else(recipe, |part| recipe().without_part(part));
        let engine = engine_of(&policy, BATCH);
        for (&kind, expected) in GemmKind::ALL.iter().zip(expected) {
            assert_eq!(formats(&engine, kind), [expected], "{kind} without {left_out:?}");
        }
    }
}

/// The last 15 % of the blocks, rounded up, are in plain MXFP8; embeddings, norms and the first and
/// last linear tensor are as for MXFP8.
#[test]
fn the_last_blocks_are_in_mxfp8() {
    for (layers, mxfp8_layers) in [(2, 1), (8, 2)] {
        let engine = try_engine_of(&PrecisionPolicy::nvfp4(), layers, (SEQ, BATCH)).unwrap();
        let count = |name: &str| {
            let tensors = engine.program().precision.iter();
            tensors.filter(|tensor| tensor.format.name() == name).count()
        };
        // Seven linear tensors a block; the very last is BF16, and so is the first.
        assert_eq!(count("mxfp8"), 7 * mxfp8_layers - 1, "{layers} layers");
        assert_eq!(count("nvfp4"), 7 * (layers - mxfp8_layers) - 1, "{layers} layers");
        let wgrad = formats(&engine, GemmKind::Wgrad);
        assert!(wgrad.contains(&"mxfp8 1x32 * mxfp8 1x32".to_string()), "{wgrad:?}");
        assert_eq!(wgrad.len(), 2, "{wgrad:?}");
        let reasons = engine.program().precision.iter().map(|tensor| &tensor.reason);
        let expected = format!("one of the last {mxfp8_layers} of {layers} blocks (15 %)");
        assert_eq!(reasons.filter(|&reason| *reason == expected).count(), 7 * mxfp8_layers - 1);
    }
}

/// Every byte of every operand is that of the slow definitions, in both orders, with each part left
/// out, and where operands are dequantized and transformed back.
#[test]
fn the_audit_finds_the_bytes_of_the_definitions() {
    let parts = [RecipePart::Hadamard, RecipePart::StochasticRounding, RecipePart::SquareWeights];
    let without = parts.map(|part| recipe().without_part(part));
    let gradient_alone = recipe().only(&[OperandClass::WgradGradient]);
    let others = [
        recipe(),
        recipe().with_scale_order(ScaleOrder::Te),
        recipe().with_gemm(GemmMode::Emulated),
        gradient_alone,
        PrecisionPolicy::nvfp4(),
    ];
    for policy in others.into_iter().chain(without) {
        let mut engine = engine_of(&policy, BATCH / 2);
        let mut audit = Audit::new(engine.program());
        run(&mut engine, 0..2, &mut audit);
        let report = audit.finish();
        assert!(report.is_clean(), "{}\n{report}", policy.to_toml());
    }
}

/// Stop and resume is never stopped, on any number of threads.
#[test]
fn a_resumed_run_has_the_bits_of_the_whole() {
    let whole = run(&mut engine_of(&recipe(), BATCH / 2), 0..4, &mut Nobody);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let again = pool.install(|| run(&mut engine_of(&recipe(), BATCH / 2), 0..4, &mut Nobody));
    assert_eq!(again, whole);

    let mut first = engine_of(&recipe(), BATCH / 2);
    run(&mut first, 0..2, &mut Nobody);
    let mut second = engine_of(&recipe(), BATCH / 2);
    let (applied, skipped) = first.applied_steps().unwrap();
    for state in first.program().parameters.clone() {
        for id in [Some(state.master.value()), state.first_moment, state.second_moment]
            .into_iter()
            .flatten()
        {
            let mut values = vec![0f32; first.program().value(id).elements()];
            first.read_value(id, cast_slice_mut(&mut values)).unwrap();
            second.write_value(id, bytemuck::cast_slice(&values)).unwrap();
        }
    }
    second.set_applied_steps(applied, skipped).unwrap();
    second.refresh_weight_copies().unwrap();
    assert_eq!(run(&mut second, 2..4, &mut Nobody), whole[2..]);
}

/// Gradients of the first step, by parameter.
fn gradients(policy: &PrecisionPolicy) -> Vec<(String, Vec<f32>)> {
    let mut engine = engine_of(policy, BATCH);
    run(&mut engine, 0..1, &mut Nobody);
    let states = engine.program().parameters.clone();
    let of_state = |state: deepwell_ir::ParameterState| {
        let id = state.gradient.unwrap();
        let mut values = vec![0f32; engine.program().value(id).elements()];
        engine.read_value(id, cast_slice_mut(&mut values)).unwrap();
        (state.name, values)
    };
    states.into_iter().map(of_state).collect()
}

/// The transform cancels in the weight gradient: with signs that differ between the operands, or
/// with one operand transformed, the gradient is noise. Bounds are those of the format's noise:
/// about 15 dB for a product, a cosine of 0.98.
#[test]
fn the_transform_cancels_in_the_weight_gradient() {
    let cosine = |a: &[f32], b: &[f32]| {
        let dot = |a: &[f32], b: &[f32]| {
            a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>()
        };
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    };
    let of_bf16 = gradients(&PrecisionPolicy::bf16());
    let wgrad = OperandClass::of(GemmKind::Wgrad);
    for (policy, what) in [
        (recipe().only(&wgrad), "both operands"),
        // One operand alone is dequantized, and transformed back.
        (recipe().only(&wgrad[..1]), "gradient"),
        (recipe().only(&wgrad[1..]), "activation"),
        (recipe().only(&wgrad).with_gemm(GemmMode::Emulated), "emulated"),
    ] {
        for ((name, expected), (_, got)) in of_bf16.iter().zip(&gradients(&policy)) {
            let cosine = cosine(expected, got);
            assert!(cosine > 0.95, "{what}: `{name}` {cosine}");
        }
    }
    // Where only one operand has the transform the GEMM is emulated, never a product of a
    // transformed operand with another.
    let mut plain = OperandSetting::default();
    plain.hadamard = Some(false);
    let policy = recipe().with_operands(&wgrad[..1], &plain);
    let engine = engine_of(&policy, BATCH);
    assert!(formats(&engine, GemmKind::Wgrad).is_empty());
    for ((name, expected), (_, got)) in of_bf16.iter().zip(&gradients(&policy.only(&wgrad))) {
        assert!(cosine(expected, got) > 0.95, "`{name}` of mixed operands");
    }
}

/// Elements of a quantized operand of each micro-batch, from the first rounding of a step.
struct Codes {
    call: Option<String>,
    bytes: Vec<Vec<u8>>,
}

impl Observer for Codes {
    fn after(
        &mut self,
        program: &Program,
        call: &Call,
        _instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        let is_here = match &self.call {
            None => matches!(call.op, Op::StochasticRound(_)),
            Some(name) => *name == call.name,
        };
        if is_here {
            self.call = Some(call.name.clone());
            let range = program.value(call.outputs()[0].value).range;
            let mut bytes = vec![0; range.bytes];
            backend.read(range, &mut bytes)?;
            self.bytes.push(bytes);
        }
        Ok(())
    }
}

/// TE#2487, llm.c#597 and #601, CUDA graphs with a host seed: the same random words twice. Two
/// micro-batches with the same tokens, and two steps, have other codes; a step that is run again
/// has the same.
#[test]
fn no_two_micro_batches_share_random_words() {
    let codes = |first_step: u64| {
        let mut engine = engine_of(&recipe(), BATCH / 2);
        engine.set_applied_steps(first_step, 0).unwrap();
        let mut codes = Codes { call: None, bytes: Vec::new() };
        let row = &tokens(0)[..=SEQ];
        let (inputs, targets) = ([&row[..SEQ]; BATCH].concat(), [&row[1..]; BATCH].concat());
        // A learning rate of zero: the second step has the weights of the first.
        for _ in 0..2 {
            engine.step_observed(&inputs, &targets, 0.0, 1.0, &mut codes).unwrap();
        }
        codes.bytes
    };
    let got = codes(0);
    assert_eq!(got.len(), 2 * BATCH);
    let different: BTreeSet<&Vec<u8>> = got.iter().collect();
    assert_eq!(different.len(), got.len(), "codes of two micro-batches are equal");
    assert_eq!(codes(0), got);
    assert_eq!(codes(1)[..BATCH], got[BATCH..]);
}

/// Groups of 16 tokens: a message before the run starts says what to change.
#[test]
fn tokens_that_do_not_divide_into_groups_are_refused() {
    let error = try_engine_of(&recipe(), 2, (24, 1)).map(drop).unwrap_err();
    assert!(error.contains("a Hadamard transform takes groups of 16 tokens, got 24"), "{error}");
    assert!(error.contains("`hadamard = false`"), "{error}");
    let without = recipe().without_part(RecipePart::Hadamard);
    try_engine_of(&without, 2, (24, 1)).unwrap();
    let mut everywhere = OperandSetting::default();
    everywhere.hadamard = Some(true);
    let forward = recipe().with_operands(&[OperandClass::FpropActivation], &everywhere);
    let error = try_engine_of(&forward, 2, (SEQ, 1)).map(drop).unwrap_err();
    assert!(error.contains("only wgrad gains from it"), "{error}");
    let mut weights = OperandSetting::default();
    weights.four_six = Some(true);
    let square = recipe().with_operands(&[OperandClass::FpropWeight], &weights);
    let error = try_engine_of(&square, 2, (SEQ, 1)).map(drop).unwrap_err();
    assert!(error.contains("fprop.weight: expected 4/6 with blocks of 1x16"), "{error}");
}

/// The format of an operand survives the program's text and its JSON.
#[test]
fn programs_keep_the_recipe() {
    let engine = engine_of(&recipe().with_scale_order(ScaleOrder::Te), BATCH);
    let json = serde_json::to_string(engine.program()).unwrap();
    let back: Program = serde_json::from_str(&json).unwrap();
    assert_eq!(&back, engine.program());
    let is_te = |format: &QuantFormat| format.order == ScaleOrder::Te;
    assert!(back.calls.iter().flat_map(|call| call.op.formats()).all(|format| is_te(&format)));
}
