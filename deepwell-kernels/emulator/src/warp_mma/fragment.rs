//! Layout of matrix elements over the lanes of a warp.
//!
//! Lane `l` is number `l % 4` of group `l / 4`. A register holds `32 / bits` elements, low bits
//! first. With E elements per register:
//!
//! | matrix | register `r`, element `i` of it |
//! |---|---|
//! | A, 16 rows | row `group + 8 (r % 2)`, column `E (l % 4) + i + 4 E (r / 2)` |
//! | B, 8 columns | column `group`, row `E (l % 4) + i + 4 E r` |
//! | C and D, 32 bits | row `group + 8 (r / 2 % 2)`, column `2 (l % 4) + r % 2 + 8 (r / 4)` |
//! | C and D, 16 bits | row `group + 8 (r % 2)`, column `2 (l % 4) + i + 8 (r / 2)` |
//!
//! These formulas cover the fragments of `mma.m16n8k4` to `m16n8k64` in the ISA. D continues along
//! N as in `wgmma`.

use super::{LANES, Row};

/// Rows of A and D in a warp.
pub const WARP_ROWS: usize = 16;

/// Gathers A as `[16, k]`, each element in the low bits.
pub fn gather_a(registers: &[Row], bits: u32, k: usize) -> Vec<u32> {
    let per_register = (32 / bits) as usize;
    let mut element_bits = vec![0; WARP_ROWS * k];
    for (index, register) in registers.iter().enumerate() {
        for (lane, &word) in register.iter().enumerate() {
            let row = lane / 4 + 8 * (index % 2);
            let column = per_register * (lane % 4 + 4 * (index / 2));
            put(&mut element_bits[row * k + column..][..per_register], word, bits);
        }
    }
    element_bits
}

/// Gathers B as `[8, k]` (B transposed), each element in the low bits.
pub fn gather_b(registers: &[Row], bits: u32, k: usize) -> Vec<u32> {
    let per_register = (32 / bits) as usize;
    let mut element_bits = vec![0; 8 * k];
    for (index, register) in registers.iter().enumerate() {
        for (lane, &word) in register.iter().enumerate() {
            let row = per_register * (lane % 4 + 4 * index);
            put(&mut element_bits[lane / 4 * k + row..][..per_register], word, bits);
        }
    }
    element_bits
}

#[inline(always)]
fn put(target: &mut [u32], word: u32, bits: u32) {
    if let [low, high] = target {
        (*low, *high) = (word & 0xffff, word >> 16);
        return;
    }
    let mask = u32::MAX >> (32 - bits);
    for (i, code) in target.iter_mut().enumerate() {
        *code = word >> (bits * i as u32) & mask;
    }
}

/// Gathers C or D as `[16, n]`, each element in the low bits. `bits` is 16 or 32.
pub fn gather_accumulator(registers: &[Row], bits: u32, n: usize) -> Vec<u32> {
    let mut element_bits = vec![0; WARP_ROWS * n];
    for (index, register) in registers.iter().enumerate() {
        for (lane, &word) in register.iter().enumerate() {
            if bits == 32 {
                element_bits[wide_place(index, lane, n)] = word;
            } else {
                let at = half_place(index, lane, n);
                element_bits[at] = word & 0xffff;
                element_bits[at + 1] = word >> 16;
            }
        }
    }
    element_bits
}

/// The inverse of [`gather_accumulator`].
pub fn scatter_accumulator(element_bits: &[u32], bits: u32, n: usize, registers: &mut [Row]) {
    for (index, register) in registers.iter_mut().enumerate() {
        for (lane, word) in register.iter_mut().enumerate() {
            *word = if bits == 32 {
                element_bits[wide_place(index, lane, n)]
            } else {
                let at = half_place(index, lane, n);
                element_bits[at] & 0xffff | element_bits[at + 1] << 16
            };
        }
    }
}

/// Registers per thread of an accumulator with `n` columns.
pub fn accumulator_registers(bits: u32, n: usize) -> usize {
    WARP_ROWS * n * bits as usize / 32 / LANES
}

fn wide_place(index: usize, lane: usize, n: usize) -> usize {
    let row = lane / 4 + 8 * (index / 2 % 2);
    row * n + 2 * (lane % 4) + index % 2 + 8 * (index / 4)
}

fn half_place(index: usize, lane: usize, n: usize) -> usize {
    let row = lane / 4 + 8 * (index % 2);
    row * n + 2 * (lane % 4) + 8 * (index / 2)
}
