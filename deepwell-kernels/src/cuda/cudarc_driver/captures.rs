//! A gate for calls that invalidate captures of other threads: such calls wait.
//!
//! All captures here are relaxed (`CU_STREAM_CAPTURE_MODE_RELAXED`). During a capture, by the
//! documentation of `cuThreadExchangeStreamCaptureMode` and the CUDA programming guide:
//!
//! - "Potentially unsafe" calls are permitted on every thread: `cuMemAlloc`, `cuMemFree`,
//!   `cuMemHostAlloc`, `cuMemFreeHost`, `cuModuleLoadData`, the creation of streams and events.
//! - Copies, waits and queries of streams that are not captured are permitted. On a captured
//!   stream, or on an event recorded in a captured stream, these calls fail and invalidate the
//!   capture; only the capturing driver knows these handles.
//! - The legacy stream is permitted, since all streams here are non-blocking.
//! - Calls that wait for the whole context fail and invalidate every capture in the context:
//!   `cuCtxSynchronize`, and its callers such as `cublasLtDestroy` and `cuModuleUnload`.
//!
//! The last kind also invalidates captures of other drivers, because all drivers share the primary
//! context of a device. Such calls therefore go through [`CaptureGate::alone`], which waits until
//! no capture of the device is open in this process and delays new captures meanwhile.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use cudarc::driver::sys;

use crate::runtime::cuda::driver::{DriverError, DriverResult};

/// The captures of this process.
pub(super) static CAPTURES: CaptureGate = CaptureGate::new();

/// State of a device.
#[derive(Default)]
struct State {
    /// The threads that began the open captures.
    open: Vec<ThreadId>,
    /// Whether a call that would invalidate captures is running.
    is_closed: bool,
}

/// Tracks the open captures of each device.
pub(super) struct CaptureGate {
    states: Mutex<BTreeMap<sys::CUdevice, State>>,
    changed: Condvar,
}

/// An open capture, closed on drop.
pub(super) struct OpenCapture {
    gate: &'static CaptureGate,
    device: sys::CUdevice,
    thread: ThreadId,
}

impl CaptureGate {
    const fn new() -> CaptureGate {
        CaptureGate { states: Mutex::new(BTreeMap::new()), changed: Condvar::new() }
    }

    /// Opens a capture on `device`; waits while a call runs that would invalidate the capture.
    pub(super) fn open(&'static self, device: sys::CUdevice) -> OpenCapture {
        let mut states = self.lock();
        while states.entry(device).or_default().is_closed {
            states = self.changed.wait(states).unwrap_or_else(PoisonError::into_inner);
        }
        let thread = thread::current().id();
        states.entry(device).or_default().open.push(thread);
        OpenCapture { gate: self, device, thread }
    }

    /// Makes a call that would invalidate captures of `device`, once no captures are open.
    ///
    /// # Errors
    /// This thread itself has an open capture, so waiting would deadlock.
    pub(super) fn alone<T>(
        &self,
        device: sys::CUdevice,
        name: &str,
        call: impl FnOnce() -> T,
    ) -> DriverResult<T> {
        let mut states = self.lock();
        loop {
            let state = states.entry(device).or_default();
            if state.open.contains(&thread::current().id()) {
                return Err(DriverError::new(
                    name,
                    "expected no open capture of this thread, got one\n\
                     hint: end the capture first; the call would spoil it",
                ));
            }
            if !state.is_closed && state.open.is_empty() {
                state.is_closed = true;
                break;
            }
            states = self.changed.wait(states).unwrap_or_else(PoisonError::into_inner);
        }
        drop(states);
        let _reopens = Closed { gate: self, device };
        Ok(call())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<sys::CUdevice, State>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenCapture {
    fn drop(&mut self) {
        let mut states = self.gate.lock();
        let open = &mut states.entry(self.device).or_default().open;
        if let Some(place) = open.iter().position(|&thread| thread == self.thread) {
            open.swap_remove(place);
        }
        self.gate.changed.notify_all();
    }
}

/// Marks a device as closed while a call runs alone.
struct Closed<'a> {
    gate: &'a CaptureGate,
    device: sys::CUdevice,
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.gate.lock().entry(self.device).or_default().is_closed = false;
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_call_that_ends_captures_never_runs_while_one_is_open() {
        static GATE: CaptureGate = CaptureGate::new();
        // Open captures, or -1 while a call runs alone.
        let state = AtomicI32::new(0);
        let (captures, calls) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let open = GATE.open(0);
                        assert!(state.fetch_add(1, Ordering::SeqCst) >= 0, "a call is running");
                        thread::yield_now();
                        state.fetch_sub(1, Ordering::SeqCst);
                        drop(open);
                        captures.fetch_add(1, Ordering::SeqCst);
                    }
                });
                scope.spawn(|| {
                    for _ in 0..30 {
                        let call = || {
                            assert_eq!(state.swap(-1, Ordering::SeqCst), 0, "something is open");
                            thread::yield_now();
                            state.store(0, Ordering::SeqCst);
                        };
                        GATE.alone(0, "call", call).unwrap();
                        calls.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!((captures.into_inner(), calls.into_inner()), (300, 90));
    }

    #[test]
    fn a_thread_does_not_wait_for_its_own_capture() {
        static GATE: CaptureGate = CaptureGate::new();
        let open = GATE.open(0);
        let error = GATE.alone(0, "cuCtxSynchronize", || ()).unwrap_err().to_string();
        assert!(error.contains("cuCtxSynchronize: expected no open capture"), "{error}");
        // Captures on other devices, and new captures on this device, are not affected.
        GATE.alone(1, "call", || ()).unwrap();
        drop(GATE.open(0));
        drop(open);
        GATE.alone(0, "call", || ()).unwrap();
    }

    #[test]
    fn a_call_that_panics_lets_captures_begin_again() {
        static GATE: CaptureGate = CaptureGate::new();
        let panics = || GATE.alone(0, "call", || panic!("on purpose"));
        assert!(std::panic::catch_unwind(panics).is_err());
        let (sender, receiver) = std::sync::mpsc::channel();
        thread::spawn(move || {
            drop(GATE.open(0));
            let _ = sender.send(());
        });
        receiver.recv_timeout(Duration::from_secs(60)).expect("a capture begins");
    }
}
