//! How a given plan runs: lowers a model to a program, packs its memory, and predicts memory and
//! time.
//!
//! # Brief overview
//!
//! A [`Plan`] is data: device, micro-batches, recomputation, precision, kernels and the optimizer's
//! buckets. [`autoplan`] tries candidates: [`lower`] lowers each candidate to a
//! [`deepwell_ir::Program`], and [`dryrun`] predicts the program. [`lower`] runs the graph passes,
//! appends the optimizer, schedules micro-batches, selects kernels from a
//! [`deepwell_ir::KernelCatalog`] and packs all values of a step into one arena ([`arena`]).
//!
//! ```
//! use deepwell_lower::arena::{Lifetime, pack};
//!
//! // Two values that never live at the same call share their bytes.
//! let packing = pack(&[
//!     Lifetime { bytes: 4096, first: 0, last: 1 },
//!     Lifetime { bytes: 4096, first: 2, last: 3 },
//! ]);
//! assert_eq!(packing.bytes, 4096);
//! ```

pub mod arena;
mod auto;
mod autoplan;
mod budget;
mod candidates;
pub mod counting;
mod dryrun;
mod error;
mod fallbacks;
mod gpu;
mod known_kernels;
mod lower;
mod parallel;
mod plan;
mod planned;
mod request;
pub mod schedule;
mod stages;

pub use auto::{AutoLayers, AutoPrecision, AutoTime, auto_precision};
pub use autoplan::{autoplan, autoplan_ranks, autoplan_stages};
pub use budget::{memory_limit_bytes, usable_bytes};
pub use dryrun::{
    Bound, DryRun, ExchangeTime, ExpertRoom, OpTime, RankReport, ZeroBubble, dryrun, dryrun_stages,
    dryrun_world, roofline,
};
pub use error::PlanError;
pub use fallbacks::{PrecisionFallback, precision_fallbacks};
pub use known_kernels::KnownKernels;
pub use lower::{
    EXCHANGES, Inference, LinearFlops, Scheduling, SharedGraph, arena_bytes_with_fallback,
    arena_bytes_with_fallbacks, linear_flops, lower, lower_evaluation, lower_fallback,
    lower_inference, lower_scheduled, lower_scoring, lower_within, place_state_as, quantized_bytes,
    quantized_flop_share,
};
pub use parallel::Parallel;
pub use plan::{KernelPlan, OptimizerSpec, Plan};
pub use planned::Planned;
pub use request::PlanRequest;
pub use stages::{balanced_stages, passes_of};

/// Formats bytes for people: `12.3 MiB`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut amount = bytes as f64;
    let mut unit = 0;
    while amount >= 1024.0 && unit + 1 < UNITS.len() {
        amount /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{amount:.1} {}", UNITS[unit]) }
}
