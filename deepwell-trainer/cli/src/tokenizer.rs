//! `deepwell tokenizer`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Subcommand};
use deepwell_trainer::data::bpe::{self, BpeOptions};
use deepwell_trainer::data::{Progress, Stage};
use deepwell_trainer::terminal::stderr_draws;
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::{print, print_json, say};
use crate::{Outcome, bytes};

/// Train tokenizers
#[derive(Args, Debug)]
pub(crate) struct TokenizerArgs {
    #[command(subcommand)]
    command: TokenizerCommand,
}

#[derive(Debug, Subcommand)]
enum TokenizerCommand {
    Train(TokenizerTrainArgs),
}

const TRAIN_AFTER_HELP: &str = "\
Byte-level BPE starts with the 256 bytes, so any text can be encoded and decoded. It repeatedly
merges the most frequent pair of tokens into a new token until the vocabulary is full. Words are
split by GPT-2's rules. Token 0 is `<|endoftext|>`; `deepwell train` appends it to every document.

The tokenizer does not learn from the files that `deepwell train` holds out first; the table shows
its bytes per token on these files. Equal text gives a byte-identical file.

A model needs a `vocab_size` of at least the size of the vocabulary. The presets llama-134m and
llama-1.1b have 32,000; write a config.json for another size.

Examples:
  deepwell tokenizer train                        32,000 tokens from the default corpus
  deepwell tokenizer train --data texts 'more/**/*.md' --vocab-size 8000 --out runs/tokenizer.json
  deepwell tokenizer train --data web --max-bytes 2GB
  deepwell train --data texts --tokenizer runs/tokenizer.json --model ./config.json

Exit codes: 0 written, 2 an input or the output cannot be used";

/// Learn a byte-level BPE vocabulary from text and write it as a Hugging Face tokenizer.json
#[derive(Args, Debug)]
#[command(after_help = TRAIN_AFTER_HELP)]
struct TokenizerTrainArgs {
    /// Text to learn from: text, .jsonl, .parquet, folders or globs [default: Rust sources of the
    /// locked dependencies]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Field of a record that holds its text or messages [default: the first present of text,
    /// content, messages and conversations]
    #[arg(long, value_name = "NAME")]
    text_field: Option<String>,
    /// Vocabulary size, including 256 bytes and `<|endoftext|>`
    #[arg(long, value_name = "TOKENS", default_value_t = 32_000)]
    vocab_size: u32,
    /// Minimum number of occurrences of a pair to merge it
    #[arg(long, value_name = "TIMES", default_value_t = 2,
          value_parser = clap::value_parser!(u64).range(1..))]
    min_frequency: u64,
    /// Maximum text to learn from, such as `2GB`; files are chosen by their names only [default:
    /// all]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    max_bytes: Option<u64>,
    /// File to write
    #[arg(long, value_name = "FILE", default_value = "tokenizer.json")]
    out: PathBuf,
    /// Overwrite an existing file
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &TokenizerArgs) -> Result<Outcome> {
    match &args.command {
        TokenizerCommand::Train(args) => run_train(args),
    }
}

fn run_train(args: &TokenizerTrainArgs) -> Result<Outcome> {
    let options = BpeOptions {
        inputs: args.data.clone(),
        text_field: args.text_field.clone(),
        vocab_size: args.vocab_size,
        min_frequency: args.min_frequency,
        bytes_max: args.max_bytes,
        out: args.out.clone(),
        force: args.force,
        ..BpeOptions::default()
    };
    let mut stages = Stages::default();
    let result = bpe::train(&options, &mut |progress| stages.show(progress));
    stages.finish();
    let summary = result?;
    if args.json {
        print_json(&summary)?;
    } else {
        print(&summary)?;
    }
    Ok(Outcome::Success)
}

/// A bar for each stage on a terminal, elsewhere a line.
#[derive(Default)]
struct Stages {
    stage: Option<Stage>,
    bar: Option<ProgressBar>,
}

impl Stages {
    fn show(&mut self, progress: Progress) {
        if self.stage != Some(progress.stage) {
            self.finish();
            self.stage = Some(progress.stage);
            self.begin(progress);
        }
        if let Some(bar) = &self.bar {
            bar.set_position(progress.bytes_done);
        }
    }

    fn begin(&mut self, progress: Progress) {
        let name = match progress.stage {
            Stage::Scan => "reading",
            Stage::Count => "counting words",
            Stage::Merge => "learning merges",
            Stage::Tokenize => "measuring",
        };
        if !stderr_draws() {
            match progress.bytes_total {
                0 => say(name),
                bytes => say(format_args!("{name}: {:.2} MB", bytes as f64 / 1e6)),
            }
            return;
        }
        // A library does all merges in one call, so only the elapsed time can be shown.
        let is_known = progress.stage != Stage::Merge;
        let (bar, template) = if is_known {
            let template = "{prefix:>15} {wide_bar} {bytes}/{total_bytes} eta {eta}";
            (ProgressBar::new(progress.bytes_total), template)
        } else {
            (ProgressBar::new_spinner(), "{prefix:>15} {spinner} {elapsed}")
        };
        let bar = bar.with_prefix(name);
        let bar = match ProgressStyle::with_template(template) {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        };
        bar.enable_steady_tick(Duration::from_millis(200));
        self.bar = Some(bar);
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
