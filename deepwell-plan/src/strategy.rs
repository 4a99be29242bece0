//! What a search over many GPUs chooses: degrees, schedule, batches, recomputation.

use std::fmt;

use deepwell_ir::Recompute;
use serde::{Deserialize, Serialize};

use crate::schedule::PipelineSchedule;
use crate::{Parallel, PlanError};

/// What the backward pass computes again, as Megatron-LM names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationRecompute {
    /// Nothing.
    None,
    /// Outputs of norms.
    Norms,
    /// Outputs of activation functions.
    Activations,
    /// Both, and queries, keys and values of latent attention; as Megatron-LM has it attention's
    /// scores where they are stored, and the activation function of experts.
    Selective,
    /// Each layer from its input.
    Full,
}

impl ActivationRecompute {
    /// All of them, least work first.
    pub const ALL: [ActivationRecompute; 5] = [
        ActivationRecompute::None,
        ActivationRecompute::Norms,
        ActivationRecompute::Activations,
        ActivationRecompute::Selective,
        ActivationRecompute::Full,
    ];

    /// The rule of the trainer; none where it has no such rule ([`Strategy::parallel`]).
    pub const fn of_trainer(self) -> Recompute {
        match self {
            ActivationRecompute::Full => Recompute::Full,
            ActivationRecompute::Selective => Recompute::Selective,
            _ => Recompute::None,
        }
    }

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            ActivationRecompute::None => "none",
            ActivationRecompute::Norms => "norms",
            ActivationRecompute::Activations => "activations",
            ActivationRecompute::Selective => "selective",
            ActivationRecompute::Full => "full",
        }
    }
}

/// How the layers of a model are divided over pipeline stages.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum LayerSplit {
    /// In equal parts; the first chunks take what is left over.
    #[default]
    Even,
    /// With the embedding and the head as a layer each, so that the first and the last stage have
    /// fewer (`--account-for-embedding-in-pipeline-split` and `-loss-` of Megatron-LM).
    Ends,
    /// With the head as the number of layers that have as many FLOPs
    /// ([`ModelShape::head_layers`](crate::ModelShape::head_layers)).
    Balanced,
    /// As a layout says: [`ModelShape::chunk_layers`](crate::ModelShape::chunk_layers).
    Given,
}

impl LayerSplit {
    /// All of them.
    pub const ALL: [LayerSplit; 4] =
        [LayerSplit::Even, LayerSplit::Ends, LayerSplit::Balanced, LayerSplit::Given];

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            LayerSplit::Even => "even",
            LayerSplit::Ends => "ends",
            LayerSplit::Balanced => "balanced",
            LayerSplit::Given => "given",
        }
    }
}

/// How a model is divided over GPUs, and in which order a step runs.
///
/// Attention's grid is `tp` x `cp` x `dp`, that of the experts `etp` x `ep` x the rest of the same
/// ranks (parallel folding). What of it the trainer runs is a [`Parallel`], which
/// [`Strategy::parallel`] gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Strategy {
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
    /// How layers are divided over stages.
    #[serde(default)]
    pub split: LayerSplit,
    /// Whether master weights and moments are on the host, which updates them.
    #[serde(default)]
    pub offload: bool,
}

impl Strategy {
    /// One device, one micro-batch of one sequence.
    pub const SINGLE: Strategy = Strategy {
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
        split: LayerSplit::Even,
        offload: false,
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

    /// The same ranks as the trainer runs them.
    ///
    /// # Errors
    /// What the trainer does not run yet, named with its value.
    pub fn parallel(&self) -> Result<Parallel, PlanError> {
        let refuse = |what, expected: &str, got: String| {
            Err(PlanError::Request { what, expected: expected.to_string(), got })
        };
        if self.offload {
            let expected = "the GPU, as an optimizer on the host is not there yet";
            return refuse("place of the optimizer", expected, "the host".to_string());
        }
        let kinds = [ActivationRecompute::Norms, ActivationRecompute::Activations];
        if kinds.contains(&self.recompute) {
            let expected = "none, selective or full";
            return refuse("recompute", expected, self.recompute.name().to_string());
        }
        if self.etp > 1 {
            let expected = "1, as experts are whole on their ranks";
            return refuse("tensor-parallel ranks of an expert", expected, self.etp.to_string());
        }
        let parallel = Parallel {
            zero: self.zero,
            tensor: self.tp,
            pipeline: self.pp,
            chunks: self.vpp,
            expert: self.ep,
            // Of one stage there is no order.
            schedule: if self.pp > 1 { self.schedule } else { PipelineSchedule::OneFOneB },
            context: self.cp,
            ..Parallel::data(self.dp * self.cp)
        };
        parallel.check()?;
        Ok(parallel)
    }

    /// Ranks over which the sequence is divided between the GEMMs: `tp` with sequence parallelism.
    pub fn sequence_ranks(&self) -> usize {
        if self.sp { self.tp } else { 1 }
    }
}

impl fmt::Display for Strategy {
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
            f.write_str(match self.split {
                LayerSplit::Even => "",
                LayerSplit::Ends => " ends as layers",
                LayerSplit::Balanced => " head as layers",
                LayerSplit::Given => " layers as given",
            })?;
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
        )?;
        if self.offload { f.write_str(" optimizer on the host") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_trainer_runs() {
        let check = |at: Strategy, expected: Result<Parallel, &str>| match (at.parallel(), expected)
        {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, expected) => panic!("{at}: {found:?}, expected {expected:?}"),
        };
        let dp = Strategy { dp: 4, ..Strategy::SINGLE };
        check(Strategy::SINGLE, Ok(Parallel::default()));
        check(dp, Ok(Parallel::data(4)));
        check(Strategy { zero: 1, ..dp }, Ok(Parallel { zero: 1, ..Parallel::data(4) }));
        check(Strategy { zero: 3, ..dp }, Ok(Parallel { zero: 3, ..Parallel::data(4) }));
        check(Strategy { zero: 4, ..dp }, Err("ZeRO stage: expected 0, 1: optimizer state"));
        check(Strategy { cp: 2, ..dp }, Ok(Parallel { context: 2, ..Parallel::data(8) }));
        let interleaved = Parallel { pipeline: 2, chunks: 2, ..Parallel::data(4) };
        check(Strategy { pp: 2, vpp: 2, ..dp }, Ok(interleaved));
        check(Strategy { vpp: 2, ..dp }, Err("model chunks of a stage: expected 1 where there is"));
        let stages = Strategy { pp: 2, schedule: PipelineSchedule::ZbH1, ..dp };
        let deferred =
            Parallel { pipeline: 2, schedule: PipelineSchedule::ZbH1, ..Parallel::data(4) };
        check(stages, Ok(deferred));
        let twice = Strategy { schedule: PipelineSchedule::ZbH2, ..stages };
        check(twice, Err("schedule: expected 1f1b or zb-h1"));
        check(Strategy { offload: true, ..dp }, Err("an optimizer on the host is not there yet"));
        let norms = Strategy { recompute: ActivationRecompute::Norms, ..dp };
        check(norms, Err("recompute: expected none, selective or full, got norms"));
        let folded = Parallel { tensor: 2, expert: 4, ..Parallel::data(4) };
        check(Strategy { tp: 2, ep: 4, ..dp }, Ok(folded));
        check(Strategy { tp: 2, ep: 4, etp: 2, ..dp }, Err("experts are whole on their ranks"));
    }
}
