//! Quantization of one tensor into data and scales.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use deepwell_precision::{
    BlockStatistics, BlockSums, QuantizeError, ScaleFormat, Source, nvfp4, packed, quantize_rows,
    scale_tiles,
};
use half::{bf16, f16};

use super::regions::{Region, for_each, for_each_run, regions};
use super::safetensors::StoredTensor;
use super::shape::{Matrices, Stored};
use super::{FileFormat, QuantizeFileError, QuantizeFileOptions, ScaleLayout};

/// Bytes of a kept tensor copied at once.
const COPY_BYTES: usize = 1 << 20;

/// Input and output files.
pub(super) struct Files<'a> {
    pub(super) source: &'a File,
    pub(super) source_path: &'a Path,
    pub(super) target: &'a File,
    pub(super) target_path: &'a Path,
}

impl Files<'_> {
    fn read(&self, bytes: &mut [u8], at: u64) -> Result<(), QuantizeFileError> {
        self.source
            .read_exact_at(bytes, at)
            .map_err(QuantizeFileError::io("read", self.source_path))
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<(), QuantizeFileError> {
        self.target
            .write_all_at(bytes, at)
            .map_err(QuantizeFileError::io("write", self.target_path))
    }
}

/// Copies a kept tensor.
pub(super) fn copy(
    files: &Files<'_>,
    tensor: &StoredTensor,
    target: u64,
) -> Result<(), QuantizeFileError> {
    let starts: Vec<u64> = (0..tensor.bytes).step_by(COPY_BYTES).collect();
    for_each(&starts, COPY_BYTES / 4, |buffer: &mut Vec<u8>, start| {
        buffer.resize(COPY_BYTES.min((tensor.bytes - start) as usize), 0);
        files.read(buffer, tensor.begin + start)?;
        files.write(buffer, target + start)
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
        match tensor.dtype.as_str() {
            "F32" => Some(Self::F32),
            "BF16" => Some(Self::Bf16),
            "F16" => Some(Self::F16),
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

/// One tensor to quantize.
pub(super) struct Work<'a> {
    pub(super) files: &'a Files<'a>,
    pub(super) tensor: &'a StoredTensor,
    pub(super) kind: SourceType,
    pub(super) matrices: Matrices,
    /// Whether the file contains the transpose: `[.., cols, rows]`.
    pub(super) is_inputs_first: bool,
    pub(super) stored: Stored,
    pub(super) options: &'a QuantizeFileOptions,
    pub(super) offsets: PlaneOffsets,
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

impl Work<'_> {
    pub(super) fn run(&self) -> Result<BlockSums, QuantizeFileError> {
        let regions = regions(self.matrices, self.stored.layout, self.is_inputs_first);
        let elements = regions.iter().map(|region| region.elements()).max().unwrap_or(0);
        let amax = match self.offsets.tensor_scale {
            None => 0.0,
            Some(_) => {
                let by_region = for_each(&regions, elements, |buffers: &mut Buffers, region| {
                    self.read(region, buffers)?;
                    Ok(match self.kind {
                        SourceType::Bf16 => nvfp4::amax(&buffers.narrow),
                        _ => nvfp4::amax(&buffers.wide),
                    })
                })?;
                by_region.into_iter().fold(0.0, f32::max)
            }
        };
        if let Some(begin) = self.offsets.tensor_scale {
            let scale = match self.stored.format.quant_format(self.options.scale_rule).scale {
                ScaleFormat::Ue4m3(bound) => 1.0 / nvfp4::encode_scale(amax, bound),
                _ => 1.0,
            };
            self.files.write(&scale.to_le_bytes(), begin)?;
        }
        let sums = for_each(&regions, elements, |buffers: &mut Buffers, region| {
            self.read(region, buffers)?;
            let Buffers { wide, narrow, data, packed, scales, tiles, .. } = buffers;
            let out = OutputBuffers { data, packed, scales, tiles };
            match self.kind {
                SourceType::Bf16 => self.quantize(region, amax, narrow, out),
                _ => self.quantize(region, amax, wide, out),
            }
        })?;
        let mut total = BlockSums::default();
        sums.iter().for_each(|sums| total.merge(sums));
        Ok(total)
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
        let file_offset = |first: u64| self.tensor.begin + size as u64 * first;
        if !self.is_inputs_first {
            let bytes = bytemuck::cast_slice_mut(target);
            return self.files.read(bytes, file_offset(region.first(self.matrices)));
        }
        for_each_run(region, self.matrices, |col, first, row, count| {
            run.resize(count * size, 0);
            self.files.read(run, file_offset(first))?;
            let rows = target[row * region.cols..].chunks_mut(region.cols);
            for (target, bytes) in rows.zip(run.chunks_exact(size)) {
                target[col] = bytemuck::pod_read_unaligned(bytes);
            }
            Ok(())
        })
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
        let format = self.stored.format.quant_format(self.options.scale_rule);
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
        let begin = self.offsets.data + region.data_begin(self.matrices, self.stored);
        self.files.write(data, begin)?;
        let begin = self.offsets.scales + region.scales_begin(self.matrices, self.stored);
        match self.stored.layout {
            ScaleLayout::Plain => self.files.write(scales, begin)?,
            ScaleLayout::Tiled => {
                tiles.resize(scale_tiles::tiled_len(rows, blocks), 0);
                scale_tiles::to_tiles(scales, rows, blocks, tiles)?;
                self.files.write(tiles, begin)?;
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
