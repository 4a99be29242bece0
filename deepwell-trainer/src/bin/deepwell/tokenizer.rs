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

/// Make tokenizers
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
A token is a piece of a word: byte-level BPE starts from the 256 bytes, so that every text has
tokens and comes back from them, and makes the pair that comes most often into a token of its own,
again and again, until the vocabulary is full. Words are split as GPT-2 splits them, token 0 is
`<|endoftext|>`, and `deepwell train` puts it after every document.

The files that `deepwell train` holds out first are kept aside: the tokenizer does not learn from
them, and the table says how many bytes one of its tokens stands for on them. The same text gives
the same file, byte for byte.

A model needs a `vocab_size` of at least the vocabulary: 32,000 is that of the presets llama-134m
and llama-1.1b; for another size write a config.json.

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
    /// Text, .jsonl, .parquet, folders or globs [default: sources of the locked dependencies]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Field of a record that is its text or its messages [default: text, content, messages or
    /// conversations, the first that is there]
    #[arg(long, value_name = "NAME")]
    text_field: Option<String>,
    /// Tokens of the vocabulary, 256 bytes and `<|endoftext|>` among them
    #[arg(long, value_name = "TOKENS", default_value_t = 32_000)]
    vocab_size: u32,
    /// How often a pair must come in the text to become a token
    #[arg(long, value_name = "TIMES", default_value_t = 2,
          value_parser = clap::value_parser!(u64).range(1..))]
    min_frequency: u64,
    /// Text to learn from at most, such as `2GB`; which files, depends on their names alone
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    max_bytes: Option<u64>,
    /// File to write
    #[arg(long, value_name = "FILE", default_value = "tokenizer.json")]
    out: PathBuf,
    /// Write over a file that is there
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
