//! Event-driven simulation of the orders of all stages.

use serde::{Deserialize, Serialize};

use super::{Pass, PipelineOp};
use crate::PlanError;

/// Times of one stage for one micro-batch through all its chunks, in any unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpTimes {
    /// F.
    pub forward: f64,
    /// B: gradients of the input.
    pub dgrad: f64,
    /// W: gradients of the weights.
    pub wgrad: f64,
    /// Time from the end of an op to the arrival of its output at the next stage.
    pub p2p: f64,
}

impl OpTimes {
    fn of(&self, pass: Pass) -> f64 {
        match pass {
            Pass::Forward => self.forward,
            Pass::Dgrad => self.dgrad,
            Pass::Wgrad => self.wgrad,
            Pass::Backward => self.dgrad + self.wgrad,
        }
    }
}

/// Begin and end of an op.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpRun {
    /// The op.
    pub op: PipelineOp,
    /// When it began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// A simulated step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PipelineRun {
    /// The ops of each stage in order.
    pub stages: Vec<Vec<OpRun>>,
}

impl PipelineRun {
    /// Time from the first begin on any stage to the last end.
    pub fn makespan(&self) -> f64 {
        self.stages.iter().flatten().map(|run| run.end).fold(0.0, f64::max)
    }

    /// Time from the first op to the end of the last op of a stage, on the stage with the longest
    /// time. This is the step time if stages need not synchronize between steps.
    pub fn longest_stage(&self) -> f64 {
        let of_stage = |runs: &Vec<OpRun>| match (runs.first(), runs.last()) {
            (Some(first), Some(last)) => last.end - first.start,
            _ => 0.0,
        };
        self.stages.iter().map(of_stage).fold(0.0, f64::max)
    }

    /// Compute time of a stage.
    pub fn busy(&self, stage: usize) -> f64 {
        self.stages[stage].iter().map(|run| run.end - run.start).sum()
    }

    /// Idle share of the longest stage's time, for the busiest stage.
    pub fn bubble_rate(&self) -> f64 {
        let busy = (0..self.stages.len()).map(|stage| self.busy(stage)).fold(0.0, f64::max);
        let time = self.longest_stage();
        if time > 0.0 { 1.0 - busy / time } else { 0.0 }
    }
}

/// Runs `orders` with the given `times`, one entry for each stage.
///
/// # Errors
/// Orders that deadlock.
pub fn simulate(
    orders: &[Vec<PipelineOp>],
    chunks: usize,
    times: &[OpTimes],
) -> Result<PipelineRun, PlanError> {
    let stages = orders.len();
    let micro_batches = orders.iter().flatten().map(|op| op.micro_batch as usize + 1).max();
    let micro_batches = micro_batches.unwrap_or(0);
    // End of F and of B, by stage, chunk and micro-batch.
    let index = |stage: usize, op: &PipelineOp, is_backward: bool| {
        let pass = usize::from(is_backward);
        ((stage * 2 + pass) * chunks + op.chunk as usize) * micro_batches + op.micro_batch as usize
    };
    let mut ends: Vec<Option<f64>> = vec![None; stages * 2 * chunks * micro_batches];
    let mut runs: Vec<Vec<OpRun>> =
        orders.iter().map(|order| Vec::with_capacity(order.len())).collect();
    loop {
        let mut moved = false;
        for stage in 0..stages {
            while let Some(&op) = orders[stage].get(runs[stage].len()) {
                let arrival = match needed(stage, stages, chunks, op) {
                    None => Some(0.0),
                    Some((from, needed, is_backward)) => {
                        let latency = if from == stage { 0.0 } else { times[from].p2p };
                        ends[index(from, &needed, is_backward)].map(|end| end + latency)
                    }
                };
                let Some(arrival) = arrival else { break };
                let free = runs[stage].last().map_or(0.0, |run| run.end);
                let start = free.max(arrival);
                let end = start + times[stage].of(op.pass) / chunks as f64;
                runs[stage].push(OpRun { op, start, end });
                if op.pass != Pass::Wgrad {
                    ends[index(stage, &op, op.pass != Pass::Forward)] = Some(end);
                }
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck = (0..stages).find(|&stage| runs[stage].len() < orders[stage].len());
    if let Some(stage) = stuck {
        let op = orders[stage][runs[stage].len()];
        return Err(PlanError::Request {
            what: "pipeline schedule",
            expected: "an order in which each op's input comes before it".to_string(),
            got: format!("stage {stage} waits for ever before {op:?}"),
        });
    }
    Ok(PipelineRun { stages: runs })
}

/// The input of an op: stage and op of the sender, and whether the input is a gradient (output of
/// B).
pub(super) fn needed(
    stage: usize,
    stages: usize,
    chunks: usize,
    op: PipelineOp,
) -> Option<(usize, PipelineOp, bool)> {
    let with_chunk = |chunk: u32| PipelineOp { chunk, ..op };
    match op.pass {
        Pass::Forward if stage > 0 => Some((stage - 1, op, false)),
        Pass::Forward if op.chunk > 0 => Some((stages - 1, with_chunk(op.chunk - 1), false)),
        Pass::Forward => None,
        Pass::Wgrad => Some((stage, op, true)),
        Pass::Dgrad | Pass::Backward if stage + 1 < stages => Some((stage + 1, op, true)),
        Pass::Dgrad | Pass::Backward if (op.chunk as usize) + 1 < chunks => {
            Some((0, with_chunk(op.chunk + 1), true))
        }
        Pass::Dgrad | Pass::Backward => Some((stage, op, false)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{PipelineSchedule, orders};

    fn rate(schedule: PipelineSchedule, stages: usize, count: usize, chunks: usize) -> f64 {
        let times = OpTimes { forward: 1.0, dgrad: 1.0, wgrad: 1.0, p2p: 0.0 };
        let orders = orders(schedule, stages, count, chunks).unwrap();
        simulate(&orders, chunks, &vec![times; stages]).unwrap().bubble_rate()
    }

    #[test]
    fn bubbles_are_those_of_the_closed_forms() {
        // Bubble time, in units of F = B = W, in addition to m (F + B + W).
        let check = |schedule, sizes: (usize, usize, usize), bubble: f64| {
            let (stages, count, chunks) = sizes;
            let expected = bubble / (3.0 * count as f64 + bubble);
            let found = rate(schedule, stages, count, chunks);
            assert!((found - expected).abs() < 1e-12, "{schedule} {sizes:?}: {found} {expected}");
        };
        check(PipelineSchedule::OneFOneB, (1, 4, 1), 0.0);
        check(PipelineSchedule::OneFOneB, (4, 8, 1), 9.0);
        check(PipelineSchedule::OneFOneB, (8, 8, 1), 21.0);
        check(PipelineSchedule::OneFOneB, (4, 8, 3), 3.0);
        check(PipelineSchedule::ZbH1, (4, 12, 1), 3.0);
        check(PipelineSchedule::ZbH2, (4, 12, 1), 0.0);
    }

    #[test]
    fn orders_that_wait_for_ever_are_refused() {
        let times = OpTimes { forward: 1.0, dgrad: 1.0, wgrad: 1.0, p2p: 0.0 };
        let mut orders = orders(PipelineSchedule::OneFOneB, 2, 2, 1).unwrap();
        orders[1].swap(0, 1);
        let error = simulate(&orders, 1, &[times; 2]).unwrap_err().to_string();
        assert!(error.contains("waits for ever before"), "{error}");
    }
}
