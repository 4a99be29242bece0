//! Error codes of the driver as [`DriverError`].

use std::ffi::{CStr, c_char};
use std::ptr;

use cudarc::driver::sys::{self, CUresult};

use crate::runtime::cuda::driver::{DriverError, DriverResult};

/// Returns `Ok` for success, otherwise an error with the names of call and code and the code's
/// meaning.
pub(super) fn check(call: &str, code: CUresult) -> DriverResult<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(error(call, code)) }
}

/// The error for a code.
pub(super) fn error(call: &str, code: CUresult) -> DriverError {
    let hint = hint(code).map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
    DriverError {
        call: call.to_string(),
        reason: format!("{}: {}{hint}", name_of(code), meaning_of(code)),
        out_of_memory: code == CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    }
}

/// Prefixes the reason of an error.
pub(super) fn about(what: impl FnOnce() -> String) -> impl FnOnce(DriverError) -> DriverError {
    move |error| DriverError { reason: format!("{}: {}", what(), error.reason), ..error }
}

fn hint(code: CUresult) -> Option<&'static str> {
    Some(match code {
        CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "the `libcuda.so` that was loaded is the toolkit's stub for linking; take its folder \
             (`stubs`) out of `LD_LIBRARY_PATH`"
        }
        CUresult::CUDA_ERROR_SYSTEM_NOT_READY => {
            "on machines with NVSwitch the fabric manager must run \
             (`systemctl status nvidia-fabricmanager`)"
        }
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "the driver was updated while its kernel module stayed loaded; restart the machine"
        }
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_INVALID_IMAGE => {
            "the kernels were built for another GPU; build them for this one with \
             `cargo xtask kernels`"
        }
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            "the PTX was written by a compiler newer than the driver; update the driver"
        }
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_LAUNCH_FAILED => {
            "a kernel that was launched before failed, and every later call repeats this; \
             `compute-sanitizer` names it"
        }
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED => {
            "something that cannot be recorded was put into a stream that is recorded"
        }
        _ => return None,
    })
}

fn name_of(code: CUresult) -> String {
    // SAFETY: the function only writes a pointer to a constant text, or null.
    text(code, |code, text| unsafe { sys::cuGetErrorName(code, text) })
        .unwrap_or_else(|| format!("code {}", code as u32))
}

fn meaning_of(code: CUresult) -> String {
    // SAFETY: as above.
    text(code, |code, text| unsafe { sys::cuGetErrorString(code, text) })
        .unwrap_or_else(|| "the driver has no words for it".to_string())
}

fn text(
    code: CUresult,
    ask: impl FnOnce(CUresult, *mut *const c_char) -> CUresult,
) -> Option<String> {
    let mut pointer = ptr::null();
    if ask(code, &mut pointer) != CUresult::CUDA_SUCCESS || pointer.is_null() {
        return None;
    }
    // SAFETY: on success the driver returned a constant text with a final zero byte.
    Some(unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}
