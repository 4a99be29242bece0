//! The exchanges of all schedules, without a model: nobody waits for ever.

use deepwell_ir::ops::CollectiveKind;
use deepwell_ir::{DType, ProcessGroup, Shape};
use deepwell_kernels::{Comm, Exchange, InProcess};
use deepwell_plan::schedule::{Pass, PipelineOp, PipelineSchedule, orders};

use super::PATIENCE;

/// What a stage's ops exchange, in order: the other stage, and what is sent to it or awaited of it.
/// Interleaved stages hand on from the last one to the first one's next chunk.
fn exchanges(order: &[PipelineOp], stage: usize, stages: usize) -> Vec<(bool, usize, u64)> {
    let mark = |backward: bool, chunk: u32, at: usize, micro_batch: u32| {
        u64::from(backward) << 60
            | u64::from(chunk) << 40
            | (at as u64) << 20
            | u64::from(micro_batch)
    };
    let chunks = order.iter().map(|op| op.chunk + 1).max().unwrap_or(1);
    let mut list = Vec::new();
    for op in order {
        let (chunk, micro_batch) = (op.chunk, op.micro_batch);
        let backward = match op.pass {
            Pass::Forward => false,
            Pass::Backward | Pass::Dgrad => true,
            Pass::Wgrad => continue,
        };
        let before = match (stage, chunk) {
            (0, 0) => None,
            (0, chunk) => Some((stages - 1, chunk - 1)),
            (stage, chunk) => Some((stage - 1, chunk)),
        };
        let behind = match (stage + 1 == stages, chunk + 1 == chunks) {
            (true, true) => None,
            (true, false) => Some((0, chunk + 1)),
            (false, _) => Some((stage + 1, chunk)),
        };
        let (from, to) = if backward { (behind, before) } else { (before, behind) };
        list.extend(from.map(|(at, chunk)| (false, at, mark(backward, chunk, at, micro_batch))));
        list.extend(to.map(|(at, _)| (true, at, mark(backward, chunk, stage, micro_batch))));
    }
    list
}

/// Each stage in a thread of its own, with marks in place of activations.
fn run_exchanges(orders: &[Vec<PipelineOp>]) -> Result<(), String> {
    let stages = orders.len();
    let comms = InProcess::world(stages as u32, PATIENCE);
    let group = ProcessGroup {
        name: ProcessGroup::PIPELINE.to_string(),
        ranks: (0..stages as u32).collect(),
    };
    let run = |stage: usize, mut comm: InProcess| -> Result<(), String> {
        for (sends, other, mark) in exchanges(&orders[stage], stage, stages) {
            let exchange = |kind| Exchange { kind, group: group.clone(), dtype: DType::U64 };
            let mut got = [0u8; 8];
            let done = if sends {
                let send = exchange(CollectiveKind::Send { to: other as u32 });
                comm.exchange(&send, &mark.to_le_bytes(), &mut [])
            } else {
                let (from, shape) = (other as u32, Shape::new([1usize]));
                let recv = CollectiveKind::Recv { from, shape, dtype: DType::U64 };
                comm.exchange(&exchange(recv), &[], &mut got)
            };
            done.map_err(|error| error.to_string())?;
            if !sends && u64::from_le_bytes(got) != mark {
                return Err(format!("stage {stage} of {stages} awaits {mark:x} of {other}"));
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms
            .into_iter()
            .enumerate()
            .map(|(stage, comm)| {
                let run = &run;
                scope.spawn(move || run(stage, comm))
            })
            .collect();
        let ends = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        let errors: Vec<String> = ends.filter_map(Result::err).collect();
        if errors.is_empty() { Ok(()) } else { Err(errors.join("; ")) }
    })
}

/// Nobody waits for ever, and what a stage receives is what it awaits: both ends of each pair go in
/// one order.
#[test]
fn both_ends_exchange_in_one_order() {
    for stages in 2..=4 {
        for micro_batches in 1..=8 {
            for schedule in PipelineSchedule::ALL {
                let orders = orders(schedule, stages, micro_batches, 1).unwrap();
                run_exchanges(&orders).unwrap_or_else(|error| panic!("{schedule}: {error}"));
            }
        }
    }
    for (stages, micro_batches, chunks) in [(2, 2, 2), (2, 8, 2), (2, 4, 3), (3, 6, 2), (4, 8, 2)] {
        let schedule = PipelineSchedule::OneFOneB;
        let orders = orders(schedule, stages, micro_batches, chunks).unwrap();
        run_exchanges(&orders).unwrap_or_else(|error| panic!("{chunks} chunks: {error}"));
    }
    // Two stages whose micro-batches they do not divide would: such plans are refused.
    let refused = orders(PipelineSchedule::OneFOneB, 2, 5, 2).unwrap();
    assert!(run_exchanges(&refused).unwrap_err().contains("awaits"));
    // An order that one end does not follow is seen.
    let mut orders = orders(PipelineSchedule::OneFOneB, 2, 3, 1).unwrap();
    orders[0].swap(0, 1);
    let error = run_exchanges(&orders).unwrap_err();
    assert!(error.contains("awaits"), "{error}");
}
