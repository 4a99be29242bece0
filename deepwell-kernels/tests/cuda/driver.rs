//! The driver itself: memory, streams, recordings with groups, and what it refuses.
#![allow(unsafe_code)]

use deepwell_kernels::cuda::{
    Argument, CudarcDriver, DevicePtr, Driver, Function, KernelImages, Launch, Priority, Stream,
    TensorMapElement, TensorMapSpec, TensorMapSwizzle,
};
use half::bf16;

use crate::device::open_driver;
use crate::harness::uniform;

const ELEMENTS: usize = 1000;
pub(crate) const BYTES: usize = 2 * ELEMENTS;
const THREADS: u32 = 256;

/// A driver with the kernel of `add.cu` and one stream.
pub(crate) struct Fixture {
    pub(crate) driver: CudarcDriver,
    add: Function,
    pub(crate) stream: Stream,
}

impl Fixture {
    pub(crate) fn open() -> Fixture {
        let mut driver = open_driver();
        let capability = driver.properties().capability;
        let image = KernelImages::discover().image("add", capability).unwrap();
        let module = driver.load_module(&image).unwrap();
        let add = driver.function(module, "add_bf16", 0).unwrap();
        assert_eq!(driver.function(module, "add_bf16", 0).unwrap(), add);
        let stream = driver.stream(Priority::Middle).unwrap();
        Fixture { driver, add, stream }
    }

    pub(crate) fn upload(&mut self, values: &[bf16]) -> DevicePtr {
        let pointer = self.driver.allocate(size_of_val(values)).unwrap();
        self.driver.upload(pointer, bytemuck::cast_slice(values)).unwrap();
        pointer
    }

    pub(crate) fn download(&mut self, pointer: DevicePtr) -> Vec<bf16> {
        let mut bytes = vec![0; BYTES];
        self.driver.download(&mut bytes, pointer).unwrap();
        bytemuck::pod_collect_to_vec(&bytes)
    }

    fn launch_of(&self, a: DevicePtr, b: DevicePtr, sum: DevicePtr) -> Launch {
        Launch {
            function: self.add,
            grid: [2, 1, 1],
            block: [THREADS, 1, 1],
            cluster: [1, 1, 1],
            shared_bytes: 0,
            programmatic: false,
            arguments: vec![
                Argument::Pointer(a),
                Argument::Pointer(b),
                Argument::Pointer(sum),
                Argument::U64(ELEMENTS as u64),
            ],
        }
    }

    pub(crate) fn add(&mut self, a: DevicePtr, b: DevicePtr, sum: DevicePtr) {
        let launch = self.launch_of(a, b, sum);
        self.driver.launch(&launch, self.stream).unwrap();
    }
}

pub(crate) fn random(seed: u64) -> Vec<bf16> {
    uniform(ELEMENTS, seed, 4.0).into_iter().map(bf16::from_f32).collect()
}

pub(crate) fn sum(a: &[bf16], b: &[bf16]) -> Vec<bf16> {
    a.iter().zip(b).map(|(x, y)| bf16::from_f32(x.to_f32() + y.to_f32())).collect()
}

trial!(the_device_describes_itself);
fn the_device_describes_itself() {
    let mut driver = open_driver();
    let properties = driver.properties().clone();
    let (free, total) = driver.memory().unwrap();
    assert!(free <= total && total <= properties.memory_bytes, "{free} {total} {properties:?}");
    assert!(properties.sm_count > 0 && properties.l2_bytes > 0, "{properties:?}");
    assert!(properties.shared_bytes_per_cta >= 99 << 10, "{properties:?}");
    assert!(properties.cuda_version >= 13_000, "{properties:?}");
    let error = CudarcDriver::open(1000).map(drop).unwrap_err().to_string();
    assert!(error.contains("got 1000; there is"), "{error}");
}

trial!(bytes_come_back_from_memory_copies_and_fills);
fn bytes_come_back_from_memory_copies_and_fills() {
    let mut driver = open_driver();
    let stream = driver.stream(Priority::High).unwrap();
    for bytes in [0usize, 1, 255, 4097, 3 << 20] {
        let data: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
        let (a, b) = (driver.allocate(bytes).unwrap(), driver.allocate(bytes).unwrap());
        assert_eq!(a.0 % 256, 0);
        driver.upload(a, &data).unwrap();
        driver.fill(b, 0x5A, bytes, stream).unwrap();
        driver.copy(b, a, bytes / 2, stream).unwrap();
        let mut expected = vec![0x5A; bytes];
        expected[..bytes / 2].copy_from_slice(&data[..bytes / 2]);
        let mut got = vec![0; bytes];
        driver.download(&mut got, b).unwrap();
        assert!(got == expected, "{bytes} bytes");
        driver.free(a).unwrap();
        driver.free(b).unwrap();
        assert!(driver.free(a).is_err(), "freed twice");
    }
    let error = driver.allocate(1 << 46).unwrap_err();
    assert!(error.out_of_memory, "{error}");
}

trial!(a_kernel_runs_from_any_thread_in_clusters_and_programmatically);
fn a_kernel_runs_from_any_thread_in_clusters_and_programmatically() {
    let mut fixture = Fixture::open();
    let (x, y) = (random(1), random(2));
    let (a, b) = (fixture.upload(&x), fixture.upload(&y));
    let out = fixture.upload(&vec![bf16::NAN; ELEMENTS]);
    let expected = sum(&x, &y);
    for (cluster, programmatic) in [(1, false), (2, false), (1, true), (2, true)] {
        let launch =
            Launch { cluster: [cluster, 1, 1], programmatic, ..fixture.launch_of(a, b, out) };
        let stream = fixture.stream;
        fixture.driver.fill(out, 0xFF, BYTES, stream).unwrap();
        // Nothing may precede a programmatic launch that does not wait for it on the device.
        fixture.driver.synchronize().unwrap();
        fixture = std::thread::spawn(move || {
            fixture.driver.launch(&launch, fixture.stream).unwrap();
            fixture
        })
        .join()
        .unwrap();
        assert_eq!(fixture.download(out), expected, "cluster {cluster}, {programmatic}");
    }
    let blocks = fixture.driver.ctas_per_sm(fixture.add, THREADS, 0).unwrap();
    assert!((1..=8).contains(&blocks), "{blocks} blocks of {THREADS} threads");
}

trial!(what_would_go_wrong_on_the_device_is_refused_before);
fn what_would_go_wrong_on_the_device_is_refused_before() {
    let mut fixture = Fixture::open();
    let a = fixture.upload(&random(1));
    let good = fixture.launch_of(a, a, a);
    let missing = Launch { arguments: good.arguments[..3].to_vec(), ..good.clone() };
    let mut narrow = good.clone();
    narrow.arguments[3] = Argument::U32(5);
    let unknown = Launch { function: Function(77), ..good.clone() };
    let empty = Launch { grid: [0, 1, 1], ..good.clone() };
    let Fixture { driver, stream, .. } = &mut fixture;
    let module = {
        let capability = driver.properties().capability;
        let image = KernelImages::discover().image("add", capability).unwrap();
        let error = driver.load_module(&image[..image.len() - 100]).unwrap_err();
        assert!(error.to_string().contains("cut off"), "{error}");
        driver.load_module(&image).unwrap()
    };
    for (launch, words) in [
        (missing, "expected arguments of [8, 8, 8, 8] bytes, got [8, 8, 8]"),
        (narrow, "got [8, 8, 8, 4]"),
        (unknown, "got number 77"),
        (empty, "kernel `add_bf16`, grid [0, 1, 1]"),
    ] {
        let error = driver.launch(&launch, *stream).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let error = driver.function(module, "no_such_kernel", 0).unwrap_err().to_string();
    assert!(error.contains("no_such_kernel") && error.contains("CUDA_ERROR_NOT_FOUND"), "{error}");
    assert!(driver.function(module, "add_bf16", 1 << 20).is_err(), "a megabyte of shared memory");
    let pinned = driver.allocate_pinned(8).unwrap();
    // SAFETY: refused; nothing is copied.
    let outside = unsafe { driver.copy_from_pinned(a, &pinned, 1, 8, *stream) };
    assert!(outside.is_err(), "past the end");
    assert!(driver.begin_group(*stream).is_err(), "a group outside of a recording");
    assert!(driver.end_capture(*stream).is_err(), "an end without a begin");
    driver.synchronize().unwrap();
}

trial!(ptx_is_compiled_and_errors_in_it_are_quoted);
fn ptx_is_compiled_and_errors_in_it_are_quoted() {
    let mut driver = open_driver();
    let good = b".version 8.0\n.target sm_90\n.address_size 64\n\
        .visible .entry nothing() { ret; }\n\0";
    let module = driver.load_module(good).unwrap();
    driver.function(module, "nothing", 0).unwrap();
    let bad = b".version 8.0\n.target sm_90\n.address_size 64\n\
        .visible .entry nothing() { no_such_instruction; }\n\0";
    let error = driver.load_module(bad).unwrap_err().to_string();
    assert!(error.contains("no_such_instruction"), "{error}");
}

trial!(a_recording_keeps_its_order_and_a_group_is_one_node);
fn a_recording_keeps_its_order_and_a_group_is_one_node() {
    let mut fixture = Fixture::open();
    let (x, y) = (random(1), random(2));
    let (a, b) = (fixture.upload(&x), fixture.upload(&y));
    let spare = vec![bf16::NAN; ELEMENTS];
    let (once, copied, twice, last) = (
        fixture.upload(&spare),
        fixture.upload(&spare),
        fixture.upload(&spare),
        fixture.upload(&spare),
    );
    let stream = fixture.stream;
    fixture.driver.begin_capture(stream).unwrap();
    assert!(fixture.driver.begin_capture(stream).is_err(), "recorded already");
    fixture.add(a, b, once);
    fixture.driver.begin_group(stream).unwrap();
    assert!(fixture.driver.begin_group(stream).is_err(), "a group within a group");
    fixture.driver.copy(copied, once, BYTES, stream).unwrap();
    fixture.add(copied, b, twice);
    fixture.driver.end_group(stream).unwrap();
    fixture.driver.begin_group(stream).unwrap();
    fixture.driver.end_group(stream).unwrap();
    fixture.add(twice, b, last);
    // Not part of the recording.
    fixture.driver.upload(copied, bytemuck::cast_slice(&spare)).unwrap();
    let graph = fixture.driver.end_capture(stream).unwrap();
    assert_eq!(fixture.driver.graph_nodes(graph).unwrap(), 4);
    assert!(fixture.download(once)[0].is_nan(), "recorded, not run");

    for seed in [3, 4] {
        let x = random(seed);
        fixture.driver.upload(a, bytemuck::cast_slice(&x)).unwrap();
        fixture.driver.launch_graph(graph, stream).unwrap();
        assert_eq!(fixture.download(last), sum(&sum(&sum(&x, &y), &y), &y), "seed {seed}");
    }
    fixture.driver.synchronize().unwrap();
    fixture.driver.free_graph(graph).unwrap();
    assert!(fixture.driver.launch_graph(graph, stream).is_err(), "freed");
}

trial!(a_group_left_open_spoils_its_recording_and_nothing_after_it);
fn a_group_left_open_spoils_its_recording_and_nothing_after_it() {
    let mut fixture = Fixture::open();
    let (x, y) = (random(1), random(2));
    let (a, b) = (fixture.upload(&x), fixture.upload(&y));
    let out = fixture.upload(&x);
    let stream = fixture.stream;
    fixture.driver.begin_capture(stream).unwrap();
    fixture.driver.begin_group(stream).unwrap();
    fixture.add(a, b, out);
    assert!(fixture.driver.end_capture(stream).is_err());
    fixture.add(a, b, out);
    assert_eq!(fixture.download(out), sum(&x, &y));
    fixture.driver.begin_capture(stream).unwrap();
    fixture.add(a, b, out);
    let graph = fixture.driver.end_capture(stream).unwrap();
    assert_eq!(fixture.driver.graph_nodes(graph).unwrap(), 1);
}

trial!(a_second_stream_joins_a_recording_by_events);
fn a_second_stream_joins_a_recording_by_events() {
    let mut fixture = Fixture::open();
    let (x, y) = (random(1), random(2));
    let (a, b) = (fixture.upload(&x), fixture.upload(&y));
    let (left, right) = (fixture.upload(&x), fixture.upload(&x));
    let (main, driver) = (fixture.stream, &mut fixture.driver);
    let side = driver.stream(Priority::High).unwrap();
    let (fork, join) = (driver.event(false).unwrap(), driver.event(false).unwrap());
    fixture.driver.begin_capture(main).unwrap();
    fixture.add(a, b, left);
    let launch = fixture.launch_of(left, b, right);
    let driver = &mut fixture.driver;
    driver.record(fork, main).unwrap();
    driver.wait(side, fork).unwrap();
    driver.begin_group(side).unwrap();
    driver.launch(&launch, side).unwrap();
    driver.end_group(side).unwrap();
    driver.record(join, side).unwrap();
    driver.wait(main, join).unwrap();
    fixture.add(right, b, left);
    let graph = fixture.driver.end_capture(main).unwrap();
    assert_eq!(fixture.driver.graph_nodes(graph).unwrap(), 3);
    fixture.driver.launch_graph(graph, main).unwrap();
    assert_eq!(fixture.download(left), sum(&sum(&sum(&x, &y), &y), &y));
}

trial!(events_order_streams_and_read_time_within_recordings_too);
fn events_order_streams_and_read_time_within_recordings_too() {
    const LARGE: usize = 256 << 20;
    let mut driver = open_driver();
    let (main, side) =
        (driver.stream(Priority::Middle).unwrap(), driver.stream(Priority::High).unwrap());
    let large = driver.allocate(LARGE).unwrap();
    let (from, to) = (driver.event(true).unwrap(), driver.event(true).unwrap());
    let filled = driver.event(false).unwrap();
    driver.record(from, main).unwrap();
    driver.fill(large, 3, LARGE, main).unwrap();
    driver.record(to, main).unwrap();
    driver.record(filled, main).unwrap();
    driver.wait(side, filled).unwrap();
    let pinned = driver.allocate_pinned(1).unwrap();
    // SAFETY: the bytes are read when all streams are empty.
    unsafe { driver.copy_to_pinned(&pinned, 0, large.offset(LARGE - 1), 1, side) }.unwrap();
    driver.synchronize().unwrap();
    assert_eq!(pinned.as_slice(), [3]);
    assert!(driver.is_done(filled).unwrap());
    let outside_ms = driver.elapsed_ms(from, to).unwrap();
    assert!(driver.elapsed_ms(from, filled).is_err(), "an event without timing");

    driver.begin_capture(main).unwrap();
    driver.record(from, main).unwrap();
    driver.fill(large, 4, LARGE, main).unwrap();
    driver.record(to, main).unwrap();
    let graph = driver.end_capture(main).unwrap();
    assert_eq!(driver.graph_nodes(graph).unwrap(), 3);
    driver.launch_graph(graph, main).unwrap();
    driver.synchronize().unwrap();
    let inside_ms = driver.elapsed_ms(from, to).unwrap();
    // 256 MiB at no more than 16 TB/s, twice what any GPU of this generation writes.
    for elapsed_ms in [outside_ms, inside_ms] {
        assert!(elapsed_ms > 0.016, "{elapsed_ms} ms");
    }
}

trial!(inputs_and_results_go_through_pinned_memory_on_another_stream);
fn inputs_and_results_go_through_pinned_memory_on_another_stream() {
    let mut fixture = Fixture::open();
    let y = random(2);
    let b = fixture.upload(&y);
    let (a, out) = (fixture.upload(&y), fixture.upload(&y));
    let side = fixture.driver.stream(Priority::High).unwrap();
    let mut staged = fixture.driver.allocate_pinned(64 + BYTES).unwrap();
    assert!(staged.as_slice().iter().all(|&byte| byte == 0), "zeroed");
    let result = fixture.driver.allocate_pinned(BYTES).unwrap();
    let (arrived, done) =
        (fixture.driver.event(false).unwrap(), fixture.driver.event(false).unwrap());
    for seed in 10..15 {
        let x = random(seed);
        staged.as_mut_slice()[64..].copy_from_slice(bytemuck::cast_slice(&x));
        let main = fixture.stream;
        // SAFETY: the bytes are written again after `done`, which waits for `arrived`.
        unsafe { fixture.driver.copy_from_pinned(a, &staged, 64, BYTES, side) }.unwrap();
        fixture.driver.record(arrived, side).unwrap();
        fixture.driver.wait(main, arrived).unwrap();
        fixture.add(a, b, out);
        // SAFETY: the bytes are read after `done`.
        unsafe { fixture.driver.copy_to_pinned(&result, 0, out, BYTES, main) }.unwrap();
        fixture.driver.record(done, main).unwrap();
        fixture.driver.synchronize_event(done).unwrap();
        let got: Vec<bf16> = bytemuck::pod_collect_to_vec(result.as_slice());
        assert_eq!(got, sum(&x, &y), "seed {seed}");
    }
    fixture.driver.free_pinned(result).unwrap();
    let before = staged.as_slice().to_vec();
    drop(fixture);
    assert_eq!(staged.as_slice(), before, "a buffer outlives its driver");
}

trial!(tensor_maps_are_encoded_and_bad_ones_refused);
fn tensor_maps_are_encoded_and_bad_ones_refused() {
    let mut driver = open_driver();
    let base = driver.allocate(1 << 20).unwrap();
    let good = TensorMapSpec {
        base,
        element: TensorMapElement::Bf16,
        sizes: vec![512, 256],
        strides_bytes: vec![1024],
        box_sizes: vec![64, 128],
        swizzle: TensorMapSwizzle::Bytes128,
    };
    let map = driver.tensor_map(&good).unwrap();
    assert!(map.0.iter().any(|&word| word != 0));
    let bad = [
        TensorMapSpec { strides_bytes: vec![1000], ..good.clone() },
        TensorMapSpec { base: base.offset(8), ..good.clone() },
        TensorMapSpec { box_sizes: vec![128, 128], ..good.clone() },
        TensorMapSpec { box_sizes: vec![64], ..good.clone() },
        TensorMapSpec { sizes: Vec::new(), ..good.clone() },
    ];
    for spec in bad {
        let error = driver.tensor_map(&spec).unwrap_err().to_string();
        assert!(error.contains("cuTensorMapEncodeTiled"), "{error}");
    }
}
