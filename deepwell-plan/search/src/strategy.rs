//! The choices of a search over many GPUs: degrees, schedule, batches, recomputation.

use std::fmt;

use deepwell_ir::Recompute;
use serde::{Deserialize, Serialize};

use deepwell_lower::schedule::PipelineSchedule;
use deepwell_lower::{Parallel, PlanError};

/// Recomputation in the backward pass, with Megatron-LM's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationRecompute {
    /// Nothing.
    None,
    /// Outputs of norms.
    Norms,
    /// Outputs of activation functions.
    Activations,
    /// Outputs of norms and activation functions, and latent attention's queries, keys and values.
    /// In Megatron-LM: stored attention scores, and the activation function of experts.
    Selective,
    /// Each layer from its input.
    Full,
}

impl ActivationRecompute {
    /// All rules, least work first.
    pub const ALL: [ActivationRecompute; 5] = [
        ActivationRecompute::None,
        ActivationRecompute::Norms,
        ActivationRecompute::Activations,
        ActivationRecompute::Selective,
        ActivationRecompute::Full,
    ];

    /// The trainer's rule.
    pub const fn of_trainer(self) -> Recompute {
        match self {
            ActivationRecompute::None => Recompute::None,
            ActivationRecompute::Norms => Recompute::Norms,
            ActivationRecompute::Activations => Recompute::Activations,
            ActivationRecompute::Selective => Recompute::Selective,
            ActivationRecompute::Full => Recompute::Full,
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

/// Division of a model's layers over pipeline stages.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum LayerSplit {
    /// Equal parts; the first chunks take the remainder.
    #[default]
    Even,
    /// The embedding and the head count as a layer each, so the first and the last stage have fewer
    /// layers (`--account-for-embedding-in-pipeline-split` and `-loss-` of Megatron-LM).
    Ends,
    /// The head counts as the number of layers with the same FLOPs
    /// ([`ModelShape::head_layers`](crate::ModelShape::head_layers)).
    Balanced,
    /// Given by a layout: [`ModelShape::chunk_layers`](crate::ModelShape::chunk_layers).
    Given,
}

impl LayerSplit {
    /// All divisions.
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

/// Division of a model over GPUs, and the order of a step.
///
/// Attention's grid is `tp` x `cp` x `dp`; the experts' grid is `etp` x `ep` x the remaining factor
/// of the same ranks (parallel folding). [`Strategy::parallel`] converts a strategy supported by
/// the trainer to a [`Parallel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Strategy {
    /// Pipeline stages.
    pub pp: usize,
    /// Model chunks per stage.
    pub vpp: usize,
    /// Order of the stages' ops.
    pub schedule: PipelineSchedule,
    /// Tensor-parallel ranks.
    pub tp: usize,
    /// Sequence parallelism: whether norms and dropout are split over the sequence, too.
    pub sp: bool,
    /// Context-parallel ranks.
    pub cp: usize,
    /// Expert-parallel ranks.
    pub ep: usize,
    /// Tensor-parallel ranks of one expert.
    pub etp: usize,
    /// Data-parallel ranks.
    pub dp: usize,
    /// ZeRO stage: 0 none, 1 optimizer states, 2 also gradients, 3 also parameters.
    pub zero: u8,
    /// Sequences per micro-batch.
    pub micro_batch: usize,
    /// Micro-batches per step on one data-parallel rank.
    pub micro_batches: usize,
    /// Recomputation in the backward pass.
    pub recompute: ActivationRecompute,
    /// Division of layers over stages.
    #[serde(default)]
    pub split: LayerSplit,
    /// Whether master weights and moments are kept on the host.
    #[serde(default)]
    pub offload: bool,
}

impl Strategy {
    /// A single device, with one micro-batch of one sequence.
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

    /// Number of GPUs.
    pub fn gpus(&self) -> usize {
        self.pp * self.tp * self.cp * self.dp
    }

    /// Data-parallel ranks of the experts: ranks with the same experts.
    pub fn expert_dp(&self) -> usize {
        (self.tp * self.cp * self.dp / (self.ep * self.etp)).max(1)
    }

    /// Sequences per step.
    pub fn global_batch(&self) -> usize {
        self.micro_batch * self.micro_batches * self.dp
    }

    /// Converts to the trainer's degrees.
    ///
    /// # Errors
    /// A choice unsupported by the trainer, with its value.
    pub fn parallel(&self) -> Result<Parallel, PlanError> {
        let refuse = |what, expected: &str, got: String| {
            Err(PlanError::Request { what, expected: expected.to_string(), got })
        };
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
            // A single stage has no schedule.
            schedule: if self.pp > 1 { self.schedule } else { PipelineSchedule::OneFOneB },
            context: self.cp,
            ..Parallel::data(self.dp * self.cp)
        };
        parallel.check()?;
        Ok(parallel)
    }

    /// Ranks that split the sequence between GEMMs: `tp` with sequence parallelism.
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
        check(Strategy { offload: true, ..dp }, Ok(Parallel::data(4)));
        let norms = Strategy { recompute: ActivationRecompute::Norms, ..dp };
        check(norms, Ok(dp.parallel().unwrap()));
        let folded = Parallel { tensor: 2, expert: 4, ..Parallel::data(4) };
        check(Strategy { tp: 2, ep: 4, ..dp }, Ok(folded));
        check(Strategy { tp: 2, ep: 4, etp: 2, ..dp }, Err("experts are whole on their ranks"));
    }
}
