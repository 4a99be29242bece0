//! Where bytes are, and how operations reach them.

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
        /// Which CTA.
        rank: u32,
        /// Byte in its window.
        offset: u32,
    },
    /// Tensor memory of a CTA of the same cluster. Bytes go on along the columns of one lane,
    /// four to a column.
    Tensor {
        /// Which CTA.
        rank: u32,
        /// Of [`TENSOR_LANES`].
        lane: u32,
        /// Of [`TENSOR_COLUMNS`].
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

/// What an operation reads and writes. The engine's memory checks bounds and initialization and
/// tells the hazard tracker who came by.
pub trait Memory {
    /// Reads bytes from `place` on.
    ///
    /// # Errors
    /// Bytes that are not there.
    fn read(&mut self, place: Place, bytes: &mut [u8]) -> Result<(), Fault>;

    /// Writes bytes from `place` on.
    ///
    /// # Errors
    /// Bytes that are not there.
    fn write(&mut self, place: Place, bytes: &[u8]) -> Result<(), Fault>;
}
