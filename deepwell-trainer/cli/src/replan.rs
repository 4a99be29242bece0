//! `deepwell replan`.

use std::path::PathBuf;

use crate::degrees::Degrees;
use anyhow::{Context, Result, bail};
use clap::Args;
use deepwell_plan::search::{ClusterPlan, Machines, Moves, Pin, SearchAids, SearchRequest, replan};
use deepwell_plan::{DryRun, ModelShape, Plan};
use deepwell_trainer::Settings;
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::hardware::{cluster_of, measurements_of};
use crate::lowered::{self, Source};
use crate::nearest;
use crate::optimizer_args::OptimizerArgs;
use crate::output::{print, print_json};
use crate::plan_cluster::by_trainer;
use crate::planning::PlanningArgs;
use crate::watch::Watch;

const AFTER_HELP: &str = "\
Plans for a cluster that has lost or gained GPUs, with the model, batch and precision of the old
plan. Prints which degrees change, how the step time changes, and which states must move between
GPUs. GPUs of the smaller cluster are taken to be the first of the larger one, so ranks keep their
numbers. As with `deepwell plan`, the best plan that the trainer runs is lowered; each tensor keeps
its precision from the old plan.

Examples:
  deepwell plan llama-3-70b --hardware h100:nodes=32 --json > plan.json
  deepwell replan plan.json --hardware h100:nodes=31
  deepwell replan plan.json --hardware h100:nodes=16 --runnable --json > smaller.json
  deepwell train --plan smaller.json --resume          resume with the new plan
  deepwell replan plan.json --hardware h100:nodes=16 --pin tp=8

Exit codes: 0 planned, 1 no plan fits (with --runnable: none that the trainer runs), 2 an input
cannot be used";

/// Plan again for a smaller or larger cluster, and list the states that move
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ReplanArgs {
    /// Output of `deepwell plan --hardware CLUSTER --json`
    plan: PathBuf,
    /// New cluster, in the forms of `deepwell plan`
    #[arg(long, value_name = "CLUSTER")]
    hardware: String,
    /// Fix a dimension at a value (tp=4) or exclude a value (tp!=4), as in `deepwell plan`
    #[arg(long, value_name = "PIN")]
    pin: Vec<Pin>,
    /// Exclude a dimension (cp) or one of its values (tp=8)
    #[arg(long, value_name = "DIMENSION", value_parser = Pin::forbid)]
    forbid: Vec<Pin>,
    /// Accept only plans that the trainer runs: their programs are lowered and fit
    #[arg(long)]
    runnable: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The fields read from a file of `deepwell plan --json`.
#[derive(Debug, Deserialize)]
struct PlanFile {
    /// Name given on the command line.
    model: String,
    plan: ClusterPlan,
    /// The plan of each rank; `None` for a plan unsupported by the trainer.
    #[serde(default)]
    program: Option<Plan>,
}

/// JSON output, accepted by `deepwell train --plan`.
#[derive(Debug, Serialize)]
struct Replanned {
    model: String,
    plan: ClusterPlan,
    /// The plan of each rank; `None` for a plan unsupported by the trainer.
    program: Option<Plan>,
    /// Prediction of the programs of all classes of ranks, by roofline.
    lowered: Option<DryRun>,
    moves: Moves,
}

impl PlanFile {
    /// The options of `deepwell plan` for the same model, batch and precision.
    fn planning(&self) -> PlanningArgs {
        let plan = &self.plan;
        let policy = self.program.as_ref().map(|program| program.policy.clone());
        let precision = match (plan.nvfp4, plan.fp8) {
            (true, _) => "nvfp4",
            (false, true) => Settings::AUTO,
            (false, false) => "bf16",
        };
        PlanningArgs {
            model: self.model.clone(),
            seq: Some(plan.seq),
            batch: Some(plan.global_batch),
            precision: precision.to_string(),
            given_policy: policy,
            policy: None,
            allow_fallback: false,
            fallback: None,
            micro_batch: None,
            recompute: None,
            saved_activations: None,
            optimizer: OptimizerArgs { moments: Some(plan.moments), ..OptimizerArgs::default() },
            capacity_factor: plan.capacity_factor,
            memory_limit: None,
            hardware: None,
            device: None,
            devices: None,
            degrees: Degrees::default(),
        }
    }
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
    let planning = file.planning();
    let now = file.plan;
    let Some(cluster) = cluster_of(&args.hardware)? else {
        bail!("--hardware: expected machines with GPUs, got `{}`", args.hardware);
    };
    let mut machines = Machines::of_cluster(&cluster)?;
    if let Some(measured) = measurements_of(&args.hardware)? {
        machines = machines.measured(&measured);
    }
    machines.price_per_gpu_hour = machines.price_per_gpu_hour.or(now.machines.price_per_gpu_hour);
    // A layout belongs to the old number of stages.
    let model = ModelShape { chunk_layers: Vec::new(), ..now.model.clone() };
    let mut request = SearchRequest {
        pins: args.pin.iter().chain(&args.forbid).copied().collect(),
        fp8: now.fp8,
        nvfp4: now.nvfp4,
        expert_imbalance: now.expert_imbalance,
        capacity_factor: now.capacity_factor,
        moments: now.moments,
        by_trainer: by_trainer(args.runnable),
        ..SearchRequest::new(model, now.seq, now.global_batch, machines)
    };
    let watch = Watch::start();
    let node = &cluster.nodes[0].hardware;
    let source = Source::of_search(&planning, &mut request, node)?;
    let programs = source.as_ref().ok().map(Source::programs);
    let progress = |progress| watch.searched(progress);
    let programs = programs.as_ref();
    let aids = SearchAids { programs, progress: Some(&progress), best_alone: true };
    let best = lowered::best(&request, source.as_ref().ok(), &aids);
    let (found, lowered) = best.map_err(|error| nearest::named(error, &request, &aids))?;
    watch.found(&found);
    watch.end();
    let tokens = now.run.map(|run| run.tokens);
    let mut plan = ClusterPlan::new(&request, &found, tokens)?;
    plan.warnings.extend(lowered.refused.clone());
    plan.not_run_yet = plan.not_run_yet.or(lowered.not_run_yet.clone());
    plan.is_lowered = lowered.planned.is_some();
    let searched = lowered::take_programs(&mut plan, &lowered, &request, programs);
    let moves = replan(&now, &plan);
    if args.json {
        let model = planning.model;
        let (program, lowered) = match lowered.planned {
            Some(planned) => (Some(planned.plan), Some(planned.prediction)),
            None => (None, None),
        };
        print_json(&Replanned { model, plan, program, lowered, moves })?;
        return Ok(Outcome::Success);
    }
    let mut text = format!("{plan}{moves}");
    if let Some(planned) = &lowered.planned {
        text += &format!("\neach rank runs the {}", planned.plan);
        text += &lowered::page(&planned.prediction, &searched, &plan);
    }
    print(&text)?;
    Ok(Outcome::Success)
}
