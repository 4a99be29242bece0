//! Policies that quantize single operands of GEMMs: what they compute, and what the audit says.

use bytemuck::cast_slice;
use deepwell_ir::capture::{LlamaConfig, capture_for_sequence};
use deepwell_ir::{Call, GemmKind, Instance, Op, PrecisionPolicy, Program, ValueId};
use deepwell_kernels::{Backend, CallAction, KernelError, Observer};
use deepwell_precision::{
    BLOCK, ElementRounding, GemmMode, OperandClass, OperandSetting, QuantFormat, Source, e4m3,
    e8m0, quantize_columns, quantize_rows, scales_len,
};
use deepwell_trainer::audit::{Audit, audit_counts, audit_provenance};
use deepwell_trainer::{CompileOptions, Engine, compile};
use half::bf16;

const SEQ: usize = 48;
const BATCH: usize = 2;

/// MXFP8 in the blocks without exceptions.
fn all_mxfp8() -> PrecisionPolicy {
    PrecisionPolicy::from_toml("keep_first_last_bf16 = false", "policy").unwrap()
}

fn engine_of(policy: &PrecisionPolicy, micro_batch: usize) -> Engine {
    let config = LlamaConfig { num_layers: 2, ..LlamaConfig::preset("llama-micro").unwrap() };
    let graph = capture_for_sequence(&config, SEQ).unwrap();
    let options = CompileOptions {
        micro_batch: Some(micro_batch),
        ..CompileOptions::new(policy.clone(), SEQ, BATCH)
    };
    let mut engine = compile(graph, deepwell_probe::probe(), &options).unwrap();
    engine.initialize(7).unwrap();
    engine
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

fn tokens(step: i32) -> Vec<i32> {
    (0..=(BATCH * SEQ) as i32).map(|index| (index * index * 31 + 17 * index + step) % 256).collect()
}

/// Bits of loss and gradient norm of two steps, and of the loss of an evaluation after them.
fn run(engine: &mut Engine, observer: &mut dyn Observer) -> Vec<u32> {
    let mut bits = Vec::new();
    for step in 0..2 {
        let tokens = tokens(step);
        let (inputs, targets) = (&tokens[..BATCH * SEQ], &tokens[1..]);
        let outcome = engine.step_observed(inputs, targets, 1e-3, 1.0, observer).unwrap();
        bits.extend([outcome.loss.to_bits(), outcome.grad_norm.to_bits()]);
    }
    bits
}

fn evaluated(engine: &mut Engine) -> u32 {
    let (tokens, len) = (tokens(5), engine.evaluation_rows() * SEQ);
    engine.evaluate(&tokens[..len], &tokens[1..=len]).unwrap().to_bits()
}

/// Quantized along a row or down a column, and back, as BF16 holds it.
fn there_and_back<S: Source>(x: &[S], rows: usize, columns: usize, by_column: bool) -> Vec<bf16> {
    let spec = QuantFormat::MXFP8;
    let (outer, k) = if by_column { (columns, rows) } else { (rows, columns) };
    let mut data = vec![0; x.len()];
    let mut scales = vec![0; scales_len(outer, k)];
    let quantize = if by_column { quantize_columns::<S> } else { quantize_rows::<S> };
    quantize(x, rows, columns, &spec, &mut data, &mut scales).unwrap();
    let value = |index: usize| {
        let (row, column) = (index / columns, index % columns);
        let (outer, along) = if by_column { (column, row) } else { (row, column) };
        let scale = e8m0::decode(scales[outer * k.div_ceil(BLOCK) + along / BLOCK]);
        bf16::from_f32(e4m3::decode(data[outer * k + along]) * scale)
    };
    (0..x.len()).map(value).collect()
}

/// Puts quantized and dequantized numbers in the place of an operand of BF16 GEMMs, for as long as
/// the GEMM runs.
struct ByHand {
    class: OperandClass,
    /// Part of the names of the layers.
    layers: &'static str,
    saved: Option<(ValueId, Vec<u8>)>,
    gemms: usize,
}

/// Which GEMM of a linear layer a call is.
fn gemm_of(call: &Call) -> Option<GemmKind> {
    match call.op.leading() {
        Op::Linear(_) => Some(GemmKind::Fprop),
        Op::LinearDgrad(_) => Some(GemmKind::Dgrad),
        Op::LinearWgrad(_) => Some(GemmKind::Wgrad),
        _ => None,
    }
}

fn bytes_of(program: &Program, id: ValueId, backend: &mut dyn Backend) -> Vec<u8> {
    let range = program.value(id).range;
    let mut bytes = vec![0; range.bytes];
    backend.read(range, &mut bytes).unwrap();
    bytes
}

impl Observer for ByHand {
    fn before(
        &mut self,
        program: &Program,
        call: &Call,
        _instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        let is_here = gemm_of(call).is_some_and(|it| it == self.class.gemm());
        if !is_here || !call.name.contains(self.layers) {
            return Ok(CallAction::Run);
        }
        self.gemms += 1;
        let classes = OperandClass::of(self.class.gemm());
        let side = classes.iter().position(|&class| class == self.class).unwrap();
        let id = call.operands[side].value;
        let (rows, columns) = (program.value(id).shape[0], program.value(id).shape[1]);
        let bytes = bytes_of(program, id, backend);
        let by_column = matches!(
            self.class,
            OperandClass::DgradWeight | OperandClass::WgradGradient | OperandClass::WgradActivation
        );
        let made = if self.class.operand() == "weight" {
            // What is quantized is the master.
            let name = program.value(id).name.strip_suffix(".bf16").unwrap();
            let state = program.parameters.iter().find(|state| state.name == name).unwrap();
            let master = bytes_of(program, state.master.value(), backend);
            there_and_back(cast_slice::<u8, f32>(&master), rows, columns, by_column)
        } else {
            there_and_back(cast_slice::<u8, bf16>(&bytes), rows, columns, by_column)
        };
        backend.write(program.value(id).range, cast_slice(&made))?;
        self.saved = Some((id, bytes));
        Ok(CallAction::Run)
    }

    fn after(
        &mut self,
        program: &Program,
        _call: &Call,
        _instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        let Some((id, bytes)) = self.saved.take() else { return Ok(()) };
        backend.write(program.value(id).range, &bytes)
    }
}

/// A policy with one quantized operand is quantize, dequantize and a BF16 GEMM, bit for bit; and no
/// other policy.
#[test]
fn one_operand_is_what_it_is_by_hand() {
    let of_bf16 = run(&mut engine_of(&PrecisionPolicy::bf16(), BATCH), &mut Nobody);
    let of_mxfp8 = run(&mut engine_of(&all_mxfp8(), BATCH), &mut Nobody);
    assert_ne!(of_bf16, of_mxfp8);
    for &class in OperandClass::ALL {
        for (layers, gemms) in [("_proj", 2 * 7 * 2), (".v_proj", 2 * 2)] {
            let glob = format!("*{layers}*");
            let policy = all_mxfp8().only_in(&glob, &[class]).unwrap();
            let got = run(&mut engine_of(&policy, BATCH), &mut Nobody);
            let mut by_hand = ByHand { class, layers, saved: None, gemms: 0 };
            let expected = run(&mut engine_of(&PrecisionPolicy::bf16(), BATCH), &mut by_hand);
            assert_eq!(by_hand.gemms, gemms, "{class} of {glob}");
            assert_eq!(got, expected, "{class} of {glob}");
            assert_ne!(got, of_bf16, "{class} of {glob}");
            assert_ne!(got, of_mxfp8, "{class} of {glob}");
        }
    }
}

/// The CPU multiplies MXFP8 by decoding it to BF16, so that emulation changes nothing there.
#[test]
fn emulated_gemms_give_the_bits_of_native_ones_on_the_cpu() {
    for micro_batch in [BATCH, BATCH / 2] {
        let native = &mut engine_of(&all_mxfp8(), micro_batch);
        let emulated = &mut engine_of(&all_mxfp8().with_gemm(GemmMode::Emulated), micro_batch);
        assert_eq!(run(native, &mut Nobody), run(emulated, &mut Nobody));
        assert_eq!(evaluated(native), evaluated(emulated));
        let is_mx = |engine: &Engine| {
            engine.program().calls.iter().any(|call| matches!(call.op.leading(), Op::ScaledGemm(_)))
        };
        assert!(is_mx(native) && !is_mx(emulated));
    }
}

/// Policies of several kinds at once.
fn mixed() -> [PrecisionPolicy; 4] {
    use OperandClass::{DgradWeight, FpropActivation, WgradGradient};
    let all = all_mxfp8();
    [
        all.clone().without_in("*.v_proj.*", &[WgradGradient]).unwrap(),
        all.clone().only(&[FpropActivation, DgradWeight, WgradGradient]),
        all.with_gemm(GemmMode::Emulated),
        stochastic().without_in("*.v_proj.*", &[DgradWeight]).unwrap(),
    ]
}

#[test]
fn the_audit_understands_mixed_policies() {
    for policy in mixed() {
        let mut engine = engine_of(&policy, BATCH / 2);
        let mut audit = Audit::new(engine.program());
        run(&mut engine, &mut audit);
        let report = audit.finish();
        assert!(report.is_clean(), "{}\n{report}", policy.to_toml());
    }
}

/// Indices of the calls that dequantize.
fn dequantizations(program: &Program) -> Vec<usize> {
    let calls = program.calls.iter().enumerate();
    calls.filter(|(_, call)| matches!(call.op, Op::Dequantize(_))).map(|(at, _)| at).collect()
}

#[test]
fn the_audit_finds_wrong_operands_of_emulated_gemms() {
    let policy = all_mxfp8().only(&[OperandClass::FpropActivation]);
    let engine = engine_of(&policy, BATCH);
    let clean = engine.program();
    assert_eq!((audit_counts(clean), audit_provenance(clean)), (Vec::new(), Vec::new()));
    let [one, .., other] = dequantizations(clean)[..] else { panic!("nothing is dequantized") };

    // A GEMM that reads what was not quantized, and one that reads another's operand dequantized.
    let mut program = clean.clone();
    let made = program.calls[one].outputs()[0].value;
    let source = program.value(made).link.unwrap().of;
    let plain = program.values.iter().position(|value| value.tensor == Some(source)).unwrap();
    let plain = ValueId(plain as u32);
    let reads = |call: &Call| call.inputs().iter().any(|operand| operand.value == made);
    let reader = program.calls.iter().position(reads).unwrap();
    program.calls[reader].operands[0].value = plain;
    let findings = audit_counts(&program);
    assert_eq!(findings.len(), 1, "{findings:?}");
    let expected = "expected one dequantized from rowwise data";
    assert!(findings[0].what.contains(expected), "{findings:?}");

    let mut program = clean.clone();
    let wgrad = |call: &Call| matches!(call.op, Op::LinearWgrad(_));
    let wgrad = program.calls.iter().position(wgrad).unwrap();
    program.calls[wgrad].operands[1].value = made;
    let findings = audit_counts(&program);
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert!(findings[0].what.contains("expected a tensor that was not quantized"), "{findings:?}");

    // Data of one operand under the scales of another.
    let mut program = clean.clone();
    let scales = program.calls[other].operands[1].value;
    program.calls[one].operands[1].value = scales;
    let findings = audit_provenance(&program);
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert!(findings[0].what.contains("with scales of the rowwise `"), "{findings:?}");
}

/// Leaves out what makes one operand.
struct LeavesOut {
    audit: Audit,
    op: fn(&Op) -> bool,
    left_out: Option<String>,
}

impl Observer for LeavesOut {
    fn before(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        let verdict = self.audit.before(program, call, instance, backend)?;
        let is_here = self.left_out.is_none() && (self.op)(&call.op);
        if is_here {
            self.left_out = Some(call.name.clone());
        }
        Ok(if is_here { CallAction::Skip } else { verdict })
    }

    fn after(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        self.audit.after(program, call, instance, backend)
    }
}

#[test]
fn the_audit_compares_dequantized_and_rounded_elements() {
    let ops: [fn(&Op) -> bool; 2] =
        [|op| matches!(op, Op::Dequantize(_)), |op| matches!(op, Op::StochasticRound(_))];
    for op in ops {
        let policy = stochastic().without_in("*.v_proj.*", &[OperandClass::DgradWeight]).unwrap();
        let mut engine = engine_of(&policy, BATCH);
        let audit = Audit::new(engine.program());
        let mut observer = LeavesOut { audit, op, left_out: None };
        run(&mut engine, &mut observer);
        let name = observer.left_out.unwrap();
        let report = observer.audit.finish();
        let finding = &report.findings[0];
        assert_eq!(finding.call, name, "{report}");
        let is_named = ["of the quantized operand", "rounded at random"]
            .iter()
            .any(|what| finding.what.contains(what));
        assert!(is_named, "{report}");
    }
}

/// Gradients rounded at random in both GEMMs.
fn stochastic() -> PrecisionPolicy {
    let gradients = [OperandClass::DgradGradient, OperandClass::WgradGradient];
    let setting = OperandSetting::of_rounding(ElementRounding::Stochastic);
    all_mxfp8().with_operands(&gradients, &setting)
}

/// Bits follow from seed and step alone: not from threads, nor from where a run was resumed.
#[test]
fn rounding_at_random_repeats_itself() {
    let whole = |seed: u64| {
        let mut engine = engine_of(&stochastic(), BATCH / 2);
        engine.set_rounding_seed(seed);
        run(&mut engine, &mut Nobody)
    };
    let nearest = run(&mut engine_of(&all_mxfp8(), BATCH / 2), &mut Nobody);
    let expected = whole(7);
    // The forward of the first step knows nothing of gradients.
    assert_eq!(expected[0], nearest[0]);
    assert_ne!(expected[1..], nearest[1..]);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    assert_eq!(pool.install(|| whole(7)), expected);
    assert_ne!(whole(8)[1..], expected[1..]);

    // Steps are counted on from where they are set.
    let second_alone = |steps: u64| {
        let mut engine = engine_of(&stochastic(), BATCH / 2);
        engine.set_applied_steps(steps, 0).unwrap();
        let tokens = tokens(1);
        let outcome = engine.step(&tokens[..BATCH * SEQ], &tokens[1..], 1e-3, 1.0).unwrap();
        outcome.grad_norm.to_bits()
    };
    assert_eq!(second_alone(1), second_alone(1));
    assert_ne!(second_alone(1), second_alone(0));
}

#[test]
fn only_gradients_are_rounded_at_random() {
    let config = LlamaConfig { num_layers: 2, ..LlamaConfig::preset("llama-micro").unwrap() };
    let graph = capture_for_sequence(&config, SEQ).unwrap();
    let setting = OperandSetting::of_rounding(ElementRounding::Stochastic);
    let policy = all_mxfp8().with_operands(&[OperandClass::DgradWeight], &setting);
    let options = CompileOptions::new(policy, SEQ, BATCH);
    let Err(error) = compile(graph, deepwell_probe::probe(), &options) else {
        panic!("weights rounded at random were accepted")
    };
    let text = error.to_string();
    let expected = "expected rounding `nearest` for dgrad.weight, got `stochastic`";
    assert!(text.contains(expected), "{text}");
}

/// A GEMM in fallback is BF16 whatever its operands were, and comes back.
#[test]
fn gemms_fall_back_from_mixed_policies() {
    for policy in mixed() {
        let mut engine = engine_of(&policy, BATCH);
        let whole = engine.program().clone();
        let counted = engine.program().host.statistics.len();
        run(&mut engine, &mut Nobody);
        engine.fall_back(&(0..14).collect::<Vec<_>>(), "a test").unwrap();
        assert!(engine.program().host.statistics.is_empty());
        run(&mut engine, &mut Nobody);
        for gemms in [&[7, 8, 9, 10, 11, 12, 13][..], &[7], &[1, 12]] {
            engine.fall_back(gemms, "a test").unwrap();
            let left = engine.program().host.statistics.len();
            assert!(0 < left && left < counted, "{left} of {counted}");
            run(&mut engine, &mut Nobody);
        }
        engine.fall_back(&[], "a test").unwrap();
        assert_eq!(engine.program(), &whole);
    }
}

/// The counters of a tensor count for the GEMMs that read it dequantized.
#[test]
fn guards_see_operands_of_emulated_gemms() {
    let policy = all_mxfp8().only(&[OperandClass::WgradGradient]);
    let mut engine = engine_of(&policy, BATCH);
    let tokens = tokens(1);
    engine.step(&tokens[..BATCH * SEQ], &tokens[1..], 1e-3, 1.0).unwrap();
    for (index, gemm) in engine.gemms().iter().enumerate() {
        let of_gemm = engine.statistics().iter().find(|it| it.gemms[..] == [index]);
        assert!(of_gemm.is_some_and(|it| it.stats.elements > 0), "{}", gemm.weight);
    }
}
