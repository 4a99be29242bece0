//! The largest share of a unit's peak for kernels, for the roofline of their calls: measured on an
//! H200, and by the instruction on sm_103a.

use deepwell_ir::Target;

use crate::runtime::cuda::architecture::Architecture;

/// All GEMM and attention kernels measured on Hopper. A share is relative to the datasheet peak of
/// the arithmetic unit, the maximum over all shapes:
///
/// - the library's GEMMs: `benchmarks/bench_h200_2026-11-21.md`. Our GEMMs are within 2 % of these,
///   and so are dequantized GEMMs (`benchmarks/sm90_gemms_2026-11-27.md`); NVFP4's is assumed to
///   be, as the same GEMM after a shorter dequantization;
/// - `cuda_sm90_mxfp8_gemm`: `benchmarks/sm90_mxfp8_gemm_2026-11-23.md`;
/// - grouped GEMMs: `benchmarks/grouped_gemm_2026-11-23.md`; NVFP4's is assumed to be the same
///   GEMM's;
/// - attention: `benchmarks/sm90_attention_2026-11-23.md`. The portable kernels of ring attention
///   have the structure of `cuda_attention`, on `mma.sync`;
/// - attention of wide heads on wgmma: not measured, the shares of the kernels for narrower heads;
/// - ring attention on wgmma: `benchmarks/sm90_attention_part_2026-11-30.md`.
const HOPPER: &[(&str, f64)] = &[
    ("cublaslt_linear", 0.74),
    ("cublaslt_linear_residual", 0.74),
    ("cublaslt_linear_cross_entropy", 0.74),
    ("cublaslt_vocab_parallel_head", 0.74),
    ("cuda_sm90_bf16_gemm", 0.75),
    ("cublaslt_mx_gemm", 0.58),
    ("cublaslt_mx_gemm_residual", 0.58),
    ("cublaslt_dequantized_mx_gemm", 0.74),
    ("cuda_sm90_dequantized_mxfp8_gemm", 0.75),
    ("cuda_sm90_dequantized_nvfp4_gemm", 0.75),
    ("cuda_sm90_mxfp8_gemm", 0.54),
    ("cuda_mxfp8_gemm", 0.09),
    ("cuda_sm90_bf16_grouped_gemm", 0.69),
    ("cuda_sm90_mxfp8_grouped_gemm", 0.55),
    ("cuda_sm90_dequantized_grouped_gemm", 0.69),
    ("cuda_sm90_dequantized_nvfp4_grouped_gemm", 0.69),
    ("cuda_sm90_attention", 0.67),
    ("cuda_sm90_attention_backward", 0.46),
    ("cuda_sm90_attention_backward_ordered", 0.46),
    ("cuda_sm90_attention_backward_stored", 0.56),
    ("cuda_sm90_attention_backward_wide", 0.56),
    ("cuda_sm90_attention_narrow_values", 0.67),
    ("cuda_sm90_attention_part", 0.64),
    ("cuda_sm90_attention_part_backward", 0.47),
    ("cuda_sm90_attention_part_backward_stored", 0.53),
    ("cuda_attention", 0.39),
    ("cuda_attention_part", 0.39),
    ("cuda_attention_backward", 0.26),
    ("cuda_attention_part_backward", 0.26),
];

/// Kernels on sm_103a that cannot reach the peak: FP4 MMAs have it with 96 elements along K, and
/// take as long with 64 (assumed: the FP4 peak of a B300 is 1.5 times a B200's, that of FP8 equal).
const SM103: &[(&str, f64)] = &[("cuda_sm100_nvfp4_gemm", 64.0 / 96.0)];

/// The share of a kernel on a target; 1 if not known, or if the GPU is emulated.
pub(super) fn peak_share(kernel: &str, target: &Target) -> f64 {
    let is_on = |architecture: Architecture| target.arch == architecture.target_name();
    let shares = match target.gpu {
        Some(_) if is_on(Architecture::Sm90a) => HOPPER,
        Some(_) if is_on(Architecture::Sm103a) => SM103,
        _ => &[],
    };
    let found = shares.iter().find(|(name, _)| *name == kernel);
    found.map_or(1.0, |(_, share)| *share)
}

#[cfg(test)]
mod tests {
    use super::super::cuda_kernels;
    use super::*;
    use crate::runtime::cuda::architecture::{CUBLASLT, cuda_target};

    #[test]
    fn shares_are_of_kernels_that_there_are() {
        for (shares, architecture) in [(HOPPER, Architecture::Sm90a), (SM103, Architecture::Sm103a)]
        {
            for (kernel, share) in shares {
                let spec = cuda_kernels().find(|spec| spec.name == *kernel);
                let runs = spec.is_some_and(|spec| spec.architectures.contains(&architecture));
                assert!(runs, "no kernel `{kernel}` for {architecture:?}");
                assert!(*share > 0.0 && *share < 1.0, "{kernel}: {share}");
            }
        }
    }

    /// Every GEMM or attention kernel that a program may select on Hopper.
    #[test]
    fn every_gemm_of_hopper_has_a_share() {
        let ops = ["linear", "scaled_gemm", "scaled_grouped_gemm", "grouped_gemm"];
        let attention =
            ["attention", "attention_backward", "attention_part", "attention_part_backward"];
        // On `mma.sync`, never timed: a GPU selects a kernel on wgmma instead.
        let never_selected =
            ["cuda_bf16_gemm", "cuda_bf16_grouped_gemm", "cuda_mxfp8_grouped_gemm"];
        for op in ops.into_iter().chain(attention) {
            let of_hopper = |spec: &&crate::runtime::cuda::spec::CudaKernelSpec| {
                spec.ops.contains(&op) && spec.architectures.contains(&Architecture::Sm90a)
            };
            for spec in cuda_kernels().filter(of_hopper) {
                let is_known = HOPPER.iter().any(|(name, _)| *name == spec.name);
                let is_left_out = never_selected.contains(&spec.name);
                assert!(is_known != is_left_out, "{op}: {}", spec.name);
            }
        }
    }

    #[test]
    fn shares_by_target() {
        let check = |kernel: &str, target: &Target, expected: f64| {
            assert_eq!(peak_share(kernel, target), expected, "{kernel} on {}", target.arch);
        };
        let hopper = cuda_target(Architecture::Sm90a, 132, &[CUBLASLT]);
        let blackwell = cuda_target(Architecture::Sm100a, 148, &[CUBLASLT]);
        let emulated = Target { gpu: None, ..hopper.clone() };
        check("cublaslt_linear", &hopper, 0.74);
        check("cuda_attention_part", &hopper, 0.39);
        check("cuda_rms_norm", &hopper, 1.0);
        check("cublaslt_linear", &blackwell, 1.0);
        check("cuda_sm100_nvfp4_gemm", &blackwell, 1.0);
        let ultra = cuda_target(Architecture::Sm103a, 148, &[]);
        check("cuda_sm100_nvfp4_gemm", &ultra, 64.0 / 96.0);
        check("cublaslt_linear", &emulated, 1.0);
    }
}
