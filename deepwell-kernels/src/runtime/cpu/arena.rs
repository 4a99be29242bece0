//! The CPU's arena: one zeroed, aligned allocation, and typed views of its ranges.
//!
//! Creating a view does not borrow the arena, because a call holds several views at once, some of
//! them mutable. Three rules make this sound:
//! - a view is made only of an aligned range inside the arena;
//! - when a call is prepared, two views may overlap only if both are read-only
//!   (`Operands::check_views`), whether or not the program was verified;
//! - views exist only while their call runs, and calls run one after another.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ptr::NonNull;

use bytemuck::Pod;
use deepwell_ir::{ALIGNMENT_BYTES, ByteRange};

use crate::KernelError;

/// Alignment that every allocator guarantees.
const ALLOCATOR_ALIGNMENT_BYTES: usize = 16;

/// Owned bytes, initially zero. The operating system maps a page at its first use.
pub(crate) struct Arena {
    /// The first aligned byte of the allocation.
    start: NonNull<u8>,
    bytes: usize,
    allocation: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the arena owns its bytes; the only other pointers to them are views, which live within a
// call.
unsafe impl Send for Arena {}

impl Arena {
    pub(crate) fn new(bytes: usize) -> Result<Arena, KernelError> {
        let out_of_memory = || KernelError::OutOfMemory { bytes };
        // An allocator zeroes byte by byte, and so touches every page, for a larger alignment than
        // this.
        let allocated = bytes.checked_add(ALIGNMENT_BYTES).ok_or_else(out_of_memory)?;
        let layout = Layout::from_size_align(allocated, ALLOCATOR_ALIGNMENT_BYTES)
            .map_err(|_| out_of_memory())?;
        // SAFETY: the size is not zero.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(out_of_memory)?;
        let skipped = allocation.as_ptr().align_offset(ALIGNMENT_BYTES);
        // SAFETY: fewer than `ALIGNMENT_BYTES` are skipped, and the allocation is `ALIGNMENT_BYTES`
        // larger.
        let start = unsafe { allocation.add(skipped) };
        Ok(Arena { start, bytes, allocation, layout })
    }

    fn contains(&self, range: ByteRange) -> bool {
        range.end() <= self.bytes
    }

    /// Bytes of a range, for copies between calls.
    pub(crate) fn bytes(&mut self, range: ByteRange) -> Option<&mut [u8]> {
        if !self.contains(range) {
            return None;
        }
        // SAFETY: inside the allocation, and `&mut self` keeps every other access away.
        Some(unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.offset), range.bytes)
        })
    }

    /// Bytes of a range, for reads between calls.
    pub(crate) fn view(&self, range: ByteRange) -> Option<&[u8]> {
        if !self.contains(range) {
            return None;
        }
        // SAFETY: inside the allocation; calls run only through `&mut CpuBackend`, so no call
        // writes while this borrow of the backend lives.
        Some(unsafe {
            std::slice::from_raw_parts(self.start.as_ptr().add(range.offset), range.bytes)
        })
    }

    fn pointer<T>(&self, range: ByteRange) -> *mut T {
        assert!(self.contains(range), "range outside of the arena");
        // SAFETY: the offset is inside the allocation, checked above.
        unsafe { self.start.as_ptr().add(range.offset).cast() }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and dropped once.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}

/// A range that a call reads as elements of `T`.
#[derive(Debug)]
pub(crate) struct In<T> {
    range: ByteRange,
    element: PhantomData<fn() -> T>,
}

/// Whether elements of `T` can begin at the start of a range. The arena itself is aligned for every
/// `T`.
fn is_aligned<T>(range: ByteRange) -> bool {
    const { assert!(align_of::<T>() <= ALIGNMENT_BYTES) };
    range.offset.is_multiple_of(align_of::<T>())
}

impl<T: Pod> In<T> {
    /// Returns `None` for a range that is misaligned for `T`.
    pub(crate) fn new(range: ByteRange) -> Option<In<T>> {
        is_aligned::<T>(range).then_some(In { range, element: PhantomData })
    }

    /// The elements of the range.
    pub(crate) fn of<'a>(&self, arena: &'a Arena) -> &'a [T] {
        let length = self.range.bytes / size_of::<T>();
        // SAFETY: `new` checked the alignment and `pointer` the bounds; any bytes are a valid
        // `T: Pod`; no view of the running call writes this range.
        unsafe { std::slice::from_raw_parts(arena.pointer::<T>(self.range), length) }
    }
}

/// A range that a call writes or updates as elements of `T`.
#[derive(Debug)]
pub(crate) struct Out<T> {
    range: ByteRange,
    element: PhantomData<fn() -> T>,
}

impl<T: Pod> Out<T> {
    /// Returns `None` for a range that is misaligned for `T`.
    pub(crate) fn new(range: ByteRange) -> Option<Out<T>> {
        is_aligned::<T>(range).then_some(Out { range, element: PhantomData })
    }

    /// The elements of the range.
    #[expect(clippy::mut_from_ref, reason = "the module's rules keep views apart")]
    pub(crate) fn of<'a>(&self, arena: &'a Arena) -> &'a mut [T] {
        let length = self.range.bytes / size_of::<T>();
        // SAFETY: `new` checked the alignment and `pointer` the bounds; any bytes are a valid
        // `T: Pod`; this is the running call's only view of the range.
        unsafe { std::slice::from_raw_parts_mut(arena.pointer::<T>(self.range), length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_begins_aligned() {
        for bytes in [0, 1, 255, 256, 4097] {
            let mut arena = Arena::new(bytes).unwrap();
            assert_eq!(arena.start.as_ptr().align_offset(ALIGNMENT_BYTES), 0);
            let whole = ByteRange { offset: 0, bytes };
            assert!(arena.bytes(whole).is_some_and(|all| all.iter().all(|&byte| byte == 0)));
            assert!(arena.bytes(ByteRange { offset: 1, bytes }).is_none());
        }
    }

    /// Explicit zeroing would touch every page, including the workspace that only fallback GEMMs
    /// use.
    #[cfg(target_os = "linux")]
    #[test]
    fn pages_are_touched_when_they_are_used() {
        let resident_bytes = || {
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
        };
        let before = resident_bytes();
        let arena = Arena::new(2 << 30).unwrap();
        let after = resident_bytes();
        assert!(after < before + (1 << 30), "{before} and {after} bytes");
        assert_eq!(arena.bytes, 2 << 30);
    }
}
