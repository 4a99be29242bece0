//! MMAs, copies and register accesses against a plain definition.

mod bench;
mod faults;
mod memory;
mod moves;
mod planted;
mod scale_tiles;
mod scaled;
mod unscaled;
mod writer;
