//! The device's primary context and its streams, shared by the driver, by libraries that enqueue
//! work, and by pinned memory.
//!
//! A [`Stream`] stands for up to two driver streams: its own, and a private stream for the work of
//! a group. [`Context::resolve`] returns the stream in use at the moment, so callers that enqueue
//! work need not know about groups. Streams live until the last user of the context is dropped.

use std::ffi::c_int;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::captures::{CAPTURES, OpenCapture};
use super::error::check;
use crate::runtime::cuda::driver::{DriverError, DriverResult, Priority, Stream};

pub(super) struct StreamSlot {
    pub(super) raw: sys::CUstream,
    pub(super) priority: c_int,
    /// Whether another library owns the stream: it may end before this context.
    pub(super) is_foreign: bool,
    /// Captures the work of groups; created for the first group.
    pub(super) private: Option<sys::CUstream>,
    /// Set during a capture that began with this stream.
    pub(super) recording: Option<OpenCapture>,
    /// Set during a group.
    pub(super) is_grouped: bool,
}

pub(super) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
    /// For synchronous copies.
    transfers: sys::CUstream,
    /// Least and greatest priority of a stream; higher priorities are smaller numbers.
    priorities: (c_int, c_int),
    slots: Mutex<Vec<StreamSlot>>,
}

// SAFETY: the driver's handles belong to no thread, its functions may be called from any thread,
// and the slots are behind a lock.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of a device.
    pub(super) fn retain(device: sys::CUdevice) -> DriverResult<Context> {
        let mut raw = ptr::null_mut();
        // SAFETY: the device came from the driver; writes one handle.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut raw, device)
        })?;
        let mut context = Context {
            device,
            raw,
            transfers: ptr::null_mut(),
            priorities: (0, 0),
            slots: Mutex::new(Vec::new()),
        };
        context.enter()?;
        let (least, greatest) = (&mut context.priorities.0, &mut context.priorities.1);
        // SAFETY: writes two integers.
        let code = unsafe { sys::cuCtxGetStreamPriorityRange(least, greatest) };
        check("cuCtxGetStreamPriorityRange", code)?;
        context.transfers = new_stream(context.priorities.0)?;
        Ok(context)
    }

    /// Makes the context current on the calling thread.
    pub(super) fn enter(&self) -> DriverResult<()> {
        // SAFETY: the context is retained until `self` is dropped.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    pub(super) fn raw(&self) -> sys::CUcontext {
        self.raw
    }

    pub(super) fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// The greatest priority of a stream.
    pub(super) fn high_priority(&self) -> c_int {
        self.priorities.1
    }

    pub(super) fn transfers(&self) -> sys::CUstream {
        self.transfers
    }

    pub(super) fn slots(&self) -> MutexGuard<'_, Vec<StreamSlot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a stream that does not synchronize with the legacy stream.
    pub(super) fn add_stream(&self, priority: Priority) -> DriverResult<Stream> {
        let (least, greatest) = self.priorities;
        let priority = match priority {
            Priority::Low => least,
            Priority::Middle => (least + greatest) / 2,
            Priority::High => greatest,
        };
        let raw = new_stream(priority)?;
        Ok(self.add_slot(raw, priority, false))
    }

    /// Adds a stream that another library owns.
    pub(super) fn add_foreign_stream(&self, handle: u64) -> Stream {
        let raw = ptr::with_exposed_provenance_mut(handle as usize);
        self.add_slot(raw, self.priorities.0, true)
    }

    fn add_slot(&self, raw: sys::CUstream, priority: c_int, is_foreign: bool) -> Stream {
        let mut slots = self.slots();
        let (private, recording) = (None, None);
        let slot = StreamSlot { raw, priority, is_foreign, private, recording, is_grouped: false };
        slots.push(slot);
        Stream(slots.len() as u64 - 1)
    }

    /// The driver stream that receives work for `stream` at this moment.
    pub(super) fn resolve(&self, stream: Stream) -> DriverResult<sys::CUstream> {
        let mut slots = self.slots();
        let slot = slot_of(&mut slots, stream)?;
        Ok(match slot.private {
            Some(private) if slot.is_grouped => private,
            _ => slot.raw,
        })
    }

    /// Makes a call that would invalidate the captures of this device, once no captures are open.
    pub(super) fn alone<T>(&self, name: &str, call: impl FnOnce() -> T) -> DriverResult<T> {
        CAPTURES.alone(self.device, name, call)
    }

    /// Waits for all own streams that are not captured.
    pub(super) fn synchronize(&self) -> DriverResult<()> {
        // Release the lock before waiting, so that other threads can enqueue.
        let slots = self.slots();
        let own = slots.iter().filter(|slot| !slot.is_foreign);
        let streams: Vec<sys::CUstream> = own.map(|slot| slot.raw).collect();
        drop(slots);
        for stream in streams.into_iter().chain([self.transfers]) {
            if !is_capturing(stream)? {
                // SAFETY: streams live as long as the context.
                check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })?;
            }
        }
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.enter().is_err() {
            // The driver library has shut down and released everything.
            return;
        }
        let slots = self.slots.get_mut().unwrap_or_else(PoisonError::into_inner);
        let raw = |slot: &StreamSlot| (!slot.is_foreign).then_some(slot.raw);
        let own = slots.drain(..).flat_map(|slot| [raw(&slot), slot.private]);
        for stream in own.flatten().chain([self.transfers]).filter(|stream| !stream.is_null()) {
            // SAFETY: streams of this context, each destroyed once; a failure leaves nothing to do.
            let _ = unsafe { sys::cuStreamDestroy_v2(stream) };
        }
        // SAFETY: retained once in `retain`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

pub(super) fn slot_of(slots: &mut [StreamSlot], stream: Stream) -> DriverResult<&mut StreamSlot> {
    slots.get_mut(stream.0 as usize).ok_or_else(|| no_such("stream", stream.0))
}

/// The error of a handle that is unknown or no longer valid.
pub(super) fn no_such(kind: &str, handle: u64) -> DriverError {
    DriverError::new(kind, format!("expected a {kind} of this driver, got number {handle}"))
}

/// Creates a stream in the current context.
pub(super) fn new_stream(priority: c_int) -> DriverResult<sys::CUstream> {
    let mut raw = ptr::null_mut();
    let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: the caller made the context current; writes one handle.
    check("cuStreamCreateWithPriority", unsafe {
        sys::cuStreamCreateWithPriority(&mut raw, flags, priority)
    })?;
    Ok(raw)
}

/// Whether work on a stream is captured.
pub(super) fn is_capturing(stream: sys::CUstream) -> DriverResult<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a live stream; writes one value of the enumeration.
    check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream, &mut status) })?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}
