//! Description of one GPU.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Arch, Fault, NumberFormat};

/// One GPU, as described by the driver.
///
/// If the driver does not answer a question, the field is `None` and `notes` says so.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    /// Index in the management library, which `CUDA_VISIBLE_DEVICES` does not change; use `uuid` to
    /// find the device in CUDA.
    pub index: u32,
    /// The driver's name of the SKU.
    pub name: String,
    /// Identifier independent of the device order, `GPU-...`.
    pub uuid: String,
    /// PCI address, `00000000:04:00.0`.
    pub pci_bus_id: String,
    /// CUDA compute capability, `(major, minor)`; `(0, 0)` if unknown.
    pub compute_capability: (u32, u32),
    /// The architecture that kernels must be built for.
    pub arch: Arch,
    /// Number of SMs; files of older releases use another key.
    #[serde(alias = "multiprocessors")]
    pub sm_count: Option<u32>,
    /// Memory of the device, bytes.
    pub memory_bytes: u64,
    /// Memory that was free at the time of probing.
    pub memory_free_bytes: u64,
    /// Bandwidth of the device memory in GB/s: bus width / 8 x memory clock x 2 (double data rate),
    /// or the datasheet's figure if the driver reports no clock (a note says so). 0 if both are
    /// unknown.
    pub hbw_gbps: f64,
    /// Size of the L2 cache, reported by the CUDA driver only.
    pub l2_bytes: Option<u64>,
    /// Maximum clocks.
    pub clocks: Clocks,
    /// Current power limit, in watts.
    pub power_cap_w: Option<f64>,
    /// Default power limit, in watts.
    pub power_cap_default_w: Option<f64>,
    /// Whether MIG is enabled; `None` if not supported.
    pub mig: Option<bool>,
    /// Whether ECC is enabled; `None` if not supported.
    pub ecc: Option<bool>,
    /// The processor's memory node that the device is attached to.
    pub numa_node: Option<u32>,
    /// The connection to the host.
    pub pcie: Option<Pcie>,
    /// Number of active NVLinks of the device.
    pub nvlinks_active: u32,
    /// The device's NVLink domain, if it spans hosts.
    pub nvlink_domain: Option<NvLinkDomain>,
    /// Formats that the matrix units (or, for FP32 and FP64, the cores) support, including the
    /// block scales of the format.
    pub precisions: Vec<NumberFormat>,
    /// Peak of dense (never sparse) GEMMs in TFLOP/s by operand format. MXFP8 is included only if
    /// matrix units apply the block scales; a kernel that applies scales itself, as on Hopper, is
    /// bounded by the FP8 figure.
    pub peak_tflops_dense: BTreeMap<NumberFormat, f64>,
    /// Source of the peaks.
    pub peak_source: String,
    /// Faults that make the device unusable, except MIG; see
    /// [`Hardware::refusals`](crate::Hardware::refusals).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
    /// Missing values, and remarks about the figures.
    pub notes: Vec<String>,
}

/// Maximum clocks of a GPU in MHz.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clocks {
    /// SM clock; files of older releases use another key.
    #[serde(alias = "multiprocessor_mhz_max")]
    pub sm_mhz_max: Option<u32>,
    /// Memory clock, before doubling for double data rate.
    pub memory_mhz_max: Option<u32>,
}

/// One PCI Express connection.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pcie {
    /// Maximum generation of both ends, 1 to 6. Idle devices fall back to a lower generation, so
    /// the current generation says nothing.
    pub generation: u32,
    /// Number of lanes.
    pub width: u32,
    /// GB/s in each direction after line coding, before packet headers.
    pub gbps: f64,
}

/// Membership in an NVLink domain that spans hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvLinkDomain {
    /// Identifier of the domain, as hexadecimal digits.
    pub cluster_uuid: String,
    /// The part of the domain within which all members can communicate.
    pub clique: u32,
}

impl Pcie {
    /// A connection of `width` lanes of a `generation`.
    ///
    /// Rate per lane, in GB/s each way: 2.5 and 5 GT/s with 8b/10b coding for generations 1 and 2,
    /// 8, 16 and 32 GT/s with 128b/130b for 3, 4 and 5, and 64 GT/s with 242 of 256 bytes of a flit
    /// for 6. A newer generation counts as 6.
    ///
    /// ```
    /// assert_eq!(deepwell_probe::Pcie::new(5, 16).gbps, 63.015);
    /// ```
    pub fn new(generation: u32, width: u32) -> Pcie {
        let lane_gbps = match generation {
            0 => 0.0,
            1 => 2.5 * 8.0 / 10.0 / 8.0,
            2 => 5.0 * 8.0 / 10.0 / 8.0,
            3 => 8.0 * 128.0 / 130.0 / 8.0,
            4 => 16.0 * 128.0 / 130.0 / 8.0,
            5 => 32.0 * 128.0 / 130.0 / 8.0,
            _ => 64.0 * 242.0 / 256.0 / 8.0,
        };
        let gbps = (lane_gbps * f64::from(width) * 1000.0).round() / 1000.0;
        Pcie { generation, width, gbps }
    }
}

impl Gpu {
    /// Dense peak on operands of `format` in TFLOP/s, `None` if not supported or unknown.
    pub fn peak_tflops(&self, format: NumberFormat) -> Option<f64> {
        self.peak_tflops_dense.get(&format).copied()
    }

    /// Supported formats without a peak in `peak_tflops_dense`: neither in the datasheet nor
    /// computed.
    pub fn peaks_unknown(&self) -> Vec<NumberFormat> {
        let is_unknown = |format: &NumberFormat| self.peak_tflops(*format).is_none();
        self.precisions.iter().copied().filter(is_unknown).collect()
    }

    /// Whether matrix units support `format`.
    pub fn supports(&self, format: NumberFormat) -> bool {
        self.precisions.contains(&format)
    }
}

/// The formats that the matrix units of a compute capability support (FP32 and FP64: the cores).
///
/// Source: the table of `mma`, `wgmma` and `tcgen05.mma` kinds of the PTX ISA.
pub(crate) fn precisions(capability: (u32, u32)) -> Vec<NumberFormat> {
    use NumberFormat::*;
    let mut formats = vec![Fp64, Fp32];
    if capability >= (8, 0) {
        formats.extend([Tf32, Bf16]);
    }
    if capability >= (7, 0) {
        formats.push(Fp16);
    }
    if capability >= (8, 9) {
        formats.push(Fp8);
    }
    if capability >= (10, 0) {
        formats.extend([Mxfp8, Mxfp6, Mxfp4, Nvfp4]);
    }
    if capability >= (7, 2) {
        formats.push(Int8);
    }
    formats
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_carry_what_their_coding_leaves() {
        let rows = [
            (1, 1, 0.25),
            (2, 16, 8.0),
            (3, 16, 15.754),
            (4, 16, 31.508),
            (5, 8, 31.508),
            (6, 16, 121.0),
            (0, 16, 0.0),
            (5, 0, 0.0),
        ];
        for (generation, width, expected) in rows {
            assert_eq!(Pcie::new(generation, width).gbps, expected, "{generation} x{width}");
        }
    }

    #[test]
    fn formats_grow_with_the_capability() {
        use NumberFormat::*;
        let rows: [((u32, u32), NumberFormat, bool); 9] = [
            ((7, 0), Fp16, true),
            ((7, 0), Bf16, false),
            ((7, 0), Int8, false),
            ((7, 5), Int8, true),
            ((8, 0), Bf16, true),
            ((8, 9), Fp8, true),
            ((9, 0), Mxfp8, false),
            ((10, 0), Mxfp8, true),
            ((12, 0), Nvfp4, true),
        ];
        for (capability, format, expected) in rows {
            assert_eq!(precisions(capability).contains(&format), expected, "{capability:?}");
        }
    }
}
