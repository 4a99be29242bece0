//! The op family `stochastic_round`.

pub mod cpu;
pub(crate) mod cuda;
