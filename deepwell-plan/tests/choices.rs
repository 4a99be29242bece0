//! What the planner chooses, and when it gives up.

mod common;

use std::num::NonZeroU32;

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
    use Recompute::{Activations, Full, FullOf, None, Norms, Selective};
    let layers = graph(PRESET).layer_count() as u32;
    let whole: Vec<Recompute> = (1..layers).filter_map(NonZeroU32::new).map(FullOf).collect();
    let one_kind = [Norms, Activations];
    let in_order = [&[None], &one_kind[..], &[Selective], &whole].concat();
    let peak = |rule| peak_bytes(BATCH, rule);
    assert!(peak(None) > peak(Norms).max(peak(Activations)));
    assert!(peak(Selective) < peak(Norms).min(peak(Activations)));
    let more: Vec<u64> = [&[Selective], &whole[..]].concat().into_iter().map(peak).collect();
    assert!(more.is_sorted_by(|a, b| a > b), "{more:?}");
    let limited = |limit_bytes: u64| {
        let limited = PlanRequest {
            memory_limit_bytes: Some(limit_bytes),
            micro_batch: Some(BATCH),
            ..request(PrecisionPolicy::bf16(), SEQ, BATCH)
        };
        plan(PRESET, &limited)
    };
    let check = |limit_bytes: u64, expected: Recompute| {
        let planned = limited(limit_bytes).unwrap();
        assert_eq!(planned.plan.recompute, expected, "{limit_bytes} bytes");
        assert!(planned.prediction.ranks[0].peak_bytes <= limit_bytes);
        // Rules with less work than the chosen one are named with what they need.
        let place = in_order.iter().position(|rule| *rule == expected).unwrap();
        for rule in in_order[..place].iter().filter(|rule| !whole.contains(rule)) {
            let is_named = |text: &String| {
                text.contains(&format!("recompute {rule}: ")) || one_kind.contains(rule)
            };
            assert!(planned.rejected.iter().any(is_named), "{rule}: {:?}", planned.rejected);
        }
    };
    check(u64::MAX, None);
    check(peak(None), None);
    let (smaller, larger) = match peak(Norms) < peak(Activations) {
        true => (Norms, Activations),
        false => (Activations, Norms),
    };
    // Of two that fit, the faster.
    let time_s =
        |rule| planned(PRESET, PrecisionPolicy::bf16(), SEQ, BATCH, BATCH, rule).prediction.time_s;
    let faster = if time_s(Norms) <= time_s(Activations) { Norms } else { Activations };
    check(peak(None) - 1, if peak(None) > peak(larger) { faster } else { smaller });
    check(peak(larger) - 1, smaller);
    check(peak(smaller) - 1, Selective);
    check(peak(Selective), Selective);
    // As few whole layers as fit.
    for (at, &rule) in whole.iter().enumerate() {
        check(more[at + 1], rule);
        check(more[at] - 1, rule);
    }
    // Recomputation of the last layer raises the peak of one micro-batch.
    let least = peak(whole[whole.len() - 1]);
    assert!(least < peak(Full));
    for limit_bytes in [least - 1, 0] {
        match limited(limit_bytes) {
            Err(PlanError::NothingFits { limit_bytes: limit, rejected }) => {
                assert_eq!((limit, rejected.len()), (limit_bytes, 6));
                assert!(rejected.iter().all(|text| text.contains("may be used")), "{rejected:?}");
            }
            result => panic!("{limit_bytes} bytes: {:?}", result.map(|p| p.plan.recompute)),
        }
    }
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
    // Two micro-batches by six rules.
    assert_eq!(lines.len(), 1 + 12 + 1, "{message}");
    assert!(lines[1].starts_with("  micro-batch 2 x 1, recompute none: needs "), "{message}");
    assert!(lines[12].starts_with("  micro-batch 1 x 2, recompute full: needs "), "{message}");
    assert!(lines[13].starts_with("hint: "), "{message}");
}
