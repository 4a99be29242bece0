//! Measured times of kernels by shape, and the catalog that selects by them.
//!
//! `deepwell tune` times the kernels of a shape on a GPU, each with all its tiles, and writes a
//! [`TunedTable`]. [`TunedCatalog`] takes the first kernel of the row whose shape is nearest, and
//! the one with the least predicted time where no row is near.
//!
//! A row serves a request of the same op with the same attributes and element types, whose sizes
//! are each within [`NEAREST`] of its own, on the GPU model that was measured. Nothing but the
//! table and the request decides, so the same binary and the same table select the same kernels.

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

/// Tables that come with the crate, made by `deepwell tune`: the name of the file in
/// `deepwell-kernels/tuned/`, and its text.
pub const COMMITTED: &[(&str, &str)] = &[];

#[cfg(test)]
mod tests;
