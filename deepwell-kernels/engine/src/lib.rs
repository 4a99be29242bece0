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
//! ```
//! use std::ffi::CString;
//!
//! use deepwell_engine::{DwEngineStatus, DwStepResult, dw_engine_create, dw_engine_step};
//!
//! let archive = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deepwell-ir/tests/pt2/gpt2.pt2");
//! let options = format!(
//!     r#"{{"archive": "{archive}", "device": "cpu", "precision": "f32", "seq": 8, "batch": 2}}"#
//! );
//! let options = CString::new(options).unwrap();
//! let (mut engine, mut result) = (std::ptr::null_mut(), DwStepResult::default());
//! let ids = [1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6, 5, 4, 3, 2, 1];
//! // SAFETY: a string that ends with a zero byte, and as many ids as the call says.
//! let status = unsafe {
//!     assert_eq!(dw_engine_create(options.as_ptr(), &mut engine), DwEngineStatus::Ok);
//!     dw_engine_step(engine, ids.as_ptr(), ids.as_ptr(), 16, 1e-3, 1.0, &mut result)
//! };
//! assert_eq!(status, DwEngineStatus::Ok);
//! assert!(result.loss > 0.0);
//! ```
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
