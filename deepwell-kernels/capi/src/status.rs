//! What a call returns, and the words for it.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use deepwell_ir::NoKernel;
use deepwell_kernels::KernelError;

/// What became of a call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DwStatus {
    /// The result is there.
    Ok = 0,
    /// An argument is not what the function takes.
    InvalidArgument = 1,
    /// There is no such device, or no driver for it.
    NoDevice = 2,
    /// No kernel of the device takes this.
    Unsupported = 3,
    /// The device failed, or has too little memory.
    DeviceError = 4,
    /// A mistake in Deepwell.
    Internal = 5,
}

/// Why a call did not do what it was asked for.
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
    // A message has no zero bytes; if one had, it would end there.
    let text = message.split('\0').next().unwrap_or_default();
    LAST_ERROR.set(CString::new(text).unwrap_or_default());
}

/// Runs the body of an exported function: no error and no panic leaves it.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> DwStatus {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => {
            set_last_error("");
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

/// Why the last call of this thread failed, in UTF-8, empty if it did not. Valid until the next
/// call of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn dw_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|message| message.as_ptr())
}
