//! Step time of a pipeline, simulated from the programs of all stages.

use deepwell_ir::{Instance, Phase, Program, Value};
use deepwell_probe::Hardware;

use super::{DryRun, ZeroBubble, dryrun, dryrun_world, roof::Roof};
use crate::Parallel;
use crate::schedule::{OpTimes, PipelineRun, PipelineSchedule, simulate};
use crate::stages::orders_of;

/// Predicts a step of the ranks of a pipeline. `programs` holds one rank's program for each stage,
/// in stage order; the other ranks of a stage are alike. With one stage a single program stands for
/// all ranks, as in [`dryrun_world`].
///
/// Passes take the time of their bodies and wait for the passes from which they receive. Sums over
/// ranks and the update follow the last pass.
pub fn dryrun_stages(programs: &[Program], parallel: Parallel, hardware: &Hardware) -> DryRun {
    if let [program] = programs {
        return dryrun_world(program, parallel, hardware);
    }
    let mut run = dryrun(programs, hardware);
    run.tokens *= parallel.data as u64;
    let ranks = parallel.world_size() / programs.len().max(1);
    for (stage, report) in run.ranks.iter_mut().enumerate() {
        let of_stage = (stage * ranks..(stage + 1) * ranks).map(|rank| rank as u32);
        report.alike = of_stage.filter(|&rank| rank != report.rank).collect();
    }
    let stages = Stages::of(programs, parallel, hardware);
    run.chunks = parallel.chunks;
    run.bubble = stages.run.as_ref().map(PipelineRun::bubble_rate);
    run.zero_bubble = stages.bubble_1f1b.map(|bubble_1f1b| {
        let kept = programs.iter().enumerate().map(|(stage, it)| kept_bytes(it, stage, programs));
        let (kept_bytes, kept_bytes_1f1b) = kept.unzip();
        ZeroBubble { bubble_1f1b, kept_bytes, kept_bytes_1f1b }
    });
    run.time_s = if programs.iter().any(|program| program.target.gpu.is_some()) {
        stages.run.map_or(run.time_s, |run| run.makespan() + stages.update_s)
    } else {
        // All ranks share one CPU, which is never idle.
        run.ranks.iter().map(|rank| rank.time_s).sum::<f64>() * ranks as f64
    };
    run
}

/// Bytes kept from pass to pass in all slots of a stage, and the same under 1F1B, where fewer
/// micro-batches keep the values from forward to backward.
fn kept_bytes(program: &Program, stage: usize, programs: &[Program]) -> (u64, u64) {
    let mut bodies: Vec<Option<(Phase, Phase)>> = vec![None; program.values.len()];
    for call in &program.calls {
        for operand in &call.operands {
            let users = bodies[operand.value.index()].get_or_insert((call.phase, call.phase));
            users.1 = call.phase;
        }
    }
    let is_kept = |(value, users): &(&Value, Option<(Phase, Phase)>)| {
        !value.memory.is_persistent() && users.is_some_and(|(first, last)| first != last)
    };
    let kept: Vec<(&Value, Option<(Phase, Phase)>)> =
        program.values.iter().zip(bodies).filter(is_kept).collect();
    let bytes = |from: Phase| -> u64 {
        let of_phase = kept.iter().filter(|(_, users)| users.is_some_and(|users| users.0 == from));
        of_phase.map(|(value, _)| value.range.bytes as u64).sum()
    };
    let forward = bytes(Phase::Forward);
    let slot = match kept.iter().map(|(value, _)| value.slot_stride_bytes).max() {
        Some(stride) if stride > 0 => stride as u64,
        _ => forward + bytes(Phase::Backward),
    };
    let slots_1f1b = (programs.len() - stage).min(program.micro_batches);
    (slot * u64::from(program.slots), forward * slots_1f1b as u64)
}

/// Simulated passes of all stages, and the time after the passes on the slowest stage.
struct Stages {
    run: Option<PipelineRun>,
    /// Bubble of 1F1B, for a zero-bubble schedule.
    bubble_1f1b: Option<f64>,
    update_s: f64,
}

impl Stages {
    fn of(programs: &[Program], parallel: Parallel, hardware: &Hardware) -> Stages {
        // Bodies of all chunks together: the simulation divides the time evenly by chunk.
        let body_s = |program: &Program, phase, instance| -> f64 {
            let roof = Roof::of(hardware, program, programs);
            let of_phase = program.bodies.iter().filter(|body| body.phase == phase);
            of_phase
                .map(|body| roof.body_time_s(&program.calls[body.calls.clone()], instance))
                .sum()
        };
        let between = Instance { is_first: false, is_last: false, ..Instance::ONLY };
        let times = |program: &Program| OpTimes {
            forward: body_s(program, Phase::Forward, between),
            // Includes weight gradients, unless these have a body of their own.
            dgrad: body_s(program, Phase::Backward, between),
            wgrad: body_s(program, Phase::WeightGradients, between),
            // Sends and receives are calls of the bodies.
            p2p: 0.0,
        };
        let times: Vec<OpTimes> = programs.iter().map(times).collect();
        let micro_batches = programs.first().map_or(1, |program| program.micro_batches);
        // Programs were lowered for the same, deadlock-free orders.
        let orders = orders_of(parallel, micro_batches);
        let run = orders.and_then(|orders| simulate(&orders, parallel.chunks, &times)).ok();
        let bubble_1f1b = parallel.schedule.defers_weight_gradients().then(|| {
            let parallel = Parallel { schedule: PipelineSchedule::OneFOneB, ..parallel };
            let orders = orders_of(parallel, micro_batches).ok()?;
            Some(simulate(&orders, parallel.chunks, &times).ok()?.bubble_rate())
        });
        let bubble_1f1b = bubble_1f1b.flatten();
        // Includes the sums over ranks added to the last passes.
        let update_s = |program: &Program| -> f64 {
            let last = Instance { is_last: true, ..between };
            let sums_s = [Phase::Backward, Phase::WeightGradients]
                .map(|phase| body_s(program, phase, last) - body_s(program, phase, between));
            let once_s = [Phase::Optimizer, Phase::Weights]
                .map(|phase| body_s(program, phase, Instance::ONLY));
            sums_s.iter().chain(&once_s).sum()
        };
        Stages { run, bubble_1f1b, update_s: programs.iter().map(update_s).fold(0.0, f64::max) }
    }
}
