//! Pinned host memory.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use rayon::prelude::*;

use super::context::Context;
use super::error::{about, check};
use crate::runtime::cuda::driver::{DriverError, DriverResult};
use crate::runtime::cuda::pinned::PinnedBuffer;

/// Bytes that a thread fills or copies at a time: large buffers take seconds.
const CHUNK_BYTES: usize = 16 << 20;

/// Owns the memory of a buffer; holds the context, so the memory may outlive the driver.
struct Allocation {
    pointer: *mut c_void,
    context: Arc<Context>,
}

// SAFETY: the memory belongs to no thread and may be freed from any thread.
unsafe impl Send for Allocation {}
// SAFETY: a shared reference gives access only to the address.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: memory of ours, freed once; a failure leaves nothing to do.
            let _ = unsafe { sys::cuMemFreeHost(self.pointer) };
        }
    }
}

/// Allocates zeroed memory, pinned for every context.
pub(super) fn allocate(context: &Arc<Context>, bytes: usize) -> DriverResult<PinnedBuffer> {
    let mut pointer = ptr::null_mut();
    // SAFETY: writes one address; never zero bytes, which the driver rejects.
    let code =
        unsafe { sys::cuMemHostAlloc(&mut pointer, bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) };
    check("cuMemHostAlloc", code).map_err(about(|| format!("{bytes} bytes of host memory")))?;
    let allocation = Allocation { pointer, context: Arc::clone(context) };
    // SAFETY: the driver returned `bytes` bytes at this address, and nobody else knows the address.
    let memory: &mut [MaybeUninit<u8>] =
        unsafe { std::slice::from_raw_parts_mut(pointer.cast(), bytes) };
    memory.par_chunks_mut(CHUNK_BYTES).for_each(|chunk| chunk.fill(MaybeUninit::new(0)));
    // SAFETY: initialized just now; the bytes live as long as the allocation.
    Ok(unsafe { PinnedBuffer::from_raw(pointer.cast(), bytes, Box::new(allocation)) })
}

/// Copies within host memory, on all cores.
///
/// # Panics
/// If the lengths differ.
pub(super) fn copy(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "bytes of a copy");
    to.par_chunks_mut(CHUNK_BYTES)
        .zip(from.par_chunks(CHUNK_BYTES))
        .for_each(|(to, from)| to.copy_from_slice(from));
}

/// Frees a buffer of this context.
pub(super) fn free(context: &Arc<Context>, buffer: PinnedBuffer) -> DriverResult<()> {
    let own = buffer.owner().downcast_ref::<Allocation>();
    match own {
        Some(allocation) if Arc::ptr_eq(&allocation.context, context) => {
            drop(buffer);
            Ok(())
        }
        _ => Err(DriverError::new("cuMemFreeHost", "expected a buffer of this driver")),
    }
}

/// The address at `offset` in a buffer, if `bytes` bytes follow.
pub(super) fn range(buffer: &PinnedBuffer, offset: usize, bytes: usize) -> DriverResult<*mut u8> {
    if offset.checked_add(bytes).is_none_or(|end| end > buffer.len()) {
        return Err(DriverError::new(
            "pinned copy",
            format!(
                "expected a range within {} bytes, got {bytes} bytes from {offset}",
                buffer.len()
            ),
        ));
    }
    Ok(buffer.as_ptr().wrapping_add(offset))
}
