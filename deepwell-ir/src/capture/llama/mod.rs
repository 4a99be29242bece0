//! Llama and similar families: configuration, parameters, graph.

mod check;
mod config;
mod experts;
mod family;
mod folder;
mod graph;
mod latent;
mod mixture;
mod packing;
mod parameters;
mod presets;
mod rope;
mod rope_json;
mod stored;
mod to_json;

pub use config::{CaptureNotes, HiddenAct, LlamaConfig, StoredDType};
pub use experts::ExpertsConfig;
pub use family::ModelFamily;
pub use graph::{capture, capture_for_sequence};
pub use latent::LatentConfig;
pub use packing::WeightPacking;
pub use parameters::{ParameterRole, ParameterSpec};
pub use rope::{Rope, RopeScaling, YarnScaling};
pub use stored::{StoredElement, StoredSpec};

pub(super) use config::read_dtype;
