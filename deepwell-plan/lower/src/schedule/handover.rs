//! Plans the sends and receives between pipeline stages so that no stage deadlocks.
//!
//! Sends are unbuffered: a send ends when the other stage receives. Between two of its ops a stage
//! has a *meeting*: it sends the previous op's output and posts the planned receives, all at the
//! same time, and continues when all of these have ended. Each received message lands in a place of
//! its own, which is free again when the reading op begins.
//!
//! The receives of each meeting are found by running the orders of all stages together. After an
//! op, a stage waits until its outputs are taken and the inputs of its next op have arrived.
//! Meanwhile any stage may hand over a message to the waiting stage. The run records which message
//! is received in which meeting, and in which order.
//!
//! No stage that follows this plan deadlocks, for any op times. Proof by contradiction: among the
//! messages not handed over, take the message that the run handed over first. In the run, sender
//! and receiver were in their meetings at that time, and all messages of their earlier meetings had
//! been handed over before. By choice of the message, all those messages are handed over now as
//! well. So sender and receiver have reached their meetings, and the message is handed over.

use std::collections::HashMap;

use super::simulate::needed;
use super::{Pass, PipelineOp};
use crate::PlanError;

/// Receives of one stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageHandover {
    /// Largest number of messages received and not yet read.
    pub places: usize,
    /// For each op of the stage, and after the last op: messages received before the op, by the
    /// index of the reading op, and the place of each message.
    pub before: Vec<Vec<(usize, usize)>>,
}

/// Plans the receives of each stage of `orders`, with the fewest places that do not lengthen a
/// step.
///
/// # Errors
/// Orders that deadlock.
pub fn handovers(
    orders: &[Vec<PipelineOp>],
    chunks: usize,
) -> Result<Vec<StageHandover>, PlanError> {
    let messages = Messages::of(orders, chunks);
    let stuck = || PlanError::Request {
        what: "pipeline schedule",
        expected: "an order in which each op's input comes before it".to_string(),
        got: "stages that wait for each other for ever".to_string(),
    };
    let most = orders.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let (widest, ticks) = run(orders, &messages, most).ok_or_else(stuck)?;
    let narrow = (1..most).find_map(|places| {
        let (found, took) = run(orders, &messages, places)?;
        (took <= ticks).then_some(found)
    });
    Ok(narrow.unwrap_or(widest))
}

/// An op, by stage and index.
type At = (usize, usize);

/// Messages between stages.
struct Messages {
    /// For each op, the reader of the op's output on another stage.
    readers: Vec<Vec<Option<At>>>,
    /// Whether an op reads the output of another stage.
    receives: Vec<Vec<bool>>,
}

impl Messages {
    fn of(orders: &[Vec<PipelineOp>], chunks: usize) -> Messages {
        let mut made: HashMap<(usize, bool, u32, u32), usize> = HashMap::new();
        for (stage, order) in orders.iter().enumerate() {
            for (index, op) in order.iter().enumerate().filter(|(_, op)| op.pass != Pass::Wgrad) {
                let is_backward = op.pass != Pass::Forward;
                made.insert((stage, is_backward, op.chunk, op.micro_batch), index);
            }
        }
        let mut readers: Vec<Vec<Option<At>>> =
            orders.iter().map(|order| vec![None; order.len()]).collect();
        let mut receives: Vec<Vec<bool>> =
            orders.iter().map(|order| vec![false; order.len()]).collect();
        for (stage, order) in orders.iter().enumerate() {
            for (index, &op) in order.iter().enumerate() {
                let Some((from, needed, is_backward)) = needed(stage, orders.len(), chunks, op)
                else {
                    continue;
                };
                if from == stage {
                    continue;
                }
                receives[stage][index] = true;
                let sender = made.get(&(from, is_backward, needed.chunk, needed.micro_batch));
                if let Some(&sender) = sender {
                    readers[from][sender] = Some((stage, index));
                }
            }
        }
        Messages { readers, receives }
    }
}

/// State of a stage in a run.
struct Stage {
    /// The op in progress, or the next op.
    next: usize,
    /// End of the op in progress; `None` in a meeting.
    ends: Option<u64>,
    /// Reader of the output that is not yet taken.
    sends: Option<At>,
    /// The ops whose inputs occupy the places.
    landed: Vec<Option<usize>>,
    handover: StageHandover,
}

/// Approximate duration of an op in ticks. Durations affect waiting times, not deadlocks.
fn ticks(pass: Pass) -> u64 {
    match pass {
        Pass::Forward | Pass::Dgrad | Pass::Wgrad => 1,
        Pass::Backward => 2,
    }
}

/// Runs the orders with `places` places per stage, where one place is reserved for the input of the
/// next op. Returns the recorded receives and the duration, or `None` if stages deadlock.
fn run(
    orders: &[Vec<PipelineOp>],
    messages: &Messages,
    places: usize,
) -> Option<(Vec<StageHandover>, u64)> {
    let new = |order: &Vec<PipelineOp>| Stage {
        next: 0,
        ends: None,
        sends: None,
        landed: Vec::new(),
        handover: StageHandover { places: 0, before: vec![Vec::new(); order.len() + 1] },
    };
    let mut stages: Vec<Stage> = orders.iter().map(new).collect();
    let mut now = 0;
    loop {
        let mut moved = true;
        while moved {
            moved = false;
            for at in 0..stages.len() {
                moved |= hand_over(&mut stages, at, places);
            }
            for (at, stage) in stages.iter_mut().enumerate() {
                moved |= begin(stage, &orders[at], &messages.receives[at], now);
            }
        }
        let Some(end) = stages.iter().filter_map(|stage| stage.ends).min() else { break };
        now = end;
        for (at, stage) in stages.iter_mut().enumerate().filter(|(_, it)| it.ends == Some(end)) {
            stage.ends = None;
            stage.sends = messages.readers[at][stage.next];
            stage.next += 1;
        }
    }
    let is_over = |(stage, order): (&Stage, &Vec<PipelineOp>)| {
        stage.next == order.len() && stage.sends.is_none()
    };
    let all = stages.iter().zip(orders).all(is_over);
    all.then(|| (stages.into_iter().map(|stage| stage.handover).collect(), now))
}

/// Hands over the output of stage `at`, if the reader is in a meeting and has a free place.
fn hand_over(stages: &mut [Stage], at: usize, places: usize) -> bool {
    let Some((to, op)) = stages[at].sends.filter(|_| stages[at].ends.is_none()) else {
        return false;
    };
    let reader = &mut stages[to];
    let early = reader.landed.iter().flatten().filter(|landed| **landed != reader.next).count();
    if reader.ends.is_some() || (op != reader.next && early + 1 >= places) {
        return false;
    }
    let free = reader.landed.iter().position(Option::is_none);
    let place = free.unwrap_or_else(|| {
        reader.landed.push(None);
        reader.landed.len() - 1
    });
    reader.landed[place] = Some(op);
    reader.handover.places = reader.landed.len();
    reader.handover.before[reader.next].push((op, place));
    stages[at].sends = None;
    true
}

/// Begins the next op of a stage, if its outputs are taken and its input has arrived.
fn begin(stage: &mut Stage, order: &[PipelineOp], receives: &[bool], now: u64) -> bool {
    let Some(op) = order.get(stage.next) else { return false };
    if stage.ends.is_some() || stage.sends.is_some() {
        return false;
    }
    if receives[stage.next] {
        let own = stage.landed.iter_mut().find(|landed| **landed == Some(stage.next));
        let Some(own) = own else { return false };
        *own = None;
    }
    stage.ends = Some(now + ticks(op.pass));
    true
}

#[cfg(test)]
mod tests;
