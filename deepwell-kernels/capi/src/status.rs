//! Status and error message of a call.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use deepwell_ir::NoKernel;
use deepwell_kernels::KernelError;

/// Result of a call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DwStatus {
    /// Success: the result is complete.
    Ok = 0,
    /// An argument is invalid.
    InvalidArgument = 1,
    /// The device does not exist, or has no driver.
    NoDevice = 2,
    /// No kernel of the device supports the arguments.
    Unsupported = 3,
    /// The device failed, or has too little memory.
    DeviceError = 4,
    /// An internal error of Deepwell.
    Internal = 5,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0}")]
    InvalidArgument(String),
    #[error("{0}")]
    NoDevice(String),
    #[error("{0}")]
    Unsupported(#[from] NoKernel),
    #[error("{0}")]
    Device(#[from] KernelError),
}

impl Failure {
    fn status(&self) -> DwStatus {
        match self {
            Failure::InvalidArgument(_) => DwStatus::InvalidArgument,
            Failure::NoDevice(_) => DwStatus::NoDevice,
            Failure::Unsupported(_) => DwStatus::Unsupported,
            Failure::Device(_) => DwStatus::DeviceError,
        }
    }
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

fn set_last_error(message: &str) {
    // Messages contain no zero bytes; the text would end at the first.
    let text = message.split('\0').next().unwrap_or_default();
    LAST_ERROR.set(CString::new(text).unwrap_or_default());
}

/// Runs the body of an exported function; neither errors nor panics leave it.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> DwStatus {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => {
            // No allocation in the calls of a training step.
            if LAST_ERROR.with_borrow(|message| !message.is_empty()) {
                set_last_error("");
            }
            DwStatus::Ok
        }
        Ok(Err(failure)) => {
            set_last_error(&failure.to_string());
            failure.status()
        }
        Err(panic) => {
            let what = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("a panic without a message");
            set_last_error(&format!("a mistake in Deepwell, please report it: {what}"));
            DwStatus::Internal
        }
    }
}

/// Error message of this thread's last call, in UTF-8; empty if the call succeeded. Valid until the
/// next call of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn dw_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|message| message.as_ptr())
}
