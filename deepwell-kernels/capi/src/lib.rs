//! C interface of Deepwell's kernels: `include/deepwell.h` and `libdeepwell.so`.
//!
//! Each function runs one op on memory that the caller owns: of an NVIDIA GPU, or of the host where
//! [`dw_set_device`] has chosen the CPU. It returns when the result is there. Matrices are row-major
//! and contiguous, every pointer is a multiple of 64 bytes. A function returns [`DwStatus::Ok`] or
//! says in [`dw_last_error`] what was expected, what came and what to do.
//!
//! On a GPU a call waits for all work of the device before it begins and after it ends, so that
//! results of other streams are seen without further ado. That costs a few microseconds a call.
#![allow(unsafe_code)]

mod attention;
mod gemm;
mod session;
mod status;

pub use attention::{dw_attention_bf16_backward, dw_attention_bf16_forward, dw_fmha_bf16_forward};
pub use gemm::{DwDType, dw_bf16_gemm, dw_mxfp8_gemm, dw_mxfp8_quantize, dw_mxfp8_scale_bytes};
pub use session::dw_set_device;
pub use status::{DwStatus, dw_last_error};
