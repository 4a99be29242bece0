//! C interface of Deepwell's kernels: `include/deepwell.h` and `libdeepwell.so`.
//!
//! There are two ways to call kernels. A plan ([`dw_plan_create`], [`dw_plan_run`]) serves every
//! op, enqueues in a stream of the caller and neither allocates nor waits. The other functions take
//! fewer steps: each runs one op on memory of the caller, on an NVIDIA GPU, or on the host if
//! [`dw_set_device`] has chosen the CPU, and returns once the result is complete.
//!
//! Matrices are row-major and contiguous, and every pointer is a multiple of 64 bytes. A function
//! returns [`DwStatus::Ok`], or another status and an explanation in [`dw_last_error`]: expected
//! value, actual value and fix.
//!
//! On a GPU a function of one op synchronizes the device before it starts and after it ends, so
//! that results of other streams are visible to it. This costs a few microseconds per call.
//!
//! ```
//! use deepwell::{DwStatus, dw_bf16_gemm, dw_set_device};
//!
//! #[repr(align(64))]
//! struct Matrix([half::bf16; 4]);
//!
//! let [one, two] = [1.0, 2.0].map(half::bf16::from_f32);
//! let (a, b) = (Matrix([one, two, two, one]), Matrix([one, one, one, one]));
//! let mut out = Matrix([one; 4]);
//! let (from_a, from_b) = (a.0.as_ptr().cast(), b.0.as_ptr().cast());
//! // SAFETY: a string that ends with a zero byte, and matrices of these sizes.
//! let status = unsafe {
//!     assert_eq!(dw_set_device(c"cpu".as_ptr()), DwStatus::Ok);
//!     dw_bf16_gemm(from_a, from_b, out.0.as_mut_ptr().cast(), 2, 2, 2)
//! };
//! assert_eq!(status, DwStatus::Ok);
//! assert_eq!(out.0.map(half::bf16::to_f32), [3.0; 4]);
//! ```
//!
//! # Features
//!
//! | feature | what it adds |
//! |---|---|
//! | `cuda` | NVIDIA GPUs (on by default); libraries are looked up when a device is opened |
//! | `emulated` | plans on an emulated GPU, `emulated:sm90`, for tests of their callers |
#![allow(unsafe_code)]

mod attention;
mod cuda_device;
mod device;
mod emulated_device;
mod gemm;
mod grouped;
mod plan;
mod request;
mod session;
mod status;
mod template;

pub use attention::{dw_attention_bf16_backward, dw_attention_bf16_forward, dw_fmha_bf16_forward};
pub use gemm::{DwDType, dw_bf16_gemm, dw_mxfp8_gemm, dw_mxfp8_quantize, dw_mxfp8_scale_bytes};
pub use grouped::{
    dw_grouped_gemm_bf16, dw_grouped_gemm_bf16_dgrad, dw_grouped_gemm_bf16_wgrad,
    dw_grouped_gemm_mxfp8, dw_grouped_gemm_mxfp8_wgrad,
};
pub use plan::{
    DW_ABI_VERSION, DwPlan, dw_abi_version, dw_plan_create, dw_plan_destroy, dw_plan_flops,
    dw_plan_kernel, dw_plan_run, dw_plan_workspace_bytes, dw_supported,
};
pub use request::{DW_MAX_RANK, DwOperand, DwRequest};
pub use session::dw_set_device;
pub use status::{DwStatus, dw_last_error};
