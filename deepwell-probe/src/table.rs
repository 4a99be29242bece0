//! The hardware as a text table.

use crate::cpu::CacheKind;
use crate::files::format_list;
use crate::{Cpu, Gpu, Hardware, Library, LinkKind, NUMBER_FORMATS};

impl Hardware {
    /// A human-readable table of several lines, each ended by a line break.
    ///
    /// Programs should use [`Hardware::to_json`]. Rates are GB (10⁹ bytes) per second in one
    /// direction, sizes GiB (2³⁰ bytes).
    pub fn table(&self) -> String {
        let mut text = String::new();
        cpu_section(&mut text, &self.cpu);
        for gpu in &self.gpus {
            text.push('\n');
            gpu_section(&mut text, gpu);
        }
        if let Some(absence) = &self.gpus_absent {
            text.push('\n');
            row(&mut text, "GPUs", &format!("none: {}", absence.reason));
        }
        if !self.links.is_empty() {
            text.push('\n');
            links_section(&mut text, self);
        }
        if self.software.libraries().iter().any(|(_, library)| was_looked_for(library)) {
            text.push('\n');
            for (name, library) in self.software.libraries() {
                let path = match library {
                    Library::Found { path: Some(path), .. } => format!("  {path}"),
                    _ => String::new(),
                };
                row(&mut text, name, &format!("{library}{path}"));
            }
        }
        let warnings = self.warnings();
        if !warnings.is_empty() {
            text.push('\n');
            for warning in warnings {
                line(&mut text, &format!("note: {warning}"));
            }
        }
        text
    }
}

/// Width of the first column.
const LABEL_WIDTH: usize = 16;

fn line(text: &mut String, content: &str) {
    text.push_str(content.trim_end());
    text.push('\n');
}

fn row(text: &mut String, label: &str, content: &str) {
    line(text, &format!("{label:<LABEL_WIDTH$} {content}"));
}

fn was_looked_for(library: &Library) -> bool {
    !matches!(library, Library::Missing { looked_for, .. } if looked_for.is_empty())
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

/// A cache or memory size in the largest unit without a fraction.
fn size(bytes: u64) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

/// A rate with about three significant digits.
pub(crate) fn rate(number: f64) -> String {
    match number {
        _ if number >= 100.0 => format!("{number:.0}"),
        _ if number >= 10.0 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

fn cpu_section(text: &mut String, cpu: &Cpu) {
    row(text, "CPU", &cpu.model);
    let clock = match cpu.frequency_hz_max {
        Some(hz) => format!("{:.2} GHz ({})", hz as f64 / 1e9, cpu.frequency_source),
        None => "clock not known".to_owned(),
    };
    let cores = format!(
        "{} sockets, {} cores, {} threads, {clock}",
        cpu.sockets, cpu.physical_cores, cpu.logical_cores
    );
    row(text, "  cores", &cores.replace("1 sockets", "1 socket").replace(" 1 cores", " 1 core"));
    row(text, "  vectors", &cpu.simd.join(" "));
    let caches: Vec<String> = cpu
        .caches
        .iter()
        .map(|cache| {
            let kind = match cache.kind {
                CacheKind::Data => "d",
                CacheKind::Instruction => "i",
                CacheKind::Unified => "",
            };
            format!("L{}{kind} {}", cache.level, size(cache.bytes))
        })
        .collect();
    if !caches.is_empty() {
        row(text, "  caches", &caches.join(", "));
    }
    let bandwidth = match cpu.memory_gbps {
        Some(gbps) => format!(", {} GB/s measured", rate(gbps)),
        None => String::new(),
    };
    let memory = format!(
        "{}, {} available{bandwidth}",
        gib(cpu.memory_total_bytes),
        gib(cpu.memory_available_bytes)
    );
    row(text, "  memory", &memory);
    for node in &cpu.numa_nodes {
        let place = format!("cpus {}, {}", format_list(&node.cpus), gib(node.memory_bytes));
        row(text, &format!("  numa{}", node.index), &place);
    }
    let peaks: Vec<String> = NUMBER_FORMATS
        .iter()
        .filter(|format| cpu.peak_flops.contains_key(format))
        .map(|format| format!("{format} {}", rate(cpu.peak_gflops(*format))))
        .collect();
    row(text, "  peak GFLOP/s", &format!("{} (estimated)", peaks.join(", ")));
}

fn gpu_section(text: &mut String, gpu: &Gpu) {
    let (major, minor) = gpu.compute_capability;
    row(
        text,
        &format!("GPU {}", gpu.index),
        &format!("{}, {}, compute capability {major}.{minor}", gpu.name, gpu.arch),
    );
    row(text, "  identity", &format!("{}  {}", gpu.uuid, gpu.pci_bus_id));
    let mut units = Vec::new();
    units.extend(gpu.sm_count.map(|count| format!("{count} SMs")));
    units.extend(gpu.clocks.sm_mhz_max.map(|mhz| format!("{mhz} MHz")));
    units.extend(gpu.l2_bytes.map(|bytes| format!("L2 {}", size(bytes))));
    row(text, "  units", &units.join(", "));
    let bandwidth = match gpu.hbw_gbps {
        0.0 => "bandwidth not known".to_owned(),
        gbps => format!("{gbps:.0} GB/s"),
    };
    let memory = gib(gpu.memory_bytes);
    row(text, "  memory", &format!("{memory}, {} free, {bandwidth}", gib(gpu.memory_free_bytes)));
    let state = |name: &str, on: Option<bool>| match on {
        Some(true) => format!("{name} on"),
        Some(false) => format!("{name} off"),
        None => format!("{name} not supported"),
    };
    let mut states = vec![state("ECC", gpu.ecc), state("MIG", gpu.mig)];
    if let Some(watts) = gpu.power_cap_w {
        states.insert(0, format!("{watts:.0} W"));
    }
    row(text, "  state", &states.join(", "));
    if let Some(pcie) = gpu.pcie {
        let node = gpu.numa_node.map(|node| format!(", at numa{node}")).unwrap_or_default();
        let (generation, width, gbps) = (pcie.generation, pcie.width, rate(pcie.gbps));
        row(text, "  PCIe", &format!("generation {generation} x{width}, {gbps} GB/s{node}"));
    }
    if let Some(domain) = &gpu.nvlink_domain {
        let place = format!("{} clique {}", domain.cluster_uuid, domain.clique);
        row(text, "  NVLink domain", &place);
    }
    let peaks: Vec<String> = NUMBER_FORMATS
        .iter()
        .filter_map(|format| Some(format!("{format} {}", rate(gpu.peak_tflops(*format)?))))
        .collect();
    if !peaks.is_empty() {
        row(text, "  peak TFLOP/s", &peaks.join(", "));
        row(text, "", &format!("({})", gpu.peak_source));
    }
    let unknown: Vec<&str> = gpu.peaks_unknown().into_iter().map(|format| format.name()).collect();
    if !unknown.is_empty() {
        row(text, "  peak not known", &unknown.join(", "));
    }
}

fn links_section(text: &mut String, hardware: &Hardware) {
    for (place, link) in hardware.links.iter().enumerate() {
        let what = match link.kind {
            LinkKind::NvLink { links, gbps_each_way, through_switch } => {
                let way = if through_switch { " through NVSwitch" } else { "" };
                format!("NVLink {links} x {gbps_each_way} GB/s{way}")
            }
            LinkKind::Pcie { generation, width, meet } => {
                format!("PCIe generation {generation} x{width}, {meet}")
            }
            LinkKind::ChipToChip => "NVLink-C2C".to_owned(),
            LinkKind::NumaHop { distance } => format!("distance {distance}"),
        };
        let gbps = link.gbps.map(|gbps| format!(", {} GB/s", rate(gbps))).unwrap_or_default();
        let label = if place == 0 { "links" } else { "" };
        let ends = format!("{} - {}", link.a, link.b);
        row(text, label, &format!("{ends:<14} {what}{gbps}"));
    }
}
