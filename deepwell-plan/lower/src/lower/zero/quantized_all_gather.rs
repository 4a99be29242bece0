//! All-gather of quantized weights as data and scales, in place of FP32 masters.
//!
//! Blocks are quantized independently. So a weight has its own bucket if the slices of ranks are
//! whole blocks rowwise and columnwise, and whole tiles of scales: bands of a multiple of
//! [`SLICE_ROWS`] rows, or whole matrices of a stack. A rank quantizes its slice, and the ranks
//! gather the planes read by calls of the body: about one byte per parameter and axis, where
//! masters are four. The bits equal quantized gathered masters, so no option is needed: all
//! eligible weights are gathered this way. All other weights are gathered as masters or in BF16.
//!
//! Bands of a rowwise operand are contiguous, so they are gathered in place. A columnwise operand
//! is stored transposed with bands side by side, so the gathered parts are joined before the first
//! reader.
//!
//! The cut of a parameter follows from the format of the policy and from the shape, not from the
//! precision of individual weights: a weight with BF16 fallback keeps the slices of its state.

use std::collections::HashSet;

use deepwell_ir::ops::{Axis, Collective, JoinParts};
use deepwell_ir::{
    DType, IrError, MemoryKind, Op, OperandType, Phase, Plane, Rejected, SplitOver, Storage,
    TensorId,
};
use deepwell_precision::{ElementFormat, scale_tiles};

use super::gather_per_layer::suffix_of;
use super::state::{Bucket, Planes, SLICE_ELEMENTS};
use crate::PlanError;
use crate::lower::builder::{read, write};
use crate::lower::lowering::Lowering;
use crate::lower::rank::RankContext;

/// Row multiple of a slice: the rows of a tile of scales, no fewer than the rows of any block.
const SLICE_ROWS: usize = scale_tiles::TILE_ROWS;

impl RankContext<'_> {
    /// The shape of a rank's slice of a parameter, if the parameter can be cut between blocks.
    pub(super) fn block_slice_of(
        &self,
        shape: &[usize],
        split: Option<SplitOver>,
    ) -> Option<Vec<usize>> {
        let format = self.plan.policy.format().quantized()?;
        // A per-tensor scale needs the whole tensor.
        if format.element != ElementFormat::E4M3 || Storage::plane_count(&format) > 2 {
            return None;
        }
        let (_, ranks) = self.shards_gradients().then(|| self.zero_group_of(split))??;
        block_slice(shape, ranks as usize)
    }

    /// The quantizing node of a parameter, by index in the graph, if slices can be quantized
    /// independently and calls read the parameter in no other form.
    pub(super) fn quantization_of(
        &self,
        parameter: TensorId,
        shape: &[usize],
        split: Option<SplitOver>,
    ) -> Option<usize> {
        self.block_slice_of(shape, split)?;
        let nodes = || self.graph.nodes.iter().enumerate();
        let mut readers = nodes().filter(|(_, node)| node.inputs.contains(&parameter));
        let ((at, node), None) = (readers.next()?, readers.next()) else { return None };
        let Op::Quantize(op) = &node.op else { return None };
        // The rowwise data has the parameter's shape and represents the parameter.
        let is_by_blocks = Storage::plane_count(&op.format) == 2 && op.axes()[0] == Axis::Row;
        let is_read_there = |(_, other): (usize, &deepwell_ir::Node)| {
            other.phase == Phase::Weights
                && other.inputs.iter().any(|input| node.outputs.contains(input))
        };
        let is_copy = node.phase == Phase::Weights && !nodes().any(is_read_there);
        (is_copy && is_by_blocks).then_some(at)
    }

    /// The tensors read after a gather in `phase`: by calls of the same pass, or by all calls if
    /// weights are gathered between steps.
    fn read_in(&self, phase: Phase) -> HashSet<TensorId> {
        let comes_later = |reader: Phase| match phase {
            Phase::Forward => reader == Phase::Forward,
            Phase::Backward => [Phase::Backward, Phase::WeightGradients].contains(&reader),
            _ => true,
        };
        let nodes = self.graph.nodes.iter().filter(|node| comes_later(node.phase));
        nodes.flat_map(|node| node.inputs.iter().copied()).collect()
    }
}

impl Lowering<'_> {
    /// Quantizes this rank's slice of a bucket and queues the planes for
    /// [`Lowering::gather_planes`]: only planes read by calls between this phase and the next
    /// gather.
    pub(super) fn gather_quantized(
        &mut self,
        bucket: usize,
        (phase, layer): (Phase, Option<u32>),
    ) -> Result<(), PlanError> {
        let Bucket { master, group: (group, ranks), quantized_by, .. } = self.zero.buckets[bucket];
        let graph = self.rank.graph;
        let Some(node) = quantized_by.map(|at| &graph.nodes[at]) else { return Ok(()) };
        let Op::Quantize(op) = &node.op else { return Ok(()) };
        let suffix = suffix_of(phase);
        if phase != Phase::Backward {
            self.build.rebind(
                self.zero.buckets[bucket].gathered_as[0],
                self.zero.buckets[bucket].gathered[0],
            );
        }
        let shape = self.build.values[master.index()].shape.clone();
        let is_matrix = shape.len() == 2;
        let types = node.op.outputs_of(&[OperandType { dtype: DType::F32, shape }]);
        let types =
            types.map_err(|source| IrError::Operands { node: node.name.clone(), source })?;
        let mut outputs = Vec::with_capacity(types.len());
        for ((&id, of), (_, plane)) in node.outputs.iter().zip(types).zip(op.planes()) {
            let value = match plane {
                Plane::Counters => self.build.value(id),
                _ => {
                    let name = format!("{}.slice{suffix}", graph.tensor(id).name);
                    self.build.add(name, of.dtype, of.shape, MemoryKind::Activations)
                }
            };
            outputs.push(value);
        }
        let name = format!("quantize.shard.{bucket}{suffix}");
        let writes = outputs.iter().copied().map(write).collect();
        let reads = vec![read(master)];
        self.build.layer_call((phase, layer), &name, node.op.clone(), reads, writes)?;

        let is_read = self.rank.read_in(phase);
        for ((&id, own), (axis, plane)) in node.outputs.iter().zip(outputs).zip(op.planes()) {
            if plane == Plane::Counters || !is_read.contains(&id) {
                continue;
            }
            let arrives = match axis == Axis::Column && is_matrix {
                true => {
                    let own = self.build.values[own.index()].clone();
                    let mut shape = own.shape;
                    shape[0] *= ranks as usize;
                    let name = format!("{}.parts{suffix}", graph.tensor(id).name);
                    let parts = self.build.add(name, own.dtype, shape, MemoryKind::Activations);
                    self.zero.gathers.parts.entry(bucket).or_default().push((parts, id));
                    parts
                }
                false => self.build.value_with_suffix(id, suffix),
            };
            let planes = &mut self.zero.gathers.planes;
            match planes.iter_mut().find(|planes| planes.group == (group, ranks)) {
                Some(planes) => planes.pairs.push((own, arrives)),
                None => {
                    let pairs = vec![(own, arrives)];
                    planes.push(Planes { group: (group, ranks), bucket, pairs });
                }
            }
        }
        Ok(())
    }

    /// Bytes of the gathered planes in the queue.
    pub(super) fn gathered_plane_bytes(&self) -> usize {
        let pairs = self.zero.gathers.planes.iter().flat_map(|planes| &planes.pairs);
        pairs.map(|(_, whole)| self.build.values[whole.index()].range.bytes).sum()
    }

    /// Gathers the queued planes, one collective per group.
    pub(in crate::lower) fn gather_planes(&mut self, phase: Phase) -> Result<(), PlanError> {
        let suffix = suffix_of(phase);
        for Planes { group: (group, ranks), bucket, pairs } in
            std::mem::take(&mut self.zero.gathers.planes)
        {
            let gather = Collective::gathers(group, ranks, pairs.len());
            let (slices, whole) = pairs.into_iter().map(|(a, b)| (read(a), write(b))).unzip();
            let name = format!("all_gather.planes.{bucket}{suffix}");
            self.build.phase_call(phase, &name, gather.into(), slices, whole)?;
        }
        Ok(())
    }

    /// Joins the gathered parts of a bucket.
    pub(super) fn join_parts(
        &mut self,
        bucket: usize,
        (phase, layer): (Phase, Option<u32>),
    ) -> Result<(), PlanError> {
        let (_, ranks) = self.zero.buckets[bucket].group;
        let suffix = suffix_of(phase);
        for (parts, id) in self.zero.gathers.parts.remove(&bucket).unwrap_or_default() {
            let whole = self.build.value_with_suffix(id, suffix);
            let name = format!("join.{}{suffix}", self.rank.graph.tensor(id).name);
            let op = JoinParts { parts: ranks as usize };
            let (reads, writes) = (vec![read(parts)], vec![write(whole)]);
            self.build.layer_call((phase, layer), &name, op.into(), reads, writes)?;
        }
        Ok(())
    }

    /// Why a bucket with quantized weights is gathered as masters or BF16 copies.
    pub(super) fn why_not_quantized(&self, bucket: usize) -> Option<Rejected> {
        let Bucket { parameters, group: (_, ranks), .. } = self.zero.buckets.get(bucket)?;
        let is_quantized = |id: &&TensorId| {
            let mut nodes = self.rank.graph.nodes.iter();
            nodes.any(|node| matches!(node.op, Op::Quantize(_)) && node.inputs.contains(id))
        };
        let tensor = self.rank.graph.tensor(*parameters.iter().find(is_quantized)?);
        let (name, shape) = (&tensor.name, &tensor.shape);
        let reason = match self.rank.block_slice_of(&tensor.shape.bind(&self.rank.binding), None) {
            _ if !self.rank.shards_gradients() => "masters are whole between steps".to_string(),
            None => format!(
                "slices of `{name}` {shape} on {ranks} ranks are not whole blocks of E4M3: they \
                 are with a multiple of {SLICE_ROWS} rows for each"
            ),
            Some(_) => format!("calls read other copies of `{name}` too"),
        };
        Some(Rejected { kernel: "gather of data and scales".to_string(), reason })
    }
}

/// The shape of the slices of a parameter on `ranks` ranks, if it can be cut between blocks.
pub fn block_slice(shape: &[usize], ranks: usize) -> Option<Vec<usize>> {
    let first = *shape.first()?;
    let can_be = match shape.len() {
        2 => first.is_multiple_of(SLICE_ROWS * ranks),
        3 => first.is_multiple_of(ranks),
        _ => false,
    };
    let slice = [&[first / ranks.max(1)], &shape[1..]].concat();
    let elements: usize = slice.iter().product();
    let is_aligned = elements > 0 && elements.is_multiple_of(SLICE_ELEMENTS);
    (ranks > 1 && can_be && is_aligned).then_some(slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_whole_blocks() {
        let check = |shape: &[usize], ranks, expected: Option<&[usize]>| {
            assert_eq!(block_slice(shape, ranks).as_deref(), expected, "{shape:?} on {ranks}");
        };
        check(&[256, 96], 2, Some(&[128, 96]));
        check(&[768, 768], 3, Some(&[256, 768]));
        check(&[4096, 14336], 8, Some(&[512, 14336]));
        // A tile of scales would be of two ranks.
        check(&[256, 96], 4, None);
        check(&[384, 96], 2, None);
        check(&[64, 4096], 2, None);
        // Matrices of a stack are whole, of any shape.
        check(&[8, 96, 64], 4, Some(&[2, 96, 64]));
        check(&[8, 96, 64], 3, None);
        // Slices begin at aligned bytes.
        check(&[4, 3, 5], 2, None);
        check(&[4096], 2, None);
        check(&[256, 0], 2, None);
        check(&[256, 96], 1, None);
    }
}
