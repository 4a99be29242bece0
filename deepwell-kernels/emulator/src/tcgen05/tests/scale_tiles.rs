//! Scales of a case in tiles of 128 rows and 4 scales, and the copies that take them to tensor
//! memory.

use super::bench::{Bench, SCALES_A, SCALES_B};
use crate::decode::{Tcgen05CopyFormat, Tcgen05CopyShape};
use crate::tcgen05::*;

/// First byte of the tiles.
const START: u32 = 0x3_4000;
/// Bytes from one to the next; a tile of 64 lines takes them all.
const PITCH: u32 = 1024;

/// A tile: lines of 16 bytes, which are four columns with four scales of one row each.
struct Tile {
    /// 0 for A, 1 for B.
    which: usize,
    /// Of four scales along K.
    group: u32,
    /// Of 128 rows.
    nth: u32,
    /// B of the layout with halves side by side: 32 lines for each half of N.
    by_halves: bool,
    offset: u32,
}

impl Tile {
    /// Row of the matrix in a line and a column, if there are so many.
    fn row(&self, rows: u32, line: u32, column: u32) -> Option<u32> {
        let row = self.nth * 128 + column * 32 + line % 32;
        if self.by_halves {
            let half = rows / 2;
            return (row < half).then_some(line / 32 * half + row);
        }
        (row < rows).then_some(row)
    }
}

impl Bench {
    pub(super) fn place_scales(&mut self) {
        let case = self.case;
        let Some((_, block)) = case.scale else { return };
        let by_halves = case.m == 128 && case.group == 2;
        let mut offset = START;
        for group in 0..(case.k() / block).div_ceil(4) {
            for which in 0..2 {
                let rows = [case.m / case.group, case.n][which];
                let by_halves = by_halves && which == 1;
                let tiles = if by_halves { 1 } else { rows.div_ceil(128) };
                for nth in 0..tiles {
                    let tile = Tile { which, group, nth, by_halves, offset };
                    for rank in 0..case.group {
                        self.write_tile(&tile, rank, rows, case.k() / block);
                    }
                    self.push_copy(&tile);
                    offset += PITCH;
                }
            }
        }
    }

    fn write_tile(&mut self, tile: &Tile, rank: u32, rows: u32, along_k: u32) {
        // Rows of A differ between CTAs, all columns of B are in both.
        let first = if tile.which == 0 { rank * rows } else { 0 };
        let lines = if tile.by_halves { 64 } else { 32 };
        for byte in 0..lines * 16 {
            let (line, column, nth) = (byte / 16, byte / 4 % 4, byte % 4);
            let at = tile.group * 4 + nth;
            let code = match tile.row(rows, line, column) {
                Some(row) if at < along_k => {
                    self.scales[tile.which][((first + row) * along_k + at) as usize]
                }
                _ => 0,
            };
            self.memory.write_byte(rank, tile.offset + byte, code);
        }
    }

    fn push_copy(&mut self, tile: &Tile) {
        let target = [SCALES_A + 4 * tile.group, SCALES_B + 8 * tile.group][tile.which];
        self.copies.push(CopyRequest {
            group: self.case.group,
            rank: 0,
            shape: if tile.by_halves {
                Tcgen05CopyShape::Rows64Bits128Warps01And23
            } else {
                Tcgen05CopyShape::Rows32Bits128AllWarps
            },
            format: Tcgen05CopyFormat::Same,
            target: target + 4 * tile.nth,
            descriptor: SharedDescriptor {
                start: tile.offset,
                leading: 128,
                stride: 128,
                base_offset: 0,
                swizzle: Swizzle::None,
            }
            .encode(),
        });
    }
}
