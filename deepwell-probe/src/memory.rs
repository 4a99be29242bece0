//! Measures memory bandwidth on request: a copy, and the STREAM triad.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Cpu;

/// Result of [`measure_memory_bandwidth`] or [`measure_triad`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryBandwidth {
    /// Bytes read plus bytes written per second over all threads, in 10⁹ bytes; the best pass.
    pub gbps: f64,
    /// Number of concurrent threads.
    pub threads: u32,
    /// Size of all buffers together.
    pub buffer_bytes: u64,
    /// Whether the buffers fit in the caches of the cores used: then `gbps` is the caches'
    /// bandwidth rather than the memory's.
    pub fits_in_cache: bool,
    /// Number of timed passes over the buffers.
    pub passes: u32,
}

/// Bytes of one buffer of each thread, before the cap on the total.
const BYTES_PER_THREAD: u64 = 16 << 20;
/// Maximum total size of all buffers.
const BYTES_MAX: u64 = 512 << 20;
/// Passes start until this time has elapsed, not counting the first touch of the pages.
const MEASURING_TIME: Duration = Duration::from_millis(30);
/// Maximum number of threads: a few dozen saturate the memory of any socket.
const THREADS_MAX: u32 = 64;

/// Copies one `Vec<f64>` into another on every usable core and reports the bandwidth.
///
/// Takes under 100 ms and allocates 32 MiB per thread, at most 512 MiB (or a quarter of the
/// available memory), all freed on return. [`probe`](crate::probe) never calls it.
pub fn measure_memory_bandwidth(cpu: &Cpu) -> MemoryBandwidth {
    measure_on(cpu, Pass::Copy)
}

/// Runs `a = b + 3 c` over three `Vec<f64>` on every usable core and reports the bandwidth.
///
/// This is the triad of STREAM, with STREAM's count: two buffers read and one written, without the
/// caches' additional reads before writes. Time and allocations are those of
/// [`measure_memory_bandwidth`], with half as much memory again per thread below the cap.
///
/// ```
/// use deepwell_probe::{measure_triad, probe};
///
/// let measured = measure_triad(&probe().cpu);
/// assert!(measured.gbps > 0.0 && measured.threads >= 1);
/// ```
pub fn measure_triad(cpu: &Cpu) -> MemoryBandwidth {
    measure_on(cpu, Pass::Triad)
}

/// Work of a thread in one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// One buffer into another.
    Copy,
    /// `a = b + 3 c`.
    Triad,
}

impl Pass {
    /// Buffers per thread, each read or written once per pass.
    fn buffers(self) -> u64 {
        match self {
            Pass::Copy => 2,
            Pass::Triad => 3,
        }
    }
}

fn measure_on(cpu: &Cpu, pass: Pass) -> MemoryBandwidth {
    let threads = cpu.usable_cores().clamp(1, THREADS_MAX);
    let bytes_max = BYTES_MAX.min(cpu.memory_available_bytes / 4);
    let bytes_each = BYTES_PER_THREAD.min(bytes_max / pass.buffers() / u64::from(threads));
    measure(pass, threads, bytes_each.max(1 << 16), cache_bytes(cpu))
}

/// `target = source + 3 second`, element by element; the shortest length counts.
fn triad(target: &mut [f64], source: &[f64], second: &[f64]) {
    for ((target, source), second) in target.iter_mut().zip(source).zip(second) {
        *target = source + 3.0 * second;
    }
}

/// Total capacity of the last-level caches of `cpu`.
fn cache_bytes(cpu: &Cpu) -> u64 {
    let last = cpu.caches.iter().max_by_key(|cache| cache.level);
    last.map_or(0, |cache| {
        let sharers = u64::from(cache.shared_by_threads.max(1));
        cache.bytes * u64::from(cpu.logical_cores).div_ceil(sharers)
    })
}

/// Runs the passes. Each worker allocates and first touches its own buffers, which places the
/// buffers in the worker's memory node. A pass starts with a message to every worker and ends with
/// a message from each.
fn measure(kind: Pass, threads: u32, bytes_each: u64, cache_bytes: u64) -> MemoryBandwidth {
    let elements = (bytes_each / 8) as usize;
    thread::scope(|scope| {
        let (ready, readies) = mpsc::channel::<()>();
        let mut starts = Vec::new();
        for _ in 0..threads {
            let (start, start_receiver) = mpsc::channel::<()>();
            let ready = ready.clone();
            let worker = move || {
                let source = vec![1.0_f64; elements];
                let second = match kind {
                    Pass::Copy => Vec::new(),
                    Pass::Triad => vec![3.0_f64; elements],
                };
                let mut target = vec![2.0_f64; elements];
                // The coordinator closes the channel when it is done; sends cannot fail before.
                while ready.send(()).is_ok() && start_receiver.recv().is_ok() {
                    match kind {
                        Pass::Copy => target.copy_from_slice(&source),
                        Pass::Triad => triad(&mut target, &source, &second),
                    }
                    std::hint::black_box(&mut target);
                }
            };
            // If the machine refuses a thread, the measurement uses the threads already started.
            if thread::Builder::new().spawn_scoped(scope, worker).is_ok() {
                starts.push(start);
            }
        }
        drop(ready);
        let all_ready = || starts.iter().all(|_| readies.recv().is_ok());

        let bytes_per_pass = kind.buffers() * 8 * elements as u64 * starts.len() as u64;
        let mut pass_time_min = Duration::MAX;
        let mut passes = 0;
        let mut complete = all_ready() && !starts.is_empty();
        let first = Instant::now();
        while complete && (passes < 2 || first.elapsed() < MEASURING_TIME) {
            let pass = Instant::now();
            let started = starts.iter().all(|start| start.send(()).is_ok());
            complete = started && all_ready();
            if complete {
                pass_time_min = pass_time_min.min(pass.elapsed());
                passes += 1;
            }
        }
        let gbps = match passes {
            0 => 0.0,
            _ => bytes_per_pass as f64 / pass_time_min.as_secs_f64().max(1e-9) / 1e9,
        };
        MemoryBandwidth {
            gbps,
            threads: starts.len() as u32,
            buffer_bytes: bytes_per_pass,
            fits_in_cache: bytes_per_pass <= cache_bytes,
            passes,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_was_copied() {
        let rows = [
            (Pass::Copy, 2, 1, 1 << 20, 0),
            (Pass::Copy, 2, 2, 1 << 16, 1 << 30),
            (Pass::Triad, 3, 1, 1 << 20, 0),
            (Pass::Triad, 3, 2, 1 << 16, 1 << 30),
        ];
        for (pass, buffers, threads, bytes_each, cache_bytes) in rows {
            let measured = measure(pass, threads, bytes_each, cache_bytes);
            assert_eq!(measured.threads, threads);
            assert_eq!(measured.buffer_bytes, buffers * bytes_each * u64::from(threads));
            assert_eq!(measured.fits_in_cache, cache_bytes > 0);
            assert!(measured.passes >= 2, "{measured:?}");
            // Wide limits: nothing between a loaded emulator and a big cache is outside.
            assert!(measured.gbps > 0.01 && measured.gbps < 1e5, "{measured:?}");
        }
    }

    #[test]
    fn the_triad_adds_what_it_reads() {
        let mut target = [0.0; 3];
        triad(&mut target, &[1.0, 2.0, 3.0], &[10.0, 20.0, 30.0]);
        assert_eq!(target, [31.0, 62.0, 93.0]);
    }

    #[test]
    fn a_machine_with_little_memory_is_not_filled() {
        let mut cpu = Cpu::described("any", 2, 1_000_000_000, &[], 64 << 20);
        let measured = cpu.measure_memory_bandwidth();
        assert!(measured.buffer_bytes <= 16 << 20, "{measured:?}");
        assert_eq!(cpu.memory_gbps, Some(measured.gbps));
        let measured = measure_triad(&cpu);
        assert!(measured.buffer_bytes <= 16 << 20, "{measured:?}");
    }

    #[test]
    fn the_last_level_counts_once_for_each_group_of_sharers() {
        let mut cpu = Cpu::described("any", 8, 1_000_000_000, &[], 1 << 30);
        assert_eq!(cache_bytes(&cpu), 16 << 20);
        cpu.caches[2].shared_by_threads = 4;
        assert_eq!(cache_bytes(&cpu), 32 << 20);
        cpu.caches.clear();
        assert_eq!(cache_bytes(&cpu), 0);
    }
}
