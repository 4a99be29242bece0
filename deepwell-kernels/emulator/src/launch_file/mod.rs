//! Launches as files: a TOML document with a kernel, its PTX file, inputs and expected outputs.
//!
//! # Brief overview
//!
//! [`LaunchFile`] is the document. [`PreparedLaunch::read`] reads a document and all its files.
//! [`PreparedLaunch::run`] runs the launch in any mode, compares the results with the expectations
//! and returns an [`Outcome`]. [`mutate`] runs launches once for each mistake made in the kernel.
//! Paths are relative to the document's folder.
//!
//! ```
//! use deepwell_emulator::launch::Settings;
//! use deepwell_emulator::launch_file::{LaunchFile, PreparedLaunch};
//!
//! let text = r#"
//!     ptx = "engine.ptx"
//!     kernel = "saxpy"
//!     grid = [2]
//!     block = [64]
//!
//!     [[buffer]]
//!     name = "x"
//!     dtype = "f32"
//!     shape = [100]
//!     random = { distribution = "normal", seed = 1 }
//!
//!     [[buffer]]
//!     name = "y"
//!     dtype = "f32"
//!     shape = [100]
//!     fill = 0
//!
//!     [[argument]]
//!     buffer = "x"
//!     [[argument]]
//!     buffer = "y"
//!     [[argument]]
//!     f32 = 2.0
//!     [[argument]]
//!     u32 = 100
//! "#;
//! let file = LaunchFile::parse(text, "saxpy.toml")?;
//! let folder = std::path::Path::new("tests/fixtures");
//! let outcome = PreparedLaunch::of(&file, folder)?.run(&Settings::default());
//! assert!(outcome.is_right());
//! # Ok::<(), deepwell_emulator::launch_file::LaunchFileError>(())
//! ```

mod check;
mod compare;
mod contents;
mod data_type;
mod error;
mod file;
mod lines;
mod mutate;
mod npy;
mod prepare;
mod redundant;
mod replay;
#[cfg(test)]
mod tests;

pub use compare::{Comparison, Difference};
pub use data_type::DataType;
pub use error::LaunchFileError;
pub use file::{
    Argument, Buffer, Distribution, Expectation, LaunchFile, Lenience, OrderedBefore, Random,
    Recorded, Redundant, TensorMap, Tolerance, Within,
};
pub use lines::{SourceLine, SourceLines};
pub use mutate::{Mutant, MutantEnd, MutationOptions, MutationSummary, mutate};
pub use npy::{Array, NpyError};
pub use prepare::PreparedLaunch;
pub use replay::{Outcome, ReplayStatus};
