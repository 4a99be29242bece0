//! Processors described by the text files of real machines, shortened.

use super::*;
use crate::NumberFormat;
use crate::files::tests::FakeFiles;

/// One processor entry of `/proc/cpuinfo` on x86.
fn x86(processor: u32, package: u32, core: u32) -> String {
    format!(
        "processor\t: {processor}\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n\
         model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz\ncpu MHz\t\t: 2699.998\n\
         physical id\t: {package}\ncore id\t\t: {core}\ncpu cores\t: 2\n\
         flags\t\t: fpu sse2 sse4_2 avx f16c fma avx2 avx512f avx512bw avx512_vnni avx512_bf16 \
         amx_bf16 amx_tile amx_int8\nbogomips\t: 5399.99\n\n"
    )
}

/// Two packages of two cores of two threads, with all that Linux shows of them.
fn two_sockets() -> FakeFiles {
    let order = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1), (1, 0), (1, 1)];
    let cpuinfo: String =
        (0..).zip(order).map(|(index, (package, core))| x86(index, package, core)).collect();
    FakeFiles::new(&[
        ("/proc/cpuinfo", &cpuinfo),
        (
            "/proc/meminfo",
            "MemTotal: 16777216 kB\nMemFree:   1048576 kB\nMemAvailable: 8388608 kB\n",
        ),
        ("/sys/devices/system/node/online", "0-1\n"),
        ("/sys/devices/system/node/node0/cpulist", "0-1,4-5\n"),
        ("/sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:    8388608 kB\n"),
        ("/sys/devices/system/node/node0/distance", "10 21\n"),
        ("/sys/devices/system/node/node1/cpulist", "2-3,6-7\n"),
        ("/sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:    8388608 kB\n"),
        ("/sys/devices/system/node/node1/distance", "21 10\n"),
        ("/sys/devices/system/cpu/cpu0/cache/index0/level", "1\n"),
        ("/sys/devices/system/cpu/cpu0/cache/index0/type", "Data\n"),
        ("/sys/devices/system/cpu/cpu0/cache/index0/size", "48K\n"),
        ("/sys/devices/system/cpu/cpu0/cache/index0/shared_cpu_list", "0,4\n"),
        ("/sys/devices/system/cpu/cpu0/cache/index1/level", "3\n"),
        ("/sys/devices/system/cpu/cpu0/cache/index1/type", "Unified\n"),
        ("/sys/devices/system/cpu/cpu0/cache/index1/size", "105M\n"),
        ("/sys/devices/system/cpu/cpu0/cache/index1/shared_cpu_list", "0-1,4-5\n"),
    ])
}

#[test]
fn a_server_with_two_sockets() {
    let cpu = read_cpu(&two_sockets(), 8);
    assert_eq!(cpu.model, "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz");
    assert_eq!((cpu.vendor.as_str(), cpu.family), ("GenuineIntel", Some(6)));
    assert_eq!((cpu.sockets, cpu.physical_cores, cpu.logical_cores), (2, 4, 8));
    assert_eq!(cpu.frequency_hz_max, Some(2_700_000_000));
    assert_eq!(cpu.frequency_source, "model name");
    assert_eq!(cpu.memory_total_bytes, 16 << 30);
    assert_eq!(cpu.memory_available_bytes, 8 << 30);
    let expected = [
        "sse2",
        "sse4_2",
        "avx",
        "f16c",
        "fma",
        "avx2",
        "avx512f",
        "avx512bw",
        "avx512vnni",
        "avx512bf16",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
    ];
    assert_eq!(cpu.simd, expected);
    assert_eq!(cpu.numa_nodes.len(), 2);
    assert_eq!(cpu.numa_nodes[1].cpus, [2, 3, 6, 7]);
    assert_eq!(cpu.numa_nodes[1].memory_bytes, 8 << 30);
    assert_eq!(cpu.numa_nodes[1].distances, [21, 10]);
    let caches: Vec<(u32, u64, u32)> = cpu
        .caches
        .iter()
        .map(|cache| (cache.level, cache.bytes, cache.shared_by_threads))
        .collect();
    assert_eq!(caches, [(1, 48 << 10, 2), (3, 105 << 20, 4)]);
    // 4 cores x 1024 x 2.7 GHz.
    assert_eq!(cpu.peak_gflops(NumberFormat::Bf16), 4.0 * 1024.0 * 2.7);
    assert_eq!(cpu.memory_gbps, None);
    assert_eq!(cpu.notes, Vec::<String>::new());
}

#[test]
fn a_container_that_may_use_part_of_the_machine() {
    let mut files = two_sockets();
    let more = [
        ("/proc/self/cgroup", "0::/pods/one\n"),
        ("/sys/fs/cgroup/pods/one/memory.max", "max\n"),
        ("/sys/fs/cgroup/pods/memory.max", "4294967296\n"),
        ("/sys/fs/cgroup/pods/memory.current", "1073741824\n"),
    ];
    files.0.extend(FakeFiles::new(&more).0);
    let cpu = read_cpu(&files, 2);
    assert_eq!(cpu.usable_threads, 2);
    assert_eq!(cpu.memory_total_bytes, 4 << 30);
    assert_eq!(cpu.memory_available_bytes, 3 << 30);
    // Two threads of one core, so that one core counts.
    assert_eq!(cpu.peak_gflops(NumberFormat::Fp32), 64.0 * 2.7);
    assert_eq!(cpu.notes.len(), 2, "{:?}", cpu.notes);

    let more = [
        ("/proc/self/cgroup", "5:cpu:/\n4:memory:/job\n"),
        ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "2147483648\n"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
    ];
    files.0.extend(FakeFiles::new(&more).0);
    assert_eq!(read_cpu(&files, 8).memory_total_bytes, 2 << 30);
}

#[test]
fn an_arm_server_has_its_topology_in_other_files() {
    let cpuinfo = "processor\t: 0\nBogoMIPS\t: 50.00\n\
                   Features\t: fp asimd bf16 sve sve2\nCPU implementer\t: 0x41\n\
                   CPU part\t: 0xd4f\n\nprocessor\t: 1\nBogoMIPS\t: 50.00\n\
                   Features\t: fp asimd bf16 sve sve2\nCPU implementer\t: 0x41\n\
                   CPU part\t: 0xd4f\n";
    let files = FakeFiles::new(&[
        ("/proc/cpuinfo", cpuinfo),
        ("/proc/meminfo", "MemTotal: 1048576 kB\nMemFree: 524288 kB\n"),
        ("/sys/devices/system/cpu/cpu0/topology/physical_package_id", "0\n"),
        ("/sys/devices/system/cpu/cpu0/topology/core_id", "0\n"),
        ("/sys/devices/system/cpu/cpu1/topology/physical_package_id", "0\n"),
        ("/sys/devices/system/cpu/cpu1/topology/core_id", "1\n"),
        ("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "3447000\n"),
    ]);
    let cpu = read_cpu(&files, 2);
    assert_eq!(cpu.vendor, "ARM");
    assert_eq!(cpu.model, "ARM part 0xd4f");
    assert_eq!((cpu.sockets, cpu.physical_cores, cpu.logical_cores), (1, 2, 2));
    assert_eq!(cpu.simd, ["neon", "neon_bf16", "sve", "sve2"]);
    assert_eq!(cpu.frequency_hz_max, Some(3_447_000_000));
    assert_eq!(cpu.memory_available_bytes, 512 << 20);
    assert_eq!(cpu.numa_nodes.len(), 1);
    assert_eq!(cpu.peak_gflops(NumberFormat::Bf16), 2.0 * 64.0 * 3.447);
}

#[test]
fn the_clock_comes_from_the_first_place_that_has_one() {
    let entry = |lines: &str| format!("processor\t: 0\nvendor_id\t: GenuineIntel\n{lines}\n");
    let rows = [
        ("model name\t: X @ 2.60GHz\ncpu MHz\t: 3000.0", Some(2_600_000_000), "model name"),
        ("model name\t: X\ncpu MHz\t: 2600.000", Some(2_600_000_000), "cpu MHz"),
        ("bogomips\t: 5200.00", Some(2_600_000_000), "BogoMIPS"),
        ("cpu MHz\t: 0.000\nbogomips\t: 4000.00", Some(2_000_000_000), "BogoMIPS"),
        ("cpu MHz\t: nan", None, "not found"),
        ("", None, "not found"),
    ];
    for (lines, expected, source) in rows {
        let cpu = read_cpu(&FakeFiles::new(&[("/proc/cpuinfo", &entry(lines))]), 1);
        assert_eq!(cpu.frequency_hz_max, expected, "{lines}");
        assert_eq!(cpu.frequency_source, source, "{lines}");
        assert!(cpu.peak_gflops(NumberFormat::Fp32) > 0.0, "{lines}");
    }
}

#[test]
fn nothing_to_read_gives_a_subset_and_says_so() {
    for cpuinfo in ["", "\n\n", ":::\n", "processor\t:\n", "\u{fffd}\0"] {
        let cpu = read_cpu(&FakeFiles::new(&[("/proc/cpuinfo", cpuinfo)]), 3);
        assert_eq!((cpu.sockets, cpu.logical_cores, cpu.physical_cores), (1, 3, 3), "{cpuinfo:?}");
        assert_eq!(cpu.numa_nodes.len(), 1);
        assert_eq!(cpu.numa_nodes[0].cpus, [0, 1, 2]);
        assert!(cpu.notes.iter().any(|note| note.contains("memory")), "{:?}", cpu.notes);
        assert!(cpu.notes.iter().any(|note| note.contains("clock")), "{:?}", cpu.notes);
    }
}
