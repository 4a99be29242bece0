//! From a model to its quantized form.

use std::path::Path;
use std::time::Instant;

use deepwell_ir::capture::StoredTensor;

use super::decide::{Decision, ModelFile, decide};
use super::hf;
use super::metadata::{KEY, Original, Quantized};
use super::output::Output;
use super::regions::TILED_COLS_MAX;
use super::report::{Quality, QuantizeReport, TensorReport};
use super::safetensors::{self, NewTensor};
use super::shape::{Matrices, Stored, inputs_last};
use super::tensor::{
    PlaneOffsets, SourceFile, SourceType, TargetFile, TensorScaleForm, Weight, Work, copy,
};
use super::{FileFormat, QuantizeFileError, QuantizeFileOptions, ScaleLayout};

/// Quantizes a model: `options.output` gets every tensor of the input, the tensors selected by the
/// policy as data and scales. Large tensors are split over the threads of the current rayon pool;
/// the bytes do not depend on the number of threads. The output appears once complete.
///
/// # Errors
///
/// [`QuantizeFileError`]: the input is no model, is already quantized or has nothing to quantize;
/// the output exists; the policy names missing tensors; or the system reports an error.
pub fn quantize(options: &QuantizeFileOptions) -> Result<QuantizeReport, QuantizeFileError> {
    let start = Instant::now();
    let model = safetensors::find(&options.input)?;
    let mut files = Vec::new();
    for (path, name) in &model.files {
        let (file, header) = safetensors::open(path)?;
        if let Some(quantized) = Quantized::of(&header, path)? {
            let format = quantized.format.name();
            return Err(QuantizeFileError::AlreadyQuantized { path: path.clone(), format });
        }
        if hf::planes_of(&header, path, "BF16").is_ok_and(|found| !found.tensors.is_empty()) {
            let format = "quantized modules";
            return Err(QuantizeFileError::AlreadyQuantized { path: path.clone(), format });
        }
        files.push(ModelFile { path, name, file, header });
    }
    let folder = match options.input.is_dir() {
        true => options.input.as_path(),
        false => options.input.parent().unwrap_or(Path::new("")),
    };
    let headers = files.iter().map(|source| &source.header);
    let (reasons, notes) = decide(options.policy.as_ref(), folder, headers)?;

    let output = Output::begin(&model, &options.output, options.force)?;
    let mut report = QuantizeReport::new(options);
    let mut reasons = reasons.into_iter();
    report.notes = notes;
    let mut index = Vec::new();
    for source in &files {
        let decisions: Vec<_> = reasons.by_ref().take(source.header.tensors.len()).collect();
        let target = output.file(source.name);
        let tensors = quantize_file(source, &decisions, options, &target, &mut report)?;
        index.push((source.name.to_owned(), tensors));
    }
    output.finish(&model, &index)?;
    report.seconds = start.elapsed().as_secs_f64();
    Ok(report)
}

/// A tensor of the input with its output form.
struct Job<'a> {
    tensor: &'a StoredTensor,
    /// None for a kept tensor.
    matrices: Option<(SourceType, Matrices)>,
    is_inputs_first: bool,
    reason: String,
}

/// The tensors of a quantized file, and the work that writes them.
struct FilePlan<'a> {
    quantized: Quantized,
    jobs: Vec<Job<'a>>,
    new: Vec<NewTensor>,
}

/// Plans the tensors of one quantized file.
fn plan_file<'a>(
    source: &'a ModelFile<'_>,
    decisions: &[Decision],
    options: &QuantizeFileOptions,
) -> Result<FilePlan<'a>, QuantizeFileError> {
    let stored = Stored { format: options.format, layout: options.layout };
    let mut quantized = Quantized::new(options.format, options.scale_rule, options.layout);
    let (mut jobs, mut new) = (Vec::new(), Vec::new());
    for (tensor, decision) in source.header.tensors.iter().zip(decisions) {
        let kind = SourceType::of(tensor).filter(|_| decision.is_quantized);
        let is_inputs_first = decision.is_inputs_first;
        let shape = inputs_last(&tensor.shape, is_inputs_first);
        let matrices = kind.and_then(|kind| Some((kind, Matrices::new(&shape)?)));
        match matrices {
            None => new.push(NewTensor::of(tensor)),
            Some((_, matrices)) => {
                if stored.layout == ScaleLayout::Tiled && matrices.cols > TILED_COLS_MAX {
                    return Err(QuantizeFileError::TooWide {
                        name: tensor.name.clone(),
                        cols: matrices.cols,
                        cols_max: TILED_COLS_MAX,
                    });
                }
                new.extend(stored_tensors(&tensor.name, &shape, matrices, stored));
                let original = Original {
                    dtype: tensor.dtype.to_string(),
                    shape: tensor.shape.clone(),
                    transposed: is_inputs_first,
                };
                quantized.tensors.insert(tensor.name.clone(), original);
            }
        }
        jobs.push(Job { tensor, matrices, is_inputs_first, reason: decision.reason.clone() });
    }
    safetensors::check_names(source.path, &new)?;
    Ok(FilePlan { quantized, jobs, new })
}

/// Quantizes one file into `target`, adds to the report, and returns a description of the new
/// tensors.
fn quantize_file(
    source: &ModelFile<'_>,
    decisions: &[Decision],
    options: &QuantizeFileOptions,
    target: &Path,
    report: &mut QuantizeReport,
) -> Result<Vec<NewTensor>, QuantizeFileError> {
    let stored = Stored { format: options.format, layout: options.layout };
    let FilePlan { quantized, jobs, new } = plan_file(source, decisions, options)?;
    let mut metadata = source.header.metadata.clone();
    let text = serde_json::to_string(&quantized)
        .map_err(|error| QuantizeFileError::invalid(target, error.to_string()))?;
    metadata.insert(KEY.to_owned(), text);
    let (target_file, begins) = safetensors::create(target, &new, &metadata)?;

    let from = SourceFile { file: &source.file, path: source.path };
    let target = TargetFile { file: &target_file, path: target };
    let mut offsets = begins.iter().copied().zip(&new);
    for job in jobs {
        let tensor = job.tensor;
        let mut next = || offsets.next().map_or((0, 0), |(begin, new)| (begin, new.bytes));
        let (begin, bytes) = next();
        let mut bytes_out = bytes;
        let quality = match job.matrices {
            None => {
                copy(from, tensor, target, begin)?;
                None
            }
            Some((kind, matrices)) => {
                let scales = next();
                bytes_out += scales.1;
                let mut offsets =
                    PlaneOffsets { data: begin, scales: scales.0, tensor_scale: None };
                if stored.format == FileFormat::Nvfp4 {
                    let (begin, bytes) = next();
                    offsets.tensor_scale = Some(begin);
                    bytes_out += bytes;
                }
                let is_inputs_first = job.is_inputs_first;
                let weight = Weight { file: from, tensor, kind, matrices, is_inputs_first };
                let amax = match offsets.tensor_scale {
                    None => 0.0,
                    Some(_) => weight.amax()?,
                };
                let format = stored.format.quant_format(options.scale_rule);
                let tensor_scale = TensorScaleForm::Factor;
                let work = Work { weight, target, stored, format, offsets, tensor_scale };
                Some(Quality::from(work.run(amax)?))
            }
        };
        report.add(TensorReport {
            name: tensor.name.clone(),
            dtype: tensor.dtype.to_string(),
            shape: tensor.shape.clone(),
            inputs_first: job.is_inputs_first,
            reason: job.reason,
            bytes_in: tensor.size_bytes,
            bytes_out,
            quality,
        });
    }
    Ok(new)
}

/// Data, scales and, for NVFP4, the tensor scale of one tensor; the last dimension of `shape` is
/// the inputs.
fn stored_tensors(
    name: &str,
    shape: &[usize],
    matrices: Matrices,
    stored: Stored,
) -> Vec<NewTensor> {
    let rows = matrices.rows_total() as u64;
    let mut new = vec![
        NewTensor {
            name: name.to_owned(),
            dtype: stored.data_dtype().to_owned(),
            shape: stored.data_shape(shape),
            bytes: rows * stored.data_len(matrices.cols) as u64,
        },
        NewTensor {
            name: format!("{name}_scale"),
            dtype: stored.scales_dtype().to_owned(),
            shape: stored.scales_shape(shape, matrices),
            bytes: matrices.count as u64 * stored.matrix_scales_len(matrices) as u64,
        },
    ];
    if stored.format == FileFormat::Nvfp4 {
        let name = format!("{name}_scale_2");
        new.push(NewTensor { name, dtype: "F32".to_owned(), shape: Vec::new(), bytes: 4 });
    }
    new
}
