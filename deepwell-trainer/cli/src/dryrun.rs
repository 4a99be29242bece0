//! `deepwell dryrun`.

use std::fmt;

use anyhow::Result;
use clap::Args;
use deepwell_plan::{DryRun, format_bytes};
use deepwell_trainer::{Parallel, quantized_formats};
use serde::Serialize;

use crate::output::{print, print_json};
use crate::plan_cluster::{ClusterArgs, cluster_asked};
use crate::planning::{Planning, PlanningArgs};
use crate::{Outcome, plan_cluster};

const AFTER_HELP: &str = "\
Nothing runs and no device memory is allocated. Memory is the arena that training would allocate,
plus the backend's own allocations. Time is the sum of the roofline times of all calls, each the
larger of FLOPs over peak and bytes over bandwidth: a lower bound that real runs do not reach.

With --hardware that has GPUs and without --device, predicts a step of the whole cluster, with the
plan that `deepwell plan` finds or that --pin fixes. One rank of each pipeline stage is simulated.
Prints bubbles, exposed communication, tokens/s, MFU, memory over time, and hours and cost of a run.

Examples:
  deepwell dryrun parity-3m
  deepwell dryrun llama-134m --seq 512 --batch 16 --precision bf16
  deepwell dryrun parity-3m --hardware machine.json --json
  deepwell dryrun llama-134m --devices cpu:4            memory and time of each of four ranks
  deepwell dryrun llama-134m --devices cpu:4 --pp 4     memory and time of each pipeline stage
  deepwell dryrun llama-3-70b --hardware h100:nodes=32 --pp 4 --tp 8 --trace step.json --tokens 1T

Exit codes: 0 predicted, 1 no plan fits (with --runnable: none that the trainer runs), 2 an input
cannot be used";

/// Predict memory and time of a training step without running it
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct DryrunCommand {
    #[command(flatten)]
    planning: PlanningArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub(crate) fn run(args: &DryrunCommand) -> Result<Outcome> {
    if let Some(cluster) = cluster_asked(&args.planning)? {
        plan_cluster::run(&args.planning, &args.cluster, &cluster, false, args.json)?;
        return Ok(Outcome::Success);
    }
    args.cluster.refuse_without_cluster()?;
    let Planning { planned } = args.planning.plan()?;
    let prediction = planned.prediction;
    let parallel = planned.plan.parallel;
    let in_bf16 = planned.in_bf16;
    let (blocks, all) = planned.linear_flops.quantized_share();
    let predicted = Predicted {
        quantized_to: quantized_formats(&planned.program.precision),
        micro_batch: planned.plan.micro_batch,
        micro_batches: planned.plan.micro_batches,
        parallel,
        recompute: planned.plan.recompute.to_string(),
        prediction,
        quantized_flop_share: FlopShare { blocks, all },
        in_bf16: in_bf16.map(|run| InBf16 { time_s: run.time_s, peak_bytes: run.peak_bytes() }),
    };
    if args.json {
        print_json(&predicted)?
    } else {
        print(&predicted)?
    }
    Ok(Outcome::Success)
}

/// A prediction with the context needed to read it.
#[derive(Debug, Serialize)]
struct Predicted {
    /// Quantized formats, joined by `+`; null where nothing is quantized.
    quantized_to: Option<String>,
    micro_batch: usize,
    micro_batches: usize,
    #[serde(skip_serializing_if = "Parallel::is_single")]
    parallel: Parallel,
    recompute: String,
    #[serde(flatten)]
    prediction: DryRun,
    quantized_flop_share: FlopShare,
    in_bf16: Option<InBf16>,
}

/// Share of the FLOPs of linear layers whose operands are quantized, 0 to 1.
#[derive(Debug, Serialize)]
struct FlopShare {
    /// Of the layers in the transformer blocks.
    blocks: f64,
    /// Of the layers in the blocks and the output head.
    all: f64,
}

/// Prediction of the same run in BF16.
#[derive(Debug, Serialize)]
struct InBf16 {
    time_s: f64,
    peak_bytes: u64,
}

impl fmt::Display for Predicted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.micro_batches == 1 { "" } else { "es" };
        if !self.parallel.is_single() {
            write!(f, "{} ranks ({}) with each ", self.parallel.world_size(), self.parallel)?;
        }
        writeln!(
            f,
            "{} micro-batch{plural} of {}, recompute {}",
            self.micro_batches, self.micro_batch, self.recompute
        )?;
        write!(f, "{}", self.prediction)?;
        writeln!(
            f,
            "{} share of linear FLOPs: {:.1} % in the blocks, {:.1} % with the head",
            self.quantized_to.as_ref().map_or("quantized".to_string(), |to| to.to_uppercase()),
            self.quantized_flop_share.blocks * 100.0,
            self.quantized_flop_share.all * 100.0
        )?;
        if let Some(in_bf16) = &self.in_bf16 {
            writeln!(
                f,
                "the same plan in BF16: at least {:.3} ms, peak {}",
                in_bf16.time_s * 1e3,
                format_bytes(in_bf16.peak_bytes)
            )?;
        }
        Ok(())
    }
}
