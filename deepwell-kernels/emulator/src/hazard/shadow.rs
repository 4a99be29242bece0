//! Shadow cells of the memories.

use std::collections::HashMap;

use super::cell::Cell;
use super::pattern::Patterns;
use crate::place::{TENSOR_COLUMNS, TENSOR_LANES};

/// Bytes of a cell of shared and global memory.
pub(super) const CELL_BYTES: u64 = 16;

/// Lanes of tensor memory in a cell, equal to the lanes that one warp can access.
pub(super) const CELL_LANES: u32 = 32;

const PAGE_CELLS: u64 = 64;

/// Shadow of a CTA's shared memory.
#[derive(Debug, Default)]
pub(super) struct SharedShadow {
    cells: Vec<Cell>,
    /// Swizzle of each cell's last write.
    patterns: Vec<Patterns>,
}

impl SharedShadow {
    pub(super) fn cell(&mut self, index: usize) -> &mut Cell {
        if self.cells.len() <= index {
            self.cells.resize_with((index + 1).next_power_of_two(), Cell::default);
        }
        &mut self.cells[index]
    }

    pub(super) fn pattern(&self, index: usize) -> Patterns {
        self.patterns.get(index).copied().unwrap_or_default()
    }

    pub(super) fn set_pattern(&mut self, index: usize, patterns: Patterns) {
        if self.patterns.len() <= index {
            if patterns == Patterns::default() {
                return;
            }
            self.patterns.resize((index + 1).next_power_of_two(), Patterns::default());
        }
        self.patterns[index] = patterns;
    }

    /// Returns all cells with the offset of their first byte.
    pub(super) fn cells(&self) -> impl Iterator<Item = (u32, &Cell)> {
        self.cells.iter().enumerate().map(|(at, cell)| (at as u32 * CELL_BYTES as u32, cell))
    }
}

/// Shadow of a CTA's tensor memory.
#[derive(Debug, Default)]
pub(super) struct TensorShadow {
    cells: Vec<Cell>,
}

impl TensorShadow {
    pub(super) fn cell(&mut self, lane_group: u32, column: u32) -> &mut Cell {
        if self.cells.is_empty() {
            let count = TENSOR_LANES / CELL_LANES * TENSOR_COLUMNS;
            self.cells.resize_with(count as usize, Cell::default);
        }
        &mut self.cells[(lane_group * TENSOR_COLUMNS + column) as usize]
    }
}

/// Shadow of global memory, in pages created on first access.
#[derive(Debug, Default)]
pub(super) struct GlobalShadow {
    pages: Vec<Box<[Cell]>>,
    index: HashMap<u64, usize>,
    last: Option<(u64, usize)>,
}

impl GlobalShadow {
    pub(super) fn cell(&mut self, index: u64) -> &mut Cell {
        let (page, within) = (index / PAGE_CELLS, (index % PAGE_CELLS) as usize);
        let at = match self.last {
            Some((last, at)) if last == page => at,
            _ => {
                let next = self.pages.len();
                let at = *self.index.entry(page).or_insert(next);
                if at == next {
                    self.pages.push((0..PAGE_CELLS).map(|_| Cell::default()).collect());
                }
                self.last = Some((page, at));
                at
            }
        };
        &mut self.pages[at][within]
    }
}
