//! Pinned host memory.

use std::alloc::{self, Layout};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use cudarc::driver::sys;
use rayon::prelude::*;
use rustix::mm::{Advice, madvise};

use super::context::Context;
use super::error::{about, check};
use crate::runtime::cuda::driver::{DriverError, DriverResult};
use crate::runtime::cuda::pinned::PinnedBuffer;

/// Bytes that a thread fills or copies at a time: large buffers take seconds.
const CHUNK_BYTES: usize = 16 << 20;

/// Buffers of this size are memory of the process that is registered afterwards: `cuMemHostAlloc`
/// clears and pins pages on one thread, a second for each GiB.
const LARGE_BYTES: usize = 1 << 30;

/// Alignment of large buffers, the size of a huge page. Huge pages are pinned 512 small pages at a
/// time.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Owns the memory of a buffer; holds the context, so the memory may outlive the driver.
struct Allocation {
    pointer: *mut c_void,
    /// Memory of the process with this layout, not of the driver.
    registered: Option<Layout>,
    context: Arc<Context>,
}

// SAFETY: the memory belongs to no thread and may be freed from any thread.
unsafe impl Send for Allocation {}
// SAFETY: a shared reference gives access only to the address.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        let is_current = self.context.enter().is_ok();
        match self.registered {
            None if is_current => {
                // SAFETY: memory of ours, freed once; a failure leaves nothing to do.
                let _ = unsafe { sys::cuMemFreeHost(self.pointer) };
            }
            None => {}
            Some(layout) => {
                // SAFETY: registered once, by `register`; a context that has ended pins nothing.
                let _ = is_current.then(|| unsafe { sys::cuMemHostUnregister(self.pointer) });
                // SAFETY: allocated with this layout, and freed once.
                unsafe { alloc::dealloc(self.pointer.cast(), layout) };
            }
        }
    }
}

/// Memory of `layout`, zeroed on all cores, in huge pages where the system has huge pages.
fn allocate_pages(layout: Layout) -> Option<*mut u8> {
    // SAFETY: the layout is of at least `LARGE_BYTES`.
    let pointer = NonNull::new(unsafe { alloc::alloc(layout) })?.as_ptr();
    // SAFETY: the range was allocated just now, and the advice changes no byte. A system without
    // huge pages refuses, which costs time alone.
    let _ = unsafe { madvise(pointer.cast(), layout.size(), Advice::LinuxHugepage) };
    // SAFETY: allocated just now with this size, and nobody else knows the address.
    let memory: &mut [MaybeUninit<u8>] =
        unsafe { std::slice::from_raw_parts_mut(pointer.cast(), layout.size()) };
    memory.par_chunks_mut(CHUNK_BYTES).for_each(|chunk| chunk.fill(MaybeUninit::new(0)));
    Some(pointer)
}

/// Allocates zeroed memory of the process, and pins it for every context. `None` where the system
/// or the driver refuses.
fn register(context: &Arc<Context>, bytes: usize) -> Option<PinnedBuffer> {
    let layout = Layout::from_size_align(bytes, HUGE_PAGE_BYTES).ok()?;
    let pointer = allocate_pages(layout)?;
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
    // SAFETY: the range is of this process, and unregistered before it is freed.
    let code = unsafe { sys::cuMemHostRegister_v2(pointer.cast(), bytes, flags) };
    if check("cuMemHostRegister", code).is_err() {
        // SAFETY: allocated with this layout, and not pinned.
        unsafe { alloc::dealloc(pointer, layout) };
        return None;
    }
    let allocation = Allocation {
        pointer: pointer.cast(),
        registered: Some(layout),
        context: Arc::clone(context),
    };
    // SAFETY: initialized by `allocate_pages`; the bytes live as long as the allocation.
    Some(unsafe { PinnedBuffer::from_raw(pointer, bytes, Box::new(allocation)) })
}

/// Allocates zeroed memory, pinned for every context.
pub(super) fn allocate(context: &Arc<Context>, bytes: usize) -> DriverResult<PinnedBuffer> {
    let large = (bytes >= LARGE_BYTES).then(|| register(context, bytes));
    if let Some(buffer) = large.flatten() {
        return Ok(buffer);
    }
    let mut pointer = ptr::null_mut();
    // SAFETY: writes one address; never zero bytes, which the driver rejects.
    let code =
        unsafe { sys::cuMemHostAlloc(&mut pointer, bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) };
    check("cuMemHostAlloc", code).map_err(about(|| format!("{bytes} bytes of host memory")))?;
    let allocation = Allocation { pointer, registered: None, context: Arc::clone(context) };
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
