//! C interface of Deepwell's trainer: `include/deepwell_engine.h` and `libdeepwell_engine.so`.
//!
//! [`dw_engine_create`] plans and loads a model that `torch.export.save` wrote; [`dw_engine_step`]
//! trains a step on token ids of the caller; [`dw_engine_read_tensor`] gives the weights back under
//! their names in PyTorch. Kernels, memory and optimizer state belong to the engine: it shares
//! nothing with the caller's framework.
//!
//! A function returns [`DwEngineStatus::Ok`], or another status and an explanation in
//! [`dw_engine_last_error`]: expected value, actual value and fix. An engine is used by one thread
//! at a time.
//!
//! # Features
//!
//! | feature | what it adds |
//! |---|---|
//! | `cuda` | NVIDIA GPUs (on by default); libraries are looked up when a device is opened |
//! | `emulated` | an emulated GPU, `emulated:sm90`, for tests |
#![allow(unsafe_code)]

mod engine;
mod exports;
mod options;
mod status;

pub use exports::{
    DwEngine, DwStepResult, dw_engine_create, dw_engine_describe, dw_engine_destroy,
    dw_engine_evaluate, dw_engine_read_tensor, dw_engine_step, dw_engine_write_tensor,
};
pub use status::{DwEngineStatus, dw_engine_last_error};
