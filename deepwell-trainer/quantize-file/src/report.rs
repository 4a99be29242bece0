//! Results of quantization and dequantization, as a table or as JSON.

use std::fmt;

use deepwell_precision::BlockSums;
use serde::Serialize;

use super::{FileFormat, QuantizeFileOptions, ScaleLayout};

/// Result of [`super::quantize`].
#[derive(Clone, Debug, Serialize)]
pub struct QuantizeReport {
    /// Format of the quantized tensors.
    pub format: FileFormat,
    /// Rule of the scales; `null` for NVFP4, whose rule is fixed.
    pub scale_rule: Option<&'static str>,
    /// Layout of the scales.
    pub layout: ScaleLayout,
    /// All tensors, by file and place.
    pub tensors: Vec<TensorReport>,
    /// Remarks on where roles and layouts of the tensors are from.
    pub notes: Vec<String>,
    /// Bytes of all tensors of the input.
    pub bytes_in: u64,
    /// Bytes of all tensors of the output, scales included.
    pub bytes_out: u64,
    /// Elapsed seconds.
    pub seconds: f64,
}

/// One tensor.
#[derive(Clone, Debug, Serialize)]
pub struct TensorReport {
    /// Name of the tensor.
    pub name: String,
    /// Element type in the input.
    pub dtype: String,
    /// Shape of the tensor.
    pub shape: Vec<usize>,
    /// Whether the tensor is stored as `[.., inputs, outputs]`: blocks are along the inputs.
    pub inputs_first: bool,
    /// Reason for quantizing or keeping the tensor.
    pub reason: String,
    /// Bytes in the input.
    pub bytes_in: u64,
    /// Bytes in the output, scales included.
    pub bytes_out: u64,
    /// Quantization quality; `null` for a kept tensor.
    pub quality: Option<Quality>,
}

/// Quantization quality of a tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Quality {
    /// Signal to noise, decibels; `null` in JSON where nothing was lost.
    pub snr_db: f64,
    /// Share of the elements beyond the largest value of their block, 0 to 1.
    pub saturation: f64,
    /// Share of the elements that became zero, 0 to 1.
    pub underflow: f64,
    /// Number of blocks with a NaN or an infinity, which the other figures exclude.
    pub blocks_not_finite: u64,
}

impl From<BlockSums> for Quality {
    fn from(sums: BlockSums) -> Self {
        Self {
            snr_db: sums.snr_db(),
            saturation: sums.saturation_fraction(),
            underflow: sums.underflow_fraction(),
            blocks_not_finite: sums.blocks_not_finite,
        }
    }
}

impl QuantizeReport {
    pub(super) fn new(options: &QuantizeFileOptions) -> Self {
        let has_rule = options.format != FileFormat::Nvfp4;
        Self {
            format: options.format,
            scale_rule: has_rule.then(|| options.scale_rule.name()),
            layout: options.layout,
            tensors: Vec::new(),
            notes: Vec::new(),
            bytes_in: 0,
            bytes_out: 0,
            seconds: 0.0,
        }
    }

    pub(super) fn add(&mut self, tensor: TensorReport) {
        self.bytes_in += tensor.bytes_in;
        self.bytes_out += tensor.bytes_out;
        self.tensors.push(tensor);
    }
}

impl fmt::Display for QuantizeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |tensor: &TensorReport| tensor.name.chars().count();
        let width = self.tensors.iter().map(name).max().unwrap_or(0).max(6);
        writeln!(
            f,
            "{:width$} {:>17} {:>11} {:>11} {:>7} {:>9} {:>9}",
            "tensor", "shape", "MB before", "MB after", "SNR dB", "saturated", "underflow"
        )?;
        for tensor in &self.tensors {
            let shape: Vec<String> = tensor.shape.iter().map(ToString::to_string).collect();
            let (shape, mb) = (shape.join("x"), |bytes: u64| bytes as f64 / 1e6);
            let (before, after) = (mb(tensor.bytes_in), mb(tensor.bytes_out));
            write!(f, "{:width$} {shape:>17} {before:>11.3} {after:>11.3} ", tensor.name)?;
            match &tensor.quality {
                None => writeln!(f, "kept: {}", tensor.reason)?,
                Some(quality) => {
                    let Quality { snr_db, saturation, underflow, .. } = quality;
                    let (saturated, lost) = (saturation * 100.0, underflow * 100.0);
                    write!(f, "{snr_db:>7.2} {saturated:>7.3} % {lost:>7.3} %")?;
                    match quality.blocks_not_finite {
                        0 => writeln!(f)?,
                        blocks => writeln!(f, "  {blocks} blocks are not finite")?,
                    }
                }
            }
        }
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        let turned = |tensor: &&TensorReport| tensor.inputs_first && tensor.quality.is_some();
        match self.tensors.iter().filter(turned).count() {
            0 => {}
            1 => writeln!(
                f,
                "1 weight is stored as [inputs, outputs] and quantized along its inputs"
            )?,
            count => writeln!(
                f,
                "{count} weights are stored as [inputs, outputs] and quantized along their inputs"
            )?,
        }
        let quantized = self.tensors.iter().filter(|tensor| tensor.quality.is_some()).count();
        let (before, after) = (self.bytes_in as f64 / 1e6, self.bytes_out as f64 / 1e6);
        writeln!(
            f,
            "{} of {} tensors to {} ({} scales): {before:.3} MB to {after:.3} MB, {:.2} x smaller, \
             in {:.2} s",
            quantized,
            self.tensors.len(),
            self.format.name(),
            match self.scale_rule {
                Some(rule) => format!("{rule}, {}", self.layout.name()),
                None => self.layout.name().to_owned(),
            },
            self.bytes_in as f64 / self.bytes_out.max(1) as f64,
            self.seconds
        )
    }
}

/// Result of [`super::dequantize`].
#[derive(Clone, Debug, Default, Serialize)]
pub struct DequantizeReport {
    /// Number of dequantized tensors.
    pub tensors: usize,
    /// Number of tensors copied without dequantization.
    pub tensors_kept: usize,
    /// Bytes of all tensors of the input.
    pub bytes_in: u64,
    /// Bytes of all tensors of the output.
    pub bytes_out: u64,
    /// Elapsed seconds.
    pub seconds: f64,
}

impl fmt::Display for DequantizeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} tensors brought back, {} kept: {:.3} MB to {:.3} MB in {:.2} s",
            self.tensors,
            self.tensors_kept,
            self.bytes_in as f64 / 1e6,
            self.bytes_out as f64 / 1e6,
            self.seconds
        )
    }
}
