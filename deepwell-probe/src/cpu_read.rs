//! Reads the processor from `/proc` and `/sys`; a reasonable subset on other systems.

use std::collections::{BTreeMap, BTreeSet};

use crate::cpu::{Cache, CacheKind, Cpu, NumaNode, SIMD_TABLE};
use crate::files::{FileTree, parse_list};

/// Describes the processor of the machine with these files.
///
/// `usable_threads` is the number of threads that the process may run at once, as counted by the
/// standard library.
pub(crate) fn read_cpu(files: &dyn FileTree, usable_threads: u32) -> Cpu {
    let text = files.read("/proc/cpuinfo").unwrap_or_default();
    let entries = CpuInfo::parse(&text);
    let mut notes = Vec::new();

    let logical_cores = match entries.processors.len() as u32 {
        0 => usable_threads.max(1),
        count => count,
    };
    let (sockets, physical_cores) = count_cores(files, &entries, logical_cores);
    let vendor = entries.first(&["vendor_id"]).map_or_else(vendor_of_build, str::to_owned);
    let vendor = match (vendor.as_str(), entries.first(&["CPU implementer"])) {
        ("unknown", Some("0x41")) => "ARM".to_owned(),
        ("unknown", Some(code)) => format!("implementer {code}"),
        _ => vendor,
    };
    let model = entries
        .first(&["model name", "Model", "Hardware"])
        .map(str::to_owned)
        .or_else(|| entries.first(&["CPU part"]).map(|part| format!("{vendor} part {part}")))
        .unwrap_or_else(|| format!("unknown {} processor", std::env::consts::ARCH));

    let flags: BTreeSet<&str> =
        entries.first(&["flags", "Features"]).unwrap_or_default().split_whitespace().collect();
    let mut simd = simd_from_flags(&flags);
    if flags.is_empty() {
        simd = simd_of_host();
    }

    let (frequency_hz_max, frequency_source) = read_frequency(files, &entries, &model);
    if frequency_hz_max.is_none() {
        let assumed_ghz = crate::ASSUMED_FREQUENCY_HZ as f64 / 1e9;
        notes.push(format!("no clock found, estimates use {assumed_ghz} GHz"));
    }
    let (memory_total_bytes, memory_available_bytes) = read_memory(files, &mut notes);
    if usable_threads < logical_cores {
        notes.push(format!(
            "this process may use {usable_threads} of {logical_cores} hardware threads"
        ));
    }

    let mut cpu = Cpu {
        model,
        vendor,
        family: entries.first(&["cpu family"]).and_then(|family| family.parse().ok()),
        sockets,
        physical_cores,
        logical_cores,
        usable_threads: usable_threads.max(1),
        numa_nodes: read_numa_nodes(files, logical_cores, memory_total_bytes),
        simd,
        caches: read_caches(files),
        memory_total_bytes,
        memory_available_bytes,
        frequency_hz_max,
        frequency_source,
        peak_flops: BTreeMap::new(),
        memory_gbps: None,
        notes,
    };
    cpu.peak_flops = cpu.estimate_peak_flops();
    cpu
}

/// `/proc/cpuinfo`: the entries of each processor, and entries of none.
struct CpuInfo<'a> {
    processors: Vec<BTreeMap<&'a str, &'a str>>,
    others: BTreeMap<&'a str, &'a str>,
}

impl<'a> CpuInfo<'a> {
    fn parse(text: &'a str) -> CpuInfo<'a> {
        let mut info = CpuInfo { processors: Vec::new(), others: BTreeMap::new() };
        for block in text.split("\n\n") {
            let entries: BTreeMap<&str, &str> = block
                .lines()
                .filter_map(|line| line.split_once(':'))
                .map(|(key, value)| (key.trim(), value.trim()))
                .filter(|(_, value)| !value.is_empty())
                .collect();
            if entries.contains_key("processor") {
                info.processors.push(entries);
            } else {
                info.others.extend(entries);
            }
        }
        info
    }

    /// The value of the first key that the first processor has.
    fn first(&self, keys: &[&str]) -> Option<&'a str> {
        let maps = || self.processors.first().into_iter().chain([&self.others]);
        keys.iter().find_map(|key| maps().find_map(|entries| entries.get(key).copied()))
    }

    /// The number under `key` for one processor.
    fn number(&self, processor: usize, key: &str) -> Option<u32> {
        self.processors.get(processor)?.get(key)?.parse().ok()
    }
}

/// Number of packages and physical cores: from `/proc/cpuinfo` (x86), or from the topology files;
/// otherwise every thread counts as a core.
fn count_cores(files: &dyn FileTree, info: &CpuInfo<'_>, logical_cores: u32) -> (u32, u32) {
    let mut cores = BTreeSet::new();
    for index in 0..info.processors.len() {
        let topology = |name: &str| {
            let processor = info.number(index, "processor").unwrap_or(index as u32);
            let path = format!("/sys/devices/system/cpu/cpu{processor}/topology/{name}");
            files.read_u64(&path).and_then(|number| u32::try_from(number).ok())
        };
        let package = info.number(index, "physical id").or_else(|| topology("physical_package_id"));
        let core = info.number(index, "core id").or_else(|| topology("core_id"));
        if let (Some(package), Some(core)) = (package, core) {
            cores.insert((package, core));
        }
    }
    if cores.is_empty() {
        return (1, logical_cores);
    }
    let sockets: BTreeSet<u32> = cores.iter().map(|(package, _)| *package).collect();
    (sockets.len() as u32, cores.len() as u32)
}

fn vendor_of_build() -> String {
    if cfg!(all(target_arch = "aarch64", target_vendor = "apple")) { "Apple" } else { "unknown" }
        .to_owned()
}

/// The names of [`SIMD_TABLE`] among the kernel's flags.
fn simd_from_flags(flags: &BTreeSet<&str>) -> Vec<String> {
    let listed = |names: &[&str]| names.iter().any(|name| flags.contains(name));
    let table = SIMD_TABLE.iter().filter(|(_, listed_as)| listed(listed_as));
    table.map(|(name, _)| name.to_string()).collect()
}

/// Extensions detected by the standard library, for systems without `/proc/cpuinfo`.
fn simd_of_host() -> Vec<String> {
    #[allow(unused_mut)]
    let mut found: Vec<&str> = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! detect {
            ($($feature:tt => $name:literal),* $(,)?) => {
                $(if std::arch::is_x86_feature_detected!($feature) { found.push($name); })*
            };
        }
        detect!(
            "sse2" => "sse2", "sse4.2" => "sse4_2", "avx" => "avx", "f16c" => "f16c",
            "fma" => "fma", "avx2" => "avx2", "avx512f" => "avx512f", "avx512bw" => "avx512bw",
            "avx512vl" => "avx512vl", "avx512vnni" => "avx512vnni",
            "avx512bf16" => "avx512bf16", "avx512fp16" => "avx512fp16",
        );
    }
    #[cfg(target_arch = "aarch64")]
    {
        macro_rules! detect {
            ($($feature:tt => $name:literal),* $(,)?) => {
                $(if std::arch::is_aarch64_feature_detected!($feature) { found.push($name); })*
            };
        }
        detect!("neon" => "neon", "bf16" => "neon_bf16", "sve" => "sve", "sve2" => "sve2");
    }
    found.into_iter().map(str::to_owned).collect()
}

/// The highest clock in Hz and its source: the frequency driver, the model name, the highest `cpu
/// MHz`, or half of BogoMIPS (Linux on x86 sets BogoMIPS to twice the rate of the time-stamp
/// counter).
fn read_frequency(files: &dyn FileTree, info: &CpuInfo<'_>, model: &str) -> (Option<u64>, String) {
    let driver = "/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq";
    if let Some(khz) = files.read_u64(driver).filter(|khz| *khz > 0) {
        return (Some(khz * 1000), "cpufreq".to_owned());
    }
    let positive = |number: f64| (number.is_finite() && number > 0.0).then_some(number);
    let named = model
        .rsplit_once('@')
        .and_then(|(_, clock)| positive(clock.trim().strip_suffix("GHz")?.trim().parse().ok()?));
    if let Some(ghz) = named {
        return (Some((ghz * 1e9).round() as u64), "model name".to_owned());
    }
    let clocks = info.processors.iter().filter_map(|entries| entries.get("cpu MHz"));
    let mhz = clocks.filter_map(|text| text.parse().ok()).fold(0.0, f64::max);
    if let Some(mhz) = positive(mhz) {
        return (Some((mhz * 1e6).round() as u64), "cpu MHz".to_owned());
    }
    let is_x86 = info.first(&["vendor_id"]).is_some();
    let bogomips = info.first(&["bogomips"]).filter(|_| is_x86);
    match bogomips.and_then(|text| text.parse().ok()).and_then(positive) {
        Some(bogomips) => (Some((bogomips / 2.0 * 1e6).round() as u64), "BogoMIPS".to_owned()),
        None => (None, "not found".to_owned()),
    }
}

/// The value of a line such as `MemTotal:  24684084 kB`, in bytes.
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let line =
        text.lines().find(|line| line.split(':').next().is_some_and(|k| k.ends_with(key)))?;
    let number: u64 = line.split_once(':')?.1.split_whitespace().next()?.parse().ok()?;
    number.checked_mul(1024)
}

/// Total and available memory, within the limit of the control group.
fn read_memory(files: &dyn FileTree, notes: &mut Vec<String>) -> (u64, u64) {
    let text = files.read("/proc/meminfo").unwrap_or_default();
    let Some(total) = kilobytes(&text, "MemTotal") else {
        notes.push("the size of the memory is not known here".to_owned());
        return (0, 0);
    };
    let available =
        kilobytes(&text, "MemAvailable").or_else(|| kilobytes(&text, "MemFree")).unwrap_or(total);
    match read_memory_limit(files).filter(|(limit, _)| *limit < total) {
        None => (total, available),
        Some((limit, used)) => {
            let mib = limit >> 20;
            notes.push(format!("a control group limits memory to {mib} MiB"));
            (limit, available.min(limit.saturating_sub(used)))
        }
    }
}

/// The lowest memory limit of this process's control group and its ancestors, and the usage of that
/// group, in bytes.
fn read_memory_limit(files: &dyn FileTree) -> Option<(u64, u64)> {
    let groups = files.read("/proc/self/cgroup").unwrap_or_default();
    let mut tightest: Option<(u64, u64)> = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, limit_file, used_file) = if controllers.is_empty() {
            ("/sys/fs/cgroup", "memory.max", "memory.current")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            continue;
        };
        let mut group = path.trim_end_matches('/');
        loop {
            let folder = format!("{root}{group}");
            if let Some(limit) = files.read_u64(&format!("{folder}/{limit_file}")) {
                let used = files.read_u64(&format!("{folder}/{used_file}")).unwrap_or(0);
                if tightest.is_none_or(|(tightest_limit, _)| limit < tightest_limit) {
                    tightest = Some((limit, used));
                }
            }
            match group.rfind('/') {
                Some(parent_end) => group = &group[..parent_end],
                None => break,
            }
        }
    }
    tightest
}

/// The memory nodes; a single node if the kernel reports none.
fn read_numa_nodes(
    files: &dyn FileTree,
    logical_cores: u32,
    memory_total_bytes: u64,
) -> Vec<NumaNode> {
    let folder = "/sys/devices/system/node";
    let online = files.read(&format!("{folder}/online")).unwrap_or_default();
    let nodes: Vec<NumaNode> = parse_list(&online)
        .into_iter()
        .map(|index| {
            let read = |name: &str| {
                files.read(&format!("{folder}/node{index}/{name}")).unwrap_or_default()
            };
            NumaNode {
                index,
                cpus: parse_list(&read("cpulist")),
                memory_bytes: kilobytes(&read("meminfo"), "MemTotal").unwrap_or(0),
                distances: read("distance")
                    .split_whitespace()
                    .filter_map(|distance| distance.parse().ok())
                    .collect(),
            }
        })
        .collect();
    if !nodes.is_empty() {
        return nodes;
    }
    vec![NumaNode {
        index: 0,
        cpus: (0..logical_cores).collect(),
        memory_bytes: memory_total_bytes,
        distances: vec![10],
    }]
}

/// The caches of the first core.
fn read_caches(files: &dyn FileTree) -> Vec<Cache> {
    let mut caches = Vec::new();
    for index in 0.. {
        let read = |name: &str| {
            files.read(&format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{name}"))
        };
        let Some(level) = read("level").and_then(|level| level.trim().parse().ok()) else { break };
        let kind = match read("type").as_deref().map(str::trim) {
            Some("Data") => CacheKind::Data,
            Some("Instruction") => CacheKind::Instruction,
            _ => CacheKind::Unified,
        };
        let size = read("size").unwrap_or_default();
        let size = size.trim();
        let (digits, scale) = match size.strip_suffix('K') {
            Some(digits) => (digits, 1 << 10),
            None => match size.strip_suffix('M') {
                Some(digits) => (digits, 1 << 20),
                None => (size, 1),
            },
        };
        let Ok(number) = digits.parse::<u64>() else { continue };
        let shared = parse_list(&read("shared_cpu_list").unwrap_or_default());
        caches.push(Cache {
            level,
            kind,
            bytes: number.saturating_mul(scale),
            shared_by_threads: (shared.len() as u32).max(1),
        });
    }
    caches
}

#[cfg(test)]
#[path = "cpu_read_tests.rs"]
mod tests;
