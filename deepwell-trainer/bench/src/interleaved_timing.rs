//! Times the kernels of one call in turns, so that clock changes affect all kernels.

use std::time::Instant;

use deepwell_ir::{Instance, KernelChoice, Program};
use deepwell_kernels::{Issue, KernelError, PreparedCall, Recording, SingleCall};

use super::timer::{SAMPLE_TIME, Timer, calls_recorded};

/// A kernel that is ready to be timed.
struct Ready {
    recording: Recording,
    /// Number of calls in the recording.
    calls: usize,
    /// Number of replays per sample.
    replays: usize,
}

impl Timer<'_> {
    /// Seconds of each of `samples` rounds for each choice: a round times every choice once, and
    /// every other round in the reverse order. A failed choice has the reason instead.
    ///
    /// # Errors
    /// No memory, or an error of the device; as text.
    pub(super) fn time_interleaved(
        &mut self,
        call: &SingleCall,
        choices: &[KernelChoice],
    ) -> Result<Vec<Result<Vec<f64>, String>>, String> {
        let copies = self.copies(call.bytes());
        let target = &self.device.target;
        let programs: Vec<Program> = choices
            .iter()
            .map(|choice| call.program(choice.clone(), target.clone(), copies))
            .collect();
        let times = self.time_programs(call, &programs);
        let forgotten = self.device.backend.forget_prepared();
        let times = times.map_err(|error| error.to_string())?;
        forgotten.map_err(|error| error.to_string())?;
        Ok(times)
    }

    fn time_programs(
        &mut self,
        call: &SingleCall,
        programs: &[Program],
    ) -> Result<Vec<Result<Vec<f64>, String>>, KernelError> {
        // Operands have the same addresses in all programs, followed by the scratch.
        let Some(largest) = programs.iter().max_by_key(|program| program.arena.bytes) else {
            return Ok(Vec::new());
        };
        self.device.backend.allocate(largest.arena.bytes)?;
        self.fill(call, largest)?;
        let mut ready: Vec<Result<Ready, String>> = Vec::with_capacity(programs.len());
        for program in programs {
            ready.push(self.ready(program).map_err(|error| error.to_string()));
        }
        let mut samples: Vec<Vec<f64>> = vec![Vec::with_capacity(self.samples); programs.len()];
        for round in 0..self.samples {
            let mut order: Vec<usize> = (0..programs.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let Ok(Ready { recording, calls, replays }) = ready[index] else { continue };
                let backend = self.device.backend.as_mut();
                match backend.time_replays(recording, replays) {
                    Ok(time_s) => samples[index].push(time_s / (calls * replays) as f64),
                    Err(error) => ready[index] = Err(error.to_string()),
                }
            }
        }
        Ok(ready.into_iter().zip(samples).map(|(ready, samples)| ready.map(|_| samples)).collect())
    }

    /// Prepares, captures and warms up one kernel.
    fn ready(&mut self, program: &Program) -> Result<Ready, KernelError> {
        let warm_up = self.warm_up;
        let backend = self.device.backend.as_mut();
        let prepare = |call| backend.prepare(program, call, Instance::ONLY);
        let prepared =
            program.calls.iter().map(prepare).collect::<Result<Vec<PreparedCall>, _>>()?;
        let mut call_s = 0.0;
        for _ in 0..2 {
            let begin = Instant::now();
            backend.enqueue(prepared[0])?;
            backend.synchronize()?;
            call_s = begin.elapsed().as_secs_f64();
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
        let replays = (SAMPLE_TIME.as_secs_f64() / once_s.max(1e-9)).ceil().max(1.0) as usize;
        Ok(Ready { recording, calls: rotated.len(), replays })
    }
}
