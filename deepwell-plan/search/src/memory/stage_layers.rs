//! The layers of a pipeline stage.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{LayerSplit, ModelShape, Strategy};
use deepwell_lower::PlanError;

/// A pipeline stage's part of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageLayers {
    /// Layers of each chunk. Layers past the model's last are multi-token prediction layers, equal
    /// in size to the last layer.
    pub chunks: Vec<Range<usize>>,
    /// Whether the stage has the embedding.
    pub has_embedding: bool,
    /// Whether the stage has the output head and the loss.
    pub has_head: bool,
}

impl StageLayers {
    /// Stage `stage` of an even division of layers; the first chunks take the remainder.
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
            LayerSplit::Ends => StageLayers::with_ends(shape.layers, (1, 1), stage, at.pp, at.vpp),
            LayerSplit::Balanced => {
                let ends = (0, shape.head_layers());
                StageLayers::with_ends(shape.layers, ends, stage, at.pp, at.vpp)
            }
            LayerSplit::Given => {
                let end = |part: usize| shape.chunk_layers.iter().take(part).sum::<usize>();
                let of_chunk = |chunk: usize| {
                    let part = chunk * at.pp + stage;
                    end(part)..end(part + 1)
                };
                StageLayers {
                    chunks: (0..at.vpp).map(of_chunk).collect(),
                    has_embedding: stage == 0,
                    has_head: stage + 1 == at.pp,
                }
            }
        }
    }

    /// [`StageLayers::even`] with the embedding and the head counted as `embedding` and `head`
    /// layers.
    fn with_ends(
        layers: usize,
        (embedding, head): (usize, usize),
        stage: usize,
        pp: usize,
        vpp: usize,
    ) -> StageLayers {
        let all = StageLayers::even(layers + embedding + head, stage, pp, vpp);
        let place = |unit: usize| unit.saturating_sub(embedding).min(layers);
        let without = |chunk: Range<usize>| place(chunk.start)..place(chunk.end);
        StageLayers { chunks: all.chunks.into_iter().map(without).collect(), ..all }
    }

    /// Number of layers in all chunks.
    pub fn count(&self) -> usize {
        self.chunks.iter().map(Range::len).sum()
    }

    /// Number of layers without experts, and with experts.
    pub fn kinds(&self, shape: &ModelShape) -> (usize, usize) {
        let each = self.chunks.iter().map(|chunk| kinds(shape, chunk));
        each.fold((0, 0), |sum, chunk| (sum.0 + chunk.0, sum.1 + chunk.1))
    }
}

/// Number of layers of a chunk without experts, and with experts.
pub(super) fn kinds(shape: &ModelShape, chunk: &Range<usize>) -> (usize, usize) {
    let dense = match shape.experts {
        None => chunk.len(),
        Some(experts) => experts.dense_layers.min(chunk.end).saturating_sub(chunk.start),
    };
    (dense, chunk.len() - dense)
}

/// All stages in Megatron-LM's layout syntax (`--pipeline-model-parallel-layout`): `E` is the
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

/// Number of layers of each chunk of a layout such as `Et*3|(tt|)*6tL`, as written by [`layout`].
///
/// # Errors
/// Text that is not a layout, or a layout with a number of layers other than `layers`.
pub fn parse_layout(text: &str, layers: usize) -> Result<Vec<usize>, PlanError> {
    let refuse =
        |expected: String, got: String| PlanError::Request { what: "layout", expected, got };
    let form = || "E, then t for each layer, L, with | between chunks, as in Et*3|(tt|)*2tL";
    let whole = expand(text).ok_or_else(|| refuse(form().to_string(), format!("`{text}`")))?;
    let inner = whole.strip_prefix('E').and_then(|rest| rest.strip_suffix('L'));
    let chunks: Vec<&str> = inner.unwrap_or("?").split('|').collect();
    if chunks.iter().any(|chunk| chunk.chars().any(|kind| kind != 't')) {
        return Err(refuse(form().to_string(), format!("`{text}`")));
    }
    let counts: Vec<usize> = chunks.iter().map(|chunk| chunk.len()).collect();
    let found: usize = counts.iter().sum();
    if found != layers {
        return Err(refuse(format!("the {layers} layers of the model"), format!("{found}")));
    }
    Ok(counts)
}

/// Largest length of an expanded layout.
const EXPANDED_MAX: usize = 1 << 16;

/// Expands `x*3` and `(xy)*3` in a layout.
pub fn expand(layout: &str) -> Option<String> {
    let mut text = String::new();
    let mut rest = layout;
    while let Some(first) = rest.chars().next() {
        let unit = if first == '(' {
            let end = rest.find(')')?;
            let unit = expand(&rest[1..end])?;
            rest = &rest[end + 1..];
            unit
        } else {
            let (unit, tail) = rest.split_at(first.len_utf8());
            rest = tail;
            unit.to_string()
        };
        let mut count = 1;
        if let Some(tail) = rest.strip_prefix('*') {
            let digits = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
            count = tail[..digits].parse().ok().filter(|count| *count <= 4096)?;
            rest = &tail[digits..];
        }
        if text.len() + unit.len() * count > EXPANDED_MAX {
            return None;
        }
        text.push_str(&unit.repeat(count));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_share_all_layers() {
        for (layers, pp, vpp) in [(12, 4, 3), (61, 16, 1), (7, 2, 2), (3, 4, 1), (126, 16, 8)] {
            for ends in [(0, 0), (1, 1), (0, 2)] {
                let of_stage = |stage| StageLayers::with_ends(layers, ends, stage, pp, vpp);
                let stages = (0..pp).map(of_stage);
                let mut all: Vec<usize> =
                    stages.flat_map(|stage| stage.chunks.into_iter().flatten()).collect();
                all.sort_unstable();
                assert_eq!(all, (0..layers).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn layouts_are_written_out() {
        let check = |layout: &str, expected: Option<&str>| {
            assert_eq!(expand(layout).as_deref(), expected, "{layout}");
        };
        check("Et*3|(tt|)*2mL", Some("Ettt|tt|tt|mL"));
        check("Et*2|(tt|)*1t|tmL", Some("Ett|tt|t|tmL"));
        check("E(t*2|)*2tL", Some("Ett|tt|tL"));
        check("(t*4096)*4096", None);
        check("(tt", None);
        check("t*x", None);
        check("t*99999", None);
    }

    /// Parsing a written layout gives the same chunks.
    #[test]
    fn layouts_are_read() {
        let check = |text: &str, layers: usize, expected: Result<&[usize], &str>| match (
            parse_layout(text, layers),
            expected,
        ) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{text}"),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, _) => panic!("{text}: {found:?}"),
        };
        check("Et*7|(t*8|)*14t*7L", 126, Ok(&[[7].as_slice(), &[8; 14], &[7]].concat()));
        check("Et|ttL", 3, Ok(&[1, 2]));
        check("E|t*3|L", 3, Ok(&[0, 3, 0]));
        for wrong in ["t*3", "Et*3", "Et*2|mL", "Et(tL", ""] {
            check(wrong, 3, Err("layout: expected E, then t for each layer"));
        }
        check("Et*2|tL", 4, Err("expected the 4 layers of the model, got 3"));
        let shape = ModelShape::known("llama-3-8b").unwrap();
        let shape = ModelShape { chunk_layers: vec![9, 7, 8, 8], ..shape };
        let at = Strategy { pp: 2, vpp: 2, split: LayerSplit::Given, ..Strategy::SINGLE };
        assert_eq!(StageLayers::of(&shape, &at, 1).chunks, [9..16, 24..32]);
        assert_eq!(parse_layout(&layout(&shape, &at), 32).unwrap(), shape.chunk_layers);
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
        // The head has the FLOPs of two thirds of a layer.
        check(126, 4, 1, LayerSplit::Balanced, "Et*32|(t*32|)*2t*30L");
        check(61, 4, 1, LayerSplit::Ends, "Et*15|(t*16|)*2t*14L");
    }
}
