//! From the quantized form of a model back to numbers.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use deepwell_ir::capture::StoredTensor;
use deepwell_precision::{ScaleRule, dequantize_rows, nvfp4, packed, scale_tiles, ue4m3};
use half::{bf16, f16};

use super::hf::{self, FolderConfig};
use super::metadata::{KEY, Original, Quantized};
use super::output::Output;
use super::planes::{QuantizedTensor, QuantizedTensors};
use super::regions::{Region, for_each, for_each_run, regions};
use super::report::DequantizeReport;
use super::safetensors::{self, Header, NewTensor};
use super::shape::{Matrices, Stored, inputs_last};
use super::tensor::TensorScaleForm;
use super::{FileFormat, QuantizeFileError, ScaleLayout};

/// Bytes of a kept tensor copied at once.
const COPY_BYTES: usize = 1 << 20;

/// The block scale 1 of NVFP4.
const ONE: u8 = 0x38;
const _: () = assert!(ue4m3::decode(ONE) == 1.0);

/// Dequantizes a model written by [`super::quantize`]: each tensor gets its original name, shape
/// and type, with the values of data and scales. Reads also folders of inference engines, such as
/// from [`super::quantize_folder`]: their tensors get the type that `config.json` states, and the
/// output gets the folder's other files. The output appears once complete.
///
/// # Errors
///
/// [`QuantizeFileError`]: the input is not quantized in one of these forms or is damaged, the
/// output exists without `force`, or the system reports an error.
pub fn dequantize(
    input: &Path,
    output: &Path,
    force: bool,
) -> Result<DequantizeReport, QuantizeFileError> {
    let start = Instant::now();
    let model = safetensors::find(input)?;
    let mut files = Vec::new();
    let mut is_own = false;
    for (path, name) in &model.files {
        let (file, header) = safetensors::open(path)?;
        let quantized = Quantized::of(&header, path)?;
        is_own |= quantized.is_some();
        files.push((path.as_path(), name, file, header, quantized));
    }
    let config = match is_own || !input.is_dir() {
        true => None,
        false => hf::folder_config(input)?,
    };
    let dtype = config.as_ref().map_or("BF16", |config| config.dtype);
    let mut inputs = Vec::new();
    for (path, name, file, header, quantized) in &files {
        let tensors = match quantized {
            Some(quantized) => QuantizedTensors::of(quantized),
            None if is_own => {
                let path = path.to_path_buf();
                return Err(QuantizeFileError::NotQuantized { path, key: KEY });
            }
            None => hf::planes_of(header, path, dtype)?,
        };
        inputs.push((name, Input { path, file, header }, tensors));
    }
    if inputs.iter().all(|(_, _, tensors)| tensors.tensors.is_empty()) && !is_own {
        return Err(QuantizeFileError::NotQuantized { path: input.to_path_buf(), key: KEY });
    }
    let target = Output::begin(&model, output, force)?;
    let mut report = DequantizeReport::default();
    let mut index = Vec::new();
    for (name, input, tensors) in &inputs {
        let new = input.dequantize(tensors, &target.file(name), &mut report)?;
        index.push(((**name).clone(), new));
    }
    if let Some(config) = config {
        write_other_files(input, config, &target)?;
    }
    target.finish(&model, &index)?;
    report.seconds = start.elapsed().as_secs_f64();
    Ok(report)
}

/// Writes the configuration without quantization, and copies the other small files.
fn write_other_files(
    input: &Path,
    config: FolderConfig,
    target: &Output<'_>,
) -> Result<(), QuantizeFileError> {
    hf::copy_other_files(input, target)?;
    config.write(&target.file(hf::CONFIG))
}

/// A quantized file.
struct Input<'a> {
    path: &'a Path,
    file: &'a File,
    header: &'a Header,
}

/// The parts of one quantized tensor.
struct StoredPlanes<'a> {
    data: &'a StoredTensor,
    scales: &'a StoredTensor,
    tensor_scale: f32,
    tensor_scale_form: TensorScaleForm,
    stored: Stored,
    matrices: Matrices,
    /// Whether the tensor was the transposes: `[.., cols, rows]`.
    is_inputs_first: bool,
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers {
    stored: Vec<u8>,
    data: Vec<u8>,
    scales: Vec<u8>,
    tiles: Vec<u8>,
    wide: Vec<f32>,
    narrow: Vec<bf16>,
    half: Vec<u16>,
    run: Vec<u8>,
    ones: Vec<u8>,
}

impl Input<'_> {
    fn dequantize(
        &self,
        quantized: &QuantizedTensors,
        target: &Path,
        report: &mut DequantizeReport,
    ) -> Result<Vec<NewTensor>, QuantizeFileError> {
        let mut jobs = Vec::new();
        let mut new = Vec::new();
        for tensor in &self.header.tensors {
            if quantized.scales.contains(&tensor.name) {
                continue;
            }
            let Some(of_tensor) = quantized.tensors.get(&tensor.name) else {
                new.push(NewTensor::of(tensor));
                jobs.push((tensor, None));
                continue;
            };
            let planes = self.planes(tensor, of_tensor)?;
            let elements = planes.matrices.rows_total() * planes.matrices.cols;
            let Original { dtype, shape, .. } = of_tensor.original.clone();
            let bytes = elements as u64 * if dtype == "F32" { 4 } else { 2 };
            new.push(NewTensor { name: of_tensor.name.clone(), dtype, shape, bytes });
            jobs.push((tensor, Some(planes)));
        }
        safetensors::check_names(self.path, &new)?;
        let quantized_count = jobs.iter().filter(|(_, planes)| planes.is_some()).count();
        if quantized_count != quantized.tensors.len() {
            let expected = quantized.tensors.len();
            let detail =
                format!("`{KEY}` names {expected} tensors, of which {quantized_count} are there");
            return Err(QuantizeFileError::invalid(self.path, detail));
        }
        let mut metadata: BTreeMap<String, String> = self.header.metadata.clone();
        metadata.remove(KEY);
        let (file, begins) = safetensors::create(target, &new, &metadata)?;
        for (((tensor, planes), begin), new) in jobs.iter().zip(begins).zip(&new) {
            let out = Destination { file: &file, path: target, begin };
            match planes {
                None => self.copy(tensor, &out)?,
                Some(planes) => {
                    self.tensor(planes, &new.dtype, &out)?;
                    report.tensors += 1;
                    report.bytes_in += planes.data.size_bytes + planes.scales.size_bytes;
                    report.bytes_out += new.bytes;
                    continue;
                }
            }
            report.tensors_kept += 1;
            report.bytes_in += tensor.size_bytes;
            report.bytes_out += tensor.size_bytes;
        }
        Ok(new)
    }

    /// Returns the parts of a quantized tensor, after checking their sizes.
    fn planes<'a>(
        &'a self,
        data: &'a StoredTensor,
        quantized: &QuantizedTensor,
    ) -> Result<StoredPlanes<'a>, QuantizeFileError> {
        let name = &data.name;
        let QuantizedTensor { original, stored, .. } = quantized;
        let invalid = |detail: String| QuantizeFileError::invalid(self.path, detail);
        if !["F32", "BF16", "F16"].contains(&original.dtype.as_str()) {
            let got = &original.dtype;
            return Err(invalid(format!("`{name}`: expected F32, BF16 or F16, got `{got}`")));
        }
        let is_inputs_first = original.transposed;
        if is_inputs_first && original.shape.len() < 2 {
            return Err(invalid(format!("`{name}` is transposed and no matrix")));
        }
        let matrices = Matrices::new(&inputs_last(&original.shape, is_inputs_first))
            .ok_or_else(|| invalid(format!("`{name}` is larger than a file can be")))?;
        let find = |name: &str, bytes: u64| {
            let stored = self.header.tensors.iter().find(|tensor| tensor.name == name);
            let tensor = stored.ok_or_else(|| invalid(format!("tensor `{name}` is missing")))?;
            match tensor.size_bytes == bytes {
                true => Ok(tensor),
                false => {
                    let got = tensor.size_bytes;
                    Err(invalid(format!("`{name}`: expected {bytes} bytes, got {got}")))
                }
            }
        };
        let rows = matrices.rows_total() as u64;
        let data = find(name, rows * stored.data_len(matrices.cols) as u64)?;
        let bytes = matrices.count as u64 * stored.matrix_scales_len(matrices) as u64;
        let scales = find(&quantized.scales, bytes)?;
        let mut tensor_scale = [0; 4];
        let mut tensor_scale_form = TensorScaleForm::Factor;
        if let Some((name, form)) = &quantized.tensor_scale {
            self.read(&mut tensor_scale, find(name, 4)?.offset_bytes)?;
            tensor_scale_form = *form;
        }
        let tensor_scale = f32::from_le_bytes(tensor_scale);
        let stored = *stored;
        Ok(StoredPlanes {
            data,
            scales,
            tensor_scale,
            tensor_scale_form,
            stored,
            matrices,
            is_inputs_first,
        })
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> Result<(), QuantizeFileError> {
        self.file.read_exact_at(bytes, at).map_err(QuantizeFileError::io("read", self.path))
    }

    fn copy(
        &self,
        tensor: &StoredTensor,
        target: &Destination<'_>,
    ) -> Result<(), QuantizeFileError> {
        let starts: Vec<u64> = (0..tensor.size_bytes).step_by(COPY_BYTES).collect();
        for_each(&starts, COPY_BYTES / 4, |buffer: &mut Vec<u8>, start| {
            buffer.resize(COPY_BYTES.min((tensor.size_bytes - start) as usize), 0);
            self.read(buffer, tensor.offset_bytes + start)?;
            target.write(buffer, start)
        })?;
        Ok(())
    }

    /// Dequantizes one tensor.
    fn tensor(
        &self,
        planes: &StoredPlanes<'_>,
        dtype: &str,
        target: &Destination<'_>,
    ) -> Result<(), QuantizeFileError> {
        let regions = regions(planes.matrices, planes.stored.layout, planes.is_inputs_first, 1);
        let elements = regions.iter().map(|region| region.elements()).max().unwrap_or(0);
        for_each(&regions, elements, |buffers: &mut Buffers, region| {
            self.load(planes, region, buffers)?;
            let Buffers { data, scales, wide, narrow, half, run, ones, .. } = buffers;
            let is_divided = planes.tensor_scale_form == TensorScaleForm::Reciprocal;
            if dtype == "BF16" && !is_divided {
                narrow.resize(region.elements(), bf16::ZERO);
                planes.values(region, data, scales, narrow)?;
                return target.write_elements(narrow, region, planes, run);
            }
            wide.resize(region.elements(), 0.0);
            match is_divided {
                true => planes.divided_values(region, data, scales, ones, wide)?,
                false => planes.values(region, data, scales, wide)?,
            }
            match dtype {
                "BF16" => {
                    narrow.clear();
                    narrow.extend(wide.iter().map(|&x| bf16::from_f32(x)));
                    target.write_elements(narrow, region, planes, run)
                }
                "F32" => target.write_elements(wide, region, planes, run),
                _ => {
                    half.clear();
                    half.extend(wide.iter().map(|&x| to_f16(x).to_bits()));
                    target.write_elements(half, region, planes, run)
                }
            }
        })?;
        Ok(())
    }

    /// Reads data and scales of a piece; NVFP4 stays packed.
    fn load(
        &self,
        planes: &StoredPlanes<'_>,
        region: Region,
        buffers: &mut Buffers,
    ) -> Result<(), QuantizeFileError> {
        let Region { rows, cols, .. } = region;
        let Buffers { stored, data, scales, tiles, .. } = buffers;
        let begin = planes.data.offset_bytes + region.data_begin(planes.matrices, planes.stored);
        stored.resize(rows * planes.stored.data_len(cols), 0);
        self.read(stored, begin)?;
        match planes.stored.format {
            FileFormat::Mxfp8 | FileFormat::Nvfp4 => std::mem::swap(data, stored),
            FileFormat::Mxfp6 => {
                data.resize(rows * cols, 0);
                packed::unpack_fp6(stored, rows, cols, data)?;
            }
            FileFormat::Mxfp4 => {
                data.resize(rows * cols, 0);
                packed::unpack_fp4(stored, rows, cols, data)?;
            }
        }
        let blocks = planes.stored.blocks(cols);
        let begin =
            planes.scales.offset_bytes + region.scales_begin(planes.matrices, planes.stored);
        scales.resize(rows * blocks, 0);
        match planes.stored.layout {
            ScaleLayout::Plain => self.read(scales, begin),
            ScaleLayout::Tiled => {
                tiles.resize(scale_tiles::tiled_len(rows, blocks), 0);
                self.read(tiles, begin)?;
                Ok(scale_tiles::from_tiles(tiles, rows, blocks, scales)?)
            }
        }
    }
}

impl StoredPlanes<'_> {
    fn values<T: deepwell_precision::DequantizedValue>(
        &self,
        region: Region,
        data: &[u8],
        scales: &[u8],
        out: &mut [T],
    ) -> Result<(), QuantizeFileError> {
        let Region { rows, cols, .. } = region;
        if self.stored.format == FileFormat::Nvfp4 {
            nvfp4::dequantize_rows(data, scales, self.tensor_scale, rows, cols, out)?;
        } else {
            let format = self.stored.format.quant_format(ScaleRule::default());
            dequantize_rows(data, scales, rows, cols, &format, out)?;
        }
        Ok(())
    }

    /// Values of NVFP4 in the arithmetic of compressed-tensors: the block scale divided by the
    /// stored reciprocal, times the element.
    fn divided_values(
        &self,
        region: Region,
        data: &[u8],
        scales: &[u8],
        ones: &mut Vec<u8>,
        out: &mut [f32],
    ) -> Result<(), QuantizeFileError> {
        let Region { rows, cols, .. } = region;
        ones.clear();
        ones.resize(scales.len(), ONE);
        nvfp4::dequantize_rows(data, ones, 1.0, rows, cols, out)?;
        let blocks = out.chunks_mut(cols).flat_map(|row| row.chunks_mut(nvfp4::BLOCK));
        for (block, &scale) in blocks.zip(scales) {
            let factor = ue4m3::decode(scale) / self.tensor_scale;
            block.iter_mut().for_each(|x| *x *= factor);
        }
        Ok(())
    }
}

/// Rounds to nearest; a finite value beyond the largest of the type becomes the largest.
fn to_f16(x: f32) -> f16 {
    let nearest = f16::from_f32(x);
    if nearest.is_infinite() && x.is_finite() { f16::MAX.copysign(nearest) } else { nearest }
}

/// Destination of one tensor.
struct Destination<'a> {
    file: &'a File,
    path: &'a Path,
    begin: u64,
}

impl Destination<'_> {
    /// Writes a piece in its order, or transposed through the buffer `run`.
    fn write_elements<T: bytemuck::Pod>(
        &self,
        values: &[T],
        region: Region,
        planes: &StoredPlanes<'_>,
        run: &mut Vec<u8>,
    ) -> Result<(), QuantizeFileError> {
        let size = size_of::<T>() as u64;
        if !planes.is_inputs_first {
            return self.write(bytemuck::cast_slice(values), size * region.first(planes.matrices));
        }
        for_each_run(region, planes.matrices, |col, first, row, count| {
            run.clear();
            for row in values[row * region.cols..].chunks(region.cols).take(count) {
                run.extend_from_slice(bytemuck::bytes_of(&row[col]));
            }
            self.write(run, size * first)
        })
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<(), QuantizeFileError> {
        self.file
            .write_all_at(bytes, self.begin + at)
            .map_err(QuantizeFileError::io("write", self.path))
    }
}
