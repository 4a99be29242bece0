//! Matrix instructions of one warp.
//!
//! # Brief overview
//!
//! [`load_matrix`], [`store_matrix`] and [`transpose_matrix`] are `ldmatrix`, `stmatrix` and
//! `movmatrix`. A [`WarpMmaForm`] is a variant of `mma.sync`: [`WarpMmaForm::check`] holds the
//! table of shapes and types, [`WarpMmaForm::run`] computes D. A register is a row of 32 lanes.
//!
//! [`fragment`] defines the layout of matrix elements in the registers of a warp. `wgmma` uses the
//! same layout: each of its four warps holds 16 rows.

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
