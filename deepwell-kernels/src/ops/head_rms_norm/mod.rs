//! The op family `head_rms_norm`.

pub(crate) mod cuda;
