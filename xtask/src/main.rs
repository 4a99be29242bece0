//! Developer commands of the Deepwell workspace.
//!
//! One file per command; this file dispatches on the first word. `cargo xtask --help` lists the
//! commands. No Deepwell crate is a dependency, so xtask compiles in seconds and works while the
//! workspace does not build.

mod arguments;
mod bundle;
mod cargo_messages;
mod deepwell;
mod emulate;
mod kernels;
mod package;
mod packages;
mod process;
mod snapshots;
mod source;
mod tidy;
mod wheel;

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use xshell::Shell;

const HELP: &str = "\
Developer commands of the Deepwell workspace

Usage: cargo xtask <COMMAND> [ARGS]

Commands that build the release binary `deepwell` and run it, with all ARGS passed on:
  parity     Train one model in BF16 and in MXFP8 and compare the two
  train      Train a model from a run file
  bench      Time kernels and training beside the hardware's limits and PyTorch
  tune       Time the kernels of each shape on a GPU, and keep the table they are selected by
  probe      Say what hardware is here
  score      Score the planner's predictions against tables of measurements

Commands for the repository:
  kernels    Compile the CUDA kernels; `cargo xtask kernels --help` has the flags
  emulate    Run kernels on the emulator, without a GPU; `--help` has the flags
  bundle     Make one folder for a GPU machine without Rust and nvcc; `--help` has the flags
  package    Make the archives for crates.io, with compiled kernels; `--help` has the flags
  snapshots  Run the snapshot tests and show what changed; `--accept` or `--reject` it
  tidy       Check the rules of the repository that a program can check; --lower lowers the
             lines of known long functions
  wheel      Build a wheel of the Python package; `--help` has the flags

They run in the workspace root, so relative paths in ARGS start there. The exit code is the
program's own; Ctrl-C reaches it.

Examples:
  cargo xtask parity --steps 1000             the main job; the report is in target/parity/
  cargo xtask parity --steps 200 --control    with BF16 twice, to see the noise
  cargo xtask parity --help                   all flags of `deepwell parity`
  cargo xtask probe --json                    the hardware as JSON
  cargo xtask bench quantize --peers          quantization, and PyTorch's beside it
  cargo xtask bench --help                    its sections and flags (`cargo bench` runs those
                                              of the crates for processors)
  cargo xtask tune --model llama-134m         which kernel is fastest, in target/tuned/
  cargo xtask score                           predictions beside what others measured
  cargo xtask kernels --arch sm_90a           kernels for one architecture
  cargo xtask emulate --all                   every kernel in all modes, without a GPU
  cargo xtask bundle                          target/bundle, to be copied to a GPU machine
  cargo xtask snapshots                       what the snapshot tests would change
  cargo xtask snapshots --accept              take it, then commit the .snap files
  cargo xtask tidy                            before each commit
";

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    let mut args = env::args_os().skip(1);
    let command = args.next().unwrap_or_else(|| "--help".into());
    let args: Vec<_> = args.collect();
    let root = workspace_root()?;
    let shell = Shell::new()?;
    shell.change_dir(&root);
    let command = command.to_string_lossy();
    match &*command {
        "parity" | "train" | "bench" | "tune" | "probe" | "score" => {
            deepwell::run(&shell, &root, &command, &args)
        }
        "kernels" => kernels::run(&root, &args),
        "emulate" => emulate::run(&shell, &root, &args),
        "bundle" => bundle::run(&shell, &root, &args),
        "package" => package::run(&shell, &root, &args),
        "snapshots" => snapshots::run(&shell, &root, &args),
        "tidy" => tidy::run(&root, &args),
        "wheel" => wheel::run(&shell, &root, &args),
        "--help" | "-h" | "help" => {
            print!("{HELP}");
            Ok(ExitCode::SUCCESS)
        }
        other => bail!("unknown command `{other}`\nhint: `cargo xtask --help` lists them"),
    }
}

/// Returns the folder of the workspace's Cargo.toml. Cargo sets the folder of this package at run
/// time, so a moved checkout works without a rebuild.
fn workspace_root() -> Result<PathBuf> {
    let package = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let root = package.parent().map(Path::to_path_buf);
    root.context("xtask lies in the workspace's root folder")
}
