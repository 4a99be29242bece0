//! Status codes, and the message of the last error of each thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use deepwell_trainer::TrainError;

/// Result of a function.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DwEngineStatus {
    /// Success.
    Ok = 0,
    /// An argument is invalid.
    InvalidArgument = 1,
    /// The model cannot be trained, or the device failed.
    Failed = 2,
    /// An internal error of Deepwell.
    Internal = 3,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0}")]
    InvalidArgument(String),
    #[error(transparent)]
    Train(#[from] TrainError),
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

fn set_last_error(message: &str) {
    // A zero byte would end a string of C.
    let text = message.split('\0').next().unwrap_or_default();
    LAST_ERROR.set(CString::new(text).unwrap_or_default());
}

/// Runs the body of an exported function; neither errors nor panics leave it.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> DwEngineStatus {
    let (message, status) = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => (String::new(), DwEngineStatus::Ok),
        Ok(Err(failure @ Failure::InvalidArgument(_))) => {
            (failure.to_string(), DwEngineStatus::InvalidArgument)
        }
        Ok(Err(failure @ Failure::Train(_))) => (failure.to_string(), DwEngineStatus::Failed),
        Err(panic) => {
            let what = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("a panic without a message");
            let message = format!("a mistake in Deepwell, please report it: {what}");
            (message, DwEngineStatus::Internal)
        }
    };
    set_last_error(&message);
    status
}

/// Error message of this thread's last call, in UTF-8; empty if the call succeeded. Valid until the
/// next call of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn dw_engine_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|message| message.as_ptr())
}
