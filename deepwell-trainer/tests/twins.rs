//! Plans of large models, trained by a small twin: the model's structure and the plan's degrees,
//! with layers and widths divided, on ranks that are threads. The losses are those of one rank.
//!
//! The degrees are those that `deepwell plan` named on 2026-12-01, by the command in each row. With
//! more than 32 ranks the pipeline of a twin has fewer stages, which the row says.

use std::time::Duration;

use deepwell_ir::capture::{LatentConfig, LlamaConfig, capture};
use deepwell_ir::ops::MomentFormat;
use deepwell_ir::{Graph, Recompute};
use deepwell_plan::OptimizerSpec;
use deepwell_precision::PrecisionPolicy;
use deepwell_probe::{Cpu, Hardware};
use deepwell_trainer::{CompileOptions, Parallel, World};

const SEQ: usize = 32;
const STEPS: usize = 3;

fn hardware() -> Hardware {
    Hardware::cpu_only(Cpu::described("two cores", 2, 2_600_000_000, &["avx2", "fma"], 8 << 30))
}

/// A plan of a large model.
struct Row {
    /// The request: `deepwell plan` with these arguments.
    request: &'static str,
    parallel: Parallel,
    /// Layers of each stage of the twin; `None` for one in each chunk.
    stage_layers: Option<Vec<usize>>,
    recompute: Recompute,
    optimizer: OptimizerSpec,
    /// Sequences per step of a data-parallel rank, each a micro-batch.
    micro_batches: usize,
}

impl Row {
    fn new(request: &'static str, parallel: Parallel, recompute: Recompute) -> Row {
        let optimizer = OptimizerSpec::default();
        Row { request, parallel, stage_layers: None, recompute, optimizer, micro_batches: 2 }
    }

    fn layers(&self) -> usize {
        let of_stages = self.stage_layers.as_ref().map(|layers| layers.iter().sum());
        of_stages.unwrap_or(self.parallel.pipeline * self.parallel.chunks)
    }

    /// The structure of the model with few layers, narrow matrices and few experts.
    fn twin(&self) -> Graph {
        let model = self.request.split(' ').next().expect("a model");
        let model = if model == "llama-3.1-405b" { "llama-3-70b" } else { model };
        let large = LlamaConfig::preset(model).expect("a preset");
        let tensor = self.parallel.tensor;
        let experts = large.experts.clone().map(|mut experts| {
            experts.num_experts = experts.num_experts.min(16);
            experts.experts_per_token = experts.experts_per_token.min(2);
            experts.intermediate_size = 64;
            experts.dense_layers.truncate(1);
            experts.groups.iter_mut().for_each(|groups| (groups.count, groups.chosen) = (4, 2));
            experts
        });
        let latent = large.latent.clone().map(|latent| LatentConfig {
            q_rank: Some(32),
            kv_rank: 32,
            plain_dim: 32,
            value_dim: 48,
            ..latent
        });
        let is_latent = latent.is_some();
        let config = LlamaConfig {
            vocab_size: 256,
            hidden_size: 128,
            intermediate_size: 128 * tensor,
            num_layers: self.layers(),
            num_heads: 2 * tensor,
            num_kv_heads: if is_latent { 2 * tensor } else { tensor },
            head_dim: 32,
            experts,
            latent,
            padding_row: None,
            ..large
        };
        capture(&config).expect("a graph")
    }

    /// Losses of steps on these ranks.
    fn losses(&self, graph: &Graph, precision: &str, parallel: Parallel) -> Vec<f32> {
        let rows = self.micro_batches * self.parallel.data / self.parallel.context;
        let policy = PrecisionPolicy::preset(precision).expect("a preset");
        let is_alone = parallel == Parallel::default();
        let options = CompileOptions {
            micro_batch: Some(1),
            recompute: Some(self.recompute),
            optimizer: self.optimizer.clone(),
            parallel,
            stage_layers: self.stage_layers.clone().filter(|_| !is_alone),
            rank_timeout: Duration::from_secs(300),
            ..CompileOptions::new(policy, SEQ, rows)
        };
        let tokens = |step: usize, shift: usize| -> Vec<i32> {
            let token = |at: usize| ((step * 31 + (at + shift) * (at + shift) * 7) % 251) as i32;
            (0..rows * SEQ).map(token).collect()
        };
        let mut world = World::compile(graph.clone(), hardware(), &options)
            .unwrap_or_else(|error| panic!("{}, {parallel}: {error}", self.request));
        let of_ranks = world.on_all(|engine| {
            engine.initialize(7)?;
            let mut step = |step| engine.step(&tokens(step, 0), &tokens(step, 1), 1e-3, 1.0);
            (0..STEPS).map(|at| Ok(step(at)?.loss)).collect::<Result<Vec<f32>, _>>()
        });
        let of_ranks = of_ranks.expect("steps");
        assert!(of_ranks.iter().all(|losses| losses == &of_ranks[0]), "{of_ranks:?}");
        of_ranks[0].clone()
    }
}

/// Largest distance of losses from those of one rank, relative.
///
/// In FP32 ranks add the same numbers in another order: 2^-24 for each of some hundred roundings of
/// random sign, and AdamW divides differences of small gradients by small roots. In MXFP8 slices of
/// a tensor are quantized and sums of ranks rounded to BF16: the limit of `gradients::MXFP8`.
fn tolerance(precision: &str) -> f32 {
    if precision == "f32" { 2e-5 } else { 5e-3 }
}

fn check(row: &Row) {
    let graph = row.twin();
    // Ranks that split a sequence or a layer add in another order; in FP32 this is all.
    let splits = row.parallel.tensor > 1 || row.parallel.context > 1;
    let precisions: &[&str] = if splits { &["f32", "mxfp8"] } else { &["mxfp8"] };
    for &precision in precisions {
        let alone = row.losses(&graph, precision, Parallel::default());
        let of_ranks = row.losses(&graph, precision, row.parallel);
        let learned = alone[0] != alone[STEPS - 1];
        assert!(learned, "{}: {alone:?}", row.request);
        for (alone, of_ranks) in alone.iter().zip(&of_ranks) {
            let distance = (alone - of_ranks).abs() / alone;
            let limit = tolerance(precision);
            let what = format!("`{}`, {}, {precision}", row.request, row.parallel);
            assert!(distance < limit, "{what}: {alone} alone, {of_ranks} on ranks");
        }
    }
}

fn on_host() -> OptimizerSpec {
    OptimizerSpec { on_host: true, moments: MomentFormat::Fp8, ..OptimizerSpec::default() }
}

#[test]
fn dense_models_train_by_their_plans() {
    let one = Parallel::default();
    for row in [
        Row {
            micro_batches: 4,
            optimizer: OptimizerSpec { moments: MomentFormat::Fp8, ..OptimizerSpec::default() },
            ..Row::new(
                "llama-3-70b --hardware h200:nodes=1 --moments fp8",
                Parallel { tensor: 4, pipeline: 2, ..one },
                Recompute::None,
            )
        },
        Row {
            micro_batches: 8,
            // Stages of the plan have 10, 11, 10 … 10 and 9 layers.
            stage_layers: Some(vec![1, 2, 1, 1, 1, 1, 1, 1]),
            optimizer: on_host(),
            ..Row::new(
                "llama-3-70b --hardware h200:nodes=1 --moments fp8 --optimizer-on-host",
                Parallel { pipeline: 8, ..one },
                Recompute::Selective,
            )
        },
        Row::new(
            "llama-3-70b --hardware h200:nodes=1 --batch 64 --moments fp8 --recompute full",
            Parallel { data: 8, zero: 3, ..one },
            Recompute::Full,
        ),
        Row {
            micro_batches: 4,
            // Four of 16 stages.
            stage_layers: Some(vec![1, 2, 2, 1]),
            ..Row::new(
                "llama-3.1-405b --hardware h100:nodes=16",
                Parallel { tensor: 8, pipeline: 4, ..one },
                Recompute::Selective,
            )
        },
    ] {
        check(&row);
    }
}

#[test]
fn mixtures_train_by_their_plans() {
    let one = Parallel::default();
    for row in [
        Row::new(
            "qwen3-30b-a3b --hardware h200:nodes=1",
            Parallel { data: 8, zero: 3, ..one },
            Recompute::Full,
        ),
        Row {
            micro_batches: 8,
            ..Row::new(
                "mixtral-8x7b --hardware h100:nodes=1 --moments fp8",
                Parallel { pipeline: 8, chunks: 3, ..one },
                Recompute::Full,
            )
        },
        Row {
            // Four of 32 stages.
            micro_batches: 4,
            ..Row::new(
                "deepseek-v3 --hardware h100:nodes=32",
                Parallel { data: 8, context: 2, expert: 8, zero: 1, pipeline: 4, ..one },
                Recompute::Full,
            )
        },
    ] {
        check(&row);
    }
}
