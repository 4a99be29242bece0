//! `deepwell plan`.

use std::fmt;

use anyhow::Result;
use clap::Args;
use deepwell_ir::{Call, Program, Rejected};
use deepwell_plan::{Plan, format_bytes};
use serde::Serialize;

use crate::Outcome;
use crate::output::{print, print_json};
use crate::planning::PlanningArgs;

const AFTER_HELP: &str = "\
A plan says how the model trains on the machine: batches, recomputation, the precision of each
tensor with the rule that decided it, and the kernel of each kind of call. Candidates are lowered
to programs and predicted; of those that fit into memory the one with the least time is taken.

Examples:
  deepwell plan parity-3m
  deepwell plan parity-3m --explain                    with what was not taken, and why
  deepwell plan ./my-model --seq 512 --batch 32 --memory-limit 2GiB
  deepwell plan parity-3m --policy policy.toml --json > plan.json
  deepwell plan llama-134m --hardware machine.json     for a machine that is not this one

A policy file:
  precision = \"mxfp8\"
  [[rule]]
  tensors = \"*.mlp.down_proj.weight\"
  format = \"bf16\"

Exit codes: 0 planned, 1 nothing fits into memory, 2 an input cannot be used";

/// Choose how a model trains on a machine
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct PlanCommand {
    #[command(flatten)]
    planning: PlanningArgs,
    /// Print the plans and kernels that were not taken too, with reasons
    #[arg(long)]
    explain: bool,
    /// Print JSON; what was not taken is always in it
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &PlanCommand) -> Result<Outcome> {
    let planned = args.planning.plan()?.planned;
    let explained = Explained {
        bytes_on_link: planned.prediction.ranks[0].bytes_on_link,
        rejected_plans: planned.rejected,
        kernels: kernel_choices(&planned.program),
        plan: planned.plan,
    };
    if args.json {
        print_json(&explained)?;
    } else if args.explain {
        print(&explained)?;
    } else {
        print(&explained.plan)?;
    }
    Ok(Outcome::Success)
}

/// A plan beside what was not taken.
#[derive(Debug, Serialize)]
struct Explained {
    plan: Plan,
    rejected_plans: Vec<String>,
    kernels: Vec<KernelChoices>,
    /// Bytes that a rank exchanges with others in a step.
    #[serde(skip_serializing_if = "is_zero")]
    bytes_on_link: u64,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// The kernel that serves a kind of call, and those that do not.
#[derive(Debug, PartialEq, Serialize)]
struct KernelChoices {
    op: String,
    kernel: String,
    calls: usize,
    rejected: Vec<Rejected>,
}

/// Calls of one op with one kernel and the same other kernels together, in order of first use: why
/// not the others, and how much slower they would be, is said of the first call.
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
        write!(f, "{}", self.plan)?;
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
