//! Numbers of the prediction against numbers worked out by other means.

mod common;

use deepwell_ir::capture::LlamaConfig;
use deepwell_ir::ops::{Add, Collective, CollectiveKind, Reduction};
use deepwell_ir::{
    Accumulate, Arena, Body, BodyId, ByteRange, Call, Cost, GroupId, HostInterface, Invocation,
    KernelChoice, MathUnit, MemoryKind, Mode, NodeId, Op, Phase, PrecisionPolicy, ProcessGroup,
    Program, Ranks, Recompute, Tag, Target,
};
use deepwell_plan::{Bound, dryrun, quantized_bytes, quantized_flop_share};
use deepwell_probe::Hardware;

use common::{OVERHEAD_BYTES, SCRATCH_BYTES, planned};

/// Calls of forward and backward.
fn model_calls(program: &Program) -> impl Iterator<Item = &Call> {
    let phases = [Phase::Forward, Phase::Backward];
    program.calls.iter().filter(move |call| phases.contains(&call.phase))
}

/// GEMMs of one step by the usual count, on paper: forward, and twice that in the backward;
/// attention has two GEMMs in its forward and five in its backward, of which a causal mask leaves
/// half.
fn gemm_flops_by_formula(config: &LlamaConfig, tokens: u64, seq: u64) -> u64 {
    let (hidden, ffn) = (config.hidden_size as u64, config.intermediate_size as u64);
    let (q, kv) = (
        (config.num_heads * config.head_dim) as u64,
        (config.num_kv_heads * config.head_dim) as u64,
    );
    let linear = 2 * q * hidden + 2 * kv * hidden + 3 * ffn * hidden;
    let head = config.vocab_size as u64 * hidden;
    let attention_per_gemm = q * seq;
    let layers = config.num_layers as u64;
    6 * tokens * (layers * linear + head) + tokens * layers * 7 * attention_per_gemm
}

#[test]
fn flops_of_the_parity_model() {
    let planned = planned("parity-3m", PrecisionPolicy::bf16(), 128, 8, 8, Recompute::None);
    let config = LlamaConfig::preset("parity-3m").unwrap();
    let is_gemm = |call: &&Call| {
        let name = call.op.name();
        name.starts_with("linear") || name.starts_with("attention")
    };
    let all: u64 = model_calls(&planned.program).map(|call| call.cost.flops).sum();
    let gemms: u64 =
        model_calls(&planned.program).filter(is_gemm).map(|call| call.cost.flops).sum();
    let by_formula = gemm_flops_by_formula(&config, 1024, 128);
    println!("gemms {gemms}, by formula {by_formula}, with element-wise ops {all}");
    // 6 FLOP per weight and token, and attention without the scores that its backward makes
    // again, are 19.3 GFLOP; the program counts those scores too.
    assert!((gemms as f64 / 19.3e9 - 1.0).abs() <= 0.01, "{gemms}");
    // The diagonal of the causal mask is the whole difference: S + 1 in place of S.
    assert!((gemms as f64 / by_formula as f64 - 1.0).abs() <= 1e-3, "{gemms} {by_formula}");
    assert!(all > gemms && all < gemms / 100 * 101, "{all} {gemms}");
}

#[test]
fn bytes_by_kind_add_up() {
    for (policy, weight_bytes) in [(PrecisionPolicy::f32(), 0), (PrecisionPolicy::bf16(), 2)] {
        let planned = planned("parity-3m", policy, 128, 8, 8, Recompute::None);
        let (program, rank) = (&planned.program, &planned.prediction.ranks[0]);
        let parameters = LlamaConfig::preset("parity-3m").unwrap().parameter_count();
        let bytes = |kind: MemoryKind| rank.bytes_at_peak[kind.name()];
        // Master and two moments; learning rate and norm limit, two counters.
        assert_eq!(bytes(MemoryKind::Optimizer), 12 * parameters + 8 + 16);
        assert_eq!(bytes(MemoryKind::Gradients), 4 * parameters);
        assert_eq!(bytes(MemoryKind::Weights), weight_bytes * parameters);
        // Tokens, targets, loss scale, loss, norm.
        assert_eq!(bytes(MemoryKind::Host), 2 * 4 * 1024 + 3 * 4);
        assert_eq!(rank.bytes_at_peak["backend"], OVERHEAD_BYTES as u64);
        assert!([0, SCRATCH_BYTES as u64].contains(&bytes(MemoryKind::Workspace)));
        assert_eq!(rank.arena_bytes + OVERHEAD_BYTES as u64, rank.peak_bytes);

        // The sum leaves out only the gaps that alignment makes: less than 64 bytes per value.
        let sum: u64 = rank.bytes_at_peak.values().sum();
        let gaps = 64 * program.values.len() as u64;
        let least = rank.arena_lower_bound_bytes + OVERHEAD_BYTES as u64;
        assert!(sum <= least && least <= sum + gaps, "{sum} {least}");
        assert!(least <= rank.peak_bytes);
        assert_eq!(rank.bytes, program.calls.iter().map(|call| call.cost.bytes()).sum::<u64>());
        assert_eq!(rank.flops, rank.ops.iter().map(|op| op.flops).sum::<u64>());
        assert_eq!(rank.bytes, rank.ops.iter().map(|op| op.bytes).sum::<u64>());
        let calls: usize = rank.ops.iter().map(|op| op.calls).sum();
        assert_eq!(calls, program.calls.len());
    }
}

#[test]
fn arena_is_close_to_its_lower_bound() {
    let policies = [PrecisionPolicy::f32(), PrecisionPolicy::bf16(), PrecisionPolicy::mxfp8()];
    for (preset, seq, batch) in [("llama-micro", 33, 6), ("parity-3m", 128, 8)] {
        for policy in &policies {
            for rule in [Recompute::None, Recompute::Selective, Recompute::Full] {
                for micro_batch in [batch, batch / 2] {
                    let planned = planned(preset, policy.clone(), seq, batch, micro_batch, rule);
                    let arena = &planned.program.arena;
                    let bound = arena.transient_lower_bound_bytes;
                    let ratio = arena.transient_bytes() as f64 / bound as f64;
                    println!(
                        "{preset} {} recompute {rule} micro-batch {micro_batch}: {} of {bound} \
                         bytes, {ratio:.4}",
                        policy.format(),
                        arena.transient_bytes()
                    );
                    // Of the transient part alone; the persistent part has no waste to dilute it.
                    assert!((1.0..=1.10).contains(&ratio), "{ratio}");
                }
            }
        }
    }
}

#[test]
fn most_of_the_linear_flops_run_in_mxfp8() {
    for (preset, seq, batch) in [("parity-3m", 128, 8), ("llama-134m", 128, 1)] {
        let share = |policy, rule| {
            quantized_flop_share(&planned(preset, policy, seq, batch, batch, rule).program)
        };
        let (blocks, all) = share(PrecisionPolicy::mxfp8(), Recompute::None);
        println!("{preset}: {blocks:.4} of the blocks, {all:.4} with the head");
        assert!((0.90..1.0).contains(&blocks), "{preset}: {blocks}");
        assert!(all < blocks, "{preset}: {all}");
        assert_eq!(share(PrecisionPolicy::mxfp8(), Recompute::Full), (blocks, all), "{preset}");
        assert_eq!(share(PrecisionPolicy::bf16(), Recompute::None), (0.0, 0.0), "{preset}");
    }
}

#[test]
fn quantized_share_is_that_of_the_tensors_by_size() {
    // Every weight is used once per token, so FLOPs are in the ratio of sizes. The first and the
    // last linear tensor stay in BF16: one query projection and one down projection.
    let config = LlamaConfig::preset("parity-3m").unwrap();
    let planned = planned("parity-3m", PrecisionPolicy::mxfp8(), 128, 8, 8, Recompute::None);
    let is_linear = |name: &str| name.ends_with("_proj.weight");
    let sizes: u64 = config
        .parameters()
        .iter()
        .filter(|spec| is_linear(&spec.name))
        .map(|spec| spec.shape.iter().product::<usize>() as u64)
        .sum();
    let kept = (256 * 256 + 256 * 704) as u64;
    let expected = 1.0 - kept as f64 / sizes as f64;
    let (blocks, _) = quantized_flop_share(&planned.program);
    assert!((blocks - expected).abs() < 1e-12, "{blocks} {expected}");
}

#[test]
fn quantized_bytes_are_data_and_scales_of_every_operand() {
    let planned = planned("parity-3m", PrecisionPolicy::mxfp8(), 128, 8, 8, Recompute::None);
    let program = &planned.program;
    // 33 bytes per 32 elements and operand, and the counters; all sizes here are multiples of 128,
    // or their scales are padded to as many.
    let mut expected = 0;
    for call in &program.calls {
        let Op::Quantize(op) = &call.op else { continue };
        let operands = if op.axis == deepwell_ir::ops::Axis::Both { 2 } else { 1 };
        let [rows, columns] = program.value(call.operands[0].value).shape[..] else { panic!() };
        let padded = rows.next_multiple_of(128) * columns.next_multiple_of(128);
        expected += operands * (rows * columns + padded / 32) + 6 * 8;
    }
    assert!(expected > 0);
    assert_eq!(quantized_bytes(program), expected as u64);
}

#[test]
fn micro_batches_share_work_and_memory() {
    let whole = planned("parity-3m", PrecisionPolicy::bf16(), 128, 8, 8, Recompute::None);
    let halves = planned("parity-3m", PrecisionPolicy::bf16(), 128, 8, 4, Recompute::None);
    let flops = |program: &Program, runs: u64| {
        runs * model_calls(program).map(|call| call.cost.flops).sum::<u64>()
    };
    assert_eq!(flops(&whole.program, 1), flops(&halves.program, 2));
    let runs = |program: &Program| program.runs_per_step();
    assert_eq!((runs(&whole.program), runs(&halves.program)), (vec![1; 4], vec![2, 2, 1, 1]));
    assert_eq!(whole.program.calls.len(), halves.program.calls.len());
    let (whole, halves) = (&whole.program.arena, &halves.program.arena);
    assert!(halves.transient_bytes() < whole.transient_bytes() * 6 / 10);
}

#[test]
fn accumulators_are_overwritten_first_and_added_to_after() {
    let planned = planned("llama-micro", PrecisionPolicy::bf16(), 32, 4, 2, Recompute::None);
    let program = &planned.program;
    for state in &program.parameters {
        let gradient = state.gradient.unwrap();
        let writes: Vec<Accumulate> = model_calls(program)
            .filter(|call| call.outputs().iter().any(|operand| operand.value == gradient))
            .map(|call| call.accumulate)
            .collect();
        assert_eq!(writes, [Accumulate::AfterFirst], "`{}`", state.name);
    }
}

/// A call of no operands that costs this much.
fn costing(name: &str, op: impl Into<Op>, cost: Cost) -> Call {
    Call {
        name: name.to_string(),
        op: op.into(),
        choice: KernelChoice { kernel: name.to_string(), tile: None, workspace_bytes: 0 },
        operands: Vec::new(),
        input_count: 0,
        accumulate: Accumulate::Never,
        last_only: false,
        alone_only: false,
        accumulator_bytes: 0,
        workspace: ByteRange::default(),
        phase: Phase::Backward,
        tag: Tag::Mlp,
        layer: None,
        source: NodeId(0),
        recomputes: false,
        unit: MathUnit::Bf16,
        peak_share: 1.0,
        cost,
        stream: 0,
        waits: Vec::new(),
        records: None,
        rejected: Vec::new(),
    }
}

/// Rank `rank` of two: GEMMs of 2 ms, all-reduce of what is made by the first of them, and 1 ms of
/// memory behind both, in a micro-batch; on an H200 of 4.8 TB/s, 989.4 TFLOP/s and NVLink of
/// 478.116 GB/s each way.
fn rank_of_two(rank: u32, target: Target, exchange_stream: u32) -> Program {
    let ranks = Ranks {
        rank,
        world_size: 2,
        groups: vec![ProcessGroup { name: "data".to_string(), ranks: vec![0, 1] }],
    };
    let kind = CollectiveKind::AllReduce { reduction: Reduction::Sum };
    let exchange = Collective::new(kind, GroupId(0), 2);
    let gemm = Cost { flops: 1_000_000_000_000, ..Cost::default() };
    // The memory would take less than a millisecond.
    let bytes = 3_000_000_000;
    let on_link = Cost { bytes_on_link: bytes / 2, bytes_read: bytes, ..Cost::default() };
    let mut calls = vec![
        costing("first", Add {}, gemm),
        costing("exchange", exchange, on_link),
        costing("second", Add {}, gemm),
        costing("last", Add {}, Cost { bytes_read: 4_800_000_000, ..Cost::default() }),
    ];
    if exchange_stream > 0 {
        calls[0].records = Some(0);
        (calls[1].stream, calls[1].waits, calls[1].records) = (exchange_stream, vec![0], Some(1));
        calls[3].waits = vec![1];
    }
    Program {
        name: "by hand".to_string(),
        mode: Mode::Train,
        rank,
        target: target.as_rank(ranks),
        batch: 1,
        seq: 1,
        micro_batches: 1,
        slots: 1,
        bodies: vec![Body { phase: Phase::Backward, chunk: 0, calls: 0..4 }],
        schedule: vec![Invocation { body: BodyId(0), micro_batch: 0, slot: 0 }],
        values: Vec::new(),
        calls,
        arena: Arena::default(),
        host: HostInterface::default(),
        parameters: Vec::new(),
        precision: Vec::new(),
        shards: Vec::new(),
        unstored: Vec::new(),
        handover: None,
        fixed_overhead_bytes: 0,
    }
}

#[test]
fn exchanges_take_the_time_of_their_link_and_streams_run_beside_each_other() {
    let near = |got: f64, expected: f64| (got / expected - 1.0).abs() < 1e-3;
    let hardware = Hardware::preset("h200-x2").unwrap();
    let on_gpu = |rank: u32| {
        let arch = "hopper-sm90".to_string();
        Target { arch, gpu: Some(rank as usize), ..Target::cpu(132, Vec::new()) }
    };
    let (gemm_s, link_s, memory_s): (f64, f64, f64) = (1e12 / 989.4e12, 1.5e9 / 478.116e9, 1e-3);
    assert!(link_s > gemm_s);
    for (stream, expected_s) in
        [(0, 2.0 * gemm_s + link_s + memory_s), (1, gemm_s + link_s.max(gemm_s) + memory_s)]
    {
        let programs = [0, 1].map(|rank| rank_of_two(rank, on_gpu(rank), stream));
        let predicted = dryrun(&programs, &hardware);
        for rank in &predicted.ranks {
            assert!(near(rank.time_s, expected_s), "{} is not {expected_s}", rank.time_s);
            let exchange = rank.ops.iter().find(|op| op.kernel == "exchange").unwrap();
            assert!(near(exchange.time_s, link_s), "{} is not {link_s}", exchange.time_s);
            assert_eq!(exchange.bound, Bound::Link);
        }
        assert_eq!(predicted.time_s, predicted.ranks[0].time_s.max(predicted.ranks[1].time_s));
        let text = predicted.to_string();
        assert!(text.lines().any(|line| line.contains("all_reduce") && line.ends_with("link")));
    }
    // Alone, it takes the widest link that its GPU has.
    let alone = dryrun(&[rank_of_two(0, on_gpu(0), 0)], &hardware);
    assert!(near(alone.time_s, 2.0 * gemm_s + link_s + memory_s), "{}", alone.time_s);
    // Without a link between GPUs there is PCI Express 5, 63.015 GB/s.
    let apart = Hardware { links: Vec::new(), ..hardware.clone() };
    let programs = [0, 1].map(|rank| rank_of_two(rank, on_gpu(rank), 0));
    let exchange_s = dryrun(&programs, &apart).ranks[0].ops[0].time_s;
    assert!(near(exchange_s, 1.5e9 / 63.015e9), "{exchange_s}");
    // Ranks of a processor meet in its memory, which the operands pass anyway.
    let cpu = common::hardware();
    let programs = [0, 1].map(|rank| rank_of_two(rank, common::target(), 0));
    let report = &dryrun(&programs, &cpu).ranks[0];
    let exchange = report.ops.iter().find(|op| op.kernel == "exchange").unwrap();
    assert_eq!(exchange.bound, Bound::Memory);
}
