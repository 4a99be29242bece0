//! Typed buffers, carved out of a workspace of bytes.

use super::ALIGNMENT;

/// Hands out a workspace from the front, buffer by buffer, each aligned to a cache line.
pub(crate) struct Carver<'a> {
    rest: &'a mut [u8],
}

impl<'a> Carver<'a> {
    pub(crate) fn new(workspace: &'a mut [u8]) -> Self {
        Self { rest: align(workspace) }
    }

    /// Returns the next `count` elements; their values are arbitrary.
    ///
    /// # Panics
    ///
    /// If fewer bytes are left. Callers size workspaces as sums of [`carved_bytes`].
    pub(crate) fn take<T: bytemuck::Pod>(&mut self, count: usize) -> &'a mut [T] {
        let (taken, rest) = std::mem::take(&mut self.rest).split_at_mut(carved_bytes::<T>(count));
        self.rest = rest;
        whole_elements(&mut taken[..count * size_of::<T>()])
    }

    /// Returns the remaining bytes.
    pub(crate) fn rest(self) -> &'a mut [u8] {
        self.rest
    }
}

/// Bytes that [`Carver::take`] consumes. Add [`ALIGNMENT`] once for the start of the workspace.
pub(crate) fn carved_bytes<T>(count: usize) -> usize {
    (count * size_of::<T>()).next_multiple_of(ALIGNMENT)
}

/// The part of `workspace` that starts at a multiple of [`ALIGNMENT`].
pub(crate) fn align(workspace: &mut [u8]) -> &mut [u8] {
    let skipped = workspace.as_ptr().align_offset(ALIGNMENT).min(workspace.len());
    &mut workspace[skipped..]
}

/// Reinterprets aligned bytes as whole elements. An empty result needs no alignment.
pub(super) fn whole_elements<T: bytemuck::Pod>(bytes: &mut [u8]) -> &mut [T] {
    let length = bytes.len() / size_of::<T>() * size_of::<T>();
    if length == 0 { &mut [] } else { bytemuck::cast_slice_mut(&mut bytes[..length]) }
}
