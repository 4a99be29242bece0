//! Ranks that share the batch train as one rank does: the same bits on every rank. They have
//! optimizer state (ZeRO 1), gradients (ZeRO 2) and weights (ZeRO 3) whole or in slices.
//!
//! The reference is one rank that runs the micro-batches of the others one after the other: it
//! makes the gradients of each part whole, adds them up on the host in the order of the ranks, and
//! updates once. Its program exchanges nothing. Ranks that have gradients in slices sum these over
//! the ranks first and then over the micro-batches, and the reference sums in that order.

mod faults;
mod gathers;
#[path = "../observers/mod.rs"]
mod observers;
#[path = "../ranks/mod.rs"]
mod ranks;
#[path = "../shard_slices/mod.rs"]
mod shard_slices;
mod slices;
mod train;

use std::collections::BTreeMap;

use deepwell_trainer::{CompileOptions, Device, Engine, Parallel, World};

use ranks::reference::{Bits, Case, SEED};
use ranks::{graph, hardware};
use train::{SEQ, STEPS, bits, options, run, world};

/// What one rank gives in the place of several.
fn reference(precision: &str, parts: usize, rows: usize, by_micro_batch: bool) -> Bits {
    let case = Case { device: Device::Cpu, precision, seq: SEQ, parts, rows, steps: STEPS };
    if by_micro_batch { case.run_by_micro_batch() } else { case.run() }
}

/// Trains ranks with so many sequences each in stages of ZeRO.
fn check(precision: &str, ranks: usize, rows: usize, stages: &[u8]) {
    let (mut evaluations, mut known) = (Vec::new(), BTreeMap::new());
    for &zero in stages {
        let what = format!("ZeRO {zero}, {precision}, {ranks} ranks, {rows} rows");
        let by_micro_batch = zero >= 2 && rows > 1;
        let expected = known
            .entry(by_micro_batch)
            .or_insert_with(|| reference(precision, ranks, rows, by_micro_batch));
        let world = world(precision, zero, ranks, rows);
        assert_eq!(world.first().program().shards.is_empty(), zero == 0, "{what}");
        let got = run(world, zero, STEPS);
        for (got, expected) in got.steps.iter().zip(&expected.steps) {
            assert_eq!(got[1], expected[1], "{what}: norm");
            let [loss, expected] = [got[0], expected[0]].map(f32::from_bits);
            // Within a micro-batch a loss goes through FP64: with several of them each way rounds
            // that of a micro-batch, and each sum of them, once at most.
            let parts = if by_micro_batch { ranks * rows } else { 0 };
            let bound = 2.0 * parts as f32 * f32::EPSILON / 2.0 * expected;
            assert!((loss - expected).abs() <= bound, "{what}: {loss}, expected {expected}");
        }
        assert!(got.masters == expected.masters, "{what}: masters");
        let is_whole = zero == 0;
        assert!(is_whole || got.moments.is_empty(), "{what}: nobody has moments whole");
        assert!(!is_whole || got.moments == expected.moments, "{what}: moments");
        // The order of sums is another one between 1 and 2.
        evaluations.push((by_micro_batch, got.evaluated));
    }
    for pair in evaluations.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
        assert_eq!(pair[0], pair[1], "{precision}, {ranks} ranks, {rows} rows: evaluations");
    }
}

/// Three ranks cut parameters in the middle, and fill the last slice up.
#[test]
fn ranks_train_as_one_does() {
    for precision in ["bf16", "mxfp8"] {
        check(precision, 2, 1, &[0, 2, 3]);
        check(precision, 2, 2, &[0, 1, 2, 3]);
        check(precision, 3, 1, &[0, 1, 2, 3]);
        check(precision, 4, 1, &[0, 1, 2, 3]);
        check(precision, 3, 2, &[2, 3]);
    }
    check("f32", 2, 1, &[2, 3]);
    for (ranks, rows) in [(2, 2), (3, 1), (4, 1)] {
        check("f32", ranks, rows, &[1, 2, 3]);
    }
    check("f32", 3, 2, &[2, 3]);
}

/// One rank that accumulates micro-batches in place adds each token's gradient of the embedding to
/// the sum so far, not to that of its micro-batch: the same numbers where no token comes twice in a
/// micro-batch. Its loss goes through f64 within a micro-batch.
#[test]
fn ranks_train_as_gradient_accumulation_does() {
    for (precision, ranks) in [("bf16", 2), ("bf16", 4), ("mxfp8", 3)] {
        let distinct = |step: usize| -> (Vec<i32>, Vec<i32>) {
            let token = |at: usize| ((at * 37 + step * 11) % 256) as i32;
            let rows = 0..ranks * SEQ;
            (rows.clone().map(token).collect(), rows.map(|at| token(at + 1)).collect())
        };
        let train = |engine: &mut Engine| {
            engine.initialize(SEED)?;
            let mut losses = Vec::new();
            for at in 0..STEPS {
                let (inputs, targets) = distinct(at);
                losses.push(engine.step(&inputs, &targets, 1e-2, 0.5)?.loss);
            }
            Ok((losses, bits(engine)?))
        };
        let one =
            CompileOptions { parallel: Parallel::default(), ..options(precision, 0, ranks, 1) };
        let mut one = World::compile(graph(), hardware(), &one).unwrap();
        assert_eq!(one.first().program().micro_batches, ranks);
        let (expected_losses, expected) = one.on_all(train).unwrap().remove(0);
        for (losses, state) in world(precision, 0, ranks, 1).on_all(train).unwrap() {
            assert!(state == expected, "{precision}, {ranks} ranks: masters and moments");
            for (loss, expected) in losses.iter().zip(&expected_losses) {
                // Each way rounds the loss of a micro-batch, and each sum of them, once at most.
                let bound = 2.0 * ranks as f32 * f32::EPSILON / 2.0 * expected;
                assert!((loss - expected).abs() <= bound, "{loss}, expected {expected}");
            }
        }
    }
}

#[test]
fn a_batch_that_ranks_cannot_split_is_refused() {
    let options = CompileOptions { global_batch: 4, ..options("bf16", 0, 3, 1) };
    let error = World::compile(graph(), hardware(), &options).err().unwrap().to_string();
    assert_eq!(error, "batch size: expected a multiple of the 3 ranks that split it, got 4");
}
