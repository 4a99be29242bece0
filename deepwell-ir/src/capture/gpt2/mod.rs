//! GPT-2: configuration, parameters, weight files, graph.

mod config;
mod folder;
mod graph;
mod parameters;

pub use config::Gpt2Config;
pub use graph::capture_gpt2;
