//! Programs of the stages of a pipeline: what each has and exchanges, and what is predicted of
//! them.

#[expect(dead_code, reason = "models here have more layers than those of other tests")]
mod common;

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::ops::CollectiveKind;
use deepwell_ir::{
    Graph, Handover, MemoryKind, Op, PrecisionPolicy, Program, Recompute, verify_program,
};
use deepwell_plan::schedule::PipelineSchedule;
use deepwell_plan::{
    Parallel, Plan, PlanRequest, Planned, SharedGraph, autoplan_stages, dryrun_stages, lower,
};

use common::{Kernels, hardware, request, target};

fn graph(layers: usize, tie_word_embeddings: bool) -> Graph {
    let micro = LlamaConfig::preset("llama-micro").unwrap();
    capture(&LlamaConfig { num_layers: layers, tie_word_embeddings, ..micro }).unwrap()
}

/// Of six layers, which two tensor-parallel ranks can split.
fn graph_of_two_heads(tie_word_embeddings: bool) -> Graph {
    let micro = LlamaConfig::preset("llama-micro").unwrap();
    let (num_layers, num_kv_heads, intermediate_size) = (6, 2, 192);
    let config =
        LlamaConfig { num_layers, num_kv_heads, intermediate_size, tie_word_embeddings, ..micro };
    capture(&config).unwrap()
}

fn planned(graph: &Graph, parallel: Parallel, layers: Option<&[usize]>) -> Planned {
    let wanted = PlanRequest {
        micro_batch: Some(1),
        recompute: Some(Recompute::None),
        ..request(PrecisionPolicy::mxfp8(), 32, 8)
    };
    let split = (parallel, layers);
    autoplan_stages(graph, &hardware(), &wanted, split, &Kernels, &target()).unwrap()
}

/// The program of a rank.
fn program(graph: &Graph, plan: &Plan, rank: usize) -> Program {
    lower(graph, plan, &Kernels, &target().as_rank(plan.parallel.ranks(rank))).unwrap()
}

fn collectives(program: &Program) -> Vec<String> {
    let is_collective = |op: &Op| matches!(op, Op::Collective(_));
    let calls = program.calls.iter().filter(|call| is_collective(&call.op));
    calls.map(|call| format!("{} {}", call.name, call.op.rule().attributes())).collect()
}

fn stages(pipeline: usize, data: usize) -> Parallel {
    Parallel { pipeline, ..Parallel::data(data) }
}

#[test]
fn stages_send_activations_and_agree_on_the_norm() {
    let graph = graph(4, true);
    let plan = planned(&graph, stages(2, 1), Some(&[3, 1])).plan;
    assert_eq!(plan.stages, [3, 1]);
    assert!(plan.to_string().contains("stages        of 3, 1 layers"), "{plan}");
    let json = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan);
    let [first, last] = [0, 1].map(|rank| program(&graph, &plan, rank));
    assert_eq!(
        collectives(&first),
        [
            "layers.2.mlp.residual.send group=0 ranks=2 to=1",
            "layers.2.mlp.residual.send.backward group=0 ranks=2 from=1 bf16[B*S, 64]",
            "all_reduce.tied.model.embed_tokens.weight sum group=1 ranks=2 bucket=1",
            "all_gather.grad_norm.stages group=0 ranks=2",
            "all_reduce.loss.pipeline sum group=0 ranks=2",
        ]
    );
    assert_eq!(
        collectives(&last),
        [
            "layers.2.mlp.residual.recv group=0 ranks=2 from=0 bf16[B*S, 64]",
            "layers.2.mlp.residual.recv.backward group=0 ranks=2 to=0",
            "all_reduce.tied.model.embed_tokens.weight sum group=1 ranks=2 bucket=1",
            "all_gather.grad_norm.stages group=0 ranks=2",
            "all_reduce.loss.pipeline sum group=0 ranks=2",
        ]
    );
    // As many micro-batches in flight as stages are left.
    assert_eq!((first.slots, last.slots), (2, 1));
    assert!(first.host.tokens.is_some() && first.host.targets.is_none());
    assert!(last.host.tokens.is_none() && last.host.targets.is_some());
    // Both say what the policy came to for the whole model.
    assert_eq!(first.precision, last.precision);
    assert_eq!(first.precision.len(), planned(&graph, stages(1, 1), None).plan.precision.len());
}

#[test]
fn each_stage_is_predicted() {
    let graph = graph(4, false);
    let alone = planned(&graph, stages(1, 1), None);
    assert!(alone.plan.stages.is_empty() && alone.prediction.bubble.is_none());
    let planned = planned(&graph, stages(4, 2), None);
    assert_eq!(planned.plan.stages, [1, 1, 1, 1]);
    let run = &planned.prediction;
    assert_eq!(run.ranks.len(), 4);
    assert_eq!(run.tokens, alone.prediction.tokens);
    let alike: Vec<&[u32]> = run.ranks.iter().map(|rank| rank.alike.as_slice()).collect();
    assert_eq!(alike, [[1], [3], [5], [7]]);
    // A stage has its part of the optimizer state.
    let of_kind = |program: &Program| -> usize {
        program.values_of(MemoryKind::Optimizer).map(|value| value.range.bytes).sum()
    };
    let programs: Vec<Program> =
        (0..4).map(|stage| program(&graph, &planned.plan, 2 * stage)).collect();
    let all: usize = programs.iter().map(of_kind).sum();
    let whole = of_kind(&alone.program);
    assert!(all >= whole && all < whole + 4 * 256, "{all} beside {whole}");
    // Of 4 micro-batches: 3 of 7 times where all stages were alike, more as the last one is slower.
    let bubble = run.bubble.unwrap();
    assert!(bubble > 0.2 && bubble < 3.0 / 7.0, "{bubble}");
    let text = run.to_string();
    assert!(text.contains("pipeline of 4 stages by 1f1b: bubble "), "{text}");
    assert!(text.contains("stage 3, each of 2 ranks: peak "), "{text}");
    assert_eq!(dryrun_stages(&programs, planned.plan.parallel, &hardware()).ranks.len(), 4);
}

/// The first rank's graph is that of all stages until each takes its part, so that the passes up to
/// there run once.
#[test]
fn stages_share_a_graph() {
    let check = |parallel: Parallel, tie_word_embeddings: bool| {
        let graph = graph_of_two_heads(tie_word_embeddings);
        let plan = planned(&graph, parallel, None).plan;
        let at = |stage: usize| {
            let rank = stage * parallel.world_size() / parallel.pipeline;
            target().as_rank(parallel.ranks(rank))
        };
        let shared = SharedGraph::of(&graph, &plan, &Kernels, &at(0)).unwrap();
        for stage in 0..parallel.pipeline {
            let program = shared.lower_stage(&Kernels, &at(stage)).unwrap();
            let alone = lower(&graph, &plan, &Kernels, &at(stage)).unwrap();
            assert!(program == alone, "{parallel}, stage {stage}");
        }
    };
    let tensor = Parallel { tensor: 2, zero: 1, ..stages(3, 2) };
    for tied in [false, true] {
        check(stages(3, 1), tied);
        check(tensor, tied);
        check(Parallel { chunks: 3, ..stages(2, 2) }, tied);
        check(Parallel { schedule: PipelineSchedule::ZbH1, ..stages(3, 2) }, tied);
        check(Parallel { context: 2, ..stages(3, 2) }, tied);
    }
    // Of the other tensor-parallel rank's slices nothing is known.
    let graph = graph_of_two_heads(false);
    let plan = planned(&graph, tensor, None).plan;
    let at = |rank: usize| target().as_rank(tensor.ranks(rank));
    let shared = SharedGraph::of(&graph, &plan, &Kernels, &at(0)).unwrap();
    let error = shared.lower_stage(&Kernels, &at(1)).unwrap_err().to_string();
    assert!(
        error.starts_with("rank of the target: expected one at the place of rank 0"),
        "{error}"
    );
}

/// Gradients of weights where stages would wait: less time, more that is kept on later stages.
#[test]
fn zero_bubble_stages_wait_less_and_keep_more() {
    let graph = graph(8, false);
    for pipeline in [2, 4] {
        let schedule = PipelineSchedule::ZbH1;
        let parallel = Parallel { schedule, ..stages(pipeline, 1) };
        let run = planned(&graph, parallel, None).prediction;
        let of_1f1b = planned(&graph, stages(pipeline, 1), None).prediction;
        assert!(of_1f1b.zero_bubble.is_none());
        let zero_bubble = run.zero_bubble.as_ref().unwrap();
        let (saved, of_1f1b_bubble) = (run.bubble.unwrap(), of_1f1b.bubble.unwrap());
        assert!(saved < 0.8 * of_1f1b_bubble, "{pipeline} stages: {saved} of {of_1f1b_bubble}");
        // The same bodies as of 1F1B, cut in two: their calls take as long.
        assert!((zero_bubble.bubble_1f1b - of_1f1b_bubble).abs() < 1e-9);
        let text = run.to_string();
        assert!(text.contains("stages by zb-h1: bubble"), "{text}");
        assert!(text.contains("  1f1b would have a bubble of "), "{text}");
        let kept = zero_bubble.kept_bytes.iter().zip(&zero_bubble.kept_bytes_1f1b);
        for (stage, (kept, of_1f1b_kept)) in kept.enumerate() {
            // As many micro-batches as stages on each, and gradients of what layers give.
            assert!(kept > of_1f1b_kept, "stage {stage}: {kept} beside {of_1f1b_kept}");
        }
        let [last, of_1f1b_last] = [&run, &of_1f1b].map(|run| run.ranks.last().unwrap());
        assert!(last.peak_bytes > of_1f1b_last.peak_bytes);
        // What is said to be kept is what the arena grows by, but for what lives within a pass.
        let more =
            zero_bubble.kept_bytes.last().unwrap() - zero_bubble.kept_bytes_1f1b.last().unwrap();
        let grown = last.arena_bytes - of_1f1b_last.arena_bytes;
        assert!(grown.abs_diff(more) < more / 4, "{grown} beside {more}");
    }
}

/// Two chunks of layers each: stages begin and end their passes sooner, and wait less.
#[test]
fn interleaved_stages_wait_less() {
    let graph = graph(8, false);
    let bubble = |pipeline, chunks| {
        let parallel = Parallel { chunks, ..stages(pipeline, 1) };
        let run = planned(&graph, parallel, None).prediction;
        let text = run.to_string();
        assert_eq!(text.contains("interleaved 1f1b over 2 chunks each"), chunks == 2, "{text}");
        run.bubble.unwrap()
    };
    for pipeline in [2, 4] {
        let parallel = Parallel { chunks: 2, ..stages(pipeline, 1) };
        for rank in planned(&graph, parallel, None).prediction.ranks {
            // What is counted by kind is in the arena, and most of it.
            let sum: u64 = rank.bytes_at_peak.values().sum();
            assert!(sum <= rank.peak_bytes && sum > rank.peak_bytes / 10 * 8, "{rank:?}");
        }
        let (whole, in_chunks) = (bubble(pipeline, 1), bubble(pipeline, 2));
        assert!(in_chunks < 0.8 * whole, "{pipeline} stages: {in_chunks} beside {whole}");
    }
    // A rank has the layers of both of its chunks, bodies of each, and runs them all.
    let parallel = Parallel { chunks: 2, ..stages(2, 1) };
    let plan = planned(&graph, parallel, None).plan;
    assert_eq!(plan.stages, [2, 2, 2, 2]);
    let last = program(&graph, &plan, 1);
    let has = |layer: usize| {
        let name = format!("model.layers.{layer}.");
        last.parameters.iter().any(|state| state.name.starts_with(&name))
    };
    assert_eq!([0, 2, 4, 6].map(has), [false, true, false, true]);
    let runs: Vec<(u32, usize)> =
        last.bodies.iter().map(|body| body.chunk).zip(last.runs_per_step()).collect();
    let micro_batches = plan.micro_batches;
    assert_eq!(runs[..4], [1, 1, 0, 0].map(|chunk| (chunk, micro_batches)));
    // Each slot holds a chunk of a micro-batch: fewer than for both chunks of all in flight.
    assert_eq!(last.slots, 3);
}

/// Where ranks split the batch too, a gradient of both ends is summed over them first, and then
/// over the ranks that split the batch; the verifier takes nothing less.
#[test]
fn gradients_of_a_tied_table_are_summed_twice() {
    let graph = graph(2, true);
    for zero in [0, 1] {
        let parallel = Parallel { zero, ..stages(2, 2) };
        let plan = planned(&graph, parallel, None).plan;
        for rank in 0..4 {
            let sound = program(&graph, &plan, rank);
            let names: Vec<String> = collectives(&sound);
            let at = |part: &str| names.iter().position(|name| name.contains(part)).unwrap();
            let over_data = if zero == 0 { "all_reduce.gradients.0" } else { "reduce_scatter" };
            assert!(at("all_reduce.tied.") < at(over_data), "{names:?}");
            verify_program(&sound).unwrap();
            let mut without = sound.clone();
            let Some(call) = without.calls.iter_mut().find(|call| call.name.starts_with(over_data))
            else {
                panic!("no sum over the data ranks")
            };
            let Op::Collective(op) = &mut call.op else { panic!() };
            op.group = sound.target.ranks.named("embedding").unwrap().0;
            let error = verify_program(&without).unwrap_err().to_string();
            assert!(error.contains("summed over") || error.contains("sums"), "{error}");
        }
    }
}

/// One end of what a stage sends another: the tensor, its micro-batch, and the other stage.
#[derive(Clone, Debug, PartialEq)]
struct End {
    sends: bool,
    tensor: String,
    micro_batch: u32,
    other: usize,
}

/// What a stage sends and receives at the same time, one meeting after the other: as its program
/// has it, or with each body's receives and sends by themselves.
fn meetings(program: &Program, in_bodies: bool) -> Vec<Vec<End>> {
    let ends = |invocation: u32, sends: bool| -> Vec<End> {
        let Some(it) = program.schedule.get(invocation as usize) else { return Vec::new() };
        let (received, sent) = program.handed_over(it.body);
        let calls = &program.calls_of(it.body)[if sends { sent } else { received }];
        let end = |call: &deepwell_ir::Call| {
            let Op::Collective(op) = &call.op else { panic!("`{}` sends nothing", call.name) };
            let (CollectiveKind::Send { to: other } | CollectiveKind::Recv { from: other, .. }) =
                op.kind
            else {
                panic!("`{}` is for all", call.name)
            };
            let tensor = call.name.replace(".send", "").replace(".recv", "");
            End { sends, tensor, micro_batch: it.micro_batch, other: other as usize }
        };
        calls.iter().map(end).collect()
    };
    let count = program.schedule.len() as u32;
    if in_bodies {
        return (0..count).flat_map(|at| [ends(at, false), ends(at, true)]).collect();
    }
    let meeting = |at: u32| {
        let arrivals = &program.handover.as_ref().unwrap().before[at as usize];
        let received = arrivals.iter().flat_map(|arrival| ends(arrival.invocation, false));
        let sent = at.checked_sub(1).map(|former| ends(former, true)).unwrap_or_default();
        sent.into_iter().chain(received).collect()
    };
    (0..=count).map(meeting).collect()
}

/// Whether all comes through where nothing is buffered: a send ends when the other end receives.
fn all_comes_through(mut stages: Vec<Vec<Vec<End>>>) -> bool {
    let mut at = vec![0; stages.len()];
    loop {
        let mut moved = false;
        for stage in 0..stages.len() {
            while stages[stage].get(at[stage]).is_some_and(Vec::is_empty) {
                at[stage] += 1;
                moved = true;
            }
            let group = stages[stage].get(at[stage]).cloned().unwrap_or_default();
            for sent in group.iter().filter(|end| end.sends) {
                let Some(group) = stages[sent.other].get_mut(at[sent.other]) else { continue };
                let of_us = |end: &End| !end.sends && end.other == stage;
                let Some(place) = group.iter().position(of_us) else { continue };
                let received = group.remove(place);
                let of = |end: &End| (end.tensor.clone(), end.micro_batch);
                assert_eq!(of(sent), of(&received), "stage {stage} sends another than is awaited");
                stages[stage][at[stage]].retain(|end| end != sent);
                moved = true;
            }
        }
        if !moved {
            return at.iter().zip(&stages).all(|(at, groups)| *at == groups.len());
        }
    }
}

/// Programs of all stages, whose sends end when they are received: as they are, none waits for
/// ever; where bodies send and receive by themselves, they do.
#[test]
fn stages_hand_over_without_buffers() {
    let graph = graph(8, false);
    let one_f_one_b = PipelineSchedule::OneFOneB;
    for (pipeline, chunks, schedule, places) in [
        (2, 1, one_f_one_b, 1),
        (4, 1, one_f_one_b, 1),
        (2, 1, PipelineSchedule::ZbH1, 2),
        (4, 1, PipelineSchedule::ZbH1, 2),
        (2, 2, one_f_one_b, 2),
        (4, 2, one_f_one_b, 3),
    ] {
        let parallel = Parallel { chunks, schedule, ..stages(pipeline, 1) };
        let plan = planned(&graph, parallel, None).plan;
        let programs: Vec<Program> =
            (0..pipeline).map(|stage| program(&graph, &plan, stage)).collect();
        let of = |in_bodies| programs.iter().map(|it| meetings(it, in_bodies)).collect();
        assert!(all_comes_through(of(false)), "{parallel}");
        assert!(!all_comes_through(of(true)), "{parallel}");
        let most = programs.iter().map(|it| it.handover.as_ref().unwrap().places).max();
        assert!(most <= Some(places), "{parallel}: {most:?}");
        // As many as differ are recorded: that many, however many micro-batches there are.
        let longer = Plan { micro_batches: 32 * plan.micro_batches, ..plan };
        let distinct = |program: &Program| {
            let meetings = (0..=program.schedule.len()).filter_map(|at| program.meeting(at));
            meetings.collect::<std::collections::BTreeSet<_>>().len()
        };
        for stage in 0..pipeline {
            let long = program(&graph, &longer, stage);
            let (recorded, slots) = (distinct(&long), long.slots as usize);
            let most = if chunks > 1 { 18 } else { 6 } * slots;
            assert!(recorded <= most, "{parallel}, stage {stage}: {recorded} of {slots} slots");
        }
    }
}

/// What lands where it should not, too late or twice is refused.
#[test]
fn handovers_that_lose_something_are_refused() {
    let graph = graph(4, false);
    let plan = planned(&graph, stages(2, 1), None).plan;
    let sound = program(&graph, &plan, 1);
    verify_program(&sound).unwrap();
    let check = |plant: &dyn Fn(&mut Program, &mut Handover), part: &str| {
        let mut broken = sound.clone();
        let mut handover = broken.handover.clone().unwrap();
        plant(&mut broken, &mut handover);
        broken.handover = Some(handover);
        let error = verify_program(&broken).unwrap_err().to_string();
        assert!(error.contains(part), "expected `{part}` in {error}");
    };
    check(&|_, it| drop(it.before.pop()), "expected 19: around each body");
    check(&|_, it| it.before[0].clear(), "forward of micro-batch 0 begins before it has received");
    check(&|_, it| it.before[1] = it.before[0].clone(), "receives twice, or when it is over");
    check(&|_, it| it.before[0][0].place = 1, "lands in place 1, there are 1");
    check(&|_, it| it.before[0][0].invocation = 99, "for invocation 99, which there is not");
    check(
        &|_, it| {
            let next = it.before[2].remove(0);
            it.before[0].insert(0, next);
        },
        "lands in place 0 on what 2 reads",
    );
    check(&|_, it| it.place_bytes /= 2, "bytes land in a place of");
    check(&|_, it| it.places = 2, "outside of the arena");
    check(&|program, it| it.offset = program.arena.transient_offset, "lies where what stages");
    check(
        &|program, _| {
            let last = program.bodies[1].calls.end - 1;
            program.calls[last].last_only = true;
        },
        "does not run alike in all micro-batches",
    );
}

/// Every stage was lowered, and its BF16 fallback, before memory was compared.
#[test]
fn the_first_stage_that_needs_too_much_ends_an_attempt() {
    let graph = graph(4, false);
    let fits = planned(&graph, stages(2, 1), None);
    let peak_bytes = |stage: usize| fits.prediction.ranks[stage].peak_bytes;
    let least = peak_bytes(0).min(peak_bytes(1));
    let check = |limit_bytes: u64, expected: &str| {
        let wanted = PlanRequest {
            memory_limit_bytes: Some(limit_bytes),
            micro_batch: Some(1),
            recompute: Some(Recompute::None),
            ..request(PrecisionPolicy::mxfp8(), 32, 8)
        };
        let split = (stages(2, 1), None);
        let found = autoplan_stages(&graph, &hardware(), &wanted, split, &Kernels, &target());
        let text = match found {
            Ok(_) => "fits".to_string(),
            Err(error) => error.to_string(),
        };
        assert!(text.contains(expected), "{limit_bytes}: {text}");
    };
    check(peak_bytes(0).max(peak_bytes(1)), "fits");
    check(least - 1, " or more, ");
}
