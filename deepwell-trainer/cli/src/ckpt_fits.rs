//! `deepwell ckpt fits`.

use std::fmt;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use deepwell_moe::RouterTraining;
use deepwell_plan::{PlanRequest, RankReport, autoplan_stages, format_bytes};
use deepwell_trainer::checkpoint::{Reads, reads};
use deepwell_trainer::plan_file::PlanFile;
use deepwell_trainer::{Device, ModelSource, TrainError, with_routers};
use serde::Serialize;

use crate::Outcome;
use crate::checkpoint_path::{Wanted, find};
use crate::hardware::hardware_and_target;
use crate::output::{note, print, print_json};

const AFTER_HELP: &str = "\
The plan is the output of `deepwell plan MODEL --json`, for other ranks, stages or GPUs than those
that saved the checkpoint. The program of each rank is lowered, and its state is looked up in the
manifest. No tensor is read, and no GPU is needed.

PATH is one checkpoint (`step-00000120`), a folder of checkpoints, or the output folder of a run. In
a folder the newest complete checkpoint is used.

Examples:
  deepwell plan llama-134m --devices cpu:4 --zero 1 --json > plan.json
  deepwell ckpt fits runs/a --plan plan.json
  deepwell ckpt fits runs/a --plan plan.json --hardware h200-x2 --json

Exit codes: 0 the checkpoint loads, 1 it does not load or the plan does not fit into memory, 2 an
input cannot be used";

/// Check whether a checkpoint loads under another plan, and what each rank reads
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct FitsArgs {
    /// Checkpoint, folder of checkpoints, or output folder of a run
    path: PathBuf,
    /// Plan file from `deepwell plan MODEL --json`
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// Check for another machine: output of `deepwell probe --json`, or a preset such as h200-x2
    /// [default: this machine]
    #[arg(long, value_name = "FILE")]
    hardware: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A checkpoint under a plan.
#[derive(Debug, Serialize)]
struct Fit {
    path: PathBuf,
    step: u64,
    model: String,
    fits: bool,
    /// An entry for each kind of rank.
    ranks: Vec<RankFit>,
}

/// Requirements of a rank to resume from a checkpoint.
#[derive(Debug, Serialize)]
struct RankFit {
    rank: u32,
    /// Ranks with the same requirements.
    alike: Vec<u32>,
    /// Peak device bytes of a step: the arena, allocated before anything is read, plus the
    /// backend's own allocations.
    peak_bytes: u64,
    #[serde(flatten)]
    reads: Reads,
}

pub(crate) fn run(args: &FitsArgs) -> Result<Outcome> {
    let path = find(&args.path, Wanted::NewestComplete)?;
    let checkpoint = deepwell_ckpt::load(&path)?;
    let file = PlanFile::read(&args.plan)?;
    let plan = &file.plan;
    let model = ModelSource::open(&file.model)?;
    let capacity_factor = plan.capacity_factor;
    let training = RouterTraining { capacity_factor, ..RouterTraining::default() };
    let graph = with_routers(&model.capture(Some(plan.seq))?, &training)?;
    file.check_model(&graph)?;
    let device: Device = plan.device.parse().map_err(|got| TrainError::Setting {
        setting: "plan",
        expected: "a device to train on".to_string(),
        got,
        hint: None,
    })?;
    let (hardware, mut target) = hardware_and_target(args.hardware.as_deref(), device)?;
    let parallel = plan.parallel;
    if parallel.world_size() > 1 {
        target = device.among_ranks(target);
    }
    let request = PlanRequest {
        seq: plan.seq,
        global_batch: plan.micro_batches * plan.micro_batch * parallel.batch_ranks(),
        policy: plan.policy.clone(),
        optimizer: plan.optimizer.clone(),
        memory_limit_bytes: None,
        micro_batch: Some(plan.micro_batch),
        recompute: Some(plan.recompute),
        saved_activations: plan.saved_activations,
    };
    let catalog = device.catalog();
    let layers = (!plan.stages.is_empty()).then_some(plan.stages.as_slice());
    let split = (parallel, layers);
    let planned = autoplan_stages(&graph, &hardware, &request, split, catalog.as_ref(), &target)?;
    let mut ranks = Vec::new();
    for RankReport { rank, alike, peak_bytes, .. } in &planned.prediction.ranks {
        let of_rank = planned.of_rank(*rank as usize, &graph, catalog.as_ref(), &target)?;
        let (rank, alike, peak_bytes) = (*rank, alike.clone(), *peak_bytes);
        ranks.push(RankFit {
            rank,
            alike,
            peak_bytes,
            reads: reads(&checkpoint, &of_rank.program, parallel),
        });
    }
    let fits = ranks.iter().all(|rank| rank.reads.misfits.is_empty());
    let fit = Fit { path, step: checkpoint.step(), model: file.model, fits, ranks };
    if args.json {
        print_json(&fit)?
    } else {
        print(&fit)?
    }
    if fit.fits {
        return Ok(Outcome::Success);
    }
    note(format_args!("checkpoint `{}` does not load under this plan", fit.path.display()));
    Ok(Outcome::Failed)
}

/// Number of misfits printed per rank; the rest are counted.
const MISFITS_SHOWN: usize = 10;

impl fmt::Display for Fit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.fits { "loads" } else { "does not load" };
        let (step, path) = (self.step, self.path.display());
        writeln!(f, "{verdict}: step {step} of `{path}` under the plan of \"{}\"", self.model)?;
        for RankFit { rank, alike, peak_bytes, reads } in &self.ranks {
            let others = match alike.len() {
                0 => String::new(),
                others => format!(" and {others} like it"),
            };
            let [peak, read, host] = [*peak_bytes, reads.bytes, reads.host_bytes].map(format_bytes);
            write!(f, "  rank {rank}{others}: peak {peak}; reads {} tensors, ", reads.tensors)?;
            writeln!(f, "{read}, through {host} of the host")?;
            for misfit in reads.misfits.iter().take(MISFITS_SHOWN) {
                writeln!(f, "    {misfit}")?;
            }
            if let Some(more) = reads.misfits.len().checked_sub(MISFITS_SHOWN).filter(|&it| it > 0)
            {
                writeln!(f, "    and {more} more")?;
            }
        }
        Ok(())
    }
}
