//! Captured models of GPT-2 and Qwen 3 on the CPU: gradients against finite differences of the
//! loss, and a loss that falls.

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::capture::{Gpt2Config, LlamaConfig, ModelFamily, capture, capture_gpt2};
use deepwell_ir::{Graph, Init, Phase, Recompute, TensorKind, ValueId};
use deepwell_kernels::{CpuBackend, CpuCatalog, Executor, LoadedProgram, cpu_target};
use deepwell_plan::{OptimizerSpec, PlanRequest, autoplan};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::init;

const SEQ: usize = 12;
const VOCABULARY: usize = 96;

/// `std` is large for gradients that are not lost in rounding.
fn gpt2(std: f64) -> Graph {
    let config = Gpt2Config {
        vocab_size: VOCABULARY,
        hidden_size: 64,
        intermediate_size: 128,
        num_layers: 2,
        num_heads: 2,
        max_position_embeddings: 16,
        layer_norm_eps: 1e-5,
        gelu_tanh: true,
        scale_attention: true,
        tie_word_embeddings: true,
        initializer_range: std,
        torch_dtype: None,
    };
    capture_gpt2(&config).unwrap()
}

fn qwen3(std: f64) -> Graph {
    let config = LlamaConfig {
        family: ModelFamily::Qwen3,
        vocab_size: VOCABULARY,
        initializer_range: std,
        ..LlamaConfig::preset("llama-micro").unwrap()
    };
    capture(&config).unwrap()
}

struct Model {
    executor: Executor,
    loaded: LoadedProgram,
}

impl Model {
    fn new(graph: &Graph, rule: Recompute, rate: f32, everywhere: Option<Init>) -> Model {
        let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
        let request = PlanRequest {
            seq: SEQ,
            global_batch: 4,
            policy: PrecisionPolicy::f32(),
            optimizer: OptimizerSpec::default(),
            memory_limit_bytes: None,
            micro_batch: Some(2),
            recompute: Some(rule),
            saved_activations: Default::default(),
        };
        let hardware = Hardware::cpu_only(cpu);
        let program =
            autoplan(graph, &hardware, &request, &CpuCatalog, &cpu_target(2)).unwrap().program;
        let mut executor = Executor::new(Box::new(CpuBackend::new()), program.arena.bytes).unwrap();
        let loaded = executor.load(program).unwrap();
        let mut model = Model { executor, loaded };
        for ((_, tensor), index) in graph.parameters().zip(0..) {
            let TensorKind::Parameter { init, .. } = tensor.kind else { panic!("no parameter") };
            let state = &model.loaded.program().parameters[index];
            let (name, master) = (state.name.clone(), state.master.value());
            let mut values = model.read(master);
            init::fill(everywhere.unwrap_or(init), 3, &name, &mut values);
            model.write(master, &values);
        }
        model.feed(rate);
        model
    }

    fn read(&mut self, id: ValueId) -> Vec<f32> {
        let mut values = vec![0f32; self.loaded.program().value(id).elements()];
        self.executor.read(self.loaded.program(), id, cast_slice_mut(&mut values)).unwrap();
        values
    }

    fn write(&mut self, id: ValueId, values: &[f32]) {
        self.executor.write(self.loaded.program(), id, cast_slice(values)).unwrap();
    }

    /// Inputs that stay from step to step, the same for each micro-batch.
    fn feed(&mut self, rate: f32) {
        let host = self.loaded.program().host.clone();
        let token = |at: usize| ((at * at * 31 + at * 7) % VOCABULARY) as i32;
        let of = |shift: usize| -> Vec<i32> { (0..2 * SEQ).map(|at| token(at + shift)).collect() };
        let program = self.loaded.program();
        self.executor.write(program, host.tokens.unwrap(), cast_slice(&of(0))).unwrap();
        self.executor.write(program, host.targets.unwrap(), cast_slice(&of(1))).unwrap();
        let tokens = self.loaded.program().tokens_per_step();
        self.write(host.loss_scale.unwrap(), &[1.0 / tokens as f32]);
        self.write(host.schedule.unwrap(), &[rate, 1.0]);
    }

    fn loss(&mut self) -> f64 {
        self.executor.run_phase(&self.loaded, Phase::Weights).unwrap();
        self.executor.run(&self.loaded).unwrap();
        let loss = self.read(self.loaded.program().host.loss.unwrap())[0];
        assert!(loss.is_finite());
        f64::from(loss)
    }

    /// The loss with `master` moved from `at` by `distance` along `direction`.
    fn loss_at(&mut self, master: ValueId, at: &[f32], direction: &[f64], distance: f64) -> f64 {
        let moved: Vec<f32> =
            at.iter().zip(direction).map(|(&w, d)| (f64::from(w) + distance * d) as f32).collect();
        self.write(master, &moved);
        self.loss()
    }
}

#[test]
fn gradients_are_those_of_finite_differences() {
    // Five-point differences: the loss is right to 1e-6 or so, which the step turns into 1e-4.
    const STEP: f64 = 0.02;
    let init = Init::Normal { std: 0.3 };
    for graph in [gpt2(0.3), qwen3(0.3)] {
        for rule in [Recompute::None, Recompute::Full] {
            let mut model = Model::new(&graph, rule, 0.0, Some(init));
            model.loss();
            let parameters = model.loaded.program().parameters.clone();
            let gradients: Vec<Vec<f32>> =
                parameters.iter().map(|state| model.read(state.gradient.unwrap())).collect();
            let mut seen = 0;
            for (state, gradient) in parameters.iter().zip(&gradients) {
                let at = model.read(state.master.value());
                let size = gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
                // Adding one number to all scores of a query changes nothing: a bias of keys has
                // no gradient.
                if state.name.ends_with("attn.k.bias") {
                    assert!(size < 1e-5, "the gradient of `{}` is {size}", state.name);
                    continue;
                }
                assert!(size > 1e-4, "the gradient of `{}` is only {size}", state.name);
                let uphill: Vec<f64> = gradient.iter().map(|&g| f64::from(g) / size).collect();
                let mut loss =
                    |distance: f64| model.loss_at(state.master.value(), &at, &uphill, distance);
                let (near, far) = (loss(STEP) - loss(-STEP), loss(2.0 * STEP) - loss(-2.0 * STEP));
                let measured = (8.0 * near - far) / (12.0 * STEP);
                assert!(
                    (measured - size).abs() <= 2e-4 + 5e-3 * size,
                    "{rule}, `{}`: gradient {size}, finite difference {measured}",
                    state.name
                );
                model.write(state.master.value(), &at);
                seen += 1;
            }
            assert!(seen + 2 >= parameters.len());
        }
    }
}

#[test]
fn the_loss_falls() {
    for graph in [gpt2(0.02), qwen3(0.02)] {
        let mut model = Model::new(&graph, Recompute::None, 3e-3, None);
        let first = model.loss();
        // Nothing is known at first: all tokens are alike.
        assert!((first - (VOCABULARY as f64).ln()).abs() < 0.2, "{}: {first}", graph.name);
        let last = (0..40).map(|_| model.loss()).last().unwrap();
        assert!(last < 0.5 * first, "{}: {first} fell to {last} only", graph.name);
    }
}

#[test]
fn sequences_longer_than_the_position_table_are_refused() {
    let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
    let request = PlanRequest {
        seq: 17,
        global_batch: 1,
        policy: PrecisionPolicy::f32(),
        optimizer: OptimizerSpec::default(),
        memory_limit_bytes: None,
        micro_batch: Some(1),
        recompute: Some(Recompute::None),
        saved_activations: Default::default(),
    };
    let hardware = Hardware::cpu_only(cpu);
    let graph = gpt2(0.02);
    let program =
        autoplan(&graph, &hardware, &request, &CpuCatalog, &cpu_target(2)).unwrap().program;
    let mut executor = Executor::new(Box::new(CpuBackend::new()), program.arena.bytes).unwrap();
    let error = executor.load(program).err().unwrap().to_string();
    assert!(error.contains("expected sequences of 1 to 16 tokens, got 17"), "{error}");
}
