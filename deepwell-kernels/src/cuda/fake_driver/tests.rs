//! The driver that runs nothing, tested as what others are tested with.

use deepwell_ir::DType;

use super::FakeDriver;
use crate::cuda::host_driver::{Counts, FakeNode};
use crate::runtime::cuda::blas::{Blas, BlockScales, Matmul, Matrix};
use crate::runtime::cuda::driver::{DevicePtr, Driver, Event, Function, Launch, Priority, Stream};

fn driver_with_stream() -> (FakeDriver, Stream) {
    let mut driver = FakeDriver::h200();
    let stream = driver.stream(Priority::Middle).unwrap();
    (driver, stream)
}

fn kernel(driver: &mut FakeDriver, name: &str) -> Launch {
    let module = driver.load_module(b"anything").unwrap();
    launch_of(driver.function(module, name, 0).unwrap())
}

fn launch_of(function: Function) -> Launch {
    Launch {
        function,
        grid: [1, 1, 1],
        block: [32, 1, 1],
        cluster: [1, 1, 1],
        shared_bytes: 0,
        programmatic: false,
        arguments: Vec::new(),
    }
}

fn bytes_at(driver: &mut FakeDriver, pointer: DevicePtr, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    driver.download(&mut read, pointer).unwrap();
    read
}

#[test]
fn memory_holds_what_was_written_across_pages() {
    const PAGE: usize = 1 << 16;
    let (mut driver, stream) = driver_with_stream();
    for (offset, len) in [(0, 0), (0, 1), (7, 300), (PAGE - 1, 2), (5, 3 * PAGE), (PAGE, PAGE)] {
        let pointer = driver.allocate(4 * PAGE).unwrap();
        let copy = driver.allocate(4 * PAGE).unwrap();
        assert_eq!(pointer.0 % 256, 0);
        let data: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8).collect();
        driver.upload(pointer.offset(offset), &data).unwrap();
        let mut expected = vec![0xFF; 4 * PAGE];
        expected[offset..offset + len].copy_from_slice(&data);
        assert!(bytes_at(&mut driver, pointer, 4 * PAGE) == expected, "{len} at {offset}");

        driver.copy(copy, pointer.offset(offset), len, stream).unwrap();
        assert!(bytes_at(&mut driver, copy, len) == data, "copy of {len} at {offset}");
        driver.fill(copy.offset(offset), 0x5A, len, stream).unwrap();
        assert!(bytes_at(&mut driver, copy.offset(offset), len) == vec![0x5A; len]);
        driver.free(pointer).unwrap();
        driver.free(copy).unwrap();
    }
    assert_eq!(driver.memory().unwrap(), (143_771 << 20, 143_771 << 20));
}

#[test]
fn a_large_allocation_takes_room_only_where_it_was_written() {
    let (mut driver, stream) = driver_with_stream();
    let bytes = 100 << 30;
    let pointer = driver.allocate(bytes).unwrap();
    driver.fill(pointer, 0, 1 << 30, stream).unwrap();
    driver.upload(pointer.offset(bytes - 1), &[7]).unwrap();
    assert_eq!(bytes_at(&mut driver, pointer.offset(bytes - 2), 2), [0xFF, 7]);
    assert_eq!(bytes_at(&mut driver, pointer.offset((1 << 30) - 1), 2), [0, 0xFF]);
    assert!(driver.allocate(bytes).unwrap_err().out_of_memory);
    driver.free(pointer).unwrap();
    assert!(driver.allocate(bytes).is_ok());
}

#[test]
fn what_a_real_driver_refuses_is_refused() {
    let (mut driver, stream) = driver_with_stream();
    let pointer = driver.allocate(16).unwrap();
    let pinned = driver.allocate_pinned(8).unwrap();
    let foreign = FakeDriver::h200().allocate_pinned(8).unwrap();
    let mut launch = kernel(&mut driver, "k");
    launch.grid = [0, 1, 1];
    let event = driver.event(false).unwrap();
    // SAFETY: both are refused; nothing is copied.
    let (outside, foreign_copy) = unsafe {
        (
            fails(driver.copy_from_pinned(pointer, &pinned, 1, 8, stream)),
            fails(driver.copy_to_pinned(&foreign, 0, pointer, 8, stream)),
        )
    };
    let rows: Vec<(&str, String)> = vec![
        ("an upload past the end", fails(driver.upload(pointer.offset(9), &[0; 8]))),
        ("a copy past the end", fails(driver.copy(pointer, pointer.offset(1), 16, stream))),
        ("a fill without a base", fails(driver.fill(DevicePtr(64), 0, 1, stream))),
        ("an address inside", fails(driver.free(pointer.offset(8)))),
        ("a pinned range", outside),
        ("a foreign buffer", foreign_copy),
        ("a foreign buffer back", fails(driver.free_pinned(foreign))),
        ("no CTAs", fails(driver.launch(&launch, stream))),
        ("no such stream", fails(driver.record(event, Stream(9)))),
        ("no such event", fails(driver.wait(stream, Event(9)))),
        ("times without timing", fails(driver.elapsed_ms(event, event))),
        ("a group outside of a recording", fails(driver.begin_group(stream))),
        ("an end without a begin", fails(driver.end_capture(stream))),
    ];
    for (what, error) in rows {
        assert!(!error.is_empty(), "{what} passed");
    }
    assert_eq!(driver.counts().read().launches, 0);
}

fn fails<T>(result: Result<T, crate::cuda::DriverError>) -> String {
    result.err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn a_recording_runs_when_it_is_launched_and_a_group_is_one_node() {
    let (mut driver, stream) = driver_with_stream();
    let counts = driver.counts();
    let launch = kernel(&mut driver, "k");
    let from = driver.allocate(4).unwrap();
    let to = driver.allocate(4).unwrap();
    let pinned = driver.allocate_pinned(4).unwrap();
    driver.upload(from, &[1, 2, 3, 4]).unwrap();
    driver.upload(to, &[0; 4]).unwrap();
    let timing = driver.event(true).unwrap();
    counts.take();

    driver.begin_capture(stream).unwrap();
    driver.launch(&launch, stream).unwrap();
    driver.begin_group(stream).unwrap();
    driver.copy(to, from, 4, stream).unwrap();
    driver.fill(to, 9, 1, stream).unwrap();
    driver.end_group(stream).unwrap();
    driver.record(timing, stream).unwrap();
    // SAFETY: this driver runs a graph when it is launched, and the bytes are read after that.
    unsafe { driver.copy_to_pinned(&pinned, 0, to, 4, stream) }.unwrap();
    driver.begin_group(stream).unwrap();
    driver.end_group(stream).unwrap();
    let graph = driver.end_capture(stream).unwrap();

    let nodes = vec![
        FakeNode::Launch("k".to_string()),
        FakeNode::Group(vec![FakeNode::Copy, FakeNode::Fill]),
        FakeNode::Record,
        FakeNode::PinnedCopy,
        FakeNode::Group(Vec::new()),
    ];
    assert_eq!(driver.graph_nodes(graph).unwrap(), nodes.len());
    assert_eq!(bytes_at(&mut driver, to, 4), [0; 4], "recorded, not run");
    assert_eq!(counts.take(), Counts { downloads: 1, graphs: vec![nodes], ..Counts::default() });

    driver.launch_graph(graph, stream).unwrap();
    assert_eq!(counts.take(), Counts { graph_launches: 1, ..Counts::default() });
    assert_eq!(pinned.as_slice(), [9, 2, 3, 4]);
    driver.upload(from, &[5; 4]).unwrap();
    driver.launch_graph(graph, stream).unwrap();
    assert_eq!(pinned.as_slice(), [9, 5, 5, 5]);
    driver.free_graph(graph).unwrap();
    assert!(driver.launch_graph(graph, stream).is_err());
}

#[test]
fn a_group_left_open_spoils_its_recording_and_nothing_after_it() {
    let (mut driver, stream) = driver_with_stream();
    driver.begin_capture(stream).unwrap();
    assert!(driver.begin_capture(stream).is_err());
    driver.begin_group(stream).unwrap();
    assert!(driver.begin_group(stream).is_err());
    assert!(driver.end_capture(stream).is_err());
    driver.begin_capture(stream).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    assert_eq!(driver.graph_nodes(graph).unwrap(), 0);
}

#[test]
fn a_stream_joins_a_recording_by_an_event_and_leaves_at_its_end() {
    let (mut driver, main) = driver_with_stream();
    let side = driver.stream(Priority::High).unwrap();
    let launch = kernel(&mut driver, "side");
    let fork = driver.event(false).unwrap();
    let before = driver.event(false).unwrap();
    driver.record(before, main).unwrap();
    driver.begin_capture(main).unwrap();
    assert!(driver.wait(main, before).is_err(), "work outside of the recording");
    driver.record(fork, main).unwrap();
    assert!(driver.is_done(fork).is_err(), "a point of a recording is never done");
    driver.wait(side, fork).unwrap();
    driver.launch(&launch, side).unwrap();
    let graph = driver.end_capture(main).unwrap();
    assert_eq!(driver.graph_nodes(graph).unwrap(), 1);
    driver.launch(&launch, side).unwrap();
    assert_eq!(driver.counts().read().launches, 1);
}

#[test]
fn events_read_a_clock_that_counts_work() {
    let (mut driver, stream) = driver_with_stream();
    let launch = kernel(&mut driver, "k");
    let from = driver.event(true).unwrap();
    let to = driver.event(true).unwrap();
    assert!(driver.elapsed_ms(from, to).is_err(), "not recorded");
    driver.record(from, stream).unwrap();
    driver.launch(&launch, stream).unwrap();
    driver.launch(&launch, stream).unwrap();
    driver.record(to, stream).unwrap();
    assert!(driver.is_done(to).unwrap());
    assert_eq!(driver.elapsed_ms(from, to).unwrap(), 3.0);
}

#[test]
fn a_pinned_buffer_outlives_its_driver() {
    let mut driver = FakeDriver::h200();
    let mut pinned = driver.allocate_pinned(3).unwrap();
    drop(driver);
    assert_eq!(pinned.as_slice(), [0; 3]);
    pinned.as_mut_slice()[1] = 4;
    assert_eq!(pinned.as_slice(), [0, 4, 0]);
    assert!(FakeDriver::h200().allocate_pinned(0).unwrap().is_empty());
}

#[test]
fn gemms_are_checked_and_counted() {
    let (mut driver, stream) = driver_with_stream();
    let mut blas = driver.blas();
    let pointer = driver.allocate(1 << 20).unwrap();
    let matrix = |dtype, rows, columns| Matrix { pointer, dtype, rows, columns, leading: columns };
    let bf16 = |rows, columns| matrix(DType::Bf16, rows, columns);
    let fitting = Matmul {
        a: bf16(3, 5),
        a_transposed: false,
        b: bf16(7, 5),
        b_transposed: true,
        out: matrix(DType::F32, 3, 7),
        added: Some(pointer),
        bias: None,
        scales: None,
        workspace: pointer,
        workspace_bytes: 64,
    };
    let scales = Some((BlockScales::Row128(pointer), BlockScales::Square128(pointer)));
    let fp8_a = matrix(DType::E4m3, 3, 5);
    let fp8_b = matrix(DType::E4m3, 7, 5);
    let fp8 = Matmul { a: fp8_a, b: fp8_b, scales, ..fitting };
    let overlapping = Matrix { leading: 4, ..fitting.a };
    let rows: [(&str, Matmul, bool); 9] = [
        ("fits", fitting, true),
        ("wide rows", Matmul { a: Matrix { leading: 64, ..fitting.a }, ..fitting }, true),
        ("fp8 with scales", fp8, true),
        ("fp8 without", Matmul { scales: None, ..fp8 }, false),
        ("scales without fp8", Matmul { scales, ..fitting }, false),
        ("two contractions", Matmul { b_transposed: false, ..fitting }, false),
        ("another result", Matmul { out: bf16(7, 3), ..fitting }, false),
        ("overlapping rows", Matmul { a: overlapping, ..fitting }, false),
        ("no rows", Matmul { a: bf16(0, 5), out: bf16(0, 7), ..fitting }, false),
    ];
    for (name, matmul, fits) in rows {
        assert_eq!(blas.plan(&matmul).is_ok(), fits, "{name}");
    }
    let plan = blas.plan(&fitting).unwrap();
    blas.run(plan, stream).unwrap();
    driver.begin_capture(stream).unwrap();
    blas.run(plan, stream).unwrap();
    driver.end_capture(stream).unwrap();
    let counts = driver.counts().read();
    assert_eq!((counts.matmuls, counts.graphs), (1, vec![vec![FakeNode::Matmul]]));
    blas.forget_plans();
    assert!(blas.run(plan, stream).is_err());
}
