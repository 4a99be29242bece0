//! Quantization of one tensor into data and scales.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ::safetensors::Dtype;
use deepwell_ir::capture::StoredTensor;
use deepwell_precision::{
    BlockStatistics, BlockSums, QuantFormat, QuantizeError, ScaleFormat, Source, nvfp4, packed,
    quantize_rows, scale_tiles,
};
use half::{bf16, f16};

use super::regions::{Region, for_each, for_each_run, regions};
use super::shape::{Matrices, Stored};
use super::{FileFormat, QuantizeFileError, ScaleLayout};

/// Bytes of a kept tensor copied at once.
const COPY_BYTES: usize = 1 << 20;

/// A file of the input.
#[derive(Clone, Copy)]
pub(super) struct SourceFile<'a> {
    pub(super) file: &'a File,
    pub(super) path: &'a Path,
}

impl SourceFile<'_> {
    fn read(&self, bytes: &mut [u8], at: u64) -> Result<(), QuantizeFileError> {
        self.file.read_exact_at(bytes, at).map_err(QuantizeFileError::io("read", self.path))
    }
}

/// A file of the output.
#[derive(Clone, Copy)]
pub(super) struct TargetFile<'a> {
    pub(super) file: &'a File,
    pub(super) path: &'a Path,
}

impl TargetFile<'_> {
    pub(super) fn write(&self, bytes: &[u8], at: u64) -> Result<(), QuantizeFileError> {
        self.file.write_all_at(bytes, at).map_err(QuantizeFileError::io("write", self.path))
    }
}

/// Copies a kept tensor.
pub(super) fn copy(
    source: SourceFile<'_>,
    tensor: &StoredTensor,
    target: TargetFile<'_>,
    begin: u64,
) -> Result<(), QuantizeFileError> {
    let starts: Vec<u64> = (0..tensor.size_bytes).step_by(COPY_BYTES).collect();
    for_each(&starts, COPY_BYTES / 4, |buffer: &mut Vec<u8>, start| {
        buffer.resize(COPY_BYTES.min((tensor.size_bytes - start) as usize), 0);
        source.read(buffer, tensor.offset_bytes + start)?;
        target.write(buffer, begin + start)
    })?;
    Ok(())
}

/// Copies a kept tensor of F32, rounded to BF16.
pub(super) fn copy_as_bf16(
    source: SourceFile<'_>,
    tensor: &StoredTensor,
    target: TargetFile<'_>,
    begin: u64,
) -> Result<(), QuantizeFileError> {
    let starts: Vec<u64> = (0..tensor.size_bytes).step_by(COPY_BYTES).collect();
    for_each(&starts, COPY_BYTES / 4, |buffers: &mut (Vec<u8>, Vec<bf16>), start| {
        let (bytes, narrow) = buffers;
        bytes.resize(COPY_BYTES.min((tensor.size_bytes - start) as usize), 0);
        source.read(bytes, tensor.offset_bytes + start)?;
        narrow.clear();
        narrow.extend(
            bytes.as_chunks::<4>().0.iter().map(|&x| bf16::from_f32(f32::from_le_bytes(x))),
        );
        if let Some(index) = narrow.iter().position(|x| !x.is_finite()) {
            return Err(QuantizeFileError::NotFinite {
                name: tensor.name.clone(),
                what: format!("element {}", start / 4 + index as u64),
            });
        }
        target.write(bytemuck::cast_slice(narrow), begin + start / 2)
    })?;
    Ok(())
}

/// Element types that can be quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SourceType {
    F32,
    Bf16,
    F16,
}

impl SourceType {
    pub(super) fn of(tensor: &StoredTensor) -> Option<Self> {
        match tensor.dtype {
            Dtype::F32 => Some(Self::F32),
            Dtype::BF16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            _ => None,
        }
    }
}

/// Offsets of the parts of a tensor in the file.
#[derive(Clone, Copy)]
pub(super) struct PlaneOffsets {
    pub(super) data: u64,
    pub(super) scales: u64,
    pub(super) tensor_scale: Option<u64>,
}

/// What a file stores as the tensor scale of NVFP4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TensorScaleForm {
    /// The factor from the product of element and block scale to the value.
    Factor,
    /// The reciprocal of this factor.
    Reciprocal,
}

/// A tensor to quantize.
#[derive(Clone, Copy)]
pub(super) struct Weight<'a> {
    pub(super) file: SourceFile<'a>,
    pub(super) tensor: &'a StoredTensor,
    pub(super) kind: SourceType,
    pub(super) matrices: Matrices,
    /// Whether the file contains the transpose: `[.., cols, rows]`.
    pub(super) is_inputs_first: bool,
}

/// The quantization of one tensor.
pub(super) struct Work<'a> {
    pub(super) weight: Weight<'a>,
    pub(super) target: TargetFile<'a>,
    pub(super) stored: Stored,
    pub(super) format: QuantFormat,
    pub(super) offsets: PlaneOffsets,
    pub(super) tensor_scale: TensorScaleForm,
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers {
    wide: Vec<f32>,
    narrow: Vec<bf16>,
    half: Vec<u16>,
    run: Vec<u8>,
    data: Vec<u8>,
    packed: Vec<u8>,
    scales: Vec<u8>,
    tiles: Vec<u8>,
}

impl Weight<'_> {
    /// The largest magnitude of the tensor.
    pub(super) fn amax(&self) -> Result<f32, QuantizeFileError> {
        let regions = regions(self.matrices, ScaleLayout::Plain, self.is_inputs_first, 1);
        let elements = regions.iter().map(|region| region.elements()).max().unwrap_or(0);
        let by_region = for_each(&regions, elements, |buffers: &mut Buffers, region| {
            self.read(region, buffers)?;
            Ok(match self.kind {
                SourceType::Bf16 => nvfp4::amax(&buffers.narrow),
                _ => nvfp4::amax(&buffers.wide),
            })
        })?;
        Ok(by_region.into_iter().fold(0.0, f32::max))
    }

    /// Reads a piece into `wide`, or into `narrow` for bf16.
    fn read(&self, region: Region, buffers: &mut Buffers) -> Result<(), QuantizeFileError> {
        let (elements, run) = (region.elements(), &mut buffers.run);
        match self.kind {
            SourceType::F32 => {
                buffers.wide.resize(elements, 0.0);
                self.read_elements(region, &mut buffers.wide, run)
            }
            SourceType::Bf16 => {
                buffers.narrow.resize(elements, bf16::ZERO);
                self.read_elements(region, &mut buffers.narrow, run)
            }
            SourceType::F16 => {
                buffers.half.resize(elements, 0);
                self.read_elements(region, &mut buffers.half, run)?;
                let values = buffers.half.iter().map(|&bits| f16::from_bits(bits).to_f32());
                buffers.wide.clear();
                buffers.wide.extend(values);
                Ok(())
            }
        }
    }

    /// Reads a piece in file order, or transposed through the buffer `run`.
    fn read_elements<T: bytemuck::Pod>(
        &self,
        region: Region,
        target: &mut [T],
        run: &mut Vec<u8>,
    ) -> Result<(), QuantizeFileError> {
        let size = size_of::<T>();
        let file_offset = |first: u64| self.tensor.offset_bytes + size as u64 * first;
        if !self.is_inputs_first {
            let bytes = bytemuck::cast_slice_mut(target);
            return self.file.read(bytes, file_offset(region.first(self.matrices)));
        }
        for_each_run(region, self.matrices, |col, first, row, count| {
            run.resize(count * size, 0);
            self.file.read(run, file_offset(first))?;
            let rows = target[row * region.cols..].chunks_mut(region.cols);
            for (target, bytes) in rows.zip(run.chunks_exact(size)) {
                target[col] = bytemuck::pod_read_unaligned(bytes);
            }
            Ok(())
        })
    }
}

impl Work<'_> {
    /// Quantizes the tensor. `amax` is the largest magnitude under the tensor scale, for NVFP4.
    pub(super) fn run(&self, amax: f32) -> Result<BlockSums, QuantizeFileError> {
        let Weight { matrices, is_inputs_first, kind, .. } = self.weight;
        let rows = usize::from(self.format.block.rows);
        let regions = regions(matrices, self.stored.layout, is_inputs_first, rows);
        let elements = regions.iter().map(|region| region.elements()).max().unwrap_or(0);
        if let (Some(begin), ScaleFormat::Ue4m3(bound)) =
            (self.offsets.tensor_scale, self.format.scale)
        {
            let encode = self.format.order.encode_scale(amax, bound);
            let scale = match self.tensor_scale {
                TensorScaleForm::Factor => 1.0 / encode,
                TensorScaleForm::Reciprocal => encode,
            };
            self.target.write(&scale.to_le_bytes(), begin)?;
        }
        let sums = for_each(&regions, elements, |buffers: &mut Buffers, region| {
            self.weight.read(region, buffers)?;
            let Buffers { wide, narrow, data, packed, scales, tiles, .. } = buffers;
            let out = OutputBuffers { data, packed, scales, tiles };
            match kind {
                SourceType::Bf16 => self.quantize(region, amax, narrow, out),
                _ => self.quantize(region, amax, wide, out),
            }
        })?;
        let mut total = BlockSums::default();
        sums.iter().for_each(|sums| total.merge(sums));
        Ok(total)
    }

    /// Quantizes one piece, writes it, and measures the error.
    fn quantize<S: Source>(
        &self,
        region: Region,
        amax: f32,
        src: &[S],
        out: OutputBuffers<'_>,
    ) -> Result<BlockSums, QuantizeFileError> {
        let Region { rows, cols, .. } = region;
        let OutputBuffers { data, packed: dense, scales, tiles } = out;
        let blocks = self.stored.blocks(cols);
        scales.resize(rows * blocks, 0);
        dense.resize(rows * self.stored.data_len(cols), 0);
        let format = self.format;
        let statistics = if let ScaleFormat::Ue4m3(_) = format.scale {
            let common = nvfp4::Common::nearest(amax);
            let (scale, _) =
                nvfp4::quantize_rows(src, rows, cols, &format, &common, dense, scales)?;
            BlockStatistics::of_nvfp4(src, dense, scales, scale, rows, cols)?
        } else {
            data.resize(src.len(), 0);
            quantize_rows(src, rows, cols, &format, data, scales)?;
            pack(self.stored.format, data, rows, cols, dense)?;
            BlockStatistics::of_mx(src, data, scales, rows, cols, &format)?
        };
        let data = if self.stored.format == FileFormat::Mxfp8 { data } else { dense };
        let begin = self.offsets.data + region.data_begin(self.weight.matrices, self.stored);
        self.target.write(data, begin)?;
        let begin = self.offsets.scales + region.scales_begin(self.weight.matrices, self.stored);
        match self.stored.layout {
            ScaleLayout::Plain => self.target.write(scales, begin)?,
            ScaleLayout::Tiled => {
                tiles.resize(scale_tiles::tiled_len(rows, blocks), 0);
                scale_tiles::to_tiles(scales, rows, blocks, tiles)?;
                self.target.write(tiles, begin)?;
            }
        }
        Ok(statistics.total())
    }
}

/// Output buffers of a piece.
struct OutputBuffers<'a> {
    data: &'a mut Vec<u8>,
    packed: &'a mut Vec<u8>,
    scales: &'a mut Vec<u8>,
    tiles: &'a mut Vec<u8>,
}

/// Data without gaps, where elements have less than eight bits.
fn pack(
    format: FileFormat,
    data: &[u8],
    rows: usize,
    cols: usize,
    bytes: &mut [u8],
) -> Result<(), QuantizeError> {
    match format {
        FileFormat::Mxfp8 => Ok(()),
        FileFormat::Mxfp6 => packed::pack_fp6(data, rows, cols, bytes),
        FileFormat::Mxfp4 | FileFormat::Nvfp4 => packed::pack_fp4(data, rows, cols, bytes),
    }
}
