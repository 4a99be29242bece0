//! Options of an engine, as C passes them.

use deepwell_trainer::Device;
use serde::Deserialize;

/// What `dw_engine_create` reads.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EngineOptions {
    /// Path of the `.pt2` archive.
    pub(crate) archive: String,
    /// `cpu`, `cuda:N` or `emulated:sm90`.
    pub(crate) device: Device,
    /// A precision of `deepwell train`: `f32`, `bf16`, `mxfp8`, `nvfp4` or `auto`.
    pub(crate) precision: String,
    /// Tokens per sequence.
    pub(crate) seq: usize,
    /// Sequences per step.
    pub(crate) batch: usize,
    /// Sequences that run at once; the planner's choice if absent.
    pub(crate) micro_batch: Option<usize>,
    /// Decays of AdamW's moments.
    #[serde(default = "default_betas")]
    pub(crate) betas: (f32, f32),
    /// Added to the root of the second moment.
    #[serde(default = "default_eps")]
    pub(crate) eps: f32,
    /// Decoupled weight decay of matrices; vectors have none.
    #[serde(default = "default_weight_decay")]
    pub(crate) weight_decay: f32,
    /// Whether parameters exported with `requires_grad = false` are trained like the others.
    #[serde(default)]
    pub(crate) train_frozen: bool,
}

/// PyTorch's defaults of AdamW.
fn default_betas() -> (f32, f32) {
    (0.9, 0.999)
}

fn default_eps() -> f32 {
    1e-8
}

fn default_weight_decay() -> f32 {
    1e-2
}
