//! What `plan` and `dryrun` share: from a command line to a plan.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use deepwell_ir::{PrecisionPolicy, Recompute};
use deepwell_plan::{OptimizerSpec, PlanRequest, Planned, autoplan_ranks};
use deepwell_precision::PRESETS;
use deepwell_probe::Hardware;
use deepwell_trainer::commands::Degrees;
use deepwell_trainer::{Device, Devices, ModelSource};

use crate::bytes;
use crate::hardware::hardware_and_target;
use crate::output::note;

/// Most tokens of a step: positions and token indices are 32-bit.
const TOKENS_MAX: usize = i32::MAX as usize;

/// Model and request of `plan` and `dryrun`.
#[derive(Args, Debug)]
pub(crate) struct PlanningArgs {
    /// Preset name, `config.json`, model folder or `.pt2` archive
    model: String,
    /// Tokens of a sequence
    #[arg(long, alias = "seq-len", value_name = "TOKENS", default_value_t = 128)]
    seq: usize,
    /// Sequences of a step
    #[arg(long, alias = "batch-size", value_name = "SEQUENCES", default_value_t = 8)]
    batch: usize,
    /// Precision of the GEMMs
    #[arg(long, value_name = "NAME", default_value = "mxfp8",
          value_parser = PossibleValuesParser::new(PRESETS.iter().copied()))]
    precision: String,
    /// Precision tensor by tensor: a policy in TOML
    #[arg(long, value_name = "FILE", conflicts_with = "precision")]
    policy: Option<PathBuf>,
    /// Sequences that run at a time, a divisor of the batch [default: chosen]
    #[arg(long, value_name = "SEQUENCES")]
    micro_batch: Option<usize>,
    /// What the backward pass computes again: none, selective or full [default: chosen]
    #[arg(long, value_name = "RULE")]
    recompute: Option<Recompute>,
    /// Memory that may be used, such as 2GiB [default: 90 % of what is free]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    memory_limit: Option<u64>,
    /// Plan for another machine: the JSON of `deepwell probe --json`, or a preset such as h200-x2
    #[arg(long, value_name = "FILE")]
    hardware: Option<String>,
    /// Where it will run: cpu, cuda, cuda:N, or emulated: and one of sm90, sm100, sm103, sm120
    #[arg(long, default_value_t = Device::Cpu)]
    device: Device,
    /// Where the ranks of one run will be: cpu:N, emulated:ARCH:N, or GPUs as in cuda:0,cuda:1
    #[arg(long, conflicts_with = "device")]
    devices: Option<Devices>,
    #[command(flatten)]
    degrees: Degrees,
}

/// A plan and the machine that it is for.
pub(crate) struct Planning {
    /// The machine.
    pub(crate) hardware: Hardware,
    /// The plan, its program (of rank 0) and its prediction.
    pub(crate) planned: Planned,
}

impl PlanningArgs {
    /// Captures the model and plans its training.
    ///
    /// # Errors
    /// Whatever of the command line cannot be used, or nothing that fits.
    pub(crate) fn plan(&self) -> Result<Planning> {
        self.check_sizes()?;
        let policy = self.policy()?;
        let model = ModelSource::open(&self.model)?;
        for remark in &model.notes().remarks {
            note(remark);
        }
        if let Some(made_for) = model.seq_max().filter(|&longest| self.seq > longest) {
            note(format_args!(
                "sequences of {} tokens; the model was made for {made_for} at most",
                self.seq
            ));
        }
        let graph = model.capture(Some(self.seq))?;
        let alone = Devices { device: self.device, ranks: 1 };
        let Devices { device, ranks } = self.devices.unwrap_or(alone);
        let parallel = self.degrees.of_ranks(ranks)?;
        let (hardware, mut target) = hardware_and_target(self.hardware.as_deref(), device)?;
        if ranks > 1 {
            target = device.among_ranks(target);
        }
        let request = PlanRequest {
            seq: self.seq,
            global_batch: self.batch,
            policy,
            optimizer: OptimizerSpec::default(),
            memory_limit_bytes: self.memory_limit,
            micro_batch: self.micro_batch,
            recompute: self.recompute,
        };
        let catalog = device.catalog();
        let planned =
            autoplan_ranks(&graph, &hardware, &request, parallel, catalog.as_ref(), &target)?;
        Ok(Planning { hardware, planned })
    }

    fn check_sizes(&self) -> Result<()> {
        for (option, size) in [("--seq", self.seq), ("--batch", self.batch)] {
            if size == 0 {
                bail!("{option}: expected at least 1, got 0");
            }
        }
        if self.seq.checked_mul(self.batch).is_none_or(|tokens| tokens > TOKENS_MAX) {
            bail!(
                "--seq x --batch: expected at most {TOKENS_MAX} tokens in a step, got {} x {}",
                self.seq,
                self.batch
            );
        }
        Ok(())
    }

    fn policy(&self) -> Result<PrecisionPolicy> {
        let Some(path) = &self.policy else {
            return Ok(PrecisionPolicy::preset(&self.precision)?);
        };
        let place = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the policy `{place}`"))?;
        Ok(PrecisionPolicy::from_toml(&text, &place)?)
    }
}
