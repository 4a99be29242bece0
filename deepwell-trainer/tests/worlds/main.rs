//! Up to eight ranks train dense models and mixtures of experts as one rank does: a table of
//! models, formats and layouts of ranks, in which each degree of parallelism occurs with each other
//! one. With `DEEPWELL_ALL_LAYOUTS` each degree occurs alone too, and in more layouts.
//!
//! Stages alone add up what one rank does in its order: their losses, norms and masters are its
//! bits. All other ranks sum in another order, or round partial sums, and their bound is measured
//! where that arises: in control runs each sum that ranks have made has its last bits flipped at
//! random, and so have keys and values that go around a ring: attention of ranks rounds as if they
//! had. What a run differs from one rank by may be a multiple of what the furthest control differs
//! from the run itself by, for a control is one draw from the same chaos.

#[path = "../degrees/mod.rs"]
mod degrees;
mod experts;
mod fault;
#[path = "../layouts/mod.rs"]
mod layouts;
mod model;
#[path = "../observers/mod.rs"]
mod observers;
#[path = "../rank_faults/mod.rs"]
mod rank_faults;
mod tensor_scales;
mod train;

use deepwell_ir::ProcessGroup;
use deepwell_trainer::Parallel;

use degrees::{context, data, expert, interleaved, single, stages, tensor, zero_bubble};
use fault::Fault;
use model::model;
use train::{STEPS, Sound, options, train};

/// Trains a model on one rank and in each layout, with so many sequences a step; `others` are the
/// layouts that a run of all layouts adds.
fn check(name: &str, precision: &str, rows: usize, covering: &[Parallel], others: &[Parallel]) {
    let layouts = layouts::rows(covering, others);
    if layouts.is_empty() {
        return;
    }
    let graph = model(name);
    let alone = train(&graph, &options(precision, single(), rows), Fault::None, STEPS);
    let first = train(&graph, &options(precision, single(), rows), Fault::None, 0);
    let still = alone.masters.iter().find(|(name, values)| first.masters[*name] == **values);
    assert!(still.is_none(), "{:?} was not trained", still.map(|(name, _)| name));
    for parallel in layouts {
        let what = format!("{name} in {precision}, {parallel}");
        assert!(parallel.world_size() <= 8, "{what}");
        let options = options(precision, parallel, rows);
        if parallel.world_size() == parallel.pipeline {
            let got = train(&graph, &options, Fault::None, STEPS);
            assert_eq!((&got.losses, &got.norms), (&alone.losses, &alone.norms), "{what}");
            assert!(got == alone, "{what}: evaluations, gradients or masters");
            continue;
        }
        let sound = Sound::of(&graph, &options, STEPS);
        let beyond = sound.beyond(&sound.run, &alone);
        assert!(beyond.is_empty(), "{what}: {beyond:?}");
    }
}

#[test]
fn dense_ranks_train_as_one_does() {
    let covering = [
        data(8, 2),
        interleaved(stages(2, single())),
        zero_bubble(stages(4, single())),
        tensor(2, data(4, 3)),
    ];
    let others = [
        data(8, 0),
        data(8, 1),
        data(8, 3),
        tensor(8, single()),
        stages(4, single()),
        interleaved(stages(2, data(4, 2))),
    ];
    check("dense", "bf16", 8, &covering, &others);
    let mixed = |zero| stages(2, tensor(2, data(2, zero)));
    // The model with biases covers a tied table in these degrees.
    check("tied", "mxfp8", 8, &[], &[mixed(1), mixed(3)]);
}

/// Heads, biases, norms of heads and tables of positions, in each format: random words of NVFP4 and
/// MXFP4 are those of whole operands.
#[test]
fn ranks_train_as_one_does_but_for_roundings() {
    let alone = |ranks| tensor(ranks, single());
    let staged = |data| stages(2, tensor(2, data));
    check("llama", "bf16", 4, &[alone(4)], &[tensor(2, data(2, 0))]);
    check("llama", "nvfp4", 4, &[alone(2)], &[]);
    check("llama", "mxfp4", 4, &[alone(2)], &[]);
    check("llama", "mxfp8-hybrid", 4, &[tensor(2, data(2, 0))], &[]);
    check("llama", "mxfp6", 4, &[alone(2)], &[data(2, 1), tensor(2, data(2, 3))]);
    check("llama", "f32", 4, &[], &[alone(2)]);
    check("llama", "mxfp8", 4, &[], &[alone(2), tensor(2, data(2, 1))]);
    check("gpt2", "f32", 4, &[alone(4)], &[]);
    check("gpt2", "mxfp8", 4, &[staged(single())], &[alone(2)]);
    check("gpt2", "bf16", 4, &[], &[alone(2)]);
    check("qwen3", "mxfp8", 4, &[alone(2)], &[]);
    check("qwen3", "f32", 4, &[], &[alone(2)]);
    let biases = "llama with biases";
    check(biases, "mxfp8", 4, &[staged(data(2, 1))], &[alone(2)]);
    check(biases, "nvfp4", 4, &[staged(data(2, 1))], &[]);
    check(biases, "bf16", 4, &[], &[alone(2), staged(single())]);
}

#[test]
fn mixtures_train_as_one_rank_does() {
    let of_all = [
        expert(8, data(8, 0)),
        stages(4, single()),
        tensor(4, single()),
        expert(2, data(8, 1)),
        expert(8, data(8, 1)),
        expert(2, stages(2, data(4, 0))),
        expert(8, tensor(4, data(2, 0))),
        expert(2, tensor(4, single())),
    ];
    check("experts", "bf16", 8, &[], &of_all);
    // All four degrees in each.
    let of_each = |experts, zero| expert(experts, stages(2, tensor(2, data(2, zero))));
    let others = [of_each(2, 1), zero_bubble(of_each(2, 3))];
    check("experts", "mxfp8", 8, &[interleaved(of_each(4, 2))], &others);
}

/// Shared experts, biases of experts, and experts of which a rank adds some up.
#[test]
fn ranks_train_as_one_does_but_for_the_order_of_sums() {
    let ranks = |ranks, experts| expert(experts, data(ranks, 0));
    check("moe-micro", "mxfp8", 4, &[ranks(4, 2)], &[ranks(4, 4)]);
    check("moe-micro", "mxfp6", 4, &[ranks(2, 2)], &[]);
    check("moe-micro", "mxfp4", 4, &[ranks(2, 2)], &[]);
    check("moe-micro", "f32", 4, &[], &[ranks(2, 2)]);
    check("moe-micro", "bf16", 4, &[], &[ranks(4, 2)]);
    check("four of eight", "f32", 4, &[ranks(4, 4)], &[]);
    check("four of eight", "bf16", 4, &[], &[ranks(4, 2)]);
    check("four of eight", "mxfp8", 4, &[], &[ranks(2, 2)]);
    check("gpt-oss-micro", "bf16", 4, &[ranks(4, 4)], &[]);
    check("deepseek-micro", "mxfp8", 4, &[ranks(2, 2)], &[]);
}

/// Projections to latents are whole on each rank, with gradients of its own rows; the part of a key
/// that all heads share has a gradient from the heads of each rank.
#[test]
fn ranks_with_heads_of_latent_attention_train_as_one_does() {
    let heads = tensor(2, single());
    check("deepseek-micro", "f32", 4, &[heads], &[]);
    let with_experts = expert(2, tensor(2, data(2, 1)));
    check("deepseek-micro", "bf16", 4, &[with_experts], &[stages(2, heads)]);
}

/// The losses of routers are of all tokens of a micro-batch, of which tensor-parallel ranks have a
/// part each.
#[test]
fn balanced_mixtures_train_as_one_rank_does() {
    let plan = expert(2, stages(2, tensor(2, data(2, 1))));
    check("balanced", "bf16", 8, &[plan], &[tensor(4, single())]);
}

/// Ranks that have a part of each sequence, alone, with ranks that have sequences of their own, in
/// stages and with tensor-parallel ranks.
#[test]
fn rings_train_as_one_rank_does() {
    check(
        "dense",
        "f32",
        8,
        &[stages(2, tensor(2, context(2, single())))],
        &[context(8, single())],
    );
    check("tied", "bf16", 8, &[context(2, data(2, 3))], &[]);
    check("experts", "f32", 8, &[expert(2, context(2, data(2, 0)))], &[]);
    let ring = [context(4, single())];
    check("windows and sinks", "f32", 4, &ring, &[context(2, data(2, 1))]);
    check("windows and sinks", "bf16", 4, &[context(2, data(2, 0))], &ring);
}

/// Plants a fault in two steps of a layout; each row names a result that is then beyond the bound.
fn check_faults(name: &str, precision: &str, rows: usize, faults: &[(Parallel, Fault, &str)]) {
    let graph = model(name);
    let alone = train(&graph, &options(precision, single(), rows), Fault::None, 2);
    let mut sound: Vec<(Parallel, Sound)> = Vec::new();
    for &(parallel, fault, what) in faults {
        let options = options(precision, parallel, rows);
        let known = sound.iter().position(|(known, _)| *known == parallel);
        let known = known.unwrap_or_else(|| {
            sound.push((parallel, Sound::of(&graph, &options, 2)));
            sound.len() - 1
        });
        let got = train(&graph, &options, fault, 2);
        let beyond = sound[known].1.beyond(&got, &alone);
        assert!(
            beyond.iter().any(|(name, ..)| name.contains(what)),
            "{name} in {precision}, {parallel}, {fault:?}: `{what}` not among {beyond:?}"
        );
    }
}

#[test]
fn planted_faults_are_beyond_the_bound() {
    use ProcessGroup as Group;
    let plan = expert(2, stages(2, tensor(2, data(2, 1))));
    let apart = Parallel { zero: 0, expert: 4, ..plan };
    let wide = expert(4, tensor(2, data(4, 0)));
    let of_experts = "gradient of model.layers.1.mlp.experts";
    let of_router = "gradient of model.layers.0.mlp.gate";
    let faults = [
        (plan, Fault::NoSum(Group::EXPERT_DATA), of_experts),
        (wide, Fault::NoSum(Group::EXPERT_DATA), of_experts),
        (plan, Fault::NoSum(Group::DATA), "gradient of lm_head"),
        (plan, Fault::NoSum(Group::TENSOR), "losses"),
        (plan, Fault::NoGradientSum, of_router),
        (plan, Fault::NormOfFirst(Group::DATA), "norms"),
        (plan, Fault::NormOfFirst(Group::TENSOR), "norms"),
        (plan, Fault::NormOfFirst(Group::PIPELINE), "norms"),
        (apart, Fault::NormOfFirst(Group::DATA), "norms"),
        (apart, Fault::NormOfFirst(Group::TENSOR), "norms"),
        (plan, Fault::RowsStay, "losses"),
        (plan, Fault::NoSum(Group::EXPERT), "losses"),
        (context(2, data(2, 0)), Fault::KeysStay, "losses"),
        (context(2, single()), Fault::NoSum(Group::DATA), "gradient of lm_head"),
    ];
    check_faults("experts", "f32", 8, &faults);
    let two = tensor(2, single());
    check_faults("balanced", "f32", 8, &[(two, Fault::ChoicesOfFirst, of_router)]);
}

#[test]
fn planted_faults_of_tensor_parallel_ranks_are_beyond_the_bound() {
    let two = tensor(2, single());
    let no_gradient_sum = |what| [(two, Fault::NoGradientSum, what)];
    check_faults("llama", "bf16", 4, &[(two, Fault::NoSum(ProcessGroup::TENSOR), "losses")]);
    check_faults("llama", "bf16", 4, &no_gradient_sum("gradient of model.norm.weight"));
    check_faults("qwen3", "f32", 4, &no_gradient_sum("q_norm.weight"));
    check_faults("gpt2", "bf16", 4, &no_gradient_sum("wpe.weight"));
    let norm = (two, Fault::NormOfFirst(ProcessGroup::TENSOR), "norms");
    check_faults("llama", "mxfp8", 4, &[norm]);
}

/// Choices and rows reach the ranks that have the experts, gathered or sent.
#[test]
fn planted_faults_of_expert_parallel_ranks_are_beyond_the_bound() {
    let two = expert(2, data(2, 0));
    let faults = [
        (two, Fault::NormOfFirst(ProcessGroup::EXPERT), "norms"),
        (two, Fault::ChoicesStay, "experts.down_proj"),
        (two, Fault::NoSum(ProcessGroup::EXPERT), "experts.down_proj"),
    ];
    check_faults("four of eight", "bf16", 4, &faults);
    let faults = [
        (two, Fault::ChoicesStay, "experts.down_proj"),
        (two, Fault::NotReturned, "experts.down_proj"),
    ];
    check_faults("four of eight, sent", "bf16", 4, &faults);
}
