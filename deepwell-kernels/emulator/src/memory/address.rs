//! Windows of the generic address space, and shared addresses across a cluster.

/// First generic address of shared memory; the low 32 bits are the shared address.
pub const SHARED_WINDOW: u64 = 0x7F00_0000_0000;
/// First generic address of a thread's local memory; the low 32 bits are the local address.
pub const LOCAL_WINDOW: u64 = 0x7E00_0000_0000;
/// A shared address holds the rank of its CTA in the cluster from this bit on. (This is no rule
/// of the ISA; kernels for CTA pairs clear the lowest bit of the rank to reach the pair's leader.)
pub const RANK_SHIFT: u32 = 24;
/// First byte of a CTA's shared memory that a kernel owns: the system keeps the kibibyte below.
pub const SHARED_BASE: u32 = 1024;
/// Bytes of shared memory that a CTA may have, static and dynamic, without the system's.
pub const SHARED_BYTES_LIMIT: u32 = 227 * 1024;

/// What a generic address points into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Device memory, constants and parameters: the address itself.
    Global(u64),
    /// A shared address, with its rank.
    Shared(u32),
    /// An offset in the thread's local memory.
    Local(u32),
}

impl Window {
    /// Where a generic `address` points.
    #[inline]
    pub fn of(address: u64) -> Window {
        match address & !0xFFFF_FFFF {
            SHARED_WINDOW => Window::Shared(address as u32),
            LOCAL_WINDOW => Window::Local(address as u32),
            _ => Window::Global(address),
        }
    }
}

/// The shared address of byte `offset` of CTA `rank`.
#[inline]
pub fn shared_address(rank: u32, offset: u32) -> u32 {
    (rank << RANK_SHIFT) | offset
}

/// Rank and offset of a shared `address`.
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
