//! Products, copies and register accesses against a plain definition.

mod bench;
mod faults;
mod memory;
mod moves;
mod planted;
mod products;
mod scaled;
mod writer;
