//! The SKUs of presets, each figure with its source.
//!
//! Peaks are in [`datasheet`](crate::datasheet), by SKU. For every SKU:
//!
//! - `memory_bytes` is the driver's total (`nvidia-smi` of such a machine, as published by owners),
//!   slightly less than the nominal size in the datasheet;
//! - NVLink is the datasheet's total of both directions over its links: 900 GB/s over 18 links of
//!   version 4 on Hopper, 1.8 TB/s over 18 links of version 5 on Blackwell;
//! - the power cap is the datasheet's maximum, as reported by the driver.
//!
//! "As the driver shows" refers to outputs of `nvidia-smi` and of CUDA's device properties
//! published by owners of such machines, for figures in no document of NVIDIA's. Only the H200's
//! figures were read on a machine by this project, and no Blackwell machine has been probed.
//!
//! Blackwell figures of the datasheets were checked against public pages and projects that quote
//! them (NVIDIA's aiconfigurator, PyTorch's torchao, operators of such machines), not against the
//! sheets. The L2 caches of B300, GB200 and GB300 have no public source: they are assumed equal to
//! the L2 of B200, which has the same two dies.

/// How GPUs of a SKU are connected to each other and to their host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    /// An x86 server: four GPUs per memory node, connected by PCIe of a generation, 16 lanes.
    Server { pcie_generation: u32 },
    /// Grace processors, each with two GPUs on its NVLink-C2C; two processors are a compute tray.
    Grace,
}

/// Figures of a SKU besides the peaks of its datasheet and its compute capability.
pub(crate) struct Sku {
    /// The name before a suffix such as `-x8`.
    pub(crate) preset: &'static str,
    pub(crate) name: &'static str,
    pub(crate) capability: (u32, u32),
    pub(crate) sm_count: u32,
    pub(crate) memory_bytes: u64,
    pub(crate) hbw_gbps: f64,
    pub(crate) l2_bytes: u64,
    /// `None` if neither a document nor a driver's output has it.
    pub(crate) sm_mhz_max: Option<u32>,
    pub(crate) power_cap_w: f64,
    pub(crate) host: Host,
    /// Links and NVML's version code; `None` without NVLink.
    pub(crate) nvlink: Option<(u32, u32)>,
    /// Maximum number of GPUs of one host.
    pub(crate) gpus_max: u32,
    /// NICs of one host and Gbit/s of each, as in NVIDIA's own systems.
    pub(crate) nics: Option<(u32, f64)>,
}

const NVLINK_4: Option<(u32, u32)> = Some((18, 6));
const NVLINK_5: Option<(u32, u32)> = Some((18, 7));

/// All SKUs; each is defined by its differences from the previous SKU of its kind.
pub(crate) const SKUS: [Sku; 8] = [H100, H200, B200, B300, GB200, GB300, RTX_5090, RTX_PRO_6000];

/// NVIDIA H100 datasheet, SXM column: 80 GB HBM3 at 3.35 TB/s, 700 W, PCIe 5.0. 132 SMs and 50 MB
/// of L2: NVIDIA H100 architecture paper. NICs: DGX H100 datasheet, 8 ConnectX-7 at 400 Gbit/s.
const H100: Sku = Sku {
    preset: "h100",
    name: "NVIDIA H100 80GB HBM3",
    capability: (9, 0),
    sm_count: 132,
    memory_bytes: 81_559 << 20,
    hbw_gbps: 3350.0,
    l2_bytes: 50 << 20,
    sm_mhz_max: Some(1980),
    power_cap_w: 700.0,
    host: Host::Server { pcie_generation: 5 },
    nvlink: NVLINK_4,
    gpus_max: 8,
    nics: Some((8, 400.0)),
};

/// NVIDIA H200 datasheet, SXM column: 141 GB HBM3e at 4.8 TB/s, 700 W, PCIe 5.0. SMs, L2 and clock:
/// as the driver shows on an H200. NICs: DGX H200 datasheet.
const H200: Sku = Sku {
    preset: "h200",
    name: "NVIDIA H200",
    memory_bytes: 143_771 << 20,
    hbw_gbps: 4800.0,
    l2_bytes: 60 << 20,
    ..H100
};

/// NVIDIA Blackwell datasheet, B200 column: 180 GB HBM3e at 7.7 TB/s, 1000 W. The driver shows
/// 3996 MHz and 7680 bits, which is 7.67 TB/s; the DGX B200 datasheet prints 64 TB/s for eight. L2:
/// NVIDIA Blackwell Tuning Guide, 126 MB. PCIe and NICs: DGX B200 datasheet, 8 ports of 400
/// Gbit/s. SMs and clock: as the driver shows.
const B200: Sku = Sku {
    preset: "b200",
    name: "NVIDIA B200",
    capability: (10, 0),
    sm_count: 148,
    memory_bytes: 183_359 << 20,
    hbw_gbps: 7700.0,
    l2_bytes: 126 << 20,
    sm_mhz_max: Some(1965),
    power_cap_w: 1000.0,
    host: Host::Server { pcie_generation: 5 },
    nvlink: NVLINK_5,
    gpus_max: 8,
    nics: Some((8, 400.0)),
};

/// NVIDIA Blackwell datasheet, B300 column: 270 GB HBM3e at 7.7 TB/s, 1100 W; 3996 MHz and 7680
/// bits as of B200. HGX B300 datasheet: 8 ports of 800 Gbit/s (ConnectX-8); PCIe 6.0: NVIDIA's
/// article "Inside NVIDIA Blackwell Ultra", whose 160 SMs are those of the whole chip. SMs and
/// clock: as the driver shows. L2: no source.
const B300: Sku = Sku {
    preset: "b300",
    name: "NVIDIA B300",
    capability: (10, 3),
    memory_bytes: 275_040 << 20,
    sm_mhz_max: Some(2032),
    power_cap_w: 1100.0,
    host: Host::Server { pcie_generation: 6 },
    nics: Some((8, 800.0)),
    ..B200
};

/// NVIDIA GB200 NVL72 datasheet: 576 TB/s and 13.4 TB for 72 GPUs, 1200 W; DGX GB200 datasheet: 72
/// ConnectX-7 of 400 Gbit/s a rack, four to a compute tray. SMs: as the driver shows. L2: no
/// source.
const GB200: Sku = Sku {
    preset: "gb200",
    name: "NVIDIA GB200",
    sm_count: 152,
    memory_bytes: 189_471 << 20,
    hbw_gbps: 8000.0,
    sm_mhz_max: None,
    power_cap_w: 1200.0,
    host: Host::Grace,
    gpus_max: 4,
    nics: Some((4, 400.0)),
    ..B200
};

/// NVIDIA GB300 NVL72 datasheet: 576 TB/s and 20 TB for 72 GPUs, 1400 W; one ConnectX-8 of
/// 800 Gbit/s a GPU. SMs: as the driver shows. L2: no source.
const GB300: Sku = Sku {
    preset: "gb300",
    name: "NVIDIA GB300",
    capability: (10, 3),
    memory_bytes: 284_208 << 20,
    power_cap_w: 1400.0,
    nics: Some((4, 800.0)),
    ..GB200
};

/// NVIDIA RTX Blackwell architecture paper, GeForce RTX 5090: 170 SMs, 96 MB of L2, 32 GB GDDR7 at
/// 1792 GB/s, 575 W, PCIe 5.0. The clock is the driver's maximum, 683 MHz above the boost clock of
/// the paper; no document contains it.
const RTX_5090: Sku = Sku {
    preset: "rtx5090",
    name: "NVIDIA GeForce RTX 5090",
    capability: (12, 0),
    sm_count: 170,
    memory_bytes: 32_607 << 20,
    hbw_gbps: 1792.0,
    l2_bytes: 96 << 20,
    sm_mhz_max: Some(3090),
    power_cap_w: 575.0,
    host: Host::Server { pcie_generation: 5 },
    nvlink: None,
    gpus_max: 8,
    nics: None,
};

/// NVIDIA RTX Blackwell PRO architecture paper, RTX PRO 6000 Blackwell Workstation Edition: 188
/// SMs, 128 MB of L2, 96 GB GDDR7 at 1792 GB/s, 600 W, PCIe 5.0, boost 2617 MHz.
const RTX_PRO_6000: Sku = Sku {
    preset: "rtxpro6000",
    name: "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    sm_count: 188,
    memory_bytes: 97_887 << 20,
    l2_bytes: 128 << 20,
    sm_mhz_max: Some(2617),
    power_cap_w: 600.0,
    ..RTX_5090
};

/// Compute trays of an NVL72 rack: NVIDIA GB200 NVL72 and GB300 NVL72 datasheets, 72 GPUs and 36
/// Grace processors, four GPUs and two processors per tray.
pub(crate) const RACK_TRAYS: u32 = 18;

/// Cores of a Grace processor (NVIDIA Grace datasheet: 72 Neoverse V2) and its memory in an NVL72
/// rack (17 TB of LPDDR5X for 36 processors: 480 GB each).
pub(crate) const GRACE_CORES: u32 = 72;
/// See [`GRACE_CORES`].
pub(crate) const GRACE_MEMORY_BYTES: u64 = 480_000_000_000;
/// Base clock, NVIDIA Grace datasheet.
pub(crate) const GRACE_HZ: u64 = 3_100_000_000;
/// GB/s of NVLink-C2C in one direction per GPU: 900 GB/s in both directions (NVIDIA GB200
/// superchip), shared by two GPUs.
pub(crate) const GRACE_LINK_GBPS: f64 = 225.0;

/// The SKU with this preset name.
pub(crate) fn sku(preset: &str) -> Option<&'static Sku> {
    SKUS.iter().find(|sku| sku.preset == preset)
}
