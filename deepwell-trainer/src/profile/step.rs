//! The profile of a step.

use std::fmt;

use deepwell_ir::{Phase, Program};
use deepwell_kernels::CallTime;
use deepwell_plan::roofline;
use deepwell_probe::Hardware;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::call::{CallProfile, ratio};
use super::exchanges::RankExchanges;
use crate::{Engine, TrainError};

/// All calls of one op and kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpProfile {
    /// Name of the op.
    pub op: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Calls per step.
    pub calls: usize,
    /// Time per step.
    pub time_s: f64,
    /// Share of the step's time.
    pub share: f64,
    /// Achieved rate of arithmetic, 10^12 operations per second.
    pub tflops: f64,
    /// Achieved rate of necessary memory traffic, 10^9 bytes per second.
    pub gbps: f64,
    /// Least time by the roofline over the time taken.
    pub roof_share: f64,
    /// Mean of [`CallProfile::grid_fill`], weighted by time, over calls with a known grid; `None`
    /// without such calls.
    #[serde(default)]
    pub grid_fill: Option<f64>,
}

/// The profile of one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// Device of the profile.
    pub device: String,
    /// Tokens of the step.
    pub tokens: usize,
    /// Sum over the calls of a step, each with the time of its one measured run.
    pub time_s: f64,
    /// Grouped by op and kernel, longest first.
    pub ops: Vec<OpProfile>,
    /// Every call, in order.
    pub calls: Vec<CallProfile>,
    /// Collectives, sends and receives of the step.
    #[serde(default)]
    pub ranks: RankExchanges,
}

impl Profile {
    /// Profiles another step on the data of the last step. The weights change further: the step
    /// runs once as a whole, and once more call by call.
    ///
    /// # Errors
    /// The device fails.
    pub fn of(engine: &mut Engine) -> Result<Profile, TrainError> {
        let step_s = engine.step_time().map(|time| time.since_staged_s);
        let times = engine.profile_step()?;
        let device = engine.device().to_string();
        let program = engine.program();
        let profile = Profile::from_times(program, engine.hardware(), device, &times);
        let ranks = RankExchanges::of(program, &profile.calls, step_s);
        Ok(Profile { ranks, ..profile })
    }

    /// Combines times with the work of the calls that a step of `program` runs.
    pub fn from_times(
        program: &Program,
        hardware: &Hardware,
        device: String,
        times: &[CallTime],
    ) -> Profile {
        let calls: Vec<CallProfile> = program
            .calls_with_runs()
            .filter(|(_, runs)| *runs > 0)
            .zip(times)
            .map(|((call, runs), time)| CallProfile {
                runs,
                name: call.name.clone(),
                op: call.op.name().to_string(),
                kernel: call.choice.kernel.clone(),
                phase: call.phase,
                layer: call.layer,
                stream: call.stream,
                begin_s: time.begin_s,
                time_s: time.end_s - time.begin_s,
                roofline_s: roofline(program, call, hardware).0,
                flops: call.cost.flops,
                bytes: call.cost.bytes(),
                grid_fill: time.grid_fill,
            })
            .collect();
        let time_s: f64 = calls.iter().map(|call| call.in_step(call.time_s)).sum();
        let ranks = RankExchanges::of(program, &calls, None);
        let tokens = program.tokens_per_step();
        Profile { device, tokens, time_s, ops: by_op(&calls), calls, ranks }
    }

    /// The profile as events of a trace's process `pid`.
    pub(super) fn events(&self, pid: usize, name: &str) -> Vec<Value> {
        let mut events = vec![json!({
            "ph": "M", "name": "process_name", "pid": pid, "args": { "name": name }
        })];
        let mut streams: Vec<u32> = self.calls.iter().map(|call| call.stream).collect();
        streams.sort_unstable();
        streams.dedup();
        events.extend(streams.iter().map(|stream| {
            let name = format!("stream {stream}");
            json!({ "ph": "M", "name": "thread_name", "pid": pid, "tid": stream,
                    "args": { "name": name } })
        }));
        events.extend(self.calls.iter().map(|call| {
            json!({
                "ph": "X", "pid": pid, "tid": call.stream,
                "cat": phase_name(call.phase), "name": call.op,
                "ts": call.begin_s * 1e6, "dur": call.time_s * 1e6,
                "args": {
                    "call": call.name, "kernel": call.kernel, "layer": call.layer,
                    "phase": phase_name(call.phase),
                    "flops": call.flops, "bytes": call.bytes,
                    "share of the roof": ratio(call.roofline_s, call.time_s),
                },
            })
        }));
        events
    }
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::WeightGradients => "weight_gradients",
        Phase::Optimizer => "optimizer",
        Phase::Weights => "weights",
    }
}

fn by_op(calls: &[CallProfile]) -> Vec<OpProfile> {
    let total_s: f64 = calls.iter().map(|call| call.in_step(call.time_s)).sum();
    let mut names: Vec<(&str, &str)> =
        calls.iter().map(|call| (call.op.as_str(), call.kernel.as_str())).collect();
    names.sort_unstable();
    names.dedup();
    let mut ops: Vec<OpProfile> = names
        .into_iter()
        .map(|(op, kernel)| {
            let of_op = || calls.iter().filter(move |call| call.op == op && call.kernel == kernel);
            let sum = |value: fn(&CallProfile) -> f64| -> f64 {
                of_op().map(|call| call.in_step(value(call))).sum()
            };
            let time_s = sum(|call| call.time_s);
            OpProfile {
                op: op.to_string(),
                kernel: kernel.to_string(),
                calls: of_op().map(|call| call.runs).sum(),
                time_s,
                share: ratio(time_s, total_s),
                tflops: ratio(sum(|call| call.flops as f64), time_s) / 1e12,
                gbps: ratio(sum(|call| call.bytes as f64), time_s) / 1e9,
                roof_share: ratio(sum(|call| call.roofline_s), time_s),
                grid_fill: mean_grid_fill(of_op()),
            }
        })
        .collect();
    ops.sort_by(|a, b| b.time_s.total_cmp(&a.time_s));
    ops
}

/// Mean over the calls with a known grid, weighted by time.
fn mean_grid_fill<'a>(calls: impl Iterator<Item = &'a CallProfile>) -> Option<f64> {
    let known = calls.filter_map(|call| Some((call.in_step(call.time_s), call.grid_fill?)));
    let (mut time_s, mut filled_s) = (0.0, 0.0);
    for (call_s, fill) in known {
        time_s += call_s;
        filled_s += call_s * fill;
    }
    (time_s > 0.0).then(|| filled_s / time_s)
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "step of {} tokens on {}: {:.3} ms in {} calls",
            self.tokens,
            self.device,
            self.time_s * 1e3,
            self.calls.iter().map(|call| call.runs).sum::<usize>()
        )?;
        writeln!(
            f,
            "  {:<28} {:<26} {:>5} {:>9} {:>6} {:>8} {:>8} {:>6} {:>6}",
            "op", "kernel", "calls", "ms", "share", "TFLOP/s", "GB/s", "roof", "grid"
        )?;
        for op in &self.ops {
            writeln!(
                f,
                "  {:<28} {:<26} {:>5} {:>9.3} {:>5.1}% {:>8.1} {:>8.1} {:>5.1}% {:>6}",
                op.op,
                op.kernel,
                op.calls,
                op.time_s * 1e3,
                op.share * 100.0,
                op.tflops,
                op.gbps,
                op.roof_share * 100.0,
                op.grid_fill.map_or("-".to_string(), |fill| format!("{:.1}%", fill * 100.0))
            )?;
        }
        Ok(())
    }
}
