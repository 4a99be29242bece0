//! The model against measured intervals and latencies, and on small recordings.

use super::machine::{Bound, Machine};
use super::record::{Recording, Step, WarpSteps};
use super::replay::replay;
use super::summary::Unit;
use crate::observe::{Direction, Origin, TensorMma};

fn machine(bound: Bound) -> Machine {
    Machine::of("sm_100a", bound).expect("a known target")
}

/// M, N, CTAs, A in shared memory, and the measured clocks between MMAs (SA, B200).
const INTERVALS: [(u32, u32, u32, bool, f64); 13] = [
    (128, 64, 1, true, 48.0),
    (128, 96, 1, true, 56.0),
    (128, 128, 1, true, 64.0),
    (128, 256, 1, true, 128.0),
    (128, 64, 1, false, 32.0),
    (128, 128, 1, false, 64.0),
    (256, 64, 2, true, 43.0),
    (256, 128, 2, true, 64.0),
    (256, 256, 2, true, 128.0),
    (128, 64, 2, true, 25.0),
    (128, 128, 2, true, 32.0),
    (128, 256, 2, true, 64.0),
    (128, 64, 2, false, 18.0),
];

fn mma((m, n, group, a_in_shared): (u32, u32, u32, bool)) -> TensorMma {
    TensorMma { m, n, k: 16, group, a_in_shared }
}

#[test]
fn intervals_of_mmas_are_those_measured() {
    for (m, n, group, a_in_shared, measured) in INTERVALS {
        let clocks = machine(Bound::Fast).mma_clocks(&mma((m, n, group, a_in_shared)));
        // The measured intervals of small pairs are up to 12 % above the bytes over 128.
        let error = (clocks - measured).abs() / measured;
        assert!(error <= 0.12, "{m} x {n}, {group} CTAs: {clocks}, measured {measured}");
    }
}

fn origin(warp: u32) -> Origin {
    Origin { cluster: 0, place: 0, sm: 0, rank: 0, warp, pc: 0 }
}

/// A recording of one CTA from the steps of its warps.
fn recording(warps: Vec<Vec<Step>>, arrivals: &[u32]) -> Recording {
    let warps = (0..).zip(warps).map(|(warp, steps)| WarpSteps {
        origin: origin(warp),
        steps: steps.into_iter().map(|step| (0, step)).collect(),
    });
    Recording {
        warps: warps.collect(),
        arrivals: arrivals.to_vec(),
        of_mbarriers: vec![true; arrivals.len()],
        sms: [((0, 0), 0)].into(),
    }
}

/// D MMAs, their commit and a wait take (D - 1) intervals, N / 2, a latency and 12 clocks (SA).
#[test]
fn latency_of_a_chain_of_mmas() {
    for depth in [1, 4, 32] {
        let of = mma((128, 256, 1, true));
        let mut steps = vec![Step::Mma(of); depth];
        steps.extend([Step::Commit(0), Step::Wait(0)]);
        for (bound, latency) in [(Bound::Fast, 104.0), (Bound::Slow, 136.0)] {
            let found = replay(&recording(vec![steps.clone()], &[1]), &machine(bound)).clocks;
            let expected = (depth - 1) as f64 * 128.0 + 128.0 + latency + 12.0;
            assert!((found - expected).abs() <= 2.0, "{depth}: {found}, expected {expected}");
        }
    }
}

/// A producer fills two stages, MMAs empty them: with enough stages MMAs are the bound, with copies
/// of twice the bytes the copies are.
#[test]
fn a_pipeline_is_bound_by_its_slower_side() {
    let stages = 64u32;
    for (bytes, unit) in [(8192, Unit::TensorCores), (65536, Unit::Copies)] {
        let mut producer = Vec::new();
        let mut consumer = Vec::new();
        for stage in 0..stages {
            let (full, empty) = (2 * stage, 2 * stage + 1);
            if stage >= 8 {
                producer.push(Step::Wait(2 * (stage - 8) + 1));
            }
            let direction = Direction::ToShared(0);
            producer.push(Step::Copy { direction, bytes, signal: Some(full) });
            consumer.push(Step::Wait(full));
            consumer.extend(vec![Step::Mma(mma((128, 256, 1, true))); 4]);
            consumer.push(Step::Commit(empty));
        }
        let recording = recording(vec![producer, consumer], &[1; 128]);
        let cycles = replay(&recording, &machine(Bound::Fast));
        assert_eq!(cycles.stuck, 0);
        let (bound, share) = cycles.bound().expect("units are busy");
        assert_eq!(bound, unit, "{bytes} bytes: {:?}", cycles.busy);
        assert!(share > 0.9, "{bytes} bytes: {share}");
    }
}

#[test]
fn a_missing_arrival_is_counted() {
    let cycles = replay(&recording(vec![vec![Step::Wait(0)]], &[1]), &machine(Bound::Fast));
    assert_eq!(cycles.stuck, 1);
}
