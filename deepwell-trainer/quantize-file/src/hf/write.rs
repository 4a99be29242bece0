//! Writes one file of a quantized folder.

use std::collections::HashMap;
use std::path::Path;

use ::safetensors::Dtype;
use deepwell_ir::capture::StoredTensor;
use deepwell_precision::{QuantFormat, ScaleFormat, nvfp4};

use super::super::decide::ModelFile;
use super::super::report::{Quality, TensorReport};
use super::super::safetensors::{self, NewTensor};
use super::super::shape::Stored;
use super::super::tensor::{
    PlaneOffsets, SourceFile, TargetFile, TensorScaleForm, Work, copy, copy_as_bf16,
};
use super::super::{QuantizeFileError, ScaleLayout};
use super::choice::Choice;
use super::matrix::weight_of;
use super::names::{FolderFormat, WEIGHT};
use super::options::QuantizeFolderOptions;

/// Amax of weight and input of NVFP4 tensors.
pub(super) struct Scalars {
    /// By tensor name.
    pub(super) amax: HashMap<String, (f32, f32)>,
    pub(super) has_input_scales: bool,
}

/// Writes the tensors of one file, reports each, and returns the new tensors.
pub(super) fn write_file(
    source: &ModelFile<'_>,
    choices: &[Choice],
    scalars: &Scalars,
    options: &QuantizeFolderOptions,
    target: &Path,
    report: &mut dyn FnMut(TensorReport),
) -> Result<Vec<NewTensor>, QuantizeFileError> {
    let mut new = Vec::new();
    let mut counts = Vec::new();
    for (tensor, choice) in source.header.tensors.iter().zip(choices) {
        let of_tensor = new_tensors(tensor, choice, scalars, options);
        counts.push(of_tensor.len());
        new.extend(of_tensor);
    }
    safetensors::check_names(source.path, &new)?;
    let (target_file, begins) = safetensors::create(target, &new, &source.header.metadata)?;
    let from = SourceFile { file: &source.file, path: source.path };
    let target = TargetFile { file: &target_file, path: target };
    let mut first = 0;
    for ((tensor, choice), count) in source.header.tensors.iter().zip(choices).zip(counts) {
        let begins = &begins[first..first + count];
        let bytes_out = new[first..first + count].iter().map(|new| new.bytes).sum();
        let quality = match choice.format {
            None => {
                let is_narrowed = new[first].bytes < tensor.size_bytes;
                let copy = if is_narrowed { copy_as_bf16 } else { copy };
                copy(from, tensor, target, begins[0])?;
                None
            }
            Some(format) => Some(quantize(from, tensor, format, target, begins, scalars, options)?),
        };
        first += count;
        report(TensorReport {
            name: tensor.name.clone(),
            dtype: tensor.dtype.to_string(),
            shape: tensor.shape.clone(),
            inputs_first: false,
            reason: choice.reason.clone(),
            bytes_in: tensor.size_bytes,
            bytes_out,
            quality,
        });
    }
    Ok(new)
}

/// The tensors that one tensor becomes: data, scales, tensor scale and input scale, in this order.
fn new_tensors(
    tensor: &StoredTensor,
    choice: &Choice,
    scalars: &Scalars,
    options: &QuantizeFolderOptions,
) -> Vec<NewTensor> {
    let Some((format, _)) = choice.format else {
        let is_narrowed = options.keeps_as_bf16
            && tensor.dtype == Dtype::F32
            && !options.keeps_f32.contains(&tensor.name);
        let mut new = NewTensor::of(tensor);
        if is_narrowed {
            (new.dtype, new.bytes) = ("BF16".to_owned(), new.bytes / 2);
        }
        return vec![new];
    };
    let stored = Stored { format: format.into(), layout: ScaleLayout::Plain };
    let module = tensor.name.strip_suffix(WEIGHT).unwrap_or(&tensor.name);
    let names = options.convention.planes(module, format);
    let plane = |name: String, dtype: &str, shape: Vec<usize>| {
        let bytes = shape.iter().product::<usize>() as u64 * if dtype == "F32" { 4 } else { 1 };
        NewTensor { name, dtype: dtype.to_owned(), shape, bytes }
    };
    let cols = tensor.shape.last().copied().unwrap_or(1);
    let scales = [&tensor.shape[..tensor.shape.len() - 1], &[stored.blocks(cols)]].concat();
    let input_scale = names.input_scale.filter(|_| scalars.has_input_scales);
    let scalar = |name: String| plane(name, "F32", options.convention.scalar_shape());
    [
        plane(names.data, stored.data_dtype(), stored.data_shape(&tensor.shape)),
        plane(names.scales, stored.scales_dtype(), scales),
    ]
    .into_iter()
    .chain(names.tensor_scale.map(scalar))
    .chain(input_scale.map(scalar))
    .collect()
}

/// Quantizes one tensor into the planes at `begins`.
fn quantize(
    from: SourceFile<'_>,
    tensor: &StoredTensor,
    (folder_format, format): (FolderFormat, QuantFormat),
    target: TargetFile<'_>,
    begins: &[u64],
    scalars: &Scalars,
    options: &QuantizeFolderOptions,
) -> Result<Quality, QuantizeFileError> {
    let (amax, input_amax) = scalars.amax.get(&tensor.name).copied().unwrap_or_default();
    let tensor_scale = options.convention.tensor_scale();
    let work = Work {
        weight: weight_of(from, tensor)?,
        target,
        stored: Stored { format: folder_format.into(), layout: ScaleLayout::Plain },
        format,
        offsets: PlaneOffsets {
            data: begins[0],
            scales: begins[1],
            tensor_scale: begins.get(2).copied(),
        },
        tensor_scale,
    };
    let sums = work.run(amax)?;
    if let (Some(&begin), ScaleFormat::Ue4m3(_)) = (begins.get(3), format.scale) {
        // Activations are quantized by the engine, whose block scales reach 448.
        let encode = nvfp4::encode_scale(input_amax, nvfp4::ScaleBound::Max448);
        let scale = match tensor_scale {
            TensorScaleForm::Factor => 1.0 / encode,
            TensorScaleForm::Reciprocal => encode,
        };
        target.write(&scale.to_le_bytes(), begin)?;
    }
    match sums.blocks_not_finite {
        0 => Ok(Quality::from(sums)),
        count => Err(QuantizeFileError::NotFinite {
            name: tensor.name.clone(),
            what: format!("{count} blocks"),
        }),
    }
}
