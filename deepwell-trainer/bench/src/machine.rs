//! Description of the machine in a record.

use std::process::Command;

use deepwell_probe::Hardware;
use serde::{Deserialize, Serialize};

use deepwell_trainer::Device;

/// Name of the machine and facts about the machine and the method.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Name of the GPU or the CPU.
    pub name: String,
    /// Facts in printing order.
    pub facts: Vec<(String, String)>,
}

/// Fields queried from `nvidia-smi`, and their names in a record.
const QUERIES: [(&str, &str); 8] = [
    ("clocks.sm", "SM clock now"),
    ("clocks.mem", "memory clock now"),
    ("clocks.max.sm", "SM clock at most"),
    ("clocks_event_reasons.active", "reasons for lower clocks"),
    ("power.draw", "power draw now"),
    ("power.limit", "power limit"),
    ("temperature.gpu", "temperature, degrees Celsius"),
    ("memory.used", "memory used"),
];

impl Machine {
    /// Describes the device and this build.
    pub fn describe(device: Device, hardware: &Hardware) -> Machine {
        let cpu = &hardware.cpu;
        let processor = format!("{}, {} threads", cpu.model, cpu.usable_threads);
        let mut facts = Vec::new();
        let mut fact = |name: &str, value: String| facts.push((name.to_string(), value));
        let name = match device {
            Device::Cpu => cpu.model.clone(),
            Device::Emulated(_) => device.to_string(),
            Device::Cuda(index) => match hardware.gpus.get(index) {
                Some(gpu) => {
                    let or_unknown = |value: Option<u32>| {
                        value.map_or_else(|| "unknown".to_string(), |value| value.to_string())
                    };
                    fact("GPU", format!("{}, {} SMs", gpu.name, or_unknown(gpu.sm_count)));
                    fact(
                        "driver",
                        match hardware.software.driver.version() {
                            Some(version) => version.to_string(),
                            None => "unknown".to_string(),
                        },
                    );
                    fact("peak rates", gpu.peak_source.clone());
                    for note in &gpu.notes {
                        fact("note", note.clone());
                    }
                    gpu.name.clone()
                }
                None => device.to_string(),
            },
        };
        fact("processor", processor);
        let features = cpu.simd.join(" ");
        fact("processor's instructions", features);
        // A build for another machine sets the commit: no repository exists there.
        let commit = option_env!("DEEPWELL_COMMIT").map(|commit| format!(", commit {commit}"));
        fact("deepwell", format!("{}{}", env!("CARGO_PKG_VERSION"), commit.unwrap_or_default()));
        if let Device::Cuda(index) = device {
            facts.extend(clocks(index));
        }
        Machine { name, facts }
    }

    /// Adds a fact.
    pub fn push(&mut self, name: &str, value: impl ToString) {
        self.facts.push((name.to_string(), value.to_string()));
    }

    /// Adds the GPU's current clocks, power and temperature, labelled with `when`.
    pub fn push_clocks(&mut self, device: Device, when: &str) {
        let Device::Cuda(index) = device else { return };
        for (name, value) in clocks(index) {
            self.facts.push((format!("{name}, {when}"), value));
        }
    }

    /// The device's name in a file name: `NVIDIA H200` is `h200`.
    pub fn slug(&self) -> String {
        let mut slug = String::new();
        for word in self.name.to_lowercase().split(|c: char| !c.is_ascii_alphanumeric()) {
            if word.is_empty() || ["nvidia", "r", "tm", "cpu"].contains(&word) {
                continue;
            }
            if !slug.is_empty() {
                slug.push('-');
            }
            slug.push_str(word);
        }
        if slug.is_empty() { "unknown".to_string() } else { slug }
    }
}

/// Returns clocks and power from the driver's tool, or a fact that says that the tool failed.
fn clocks(index: usize) -> Vec<(String, String)> {
    let names: Vec<&str> = QUERIES.iter().map(|(query, _)| *query).collect();
    let output = Command::new("nvidia-smi")
        .arg(format!("--query-gpu={}", names.join(",")))
        .args(["--format=csv,noheader", &format!("--id={index}")])
        .output();
    let text = match output {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).into_owned()
        }
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout).trim().to_string();
            return vec![("clocks".to_string(), format!("nvidia-smi failed: {said}"))];
        }
        Err(error) => return vec![("clocks".to_string(), format!("no nvidia-smi: {error}"))],
    };
    let values = text.lines().next().unwrap_or_default().split(',').map(str::trim);
    QUERIES.iter().zip(values).map(|((_, name), value)| (name.to_string(), value.into())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slugs() {
        let check = |name: &str, expected: &str| {
            let machine = Machine { name: name.to_string(), facts: Vec::new() };
            assert_eq!(machine.slug(), expected);
        };
        check("NVIDIA H200", "h200");
        check("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3");
        check("Intel(R) Xeon(R) CPU @ 2.60GHz", "intel-xeon-2-60ghz");
        check("", "unknown");
    }
}
