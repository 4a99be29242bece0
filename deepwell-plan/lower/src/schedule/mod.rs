//! Pipeline schedules: the order of each stage's ops, and an event-driven simulation.
//!
//! A schedule is data: a list of [`PipelineOp`] for each stage. [`simulate`] runs all lists
//! together: an op starts when its stage is free and its input has arrived, P2P latency included.
//! The times of ops are given by the caller.
//!
//! ```
//! use deepwell_lower::schedule::{OpTimes, PipelineSchedule, orders, simulate};
//!
//! let times = OpTimes { forward: 1.0, dgrad: 1.0, wgrad: 1.0, p2p: 0.0 };
//! let orders = orders(PipelineSchedule::OneFOneB, 4, 8, 1)?;
//! let run = simulate(&orders, 1, &vec![times; 4])?;
//! // (p - 1) (F + B + W) of idle time beside m (F + B + W) of work.
//! assert!((run.bubble_rate() - 3.0 / 11.0).abs() < 1e-12);
//! # Ok::<(), deepwell_lower::PlanError>(())
//! ```

mod handover;
mod orders;
mod passes;
mod simulate;
mod timeline;

pub use handover::{StageHandover, handovers};
pub use orders::{in_flight, interleaving_group, orders};
pub use passes::{Pass, PipelineOp, PipelineSchedule};
pub use simulate::{OpRun, OpTimes, PipelineRun, simulate};
