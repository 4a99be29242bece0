//! The optimizer's buckets: which parameters are in one, and what the verifier says of broken ones.
// Buckets are ranges of parameters, and one is a list of them.
#![allow(clippy::single_range_in_vec_init)]

mod common;

use std::ops::Range;

use deepwell_ir::ops::AdamW;
use deepwell_ir::{
    Access, Call, Op, ParameterState, PrecisionPolicy, Program, Recompute, ValueId, verify_program,
};
use deepwell_plan::{Plan, lower};

use common::{Kernels, graph, planned, target};

fn lowered(bucket_bytes: usize) -> Program {
    let planned = planned("llama-micro", PrecisionPolicy::bf16(), 32, 4, 4, Recompute::None);
    let plan = Plan { bucket_bytes, ..planned.plan };
    lower(&graph("llama-micro"), &plan, &Kernels, &target()).unwrap()
}

fn bucket_of(call: &Call) -> Option<&AdamW> {
    match &call.op {
        Op::AdamW(bucket) => Some(bucket),
        _ => None,
    }
}

fn buckets(program: &Program) -> Vec<Range<usize>> {
    program.calls.iter().filter_map(bucket_of).map(|bucket| bucket.parameters.clone()).collect()
}

/// Bytes of the gradients of llama-micro: the embedding has 65,536, the first layer's norm, query
/// and key weights 256, 16,384 and 8,192.
#[test]
fn a_bucket_holds_as_much_as_fits() {
    let all = lowered(Plan::BUCKET_BYTES);
    let count = all.parameters.len();
    assert_eq!(buckets(&all), [0..count]);
    for (bucket_bytes, expected) in [
        (0, vec![0..1, 1..2, 2..3, 3..4]),
        (255, vec![0..1, 1..2, 2..3, 3..4]),
        (16_384, vec![0..1, 1..2, 2..3]),
        (16_384 + 256, vec![0..1, 1..3]),
        (65_536, vec![0..1]),
        (65_536 + 255, vec![0..1]),
        (65_536 + 256, vec![0..2]),
    ] {
        let program = lowered(bucket_bytes);
        let got = buckets(&program);
        assert_eq!(got[..expected.len()], expected, "{bucket_bytes} bytes");
        assert_eq!((got[0].start, got[got.len() - 1].end), (0, count));
        assert!(got.windows(2).all(|pair| pair[0].end == pair[1].start), "{got:?}");
        // Values lie where they lie in one bucket, and the step needs no more memory.
        assert_eq!(program.arena, all.arena, "{bucket_bytes} bytes");
        let flops: u64 = all.calls.iter().map(|call| call.cost.flops).sum();
        assert_eq!(program.calls.iter().map(|call| call.cost.flops).sum::<u64>(), flops);
    }
}

#[test]
fn a_bucket_that_is_not_what_it_says_is_refused() {
    // The embedding, then a layer's norms and attention, then others.
    let sound = lowered(65_536 + 255);
    verify_program(&sound).unwrap();
    let places: Vec<usize> =
        (0..sound.calls.len()).filter(|&at| bucket_of(&sound.calls[at]).is_some()).collect();
    let check = |change: &dyn Fn(&mut Program, &[usize]), expected: &str| {
        let mut program = sound.clone();
        change(&mut program, &places);
        let message = verify_program(&program).expect_err(expected).to_string();
        assert!(message.contains(expected), "expected `{expected}` in: {message}");
    };
    let set = |program: &mut Program, at: usize, parameters: Range<usize>| match &mut program.calls
        [at]
        .op
    {
        Op::AdamW(bucket) => bucket.parameters = parameters,
        _ => unreachable!(),
    };
    let q_proj = "model.layers.0.self_attn.q_proj.weight";
    check(
        &|p, at| set(p, at[1], 0..9),
        "call `adamw.1` updates parameters 0..9 as well as another",
    );
    check(&|p, at| set(p, at[1], 1..99), "updates parameters 1..99, there are 21");
    check(&|p, at| set(p, at[1], 2..7), "parameter `model.layers.0.input_layernorm.weight` has a");
    check(
        &|p, _| p.parameters[2].gradient = None,
        &format!("expected gradient, master and moments of `{q_proj}`"),
    );
    check(&|p, at| set(p, at[1], 1..6), "updates 6 parameters, expected 5");
    check(
        &|p, at| {
            p.calls[at[1]].operands.truncate(AdamW::LEADING_OPERANDS);
            p.calls[at[1]].input_count = AdamW::LEADING_OPERANDS;
        },
        "updates 0 parameters, expected 6",
    );
    check(
        &|p, at| p.calls[at[1]].operands.swap(6, 7),
        &format!("expected gradient, master and moments of `{q_proj}`"),
    );
    check(
        &|p, at| p.calls[at[1]].operands[6].access = Access::Read,
        &format!("expected gradient, master and moments of `{q_proj}`"),
    );
    check(
        &|p, at| {
            p.calls[at[1]].operands.pop();
            p.calls[at[1]].input_count -= 1;
        },
        "expected gradient, master and moments of `model.layers.0.post_attention_layernorm.weight`",
    );
    check(
        &|p, at| match &mut p.calls[at[1]].op {
            Op::AdamW(bucket) => bucket.weight_decay.truncate(3),
            _ => unreachable!(),
        },
        "expected 6 weight decays, got 3",
    );
    check(
        &|p, _| {
            let extra = p.parameters[0].clone();
            p.parameters.push(ParameterState { name: "extra".to_string(), ..extra });
        },
        "parameter `extra` has a gradient and no update",
    );
    let norm = sound.host.grad_norm.unwrap();
    check(&|p, at| p.calls[at[0]].operands[0].value = norm, "expected operand 0 [9]");
    // Two values of equal size change places: still apart, no longer one range.
    let swap = |p: &mut Program, one: ValueId, two: ValueId| {
        let ranges = (p.value(one).range, p.value(two).range);
        p.values[one.index()].range = ranges.1;
        p.values[two.index()].range = ranges.0;
    };
    let key = |p: &Program| (p.parameters[3].clone(), p.parameters[4].clone());
    check(
        &|p, _| {
            let (k, v) = key(p);
            swap(p, k.first_moment.unwrap(), v.first_moment.unwrap());
        },
        "expected it behind `moment1.model.layers.0.self_attn.q_proj.weight`",
    );
    check(
        &|p, _| {
            let (k, v) = key(p);
            swap(p, k.gradient.unwrap(), v.gradient.unwrap());
        },
        "expected it behind `grad.model.layers.0.self_attn.q_proj.weight`",
    );
}
