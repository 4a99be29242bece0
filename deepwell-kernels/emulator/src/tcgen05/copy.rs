//! `tcgen05.cp`: copies from shared to tensor memory.

use super::address::TensorAddress;
use super::elements::{Container, bits6};
use super::shared_descriptor::SharedDescriptor;
use super::tile::{CHUNK_BYTES, Major, SharedTile};
use crate::decode::{Tcgen05CopyFormat, Tcgen05CopyShape};
use crate::error::Fault;
use crate::place::{Memory, Place};

/// One `tcgen05.cp` with its operand values.
///
/// With `.cta_group::2`, each CTA of the pair copies from its own shared memory to its own tensor
/// memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRequest {
    /// `.cta_group`: 1 or 2.
    pub group: u32,
    /// Rank of the issuing CTA.
    pub rank: u32,
    /// Shape and multicast.
    pub shape: Tcgen05CopyShape,
    /// Decompression.
    pub format: Tcgen05CopyFormat,
    /// Tensor-memory address.
    pub target: u32,
    /// Descriptor of the matrix in shared memory.
    pub descriptor: u64,
}

/// A legal copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyPlan {
    request: CopyRequest,
    target: TensorAddress,
    tile: SharedTile,
}

/// Rows, and 16-byte chunks per row, of a shape.
fn extent(shape: Tcgen05CopyShape) -> (u32, u32) {
    match shape {
        Tcgen05CopyShape::Rows128Bits256 => (128, 2),
        Tcgen05CopyShape::Rows4Bits256 => (4, 2),
        Tcgen05CopyShape::Rows128Bits128 => (128, 1),
        Tcgen05CopyShape::Rows64Bits128Warps02And13
        | Tcgen05CopyShape::Rows64Bits128Warps01And23 => (64, 1),
        Tcgen05CopyShape::Rows32Bits128AllWarps => (32, 1),
    }
}

/// Destination lanes of a row, relative to the target's lane.
fn lanes(shape: Tcgen05CopyShape, row: u32) -> Vec<u32> {
    match shape {
        Tcgen05CopyShape::Rows128Bits256 | Tcgen05CopyShape::Rows128Bits128 => vec![row],
        // One lane in each group of 32.
        Tcgen05CopyShape::Rows4Bits256 => vec![row * 32],
        Tcgen05CopyShape::Rows64Bits128Warps02And13 => vec![row, row + 64],
        Tcgen05CopyShape::Rows64Bits128Warps01And23 => {
            let first = row % 32 + row / 32 * 64;
            vec![first, first + 32]
        }
        Tcgen05CopyShape::Rows32Bits128AllWarps => (0..4).map(|warp| row + 32 * warp).collect(),
    }
}

impl CopyRequest {
    /// Checks that the instruction is legal, independently of memory contents.
    ///
    /// # Errors
    /// The broken rule: those of [`SharedDescriptor::decode`], [`SharedTile::check`] and
    /// [`TensorAddress`].
    pub fn check(&self) -> Result<CopyPlan, Fault> {
        let target = TensorAddress::decode(self.target)?;
        let (rows, chunks) = extent(self.shape);
        if self.shape == Tcgen05CopyShape::Rows4Bits256 {
            let any: Vec<u32> = (0..32).collect();
            target.check_lane("the target", &any)?;
        } else {
            target.check_lane("the target", &[0])?;
        }
        target.check_columns("the target", chunks * CHUNK_BYTES / 4)?;
        let container = match self.format {
            Tcgen05CopyFormat::Same => Container::Bytes,
            Tcgen05CopyFormat::B6 => Container::Padded6,
            Tcgen05CopyFormat::B4 => Container::Padded4,
        };
        let tile = SharedTile {
            descriptor: SharedDescriptor::decode("the source", self.descriptor)?,
            major: Major::K,
            container,
        };
        tile.check("the source", rows)?;
        Ok(CopyPlan { request: *self, target, tile })
    }
}

impl CopyPlan {
    /// First column and number of columns written.
    pub fn columns(&self) -> (u32, u32) {
        (self.target.column, extent(self.request.shape).1 * CHUNK_BYTES / 4)
    }

    /// Bytes read from shared memory.
    pub fn bytes_shared(&self) -> u64 {
        let (rows, chunks) = extent(self.request.shape);
        let bytes = self.tile.container.chunk_bytes() as u64;
        u64::from(rows * chunks * self.request.group) * bytes
    }

    /// Executes the copy.
    ///
    /// # Errors
    /// The errors of `memory`.
    pub fn run(&self, memory: &mut dyn Memory) -> Result<(), Fault> {
        let CopyRequest { group, rank, shape, .. } = self.request;
        let first = if group == 2 { rank & !1 } else { rank };
        let (rows, chunks) = extent(shape);
        for rank in first..first + group {
            for row in 0..rows {
                let mut data = [0; 2 * CHUNK_BYTES as usize];
                for chunk in 0..chunks {
                    let offset = self.tile.chunk_address(row, chunk);
                    let read = self.tile.container.chunk_bytes();
                    let mut bytes = [0; CHUNK_BYTES as usize];
                    memory.read(Place::Shared { rank, offset }, &mut bytes[..read])?;
                    let to = &mut data[(chunk * CHUNK_BYTES) as usize..][..bytes.len()];
                    decompress(self.request.format, &bytes, to);
                }
                let data = &data[..(chunks * CHUNK_BYTES) as usize];
                for lane in lanes(shape, row) {
                    let lane = self.target.lane + lane;
                    memory.write(TensorAddress { lane, ..self.target }.place(rank), data)?;
                }
            }
        }
        Ok(())
    }
}

/// Expands one chunk to 16 bytes: unchanged, or 16 elements of 6 bits into the low bits of 16
/// bytes, or 16 elements of 4 bits into bits 2 to 5. The latter are the layouts of A of 8-bit kinds
/// in tensor memory.
fn decompress(format: Tcgen05CopyFormat, from: &[u8], to: &mut [u8]) {
    for (i, to) in to.iter_mut().enumerate() {
        *to = match format {
            Tcgen05CopyFormat::Same => from[i],
            Tcgen05CopyFormat::B6 => bits6(from, i),
            Tcgen05CopyFormat::B4 => (from[i / 2] >> (i % 2 * 4) & 0xf) << 2,
        };
    }
}

/// [`CopyRequest::check`] followed by [`CopyPlan::run`].
///
/// # Errors
/// The errors of both.
pub fn copy(request: &CopyRequest, memory: &mut dyn Memory) -> Result<CopyPlan, Fault> {
    let plan = request.check()?;
    plan.run(memory)?;
    Ok(plan)
}
