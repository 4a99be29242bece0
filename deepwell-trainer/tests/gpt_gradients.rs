//! Gradients of a whole model of layer norms, biases and GELUs against finite differences of its
//! loss: derivatives of ops, their order in the backward, and the kernels together.

mod gpt;

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::{Phase, Recompute, TensorKind, ValueId};
use deepwell_kernels::{CpuBackend, CpuCatalog, Executor, LoadedProgram, cpu_target};
use deepwell_plan::{OptimizerSpec, PlanRequest, autoplan};
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::init;

const SEQ: usize = 12;

struct Model {
    executor: Executor,
    loaded: LoadedProgram,
}

impl Model {
    fn new(rule: Recompute) -> Model {
        let graph = gpt::gpt().unwrap();
        let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
        let request = PlanRequest {
            seq: SEQ,
            global_batch: 2,
            policy: PrecisionPolicy::f32(),
            optimizer: OptimizerSpec::default(),
            memory_limit_bytes: None,
            micro_batch: Some(1),
            recompute: Some(rule),
            saved_activations: Default::default(),
        };
        let hardware = Hardware::cpu_only(cpu);
        let program =
            autoplan(&graph, &hardware, &request, &CpuCatalog, &cpu_target(2)).unwrap().program;
        let mut executor = Executor::new(Box::new(CpuBackend::new()), program.arena.bytes).unwrap();
        let loaded = executor.load(program).unwrap();
        let mut model = Model { executor, loaded };
        for ((_, tensor), index) in graph.parameters().zip(0..) {
            let TensorKind::Parameter { init, .. } = tensor.kind else { panic!("no parameter") };
            let state = &model.loaded.program().parameters[index];
            let (name, master) = (state.name.clone(), state.master.value());
            let mut values = model.read(master);
            init::fill(init, 3, &name, &mut values);
            model.write(master, &values);
        }
        model.feed();
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

    /// Inputs that stay, the same for each micro-batch, and a learning rate of zero: a step changes
    /// no weight.
    fn feed(&mut self) {
        let host = self.loaded.program().host.clone();
        let token = |at: usize| ((at * at * 31 + at * 7) % gpt::VOCABULARY) as i32;
        let of = |shift: usize| -> Vec<i32> { (0..SEQ).map(|at| token(at + shift)).collect() };
        let program = self.loaded.program();
        self.executor.write(program, host.tokens.unwrap(), cast_slice(&of(0))).unwrap();
        self.executor.write(program, host.targets.unwrap(), cast_slice(&of(1))).unwrap();
        let tokens = self.loaded.program().tokens_per_step();
        self.write(host.loss_scale.unwrap(), &[1.0 / tokens as f32]);
        self.write(host.schedule.unwrap(), &[0.0, 1.0]);
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

/// A direction of length one.
fn unit(mut direction: Vec<f64>) -> Vec<f64> {
    let length = direction.iter().map(|d| d * d).sum::<f64>().sqrt();
    direction.iter_mut().for_each(|d| *d /= length);
    direction
}

#[test]
fn gradients_are_those_of_finite_differences() {
    // Five-point differences: the loss, about 5, is right to 1e-6 or so, which the step turns into
    // 1e-4; what is left out is of the fourth power of the step.
    const STEP: f64 = 0.02;
    for rule in [Recompute::None, Recompute::Selective, Recompute::Full] {
        let mut model = Model::new(rule);
        model.loss();
        let parameters = model.loaded.program().parameters.clone();
        let gradients: Vec<Vec<f32>> =
            parameters.iter().map(|state| model.read(state.gradient.unwrap())).collect();
        for (state, gradient) in parameters.iter().zip(&gradients) {
            let at = model.read(state.master.value());
            let gradient: Vec<f64> = gradient.iter().map(|&g| f64::from(g)).collect();
            let size = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
            assert!(size > 1e-2, "the gradient of `{}` is only {size}", state.name);
            let mut waves = vec![0f32; at.len()];
            init::fill(deepwell_ir::Init::Normal { std: 1.0 }, 11, &state.name, &mut waves);
            let waves = unit(waves.into_iter().map(f64::from).collect());
            // Uphill, and any other way.
            for direction in [unit(gradient.clone()), waves] {
                let mut loss =
                    |distance: f64| model.loss_at(state.master.value(), &at, &direction, distance);
                let (near, far) = (loss(STEP) - loss(-STEP), loss(2.0 * STEP) - loss(-2.0 * STEP));
                let measured = (8.0 * near - far) / (12.0 * STEP);
                let expected: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
                let allowed = 2e-4 + 2e-3 * size;
                assert!(
                    (measured - expected).abs() <= allowed,
                    "{rule}, `{}`: gradient {expected}, finite difference {measured}",
                    state.name
                );
            }
            model.write(state.master.value(), &at);
        }
    }
}
