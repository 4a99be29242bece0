//! A plan and its program as text and JSON.

mod common;

use deepwell_ir::{PrecisionPolicy, Program, Recompute};
use deepwell_plan::Plan;

use common::planned;

#[test]
fn plans_and_programs_as_text() {
    for (name, policy, micro_batch) in [
        ("bf16_one_micro_batch", PrecisionPolicy::bf16(), 4),
        ("bf16_two_micro_batches", PrecisionPolicy::bf16(), 2),
        ("mxfp8_two_micro_batches", PrecisionPolicy::mxfp8(), 2),
    ] {
        let planned = planned("llama-micro", policy, 32, 4, micro_batch, Recompute::None);
        insta::assert_snapshot!(format!("plan_{name}"), planned.plan.to_string());
        insta::assert_snapshot!(format!("program_{name}"), planned.program.to_string());
    }
}

#[test]
fn plan_as_json() {
    let planned = planned("llama-micro", PrecisionPolicy::mxfp8(), 32, 4, 2, Recompute::Selective);
    insta::assert_json_snapshot!(planned.plan);
}

#[test]
fn json_gives_plan_and_program_back() {
    for policy in [PrecisionPolicy::f32(), PrecisionPolicy::bf16(), PrecisionPolicy::mxfp8()] {
        for rule in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let planned = planned("llama-micro", policy.clone(), 33, 6, 2, rule);
            let text = serde_json::to_string(&planned.plan).unwrap();
            let plan: Plan = serde_json::from_str(&text).unwrap();
            assert_eq!(plan, planned.plan);
            assert_eq!(Program::from_json(&planned.program.to_json()).unwrap(), planned.program);
        }
    }
}

/// `zero_level` is a key of older plans.
#[test]
fn plan_with_a_key_that_nobody_knows_is_refused() {
    let planned = planned("llama-micro", PrecisionPolicy::bf16(), 32, 4, 4, Recompute::None);
    let text = serde_json::to_string(&planned.plan).unwrap();
    for key in ["zero_level", "bucket_byte"] {
        let text = text.replacen('{', &format!("{{\"{key}\":1,"), 1);
        let error = serde_json::from_str::<Plan>(&text).unwrap_err().to_string();
        assert!(error.starts_with(&format!("unknown field `{key}`, expected one of ")), "{error}");
    }
}
