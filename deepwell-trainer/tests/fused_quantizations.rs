//! A program whose quantizations are fused with their producers, and whose optimizer writes the
//! copies of weights, gives the bits that the program without gives, and everything that looks at
//! quantizations sees them in both.

mod gpt;

use std::collections::{BTreeMap, BTreeSet};

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{
    Call, Graph, KernelCatalog, KernelRequest, MemoryKind, NoKernel, Op, Phase, Program, Recompute,
    Selection, Target, TensorKind, ValueId,
};
use deepwell_kernels::{CpuBackend, CpuCatalog, Executor, LoadedProgram, cpu_target};
use deepwell_plan::{
    OptimizerSpec, PlanRequest, autoplan, lower_evaluation, quantized_bytes, quantized_flop_share,
};
use deepwell_precision::{Format, GemmMode, OperandClass, PrecisionPolicy};
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::audit::Audit;
use deepwell_trainer::init;

const SEQ: usize = 32;
const BATCH: usize = 4;
const MICRO_BATCH: usize = 2;

/// The CPU's kernels, as a GPU's catalog would offer them: fused wherever there is such an op, with
/// all copies of weights by the optimizer. A residual is added by the GEMM before it, or by the
/// norm behind it.
#[derive(Clone, Copy, PartialEq)]
enum Fusing {
    ResidualsInGemms,
    ResidualsInNorms,
}

impl KernelCatalog for Fusing {
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel> {
        CpuCatalog.select(request, target)
    }

    fn predicted_s(&self, request: &KernelRequest<'_>, target: &Target) -> Option<f64> {
        let is_fused = match request.op {
            Op::AdamW(op) => !op.copies.is_empty(),
            op => matches!(op, Op::Fused(_)),
        };
        let is_slow = *self == Self::ResidualsInNorms && request.op.name().ends_with("_residual");
        let cost_s = if is_slow { 4.0 } else { f64::from(!is_fused) };
        CpuCatalog.predicted_s(request, target).map(|_| cost_s)
    }

    fn fixed_overhead_bytes(&self, target: &Target, calls: &[Call]) -> usize {
        CpuCatalog.fixed_overhead_bytes(target, calls)
    }
}

/// All that two steps, one that is skipped and an evaluation leave, as bits, by name.
#[derive(PartialEq)]
struct Outcome {
    losses: Vec<u32>,
    weights: BTreeMap<String, Vec<u32>>,
    copies: BTreeMap<String, Vec<u8>>,
    statistics: BTreeMap<String, Vec<u64>>,
    evaluation_loss: u32,
}

struct Run {
    outcome: Outcome,
    program: Program,
}

fn loss_of(executor: &mut Executor, loaded: &LoadedProgram) -> u32 {
    let mut loss = [0f32];
    let id = loaded.program().host.loss.unwrap();
    executor.read(loaded.program(), id, cast_slice_mut(&mut loss)).unwrap();
    assert!(loss[0].is_finite());
    loss[0].to_bits()
}

fn read<T: bytemuck::Pod>(executor: &mut Executor, program: &Program, id: ValueId) -> Vec<T> {
    let mut words = vec![T::zeroed(); program.value(id).elements()];
    executor.read(program, id, cast_slice_mut(&mut words)).unwrap();
    words
}

fn initialize(executor: &mut Executor, graph: &Graph, loaded: &LoadedProgram) {
    let program = loaded.program();
    for ((_, tensor), state) in graph.parameters().zip(&program.parameters) {
        let TensorKind::Parameter { init, .. } = tensor.kind else { panic!("no parameter") };
        let mut values = vec![0f32; program.value(state.master.value()).elements()];
        init::fill(init, 7, &state.name, &mut values);
        executor.write(program, state.master.value(), cast_slice(&values)).unwrap();
    }
    executor.run_phase(loaded, Phase::Weights).unwrap();
}

/// Writes the inputs of step `step`, the same for each micro-batch, which count in full; `scale` is
/// 1, or what spoils all gradients.
fn feed(executor: &mut Executor, program: &Program, step: usize, scale: f32) {
    let host = &program.host;
    let count = program.batch * program.seq;
    let token = |at: usize| ((at * at * 31 + at * 7 + step) % gpt::VOCABULARY) as i32;
    let of = |shift: usize| -> Vec<i32> { (0..count).map(|at| token(at + shift)).collect() };
    executor.write(program, host.tokens.unwrap(), cast_slice(&of(0))).unwrap();
    executor.write(program, host.targets.unwrap(), cast_slice(&of(1))).unwrap();
    let scale = [scale / program.tokens_per_step() as f32];
    executor.write(program, host.loss_scale.unwrap(), cast_slice(&scale)).unwrap();
}

fn run(
    graph: &Graph,
    policy: &PrecisionPolicy,
    rule: Recompute,
    catalog: &dyn KernelCatalog,
) -> Run {
    let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
    let request = PlanRequest {
        seq: SEQ,
        global_batch: BATCH,
        policy: policy.clone(),
        optimizer: OptimizerSpec::default(),
        memory_limit_bytes: None,
        micro_batch: Some(MICRO_BATCH),
        recompute: Some(rule),
        saved_activations: Default::default(),
    };
    let target = cpu_target(2);
    let planned = autoplan(graph, &Hardware::cpu_only(cpu), &request, catalog, &target).unwrap();
    let program = planned.program;
    let evaluation = lower_evaluation(graph, &planned.plan, &program, catalog, &target).unwrap();
    let bytes = program.arena.bytes.max(evaluation.arena.bytes);
    let mut executor = Executor::new(Box::new(CpuBackend::new()), bytes).unwrap();
    let training = executor.load(program.clone()).unwrap();
    let evaluation = executor.load(evaluation).unwrap();
    initialize(&mut executor, graph, &training);
    let schedule = [1e-2f32, 1.0];
    executor.write(&program, program.host.schedule.unwrap(), cast_slice(&schedule)).unwrap();
    let mut losses = Vec::new();
    for step in 0..2 {
        feed(&mut executor, &program, step, 1.0);
        let mut audit = Audit::new(&program);
        executor.run_observed(&training, &mut audit).unwrap();
        let report = audit.finish();
        assert!(report.is_clean(), "{report}");
        losses.push(loss_of(&mut executor, &training));
    }
    feed(&mut executor, &program, 2, f32::NAN);
    executor.run(&training).unwrap();
    let counters: Vec<u64> = read(&mut executor, &program, program.host.counters.unwrap());
    assert_eq!(counters, [2, 1]);
    let named = program.parameters.iter().map(|state| (state.name.clone(), state.master.value()));
    let weights = named.map(|(name, id)| (name, read(&mut executor, &program, id))).collect();
    let counters = program.host.statistics.iter().cloned();
    let statistics = counters.map(|(name, id)| (name, read(&mut executor, &program, id))).collect();
    let mut copies = BTreeMap::new();
    for (index, value) in program.values.iter().enumerate() {
        if value.memory == MemoryKind::Weights {
            let mut bytes = vec![0; value.range.bytes];
            executor.read(&program, ValueId(index as u32), &mut bytes).unwrap();
            copies.insert(value.name.clone(), bytes);
        }
    }
    feed(&mut executor, evaluation.program(), 2, 1.0);
    executor.run(&evaluation).unwrap();
    let evaluation_loss = loss_of(&mut executor, &evaluation);
    Run { outcome: Outcome { losses, weights, copies, statistics, evaluation_loss }, program }
}

/// Both ways of lowering, compared; `names` are the fused ops that there must be.
fn check(graph: &Graph, preset: &str, fusing: Fusing, names: &[&str], unread: &str) {
    let policy =
        PrecisionPolicy::preset(preset).unwrap().with_rule("*_proj.weight", Format::MXFP8).unwrap();
    for rule in [Recompute::None, Recompute::Selective, Recompute::Full] {
        let apart = run(graph, &policy, rule, &CpuCatalog);
        let fused = run(graph, &policy, rule, &fusing);
        let case = format!("{} {preset} {rule}", graph.name);
        let (one, other) = (&apart.outcome, &fused.outcome);
        assert_eq!(one.losses, other.losses, "{case}");
        assert_eq!(one.evaluation_loss, other.evaluation_loss, "{case}");
        for (name, weights) in &one.weights {
            assert!(weights == &other.weights[name], "{case}: weights of `{name}` differ");
        }
        for (name, copy) in &one.copies {
            assert!(copy == &other.copies[name], "{case}: copies `{name}` differ");
        }
        assert!(!one.copies.is_empty() && one.copies.len() == other.copies.len(), "{case}");
        all_copies_are_written(&fused.program, &case);
        assert!(!one.statistics.is_empty());
        assert_eq!(one.statistics, other.statistics, "{case}");
        same_accounts(&apart.program, &fused.program, &case);
        let is_fused = |op: &Op| matches!(op, Op::Fused(_));
        assert!(!apart.program.calls.iter().any(|call| is_fused(&call.op)), "{case}");
        let calls = fused.program.calls.iter().filter(|call| is_fused(&call.op));
        let found: BTreeSet<String> = calls.map(|call| call.op.name().to_string()).collect();
        // An activation that alone runs again finds its input there.
        let is_again = rule == Recompute::Selective && names.contains(&"scaled_gemm_gelu_quantize");
        let expected = names.iter().copied().chain(is_again.then_some("gelu_quantize"));
        assert_eq!(found, expected.map(str::to_string).collect(), "{case}");
        // Of what nobody else reads nothing but quantized data is there.
        let found =
            |program: &Program, suffix: &str| program.find(&format!("{unread}{suffix}")).is_some();
        assert!(found(&apart.program, "") && !found(&fused.program, ""), "{case}");
        assert!(found(&fused.program, ".mx.row"), "{case}");
    }
}

#[test]
fn fused_programs_give_the_same_bits() {
    let config = LlamaConfig { num_layers: 2, ..LlamaConfig::preset("llama-micro").unwrap() };
    let llama = capture(&config).unwrap();
    let of_llama = [
        "attention_quantize",
        "rms_norm_backward_quantize",
        "rms_norm_quantize",
        "rope_backward_quantize",
        "swiglu_backward_quantize",
        "swiglu_quantize",
    ];
    let mixture = capture(&LlamaConfig::preset("moe-micro").unwrap()).unwrap();
    let of_mixture = [
        "attention_quantize",
        "expert_swiglu_backward_quantize",
        "expert_swiglu_quantize",
        "head_rms_norm_backward_quantize",
        "permute_quantize",
        "rms_norm_backward_quantize",
        "rms_norm_quantize",
    ];
    let in_norms: &[&str] = &["add_rms_norm_quantize"];
    for (preset, fusing, of_residuals, more_of_mixture) in [
        ("mxfp8", Fusing::ResidualsInNorms, in_norms, &[] as &[&str]),
        (
            "mxfp8",
            Fusing::ResidualsInGemms,
            &["scaled_gemm_residual"],
            &["router_logits_backward_residual", "unpermute_residual"],
        ),
        ("mxfp8-2d", Fusing::ResidualsInGemms, &["scaled_gemm_residual"], &[]),
        ("mxfp8-128", Fusing::ResidualsInNorms, in_norms, &[]),
    ] {
        let names = [&of_llama, of_residuals].concat();
        check(&llama, preset, fusing, &names, "layers.1.mlp.swiglu.backward.dgate");
        if preset != "mxfp8-2d" {
            let names = [&of_mixture, of_residuals, more_of_mixture].concat();
            check(&mixture, preset, fusing, &names, "layers.1.mlp.experts.permute");
        }
    }
    check(
        &gpt::gpt().unwrap(),
        "mxfp8",
        Fusing::ResidualsInNorms,
        &[
            "add_layer_norm_quantize",
            "layer_norm_backward_quantize",
            "layer_norm_quantize",
            "scaled_gemm_gelu_backward_quantize",
            "scaled_gemm_gelu_quantize",
        ],
        "layers.1.gelu",
    );
}

/// Producers are fused with the quantizations that there are, dequantized or not.
#[test]
fn fused_programs_of_single_operands_give_the_same_bits() {
    use OperandClass::{DgradWeight, FpropActivation, WgradGradient};
    let config = LlamaConfig { num_layers: 2, ..LlamaConfig::preset("llama-micro").unwrap() };
    let all = PrecisionPolicy::from_toml("keep_first_last_bf16 = false", "policy").unwrap();
    let mixed = all.clone().only(&[FpropActivation, DgradWeight, WgradGradient]);
    for policy in [mixed, all.with_gemm(GemmMode::Emulated)] {
        let graph = capture(&config).unwrap();
        let apart = run(&graph, &policy, Recompute::Full, &CpuCatalog);
        let fused = run(&graph, &policy, Recompute::Full, &Fusing::ResidualsInGemms);
        assert!(apart.outcome == fused.outcome, "{}", policy.to_toml());
        same_accounts(&apart.program, &fused.program, &policy.to_toml());
        assert_eq!(quantized_flop_share(&fused.program), (0.0, 0.0), "{}", policy.to_toml());
        let is_fused = |op: &Op| matches!(op, Op::Fused(_));
        assert!(fused.program.calls.iter().any(|call| is_fused(&call.op)));
    }
}

/// The optimizer writes all copies: a step leaves out the body that makes them.
fn all_copies_are_written(program: &Program, case: &str) {
    let body = program.body_of(Phase::Weights).unwrap();
    assert!(program.calls_of(body).iter().all(|call| call.alone_only), "{case}");
    assert!(program.schedule.iter().all(|invocation| invocation.body != body), "{case}");
}

/// What is said of quantizations does not depend on how they are made.
fn same_accounts(apart: &Program, fused: &Program, case: &str) {
    let count = |program: &Program| {
        let calls = program.calls.iter().filter(|call| !call.alone_only);
        calls.map(|call| call.quantizations().len()).sum::<usize>()
    };
    assert_eq!(count(apart), count(fused), "{case}");
    assert_eq!(quantized_bytes(apart), quantized_bytes(fused), "{case}");
    assert_eq!(quantized_flop_share(apart), quantized_flop_share(fused), "{case}");
    assert_eq!(apart.flops(), fused.flops(), "{case}");
    let sources = |program: &Program| -> BTreeSet<_> {
        let quantizations = program.calls.iter().flat_map(|call| call.quantizations());
        quantizations.map(|quantization| quantization.tensor(program)).collect()
    };
    assert_eq!(sources(apart), sources(fused), "{case}");
}
