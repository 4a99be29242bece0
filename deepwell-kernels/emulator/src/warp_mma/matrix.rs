//! `ldmatrix`, `stmatrix` and `movmatrix`.

use super::{LANES, Row};
use crate::decode::{MatrixElement, MatrixShape};
use crate::error::Fault;
use crate::place::{Memory, Place};

/// Bytes of a matrix row in shared memory, including padding.
const ROW_BYTES: usize = 16;

/// Qualifiers of `ldmatrix` and `stmatrix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixAccess {
    /// Shape of one matrix.
    pub shape: MatrixShape,
    /// Number of matrices: 1, 2 or 4.
    pub count: u32,
    /// `.trans`.
    pub transpose: bool,
    /// Element type.
    pub element: MatrixElement,
}

impl MatrixAccess {
    /// Number of lanes whose addresses are used: the first `8 count` or `16 count` lanes.
    pub fn addresses(&self) -> usize {
        let rows = if self.shape == MatrixShape::M16n16 { 16 } else { 8 };
        rows * self.count as usize
    }

    /// Number of 32-bit registers per thread.
    pub fn registers(&self) -> usize {
        let each = if self.shape == MatrixShape::M16n16 { 2 } else { 1 };
        each * self.count as usize
    }

    /// Checks shape, element and count of a load.
    ///
    /// # Errors
    /// `matrix-load-form`.
    pub fn check_load(&self) -> Result<(), Fault> {
        let is_legal = match (self.shape, self.element) {
            (MatrixShape::M8n8, MatrixElement::B16) => matches!(self.count, 1 | 2 | 4),
            (MatrixShape::M8n16, MatrixElement::B8FromB6 | MatrixElement::B8FromB4) => {
                matches!(self.count, 1 | 2 | 4) && !self.transpose
            }
            (
                MatrixShape::M16n16,
                MatrixElement::B8 | MatrixElement::B8FromB6 | MatrixElement::B8FromB4,
            ) => matches!(self.count, 1 | 2) && self.transpose,
            _ => false,
        };
        self.refuse_unless(is_legal, "matrix-load-form", "ldmatrix")
    }

    /// Checks shape, element and count of a store.
    ///
    /// # Errors
    /// `matrix-store-form`.
    pub fn check_store(&self) -> Result<(), Fault> {
        let is_legal = matches!(self.count, 1 | 2 | 4)
            && match (self.shape, self.element) {
                (MatrixShape::M8n8, MatrixElement::B16) => true,
                (MatrixShape::M16n8, MatrixElement::B8) => self.transpose,
                _ => false,
            };
        self.refuse_unless(is_legal, "matrix-store-form", "stmatrix")
    }

    fn refuse_unless(&self, is_legal: bool, rule: &'static str, name: &str) -> Result<(), Fault> {
        if is_legal {
            return Ok(());
        }
        Err(Fault::new(
            rule,
            format!(
                "`{name}` of {} matrices {:?} of {:?} {} `.trans` does not exist",
                self.count,
                self.shape,
                self.element,
                if self.transpose { "with" } else { "without" }
            ),
        ))
    }
}

/// `ldmatrix`. `rows` holds, by lane, the rank and the shared-memory offset of a matrix row; only
/// the first [`MatrixAccess::addresses`] rows are used. Returns [`MatrixAccess::registers`]
/// registers.
///
/// # Errors
/// The errors of [`MatrixAccess::check_load`] and of the memory; `matrix-row-alignment`.
pub fn load_matrix(
    access: MatrixAccess,
    rows: &[(u32, u32); LANES],
    memory: &mut dyn Memory,
) -> Result<Vec<Row>, Fault> {
    access.check_load()?;
    check_alignment(access, rows)?;
    let mut bytes = [[0; ROW_BYTES]; LANES];
    for (&(rank, offset), row) in rows.iter().zip(&mut bytes).take(access.addresses()) {
        let stored = match access.element {
            MatrixElement::B8FromB6 => 12,
            MatrixElement::B8FromB4 => 8,
            _ => ROW_BYTES,
        };
        memory.read(Place::Shared { rank, offset }, &mut row[..stored])?;
        widen(access.element, row);
    }
    let mut registers = vec![[0; LANES]; access.registers()];
    for (index, register) in registers.iter_mut().enumerate() {
        for (lane, word) in register.iter_mut().enumerate() {
            *word = loaded_word(access, &bytes, index, lane);
        }
    }
    Ok(registers)
}

/// Expands 6-bit or 4-bit elements, packed at the start of a row, to bytes.
fn widen(element: MatrixElement, row: &mut [u8; ROW_BYTES]) {
    let bits = match element {
        MatrixElement::B8FromB6 => 6,
        MatrixElement::B8FromB4 => 4,
        _ => return,
    };
    let packed = u128::from_le_bytes(*row);
    for (i, byte) in row.iter_mut().enumerate() {
        *byte = (packed >> (bits * i)) as u8 & ((1 << bits) - 1);
    }
}

fn loaded_word(
    access: MatrixAccess,
    bytes: &[[u8; ROW_BYTES]; LANES],
    index: usize,
    lane: usize,
) -> u32 {
    let (group, number) = (lane / 4, lane % 4);
    match (access.shape, access.transpose) {
        (MatrixShape::M16n16, _) => {
            // Each matrix has two registers: columns 0 to 7, then 8 to 15.
            let column = group + 8 * (index % 2);
            let first = 16 * (index / 2) + 4 * number;
            u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[first + i][column]))
        }
        (_, false) => {
            let row = &bytes[8 * index + group];
            u32::from_le_bytes([0, 1, 2, 3].map(|i| row[4 * number + i]))
        }
        (_, true) => {
            let first = 8 * index + 2 * number;
            u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[first + i / 2][2 * group + i % 2]))
        }
    }
}

/// `stmatrix`, with `rows` as in [`load_matrix`].
///
/// # Errors
/// The errors of [`MatrixAccess::check_store`] and of the memory; `matrix-row-alignment`;
/// `matrix-registers` for a wrong number of registers.
pub fn store_matrix(
    access: MatrixAccess,
    rows: &[(u32, u32); LANES],
    registers: &[Row],
    memory: &mut dyn Memory,
) -> Result<(), Fault> {
    access.check_store()?;
    check_alignment(access, rows)?;
    if registers.len() != access.registers() {
        return Err(Fault::new(
            "matrix-registers",
            format!("expected {} registers, got {}", access.registers(), registers.len()),
        ));
    }
    let mut bytes = [[0; ROW_BYTES]; LANES];
    for (index, register) in registers.iter().enumerate() {
        for (lane, word) in register.iter().enumerate() {
            let (group, number) = (lane / 4, lane % 4);
            for (i, byte) in word.to_le_bytes().into_iter().enumerate() {
                let (row, column) = match (access.shape, access.transpose) {
                    // Elements 0 and 1 go to column `group` in memory, elements 2 and 3 to `group +
                    // 8`.
                    (MatrixShape::M16n8, _) => (2 * number + i % 2, group + 8 * (i / 2)),
                    (_, false) => (group, 4 * number + i),
                    (_, true) => (2 * number + i / 2, 2 * group + i % 2),
                };
                bytes[8 * index + row][column] = byte;
            }
        }
    }
    for (&(rank, offset), row) in rows.iter().zip(&bytes).take(access.addresses()) {
        memory.write(Place::Shared { rank, offset }, row)?;
    }
    Ok(())
}

/// `movmatrix.m8n8.trans.b16`.
pub fn transpose_matrix(source: &Row) -> Row {
    let element =
        |row: usize, column: usize| source[4 * row + column / 2] >> (16 * (column % 2)) & 0xffff;
    let mut target = [0; LANES];
    for (lane, word) in target.iter_mut().enumerate() {
        let (row, column) = (lane / 4, 2 * (lane % 4));
        *word = element(column, row) | element(column + 1, row) << 16;
    }
    target
}

fn check_alignment(access: MatrixAccess, rows: &[(u32, u32); LANES]) -> Result<(), Fault> {
    for (lane, &(_, offset)) in rows.iter().enumerate().take(access.addresses()) {
        if !offset.is_multiple_of(ROW_BYTES as u32) {
            return Err(Fault::new(
                "matrix-row-alignment",
                format!(
                    "a matrix row must begin at a multiple of {ROW_BYTES} bytes, lane {lane} has \
                     {offset:#x}"
                ),
            ));
        }
    }
    Ok(())
}
