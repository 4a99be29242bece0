//! A rank's holdings of a model, as rectangles of its tensors.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use bytemuck::{cast_slice, pod_collect_to_vec};
use deepwell_ckpt::{CkptDtype, Region, Section};
use deepwell_ir::{
    ByteRange, DType, Derivation, Link, MemoryKind, ParameterState, Plane, Program, TensorId,
    Value as IrValue, ValueId,
};
use deepwell_plan::Parallel;
use deepwell_precision::moments::{self, Moment};
use deepwell_precision::scale_tiles;
use half::bf16;

use crate::TrainError;
use crate::engine::{part, slice_of};
use crate::peers::Peers;

/// A rectangle of a tensor, and its address on this rank.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Holding {
    /// Name of the tensor.
    pub(super) name: String,
    pub(super) section: Section,
    pub(super) dtype: CkptDtype,
    /// Shape of the tensor.
    pub(super) whole: Vec<usize>,
    /// The rectangle.
    pub(super) region: Region,
    /// Bytes in the arena that contain the rectangle, row-major.
    pub(super) range: ByteRange,
    stored: Stored,
}

/// How the bytes of the arena differ from those of a file.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stored {
    /// Not at all.
    AsInFile,
    /// Scales in tiles; the shapes are those of row-major scales.
    ScaleTiles,
    /// Blocks of a moment in eight bits, which is FP32 in a file. The rectangle begins at an
    /// element of the first block.
    Blocks { moment: Moment, begin: usize },
    /// A master in BF16, which is FP32 in a file.
    Bf16,
}

impl Holding {
    /// Whether a resuming rank reads the holding; copies are recomputed from masters.
    pub(super) fn is_state(&self) -> bool {
        matches!(self.section, Section::Master | Section::MomentFirst | Section::MomentSecond)
    }

    /// Bytes of the rectangle in a file.
    pub(super) fn file_bytes(&self) -> usize {
        match self.stored {
            Stored::AsInFile | Stored::ScaleTiles => self.range.bytes,
            Stored::Blocks { .. } | Stored::Bf16 => self.region.elements() * size_of::<f32>(),
        }
    }

    /// Returns the file's bytes from those of the arena.
    pub(super) fn to_file<'a>(&self, data: &'a [u8]) -> Result<Cow<'a, [u8]>, TrainError> {
        match (self.stored, &self.whole[..]) {
            (Stored::Blocks { moment, begin }, _) => {
                let values = decoded(data, moment);
                let values = &values[begin..begin + self.region.elements()];
                Ok(Cow::Owned(cast_slice(values).to_vec()))
            }
            (Stored::Bf16, _) => {
                let narrow: Vec<bf16> = pod_collect_to_vec(data);
                let wide: Vec<f32> = narrow.into_iter().map(bf16::to_f32).collect();
                Ok(Cow::Owned(cast_slice(&wide).to_vec()))
            }
            (Stored::ScaleTiles, &[rows, blocks]) => {
                let mut plain = vec![0; rows * blocks];
                scale_tiles::from_tiles(data, rows, blocks, &mut plain)?;
                Ok(Cow::Owned(plain))
            }
            _ => Ok(Cow::Borrowed(data)),
        }
    }

    /// Returns the arena's bytes from those of a file, for state ([`Holding::is_state`]). `before`
    /// reads the arena: other holdings may have elements in the first and last block.
    pub(super) fn to_arena<'a>(
        &self,
        file: &'a [u8],
        before: impl FnOnce(&mut [u8]) -> Result<(), TrainError>,
    ) -> Result<Cow<'a, [u8]>, TrainError> {
        let (moment, begin) = match self.stored {
            Stored::Blocks { moment, begin } => (moment, begin),
            Stored::Bf16 => {
                let wide: Vec<f32> = pod_collect_to_vec(file);
                let narrow: Vec<bf16> = wide.into_iter().map(bf16::from_f32).collect();
                return Ok(Cow::Owned(cast_slice(&narrow).to_vec()));
            }
            Stored::AsInFile | Stored::ScaleTiles => return Ok(Cow::Borrowed(file)),
        };
        let mut bytes = vec![0; self.range.bytes];
        before(&mut bytes)?;
        let mut values = decoded(&bytes, moment);
        let new: Vec<f32> = pod_collect_to_vec(file);
        values[begin..begin + new.len()].copy_from_slice(&new);
        let blocks = bytes.as_chunks_mut::<{ moments::BLOCK_BYTES }>().0;
        for (values, block) in values.as_chunks::<{ moments::BLOCK }>().0.iter().zip(blocks) {
            moments::encode(values, moment, &moments::NEAREST, block);
        }
        Ok(Cow::Owned(bytes))
    }
}

fn decoded(bytes: &[u8], moment: Moment) -> Vec<f32> {
    let blocks = bytes.as_chunks::<{ moments::BLOCK_BYTES }>().0;
    let mut values = vec![0.0; blocks.len() * moments::BLOCK];
    let places = values.as_chunks_mut::<{ moments::BLOCK }>().0;
    for (block, values) in blocks.iter().zip(places) {
        moments::decode(block, moment, values);
    }
    values
}

/// The bytes of some elements of a value, and their difference from a file's.
fn place_of(value: &IrValue, section: Section, elements: Range<usize>) -> (ByteRange, Stored) {
    let moment = match section {
        Section::MomentFirst => Some(Moment::First),
        Section::MomentSecond => Some(Moment::Second),
        _ => None,
    };
    let (units, bytes_each, stored) = match (value.dtype, moment) {
        (DType::E4m3, Some(moment)) => {
            let units = elements.start / moments::BLOCK..elements.end.div_ceil(moments::BLOCK);
            let begin = elements.start % moments::BLOCK;
            (units, moments::BLOCK_BYTES, Stored::Blocks { moment, begin })
        }
        (DType::Bf16, None) => (elements, size_of::<bf16>(), Stored::Bf16),
        _ => (elements, size_of::<f32>(), Stored::AsInFile),
    };
    let offset = value.range.offset + units.start * bytes_each;
    (ByteRange { offset, bytes: units.len() * bytes_each }, stored)
}

/// The moments of a parameter, each with its name and section.
fn moments_of<V>(parameter: &str, [first, second]: [V; 2]) -> [(String, V, Section); 2] {
    let name = |moment| ParameterState::moment_name(moment, parameter);
    [
        (name(Moment::First), first, Section::MomentFirst),
        (name(Moment::Second), second, Section::MomentSecond),
    ]
}

/// Type and shape of a value in a file. A byte holds two elements of four bits.
fn type_in_file(value: &IrValue) -> (CkptDtype, Vec<usize>) {
    let dtype = match value.dtype {
        DType::F32 => CkptDtype::F32,
        DType::Bf16 => CkptDtype::Bf16,
        DType::I32 => CkptDtype::I32,
        DType::U64 => CkptDtype::U64,
        // Unsigned scales are stored as values of the signed format.
        DType::E4m3 | DType::Ue4m3 => CkptDtype::E4M3,
        DType::E8m0 => CkptDtype::E8M0,
        _ => CkptDtype::U8,
    };
    let mut shape = value.shape.clone();
    if let (CkptDtype::U8, Some(last)) = (dtype, shape.last_mut()) {
        *last = (*last * value.dtype.bits() as usize).div_ceil(8);
    }
    (dtype, shape)
}

/// Returns everything that a rank holds between steps: master weights, moments, and the compute
/// copies with their scales. Copies of weights that are split over ranks are left out, because they
/// follow from the masters.
pub(super) fn holdings(program: &Program, parallel: Parallel, rank: usize) -> Vec<Holding> {
    let mut all = Vec::new();
    for state in &program.parameters {
        let moments = moments_of(&state.name, [state.first_moment, state.second_moment]);
        let is_whole = state.master.only_in_shard().is_none();
        let master = is_whole.then_some(state.master.value());
        let master = (state.name.clone(), master, Section::Master);
        for (name, id, section) in [master].into_iter().chain(moments) {
            let Some(id) = id else { continue };
            let shape = &program.value(state.master.value()).shape;
            let elements = 0..shape.iter().product();
            let (range, stored) = place_of(program.value(id), section, elements);
            all.push(Holding {
                name,
                section,
                dtype: CkptDtype::F32,
                whole: program.whole_shape(state),
                region: in_whole(state, shape, Region::whole(shape)),
                range,
                stored,
            });
        }
    }
    add_slices(program, parallel, rank, &mut all);
    add_copies(program, &mut all);
    all
}

/// Adds the masters and moments of which this rank holds a slice of each bucket.
fn add_slices(program: &Program, parallel: Parallel, rank: usize, all: &mut Vec<Holding>) {
    for shard in &program.shards {
        let own = slice_of(program, parallel, shard, rank);
        for &(index, offset) in &shard.parameters {
            let state = &program.parameters[index];
            let value = program.value(state.master.value());
            let Some((of_slice, of_parameter)) = part(own.clone(), offset, value.elements()) else {
                continue;
            };
            let master = state.master.only_in_shard();
            let master = master.map(|_| (state.name.clone(), shard.master, Section::Master));
            let moments = moments_of(&state.name, [shard.first_moment, shard.second_moment]);
            for (name, id, section) in master.into_iter().chain(moments) {
                let mut begin = of_slice.start;
                for region in Region::of_range(&value.shape, of_parameter.clone()) {
                    let elements = begin..begin + region.elements();
                    begin = elements.end;
                    let (range, stored) = place_of(program.value(id), section, elements);
                    all.push(Holding {
                        name: name.clone(),
                        section,
                        dtype: CkptDtype::F32,
                        whole: program.whole_shape(state),
                        region: in_whole(state, &value.shape, region),
                        range,
                        stored,
                    });
                }
            }
        }
    }
}

/// Region of the whole parameter that a region of this rank's slice covers.
fn in_whole(state: &ParameterState, slice: &[usize], mut region: Region) -> Region {
    if let Some(split) = state.split {
        region.offset[split.dim] += split.place * slice[split.dim];
    }
    region
}

fn add_copies(program: &Program, all: &mut Vec<Holding>) {
    let is_master = |id| program.parameters.iter().any(|state| state.master.value() == id);
    // A master may be gathered as a copy, which links to the master.
    let tensor_of = |id: ValueId| {
        let value = program.value(id);
        value.link.map(|link| link.of).or(value.tensor)
    };
    let split = program.parameters.iter().filter(|state| state.split.is_some());
    let split: HashSet<TensorId> =
        split.filter_map(|state| tensor_of(state.master.value())).collect();
    let is_of_split = |link: Option<Link>| link.is_some_and(|link| split.contains(&link.of));
    for (index, value) in program.values.iter().enumerate() {
        let id = ValueId(index as u32);
        // Masters that are gathered among the copies were added before; padding of slices is not a
        // tensor.
        let is_copy = value.memory == MemoryKind::Weights && value.tensor.is_some();
        let is_plane = value.link.is_some_and(|link| link.plane().is_some());
        if !is_copy || is_master(id) && !is_plane || is_of_split(value.link) {
            continue;
        }
        let section = match value.link.and_then(|link| link.plane()) {
            Some(Plane::Data) => Section::Quantized,
            Some(_) => Section::Scales,
            None => Section::Weights,
        };
        let plain = match section {
            Section::Scales => value.link.and_then(|link| plain_shape(program, link)),
            _ => None,
        };
        let (dtype, shape) = type_in_file(value);
        let stored = if plain.is_some() { Stored::ScaleTiles } else { Stored::AsInFile };
        let shape = plain.unwrap_or(shape);
        all.push(Holding {
            name: value.name.clone(),
            section,
            dtype,
            region: Region::whole(&shape),
            whole: shape,
            range: value.range,
            stored,
        });
    }
}

/// Returns rows and scales per row of a plane of scales, from the shape of the matching data.
fn plain_shape(program: &Program, scales: Link) -> Option<Vec<usize>> {
    let Derivation::Plane { quantization, axis, plane: Plane::Scales, format } = scales.derivation
    else {
        return None;
    };
    let derivation = Derivation::Plane { quantization, axis, plane: Plane::Data, format };
    let data = Link { derivation, ..scales };
    let data = program.values.iter().find(|value| value.link == Some(data))?;
    let &[m, k] = &data.shape[..] else { return None };
    Some(vec![m, k.div_ceil(format.scale.stored_every())])
}

/// Returns the indices of the holdings in `own` that this rank saves. A collective of all ranks. A
/// holding of several ranks is saved by the rank with the least bytes so far; a table of two
/// pipeline stages is saved by the first stage.
pub(super) fn shares(
    peers: &mut Peers,
    stage: usize,
    own: &[Holding],
) -> Result<Vec<usize>, TrainError> {
    if peers.world_size() == 1 {
        return Ok((0..own.len()).collect());
    }
    let words: Vec<u64> = own
        .iter()
        .flat_map(|it| {
            let tensor = format!("{}/{}", it.section, it.name);
            let part = format!("{tensor} {:?} {:?}", it.region.offset, it.region.shape);
            [hash(&tensor), hash(&part), it.range.bytes as u64, stage as u64]
        })
        .collect();
    let all = peers.gather_any(&words)?;
    Ok(shares_of(&all, peers.rank()))
}

/// [`shares`], from four words for each holding of each rank: tensor, part, bytes and stage.
fn shares_of(all: &[Vec<u64>], rank: usize) -> Vec<usize> {
    let rows = |rank: usize| all[rank].chunks_exact(4).map(|it| [it[0], it[1], it[2], it[3]]);
    let mut stages: BTreeMap<u64, u64> = BTreeMap::new();
    let mut holders: BTreeMap<u64, (u64, u64, Vec<usize>)> = BTreeMap::new();
    for rank in 0..all.len() {
        for [tensor, part, bytes, stage] in rows(rank) {
            let first = stages.entry(tensor).or_insert(stage);
            *first = stage.min(*first);
            let (.., ranks) = holders.entry(part).or_insert((bytes, tensor, Vec::new()));
            ranks.push(rank);
        }
    }
    let stage_of: Vec<Option<u64>> =
        (0..all.len()).map(|rank| rows(rank).next().map(|row| row[3])).collect();
    let mut parts: Vec<(u64, u64, u64, Vec<usize>)> = holders
        .into_iter()
        .map(|(part, (bytes, tensor, ranks))| {
            let is_first = |rank: &usize| stage_of[*rank] == stages.get(&tensor).copied();
            (bytes, part, tensor, ranks.into_iter().filter(is_first).collect())
        })
        .collect();
    // First the parts of a single rank; then the largest parts first, each to the least loaded
    // rank.
    parts
        .sort_by_key(|(bytes, part, _, ranks)| (ranks.len() > 1, std::cmp::Reverse(*bytes), *part));
    let mut load = vec![0u64; all.len()];
    let mut saved_here = HashSet::new();
    for (bytes, part, _, ranks) in &parts {
        let Some(&saves) = ranks.iter().min_by_key(|rank| (load[**rank], **rank)) else { continue };
        load[saves] += bytes;
        if saves == rank {
            saved_here.insert(*part);
        }
    }
    let own = rows(rank).enumerate();
    own.filter(|(_, row)| saved_here.contains(&row[1])).map(|(index, _)| index).collect()
}

fn hash(text: &str) -> u64 {
    let hash = blake3::hash(text.as_bytes());
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("eight of 32 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the parts that each rank saves, given the parts of each rank as (tensor, part, bytes,
    /// stage).
    fn check(ranks: &[&[[u64; 4]]], expected: &[&[u64]]) {
        let all: Vec<Vec<u64>> = ranks.iter().map(|rows| rows.concat()).collect();
        for (rank, expected) in expected.iter().enumerate() {
            let got = shares_of(&all, rank);
            let parts: Vec<u64> = got.into_iter().map(|index| ranks[rank][index][1]).collect();
            assert_eq!(parts, *expected, "rank {rank}");
        }
    }

    #[test]
    fn every_part_is_saved_once_and_evenly() {
        // Two ranks with everything.
        let all = [[1, 10, 400, 0], [2, 20, 300, 0], [3, 30, 200, 0], [4, 40, 100, 0]];
        check(&[&all, &all], &[&[10, 40], &[20, 30]]);
        // Slices of one tensor, and a tensor on both ranks: saved by the rank with the smaller
        // slice.
        check(
            &[&[[1, 10, 400, 0], [2, 20, 8, 0]], &[[1, 11, 300, 0], [2, 20, 8, 0]]],
            &[&[10], &[11, 20]],
        );
        // A tied table, sliced differently on each stage: the first stage saves its slices.
        check(
            &[
                &[[1, 10, 64, 0], [2, 20, 8, 0]],
                &[[1, 11, 64, 0]],
                &[[1, 12, 32, 1], [3, 30, 8, 1]],
                &[[1, 13, 96, 1]],
            ],
            &[&[10, 20], &[11], &[30], &[]],
        );
        check(&[&[], &[[1, 10, 4, 0]]], &[&[], &[10]]);
    }
}
