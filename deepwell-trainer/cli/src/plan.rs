//! `deepwell plan`.

use std::fmt;

use anyhow::Result;
use clap::Args;
use deepwell_ir::{Call, Program, Rejected};
use deepwell_plan::{ExpertRoom, Plan, format_bytes};
use serde::Serialize;

use crate::output::{print, print_json};
use crate::plan_cluster::{ClusterArgs, cluster_asked};
use crate::planning::PlanningArgs;
use crate::{Outcome, plan_cluster};

const AFTER_HELP: &str = "\
A plan contains batch sizes, recomputation, the precision of each tensor with the policy rule that
set it, and the kernel of each kind of call. Candidate plans are lowered to programs and simulated;
the fastest candidate that fits into memory is selected.

With --hardware that has GPUs and without --device, the search covers the whole cluster: pipeline
stages and schedule, model chunks, tensor, context and expert parallelism, ZeRO, micro-batch,
recomputation. The output shows the state of each rank, the breakdown of the step time, and the
cost of a run. `deepwell score` shows the accuracy of the predictions. `micro-batch 4 x 2` means 2
micro-batches of 4 sequences per step on each data-parallel rank.

Plans that the trainer runs come before faster plans that it does not run. The best is lowered to
programs; if these do not fit, the next one is tried. If none fits, the output shows a plan that the
trainer does not run yet; with --runnable the exit code is 1.

CLUSTER is h200-x8 (one machine), h100:nodes=2048 (systems of eight GPUs; gpus=, nics=, gbit= and
price= may follow the colon), hgx-b200-x16, gb300-nvl72-x8 (racks), or a file as in `deepwell probe
--help`, optionally with `price_per_gpu_hour`.

Examples:
  deepwell plan parity-3m
  deepwell plan parity-3m --explain                    with rejected candidates and reasons
  deepwell plan ./my-model --seq 512 --batch 32 --memory-limit 2GiB
  deepwell plan parity-3m --policy policy.toml --json > plan.json
  deepwell train --plan plan.json                      train with this plan
  deepwell plan llama-3-70b --hardware h100:nodes=32 --seq 8192 --batch 512
  deepwell plan deepseek-v3 --hardware h100:nodes=256,price=2.5 --tokens 15T
  deepwell plan mixtral-8x7b --hardware b200-x8 --seq 16384 --batch 64 --explain
  deepwell plan llama-3-70b --hardware h200-x8 --pin tp=4 --pin zero=1 --forbid cp
  deepwell plan mixtral-8x7b --hardware h200-x8 --seq 16384 --runnable
  deepwell plan llama-3-8b --hardware h100:nodes=4 --pareto
  deepwell plan llama-3-70b --hardware racks.toml --as megatron --trace step.json --svg step.svg

A policy file:
  precision = \"mxfp8\"
  [[rule]]
  tensors = \"*.mlp.down_proj.weight\"
  format = \"bf16\"

Exit codes: 0 planned, 1 no plan fits (with --runnable: none that the trainer runs), 2 an input
cannot be used";

/// Plan the training of a model on a machine or a cluster
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct PlanCommand {
    #[command(flatten)]
    planning: PlanningArgs,
    /// Also print rejected plans and kernels with reasons; for a cluster also the effect of other
    /// networks, memory sizes and batches
    #[arg(long)]
    explain: bool,
    /// Print JSON; rejected candidates are always included
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub(crate) fn run(args: &PlanCommand) -> Result<Outcome> {
    let PlanCommand { planning, cluster: options, explain, json } = args;
    if let Some(cluster) = cluster_asked(planning)? {
        plan_cluster::run(planning, options, &cluster, *explain, *json)?;
        return Ok(Outcome::Success);
    }
    options.refuse_without_cluster()?;
    let planned = planning.plan()?.planned;
    let explained = Explained {
        model: planning.model.clone(),
        bytes_on_link: planned.prediction.ranks[0].bytes_on_link,
        rejected_plans: planned.rejected,
        kernels: kernel_choices(&planned.program),
        expert_room: planned.prediction.ranks[0].expert_room,
        plan: planned.plan,
    };
    if args.json {
        print_json(&explained)?;
    } else if args.explain {
        print(&explained)?;
    } else {
        print(&format_args!("{}{}", explained.plan, explained.room()))?;
    }
    Ok(Outcome::Success)
}

/// A plan with the rejected plans and kernels.
#[derive(Debug, Serialize)]
struct Explained {
    /// Name given on the command line.
    model: String,
    plan: Plan,
    rejected_plans: Vec<String>,
    kernels: Vec<KernelChoices>,
    /// Rows of a layer's experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    expert_room: Option<ExpertRoom>,
    /// Bytes sent to other ranks per step.
    #[serde(skip_serializing_if = "is_zero")]
    bytes_on_link: u64,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

impl Explained {
    /// The line about experts' rows; empty for a model without experts.
    fn room(&self) -> String {
        self.expert_room.map_or(String::new(), |room| format!("  experts       {room}\n"))
    }
}

/// The selected kernel of a kind of call, and the rejected kernels.
#[derive(Debug, PartialEq, Serialize)]
struct KernelChoices {
    op: String,
    kernel: String,
    calls: usize,
    rejected: Vec<Rejected>,
}

/// Groups calls by op, kernel and rejected kernels, in order of first use. Reasons and times are
/// from the first call of each group.
fn kernel_choices(program: &Program) -> Vec<KernelChoices> {
    let mut kinds: Vec<KernelChoices> = Vec::new();
    let others = |call: &Call| -> Vec<String> {
        call.rejected.iter().map(|rejected| rejected.kernel.clone()).collect()
    };
    for (call, runs) in program.calls_with_runs() {
        let known = kinds.iter_mut().find(|kind| {
            kind.op == call.op.name()
                && kind.kernel == call.choice.kernel
                && kind.rejected.iter().map(|other| &other.kernel).eq(&others(call))
        });
        match known {
            Some(kind) => kind.calls += runs,
            None => kinds.push(KernelChoices {
                op: call.op.name().to_string(),
                kernel: call.choice.kernel.clone(),
                calls: runs,
                rejected: call.rejected.clone(),
            }),
        }
    }
    kinds
}

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.plan, self.room())?;
        if self.bytes_on_link > 0 {
            writeln!(
                f,
                "  exchange      {} of each rank a step",
                format_bytes(self.bytes_on_link)
            )?;
        }
        f.write_str("\nplans not taken\n")?;
        for rejected in &self.rejected_plans {
            writeln!(f, "  {rejected}")?;
        }
        if self.rejected_plans.is_empty() {
            f.write_str("  none: there was one candidate\n")?;
        }
        f.write_str("\nkernels not taken\n")?;
        let mut without_others = 0;
        for kind in &self.kernels {
            if kind.rejected.is_empty() {
                without_others += 1;
                continue;
            }
            writeln!(f, "  {} ({} calls), taken: {}", kind.op, kind.calls, kind.kernel)?;
            for rejected in &kind.rejected {
                writeln!(f, "    {rejected}")?;
            }
        }
        writeln!(
            f,
            "  {without_others} of {} kinds of calls have no other kernel",
            self.kernels.len()
        )?;
        Ok(())
    }
}
