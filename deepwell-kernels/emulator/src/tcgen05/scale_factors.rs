//! Block scales in tensor memory.
//!
//! A column of 32 bits holds up to four scales of one row. Row `r` is in lane `r % 32` of column
//! `r / 32`, and in the same lanes of the other three groups of 32: every group of lanes has its
//! own copy. In the layout [`DataPath::B`], where the lower 64 lanes of D have the first half of
//! its columns, so do the scales of B: lanes 0 to 63 hold two copies for the first half of N,
//! lanes 64 to 127 for the second.

use super::address::TensorAddress;
use super::datapath::{DataPath, Part};
use crate::error::Fault;
use crate::place::Memory;

/// Lanes of one copy.
const LANES: u32 = 32;

/// The scales of one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleTile {
    /// First column.
    pub address: TensorAddress,
    /// First byte in a column.
    pub id: u32,
    /// Scales of one row.
    pub count: u32,
}

impl ScaleTile {
    /// Takes the address of scales apart. Its two upper bits may repeat the byte `id`.
    ///
    /// # Errors
    /// `scale-address-id`: they say another byte. `tensor-lane-alignment`: it is not lane 0.
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

    /// Columns that hold the scales of `rows` rows.
    pub fn columns(rows: u32) -> u32 {
        rows.div_ceil(LANES)
    }

    /// Scales of the rows of A that a part has.
    ///
    /// # Errors
    /// Those of `memory`; `scale-copies-differ`.
    pub fn read_a(
        &self,
        part: &Part,
        rank: u32,
        memory: &mut dyn Memory,
    ) -> Result<Vec<u8>, Fault> {
        let rows = part.rows.end - part.rows.start;
        self.read("the scales of A", rows, &[0, 1, 2, 3], rank, memory)
    }

    /// Scales of the columns of B that a part has.
    ///
    /// # Errors
    /// Those of `memory`; `scale-copies-differ`.
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

    /// Scales of `rows` rows, row after row, which all copies must have alike.
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
