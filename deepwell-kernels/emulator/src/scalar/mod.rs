//! Evaluation of scalar instructions on the 32 lanes of a warp.

mod registers;

pub use registers::{LANES, Registers};
