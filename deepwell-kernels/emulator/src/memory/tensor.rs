//! Tensor memory of one CTA.

use super::POISON;
use crate::error::Fault;
use crate::place::{TENSOR_COLUMNS, TENSOR_LANES};

/// Tensor memory of one CTA: 128 lanes of 512 columns of 32 bits. The owner keeps track of
/// allocated columns.
#[derive(Debug, Default)]
pub struct TensorMemory {
    /// Cells lane by lane; empty until the first allocation.
    cells: Vec<u8>,
    /// One bit per 32-bit cell, set when the cell is written.
    written: Vec<u64>,
}

impl TensorMemory {
    /// Creates tensor memory without cells; the first allocation adds the cells.
    pub fn new() -> TensorMemory {
        TensorMemory::default()
    }

    /// Fills `columns` columns starting at `column` with poison, as a new allocation does.
    pub fn poison(&mut self, column: u32, columns: u32) {
        if self.cells.is_empty() {
            let cells = (TENSOR_LANES * TENSOR_COLUMNS) as usize;
            self.cells = vec![POISON; cells * 4];
            self.written = vec![0; cells / 64];
        }
        for lane in 0..TENSOR_LANES as usize {
            for column in column.min(TENSOR_COLUMNS)..(column + columns).min(TENSOR_COLUMNS) {
                let cell = lane * TENSOR_COLUMNS as usize + column as usize;
                self.cells[cell * 4..cell * 4 + 4].fill(POISON);
                self.written[cell / 64] &= !(1 << (cell % 64));
            }
        }
    }

    fn cell(&self, lane: u32, column: u32, bytes: usize) -> Result<usize, Fault> {
        let columns = bytes.div_ceil(4);
        if lane >= TENSOR_LANES || column as usize + columns > TENSOR_COLUMNS as usize {
            return Err(Fault::new(
                "tensor-memory-out-of-range",
                format!(
                    "columns {column} to {} of lane {lane}: there are {TENSOR_COLUMNS} columns of \
                     {TENSOR_LANES} lanes",
                    column as usize + columns
                ),
            ));
        }
        if self.cells.is_empty() {
            return Err(Fault::new(
                "tensor-memory-not-allocated",
                format!("column {column} of lane {lane}: the CTA has allocated nothing"),
            ));
        }
        Ok((lane * TENSOR_COLUMNS + column) as usize)
    }

    /// Returns bytes of one lane starting at `column`, and whether all their cells were written.
    ///
    /// # Errors
    /// Cells outside of tensor memory.
    pub fn read(&self, lane: u32, column: u32, bytes: usize) -> Result<(&[u8], bool), Fault> {
        let cell = self.cell(lane, column, bytes)?;
        let written = words_of(cell, bytes).all(|(word, bits)| self.written[word] & bits == bits);
        Ok((&self.cells[cell * 4..cell * 4 + bytes], written))
    }

    /// Returns bytes of one lane starting at `column`, all of which the caller overwrites.
    ///
    /// # Errors
    /// Cells outside of tensor memory.
    pub fn write(&mut self, lane: u32, column: u32, bytes: usize) -> Result<&mut [u8], Fault> {
        let cell = self.cell(lane, column, bytes)?;
        for (word, bits) in words_of(cell, bytes) {
            self.written[word] |= bits;
        }
        Ok(&mut self.cells[cell * 4..cell * 4 + bytes])
    }
}

/// Returns the words of the bit set, with bit masks, that cover `bytes` bytes starting at cell
/// `first`.
fn words_of(first: usize, bytes: usize) -> impl Iterator<Item = (usize, u64)> {
    let end = first + bytes.div_ceil(4);
    (first / 64..end.div_ceil(64)).map(move |word| {
        let from = first.saturating_sub(word * 64);
        let count = (end - word * 64).min(64) - from;
        (word, u64::MAX.checked_shr(64 - count as u32).unwrap_or(0) << from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_of_a_lane_are_consecutive() {
        let mut memory = TensorMemory::new();
        assert_eq!(memory.read(0, 0, 4).unwrap_err().rule, "tensor-memory-not-allocated");
        memory.poison(0, 64);
        assert!(!memory.read(3, 10, 8).unwrap().1);
        memory.write(3, 10, 8).unwrap().copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(memory.read(3, 11, 4).unwrap(), (&[5, 6, 7, 8][..], true));
        assert_eq!(memory.read(3, 12, 4).unwrap(), (&[POISON; 4][..], false));
        for (lane, column, bytes) in [(128, 0, 4), (0, 512, 4), (0, 510, 12)] {
            let fault = memory.read(lane, column, bytes).unwrap_err();
            assert_eq!(fault.rule, "tensor-memory-out-of-range");
        }
        memory.poison(11, 1);
        assert_eq!(memory.read(3, 11, 4).unwrap(), (&[POISON; 4][..], false));
        assert!(memory.read(3, 10, 4).unwrap().1);
    }

    #[test]
    fn bits_of_cells_are_words() {
        let check = |first: usize, bytes: usize, expected: &[(usize, u64)]| {
            assert_eq!(words_of(first, bytes).collect::<Vec<_>>(), expected, "{first}, {bytes}");
        };
        check(5, 0, &[(0, 0)]);
        check(64, 0, &[]);
        check(0, 1, &[(0, 1)]);
        check(3, 8, &[(0, 0b11000)]);
        check(63, 5, &[(0, 1 << 63), (1, 1)]);
        check(64, 256, &[(1, u64::MAX)]);
        check(126, 4 * 67, &[(1, 0b11 << 62), (2, u64::MAX), (3, 1)]);
    }
}
