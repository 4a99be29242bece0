//! `deepwell replan`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use deepwell_plan::ModelShape;
use deepwell_plan::search::{
    ClusterPlan, Machines, Moves, Pin, SearchRequest, replan, search_watched,
};
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::hardware::{cluster_of, measurements_of};
use crate::output::{print, print_json};
use crate::watch::Watch;

const AFTER_HELP: &str = "\
A cluster that shrinks, or grows, needs another plan: this one searches for it with the model, the
batch and the precision of the old plan, and says which degrees change, how much slower a step gets,
and which states have to go from one GPU to another. Ranks keep their number: the GPUs that stay are
taken to be the first.

Examples:
  deepwell plan llama-3-70b --hardware h100:nodes=32 --json > plan.json
  deepwell replan plan.json --hardware h100:nodes=31
  deepwell replan plan.json --hardware h100:nodes=16 --pin tp=8

Exit codes: 0 planned, 1 no plan, as nothing fits into memory, 2 an input cannot be used";

/// Plan again for a smaller or larger cluster, and say what moves
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ReplanArgs {
    /// What `deepwell plan --hardware CLUSTER --json` wrote
    plan: PathBuf,
    /// The other cluster, as `deepwell plan` takes it
    #[arg(long, value_name = "CLUSTER")]
    hardware: String,
    /// Hold a dimension at a value, or keep it from one, as in `deepwell plan`
    #[arg(long, value_name = "PIN")]
    pin: Vec<Pin>,
    /// Do without a dimension, or without a value of it
    #[arg(long, value_name = "DIMENSION", value_parser = Pin::forbid)]
    forbid: Vec<Pin>,
    /// Take only plans within the trainer's rules; `deepwell plan` also lowers their programs
    #[arg(long)]
    runnable: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A file of `deepwell plan --json`, as far as it is read.
#[derive(Debug, Deserialize)]
struct PlanFile {
    plan: ClusterPlan,
}

#[derive(Debug, Serialize)]
struct Replanned {
    plan: ClusterPlan,
    moves: Moves,
}

pub(crate) fn run(args: &ReplanArgs) -> Result<Outcome> {
    let place = args.plan.display().to_string();
    let text =
        std::fs::read_to_string(&args.plan).with_context(|| format!("cannot read `{place}`"))?;
    let file: PlanFile = serde_json::from_str(&text).with_context(|| {
        format!(
            "expected a plan for a cluster in `{place}`\n\
             hint: `deepwell plan MODEL --hardware CLUSTER --json` writes one"
        )
    })?;
    let now = file.plan;
    let Some(cluster) = cluster_of(&args.hardware)? else {
        bail!("--hardware: expected machines with GPUs, got `{}`", args.hardware);
    };
    let mut machines = Machines::of_cluster(&cluster)?;
    if let Some(measured) = measurements_of(&args.hardware)? {
        machines = machines.measured(&measured);
    }
    machines.price_per_gpu_hour = machines.price_per_gpu_hour.or(now.machines.price_per_gpu_hour);
    // A layout is one of the stages that there were.
    let model = ModelShape { chunk_layers: Vec::new(), ..now.model.clone() };
    let request = SearchRequest {
        pins: args.pin.iter().chain(&args.forbid).copied().collect(),
        fp8: now.fp8,
        expert_imbalance: now.expert_imbalance,
        capacity_factor: now.capacity_factor,
        runnable_only: args.runnable,
        ..SearchRequest::new(model, now.seq, now.global_batch, machines)
    };
    let watch = Watch::start();
    let found = search_watched(&request, &mut |considered| watch.searched(considered))?;
    watch.found(&found);
    watch.end();
    let tokens = now.run.map(|run| run.tokens);
    let plan = ClusterPlan::new(&request, &found, tokens)?;
    let moves = replan(&now, &plan);
    if args.json {
        print_json(&Replanned { plan, moves })?;
    } else {
        print(&format_args!("{plan}{moves}"))?;
    }
    Ok(Outcome::Success)
}
