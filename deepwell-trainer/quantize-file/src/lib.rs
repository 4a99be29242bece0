//! Safetensors models in and out of block formats: `deepwell quantize`.
//!
//! Tensors are processed in pieces, so that a model may be larger than memory: for a model of any
//! size, buffers take at most [`BUFFER_BYTES_MAX`]. `docs/formats.md` describes the files.
//!
//! ```
//! use deepwell_quantize_file::{FileFormat, QuantizeFileOptions, dequantize, quantize};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = |name: &str| folder.path().join(name);
//! # let values: Vec<f32> = (0..64 * 64).map(|i| (i as f32).sin()).collect();
//! # let tensor = deepwell_ckpt::hf::WriteTensor::from_f32("up.weight", &[64, 64], &values);
//! # deepwell_ckpt::hf::write(&path("model.safetensors"), &[tensor])?;
//! let mut options = QuantizeFileOptions::new(
//!     path("model.safetensors"),
//!     path("small.safetensors"),
//!     FileFormat::Nvfp4,
//! );
//! let report = quantize(&options)?;
//! assert!(report.bytes_out < report.bytes_in / 6);
//! assert!(report.tensors[0].quality.as_ref().is_some_and(|quality| quality.snr_db > 15.0));
//!
//! (options.input, options.output) = (options.output, path("again.safetensors"));
//! dequantize(&options.input, &options.output, false)?;
//! # Ok(())
//! # }
//! ```

use std::path::PathBuf;

use deepwell_precision::{ElementFormat, PrecisionPolicy, QuantFormat, ScaleRule};
use serde::{Deserialize, Serialize};

mod decide;
mod decode;
mod encode;
mod error;
mod hf;
mod metadata;
mod names;
mod orientation;
mod output;
mod planes;
mod regions;
mod report;
mod safetensors;
mod shape;
mod tensor;
mod uses;

pub use decode::dequantize;
pub use encode::quantize;
pub use error::QuantizeFileError;
pub use hf::{
    AssignedWeight, Convention, FolderFormat, QuantizeFolderOptions, QuantizedFolder,
    quantize_folder,
};
pub use regions::BUFFER_BYTES_MAX;
pub use report::{DequantizeReport, Quality, QuantizeReport, TensorReport};

/// The format of the quantized tensors of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum FileFormat {
    /// E4M3 elements in blocks of 32
    Mxfp8,
    /// E2M3 elements in blocks of 32, four elements in three bytes
    Mxfp6,
    /// E2M1 elements in blocks of 32, two elements per byte
    Mxfp4,
    /// E2M1 elements in blocks of 16 with a tensor scale, two elements per byte
    Nvfp4,
}

impl FileFormat {
    /// Name on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mxfp8 => "mxfp8",
            Self::Mxfp6 => "mxfp6",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
        }
    }

    /// The quantization format; `rule` applies to formats with exponents as scales.
    const fn quant_format(self, rule: ScaleRule) -> QuantFormat {
        match self {
            Self::Mxfp8 => QuantFormat::MXFP8.with_scale_rule(rule),
            Self::Mxfp6 => QuantFormat::mx(ElementFormat::E2M3).with_scale_rule(rule),
            Self::Mxfp4 => QuantFormat::mx(ElementFormat::E2M1).with_scale_rule(rule),
            Self::Nvfp4 => QuantFormat::NVFP4,
        }
    }
}

/// How the scales of a file are laid out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ScaleLayout {
    /// Row-major, one byte per block
    #[default]
    Plain,
    /// Tiles of 128 rows by 4 blocks, the layout that tensor cores read
    Tiled,
}

impl ScaleLayout {
    /// Name on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Tiled => "tiled",
        }
    }
}

/// Options of [`quantize`].
#[derive(Clone, Debug)]
pub struct QuantizeFileOptions {
    /// A safetensors file, an index of shards, or a folder with either.
    pub input: PathBuf,
    /// A file where the input is a file, else a folder.
    pub output: PathBuf,
    /// The format of quantized tensors.
    pub format: FileFormat,
    /// Rule from magnitudes to scales for MX formats; NVFP4 has a fixed rule.
    pub scale_rule: ScaleRule,
    /// Policy whose block-scaled tensors are quantized; by default every linear tensor of blocks
    /// and experts.
    pub policy: Option<PrecisionPolicy>,
    /// The layout of scales.
    pub layout: ScaleLayout,
    /// Whether to overwrite an existing output.
    pub force: bool,
}

impl QuantizeFileOptions {
    /// Options with the defaults of the command: RCEIL, plain scales, no policy, nothing
    /// overwritten.
    #[must_use]
    pub fn new(input: PathBuf, output: PathBuf, format: FileFormat) -> Self {
        Self {
            input,
            output,
            format,
            scale_rule: ScaleRule::Rceil,
            policy: None,
            layout: ScaleLayout::Plain,
            force: false,
        }
    }
}
