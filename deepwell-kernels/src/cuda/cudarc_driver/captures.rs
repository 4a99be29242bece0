//! Calls that end the captures of other threads, and how they wait.
//!
//! All captures here are relaxed (`CU_STREAM_CAPTURE_MODE_RELAXED`). While one is open, by the
//! documentation of `cuThreadExchangeStreamCaptureMode` and the CUDA programming guide:
//!
//! - Calls that are "potentially unsafe" are permitted on every thread: `cuMemAlloc`, `cuMemFree`,
//!   `cuMemHostAlloc`, `cuMemFreeHost`, `cuModuleLoadData`, the creation of streams and events.
//! - Copies, waits and queries of streams that are not captured are permitted. Those of a captured
//!   stream, and of an event recorded in it, fail and end the capture; only the driver that
//!   captures knows these handles.
//! - The legacy stream is permitted, since all streams here are non-blocking.
//! - Calls that wait for the whole context fail and end every capture in it: `cuCtxSynchronize`,
//!   and what makes it, as `cublasLtDestroy` and `cuModuleUnload` do.
//!
//! The last kind ends captures of other drivers, too, for all drivers share the primary context of
//! a device. So these calls go through [`CaptureGate::alone`], which waits until no capture of the
//! device is open in this process and lets none begin meanwhile.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use cudarc::driver::sys;

use crate::cuda::driver::{DriverError, DriverResult};

/// The captures of this process.
pub(super) static CAPTURES: CaptureGate = CaptureGate::new();

/// Of one device.
#[derive(Default)]
struct State {
    /// The threads that began the open captures.
    open: Vec<ThreadId>,
    /// Whether a call runs that would end captures.
    is_closed: bool,
}

/// Knows the open captures of each device.
pub(super) struct CaptureGate {
    states: Mutex<BTreeMap<sys::CUdevice, State>>,
    changed: Condvar,
}

/// A capture that is open until this is dropped.
pub(super) struct OpenCapture {
    gate: &'static CaptureGate,
    device: sys::CUdevice,
    thread: ThreadId,
}

impl CaptureGate {
    const fn new() -> CaptureGate {
        CaptureGate { states: Mutex::new(BTreeMap::new()), changed: Condvar::new() }
    }

    /// Opens a capture on `device`; waits while a call runs that would end it.
    pub(super) fn open(&'static self, device: sys::CUdevice) -> OpenCapture {
        let mut states = self.lock();
        while states.entry(device).or_default().is_closed {
            states = self.changed.wait(states).unwrap_or_else(PoisonError::into_inner);
        }
        let thread = thread::current().id();
        states.entry(device).or_default().open.push(thread);
        OpenCapture { gate: self, device, thread }
    }

    /// Makes a call that ends captures of `device`, once there are none.
    ///
    /// # Errors
    /// This thread has an open capture, which nobody else would end.
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

/// While a call runs alone.
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
        // Another device's captures, and other captures of this one, are not concerned.
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
