//! Predicted times of kernels, from bytes, FLOPs and the rates of the target.
//!
//! A prediction chooses between kernels of the same request; it does not promise a time. Rates come
//! from `deepwell-probe`: datasheets of GPUs, FLOP per cycle of CPUs. The share of a rate that a
//! kernel reaches is measured and cited, or marked as assumed.

use std::sync::LazyLock;

use deepwell_ir::{DType, KernelRequest, MathUnit, Op, Target};
use deepwell_probe::{Cpu, Gpu, Hardware, NumberFormat};

use crate::runtime::cpu::gemm::Tier;

/// Predicts a kernel's time for a request, in seconds.
pub type Predict = fn(&KernelRequest<'_>, &Target) -> f64;

/// Seconds per launch on a GPU, from one launch to the next in a CUDA graph: `rope 16384x256` takes
/// 6.0 us with bytes of 4.0 us on an H200 (`benchmarks/bench_h200_2026-11-21.md`, norms).
const LAUNCH_S: f64 = 2e-6;

/// Share of the peak that cuBLASLt reaches in BF16: 66 to 74 % on an H200 for matrices of 2048 and
/// more (`benchmarks/bench_h200_2026-11-21.md`, gemm).
pub(crate) const CUBLASLT_BF16: f64 = 0.70;
/// Share of cuBLASLt in FP8 with scales of 128, their expansion included: 45 to 58 % (same file).
pub(crate) const CUBLASLT_FP8: f64 = 0.52;
/// Share of the FP8 peak that `mxfp8_gemm.cu` reaches, which rescales in registers: 8.2 to 9.0 % on
/// an H200 (same file).
pub(crate) const MMA_SYNC_MXFP8: f64 = 0.085;
/// Share of the BF16 peak of `bf16_gemm.cu`: assumed, twice that of `mxfp8_gemm.cu`, with the same
/// structure on `mma.sync` and no rescaling.
pub(crate) const MMA_SYNC_BF16: f64 = 0.17;
/// Share of the FP8 peak of `sm120_mxfp8_gemm.cu`, where tensor cores apply the scales: assumed,
/// that of `bf16_gemm.cu`, with the same structure.
pub(crate) const SM120_MXFP8: f64 = MMA_SYNC_BF16;
/// Share of the FP4 peak of `sm120_nvfp4_gemm.cu`: assumed, for the same reason.
pub(crate) const SM120_NVFP4: f64 = MMA_SYNC_BF16;

/// Rates of a target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rates {
    f32_flops_per_s: f64,
    bf16_flops_per_s: f64,
    fp8_flops_per_s: f64,
    nvfp4_flops_per_s: f64,
    bytes_per_s: f64,
    launch_s: f64,
}

impl Rates {
    /// Rates of a GPU of `target`'s architecture: the datasheet rates times the target's share of
    /// the SMs. For any other architecture, the rates of a CPU.
    pub(crate) fn of(target: &Target) -> Rates {
        let Some((gpu, sms)) = gpu(&target.arch) else { return Rates::of_cpu(target, Tier::F32) };
        let share = target.workers as f64 / sms;
        let tflops = |format| gpu.peak_tflops(format);
        let f32_tflops = tflops(NumberFormat::Fp32).unwrap_or(1.0);
        let bf16_tflops = tflops(NumberFormat::Bf16).unwrap_or(f32_tflops);
        let fp8_tflops = tflops(NumberFormat::Fp8).unwrap_or(bf16_tflops);
        Rates {
            f32_flops_per_s: share * f32_tflops * 1e12,
            bf16_flops_per_s: share * bf16_tflops * 1e12,
            fp8_flops_per_s: share * fp8_tflops * 1e12,
            // Without a peak, operands are dequantized first.
            nvfp4_flops_per_s: share * tflops(NumberFormat::Nvfp4).unwrap_or(bf16_tflops) * 1e12,
            bytes_per_s: share * gpu.hbw_gbps * 1e9,
            launch_s: LAUNCH_S,
        }
    }

    /// Rates of a CPU with `target`'s workers as cores, with the instructions of `tier`.
    pub(crate) fn of_cpu(target: &Target, tier: Tier) -> Rates {
        let cores = target.workers.max(1) as u32;
        let flops_per_s = |format| core(tier).peak_gflops(format) * 1e9 * f64::from(cores);
        // All formats are widened to the input format of the instructions.
        let format = if tier == Tier::F32 { NumberFormat::Fp32 } else { NumberFormat::Bf16 };
        Rates {
            f32_flops_per_s: flops_per_s(NumberFormat::Fp32),
            bf16_flops_per_s: flops_per_s(format),
            fp8_flops_per_s: flops_per_s(format),
            nvfp4_flops_per_s: flops_per_s(format),
            bytes_per_s: core(tier).memory_gbps_or_assumed() * 1e9 * f64::from(cores),
            launch_s: 0.0,
        }
    }

    fn flops_per_s(&self, unit: MathUnit) -> f64 {
        match unit {
            MathUnit::F32 => self.f32_flops_per_s,
            MathUnit::Bf16 => self.bf16_flops_per_s,
            MathUnit::Mxfp8 => self.fp8_flops_per_s,
            MathUnit::Nvfp4 => self.nvfp4_flops_per_s,
        }
    }

    /// Seconds to read or write so many bytes of memory.
    pub(crate) fn bytes_s(&self, bytes: f64) -> f64 {
        bytes / self.bytes_per_s
    }

    /// The roofline time of a request whose arithmetic reaches `share` of the unit's peak, plus a
    /// launch.
    pub(crate) fn roofline_s(&self, request: &KernelRequest<'_>, share: f64) -> f64 {
        let dtypes: Vec<DType> = request.operands.iter().map(|operand| operand.dtype).collect();
        let unit = request.op.rule().unit(&dtypes);
        let math_s = flops(request) / (share * self.flops_per_s(unit));
        math_s.max(self.bytes_s(bytes(request))) + self.launch_s
    }

    /// The roofline time of a GEMM whose operands were dequantized to BF16, at most twice the
    /// bytes, plus a launch.
    pub(crate) fn bf16_gemm_s(&self, request: &KernelRequest<'_>, share: f64) -> f64 {
        let math_s = flops(request) / (share * self.bf16_flops_per_s);
        math_s.max(self.bytes_s(2.0 * bytes(request))) + self.launch_s
    }

    /// Seconds of a launch.
    pub(crate) fn launch_s(&self) -> f64 {
        self.launch_s
    }
}

fn flops(request: &KernelRequest<'_>) -> f64 {
    let shapes: Vec<Vec<usize>> =
        request.operands.iter().map(|operand| operand.shape.clone()).collect();
    request.op.rule().flops(&shapes) as f64
}

/// Bytes of all operands, each counted once.
fn bytes(request: &KernelRequest<'_>) -> f64 {
    let of = |operand: &deepwell_ir::OperandType| operand.storage_bytes().unwrap_or(usize::MAX);
    request.operands.iter().map(|operand| of(operand) as f64).sum()
}

/// The datasheet GPU of an architecture, and its number of SMs.
fn gpu(arch: &str) -> Option<&'static (Gpu, f64)> {
    static GPUS: LazyLock<Vec<(Gpu, f64)>> = LazyLock::new(|| {
        ["h200", "b200", "b300", "rtx5090"]
            .into_iter()
            .filter_map(|preset| Hardware::preset(preset).ok()?.gpus.into_iter().next())
            .filter_map(|gpu| {
                let sms = f64::from(gpu.sm_count?);
                Some((gpu, sms))
            })
            .collect()
    });
    GPUS.iter().find(|(gpu, _)| gpu.arch.to_string() == arch)
}

/// A core with the instructions of a tier and of all lower tiers.
fn core(tier: Tier) -> &'static Cpu {
    static CORES: LazyLock<[Cpu; 3]> = LazyLock::new(|| {
        [&["avx", "avx2", "fma", "avx512f"][..], &["avx512bf16"], &["amx_bf16"]].map(|simd| {
            let cpu = Hardware::preset("cpu").map(|hardware| hardware.cpu);
            let (hz, bytes) = cpu
                .map_or((1, 1), |cpu| (cpu.frequency_hz_max.unwrap_or(1), cpu.memory_total_bytes));
            let simd = [&["avx", "avx2", "fma", "avx512f"][..], simd].concat();
            Cpu::described("a core", 1, hz, &simd, bytes)
        })
    });
    &CORES[match tier {
        Tier::F32 | Tier::Avx512 => 0,
        Tier::Avx512Bf16 => 1,
        Tier::AmxBf16 => 2,
    }]
}

/// The roofline time: for kernels without alternatives, and for memory-bound kernels, which reach
/// 0.6 to 1.0 of the roofline on an H200 (`benchmarks/bench_h200_2026-11-21.md`, norms).
pub(crate) fn roofline(request: &KernelRequest<'_>, target: &Target) -> f64 {
    Rates::of(target).roofline_s(request, 1.0)
}

/// Side of the tiles of the `mma.sync` GEMMs, and seconds in which a CTA writes one tile: 1024
/// cycles, as assumed for a CTA on tcgen05, but not overlapped with the next tile.
const MMA_SYNC_TILE: usize = 128;
const MMA_SYNC_RESULT_S: f64 = 1024.0 / 1.8e9;

/// Predicted time of a GEMM on `mma.sync` with tiles of 128 by 128, at `share` of the unit's peak:
/// waves of CTAs in sequence, each as long as a full tile.
pub(crate) fn mma_sync_gemm(request: &KernelRequest<'_>, target: &Target, share: f64) -> f64 {
    let rates = Rates::of(target);
    let Some([m, n]) = result_of_gemm(request).filter(|sizes| !sizes.contains(&0)) else {
        return rates.roofline_s(request, share);
    };
    let tiles = m.div_ceil(MMA_SYNC_TILE) * n.div_ceil(MMA_SYNC_TILE);
    let waves = tiles.div_ceil(target.workers.max(1)) as f64;
    let computed = waves * (target.workers * MMA_SYNC_TILE * MMA_SYNC_TILE) as f64;
    let used = (m * n) as f64 / computed;
    rates.roofline_s(request, share * used) + waves * MMA_SYNC_RESULT_S
}

/// M and N of a GEMM, from the shapes of its operands; `None` for other ops.
fn result_of_gemm(request: &KernelRequest<'_>) -> Option<[usize; 2]> {
    let shape = |index: usize| &request.operands[index].shape;
    Some(match request.op {
        Op::Linear(_) => [shape(0)[0], shape(1)[0]],
        Op::LinearDgrad(_) => [shape(0)[0], shape(1)[1]],
        Op::LinearWgrad(_) => [shape(0)[1], shape(1)[1]],
        Op::ScaledGemm(op) => [shape(0)[0], shape(op.b_input())[0]],
        _ => return None,
    })
}
