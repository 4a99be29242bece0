//! Facts that are known when a run begins, `facts.json`: readers of an unfinished run need them.

use std::collections::BTreeMap;

use deepwell_ir::{SavedActivations, TensorPrecision};
use deepwell_plan::PrecisionFallback;
use deepwell_probe::{Hardware, NumberFormat};
use serde::{Deserialize, Serialize};

use super::memory_table::predicted_peak_bytes;
use super::prepared::Run;
use crate::atomic_write::write_atomically;
use crate::clock::unix_s;
use crate::{Device, Settings, TrainError, World, run_paths};

/// Contents of `facts.json`, written before the first step and at each resumption.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunFacts {
    /// Time of the start or resumption, seconds since 1970.
    pub unix_s: f64,
    /// The settings.
    pub settings: Settings,
    /// The machine.
    pub machine: MachineFacts,
    /// Trained values.
    pub params: u64,
    /// Tokens per step.
    pub tokens_per_step: u64,
    /// Number of ranks.
    pub ranks: usize,
    /// FLOPs per step of rank 0, with recomputation.
    pub flops_per_step: u64,
    /// Recomputation in the backward pass: `none`, `selective` or `full`.
    pub recompute: String,
    /// Storage of activations between the forward and the backward pass.
    #[serde(default, skip_serializing_if = "SavedActivations::is_exact")]
    pub saved_activations: SavedActivations,
    /// Least predicted time of a step.
    pub predicted_step_s: f64,
    /// Predicted peak memory, the sum over ranks that share it.
    pub peak_bytes_predicted: u64,
    /// Predicted bytes of rank 0 by kind at the peak.
    pub bytes_at_peak: BTreeMap<String, u64>,
    /// Planned share of quantized FLOPs of the blocks' linear layers, 0 to 1.
    pub quantized_flop_share_planned: f64,
    /// Format of each tensor, with the reason.
    pub precision: Vec<TensorPrecision>,
    /// Parts of the requested precision that the device does not support, by reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub precision_fallbacks: Vec<PrecisionFallback>,
}

/// The machine of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MachineFacts {
    /// Name of the GPU, otherwise of the processor.
    pub name: String,
    /// Memory of the GPU, otherwise of the machine.
    pub memory_bytes: u64,
    /// Physical cores of the processor.
    pub cores: u32,
    /// Version of the GPU's driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Dense peak of a rank on BF16 operands in FLOP/s; none where unknown, and on an emulator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bf16_flops: Option<f64>,
    /// Origin of the peak.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_source: Option<String>,
}

impl MachineFacts {
    /// The part of the machine that trains. Ranks on a processor share its peak.
    pub(super) fn of(hardware: &Hardware, settings: &Settings) -> MachineFacts {
        let (cpu, cores) = (&hardware.cpu, hardware.cpu.physical_cores);
        let of_cpu = |name: String| MachineFacts {
            name,
            memory_bytes: cpu.memory_total_bytes,
            cores,
            ..MachineFacts::default()
        };
        match settings.device {
            Device::Cuda(index) => match hardware.gpus.get(index) {
                None => of_cpu(format!("cuda:{index}")),
                Some(gpu) => MachineFacts {
                    name: gpu.name.clone(),
                    memory_bytes: gpu.memory_bytes,
                    cores,
                    driver: hardware.software.driver.version().map(str::to_string),
                    peak_bf16_flops: gpu.peak_tflops(NumberFormat::Bf16).map(|peak| peak * 1e12),
                    peak_source: Some(gpu.peak_source.clone()),
                },
            },
            Device::Emulated(_) => of_cpu(format!("{} on {}", settings.device, cpu.model)),
            Device::Cpu => MachineFacts {
                peak_bf16_flops: Some(
                    cpu.peak_gflops(NumberFormat::Bf16) * 1e9 / settings.ranks.max(1) as f64,
                ),
                peak_source: Some("estimate from cores, vectors and clock".to_string()),
                ..of_cpu(cpu.model.clone())
            },
        }
    }
}

impl RunFacts {
    /// The facts of a compiled run.
    pub(super) fn of(run: &Run<'_>, world: &World, machine: &MachineFacts) -> RunFacts {
        let engine = world.first();
        RunFacts {
            unix_s: unix_s(),
            settings: run.settings.clone(),
            machine: machine.clone(),
            params: engine.graph().parameter_count(),
            tokens_per_step: engine.tokens_per_step() as u64,
            ranks: world.size(),
            flops_per_step: engine.program().flops(),
            recompute: engine.plan().recompute.to_string(),
            saved_activations: engine.plan().saved_activations,
            predicted_step_s: engine.prediction().time_s,
            peak_bytes_predicted: predicted_peak_bytes(world),
            bytes_at_peak: engine.prediction().ranks[0].bytes_at_peak.clone(),
            quantized_flop_share_planned: engine.quantized_flop_share_planned().0,
            precision: engine.program().precision.clone(),
            precision_fallbacks: engine.precision_fallbacks().to_vec(),
        }
    }

    /// Writes the facts to the folder of the run.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn write(&self) -> Result<(), TrainError> {
        let text = serde_json::to_string_pretty(self).expect("facts are plain data");
        write_atomically(&self.settings.out.join(run_paths::FACTS), &text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank of a shared processor has its part of the peak, a GPU its own, an emulator none.
    #[test]
    fn peaks_are_those_of_a_rank() {
        let h200 = Hardware::preset("h200-x2").expect("a preset");
        let cpu = h200.cpu.peak_gflops(NumberFormat::Bf16) * 1e9;
        let check = |device: &str, ranks: usize, name: &str, peak: Option<f64>| {
            let device = device.parse().expect("a device");
            let facts = MachineFacts::of(&h200, &Settings { device, ranks, ..Settings::default() });
            assert!(facts.name.contains(name), "{facts:?}");
            assert_eq!(facts.peak_bf16_flops, peak, "{device} with {ranks} ranks");
        };
        check("cpu", 1, &h200.cpu.model, Some(cpu));
        check("cpu", 4, &h200.cpu.model, Some(cpu / 4.0));
        check(
            "cuda:1",
            2,
            "H200",
            h200.gpus[1].peak_tflops(NumberFormat::Bf16).map(|it| it * 1e12),
        );
        check("cuda:7", 1, "cuda:7", None);
        check("emulated:sm90", 1, "emulated:sm90 on ", None);
    }
}
