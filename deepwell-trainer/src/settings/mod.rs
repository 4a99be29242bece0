//! All settings of a training run, as a run file in TOML.
//!
//! Defaults, a plan, a run file and flags each stand over the ones before. `layer.rs` merges them.

mod check;
mod layer;
mod plan;
mod read;
mod resolve;
mod schema;

pub use self::layer::SettingsLayer;
pub use self::schema::{PARITY_EVAL_TOKENS, PARITY_INTERIM_PART, Settings};
