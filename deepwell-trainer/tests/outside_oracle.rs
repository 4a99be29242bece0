//! Loss, logits and every gradient of small models against PyTorch and transformers: ten llamas,
//! and mixtures of gpt-oss, DeepSeek-V3, Mixtral and Qwen3-MoE.
//!
//! The fixtures and how they were made are described in `tests/oracle/README.md`. The engine runs
//! in F32, so that what is left of a difference is rounding; each case runs with its batch whole
//! and as micro-batches of one sequence, whose gradients must add up to the same.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::path::PathBuf;

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::capture::{LlamaConfig, ModelConfig, StoredSlice, capture_for_sequence};
use deepwell_ir::ops::IGNORED_TARGET;
use deepwell_ir::{Call, Instance, Program};
use deepwell_kernels::{Backend, KernelError, Observer};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Engine, compile};
use safetensors::SafeTensors;

/// Largest difference over the largest magnitude of the tensor. The oracle's own rounding is at
/// most 6e-6 by its README; ours in F32 is of that order, and a wrong rule is off by 1e-2 or more.
const TOLERANCE: f64 = 1e-4;

/// A gradient norm that clips nothing.
const NO_CLIPPING: f64 = 1e30;

struct Case {
    name: String,
    config: LlamaConfig,
    /// The stored tensors of each parameter.
    parts: HashMap<String, Vec<StoredSlice>>,
    bytes: Vec<u8>,
    batch: usize,
    seq: usize,
}

impl Case {
    fn read(name: &str) -> Case {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/oracle");
        let path = folder.join(format!("{name}.config.json"));
        let (config, _) = LlamaConfig::from_path(&path).unwrap();
        let bytes = std::fs::read(folder.join(format!("{name}.safetensors"))).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let shape = file.tensor("input_ids").unwrap().shape().to_vec();
        let parts = ModelConfig::from(config.clone()).stored_slices().into_iter();
        let parts = parts.map(|(spec, parts)| (spec.name, parts)).collect();
        let (name, batch, seq) = (name.to_string(), shape[0], shape[1]);
        Case { name, config, parts, bytes, batch, seq }
    }

    /// A parameter of shape `shape` in canonical order, or its gradient, out of the stored tensors.
    fn parameter(&self, prefix: &str, name: &str, shape: &[usize]) -> Vec<f32> {
        let mut values = vec![f32::NAN; shape.iter().product()];
        for part in &self.parts[name] {
            let (own, shape) = part.elements_of(shape);
            let stored = self.f32s(&format!("{prefix}.{}", part.name));
            values[own].copy_from_slice(&part.extract(&stored, shape).expect("it fits"));
        }
        values
    }

    /// Whether a parameter is one that transformers does not train: a buffer without a gradient.
    fn is_buffer(&self, name: &str) -> bool {
        let part = &self.parts[name][0].name;
        self.file().tensor(&format!("grad.{part}")).is_err()
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap()
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        let data = self.file().tensor(name).unwrap().data().to_vec();
        data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        self.file().tensor(name).unwrap().shape().to_vec()
    }

    fn i32s(&self, name: &str) -> Vec<i32> {
        let data = self.file().tensor(name).unwrap().data().to_vec();
        let wide = data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()));
        wide.map(|value| i32::try_from(value).unwrap()).collect()
    }

    /// An engine with the fixture's weights.
    fn engine(&self, micro_batch: usize) -> Engine {
        let graph = capture_for_sequence(&self.config, self.seq).unwrap();
        let mut options = CompileOptions {
            micro_batch: Some(micro_batch),
            ..CompileOptions::new(PrecisionPolicy::f32(), self.seq, self.batch)
        };
        // As transformers has them, selection biases do not move.
        options.optimizer.selection_bias_rate = 0.0;
        let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
        let mut engine = compile(graph, Hardware::cpu_only(cpu), &options).unwrap();
        for state in engine.program().parameters.clone() {
            let shape = engine.program().value(state.master.value()).shape.clone();
            let weight = self.parameter("weight", &state.name, &shape);
            engine.write_value(state.master.value(), cast_slice(&weight)).unwrap();
        }
        engine.refresh_weight_copies().unwrap();
        engine
    }
}

/// Keeps what the output head read, one micro-batch after the other.
#[derive(Default)]
struct HeadInput {
    rows: Vec<f32>,
}

impl Observer for HeadInput {
    fn after(
        &mut self,
        program: &Program,
        call: &Call,
        _instance: Instance,
        backend: &mut dyn Backend,
    ) -> Result<(), KernelError> {
        if call.op.name() == "linear_cross_entropy_grad" {
            let value = program.value(call.operands[0].value);
            let at = self.rows.len();
            self.rows.resize(at + value.elements(), 0.0);
            backend.read(value.range, cast_slice_mut(&mut self.rows[at..]))?;
        }
        Ok(())
    }
}

/// The differences of one run, written down tensor by tensor.
struct Comparison {
    run: String,
    failures: String,
    worst: (f64, String),
}

impl Comparison {
    fn compare(&mut self, name: &str, shape: &[usize], got: &[f32], expected: &[f32]) {
        assert_eq!(got.len(), expected.len(), "{}: length of `{name}`", self.run);
        let largest = expected.iter().fold(0.0f64, |top, &value| top.max(f64::from(value).abs()));
        let relative =
            |index: usize| (f64::from(got[index]) - f64::from(expected[index])).abs() / largest;
        let worst = (0..got.len()).map(relative).fold(0.0, |top: f64, difference| {
            // `max` would lose a NaN.
            if difference.is_nan() || difference > top { difference } else { top }
        });
        if worst.is_nan() || worst > self.worst.0 {
            self.worst = (worst, name.to_string());
        }
        let is_off = |index: &usize| !matches!(relative(*index), d if d <= TOLERANCE);
        let Some(first) = (0..got.len()).find(is_off) else { return };
        let count = (0..got.len()).filter(is_off).count();
        writeln!(
            self.failures,
            "{}: `{name}` {shape:?}: {count} of {} elements differ, by up to {worst:.2e} of the \
             largest magnitude; the first at {:?}: expected {}, got {}",
            self.run,
            got.len(),
            coordinate(first, shape),
            expected[first],
            got[first]
        )
        .unwrap();
    }
}

fn coordinate(mut index: usize, shape: &[usize]) -> Vec<usize> {
    let mut at = vec![0; shape.len()];
    for (axis, size) in shape.iter().enumerate().rev() {
        at[axis] = index % size;
        index /= size;
    }
    at
}

/// `x · headᵀ` in f64.
fn logits(x: &[f32], head: &[f32], hidden: usize) -> Vec<f32> {
    let dot = |row: &[f32], column: &[f32]| -> f64 {
        row.iter().zip(column).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    x.chunks_exact(hidden)
        .flat_map(|row| head.chunks_exact(hidden).map(move |column| dot(row, column) as f32))
        .collect()
}

fn read_f32s(engine: &mut Engine, id: deepwell_ir::ValueId) -> Vec<f32> {
    let mut values = vec![0.0f32; engine.program().value(id).elements()];
    engine.read_value(id, cast_slice_mut(&mut values)).unwrap();
    values
}

/// Runs a case; gives the failures as text, empty when there are none.
fn run(name: &str, in_micro_batches: bool) -> String {
    let case = Case::read(name);
    let micro_batch = if in_micro_batches { 1 } else { case.batch };
    let (inputs, targets) = (case.i32s("input_ids"), case.i32s("targets"));
    assert!(targets.contains(&IGNORED_TARGET), "{name} has no ignored target");
    let mut engine = case.engine(micro_batch);
    assert_eq!(engine.program().micro_batches, case.batch / micro_batch);
    let mut head_input = HeadInput::default();
    let outcome =
        engine.step_observed(&inputs, &targets, 0.0, NO_CLIPPING, &mut head_input).unwrap();
    assert!(!outcome.skipped);

    let mut comparison = Comparison {
        run: format!("{} in micro-batches of {micro_batch}", case.name),
        failures: String::new(),
        worst: (0.0, String::new()),
    };
    let expected_loss = case.f32s("loss");
    comparison.compare("loss", &[1], &[outcome.loss], &expected_loss);
    let head = match case.config.tie_word_embeddings {
        true => "weight.model.embed_tokens.weight",
        false => "weight.lm_head.weight",
    };
    let got = logits(&head_input.rows, &case.f32s(head), case.config.hidden_size);
    comparison.compare("logits", &case.shape("logits"), &got, &case.f32s("logits"));

    let parameters = engine.program().parameters.clone();
    let is_gradient = |name: &&&str| name.starts_with("grad.");
    let stored: BTreeSet<String> =
        case.file().names().iter().filter(is_gradient).map(ToString::to_string).collect();
    let mut square_sum = 0.0f64;
    let mut compared = BTreeSet::new();
    for state in &parameters {
        let shape = engine.program().value(state.master.value()).shape.clone();
        let weight = read_f32s(&mut engine, state.master.value());
        let before = case.parameter("weight", &state.name, &shape);
        assert_eq!(weight, before, "`{}` moved at learning rate 0", state.name);
        let got = read_f32s(&mut engine, state.gradient.unwrap());
        if case.is_buffer(&state.name) {
            // In the place of a gradient it has the counts of a step.
            let experts = case.config.experts.as_ref().unwrap();
            let pairs = case.batch * case.seq * experts.experts_per_token;
            assert_eq!(got.iter().sum::<f32>(), pairs as f32, "`{}`", state.name);
            continue;
        }
        let expected = case.parameter("grad", &state.name, &shape);
        square_sum += expected.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>();
        comparison.compare(&format!("grad.{}", state.name), &shape, &got, &expected);
        compared.extend(case.parts[&state.name].iter().map(|part| format!("grad.{}", part.name)));
    }
    assert_eq!(compared, stored, "{name}: every gradient is compared");
    let norm = square_sum.sqrt() as f32;
    comparison.compare("gradient norm", &[1], &[outcome.grad_norm], &[norm]);
    if !in_micro_batches {
        let loss = engine.evaluate(&inputs, &targets).unwrap();
        comparison.compare("evaluation loss", &[1], &[loss], &expected_loss);
    }
    println!("{}: worst {:.1e} in `{}`", comparison.run, comparison.worst.0, comparison.worst.1);
    comparison.failures
}

/// All cases by name.
fn cases() -> impl Iterator<Item = String> {
    let dense = (0..10).map(|number| format!("case_{number:02}"));
    dense.chain((0..7).map(|number| format!("mixture_{number:02}")))
}

#[test]
fn loss_logits_and_gradients_are_those_of_pytorch() {
    let failures: String = cases().map(|name| run(&name, false)).collect();
    assert!(failures.is_empty(), "\n{failures}");
}

#[test]
fn gradients_of_micro_batches_add_up_to_those_of_pytorch() {
    let batches = |name: &String| Case::read(name).batch > 1;
    let failures: String = cases().filter(batches).map(|name| run(&name, true)).collect();
    assert!(failures.is_empty(), "\n{failures}");
}
