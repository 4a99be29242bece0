//! Efficiencies measured on a machine, as written by `deepwell probe --measure --json`.

use deepwell_probe::NumberFormat;
use serde::Deserialize;

use super::Machines;
use crate::gpu_model::GpuModel;

/// Measurements of a machine, as far as a plan uses them.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct MachineMeasurements {
    /// Each GPU.
    #[serde(default)]
    pub gpus: Vec<GpuMeasurement>,
    /// Links between the GPUs.
    #[serde(default)]
    pub links: LinkMeasurement,
}

/// Measurements of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct GpuMeasurement {
    /// Memory copy bandwidth in GB/s, read and written bytes.
    #[serde(default)]
    pub copy_gbps: Option<f64>,
    /// GEMMs.
    #[serde(default)]
    pub gemms: Vec<GemmMeasurement>,
}

/// Measurement of a GEMM.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct GemmMeasurement {
    /// Format of the operands.
    pub format: NumberFormat,
    /// M, N, K.
    pub shape: [usize; 3],
    /// 10^12 FLOP a second.
    pub tflops: f64,
}

/// Measurements of the links.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct LinkMeasurement {
    /// Copies between each pair of GPUs.
    #[serde(default)]
    pub copies: Vec<CopyMeasurement>,
}

/// Measurement of a copy between two GPUs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct CopyMeasurement {
    /// GB/s.
    pub gbps: f64,
    /// Whether the copy is peer to peer.
    pub is_direct: bool,
}

/// Bandwidth of norms and activation functions relative to a copy: 80 of 88 % on the H200 used to
/// calibrate Hopper.
const KERNELS_OF_COPY: f64 = 0.80 / 0.88;

impl Machines {
    /// Replaces the efficiencies of the GPU generation by measured values. The slowest GPU counts,
    /// because ranks wait for it; values without a measurement stay.
    #[must_use]
    pub fn measured(mut self, measured: &MachineMeasurements) -> Machines {
        let of_format = |formats: &[NumberFormat]| {
            let rates = measured.gpus.iter().filter_map(|gpu| {
                let of_gpu = gpu.gemms.iter().filter(|gemm| formats.contains(&gemm.format));
                of_gpu.filter(|gemm| gemm.tflops > 0.0).max_by(|a, b| a.tflops.total_cmp(&b.tflops))
            });
            rates.min_by(|a, b| a.tflops.total_cmp(&b.tflops))
        };
        let mut what: Vec<&str> = Vec::new();
        let share = |gemm: &GemmMeasurement, seconds: &dyn Fn(f64, f64, f64) -> f64| {
            let [m, n, k] = gemm.shape.map(|size| size as f64);
            let predicted = 2.0 * m * n * k / seconds(m, n, k) / 1e12;
            if predicted > 0.0 { gemm.tflops / predicted } else { 1.0 }
        };
        let gpu: &mut GpuModel = &mut self.gpu;
        if let Some(gemm) = of_format(&[NumberFormat::Bf16]) {
            gpu.gemm_efficiency *= share(gemm, &|m, n, k| gpu.gemm_s(m, n, k));
            what.push("BF16 GEMMs");
        }
        if let Some(gemm) = of_format(&[NumberFormat::Mxfp8]) {
            gpu.fp8_gemm_efficiency *= share(gemm, &|m, n, k| gpu.fp8_gemm_s(m, n, k));
            what.push("MXFP8 GEMMs");
        }
        let copies = measured.gpus.iter().filter_map(|gpu| gpu.copy_gbps);
        let slowest = copies.filter(|gbps| *gbps > 0.0).fold(f64::INFINITY, f64::min);
        if slowest.is_finite() {
            gpu.memory_efficiency = KERNELS_OF_COPY * slowest * 1e9 / gpu.memory_bytes_per_s;
            what.push("memory");
        }
        let direct = measured.links.copies.iter().filter(|copy| copy.is_direct && copy.gbps > 0.0);
        let slowest = direct.map(|copy| copy.gbps).fold(f64::INFINITY, f64::min);
        if slowest.is_finite() {
            let share = slowest / self.fabric.generation.nvlink_gbps();
            self.fabric.nvlink_share = share.min(1.0);
            what.push("NVLink");
        }
        if !what.is_empty() {
            let rest = std::mem::take(&mut self.gpu.calibration);
            self.gpu.calibration = format!(
                "{} measured by `deepwell probe --measure`; the rest: {rest}",
                what.join(", ")
            );
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_take_the_place_of_the_generations() {
        let before = Machines::of_gpus(GpuModel::b200(), 8);
        let text = r#"{
            "cpu": { "copy_gbps": 100.0 },
            "gpus": [
                { "index": 0, "copy_gbps": 6000.0, "gemms": [
                    { "format": "bf16", "shape": [8192, 8192, 8192], "tflops": 1700 },
                    { "format": "mxfp8", "shape": [8192, 8192, 8192], "tflops": 3000 }
                ] },
                { "index": 1, "copy_gbps": 5500.0, "gemms": [
                    { "format": "bf16", "shape": [8192, 8192, 8192], "kernel": "a", "tflops": 1600 }
                ] },
                { "index": 2, "failures": ["lost"] }
            ],
            "links": { "copies": [
                { "from": 0, "to": 1, "gbps": 700.0, "is_direct": true },
                { "from": 1, "to": 0, "gbps": 20.0, "is_direct": false }
            ] }
        }"#;
        let measured: MachineMeasurements = serde_json::from_str(text).unwrap();
        let after = before.clone().measured(&measured);
        let seconds = after.gpu.gemm_s(8192.0, 8192.0, 8192.0);
        assert!((2.0 * 8192f64.powi(3) / seconds / 1600e12 - 1.0).abs() < 1e-9, "{seconds}");
        let seconds = after.gpu.fp8_gemm_s(8192.0, 8192.0, 8192.0);
        assert!((2.0 * 8192f64.powi(3) / seconds / 3000e12 - 1.0).abs() < 1e-9, "{seconds}");
        assert!((1e9 / after.gpu.memory_s(1e9) / (5500e9 * 0.80 / 0.88) - 1.0).abs() < 1e-9);
        assert!((after.fabric.nvlink_gbps() - 700.0).abs() < 1e-9);
        let calibration = "BF16 GEMMs, MXFP8 GEMMs, memory, NVLink measured by `deepwell probe";
        assert!(after.gpu.calibration.starts_with(calibration), "{}", after.gpu.calibration);
        assert_eq!(before.clone().measured(&MachineMeasurements::default()), before);
    }
}
