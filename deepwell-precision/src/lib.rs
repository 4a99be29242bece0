//! Number formats, block quantization, scale layouts, per-layer precision policy and guards.

pub mod e4m3;
pub mod e5m2;
pub mod e8m0;
pub mod scale_tiles;

mod dequantize;
mod error;
mod format;
mod guards;
mod minifloat;
mod names;
#[cfg(feature = "policy")]
mod policy;
mod quantize;
mod rounding;
mod simd;
mod source;
mod spec;
mod stats;
mod threads;

pub use dequantize::dequantize_rows;
pub use error::QuantizeError;
pub use format::{Assignment, Fallback, Format, Role, TensorUse};
pub use guards::{GuardConfig, GuardError, GuardEvent, GuardEventKind, Guards, LayerState};
pub use names::UnknownName;
#[cfg(feature = "policy")]
pub use policy::{PRESETS, PolicyError, PrecisionPolicy};
pub use quantize::{quantize_both, quantize_columns, quantize_rows, scales_len};
pub use rounding::{Overflow, Rounding};
pub use source::{Source, Target};
pub use spec::{BLOCK, BlockShape, ElementFormat, Granularity, MxSpec, ScaleRule};
pub use stats::QuantStats;
