//! Which layers each stage of a pipeline has, and in which order it runs its passes.

use deepwell_ir::{Binding, Graph, Node, Schedule, Slotted, Target};

use crate::schedule::{Pass, PipelineOp, PipelineSchedule, in_flight, orders};
use crate::{Plan, PlanError};

/// Layers of each of so many stages, so that the stage with the most FLOPs has as few as it can.
/// The first stage has the embedding as well, the last one the head.
///
/// # Errors
/// More stages than layers.
pub fn balanced_stages(
    graph: &Graph,
    stages: usize,
    binding: &Binding,
) -> Result<Vec<usize>, PlanError> {
    let count = graph.layer_count();
    if stages == 0 || stages > count {
        return Err(PlanError::Request {
            what: "pipeline stages",
            expected: format!("from 1 to {count}, the layers of the model"),
            got: stages.to_string(),
        });
    }
    let mut layers = vec![0u64; count];
    let mut last = None;
    for node in &graph.nodes {
        last = node.layer.or(last);
        // What stands behind the last layer counts with it, what stands before the first with that.
        layers[last.unwrap_or(0) as usize] += flops(graph, node, binding);
    }
    Ok(partition(&layers, stages))
}

fn flops(graph: &Graph, node: &Node, binding: &Binding) -> u64 {
    let operands = node.inputs.iter().chain(&node.outputs);
    let shapes: Vec<Vec<usize>> =
        operands.map(|&id| graph.tensor(id).shape.bind(binding)).collect();
    node.op.rule().flops(&shapes)
}

/// Cuts a list into so many parts of at least one each, the largest sum of a part as small as it
/// can be; of equally good ways the one with the most in its first parts.
fn partition(costs: &[u64], parts: usize) -> Vec<usize> {
    let sum = |from: usize, to: usize| costs[from..to].iter().sum::<u64>();
    // `least[at]`: the largest sum where what begins at `at` is cut into the parts looked at so
    // far, and how long the first of those is.
    let count = costs.len();
    let mut least: Vec<Option<(u64, usize)>> =
        (0..count).map(|at| Some((sum(at, count), count - at))).collect();
    let mut lengths = vec![least.clone()];
    for _ in 1..parts {
        let of = |at: usize| {
            let cuts = (at + 1..count).filter_map(|cut| {
                let (behind, _) = least[cut]?;
                Some((sum(at, cut).max(behind), cut - at))
            });
            cuts.min_by_key(|&(most, length)| (most, std::cmp::Reverse(length)))
        };
        least = (0..count).map(of).collect();
        lengths.push(least.clone());
    }
    let mut at = 0;
    let mut cut = Vec::with_capacity(parts);
    for least in lengths.iter().rev() {
        let length = least.get(at).copied().flatten().map_or(0, |(_, length)| length);
        cut.push(length);
        at += length;
    }
    cut
}

/// The passes of a rank: 1F1B over the stages of its pipeline, F B F B … where there is one stage.
///
/// # Errors
/// As [`passes_of`].
pub(crate) fn passes(plan: &Plan, target: &Target) -> Result<Schedule, PlanError> {
    let stages = plan.parallel.pipeline;
    let stage = plan.parallel.pipeline_place(target.ranks.rank as usize);
    let orders = orders(PipelineSchedule::OneFOneB, stages, plan.micro_batches, 1)?;
    passes_of(&orders[stage])
}

/// A stage's order of ops as the schedule of a program: each micro-batch in flight has a slot.
///
/// # Errors
/// Ops that a program has no body for: those of a second chunk of layers, and gradients of inputs
/// and of weights apart.
pub fn passes_of(order: &[PipelineOp]) -> Result<Schedule, PlanError> {
    let slots = in_flight(order).max(1) as u32;
    let slotted = |op: &PipelineOp| {
        let refuse = |expected: &str, got: String| {
            let expected = expected.to_string();
            Err(PlanError::Request { what: "pipeline schedule", expected, got })
        };
        let phase = match op.pass {
            Pass::Forward => deepwell_ir::Phase::Forward,
            Pass::Backward => deepwell_ir::Phase::Backward,
            Pass::InputGrad | Pass::WeightGrad => {
                return refuse(
                    "1F1B, as a program has one body for the whole backward pass",
                    format!(
                        "{:?}\nhint: zero-bubble schedules need bodies of their own for the \
                         gradients of inputs and of weights",
                        op.pass
                    ),
                );
            }
        };
        if op.chunk > 0 {
            return refuse(
                "one chunk of layers for each stage, as a program has one body of each phase",
                format!(
                    "chunk {}\nhint: interleaved schedules need bodies for each chunk",
                    op.chunk
                ),
            );
        }
        let micro_batch = op.micro_batch;
        Ok(Slotted { phase, micro_batch, slot: micro_batch % slots })
    };
    let passes = order.iter().map(slotted).collect::<Result<_, _>>()?;
    Ok(Schedule { slots, passes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heaviest_part_is_as_light_as_it_can_be() {
        for (costs, parts, expected) in [
            (&[1u64, 1, 1, 1][..], 1, &[4usize][..]),
            (&[1, 1, 1, 1], 2, &[2, 2]),
            (&[1, 1, 1, 1], 4, &[1, 1, 1, 1]),
            // The head is as heavy as two layers.
            (&[1, 1, 1, 3], 2, &[3, 1]),
            (&[1, 1, 1, 1, 1], 2, &[3, 2]),
            (&[5, 1, 1, 1, 1, 1], 3, &[1, 3, 2]),
            (&[0, 0, 0], 2, &[2, 1]),
        ] {
            assert_eq!(partition(costs, parts), expected, "{costs:?} in {parts}");
        }
    }

    #[test]
    fn orders_become_slots() {
        for stages in 1..=4 {
            for micro_batches in 1..=8 {
                let orders = orders(PipelineSchedule::OneFOneB, stages, micro_batches, 1).unwrap();
                for (stage, order) in orders.iter().enumerate() {
                    let expected = Schedule::one_forward_one_backward(micro_batches, stages, stage);
                    assert_eq!(passes_of(order).unwrap(), expected, "{stage} of {stages}");
                }
            }
        }
        let check = |schedule, chunks, expected: &str| {
            let orders = orders(schedule, 2, 4, chunks).unwrap();
            let error = passes_of(&orders[0]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(PipelineSchedule::OneFOneB, 2, "interleaved schedules need bodies for each chunk");
        check(PipelineSchedule::ZbH1, 1, "zero-bubble schedules need bodies of their own");
        check(PipelineSchedule::ZbH2, 1, "gradients of inputs and of weights");
    }
}
