//! The `deepwell-emulate` command: runs launches of PTX kernels on the CPU, compares results,
//! checks for hazards, and tests these checks by mutation.
//!
//! Results of a subcommand go to stdout, as text or with `--json` as one JSON document. All other
//! output goes to stderr.

mod cycles;
mod json;
mod modes;
mod mutate;
mod output;
mod proofs;
mod run;
mod sample;
mod survey;
mod text;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use self::output::{FAILED, UNUSABLE, describe, say};

const AFTER_HELP: &str = "\
A launch file says which kernel of which PTX file runs, on what, and what must come out:

  ptx = \"saxpy.ptx\"                # files are relative to the launch file
  kernel = \"saxpy\"
  grid = [4]
  block = [128]

  [[buffer]]                       # device memory: from a .npy or raw file, random, or filled
  name = \"x\"
  dtype = \"f32\"
  shape = [1000]
  random = { distribution = \"normal\", seed = 1 }

  [[buffer]]
  name = \"y\"
  file = \"y.npy\"

  [[argument]]                     # in the order of the kernel's parameters
  buffer = \"x\"
  [[argument]]
  buffer = \"y\"
  [[argument]]
  f32 = 2.0
  [[argument]]
  u32 = 1000

  [[expect]]                       # what must be in memory afterwards
  buffer = \"y\"
  file = \"expected.npy\"
  tolerance = { relative = 1e-6 }  # without it: bit for bit

Examples:
  deepwell-emulate run saxpy.toml                           once, watched by the hazard tracker
  deepwell-emulate run gemm.toml --completion lazy --seed 7 copies end late, in another order
  deepwell-emulate run gemm.toml --results exact,fuzz       other sums in tensor cores
  deepwell-emulate cycles gemm.toml --timeline .            the time on a GPU, modelled
  deepwell-emulate mutate gemm.toml                         delete each wait, fence and arrival

docs/emulator.md of the repository has all fields of launch files, tensor maps among them.

Exit codes:
  0  everything is right
  1  a wrong value, a hazard, a failed launch, or a mistake that nobody noticed
  2  the command line or a file cannot be used";

/// Runs PTX kernels for Hopper and Blackwell on a CPU
#[derive(Debug, Parser)]
#[command(name = "deepwell-emulate", version, max_term_width = 100, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::RunArgs),
    Mutate(mutate::MutateArgs),
    Survey(survey::SurveyArgs),
    Cycles(cycles::CyclesArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Mutate(args) => mutate::run(&args),
        Command::Survey(args) => survey::run(&args),
        Command::Cycles(args) => cycles::run(&args),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(FAILED),
        Err(error) => {
            say(describe(&error));
            ExitCode::from(UNUSABLE)
        }
    }
}
