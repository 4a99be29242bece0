//! Number formats, block quantization, scale layouts, per-layer precision policy and guards for
//! training neural networks in eight, six and four bits.
//!
//! # Brief overview
//!
//! The parts can be used separately:
//!
//! **Numbers.** [`e4m3`], [`e5m2`], [`e3m2`], [`e2m3`], [`e2m1`] and, for scales, [`e8m0`] and
//! [`ue4m3`] convert one number to a code and back, with explicit [`Rounding`] and [`Overflow`], or
//! stochastically with bits from [`Philox`]. Philox is counter based: the same seed and index give
//! the same bits everywhere.
//!
//! **Formats.** A [`QuantFormat`] describes the quantization of a matrix: the element format, the
//! [`Block`] of elements with a common scale, how scales are stored and computed from magnitudes
//! ([`ScaleFormat`]), whether there is a tensor scale, and the rounding of elements.
//! [`QuantFormat::MXFP8`], [`QuantFormat::MXFP8_128`] and [`QuantFormat::NVFP4`] are presets.
//!
//! **MX blocks.** For MX formats, [`quantize_rows`], [`quantize_columns`] and [`quantize_both`]
//! write quantized data and scales from `f32` or `bf16` and return [`QuantStats`];
//! [`dequantize_rows`] is the inverse. A GEMM needs each operand quantized along its contraction,
//! so a tensor of two GEMMs has two quantized operands, each made from the source.
//!
//! **NVFP4.** [`nvfp4`] quantizes with two levels of scales, in blocks of 16, and writes packed
//! data.
//!
//! **Around quantization.** [`packed`] stores elements of four and six bits without gaps,
//! [`scale_tiles`] converts scales to the layout that tensor cores read, [`hadamard`] spreads
//! outliers before quantization, and [`BlockStatistics`] measures the loss afterwards: signal to
//! noise, saturation, underflow, for each block scale.
//!
//! **Policy** (feature `policy`, on by default). A `PrecisionPolicy`, from a preset or from TOML,
//! gives each tensor of a model an [`Assignment`]: its [`Format`], its specs and the reason.
//!
//! **Guards.** [`Guards`] watch a run: they count, keep histories, detect loss spikes, and move
//! GEMMs that offend to BF16 and back. Their whole state serializes.
//!
//! Quantization uses the vector instructions of the machine (feature `std`) and the threads of the
//! current rayon pool (feature `rayon`); both are on by default and do not change any bit of the
//! result. Without default features the crate is `no_std` and needs `alloc`; only the policy and
//! decibels are missing.
//!
//! # Example
//!
//! ```
//! use deepwell_precision::{QuantFormat, dequantize_rows, quantize_both, scales_len};
//!
//! // A weight of 64 outputs x 96 inputs: along its rows for fprop, along its
//! // columns (stored transposed) for the gradient of the input.
//! let (rows, cols) = (64, 96);
//! let weight: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin()).collect();
//! let (mut data, mut data_t) = (vec![0; rows * cols], vec![0; rows * cols]);
//! let mut scales = vec![0; scales_len(rows, cols)];
//! let mut scales_t = vec![0; scales_len(cols, rows)];
//! let format = QuantFormat::MXFP8;
//! let by_row = (&mut data[..], &mut scales[..]);
//! let by_column = (&mut data_t[..], &mut scales_t[..]);
//! let stats = quantize_both(&weight, rows, cols, &format, by_row, by_column)?;
//! assert_eq!(stats.nonfinite, 0);
//!
//! let mut back = vec![0.0_f32; rows * cols];
//! dequantize_rows(&data, &scales, rows, cols, &format, &mut back)?;
//! for (&exact, &approximate) in weight.iter().zip(&back) {
//!     // Three stored fraction bits: half a unit in the last place is one part in 16.
//!     assert!((exact - approximate).abs() <= exact.abs() / 16.0);
//! }
//! # Ok::<(), deepwell_precision::QuantizeError>(())
//! ```
//!
//! In four bits, with a tensor scale:
//!
//! ```
//! use deepwell_precision::{BlockStatistics, QuantFormat, nvfp4, packed};
//!
//! let (rows, cols) = (64, 96);
//! let weight: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin()).collect();
//! let mut data = vec![0; packed::fp4_len(rows, cols)];
//! let mut scales = vec![0; nvfp4::scales_len(rows, cols)];
//! let common = nvfp4::Common::nearest(nvfp4::amax(&weight));
//! let format = QuantFormat::NVFP4.square();
//! let (scale, _) =
//!     nvfp4::quantize_rows(&weight, rows, cols, &format, &common, &mut data, &mut scales)?;
//! let statistics = BlockStatistics::of_nvfp4(&weight, &data, &scales, scale, rows, cols)?;
//! assert!(statistics.total().signal_to_noise() > 50.0); // 17 dB
//! # Ok::<(), deepwell_precision::QuantizeError>(())
//! ```
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `std` | yes | vector instructions chosen at run time, decibels; else `no_std` + `alloc` |
//! | `rayon` | yes | quantization of large matrices on all threads of the current pool |
//! | `policy` | yes | `PrecisionPolicy`: glob rules from TOML |
//!
//! The last two turn `std` on. None of them changes a result.
//!
//! # Not implemented yet
//!
//! Six bits in a policy: [`Format`] is `non_exhaustive`, and names MXFP8 and NVFP4.

#![cfg_attr(not(any(feature = "std", test)), no_std)]
#![cfg_attr(docsrs, feature(doc_cfg))]

extern crate alloc;

pub mod e4m3;
pub mod e5m2;
pub mod e8m0;
pub mod hadamard;
#[cfg(any(feature = "std", test))]
pub mod moments;
pub mod nvfp4;
pub mod packed;
pub mod philox;
pub mod scale_tiles;
pub mod ue4m3;

mod block_statistics;
mod dequantize;
mod error;
mod format;
pub mod guards;
mod min_error;
mod minifloat;
mod names;
mod narrow;
mod operand;
#[cfg(feature = "policy")]
pub mod policy;
mod quant_format;
pub mod quantize;
pub mod random;
mod rounding;
mod simd;
mod source;
mod spec;
mod stats;
mod threads;

pub use block_statistics::{BlockStatistics, BlockSums};
pub use dequantize::dequantize_rows;
pub use error::QuantizeError;
pub use format::{Assignment, Fallback, Format, Role, TensorUse};
pub use guards::{
    GemmState, GuardConfig, GuardError, GuardEvent, GuardEventKind, Guards, Observed,
};
pub use hadamard::Hadamard16;
pub use names::UnknownName;
pub use narrow::{e2m1, e2m3, e3m2};
pub use operand::{ElementRounding, GemmKind, GemmMode, GemmPrecision, OperandClass};
pub use philox::Philox;
#[cfg(feature = "policy")]
pub use policy::{
    LastBlocks, OperandSetting, PRESETS, PolicyError, PrecisionPolicy, RecipePart, Repair,
};
pub use quant_format::{Block, QuantFormat, ScaleFormat, TensorScale};
pub use quantize::{
    quantize_both, quantize_columns, quantize_rows, quantize_rows_stochastic, scales_len,
};
pub use rounding::{Overflow, Rounding};
pub use source::{DequantizedValue, Source};
pub use spec::{BLOCK, BlockShape, ElementFormat, Granularity, ScaleRule};
pub use stats::QuantStats;

/// The examples of the README, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
