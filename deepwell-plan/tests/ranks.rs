//! Programs of ranks that split the batch: what is summed, what it costs, and what the verifier
//! says of one that leaves something out.

mod common;

use deepwell_ir::ops::{CollectiveKind, Reduction};
use deepwell_ir::{
    Access, Call, Gathered, Master, MemoryKind, Op, Operand, PrecisionPolicy, Program, Recompute,
    verify_program,
};
use deepwell_plan::{Parallel, Plan, PlanRequest, Planned, autoplan_ranks, dryrun_world, lower};

use common::{Kernels, graph, hardware, request, target};

fn planned(ranks: usize, batch: usize) -> Planned {
    let fixed = PlanRequest {
        micro_batch: Some(1),
        recompute: Some(Recompute::None),
        ..request(PrecisionPolicy::mxfp8(), 32, batch)
    };
    let parallel = Parallel::data(ranks);
    autoplan_ranks(&graph("llama-micro"), &hardware(), &fixed, parallel, &Kernels, &target())
        .unwrap()
}

/// The program of rank 0 of some, with small buckets.
fn lowered(ranks: usize) -> Program {
    let plan = Plan { bucket_bytes: 65_536 + 256, ..planned(ranks, 2 * ranks).plan };
    let target = target().as_rank(plan.parallel.ranks(0));
    lower(&graph("llama-micro"), &plan, &Kernels, &target).unwrap()
}

/// The same where the ranks share the optimizer state.
fn shared(ranks: usize) -> Program {
    let plan = planned(ranks, 2 * ranks).plan;
    let parallel = Parallel { zero: 1, ..plan.parallel };
    let plan = Plan { bucket_bytes: 65_536 + 256, parallel, ..plan };
    let target = target().as_rank(plan.parallel.ranks(0));
    lower(&graph("llama-micro"), &plan, &Kernels, &target).unwrap()
}

fn bytes_of(program: &Program, kind: MemoryKind) -> usize {
    program.values_of(kind).map(|value| value.range.bytes).sum()
}

fn is_sum(call: &Call) -> bool {
    match &call.op {
        Op::Collective(op) => op.kind == CollectiveKind::AllReduce { reduction: Reduction::Sum },
        _ => false,
    }
}

#[test]
fn each_gradient_is_summed_once_bucket_by_bucket() {
    let program = lowered(4);
    let sums: Vec<&Call> = program.calls.iter().filter(|call| is_sum(call)).collect();
    let updates = program.calls.iter().filter(|call| matches!(call.op, Op::AdamW(_))).count();
    assert_eq!(sums.len(), updates + 1, "a sum for each bucket, and the loss");
    assert_eq!(sums[0].op.rule().attributes(), "sum group=0 ranks=4 bucket=2");
    let mut summed: Vec<_> =
        sums.iter().flat_map(|call| &call.operands).map(|operand| operand.value).collect();
    let mut expected: Vec<_> = program.parameters.iter().filter_map(|p| p.gradient).collect();
    expected.extend(program.host.loss);
    summed.sort_unstable();
    expected.sort_unstable();
    assert_eq!(summed, expected);
    // Of a ring each rank sends all but its own part, twice; each bucket is rounded down.
    let bytes: u64 = expected.iter().map(|&id| program.value(id).range.bytes as u64).sum();
    let on_link: u64 = program.calls.iter().map(|call| call.cost.bytes_on_link).sum();
    let expected = 2 * bytes * 3 / 4;
    assert!(on_link <= expected && on_link + sums.len() as u64 > expected, "{on_link}");
}

/// What planning costs does not grow with the ranks: they have one program.
#[test]
fn ranks_of_a_class_have_one_program() {
    let (two, many) = (lowered(2), lowered(512));
    assert_eq!(two.calls.len(), many.calls.len());
    assert_eq!(two.arena, many.arena);
    for rank in [1, 511] {
        let other = many.for_rank(Parallel::data(512).ranks(rank));
        assert_eq!(other.rank, rank as u32);
        verify_program(&other).unwrap();
        assert_eq!((other.calls, other.values), (many.calls.clone(), many.values.clone()));
    }
    let run = dryrun_world(&many, Parallel::data(512), &hardware());
    assert_eq!((run.ranks.len(), run.ranks[0].alike.len()), (1, 511));
    assert_eq!(run.tokens, 512 * 2 * 32);
    assert!(run.to_string().contains("each of 512 ranks: peak "), "{run}");
    assert!(run.to_string().contains("to other ranks a step"), "{run}");
}

#[test]
fn a_rank_has_its_part_of_the_batch() {
    let (one, four) = (planned(1, 8), planned(4, 8));
    let alone = common::planned("llama-micro", PrecisionPolicy::mxfp8(), 32, 8, 1, Recompute::None);
    assert_eq!((&one.plan, &one.program), (&alone.plan, &alone.program));
    assert_eq!((one.plan.micro_batches, four.plan.micro_batches), (8, 2));
    assert_eq!(one.prediction.tokens, four.prediction.tokens);
    assert_eq!(one.program.arena.bytes, four.program.arena.bytes);
    assert_eq!(one.prediction.ranks[0].bytes_on_link, 0);
    let text = four.plan.to_string();
    assert!(text.contains("8 x 32 tokens = 4 ranks of 2 micro-batches of 1"), "{text}");
    let json = serde_json::to_string(&four.plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), four.plan);
    let refuse = |ranks, batch, micro_batch, expected: &str| {
        let wanted = PlanRequest { micro_batch, ..request(PrecisionPolicy::bf16(), 32, batch) };
        let (graph, parallel) = (graph("llama-micro"), Parallel::data(ranks));
        let error = autoplan_ranks(&graph, &hardware(), &wanted, parallel, &Kernels, &target());
        assert_eq!(error.unwrap_err().to_string(), expected);
    };
    refuse(3, 8, None, "batch size: expected a multiple of the 3 ranks that split it, got 8");
    refuse(0, 8, None, "batch size: expected a multiple of the 0 ranks that split it, got 8");
    refuse(
        2,
        8,
        Some(8),
        "micro-batch: expected a divisor of the batch of 4 that each rank has, got 8",
    );
    let plan = planned(2, 4).plan;
    let error = lower(&graph("llama-micro"), &plan, &Kernels, &target()).unwrap_err().to_string();
    assert!(error.starts_with("ranks of the target: expected those of the plan"), "{error}");
}

#[test]
fn a_program_that_does_not_sum_what_it_must_is_refused() {
    let sound = lowered(3);
    verify_program(&sound).unwrap();
    let at: Vec<usize> =
        (0..sound.calls.len()).filter(|&index| is_sum(&sound.calls[index])).collect();
    let check = |change: &dyn Fn(&mut Program), expected: &str| {
        let mut program = sound.clone();
        change(&mut program);
        let error = verify_program(&program).expect_err(expected).to_string();
        assert!(error.contains(expected), "expected `{expected}` in: {error}");
    };
    let shorten = |program: &mut Program, index: usize| {
        let call = &mut program.calls[index];
        call.operands.pop();
        call.input_count -= 1;
        let Op::Collective(op) = &mut call.op else { unreachable!() };
        op.bucket = Some(call.operands.len() as u32);
    };
    check(&|p| shorten(p, at[0]), "which is not summed over the 3 ranks of group `data` yet");
    check(
        &|p| {
            p.calls[at[1]].operands.truncate(1);
            p.calls[at[1]].input_count = 1;
        },
        "tensors, at least 1, got 1",
    );
    check(&|p| p.calls[at[1]].operands.swap(0, 1), "one behind the other in its bucket");
    check(
        &|p| p.calls[at[1]].operands[0].access = Access::Read,
        "expected a bucket that is updated",
    );
    check(
        &|p| {
            let again = p.calls[at[0]].operands.clone();
            p.calls[at[1]].op = p.calls[at[0]].op.clone();
            p.calls[at[1]].input_count = again.len();
            p.calls[at[1]].operands = again;
        },
        "sums `grad.model.embed_tokens.weight` over the ranks once more",
    );
    let last = at[at.len() - 1];
    check(
        &|p| {
            let norm = Operand { value: p.host.grad_norm.unwrap(), access: Access::Update };
            p.calls[last].operands[0] = norm;
        },
        "nothing sums `",
    );
    // The largest is no sum.
    check(
        &|p| {
            let Op::Collective(op) = &mut p.calls[at[0]].op else { unreachable!() };
            op.kind = CollectiveKind::AllReduce { reduction: Reduction::Max };
        },
        "uses `grad.model.embed_tokens.weight`, which is not summed over the 3 ranks of group",
    );
    // After the norm.
    check(&|p| p.calls.swap(at[0], last + 1), "is not summed over the 3 ranks of group `data` yet");
}

/// Masters and moments are a rank's part of what they are, gradients are whole.
#[test]
fn shared_state_takes_its_part_of_the_memory() {
    for ranks in [2, 3, 4, 7] {
        let (whole, shared) = (lowered(ranks), shared(ranks));
        assert!(shared.shards.len() > 1);
        // What fills slices up: less than 32 elements a rank and bucket, in three columns.
        let filling = 3 * shared.shards.len() * 32 * size_of::<f32>();
        let scalars = 24;
        let optimizer = bytes_of(&whole, MemoryKind::Optimizer) - scalars;
        let got = bytes_of(&shared, MemoryKind::Optimizer) - scalars;
        assert!(got * ranks >= optimizer && got <= optimizer / ranks + filling, "{ranks}: {got}");
        let gradients = bytes_of(&whole, MemoryKind::Gradients);
        let got = bytes_of(&shared, MemoryKind::Gradients);
        assert!(got >= gradients && got <= gradients + ranks * filling, "{ranks}: {got}");
        assert!(shared.arena.bytes < whole.arena.bytes);
        // A reduce-scatter and a gather move what an all-reduce does.
        let on_link = |program: &Program| -> u64 {
            program.calls.iter().map(|call| call.cost.bytes_on_link).sum()
        };
        let most = on_link(&whole) + 2 * (ranks * filling) as u64 + 8 * ranks as u64 * 64;
        assert!(on_link(&shared) <= most, "{ranks}: {} over {most}", on_link(&shared));
    }
    let plan = planned(2, 4).plan;
    let plan = Plan { parallel: Parallel { zero: 4, ..plan.parallel }, ..plan };
    let target = target().as_rank(plan.parallel.ranks(0));
    let lowered = lower(&graph("llama-micro"), &plan, &Kernels, &target);
    let error = lowered.map(|_| "a program").unwrap_err().to_string();
    let expected = "expected 0, 1: optimizer state, 2: and gradients, 3: and weights, got 4";
    assert_eq!(error, format!("ZeRO stage: {expected}"));
}

#[test]
fn shards_that_are_not_what_they_say_are_refused() {
    let sound = shared(3);
    verify_program(&sound).unwrap();
    let check = |change: &dyn Fn(&mut Program), expected: &str| {
        let mut program = sound.clone();
        change(&mut program);
        let error = verify_program(&program).expect_err(expected).to_string();
        assert!(error.contains(expected), "expected `{expected}` in: {error}");
    };
    let at = |part: &str| sound.calls.iter().position(|call| call.name.starts_with(part)).unwrap();
    check(&|p| p.shards[0].parameters[0].1 = 16, "begins at 16, expected 0");
    check(&|p| p.shards[0].group = "others".to_string(), "it is of group `others`");
    check(
        &|p| {
            p.shards.pop();
        },
        "expected one for each",
    );
    check(
        &|p| {
            let again = p.shards[0].parameters[0];
            p.shards[1].parameters[0] = again;
        },
        "is in another shard too",
    );
    check(
        &|p| {
            p.shards[1].parameters.pop();
        },
        "has a gradient and no update",
    );
    check(
        &|p| {
            let shard = &mut p.shards[0];
            std::mem::swap(&mut shard.first_moment, &mut shard.second_moment);
        },
        "expected master and moments of shard 0",
    );
    // Each parameter says where its master is.
    let first = sound.shards[0].parameters[0].0;
    let Master::Sharded { shard, gathered, form } = sound.parameters[first].master else {
        panic!("parameter {first} is whole");
    };
    let store = |master: Master| move |p: &mut Program| p.parameters[first].master = master;
    check(&store(Master::Whole(gathered)), "the master of");
    check(&store(Master::Sharded { shard: shard + 1, gathered, form }), "names shard 1");
    assert_eq!(form, Gathered::Kept);
    for form in [Gathered::Fp32, Gathered::Bf16, Gathered::Quantized] {
        let expected = format!("is gathered as {form:?}");
        check(&store(Master::Sharded { shard, gathered, form }), &expected);
    }
    check(
        &|p| {
            let (index, _) = p.shards[1].parameters.pop().unwrap();
            p.parameters[index].gradient = None;
        },
        "is not in shard 1",
    );
    let scatter = at("reduce_scatter.gradients.0");
    check(&|p| p.calls[scatter].operands.swap(0, 1), "expected");
    // The slices of four ranks are longer than a bucket for three.
    let gather = at("all_gather.masters.0");
    check(
        &|p| {
            let Op::Collective(op) = &mut p.calls[gather].op else { unreachable!() };
            op.ranks = 4;
        },
        "it is among 4 ranks, group `data` has 3",
    );
}
