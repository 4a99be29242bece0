//! Recorded machines through the whole of the crate.

use std::time::{Duration, Instant};

use crate::files::tests::FakeFiles;
use crate::record::{GpuRecord, GpuSource, RemoteKind, RowRepairs};
use crate::recordings::{NoDriver, direct_link, failed, hidden_link, one_b200, two_h200};
use crate::software::{self, Requirement};
use crate::{
    Arch, Cpu, Endpoint, Hardware, Library, LinkKind, NumberFormat, NvLinkDomain, PcieMeet,
    Software, describe, probe,
};

/// Software of a machine with CUDA 13, as `describe` gets it.
fn libraries() -> Software {
    let found = |requirement: &Requirement, version: &str, path: &str| {
        Library::judged(requirement, version, Some(path.to_owned()), None)
    };
    Software {
        driver: Library::missing(&software::DRIVER, &[]),
        cuda_driver_api: found(&software::CUDA_DRIVER_API, "13.0", "/usr/lib/libcuda.so.580"),
        cuda_runtime: Library::missing(&software::CUDA_RUNTIME, &["libcudart.so"]),
        nccl: Library::Found {
            version: "2.27.3".to_owned(),
            path: Some("/usr/lib/libnccl.so.2.27.3".to_owned()),
            note: None,
        },
        cublaslt: found(&software::CUBLASLT, "12.8.4", "/usr/lib/libcublasLt.so.12"),
        nvrtc: Library::missing(&software::NVRTC, &["libnvrtc.so", "libnvrtc.so.13"]),
    }
}

fn host() -> Cpu {
    let simd = ["avx2", "fma", "avx512f", "avx512bf16", "amx_tile", "amx_bf16"];
    Cpu::described("Intel(R) Xeon(R) Platinum 8481C", 16, 2_700_000_000, &simd, 128 << 30)
}

fn machine(source: &dyn GpuSource) -> Hardware {
    let files = FakeFiles::new(&[("/sys/bus/pci/devices/0000:04:00.0/numa_node", "0\n")]);
    let hardware = describe(host(), &files, source, libraries());
    assert_eq!(Hardware::from_json(&hardware.to_json()).unwrap(), hardware);
    hardware
}

/// The edges of the fabric as text, sorted.
fn edges(hardware: &Hardware) -> Vec<String> {
    let fabric = hardware.fabric();
    let mut edges: Vec<String> = fabric
        .all_edges()
        .map(|(a, b, edge)| format!("{} {} {:?}", a.min(b), a.max(b), edge.gbps))
        .collect();
    edges.sort();
    edges
}

#[test]
fn two_h200_behind_a_switch_that_the_guest_cannot_see() {
    let hardware = machine(&two_h200());
    assert_eq!(hardware.arch(), Arch::HopperSm90);
    let gpu = &hardware.gpus[1];
    assert_eq!(gpu.peak_tflops(NumberFormat::Fp8), Some(1979.0));
    assert_eq!(gpu.peak_tflops(NumberFormat::Mxfp8), None);
    assert!(gpu.supports(NumberFormat::Fp8) && !gpu.supports(NumberFormat::Mxfp8));
    // 6144 bits / 8 x 3201 MHz x 2.
    assert_eq!(gpu.hbw_gbps, 4916.7);
    assert_eq!(gpu.l2_bytes, Some(60 << 20));
    assert_eq!(gpu.notes, Vec::<String>::new());

    let link = hardware.link_between(Endpoint::Gpu(1), Endpoint::Gpu(0)).unwrap();
    let expected = LinkKind::NvLink { links: 18, gbps_each_way: 26.562, through_switch: true };
    assert_eq!(link.kind, expected);
    assert_eq!(link.gbps, Some(478.116));
    assert_eq!(
        edges(&hardware),
        [
            "gpu0 switch0 Some(478.116)",
            "gpu1 switch0 Some(478.116)",
            "numa0 gpu0 Some(63.015)",
            "numa0 gpu1 Some(63.015)",
        ]
    );
    insta::assert_snapshot!(hardware.table());
}

#[test]
fn a_b200_that_answers_only_half_of_the_questions() {
    let hardware = machine(&one_b200());
    let gpu = &hardware.gpus[0];
    assert_eq!(gpu.arch, Arch::BlackwellSm100);
    assert_eq!(gpu.sm_count, Some(148), "from the number of cores");
    assert_eq!(gpu.hbw_gbps, 7700.0, "from the datasheet");
    assert_eq!(gpu.pcie.map(|pcie| pcie.width), Some(8), "as the slot runs");
    assert!(gpu.supports(NumberFormat::Mxfp8));
    assert!(matches!(hardware.software.driver, Library::TooOld { .. }));
    for part in ["datasheet", "800 W of 1000 W", "8 of 16 lanes", "580 or newer"] {
        let warnings = hardware.warnings();
        assert!(warnings.iter().any(|warning| warning.contains(part)), "{part}: {warnings:#?}");
    }
    insta::assert_snapshot!(hardware.table());
}

#[test]
fn a_machine_without_a_driver() {
    let hardware = machine(&NoDriver { library_loaded: false });
    assert!(hardware.gpus.is_empty() && hardware.links.is_empty());
    assert_eq!(hardware.arch(), Arch::Cpu);
    let absence = hardware.gpus_absent.as_ref().unwrap();
    assert!(absence.reason.contains("libnvidia-ml.so.1"), "{absence:?}");
    assert!(absence.hint.contains("580"), "{absence:?}");
    assert!(matches!(hardware.software.driver, Library::Missing { .. }));
    insta::assert_snapshot!(hardware.table());
}

#[test]
fn a_driver_that_does_not_start_is_not_taken_for_a_missing_one() {
    let hardware = machine(&NoDriver { library_loaded: true });
    let driver = hardware.software.driver;
    assert!(matches!(driver, Library::Unusable { .. }), "{driver:?}");
    assert!(hardware.gpus_absent.is_some_and(|absence| absence.reason == driver_reason(&driver)));
}

fn driver_reason(driver: &Library) -> &str {
    match driver {
        Library::Unusable { reason, .. } => reason,
        _ => "",
    }
}

#[test]
fn a_driver_without_devices_says_so() {
    let record = GpuRecord { devices: Vec::new(), pairs: Vec::new(), ..two_h200() };
    let hardware = machine(&record);
    assert!(hardware.software.driver.is_found());
    assert!(hardware.gpus_absent.is_some_and(|absence| absence.reason.contains("no device")));
}

/// What joins the two devices of a record, as text.
fn between(record: &GpuRecord) -> String {
    let hardware = machine(record);
    let link = hardware.link_between(Endpoint::Gpu(0), Endpoint::Gpu(1));
    match link.map(|link| (link.kind, link.gbps)) {
        Some((LinkKind::NvLink { links, through_switch, .. }, gbps)) => {
            format!("nvlink {links} switch={through_switch} {gbps:?}")
        }
        Some((LinkKind::Pcie { meet, .. }, gbps)) => format!("pcie {meet:?} {gbps:?}"),
        other => format!("{other:?}"),
    }
}

#[test]
fn nvlink_is_found_however_the_driver_shows_it() {
    let check = |what: &str, change: &dyn Fn(&mut GpuRecord), expected: &str| {
        let mut record = two_h200();
        change(&mut record);
        assert_eq!(between(&record), expected, "{what}");
    };
    let links = |record: &mut GpuRecord, links: [Vec<crate::record::NvLinkRecord>; 2]| {
        for (device, links) in record.devices.iter_mut().zip(links) {
            device.nvlinks = links;
        }
    };
    check("as recorded", &|_| {}, "nvlink 18 switch=true Some(478.116)");
    check(
        "a switch in sight",
        &|record| {
            for device in &mut record.devices {
                for link in &mut device.nvlinks {
                    link.remote_kind = Ok(RemoteKind::Switch);
                    link.remote_address = failed("no permission");
                }
            }
        },
        "nvlink 18 switch=true Some(478.116)",
    );
    check(
        "one end has lost two links",
        &|record| record.devices[1].nvlinks.truncate(16),
        "nvlink 16 switch=true Some(424.992)",
    );
    check(
        "the speed by version",
        &|record| {
            links(record, [(); 2].map(|_| vec![hidden_link(7, failed("no such field")); 18]));
        },
        "nvlink 18 switch=true Some(900.0)",
    );
    check(
        "neither speed nor a version that is known",
        &|record| links(record, [(); 2].map(|_| vec![hidden_link(99, failed("none")); 18])),
        "nvlink 18 switch=true None",
    );
    check(
        "a bridge between two cards",
        &|record| {
            links(record, [vec![direct_link(4, 5); 4], vec![direct_link(4, 4); 4]]);
        },
        "nvlink 4 switch=false Some(100.0)",
    );
    check(
        "links to a card that is not here",
        &|record| {
            links(record, [vec![direct_link(4, 9); 4], vec![direct_link(4, 9); 4]]);
        },
        "pcie HostBridge Some(63.015)",
    );
    check(
        "no links",
        &|record| links(record, [Vec::new(), Vec::new()]),
        "pcie HostBridge Some(63.015)",
    );
    check(
        "the driver says that the two do not reach each other",
        &|record| record.pairs[0].nvlink_reaches = Ok(false),
        "pcie HostBridge Some(63.015)",
    );
    check(
        "the driver says nothing",
        &|record| record.pairs[0].nvlink_reaches = failed("unknown"),
        "nvlink 18 switch=true Some(478.116)",
    );
    check(
        "two cliques of one domain",
        &|record| {
            for (clique, device) in (0..).zip(&mut record.devices) {
                let cluster_uuid = "ab".repeat(16);
                device.nvlink_domain = Ok(Some(NvLinkDomain { cluster_uuid, clique }));
            }
        },
        "pcie HostBridge Some(63.015)",
    );
}

#[test]
fn doubts_about_nvlink_are_noted() {
    let mut record = two_h200();
    record.pairs[0].nvlink_reaches = Ok(false);
    let notes = machine(&record).warnings().join("\n");
    assert!(notes.contains("gpu1: NVLink is up") && notes.contains("fabric manager"), "{notes}");
    record.pairs[0].nvlink_reaches = failed("status unknown");
    let notes = machine(&record).warnings().join("\n");
    assert!(notes.contains("does not say (status unknown)"), "{notes}");
}

#[test]
fn what_keeps_a_machine_from_training_is_refused_with_the_fix() {
    let refusals = |change: &dyn Fn(&mut GpuRecord)| {
        let mut record = two_h200();
        change(&mut record);
        let files = FakeFiles::new(&[]);
        let software = Software { nccl: Library::missing(&software::NCCL, &[]), ..libraries() };
        let hardware = describe(host(), &files, &record, software);
        assert_eq!(Hardware::from_json(&hardware.to_json()).unwrap(), hardware);
        let warnings = hardware.warnings();
        let refusals: Vec<String> = hardware.refusals().iter().map(|f| f.to_string()).collect();
        assert!(refusals.iter().all(|refusal| warnings.contains(refusal)), "{warnings:#?}");
        refusals
    };
    assert_eq!(refusals(&|_| {}), Vec::<String>::new());
    /// What is changed, how many refusals there are, parts of the first one.
    type Row<'a> = (&'a dyn Fn(&mut GpuRecord), usize, [&'a str; 2]);
    let rows: [Row<'_>; 9] = [
        (&|r| r.driver_version = Ok("570.1".to_owned()), 1, ["too old", "driver 580"]),
        (&|r| r.devices[1].mig = Ok(true), 1, ["gpu1: divided", "-i 1 -mig 0"]),
        (
            &|r| {
                r.devices[0].nvlinks.truncate(16);
                r.devices[0].nvlinks_down = 2;
            },
            1,
            ["gpu0: 2 of 18 NVLinks are down", "nvidia-fabricmanager"],
        ),
        (&|r| r.pairs[0].nvlink_reaches = Ok(false), 2, ["does not reach gpu1", "fabric"]),
        (
            &|r| r.devices[1].row_repairs = Ok(RowRepairs { pending: true, failed: false }),
            1,
            ["gpu1: ECC", "--gpu-reset -i 1"],
        ),
        (
            &|r| r.devices[1].row_repairs = Ok(RowRepairs { pending: true, failed: true }),
            2,
            ["could not be replaced", "no reset"],
        ),
        (&|r| r.devices[0].pages_pending = Ok(true), 1, ["pages wait", "-i 0"]),
        (&|r| r.devices[0].errors_uncorrected = Ok(3), 1, ["3 memory errors", "reset"]),
        // Bridged cards leave links without a bridge.
        (
            &|r| {
                r.devices[0].name = Ok("NVIDIA H200 NVL".to_owned());
                r.devices[0].nvlinks_down = 6;
            },
            0,
            ["", ""],
        ),
    ];
    for (change, count, parts) in rows {
        let got = refusals(change);
        assert_eq!(got.len(), count, "{got:#?}");
        for part in parts {
            assert!(got.first().is_none_or(|refusal| refusal.contains(part)), "{part}: {got:#?}");
        }
    }
}

#[test]
fn a_gpu_that_nobody_knows_says_which_peaks_are_unknown() {
    let mut record = two_h200();
    record.devices[0].name = Ok("NVIDIA Z900".to_owned());
    record.devices[0].compute_capability = Ok((13, 7));
    record.devices[1].name = Ok("NVIDIA L4".to_owned());
    record.devices[1].compute_capability = Ok((8, 9));
    let hardware = machine(&record);
    let (new, known) = (&hardware.gpus[0], &hardware.gpus[1]);
    assert_eq!(new.peaks_unknown(), new.precisions);
    assert_eq!((new.memory_bytes, new.sm_count), (143_771 << 20, Some(132)));
    let note = new.notes.join("\n");
    assert!(note.contains("`NVIDIA Z900`") && note.contains("compute capability 13.7"), "{note}");
    assert_eq!(known.peaks_unknown(), [NumberFormat::Fp64], "not in the datasheet");
    assert!(hardware.table().contains("peak not known fp64"), "{}", hardware.table());
}

#[test]
fn cards_below_one_pcie_switch_have_an_edge_of_their_own() {
    let mut record = two_h200();
    for device in &mut record.devices {
        device.nvlinks.clear();
    }
    assert_eq!(edges(&machine(&record)).len(), 2);
    record.pairs[0].meet = Ok(PcieMeet::Switch);
    assert!(edges(&machine(&record)).contains(&"gpu0 gpu1 Some(63.015)".to_owned()));
}

#[test]
fn a_device_that_is_lost_is_described_as_far_as_it_goes() {
    let mut record = two_h200();
    let lost = || "the GPU has fallen off the bus";
    let device = &mut record.devices[1];
    device.name = failed(lost());
    device.address = failed(lost());
    device.compute_capability = failed(lost());
    device.memory_bytes = failed(lost());
    device.memory_bus_bits = failed(lost());
    device.pcie_width_max = failed(lost());
    device.cores = failed(lost());
    device.nvlinks.clear();
    let hardware = machine(&record);
    assert_eq!(hardware.gpus.len(), 2);
    let gpu = &hardware.gpus[1];
    assert_eq!(gpu.arch, Arch::Other("unknown".to_owned()));
    assert!(gpu.peak_tflops_dense.is_empty());
    assert_eq!((gpu.hbw_gbps, gpu.sm_count), (0.0, None));
    assert!(gpu.notes.iter().any(|note| note.contains("fallen off the bus")), "{:?}", gpu.notes);
    assert!(hardware.link_between(Endpoint::Gpu(0), Endpoint::Gpu(1)).is_none());
}

#[test]
fn memory_nodes_are_joined_and_gpus_hang_on_theirs() {
    let hardware = Hardware::preset("rtx5090-x5").unwrap();
    let edges = edges(&hardware);
    assert!(edges.contains(&"numa0 numa1 None".to_owned()), "{edges:?}");
    assert!(edges.contains(&"numa1 gpu4 Some(63.015)".to_owned()), "{edges:?}");
    assert!(edges.iter().all(|edge| !edge.contains("switch")), "{edges:?}");
    let hop = hardware.link_between(Endpoint::Numa(1), Endpoint::Numa(0)).unwrap();
    assert_eq!(hop.kind, LinkKind::NumaHop { distance: 21 });
}

#[test]
fn a_gpu_whose_memory_node_is_not_shown_hangs_on_the_first() {
    let mut cpu = host();
    cpu.numa_nodes.push(crate::NumaNode { index: 1, ..cpu.numa_nodes[0].clone() });
    let shown = ("/sys/bus/pci/devices/0000:05:00.0/numa_node", "1\n");
    let hidden = ("/sys/bus/pci/devices/0000:04:00.0/numa_node", "-1\n");
    let files = FakeFiles::new(&[shown, hidden]);
    let hardware = describe(cpu, &files, &two_h200(), libraries());
    assert_eq!(hardware.gpus[0].numa_node, None);
    assert!(hardware.gpus[0].notes[0].contains("taken for numa0"), "{:?}", hardware.gpus[0].notes);
    assert_eq!(hardware.gpus[1].numa_node, Some(1));
    assert!(hardware.link_between(Endpoint::Gpu(0), Endpoint::Numa(0)).is_some());
    assert!(hardware.link_between(Endpoint::Gpu(1), Endpoint::Numa(1)).is_some());
}

#[test]
fn json_that_is_none_names_the_place() {
    let json = machine(&two_h200()).to_json();
    let rows = [
        ("", "line 1"),
        ("{}", "cpu"),
        ("[1]", "line 1"),
        (&json[..json.len() / 2], "line"),
        (&json.replace("\"mxfp8\"", "1"), ""),
        (&json.replace("\"bf16\"", "\"bf17\""), "bf17"),
    ];
    for (text, part) in rows {
        match Hardware::from_json(text) {
            Err(error) => assert!(error.to_string().contains(part), "{error}"),
            // H200 has no `mxfp8` in it, so that this row changes nothing.
            Ok(hardware) => assert_eq!((part, hardware.to_json()), ("", json.clone())),
        }
    }
}

#[test]
fn files_of_older_releases_are_read() {
    let hardware = Hardware::preset("h200").unwrap();
    let json = hardware.to_json();
    for (now, before) in [("sm_count", "multiprocessors"), ("sm_mhz_max", "multiprocessor_mhz_max")]
    {
        assert!(json.contains(&format!("\"{now}\"")), "{json}");
        let old = json.replace(&format!("\"{now}\""), &format!("\"{before}\""));
        assert_eq!(Hardware::from_json(&old).unwrap(), hardware, "{before}");
    }
}

#[test]
fn this_machine_is_described_whatever_it_is() {
    let start = Instant::now();
    let hardware = probe();
    let elapsed = start.elapsed();
    assert!(hardware.cpu.logical_cores >= 1 && hardware.cpu.physical_cores >= 1);
    assert!(!hardware.cpu.numa_nodes.is_empty());
    assert_eq!(hardware.gpus.is_empty(), hardware.gpus_absent.is_some());
    assert_eq!(Hardware::from_json(&hardware.to_json()).unwrap(), hardware);
    assert!(hardware.table().starts_with("CPU "));
    if cfg!(target_os = "linux") {
        assert!(hardware.cpu.memory_total_bytes > 1 << 20);
        assert!(hardware.cpu.memory_available_bytes <= hardware.cpu.memory_total_bytes);
    }
    // 200 ms is what the crate promises without GPUs; ten times that for a loaded machine.
    if hardware.gpus.is_empty() {
        assert!(elapsed < Duration::from_secs(2), "{elapsed:?}");
    }
}
