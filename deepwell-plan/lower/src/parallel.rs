//! Degrees of parallelism, and the coordinates and groups of ranks.

use std::fmt;

use deepwell_ir::{ProcessGroup, Ranks, SplitOver};
use serde::{Deserialize, Serialize};

use crate::PlanError;
use crate::schedule::PipelineSchedule;

/// The degrees of parallelism of a plan.
///
/// Ranks are numbered with the tensor place fastest, then the data place, then the pipeline place,
/// the default of Megatron-LM: ranks with the most communication are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parallel {
    /// Ranks that split the tokens of a step and sum their gradients.
    pub data: usize,
    /// Context parallelism: neighbours among the data-parallel ranks that split each sequence.
    /// Other data-parallel ranks have different sequences.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub context: usize,
    /// ZeRO stage, by what data-parallel ranks shard: 0 nothing, 1 the optimizer state, 2 also the
    /// gradients, 3 also the weights.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub zero: u8,
    /// Tensor parallelism: ranks that split the heads and columns of each layer, and the tokens
    /// between GEMMs (sequence parallelism).
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub tensor: usize,
    /// Pipeline parallelism: ranks that split the layers.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub pipeline: usize,
    /// Chunks of layers of each pipeline rank. With several chunks (virtual stages) the schedule is
    /// interleaved 1F1B, and chunk `c` of place `p` among `n` ranks is the stage `c n + p` of the
    /// model.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub chunks: usize,
    /// Expert parallelism: ranks that split the experts, neighbours among the tensor-parallel and
    /// data-parallel ranks of a stage. An expert is whole on its rank: tensor-parallel ranks split
    /// attention by heads, but experts by tokens.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub expert: usize,
    /// Order of the passes of pipeline stages; interleaved for several chunks.
    #[serde(default, skip_serializing_if = "is_default")]
    pub schedule: PipelineSchedule,
}

fn is_default(schedule: &PipelineSchedule) -> bool {
    *schedule == PipelineSchedule::default()
}

fn is_zero(stage: &u8) -> bool {
    *stage == 0
}

fn one() -> usize {
    1
}

fn is_one(degree: &usize) -> bool {
    *degree == 1
}

impl Default for Parallel {
    fn default() -> Parallel {
        Parallel::data(1)
    }
}

impl Parallel {
    /// Data parallelism over `ranks` ranks.
    pub const fn data(ranks: usize) -> Parallel {
        let schedule = PipelineSchedule::OneFOneB;
        let (tensor, pipeline, chunks, expert, context) = (1, 1, 1, 1, 1);
        Parallel { data: ranks, context, zero: 0, tensor, pipeline, chunks, expert, schedule }
    }

    /// Whether the world has one rank.
    pub fn is_single(&self) -> bool {
        self.world_size() == 1
    }

    /// Number of ranks in the world.
    pub const fn world_size(&self) -> usize {
        self.tensor * self.data * self.pipeline
    }

    /// A rank of the world with its groups. Groups of one rank are left out, except the group of
    /// ranks with the same experts if the optimizer state is sharded; a world of one rank has no
    /// groups.
    pub fn ranks(&self, rank: usize) -> Ranks {
        let Parallel { data, tensor, pipeline, expert, .. } = *self;
        let (at_tensor, at_data) = (self.tensor_place(rank), self.data_place(rank));
        let at_pipeline = self.pipeline_place(rank);
        let among_data = |at: usize| self.rank_at(at_tensor, at, at_pipeline);
        let first_of_sequence = at_data - self.context_place(rank);
        let among_context = |at: usize| among_data(first_of_sequence + at);
        // Ranks of this stage by token place, and the first rank of the expert-parallel group.
        let among_tokens = |at: usize| (at_pipeline * data * tensor + at) as u32;
        let at_tokens = self.token_place(rank);
        let first = at_tokens - at_tokens % expert.max(1);
        // With one expert-parallel rank, experts are replicated like all other parameters.
        let same_experts = match expert {
            0 | 1 => Vec::new(),
            _ => (at_tokens % expert..tensor * data).step_by(expert).map(among_tokens).collect(),
        };
        let of = |name: &str, ranks: Vec<u32>| ProcessGroup { name: name.to_string(), ranks };
        let groups = [
            of(ProcessGroup::DATA, (0..data).map(among_data).collect()),
            of(
                ProcessGroup::TENSOR,
                (0..tensor).map(|at| self.rank_at(at, at_data, at_pipeline)).collect(),
            ),
            of(
                ProcessGroup::PIPELINE,
                (0..pipeline).map(|at| self.rank_at(at_tensor, at_data, at)).collect(),
            ),
            of(ProcessGroup::EXPERT, (first..first + expert).map(among_tokens).collect()),
            of(ProcessGroup::EXPERT_DATA, same_experts),
            of(ProcessGroup::EMBEDDING, self.ends_of_pipeline(rank)),
            of(ProcessGroup::CONTEXT, (0..self.context).map(among_context).collect()),
        ];
        let shares_experts = |group: &ProcessGroup| {
            let may_be_one = self.shards_optimizer() && expert > 1;
            may_be_one && group.name == ProcessGroup::EXPERT_DATA
        };
        let is_there = |group: &ProcessGroup| group.ranks.len() > 1 || shares_experts(group);
        let groups = groups.into_iter().filter(is_there).collect();
        Ranks { rank: rank as u32, world_size: self.world_size() as u32, groups }
    }

    /// Whether ranks shard the optimizer state.
    pub const fn shards_optimizer(&self) -> bool {
        self.zero > 0 && self.data > 1
    }

    /// Whether ranks shard the gradients, too (ZeRO 2 and 3).
    pub const fn shards_gradients(&self) -> bool {
        self.zero >= 2 && self.shards_optimizer()
    }

    /// Whether ranks shard the weights, too, and gather them per layer (ZeRO 3).
    pub const fn shards_weights(&self) -> bool {
        self.zero >= 3 && self.shards_optimizer()
    }

    /// Number of consecutive parts of the model: stages times chunks.
    pub const fn stages(&self) -> usize {
        self.pipeline * self.chunks
    }

    /// The first and the last stage of a rank's pipeline, if the rank is on one of the two.
    fn ends_of_pipeline(&self, rank: usize) -> Vec<u32> {
        let last = self.pipeline.saturating_sub(1);
        let at = |stage| self.rank_at(self.tensor_place(rank), self.data_place(rank), stage);
        match self.pipeline_place(rank) {
            place if last > 0 && (place == 0 || place == last) => vec![at(0), at(last)],
            _ => Vec::new(),
        }
    }

    fn rank_at(&self, tensor: usize, data: usize, pipeline: usize) -> u32 {
        ((pipeline * self.data + data) * self.tensor + tensor) as u32
    }

    /// Number of ranks, or context-parallel groups, with different sequences.
    pub const fn batch_ranks(&self) -> usize {
        self.data / self.context
    }

    /// Index of a rank's part of the sequences of a step; the sequences of a part are contiguous.
    pub const fn batch_place(&self, rank: usize) -> usize {
        self.data_place(rank) / self.context
    }

    /// Index of a rank's part of each of its sequences.
    pub const fn context_place(&self, rank: usize) -> usize {
        self.data_place(rank) % self.context
    }

    /// Index of a rank's part of the tokens of a step.
    pub const fn data_place(&self, rank: usize) -> usize {
        rank / self.tensor % self.data
    }

    /// The first rank with the given part of the tokens.
    pub const fn first_at(&self, data_place: usize) -> usize {
        data_place * self.tensor
    }

    /// Index of a rank's part of each layer.
    pub const fn tensor_place(&self, rank: usize) -> usize {
        rank % self.tensor
    }

    /// A rank's pipeline place, in the order of the layers.
    pub const fn pipeline_place(&self, rank: usize) -> usize {
        rank / (self.tensor * self.data)
    }

    /// A rank's place among the ranks of its stage, which all have different tokens.
    pub const fn token_place(&self, rank: usize) -> usize {
        rank % (self.tensor * self.data)
    }

    /// Index of a rank's part of the experts of each layer.
    pub const fn expert_place(&self, rank: usize) -> usize {
        self.token_place(rank) % self.expert
    }

    /// Index of a rank's slice of split parameters.
    pub const fn split_place(&self, rank: usize, over: SplitOver) -> usize {
        match over {
            SplitOver::Tensor => self.tensor_place(rank),
            SplitOver::Expert => self.expert_place(rank),
        }
    }

    /// A rank's place among the ranks with the same parameters, over which optimizer state is
    /// sharded.
    pub const fn shard_place(&self, rank: usize, over: SplitOver) -> usize {
        match over {
            SplitOver::Tensor => self.data_place(rank),
            SplitOver::Expert => self.token_place(rank) / self.expert,
        }
    }

    /// The class of a rank. Ranks of a class have the same part of the model and the same program
    /// ([`deepwell_ir::Program::for_rank`]): equal tensor, context, pipeline and expert place.
    pub const fn class(&self, rank: usize) -> [usize; 4] {
        let (context, expert) = (self.context_place(rank), self.expert_place(rank));
        [self.tensor_place(rank), context, self.pipeline_place(rank), expert]
    }

    /// Sequences per step of one rank.
    ///
    /// # Errors
    /// A batch that ranks cannot split evenly.
    pub fn rows_of_rank(&self, global_batch: usize) -> Result<usize, PlanError> {
        let ranks = self.batch_ranks();
        if ranks > 0 && global_batch.is_multiple_of(ranks) {
            return Ok(global_batch / ranks);
        }
        Err(PlanError::Request {
            what: "batch size",
            expected: format!("a multiple of the {ranks} ranks that split it"),
            got: global_batch.to_string(),
        })
    }

    /// Checks requirements common to all programs.
    ///
    /// # Errors
    /// An invalid or unsupported degree or ZeRO stage.
    pub fn check(&self) -> Result<(), PlanError> {
        let Parallel { data, context, zero, tensor, pipeline, chunks, expert, schedule } = *self;
        let refuse = |what, expected: &str, got: String| {
            Err(PlanError::Request { what, expected: expected.to_string(), got })
        };
        if zero > 3 {
            let expected = "0, 1: optimizer state, 2: and gradients, 3: and weights";
            return refuse("ZeRO stage", expected, zero.to_string());
        }
        for (what, degree) in [
            ("data-parallel ranks", data),
            ("context-parallel ranks", context),
            ("tensor-parallel ranks", tensor),
            ("pipeline stages", pipeline),
            ("expert-parallel ranks", expert),
            ("model chunks of a stage", chunks),
        ] {
            if degree == 0 {
                return refuse(what, "at least 1", degree.to_string());
            }
        }
        if !data.is_multiple_of(context) {
            let expected = format!("a divisor of the {data} ranks that split the tokens of a step");
            return refuse("context-parallel ranks", &expected, context.to_string());
        }
        if chunks > 1 && pipeline == 1 {
            let expected = "1 where there is one stage: an interleaved schedule fills the time in \
                            which stages wait for each other";
            return refuse("model chunks of a stage", expected, chunks.to_string());
        }
        match schedule {
            PipelineSchedule::OneFOneB => {}
            PipelineSchedule::ZbH1 if pipeline == 1 => {
                let expected = "1f1b where there is one stage: a zero-bubble schedule fills the \
                                time in which stages wait for each other";
                return refuse("schedule", expected, schedule.to_string());
            }
            PipelineSchedule::ZbH1 if chunks > 1 => {
                let expected = format!("1 for {schedule}: it is of whole stages");
                return refuse("model chunks of a stage", &expected, chunks.to_string());
            }
            PipelineSchedule::ZbH1 => {}
            PipelineSchedule::ZbH2 => {
                let expected = "1f1b or zb-h1 (zb-h2 saves time only if stages do not wait for the \
                                norm of all gradients, and the trainer's stages do)";
                return refuse("schedule", expected, schedule.to_string());
            }
        }
        if expert > 1 {
            let got = expert.to_string();
            let ranks = tensor * data;
            if !ranks.is_multiple_of(expert) {
                let expected = match tensor {
                    1 => format!("a divisor of the {data} data-parallel ranks"),
                    _ => format!("a divisor of the {tensor} x {data} = {ranks} ranks of a stage"),
                };
                return refuse("expert-parallel ranks", &expected, got);
            }
        }
        Ok(())
    }
}

impl fmt::Display for Parallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "data {}", self.data)?;
        for (name, degree) in [
            ("context", self.context),
            ("tensor", self.tensor),
            ("pipeline", self.pipeline),
            ("chunks", self.chunks),
            ("expert", self.expert),
        ] {
            if degree > 1 {
                write!(f, ", {name} {degree}")?;
            }
        }
        if self.zero > 0 {
            write!(f, ", ZeRO {}", self.zero)?;
        }
        match self.schedule {
            PipelineSchedule::OneFOneB => Ok(()),
            schedule => write!(f, ", {schedule}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_counted_tensor_first_and_pipeline_last() {
        let parallel = Parallel { tensor: 2, pipeline: 2, expert: 2, ..Parallel::data(4) };
        const NAMES: [&str; 5] = ["data", "tensor", "pipeline", "expert", "expert_data"];
        assert_eq!(parallel.world_size(), 16);
        let check = |rank: usize, places: [usize; 3], groups: [&[u32]; 5]| {
            let got = [parallel.tensor_place(rank), parallel.data_place(rank)];
            assert_eq!([got[0], got[1], parallel.pipeline_place(rank)], places, "{rank}");
            let ranks = parallel.ranks(rank);
            ranks.check().unwrap();
            for (name, members) in NAMES.iter().zip(groups) {
                assert_eq!(ranks.named(name).unwrap().1.ranks, members, "{rank} {name}");
            }
        };
        check(0, [0, 0, 0], [&[0, 2, 4, 6], &[0, 1], &[0, 8], &[0, 1], &[0, 2, 4, 6]]);
        check(5, [1, 2, 0], [&[1, 3, 5, 7], &[4, 5], &[5, 13], &[4, 5], &[1, 3, 5, 7]]);
        check(15, [1, 3, 1], [&[9, 11, 13, 15], &[14, 15], &[7, 15], &[14, 15], &[9, 11, 13, 15]]);
        // Over both grids: the experts of a layer are on two tensor-parallel groups.
        let wide = Parallel { expert: 4, ..parallel };
        let named = |rank: usize, name: &str| wide.ranks(rank).named(name).unwrap().1.ranks.clone();
        assert_eq!(named(13, "expert"), [12, 13, 14, 15]);
        assert_eq!(named(13, "expert_data"), [9, 13]);
        for over in [SplitOver::Tensor, SplitOver::Expert] {
            assert_eq!(wide.split_place(13, over), 1);
        }
        assert_eq!(
            [SplitOver::Tensor, SplitOver::Expert].map(|it| wide.shard_place(13, it)),
            [2, 1]
        );
        // Alone with its experts, a rank is in a group of its own.
        let all = Parallel { expert: 8, zero: 1, ..parallel };
        assert_eq!(all.ranks(9).named("expert_data").unwrap().1.ranks, [9]);
        let named = |parallel: Parallel| -> Vec<String> {
            parallel.ranks(0).groups.into_iter().map(|group| group.name).collect()
        };
        assert_eq!(named(Parallel::data(3)), ["data"]);
        assert_eq!(named(Parallel { tensor: 2, ..Parallel::data(1) }), ["tensor"]);
        assert!(Parallel::default().ranks(0).is_single());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        use PipelineSchedule::{ZbH1, ZbH2};
        let with = |data, expert| Parallel { expert, ..Parallel::data(data) };
        for (parallel, expected) in [
            (with(4, 2), None),
            (with(4, 4), None),
            (with(4, 0), Some("expert-parallel ranks: expected at least 1, got 0")),
            (with(4, 3), Some("a divisor of the 4 data-parallel ranks, got 3")),
            (Parallel { tensor: 2, ..with(2, 2) }, None),
            (Parallel { tensor: 2, ..with(1, 2) }, None),
            (Parallel { tensor: 2, ..with(2, 3) }, Some("a divisor of the 2 x 2 = 4 ranks of a")),
            (Parallel { pipeline: 2, zero: 1, ..with(2, 2) }, None),
            (Parallel { zero: 3, ..with(4, 1) }, None),
            (Parallel { zero: 4, ..with(4, 1) }, Some("ZeRO stage: expected 0, 1: optimizer")),
            (Parallel { zero: 3, tensor: 2, pipeline: 2, ..with(2, 2) }, None),
            (Parallel { pipeline: 2, schedule: ZbH1, ..with(2, 2) }, None),
            (Parallel { schedule: ZbH1, ..with(2, 1) }, Some("1f1b where there is one stage")),
            (
                Parallel { pipeline: 2, chunks: 2, schedule: ZbH1, ..with(2, 1) },
                Some("model chunks of a stage: expected 1 for zb-h1: it is of whole stages, got 2"),
            ),
            (
                Parallel { pipeline: 2, schedule: ZbH2, ..with(2, 1) },
                Some("1f1b or zb-h1 (zb-h2 saves"),
            ),
        ] {
            let error = parallel.check().err().map(|error| error.to_string());
            let is_expected = match (&error, expected) {
                (Some(error), Some(expected)) => error.contains(expected),
                (error, expected) => error.is_none() && expected.is_none(),
            };
            assert!(is_expected, "{parallel}: {error:?}, not {expected:?}");
        }
    }

    #[test]
    fn plans_of_before_have_one_rank_of_what_they_do_not_name() {
        let old: Parallel = serde_json::from_str(r#"{"data": 4, "zero": 1}"#).unwrap();
        assert_eq!(old, Parallel { zero: 1, ..Parallel::data(4) });
        assert_eq!(serde_json::to_string(&old).unwrap(), r#"{"data":4,"zero":1}"#);
        let parallel = Parallel { tensor: 2, ..Parallel::data(2) };
        let json = serde_json::to_string(&parallel).unwrap();
        assert_eq!(serde_json::from_str::<Parallel>(&json).unwrap(), parallel);
        assert_eq!(
            (parallel.to_string(), json.contains("expert")),
            ("data 2, tensor 2".into(), false)
        );
    }
}
