//! `deepwell eval`.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use clap::builder::PossibleValuesParser;
use deepwell_precision::PRESETS;
use deepwell_trainer::Device;
use deepwell_trainer::data::{DataOptions, Dataset, DatasetSummary};
use deepwell_trainer::generate::{Evaluation, OpenOptions, TextModel};
use deepwell_trainer::terminal::stderr_draws;
use indicatif::ProgressBar;
use serde::Serialize;

use crate::Outcome;
use crate::checkpoint_path::{Wanted, find};
use crate::generate::is_model;
use crate::output::{grouped, note, print, print_json, say};

const AFTER_HELP: &str = "\
MODEL is a checkpoint, a folder of checkpoints or the output folder of a run (the newest complete
checkpoint is used); a Hugging Face folder, such as from `deepwell export hf`; a `.pt2` archive; or
a preset or config.json, which is evaluated with its initial weights. A run is evaluated with its
own tokenizer, precision and sequence length.

The whole text is evaluated; no share is held out. Only the token cache is written. The text is cut
into windows of --seq-len tokens that start --stride tokens apart. Each token except the first is
predicted once, in the first window that contains the preceding token, from the tokens of that
window; no token is added before the text. The loss is the mean over all predicted tokens in nats,
the perplexity is its exponential, and bits per byte is the sum in bits divided by the bytes of the
text. In conversations only the answers are predicted.

Examples:
  deepwell eval runs/book --data book.txt               the newest checkpoint of a run
  deepwell eval ./TinyLlama --data wiki.txt --seq-len 2048 --precision f32
  deepwell eval ./TinyLlama --data wiki.txt --seq-len 1024 --stride 512
  deepwell eval ./chat --data answers.jsonl --json | jq .loss

Exit codes: 0 success, 2 no model, no tokenizer, nothing to predict, or another input that cannot be
used";

/// Default window of a Hugging Face folder, in tokens.
const FOLDER_WINDOW: usize = 1024;

/// Measure loss, perplexity and bits per byte of a model on a text
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct EvalArgs {
    /// Checkpoint, folder of checkpoints, output folder of a run, Hugging Face folder, .pt2
    /// archive, config.json or preset
    model: PathBuf,
    /// Text to evaluate: text, .jsonl, .parquet, folders, globs or token files
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    data: Vec<PathBuf>,
    /// Field of a record that holds its text or messages [default: the first present of text,
    /// content, messages and conversations]
    #[arg(long, value_name = "NAME")]
    text_field: Option<String>,
    /// Hugging Face tokenizer.json [default: the run's or the folder's]
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Tokens per window [default: the run's sequence length; otherwise 1024, at most the model's
    /// maximum]
    #[arg(long, value_name = "TOKENS")]
    seq_len: Option<usize>,
    /// Tokens between the starts of two windows [default: --seq-len]
    #[arg(long, value_name = "TOKENS")]
    stride: Option<usize>,
    /// Precision of the GEMMs [default: the run's, otherwise bf16]
    #[arg(long, value_name = "NAME",
          value_parser = PossibleValuesParser::new(PRESETS.iter().copied()))]
    precision: Option<String>,
    /// `cpu`, `cuda[:N]`, or `emulated:ARCH` with sm90, sm100, sm103 or sm120
    #[arg(long, default_value_t = Device::Cpu)]
    device: Device,
    /// Folder of the token cache
    #[arg(long, value_name = "DIR", default_value = "target/deepwell-cache")]
    cache_dir: PathBuf,
    /// New place of the model that the run was started with, if moved: preset, config.json or
    /// folder
    #[arg(long = "model", value_name = "MODEL")]
    moved: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Output of `eval --json`.
#[derive(Debug, Serialize)]
struct Report<'a> {
    model: PathBuf,
    step: Option<u64>,
    untrained: bool,
    precision: String,
    device: String,
    #[serde(flatten)]
    evaluation: Evaluation,
    bytes: u64,
    time_s: f64,
    data: &'a DatasetSummary,
}

pub(crate) fn run(args: &EvalArgs) -> Result<Outcome> {
    let mut model = args.open()?;
    let is_untrained = args.is_untrained();
    if is_untrained {
        note("the weights are those that training begins with: MODEL has none");
    }
    let data = Dataset::prepare(
        &DataOptions {
            inputs: args.data.clone(),
            holds_out_all: true,
            text_field: args.text_field.clone(),
            tokenizer: model.tokenizer.clone(),
            cache_dir: args.cache_dir.clone(),
            heldout_tokens_min: 0,
            ..DataOptions::default()
        },
        &mut |_| {},
    )?;
    let summary = data.summary();
    if summary.skipped.total() > 0 {
        note(format_args!("skipped {}", summary.skipped));
    }
    summary.notes.iter().for_each(note);
    let step = model.step.map(|step| format!(", step {step}")).unwrap_or_default();
    say(format_args!(
        "{}{step}: {} on {}, window {}, {}",
        model.path.display(),
        model.precision,
        args.device,
        model.forward.window(),
        model.tokenizer.name()
    ));
    let started = Instant::now();
    let bar = stderr_draws().then(|| ProgressBar::new(1));
    let evaluation = model.evaluate(&data, args.stride, &mut |done, all| {
        if let Some(bar) = &bar {
            bar.set_length(all);
            bar.set_position(done);
        }
    });
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    let evaluation = evaluation?;
    let time_s = started.elapsed().as_secs_f64();
    if args.json {
        print_json(&Report {
            model: model.path,
            step: model.step,
            untrained: is_untrained,
            precision: model.precision,
            device: args.device.to_string(),
            evaluation,
            bytes: summary.bytes,
            time_s,
            data: summary,
        })?;
        return Ok(Outcome::Success);
    }
    let bits = evaluation.bits_per_byte.map_or("not known".to_owned(), |bits| format!("{bits:.4}"));
    print(&format_args!(
        "loss           {:.4} nats per token\n\
         perplexity     {:.3}\n\
         bits per byte  {bits}\n\
         tokens         {} predicted of {}, {} windows of {}\n",
        evaluation.loss,
        evaluation.perplexity,
        grouped(evaluation.tokens_predicted),
        grouped(evaluation.tokens),
        grouped(evaluation.windows),
        evaluation.seq_len
    ))?;
    Ok(Outcome::Success)
}

impl EvalArgs {
    /// Whether MODEL is a preset or a configuration, so that no weights exist.
    fn is_untrained(&self) -> bool {
        !self.model.is_dir() && self.model.extension().is_none_or(|ending| ending != "pt2")
    }

    fn open(&self) -> Result<TextModel> {
        let options = OpenOptions {
            model: self.moved.clone(),
            tokenizer: self.tokenizer.clone(),
            precision: self.precision.clone(),
            window: self.seq_len,
            device: self.device,
            tokens_wanted: FOLDER_WINDOW,
            scores: true,
            data: self.data.clone(),
        };
        if !self.model.is_dir() || is_model(&self.model) {
            return Ok(TextModel::from_folder(&self.model, &options)?);
        }
        let checkpoint = find(&self.model, Wanted::NewestComplete)?;
        Ok(TextModel::from_checkpoint(&checkpoint, &options)?)
    }
}
