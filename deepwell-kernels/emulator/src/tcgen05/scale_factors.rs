//! Block scales in tensor memory.
//!
//! A 32-bit column holds up to four scales of one row. The scales of row `r` are in lane `r % 32`
//! of column `r / 32`, and in the same lane of the other three groups of 32 lanes: every group of
//! lanes has its own copy. In the layout [`DataPath::B`], lanes 0 to 63 hold the first half of D's
//! columns, lanes 64 to 127 the second half. The scales of B follow: lanes 0 to 63 hold two copies
//! for the first half of N, lanes 64 to 127 for the second half.

use super::address::TensorAddress;
use super::datapath::{DataPath, Part};
use crate::error::Fault;
use crate::place::Memory;

/// Lanes of one copy.
const LANES: u32 = 32;

/// The scales of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleTile {
    /// First column.
    pub address: TensorAddress,
    /// First byte in a column.
    pub id: u32,
    /// Scales per row.
    pub count: u32,
}

impl ScaleTile {
    /// Decodes the address of scales. Its two upper bits are zero or repeat the byte `id`.
    ///
    /// # Errors
    /// `scale-address-id`: the upper bits name another byte. `tensor-lane-alignment`: the lane is
    /// not 0.
    pub fn decode(what: &str, bits: u32, id: u32, count: u32) -> Result<ScaleTile, Fault> {
        let upper = bits >> 30;
        if upper != 0 && upper != id {
            return Err(Fault::new(
                "scale-address-id",
                format!(
                    "address {bits:#010x} of {what} says byte {upper} in bits 30 and 31, the \
                     instruction descriptor says {id}"
                ),
            ));
        }
        let address = TensorAddress::decode(bits & 0x3fff_ffff)?;
        address.check_lane(what, &[0])?;
        Ok(ScaleTile { address, id, count })
    }

    /// Number of columns for the scales of `rows` rows.
    pub fn columns(rows: u32) -> u32 {
        rows.div_ceil(LANES)
    }

    /// Reads the scales of the rows of A in a part.
    ///
    /// # Errors
    /// The errors of `memory`; `scale-copies-differ`.
    pub fn read_a(
        &self,
        part: &Part,
        rank: u32,
        memory: &mut dyn Memory,
    ) -> Result<Vec<u8>, Fault> {
        let rows = part.rows.end - part.rows.start;
        self.read("the scales of A", rows, &[0, 1, 2, 3], rank, memory)
    }

    /// Reads the scales of the columns of B in a part.
    ///
    /// # Errors
    /// The errors of `memory`; `scale-copies-differ`.
    pub fn read_b(
        &self,
        path: DataPath,
        part: &Part,
        rank: u32,
        memory: &mut dyn Memory,
    ) -> Result<Vec<u8>, Fault> {
        let columns = part.columns.end - part.columns.start;
        let copies: &[u32] = match (path, part.slice) {
            (DataPath::B, 0) => &[0, 1],
            (DataPath::B, _) => &[2, 3],
            _ => &[0, 1, 2, 3],
        };
        self.read("the scales of B", columns, copies, rank, memory)
    }

    /// Reads the scales of `rows` rows, row-major. All copies must be equal.
    fn read(
        &self,
        what: &str,
        rows: u32,
        copies: &[u32],
        rank: u32,
        memory: &mut dyn Memory,
    ) -> Result<Vec<u8>, Fault> {
        let count = self.count as usize;
        let mut scales = vec![0; rows as usize * count];
        let mut words = [0; 64];
        for lane in 0..LANES.min(rows) {
            let columns = (rows - lane).div_ceil(LANES);
            let words = &mut words[..columns as usize * 4];
            for (nth, copy) in copies.iter().enumerate() {
                let address = TensorAddress { lane: copy * LANES + lane, ..self.address };
                memory.read(address.place(rank), words)?;
                for (column, word) in words.chunks_exact(4).enumerate() {
                    let row = column * LANES as usize + lane as usize;
                    let found = &word[self.id as usize..][..count];
                    let scale = &mut scales[row * count..][..count];
                    if nth == 0 {
                        scale.copy_from_slice(found);
                    } else if scale != found {
                        return Err(Fault::new(
                            "scale-copies-differ",
                            format!(
                                "{what} for row {row} are {scale:02x?} in lane {} and {found:02x?} \
                                 in lane {}; every 32 lanes need the same",
                                copies[0] * LANES + lane,
                                address.lane
                            ),
                        ));
                    }
                }
            }
        }
        Ok(scales)
    }
}
