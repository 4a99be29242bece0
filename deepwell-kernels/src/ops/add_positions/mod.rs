//! The op family `add_positions`.

pub mod cpu;
pub(crate) mod cuda;
