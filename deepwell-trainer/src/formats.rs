//! The formats of a model's GEMMs, as one word.

use deepwell_ir::TensorPrecision;

/// The quantized formats of tensors, `nvfp4` or `mxfp8+nvfp4`; none where none is quantized.
///
/// ```
/// use deepwell_ir::TensorPrecision;
/// use deepwell_precision::Format;
/// use deepwell_trainer::quantized_formats;
///
/// let tensor = |format| TensorPrecision {
///     tensor: String::new(),
///     format,
///     gemms: None,
///     asked: None,
///     reason: String::new(),
/// };
/// let tensors = [Format::Bf16, Format::NVFP4, Format::MXFP8, Format::NVFP4].map(tensor);
/// assert_eq!(quantized_formats(&tensors).as_deref(), Some("mxfp8+nvfp4"));
/// assert_eq!(quantized_formats(&tensors[..1]), None);
/// ```
pub fn quantized_formats(tensors: &[TensorPrecision]) -> Option<String> {
    let formats = tensors.iter().filter_map(|tensor| tensor.format.quantized());
    let mut names: Vec<&str> = formats.map(|format| format.name()).collect();
    names.sort_unstable();
    names.dedup();
    (!names.is_empty()).then(|| names.join("+"))
}
