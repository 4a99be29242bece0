//! Programs with several micro-batches in flight and calls on several streams: the same bits as one
//! after the other.

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::{
    Call, Graph, Op, Order, Phase, PrecisionPolicy, Program, Recompute, Schedule, TensorKind,
    verify_program,
};
use deepwell_kernels::{CpuBackend, CpuCatalog, Executor, cpu_target};
use deepwell_plan::schedule::{PipelineSchedule, orders};
use deepwell_plan::{
    OptimizerSpec, Plan, PlanRequest, Scheduling, autoplan, lower_scheduled, passes_of,
};
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::init;

const SEQ: usize = 32;
const MICRO_BATCHES: usize = 5;
const STEPS: usize = 2;

fn model(precision: &str) -> (Graph, Plan) {
    let graph = capture(&LlamaConfig::preset("llama-micro").unwrap()).unwrap();
    let request = PlanRequest {
        seq: SEQ,
        global_batch: MICRO_BATCHES,
        policy: PrecisionPolicy::preset(precision).unwrap(),
        optimizer: OptimizerSpec::default(),
        memory_limit_bytes: None,
        micro_batch: Some(1),
        recompute: Some(Recompute::None),
        saved_activations: Default::default(),
    };
    let cpu = Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 4 << 30);
    let hardware = Hardware::cpu_only(cpu);
    let plan = autoplan(&graph, &hardware, &request, &CpuCatalog, &cpu_target(2)).unwrap().plan;
    (graph, plan)
}

fn lowered(graph: &Graph, plan: &Plan, scheduling: &Scheduling<'_>) -> Program {
    lower_scheduled(graph, plan, scheduling, &CpuCatalog, &cpu_target(2)).unwrap()
}

fn token(at: usize) -> i32 {
    ((at * at * 31 + at * 7) % 256) as i32
}

/// Bits of the losses and of all weights after some steps, each micro-batch with other tokens.
fn run(graph: &Graph, program: &Program) -> Vec<u32> {
    let mut executor = Executor::new(Box::new(CpuBackend::new()), program.arena.bytes).unwrap();
    let loaded = executor.load(program.clone()).unwrap();
    for ((_, tensor), state) in graph.parameters().zip(&program.parameters) {
        let TensorKind::Parameter { init, .. } = tensor.kind else { panic!("no parameter") };
        let mut values = vec![0f32; program.value(state.master.value()).elements()];
        init::fill(init, 7, &state.name, &mut values);
        executor.write(program, state.master.value(), cast_slice(&values)).unwrap();
    }
    executor.run_phase(&loaded, Phase::Weights).unwrap();
    let host = &program.host;
    let scale = [1.0 / program.tokens_per_step() as f32];
    executor.write(program, host.loss_scale.unwrap(), cast_slice(&scale)).unwrap();
    executor.write(program, host.schedule.unwrap(), cast_slice(&[1e-2f32, 1.0])).unwrap();
    let mut bits = Vec::new();
    for step in 0..STEPS {
        for (index, invocation) in program.schedule.iter().enumerate() {
            if program.bodies[invocation.body.index()].phase == Phase::Forward {
                let first = step * 1000 + invocation.micro_batch as usize * SEQ;
                let of = |shift: usize| -> Vec<i32> {
                    (0..SEQ).map(|at| token(first + at + shift)).collect()
                };
                let (inputs, targets) = (of(0), of(1));
                let values = [
                    (host.tokens.unwrap(), cast_slice(&inputs)),
                    (host.targets.unwrap(), cast_slice(&targets)),
                ];
                executor.stage(program, invocation.slot, &values).unwrap();
            }
            executor.invoke(&loaded, index).unwrap();
        }
        let mut loss = [0f32];
        executor.read(program, host.loss.unwrap(), cast_slice_mut(&mut loss)).unwrap();
        assert!(loss[0].is_finite());
        bits.push(loss[0].to_bits());
    }
    for state in &program.parameters {
        let mut values = vec![0u32; program.value(state.master.value()).elements()];
        executor.read(program, state.master.value(), cast_slice_mut(&mut values)).unwrap();
        bits.extend(values);
    }
    bits
}

#[test]
fn micro_batches_in_flight_change_no_bit() {
    for precision in ["bf16", "mxfp8", "nvfp4"] {
        let (graph, plan) = model(precision);
        let alone = lowered(&graph, &plan, &Scheduling::of(&plan));
        let expected = run(&graph, &alone);
        for stages in 2..=MICRO_BATCHES + 1 {
            let passes = Schedule::one_forward_one_backward(MICRO_BATCHES, stages, 0);
            let slots = stages.min(MICRO_BATCHES);
            assert_eq!(passes.slots as usize, slots);
            let scheduling = Scheduling { passes, ..Scheduling::of(&plan) };
            let program = lowered(&graph, &plan, &scheduling);
            assert_eq!(program.calls.len(), alone.calls.len());
            assert!(program.arena.transient_bytes() <= slots * alone.arena.transient_bytes());
            assert!(run(&graph, &program) == expected, "{precision}, {stages} stages");
        }
    }
}

/// Gradients of weights in passes of their own, as late as each stage of a zero-bubble schedule
/// makes them.
#[test]
fn gradients_of_weights_that_come_later_change_no_bit() {
    for precision in ["bf16", "mxfp8", "nvfp4"] {
        let (graph, plan) = model(precision);
        let alone = lowered(&graph, &plan, &Scheduling::of(&plan));
        let expected = run(&graph, &alone);
        for (stages, stage) in [(1, 0), (2, 1), (4, 0), (4, 3)] {
            let order = &orders(PipelineSchedule::ZbH1, stages, MICRO_BATCHES, 1).unwrap()[stage];
            let passes = passes_of(order).unwrap();
            assert_eq!(passes.slots as usize, stages);
            let program = lowered(&graph, &plan, &Scheduling { passes, ..Scheduling::of(&plan) });
            assert_eq!(program.calls.len(), alone.calls.len());
            // Queries, keys, values, output, gate, up and down; the head's is made with the loss.
            let gemms = program.calls.iter().filter(|call| call.name.ends_with("wgrad"));
            let phases: Vec<Phase> = gemms.map(|call| call.phase).collect();
            assert_eq!(phases, vec![Phase::WeightGradients; 7 * graph.layer_count()]);
            assert!(run(&graph, &program) == expected, "{precision}, stage {stage} of {stages}");
        }
    }
}

/// What gradients of weights read must be there until then.
#[test]
fn passes_that_lose_what_weights_need_are_refused() {
    let (graph, plan) = model("bf16");
    let passes = passes_of(&orders(PipelineSchedule::ZbH1, 2, MICRO_BATCHES, 1).unwrap()[1]);
    let scheduling = Scheduling { passes: passes.unwrap(), ..Scheduling::of(&plan) };
    let sound = lowered(&graph, &plan, &scheduling);
    let [backward, deferred] =
        [Phase::Backward, Phase::WeightGradients].map(|phase| sound.body_of(phase).unwrap());
    let first = |program: &Program, body| {
        program.schedule.iter().position(|invocation| invocation.body == body).unwrap()
    };
    type Plant<'a> = &'a dyn Fn(&mut Program);
    let rows: [(Plant<'_>, &str); 4] = [
        (
            &|program| {
                let places = (first(program, backward), first(program, deferred));
                program.schedule.swap(places.0, places.1);
            },
            "weight_gradients of micro-batch 0 finds micro-batch 0 in slot 0, expected \
             micro-batch 0 before its weight_gradients",
        ),
        (
            &|program| {
                let at = first(program, deferred);
                program.schedule.remove(at);
            },
            "finds micro-batch 0 before its weight_gradients in slot 0, expected",
        ),
        (
            &|program| {
                let last = |body| program.schedule.iter().rposition(|it| it.body == body).unwrap();
                let at = last(deferred);
                program.schedule.remove(at);
            },
            "runs while micro-batch",
        ),
        (
            &|program| {
                // A place for all slots, behind them.
                let calls = program.calls_of(deferred).to_vec();
                let operands = calls.iter().flat_map(|call| call.inputs());
                let is_kept = |value: &deepwell_ir::ValueId| {
                    program.value(*value).slot_stride_bytes > 0
                        && !program.value(*value).memory.is_persistent()
                };
                let value = operands.map(|operand| operand.value).find(is_kept).unwrap();
                program.values[value.index()].slot_stride_bytes = 0;
            },
            "has one place for 2 slots",
        ),
    ];
    for (plant, expected) in rows {
        let mut program = sound.clone();
        plant(&mut program);
        let error = verify_program(&program).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn buckets_of_any_size_change_no_bit() {
    let (graph, plan) = model("mxfp8");
    let whole = lowered(&graph, &plan, &Scheduling::of(&plan));
    let expected = run(&graph, &whole);
    let updates = |program: &Program| {
        program.calls.iter().filter(|call| matches!(call.op, Op::AdamW(_))).count()
    };
    assert_eq!(updates(&whole), 1);
    for (bucket_bytes, count) in [(0, whole.parameters.len()), (100_000, 6)] {
        let plan = Plan { bucket_bytes, ..plan.clone() };
        let program = lowered(&graph, &plan, &Scheduling::of(&plan));
        assert_eq!(updates(&program), count);
        assert_eq!(program.arena, whole.arena);
        assert!(run(&graph, &program) == expected, "buckets of {bucket_bytes} bytes");
    }
}

/// Weight gradients beside everything else, norms on a third stream.
fn by_op(call: &Call) -> u32 {
    match call.op.name() {
        name if name.contains("wgrad") || call.name.ends_with("wgrad") => 1,
        name if name.contains("norm") => 2,
        _ => 0,
    }
}

/// The calls of each body in another order that its events allow.
fn permuted(program: &Program, seed: usize) -> Program {
    let order = Order::of(&program.calls, &program.bodies).unwrap();
    let mut permuted = program.clone();
    let mut random = seed;
    for body in &program.bodies {
        let mut left: Vec<usize> = body.calls.clone().collect();
        for place in body.calls.clone() {
            let is_ready =
                |&at: &usize| !left.iter().any(|&other| order.is_before(other, left[at]));
            let ready: Vec<usize> = (0..left.len()).filter(is_ready).collect();
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let next = left.remove(ready[(random >> 33) % ready.len()]);
            permuted.calls[place] = program.calls[next].clone();
        }
    }
    permuted
}

#[test]
fn calls_of_several_streams_run_in_any_order_to_the_same_bits() {
    for precision in ["bf16", "mxfp8", "nvfp4"] {
        let (graph, plan) = model(precision);
        let alone = lowered(&graph, &plan, &Scheduling::of(&plan));
        let expected = run(&graph, &alone);
        let scheduling = Scheduling { stream_of: Some(&by_op), ..Scheduling::of(&plan) };
        let program = lowered(&graph, &plan, &scheduling);
        let order = Order::of(&program.calls, &program.bodies).unwrap();
        assert_eq!(order.streams(), 3);
        assert!(program.calls.iter().any(|call| !call.waits.is_empty()));
        assert!(run(&graph, &program) == expected, "{precision}");
        let mut orders = Vec::new();
        for seed in 1..=4 {
            let permuted = permuted(&program, seed);
            verify_program(&permuted).unwrap();
            assert!(run(&graph, &permuted) == expected, "{precision}, order {seed}");
            let names: Vec<&str> = permuted.calls.iter().map(|call| call.name.as_str()).collect();
            orders.push(names.join(" "));
        }
        orders.sort();
        orders.dedup();
        assert_eq!(orders.len(), 4, "{precision}: orders that are the same test nothing");
    }
}

/// Lifetimes that end where a call stands in the list, as on one stream, are too short.
#[test]
fn an_arena_for_one_stream_is_refused_on_three() {
    let (graph, plan) = model("bf16");
    let alone = lowered(&graph, &plan, &Scheduling::of(&plan));
    let scheduling = Scheduling { stream_of: Some(&by_op), ..Scheduling::of(&plan) };
    let mut program = lowered(&graph, &plan, &scheduling);
    program.arena = alone.arena.clone();
    for (value, other) in program.values.iter_mut().zip(&alone.values) {
        assert_eq!(value.name, other.name);
        value.range = other.range;
    }
    for (call, other) in program.calls.iter_mut().zip(&alone.calls) {
        call.workspace = other.workspace;
    }
    let error = verify_program(&program).unwrap_err().to_string();
    assert!(error.contains("no event orders them"), "{error}");
}
