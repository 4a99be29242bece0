//! The degrees of a distributed plan.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::schedule::PipelineSchedule;

/// What the backward pass computes again, as Megatron-LM names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationRecompute {
    /// Nothing.
    None,
    /// Attention's scores where they are stored, the activation function of experts.
    Selective,
    /// Each layer from its input.
    Full,
}

impl ActivationRecompute {
    /// All of them, least work first.
    pub const ALL: [ActivationRecompute; 3] =
        [ActivationRecompute::None, ActivationRecompute::Selective, ActivationRecompute::Full];

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            ActivationRecompute::None => "none",
            ActivationRecompute::Selective => "selective",
            ActivationRecompute::Full => "full",
        }
    }
}

/// How many ways each dimension is divided.
///
/// It maps to a [`Plan`](crate::Plan) as follows: `micro_batch`, `micro_batches` and `recompute`
/// are the plan's own; each rank's program is what the shard pass makes of the degrees. Attention's
/// grid is `tp` x `cp` x `dp`, that of the experts `etp` x `ep` x the rest of the same ranks
/// (parallel folding).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Parallelism {
    /// Pipeline stages.
    pub pp: usize,
    /// Model chunks of a stage.
    pub vpp: usize,
    /// Order of the stages' ops.
    pub schedule: PipelineSchedule,
    /// Tensor-parallel ranks.
    pub tp: usize,
    /// Whether norms and dropout are divided over the sequence, too.
    pub sp: bool,
    /// Context-parallel ranks.
    pub cp: usize,
    /// Expert-parallel ranks.
    pub ep: usize,
    /// Tensor-parallel ranks of one expert.
    pub etp: usize,
    /// Data-parallel ranks.
    pub dp: usize,
    /// ZeRO stage: 0 none, 1 optimizer states, 2 and gradients, 3 and parameters.
    pub zero: u8,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches of a step on one data-parallel rank.
    pub micro_batches: usize,
    /// What the backward computes again.
    pub recompute: ActivationRecompute,
}

impl Parallelism {
    /// One device, one micro-batch of one sequence.
    pub const SINGLE: Parallelism = Parallelism {
        pp: 1,
        vpp: 1,
        schedule: PipelineSchedule::OneFOneB,
        tp: 1,
        sp: false,
        cp: 1,
        ep: 1,
        etp: 1,
        dp: 1,
        zero: 0,
        micro_batch: 1,
        micro_batches: 1,
        recompute: ActivationRecompute::None,
    };

    /// GPUs.
    pub fn gpus(&self) -> usize {
        self.pp * self.tp * self.cp * self.dp
    }

    /// Data-parallel ranks of the experts: those that hold the same ones.
    pub fn expert_dp(&self) -> usize {
        (self.tp * self.cp * self.dp / (self.ep * self.etp)).max(1)
    }

    /// Sequences of a step.
    pub fn global_batch(&self) -> usize {
        self.micro_batch * self.micro_batches * self.dp
    }

    /// Ranks over which the sequence is divided between the GEMMs: `tp` with sequence parallelism.
    pub fn sequence_ranks(&self) -> usize {
        if self.sp { self.tp } else { 1 }
    }
}

impl fmt::Display for Parallelism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TP{}", self.tp)?;
        if self.sp && self.tp > 1 {
            f.write_str("+SP")?;
        }
        if self.pp > 1 {
            write!(f, " PP{}", self.pp)?;
            if self.vpp > 1 {
                write!(f, " VPP{}", self.vpp)?;
            }
            write!(f, " {}", self.schedule)?;
        }
        if self.cp > 1 {
            write!(f, " CP{}", self.cp)?;
        }
        if self.ep > 1 || self.etp > 1 {
            write!(f, " EP{}", self.ep)?;
            if self.etp > 1 {
                write!(f, " ETP{}", self.etp)?;
            }
        }
        write!(
            f,
            " DP{} ZeRO-{} micro-batch {} x {} recompute {}",
            self.dp,
            self.zero,
            self.micro_batch,
            self.micro_batches,
            self.recompute.name()
        )
    }
}
