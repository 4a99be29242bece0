//! The audit finds nothing in a clean step, and each of many planted faults.
//!
//! Faults are planted by an observer that stands between the executor and the audit: it changes
//! bytes between two calls, or leaves a call out. A fault must be found at its own call and
//! nowhere else: what comes later is right for the bytes that it reads.

use deepwell_ir::capture::{LlamaConfig, capture_for_sequence};
use deepwell_ir::ops::{LinearDgrad, ScaledGemm};
use deepwell_ir::{
    Access, Call, GemmKind, Instance, Op, Operand, PrecisionPolicy, Program, Recompute, ValueId,
};
use deepwell_kernels::{Backend, CallAction, CpuCatalog, KernelError, Observer, cpu_target};
use deepwell_plan::{Plan, lower};
use deepwell_precision::{Format, scale_tiles};
use deepwell_trainer::audit::{
    Audit, AuditReport, FINDINGS_KEPT, Finding, audit_counts, audit_provenance,
};
use deepwell_trainer::{CompileOptions, Engine, Settings, compile};

const SEQ: usize = 32;
const BATCH: usize = 2;
const LEARNING_RATE: f64 = 1e-3;

fn engine_of(config: &LlamaConfig, policy: PrecisionPolicy, micro_batch: usize) -> Engine {
    let graph = capture_for_sequence(config, SEQ).unwrap();
    let micro_batch = Some(micro_batch);
    let options = CompileOptions { micro_batch, ..CompileOptions::new(policy, SEQ, BATCH) };
    let mut engine = compile(graph, deepwell_probe::probe(), &options).unwrap();
    engine.initialize(7).unwrap();
    engine
}

fn micro_engine(precision: &str, micro_batch: usize) -> Engine {
    let config = LlamaConfig::preset("llama-micro").unwrap();
    engine_of(&config, PrecisionPolicy::preset(precision).unwrap(), micro_batch)
}

/// Tokens that differ from step to step.
fn tokens(step: i32) -> Vec<i32> {
    (0..(BATCH * SEQ) as i32 + 1)
        .map(|index| (index * index * 31 + 17 * index + step) % 256)
        .collect()
}

fn step(engine: &mut Engine, number: i32, observer: &mut dyn Observer) {
    let tokens = tokens(number);
    let (inputs, targets) = (&tokens[..BATCH * SEQ], &tokens[1..]);
    engine.step_observed(inputs, targets, LEARNING_RATE, 1.0, observer).unwrap();
}

/// What is done to the arena.
type Change = fn(&Program, &Call, &mut dyn Backend);

#[derive(Clone, Copy)]
enum Fault {
    /// The call does not run.
    Skip,
    /// The bytes are changed right before the call.
    Before(Change),
    /// The bytes are changed right after the call.
    After(Change),
}

/// A call, and which of its runs in a step, counted from 0.
type CallRun = (&'static str, usize);

/// Plants `fault` at one run of a call, and passes everything on to the audit.
struct Planted {
    audit: Audit,
    at: CallRun,
    fault: Fault,
    times: usize,
}

impl Planted {
    fn is_at(&self, call: &Call) -> bool {
        (call.name.as_str(), self.times) == (self.at.0, self.at.1 + 1)
    }
}

impl Observer for Planted {
    fn before(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<CallAction, KernelError> {
        self.times += usize::from(call.name == self.at.0);
        let is_here = self.is_at(call);
        if let (true, Fault::Before(change)) = (is_here, self.fault) {
            change(program, call, backend);
        }
        let verdict = self.audit.before(program, call, instance, backend)?;
        let is_skipped = is_here && matches!(self.fault, Fault::Skip);
        Ok(if is_skipped { CallAction::Skip } else { verdict })
    }

    fn after(
        &mut self,
        program: &Program,
        call: &Call,
        instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        if let (true, Fault::After(change)) = (self.is_at(call), self.fault) {
            change(program, call, backend);
        }
        self.audit.after(program, call, instance, backend)
    }
}

fn run_with_fault(engine: &mut Engine, at: CallRun, fault: Fault) -> AuditReport {
    let audit = Audit::new(engine.program());
    let mut planted = Planted { audit, at, fault, times: 0 };
    step(engine, 1, &mut planted);
    assert!(planted.times > at.1, "the step runs `{}` {} times", at.0, planted.times);
    planted.audit.finish()
}

/// Changes the bytes of a value.
fn change(
    program: &Program,
    id: ValueId,
    backend: &mut dyn Backend,
    change: impl FnOnce(&mut [u8]),
) {
    let range = program.value(id).range;
    let mut bytes = vec![0; range.bytes];
    backend.read(range, &mut bytes).unwrap();
    change(&mut bytes);
    backend.write(range, &bytes).unwrap();
}

fn exchange(program: &Program, one: ValueId, two: ValueId, backend: &mut dyn Backend) {
    let (mut ones, mut twos) = (Vec::new(), Vec::new());
    change(program, one, backend, |bytes| ones.extend_from_slice(bytes));
    change(program, two, backend, |bytes| twos.extend_from_slice(bytes));
    backend.write(program.value(one).range, &twos).unwrap();
    backend.write(program.value(two).range, &ones).unwrap();
}

fn output(call: &Call, index: usize) -> ValueId {
    call.outputs()[index].value
}

fn raise_a_row_scale(program: &Program, call: &Call, backend: &mut dyn Backend) {
    change(program, output(call, 1), backend, |scales| {
        scales[scale_tiles::offset(1, 1, 2)] += 1;
    });
}

fn lower_a_column_scale(program: &Program, call: &Call, backend: &mut dyn Backend) {
    change(program, output(call, 3), backend, |scales| {
        scales[scale_tiles::offset(63, 1, 2)] -= 1;
    });
}

fn flip_a_row_code(program: &Program, call: &Call, backend: &mut dyn Backend) {
    change(program, output(call, 0), backend, |data| data[64 + 5] ^= 1);
}

fn swap_operands(program: &Program, call: &Call, backend: &mut dyn Backend) {
    exchange(program, output(call, 0), output(call, 2), backend);
    exchange(program, output(call, 1), output(call, 3), backend);
}

/// Toward zero, which gives BF16 numbers as rounding to nearest does.
fn round_masters_to_bf16(program: &Program, _: &Call, backend: &mut dyn Backend) {
    for state in &program.parameters {
        change(program, state.master.value(), backend, |bytes| {
            for word in bytes.chunks_exact_mut(4) {
                word[..2].fill(0);
            }
        });
    }
}

fn halve_first_moment(program: &Program, _: &Call, backend: &mut dyn Backend) {
    let moment = program.parameters[0].first_moment.unwrap();
    change(program, moment, backend, |bytes| {
        for word in bytes.chunks_exact_mut(4) {
            let value = f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            word.copy_from_slice(&(value / 2.0).to_le_bytes());
        }
    });
}

fn count_once_more(program: &Program, call: &Call, backend: &mut dyn Backend) {
    change(program, call.operands[2].value, backend, |bytes| bytes[0] += 1);
}

fn raise_the_step_size(program: &Program, call: &Call, backend: &mut dyn Backend) {
    change(program, output(call, 0), backend, |bytes| {
        let size = f32::from_le_bytes([bytes[24], bytes[25], bytes[26], bytes[27]]);
        bytes[24..28].copy_from_slice(&f32::from_bits(size.to_bits() + 4).to_le_bytes());
    });
}

fn double_the_norm(program: &Program, call: &Call, backend: &mut dyn Backend) {
    change(program, output(call, 0), backend, |bytes| bytes[3] ^= 1);
}

fn zero_the_output(program: &Program, call: &Call, backend: &mut dyn Backend) {
    change(program, output(call, 0), backend, |bytes| bytes.fill(0));
}

fn change_the_last_element(program: &Program, call: &Call, backend: &mut dyn Backend) {
    // A bit in the middle of the fraction of what is BF16.
    change(program, output(call, 0), backend, |bytes| {
        let low = bytes.len() - 2;
        bytes[low] ^= 0x20;
    });
}

fn flip_a_code_of_the_first_operand(program: &Program, call: &Call, backend: &mut dyn Backend) {
    change(program, call.operands[0].value, backend, |data| data[9] ^= 0x10);
}

#[test]
fn a_clean_step_has_no_findings() {
    for precision in ["f32", "bf16", "mxfp8", "mxfp8-floor", "mxfp8-128", "mxfp8-2d", "nvfp4"] {
        for micro_batch in [2, 1] {
            let mut engine = micro_engine(precision, micro_batch);
            let mut audit = Audit::new(engine.program());
            for number in 0..3 {
                step(&mut engine, number, &mut audit);
            }
            let report = audit.finish();
            assert!(report.is_clean(), "{precision}, micro-batches of {micro_batch}: {report}");
            // 14 linear layers, three GEMMs each, three steps; each of 64 samples at least.
            let gemms = 3 * 3 * 14 * (BATCH / micro_batch) as u64;
            assert!(report.calls_checked > gemms, "{report}");
            assert!(report.elements_checked > 64 * gemms, "{report}");
            let evaluation = engine.evaluation_program();
            assert_eq!(audit_counts(evaluation), [], "{precision}");
            assert_eq!(audit_provenance(evaluation), [], "{precision}");
        }
    }
}

/// 1024 tokens, 28 linear layers, as `deepwell train` without arguments has them.
#[test]
fn a_clean_step_of_the_default_model_has_no_findings() {
    let settings = Settings::default();
    let (seq, batch) = (settings.seq_len, settings.batch_size);
    let graph = settings.model_source().unwrap().capture(Some(seq)).unwrap();
    let policy = settings.precision_policy().unwrap();
    let options = CompileOptions::new(policy, seq, batch);
    let mut engine = compile(graph, deepwell_probe::probe(), &options).unwrap();
    engine.initialize(7).unwrap();
    let tokens: Vec<i32> = (0..(seq * batch) as i32 + 1).map(|i| i * i * 31 % 256).collect();
    let (inputs, targets) = (&tokens[..seq * batch], &tokens[1..]);
    let mut audit = Audit::new(engine.program());
    engine.step_observed(inputs, targets, LEARNING_RATE, 1.0, &mut audit).unwrap();
    let report = audit.finish();
    assert!(report.is_clean(), "{report}");
}

/// Biases, several key heads, sizes that are no multiple of 64 or 128: groups of 128 end short.
#[test]
fn a_clean_step_of_odd_sizes_has_no_findings() {
    let micro = LlamaConfig::preset("llama-micro").unwrap();
    let config = LlamaConfig {
        hidden_size: 96,
        intermediate_size: 160,
        num_heads: 6,
        num_kv_heads: 2,
        head_dim: 16,
        attention_bias: true,
        mlp_bias: true,
        ..micro
    };
    for precision in ["bf16", "mxfp8", "mxfp8-128", "mxfp8-2d", "nvfp4"] {
        let policy = PrecisionPolicy::preset(precision).unwrap();
        let mut engine = engine_of(&config, policy, 1);
        let mut audit = Audit::new(engine.program());
        step(&mut engine, 0, &mut audit);
        let report = audit.finish();
        assert!(report.is_clean(), "{precision}: {report}");
    }
}

#[test]
fn planted_faults_are_found_where_they_are() {
    let weight = ("model.layers.1.self_attn.q_proj.weight.mx", 0);
    let activation = ("layers.1.input_layernorm.mx", 0);
    let gradient = ("layers.1.mlp.gate_proj.wgrad", 1);
    // What is done, at which run of which call, and words that a finding must have.
    let rows: &[(&str, Fault, CallRun, &[&str])] = &[
        (
            "a scale byte one too high in a block of 32",
            Fault::After(raise_a_row_scale),
            activation,
            &["1 of 64 rowwise scales differ", "first at [1, 1]"],
        ),
        (
            "a scale byte one too low in the columnwise operand of a weight",
            Fault::After(lower_a_column_scale),
            weight,
            &["1 of 128 columnwise scales differ", "present master weight", "[63, 1]"],
        ),
        (
            "a code flipped in an activation",
            Fault::After(flip_a_row_code),
            activation,
            &["1 of 2048 rowwise data differ", "first at [1, 5]"],
        ),
        (
            "a code flipped between quantization and kind",
            Fault::Before(flip_a_code_of_the_first_operand),
            // The last reader of the rowwise operand: each reader after the change has a finding.
            ("layers.1.self_attn.v_proj", 0),
            &["layers.1.input_layernorm.mx.row", "changed after it was quantized"],
        ),
        (
            "rowwise and columnwise operand of a square weight swapped",
            Fault::After(swap_operands),
            weight,
            &["rowwise and columnwise operands of", "are swapped"],
        ),
        (
            "master weights rounded to BF16",
            Fault::After(round_masters_to_bf16),
            ("adamw.0", 0),
            &["sampled elements are not AdamW's", "all sampled elements are BF16 numbers"],
        ),
        (
            "a moment halved",
            Fault::After(halve_first_moment),
            ("adamw.0", 0),
            &["`moment1.", "sampled elements are not AdamW's"],
        ),
        ("no update", Fault::Skip, ("adamw.0", 0), &["not AdamW's"]),
        (
            "a step that is counted twice",
            Fault::After(count_once_more),
            ("adamw_coefficients", 0),
            &["applied and skipped steps"],
        ),
        (
            "a step size four ulps too large",
            Fault::After(raise_the_step_size),
            ("adamw_coefficients", 0),
            &["coefficient 6: expected"],
        ),
        ("a stale weight copy", Fault::Skip, weight, &["rowwise data", "present master weight"]),
        (
            "a stale BF16 weight copy",
            Fault::Skip,
            ("model.layers.0.self_attn.q_proj.weight.bf16", 0),
            &["bf16 elements differ", "present master weight"],
        ),
        (
            "an activation that is not quantized again",
            Fault::Skip,
            ("layers.1.post_attention_layernorm.mx", 1),
            &["rowwise data differ from those of `layers.1.post_attention_layernorm`"],
        ),
        (
            "a wrong norm",
            Fault::After(double_the_norm),
            ("grad_norm", 0),
            &["expected a gradient norm"],
        ),
        (
            "a kind of zeros",
            Fault::After(zero_the_output),
            ("layers.0.mlp.up_proj", 0),
            &["of 64 sampled outputs are not the dot product", "got 0e0"],
        ),
        (
            "one wrong output of a dgrad in BF16",
            Fault::After(change_the_last_element),
            ("layers.1.mlp.down_proj.dgrad", 1),
            &["1 of 64 sampled outputs", "first at [31, 159]"],
        ),
        (
            "a gradient that leaves out a micro-batch",
            Fault::Skip,
            gradient,
            &["sampled outputs are not the dot product", "added to what was there"],
        ),
    ];
    let mut engine = micro_engine("mxfp8", 1);
    let mut problems = Vec::new();
    for &(name, fault, at, words) in rows {
        engine.initialize(7).unwrap();
        // Moments that are not zero, and other bytes in the arena than the step will write.
        let mut audit = Audit::new(engine.program());
        step(&mut engine, 0, &mut audit);
        let report = run_with_fault(&mut engine, at, fault);
        let findings = &report.findings;
        let mut problem = |what: String| problems.push(format!("{name}: {what}: {report}"));
        if report.is_clean() {
            problem("nothing found".to_string());
        }
        if findings.iter().any(|finding| finding.call != at.0) {
            problem("found elsewhere".to_string());
        }
        for word in words {
            if !findings.iter().any(|finding| finding.what.contains(word)) {
                problem(format!("no finding with `{word}`"));
            }
        }
        assert!(findings.len() <= FINDINGS_KEPT);
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn a_copy_that_was_stale_before_the_step_is_found() {
    let mut engine = micro_engine("mxfp8", 2);
    let at = "model.layers.0.mlp.up_proj.weight.mx";
    let report = run_with_fault(&mut engine, (at, 0), Fault::Skip);
    assert!(!report.is_clean());
    let mut audit = Audit::new(engine.program());
    step(&mut engine, 2, &mut audit);
    let report = audit.finish();
    assert!(!report.is_clean());
    for finding in &report.findings {
        assert_eq!(finding.call, at);
        assert!(finding.what.starts_with("at the start of the step, "), "{finding}");
    }
}

/// What is done to a program.
type Rewrite = fn(&mut Program);

/// Findings about the program as such, as text.
fn of_program(program: &Program) -> String {
    let findings: Vec<Finding> =
        audit_counts(program).into_iter().chain(audit_provenance(program)).collect();
    findings.iter().map(|finding| format!("{finding}\n")).collect()
}

fn call_mut<'a>(program: &'a mut Program, name: &str) -> &'a mut Call {
    program.calls.iter_mut().find(|call| call.name == name).unwrap()
}

/// A GEMM of the gradient before its quantization and of the master weight.
fn dgrad_in_bf16(program: &mut Program) {
    let dgrad = "layers.0.mlp.gate_proj.dgrad";
    let parameters = &program.parameters;
    let state =
        parameters.iter().find(|s| s.name == "model.layers.0.mlp.gate_proj.weight").unwrap();
    let weight = Operand { value: state.master.value(), access: Access::Read };
    let data = call_mut(program, dgrad).operands[0].value;
    let quantization =
        program.calls.iter().find(|c| c.outputs().iter().any(|out| out.value == data)).unwrap();
    let gradient = quantization.operands[0];
    let call = call_mut(program, dgrad);
    call.op = LinearDgrad {}.into();
    call.operands.splice(..4, [gradient, weight]);
    call.input_count = 2;
}

/// Lowered with a tensor in BF16 of which the report says MXFP8.
fn all_gemms_in_bf16(program: &mut Program) {
    let name = "model.layers.0.mlp.gate_proj.weight";
    let config = LlamaConfig::preset("llama-micro").unwrap();
    let policy = PrecisionPolicy::mxfp8().with_rule(name, Format::Bf16).unwrap();
    *program = engine_of(&config, policy, 2).program().clone();
    program.precision.iter_mut().find(|entry| entry.tensor == name).unwrap().format = Format::MXFP8;
}

fn rowwise_operand_in_dgrad(program: &mut Program) {
    // A square weight: shapes do not tell.
    let fprop: Vec<Operand> = call_mut(program, "layers.0.self_attn.o_proj").operands.clone();
    call_mut(program, "layers.0.self_attn.o_proj.dgrad").operands[2..4]
        .copy_from_slice(&fprop[2..4]);
}

fn scales_of_the_other_operand(program: &mut Program) {
    let dgrad = call_mut(program, "layers.0.self_attn.o_proj.dgrad").operands.clone();
    call_mut(program, "layers.0.self_attn.o_proj").operands[3] = dgrad[3];
}

fn weight_of_another_layer(program: &mut Program) {
    let other = call_mut(program, "layers.1.mlp.up_proj.dgrad").operands.clone();
    call_mut(program, "layers.0.mlp.up_proj.dgrad").operands[2..4].copy_from_slice(&other[2..4]);
}

fn gradient_of_another_layer(program: &mut Program) {
    let other = call_mut(program, "layers.1.mlp.up_proj.wgrad").operands.clone();
    call_mut(program, "layers.0.mlp.up_proj.wgrad").operands[4] = other[4];
}

fn weight_as_activation(program: &mut Program) {
    let call = call_mut(program, "layers.0.mlp.up_proj");
    let weight: Vec<Operand> = call.operands[2..4].to_vec();
    call.operands[..2].copy_from_slice(&weight);
}

fn high_precision_as_data(program: &mut Program) {
    let master = program.parameters[0].master.value();
    call_mut(program, "layers.0.mlp.up_proj").operands[0].value = master;
}

fn no_wgrad(program: &mut Program) {
    program.calls.retain(|call| call.name != "layers.0.mlp.up_proj.wgrad");
}

#[test]
fn programs_that_do_not_do_what_the_policy_says() {
    let rows: &[(Rewrite, &[&str])] = &[
        (
            dgrad_in_bf16,
            &[
                "`layers.0.mlp.gate_proj.dgrad`: dgrad of \
                 `model.layers.0.mlp.gate_proj.weight` in bf16, expected mxfp8",
                "`program`: `model.layers.0.mlp.gate_proj.weight`: \
                 expected 1 dgrad in mxfp8, got 0",
            ],
        ),
        (
            all_gemms_in_bf16,
            &[
                "`layers.0.mlp.gate_proj`: fprop of `model.layers.0.mlp.gate_proj.weight` in bf16",
                "expected 1 fprop in mxfp8, got 0",
                "expected 1 dgrad in mxfp8, got 0",
                "expected 1 wgrad in mxfp8, got 0",
            ],
        ),
        (no_wgrad, &["`model.layers.0.mlp.up_proj.weight`: expected 1 wgrad in mxfp8, got 0"]),
        (
            rowwise_operand_in_dgrad,
            &["`layers.0.self_attn.o_proj.dgrad`: dgrad reads the rowwise \
               `model.layers.0.self_attn.o_proj.weight`, expected it columnwise"],
        ),
        (
            scales_of_the_other_operand,
            &["reads data of the rowwise `", "with scales of the columnwise `"],
        ),
        (
            weight_of_another_layer,
            &["`layers.0.mlp.up_proj.dgrad`: belongs to parameter \
                 `model.layers.1.mlp.up_proj.weight`, other GEMMs of the layer to parameter \
                 `model.layers.0.mlp.up_proj.weight`"],
        ),
        (gradient_of_another_layer, &["`layers.0.mlp.up_proj.wgrad`: belongs to parameter"]),
        (
            weight_as_activation,
            &["fprop reads the weight `model.layers.0.mlp.up_proj.weight` as its first operand"],
        ),
        (high_precision_as_data, &["as data, which no quantization wrote"]),
    ];
    let clean = micro_engine("mxfp8", 2).program().clone();
    assert_eq!(of_program(&clean), "");
    for (change, words) in rows {
        let mut program = clean.clone();
        change(&mut program);
        let text = of_program(&program);
        for word in *words {
            assert!(text.contains(word), "no finding with `{word}`: {text}");
        }
    }
}

#[test]
fn the_program_of_the_test_has_what_the_tests_speak_of() {
    let engine = micro_engine("mxfp8", 2);
    let program = engine.program();
    let count = |wanted: GemmKind| {
        let kind = |call: &Call| match call.op {
            Op::ScaledGemm(ScaledGemm { kind, .. }) => Some(kind),
            _ => None,
        };
        program.calls.iter().filter(|call| kind(call) == Some(wanted)).count()
    };
    // 14 linear layers, the first and the last in BF16.
    assert!(GemmKind::ALL.iter().all(|&kind| count(kind) == 12));
}

/// What the backward runs again is quantized again, under other names; the GEMMs stay as many.
#[test]
fn programs_that_recompute_are_clean() {
    let engine = micro_engine("mxfp8", 1);
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
        let plan = Plan { recompute, ..engine.plan().clone() };
        let program = lower(engine.graph(), &plan, &CpuCatalog, &cpu_target(1)).unwrap();
        assert_eq!(of_program(&program), "", "{recompute}");
        let is_recomputed = program.calls.iter().any(|call| call.recomputes);
        assert_eq!(is_recomputed, recompute != Recompute::None);
    }
}
