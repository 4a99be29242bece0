//! Exchanges beside what computes: what may run at the same time, what that keeps in memory, and
//! what it is predicted to save.

#[path = "common/anywhere.rs"]
mod anywhere;
#[expect(dead_code, reason = "other tests want more of it")]
mod common;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{
    Call, Invocation, Op, Order, Phase, PrecisionPolicy, ProcessGroup, Program, Target,
    verify_program,
};
use deepwell_plan::{
    EXCHANGES, Parallel, Plan, PlanRequest, Scheduling, autoplan_ranks, dryrun, lower,
    lower_scheduled,
};
use deepwell_probe::Hardware;

use anywhere::Anywhere;
use common::{Kernels, request};

const LAYERS: usize = 8;
const RANKS: usize = 2;

fn model() -> LlamaConfig {
    LlamaConfig { num_layers: LAYERS, ..LlamaConfig::preset("llama-micro").unwrap() }
}

fn plan(zero: u8, micro_batches: usize) -> Plan {
    plan_of(&model(), Parallel { zero, ..Parallel::data(RANKS) }, micro_batches)
}

fn plan_of(model: &LlamaConfig, parallel: Parallel, micro_batches: usize) -> Plan {
    let batch = parallel.data * micro_batches;
    let wanted =
        PlanRequest { micro_batch: Some(1), ..request(PrecisionPolicy::bf16(), 32, batch) };
    let graph = capture(model).unwrap();
    let target = common::target();
    let planned = autoplan_ranks(&graph, &common::hardware(), &wanted, parallel, &Kernels, &target);
    Plan { bucket_bytes: 100 << 10, ..planned.unwrap().plan }
}

fn target(plan: &Plan) -> Target {
    let target = Target { arch: "sm_90a".to_string(), ..common::target() };
    target.as_rank(plan.parallel.ranks(0))
}

/// The program of a device, whose exchanges run beside what computes, or the same in turns.
fn lowered(zero: u8, micro_batches: usize, overlaps: bool) -> Program {
    let (plan, graph) = (plan(zero, micro_batches), capture(&model()).unwrap());
    let target = target(&plan);
    if overlaps {
        return lower(&graph, &plan, &Anywhere, &target).unwrap();
    }
    let in_turns = Scheduling { stream_of: Some(&|_| 0), ..Scheduling::of(&plan) };
    lower_scheduled(&graph, &plan, &in_turns, &Anywhere, &target).unwrap()
}

/// The same of ranks that split layers, or have stages.
fn lowered_of(parallel: Parallel, micro_batches: usize) -> Program {
    let model = LlamaConfig {
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 32,
        intermediate_size: 128,
        ..model()
    };
    let (plan, graph) = (plan_of(&model, parallel, micro_batches), capture(&model).unwrap());
    lower(&graph, &plan, &Anywhere, &target(&plan)).unwrap()
}

fn is_exchange(call: &Call) -> bool {
    matches!(call.op, Op::Collective(_))
}

/// The exchange of a phase that a tensor of a layer takes part in.
fn exchange_of(program: &Program, phase: Phase, tensor: &str) -> usize {
    let names = |call: &Call| {
        let mut values = call.operands.iter().map(|it| &program.value(it.value).name);
        values.any(|name| name.contains(tensor))
    };
    let is_it = |call: &Call| is_exchange(call) && call.phase == phase && names(call);
    let found = program.calls.iter().position(is_it);
    found.unwrap_or_else(|| panic!("no exchange of `{tensor}` in {phase}"))
}

/// The calls of a layer in a phase that compute.
fn computing(program: &Program, phase: Phase, layer: usize) -> Vec<usize> {
    let layer = Some(layer as u32);
    let is_cast = |call: &Call| call.name.starts_with("cast.shard");
    let is_its = |call: &Call| {
        !is_exchange(call) && !is_cast(call) && (call.phase, call.layer) == (phase, layer)
    };
    (0..program.calls.len()).filter(|&at| is_its(&program.calls[at])).collect()
}

fn beside(order: &Order, a: usize, b: usize) -> bool {
    !order.is_before(a, b) && !order.is_before(b, a)
}

#[test]
fn gradients_are_summed_beside_the_rest_of_the_backward() {
    for zero in 0..=3 {
        let program = lowered(zero, 1, true);
        let order = Order::of(&program.calls, &program.bodies).unwrap();
        // That of kernels, that of exchanges, and, by what stays, up to four more.
        assert!((2..=6).contains(&order.streams()), "ZeRO {zero}: {} streams", order.streams());
        for call in &program.calls {
            assert_eq!(call.stream == EXCHANGES, is_exchange(call), "{}", call.name);
        }
        let last = format!("grad.model.layers.{}.mlp.down_proj", LAYERS - 1);
        let sum = exchange_of(&program, Phase::Backward, &last);
        let next = computing(&program, Phase::Backward, LAYERS - 2);
        assert!(next.iter().any(|&call| beside(&order, sum, call)), "ZeRO {zero}");
        // A sum of gradients that stay has time until the optimizer. Those that are scattered make
        // room, which layers wait for.
        let first = computing(&program, Phase::Backward, 0);
        let may_be_late = first.iter().all(|&call| beside(&order, sum, call));
        let is_over = first.iter().all(|&call| order.is_before(sum, call));
        assert_eq!((may_be_late, is_over), (zero < 2, zero >= 2), "ZeRO {zero}");
        let first = exchange_of(&program, Phase::Backward, "grad.model.layers.0.mlp.down_proj");
        assert!(order.is_before(sum, first), "ZeRO {zero}: one order of exchanges");
    }
}

#[test]
fn weights_are_gathered_one_layer_ahead() {
    let program = lowered(3, 1, true);
    let order = Order::of(&program.calls, &program.bodies).unwrap();
    let gathered = |layer: usize, suffix: &str, phase| {
        exchange_of(&program, phase, &format!("model.layers.{layer}.mlp.down_proj.weight{suffix}"))
    };
    for layer in 1..LAYERS {
        let gather = gathered(layer, "", Phase::Forward);
        let before = computing(&program, Phase::Forward, layer - 1);
        assert!(before.iter().all(|&call| beside(&order, gather, call)), "layer {layer}");
        let own = computing(&program, Phase::Forward, layer);
        assert!(own.iter().any(|&call| order.is_before(gather, call)), "layer {layer}");
        if layer > 1 {
            let earlier = computing(&program, Phase::Forward, layer - 2);
            assert!(earlier.iter().all(|&call| order.is_before(call, gather)), "layer {layer}");
        }
        let again = gathered(layer - 1, ".bf16.again", Phase::Backward);
        let before = computing(&program, Phase::Backward, layer);
        assert!(before.iter().any(|&call| beside(&order, again, call)), "layer {layer}, backward");
    }
}

/// Two layers' gradients and weights are whole at a time, not those of all layers.
#[test]
fn memory_grows_by_a_layer() {
    for zero in [2, 3] {
        let [beside, in_turns] = [true, false].map(|overlaps| lowered(zero, 1, overlaps));
        let layer: usize = (in_turns.parameters.iter())
            .filter(|state| state.name.starts_with("model.layers.0."))
            .map(|state| in_turns.value(state.master.value()).elements() * size_of::<f32>())
            .sum();
        let grown = beside.arena.transient_bytes() as i64 - in_turns.arena.transient_bytes() as i64;
        // A layer's gradients in FP32, its copies in BF16, and the slice that they are gathered of.
        assert!(grown <= 5 * layer as i64 / 2, "ZeRO {zero}: {grown} over {layer}");
    }
}

/// The calls that sum gradients over ranks beside a backward pass.
fn early_sums(program: &Program) -> Vec<&Call> {
    let sums = |call: &&Call| match &call.op {
        Op::Collective(op) => {
            op.reduction().is_some() && op.bucket.is_some() && call.phase != Phase::Optimizer
        }
        _ => false,
    };
    program.calls.iter().filter(sums).collect()
}

/// They stand in the body of the backward, once, and run with the last micro-batch.
#[test]
fn sums_of_several_micro_batches_are_beside_the_last_backward() {
    for zero in [0, 1] {
        let [one, several] = [1, 3].map(|micro_batches| lowered(zero, micro_batches, true));
        assert_eq!(one.calls.len(), several.calls.len());
        assert!(one.calls.iter().all(|call| !call.last_only));
        let sums = early_sums(&several);
        assert!(sums.len() >= LAYERS, "ZeRO {zero}: {}", sums.len());
        assert!(sums.iter().all(|call| call.last_only));
        let instances = |program: &Program| {
            let is_backward =
                |body: deepwell_ir::BodyId| program.bodies[body.index()].phase == Phase::Backward;
            program.instances().into_iter().filter(|(body, _)| is_backward(*body)).count()
        };
        assert_eq!((instances(&one), instances(&several)), (1, 3));
        for (call, runs) in several.calls_with_runs().filter(|(call, _)| call.last_only) {
            assert_eq!(runs, 1, "{}", call.name);
        }
        let order = Order::of(&several.calls, &several.bodies).unwrap();
        let last = format!("grad.model.layers.{}.mlp.down_proj", LAYERS - 1);
        let sum = exchange_of(&several, Phase::Backward, &last);
        let first = computing(&several, Phase::Backward, 0);
        assert!(first.iter().all(|&call| beside(&order, sum, call)), "ZeRO {zero}");
        // Nothing is left for the optimizer but the loss.
        let late =
            several.calls.iter().filter(|call| is_exchange(call) && call.phase == Phase::Optimizer);
        let late: Vec<&str> = late.map(|call| call.name.as_str()).collect();
        assert!(!late.iter().any(|name| name.contains("gradients")), "ZeRO {zero}: {late:?}");
    }
}

/// What tensor-parallel ranks have whole is summed over them first, in the same place.
#[test]
fn ranks_that_split_layers_sum_beside_the_backward() {
    for (data, zero, pipeline, micro_batches) in
        [(1, 0, 1, 2), (2, 0, 1, 1), (2, 0, 1, 2), (2, 1, 1, 2), (2, 2, 1, 2), (2, 1, 2, 4)]
    {
        let parallel = Parallel { tensor: 2, zero, pipeline, ..Parallel::data(data) };
        let program = lowered_of(parallel, micro_batches);
        let sums = early_sums(&program);
        let of_tensor = |call: &&&Call| call.name.starts_with("all_reduce.gradients.tensor");
        // Slices of the optimizer state are of buckets of a kind, else those of a layer.
        let expected = if zero == 1 { 1 } else { LAYERS / pipeline };
        assert!(sums.iter().filter(of_tensor).count() >= expected, "{parallel}");
        for call in &sums {
            // What comes in slices is added up, slice by slice.
            let comes_in_slices = call.accumulate == deepwell_ir::Accumulate::AfterFirst;
            let expected = micro_batches > 1 && !comes_in_slices;
            assert_eq!(call.last_only, expected, "{parallel}: {}", call.name);
        }
        let is_late =
            |call: &&Call| call.phase == Phase::Optimizer && call.name.contains(".gradients.");
        let late: Vec<&str> = program.calls.iter().filter(is_late).map(|it| &*it.name).collect();
        assert_eq!(late, Vec::<&str>::new(), "{parallel}");
        if micro_batches > 1 {
            let again = lowered_of(parallel, 2 * micro_batches);
            assert_eq!(again.calls.len(), program.calls.len(), "{parallel}");
        }
    }
}

/// Shared experts, and gradients of weights, while rows are on their way to the experts of another
/// rank and back.
#[test]
fn rows_of_experts_travel_beside_what_does_not_need_them() {
    let model = LlamaConfig::preset("deepseek-micro").unwrap();
    let parallel = Parallel { expert: 2, ..Parallel::data(2) };
    let (plan, graph) = (plan_of(&model, parallel, 1), capture(&model).unwrap());
    let program = lower(&graph, &plan, &Anywhere, &target(&plan)).unwrap();
    let order = Order::of(&program.calls, &program.bodies).unwrap();
    let of_experts = plan.parallel.ranks(0).named(ProcessGroup::EXPERT).unwrap().0;
    let is_rows = |call: &Call| match &call.op {
        Op::Collective(op) => op.group == of_experts,
        _ => false,
    };
    for (phase, wanted) in [(Phase::Forward, "shared_experts"), (Phase::Backward, "wgrad")] {
        let rows: Vec<usize> = (0..program.calls.len())
            .filter(|&at| is_rows(&program.calls[at]) && program.calls[at].phase == phase)
            .collect();
        assert!(!rows.is_empty(), "{phase}");
        let hides = |at: usize, call: usize| {
            program.calls[call].name.contains(wanted) && beside(&order, at, call)
        };
        let hidden =
            rows.iter().filter(|&&at| (0..program.calls.len()).any(|call| hides(at, call)));
        assert!(hidden.count() > 0, "{phase}: nothing beside {} exchanges of rows", rows.len());
    }
}

/// Gradients of weights beside the sums of gradients of activations.
#[test]
fn exchanges_of_layers_are_beside_gradients_of_weights() {
    let program = lowered_of(Parallel { tensor: 2, ..Parallel::data(1) }, 1);
    let order = Order::of(&program.calls, &program.bodies).unwrap();
    for layer in 0..LAYERS {
        let exchanges = (0..program.calls.len()).filter(|&at| {
            let call = &program.calls[at];
            is_exchange(call) && (call.phase, call.layer) == (Phase::Backward, Some(layer as u32))
        });
        let own = computing(&program, Phase::Backward, layer);
        let is_wgrad = |call: usize| program.calls[call].name.contains("wgrad");
        let hidden = exchanges
            .filter(|&at| own.iter().any(|&call| is_wgrad(call) && beside(&order, at, call)));
        assert!(hidden.count() >= 2, "layer {layer}");
    }
}

#[test]
fn calls_of_the_last_micro_batch_are_refused_where_others_need_them() {
    let sound = lowered(1, 2, true);
    let refused = |change: &dyn Fn(&mut Program)| {
        let mut broken = sound.clone();
        change(&mut broken);
        verify_program(&broken).unwrap_err().to_string()
    };
    let sum = sound.calls.iter().position(|call| call.last_only).unwrap();
    let error = refused(&|broken| broken.calls[sum].last_only = false);
    assert!(error.contains("in each of 2 micro-batches"), "{error}");
    let norm = sound.calls.iter().position(|call| call.name == "adamw_coefficients").unwrap();
    let error = refused(&|broken| broken.calls[norm].last_only = true);
    assert!(error.contains("and optimizer runs once"), "{error}");
    let is_forward = |call: &Call| call.phase == Phase::Forward && call.outputs().len() == 1;
    let forward = sound.calls.iter().position(is_forward).unwrap();
    let error = refused(&|broken| broken.calls[forward].last_only = true);
    assert!(error.contains("which is made in the last micro-batch alone"), "{error}");
    let adds = |call: &Call| call.accumulate == deepwell_ir::Accumulate::AfterFirst;
    let adds = sound.calls.iter().position(adds).unwrap();
    let error = refused(&|broken| broken.calls[adds].last_only = true);
    assert!(error.contains("adds up those before"), "{error}");
    // Chunks: a pass of the last chunk behind the last pass of the first, whose sums it would write
    // over.
    let parallel = Parallel { zero: 1, pipeline: 2, chunks: 2, ..Parallel::data(2) };
    let sound = lowered_of(parallel, 4);
    let backward = |chunk: u32| {
        let is_it = |body: &deepwell_ir::Body| (body.phase, body.chunk) == (Phase::Backward, chunk);
        let body = sound.bodies.iter().position(is_it).unwrap();
        sound.schedule.iter().rposition(|it| it.body.index() == body).unwrap()
    };
    let (of_last_chunk, of_first_chunk) = (backward(1), backward(0));
    assert!(sound.slots > 1 && early_sums(&sound).iter().all(|call| call.last_only));
    let mut broken = sound.clone();
    broken.schedule[of_last_chunk..=of_first_chunk].rotate_left(1);
    let error = verify_program(&broken).unwrap_err().to_string();
    assert!(error.contains("backward of micro-batch 3 runs behind the last backward"), "{error}");
}

#[test]
fn a_gradient_that_is_written_behind_its_sum_is_refused() {
    let program = lowered(0, 1, true);
    let sum = exchange_of(&program, Phase::Backward, "grad.model.layers.3.mlp.down_proj");
    let writes = |call: &Call| {
        call.outputs()
            .iter()
            .any(|it| program.calls[sum].operands.iter().any(|own| own.value == it.value))
    };
    let writer = (0..sum).rev().find(|&at| writes(&program.calls[at])).unwrap();
    let mut broken = program.clone();
    broken.calls[writer..=sum].rotate_right(1);
    for call in &mut broken.calls {
        (call.stream, call.records) = (0, None);
        call.waits.clear();
    }
    let error = verify_program(&broken).unwrap_err().to_string();
    assert!(error.contains("which is summed over the ranks already"), "{error}");
    let mut broken = program.clone();
    broken.micro_batches = 2;
    let again = broken.schedule[..2].iter().map(|it| Invocation { micro_batch: 1, ..*it });
    let again: Vec<_> = again.collect();
    broken.schedule.splice(2..2, again);
    let error = verify_program(&broken).unwrap_err().to_string();
    assert!(error.contains("in each of 2 micro-batches"), "{error}");
    // No event: a sum that may run beside what writes the gradient.
    let mut broken = program;
    broken.calls[sum].waits.clear();
    let error = verify_program(&broken).unwrap_err().to_string();
    assert!(error.contains("no event orders them"), "{error}");
}

#[test]
fn a_step_is_predicted_to_take_less_time() {
    let hardware = Hardware::preset("h200-x2").unwrap();
    for zero in 0..=3 {
        let time = |overlaps| {
            let mut program = lowered(zero, 1, overlaps);
            program.target.gpu = Some(0);
            dryrun(std::slice::from_ref(&program), &hardware).ranks[0].clone()
        };
        let [beside, in_turns] = [true, false].map(time);
        assert!(beside.time_s < in_turns.time_s, "ZeRO {zero}");
        let exchanges = beside.exchanges.expect("they have a stream");
        assert_eq!(in_turns.exchanges, None);
        assert!(exchanges.exposed_s < exchanges.time_s && exchanges.exposed_s > 0.0);
        let saved = exchanges.time_s - exchanges.exposed_s;
        let error = (in_turns.time_s - beside.time_s - saved).abs();
        assert!(error < 1e-9 * in_turns.time_s, "ZeRO {zero}: {exchanges:?}");
    }
}
