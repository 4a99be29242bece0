//! Description of the processor, and estimates of its peak rates.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::NumberFormat;

/// Clock for estimates if the clock is unknown, in Hz.
pub const ASSUMED_FREQUENCY_HZ: u64 = 2_000_000_000;

/// Memory bandwidth for estimates without a measurement, in GB/s per physical core: the sustained
/// rate of a single core of a server processor.
pub const ASSUMED_MEMORY_GBPS_PER_CORE: f64 = 10.0;

/// The processors and the memory of a machine.
///
/// `peak_flops` holds estimates in FLOP/s for each format, from
///
/// ```text
/// peak = cores x FLOP per cycle and core x clock
/// FLOP per cycle and core = lanes of a vector x 2 (multiply, add) x FMA units
/// ```
///
/// where cores are the physical cores that this process may use, the clock is `frequency_hz_max`
/// (or [`ASSUMED_FREQUENCY_HZ`]), and the FLOP per cycle are those of
/// [`Cpu::flops_per_cycle_and_core`]. Real cores clock down under wide vectors, so the estimate is
/// an upper bound.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    /// The model name reported by the processor or the kernel.
    pub model: String,
    /// `GenuineIntel`, `AuthenticAMD`, `ARM`, ...; `unknown` if not reported.
    pub vendor: String,
    /// The processor family of x86, `None` on other architectures.
    pub family: Option<u32>,
    /// Number of processor packages.
    pub sockets: u32,
    /// Number of cores; hyper-threads do not count.
    pub physical_cores: u32,
    /// Number of hardware threads.
    pub logical_cores: u32,
    /// Threads that this process may run at once, within affinity and container limits.
    pub usable_threads: u32,
    /// Memory nodes, at least one.
    pub numa_nodes: Vec<NumaNode>,
    /// Vector and matrix extensions by their usual names (`avx2`, `avx512f`, `avx512bf16`,
    /// `amx_tile`, `amx_bf16`, `neon`, `sve`, ...), in the order of [`SIMD_NAMES`].
    pub simd: Vec<String>,
    /// Caches of the first core, nearest first.
    pub caches: Vec<Cache>,
    /// Memory of the machine, or the container's limit if lower.
    pub memory_total_bytes: u64,
    /// Memory available for allocation at the time of probing.
    pub memory_available_bytes: u64,
    /// The highest known clock, `None` if unknown.
    pub frequency_hz_max: Option<u64>,
    /// Source of the clock.
    pub frequency_source: String,
    /// Estimated FLOP/s by operand format, see above.
    pub peak_flops: BTreeMap<NumberFormat, f64>,
    /// Copy bandwidth of all cores together (read plus written), in GB/s. `None` until
    /// [`Cpu::measure_memory_bandwidth`] has run: probing allocates no buffers.
    pub memory_gbps: Option<f64>,
    /// Remarks about the figures above.
    pub notes: Vec<String>,
}

/// One memory node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaNode {
    /// Index in the kernel.
    pub index: u32,
    /// Hardware threads of the node.
    pub cpus: Vec<u32>,
    /// Memory of the node.
    pub memory_bytes: u64,
    /// Access distance to each node in the order of `Cpu::numa_nodes`, 10 for the node itself.
    /// Empty if the kernel reports none.
    pub distances: Vec<u32>,
}

/// One cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    /// Level: 1, 2 or 3.
    pub level: u32,
    /// Contents.
    pub kind: CacheKind,
    /// Capacity in bytes.
    pub bytes: u64,
    /// Number of hardware threads that share the cache.
    pub shared_by_threads: u32,
}

/// Contents of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheKind {
    /// Data only.
    Data,
    /// Instructions only.
    Instruction,
    /// Data and instructions.
    Unified,
}

/// The extensions that [`Cpu::simd`] can name: the name used here, and the names in
/// `/proc/cpuinfo`.
pub(crate) const SIMD_TABLE: [(&str, &[&str]); 21] = [
    ("sse2", &["sse2"]),
    ("sse4_2", &["sse4_2"]),
    ("avx", &["avx"]),
    ("f16c", &["f16c"]),
    ("fma", &["fma"]),
    ("avx2", &["avx2"]),
    ("avx_vnni", &["avx_vnni"]),
    ("avx512f", &["avx512f"]),
    ("avx512bw", &["avx512bw"]),
    ("avx512vl", &["avx512vl"]),
    ("avx512vnni", &["avx512_vnni", "avx512vnni"]),
    ("avx512bf16", &["avx512_bf16", "avx512bf16"]),
    ("avx512fp16", &["avx512_fp16", "avx512fp16"]),
    ("amx_tile", &["amx_tile"]),
    ("amx_int8", &["amx_int8"]),
    ("amx_bf16", &["amx_bf16"]),
    ("amx_fp16", &["amx_fp16"]),
    ("neon", &["asimd", "neon"]),
    ("neon_bf16", &["bf16"]),
    ("sve", &["sve"]),
    ("sve2", &["sve2"]),
];

/// All names of [`Cpu::simd`], narrow before wide.
pub const SIMD_NAMES: [&str; 21] = {
    let mut names = [""; 21];
    let mut index = 0;
    while index < names.len() {
        names[index] = SIMD_TABLE[index].0;
        index += 1;
    }
    names
};

impl Cpu {
    /// A processor with round figures, for tests and for planning without the machine.
    ///
    /// One socket, one memory node, no hyper-threads, caches of 48 KiB, 2 MiB per core and 2 MiB
    /// per core shared; `memory_gbps` is `None`.
    ///
    /// ```
    /// use deepwell_probe::{Cpu, NumberFormat};
    ///
    /// let cpu = Cpu::described("two cores", 2, 2_000_000_000, &["avx2", "fma"], 8 << 30);
    /// assert_eq!(cpu.peak_gflops(NumberFormat::Fp32), 2.0 * 32.0 * 2.0);
    /// ```
    pub fn described(
        model: &str,
        cores: u32,
        frequency_hz: u64,
        simd: &[&str],
        memory_bytes: u64,
    ) -> Cpu {
        let cores = cores.max(1);
        let cache =
            |level, kind, bytes, shared_by_threads| Cache { level, kind, bytes, shared_by_threads };
        let mut cpu = Cpu {
            model: model.to_owned(),
            vendor: "unknown".to_owned(),
            family: None,
            sockets: 1,
            physical_cores: cores,
            logical_cores: cores,
            usable_threads: cores,
            numa_nodes: vec![NumaNode {
                index: 0,
                cpus: (0..cores).collect(),
                memory_bytes,
                distances: vec![10],
            }],
            simd: simd.iter().map(|name| name.to_string()).collect(),
            caches: vec![
                cache(1, CacheKind::Data, 48 << 10, 1),
                cache(2, CacheKind::Unified, 2 << 20, 1),
                cache(3, CacheKind::Unified, (2 << 20) * u64::from(cores), cores),
            ],
            memory_total_bytes: memory_bytes,
            memory_available_bytes: memory_bytes,
            frequency_hz_max: Some(frequency_hz),
            frequency_source: "given".to_owned(),
            peak_flops: BTreeMap::new(),
            memory_gbps: None,
            notes: Vec::new(),
        };
        cpu.peak_flops = cpu.estimate_peak_flops();
        cpu
    }

    /// Whether the processor has the extension of this name, see [`SIMD_NAMES`].
    pub fn has(&self, simd: &str) -> bool {
        self.simd.iter().any(|name| name == simd)
    }

    /// Number of physical cores that this process may use.
    pub fn usable_cores(&self) -> u32 {
        let threads_per_core = self.logical_cores.div_ceil(self.physical_cores.max(1)).max(1);
        self.usable_threads.div_ceil(threads_per_core).clamp(1, self.physical_cores.max(1))
    }

    /// FLOP per cycle and core on operands of `format`.
    ///
    /// | unit | FP32 | BF16 | FP16 |
    /// |---|---|---|---|
    /// | AMX, 16 x 16 tile of 32-deep dot products in 16 cycles | – | 1024 | 1024 (`amx_fp16`) |
    /// | AVX-512, 16 lanes x 2 x 2 units | 64 | 64 | 128 (`avx512fp16`) |
    /// | AVX-512 of AMD family 25 (Zen 4), 512 bits in two halves | 32 | 64 (`avx512bf16`) | 32 |
    /// | AVX-512 of AMD family 26 (Zen 5) | 64 | 128 (`avx512bf16`) | 64 |
    /// | AVX2 with FMA, 8 lanes x 2 x 2 units | 32 | 32 | 32 |
    /// | AVX, 8 lanes, one multiply and one add | 16 | 16 | 16 |
    /// | NEON, 4 lanes x 2 x 2 units | 16 | 64 (`neon_bf16`) | 16 |
    /// | SSE2 and everything else, 4 lanes, one multiply and one add | 8 | 8 | 8 |
    ///
    /// Intel cores start one BF16 dot product of 512 bits in the cycle in which they could start
    /// two FP32 FMAs, so `avx512bf16` alone does not raise their rate. A format without
    /// instructions runs at the rate of the format it is widened to: TF32, and BF16 or FP16 without
    /// instructions, as FP32; FP8 and every block-scaled format as BF16. FP64 is half of FP32. INT8
    /// is 2048 with `amx_int8`, four times FP32 with vector dot products (`avx512vnni`,
    /// `avx_vnni`), and otherwise the rate of FP32.
    pub fn flops_per_cycle_and_core(&self, format: NumberFormat) -> f64 {
        let amd_family = (self.vendor == "AuthenticAMD").then_some(self.family).flatten();
        let fp32 = if self.has("avx512f") {
            if amd_family == Some(25) { 32.0 } else { 64.0 }
        } else if self.has("avx2") && self.has("fma") {
            32.0
        } else if self.has("avx") || self.has("neon") {
            16.0
        } else {
            8.0
        };
        let bf16 = if self.has("amx_bf16") {
            1024.0
        } else if self.has("avx512bf16") && amd_family.is_some() {
            2.0 * fp32
        } else if self.has("neon_bf16") {
            4.0 * fp32
        } else {
            fp32
        };
        match format {
            NumberFormat::Fp64 => fp32 / 2.0,
            NumberFormat::Fp32 | NumberFormat::Tf32 => fp32,
            NumberFormat::Bf16
            | NumberFormat::Fp8
            | NumberFormat::Mxfp8
            | NumberFormat::Mxfp6
            | NumberFormat::Mxfp4
            | NumberFormat::Nvfp4 => bf16,
            NumberFormat::Fp16 if self.has("amx_fp16") => 1024.0,
            NumberFormat::Fp16 if self.has("avx512fp16") => 2.0 * fp32,
            NumberFormat::Fp16 => fp32,
            NumberFormat::Int8 if self.has("amx_int8") => 2048.0,
            NumberFormat::Int8 if self.has("avx512vnni") || self.has("avx_vnni") => 4.0 * fp32,
            NumberFormat::Int8 => fp32,
        }
    }

    /// Estimated GFLOP/s of all usable cores on operands of `format`, for rooflines.
    ///
    /// Uses `peak_flops`, so that figures set by hand count; missing formats are estimated by the
    /// formula of [`Cpu`].
    pub fn peak_gflops(&self, format: NumberFormat) -> f64 {
        let estimate = || {
            let clock_hz = self.frequency_hz_max.unwrap_or(ASSUMED_FREQUENCY_HZ);
            let per_cycle = f64::from(self.usable_cores()) * self.flops_per_cycle_and_core(format);
            per_cycle * clock_hz as f64
        };
        self.peak_flops.get(&format).copied().unwrap_or_else(estimate) / 1e9
    }

    /// Memory bandwidth in GB/s: the measured figure, or [`ASSUMED_MEMORY_GBPS_PER_CORE`] per
    /// usable core.
    pub fn memory_gbps_or_assumed(&self) -> f64 {
        self.memory_gbps
            .unwrap_or_else(|| ASSUMED_MEMORY_GBPS_PER_CORE * f64::from(self.usable_cores()))
    }

    /// Measures the copy bandwidth with all usable threads and stores it in `memory_gbps`.
    ///
    /// See [`measure_memory_bandwidth`](crate::measure_memory_bandwidth) for the method and its
    /// allocations.
    pub fn measure_memory_bandwidth(&mut self) -> crate::MemoryBandwidth {
        let measured = crate::measure_memory_bandwidth(self);
        self.memory_gbps = Some(measured.gbps);
        measured
    }

    /// Computes `peak_flops` by the formula of [`Cpu`].
    pub(crate) fn estimate_peak_flops(&self) -> BTreeMap<NumberFormat, f64> {
        let empty = Cpu { peak_flops: BTreeMap::new(), ..self.clone() };
        let formats = [
            NumberFormat::Fp64,
            NumberFormat::Fp32,
            NumberFormat::Bf16,
            NumberFormat::Fp16,
            NumberFormat::Int8,
        ];
        formats.into_iter().map(|format| (format, empty.peak_gflops(format) * 1e9)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flops_per_cycle_follow_the_table() {
        use NumberFormat::{Bf16, Fp16, Fp32, Fp64, Int8, Mxfp8};
        let sapphire_rapids: &[&str] = &[
            "avx2",
            "fma",
            "avx512f",
            "avx512vnni",
            "avx512bf16",
            "avx512fp16",
            "amx_tile",
            "amx_int8",
            "amx_bf16",
        ];
        let zen: &[&str] = &["avx2", "fma", "avx512f", "avx512vnni", "avx512bf16"];
        /// Vendor, family, extensions, operands, FLOP per cycle and core.
        type Row<'a> = (&'a str, Option<u32>, &'a [&'a str], NumberFormat, f64);
        let rows: [Row<'_>; 16] = [
            ("GenuineIntel", Some(6), sapphire_rapids, Bf16, 1024.0),
            ("GenuineIntel", Some(6), sapphire_rapids, Mxfp8, 1024.0),
            ("GenuineIntel", Some(6), sapphire_rapids, Fp32, 64.0),
            ("GenuineIntel", Some(6), sapphire_rapids, Fp16, 128.0),
            ("GenuineIntel", Some(6), sapphire_rapids, Int8, 2048.0),
            ("GenuineIntel", Some(6), &["avx2", "fma", "avx512f", "avx512bf16"], Bf16, 64.0),
            ("AuthenticAMD", Some(25), zen, Fp32, 32.0),
            ("AuthenticAMD", Some(25), zen, Bf16, 64.0),
            ("AuthenticAMD", Some(26), zen, Bf16, 128.0),
            ("AuthenticAMD", Some(23), &["avx2", "fma"], Bf16, 32.0),
            ("GenuineIntel", Some(6), &["avx"], Fp32, 16.0),
            ("GenuineIntel", Some(6), &["avx2"], Fp32, 8.0),
            ("ARM", None, &["neon"], Fp64, 8.0),
            ("ARM", None, &["neon", "neon_bf16"], Bf16, 64.0),
            ("unknown", None, &[], Fp32, 8.0),
            ("unknown", None, &[], Bf16, 8.0),
        ];
        for (vendor, family, simd, format, expected) in rows {
            let mut cpu = Cpu::described("any", 4, 1_000_000_000, simd, 1 << 30);
            cpu.vendor = vendor.to_owned();
            cpu.family = family;
            let got = cpu.flops_per_cycle_and_core(format);
            assert_eq!(got, expected, "{vendor} {family:?} {simd:?} {format}");
        }
    }

    #[test]
    fn cores_that_the_process_may_not_use_do_not_count() {
        let mut cpu = Cpu::described("any", 8, 1_000_000_000, &["avx2", "fma"], 1 << 30);
        cpu.logical_cores = 16;
        for (usable_threads, expected) in [(16, 8), (4, 2), (3, 2), (1, 1), (0, 1), (64, 8)] {
            cpu.usable_threads = usable_threads;
            assert_eq!(cpu.usable_cores(), expected, "{usable_threads} threads");
        }
        cpu.usable_threads = 4;
        let estimated = cpu.estimate_peak_flops();
        assert_eq!(estimated[&NumberFormat::Fp32], 2.0 * 32.0 * 1e9);
    }

    #[test]
    fn a_figure_put_in_by_hand_counts() {
        let mut cpu = Cpu::described("any", 2, 1_000_000_000, &[], 1 << 30);
        cpu.peak_flops.insert(NumberFormat::Bf16, 5e9);
        assert_eq!(cpu.peak_gflops(NumberFormat::Bf16), 5.0);
        assert_eq!(cpu.peak_gflops(NumberFormat::Tf32), 16.0);
        assert_eq!(cpu.memory_gbps_or_assumed(), 20.0);
        cpu.memory_gbps = Some(7.5);
        assert_eq!(cpu.memory_gbps_or_assumed(), 7.5);
    }
}
