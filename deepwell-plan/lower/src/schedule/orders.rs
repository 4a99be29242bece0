//! Order of the ops on each stage.

use super::{Pass, PipelineOp, PipelineSchedule};
use crate::PlanError;

/// Returns the ops of each stage in execution order.
///
/// `chunks` is the number of model chunks of a stage (VPP); 1F1B with several chunks is interleaved
/// as in Megatron-LM.
///
/// # Errors
/// Degrees of 0, several chunks in a schedule without interleaving, or fewer micro-batches than
/// stages with interleaving.
pub fn orders(
    schedule: PipelineSchedule,
    stages: usize,
    micro_batches: usize,
    chunks: usize,
) -> Result<Vec<Vec<PipelineOp>>, PlanError> {
    for (what, size) in
        [("pipeline stages", stages), ("micro-batches", micro_batches), ("model chunks", chunks)]
    {
        if size == 0 {
            let expected = "at least 1".to_string();
            return Err(PlanError::Request { what, expected, got: "0".to_string() });
        }
    }
    let stage_order: fn(usize, usize, usize) -> Vec<PipelineOp> = match schedule {
        PipelineSchedule::OneFOneB if chunks > 1 => {
            let group = interleaving_group(stages, micro_batches)?;
            let of_stage = |stage| interleaved(stage, stages, micro_batches, chunks, group);
            return Ok((0..stages).map(of_stage).collect());
        }
        PipelineSchedule::OneFOneB => one_f_one_b,
        PipelineSchedule::ZbH1 => |stage, stages, count| zero_bubble(stages - stage, stage, count),
        PipelineSchedule::ZbH2 => {
            |stage, stages, count| zero_bubble(2 * (stages - stage) - 1, 2 * stage, count)
        }
    };
    if chunks > 1 {
        return Err(PlanError::Request {
            what: "model chunks",
            expected: format!("1 for {schedule}"),
            got: chunks.to_string(),
        });
    }
    Ok((0..stages).map(|stage| stage_order(stage, stages, micro_batches)).collect())
}

/// Number of consecutive micro-batches of one chunk in an interleaved schedule.
///
/// The number of stages, or the next larger divisor of the micro-batches.
///
/// # Errors
/// Fewer micro-batches than stages.
pub fn interleaving_group(stages: usize, micro_batches: usize) -> Result<usize, PlanError> {
    let divisor = (stages..=micro_batches).find(|&group| micro_batches.is_multiple_of(group));
    divisor.ok_or_else(|| PlanError::Request {
        what: "micro-batches of an interleaved schedule",
        expected: format!("{stages} or more, one for each stage"),
        got: micro_batches.to_string(),
    })
}

/// Largest number of forward passes whose activations a stage holds, in passes of one chunk.
pub fn in_flight(order: &[PipelineOp]) -> usize {
    let (mut live, mut most): (usize, usize) = (0, 0);
    for op in order {
        match op.pass {
            Pass::Forward => live += 1,
            Pass::Backward | Pass::Wgrad => live = live.saturating_sub(1),
            Pass::Dgrad => {}
        }
        most = most.max(live);
    }
    most
}

fn op(pass: Pass, chunk: usize, micro_batch: usize) -> PipelineOp {
    PipelineOp { pass, chunk: chunk as u32, micro_batch: micro_batch as u32 }
}

/// Warm-up with one forward pass per later stage, then pairs of forward and backward, then the
/// rest.
fn one_f_one_b(stage: usize, stages: usize, count: usize) -> Vec<PipelineOp> {
    let warm_up = count.min(stages - stage - 1);
    let mut order: Vec<PipelineOp> = (0..warm_up).map(|at| op(Pass::Forward, 0, at)).collect();
    for at in 0..count {
        if warm_up + at < count {
            order.push(op(Pass::Forward, 0, warm_up + at));
        }
        order.push(op(Pass::Backward, 0, at));
    }
    order
}

/// `warm_up` forward passes, then B, W, F in turn, with weight gradients `lag` passes late.
fn zero_bubble(warm_up: usize, lag: usize, count: usize) -> Vec<PipelineOp> {
    let mut forwards = warm_up.min(count);
    let mut weights = 0;
    let mut order: Vec<PipelineOp> = (0..forwards).map(|at| op(Pass::Forward, 0, at)).collect();
    for at in 0..count {
        order.push(op(Pass::Dgrad, 0, at));
        if at + 1 > weights + lag {
            order.push(op(Pass::Wgrad, 0, weights));
            weights += 1;
        }
        if forwards < count {
            order.push(op(Pass::Forward, 0, forwards));
            forwards += 1;
        }
    }
    order.extend((weights..count).map(|at| op(Pass::Wgrad, 0, at)));
    order
}

/// Megatron-LM's interleaved 1F1B: the k-th pass is of chunk (k / group) mod v, reversed for
/// backward.
fn interleaved(
    stage: usize,
    stages: usize,
    count: usize,
    chunks: usize,
    group: usize,
) -> Vec<PipelineOp> {
    let passes = count * chunks;
    let place = |pass: usize| {
        let (round, within) = (pass / (group * chunks), pass % (group * chunks));
        (within / group, round * group + within % group)
    };
    let forward = |pass| {
        let (chunk, micro_batch) = place(pass);
        op(Pass::Forward, chunk, micro_batch)
    };
    let backward = |pass| {
        let (chunk, micro_batch) = place(pass);
        op(Pass::Backward, chunks - 1 - chunk, micro_batch)
    };
    let warm_up = passes.min(2 * (stages - stage - 1) + (chunks - 1) * group);
    let mut order: Vec<PipelineOp> = (0..warm_up).map(forward).collect();
    for pass in 0..passes {
        if warm_up + pass < passes {
            order.push(forward(warm_up + pass));
        }
        order.push(backward(pass));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stages, micro-batches, chunks, and the passes in flight on the first and the last stage.
    fn check(schedule: PipelineSchedule, sizes: (usize, usize, usize), expected: (usize, usize)) {
        let orders = orders(schedule, sizes.0, sizes.1, sizes.2).unwrap();
        for order in &orders {
            let backward = order.iter().filter(|op| op.pass != Pass::Forward).count();
            let forward = order.len() - backward;
            let each = if schedule == PipelineSchedule::OneFOneB { 1 } else { 2 };
            assert_eq!((forward, backward), (sizes.1 * sizes.2, each * sizes.1 * sizes.2));
        }
        let found = (in_flight(&orders[0]), in_flight(orders.last().unwrap()));
        assert_eq!(found, expected, "{schedule} {sizes:?}");
    }

    #[test]
    fn passes_in_flight() {
        use PipelineSchedule::{OneFOneB, ZbH1, ZbH2};
        check(OneFOneB, (4, 8, 1), (4, 1));
        check(OneFOneB, (4, 2, 1), (2, 1));
        check(OneFOneB, (1, 3, 1), (1, 1));
        // p (1 + (p - 1) / (p v)) micro-batches, in passes of one of v chunks.
        check(OneFOneB, (4, 8, 3), (15, 9));
        check(OneFOneB, (4, 10, 3), (17, 11));
        check(ZbH1, (4, 12, 1), (4, 4));
        check(ZbH2, (4, 12, 1), (7, 7));
        check(ZbH1, (3, 1, 1), (1, 1));
    }

    #[test]
    fn schedules_that_are_none() {
        let check = |schedule, sizes: (usize, usize, usize), part: &str| {
            let error = orders(schedule, sizes.0, sizes.1, sizes.2).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        check(PipelineSchedule::OneFOneB, (0, 1, 1), "pipeline stages: expected at least 1");
        check(PipelineSchedule::OneFOneB, (4, 3, 2), "expected 4 or more");
        check(PipelineSchedule::ZbH2, (4, 8, 2), "expected 1 for zb-h2, got 2");
        assert!("zb-h3".parse::<PipelineSchedule>().is_err());
    }
}
