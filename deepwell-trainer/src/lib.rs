//! Compile, engine, trainer, data and the deepwell command

pub mod data;
pub mod metrics;
pub mod reference;
pub mod report;
