//! Machines that are not here, for planning and for tests.

use std::collections::BTreeMap;

use crate::{
    Arch, Clocks, Cpu, Endpoint, Gpu, Hardware, Link, NumaNode, Pcie, PcieMeet, ProbeError,
    Software, assemble, datasheet, gpu,
};

/// The figures of a product that neither its datasheet's peaks nor its capability tell.
struct Product {
    /// What stands before `-x8`.
    preset: &'static str,
    name: &'static str,
    capability: (u32, u32),
    multiprocessors: u32,
    memory_bytes: u64,
    hbw_gbps: f64,
    l2_bytes: u64,
    multiprocessor_mhz_max: u32,
    power_cap_w: f64,
    pcie: (u32, u32),
    /// Links and the version code of the management library; `None` without NVLink.
    nvlink: Option<(u32, u32)>,
}

/// Memory is what the driver shows as total, a little less than the datasheet's.
const PRODUCTS: [Product; 5] = [
    Product {
        preset: "h100",
        name: "NVIDIA H100 80GB HBM3",
        capability: (9, 0),
        multiprocessors: 132,
        memory_bytes: 81_559 << 20,
        hbw_gbps: 3350.0,
        l2_bytes: 50 << 20,
        multiprocessor_mhz_max: 1980,
        power_cap_w: 700.0,
        pcie: (5, 16),
        nvlink: Some((18, 6)),
    },
    Product {
        preset: "h200",
        name: "NVIDIA H200",
        capability: (9, 0),
        multiprocessors: 132,
        memory_bytes: 143_771 << 20,
        hbw_gbps: 4800.0,
        l2_bytes: 60 << 20,
        multiprocessor_mhz_max: 1980,
        power_cap_w: 700.0,
        pcie: (5, 16),
        nvlink: Some((18, 6)),
    },
    Product {
        preset: "b200",
        name: "NVIDIA B200",
        capability: (10, 0),
        multiprocessors: 148,
        memory_bytes: 183_359 << 20,
        hbw_gbps: 8000.0,
        l2_bytes: 126 << 20,
        multiprocessor_mhz_max: 1965,
        power_cap_w: 1000.0,
        pcie: (5, 16),
        nvlink: Some((18, 7)),
    },
    Product {
        preset: "b300",
        name: "NVIDIA B300",
        capability: (10, 3),
        multiprocessors: 148,
        memory_bytes: 275_040 << 20,
        hbw_gbps: 8000.0,
        l2_bytes: 126 << 20,
        multiprocessor_mhz_max: 2032,
        power_cap_w: 1100.0,
        pcie: (6, 16),
        nvlink: Some((18, 7)),
    },
    Product {
        preset: "rtx5090",
        name: "NVIDIA GeForce RTX 5090",
        capability: (12, 0),
        multiprocessors: 170,
        memory_bytes: 32_607 << 20,
        hbw_gbps: 1792.0,
        l2_bytes: 96 << 20,
        multiprocessor_mhz_max: 3090,
        power_cap_w: 575.0,
        pcie: (5, 16),
        nvlink: None,
    },
];

/// GPUs of one preset at most: those of one host.
const GPUS_MAX: u32 = 8;

impl Hardware {
    /// A machine by name: `cpu`, or a product (`h100`, `h200`, `b200`, `b300`, `rtx5090`) with
    /// `-x2` to `-x8` after it for several of them.
    ///
    /// GPUs of a data centre are joined through an NVSwitch, others by PCIe; four of them share a
    /// memory node. Peaks are those of the datasheet; memory is that of an idle machine; software
    /// is not looked for.
    ///
    /// ```
    /// use deepwell_probe::{Arch, Hardware};
    ///
    /// assert_eq!(Hardware::preset("b200-x8")?.gpus[7].arch, Arch::BlackwellSm100);
    /// assert!(Hardware::preset("b200-x9").is_err());
    /// # Ok::<(), deepwell_probe::ProbeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ProbeError::UnknownPreset`], with the names that there are.
    pub fn preset(name: &str) -> Result<Hardware, ProbeError> {
        let unknown = || ProbeError::UnknownPreset {
            got: name.to_owned(),
            known: Hardware::preset_names().join(", "),
        };
        if name == "cpu" {
            return Ok(Hardware::cpu_only(host(1, 16)));
        }
        let (product_name, count) = match name.rsplit_once("-x") {
            None => (name, 1),
            Some((product_name, count)) => (product_name, count.parse().map_err(|_| unknown())?),
        };
        let product = PRODUCTS.iter().find(|product| product.preset == product_name);
        let product = product.filter(|_| (1..=GPUS_MAX).contains(&count)).ok_or_else(unknown)?;
        Ok(machine(product, count))
    }

    /// One name of each kind that [`Hardware::preset`] knows.
    pub fn preset_names() -> Vec<String> {
        let products = PRODUCTS.iter().flat_map(|product| {
            [product.preset.to_owned(), format!("{}-x2..x{GPUS_MAX}", product.preset)]
        });
        std::iter::once("cpu".to_owned()).chain(products).collect()
    }
}

/// The host of a preset: 48 cores and 1 TiB for each memory node, or what was asked for.
fn host(nodes: u32, cores_each: u32) -> Cpu {
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
    let distances = |own: u32| (0..nodes).map(|node| if node == own { 10 } else { 21 }).collect();
    cpu.numa_nodes = (0..nodes)
        .map(|index| NumaNode {
            index,
            cpus: (index * cores_each..(index + 1) * cores_each).collect(),
            memory_bytes: memory_each,
            distances: distances(index),
        })
        .collect();
    cpu
}

fn machine(product: &Product, count: u32) -> Hardware {
    let cpu = host(count.div_ceil(4), 48);
    let mut links = assemble::numa_links(&cpu);
    let gpus: Vec<Gpu> = (0..count).map(|index| device(product, index)).collect();
    let pcie = Pcie::new(product.pcie.0, product.pcie.1);
    let by_pcie = |a, b, meet| Link::pcie((a, b), pcie, meet);
    for index in 0..count {
        let node = Endpoint::Numa(index / 4);
        links.push(by_pcie(Endpoint::Gpu(index), node, PcieMeet::HostBridge));
    }
    for a in 0..count {
        for b in a + 1..count {
            let (end_a, end_b) = (Endpoint::Gpu(a), Endpoint::Gpu(b));
            let nvlink = product
                .nvlink
                .and_then(|(count, version)| Some((count, datasheet::nvlink_gbps(version)?)));
            links.push(match nvlink {
                Some((count, gbps_each_way)) => {
                    Link::nvlink((end_a, end_b), count, gbps_each_way, true)
                }
                None if a / 4 == b / 4 => by_pcie(end_a, end_b, PcieMeet::Node),
                None => by_pcie(end_a, end_b, PcieMeet::System),
            });
        }
    }
    Hardware { cpu, gpus, gpus_absent: None, links, software: Software::none() }
}

fn device(product: &Product, index: u32) -> Gpu {
    let sheet = datasheet::sheet(product.name);
    let peaks: BTreeMap<_, _> =
        sheet.map(|sheet| sheet.peaks.iter().copied().collect()).unwrap_or_default();
    let is_geforce = product.name.contains("GeForce");
    Gpu {
        index,
        name: product.name.to_owned(),
        uuid: format!("preset-{}-{index}", product.preset),
        pci_bus_id: format!("00000000:{:02X}:00.0", index + 1),
        compute_capability: product.capability,
        arch: Arch::from_compute_capability(product.capability),
        multiprocessors: Some(product.multiprocessors),
        memory_bytes: product.memory_bytes,
        memory_free_bytes: product.memory_bytes,
        hbw_gbps: product.hbw_gbps,
        l2_bytes: Some(product.l2_bytes),
        clocks: Clocks {
            multiprocessor_mhz_max: Some(product.multiprocessor_mhz_max),
            memory_mhz_max: None,
        },
        power_cap_w: Some(product.power_cap_w),
        power_cap_default_w: Some(product.power_cap_w),
        mig: (!is_geforce).then_some(false),
        ecc: (!is_geforce).then_some(true),
        numa_node: Some(index / 4),
        pcie: Some(Pcie::new(product.pcie.0, product.pcie.1)),
        nvlinks_active: product.nvlink.map_or(0, |(links, _)| links),
        nvlink_domain: None,
        precisions: gpu::precisions(product.capability),
        peak_tflops_dense: peaks,
        peak_source: sheet.map(|sheet| sheet.source.to_owned()).unwrap_or_default(),
        notes: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_whole() {
        for product in &PRODUCTS {
            for count in 1..=GPUS_MAX {
                let hardware = Hardware::preset(&format!("{}-x{count}", product.preset)).unwrap();
                assert_eq!(hardware.gpus.len(), count as usize);
                assert_eq!(Hardware::from_json(&hardware.to_json()).unwrap(), hardware);
                for gpu in &hardware.gpus {
                    assert!(gpu.peak_tflops(crate::NumberFormat::Bf16).is_some(), "{}", gpu.name);
                    let listed = |format| gpu.precisions.contains(format);
                    assert!(gpu.peak_tflops_dense.keys().all(listed), "{}", gpu.name);
                    assert_ne!(gpu.arch.to_string(), "");
                }
                // Every GPU reaches every other and its host.
                let fabric = hardware.fabric();
                assert_eq!(petgraph::algo::connected_components(&fabric), 1, "{}", product.name);
            }
        }
        assert!(Hardware::preset("cpu").unwrap().gpus.is_empty());
    }

    #[test]
    fn names_that_are_none_list_those_that_are() {
        for name in ["", "h201", "h200-x", "h200-x0", "h200-x9", "h200-x-1", "H200", "cpu-x2"] {
            let error = Hardware::preset(name).unwrap_err().to_string();
            assert!(error.contains("h200") && error.contains("cpu"), "{name}: {error}");
        }
    }
}
