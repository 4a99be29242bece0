//! When stages hand over what they send each other, so that none waits for ever.
//!
//! Nothing is buffered on the way: a send ends when the other stage receives. Between two of its
//! ops a stage *meets* others: it sends what the op before has made, and receives what it has
//! chosen to, all at the same time, and goes on when all of that is over. What it receives lands in
//! a place of its own, which is free again when the op begins that reads it.
//!
//! What a stage receives in which meeting is found by running the orders of all stages against
//! each other. A stage that has ended an op waits until all that it sends is taken and all that its
//! next op reads is there; while it waits, whoever has something for it may hand that over. The
//! run fixes who takes what in which meeting, in which order.
//!
//! No stage that follows waits for ever, however long its ops take. Suppose some do. Of what is not
//! handed over yet, look at what the run here handed over first. Both its ends stood in their
//! meetings then; all that either had to hand over in earlier meetings was over in the run, hence
//! earlier than that, and is so over now. So both ends have come to those meetings, and it is
//! handed over.

use std::collections::HashMap;

use super::simulate::needed;
use super::{Pass, PipelineOp};
use crate::PlanError;

/// What one stage receives when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageHandover {
    /// How much can have landed and not been read at a time.
    pub places: usize,
    /// Before each op of the stage and behind its last one: the op that reads what is received, by
    /// its index, and the place where it lands.
    pub before: Vec<Vec<(usize, usize)>>,
}

/// When each stage of `orders` receives what, with as few places as do not make a step longer.
///
/// # Errors
/// Orders in which stages wait for each other for ever.
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

/// Who sends what to whom.
struct Messages {
    /// Of each op, the one that reads what it sends.
    readers: Vec<Vec<Option<At>>>,
    /// Whether an op reads what another stage sends.
    receives: Vec<Vec<bool>>,
}

impl Messages {
    fn of(orders: &[Vec<PipelineOp>], chunks: usize) -> Messages {
        let mut made: HashMap<(usize, bool, u32, u32), usize> = HashMap::new();
        for (stage, order) in orders.iter().enumerate() {
            for (index, op) in
                order.iter().enumerate().filter(|(_, op)| op.pass != Pass::WeightGrad)
            {
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

/// A stage in a run.
struct Stage {
    /// The op that it computes or would begin next.
    next: usize,
    /// When the op that it computes is over; none in a meeting.
    ends: Option<u64>,
    /// Who reads what it has sent and nobody has taken.
    sends: Option<At>,
    /// The ops whose inputs lie in its places.
    landed: Vec<Option<usize>>,
    handover: StageHandover,
}

/// Ticks that an op takes, about: they decide how long stages wait, not whether for ever.
fn ticks(pass: Pass) -> u64 {
    match pass {
        Pass::Forward | Pass::InputGrad | Pass::WeightGrad => 1,
        Pass::Backward => 2,
    }
}

/// Runs the orders where each stage has so many places, all but one for what its next op does not
/// read. None where stages wait for each other for ever; else what was received when, and how long
/// all took.
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

/// Hands over what stage `at` sends, if its reader is in a meeting and has a place for it.
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

/// Lets a stage begin its next op, if all before it is over.
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
