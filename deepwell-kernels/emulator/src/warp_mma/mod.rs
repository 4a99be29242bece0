//! Matrix instructions of one warp.
//!
//! # Brief overview
//!
//! `ldmatrix`, `stmatrix` and `movmatrix` are [`load_matrix`], [`store_matrix`] and
//! [`transpose_matrix`]; `mma.sync` is a [`WarpMmaForm`], whose [`WarpMmaForm::check`] is the table
//! of shapes and types and whose [`WarpMmaForm::run`] computes D. Registers are rows of 32 lanes.
//!
//! How the elements of a matrix lie in the registers of a warp is in [`fragment`]; `wgmma` uses it
//! too, since each of its four warps holds 16 rows in the same way.

mod form;
pub mod fragment;
mod matrix;
mod scales;
mod table;

pub use form::{WarpMmaForm, tensor_core_of};
pub use matrix::{MatrixAccess, load_matrix, store_matrix, transpose_matrix};
pub use scales::{MmaScales, ScaleSelector, WarpScales};
pub(crate) use table::{format_of, mma_kind};

#[cfg(test)]
mod tests;

/// Lanes of a warp.
pub const LANES: usize = 32;

/// One register of all lanes.
pub type Row = [u32; LANES];
