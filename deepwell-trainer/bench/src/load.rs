//! A GPU's clocks and power during measurements.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use super::timer::percentile;
use deepwell_trainer::Device;

/// Fields queried periodically from the driver's tool, in the order of [`Sample`].
const QUERY: &str = "utilization.gpu,clocks.sm,power.draw,temperature.gpu";
/// Milliseconds between two samples: long enough not to disturb the timed work.
const INTERVAL_MS: u32 = 250;
/// A sample counts if kernels ran at least this percentage of the time before it.
const BUSY: f64 = 50.0;

/// One line of the tool: share of time with kernels in percent, MHz, watts, degrees Celsius.
type Sample = [f64; 4];

/// Samples a GPU's clocks and power in a separate process until [`LoadSampler::finish`].
#[derive(Debug)]
pub struct LoadSampler {
    child: Child,
    reader: Option<JoinHandle<Vec<Sample>>>,
}

impl LoadSampler {
    /// Starts sampling; none for a CPU, or without the driver's tool.
    pub fn start(device: Device) -> Option<LoadSampler> {
        let Device::Cuda(index) = device else { return None };
        let mut child = Command::new("nvidia-smi")
            .arg(format!("--query-gpu={QUERY}"))
            .args(["--format=csv,noheader,nounits", &format!("--id={index}")])
            .arg(format!("--loop-ms={INTERVAL_MS}"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let output = child.stdout.take()?;
        let reader = std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            lines.filter_map(|line| sample(&line)).collect()
        });
        Some(LoadSampler { child, reader: Some(reader) })
    }

    /// Ends the sampling and summarizes the samples of a busy GPU; none if the GPU was never busy.
    pub fn finish(mut self) -> Option<String> {
        self.stop();
        let samples = self.reader.take()?.join().ok()?;
        summary(&samples)
    }

    fn stop(&mut self) {
        // The child may have exited by itself; then there is nothing to stop.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for LoadSampler {
    fn drop(&mut self) {
        self.stop();
    }
}

fn sample(line: &str) -> Option<Sample> {
    let mut values = line.split(',').map(|value| value.trim().parse::<f64>().ok());
    Some([values.next()??, values.next()??, values.next()??, values.next()??])
}

fn summary(samples: &[Sample]) -> Option<String> {
    let busy: Vec<&Sample> = samples.iter().filter(|sample| sample[0] >= BUSY).collect();
    if busy.is_empty() {
        return None;
    }
    let of = |index: usize, share: f64| {
        let values: Vec<f64> = busy.iter().map(|sample| sample[index]).collect();
        percentile(&values, share)
    };
    Some(format!(
        "SM clock {:.0} MHz (lowest {:.0}), {:.0} W (highest {:.0}), at most {:.0} degrees \
         Celsius; medians of {} samples of a busy GPU",
        of(1, 0.5),
        of(1, 0.0),
        of(2, 0.5),
        of(2, 1.0),
        of(3, 1.0),
        busy.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_samples_and_other_lines_do_not_count() {
        let lines =
            ["100, 1755, 690.12, 61", "3, 345, 90.00, 40", "[N/A], 1, 2, 3", "80, 1980, 400, 50"];
        let samples: Vec<Sample> = lines.iter().filter_map(|line| sample(line)).collect();
        assert_eq!(samples.len(), 3);
        assert_eq!(
            summary(&samples).unwrap(),
            "SM clock 1868 MHz (lowest 1755), 545 W (highest 690), at most 61 degrees Celsius; \
             medians of 2 samples of a busy GPU"
        );
        assert_eq!(summary(&samples[1..2]), None);
        assert!(LoadSampler::start(Device::Cpu).is_none());
    }
}
