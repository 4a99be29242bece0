//! Options of the optimizer's memory.

use clap::Args;
use deepwell_ir::ops::{MasterFormat, MomentFormat};
use deepwell_plan::OptimizerSpec;

/// Where and how the optimizer keeps its state.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct OptimizerArgs {
    /// Storage of master weights: fp32, or bf16, half of the memory: matrices are rounded
    /// stochastically by each update [default: fp32]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) masters: Option<MasterFormat>,
    /// Storage of AdamW's moments: fp32, or fp8, a quarter of the memory [default: fp32]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) moments: Option<MomentFormat>,
    /// Update each parameter in the backward pass, with gradients clipped by the norm of the step
    /// before: gradients need little memory; for one rank and one micro-batch
    #[arg(long)]
    pub(crate) optimizer_in_backward: bool,
    /// Keep master weights and moments in host memory, and copy them to the GPU for each update;
    /// losses stay the same. With --optimizer-in-backward, copies overlap with the backward pass
    #[arg(long)]
    pub(crate) optimizer_on_host: bool,
}

impl OptimizerArgs {
    /// The optimizer of the flags.
    pub(crate) fn spec(&self) -> OptimizerSpec {
        OptimizerSpec {
            masters: self.masters.unwrap_or_default(),
            moments: self.moments.unwrap_or_default(),
            in_backward: self.optimizer_in_backward,
            on_host: self.optimizer_on_host,
            ..OptimizerSpec::default()
        }
    }

    /// The given flags, by the name of their setting.
    pub(crate) fn given(&self) -> Vec<(&'static str, serde_json::Value)> {
        let masters = self.masters.map(|masters| ("optimizer.masters", masters.name().into()));
        let moments = self.moments.map(|moments| ("optimizer.moments", moments.name().into()));
        let in_backward =
            self.optimizer_in_backward.then(|| ("optimizer.in_backward", true.into()));
        let on_host = self.optimizer_on_host.then(|| ("optimizer.on_host", true.into()));
        [masters, moments, in_backward, on_host].into_iter().flatten().collect()
    }
}

/// The optimizer of the runs of a comparison in low precision.
pub(crate) fn optimizer_of(
    masters: MasterFormat,
    moments: MomentFormat,
    in_backward: bool,
) -> OptimizerSpec {
    OptimizerSpec { masters, moments, in_backward, ..OptimizerSpec::default() }
}
