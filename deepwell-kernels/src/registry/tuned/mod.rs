//! Measured times of kernels by shape, and a catalog that selects by these times.
//!
//! `deepwell tune` times the kernels of a shape on a GPU, each with all its tiles, and writes a
//! [`TunedTable`]. [`TunedCatalog`] selects the first kernel of the row with the nearest shape, or
//! the kernel with the least predicted time if no row is near.
//!
//! A row serves requests of the same op with the same attributes and element types, on the measured
//! GPU model, if each size is within a factor [`NEAREST`] of the row's size. Only the table and the
//! request decide, so the same binary and the same table select the same kernels.

mod catalog;
mod shape;
mod table;
mod versions;

pub use catalog::{Behind, TunedCatalog, heuristics_behind};
pub use shape::NEAREST;
pub use table::{
    FORMAT, LoadedTable, TableError, TunedRow, TunedTable, TunedTime, TypedOperand, VERSION,
};
pub use versions::{KernelVersions, source_file};

/// Tables shipped with the crate, written by `deepwell tune`: the file name in
/// `deepwell-kernels/tuned/`, and the text.
pub const COMMITTED: &[(&str, &str)] = &[];

#[cfg(test)]
mod tests;
