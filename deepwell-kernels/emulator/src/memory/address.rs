//! Windows of the generic address space, and shared addresses across a cluster.

/// First generic address of shared memory; the low 32 bits are the shared address.
pub const SHARED_WINDOW: u64 = 0x7F00_0000_0000;
/// First generic address of a thread's local memory; the low 32 bits are the local address.
pub const LOCAL_WINDOW: u64 = 0x7E00_0000_0000;
/// Lowest bit of the CTA's rank in a shared address. (The ISA does not define this bit; kernels for
/// CTA pairs clear the lowest bit of the rank to reach the pair's leader.)
pub const RANK_SHIFT: u32 = 24;
/// Offset of the first byte of shared memory that a kernel owns; the first KiB is the system's.
pub const SHARED_BASE: u32 = 1024;
/// Most bytes of shared memory of a CTA, static and dynamic, without the system's KiB.
pub const SHARED_BYTES_LIMIT: u32 = 227 * 1024;

/// Memory space of a generic address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Device memory, constants and parameters: the address unchanged.
    Global(u64),
    /// A shared address, with the CTA's rank.
    Shared(u32),
    /// An offset in the thread's local memory.
    Local(u32),
}

impl Window {
    /// Returns the window of a generic `address`.
    #[inline]
    pub fn of(address: u64) -> Window {
        match address & !0xFFFF_FFFF {
            SHARED_WINDOW => Window::Shared(address as u32),
            LOCAL_WINDOW => Window::Local(address as u32),
            _ => Window::Global(address),
        }
    }
}

/// Returns the shared address of byte `offset` of CTA `rank`.
#[inline]
pub fn shared_address(rank: u32, offset: u32) -> u32 {
    (rank << RANK_SHIFT) | offset
}

/// Splits a shared `address` into rank and offset.
#[inline]
pub fn split_shared(address: u32) -> (u32, u32) {
    (address >> RANK_SHIFT, address & ((1 << RANK_SHIFT) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_told_apart() {
        for (address, expected) in [
            (0x10_0000, Window::Global(0x10_0000)),
            (SHARED_WINDOW + 0x400, Window::Shared(0x400)),
            (SHARED_WINDOW + 0x0300_0410, Window::Shared(0x0300_0410)),
            (LOCAL_WINDOW + 12, Window::Local(12)),
            (0x7F01_0000_0000, Window::Global(0x7F01_0000_0000)),
        ] {
            assert_eq!(Window::of(address), expected, "{address:#x}");
        }
        assert_eq!(split_shared(shared_address(3, 0x410)), (3, 0x410));
    }
}
