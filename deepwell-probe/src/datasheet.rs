//! Dense peaks and memory bandwidths of GPUs, from their datasheets.
//!
//! Datasheets print figures "with sparsity", twice the peak of a dense GEMM; every figure here is
//! dense. The sheets of racks and boards print totals, divided here by their 72 or 8 GPUs, and one
//! figure each for "FP8/FP6" and for "FP4", used here for every format of that width. The Blackwell
//! Ultra sheets also print FP4 figures without sparsity (GB300 NVL72 1080 of 1440 PFLOP/s, HGX B300
//! 108 of 144), which are not half of the sparse figures; the Blackwell datasheet rounds them to 15
//! and 14 PFLOP/s per GPU. Memory bandwidths are from the Blackwell datasheet: 7.7 TB/s on HGX
//! boards and 8 in racks. The peaks of a GPU that is not in the table are computed from its
//! architecture: SMs x FLOP per cycle and SM x highest clock.

use std::collections::BTreeMap;

use crate::NumberFormat::{self, *};

/// Figures of one SKU.
pub(crate) struct Sheet {
    /// Words that the SKU's name must contain.
    words: &'static [&'static str],
    /// Source of the figures.
    pub(crate) source: &'static str,
    /// GB/s of the device memory; `None` if one name covers several memories.
    pub(crate) hbw_gbps: Option<f64>,
    /// Dense TFLOP/s.
    pub(crate) peaks: &'static [(NumberFormat, f64)],
}

/// Words that distinguish another SKU with a similar name: a laptop part or an export version has
/// other rates.
const OTHER_SKU: [&str; 4] = ["Laptop", "D", "Max", "vGPU"];

const HOPPER_SXM: &[(NumberFormat, f64)] = &[
    (Fp64, 67.0),
    (Fp32, 67.0),
    (Tf32, 494.0),
    (Bf16, 989.0),
    (Fp16, 989.0),
    (Fp8, 1979.0),
    (Int8, 1979.0),
];

const HOPPER_NVL: &[(NumberFormat, f64)] = &[
    (Fp64, 60.0),
    (Fp32, 60.0),
    (Tf32, 417.0),
    (Bf16, 835.0),
    (Fp16, 835.0),
    (Fp8, 1670.0),
    (Int8, 1670.0),
];

/// Sheets with more words first: the first match counts.
const SHEETS: [Sheet; 20] = [
    Sheet {
        words: &["GB300"],
        source: "NVIDIA GB300 NVL72 datasheet, dense, per GPU",
        hbw_gbps: Some(8000.0),
        peaks: &[
            (Fp64, 1.3),
            (Fp32, 80.0),
            (Tf32, 1250.0),
            (Bf16, 2500.0),
            (Fp16, 2500.0),
            (Fp8, 5000.0),
            (Mxfp8, 5000.0),
            (Mxfp6, 5000.0),
            (Mxfp4, 15000.0),
            (Nvfp4, 15000.0),
            (Int8, 165.0),
        ],
    },
    Sheet {
        words: &["B300"],
        source: "NVIDIA HGX B300 datasheet, dense, per GPU",
        hbw_gbps: Some(7700.0),
        peaks: &[
            (Fp64, 1.25),
            (Fp32, 75.0),
            (Tf32, 1125.0),
            (Bf16, 2250.0),
            (Fp16, 2250.0),
            (Fp8, 4500.0),
            (Mxfp8, 4500.0),
            (Mxfp6, 4500.0),
            (Mxfp4, 13500.0),
            (Nvfp4, 13500.0),
            (Int8, 150.0),
        ],
    },
    Sheet {
        words: &["GB200"],
        source: "NVIDIA GB200 NVL72 datasheet, dense, per GPU",
        hbw_gbps: Some(8000.0),
        peaks: &[
            (Fp64, 40.0),
            (Fp32, 80.0),
            (Tf32, 1250.0),
            (Bf16, 2500.0),
            (Fp16, 2500.0),
            (Fp8, 5000.0),
            (Mxfp8, 5000.0),
            (Mxfp6, 5000.0),
            (Mxfp4, 10000.0),
            (Nvfp4, 10000.0),
            (Int8, 5000.0),
        ],
    },
    Sheet {
        words: &["B200"],
        source: "NVIDIA HGX B200 datasheet, dense, per GPU",
        hbw_gbps: Some(7700.0),
        peaks: &[
            (Fp64, 37.0),
            (Fp32, 75.0),
            (Tf32, 1125.0),
            (Bf16, 2250.0),
            (Fp16, 2250.0),
            (Fp8, 4500.0),
            (Mxfp8, 4500.0),
            (Mxfp6, 4500.0),
            (Mxfp4, 9000.0),
            (Nvfp4, 9000.0),
            (Int8, 4500.0),
        ],
    },
    Sheet {
        words: &["H200", "NVL"],
        source: "NVIDIA H200 NVL datasheet, dense",
        hbw_gbps: Some(4800.0),
        peaks: HOPPER_NVL,
    },
    Sheet {
        words: &["H200"],
        source: "NVIDIA H200 SXM datasheet, dense",
        hbw_gbps: Some(4800.0),
        peaks: HOPPER_SXM,
    },
    Sheet {
        words: &["GH200"],
        source: "NVIDIA GH200 datasheet, dense",
        hbw_gbps: None,
        peaks: HOPPER_SXM,
    },
    Sheet {
        words: &["H100", "NVL"],
        source: "NVIDIA H100 NVL datasheet, dense",
        hbw_gbps: Some(3900.0),
        peaks: HOPPER_NVL,
    },
    Sheet {
        words: &["H100", "PCIe"],
        source: "NVIDIA H100 PCIe datasheet, dense",
        hbw_gbps: Some(2000.0),
        peaks: &[
            (Fp64, 51.0),
            (Fp32, 51.0),
            (Tf32, 378.0),
            (Bf16, 756.0),
            (Fp16, 756.0),
            (Fp8, 1513.0),
            (Int8, 1513.0),
        ],
    },
    Sheet {
        words: &["H100"],
        source: "NVIDIA H100 SXM datasheet, dense",
        hbw_gbps: Some(3350.0),
        peaks: HOPPER_SXM,
    },
    Sheet {
        words: &["H20"],
        source: "NVIDIA H20 datasheet, dense",
        hbw_gbps: Some(4000.0),
        peaks: &[
            (Fp64, 1.0),
            (Fp32, 44.0),
            (Tf32, 74.0),
            (Bf16, 148.0),
            (Fp16, 148.0),
            (Fp8, 296.0),
            (Int8, 296.0),
        ],
    },
    Sheet {
        words: &["A100"],
        source: "NVIDIA A100 datasheet, dense",
        hbw_gbps: None,
        peaks: &[
            (Fp64, 19.5),
            (Fp32, 19.5),
            (Tf32, 156.0),
            (Bf16, 312.0),
            (Fp16, 312.0),
            (Int8, 624.0),
        ],
    },
    Sheet {
        words: &["A30"],
        source: "NVIDIA A30 datasheet, dense",
        hbw_gbps: Some(933.0),
        peaks: &[
            (Fp64, 10.3),
            (Fp32, 10.3),
            (Tf32, 82.0),
            (Bf16, 165.0),
            (Fp16, 165.0),
            (Int8, 330.0),
        ],
    },
    Sheet {
        words: &["L40S"],
        source: "NVIDIA L40S datasheet, dense",
        hbw_gbps: Some(864.0),
        peaks: &[
            (Fp32, 91.6),
            (Tf32, 183.0),
            (Bf16, 362.0),
            (Fp16, 362.0),
            (Fp8, 733.0),
            (Int8, 733.0),
        ],
    },
    Sheet {
        words: &["L4"],
        source: "NVIDIA L4 datasheet, dense",
        hbw_gbps: Some(300.0),
        peaks: &[
            (Fp32, 30.3),
            (Tf32, 60.0),
            (Bf16, 121.0),
            (Fp16, 121.0),
            (Fp8, 242.0),
            (Int8, 242.0),
        ],
    },
    Sheet {
        words: &["V100"],
        source: "NVIDIA V100 SXM2 datasheet",
        hbw_gbps: Some(900.0),
        peaks: &[(Fp64, 7.8), (Fp32, 15.7), (Fp16, 125.0)],
    },
    Sheet {
        words: &["T4"],
        source: "NVIDIA T4 datasheet",
        hbw_gbps: Some(320.0),
        peaks: &[(Fp32, 8.1), (Fp16, 65.0), (Int8, 130.0)],
    },
    Sheet {
        words: &["RTX", "5090"],
        source: "NVIDIA RTX Blackwell architecture paper, dense, FP32 accumulation",
        hbw_gbps: Some(1792.0),
        peaks: &[
            (Fp32, 104.8),
            (Tf32, 104.8),
            (Bf16, 209.5),
            (Fp16, 209.5),
            (Fp8, 419.0),
            (Mxfp8, 419.0),
            (Mxfp6, 419.0),
            (Mxfp4, 1676.0),
            (Nvfp4, 1676.0),
            (Int8, 838.0),
        ],
    },
    // 188 SMs at the boost clock of 2617 MHz. FP32 accumulation is not halved as on GeForce. The
    // Max-Q and Server editions have other clocks and use computed peaks.
    Sheet {
        words: &["RTX", "PRO", "6000", "Blackwell", "Workstation"],
        source: "NVIDIA RTX Blackwell PRO architecture paper, dense, FP32 accumulation",
        hbw_gbps: Some(1792.0),
        peaks: &[
            (Fp32, 126.0),
            (Tf32, 251.9),
            (Bf16, 503.8),
            (Fp16, 503.8),
            (Fp8, 1007.6),
            (Mxfp8, 1007.6),
            (Mxfp6, 1007.6),
            (Mxfp4, 2015.2),
            (Nvfp4, 2015.2),
            (Int8, 1007.6),
        ],
    },
    Sheet {
        words: &["RTX", "4090"],
        source: "NVIDIA Ada architecture paper, dense, FP32 accumulation",
        hbw_gbps: Some(1008.0),
        peaks: &[
            (Fp32, 82.6),
            (Tf32, 82.6),
            (Bf16, 165.2),
            (Fp16, 165.2),
            (Fp8, 330.3),
            (Int8, 660.6),
        ],
    },
];

/// The sheet of a SKU, given its name in the driver.
pub(crate) fn sheet(name: &str) -> Option<&'static Sheet> {
    let words: Vec<&str> = name.split([' ', '-', '_']).collect();
    let has = |word: &&str| words.contains(word);
    if OTHER_SKU.iter().any(has) {
        return None;
    }
    SHEETS.iter().find(|sheet| sheet.words.iter().all(has))
}

/// Whether a SKU comes on boards or in racks where an NVSwitch joins all GPUs, so that inactive
/// links are a fault and not a missing bridge.
pub(crate) fn is_switched(name: &str) -> bool {
    let words = sheet(name).map(|sheet| sheet.words);
    let switched = ["GB300", "B300", "GB200", "B200", "H200", "H100"];
    words.is_some_and(|words| matches!(words, [word] if switched.contains(word)))
}

/// Dense FLOP per cycle and SM of a compute capability, by format; empty for an unknown capability.
///
/// Workstation and GeForce SKUs share capabilities 8.6, 8.9 and 12.0, but GeForce accumulates
/// 16-bit and 8-bit floating-point MMAs in FP32 at half rate.
pub(crate) fn flops_per_cycle(
    capability: (u32, u32),
    is_geforce: bool,
) -> BTreeMap<NumberFormat, f64> {
    let halved = if is_geforce { 0.5 } else { 1.0 };
    // The matrix unit's rate of 16-bit MMAs, its factor with FP32 accumulation, then FP32 and FP64
    // of the cores (or the FP64 matrix unit).
    let (built, left, fp32, fp64) = match capability {
        (7, 0) => (1024.0, 1.0, 128.0, 64.0),
        (7, 5) => (1024.0, 1.0, 128.0, 4.0),
        (8, 0) => (2048.0, 1.0, 128.0, 128.0),
        (8, 6) | (8, 9) | (12, 0) => (1024.0, halved, 256.0, 4.0),
        (9, 0) => (4096.0, 1.0, 256.0, 256.0),
        (10, 0) => (8192.0, 1.0, 256.0, 128.0),
        (10, 3) => (8192.0, 1.0, 256.0, 4.0),
        _ => return BTreeMap::new(),
    };
    let rate = |format: NumberFormat| match format {
        Fp64 => fp64,
        Fp32 => fp32,
        Tf32 => built * left / 2.0,
        Bf16 | Fp16 => built * left,
        Fp8 | Mxfp8 | Mxfp6 => 2.0 * built * left,
        Mxfp4 | Nvfp4 if capability == (10, 3) => 6.0 * built,
        Mxfp4 | Nvfp4 => 4.0 * built,
        // Blackwell Ultra reduced the integer rate: 150 TOP/s per GPU of an HGX B300.
        Int8 if capability == (10, 3) => built / 16.0,
        Int8 => 2.0 * built,
    };
    let formats = crate::gpu::precisions(capability);
    formats.into_iter().map(|format| (format, rate(format))).collect()
}

/// CUDA cores per SM, `None` for an unknown compute capability.
pub(crate) fn cores_per_sm(capability: (u32, u32)) -> Option<u32> {
    match capability {
        (7, _) | (8, 0) => Some(64),
        (8, _) | (9, _) | (10, _) | (11, _) | (12, _) => Some(128),
        _ => None,
    }
}

/// GB/s of one NVLink in each direction by NVML's code for its version, for drivers that do not
/// report the speed.
///
/// Codes of `nvml.h`: 1 is NVLink 1.0, 2 is 2.0, 3 is 2.2, 4 is 3.0, 5 is 3.1, 6 is 4.0, 7 is 5.0.
/// Speeds: 20, 25, 25, 25, 25 GB/s from the architecture papers; for 4.0 the 26.562 GB/s reported
/// by the driver on H200; for 5.0 the 50 GB/s of 1.8 TB/s over 18 links and both directions.
pub(crate) fn nvlink_gbps(version_code: u32) -> Option<f64> {
    match version_code {
        1 => Some(20.0),
        2..=5 => Some(25.0),
        6 => Some(26.562),
        7 => Some(50.0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sku_names_find_their_sheet() {
        let rows = [
            ("NVIDIA H200", Some("H200 SXM")),
            ("NVIDIA H200 NVL", Some("H200 NVL")),
            ("NVIDIA H100 80GB HBM3", Some("H100 SXM")),
            ("NVIDIA H100 PCIe", Some("H100 PCIe")),
            ("NVIDIA H20", Some("H20")),
            ("NVIDIA GH200 480GB", Some("GH200")),
            ("NVIDIA B200", Some("HGX B200")),
            ("NVIDIA GB200", Some("GB200")),
            ("NVIDIA B300 SXM6 AC", Some("HGX B300")),
            ("NVIDIA A100-SXM4-80GB", Some("A100")),
            ("NVIDIA L4", Some("L4")),
            ("NVIDIA L40", None),
            ("Tesla T4", Some("T4")),
            ("Tesla V100-SXM2-16GB", Some("V100")),
            ("NVIDIA GeForce RTX 5090", Some("RTX Blackwell")),
            ("NVIDIA GeForce RTX 5090 D", None),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
            ("NVIDIA GB300", Some("GB300")),
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", Some("Blackwell PRO")),
            ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
            ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
            ("", None),
        ];
        for (name, expected) in rows {
            let source = sheet(name).map(|sheet| sheet.source);
            match expected {
                Some(part) => {
                    assert!(source.is_some_and(|s| s.contains(part)), "{name} {source:?}")
                }
                None => assert_eq!(source, None, "{name}"),
            }
        }
    }

    #[test]
    fn no_sparse_figure_is_in_the_table() {
        // SMs and boost clock of each SKU. The sheet's figures must be within 12 % of the computed
        // peaks (sheets round, and quote the boost clock of their day). A sparse figure would be
        // 100 % off.
        let rows = [
            ("NVIDIA H200", (9, 0), 132.0, 1.83),
            ("NVIDIA H200 NVL", (9, 0), 132.0, 1.545),
            ("NVIDIA H100 PCIe", (9, 0), 114.0, 1.62),
            ("NVIDIA B200", (10, 0), 148.0, 1.855),
            ("NVIDIA B300", (10, 3), 148.0, 1.855),
            ("NVIDIA GB200", (10, 0), 152.0, 2.062),
            ("NVIDIA GB300", (10, 3), 152.0, 2.062),
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188.0, 2.617),
            ("NVIDIA A100-SXM4-80GB", (8, 0), 108.0, 1.41),
            ("NVIDIA A30", (8, 0), 56.0, 1.44),
            ("NVIDIA L40S", (8, 9), 142.0, 2.52),
            ("NVIDIA L4", (8, 9), 58.0, 2.04),
            ("Tesla T4", (7, 5), 40.0, 1.59),
            ("Tesla V100-SXM2-32GB", (7, 0), 80.0, 1.53),
            ("NVIDIA GeForce RTX 5090", (12, 0), 170.0, 2.407),
            ("NVIDIA GeForce RTX 4090", (8, 9), 128.0, 2.52),
        ];
        for (name, capability, sm_count, clock_ghz) in rows {
            let rates = flops_per_cycle(capability, name.contains("GeForce"));
            let sheet = sheet(name).unwrap();
            for (format, tflops) in sheet.peaks {
                if matches!(format, Fp64 | Fp32 | Tf32) {
                    continue;
                }
                let arithmetic = rates[format] * sm_count * clock_ghz / 1e3;
                let ratio = tflops / arithmetic;
                assert!((0.88..1.12).contains(&ratio), "{name} {format}: {tflops} {arithmetic}");
            }
        }
    }

    #[test]
    fn only_formats_of_the_device_are_in_its_sheet() {
        for sheet in &SHEETS {
            for (format, tflops) in sheet.peaks {
                assert!(*tflops > 0.0 && tflops.is_finite(), "{} {format}", sheet.source);
            }
            let has_scales = sheet.peaks.iter().any(|(format, _)| *format == Mxfp8);
            let is_blackwell = sheet.source.contains("Blackwell")
                || sheet.source.contains(" B")
                || sheet.source.contains("GB");
            assert_eq!(has_scales, is_blackwell, "{}", sheet.source);
        }
    }
}
