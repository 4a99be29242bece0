//! GPU models of the cost model: datasheet peaks, and the share of the peaks reached by kernels.
//!
//! Efficiencies are calibrated once per generation, on no row of the tables in `scores/`:
//!
//! - Hopper: the runs on an H200 in `benchmarks/` (library GEMMs at 661 to 712 of 989 TFLOP/s,
//!   MXFP8 GEMMs at up to 1145 of 1979, norms and SwiGLU at 76 to 97 % of memcpy bandwidth, itself
//!   88 % of the datasheet's, PyTorch's causal attention at 441 and 371 TFLOP/s);
//! - Ampere: no GPU of this generation was measured. GEMMs of random numbers are publicly known to
//!   reach 250 to 260 of 312 TFLOP/s; the shares of attention and memory are Hopper's;
//! - Blackwell: carried over from Hopper, as every report states. NVFP4 GEMMs are as much faster
//!   than MXFP8 GEMMs as published: 1.90 times on a B300 (Transformer Engine's profile of GEMMs,
//!   operands quantized before), and on a B200 at 88.5 % of their peak where MXFP8 is at 98.3 %
//!   (CUTLASS 3.8).

use serde::{Deserialize, Serialize};

use crate::collectives::Generation;

/// A GPU in the cost model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuModel {
    /// Name.
    pub name: String,
    /// Generation.
    pub generation: Generation,
    /// Dense BF16 FLOP/s of the datasheet.
    pub bf16_flops: f64,
    /// Dense FP8 FLOP/s of the datasheet; the BF16 peak for a GPU without FP8.
    pub fp8_flops: f64,
    /// Dense NVFP4 FLOP/s of the datasheet; the BF16 peak for a GPU without NVFP4.
    #[serde(default = "bf16_of_hopper")]
    pub nvfp4_flops: f64,
    /// Bandwidth of the device memory in bytes per second, by the datasheet.
    pub memory_bytes_per_s: f64,
    /// Bytes of memory; for a probed machine, free bytes.
    pub memory_bytes: f64,
    /// Number of SMs.
    pub sms: f64,
    /// GPUs per NVLink domain.
    pub domain_gpus: usize,
    /// GB/s of the network in one direction per GPU, in NVIDIA's own systems.
    pub nic_gbps: f64,
    /// Share of the peak reached by a large GEMM.
    pub gemm_efficiency: f64,
    /// Share of the FP8 peak reached by a large MXFP8 GEMM.
    pub fp8_gemm_efficiency: f64,
    /// Share of the NVFP4 peak reached by a large NVFP4 GEMM.
    #[serde(default = "gemms_of_hopper")]
    pub nvfp4_gemm_efficiency: f64,
    /// Share of the bandwidth reached by elementwise kernels.
    pub memory_efficiency: f64,
    /// Share of the peak reached by flash attention, forward.
    pub attention_forward_efficiency: f64,
    /// Share of the peak reached by flash attention, backward.
    pub attention_backward_efficiency: f64,
    /// Share of the peak reached by Deepwell's portable attention, forward: on `mma.sync`, for
    /// context parallelism, and for GPUs without attention kernels for their own tensor-core
    /// instructions.
    pub portable_forward_efficiency: f64,
    /// Share of the peak reached by Deepwell's portable attention, backward.
    pub portable_backward_efficiency: f64,
    /// GB/s between GPU and host in one direction, by the datasheet.
    #[serde(default = "pcie_5_gbps")]
    pub host_link_gbps: f64,
    /// GB/s of the host's memory per GPU, by the datasheet.
    #[serde(default = "ddr5_gbps")]
    pub host_memory_gbps: f64,
    /// Seconds between the end of a kernel and the begin of the next.
    pub gap_s: f64,
    /// Source of the efficiencies.
    pub calibration: String,
}

fn bf16_of_hopper() -> f64 {
    989e12
}

/// NVFP4 on Hopper is a GEMM in BF16.
fn gemms_of_hopper() -> f64 {
    0.72
}

/// PCIe 5.0 with 16 lanes.
fn pcie_5_gbps() -> f64 {
    64.0
}

/// Two sockets of eight channels of DDR5-4800 for eight GPUs.
fn ddr5_gbps() -> f64 {
    2.0 * 8.0 * 38.4 / 8.0
}

impl GpuModel {
    fn hopper(name: &str, memory_bytes_per_s: f64, memory_bytes: f64) -> GpuModel {
        GpuModel {
            name: name.to_string(),
            generation: Generation::Hopper,
            bf16_flops: 989e12,
            fp8_flops: 1979e12,
            nvfp4_flops: bf16_of_hopper(),
            memory_bytes_per_s,
            memory_bytes,
            sms: 132.0,
            domain_gpus: 8,
            nic_gbps: 50.0,
            gemm_efficiency: 0.72,
            fp8_gemm_efficiency: 0.58,
            nvfp4_gemm_efficiency: gemms_of_hopper(),
            memory_efficiency: 0.80,
            attention_forward_efficiency: 0.45,
            attention_backward_efficiency: 0.375,
            portable_forward_efficiency: 0.33,
            portable_backward_efficiency: 0.24,
            host_link_gbps: pcie_5_gbps(),
            host_memory_gbps: ddr5_gbps(),
            gap_s: 2e-6,
            calibration: "measured on an H200 (benchmarks/)".to_string(),
        }
    }

    /// NVIDIA A100 SXM, 80 GB.
    pub fn a100() -> GpuModel {
        GpuModel {
            generation: Generation::Ampere,
            bf16_flops: 312e12,
            fp8_flops: 312e12,
            nvfp4_flops: 312e12,
            sms: 108.0,
            nic_gbps: 25.0,
            gemm_efficiency: 0.82,
            fp8_gemm_efficiency: 0.82,
            nvfp4_gemm_efficiency: 0.82,
            // FlashAttention 2 reaches 50 to 73 % of an A100's peak, and 63 % backward in a case
            // with 73 % forward (arXiv 2307.08691).
            attention_forward_efficiency: 0.615,
            attention_backward_efficiency: 0.615 * 63.0 / 73.0,
            // The A100's tensor cores only support `mma.sync`.
            portable_forward_efficiency: 0.615,
            portable_backward_efficiency: 0.615 * 63.0 / 73.0,
            // PCIe 4.0, and two sockets of eight channels of DDR4-3200.
            host_link_gbps: 32.0,
            host_memory_gbps: 2.0 * 8.0 * 25.6 / 8.0,
            calibration:
                "datasheet; GEMMs at 82 % of it, attention as published, the rest carried \
                          over from Hopper"
                    .to_string(),
            ..GpuModel::hopper("a100", 2039e9, 81_920.0 * 1_048_576.0)
        }
    }

    /// NVIDIA H100 SXM, 80 GB.
    pub fn h100() -> GpuModel {
        GpuModel::hopper("h100", 3350e9, 81_559.0 * 1_048_576.0)
    }

    /// NVIDIA H200 SXM.
    pub fn h200() -> GpuModel {
        GpuModel::hopper("h200", 4800e9, 143_771.0 * 1_048_576.0)
    }

    /// Blackwell with the peaks of its datasheet.
    fn blackwell(name: &str, bf16_flops: f64, memory_bytes_per_s: f64, mib: f64) -> GpuModel {
        GpuModel {
            generation: Generation::Blackwell,
            bf16_flops,
            fp8_flops: 2.0 * bf16_flops,
            nvfp4_flops: 4.0 * bf16_flops,
            nvfp4_gemm_efficiency: 0.58 * 88.5 / 98.3,
            sms: 148.0,
            // 320 to 390 of 2250 TFLOP/s on a B200 (flashinfer#5133); backward as on Hopper.
            portable_forward_efficiency: 0.16,
            portable_backward_efficiency: 0.16 * 0.24 / 0.33,
            calibration: "datasheet; efficiencies carried over from Hopper, nothing measured"
                .to_string(),
            ..GpuModel::hopper(name, memory_bytes_per_s, mib * 1_048_576.0)
        }
    }

    /// NVIDIA B200 on an HGX board.
    pub fn b200() -> GpuModel {
        GpuModel::blackwell("b200", 2250e12, 7700e9, 183_359.0)
    }

    /// NVIDIA GB200 in a rack.
    pub fn gb200() -> GpuModel {
        let board = GpuModel::blackwell("gb200", 2500e12, 8000e9, 189_471.0);
        GpuModel { domain_gpus: 72, ..board.with_grace() }
    }

    /// NVLink-C2C, and half of the 512 GB/s of a Grace with two GPUs.
    fn with_grace(self) -> GpuModel {
        GpuModel { host_link_gbps: 450.0, host_memory_gbps: 256.0, ..self }
    }

    /// FP4 at three times the rate of FP8.
    fn with_ultra(self) -> GpuModel {
        let nvfp4_gemm_efficiency = 0.58 * 1.90 / 3.0;
        GpuModel { nvfp4_flops: 3.0 * self.fp8_flops, nvfp4_gemm_efficiency, ..self }
    }

    /// NVIDIA B300 on an HGX board.
    pub fn b300() -> GpuModel {
        let board = GpuModel::blackwell("b300", 2250e12, 7700e9, 275_040.0);
        GpuModel { nic_gbps: 100.0, ..board.with_ultra() }
    }

    /// NVIDIA GB300 in a rack.
    pub fn gb300() -> GpuModel {
        let board = GpuModel::blackwell("gb300", 2500e12, 8000e9, 284_208.0);
        GpuModel { domain_gpus: 72, nic_gbps: 100.0, ..board.with_grace().with_ultra() }
    }

    /// The GPU model whose name is contained in `name`.
    pub fn named(name: &str) -> Option<GpuModel> {
        let sku = name.to_ascii_lowercase();
        if sku.contains("a100") && sku.contains("40g") {
            let memory_bytes = 40_960.0 * 1_048_576.0;
            return Some(GpuModel { memory_bytes, memory_bytes_per_s: 1555e9, ..GpuModel::a100() });
        }
        let all: [fn() -> GpuModel; 7] = [
            GpuModel::gb300,
            GpuModel::gb200,
            GpuModel::b300,
            GpuModel::b200,
            GpuModel::h200,
            GpuModel::h100,
            GpuModel::a100,
        ];
        all.into_iter().map(|model| model()).find(|model| sku.contains(&model.name))
    }

    /// Seconds of a BF16 GEMM, `out[m, n] = a[m, k] · b[n, k]ᵀ`.
    ///
    /// The share of the peak is lower if the last wave of tiles leaves SMs idle, or if K is short
    /// compared with filling the pipeline. No GEMM is faster than reading its operands.
    pub fn gemm_s(&self, m: f64, n: f64, k: f64) -> f64 {
        self.batched_gemm_s(1.0, m, n, k)
    }

    /// Seconds of `count` GEMMs of one shape in one kernel, with tiles sharing waves, such as
    /// attention's scores and values stored in memory.
    pub fn batched_gemm_s(&self, count: f64, m: f64, n: f64, k: f64) -> f64 {
        self.gemm_at(count, [m, n, k], self.bf16_flops * self.gemm_efficiency, 2.0)
    }

    /// [`GpuModel::gemm_s`] with MXFP8 operands and a BF16 output.
    pub fn fp8_gemm_s(&self, m: f64, n: f64, k: f64) -> f64 {
        let flops = self.fp8_flops * self.fp8_gemm_efficiency;
        self.gemm_at(1.0, [m, n, k], flops, 1.0 + 1.0 / 32.0)
    }

    /// [`GpuModel::gemm_s`] with NVFP4 operands and a BF16 output.
    pub fn nvfp4_gemm_s(&self, m: f64, n: f64, k: f64) -> f64 {
        let flops = self.nvfp4_flops * self.nvfp4_gemm_efficiency;
        self.gemm_at(1.0, [m, n, k], flops, 0.5 + 1.0 / 16.0)
    }

    /// `flops` is the FLOP/s of a large GEMM; an operand element has `element_bytes`.
    fn gemm_at(&self, count: f64, [m, n, k]: [f64; 3], flops: f64, element_bytes: f64) -> f64 {
        if count <= 0.0 || m <= 0.0 || n <= 0.0 || k <= 0.0 {
            return 0.0;
        }
        let waste = |tile_m: f64, tile_n: f64| {
            let tiles = count * (m / tile_m).ceil() * (n / tile_n).ceil();
            let waves = (tiles / self.sms).ceil();
            waves * self.sms * tile_m * tile_n / (count * m * n)
        };
        // Smaller tiles read operands more often: 90 % and 75 % of the large tiles' rate.
        let choices = [(128.0, 256.0, 1.0), (128.0, 128.0, 0.9), (64.0, 64.0, 0.75)];
        let waste = choices
            .iter()
            .map(|&(tile_m, tile_n, share)| waste(tile_m, tile_n) / share)
            .fold(f64::INFINITY, f64::min);
        let fill = 1.0 + 64.0 / k;
        let compute = 2.0 * count * m * n * k / flops * waste * fill;
        let bytes = element_bytes * (m * k + n * k) + 2.0 * m * n;
        compute.max(self.memory_s(count * bytes))
    }

    /// Seconds of updating parameters whose `state_bytes` of master weights and moments lie in host
    /// memory: the state is copied to the GPU and back, in both directions at once, and the copies
    /// take longer than the update.
    pub fn host_optimizer_s(&self, state_bytes: f64) -> f64 {
        let share = self.memory_efficiency * 1e9;
        let link = state_bytes / (self.host_link_gbps * share);
        link.max(2.0 * state_bytes / (self.host_memory_gbps * share))
    }

    /// Seconds of reading and writing `bytes`.
    pub fn memory_s(&self, bytes: f64) -> f64 {
        bytes / (self.memory_bytes_per_s * self.memory_efficiency)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GEMMs of `benchmarks/bench_h200_2026-11-21.md`, in microseconds: 8 % is the spread of the
    /// library's efficiency over these shapes, 61.6 to 72 %.
    #[test]
    fn gemms_are_those_measured() {
        let gpu = GpuModel::h200();
        let rows = [
            (4096.0, 4096.0, 4096.0, 197.7),
            (8192.0, 8192.0, 8192.0, 1600.0),
            (16384.0, 4096.0, 4096.0, 818.1),
            (8192.0, 14336.0, 4096.0, 1382.0),
            (8192.0, 4096.0, 14336.0, 1351.0),
            (16384.0, 2048.0, 2048.0, 204.6),
            (16384.0, 5632.0, 2048.0, 571.4),
            (16384.0, 2048.0, 5632.0, 543.9),
        ];
        for (m, n, k, us) in rows {
            let found = gpu.gemm_s(m, n, k) * 1e6;
            assert!((found / us - 1.0).abs() < 0.08, "{m} {n} {k}: {found} {us}");
        }
    }

    /// MXFP8 GEMMs of the same file, fprop and wgrad. Twice the tolerance: the library reaches 50
    /// to 58 % of the peak in fprop, and 45 % in wgrad with FP32 output.
    #[test]
    fn mxfp8_gemms_are_those_measured() {
        let gpu = GpuModel::h200();
        let rows = [
            (4096.0, 4096.0, 4096.0, 126.2, 0.08),
            (8192.0, 8192.0, 8192.0, 959.9, 0.08),
            (16384.0, 4096.0, 4096.0, 493.0, 0.08),
            (8192.0, 14336.0, 4096.0, 865.1, 0.08),
            (8192.0, 4096.0, 14336.0, 843.7, 0.08),
            (16384.0, 2048.0, 2048.0, 136.1, 0.16),
            (5632.0, 2048.0, 16384.0, 422.1, 0.25),
        ];
        for (m, n, k, us, tolerance) in rows {
            let found = gpu.fp8_gemm_s(m, n, k) * 1e6;
            assert!((found / us - 1.0).abs() < tolerance, "{m} {n} {k}: {found} {us}");
        }
    }

    #[test]
    fn names_find_their_model() {
        let check = |name: &str, expected: Option<&str>| {
            assert_eq!(GpuModel::named(name).map(|gpu| gpu.name).as_deref(), expected, "{name}");
        };
        check("h100_80gb", Some("h100"));
        check("NVIDIA GB200", Some("gb200"));
        check("B200", Some("b200"));
        check("NVIDIA A100-SXM4-80GB", Some("a100"));
        let small = GpuModel::named("a100_40gb").unwrap();
        assert_eq!((small.name.as_str(), small.memory_bytes / 1e9), ("a100", 42.94967296));
        check("T4", None);
    }
}
