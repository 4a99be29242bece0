//! Whole training steps and forward passes: time by op, tokens per second, memory.

use std::time::Instant;

use deepwell_ir::PrecisionPolicy;
use deepwell_plan::dryrun;
use deepwell_precision::random::XorShift64;
use deepwell_probe::Hardware;

use super::peer_task::{PeerModel, PeerTask};
use super::row::{Row, RowEvent};
use super::timer::percentile;
use super::{Section, Settings};
use deepwell_trainer::memory_sampler::MemorySampler;
use deepwell_trainer::profile::Profile;
use deepwell_trainer::{CompileOptions, Device, Engine, TrainError, compile};

/// Steps before the first timed step.
const WARM_UP_STEPS: usize = 3;
/// Forward passes of a sample on a GPU: the host synchronizes once for all of them.
const FORWARD_PASSES: usize = 20;
const LEARNING_RATE: f64 = 1e-4;
const MAX_GRAD_NORM: f64 = 1.0;
const MIB: f64 = (1u64 << 20) as f64;

/// Runs the sections that need a model in every precision. A failure of a precision becomes a row.
///
/// # Errors
/// The model or precision is unknown.
pub(super) fn run(
    settings: &Settings,
    hardware: &Hardware,
    sections: &[Section],
    on_event: &mut dyn FnMut(RowEvent),
) -> Result<(), TrainError> {
    settings.graph()?;
    for precision in settings.precisions() {
        PrecisionPolicy::preset(precision)?;
        let run = ModelRun { settings, hardware, precision };
        if let Err(error) = run.measure(sections, on_event) {
            for &section in sections {
                let failed = Row::failed(section, &settings.model, &error);
                on_event(RowEvent::Row(Box::new(run.named(failed))));
            }
        }
    }
    Ok(())
}

struct ModelRun<'a> {
    settings: &'a Settings,
    hardware: &'a Hardware,
    precision: &'a str,
}

impl ModelRun<'_> {
    fn named(&self, row: Row) -> Row {
        let shape = format!("B{} S{}", self.settings.batch_size, self.settings.seq_len);
        Row { dtype: self.precision.to_string(), shape, ..row }
    }

    fn measure(
        &self,
        sections: &[Section],
        on_event: &mut dyn FnMut(RowEvent),
    ) -> Result<(), TrainError> {
        let settings = self.settings;
        let what = format!("{} in {}", settings.model, self.precision);
        on_event(RowEvent::Note(format!("{what}: compile and initialize")));
        let options = CompileOptions {
            device: settings.device,
            ..CompileOptions::new(
                PrecisionPolicy::preset(self.precision)?,
                settings.seq_len,
                settings.batch_size,
            )
        };
        let compiled = || compile(settings.graph()?, self.hardware.clone(), &options);
        if settings.device == Device::Cpu {
            // Heap memory left over from planning is not memory of the run.
            drop(compiled()?);
        }
        let sampler = MemorySampler::start(settings.device);
        let mut engine = compiled()?;
        engine.initialize(0)?;
        let tokens = random_tokens(
            settings.batch_size * (settings.seq_len + 1),
            settings.config()?.vocab_size(),
        );
        let batch = Batch::new(&tokens, settings.seq_len);
        on_event(RowEvent::Note(format!("{what}: {} steps", settings.iterations)));
        // After a step all of the memory is in use; the profile's events are not part of it.
        let timing = StepTiming::measure(&mut engine, &batch, settings.iterations)?;
        let peak_bytes = sampler.as_ref().map(MemorySampler::peak_over_baseline_bytes);
        drop(sampler);
        let mut give = |row: Row| on_event(RowEvent::Row(Box::new(self.named(row))));
        if sections.contains(&Section::Forward) {
            give(self.forward_row(&mut engine, &batch)?);
        }
        if sections.contains(&Section::Train) {
            give(self.train_row(&engine, &timing)?);
        }
        if sections.contains(&Section::Memory) {
            let row = self.memory_row(&engine, peak_bytes);
            give(Row { peer_tasks: self.peer_tasks()?, ..row });
        }
        if sections.contains(&Section::Transformer) {
            let profile = Profile::of(&mut engine)?;
            let mut rows = self.profile_rows(&profile);
            if let Some(step_row) = rows.first_mut() {
                step_row.peer_tasks = self.peer_tasks()?;
            }
            rows.into_iter().for_each(give);
        }
        Ok(())
    }

    /// Times the evaluation program, run repeatedly on its number of sequences.
    fn forward_row(&self, engine: &mut Engine, batch: &Batch) -> Result<Row, TrainError> {
        let settings = self.settings;
        let rows = engine.evaluation_rows();
        let tokens = rows * settings.seq_len;
        let part = |of: &[i32]| of.iter().copied().cycle().take(tokens).collect::<Vec<i32>>();
        engine.evaluate(&part(&batch.inputs), &part(&batch.targets))?;
        let passes = if engine.device() == Device::Cpu { 1 } else { FORWARD_PASSES };
        engine.repeat_evaluation(passes)?;
        let mut times_s = Vec::with_capacity(settings.iterations);
        for _ in 0..settings.iterations {
            let begin = Instant::now();
            engine.repeat_evaluation(passes)?;
            times_s.push(begin.elapsed().as_secs_f64() / passes as f64);
        }
        let time_s = percentile(&times_s, 0.5);
        let program = engine.evaluation_program();
        let roofline_s = dryrun(std::slice::from_ref(program), engine.hardware()).time_s;
        let calls: usize = program.calls_with_runs().map(|(_, runs)| runs).sum();
        let peer = PeerModel::of(&settings.config()?).map(|model| PeerTask::Forward {
            batch: rows,
            seq: settings.seq_len,
            model,
        });
        let row = Row {
            kernel: format!("{calls} calls"),
            time_s: Some(time_s),
            spread_s: Some((percentile(&times_s, 0.1), percentile(&times_s, 0.9))),
            rate: Some(tokens as f64 / time_s),
            rate_unit: "tokens/s".to_string(),
            roofline_s: Some(roofline_s),
            bound: "prediction".to_string(),
            roofline_share: Some(roofline_s / time_s),
            peer_tasks: peer.into_iter().collect(),
            ..Row::new(Section::Forward, &settings.model)
        };
        Ok(row.with_detail("sequences", rows).with_detail(
            "executed TFLOP/s",
            format!("{:.1}", program.flops() as f64 / time_s / 1e12),
        ))
    }

    /// Training in BF16, and in FP8 if the precision is not BF16; only for Llama, which the peers
    /// have.
    fn peer_tasks(&self) -> Result<Vec<PeerTask>, TrainError> {
        let Some(model) = PeerModel::of(&self.settings.config()?).filter(|of| of.family == "llama")
        else {
            return Ok(Vec::new());
        };
        let task = |recipe: Option<&str>| PeerTask::Train {
            recipe: recipe.map(str::to_string),
            batch: self.settings.batch_size,
            seq: self.settings.seq_len,
            model: model.clone(),
        };
        let recipes = match self.precision {
            "bf16" => vec![None],
            _ => vec![None, Some("tensorwise"), Some("rowwise")],
        };
        Ok(recipes.into_iter().map(task).collect())
    }

    fn train_row(&self, engine: &Engine, timing: &StepTiming) -> Result<Row, TrainError> {
        let settings = self.settings;
        let program = engine.program();
        let tokens = program.tokens_per_step() as f64;
        let time_s = percentile(&timing.steps_s, 0.5);
        let spread_s = (percentile(&timing.steps_s, 0.1), percentile(&timing.steps_s, 0.9));
        let roofline_s = engine.prediction().time_s;
        let mut row = Row {
            kernel: format!(
                "{} calls",
                program.calls_with_runs().map(|(_, runs)| runs).sum::<usize>()
            ),
            time_s: Some(time_s),
            spread_s: Some(spread_s),
            rate: Some(tokens / time_s),
            rate_unit: "tokens/s".to_string(),
            roofline_s: Some(roofline_s),
            bound: "prediction".to_string(),
            roofline_share: Some(roofline_s / time_s),
            peer_tasks: self.peer_tasks()?,
            ..Row::new(Section::Train, &settings.model)
        };
        let flops = program.flops() as f64;
        row = row
            .with_detail("executed TFLOP/s", format!("{:.1}", flops / time_s / 1e12))
            .with_detail("micro-batches", program.micro_batches)
            .with_detail("recompute", engine.plan().recompute)
            .with_detail("loss of the last step", timing.loss);
        if timing.host_s.is_empty() {
            return Ok(row);
        }
        let host_s = percentile(&timing.host_s, 0.5);
        Ok(row
            .with_detail("host time per step, us", format!("{:.1}", host_s * 1e6))
            .with_detail("host share of a step", format!("{:.2} %", 100.0 * host_s / time_s)))
    }

    fn memory_row(&self, engine: &Engine, peak_bytes: Option<u64>) -> Row {
        let predicted = engine.predicted_peak_bytes() as f64;
        let row = Row::new(Section::Memory, &self.settings.model);
        let Some(measured) = peak_bytes else {
            let failure = "the system does not say how much memory is used".to_string();
            return Row { failure: Some(failure), ..row };
        };
        let measured = measured as f64;
        let error = 100.0 * (measured - predicted) / predicted;
        Row {
            rate: Some(measured / MIB),
            rate_unit: "MiB".to_string(),
            bound: "prediction".to_string(),
            roofline_share: Some(predicted / measured),
            ..row
        }
        .with_detail("predicted MiB", format!("{:.2}", predicted / MIB))
        .with_detail("measured over predicted", format!("{error:+.2} %"))
    }

    fn profile_rows(&self, profile: &Profile) -> Vec<Row> {
        let mut rows: Vec<Row> = profile
            .ops
            .iter()
            .map(|op| {
                let is_matrix = op.tflops * 1e3 > op.gbps * MATRIX_FLOPS_PER_BYTE;
                let (rate, unit) =
                    if is_matrix { (op.tflops, "TFLOP/s") } else { (op.gbps, "GB/s") };
                Row {
                    kernel: op.kernel.clone(),
                    time_s: Some(op.time_s),
                    rate: Some(rate),
                    rate_unit: unit.to_string(),
                    roofline_s: Some(op.time_s * op.roof_share),
                    bound: "roofline".to_string(),
                    roofline_share: Some(op.roof_share),
                    ..Row::new(Section::Transformer, &op.op)
                }
                .with_detail("calls", op.calls)
                .with_detail("share of the step", format!("{:.1} %", op.share * 100.0))
            })
            .collect();
        let roofline_s: f64 =
            profile.calls.iter().map(|call| call.roofline_s * call.runs as f64).sum();
        rows.insert(
            0,
            Row {
                kernel: format!("{} calls", profile.ops.iter().map(|op| op.calls).sum::<usize>()),
                time_s: Some(profile.time_s),
                rate: Some(profile.tokens as f64 / profile.time_s),
                rate_unit: "tokens/s".to_string(),
                roofline_s: Some(roofline_s),
                bound: "roofline".to_string(),
                roofline_share: Some(roofline_s / profile.time_s),
                ..Row::new(Section::Transformer, "whole step, call by call")
            },
        );
        rows
    }
}

/// Ops with more FLOPs per byte are reported in FLOPs: GEMMs have hundreds, norms and the optimizer
/// about one.
const MATRIX_FLOPS_PER_BYTE: f64 = 20.0;

/// Inputs and targets of a step.
struct Batch {
    inputs: Vec<i32>,
    targets: Vec<i32>,
}

impl Batch {
    /// Each sequence is one token longer than its inputs.
    fn new(tokens: &[i32], seq: usize) -> Batch {
        let rows = tokens.chunks_exact(seq + 1);
        Batch {
            inputs: rows.clone().flat_map(|row| row[..seq].to_vec()).collect(),
            targets: rows.flat_map(|row| row[1..].to_vec()).collect(),
        }
    }
}

fn random_tokens(count: usize, vocab: usize) -> Vec<i32> {
    let mut random = XorShift64(0x9E37_79B9_7F4A_7C15);
    (0..count).map(|_| ((random.draw() >> 33) % vocab.max(1) as u64) as i32).collect()
}

struct StepTiming {
    /// Seconds from the end of one step to the end of the next, two steps in flight if supported.
    steps_s: Vec<f64>,
    /// Host seconds per step; only for devices that run asynchronously.
    host_s: Vec<f64>,
    loss: f32,
}

impl StepTiming {
    fn measure(
        engine: &mut Engine,
        batch: &Batch,
        iterations: usize,
    ) -> Result<StepTiming, TrainError> {
        let start = |engine: &mut Engine| {
            engine.start_step(&batch.inputs, &batch.targets, LEARNING_RATE, MAX_GRAD_NORM)
        };
        let mut steps_s = Vec::with_capacity(iterations);
        let warm_up = if engine.device() == Device::Cpu { 1 } else { WARM_UP_STEPS };
        let steps = warm_up + iterations;
        let mut under_way = start(engine)?;
        let mut ended = Instant::now();
        for step in 0..steps {
            let next = start(engine)?;
            engine.finish_step(under_way)?;
            under_way = next;
            if step >= warm_up {
                steps_s.push(ended.elapsed().as_secs_f64());
            }
            ended = Instant::now();
        }
        let mut loss = engine.finish_step(under_way)?.loss;
        let mut host_s = Vec::new();
        if engine.is_asynchronous() {
            for _ in 0..iterations {
                // Neither part waits: the device is idle before the first, and the step has ended
                // before the second.
                let begin = Instant::now();
                let pending = start(engine)?;
                let started_s = begin.elapsed().as_secs_f64();
                engine.applied_steps()?;
                let begin = Instant::now();
                loss = engine.finish_step(pending)?.loss;
                host_s.push(started_s + begin.elapsed().as_secs_f64());
            }
        }
        Ok(StepTiming { steps_s, host_s, loss })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_the_tokens_after() {
        let batch = Batch::new(&[1, 2, 3, 4, 5, 6], 2);
        assert_eq!((batch.inputs, batch.targets), (vec![1, 2, 4, 5], vec![2, 3, 5, 6]));
        let tokens = random_tokens(1000, 7);
        assert!((0..7).all(|token| tokens.contains(&token)) && tokens.iter().all(|&t| t < 7));
    }
}
