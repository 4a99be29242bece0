//! The layers of each pipeline stage, and the order of the stage's passes.

use std::collections::HashMap;

use deepwell_ir::{Binding, Graph, Node, Phase, Schedule, Slotted};

use crate::schedule::{Pass, PipelineOp, StageHandover, handovers, in_flight, orders};
use crate::{Parallel, Plan, PlanError};

/// Divides the layers over stages so that the largest FLOPs of a stage are minimal. The first stage
/// also has the embedding, the last stage the head.
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
        // Nodes after the last layer count with that layer, nodes before the first with the first.
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

/// Divides a list into `parts` parts of at least one element, with the smallest largest sum. Among
/// equal divisions the one with the longest first parts is taken.
fn partition(costs: &[u64], parts: usize) -> Vec<usize> {
    let sum = |from: usize, to: usize| costs[from..to].iter().sum::<u64>();
    // `least[at]`: for a division of the elements from `at` on into the current number of parts,
    // the smallest largest sum, and the length of the first part.
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

/// The passes of a stage, and the receives between passes.
pub(crate) type StagePasses = (Schedule, Option<StageHandover>);

/// The passes of each stage: 1F1B over the pipeline, interleaved for several chunks, or a
/// zero-bubble schedule; F B F B … without receives for a single stage.
///
/// # Errors
/// As [`passes_of`], and an unsupported number of micro-batches for an interleaved schedule.
pub(crate) fn passes_of_stages(plan: &Plan) -> Result<Vec<StagePasses>, PlanError> {
    let orders = orders_of(plan.parallel, plan.micro_batches)?;
    let handovers: Vec<Option<StageHandover>> = match orders.len() {
        1 => vec![None],
        _ => handovers(&orders, plan.parallel.chunks)?.into_iter().map(Some).collect(),
    };
    let passes = |(order, handover): (&Vec<PipelineOp>, _)| Ok((passes_of(order)?, handover));
    orders.iter().zip(handovers).map(passes).collect()
}

/// The order of each stage's passes.
///
/// # Errors
/// A number of micro-batches that is not a multiple of the stages, with an interleaved schedule.
pub fn orders_of(
    parallel: Parallel,
    micro_batches: usize,
) -> Result<Vec<Vec<PipelineOp>>, PlanError> {
    let Parallel { pipeline, chunks, schedule, .. } = parallel;
    if chunks > 1 && !micro_batches.is_multiple_of(pipeline) {
        // Two stages would deadlock: all messages between two stages, forward and backward, share
        // one order, and the orders of sends and receives would differ.
        return Err(PlanError::Request {
            what: "micro-batches of an interleaved schedule",
            expected: format!("a multiple of the {pipeline} stages"),
            got: micro_batches.to_string(),
        });
    }
    orders(schedule, pipeline, micro_batches, chunks)
}

/// Converts a stage's order of ops to a program schedule: each micro-batch in flight through a
/// chunk has a slot, from the forward pass to the last reader of its activations.
///
/// # Errors
/// A pass before the forward pass of its micro-batch.
pub fn passes_of(order: &[PipelineOp]) -> Result<Schedule, PlanError> {
    let slots = in_flight(order).max(1);
    let mut free: Vec<bool> = vec![true; slots];
    let mut held: HashMap<(u32, u32), usize> = HashMap::new();
    let slotted = |op: &PipelineOp| {
        let PipelineOp { pass, chunk, micro_batch } = *op;
        let (phase, is_last) = match pass {
            Pass::Forward => {
                // At most `slots` are in flight, so a slot is free.
                let slot = free.iter().position(|&is_free| is_free).unwrap_or_default();
                free[slot] = false;
                held.insert((chunk, micro_batch), slot);
                (Phase::Forward, false)
            }
            Pass::Backward => (Phase::Backward, true),
            Pass::Dgrad => (Phase::Backward, false),
            Pass::Wgrad => (Phase::WeightGradients, true),
        };
        let Some(&slot) = held.get(&(chunk, micro_batch)) else {
            return Err(PlanError::Request {
                what: "pipeline schedule",
                expected: "each forward pass before those that need its activations".to_string(),
                got: format!("{phase} of chunk {chunk} of micro-batch {micro_batch} before"),
            });
        };
        if is_last {
            held.remove(&(chunk, micro_batch));
            free[slot] = true;
        }
        Ok(Slotted { phase, chunk, micro_batch, slot: slot as u32 })
    };
    let passes = order.iter().map(slotted).collect::<Result<_, _>>()?;
    Ok(Schedule { slots: slots as u32, passes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::PipelineSchedule;

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

    /// A slot is held from a forward pass to its backward pass, and all slots are needed.
    #[test]
    fn interleaved_passes_hold_slots_of_their_own() {
        for (stages, micro_batches, chunks) in [(2, 2, 2), (2, 4, 2), (3, 6, 2), (4, 8, 3)] {
            let orders = orders(PipelineSchedule::OneFOneB, stages, micro_batches, chunks).unwrap();
            for order in &orders {
                let schedule = passes_of(order).unwrap();
                let mut held = vec![None; schedule.slots as usize];
                let mut most = 0;
                for pass in &schedule.passes {
                    let of = Some((pass.chunk, pass.micro_batch));
                    let (expected, next) = match pass.phase {
                        Phase::Forward => (None, of),
                        _ => (of, None),
                    };
                    assert_eq!(held[pass.slot as usize], expected, "{pass:?}");
                    held[pass.slot as usize] = next;
                    most = most.max(held.iter().flatten().count());
                }
                assert_eq!((most, held.iter().flatten().count()), (held.len(), 0));
            }
        }
        let parallel = Parallel { pipeline: 2, chunks: 2, ..Parallel::data(1) };
        let error = orders_of(parallel, 5).unwrap_err().to_string();
        assert!(error.contains("expected a multiple of the 2 stages, got 5"), "{error}");
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
        let pass = |pass, micro_batch| PipelineOp { pass, chunk: 0, micro_batch };
        for order in [&[pass(Pass::Backward, 0)][..], &[pass(Pass::Wgrad, 1)]] {
            let error = passes_of(order).unwrap_err().to_string();
            assert!(error.contains("each forward pass before those that need"), "{error}");
        }
    }

    /// A slot is free after the weight gradients, not after the input gradients.
    #[test]
    fn zero_bubble_passes_hold_slots_until_their_weights_have_gradients() {
        for (stages, micro_batches) in [(2, 1), (2, 5), (4, 2), (4, 12)] {
            let orders = orders(PipelineSchedule::ZbH1, stages, micro_batches, 1).unwrap();
            for order in &orders {
                let schedule = passes_of(order).unwrap();
                assert_eq!(schedule.slots as usize, stages.min(micro_batches));
                let mut held = vec![None; schedule.slots as usize];
                for pass in &schedule.passes {
                    let of = |next| Some((pass.micro_batch, next));
                    let (expected, next) = match pass.phase {
                        Phase::Forward => (None, of(Phase::Backward)),
                        Phase::Backward => (of(Phase::Backward), of(Phase::WeightGradients)),
                        _ => (of(Phase::WeightGradients), None),
                    };
                    assert_eq!(held[pass.slot as usize], expected, "{pass:?}");
                    held[pass.slot as usize] = next;
                }
                assert!(held.iter().all(Option::is_none));
            }
        }
    }
}
