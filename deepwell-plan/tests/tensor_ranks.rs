//! Programs of ranks that split each layer: what is split, exchanged and counted, and what the
//! verifier says of one that leaves something out.

mod common;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::ops::{CollectiveKind, Reduction};
use deepwell_ir::{
    Call, Graph, Op, Operand, ParameterState, Phase, PrecisionPolicy, ProcessGroup, Program,
    Recompute, verify_program,
};
use deepwell_plan::{Parallel, Plan, PlanError, PlanRequest, autoplan_ranks, lower};

use common::{Kernels, hardware, request, target};

/// llama-micro with sizes that four ranks can split into blocks of 32.
fn model(change: impl Fn(&mut LlamaConfig)) -> Graph {
    let mut config = LlamaConfig {
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 32,
        intermediate_size: 128,
        ..LlamaConfig::preset("llama-micro").unwrap()
    };
    change(&mut config);
    capture(&config).unwrap()
}

fn lowered_of(
    graph: &Graph,
    policy: PrecisionPolicy,
    parallel: Parallel,
    seq: usize,
    rank: usize,
) -> Result<Program, PlanError> {
    let fixed = PlanRequest {
        micro_batch: Some(1),
        recompute: Some(Recompute::Selective),
        ..request(policy, seq, 2 * parallel.data)
    };
    let planned = autoplan_ranks(graph, &hardware(), &fixed, parallel, &Kernels, &target())?;
    let plan = Plan { bucket_bytes: 65_536 + 256, ..planned.plan };
    lower(graph, &plan, &Kernels, &target().as_rank(parallel.ranks(rank)))
}

fn lowered(parallel: Parallel, rank: usize) -> Program {
    lowered_of(&model(|_| {}), PrecisionPolicy::mxfp8(), parallel, 32, rank).unwrap()
}

/// A group of one rank is none.
#[test]
fn one_tensor_parallel_rank_has_the_program_of_one_rank() {
    let (policy, one) = (PrecisionPolicy::mxfp8, Parallel { tensor: 1, ..Parallel::data(1) });
    let graph = common::graph("llama-micro");
    let expected = common::planned("llama-micro", policy(), 32, 2, 1, Recompute::Selective);
    let plan = Plan { bucket_bytes: 65_536 + 256, ..expected.plan };
    let expected = lower(&graph, &plan, &Kernels, &target()).unwrap();
    assert_eq!(lowered_of(&graph, policy(), one, 32, 0).unwrap(), expected);
}

fn of_tensor(data: usize, zero: u8) -> Parallel {
    Parallel { tensor: 2, zero, ..Parallel::data(data) }
}

fn group(program: &Program, call: &Call) -> Option<(String, CollectiveKind)> {
    let Op::Collective(op) = &call.op else { return None };
    let group = program.target.ranks.group(op.group)?;
    Some((group.name.clone(), op.kind.clone()))
}

#[test]
fn parameters_are_split_or_whole() {
    let one = lowered(Parallel::data(1), 0);
    for rank in [0, 1] {
        let two = lowered(of_tensor(1, 0), rank);
        for (state, whole) in two.parameters.iter().zip(&one.parameters) {
            assert_eq!(state.name, whole.name);
            let expected = match state.name.rsplit('.').nth(1) {
                Some("q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj") => Some(0),
                Some("embed_tokens" | "lm_head") => Some(0),
                Some("o_proj" | "down_proj") => Some(1),
                _ => None,
            };
            let got = state.split.map(|split| (split.dim, split.place, split.parts));
            assert_eq!(got, expected.map(|dim| (dim, rank, 2)), "{}", state.name);
            assert_eq!(
                two.whole_shape(state),
                one.value(whole.master.value()).shape,
                "{}",
                state.name
            );
        }
        let json = serde_json::to_string(&two).unwrap();
        assert_eq!(serde_json::from_str::<Program>(&json).unwrap(), two);
    }
}

/// Of a layer: two gathers and two scatters in the forward pass, and as many in the backward pass;
/// one of each for embedding and head, and the sums of logits.
#[test]
fn exchanges_of_a_layer() {
    let program = lowered(of_tensor(1, 0), 1);
    let count = |phase: Phase, gathers: bool| {
        let is_it = |call: &&Call| {
            let kind = group(&program, call).map(|(_, kind)| kind);
            let scatter = CollectiveKind::ReduceScatter { reduction: Reduction::Sum };
            let expected = if gathers { CollectiveKind::AllGather } else { scatter };
            call.phase == phase && kind == Some(expected)
        };
        program.calls.iter().filter(is_it).count()
    };
    // Two layers. The sums of logits are gathered too.
    assert_eq!((count(Phase::Forward, true), count(Phase::Forward, false)), (2 * 2 + 2, 2 * 2 + 1));
    assert_eq!(
        (count(Phase::Backward, true), count(Phase::Backward, false)),
        (2 * 2 + 1, 2 * 2 + 1)
    );
}

#[test]
fn a_program_that_does_not_sum_what_it_must_is_refused() {
    for (data, zero) in [(1, 0), (2, 0), (2, 1)] {
        // Rank 0 counts what all ranks have.
        let sound = lowered(of_tensor(data, zero), 0);
        verify_program(&sound).unwrap();
        let check = |change: &dyn Fn(&mut Program), expected: &str| {
            let mut program = sound.clone();
            change(&mut program);
            let error = verify_program(&program).expect_err(expected).to_string();
            assert!(error.contains(expected), "expected `{expected}` in: {error}");
        };
        let at = |name: &str| sound.calls.iter().position(|call| call.name == name).unwrap();
        let sum = at("all_reduce.gradients.tensor.0");
        let (id, _) = sound.target.ranks.named(ProcessGroup::TENSOR).unwrap();
        let gradient_of = |is_split: bool| {
            let is_it = |state: &&ParameterState| {
                state.split.is_some() == is_split && state.gradient.is_some()
            };
            sound.parameters.iter().find(is_it).unwrap().gradient.unwrap()
        };
        // A gradient of a norm that is not summed.
        check(
            &|p| {
                let Op::Collective(op) = &mut p.calls[sum].op else { unreachable!() };
                op.kind = CollectiveKind::AllReduce { reduction: Reduction::Max };
            },
            "is not summed over the 2 ranks of group",
        );
        // One that is split, summed.
        check(
            &|p| {
                let operand = Operand { value: gradient_of(true), ..p.calls[sum].operands[0] };
                let call = &mut p.calls[sum];
                (call.operands, call.input_count) = (vec![operand], 1);
                let Op::Collective(op) = &mut call.op else { unreachable!() };
                (op.bucket, op.group) = (Some(1), id);
            },
            "of which each rank of group `tensor` has a slice",
        );
        // Summed after its use.
        check(
            &|p| p.calls[sum..=at("grad_norm.squares")].rotate_left(1),
            "is not summed over the 2 ranks",
        );
    }
}

/// The norm counts a parameter that all ranks have whole on the first of them alone.
#[test]
fn the_norm_counts_each_parameter_once() {
    for (data, zero) in [(1, 0), (2, 1)] {
        for rank in [0, 1] {
            let program = lowered(of_tensor(data, zero), rank);
            let squares =
                program.calls.iter().find(|call| call.name == "grad_norm.squares").unwrap();
            let nothing = squares
                .inputs()
                .iter()
                .filter(|operand| program.value(operand.value).elements() == 0);
            let whole = match zero {
                0 => program.parameters.iter().filter(|state| state.split.is_none()).count(),
                _ => (program.shards.iter())
                    .filter(|shard| program.parameters[shard.parameters[0].0].split.is_none())
                    .count(),
            };
            assert!(whole > 0);
            assert_eq!(nothing.count(), if rank == 0 { 0 } else { whole }, "rank {rank}");
        }
    }
}

#[test]
fn what_ranks_cannot_split_is_refused() {
    let refuse = |graph: &Graph, policy: PrecisionPolicy, ranks: usize, seq, expected: &str| {
        let parallel = Parallel { tensor: ranks, ..Parallel::data(1) };
        let error = lowered_of(graph, policy, parallel, seq, 0).expect_err(expected).to_string();
        assert!(error.contains(expected), "expected `{expected}` in: {error}");
    };
    let (bf16, mxfp8) = (PrecisionPolicy::bf16, PrecisionPolicy::mxfp8);
    let plain = || model(|_| {});
    refuse(&plain(), bf16(), 3, 33, "expected query heads that they divide, got 4");
    let three = model(|config| (config.num_heads, config.num_kv_heads) = (3, 3));
    refuse(&three, bf16(), 3, 33, "expected a vocabulary that they divide, got 256");
    // Keys that are normalized head by head: the norm comes before the attention.
    let qwen3 = capture(&LlamaConfig::preset("qwen3-micro").unwrap()).unwrap();
    refuse(&qwen3, bf16(), 2, 32, "over 2 ranks: expected key-value heads that they divide, got 1");
    refuse(
        &model(|config| config.num_kv_heads = 2),
        bf16(),
        4,
        32,
        "over 4 ranks: expected key-value heads that they divide, got 2",
    );
    refuse(
        &model(|config| config.intermediate_size = 90),
        bf16(),
        4,
        32,
        "expected a size of dimension 0 that they divide, got 90",
    );
    refuse(
        &plain(),
        bf16(),
        2,
        33,
        "tokens of a micro-batch: expected a multiple of the 2 tensor-parallel ranks, got 1 x 33",
    );
    // Blocks of 32, and of 128.
    refuse(
        &model(|config| config.intermediate_size = 96),
        mxfp8(),
        2,
        32,
        "expected slices of whole blocks of 32 for mxfp8, got 48 of dimension 0",
    );
    let coarse = PrecisionPolicy::preset("mxfp8-128").unwrap();
    refuse(&plain(), coarse, 2, 32, "expected slices of whole blocks of 128");
}
