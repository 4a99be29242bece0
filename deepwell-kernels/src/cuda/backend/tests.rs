//! The CUDA backend over a driver that executes nothing.

use super::*;
use crate::cuda::FakeDriver;

/// What the fake device takes for anything in a queue, a copy or an event.
const MS: f64 = 1e-3;

/// The host cannot time steps: two that are in the queue seem to take the time of one.
#[test]
fn steps_are_timed_by_the_devices_clock() {
    let driver = Box::new(FakeDriver::h200());
    let mut backend = CudaBackend::new(driver, None, KernelImages::empty()).unwrap();
    backend.allocate(256).unwrap();
    let range = ByteRange { offset: 0, bytes: 64 };
    let mut times = Vec::new();
    let mut before = None;
    for _ in 0..5 {
        backend.stage(&[(range, &[1; 64])]).unwrap();
        let this = backend.read_later(&[range]).unwrap();
        // As the trainer does: a step is looked at when the next one is in the queue.
        times.extend(before.replace(this).map(|last| {
            backend.fetch(last, &mut [&mut [0; 64]]).unwrap();
            backend.time_of(last).unwrap()
        }));
    }
    let time =
        |since_readback_s| Some(ReadbackTime { since_staged_s: Some(2.0 * MS), since_readback_s });
    let later = time(Some(7.0 * MS));
    assert_eq!(times, [time(None), later, later, later]);

    // The first of the four is kept until as many as are kept lie behind it.
    for _ in 0..READBACKS - 3 {
        backend.read_later(&[range]).unwrap();
    }
    let error = backend.time_of(Readback(0)).unwrap_err();
    assert!(error.to_string().contains("one of the last 8 readbacks"), "{error}");
    let unstaged = backend.read_later(&[range]).unwrap();
    assert_eq!(backend.time_of(unstaged).unwrap().unwrap().since_staged_s, None);
}
