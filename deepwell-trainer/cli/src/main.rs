//! The `deepwell` command: a subcommand for each step from a machine and a model to a trained
//! model, so that each step can be inspected.
//!
//! Results go to stdout, as a table or with `--json` as one JSON document; everything else goes to
//! stderr. `deepwell --help` lists the exit codes.

mod bench;
mod bytes;
mod capture;
mod checkpoint_path;
mod ckpt;
mod ckpt_fits;
mod cluster;
mod commands;
mod completions;
mod corpus;
mod degrees;
mod dryrun;
mod eval;
mod export;
mod export_mlflow;
mod failure;
mod generate;
mod hardware;
mod lowered;
mod measured;
mod nearest;
mod negative;
mod optimizer_args;
mod output;
mod plan;
mod plan_cluster;
mod planning;
mod probe;
mod quantize;
mod recipe;
mod replan;
mod report;
mod router_args;
mod score;
mod serve;
mod tokenizer;
mod train;
mod tune;
mod watch;

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use deepwell_kernels::cpu::gemm::Tier;
use deepwell_trainer::terminal::stderr_has_colors;
use tracing_subscriber::EnvFilter;

use crate::commands::{ParityArgs, TrainArgs};

/// Environment variable with the log filter for stderr.
const LOG_VARIABLE: &str = "DEEPWELL_LOG";

/// Exit code after Ctrl-C: 128 plus the signal's number, as in shells.
const INTERRUPTED: u8 = 130;
/// Exit code if the data do not decide a verdict.
const OPEN: u8 = 3;

const AFTER_HELP: &str = "\
Examples:
  deepwell probe                                show the hardware of this machine
  deepwell capture llama-micro                  show a model as a graph of ops
  deepwell plan parity-3m --explain             plan training here; list rejected candidates
  deepwell plan llama-3-70b --hardware h200-x8  plan for a cluster: degrees, memory, time, cost
  deepwell dryrun ./my-model --precision mxfp8  predict memory and time of a step
  deepwell score                                compare predictions with published measurements
  deepwell train --data ./texts --steps 500     train; Ctrl-C writes a checkpoint
  deepwell parity --steps 200                   check whether MXFP8 matches BF16's loss
  deepwell generate --prompt 'fn main() {'      generate text with the newest checkpoint
  deepwell eval runs/book --data book.txt       loss, perplexity and bits per byte of a text
  deepwell report runs --out compare.html       one page over many runs
  deepwell recipe run llama-micro               train with an expected curve, to check it
  deepwell bench norms --peers                  compare kernels with roofline and PyTorch
  deepwell ckpt verify target/deepwell-run      verify all checksums of the newest checkpoint
  deepwell ckpt diff runs/a runs/b              compare two checkpoints
  deepwell ckpt fits runs/a --plan plan.json    check whether a checkpoint loads under another plan
  deepwell export hf runs/book --to ./book      write a folder for `from_pretrained`
  deepwell quantize ./llama ./q --format nvfp4  quantize weights to four bits
  deepwell tokenizer train --data ./texts       learn a vocabulary for `train --tokenizer`
  deepwell completions bash                     print shell completions

MODEL is a preset name, a Hugging Face `config.json`, a folder with one, or a `.pt2` archive of
torch.export.save. A folder also provides its weights and tokenizer.json; a preset or a single
`config.json` starts from randomly initialized weights. Presets:
  llama-micro, parity-600k, parity-2m, parity-3m, llama-134m, tinyllama-1.1b, llama-1.1b, llama-7b,
  llama-3-8b, llama-3-70b, qwen3-micro, qwen3-600k, qwen3-0.6b, moe-micro, moe-tiny,
  moe-1b-a300m, qwen3-30b-a3b, mixtral-8x7b, deepseek-micro, deepseek-v3, gpt-oss-micro,
  gpt-oss-20b, gpt2-micro, gpt2; for `plan` on a cluster also llama-3.1-405b, gpt3-175b

Exit codes:
  0    success
  1    a check or verdict failed: damaged checkpoint, checkpoints that differ, no plan that fits,
       no parity
  2    the command line, an input or an output cannot be used
  3    the data do not decide: parity needs more seeds or a larger evaluation set
  130  interrupted

Environment:
  DEEPWELL_LOG  log level on stderr: error, warn (default), info, debug, trace, or a filter such as
                `deepwell_trainer=debug`; docs/environment.md lists all variables
  NO_COLOR      any non-empty value disables colours. Colours and progress bars also need a terminal
                and a TERM other than dumb; without them progress is printed as lines";

/// Trains large language models: probe, capture, plan, predict, train, verify
#[derive(Debug, Parser)]
#[command(name = "deepwell", version, max_term_width = 100, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Probe(probe::ProbeArgs),
    Capture(capture::CaptureArgs),
    Plan(Box<plan::PlanCommand>),
    Replan(replan::ReplanArgs),
    Dryrun(Box<dryrun::DryrunCommand>),
    Score(score::ScoreArgs),
    /// Train a model on text
    #[command(after_help = train::TRAIN_AFTER_HELP)]
    Train(Box<TrainArgs>),
    /// Compare the loss of MXFP8 or NVFP4 training with BF16 over several seeds
    #[command(after_help = train::PARITY_AFTER_HELP)]
    Parity(Box<ParityArgs>),
    Generate(Box<generate::GenerateArgs>),
    Eval(Box<eval::EvalArgs>),
    Report(report::ReportArgs),
    Recipe(recipe::RecipeArgs),
    Bench(bench::BenchArgs),
    Tune(Box<tune::TuneArgs>),
    Ckpt(ckpt::CkptArgs),
    Export(export::ExportArgs),
    Quantize(quantize::QuantizeArgs),
    Tokenizer(tokenizer::TokenizerArgs),
    Corpus(corpus::CorpusArgs),
    Completions(completions::CompletionsArgs),
}

/// How a subcommand ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// Done, and every check passed.
    Success,
    /// Done, and a check failed.
    Failed,
    /// Done, and too little is known for an answer.
    Open,
    /// Stopped in order on request.
    Interrupted,
    /// Failed with this code; another process has already printed the error.
    Reported(u8),
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> ExitCode {
        ExitCode::from(match outcome {
            Outcome::Success => 0,
            Outcome::Failed => failure::FAILED,
            Outcome::Open => OPEN,
            Outcome::Interrupted => INTERRUPTED,
            Outcome::Reported(code) => code,
        })
    }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are errors of the parser too; a closed stdout or stderr is ignored.
            match negative::explain(&error, std::env::args_os().skip(1)) {
                Some(text) => output::say(text),
                None => drop(error.print()),
            }
            return ExitCode::from(if error.use_stderr() { failure::UNUSABLE } else { 0 });
        }
    };
    let started = start_logging().and_then(|()| {
        Tier::limit()?;
        Ok(deepwell_trainer::tuned::use_found()?)
    });
    match started.and_then(|()| run(cli.command)) {
        Ok(outcome) => outcome.into(),
        Err(error) => {
            let _ = std::io::stderr().write_all(failure::describe(&error).as_bytes());
            ExitCode::from(failure::exit_code(&error))
        }
    }
}

fn run(command: Command) -> Result<Outcome> {
    match command {
        Command::Probe(args) => probe::run(&args),
        Command::Capture(args) => capture::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Replan(args) => replan::run(&args),
        Command::Dryrun(args) => dryrun::run(&args),
        Command::Score(args) => score::run(&args),
        Command::Train(args) => train::run_train(*args),
        Command::Parity(args) => train::run_parity(*args),
        Command::Generate(args) => generate::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Recipe(args) => recipe::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Ckpt(args) => ckpt::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Tokenizer(args) => tokenizer::run(&args),
        Command::Corpus(args) => corpus::run(&args),
        Command::Completions(args) => completions::run(&args),
    }
}

fn start_logging() -> Result<()> {
    let filter = match std::env::var_os(LOG_VARIABLE) {
        None => EnvFilter::new("warn"),
        Some(text) => EnvFilter::try_new(text.to_string_lossy()).with_context(|| {
            format!(
                "`{LOG_VARIABLE}`: expected a log filter, got `{}`\n\
                 hint: `warn`, or `deepwell_trainer=debug,warn`",
                text.to_string_lossy()
            )
        })?,
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(stderr_has_colors())
        // The subscriber would report a closed stderr on stderr, and panic.
        .log_internal_errors(false)
        .init();
    Ok(())
}
