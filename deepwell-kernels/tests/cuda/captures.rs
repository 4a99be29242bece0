//! Captures of one thread beside what other threads do with the same device.
//!
//! All drivers of a process share the primary context of a device, and a call that waits for the
//! whole context ends the captures in it. `bf16_gemms_of_all_orientations` failed so at times, when
//! the test of another thread dropped its library.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use deepwell_kernels::cuda::{CublasLt, CudarcDriver, Driver, KernelImages, Priority};
use half::bf16;

use crate::device::open_driver;
use crate::driver::{BYTES, Fixture, random, sum};

/// Captures that have to end well.
const CAPTURES: usize = 300;

/// Sets a flag when it goes, so that no thread waits for one that failed.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Captures the sum of two vectors again and again, and launches each graph.
fn capture_repeatedly() {
    let mut fixture = Fixture::open();
    let stream = fixture.stream;
    let (x, y) = (random(1), random(2));
    let (a, b) = (fixture.upload(&x), fixture.upload(&y));
    let out = fixture.upload(&vec![bf16::NAN; x.len()]);
    for index in 0..CAPTURES {
        fixture.driver.fill(out, 0xFF, BYTES, stream).unwrap();
        fixture.driver.begin_capture(stream).unwrap();
        fixture.driver.begin_group(stream).unwrap();
        fixture.add(a, b, out);
        fixture.driver.end_group(stream).unwrap();
        let graph = fixture.driver.end_capture(stream);
        let graph = graph.unwrap_or_else(|error| panic!("capture {index}: {error}"));
        fixture.driver.launch_graph(graph, stream).unwrap();
        assert!(fixture.download(out) == sum(&x, &y), "capture {index}");
        fixture.driver.free_graph(graph).unwrap();
    }
}

/// Everything that a driver does at once: memory, copies, waits, modules.
fn use_a_driver(driver: &mut CudarcDriver, seed: usize) {
    let image = KernelImages::discover().image("add", driver.properties().capability).unwrap();
    driver.load_module(&image).unwrap();
    let stream = driver.stream(Priority::Low).unwrap();
    let event = driver.event(false).unwrap();
    let data: Vec<u8> = (0..5000).map(|index| ((index + seed) % 251) as u8).collect();
    let (from, to) = (driver.allocate(data.len()).unwrap(), driver.allocate(data.len()).unwrap());
    driver.upload(from, &data).unwrap();
    driver.copy(to, from, data.len(), stream).unwrap();
    driver.record(event, stream).unwrap();
    driver.synchronize_event(event).unwrap();
    assert!(driver.is_done(event).unwrap());
    driver.synchronize().unwrap();
    driver.synchronize_device().unwrap();
    let mut got = vec![0; data.len()];
    driver.download(&mut got, to).unwrap();
    assert!(got == data, "bytes come back");
    let pinned = driver.allocate_pinned(4096).unwrap();
    driver.free_pinned(pinned).unwrap();
    driver.free(from).unwrap();
    driver.free(to).unwrap();
    driver.memory().unwrap();
}

trial!(captures_end_well_beside_threads_that_allocate_copy_and_synchronize);
fn captures_end_well_beside_threads_that_allocate_copy_and_synchronize() {
    // Keeps the context: else the last driver of a moment would end it.
    let _first = open_driver();
    let (is_over, rounds) = (AtomicBool::new(false), [AtomicUsize::new(0), AtomicUsize::new(0)]);
    thread::scope(|scope| {
        // One keeps its driver, one opens and drops it and the library in each round.
        scope.spawn(|| {
            let mut driver = open_driver();
            while !is_over.load(Ordering::SeqCst) {
                use_a_driver(&mut driver, rounds[0].fetch_add(1, Ordering::SeqCst));
            }
        });
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                let mut driver = open_driver();
                let library = CublasLt::open(&driver).unwrap();
                use_a_driver(&mut driver, rounds[1].fetch_add(1, Ordering::SeqCst));
                drop(library);
            }
        });
        let _ends = Ends(&is_over);
        capture_repeatedly();
    });
    let rounds = rounds.map(AtomicUsize::into_inner);
    assert!(rounds.iter().all(|&count| count > 0), "the other threads ran {rounds:?} times");
}

trial!(a_thread_that_captures_cannot_wait_for_the_whole_device);
fn a_thread_that_captures_cannot_wait_for_the_whole_device() {
    let mut fixture = Fixture::open();
    let stream = fixture.stream;
    let (x, y) = (random(1), random(2));
    let (a, b) = (fixture.upload(&x), fixture.upload(&y));
    let out = fixture.upload(&vec![bf16::NAN; x.len()]);
    fixture.driver.begin_capture(stream).unwrap();
    let error = fixture.driver.synchronize_device().unwrap_err().to_string();
    assert!(error.contains("expected no open capture"), "{error}");
    // Nor does the end of another driver and of its library spoil the capture, or wait for ever.
    let driver = open_driver();
    drop(CublasLt::open(&driver).unwrap());
    drop(driver);
    fixture.add(a, b, out);
    let graph = fixture.driver.end_capture(stream).unwrap();
    fixture.driver.launch_graph(graph, stream).unwrap();
    assert!(fixture.download(out) == sum(&x, &y));
    fixture.driver.synchronize_device().unwrap();
}
