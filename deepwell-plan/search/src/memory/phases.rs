//! Memory of a rank in the phases of a run.

use serde::{Deserialize, Serialize};

use super::{StageMemory, in_blocks};

/// A phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// States are allocated, before the first step.
    Loaded,
    /// Forward and backward passes.
    Passes,
    /// The optimizer: activations are freed.
    Optimizer,
    /// Staging of a checkpoint on the host.
    Checkpoint,
}

impl Phase {
    /// All phases in order.
    pub const ALL: [Phase; 4] = [Phase::Loaded, Phase::Passes, Phase::Optimizer, Phase::Checkpoint];

    /// Name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Loaded => "loaded",
            Phase::Passes => "passes",
            Phase::Optimizer => "optimizer",
            Phase::Checkpoint => "checkpoint",
        }
    }
}

/// Bytes of a rank at the peak of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseMemory {
    /// The phase.
    pub phase: Phase,
    /// Bytes allocated.
    pub allocated: f64,
    /// Bytes reserved by the allocator, which never returns memory to the device.
    pub reserved: f64,
    /// CUDA context, NCCL and CUDA graphs.
    pub outside: f64,
    /// Pinned memory and staging of the host.
    pub host: f64,
}

impl StageMemory {
    /// The phases of a run.
    pub fn phases(&self) -> [PhaseMemory; 4] {
        let states = [self.parameters, self.gradients, self.optimizer];
        let loaded: f64 = states.iter().sum();
        Phase::ALL.map(|phase| {
            let allocated = match phase {
                Phase::Loaded => loaded,
                Phase::Passes => self.allocated(),
                Phase::Optimizer => loaded + self.workspace,
                Phase::Checkpoint => loaded,
            };
            let reserved = match phase {
                Phase::Loaded => states.into_iter().map(in_blocks).sum(),
                _ => self.reserved(),
            };
            let host = match phase {
                Phase::Checkpoint => self.host,
                _ => self.host_batches + self.host_optimizer,
            };
            PhaseMemory { phase, allocated, reserved, outside: self.outside, host }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_hold_what_they_need() {
        let gb = 1e9;
        let memory = StageMemory {
            parameters: 2.0 * gb,
            gradients: 4.0 * gb,
            optimizer: 12.0 * gb,
            activations: 30.0 * gb,
            logits: gb,
            workspace: gb,
            outside: 3.0 * gb,
            host_batches: 0.1 * gb,
            host_optimizer: 0.0,
            host: 14.1 * gb,
        };
        let phases = memory.phases();
        let allocated = phases.map(|phase| (phase.allocated / gb).round());
        assert_eq!(allocated, [18.0, 50.0, 19.0, 18.0]);
        // The allocator keeps the memory of the passes; only a checkpoint is staged.
        assert_eq!(phases[2].reserved, memory.reserved());
        assert!(phases[0].reserved < 18.1 * gb);
        let host = phases.map(|phase| phase.host / gb);
        assert_eq!(host, [0.1, 0.1, 0.1, 14.1]);
    }
}
