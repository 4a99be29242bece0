//! Descriptions of machines by name, for planning and for tests.

use std::collections::BTreeMap;

use crate::skus::{
    GRACE_CORES, GRACE_HZ, GRACE_LINK_GBPS, GRACE_MEMORY_BYTES, Host, RACK_TRAYS, SKUS, Sku, sku,
};
use crate::{
    Arch, Clocks, Cpu, Endpoint, Gpu, Hardware, Link, LinkKind, NumaNode, NvLinkDomain, Pcie,
    PcieMeet, ProbeError, Software, assemble, datasheet, gpu,
};

impl Hardware {
    /// A machine by name: `cpu`, or a SKU (`h100`, `h200`, `b200`, `b300`, `gb200`, `gb300`,
    /// `rtx5090`, `rtxpro6000`), with a suffix `-x2` to `-x8` for several GPUs. `hgx-h100` is the
    /// board of eight, as `h100-x8`.
    ///
    /// Data-center GPUs are joined through an NVSwitch, other GPUs by PCIe; four share a memory
    /// node. In Grace systems two share a node, and four are a compute tray. `gb200-nvl72` and
    /// `gb300-nvl72` are a whole rack as one machine: its 18 hosts are memory nodes connected only
    /// by NVLink (a note says so); [`Cluster::preset`](crate::Cluster::preset) describes it as 18
    /// nodes. Peaks are from the datasheet; free memory is that of an idle machine; software is
    /// unknown.
    ///
    /// ```
    /// use deepwell_probe::{Arch, Hardware};
    ///
    /// assert_eq!(Hardware::preset("b200-x8")?.gpus[7].arch, Arch::BlackwellSm100);
    /// assert_eq!(Hardware::preset("gb300-nvl72")?.gpus.len(), 72);
    /// assert!(Hardware::preset("b200-x9").is_err());
    /// # Ok::<(), deepwell_probe::ProbeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ProbeError::UnknownPreset`], with the known names.
    pub fn preset(name: &str) -> Result<Hardware, ProbeError> {
        let unknown = || ProbeError::UnknownPreset {
            got: name.to_owned(),
            known: Hardware::preset_names().join(", "),
        };
        if name == "cpu" {
            return Ok(Hardware::cpu_only(server(1, 16)));
        }
        if let Some(sku) = name.strip_suffix("-nvl72").and_then(sku) {
            return match sku.host {
                Host::Grace => Ok(machine(sku, RACK_TRAYS * sku.gpus_max)),
                Host::Server { .. } => Err(unknown()),
            };
        }
        if let Some(sku) = name.strip_prefix("hgx-").and_then(sku) {
            let is_board = sku.nvlink.is_some() && sku.host != Host::Grace;
            return if is_board { Ok(machine(sku, sku.gpus_max)) } else { Err(unknown()) };
        }
        let (sku_name, count) = match name.rsplit_once("-x") {
            None => (name, 1),
            Some((sku_name, count)) => (sku_name, count.parse().map_err(|_| unknown())?),
        };
        let sku = sku(sku_name);
        let sku = sku.filter(|sku| (1..=sku.gpus_max).contains(&count));
        Ok(machine(sku.ok_or_else(unknown)?, count))
    }

    /// One name of each kind accepted by [`Hardware::preset`].
    pub fn preset_names() -> Vec<String> {
        let skus = SKUS.iter().flat_map(|sku| {
            let name = sku.preset;
            let mut names = vec![name.to_owned(), format!("{name}-x2..x{}", sku.gpus_max)];
            match sku.host {
                Host::Grace => names.push(format!("{name}-nvl72")),
                Host::Server { .. } if sku.nvlink.is_some() => {
                    names.push(format!("hgx-{name}"));
                }
                Host::Server { .. } => {}
            }
            names
        });
        std::iter::once("cpu".to_owned()).chain(skus).collect()
    }
}

/// The host of a preset, with `cores_each` cores and 16 GiB per core for each memory node.
fn server(nodes: u32, cores_each: u32) -> Cpu {
    let simd = [
        "sse2",
        "sse4_2",
        "avx",
        "f16c",
        "fma",
        "avx2",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512vnni",
        "avx512bf16",
        "avx512fp16",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
    ];
    let memory_each = u64::from(cores_each) << 34;
    let cores = nodes * cores_each;
    let name = format!("described server, {cores} cores");
    let mut cpu =
        Cpu::described(&name, cores, 2_600_000_000, &simd, memory_each * u64::from(nodes));
    cpu.sockets = nodes;
    cpu.numa_nodes = nodes_of(nodes, cores_each, memory_each, |_, _| 21);
    cpu
}

/// The memory nodes of a host; `distance` is called for two different nodes.
fn nodes_of(
    nodes: u32,
    cores_each: u32,
    memory_bytes: u64,
    distance: impl Fn(u32, u32) -> u32,
) -> Vec<NumaNode> {
    let node = |index: u32| NumaNode {
        index,
        cpus: (index * cores_each..(index + 1) * cores_each).collect(),
        memory_bytes,
        distances: (0..nodes)
            .map(|other| if other == index { 10 } else { distance(index, other) })
            .collect(),
    };
    (0..nodes).map(node).collect()
}

/// Grace processors: two per host, each a memory node.
fn graces(count: u32) -> Cpu {
    let cores = count * GRACE_CORES;
    let name = format!("{count} x NVIDIA Grace, {cores} cores");
    let simd = ["neon", "neon_bf16", "sve", "sve2"];
    let memory_bytes = u64::from(count) * GRACE_MEMORY_BYTES;
    let mut cpu = Cpu::described(&name, cores, GRACE_HZ, &simd, memory_bytes);
    cpu.vendor = "ARM".to_owned();
    cpu.sockets = count;
    let distance = |a: u32, b: u32| if a / 2 == b / 2 { 40 } else { assemble::UNREACHABLE };
    cpu.numa_nodes = nodes_of(count, GRACE_CORES, GRACE_MEMORY_BYTES, distance);
    if count > 2 {
        cpu.notes.push(format!(
            "{} hosts described as one machine: memory nodes reach each other inside a host only",
            count / 2
        ));
    }
    cpu
}

impl Sku {
    /// The memory node of a GPU.
    fn node_of(&self, index: u32) -> u32 {
        match self.host {
            Host::Server { .. } => index / 4,
            Host::Grace => index / 2,
        }
    }

    /// The connection to the host; `None` for GPUs of Grace systems, which use NVLink-C2C.
    fn pcie(&self) -> Option<Pcie> {
        match self.host {
            Host::Server { pcie_generation } => Some(Pcie::new(pcie_generation, 16)),
            Host::Grace => None,
        }
    }

    /// The NVLink domain of a rack, `None` within one host.
    fn domain(&self, count: u32) -> Option<NvLinkDomain> {
        let cluster_uuid = format!("preset-{}-nvl{count}", self.preset);
        (count > self.gpus_max).then_some(NvLinkDomain { cluster_uuid, clique: 0 })
    }
}

fn machine(sku: &Sku, count: u32) -> Hardware {
    let nodes = sku.node_of(count - 1) + 1;
    let cpu = match sku.host {
        Host::Server { .. } => server(nodes, 48),
        Host::Grace => graces(nodes),
    };
    let mut links = assemble::numa_links(&cpu);
    let gpus: Vec<Gpu> = (0..count)
        .map(|index| Gpu { nvlink_domain: sku.domain(count), ..device(sku, index) })
        .collect();
    for index in 0..count {
        let (a, b) = (Endpoint::Gpu(index), Endpoint::Numa(sku.node_of(index)));
        links.push(match sku.pcie() {
            Some(pcie) => Link::pcie((a, b), pcie, PcieMeet::HostBridge),
            None => Link { a, b, kind: LinkKind::ChipToChip, gbps: Some(GRACE_LINK_GBPS) },
        });
    }
    let nvlink =
        sku.nvlink.and_then(|(count, version)| Some((count, datasheet::nvlink_gbps(version)?)));
    for a in 0..count {
        for b in a + 1..count {
            let ends = (Endpoint::Gpu(a), Endpoint::Gpu(b));
            match (nvlink, sku.pcie()) {
                (Some((links_each, gbps_each_way)), _) => {
                    links.push(Link::nvlink(ends, links_each, gbps_each_way, true));
                }
                (None, Some(pcie)) => {
                    let is_near = sku.node_of(a) == sku.node_of(b);
                    let meet = if is_near { PcieMeet::Node } else { PcieMeet::System };
                    links.push(Link::pcie(ends, pcie, meet));
                }
                (None, None) => {}
            }
        }
    }
    Hardware { cpu, gpus, gpus_absent: None, links, software: Software::none() }
}

/// Memory of an idle GPU that the driver reserves: an H200 has 143,771 MiB, 143,156 free. Not
/// measured for other SKUs.
const DRIVER_BYTES: u64 = 615 << 20;

fn device(sku: &Sku, index: u32) -> Gpu {
    let sheet = datasheet::sheet(sku.name);
    let peaks: BTreeMap<_, _> =
        sheet.map(|sheet| sheet.peaks.iter().copied().collect()).unwrap_or_default();
    let is_geforce = sku.name.contains("GeForce");
    Gpu {
        index,
        name: sku.name.to_owned(),
        uuid: format!("preset-{}-{index}", sku.preset),
        pci_bus_id: format!("00000000:{:02X}:00.0", index + 1),
        compute_capability: sku.capability,
        arch: Arch::from_compute_capability(sku.capability),
        sm_count: Some(sku.sm_count),
        memory_bytes: sku.memory_bytes,
        memory_free_bytes: sku.memory_bytes - DRIVER_BYTES,
        hbw_gbps: sku.hbw_gbps,
        l2_bytes: Some(sku.l2_bytes),
        clocks: Clocks { sm_mhz_max: sku.sm_mhz_max, memory_mhz_max: None },
        power_cap_w: Some(sku.power_cap_w),
        power_cap_default_w: Some(sku.power_cap_w),
        mig: (!is_geforce).then_some(false),
        ecc: (!is_geforce).then_some(true),
        numa_node: Some(sku.node_of(index)),
        pcie: sku.pcie(),
        nvlinks_active: sku.nvlink.map_or(0, |(links, _)| links),
        nvlink_domain: None,
        precisions: gpu::precisions(sku.capability),
        peak_tflops_dense: peaks,
        peak_source: sheet.map(|sheet| sheet.source.to_owned()).unwrap_or_default(),
        faults: Vec::new(),
        notes: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_whole() {
        for sku in &SKUS {
            for count in 1..=sku.gpus_max {
                let hardware = Hardware::preset(&format!("{}-x{count}", sku.preset)).unwrap();
                assert_eq!(hardware.gpus.len(), count as usize);
                assert_eq!(Hardware::from_json(&hardware.to_json()).unwrap(), hardware);
                for gpu in &hardware.gpus {
                    assert!(gpu.peak_tflops(crate::NumberFormat::Bf16).is_some(), "{}", gpu.name);
                    assert!(gpu.peak_tflops(crate::NumberFormat::Fp8).is_some(), "{}", gpu.name);
                    let listed = |format| gpu.precisions.contains(format);
                    assert!(gpu.peak_tflops_dense.keys().all(listed), "{}", gpu.name);
                    assert_ne!(gpu.arch.to_string(), "");
                }
                // All GPUs and hosts are connected.
                let fabric = hardware.fabric();
                assert_eq!(petgraph::algo::connected_components(&fabric), 1, "{}", sku.name);
            }
        }
        assert!(Hardware::preset("cpu").unwrap().gpus.is_empty());
    }

    #[test]
    fn boards_and_racks_have_names() {
        let same = Hardware::preset("h100-x8").unwrap();
        assert_eq!(Hardware::preset("hgx-h100").unwrap(), same);
        for name in ["gb200-nvl72", "gb300-nvl72"] {
            let rack = Hardware::preset(name).unwrap();
            assert_eq!((rack.gpus.len(), rack.cpu.numa_nodes.len()), (72, 36));
            let fabric = rack.fabric();
            assert_eq!(petgraph::algo::connected_components(&fabric), 1, "{name}");
            let edge = |a, b| fabric.edge_weight(a, b).and_then(|edge| edge.gbps);
            assert_eq!(edge(Endpoint::Gpu(71), Endpoint::Switch(0)), Some(900.0));
            assert_eq!(edge(Endpoint::Gpu(71), Endpoint::Numa(35)), Some(GRACE_LINK_GBPS));
            assert!(fabric.contains_edge(Endpoint::Numa(0), Endpoint::Numa(1)));
            assert!(!fabric.contains_edge(Endpoint::Numa(1), Endpoint::Numa(2)), "two hosts");
            assert!(rack.warnings().iter().any(|warning| warning.contains("18 hosts")));
            assert_eq!(Hardware::from_json(&rack.to_json()).unwrap(), rack);
        }
    }

    /// Datasheet totals of whole boards and racks: PFLOP/s dense of each format, TB/s of memory,
    /// TB/s of NVLink in both directions. Sheets round to two or three digits.
    #[test]
    fn totals_are_those_of_the_datasheets() {
        use crate::NumberFormat::{Bf16, Fp8, Mxfp6, Nvfp4, Tf32};
        let rows = [
            ("gb200-nvl72", Tf32, 90.0, 576.0, 130.0),
            ("gb200-nvl72", Bf16, 180.0, 576.0, 130.0),
            ("gb200-nvl72", Mxfp6, 360.0, 576.0, 130.0),
            ("gb200-nvl72", Nvfp4, 720.0, 576.0, 130.0),
            ("gb300-nvl72", Bf16, 180.0, 576.0, 130.0),
            ("gb300-nvl72", Fp8, 360.0, 576.0, 130.0),
            ("gb300-nvl72", Nvfp4, 1080.0, 576.0, 130.0),
            ("hgx-b200", Bf16, 18.0, 61.6, 14.4),
            ("hgx-b200", Nvfp4, 72.0, 61.6, 14.4),
            ("hgx-b300", Fp8, 36.0, 61.6, 14.4),
            ("hgx-b300", Nvfp4, 108.0, 61.6, 14.4),
            ("hgx-h100", Fp8, 15.8, 26.8, 7.2),
            ("hgx-h200", Fp8, 15.8, 38.4, 7.2),
        ];
        for (name, format, pflops, memory_tbps, nvlink_tbps) in rows {
            let hardware = Hardware::preset(name).unwrap();
            let fabric = hardware.fabric();
            let sum = |figure: &dyn Fn(&Gpu) -> f64| hardware.gpus.iter().map(figure).sum::<f64>();
            let port = |gpu: &Gpu| {
                let edge = fabric.edge_weight(Endpoint::Gpu(gpu.index), Endpoint::Switch(0));
                edge.and_then(|edge| edge.gbps).unwrap_or(0.0)
            };
            let near = |got: f64, expected: f64, tolerance: f64| {
                assert!((got / expected - 1.0).abs() < tolerance, "{name} {format}: {got}");
            };
            near(sum(&|gpu| gpu.peak_tflops(format).unwrap_or(0.0)) / 1e3, pflops, 0.01);
            near(sum(&|gpu| gpu.hbw_gbps) / 1e3, memory_tbps, 0.01);
            // Hopper's links carry 26.562 GB/s on the wire; the sheet counts 25.
            near(sum(&port) * 2.0 / 1e3, nvlink_tbps, 0.07);
        }
    }

    #[test]
    fn names_that_are_none_list_those_that_are() {
        for name in [
            "",
            "h201",
            "h200-x",
            "h200-x0",
            "h200-x9",
            "h200-x-1",
            "H200",
            "cpu-x2",
            "gb200-x5",
            "h200-nvl72",
            "hgx-gb200",
            "hgx-rtx5090",
        ] {
            let error = Hardware::preset(name).unwrap_err().to_string();
            assert!(error.contains("h200") && error.contains("cpu"), "{name}: {error}");
        }
    }
}
