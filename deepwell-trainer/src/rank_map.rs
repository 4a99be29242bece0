//! The part of the model on each rank.

use deepwell_plan::{DryRun, Plan};
use serde::{Deserialize, Serialize};

/// Part of a plan on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankCoordinates {
    /// The rank.
    pub rank: u32,
    /// Index of the part of a step's sequences, from 0.
    pub data: usize,
    /// Index of the tensor-parallel part.
    pub tensor: usize,
    /// Index of the pipeline stage.
    pub pipeline: usize,
    /// Index of the expert-parallel part.
    pub expert: usize,
    /// Layers of the rank, as `0-3`; with several chunks one range after another.
    pub layers: String,
    /// Predicted peak memory of the rank.
    pub peak_bytes: u64,
    /// Bytes through the rank's link in a step.
    pub bytes_on_link: u64,
}

/// Returns the places of all ranks of a plan for the given number of layers.
pub(crate) fn rank_map(plan: &Plan, prediction: &DryRun, layers: usize) -> Vec<RankCoordinates> {
    let parallel = plan.parallel;
    let coordinates = |rank: usize| {
        let is_of = |id: u32| id as usize == rank;
        let report = prediction
            .ranks
            .iter()
            .find(|report| is_of(report.rank) || report.alike.iter().any(|&id| is_of(id)));
        let pipeline = parallel.pipeline_place(rank);
        RankCoordinates {
            rank: rank as u32,
            data: parallel.data_place(rank),
            tensor: parallel.tensor_place(rank),
            pipeline,
            expert: parallel.expert_place(rank),
            layers: layers_of(&plan.stages, (pipeline, parallel.pipeline), layers),
            peak_bytes: report.map_or(0, |report| report.peak_bytes),
            bytes_on_link: report.map_or(0, |report| report.bytes_on_link),
        }
    };
    (0..parallel.world_size()).map(coordinates).collect()
}

/// The layers of stage `place` in a pipeline of `ranks` stages, whose chunks have `stages` layers.
fn layers_of(stages: &[usize], (place, ranks): (usize, usize), all: usize) -> String {
    let range = |begin: usize, count: usize| match count {
        0 => "none".to_string(),
        1 => begin.to_string(),
        _ => format!("{begin}-{}", begin + count - 1),
    };
    if stages.is_empty() {
        return range(0, all);
    }
    let own = (place..stages.len()).step_by(ranks.max(1));
    let of_stage = |stage: usize| range(stages[..stage].iter().sum(), stages[stage]);
    own.map(of_stage).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_places() {
        for (stages, place, ranks, expected) in [
            (&[][..], 0, 1, "0-3"),
            (&[3, 1], 0, 2, "0-2"),
            (&[3, 1], 1, 2, "3"),
            // Two chunks each: stages 0 and 2, 1 and 3.
            (&[1, 1, 1, 1], 0, 2, "0, 2"),
            (&[2, 1, 0, 1], 0, 2, "0-1, none"),
            (&[2, 1, 0, 1], 1, 2, "2, 3"),
        ] {
            assert_eq!(layers_of(stages, (place, ranks), 4), expected, "{stages:?} {place}");
        }
    }
}
