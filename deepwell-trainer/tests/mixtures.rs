//! Mixtures of experts that train on the CPU: every rule of recomputation and any number of threads
//! give the same bits, every call is what its definition says, and gradients are those of the loss.

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::capture::{
    ExpertsConfig, LlamaConfig, ModelFamily, capture, capture_for_sequence,
};
use deepwell_ir::{Call, Graph, Instance, Op, PrecisionPolicy, Program, Recompute};
use deepwell_kernels::{Backend, KernelError, Observer};
use deepwell_moe::{RouterTraining, update_selection_bias, with_router_training};
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::audit::Audit;
use deepwell_trainer::{CompileOptions, Engine, compile};

const SEQ: usize = 40;
const BATCH: usize = 4;

/// The preset for tests with so many experts for each token.
fn config(family: ModelFamily, top_k: usize, normalize_gates: bool) -> LlamaConfig {
    let preset = LlamaConfig::preset("moe-micro").expect("the preset");
    let experts = preset.experts.clone().expect("its experts");
    let experts = ExpertsConfig { experts_per_token: top_k, normalize_gates, ..experts };
    LlamaConfig { family, experts: Some(experts), ..preset }
}

fn qwen3(top_k: usize) -> Graph {
    capture(&config(ModelFamily::Qwen3Moe, top_k, false)).unwrap()
}

fn mixtral(top_k: usize) -> Graph {
    let config = config(ModelFamily::Mixtral, top_k, true);
    let experts = config.experts.clone();
    let intermediate_size = experts.as_ref().map_or(0, |experts| experts.intermediate_size);
    capture(&LlamaConfig { intermediate_size, head_dim: 32, ..config }).unwrap()
}

/// A preset of DeepSeek-V3 or gpt-oss, whose windows of 16 tokens are shorter than the sequences.
fn preset(name: &str) -> Graph {
    capture_for_sequence(&LlamaConfig::preset(name).expect("a preset"), SEQ).unwrap()
}

fn engine(graph: Graph, policy: PrecisionPolicy, rule: Recompute, micro_batch: usize) -> Engine {
    let options = CompileOptions {
        micro_batch: Some(micro_batch),
        recompute: Some(rule),
        ..CompileOptions::new(policy, SEQ, BATCH)
    };
    let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
    let mut engine = compile(graph, Hardware::cpu_only(cpu), &options).unwrap();
    engine.initialize(7).unwrap();
    engine
}

fn batch(shift: usize) -> Vec<i32> {
    let token = |index: usize| (index * index * 31 + index * 7 + 3) as i32 % 256;
    (0..BATCH * SEQ).map(|index| token(index + shift)).collect()
}

/// Bits of the losses of three steps, and of every gradient of the last.
fn bits(engine: &mut Engine) -> (Vec<u32>, Vec<(String, Vec<u32>)>) {
    let losses = (0..3).map(|step| {
        let outcome = engine.step(&batch(step), &batch(step + 1), 1e-3, 1.0).unwrap();
        assert!(outcome.loss.is_finite() && !outcome.skipped);
        outcome.loss.to_bits()
    });
    let losses = losses.collect();
    let mut gradients = Vec::new();
    for state in engine.program().parameters.clone() {
        let Some(id) = state.gradient else { continue };
        let mut bits = vec![0u32; engine.program().value(id).elements()];
        engine.read_value(id, cast_slice_mut(&mut bits)).unwrap();
        assert!(bits.iter().any(|&bits| bits != 0), "gradient of `{}` is zero", state.name);
        gradients.push((state.name, bits));
    }
    (losses, gradients)
}

#[test]
fn every_rule_and_number_of_threads_gives_the_same_bits() {
    for (graph, policy) in [
        (qwen3(2), PrecisionPolicy::bf16()),
        (qwen3(2), PrecisionPolicy::mxfp8()),
        (preset("gpt-oss-micro"), PrecisionPolicy::mxfp8()),
        (preset("deepseek-micro"), PrecisionPolicy::mxfp8()),
    ] {
        let run = |rule, threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| bits(&mut engine(graph.clone(), policy.clone(), rule, 2)))
        };
        let expected = run(Recompute::None, 1);
        for (rule, threads) in [
            (Recompute::None, 3),
            (Recompute::Selective, 2),
            (Recompute::Full, 2),
            (Recompute::None, 1),
        ] {
            let name = &graph.name;
            assert!(run(rule, threads) == expected, "{name}: {rule} on {threads} threads");
        }
    }
}

/// What the output head read, a row for each token.
#[derive(Default)]
struct HeadInput(Vec<u8>);

impl Observer for HeadInput {
    fn after(
        &mut self,
        program: &Program,
        call: &Call,
        _instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        if call.op.name() == "linear_cross_entropy_grad" {
            let range = program.value(call.operands[0].value).range;
            self.0.resize(range.bytes, 0);
            backend.read(range, &mut self.0)?;
        }
        Ok(())
    }
}

/// A token's numbers do not depend on which rows its experts gave it: sequences in another order
/// give the same bits in that order. Gradients are sums over tokens, in another order too.
#[test]
fn a_permuted_batch_gives_the_same_tokens_permuted() {
    const ORDER: [usize; BATCH] = [2, 0, 3, 1];
    let permuted = |tokens: &[i32]| -> Vec<i32> {
        ORDER.iter().flat_map(|&row| tokens[row * SEQ..][..SEQ].to_vec()).collect()
    };
    for name in ["f32", "bf16", "mxfp8", "mxfp8-128"] {
        for graph in [qwen3(2), mixtral(3), preset("gpt-oss-micro"), preset("deepseek-micro")] {
            let what = format!("{} in {name}", graph.name);
            let policy = PrecisionPolicy::preset(name).unwrap();
            let run = |inputs: &[i32], targets: &[i32]| {
                let mut engine = engine(graph.clone(), policy.clone(), Recompute::None, BATCH);
                let mut head = HeadInput::default();
                let outcome = engine.step_observed(inputs, targets, 0.0, 1.0, &mut head).unwrap();
                (head.0, outcome, engine.expert_loads().to_vec())
            };
            let (rows, outcome, loads) = run(&batch(0), &batch(1));
            let (got, of_permuted, own_loads) = run(&permuted(&batch(0)), &permuted(&batch(1)));
            assert_eq!(own_loads, loads, "{what}");
            let bytes = rows.len() / BATCH;
            for (row, &from) in ORDER.iter().enumerate() {
                let is_same = got[row * bytes..][..bytes] == rows[from * bytes..][..bytes];
                assert!(is_same, "{what}: sequence {from} at {row}");
            }
            // One loss is a sum of the other's terms.
            let loss = (f64::from(of_permuted.loss) - f64::from(outcome.loss)).abs();
            assert!(loss < 1e-6 * f64::from(outcome.loss), "{what}: {loss}");
            let norm = f64::from(of_permuted.grad_norm) / f64::from(outcome.grad_norm) - 1.0;
            // MXFP8 has scales for 32 neighbors along the tokens: an error of 2^-4 of each element,
            // of which a norm over all of them sees next to nothing.
            let bound = if name == "f32" { 1e-5 } else { 1e-2 };
            assert!(norm.abs() < bound, "{what}: {norm}");
        }
    }
}

/// Choices, permutations and sums are those of their ops' tests; here each quantization, GEMM and
/// update of a step is looked at, and which operands are read.
#[test]
fn audits_find_nothing() {
    let models = [qwen3(2), mixtral(2), preset("gpt-oss-micro"), preset("deepseek-micro")];
    for (name, models) in [
        ("f32", &models[..1]),
        ("bf16", &models[1..2]),
        ("mxfp8", &models[..]),
        ("mxfp8-128", &models[2..3]),
        ("mxfp8-2d", &models[3..]),
    ] {
        for graph in models {
            let policy = PrecisionPolicy::preset(name).unwrap();
            let model = graph.name.clone();
            let mut engine = engine(graph.clone(), policy, Recompute::None, 2);
            let mut audit = Audit::new(engine.program());
            for step in 0..2 {
                engine
                    .step_observed(&batch(step), &batch(step + 1), 1e-3, 1.0, &mut audit)
                    .unwrap();
            }
            let report = audit.finish();
            assert!(report.is_clean(), "{model} in {name}: {report}");
        }
    }
}

/// Of 13 tensors of experts' and attention's projections in two layers all but the first and the
/// last are in MXFP8, whatever their number of experts.
#[test]
fn experts_are_computed_in_mxfp8() {
    let mut config = config(ModelFamily::Qwen3Moe, 2, true);
    if let Some(experts) = &mut config.experts {
        experts.num_experts = 5;
    }
    let graph = capture(&config).unwrap();
    let engine = engine(graph, PrecisionPolicy::mxfp8(), Recompute::None, 2);
    let program = engine.program();
    let scaled = program.calls.iter().filter(|call| matches!(call.op, Op::ScaledGroupedGemm(_)));
    // Six stacks, the last of which stays in BF16, with three GEMMs each.
    assert_eq!(scaled.count(), 5 * 3);
    let (share, _) = engine.quantized_flop_share_planned();
    assert!(share > 0.7 && share < 1.0, "{share}");
    let routers = program.precision.iter().filter(|tensor| tensor.reason.contains("routers"));
    assert_eq!(routers.map(|tensor| tensor.format.name()).collect::<Vec<_>>(), ["f32", "f32"]);
}

#[test]
fn losses_fall() {
    for policy in [PrecisionPolicy::bf16(), PrecisionPolicy::mxfp8()] {
        for graph in
            [qwen3(2), mixtral(2), qwen3(8), preset("gpt-oss-micro"), preset("deepseek-micro")]
        {
            let name = format!("{} in {}", graph.name, policy.format().name());
            let mut engine = engine(graph, policy.clone(), Recompute::None, 4);
            let mut loss = || engine.step(&batch(0), &batch(1), 3e-3, 1.0).unwrap().loss;
            let first = loss();
            assert!((first - 256f32.ln()).abs() < 0.2, "{name}: {first}");
            let last = (0..40).map(|_| loss()).last().unwrap_or(first);
            assert!(last < 0.6 * first, "{name}: {first} fell to {last} only");
        }
    }
}

/// Loads are of the whole step and counted before anything is dropped.
#[test]
fn loads_are_counted_and_drops_reported() {
    let pairs = (2 * BATCH * SEQ) as u64;
    for (factor, drops) in [(None, false), (Some(0.5), true), (Some(8.0), false)] {
        let training = RouterTraining { capacity_factor: factor, ..RouterTraining::default() };
        let graph = with_router_training(&qwen3(2), &training).unwrap();
        for (rule, micro_batch) in [(Recompute::None, 4), (Recompute::Full, 1)] {
            let mut engine = engine(graph.clone(), PrecisionPolicy::mxfp8(), rule, micro_batch);
            let outcome = engine.step(&batch(0), &batch(1), 1e-3, 1.0).unwrap();
            assert!(outcome.loss.is_finite() && !outcome.skipped);
            let loads = engine.expert_loads();
            assert_eq!(loads.iter().map(|load| load.layer).collect::<Vec<_>>(), [0, 1]);
            for load in loads {
                assert_eq!(load.chosen.iter().sum::<u64>(), pairs, "{load:?}");
                // Of half an even share half or more is dropped.
                assert_eq!(load.dropped >= pairs / 2, drops, "{load:?}");
                assert!(drops || load.dropped == 0, "{load:?}");
                // A micro-batch has all of its pairs that are kept, in groups of whole 32 rows.
                let of_micro_batch = (pairs - load.dropped) * micro_batch as u64 / BATCH as u64;
                assert_eq!(load.rows_used % 32, 0, "{load:?}");
                assert!(load.rows_used >= of_micro_batch, "{load:?}");
                assert!(load.rows_used <= load.rows_planned, "{load:?}");
                let pairs = pairs * micro_batch as u64 / BATCH as u64;
                let experts = load.chosen.len() as u64;
                let planned = (pairs + 32 * experts).next_multiple_of(32);
                // A capacity of half an even share makes room for no more.
                let share = pairs / experts;
                let full = |factor: f64| experts * (factor * share as f64) as u64;
                let planned = factor.map_or(planned, |factor| {
                    planned.min(full(factor).next_multiple_of(32 * experts))
                });
                assert_eq!(load.rows_planned, planned, "{load:?}");
            }
        }
    }
}

/// Balanced routing costs the coefficient in each layer, and that of new weights is nearly so; the
/// same whatever the micro-batches, and nothing where a model is only evaluated.
#[test]
fn auxiliary_losses_are_part_of_the_loss() {
    let policy = PrecisionPolicy::f32();
    let mut plain = engine(qwen3(2), policy.clone(), Recompute::None, 4);
    let expected = plain.step(&batch(0), &batch(1), 0.0, 1.0).unwrap();
    let evaluated = plain.evaluate(&batch(0), &batch(1)).unwrap();
    let training = RouterTraining { balance: 0.5, ..RouterTraining::default() };
    let graph = with_router_training(&qwen3(2), &training).unwrap();
    for (rule, micro_batch) in [(Recompute::None, 4), (Recompute::Full, 1)] {
        let mut engine = engine(graph.clone(), policy.clone(), rule, micro_batch);
        let outcome = engine.step(&batch(0), &batch(1), 0.0, 1.0).unwrap();
        let added = f64::from(outcome.loss - expected.loss);
        assert!(added > 0.99 && added < 1.3, "{rule} {micro_batch}: {added}");
        assert!(outcome.grad_norm > expected.grad_norm);
        if micro_batch == 4 {
            let loss = engine.evaluate(&batch(0), &batch(1)).unwrap();
            assert_eq!(loss.to_bits(), evaluated.to_bits());
        }
    }
}

/// With as many choices as experts no choice can change, so the loss is smooth. (Gradients of
/// gpt-oss and DeepSeek-V3 are compared with those of transformers in `outside_oracle.rs`.)
#[test]
fn gradients_are_those_of_finite_differences() {
    // Five-point differences: the loss is right to 1e-6 or so, which the step turns into 1e-4.
    const STEP: f64 = 0.02;
    for graph in [qwen3(8), mixtral(8)] {
        let name = graph.name.clone();
        let mut engine = engine(graph, PrecisionPolicy::f32(), Recompute::None, 2);
        let parameters = engine.program().parameters.clone();
        // Weights large enough for gradients that are not lost in rounding.
        for state in &parameters {
            let mut values = vec![0f32; engine.program().value(state.master.value()).elements()];
            deepwell_trainer::init::fill(
                deepwell_ir::Init::Normal { std: 0.25 },
                3,
                &state.name,
                &mut values,
            );
            engine.write_value(state.master.value(), cast_slice(&values)).unwrap();
        }
        engine.refresh_weight_copies().unwrap();
        let loss = |engine: &mut Engine| {
            engine.refresh_weight_copies().unwrap();
            f64::from(engine.step(&batch(0), &batch(1), 0.0, 1e9).unwrap().loss)
        };
        loss(&mut engine);
        let read = |engine: &mut Engine, id| {
            let mut values = vec![0f32; engine.program().value(id).elements()];
            engine.read_value(id, cast_slice_mut(&mut values)).unwrap();
            values
        };
        let gradients: Vec<Vec<f32>> = parameters
            .iter()
            .map(|state| read(&mut engine, state.gradient.expect("it is trained")))
            .collect();
        for (state, gradient) in parameters.iter().zip(&gradients) {
            let at = read(&mut engine, state.master.value());
            let size = gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
            assert!(size > 1e-5, "{name}: the gradient of `{}` is only {size}", state.name);
            let mut loss_at = |distance: f64| {
                let moved = at.iter().zip(gradient);
                let moved: Vec<f32> = moved
                    .map(|(&w, &g)| (f64::from(w) + distance * f64::from(g) / size) as f32)
                    .collect();
                engine.write_value(state.master.value(), cast_slice(&moved)).unwrap();
                loss(&mut engine)
            };
            let near = loss_at(STEP) - loss_at(-STEP);
            let far = loss_at(2.0 * STEP) - loss_at(-2.0 * STEP);
            let measured = (8.0 * near - far) / (12.0 * STEP);
            assert!(
                (measured - size).abs() <= 2e-4 + 5e-3 * size,
                "{name}, `{}`: gradient {size}, finite difference {measured}",
                state.name
            );
            engine.write_value(state.master.value(), cast_slice(&at)).unwrap();
        }
    }
}

/// The selection biases of DeepSeek-V3 follow the counts of a whole step, whatever its
/// micro-batches and recomputation, and are no part of the gradient's norm. A step that is skipped
/// moves nothing.
#[test]
fn selection_biases_follow_the_load() {
    let read = |engine: &mut Engine, id| {
        let mut values = vec![0f32; engine.program().value(id).elements()];
        engine.read_value(id, cast_slice_mut(&mut values)).unwrap();
        values
    };
    let pairs = 2 * BATCH * SEQ;
    for (rate, rule, micro_batch) in [
        (1e-3, Recompute::None, BATCH),
        (1e-3, Recompute::None, 1),
        (1e-3, Recompute::Full, 2),
        (0.25, Recompute::None, BATCH),
        (0.0, Recompute::None, BATCH),
    ] {
        let mut options = CompileOptions {
            micro_batch: Some(micro_batch),
            recompute: Some(rule),
            ..CompileOptions::new(PrecisionPolicy::f32(), SEQ, BATCH)
        };
        options.optimizer.selection_bias_rate = rate;
        let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
        let graph = preset("deepseek-micro");
        let mut engine = compile(graph, Hardware::cpu_only(cpu), &options).unwrap();
        engine.initialize(7).unwrap();
        let parameters = engine.program().parameters.clone();
        let (biases, trained): (Vec<_>, Vec<_>) =
            parameters.into_iter().partition(|state| state.name.contains("e_score_correction"));
        assert_eq!(biases.len(), 2, "the first layer is dense");
        assert!(biases.iter().all(|state| state.first_moment.is_none()));
        let mut expected: Vec<Vec<f32>> = vec![vec![0.0; 8]; 2];
        for step in 0..3 {
            let outcome = engine.step(&batch(step), &batch(step + 1), 1e-2, 1.0).unwrap();
            let mut squares = 0f64;
            for state in &trained {
                let gradient = read(&mut engine, state.gradient.unwrap());
                squares += gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>();
            }
            // The norm is summed in another order, and rounded once.
            let norm = f64::from(outcome.grad_norm);
            assert!((norm - squares.sqrt()).abs() < 1e-5 * norm, "{norm} {}", squares.sqrt());
            let loads = engine.expert_loads().to_vec();
            for ((state, expected), load) in biases.iter().zip(&mut expected).zip(loads) {
                let counts = read(&mut engine, state.gradient.unwrap());
                let counts: Vec<usize> = counts.iter().map(|&count| count as usize).collect();
                assert_eq!(counts.iter().sum::<usize>(), pairs, "{micro_batch} {rule}");
                assert!(counts.iter().zip(&load.chosen).all(|(a, b)| *a as u64 == *b));
                update_selection_bias(expected, &counts, f64::from(rate)).unwrap();
                assert_eq!(read(&mut engine, state.master.value()), *expected, "step {step}");
            }
        }
        assert_eq!(expected.iter().flatten().any(|bias| *bias != 0.0), rate > 0.0);

        // A weight that is not finite makes a gradient that is not.
        let mut broken = read(&mut engine, trained[0].master.value());
        broken.fill(f32::INFINITY);
        engine.write_value(trained[0].master.value(), cast_slice(&broken)).unwrap();
        engine.refresh_weight_copies().unwrap();
        assert!(engine.step(&batch(0), &batch(1), 1e-2, 1.0).unwrap().skipped);
        for (state, expected) in biases.iter().zip(&expected) {
            assert_eq!(read(&mut engine, state.master.value()), *expected, "a skipped step");
        }
    }
}
