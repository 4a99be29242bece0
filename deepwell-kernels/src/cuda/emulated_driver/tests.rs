//! The emulated driver on small kernels of PTX text.

use deepwell_emulator::bulk;
use deepwell_emulator::launch::Settings;

use super::{EmulatedDriver, LaunchOutcome};
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::{
    Argument, DevicePtr, Driver, DriverError, Launch, Module, Priority, Stream, TensorMapElement,
    TensorMapSpec, TensorMapSwizzle,
};

/// Adds `addend` to each of 64 numbers; a parameter of 4 bytes stands before
/// one of 8, with four bytes between them that belong to none.
const ADD: &str = "
.visible .entry add(.param .u32 addend, .param .u64 table)
{
    .reg .b32 %r<4>;
    .reg .b64 %d<5>;
    ld.param.u32 %r1, [addend];
    ld.param.u64 %d1, [table];
    cvta.to.global.u64 %d2, %d1;
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %d3, %r2, 4;
    add.s64 %d4, %d2, %d3;
    ld.global.u32 %r3, [%d4];
    add.s32 %r3, %r3, %r1;
    st.global.u32 [%d4], %r3;
    ret;
}
";

/// Each of 64 threads stores its number to shared memory and reads that of the other warp.
const SWAP: &str = "
.visible .entry NAME(.param .u64 out)
{
    .reg .b32 %r<8>;
    .reg .b64 %d<5>;
    .shared .align 4 .b8 numbers[256];
    ld.param.u64 %d1, [out];
    cvta.to.global.u64 %d2, %d1;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, numbers;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    st.shared.u32 [%r4], %r1;
    BARRIER
    xor.b32 %r5, %r3, 128;
    add.s32 %r6, %r2, %r5;
    ld.shared.u32 %r7, [%r6];
    mul.wide.u32 %d3, %r1, 4;
    add.s64 %d4, %d2, %d3;
    st.global.u32 [%d4], %r7;
    ret;
}
";

fn ptx(architecture: &str, bodies: &[&str]) -> Vec<u8> {
    let head = format!(".version 9.0\n.target {architecture}\n.address_size 64\n");
    let mut text = head.into_bytes();
    text.extend(bodies.concat().bytes());
    text.push(0);
    text
}

struct Device {
    driver: EmulatedDriver,
    stream: Stream,
    module: Module,
    table: DevicePtr,
}

fn device() -> Device {
    let mut driver = EmulatedDriver::new(Architecture::Sm90a, Settings::default());
    let ordered = SWAP.replace("NAME", "ordered").replace("BARRIER", "bar.sync 0;");
    let unordered = SWAP.replace("NAME", "unordered").replace("BARRIER", "");
    let module = driver.load_module(&ptx("sm_90a", &[ADD, &ordered, &unordered])).unwrap();
    let stream = driver.stream(Priority::Middle).unwrap();
    let table = driver.allocate(256).unwrap();
    Device { driver, stream, module, table }
}

impl Device {
    fn launch(&mut self, kernel: &str, arguments: Vec<Argument>) -> Result<(), DriverError> {
        let function = self.driver.function(self.module, kernel, 0)?;
        let launch = Launch {
            function,
            grid: [1, 1, 1],
            block: [64, 1, 1],
            cluster: [1, 1, 1],
            shared_bytes: 0,
            programmatic: false,
            arguments,
        };
        self.driver.launch(&launch, self.stream)
    }

    fn numbers(&mut self) -> Vec<u32> {
        let mut bytes = [0; 256];
        self.driver.download(&mut bytes, self.table).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
    }
}

#[test]
fn a_launch_runs_at_once_or_with_its_graph() {
    let mut device = device();
    let (table, stream) = (device.table, device.stream);
    let arguments = vec![Argument::U32(5), Argument::Pointer(table)];
    device.driver.fill(table, 0, 256, stream).unwrap();
    device.launch("add", arguments.clone()).unwrap();
    assert_eq!(device.numbers(), [5; 64]);

    device.driver.begin_capture(stream).unwrap();
    device.launch("add", arguments).unwrap();
    let graph = device.driver.end_capture(stream).unwrap();
    assert_eq!(device.numbers(), [5; 64], "recorded, not run");
    device.driver.launch_graph(graph, stream).unwrap();
    device.driver.launch_graph(graph, stream).unwrap();
    assert_eq!(device.numbers(), [15; 64]);
    assert_eq!(device.driver.counts().read().launches, 1);
}

#[test]
fn what_nothing_orders_fails_the_launch() {
    let mut device = device();
    let arguments = vec![Argument::Pointer(device.table)];
    device.launch("ordered", arguments.clone()).unwrap();
    let expected: Vec<u32> = (0..64).map(|thread| thread ^ 32).collect();
    assert_eq!(device.numbers(), expected);
    let error = device.launch("unordered", arguments).unwrap_err().to_string();
    assert!(error.contains("kernel `unordered`") && error.contains("is not ordered"), "{error}");
}

#[test]
fn the_tracker_is_turned_off_and_on() {
    let mut device = device();
    let launches = device.driver.launches();
    let tracker = device.driver.tracker();
    tracker.set(false);
    // As of a device that was made without.
    let of_none = device.driver.tracker();
    for (tracker, on, expected) in
        [(&tracker, false, false), (&tracker, true, true), (&of_none, true, false)]
    {
        tracker.set(on);
        device.launch("ordered", vec![Argument::Pointer(device.table)]).unwrap();
        assert_eq!(launches.read().last().map(|launch| launch.tracker), Some(expected), "{on}");
    }
}

#[test]
fn launches_are_kept_and_logged() {
    let mut device = device();
    let name = format!("deepwell-launches-{}.jsonl", std::process::id());
    let path = std::env::temp_dir().join(name);
    let pointer = Argument::Pointer(device.table);
    device.launch("ordered", vec![pointer]).unwrap();
    let launches = device.driver.launches();
    device.driver.log_to(&path);
    device.launch("ordered", vec![pointer]).unwrap();
    device.launch("unordered", vec![pointer]).unwrap_err();
    let outside = Argument::Pointer(device.table.offset(4));
    device.launch("add", vec![Argument::U32(1), outside]).unwrap_err();

    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let kept = launches.read();
    let expected = [
        ("ordered", LaunchOutcome::Clean, "clean", ""),
        ("unordered", LaunchOutcome::Findings, "findings", "is not ordered"),
        ("add", LaunchOutcome::Failed, "failed", "global-out-of-range"),
    ];
    assert_eq!((kept.len(), lines.len()), (expected.len(), expected.len()));
    for ((launch, line), (kernel, verdict, word, finding)) in kept.iter().zip(&lines).zip(expected)
    {
        assert_eq!((launch.kernel.as_str(), launch.verdict), (kernel, verdict));
        assert_eq!((&line["kernel"], &line["verdict"]), (&kernel.into(), &word.into()));
        assert_eq!(line["block"], serde_json::json!([64, 1, 1]));
        assert_eq!(launch.findings.is_empty(), finding.is_empty());
        let is_told = launch.findings.iter().any(|text| text.contains(finding));
        assert_eq!(is_told, !finding.is_empty(), "{launch:?}");
    }
    assert!(kept[0].instructions > 0 && kept[0].global_bytes_written == 256, "{:?}", kept[0]);
}

#[test]
fn what_cannot_run_is_refused_with_the_reason() {
    let mut device = device();
    let (table, module) = (device.table, device.module);
    let pointer = Argument::Pointer(table);
    let mut foreign = EmulatedDriver::new(Architecture::Sm100a, Settings::default());
    let unknown = ADD.replace("add.s32", "frobnicate.s32");
    let driver = &mut device.driver;
    let too_much = driver.allocate(9 << 30).unwrap_err();
    assert!(too_much.out_of_memory);
    let rows: Vec<(String, &str)> = vec![
        (fails(driver.load_module(b"\x7fELF")), "expected PTX with a final zero byte"),
        (fails(foreign.load_module(&ptx("sm_90a", &[ADD]))), "expected PTX for `sm_100a`"),
        (fails(driver.load_module(&ptx("sm_90a", &[&unknown]))), "frobnicate"),
        (fails(driver.function(module, "subtract", 0)), "expected one of add"),
        (fails(driver.function(module, "add", 228 << 10)), "at most 232448 bytes"),
        (fails(driver.upload(table.offset(255), &[0; 2])), "global-out-of-range"),
        (fails(driver.free(table.offset(16))), "global-free"),
        (fails(device.launch("add", vec![pointer])), "[4, 8] bytes, got [8]"),
        (fails(device.launch("add", vec![pointer, Argument::U32(1)])), "got [8, 4]"),
        (
            fails(device.launch("add", vec![Argument::U32(1), Argument::Pointer(table.offset(4))])),
            "global-out-of-range",
        ),
    ];
    for (error, expected) in rows {
        assert!(error.contains(expected), "expected {expected}, got {error}");
    }
}

fn fails<T>(result: Result<T, DriverError>) -> String {
    result.err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn ctas_fit_by_threads_and_by_shared_memory() {
    let check = |architecture: Architecture, threads: u32, shared_bytes: u32, expected: u32| {
        let settings = Settings { ctas_per_sm: 32, ..Settings::default() };
        let mut driver = EmulatedDriver::new(architecture, settings);
        let module = driver.load_module(&ptx(architecture.name(), &[ADD])).unwrap();
        let add = driver.function(module, "add", shared_bytes).unwrap();
        let ctas = driver.ctas_per_sm(add, threads, shared_bytes).unwrap();
        assert_eq!(ctas, expected, "{architecture:?}, {threads}, {shared_bytes}");
    };
    // 2048 threads and 228 KiB, of which each CTA takes one more; 1536 and 100 KiB on sm_120.
    check(Architecture::Sm90a, 256, 0, 8);
    check(Architecture::Sm90a, 1000, 0, 2);
    check(Architecture::Sm90a, 32, 0, 32);
    check(Architecture::Sm90a, 128, 227 << 10, 1);
    check(Architecture::Sm100a, 128, 113 << 10, 2);
    check(Architecture::Sm103a, 128, 114 << 10, 1);
    check(Architecture::Sm120a, 1024, 0, 1);
    check(Architecture::Sm120a, 128, 49 << 10, 2);
    let two = EmulatedDriver::new(Architecture::Sm90a, Settings::default());
    assert_eq!(two.properties().shared_bytes_per_cta, 227 << 10);
}

#[test]
fn tensor_maps_are_those_of_the_emulator() {
    let driver = &mut device().driver;
    let spec = TensorMapSpec {
        base: DevicePtr(0x10_0000_0000),
        element: TensorMapElement::Bf16,
        sizes: vec![256, 64],
        strides_bytes: vec![512],
        box_sizes: vec![64, 8],
        swizzle: TensorMapSwizzle::Bytes128,
    };
    let bytes: Vec<u8> =
        driver.tensor_map(&spec).unwrap().0.iter().flat_map(|word| word.to_le_bytes()).collect();
    let map = bulk::TensorMap::decode(bytes.as_slice().try_into().unwrap()).unwrap();
    assert_eq!(map.shared_bytes(), 64 * 8 * 2);
    let refused = [
        TensorMapSpec { base: spec.base.offset(8), ..spec.clone() },
        TensorMapSpec { strides_bytes: vec![520], ..spec.clone() },
        TensorMapSpec { strides_bytes: vec![], ..spec.clone() },
        TensorMapSpec { box_sizes: vec![65, 8], ..spec.clone() },
        TensorMapSpec { sizes: vec![], strides_bytes: vec![], box_sizes: vec![], ..spec },
    ];
    for spec in refused {
        let error = fails(driver.tensor_map(&spec));
        assert!(error.contains("tensor-map"), "{spec:?}: {error}");
    }
}
