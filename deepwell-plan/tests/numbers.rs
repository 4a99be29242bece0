//! Numbers of the prediction against numbers worked out by other means.

mod common;

use deepwell_ir::capture::LlamaConfig;
use deepwell_ir::{Accumulate, Call, MemoryKind, Op, Phase, PrecisionPolicy, Program, Recompute};
use deepwell_plan::{quantized_bytes, quantized_flop_share};

use common::{OVERHEAD_BYTES, SCRATCH_BYTES, planned};

/// Calls of forward and backward.
fn model_calls(program: &Program) -> impl Iterator<Item = &Call> {
    let phases = [Phase::Forward, Phase::Backward];
    program.calls.iter().filter(move |call| phases.contains(&call.phase))
}

/// Products of matrices of one step by the usual count, on paper: forward, and twice that in the
/// backward; attention has two products in its forward and five in its backward, of which a
/// causal mask leaves half.
fn products_by_formula(config: &LlamaConfig, tokens: u64, seq: u64) -> u64 {
    let (hidden, ffn) = (config.hidden_size as u64, config.intermediate_size as u64);
    let (q, kv) = (
        (config.num_heads * config.head_dim) as u64,
        (config.num_kv_heads * config.head_dim) as u64,
    );
    let linear = 2 * q * hidden + 2 * kv * hidden + 3 * ffn * hidden;
    let head = config.vocab_size as u64 * hidden;
    let attention_per_product = q * seq;
    let layers = config.num_layers as u64;
    6 * tokens * (layers * linear + head) + tokens * layers * 7 * attention_per_product
}

#[test]
fn flops_of_the_parity_model() {
    let planned = planned("parity-3m", PrecisionPolicy::bf16(), 128, 8, 8, Recompute::None);
    let config = LlamaConfig::preset("parity-3m").unwrap();
    let is_product = |call: &&Call| {
        let name = call.op.name();
        name.starts_with("linear") || name.starts_with("attention")
    };
    let all: u64 = model_calls(&planned.program).map(|call| call.cost.flops).sum();
    let products: u64 =
        model_calls(&planned.program).filter(is_product).map(|call| call.cost.flops).sum();
    let by_formula = products_by_formula(&config, 1024, 128);
    println!("products {products}, by formula {by_formula}, with element-wise ops {all}");
    // 6 FLOP per weight and token, and attention without the scores that its backward makes
    // again, are 19.3 GFLOP; the program counts those scores too.
    assert!((products as f64 / 19.3e9 - 1.0).abs() <= 0.01, "{products}");
    // The diagonal of the causal mask is the whole difference: S + 1 in place of S.
    assert!((products as f64 / by_formula as f64 - 1.0).abs() <= 1e-3, "{products} {by_formula}");
    assert!(all > products && all < products / 100 * 101, "{all} {products}");
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
fn quantized_bytes_are_codes_and_scales_of_every_copy() {
    let planned = planned("parity-3m", PrecisionPolicy::mxfp8(), 128, 8, 8, Recompute::None);
    let program = &planned.program;
    // 33 bytes per 32 elements and copy, and the counters; all sizes here are multiples of 128, or
    // their scales are padded to as many.
    let mut expected = 0;
    for call in &program.calls {
        let Op::Quantize(op) = &call.op else { continue };
        let copies = if op.axis == deepwell_ir::ops::Axis::Both { 2 } else { 1 };
        let [rows, columns] = program.value(call.operands[0].value).shape[..] else { panic!() };
        let padded = rows.next_multiple_of(128) * columns.next_multiple_of(128);
        expected += copies * (rows * columns + padded / 32) + 6 * 8;
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
