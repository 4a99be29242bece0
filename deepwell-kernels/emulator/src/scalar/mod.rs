//! Evaluation of scalar instructions on the 32 lanes of a warp.
//!
//! # Brief overview
//!
//! [`Registers`] holds the registers of one warp, and [`execute`] runs a
//! [`ScalarInstruction`](crate::decode::ScalarInstruction) on some of its lanes. Execution cannot
//! fail and does not allocate. Floats are bit-exact where the ISA defines the bits: one rounding,
//! `.ftz`, `.sat`, NaN as `0x7fffffff` (binary32) and `0x7fff` (F16, BF16). Where the ISA does not,
//! functions of [`crate::decode::FloatFunction`] return the bits of an H200, and integer division
//! by zero returns all ones, as the code that ptxas emits.

mod approximate;
mod compare;
mod convert;
mod execute;
mod float;
mod function;
mod half;
mod ieee;
mod integer;
mod integer_ternary;
mod interpolator;
mod interpolator_tables;
mod registers;
mod rows;
mod small;
#[cfg(test)]
mod tests;

pub use execute::execute;
pub use registers::{LANES, Registers};
