//! Runs of several ranks: one folder, one set of metrics, checkpoints from which any other ranks go
//! on, and what the user sees.

#[path = "../degrees/mod.rs"]
mod degrees;
mod left;
#[path = "mod.rs"]
mod rank_runs;
mod reports;
mod resume;
mod walk;

use deepwell_trainer::{Parallel, Settings};

/// The settings of a run whose ranks share the model so.
fn shared(parallel: Parallel, base: &Settings) -> Settings {
    Settings {
        ranks: parallel.world_size(),
        zero: parallel.zero,
        tensor: parallel.tensor,
        pipeline: parallel.pipeline,
        chunks: parallel.chunks,
        pipeline_schedule: parallel.schedule,
        context: parallel.context,
        expert: parallel.expert,
        ..base.clone()
    }
}
