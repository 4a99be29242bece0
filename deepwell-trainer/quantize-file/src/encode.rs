//! From a model to its quantized form.

use std::fs::File;
use std::path::Path;
use std::time::Instant;

use deepwell_precision::{OperandClass, PrecisionPolicy, TensorUse};

use super::metadata::{KEY, Original, Quantized};
use super::output::Output;
use super::regions::TILED_COLS_MAX;
use super::report::{Quality, QuantizeReport, TensorReport};
use super::safetensors::{self, Header, NewTensor, StoredTensor};
use super::shape::{Matrices, Stored, inputs_last};
use super::tensor::{Files, PlaneOffsets, SourceType, Work, copy};
use super::uses::uses;
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
        files.push(SourceFile { path, name, file, header });
    }
    let (reasons, notes) = decide(options, files.iter().map(|source| &source.header))?;

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

/// An open file of the model.
struct SourceFile<'a> {
    path: &'a Path,
    /// Name in the model's folder.
    name: &'a str,
    file: File,
    header: Header,
}

/// Decision about one tensor, with the reason.
struct Decision {
    is_quantized: bool,
    is_inputs_first: bool,
    reason: String,
}

/// A decision for each tensor of the headers, in order, and remarks.
fn decide<'a>(
    options: &QuantizeFileOptions,
    headers: impl Iterator<Item = &'a Header>,
) -> Result<(Vec<Decision>, Vec<String>), QuantizeFileError> {
    let tensors: Vec<&StoredTensor> = headers.flat_map(|header| &header.tensors).collect();
    let is_float = |tensor: &StoredTensor| SourceType::of(tensor).is_some();
    let folder = match options.input.is_dir() {
        true => options.input.as_path(),
        false => options.input.parent().unwrap_or(Path::new("")),
    };
    let (usage, notes) = uses(&tensors, folder);
    let uses: Vec<TensorUse<'_>> = tensors
        .iter()
        .zip(&usage)
        .filter(|(tensor, _)| is_float(tensor))
        .map(|(tensor, usage)| TensorUse { name: &tensor.name, role: usage.role, layer: None })
        .collect();
    let policy = match &options.policy {
        Some(policy) => policy.clone(),
        // A file has no order of execution, so first and last are undefined.
        None => PrecisionPolicy::from_toml("keep_first_last_bf16 = false", "default policy")?,
    };
    let mut assigned = policy.assign(&uses)?.into_iter();
    let mut decisions = Vec::new();
    for (tensor, usage) in tensors.into_iter().zip(usage) {
        let assignment = if is_float(tensor) { assigned.next() } else { None };
        let is_inputs_first = usage.is_inputs_first;
        let (is_quantized, reason) = match (assignment, usage.kept) {
            (None, _) => (false, format!("type {} is not quantized", tensor.dtype)),
            (Some(_), Some(reason)) => (false, reason.to_owned()),
            // A file contains the weights of the forward pass.
            (Some(assignment), None) => (
                assignment.operand(OperandClass::FpropWeight).is_some() && tensor.bytes > 0,
                assignment.reason,
            ),
        };
        decisions.push(Decision { is_quantized, is_inputs_first, reason });
    }
    match decisions.iter().any(|decision| decision.is_quantized) {
        true => Ok((decisions, notes)),
        false => Err(QuantizeFileError::NothingToQuantize),
    }
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
    source: &'a SourceFile<'_>,
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
            None => new.push(NewTensor {
                name: tensor.name.clone(),
                dtype: tensor.dtype.clone(),
                shape: tensor.shape.clone(),
                bytes: tensor.bytes,
            }),
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
                    dtype: tensor.dtype.clone(),
                    shape: tensor.shape.clone(),
                    transposed: is_inputs_first,
                };
                quantized.tensors.insert(tensor.name.clone(), original);
            }
        }
        jobs.push(Job { tensor, matrices, is_inputs_first, reason: decision.reason.clone() });
    }
    let mut names: Vec<&str> = new.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        let detail = format!("it has a tensor `{}`, the name that scales would get", twice[0]);
        return Err(QuantizeFileError::invalid(source.path, detail));
    }
    Ok(FilePlan { quantized, jobs, new })
}

/// Quantizes one file into `target`, adds to the report, and returns a description of the new
/// tensors.
fn quantize_file(
    source: &SourceFile<'_>,
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

    let files = Files {
        source: &source.file,
        source_path: source.path,
        target: &target_file,
        target_path: target,
    };
    let mut offsets = begins.iter().copied().zip(&new);
    for job in jobs {
        let tensor = job.tensor;
        let mut next = || offsets.next().map_or((0, 0), |(begin, new)| (begin, new.bytes));
        let (begin, bytes) = next();
        let mut bytes_out = bytes;
        let quality = match job.matrices {
            None => {
                copy(&files, tensor, begin)?;
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
                let work = Work {
                    files: &files,
                    tensor,
                    kind,
                    matrices,
                    is_inputs_first: job.is_inputs_first,
                    stored,
                    options,
                    offsets,
                };
                Some(Quality::from(work.run()?))
            }
        };
        report.add(TensorReport {
            name: tensor.name.clone(),
            dtype: tensor.dtype.clone(),
            shape: tensor.shape.clone(),
            inputs_first: job.is_inputs_first,
            reason: job.reason,
            bytes_in: tensor.bytes,
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
