//! The op family `bias_grad`.

pub(crate) mod cuda;
