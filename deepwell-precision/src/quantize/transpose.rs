//! Transposes bytes with shifts and masks on 64-bit words, eight 8 x 8 squares at a time.

/// One row of 128 bytes, as 64-bit words, so that eight bytes move at a time.
#[derive(Clone, Copy)]
pub(super) struct Words([u64; 16]);

impl Words {
    pub(super) const ZERO: Self = Self([0; 16]);

    #[inline(always)]
    pub(super) fn as_bytes(&self) -> &[u8; 128] {
        bytemuck::cast_ref(&self.0)
    }

    #[inline(always)]
    pub(super) fn as_bytes_mut(&mut self) -> &mut [u8; 128] {
        bytemuck::cast_mut(&mut self.0)
    }
}

/// Writes 8 rows of 128 bytes as the bytes from 8 * `word` on of 128 columns.
#[inline(always)]
pub(super) fn transpose_8_rows(rows: &[Words; 8], columns: &mut [Words; 128], word: usize) {
    for half in 0..2 {
        // Lane l of `square[r]` holds row r of the l-th square; byte c of the lane is column c.
        let mut square = [[0_u64; 8]; 8];
        for r in 0..8 {
            let words = &rows[r].0[half * 8..half * 8 + 8];
            for (lane, &word) in square[r].iter_mut().zip(words) {
                *lane = u64::from_le(word);
            }
        }
        swap_off_diagonal::<1>(&mut square, 0x00FF_00FF_00FF_00FF);
        swap_off_diagonal::<2>(&mut square, 0x0000_FFFF_0000_FFFF);
        swap_off_diagonal::<4>(&mut square, 0x0000_0000_FFFF_FFFF);
        for l in 0..8 {
            for c in 0..8 {
                columns[half * 64 + l * 8 + c].0[word] = square[c][l].to_le();
            }
        }
    }
}

/// Swaps the upper right with the lower left quarter of every square of 2 `SIZE` rows and columns.
#[inline(always)]
fn swap_off_diagonal<const SIZE: usize>(square: &mut [[u64; 8]; 8], mask: u64) {
    for pair in 0..4 {
        // The rows without the bit SIZE: 0 2 4 6, 0 1 4 5, 0 1 2 3.
        let upper = pair / SIZE * 2 * SIZE + pair % SIZE;
        let lower = upper + SIZE;
        let (above, below) = square.split_at_mut(lower);
        for (upper, lower) in above[upper].iter_mut().zip(&mut below[0]) {
            let moved = ((*upper >> (8 * SIZE)) ^ *lower) & mask;
            *lower ^= moved;
            *upper ^= moved << (8 * SIZE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_lands_at_its_mirror_place() {
        let byte = |r: usize, c: usize| (r * 31 + c * 7 + r * c) as u8;
        let mut columns = [Words::ZERO; 128];
        for word in 0..16 {
            let mut rows = [Words::ZERO; 8];
            for (r, row) in rows.iter_mut().enumerate() {
                for (c, value) in row.as_bytes_mut().iter_mut().enumerate() {
                    *value = byte(word * 8 + r, c);
                }
            }
            transpose_8_rows(&rows, &mut columns, word);
        }
        for (c, column) in columns.iter().enumerate() {
            for (r, &value) in column.as_bytes().iter().enumerate() {
                assert_eq!(value, byte(r, c), "row {r}, column {c}");
            }
        }
    }
}
