//! A compiled model: programs loaded on a backend, with weights and optimizer state.

mod compile;
mod counts;
mod gemms;
mod measure;
mod model;
mod products;
mod routing;
mod shards;
mod slices;
mod statistics;
mod step;
mod steps;

pub use self::compile::{CompileOptions, compile, compile_on, optimize};
pub(crate) use self::compile::{Compiled, load, planned};
pub use self::counts::{GemmCounts, RunCounts};
pub use self::gemms::{Gemm, OperandStats};
pub use self::model::Engine;
pub use self::products::ProductSums;
pub use self::routing::ExpertLoad;
pub(crate) use self::slices::{part, slice_of};
pub use self::steps::{PendingStep, StepOutcome, StepTime};
