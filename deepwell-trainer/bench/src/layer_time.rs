//! Times of a layer's calls: all calls in one CUDA graph, and each call after its predecessors.

use std::time::Instant;

use deepwell_ir::{Call, DType, Instance, Op, Phase, Program, ValueId};
use deepwell_kernels::{Backend, CallTime, Issue, KernelError, PreparedCall, Recording};

use super::choices::Choices;
use super::fill::{Fill, Pool};
use super::layer::MixtureSize;
use super::layer_program::LayerProgram;
use super::timer::{SAMPLE_TIME, Timer, percentile, repeated, write_repeated};

/// E4M3 weight elements are up to 448: this exponent makes weights smaller than 1.
const WEIGHT_SCALE: u8 = 127 - 9;
/// Bytes per write to the device.
const CHUNK_BYTES: usize = 64 << 20;

/// Times of calls that run in sequence.
pub(super) struct LayerTime {
    pub(super) program: Program,
    /// Seconds of all calls as one graph.
    pub(super) samples_s: Vec<f64>,
    /// Seconds of the calls before the backward pass.
    pub(super) forward_s: f64,
    /// Median seconds of each call between two events.
    pub(super) calls_s: Vec<f64>,
}

impl LayerTime {
    /// Times the `wanted` calls of a step; the router is to choose the experts in `routing`.
    pub(super) fn of(
        timer: &mut Timer<'_>,
        step: &Program,
        wanted: impl Fn(&Call) -> bool,
        routing: Option<&Choices>,
    ) -> Result<LayerTime, String> {
        let layer = LayerProgram::of(step, wanted);
        let times = LayerTime::measure(timer, layer, routing);
        // Release this program's prepared calls before the next program, also after a failure.
        let forgotten = timer.device.backend.forget_prepared().map_err(|error| error.to_string());
        let times = times?;
        forgotten?;
        Ok(times)
    }

    fn measure(
        timer: &mut Timer<'_>,
        layer: LayerProgram,
        routing: Option<&Choices>,
    ) -> Result<LayerTime, String> {
        let LayerProgram { program, given } = layer;
        let text = |error: KernelError| error.to_string();
        timer.device.backend.allocate(program.arena.bytes).map_err(text)?;
        fill(timer, &program, &given, routing).map_err(text)?;
        let backend = timer.device.backend.as_mut();
        let prepared = program
            .calls
            .iter()
            .map(|call| backend.prepare(&program, call, Instance::ONLY))
            .collect::<Result<Vec<PreparedCall>, KernelError>>()
            .map_err(text)?;
        // Two runs outside of a graph: errors of a kernel are most precise there.
        for _ in 0..2 {
            prepared.iter().try_for_each(|&call| backend.enqueue(call)).map_err(text)?;
            backend.synchronize().map_err(text)?;
        }
        if let Some(routing) = routing {
            check_load(timer, &program, routing)?;
        }
        let of_forward =
            program.calls.iter().take_while(|call| call.phase != Phase::Backward).count();
        let (samples_s, _) = samples(timer, &prepared).map_err(text)?;
        let forward_s = match of_forward {
            0 => 0.0,
            count => percentile(&samples(timer, &prepared[..count]).map_err(text)?.0, 0.5),
        };
        let calls_s = call_times(timer, &prepared).map_err(text)?;
        Ok(LayerTime { program, samples_s, forward_s, calls_s })
    }

    /// Median of all calls together.
    pub(super) fn whole_s(&self) -> f64 {
        percentile(&self.samples_s, 0.5)
    }

    /// Sum of the times of the `wanted` calls.
    pub(super) fn sum_s(&self, wanted: impl Fn(&Op) -> bool) -> f64 {
        let calls = self.program.calls.iter().zip(&self.calls_s);
        calls.filter(|(call, _)| wanted(call.op.leading())).map(|(_, time_s)| time_s).sum()
    }
}

/// Returns the seconds of each sample of all `calls`, and the number of runs per sample.
fn samples(
    timer: &mut Timer<'_>,
    calls: &[PreparedCall],
) -> Result<(Vec<f64>, usize), KernelError> {
    let (is_gpu, warm_up, count) = (timer.is_gpu, timer.warm_up, timer.samples);
    let backend = timer.device.backend.as_mut();
    if !is_gpu {
        let mut once = || -> Result<f64, KernelError> {
            let begin = Instant::now();
            calls.iter().try_for_each(|&call| backend.enqueue(call))?;
            Ok(begin.elapsed().as_secs_f64())
        };
        return Ok(((0..count).map(|_| once()).collect::<Result<_, _>>()?, 1));
    }
    let recording = record(backend, calls)?;
    let begin = Instant::now();
    let mut once_s = backend.time_replays(recording, 1)?;
    while begin.elapsed() < warm_up {
        once_s = backend.time_replays(recording, 1)?;
    }
    let times = (SAMPLE_TIME.as_secs_f64() / once_s.max(1e-9)).ceil().max(1.0) as usize;
    let sample = |_| Ok(backend.time_replays(recording, times)? / times as f64);
    Ok(((0..count).map(sample).collect::<Result<_, KernelError>>()?, times))
}

fn record(backend: &mut dyn Backend, calls: &[PreparedCall]) -> Result<Recording, KernelError> {
    let issues: Vec<Issue> = calls.iter().map(|&call| call.into()).collect();
    backend.record(&issues)
}

/// Median seconds of each call when run in sequence, by the device's clock.
fn call_times(timer: &mut Timer<'_>, calls: &[PreparedCall]) -> Result<Vec<f64>, KernelError> {
    let is_gpu = timer.is_gpu;
    let count = timer.samples;
    let backend = timer.device.backend.as_mut();
    // The host is ahead of the device when the first call is marked.
    let before = if is_gpu { vec![record(backend, calls)?] } else { Vec::new() };
    let runs = (0..count)
        .map(|_| backend.profile(&before, calls))
        .collect::<Result<Vec<Vec<CallTime>>, KernelError>>()?;
    let of_call = |index: usize| -> f64 {
        let times: Vec<f64> =
            runs.iter().map(|run| run[index].end_s - run[index].begin_s).collect();
        percentile(&times, 0.5)
    };
    Ok((0..calls.len()).map(of_call).collect())
}

/// Writes the inputs that no call computes.
fn fill(
    timer: &mut Timer<'_>,
    program: &Program,
    given: &[ValueId],
    routing: Option<&Choices>,
) -> Result<(), KernelError> {
    let pool = Pool::new(1);
    let router = program.calls.iter().find_map(|call| match call.op.leading() {
        Op::RouterLogits(_) => Some((call.operands[0].value, call.operands[1].value)),
        _ => None,
    });
    for &id in given {
        let value = program.value(id);
        let chunk = match (router, routing) {
            (Some((x, _)), Some(routing)) if x == id => {
                let &[_, hidden] = value.shape.as_slice() else { unreachable!() };
                let top_k = routing.chosen.len() / value.shape[0];
                let experts = routing.load.len();
                routing.tokens(MixtureSize { experts, width: 0, hidden, top_k }, &pool)
            }
            (Some((_, weight)), Some(_)) if weight == id => identity(&value.shape),
            _ => {
                let period = match value.dtype {
                    DType::E4m3 => pool.period(Fill::E4m3, value.dtype),
                    DType::E8m0 => vec![WEIGHT_SCALE; 4096],
                    DType::Bf16 | DType::F32 => pool.period(Fill::Uniform, value.dtype),
                    // Counters begin at zero.
                    _ => continue,
                };
                repeated(&period, CHUNK_BYTES.min(value.range.bytes))
            }
        };
        write_repeated(timer.device, value.range, &chunk)?;
    }
    Ok(())
}

/// FP32 `[E, D]` whose row `e` selects element `e` of a token.
fn identity(shape: &[usize]) -> Vec<u8> {
    let mut weights = vec![0f32; shape.iter().product()];
    for (expert, row) in weights.chunks_exact_mut(shape[1]).enumerate() {
        row[expert] = 1.0;
    }
    bytemuck::cast_slice(&weights).to_vec()
}

/// Checks that the router chose the experts of `routing`.
fn check_load(timer: &mut Timer<'_>, program: &Program, routing: &Choices) -> Result<(), String> {
    let mut dispatches = program.calls.iter().filter(|call| matches!(call.op, Op::Dispatch(_)));
    let Some(dispatch) = dispatches.next() else { return Ok(()) };
    let load = program.value(dispatch.outputs()[1].value);
    let mut counts = vec![0i32; load.elements()];
    let bytes = bytemuck::cast_slice_mut(&mut counts);
    timer.device.backend.read(load.range, bytes).map_err(|error| error.to_string())?;
    let expected = &routing.load;
    let is_right = |(of_expert, &expected): (&i32, &usize)| *of_expert as usize == expected;
    match counts.iter().zip(expected).all(is_right) {
        true => Ok(()),
        false => Err(format!(
            "expected the router to load experts with {expected:?}, got {:?}",
            &counts[..expected.len()]
        )),
    }
}
