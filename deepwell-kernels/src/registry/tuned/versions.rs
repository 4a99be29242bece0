//! Versions of measured kernels.

use std::collections::BTreeMap;

/// Source files of the kernels with alternatives; library kernels have none.
const SOURCES: [(&str, &str); 39] = [
    ("cuda_attention", "attention"),
    ("cuda_attention_backward", "attention_backward"),
    ("cuda_sm90_attention", "sm90_attention"),
    ("cuda_sm100_attention", "sm100_attention"),
    ("cuda_sm100_attention_backward", "sm100_attention_backward"),
    ("cuda_sm90_attention_backward", "sm90_attention_backward"),
    ("cuda_sm90_attention_backward_ordered", "sm90_attention_backward_ordered"),
    ("cuda_sm90_attention_backward_stored", "sm90_attention_backward_stored"),
    ("cuda_sm90_attention_backward_wide", "sm90_attention_backward_wide"),
    ("cuda_sm90_attention_narrow_values", "sm90_attention_narrow_values"),
    ("cuda_attention_part", "attention_part"),
    ("cuda_attention_part_backward", "attention_part_backward"),
    ("cuda_sm90_attention_part", "sm90_attention_part"),
    ("cuda_sm90_attention_part_backward", "sm90_attention_part_backward"),
    ("cuda_sm90_attention_part_backward_stored", "sm90_attention_part_backward_stored"),
    ("cuda_bf16_gemm", "bf16_gemm"),
    ("cuda_sm90_bf16_gemm", "sm90_bf16_gemm"),
    ("cuda_sm100_bf16_gemm", "sm100_bf16_gemm"),
    ("cuda_sm100_bf16_gemm_fused", "sm100_bf16_gemm_fused"),
    ("cuda_mxfp8_gemm", "mxfp8_gemm"),
    ("cuda_sm90_mxfp8_gemm", "sm90_mxfp8_gemm"),
    ("cuda_sm100_mxfp8_gemm", "sm100_mxfp8_gemm"),
    ("cuda_sm100_mxfp8_gemm_fused", "sm100_mxfp8_gemm_fused"),
    ("cuda_sm100_nvfp4_gemm", "sm100_nvfp4_gemm"),
    ("cuda_sm120_mxfp8_gemm", "sm120_mxfp8_gemm"),
    ("cuda_sm120_nvfp4_gemm", "sm120_nvfp4_gemm"),
    ("cuda_bf16_grouped_gemm", "bf16_grouped_gemm"),
    ("cuda_mxfp8_grouped_gemm", "mxfp8_grouped_gemm"),
    ("cuda_sm90_mxfp8_grouped_gemm", "sm90_mxfp8_grouped_gemm"),
    ("cuda_sm90_bf16_grouped_gemm", "sm90_bf16_grouped_gemm"),
    ("cuda_sm100_mxfp8_grouped_gemm", "sm100_mxfp8_grouped_gemm"),
    ("cuda_sm100_nvfp4_grouped_gemm", "sm100_nvfp4_grouped_gemm"),
    ("cuda_sm120_nvfp4_grouped_gemm", "sm120_nvfp4_grouped_gemm"),
    ("cuda_sm90_dequantized_mxfp8_gemm", "sm90_bf16_gemm"),
    ("cuda_sm90_dequantized_nvfp4_gemm", "sm90_bf16_gemm"),
    ("cuda_sm90_dequantized_grouped_gemm", "sm90_bf16_grouped_gemm"),
    ("cuda_sm90_dequantized_nvfp4_grouped_gemm", "sm90_bf16_grouped_gemm"),
    ("cuda_linear_cross_entropy", "cross_entropy_gemm"),
    ("cuda_vocab_parallel_head", "cross_entropy_gemm"),
];

/// Kernels that launch a GEMM of dequantized operands, and the sources of the kernels launched
/// before and after the GEMM.
const DEQUANTIZED: [(&str, &[&str]); 4] = [
    ("cuda_sm90_dequantized_mxfp8_gemm", &["dequantize_operands", "add_unheld"]),
    ("cuda_sm90_dequantized_nvfp4_gemm", &["dequantize_nvfp4_operands"]),
    ("cuda_sm90_dequantized_grouped_gemm", &["dequantize_operands", "add_unheld"]),
    ("cuda_sm90_dequantized_nvfp4_grouped_gemm", &["dequantize_nvfp4_operands"]),
];

/// The name of a kernel's `.cu` file, for kernels with alternatives; `None` for library kernels.
pub fn source_file(kernel: &str) -> Option<&'static str> {
    SOURCES.iter().find(|(known, _)| *known == kernel).map(|(_, file)| *file)
}

/// Versions of the available kernels: the hash of the sources for compiled kernels, the version of
/// this crate for library kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelVersions {
    /// By file; `None` if no kernels are compiled here.
    sources: Option<BTreeMap<String, String>>,
}

impl KernelVersions {
    /// Uses the hash of each source file, if kernels are compiled here.
    pub fn new(sources: Option<BTreeMap<String, String>>) -> KernelVersions {
        KernelVersions { sources }
    }

    /// The version of a kernel; `None` for a compiled kernel whose source is unknown.
    pub fn of(&self, kernel: &str) -> Option<String> {
        match source_file(kernel) {
            None => Some(format!("deepwell-kernels {}", env!("CARGO_PKG_VERSION"))),
            Some(file) => {
                let sources = self.sources.as_ref()?;
                let beside = DEQUANTIZED.iter().find(|(known, _)| *known == kernel);
                let beside = beside.map_or(&[][..], |(_, files)| files);
                let files = std::iter::once(&file).chain(beside);
                let hashes: Option<Vec<&str>> =
                    files.map(|&file| sources.get(file).map(String::as_str)).collect();
                Some(hashes?.join("+"))
            }
        }
    }

    /// Whether `source` is the current version of a kernel. Without compiled kernels, as on a
    /// machine used only for planning, every version of a compiled kernel passes.
    pub fn are(&self, kernel: &str, source: &str) -> bool {
        let is_compiled = source_file(kernel).is_some();
        (is_compiled && self.sources.is_none()) || self.of(kernel).as_deref() == Some(source)
    }
}
