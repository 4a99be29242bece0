//! A stage with few layers of each kind, in a pipeline of at most three stages.

use std::ops::Range;

use crate::{Parallel, Plan};

/// Distinct kinds of stages: first, middle, last.
const STAGES: usize = 3;
/// Chunks with at most this many layers of a kind are lowered whole: lowering [`LAYERS`] layers and
/// [`MORE`] additional layers of a longer chunk costs about as much. Some sizes only grow at first,
/// such as the gradient buckets until a bucket is full.
const WHOLE: usize = 12;
/// Layers of a kind lowered for a longer chunk: enough for the layers, not the loss, to determine
/// the peak.
const LAYERS: usize = 4;
/// Additional layers lowered to measure the increase per layer.
const MORE: usize = 2;

fn lowered_of(layers: usize) -> usize {
    if layers > WHOLE { LAYERS } else { layers }
}

/// The layers of each chunk of a stage.
#[derive(Debug)]
pub(super) struct Chunks {
    ranges: Vec<Range<usize>>,
    /// For each chunk, the number of layers of each kind.
    pub(super) counts: Vec<Vec<usize>>,
}

impl Chunks {
    /// The chunks of a stage of a plan. `kinds` has the kind of each layer of the model.
    pub(super) fn of(plan: &Plan, stage: usize, kinds: &[usize]) -> Chunks {
        let Parallel { pipeline, chunks, .. } = plan.parallel;
        let range = |chunk: usize| {
            let place = chunk * pipeline + stage;
            let Some(&layers) = plan.stages.get(place) else { return 0..kinds.len() };
            let first: usize = plan.stages[..place].iter().sum();
            first..(first + layers).min(kinds.len())
        };
        let ranges: Vec<Range<usize>> = (0..chunks).map(range).collect();
        let kind_count = kinds.iter().max().map_or(0, |last| last + 1);
        let count = |range: &Range<usize>| {
            let mut counts = vec![0; kind_count];
            kinds[range.clone()].iter().for_each(|&kind| counts[kind] += 1);
            counts
        };
        Chunks { counts: ranges.iter().map(count).collect(), ranges }
    }

    /// Number of layers of a kind over all chunks.
    pub(super) fn all(&self, kind: usize) -> usize {
        sum(&self.counts, kind)
    }
}

fn sum(counts: &[Vec<usize>], kind: usize) -> usize {
    counts.iter().map(|counts| counts[kind]).sum()
}

/// Additional layers of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct More {
    pub(super) chunk: usize,
    pub(super) layers: usize,
}

/// The stage lowered instead of a stage with all layers.
#[derive(Debug)]
pub(super) struct FewLayers {
    pub(super) parallel: Parallel,
    /// Index of the stage in the short pipeline.
    pub(super) stage: usize,
    pub(super) micro_batches: usize,
    /// Number of layers of each kind, for each chunk.
    pub(super) counts: Vec<Vec<usize>>,
    /// For each kind, the additional layers to lower; `None` if all layers are included.
    pub(super) growing: Vec<Option<More>>,
    /// For each chunk, the model's layers from which the chunk's layers are taken.
    ranges: Vec<Range<usize>>,
}

impl FewLayers {
    pub(super) fn of(plan: &Plan, stage: usize, chunks: &Chunks, kinds: &[usize]) -> FewLayers {
        let Parallel { pipeline, .. } = plan.parallel;
        let stages = pipeline.min(STAGES);
        let ends = match chunks.ranges.len() {
            1 => vec![0],
            count => vec![0, count - 1],
        };
        let mut used = ends;
        let mut counts = chunks.lowered(&used);
        let mut growing = chunks.growing(&used, &counts, stages, kinds);
        // Without additional layers of a kind, all chunks are lowered: they are short.
        let is_short = |(kind, more): (usize, &Option<More>)| {
            more.is_none() && chunks.all(kind) > sum(&counts, kind)
        };
        if growing.iter().enumerate().any(is_short) {
            used = (0..chunks.ranges.len()).collect();
            counts = chunks.lowered(&used);
            growing = chunks.growing(&used, &counts, stages, kinds);
        }
        let place = match stage {
            0 => 0,
            _ if stage + 1 == pipeline => stages - 1,
            _ => 1,
        };
        // As many as are in flight, in whole rounds of an interleaved schedule.
        let micro_batches = match used.len() {
            1 => plan.micro_batches.min(2 * stages),
            _ => stages * (plan.micro_batches / pipeline).clamp(1, 2),
        };
        FewLayers {
            parallel: Parallel { pipeline: stages, chunks: used.len(), ..plan.parallel },
            stage: place,
            micro_batches,
            counts,
            growing,
            ranges: used.iter().map(|&chunk| chunks.ranges[chunk].clone()).collect(),
        }
    }

    /// Returns the kept layers of the model, with one layer for each other stage, and the number of
    /// layers of each stage.
    pub(super) fn kept(
        &self,
        layer_count: usize,
        kinds: &[usize],
        more: Option<(usize, More)>,
    ) -> (Vec<usize>, Vec<usize>) {
        let stages = self.parallel.pipeline;
        let mut kept: Vec<usize> = Vec::new();
        let mut layers: Vec<usize> = Vec::new();
        let mut end = 0;
        for (chunk, range) in self.ranges.iter().enumerate() {
            let others = if chunk == 0 { self.stage } else { stages - 1 };
            kept.extend(end..end + others);
            layers.extend(vec![1; others]);
            let mut own: Vec<usize> = Vec::new();
            for (kind, &count) in self.counts[chunk].iter().enumerate() {
                let further = match more {
                    Some((of, more)) if (of, more.chunk) == (kind, chunk) => more.layers,
                    _ => 0,
                };
                let mut alike: Vec<usize> = range.clone().filter(|&at| kinds[at] == kind).collect();
                if count + further > alike.len() {
                    alike.push(range.end);
                }
                // The first layers and the last: the last stage has the model's last layer.
                let Some(first) = (count + further).checked_sub(1) else { continue };
                own.extend(&alike[..first]);
                own.extend(alike.last());
            }
            own.sort_unstable();
            layers.push(own.len());
            end = own.last().map_or(range.end, |last| range.end.max(last + 1));
            kept.extend(own);
        }
        let others = stages - 1 - self.stage;
        kept.extend(layer_count - others..layer_count);
        layers.extend(vec![1; others]);
        (kept, if stages == 1 { Vec::new() } else { layers })
    }
}

impl Chunks {
    fn lowered(&self, used: &[usize]) -> Vec<Vec<usize>> {
        let counts = used.iter().map(|&chunk| &self.counts[chunk]);
        counts.map(|counts| counts.iter().map(|&count| lowered_of(count)).collect()).collect()
    }

    /// For each kind, the fullest chunk with remaining layers; otherwise, if other chunks have
    /// layers of the kind, a layer of the stages between two chunks.
    fn growing(
        &self,
        used: &[usize],
        lowered: &[Vec<usize>],
        stages: usize,
        kinds: &[usize],
    ) -> Vec<Option<More>> {
        let of_kind = |kind: usize| {
            let left = |at: usize| self.counts[used[at]][kind] - lowered[at][kind];
            let places = (0..used.len()).filter(|&at| left(at) > 0);
            let fullest = places.max_by_key(|&at| lowered[at].iter().sum::<usize>());
            if let Some(chunk) = fullest {
                return Some(More { chunk, layers: left(chunk).min(MORE) });
            }
            let all_there = self.all(kind) == sum(lowered, kind);
            let spare = self.spare(used, stages);
            let is_alike = spare.is_some_and(|layer| kinds.get(layer) == Some(&kind));
            (!all_there && is_alike).then_some(More { chunk: 0, layers: 1 })
        };
        (0..self.counts[0].len()).map(of_kind).collect()
    }

    /// The layer after the first chunk, if the stages before the next lowered chunk have one more
    /// layer than is lowered.
    fn spare(&self, used: &[usize], stages: usize) -> Option<usize> {
        let (first, next) = (*used.first()?, *used.get(1)?);
        let (end, next) = (self.ranges[first].end, self.ranges[next].start);
        (next - end > stages - 1).then_some(end)
    }
}
