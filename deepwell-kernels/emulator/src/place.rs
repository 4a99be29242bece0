//! Locations of bytes, and access to memory by operations.

use std::fmt;

use crate::error::Fault;

/// Lanes of tensor memory.
pub const TENSOR_LANES: u32 = 128;
/// Columns of tensor memory, 32 bits each.
pub const TENSOR_COLUMNS: u32 = 512;

/// The first byte of an access. `rank` is the rank of a CTA in its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// Device memory.
    Global(u64),
    /// Shared memory of a CTA of the same cluster.
    Shared {
        /// Rank of the CTA.
        rank: u32,
        /// Byte offset in the CTA's shared window.
        offset: u32,
    },
    /// Tensor memory of a CTA of the same cluster. Consecutive bytes follow the columns of one
    /// lane, four bytes to a column.
    Tensor {
        /// Rank of the CTA.
        rank: u32,
        /// Lane, below [`TENSOR_LANES`].
        lane: u32,
        /// Column, below [`TENSOR_COLUMNS`].
        column: u32,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Global(address) => write!(f, "global {address:#x}"),
            Place::Shared { rank, offset } => write!(f, "shared {offset:#x} of CTA {rank}"),
            Place::Tensor { rank, lane, column } => {
                write!(f, "tensor memory lane {lane} column {column} of CTA {rank}")
            }
        }
    }
}

/// Memory that an operation reads and writes. The engine's implementation checks bounds and
/// initialization, and reports each access to the hazard tracker.
pub trait Memory {
    /// Reads bytes starting at `place`.
    ///
    /// # Errors
    /// Bytes outside of the memory.
    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), Fault>;

    /// Writes bytes starting at `place`.
    ///
    /// # Errors
    /// Bytes outside of the memory.
    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), Fault>;
}
