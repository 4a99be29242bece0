//! Evaluation of scalar instructions on the 32 lanes of a warp.
//!
//! # Brief overview
//!
//! [`Registers`] holds the rows of one warp, and [`execute`] runs a
//! [`ScalarInstruction`](crate::decode::ScalarInstruction) on some of its lanes. Nothing here can
//! fail, and nothing is allocated. Floats are bit-exact as far as the ISA says what they are:
//! one rounding, `.ftz`, `.sat`, NaN as `0x7fffffff` (binary32) and `0x7fff` (F16, BF16). What it
//! leaves open are the functions of [`crate::decode::FloatFunction`], which are an H200's here,
//! and division of integers by zero, which gives all ones, as the instructions that ptxas makes of
//! it do.

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
