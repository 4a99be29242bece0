//! `deepwell generate`.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use deepwell_precision::PRESETS;
use deepwell_trainer::Device;
use deepwell_trainer::generate::{Generation, OpenOptions, Request, Sampling, TextModel};
use serde::Serialize;

use crate::Outcome;
use crate::checkpoint_path::{Wanted, find};
use crate::output::{print_json, say};

const AFTER_HELP: &str = "\
PATH is a checkpoint (`step-00000120`), a folder of checkpoints or the output folder of a run (the
newest complete checkpoint is used), or a Hugging Face folder with config.json, safetensors and
tokenizer.json. A run is used with its own tokenizer, precision and sequence length.

An empty prompt is replaced by the prefix of the tokenizer's template, otherwise by `bos_token_id`
of generation_config.json or config.json, otherwise by the end-of-text token. Generation stops at
any `eos_token_id` of generation_config.json (or of config.json if that has none) and at the
tokenizer's end-of-text token.

Text is streamed to stdout, without the prompt (see --echo); messages go to stderr. Each token runs
one forward pass over a window of tokens, without a KV cache, which suits small models and short
texts. Only the last tokens that fit into the window are used. The same model, prompt, options and
seed give the same text on the same kind of device.

Examples:
  deepwell generate --prompt 'fn main() {'               the newest checkpoint of `deepwell train`
  deepwell generate runs/book --prompt 'Once' --max-tokens 200 --temperature 0.8 --top-p 0.95
  deepwell generate runs/book/checkpoints/step-00000120 --prompt 'Once' --greedy
  deepwell generate ./TinyLlama --prompt-file question.txt --top-k 40 --seed 7 --json
  deepwell generate --device cuda --prompt 'use std::' > more.rs

Exit codes: 0 success, 2 no checkpoint, no tokenizer, a prompt that does not fit, or another input
that cannot be used";

/// Generate text with a trained model
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct GenerateArgs {
    /// Checkpoint, folder of checkpoints, output folder of a run, or Hugging Face folder
    #[arg(default_value = "target/deepwell-run")]
    path: PathBuf,
    /// Text to continue [default: none, start a new text]
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// File with the text to continue; `-` reads stdin
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    max_tokens: usize,
    /// Divisor of the logits: higher is more random; 0 is --greedy
    #[arg(long, value_name = "NUMBER", default_value_t = 1.0, allow_negative_numbers = true)]
    temperature: f64,
    /// Sample from this number of most probable tokens [default: all]
    #[arg(long, value_name = "TOKENS")]
    top_k: Option<usize>,
    /// Sample from the smallest set of most probable tokens whose total probability reaches this
    /// value
    #[arg(long, value_name = "PROBABILITY", default_value_t = 1.0)]
    top_p: f64,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Always select the most probable token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "seed"])]
    greedy: bool,
    /// Continue after end-of-text tokens
    #[arg(long)]
    ignore_end: bool,
    /// Print the prompt before the text
    #[arg(long, conflicts_with = "json")]
    echo: bool,
    /// Tokens per forward pass [default: the run's sequence length; for a Hugging Face folder
    /// enough for prompt and text, at most the model's maximum]
    #[arg(long, value_name = "TOKENS")]
    window: Option<usize>,
    /// New place of the model that the run was started with, if moved: preset, config.json or
    /// folder
    #[arg(long)]
    model: Option<String>,
    /// Hugging Face tokenizer.json, or `bytes` [default: the run's or the folder's]
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Precision of the GEMMs [default: the run's, for a Hugging Face folder bf16]
    #[arg(long, value_name = "NAME",
          value_parser = PossibleValuesParser::new(PRESETS.iter().copied()))]
    precision: Option<String>,
    /// `cpu`, `cuda[:N]`, or `emulated:ARCH` with sm90, sm100, sm103 or sm120
    #[arg(long, default_value_t = Device::Cpu)]
    device: Device,
    /// Print JSON after the last token
    #[arg(long)]
    json: bool,
}

/// Output of `generate --json`.
#[derive(Debug, Serialize)]
struct Report {
    model: PathBuf,
    step: Option<u64>,
    precision: String,
    device: String,
    window: usize,
    temperature: f64,
    top_k: Option<usize>,
    top_p: f64,
    seed: u64,
    prompt: String,
    #[serde(flatten)]
    generation: Generation,
    load_s: f64,
}

pub(crate) fn run(args: &GenerateArgs) -> Result<Outcome> {
    let started = Instant::now();
    let request = Request {
        prompt: args.prompt_text()?,
        tokens_max: args.max_tokens,
        sampling: Sampling {
            temperature: if args.greedy { 0.0 } else { args.temperature },
            top_k: args.top_k,
            top_p: args.top_p,
            seed: args.seed,
        },
        ignores_end: args.ignore_end,
    };
    // Reject invalid numbers before loading a model.
    request.sampling.check()?;
    let mut model = args.open(&request)?;
    let load_s = started.elapsed().as_secs_f64();
    let step = model.step.map(|step| format!(", step {step}")).unwrap_or_default();
    say(format_args!(
        "{}{step}: {} on {}, window {}, {}",
        model.path.display(),
        model.precision,
        args.device,
        model.forward.window(),
        model.tokenizer.name()
    ));
    let mut stdout = io::stdout().lock();
    let generation = if args.json {
        model.generate(&request, &mut |_| Ok(()))?
    } else {
        let mut write = |bytes: &[u8]| stdout.write_all(bytes).and_then(|()| stdout.flush());
        if args.echo && write(request.prompt.as_bytes()).is_err() {
            return Ok(Outcome::Success);
        }
        let generation = model.generate(&request, &mut write)?;
        // Let the shell's next prompt start on a new line.
        if io::stdout().is_terminal() && !generation.text.ends_with('\n') {
            let _ = write(b"\n");
        }
        generation
    };
    say(format_args!(
        "{} tokens in {:.2} s, {:.1} tokens/s; loaded in {load_s:.2} s",
        generation.tokens.len(),
        generation.time_s,
        generation.tokens_per_s
    ));
    if args.json {
        drop(stdout);
        print_json(&Report {
            model: model.path,
            step: model.step,
            precision: model.precision,
            device: args.device.to_string(),
            window: model.forward.window(),
            temperature: request.sampling.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            seed: args.seed,
            prompt: request.prompt,
            generation,
            load_s,
        })?;
    }
    Ok(Outcome::Success)
}

impl GenerateArgs {
    fn prompt_text(&self) -> Result<String> {
        match (&self.prompt, &self.prompt_file) {
            (Some(text), _) => Ok(text.clone()),
            (None, Some(path)) if path.as_os_str() == "-" => {
                io::read_to_string(io::stdin().lock()).context("cannot read the prompt from stdin")
            }
            (None, Some(path)) => std::fs::read_to_string(path)
                .with_context(|| format!("cannot read the prompt `{}`", path.display())),
            (None, None) => Ok(String::new()),
        }
    }

    fn open(&self, request: &Request) -> Result<TextModel> {
        let options = OpenOptions {
            model: self.model.clone(),
            tokenizer: self.tokenizer.clone(),
            precision: self.precision.clone(),
            window: self.window,
            device: self.device,
            // A token is a byte of the prompt at most.
            tokens_wanted: request.prompt.len() + request.tokens_max,
            scores: false,
            data: Vec::new(),
        };
        if !self.path.exists() {
            bail!(
                "no checkpoint at `{}`\n\
                 hint: `deepwell train` makes one; PATH says where, or names a Hugging Face folder",
                self.path.display()
            );
        }
        if is_model(&self.path) {
            return Ok(TextModel::from_folder(&self.path, &options)?);
        }
        let checkpoint = find(&self.path, Wanted::NewestComplete)?;
        Ok(TextModel::from_checkpoint(&checkpoint, &options)?)
    }
}

/// Whether a path is a model and no run: a folder with a configuration or weights, a `config.json`.
pub(crate) fn is_model(path: &Path) -> bool {
    if path.is_file() {
        return path.extension().is_some_and(|extension| extension == "json");
    }
    let has = |name: &str| path.join(name).symlink_metadata().is_ok();
    ["config.json", "model.safetensors", "model.safetensors.index.json"].into_iter().any(has)
}
