//! An engine with the tensors of PyTorch that its parameters are parts of.

use std::collections::BTreeMap;

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::capture::StoredSlice;
use deepwell_trainer::{CompileOptions, Engine, ModelSource, Settings, compile};
use serde_json::{Value, json};

use crate::options::EngineOptions;
use crate::status::Failure;

/// A parameter of the engine that is a part of a tensor of PyTorch, or all of it.
struct Member {
    /// Index among the parameters of the program.
    parameter: usize,
    shape: Vec<usize>,
    part: StoredSlice,
}

/// A tensor of PyTorch's `state_dict`.
struct Tensor {
    elements: usize,
    members: Vec<Member>,
}

pub(crate) struct TrainedModel {
    engine: Engine,
    tensors: BTreeMap<String, Tensor>,
    description: Value,
}

fn invalid<T>(message: String) -> Result<T, Failure> {
    Err(Failure::InvalidArgument(message))
}

impl TrainedModel {
    /// Plans and loads a model, with the weights of its archive.
    pub(crate) fn open(options: &EngineOptions) -> Result<TrainedModel, Failure> {
        let mut model = ModelSource::open(&options.archive)?;
        model.check_trainable(options.train_frozen)?;
        let graph = model.capture(Some(options.seq))?;
        let hardware = deepwell_probe::probe();
        let mut settings = Settings {
            precision: options.precision.clone(),
            device: options.device,
            seq_len: options.seq,
            batch_size: options.batch,
            ..Settings::default()
        };
        let (policy, _) = settings.resolve_policy(&graph, &hardware)?;
        let defaults = CompileOptions::new(policy, options.seq, options.batch);
        let mut optimizer = defaults.optimizer.clone();
        (optimizer.beta1, optimizer.beta2) = options.betas;
        (optimizer.eps, optimizer.weight_decay) = (options.eps, options.weight_decay);
        let compile_options = CompileOptions {
            device: options.device,
            micro_batch: options.micro_batch,
            optimizer,
            ..defaults
        };
        let mut engine = compile(graph, hardware, &compile_options)?;
        engine.initialize(0)?;
        model.load_weights(&mut engine)?;
        let tensors = tensors_of(&model, &engine)?;
        let description = description(&model, &engine, &tensors);
        Ok(TrainedModel { engine, tensors, description })
    }

    /// Plan, precision and trained tensors.
    pub(crate) fn description(&self) -> &Value {
        &self.description
    }

    /// Loss, gradient norm, and whether the step was skipped.
    pub(crate) fn step(
        &mut self,
        inputs: &[i32],
        targets: &[i32],
        learning_rate: f64,
        max_grad_norm: f64,
    ) -> Result<(f32, f32, bool), Failure> {
        self.check_ids(inputs, targets)?;
        let outcome = self.engine.step(inputs, targets, learning_rate, max_grad_norm)?;
        Ok((outcome.loss, outcome.grad_norm, outcome.skipped))
    }

    /// The mean loss of a batch as large as a step's, without training.
    pub(crate) fn evaluate(&mut self, inputs: &[i32], targets: &[i32]) -> Result<f32, Failure> {
        self.check_ids(inputs, targets)?;
        let rows = self.engine.evaluation_rows();
        let tokens = rows * self.engine.plan().seq;
        if !inputs.len().is_multiple_of(tokens) {
            return invalid(format!(
                "expected a multiple of {rows} sequences, got {} tokens",
                inputs.len()
            ));
        }
        let (mut sum, mut count) = (0.0, 0usize);
        for (inputs, targets) in inputs.chunks(tokens).zip(targets.chunks(tokens)) {
            let counted = targets.iter().filter(|&&target| target >= 0).count();
            if counted > 0 {
                sum += f64::from(self.engine.evaluate(inputs, targets)?) * counted as f64;
                count += counted;
            }
        }
        Ok((sum / count.max(1) as f64) as f32)
    }

    fn check_ids(&self, inputs: &[i32], targets: &[i32]) -> Result<(), Failure> {
        let vocabulary = self.description["vocabulary"].as_i64().unwrap_or(0);
        let ignored = i64::from(deepwell_ir::ops::IGNORED_TARGET);
        let is_token = |&id: &i32| (0..vocabulary).contains(&i64::from(id));
        let is_target = |id: &i32| is_token(id) || i64::from(*id) == ignored;
        let wrong = inputs.iter().find(|id| !is_token(id));
        match wrong.or_else(|| targets.iter().find(|id| !is_target(id))) {
            None => Ok(()),
            Some(id) => invalid(format!(
                "expected token ids of 0 or more, below {vocabulary} (a target may be {ignored}, \
                 which does not count), got {id}"
            )),
        }
    }

    fn tensor(&self, name: &str, count: usize) -> Result<&Tensor, Failure> {
        match self.tensors.get(name) {
            Some(tensor) if tensor.elements == count => Ok(tensor),
            Some(tensor) => {
                invalid(format!("`{name}`: expected {} elements, got {count}", tensor.elements))
            }
            None => invalid(format!("expected a tensor that the engine trains, got `{name}`")),
        }
    }

    /// Writes the trained parts of a tensor into `values`.
    pub(crate) fn read(&mut self, name: &str, values: &mut [f32]) -> Result<(), Failure> {
        self.tensor(name, values.len())?;
        let (engine, members) = (&mut self.engine, &self.tensors[name].members);
        for member in members {
            let mut master = vec![0f32; member.shape.iter().product()];
            let id = engine.program().parameters[member.parameter].master.value();
            engine.read_value(id, cast_slice_mut(&mut master))?;
            let (own, shape) = member.part.elements_of(&member.shape);
            if member.part.insert(&master[own], shape, values).is_none() {
                return invalid(format!("`{name}`: {shape:?} is no part of {:?}", member.part));
            }
        }
        Ok(())
    }

    /// Takes master weights from a tensor. Moments and counters stay as they are.
    pub(crate) fn write(&mut self, name: &str, values: &[f32]) -> Result<(), Failure> {
        self.tensor(name, values.len())?;
        let (engine, members) = (&mut self.engine, &self.tensors[name].members);
        for member in members {
            let mut master = vec![0f32; member.shape.iter().product()];
            let id = engine.program().parameters[member.parameter].master.value();
            engine.read_value(id, cast_slice_mut(&mut master))?;
            let (own, shape) = member.part.elements_of(&member.shape);
            let Some(taken) = member.part.extract(values, shape) else {
                return invalid(format!("`{name}`: {shape:?} is no part of {:?}", member.part));
            };
            master[own].copy_from_slice(&taken);
            engine.write_value(id, cast_slice(&master))?;
        }
        Ok(engine.refresh_weight_copies()?)
    }
}

/// The tensors of PyTorch that the engine trains. A tied tensor is there under each of its names.
fn tensors_of(model: &ModelSource, engine: &Engine) -> Result<BTreeMap<String, Tensor>, Failure> {
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    let parameters = &engine.program().parameters;
    let aliases: BTreeMap<String, Vec<String>> =
        model.archive_tensors().into_iter().map(|tensor| (tensor.name, tensor.aliases)).collect();
    for stored in model.stored_slices()? {
        let Some(parameter) = parameters.iter().position(|state| state.name == stored.name) else {
            continue;
        };
        let mut names = vec![stored.part.name.clone()];
        names.extend(aliases.get(&stored.part.name).cloned().unwrap_or_default());
        let elements = stored.part.shape.iter().product();
        for name in names {
            let tensor =
                tensors.entry(name).or_insert_with(|| Tensor { elements, members: Vec::new() });
            let (shape, part) = (stored.shape.clone(), stored.part.clone());
            tensor.members.push(Member { parameter, shape, part });
        }
    }
    Ok(tensors)
}

fn description(model: &ModelSource, engine: &Engine, tensors: &BTreeMap<String, Tensor>) -> Value {
    let plan = engine.plan();
    let (bf16, quantized) = (engine.precision_fallbacks(), engine.quantized_flop_share_planned());
    json!({
        "device": engine.device().to_string(),
        "vocabulary": model.vocab_size(),
        "seq": plan.seq,
        "tokens_per_step": engine.tokens_per_step(),
        "evaluation_rows": engine.evaluation_rows(),
        "predicted_peak_bytes": engine.predicted_peak_bytes(),
        "quantized_flop_share": [quantized.0, quantized.1],
        "precision_fallbacks": bf16.iter().map(|entry| entry.to_string()).collect::<Vec<_>>(),
        "remarks": model.notes().remarks,
        "tensors": tensors.keys().collect::<Vec<_>>(),
    })
}
