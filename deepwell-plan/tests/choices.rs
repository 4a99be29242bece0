//! What the planner chooses, and when it gives up.

mod common;

use deepwell_ir::{PrecisionPolicy, Recompute, Target};
use deepwell_plan::{PlanError, PlanRequest, autoplan};

use common::{Kernels, graph, hardware, plan, planned, request};

const PRESET: &str = "parity-3m";
const SEQ: usize = 256;
const BATCH: usize = 4;

fn peak_bytes(micro_batch: usize, rule: Recompute) -> u64 {
    let planned = planned(PRESET, PrecisionPolicy::bf16(), SEQ, BATCH, micro_batch, rule);
    planned.prediction.ranks[0].peak_bytes
}

#[test]
fn recomputation_grows_as_memory_gets_tight() {
    use Recompute::{Full, None, Selective};
    let [none, selective, full] = [None, Selective, Full].map(|rule| peak_bytes(BATCH, rule));
    assert!(full < selective && selective < none, "{full} {selective} {none}");
    let check = |limit_bytes: u64, expected: Option<Recompute>| {
        let limited = PlanRequest {
            memory_limit_bytes: Some(limit_bytes),
            micro_batch: Some(BATCH),
            ..request(PrecisionPolicy::bf16(), SEQ, BATCH)
        };
        match (plan(PRESET, &limited), expected) {
            (Ok(planned), Some(rule)) => {
                assert_eq!(planned.plan.recompute, rule, "{limit_bytes} bytes");
                assert!(planned.prediction.ranks[0].peak_bytes <= limit_bytes);
                let rejected = planned.rejected.len();
                // Each weaker rule was tried and is named with what it needs.
                assert_eq!(
                    rejected,
                    [None, Selective, Full].iter().position(|r| *r == rule).unwrap()
                );
                assert!(planned.rejected.iter().all(|text| text.contains("may be used")));
            }
            (Err(PlanError::NothingFits { limit_bytes: limit, rejected }), Option::None) => {
                assert_eq!((limit, rejected.len()), (limit_bytes, 3));
            }
            (result, _) => panic!("{limit_bytes} bytes: {:?}", result.map(|p| p.plan.recompute)),
        }
    };
    check(u64::MAX, Some(None));
    check(none, Some(None));
    check(none - 1, Some(Selective));
    check(selective, Some(Selective));
    check(selective - 1, Some(Full));
    check(full, Some(Full));
    check(full - 1, Option::None);
    check(0, Option::None);
}

#[test]
fn smaller_micro_batches_come_before_recomputation() {
    let peaks = [4, 2, 1].map(|micro_batch| peak_bytes(micro_batch, Recompute::None));
    assert!(peaks[0] > peaks[1] && peaks[1] > peaks[2], "{peaks:?}");
    for (limit_bytes, micro_batch) in
        [(peaks[0], 4), (peaks[0] - 1, 2), (peaks[1] - 1, 1), (peaks[2], 1)]
    {
        let limited = PlanRequest {
            memory_limit_bytes: Some(limit_bytes),
            ..request(PrecisionPolicy::bf16(), SEQ, BATCH)
        };
        let planned = plan(PRESET, &limited).unwrap();
        let chosen = (planned.plan.micro_batch, planned.plan.micro_batches);
        assert_eq!(chosen, (micro_batch, BATCH / micro_batch), "{limit_bytes} bytes");
        assert_eq!(planned.plan.recompute, Recompute::None, "{limit_bytes} bytes");
    }
}

#[test]
fn without_a_limit_all_but_two_hundredths_of_free_memory_may_be_used() {
    let peak = peak_bytes(BATCH, Recompute::None);
    let wanted = PlanRequest {
        micro_batch: Some(BATCH),
        recompute: Some(Recompute::None),
        ..request(PrecisionPolicy::bf16(), SEQ, BATCH)
    };
    let check = |available_bytes: u64, fits: bool| {
        let mut hardware = hardware();
        hardware.cpu.memory_available_bytes = available_bytes;
        let target = common::target();
        let result = autoplan(&graph(PRESET), &hardware, &wanted, &Kernels, &target);
        assert_eq!(result.is_ok(), fits, "{available_bytes} bytes available");
    };
    check(peak / 49 * 50 + 50, true);
    check(peak / 49 * 50 - 50, false);
}

#[test]
fn requests_that_cannot_be_planned_say_why() {
    let check = |change: &dyn Fn(&mut PlanRequest), expected: &str| {
        let mut wanted = request(PrecisionPolicy::bf16(), 32, 4);
        change(&mut wanted);
        let message = plan("llama-micro", &wanted).unwrap_err().to_string();
        assert_eq!(message, expected);
    };
    check(&|r| r.seq = 0, "sequence length: expected at least 1, got 0");
    check(&|r| r.global_batch = 0, "batch size: expected at least 1, got 0");
    check(&|r| r.micro_batch = Some(3), "micro-batch: expected a divisor of the batch of 4, got 3");
    check(&|r| r.micro_batch = Some(0), "micro-batch: expected a divisor of the batch of 4, got 0");
}

#[test]
fn a_model_without_kernels_names_the_call_and_who_was_asked() {
    let target = Target { arch: "hopper-sm90".to_string(), ..common::target() };
    let wanted = request(PrecisionPolicy::bf16(), 32, 4);
    let result = autoplan(&graph("llama-micro"), &hardware(), &wanted, &Kernels, &target);
    assert_eq!(
        result.unwrap_err().to_string(),
        "call `embed_tokens`: no kernel for `embedding` on `hopper-sm90`\n  \
         plain_embedding: runs on a cpu, not on hopper-sm90"
    );
}

#[test]
fn nothing_fits_lists_every_plan_with_what_it_needs() {
    let limited = PlanRequest {
        memory_limit_bytes: Some(1 << 20),
        ..request(PrecisionPolicy::bf16(), 32, 2)
    };
    let message = plan(PRESET, &limited).unwrap_err().to_string();
    let lines: Vec<&str> = message.lines().collect();
    assert_eq!(lines[0], "no plan fits into 1.0 MiB of memory; tried:");
    assert_eq!(lines.len(), 1 + 6 + 1, "{message}");
    assert!(lines[1].starts_with("  micro-batch 2 x 1, recompute none: needs "), "{message}");
    assert!(lines[6].starts_with("  micro-batch 1 x 2, recompute full: needs "), "{message}");
    assert!(lines[7].starts_with("hint: "), "{message}");
}
