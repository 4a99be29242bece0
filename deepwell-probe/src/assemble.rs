//! Builds GPUs and links from the driver's answers.

use crate::datasheet;
use crate::files::FileTree;
use crate::record::{
    Answer, CudaDevice, DeviceRecord, GpuRecord, NvLinkRecord, PairRecord, PciAddress, Refusal,
    RemoteKind,
};
use crate::{Arch, Clocks, Cpu, Endpoint, Fault, Gpu, Link, LinkKind, Pcie, PcieMeet};

/// Returns GPUs and all links of the machine, including those of the processor.
pub(crate) fn assemble(
    record: &GpuRecord,
    cpu: &Cpu,
    files: &dyn FileTree,
) -> (Vec<Gpu>, Vec<Link>) {
    let mut gpus: Vec<Gpu> = record
        .devices
        .iter()
        .map(|device| {
            let address = device.address.as_ref().ok();
            let cuda = record.cuda_devices.iter().find(|cuda| Some(&cuda.address) == address);
            gpu(device, cuda, cpu, files)
        })
        .collect();

    if record.devices.len() > 1 {
        for (gpu, device) in gpus.iter_mut().zip(&record.devices) {
            gpu.faults.extend(nvlink_fault(&gpu.name, device));
        }
    }

    let mut links = numa_links(cpu);
    for gpu in &mut gpus {
        let Some(pcie) = gpu.pcie else { continue };
        let node = gpu.numa_node.or_else(|| {
            let first = cpu.numa_nodes.first()?.index;
            gpu.notes.push(format!("memory node not known, taken for numa{first}"));
            Some(first)
        });
        if let Some(node) = node {
            let ends = (Endpoint::Gpu(gpu.index), Endpoint::Numa(node));
            links.push(Link::pcie(ends, pcie, PcieMeet::HostBridge));
        }
    }
    for pair in &record.pairs {
        let place = |index: u32| record.devices.iter().position(|device| device.index == index);
        let (Some(a), Some(b)) = (place(pair.devices.0), place(pair.devices.1)) else { continue };
        match nvlink(&record.devices[a], &record.devices[b], pair) {
            NvLinkBetween::Joined(link, note) => {
                links.push(link);
                if let Some(note) = note {
                    gpus[a].notes.push(note.clone());
                    gpus[b].notes.push(note);
                }
                continue;
            }
            NvLinkBetween::Apart => {
                for (own, other) in [(a, b), (b, a)] {
                    let other_index = record.devices[other].index;
                    gpus[own].notes.push(format!(
                        "NVLink does not reach gpu{other_index}, which is in another clique of \
                         its domain"
                    ));
                }
            }
            NvLinkBetween::NotReached => {
                for (own, other) in [(a, b), (b, a)] {
                    let other_index = record.devices[other].index;
                    gpus[own].faults.push(Fault::new(
                        format!(
                            "NVLink is up but the driver says that it does not reach \
                             gpu{other_index}"
                        ),
                        FABRIC_FIX,
                    ));
                }
            }
            NvLinkBetween::None => {}
        }
        if let (Some(pcie_a), Some(pcie_b)) = (gpus[a].pcie, gpus[b].pcie) {
            let pcie = if pcie_a.gbps <= pcie_b.gbps { pcie_a } else { pcie_b };
            let meet = pair.meet.clone().unwrap_or(PcieMeet::System);
            let ends = (Endpoint::Gpu(gpus[a].index), Endpoint::Gpu(gpus[b].index));
            links.push(Link::pcie(ends, pcie, meet));
        }
    }
    (gpus, links)
}

/// Access distance of memory nodes that cannot reach each other, as in the ACPI SLIT.
pub(crate) const UNREACHABLE: u32 = 255;

/// Hops between memory nodes, each pair once.
pub(crate) fn numa_links(cpu: &Cpu) -> Vec<Link> {
    let mut links = Vec::new();
    for (place, node) in cpu.numa_nodes.iter().enumerate() {
        for (other_place, other) in cpu.numa_nodes.iter().enumerate().skip(place + 1) {
            let distance = node.distances.get(other_place).copied();
            if let Some(distance) = distance.filter(|distance| *distance < UNREACHABLE) {
                links.push(Link {
                    a: Endpoint::Numa(node.index),
                    b: Endpoint::Numa(other.index),
                    kind: LinkKind::NumaHop { distance },
                    gbps: None,
                });
            }
        }
    }
    links
}

/// Returns an answer, or adds a note about the missing answer.
fn known<T: Clone>(answer: &Answer<T>, what: &str, notes: &mut Vec<String>) -> Option<T> {
    match answer {
        Ok(value) => Some(value.clone()),
        Err(refusal) => {
            notes.push(format!("{what} not known: {refusal}"));
            None
        }
    }
}

/// As [`known`], but without a note if the device does not support the feature.
fn optional<T: Clone>(answer: &Answer<T>, what: &str, notes: &mut Vec<String>) -> Option<T> {
    match answer {
        Err(Refusal::NotSupported) => None,
        other => known(other, what, notes),
    }
}

/// Fix for NVLinks that should join the GPUs of a board and do not.
const FABRIC_FIX: &str = "start the fabric manager, of the same version as the driver (`sudo \
                          systemctl restart nvidia-fabricmanager`), and look at `nvidia-smi nvlink \
                          --status`; in a virtual machine this is the host's to do";

/// Fault for inactive links on a board or in a rack where all links should be active.
fn nvlink_fault(name: &str, device: &DeviceRecord) -> Option<Fault> {
    let (up, down) = (device.nvlinks.len() as u32, device.nvlinks_down);
    let all = up + down;
    (down > 0 && datasheet::is_switched(name))
        .then(|| Fault::new(format!("{down} of {all} NVLinks are down"), FABRIC_FIX))
}

/// Faults for memory errors that require a reset or a replacement of the device.
fn memory_faults(device: &DeviceRecord) -> Vec<Fault> {
    let reset = format!(
        "stop what runs on it and reset it, `sudo nvidia-smi --gpu-reset -i {}`, or restart the \
         machine",
        device.index
    );
    let mut faults = Vec::new();
    let repairs = device.row_repairs.as_ref().ok();
    if repairs.is_some_and(|repairs| repairs.failed) {
        let reason = "ECC: broken memory rows could not be replaced";
        faults.push(Fault::new(reason, "have the device replaced; no reset will help"));
    }
    if repairs.is_some_and(|repairs| repairs.pending) {
        faults.push(Fault::new("ECC: broken memory rows wait to be replaced", reset.clone()));
    }
    if device.pages_pending == Ok(true) {
        let reason = "ECC: broken memory pages wait to be taken out of use";
        faults.push(Fault::new(reason, reset.clone()));
    }
    if let Ok(count @ 1..) = device.errors_uncorrected {
        let reason = format!("ECC: {count} memory errors that could not be corrected");
        faults.push(Fault::new(reason, reset));
    }
    faults
}

fn gpu(device: &DeviceRecord, cuda: Option<&CudaDevice>, cpu: &Cpu, files: &dyn FileTree) -> Gpu {
    let mut notes = Vec::new();
    let name = known(&device.name, "name", &mut notes).unwrap_or_else(|| "unknown".to_owned());
    let address = known(&device.address, "PCI address", &mut notes);
    let capability = known(&device.compute_capability, "compute capability", &mut notes);
    let (memory_bytes, memory_free_bytes) =
        known(&device.memory_bytes, "memory size", &mut notes).unwrap_or((0, 0));
    let clocks = Clocks {
        sm_mhz_max: known(&device.sm_mhz_max, "clock", &mut notes),
        memory_mhz_max: known(&device.memory_mhz_max, "memory clock", &mut notes),
    };
    let sm_count = cuda.and_then(|cuda| cuda.sm_count).or_else(|| {
        let cores = device.cores.as_ref().ok()?;
        Some(cores / datasheet::cores_per_sm(capability?)?)
    });
    if sm_count.is_none() {
        notes.push(
            "number of SMs not known: the CUDA driver does not show this \
                    device"
                .to_owned(),
        );
    }
    let mig = optional(&device.mig, "MIG mode", &mut notes);
    if mig == Some(true) {
        notes.push(
            "divided into MIG instances: the figures are those of the whole device".to_owned(),
        );
    }
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1000.0;
    let power_cap_w = optional(&device.power_cap_mw, "power cap", &mut notes).map(watts);
    let power_cap_default_w = device.power_cap_default_mw.as_ref().ok().copied().map(watts);
    if let (Some(cap_w), Some(default_w)) = (power_cap_w, power_cap_default_w)
        && cap_w < default_w
    {
        notes.push(format!(
            "power is capped at {cap_w:.0} W of {default_w:.0} W: expect less than \
                            the peaks"
        ));
    }

    let arch = match capability {
        Some(capability) => Arch::from_compute_capability(capability),
        None => Arch::Other("unknown".to_owned()),
    };
    let compute_capability = capability.unwrap_or((0, 0));
    let (peak_tflops_dense, peak_source) =
        peaks(&name, compute_capability, sm_count, clocks, &mut notes);
    let nvlink_domain = optional(&device.nvlink_domain, "NVLink domain", &mut notes).flatten();
    Gpu {
        index: device.index,
        uuid: known(&device.uuid, "UUID", &mut notes).unwrap_or_default(),
        pci_bus_id: address.map(|address| address.to_string()).unwrap_or_default(),
        compute_capability,
        arch,
        sm_count,
        memory_bytes,
        memory_free_bytes,
        hbw_gbps: memory_bandwidth(&name, device, cuda, &mut notes),
        l2_bytes: cuda.and_then(|cuda| cuda.l2_bytes),
        clocks,
        power_cap_w,
        power_cap_default_w,
        mig,
        ecc: optional(&device.ecc, "ECC mode", &mut notes),
        numa_node: numa_node(address, cpu, files),
        pcie: pcie(device, &mut notes),
        nvlinks_active: device.nvlinks.len() as u32,
        nvlink_domain,
        precisions: crate::gpu::precisions(compute_capability),
        peak_tflops_dense,
        peak_source,
        name,
        faults: memory_faults(device),
        notes,
    }
}

/// The peaks of a SKU and their source.
fn peaks(
    name: &str,
    capability: (u32, u32),
    sm_count: Option<u32>,
    clocks: Clocks,
    notes: &mut Vec<String>,
) -> (std::collections::BTreeMap<crate::NumberFormat, f64>, String) {
    if let Some(sheet) = datasheet::sheet(name) {
        return (sheet.peaks.iter().copied().collect(), sheet.source.to_owned());
    }
    let rates = datasheet::flops_per_cycle(capability, name.contains("GeForce"));
    let (Some(sm_count), Some(mhz), false) = (sm_count, clocks.sm_mhz_max, rates.is_empty()) else {
        let what = match (rates.is_empty(), sm_count) {
            (true, _) => format!("rates of compute capability {}.{}", capability.0, capability.1),
            (false, None) => "number of SMs".to_owned(),
            (false, Some(_)) => "clock".to_owned(),
        };
        notes.push(format!(
            "peaks not known, of any format: there is no datasheet for `{name}` here, and its \
             {what} is not known either; where a plan needs them, write them into \
             `peak_tflops_dense` of this description's JSON"
        ));
        return Default::default();
    };
    let cycles_per_s = f64::from(sm_count) * f64::from(mhz) * 1e6;
    let round = |tflops: f64| (tflops * 10.0).round() / 10.0;
    let peaks = rates.into_iter().map(|(format, rate)| (format, round(rate * cycles_per_s / 1e12)));
    (peaks.collect(), format!("{sm_count} SMs at {mhz} MHz, dense"))
}

/// Memory bandwidth in GB/s: bus width x clock x 2, or the datasheet's figure, or 0.
fn memory_bandwidth(
    name: &str,
    device: &DeviceRecord,
    cuda: Option<&CudaDevice>,
    notes: &mut Vec<String>,
) -> f64 {
    let bits = device.memory_bus_bits.as_ref().ok().copied();
    let bits = bits.or_else(|| cuda?.memory_bus_bits).filter(|bits| *bits > 0);
    let mhz = device.memory_mhz_max.as_ref().ok().copied().filter(|mhz| *mhz > 0);
    let sheet_gbps = datasheet::sheet(name).and_then(|sheet| sheet.hbw_gbps);
    match (bits, mhz, sheet_gbps) {
        (Some(bits), Some(mhz), sheet_gbps) => {
            let gbps = f64::from(bits) / 8.0 * f64::from(mhz) * 2.0 / 1000.0;
            let gbps = (gbps * 10.0).round() / 10.0;
            // Clocks and datasheets of one SKU differ by a few per cent.
            if let Some(sheet_gbps) = sheet_gbps
                && !(0.85..1.15).contains(&(gbps / sheet_gbps))
            {
                notes.push(format!(
                    "memory bandwidth is {gbps} GB/s by bus width and clock, {sheet_gbps} GB/s by \
                     the datasheet"
                ));
            }
            gbps
        }
        (_, _, Some(sheet_gbps)) => {
            notes.push("memory bandwidth is the datasheet's".to_owned());
            sheet_gbps
        }
        _ => {
            notes.push("memory bandwidth not known".to_owned());
            0.0
        }
    }
}

/// The memory node of a PCI address. Virtual machines often report -1; a single node is then
/// assumed.
fn numa_node(address: Option<PciAddress>, cpu: &Cpu, files: &dyn FileTree) -> Option<u32> {
    let shown = address.and_then(|address| {
        files.read_u64(&format!("/sys/bus/pci/devices/{}/numa_node", address.sysfs_name()))
    });
    let shown = shown.and_then(|node| u32::try_from(node).ok());
    let only = match cpu.numa_nodes.as_slice() {
        [only] => Some(only.index),
        _ => None,
    };
    shown.filter(|node| cpu.numa_nodes.iter().any(|known| known.index == *node)).or(only)
}

fn pcie(device: &DeviceRecord, notes: &mut Vec<String>) -> Option<Pcie> {
    let generation = known(&device.pcie_generation_max, "PCIe generation", notes)?;
    let width_max = known(&device.pcie_width_max, "PCIe width", notes)?;
    let width_now = device.pcie_width_now.as_ref().ok().copied().unwrap_or(width_max);
    // Idle devices lower the generation but not the width: fewer lanes are due to the slot.
    if width_now > 0 && width_now < width_max {
        notes.push(format!("PCIe runs {width_now} of {width_max} lanes"));
        return Some(Pcie::new(generation, width_now));
    }
    Some(Pcie::new(generation, width_max))
}

/// NVLink connection between two devices.
enum NvLinkBetween {
    /// A link, with an optional note.
    Joined(Link, Option<String>),
    /// Both have links to switches, but are in different cliques of a domain.
    Apart,
    /// Both have links to switches, but the switches do not join the two.
    NotReached,
    /// No NVLinks that could join them.
    None,
}

/// Whether a link leads to a switch, visible or hidden, and not to another device of the list.
fn leads_to_switch(link: &NvLinkRecord) -> bool {
    let hidden = link.remote_address.as_ref().is_ok_and(|address| address.is_hidden());
    match link.remote_kind {
        Ok(RemoteKind::Switch) => true,
        Ok(RemoteKind::Gpu) => false,
        // Switches that are not passed through to a virtual machine have no kind and no address.
        Ok(RemoteKind::Other) | Err(_) => hidden,
    }
}

/// GB/s of one link in each direction: from the driver, or by version, or 0.
fn link_gbps(link: &NvLinkRecord) -> f64 {
    let told = link.speed_mbps.as_ref().ok().filter(|mbps| **mbps > 0);
    let told = told.map(|mbps| f64::from(*mbps) / 1000.0);
    let by_version = || datasheet::nvlink_gbps(*link.version.as_ref().ok()?);
    told.or_else(by_version).unwrap_or(0.0)
}

fn nvlink(a: &DeviceRecord, b: &DeviceRecord, pair: &PairRecord) -> NvLinkBetween {
    let (end_a, end_b) = (Endpoint::Gpu(a.index), Endpoint::Gpu(b.index));
    let link = |links: u32, gbps_each_way: f64, through_switch: bool| {
        Link::nvlink((end_a, end_b), links, gbps_each_way, through_switch)
    };
    let slowest = |links: &[&NvLinkRecord]| {
        links.iter().map(|link| link_gbps(link)).fold(f64::INFINITY, f64::min)
    };

    let leads_to_b = |link: &&NvLinkRecord| {
        let remote = link.remote_address.as_ref().ok();
        remote.is_some() && remote == b.address.as_ref().ok()
    };
    let direct: Vec<&NvLinkRecord> = a.nvlinks.iter().filter(leads_to_b).collect();
    if !direct.is_empty() {
        return NvLinkBetween::Joined(link(direct.len() as u32, slowest(&direct), false), None);
    }

    let switched =
        |device: &DeviceRecord| device.nvlinks.iter().filter(|l| leads_to_switch(l)).count();
    let (count_a, count_b) = (switched(a), switched(b));
    if count_a == 0 || count_b == 0 {
        return NvLinkBetween::None;
    }
    let domain = |device: &DeviceRecord| device.nvlink_domain.clone().ok().flatten();
    if let (Some(domain_a), Some(domain_b)) = (domain(a), domain(b))
        && domain_a != domain_b
    {
        return NvLinkBetween::Apart;
    }
    let note = match &pair.nvlink_reaches {
        Ok(true) => None,
        Ok(false) => return NvLinkBetween::NotReached,
        Err(refusal) => Some(format!(
            "gpu{} and gpu{} are taken to share an NVSwitch: the driver does not say ({refusal})",
            a.index, b.index
        )),
    };
    let both = a.nvlinks.iter().chain(&b.nvlinks);
    let switched: Vec<&NvLinkRecord> = both.filter(|link| leads_to_switch(link)).collect();
    NvLinkBetween::Joined(link(count_a.min(count_b) as u32, slowest(&switched), true), note)
}
