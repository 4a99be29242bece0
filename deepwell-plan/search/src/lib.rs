//! Which plan to run: the search over degrees of parallelism, schedules and memory options of a
//! cluster, by closed forms of memory and time.
//!
//! # Brief overview
//!
//! A [`ModelShape`] is the sizes of a model, a [`Strategy`] the degrees of a run. [`search`] checks
//! every strategy on given [`search::Machines`] and explains the best one. [`memory`] and
//! [`step_time`] predict a strategy without lowering; [`ProgramMemory`] counts a candidate's memory
//! by lowered programs of few layers, so that both agree.
//!
//! ```
//! use deepwell_search::Strategy;
//!
//! let strategy = Strategy { tp: 4, dp: 2, zero: 1, ..Strategy::SINGLE };
//! assert_eq!(strategy.gpus(), 8);
//! ```

pub mod collectives;
pub mod gpu_model;
pub mod memory;
pub mod model_shape;
mod program_memory;
pub mod search;
pub mod step_time;
mod strategy;

pub use model_shape::ModelShape;
pub use program_memory::{ProgramBytes, ProgramMemory};
pub use strategy::{ActivationRecompute, LayerSplit, Strategy};
