//! Common part of `plan` and `dryrun`: from a command line to a plan.

use std::path::{Path, PathBuf};

use crate::degrees::Degrees;
use anyhow::{Context, Result, bail};
use clap::Args;
use deepwell_ir::{Graph, PrecisionPolicy, Recompute, SavedActivations, Target};
use deepwell_moe::RouterTraining;
use deepwell_plan::{PlanRequest, Planned, autoplan_stages};
use deepwell_precision::Fallback;
use deepwell_trainer::{
    AutoPrecision, Device, Devices, ModelSource, Settings, auto_policy, with_routers,
};

use crate::bytes;
use crate::hardware::hardware_and_target;
use crate::optimizer_args::OptimizerArgs;
use crate::output::{note, say};

/// Most tokens of a step: positions and token indices are 32-bit.
const TOKENS_MAX: usize = i32::MAX as usize;

/// Model and request of `plan` and `dryrun`.
#[derive(Args, Debug)]
pub(crate) struct PlanningArgs {
    /// Preset name, `config.json`, model folder or `.pt2` archive
    pub(crate) model: String,
    /// Tokens per sequence [default: 128; for a cluster 4096]
    #[arg(long, visible_alias = "seq-len", value_name = "TOKENS")]
    pub(crate) seq: Option<usize>,
    /// Sequences per step, over all ranks [default: 8; for a cluster 4 Mi tokens]
    #[arg(long, visible_aliases = ["batch-size", "global-batch"], value_name = "SEQUENCES")]
    pub(crate) batch: Option<usize>,
    /// Precision preset: f32, bf16, mxfp8, mxfp8-floor, mxfp8-128, mxfp8-2d, nvfp4; on a CPU also
    /// mxfp8-hybrid, mxfp8-e5m2, mxfp6, mxfp6-e2m3, mxfp6-e3m2, mxfp4; or auto: on a GPU each
    /// linear layer in the fastest by predicted times of bf16, mxfp8 (on Hopper mxfp8-128)
    /// and, on Blackwell, nvfp4; mxfp8 elsewhere
    #[arg(long, value_name = "NAME", default_value = Settings::AUTO)]
    pub(crate) precision: String,
    /// Policy file in TOML with the precision of each tensor
    #[arg(long, value_name = "FILE", conflicts_with = "precision")]
    pub(crate) policy: Option<PathBuf>,
    /// The policy of a plan that is made again.
    #[arg(skip)]
    pub(crate) given_policy: Option<PrecisionPolicy>,
    /// Plan in BF16 if the device supports none of the quantized formats of the precision; without
    /// this flag that is an error
    #[arg(long)]
    pub(crate) allow_fallback: bool,
    /// Reaction of the guards to a GEMM over their limits, as for `deepwell train`: safe reserves
    /// memory for GEMMs in BF16, strict and off do not [default: the policy's, else safe]
    #[arg(long, value_name = "ANSWER")]
    pub(crate) fallback: Option<Fallback>,
    /// Sequences per micro-batch; divides the batch of a data-parallel rank [default: chosen by the
    /// planner]
    #[arg(long, value_name = "SEQUENCES")]
    pub(crate) micro_batch: Option<usize>,
    /// Recomputation in the backward pass: none, norms, activations (activation functions),
    /// selective (both), full (whole layers) or full:8 (8 whole layers, the others selective)
    /// [default: chosen by the planner]
    #[arg(long, value_name = "RULE")]
    pub(crate) recompute: Option<Recompute>,
    /// Storage of activations between the forward and the backward pass: exact, once (none both in
    /// BF16 and quantized; the same losses) or mxfp8 (inputs of activation functions too, in half
    /// of the memory) [default: exact]
    #[arg(long, value_name = "STORAGE")]
    pub(crate) saved_activations: Option<SavedActivations>,
    #[command(flatten)]
    pub(crate) optimizer: OptimizerArgs,
    /// Expert capacity as a multiple of an even share; excess tokens are dropped, and buffers are
    /// sized for the rest [default: unlimited]
    #[arg(long, value_name = "FACTOR")]
    pub(crate) capacity_factor: Option<f64>,
    /// Memory limit per device, such as 2GiB [default: 98 % of the free memory; for a cluster 98 %
    /// of a GPU's memory]
    #[arg(long, visible_alias = "gpu-memory", value_name = "BYTES", value_parser = bytes::parse)]
    pub(crate) memory_limit: Option<u64>,
    /// Plan for another machine or a cluster: output of `deepwell probe --json`, a preset such as
    /// h200-x2, or a cluster [default: this machine]
    #[arg(long, value_name = "FILE")]
    pub(crate) hardware: Option<String>,
    /// Device to plan for: `cpu`, `cuda[:N]`, or `emulated:ARCH` with sm90, sm100, sm103 or sm120
    /// [default: cpu]
    #[arg(long)]
    pub(crate) device: Option<Device>,
    /// Ranks to plan for: `cpu:N`, `emulated:ARCH:N`, or consecutive GPUs such as `cuda:0,cuda:1`
    #[arg(long, conflicts_with = "device")]
    pub(crate) devices: Option<Devices>,
    #[command(flatten)]
    pub(crate) degrees: Degrees,
}

/// A plan.
pub(crate) struct Planning {
    /// The plan, its program (of rank 0) and its prediction.
    pub(crate) planned: Planned,
}

impl PlanningArgs {
    /// Captures the model and plans its training.
    ///
    /// # Errors
    /// An unusable option, or no plan that fits.
    pub(crate) fn plan(&self) -> Result<Planning> {
        let (seq, batch) = self.sizes()?;
        let model = ModelSource::open(&self.model)?;
        for remark in &model.notes().remarks {
            note(remark);
        }
        if let Some(made_for) = model.seq_max().filter(|&longest| seq > longest) {
            note(format_args!(
                "sequences of {seq} tokens; the model was made for {made_for} at most"
            ));
        }
        let graph = self.graph(&model, seq)?;
        let alone = Devices { device: self.device.unwrap_or(Device::Cpu), ranks: 1 };
        let Devices { device, ranks } = self.devices.unwrap_or(alone);
        let parallel = self.degrees.of_ranks(ranks)?;
        let (hardware, mut target) = hardware_and_target(self.hardware.as_deref(), device)?;
        if ranks > 1 {
            target = device.among_ranks(target);
        }
        let micro_batch = (self.micro_batch.unwrap_or(batch), seq);
        let presets = Settings::auto_presets(&target.arch);
        let (policy, chosen) = self.policy(&graph, (device, &target), micro_batch, presets)?;
        if let Some(chosen) = chosen {
            note(format_args!("precision auto: {chosen}"));
        }
        let request = PlanRequest {
            seq,
            global_batch: batch,
            policy,
            optimizer: self.optimizer.spec(),
            memory_limit_bytes: self.memory_limit,
            micro_batch: self.micro_batch,
            recompute: self.recompute,
            saved_activations: self.saved_activations.unwrap_or_default(),
        };
        let catalog = device.catalog();
        let split = (parallel, self.degrees.pp_layers.as_deref());
        let planned =
            autoplan_stages(&graph, &hardware, &request, split, catalog.as_ref(), &target)?;
        for fallback in planned.fallbacks(self.allow_fallback)? {
            say(format_args!("warning: {fallback}"));
        }
        Ok(Planning { planned })
    }

    /// The graph of a model for sequences of `seq` tokens, with the capacity factor of its experts.
    ///
    /// # Errors
    /// A model that cannot be captured, a capacity factor that is not above 0, or a capacity factor
    /// for a model without experts.
    pub(crate) fn graph(&self, model: &ModelSource, seq: usize) -> Result<Graph> {
        let graph = model.capture(Some(seq))?;
        if let Some(factor) = self.capacity_factor.filter(|it| !it.is_finite() || *it <= 0.0) {
            bail!("--capacity-factor: expected a number over 0, got {factor}");
        }
        let training =
            RouterTraining { capacity_factor: self.capacity_factor, ..RouterTraining::default() };
        Ok(with_routers(&graph, &training)?)
    }

    /// Tokens per sequence and sequences per step.
    fn sizes(&self) -> Result<(usize, usize)> {
        let (seq, batch) = (self.seq.unwrap_or(128), self.batch.unwrap_or(8));
        for (option, size) in [("--seq", seq), ("--batch", batch)] {
            if size == 0 {
                bail!("{option}: expected at least 1, got 0");
            }
        }
        if seq.checked_mul(batch).is_none_or(|tokens| tokens > TOKENS_MAX) {
            bail!(
                "--seq x --batch: expected at most {TOKENS_MAX} tokens in a step, got {seq} x \
                 {batch}"
            );
        }
        Ok((seq, batch))
    }

    /// Whether the device decides the precision.
    pub(crate) fn is_auto(&self) -> bool {
        let is_given = self.policy.is_some() || self.given_policy.is_some();
        !is_given && self.precision == Settings::AUTO
    }

    /// The precision of each tensor on a device, and the choice of `auto` among `presets` for
    /// micro-batches given by sequences and tokens per sequence.
    pub(crate) fn policy(
        &self,
        graph: &Graph,
        device: (Device, &Target),
        micro_batch: (usize, usize),
        presets: &[&str],
    ) -> Result<(PrecisionPolicy, Option<AutoPrecision>)> {
        let (policy, chosen) = match (&self.given_policy, &self.policy) {
            (Some(policy), _) => (policy.clone(), None),
            (None, Some(path)) => (Self::policy_of(path)?, None),
            (None, None) => match self.precision.as_str() {
                Settings::AUTO => auto_policy(graph, device, micro_batch, presets)?,
                name => (PrecisionPolicy::preset(name)?, None),
            },
        };
        let fallback = self.fallback.unwrap_or(policy.fallback());
        Ok((policy.with_fallback(fallback), chosen))
    }

    fn policy_of(path: &Path) -> Result<PrecisionPolicy> {
        let place = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the policy `{place}`"))?;
        Ok(PrecisionPolicy::from_toml(&text, &place)?)
    }
}
