//! A stage with few layers of each kind, in a pipeline of at most three stages.

use std::ops::Range;

use super::layers::Layers;
use deepwell_lower::{Parallel, Plan};

/// Distinct kinds of stages: first, middle, last.
const STAGES: usize = 3;
/// Additional layers lowered to measure the increase per layer.
pub(super) const MORE: usize = 2;

/// The layers of each chunk of a stage.
#[derive(Debug)]
pub(super) struct Chunks {
    ranges: Vec<Range<usize>>,
    /// For each chunk, the number of layers of each kind.
    pub(super) counts: Vec<Vec<usize>>,
    /// Of these, the layers to lower.
    few: Vec<Vec<usize>>,
}

impl Chunks {
    /// The chunks of a stage of a plan.
    pub(super) fn of(plan: &Plan, stage: usize, layers: &Layers) -> Chunks {
        let kinds = &layers.kinds;
        let Parallel { pipeline, chunks, .. } = plan.parallel;
        let range = |chunk: usize| {
            let place = chunk * pipeline + stage;
            let Some(&count) = plan.stages.get(place) else { return 0..kinds.len() };
            let first: usize = plan.stages[..place].iter().sum();
            first..(first + count).min(kinds.len())
        };
        let ranges: Vec<Range<usize>> = (0..chunks).map(range).collect();
        let kind_count = kinds.iter().max().map_or(0, |last| last + 1);
        let count = |range: &Range<usize>| {
            let mut counts = vec![0; kind_count];
            kinds[range.clone()].iter().for_each(|&kind| counts[kind] += 1);
            counts
        };
        let counts: Vec<Vec<usize>> = ranges.iter().map(count).collect();
        let lowered = |&count: &usize| layers.lowered(plan.parallel, plan.bucket_bytes, count);
        let few = counts.iter().map(|counts| counts.iter().map(lowered).collect()).collect();
        Chunks { ranges, counts, few }
    }

    /// Number of layers of a kind over all chunks.
    pub(super) fn all(&self, kind: usize) -> usize {
        self.counts.iter().map(|counts| counts[kind]).sum()
    }
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
    pub(super) fn of(plan: &Plan, stage: usize, chunks: &Chunks) -> FewLayers {
        let Parallel { pipeline, .. } = plan.parallel;
        let stages = pipeline.min(STAGES);
        let place = match stage {
            0 => 0,
            _ if stage + 1 == pipeline => stages - 1,
            _ => 1,
        };
        // As many as are in flight, in whole rounds of an interleaved schedule.
        let micro_batches = match chunks.ranges.len() {
            1 => plan.micro_batches.min(2 * stages),
            _ => stages * (plan.micro_batches / pipeline).clamp(1, 2),
        };
        FewLayers {
            parallel: Parallel { pipeline: stages, ..plan.parallel },
            stage: place,
            micro_batches,
            counts: chunks.few.clone(),
            growing: chunks.growing(),
            ranges: chunks.ranges.clone(),
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
    /// For each kind, further layers of the fullest chunk of which some are left.
    fn growing(&self) -> Vec<Option<More>> {
        let of_kind = |kind: usize| {
            let left = |chunk: usize| self.counts[chunk][kind] - self.few[chunk][kind];
            let places = (0..self.ranges.len()).filter(|&chunk| left(chunk) > 0);
            let chunk = places.max_by_key(|&chunk| self.few[chunk].iter().sum::<usize>())?;
            Some(More { chunk, layers: left(chunk).min(MORE) })
        };
        (0..self.counts[0].len()).map(of_kind).collect()
    }
}
