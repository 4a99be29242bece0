//! From a model folder to a quantized model folder.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Instant;

use deepwell_ir::capture::StoredTensor;
use deepwell_precision::QuantFormat;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::super::decide::{ModelFile, decide};
use super::super::metadata::Quantized;
use super::super::output::Output;
use super::super::report::{QuantizeReport, TensorReport};
use super::super::safetensors;
use super::super::tensor::SourceFile;
use super::super::{QuantizeFileError, QuantizeFileOptions};
use super::choice::{Choice, choose};
use super::config::{self, Statement};
use super::groups::{experts_of, scale_group};
use super::matrix::weight_of;
use super::names::{FolderFormat, WEIGHT};
use super::options::QuantizeFolderOptions;
use super::write::{Scalars, write_file};

/// The configuration of a model.
pub(crate) const CONFIG: &str = "config.json";
/// Extensions of files with weights, which are not copied.
const WEIGHT_FILES: [&str; 7] = ["safetensors", "bin", "pt", "pth", "gguf", "h5", "msgpack"];
/// The smallest non-zero amax of an NVFP4 tensor: its tensor scale is a normal number, which
/// engines that flush subnormal numbers can invert.
const AMAX_MIN: f32 = 2688.0 * f32::MIN_POSITIVE;

/// Result of [`quantize_folder`].
#[derive(Clone, Debug, Serialize)]
pub struct QuantizedFolder {
    /// The tensors.
    #[serde(flatten)]
    pub report: QuantizeReport,
    /// Whether activations are quantized: with input scales (`static`), with scales of their own
    /// (`dynamic`), or not at all (`none`).
    pub activations: &'static str,
    /// All files.
    pub files: Vec<String>,
}

/// Quantizes a model folder for inference engines. The output appears once complete.
///
/// # Errors
///
/// [`QuantizeFileError`]: the input is no folder of a model or is already quantized, a tensor has a
/// form that no engine reads or is not finite, the output exists, or the system reports an error.
pub fn quantize_folder(
    options: &QuantizeFolderOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<QuantizedFolder, QuantizeFileError> {
    let start = Instant::now();
    let mut config = read_config(&options.input)?;
    let model = safetensors::find(&options.input)?;
    let mut files = Vec::new();
    for (path, name) in &model.files {
        let (file, header) = safetensors::open(path)?;
        if let Some(quantized) = Quantized::of(&header, path)? {
            let format = quantized.format.name();
            return Err(QuantizeFileError::AlreadyQuantized { path: path.clone(), format });
        }
        files.push(ModelFile { path, name, file, header });
    }
    let headers = files.iter().map(|file| &file.header);
    // Formats of a run replace the policy, but not what is known of each tensor's layout.
    let (decisions, mut notes) = decide(options.policy.as_ref(), &options.input, headers)?;
    let tensors: Vec<&StoredTensor> = files.iter().flat_map(|file| &file.header.tensors).collect();
    let (choices, remarks) = choose(&tensors, decisions, options)?;
    notes.extend(remarks);
    let modules = Modules::of(&tensors, &choices, options);
    let scalars = scalars(&files, &choices, &modules, options)?;

    let output = Output::begin(&model, &options.output, false)?;
    let mut file_options = QuantizeFileOptions::new(
        options.input.clone(),
        options.output.clone(),
        options.format.into(),
    );
    file_options.policy.clone_from(&options.policy);
    let mut report = QuantizeReport::new(&file_options);
    report.notes = notes;
    let total: u64 = tensors.iter().map(|tensor| tensor.size_bytes).sum();
    let mut choices = choices.into_iter();
    let mut index = Vec::new();
    for source in &files {
        let of_file: Vec<Choice> = choices.by_ref().take(source.header.tensors.len()).collect();
        let target = output.file(source.name);
        let mut add = |tensor: TensorReport| {
            report.add(tensor);
            progress(report.bytes_in, total);
        };
        let new = write_file(source, &of_file, &scalars, options, &target, &mut add)?;
        index.push((source.name.to_owned(), new));
    }
    copy_other_files(&options.input, &output)?;
    modules.write_configs(&mut config, options, &output)?;
    output.finish(&model, &index)?;
    report.seconds = start.elapsed().as_secs_f64();
    let files = file_names(&options.output)?;
    Ok(QuantizedFolder { report, activations: modules.activations(options.format), files })
}

fn read_config(folder: &Path) -> Result<Map<String, Value>, QuantizeFileError> {
    let path = folder.join(CONFIG);
    if !path.is_file() {
        return Err(QuantizeFileError::NoConfig { path: folder.to_path_buf() });
    }
    let text = fs::read(&path).map_err(QuantizeFileError::io("read", &path))?;
    let config: Map<String, Value> = serde_json::from_slice(&text)
        .map_err(|error| QuantizeFileError::invalid(&path, error.to_string()))?;
    match config.get(config::KEY) {
        None | Some(Value::Null) => Ok(config),
        Some(_) => {
            let format = "quantized weights (`quantization_config`)";
            Err(QuantizeFileError::AlreadyQuantized { path, format })
        }
    }
}

/// The modules of a folder by their format.
struct Modules {
    main: Vec<String>,
    exceptions: Vec<String>,
    ignore: Vec<String>,
    has_nvfp4: bool,
    has_input_scales: bool,
}

impl Modules {
    fn of(
        tensors: &[&StoredTensor],
        choices: &[Choice],
        options: &QuantizeFolderOptions,
    ) -> Modules {
        let mut modules = Modules {
            main: Vec::new(),
            exceptions: Vec::new(),
            ignore: Vec::new(),
            has_nvfp4: false,
            has_input_scales: true,
        };
        for (tensor, choice) in tensors.iter().zip(choices) {
            let Some(module) = tensor.name.strip_suffix(WEIGHT) else { continue };
            let list = match choice.format {
                Some((format, _)) if format == options.format => &mut modules.main,
                Some(_) => &mut modules.exceptions,
                None => &mut modules.ignore,
            };
            list.push(module.to_owned());
            if matches!(choice.format, Some((FolderFormat::Nvfp4, _))) {
                modules.has_nvfp4 = true;
                modules.has_input_scales &= options.input_amax.contains_key(&tensor.name);
            }
        }
        // A tied head has no tensor, but a module.
        if !tensors.iter().any(|tensor| tensor.name == "lm_head.weight") {
            modules.ignore.push("lm_head".to_owned());
        }
        // Engines ask for the experts of a layer as one module.
        let experts: Vec<String> =
            modules.ignore.iter().filter_map(|module| experts_of(module)).collect();
        modules.ignore.extend(experts);
        modules.ignore.sort_unstable();
        modules.ignore.dedup();
        modules
    }

    fn activations(&self, format: FolderFormat) -> &'static str {
        match (format, self.has_nvfp4 && self.has_input_scales) {
            (FolderFormat::Nvfp4, true) => "static",
            (FolderFormat::Nvfp4, false) => "none",
            (FolderFormat::Mxfp8, _) => "dynamic",
        }
    }

    fn write_configs(
        &self,
        config: &mut Map<String, Value>,
        options: &QuantizeFolderOptions,
        output: &Output<'_>,
    ) -> Result<(), QuantizeFileError> {
        let statement = Statement {
            convention: options.convention,
            format: options.format,
            exceptions: &self.exceptions,
            modules: &self.main,
            ignore: &self.ignore,
            has_input_scales: self.has_input_scales,
        };
        if options.keeps_as_bf16 {
            config.remove("torch_dtype");
            config.insert("dtype".to_owned(), json!("bfloat16"));
        }
        config.insert(config::KEY.to_owned(), statement.config());
        write_json(&output.file(CONFIG), &Value::Object(config.clone()))?;
        match statement.quant_config_file() {
            Some(file) => write_json(&output.file(config::QUANT_CONFIG), &file),
            None => Ok(()),
        }
    }
}

/// Amax of weights and inputs for each NVFP4 tensor: equal for modules that engines merge.
fn scalars(
    files: &[ModelFile<'_>],
    choices: &[Choice],
    modules: &Modules,
    options: &QuantizeFolderOptions,
) -> Result<Scalars, QuantizeFileError> {
    let mut of_group: BTreeMap<String, (f32, f32)> = BTreeMap::new();
    let mut group_of: BTreeMap<String, String> = BTreeMap::new();
    let tensors = files.iter().flat_map(|file| {
        let from = SourceFile { file: &file.file, path: file.path };
        file.header.tensors.iter().map(move |tensor| (from, tensor))
    });
    for ((file, tensor), choice) in tensors.zip(choices) {
        let Some((FolderFormat::Nvfp4, QuantFormat { .. })) = choice.format else { continue };
        let module = tensor.name.strip_suffix(WEIGHT).unwrap_or(&tensor.name);
        let weight = weight_of(file, tensor)?;
        let amax = match weight.amax()? {
            0.0 => 0.0,
            amax => amax.max(AMAX_MIN),
        };
        let input = options.input_amax.get(&tensor.name).copied().unwrap_or(0.0);
        let group = scale_group(module);
        let (of_weights, of_inputs) = of_group.entry(group.clone()).or_default();
        *of_weights = of_weights.max(amax);
        *of_inputs = of_inputs.max(input);
        group_of.insert(tensor.name.clone(), group);
    }
    let amax =
        group_of.into_iter().filter_map(|(name, group)| Some((name, *of_group.get(&group)?)));
    Ok(Scalars { amax: amax.collect(), has_input_scales: modules.has_input_scales })
}

/// Copies the tokenizer and all other small files.
pub(crate) fn copy_other_files(input: &Path, output: &Output<'_>) -> Result<(), QuantizeFileError> {
    for name in file_names(input)? {
        let path = input.join(&name);
        let extension = path.extension().and_then(|extension| extension.to_str());
        let is_weights = extension.is_some_and(|it| WEIGHT_FILES.contains(&it));
        let is_config = [CONFIG, config::QUANT_CONFIG].contains(&name.as_str());
        if is_weights || is_config || name.ends_with(".index.json") || name.starts_with('.') {
            continue;
        }
        fs::copy(&path, output.file(&name)).map_err(QuantizeFileError::io("copy", &path))?;
    }
    Ok(())
}

/// The names of the files in a folder, sorted.
fn file_names(folder: &Path) -> Result<Vec<String>, QuantizeFileError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(QuantizeFileError::io("read", folder))? {
        let entry = entry.map_err(QuantizeFileError::io("read", folder))?;
        if entry.path().is_file() {
            names.extend(entry.file_name().into_string());
        }
    }
    names.sort_unstable();
    Ok(names)
}

fn write_json(path: &Path, value: &Value) -> Result<(), QuantizeFileError> {
    fs::write(path, format!("{value:#}\n")).map_err(QuantizeFileError::io("write", path))
}
