//! Which layers a stage of a pipeline has.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{LayerSplit, ModelShape, Strategy};

/// What a pipeline stage holds of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageLayers {
    /// Layers of each chunk. Those past the model's last are as large as that: of multi-token
    /// prediction.
    pub chunks: Vec<Range<usize>>,
    /// Whether the embedding is here.
    pub has_embedding: bool,
    /// Whether the output head and the loss are here.
    pub has_head: bool,
}

impl StageLayers {
    /// Stage `stage` where layers are divided evenly; the first chunks take what is left over.
    pub fn even(layers: usize, stage: usize, pp: usize, vpp: usize) -> StageLayers {
        let parts = pp * vpp;
        let start = |part: usize| part * (layers / parts) + part.min(layers % parts);
        let of_chunk = |chunk: usize| {
            let part = chunk * pp + stage;
            start(part)..start(part + 1)
        };
        StageLayers {
            chunks: (0..vpp).map(of_chunk).collect(),
            has_embedding: stage == 0,
            has_head: stage + 1 == pp,
        }
    }

    /// Stage `stage` of a plan.
    pub fn of(shape: &ModelShape, at: &Strategy, stage: usize) -> StageLayers {
        match at.split {
            LayerSplit::Even => StageLayers::even(shape.layers, stage, at.pp, at.vpp),
            LayerSplit::Ends => StageLayers::with_ends(shape.layers, stage, at.pp, at.vpp),
        }
    }

    /// As [`StageLayers::even`] with the embedding and the head as a layer each.
    fn with_ends(layers: usize, stage: usize, pp: usize, vpp: usize) -> StageLayers {
        let all = StageLayers::even(layers + 2, stage, pp, vpp);
        let without = |chunk: Range<usize>| {
            chunk.start.saturating_sub(1).min(layers)..chunk.end.saturating_sub(1).min(layers)
        };
        StageLayers { chunks: all.chunks.into_iter().map(without).collect(), ..all }
    }

    /// Layers of all chunks.
    pub fn count(&self) -> usize {
        self.chunks.iter().map(Range::len).sum()
    }

    /// How many of them have no experts, and how many have.
    pub fn kinds(&self, shape: &ModelShape) -> (usize, usize) {
        let each = self.chunks.iter().map(|chunk| kinds(shape, chunk));
        each.fold((0, 0), |sum, chunk| (sum.0 + chunk.0, sum.1 + chunk.1))
    }
}

/// Layers of a chunk without experts, and with.
pub(super) fn kinds(shape: &ModelShape, chunk: &Range<usize>) -> (usize, usize) {
    let dense = match shape.experts {
        None => chunk.len(),
        Some(experts) => experts.dense_layers.min(chunk.end).saturating_sub(chunk.start),
    };
    (dense, chunk.len() - dense)
}

/// All stages as a layout of Megatron-LM (`--pipeline-model-parallel-layout`): `E` is the
/// embedding, `t` a layer, `L` the loss, `|` the end of a chunk.
pub fn layout(shape: &ModelShape, at: &Strategy) -> String {
    let stages: Vec<StageLayers> =
        (0..at.pp).map(|stage| StageLayers::of(shape, at, stage)).collect();
    let parts = at.pp * at.vpp;
    let part = |index: usize| {
        let layers = stages[index % at.pp].chunks[index / at.pp].len();
        let layers = match layers {
            0 => String::new(),
            1 => "t".to_string(),
            many => format!("t*{many}"),
        };
        let first = if index == 0 { "E" } else { "" };
        let last = if index + 1 == parts { "L" } else { "|" };
        format!("{first}{layers}{last}")
    };
    let mut text = String::new();
    let mut index = 0;
    while index < parts {
        let one = part(index);
        let alike = (index..parts).take_while(|&other| part(other) == one).count();
        text += &if alike > 1 { format!("({one})*{alike}") } else { one };
        index += alike;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_share_all_layers() {
        for (layers, pp, vpp) in [(12, 4, 3), (61, 16, 1), (7, 2, 2), (3, 4, 1), (126, 16, 8)] {
            for split in [StageLayers::even, StageLayers::with_ends] {
                let stages = (0..pp).map(|stage| split(layers, stage, pp, vpp));
                let mut all: Vec<usize> =
                    stages.flat_map(|stage| stage.chunks.into_iter().flatten()).collect();
                all.sort_unstable();
                assert_eq!(all, (0..layers).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn layouts_are_those_of_megatron() {
        let check = |layers: usize, pp: usize, vpp: usize, split: LayerSplit, expected: &str| {
            let shape = ModelShape { layers, ..ModelShape::known("llama-3.1-405b").unwrap() };
            let at = Strategy { pp, vpp, split, ..Strategy::SINGLE };
            assert_eq!(layout(&shape, &at), expected);
        };
        check(8, 1, 1, LayerSplit::Even, "Et*8L");
        check(8, 4, 1, LayerSplit::Even, "Et*2|(t*2|)*2t*2L");
        check(4, 2, 2, LayerSplit::Even, "Et|(t|)*2tL");
        check(126, 16, 1, LayerSplit::Ends, "Et*7|(t*8|)*14t*7L");
        check(61, 4, 1, LayerSplit::Ends, "Et*15|(t*16|)*2t*14L");
    }
}
