//! `deepwell completions`.

use anyhow::Result;
use clap::{Args, CommandFactory, ValueEnum};
use clap_complete::Shell;

use crate::output::print;
use crate::{Cli, Outcome};

const AFTER_HELP: &str = "\
Examples:
  deepwell completions bash > ~/.local/share/bash-completion/completions/deepwell
  deepwell completions zsh > ~/.zfunc/_deepwell      with `fpath+=~/.zfunc` before `compinit`
  deepwell completions fish > ~/.config/fish/completions/deepwell.fish

Exit codes: 0 printed, 2 unknown shell";

/// Print shell completions for bash, zsh or fish
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CompletionsArgs {
    /// Shell to complete for
    shell: KnownShell,
}

/// Shells with tested scripts.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum KnownShell {
    /// GNU bash
    Bash,
    /// Z shell
    Zsh,
    /// fish
    Fish,
}

pub(crate) fn run(args: &CompletionsArgs) -> Result<Outcome> {
    let shell = match args.shell {
        KnownShell::Bash => Shell::Bash,
        KnownShell::Zsh => Shell::Zsh,
        KnownShell::Fish => Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "deepwell", &mut script);
    print(&String::from_utf8_lossy(&script))?;
    Ok(Outcome::Success)
}
