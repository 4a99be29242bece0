//! Times a call: graph replay over rotated operands, medians of samples.

use std::time::{Duration, Instant};

use deepwell_ir::{ByteRange, DType, Instance, KernelChoice, Program};
use deepwell_kernels::{Issue, KernelError, PreparedCall, SingleCall};
use deepwell_plan::{Bound, roofline};
use deepwell_probe::Hardware;

use super::expert_gemms::Routing;
use super::fill::{Fill, Pool, fills};
use deepwell_trainer::OpenDevice;

/// Maximum number of operand copies: more calls than this are not captured as one graph.
const COPIES_MAX: usize = 512;
/// Minimum length of a sample, so that launch and synchronization are negligible.
pub(super) const SAMPLE_TIME: Duration = Duration::from_millis(10);
/// Calls before the first call timed outside of a graph.
const WARM_UP_CALLS: usize = 5;
/// The default of [`Timer::warm_up`].
const WARM_UP: Duration = Duration::from_millis(100);
/// Calls in a graph of short calls: a GPU launches graphs less quickly than nodes within a graph.
const CALLS_WANTED: usize = 32;
/// Bytes per write to the device.
const CHUNK_BYTES: usize = 64 << 20;
/// Cache size assumed if the hardware description has none.
const CACHE_BYTES_ASSUMED: u64 = 64 << 20;

/// Times of one call.
#[derive(Clone, Debug)]
pub(super) struct Timing {
    /// The kernel, with the tile if the kernel has several.
    pub(super) kernel: String,
    /// Median, seconds.
    pub(super) time_s: f64,
    /// Tenth and ninetieth percentile, seconds.
    pub(super) spread_s: (f64, f64),
    /// Copies of the operands.
    pub(super) copies: usize,
    /// Samples.
    pub(super) samples: usize,
    /// Calls of a sample.
    pub(super) calls_per_sample: usize,
    /// Least time by the roofline, seconds.
    pub(super) roofline_s: f64,
    /// The resource that limits the roofline time.
    pub(super) bound: Bound,
}

/// Times calls on one device.
pub(super) struct Timer<'a> {
    pub(super) device: &'a mut OpenDevice,
    /// With the measured bandwidth.
    pub(super) hardware: &'a Hardware,
    pub(super) is_gpu: bool,
    pub(super) samples: usize,
    /// Calls are run this long before the first sample.
    pub(super) warm_up: Duration,
    /// Routing of the experts' tokens.
    pub(super) routing: Routing,
    pub(super) pool: Pool,
}

impl<'a> Timer<'a> {
    pub(super) fn new(
        device: &'a mut OpenDevice,
        hardware: &'a Hardware,
        samples: usize,
    ) -> Timer<'a> {
        let is_gpu = device.target.arch != "cpu";
        Timer {
            device,
            hardware,
            is_gpu,
            samples: samples.max(1),
            warm_up: WARM_UP,
            routing: Routing::UNKNOWN,
            pool: Pool::new(1),
        }
    }

    /// Bytes of the last-level cache.
    fn cache_bytes(&self) -> u64 {
        if self.is_gpu {
            let gpu = self.device.target.gpu.and_then(|index| self.hardware.gpus.get(index));
            return gpu.and_then(|gpu| gpu.l2_bytes).unwrap_or(CACHE_BYTES_ASSUMED);
        }
        // Capped: this machine's threads may reach only a share of a shared cache.
        let last = self.hardware.cpu.caches.iter().max_by_key(|cache| cache.level);
        last.map_or(CACHE_BYTES_ASSUMED, |cache| cache.bytes.min(CACHE_BYTES_ASSUMED))
    }

    /// Number of operand copies of `bytes` that together fill twice the cache, at least two; a
    /// single copy for operands of at least eight times the cache.
    pub(super) fn copies(&self, bytes: usize) -> usize {
        if bytes as u64 >= 8 * self.cache_bytes() {
            return 1;
        }
        let wanted = (2 * self.cache_bytes()).div_ceil(bytes.max(1) as u64);
        usize::try_from(wanted).unwrap_or(COPIES_MAX).clamp(2, COPIES_MAX)
    }

    /// Times `call` with the kernel selected by the catalog.
    ///
    /// # Errors
    /// No kernel, no memory, or an error of the device; as text.
    pub(super) fn time(&mut self, call: &SingleCall) -> Result<Timing, String> {
        let choice = self.choice(call)?;
        self.time_with(call, choice)
    }

    /// Returns the kernel selected by the catalog.
    ///
    /// # Errors
    /// No kernel, as text.
    pub(super) fn choice(&self, call: &SingleCall) -> Result<KernelChoice, String> {
        let selection = call.select(self.device.catalog.as_ref(), &self.device.target);
        Ok(selection.map_err(|error| error.to_string())?.choice)
    }

    /// Returns every kernel that supports a call, with each of its tiles, the selected kernel
    /// first.
    pub(super) fn choices(&self, call: &SingleCall) -> Vec<KernelChoice> {
        self.device.catalog.choices(&call.request(), &self.device.target)
    }

    /// Times `call` with a kernel.
    ///
    /// # Errors
    /// No memory, or an error of the device; as text.
    pub(super) fn time_with(
        &mut self,
        call: &SingleCall,
        choice: KernelChoice,
    ) -> Result<Timing, String> {
        let kernel = match choice.tile {
            Some(tile) => format!("{} {tile}", choice.kernel),
            None => choice.kernel.clone(),
        };
        let copies = self.copies(call.bytes());
        let program = call.program(choice, self.device.target.clone(), copies);
        let result = self.time_program(call, &program);
        // Release this call's prepared state before the next call, also after a failure.
        let forgotten = self.device.backend.forget_prepared();
        let (samples, calls_per_sample) = result.map_err(|error| error.to_string())?;
        forgotten.map_err(|error| error.to_string())?;
        let (roofline_s, bound) = roofline(&program, &program.calls[0], self.hardware);
        Ok(Timing {
            kernel,
            time_s: percentile(&samples, 0.5),
            spread_s: (percentile(&samples, 0.1), percentile(&samples, 0.9)),
            copies,
            samples: samples.len(),
            calls_per_sample,
            roofline_s,
            bound,
        })
    }

    fn time_program(
        &mut self,
        call: &SingleCall,
        program: &Program,
    ) -> Result<(Vec<f64>, usize), KernelError> {
        self.device.backend.allocate(program.arena.bytes)?;
        self.fill(call, program)?;
        let warm_up = self.warm_up;
        let backend = self.device.backend.as_mut();
        let prepared = program
            .calls
            .iter()
            .map(|call| backend.prepare(program, call, Instance::ONLY))
            .collect::<Result<Vec<PreparedCall>, KernelError>>()?;
        // Two runs outside of a graph: errors of a kernel are most precise there, and the second
        // run measures the duration of a call.
        let mut call_s = 0.0;
        for _ in 0..2 {
            let begin = Instant::now();
            backend.enqueue(prepared[0])?;
            backend.synchronize()?;
            call_s = begin.elapsed().as_secs_f64();
        }
        if !self.is_gpu {
            return self.sample_calls(&prepared);
        }
        let rounds = calls_recorded(call_s).div_ceil(prepared.len());
        let rotated: Vec<Issue> =
            (0..rounds).flat_map(|_| prepared.iter().map(|&call| call.into())).collect();
        let recording = backend.record(&rotated)?;
        let begin = Instant::now();
        let mut once_s = backend.time_replays(recording, 1)?;
        while begin.elapsed() < warm_up {
            once_s = backend.time_replays(recording, 1)?;
        }
        let times = (SAMPLE_TIME.as_secs_f64() / once_s.max(1e-9)).ceil().max(1.0) as usize;
        let calls = times * rotated.len();
        let samples = (0..self.samples)
            .map(|_| Ok(backend.time_replays(recording, times)? / calls as f64))
            .collect::<Result<Vec<f64>, KernelError>>()?;
        Ok((samples, calls))
    }

    /// Seconds of each of `samples` calls, run in sequence outside of any graph, by the device's
    /// clock.
    ///
    /// # Errors
    /// No kernel, no memory, or an error of the device; as text.
    pub(super) fn time_plainly(&mut self, call: &SingleCall) -> Result<Vec<f64>, String> {
        let choice = self.choice(call)?;
        let program = call.program(choice, self.device.target.clone(), 1);
        let mut times = || -> Result<Vec<f64>, KernelError> {
            self.device.backend.allocate(program.arena.bytes)?;
            self.fill(call, &program)?;
            let backend = self.device.backend.as_mut();
            let prepared = backend.prepare(&program, &program.calls[0], Instance::ONLY)?;
            let before = backend.record(&[prepared.into()])?;
            let times =
                backend.profile(&[before], &vec![prepared; WARM_UP_CALLS + self.samples])?;
            Ok(times[WARM_UP_CALLS..].iter().map(|time| time.end_s - time.begin_s).collect())
        };
        let times = times();
        let forgotten = self.device.backend.forget_prepared();
        let times = times.map_err(|error| error.to_string())?;
        forgotten.map_err(|error| error.to_string())?;
        Ok(times)
    }

    /// Times calls on a CPU, which runs calls synchronously: each call by itself, or several
    /// together if they are shorter than a sample.
    fn sample_calls(&mut self, rotated: &[PreparedCall]) -> Result<(Vec<f64>, usize), KernelError> {
        let backend = self.device.backend.as_mut();
        let mut next = rotated.iter().cycle().copied();
        let mut run = |calls: usize| -> Result<f64, KernelError> {
            let begin = Instant::now();
            for call in next.by_ref().take(calls) {
                backend.enqueue(call)?;
            }
            Ok(begin.elapsed().as_secs_f64() / calls as f64)
        };
        let once_s = run(1)?.min(run(1)?);
        // Shorter samples than on a GPU: nothing is started and waited for.
        let calls = (SAMPLE_TIME.as_secs_f64() * 0.1 / once_s.max(1e-9)).ceil().max(1.0) as usize;
        let samples =
            (0..self.samples).map(|_| run(calls)).collect::<Result<Vec<f64>, KernelError>>()?;
        Ok((samples, calls))
    }

    pub(super) fn fill(&mut self, call: &SingleCall, program: &Program) -> Result<(), KernelError> {
        let fills = fills(call, self.routing);
        let mut chunks: Vec<(Fill, DType, Vec<u8>)> = Vec::new();
        let largest = program.values.iter().map(|value| value.range.bytes).max().unwrap_or(0);
        for (index, value) in program.values.iter().enumerate() {
            let fill = fills[index % fills.len()];
            // The arena is zeroed on allocation.
            if fill == Fill::Zero || value.range.bytes == 0 {
                continue;
            }
            let same =
                |(of, dtype, _): &&(Fill, DType, Vec<u8>)| (*of, *dtype) == (fill, value.dtype);
            if chunks.iter().find(same).is_none() {
                let period = self.pool.period(fill, value.dtype);
                let chunk = repeated(&period, CHUNK_BYTES.min(largest));
                chunks.push((fill, value.dtype, chunk));
            }
            let chunk = chunks.iter().find(same).map_or(&[][..], |(_, _, chunk)| chunk);
            write_repeated(self.device, value.range, chunk)?;
        }
        Ok(())
    }
}

/// Number of calls per graph, so that the launch of the graph is negligible: many short calls, or
/// as many long calls as make a sample.
pub(super) fn calls_recorded(call_s: f64) -> usize {
    let enough = (SAMPLE_TIME.as_secs_f64() / call_s.max(1e-9)).ceil().max(1.0);
    if enough < CALLS_WANTED as f64 { enough as usize } else { CALLS_WANTED }
}

/// Repeats whole periods up to `bytes`, at least one period.
pub(super) fn repeated(period: &[u8], bytes: usize) -> Vec<u8> {
    period.repeat((bytes / period.len().max(1)).max(1))
}

/// Fills a range with repetitions of `chunk`.
pub(super) fn write_repeated(
    device: &mut OpenDevice,
    range: ByteRange,
    chunk: &[u8],
) -> Result<(), KernelError> {
    let mut done = 0;
    while done < range.bytes && !chunk.is_empty() {
        let bytes = chunk.len().min(range.bytes - done);
        let part = ByteRange { offset: range.offset + done, bytes };
        device.backend.write(part, &chunk[..bytes])?;
        done += bytes;
    }
    Ok(())
}

/// Percentile of the samples; the middle sample of an odd number for 0.5.
pub(super) fn percentile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1) as f64;
    let low = (last * share).floor() as usize;
    let high = (last * share).ceil() as usize;
    match (sorted.get(low), sorted.get(high)) {
        (Some(low), Some(high)) => (low + high) / 2.0,
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::{calls_recorded, percentile};

    #[test]
    fn recordings_last_a_sample_or_hold_many_calls() {
        let check = |call_s: f64, expected: usize| assert_eq!(calls_recorded(call_s), expected);
        check(5e-6, 32);
        check(0.0, 32);
        check(2e-3, 5);
        check(1.0, 1);
    }

    #[test]
    fn percentiles() {
        let check = |samples: &[f64], share: f64, expected: f64| {
            assert_eq!(percentile(samples, share), expected);
        };
        check(&[3.0, 1.0, 2.0], 0.5, 2.0);
        check(&[4.0, 1.0, 2.0, 3.0], 0.5, 2.5);
        check(&[7.0], 0.9, 7.0);
        check(&(0..=10).map(f64::from).collect::<Vec<_>>(), 0.1, 1.0);
        assert!(percentile(&[], 0.5).is_nan());
    }
}
