//! Compile, engine, trainer, data and the deepwell command

pub mod data;
pub mod metrics;
pub mod reference;
pub mod report;

mod engine;
mod error;
pub mod init;
pub mod memory;
mod schedule;
pub mod weights;

pub use engine::{CompileOptions, Engine, ProductCounts, StepOutcome, compile, optimize};
pub use error::TrainError;
pub use schedule::Schedule;
