//! `deepwell export`, and `deepwell export hf`.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use deepwell_ckpt::CkptDtype;
use deepwell_plan::format_bytes;
use deepwell_precision::PrecisionPolicy;
use deepwell_trainer::export::{
    ExportOptions, Exported, ExportedQuantized, Quantization, export_hf, export_hf_quantized,
    quantize_hf,
};
use deepwell_trainer::quantize_file::{Convention, FolderFormat};
use deepwell_trainer::terminal::stderr_draws;
use indicatif::{ProgressBar, ProgressStyle};

use crate::checkpoint_path::{Wanted, find};
use crate::generate::is_model;
use crate::output::{note, print, print_json, say};
use crate::{Outcome, bytes, export_mlflow};

/// Export trained models to other formats
#[derive(Args, Debug)]
pub(crate) struct ExportArgs {
    #[command(subcommand)]
    command: ExportCommand,
}

#[derive(Debug, Subcommand)]
enum ExportCommand {
    Hf(HfArgs),
    Mlflow(export_mlflow::MlflowArgs),
}

const HF_AFTER_HELP: &str = "\
CHECKPOINT is a checkpoint (`step-00000120`), a folder of checkpoints or the output folder of a run.
In a folder the newest complete checkpoint is used.

DIR gets config.json, generation_config.json, tokenizer.json and the master weights as safetensors,
with the names and layouts of transformers: `AutoModelForCausalLM.from_pretrained(DIR)` and
`AutoTokenizer.from_pretrained(DIR)` load it. Weights over --shard-size are split into shards with
an index. Configuration and tokenizer come from `model/` in the run's output folder. DIR is written
completely or not at all, and existing files are never overwritten.

A run without --tokenizer uses bytes as tokens; the exported tokenizer.json maps each byte to its
value. Token 0 ends a document and has no text: do not encode it, and stop at `eos_token_id`.

With --quantize, DIR is a folder for inference engines such as vLLM and SGLang; the converter of
llama.cpp reads NVFP4 of --format modelopt with input scales, where rows are multiples of 64.
CHECKPOINT may then also be a Hugging Face folder. The run's policy selects the weights (--policy
replaces it); all others stay in --dtype and are listed in the configuration. Weights that engines
merge (q, k, v; gate, up) get one format and one tensor scale, the experts of a layer one format.
NVFP4 weights get input scales from the activations of the run's last steps if the run quantized
these; otherwise activations are not quantized. MXFP8 activations have dynamic scales. The F32
weights need room beside DIR during the export. `deepwell quantize DIR OUT --dequantize` reads DIR.

A .pt2 archive has no config.json: --config provides the module's. Its tensors keep the names of the
module's state_dict.

Examples:
  deepwell export hf --to ./exported                the newest checkpoint of `deepwell train`
  deepwell export hf runs/book --to ./book --dtype bf16
  deepwell export hf runs/book/checkpoints/step-00000120 --to ./book-120 --shard-size 2GB
  deepwell export hf runs/mine --to ./mine --config ./module/config.json
  deepwell export hf runs/book --to ./book-nvfp4 --quantize nvfp4
  deepwell export hf ./llama --to ./llama-mxfp8 --quantize mxfp8 --format modelopt
  deepwell generate ./exported --prompt 'Once'      use the exported folder

Exit codes: 0 written, 2 a checkpoint, its model or the output cannot be used";

/// Export a checkpoint as a Hugging Face folder for `from_pretrained`
#[derive(Args, Debug)]
#[command(after_help = HF_AFTER_HELP)]
struct HfArgs {
    /// Checkpoint, folder of checkpoints, or output folder of a run; with --quantize also a
    /// Hugging Face folder
    #[arg(default_value = "target/deepwell-run")]
    checkpoint: PathBuf,
    /// Folder to write; must be missing or empty
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Element type of the weights that are not quantized [default: f32; with --quantize bf16, of a
    /// folder as it is]
    #[arg(long)]
    dtype: Option<ExportDType>,
    /// Quantize the weights
    #[arg(long, value_name = "FORMAT")]
    quantize: Option<FolderFormat>,
    /// Names and configuration of quantized weights
    #[arg(long, value_name = "NAME", default_value = "compressed-tensors", requires = "quantize")]
    format: Convention,
    /// Policy file in TOML that selects the weights to quantize
    #[arg(long, value_name = "FILE", requires = "quantize")]
    policy: Option<PathBuf>,
    /// Maximum bytes of tensors per file
    #[arg(long, value_name = "BYTES", default_value = "5GB", value_parser = bytes::parse)]
    shard_size: u64,
    /// Model that the run trained, replaces the one in the run folder: preset, config.json, model
    /// folder or .pt2 archive
    #[arg(long)]
    model: Option<String>,
    /// tokenizer.json to export, replaces the one in the run folder
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// config.json to export for a .pt2 archive
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Element types on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ExportDType {
    /// Exact copy of the FP32 master weights
    F32,
    /// Rounded to nearest, half the size
    Bf16,
}

pub(crate) fn run(args: &ExportArgs) -> Result<Outcome> {
    match &args.command {
        ExportCommand::Hf(args) => run_hf(args),
        ExportCommand::Mlflow(args) => export_mlflow::run(args),
    }
}

fn run_hf(args: &HfArgs) -> Result<Outcome> {
    if !args.checkpoint.exists() {
        bail!(
            "no checkpoint at `{}`\nhint: `deepwell train` makes one; CHECKPOINT says where",
            args.checkpoint.display()
        );
    }
    if let Some(format) = args.quantize {
        return run_quantized(args, format);
    }
    let options = args.options(ExportDType::F32)?;
    let mut progress = Progress::new();
    let exported = export_hf(&options, &mut |done, total| progress.tell(done, total))?;
    progress.bar.finish_and_clear();
    for remark in &exported.remarks {
        note(remark);
    }
    if args.json {
        print_json(&exported)?
    } else {
        print(&Table(&exported))?
    }
    Ok(Outcome::Success)
}

impl HfArgs {
    /// Options of the export of a checkpoint.
    fn options(&self, dtype: ExportDType) -> Result<ExportOptions> {
        Ok(ExportOptions {
            checkpoint: find(&self.checkpoint, Wanted::NewestComplete)?,
            to: self.to.clone(),
            dtype: match self.dtype.unwrap_or(dtype) {
                ExportDType::F32 => CkptDtype::F32,
                ExportDType::Bf16 => CkptDtype::Bf16,
            },
            shard_bytes_max: self.shard_size,
            model: self.model.clone(),
            tokenizer: self.tokenizer.clone(),
            config: self.config.clone(),
        })
    }
}

fn run_quantized(args: &HfArgs, format: FolderFormat) -> Result<Outcome> {
    let policy = match &args.policy {
        None => None,
        Some(path) => {
            let text = fs::read_to_string(path)
                .with_context(|| format!("cannot read `{}`", path.display()))?;
            Some(PrecisionPolicy::from_toml(&text, &path.display().to_string())?)
        }
    };
    let quantization = Quantization { format, convention: args.format, policy };
    let mut progress = Progress::new();
    let mut tell = |done, total| progress.tell(done, total);
    let exported = if is_model(&args.checkpoint) {
        let of_run = [args.model.is_some(), args.tokenizer.is_some(), args.config.is_some()];
        if of_run.contains(&true) {
            bail!(
                "--model, --tokenizer and --config: expected a checkpoint, got the folder `{}`\n\
                 hint: change the files in the folder",
                args.checkpoint.display()
            );
        }
        let keeps_as_bf16 = matches!(args.dtype, Some(ExportDType::Bf16));
        quantize_hf(&args.checkpoint, &args.to, &quantization, keeps_as_bf16, &mut tell)?
    } else {
        export_hf_quantized(&args.options(ExportDType::Bf16)?, &quantization, &mut tell)?
    };
    progress.bar.finish_and_clear();
    for remark in &exported.remarks {
        note(remark);
    }
    if args.json {
        print_json(&exported)?
    } else {
        print(&QuantizedTable { exported: &exported, to: &args.to })?
    }
    Ok(Outcome::Success)
}

/// A bar on a terminal; elsewhere a line every ten seconds.
struct Progress {
    bar: ProgressBar,
    told: Instant,
}

impl Progress {
    fn new() -> Progress {
        let bar = if stderr_draws() { ProgressBar::new(0) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template(
            "  export {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}",
        );
        let bar = match style {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        };
        Progress { bar, told: Instant::now() }
    }

    fn tell(&mut self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
        if self.bar.is_hidden() && self.told.elapsed() > Duration::from_secs(10) {
            self.told = Instant::now();
            say(format_args!("  export {} of {}", format_bytes(done), format_bytes(total)));
        }
    }
}

struct Table<'a>(&'a Exported);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Exported { checkpoint, step, family, dtype, folder, .. } = self.0;
        writeln!(f, "{}: {family}, step {step}", checkpoint.display())?;
        writeln!(
            f,
            "{}: {} tensors in {dtype}, {}",
            folder.path.display(),
            folder.tensors,
            format_bytes(folder.tensor_bytes)
        )?;
        for file in &folder.files {
            writeln!(f, "  {file}")?;
        }
        Ok(())
    }
}

struct QuantizedTable<'a> {
    exported: &'a ExportedQuantized,
    to: &'a Path,
}

impl fmt::Display for QuantizedTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExportedQuantized { step, convention, folder, .. } = self.exported;
        if let Some(step) = step {
            writeln!(f, "step {step}")?;
        }
        write!(f, "{}", folder.report)?;
        writeln!(
            f,
            "{}: {}, activation scales {}",
            self.to.display(),
            convention.name(),
            folder.activations
        )?;
        for file in &folder.files {
            writeln!(f, "  {file}")?;
        }
        Ok(())
    }
}
