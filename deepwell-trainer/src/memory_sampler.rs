//! Sampled memory of this process: anonymous resident memory, or GPU memory as counted by the
//! driver.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::Device;

/// Anonymous resident bytes of this process now; `None` where the system does not tell.
pub fn anonymous_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("RssAnon:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// Bytes currently held on a device: by this process, or on a whole GPU.
pub(crate) fn held_bytes(device: Device) -> Option<u64> {
    match device {
        // The memory of an emulated GPU is this process's.
        Device::Cpu | Device::Emulated(_) => anonymous_bytes(),
        Device::Cuda(index) => deepwell_probe::gpu_memory_used_bytes(index),
    }
}

/// Samples the memory of a device on a separate thread until dropped.
#[derive(Debug)]
pub struct MemorySampler {
    device: Device,
    baseline_bytes: u64,
    peak_bytes: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MemorySampler {
    /// Interval between two samples.
    const INTERVAL: Duration = Duration::from_millis(10);

    /// Takes the present size as the baseline and starts to sample; `None` where the system does
    /// not tell.
    pub fn start(device: Device) -> Option<MemorySampler> {
        let held_bytes = move || held_bytes(device);
        let baseline_bytes = held_bytes()?;
        let peak_bytes = Arc::new(AtomicU64::new(baseline_bytes));
        let stop = Arc::new(AtomicBool::new(false));
        let (peak, stopped) = (Arc::clone(&peak_bytes), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("memory-sampler".to_string())
            .spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    if let Some(bytes) = held_bytes() {
                        peak.fetch_max(bytes, Ordering::Relaxed);
                    }
                    std::thread::sleep(MemorySampler::INTERVAL);
                }
            })
            .ok();
        Some(MemorySampler { device, baseline_bytes, peak_bytes, stop, thread })
    }

    /// Includes `bytes` that the process took before and still holds.
    #[must_use]
    pub fn with_bytes(mut self, bytes: u64) -> MemorySampler {
        self.baseline_bytes = self.baseline_bytes.saturating_sub(bytes);
        self
    }

    /// Highest sample so far less the baseline, in bytes.
    pub fn peak_over_baseline_bytes(&self) -> u64 {
        if let Some(bytes) = held_bytes(self.device) {
            self.peak_bytes.fetch_max(bytes, Ordering::Relaxed);
        }
        self.peak_bytes.load(Ordering::Relaxed).saturating_sub(self.baseline_bytes)
    }
}

impl Drop for MemorySampler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A sampler that panicked has no result.
            let _ = thread.join();
        }
    }
}
