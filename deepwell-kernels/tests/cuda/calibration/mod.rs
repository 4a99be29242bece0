//! Calibration: the same PTX with the same inputs on a GPU and on the emulator, bit for bit.
//!
//! Each group launches small kernels that show one part of the machine: `wgmma`, `mma.sync`,
//! scalar arithmetic and conversions, bulk copies; and our own kernels on small inputs. Their PTX
//! is written by the tests, so that a row of a table is an instruction. Inputs come from a seeded
//! generator; only outputs are kept.
//!
//! On an H200 with `DEEPWELL_GOLDEN_OUT` a group writes what the GPU gave to that folder; the
//! `.json` files belong into `tests/cuda/golden/`. Everywhere else a group compares with the files
//! there, and fails without one: on another GPU, or on the emulator where there is none. Groups of
//! instructions also check their outputs against a loose reference in f64, on both devices: a wrong
//! layout shows without golden vectors.

mod bench;
mod copies;
mod element;
mod golden;
mod gradients;
mod kernels;
mod reduction;
mod scalar;
mod scalar_inputs;
mod scalar_rows;
mod warp_mma;
mod wgmma;
mod wgmma_cases;
mod wgmma_ptx;
