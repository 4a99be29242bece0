//! `cargo xtask emulate`: runs kernels on the emulator with the hazard tracker, in any mode.
//!
//! The tests of a kernel run on the emulated device and write launch files (`target/emulate/`);
//! `deepwell-emulate` runs these launches again, or any other launch file.

mod record;
mod rows;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use xshell::{Shell, cmd};

use crate::process::{cargo, hand_over};
use crate::{cargo_messages, kernels};

use record::Which;

const HELP: &str = "\
Run kernels on the emulator, without a GPU

Usage: cargo xtask emulate KERNEL [--arch ARCH] [--mutate | --cycles] [FLAGS]
       cargo xtask emulate FILE.toml... [--mutate | --cycles] [FLAGS]
       cargo xtask emulate --all [--arch ARCH] [--record] [FLAGS]
       cargo xtask emulate --unproven [--record] [FLAGS]

  KERNEL       name of a `.cu` file below deepwell-kernels/src/ops, without `.cu`: its row of
               deepwell-kernels/tests/cuda/emulated.rs runs on the emulated device and is checked,
               and of each of its kernels a recorded launch runs again as FLAGS say
  FILE.toml    launch files, or folders of them: any PTX
  --all        every kernel in all modes, and the GEMMs with one small mistake at a time; one
               table
  --unproven   what CI runs: the kernels whose PTX, launches or host code, or the emulator, are
               not those that are recorded as proven, with `--mutations once --skip-eager`; and of
               the others a tenth that the word in DEEPWELL_PROOF_DRAW chooses, if it is set

  --record     with `--all`: write the tables of proofs, with the flags of `--unproven`; with
               `--unproven`: write the table of rows alone, of those that passed or are proven
  --cycles     how long a recorded launch takes on a GPU, by the cycle model, as an interval;
               `--timeline FOLDER` writes what ui.perfetto.dev shows
  --mutate     make one small mistake at a time, list what nobody noticed
  --mutations  with `--all`: `sampled` (each mistake but deletions once for the kernels of a
               template), `full` (all in each kernel), `deletions` (in each kernel), `once`
               (deletions, each once for the kernels of a template)
  --arch ARCH  sm_90a, sm_100a, sm_103a or sm_120a, instead of the architecture of the row
  --keep       do not run the tests again: take the launches of the last time
  --skip-eager with `--all`: not the eager mode, in which launches were recorded
  FLAGS        those of `deepwell-emulate run`, `mutate`, `cycles` or `survey`: --completion,
               --seed, --results, --tracker, --mma-order, --warnings, --sm-count, --trace,
               --classes, --timeline, --json

Examples:
  cargo xtask emulate sm100_mxfp8_gemm                      eager, watched by the hazard tracker
  cargo xtask emulate sm100_mxfp8_gemm --completion lazy --seed 1,2,3
  cargo xtask emulate sm100_mxfp8_gemm --cycles             its time on a GPU, modelled
  cargo xtask emulate sm100_mxfp8_gemm --mutate             are its fences needed and watched
  cargo xtask emulate deepwell-kernels/emulator/examples/saxpy.toml
  cargo xtask emulate --unproven                            what CI runs
  cargo xtask emulate --all --record                        after a change of kernels, to commit
  cargo xtask emulate --all --mutations deletions           after a change of a GEMM
  cargo xtask emulate --all --mutate=none                   the same without mistakes
  cargo xtask emulate --all --mutations full                the same with all mistakes

It exits with 0 if all is right, 1 if something is not, 2 if a launch file cannot be used.
docs/emulator.md says what the modes are and what stands in a launch file.
";

/// What to emulate.
#[derive(Debug, PartialEq, Eq)]
enum What {
    Kernel(String),
    Files(Vec<PathBuf>),
    All,
    /// All that is not proven.
    Unproven,
}

#[derive(Debug, PartialEq, Eq)]
struct Options {
    what: What,
    architectures: Vec<&'static str>,
    mutate: bool,
    /// Replay on the cycle model.
    cycles: bool,
    keep: bool,
    /// Write the tables of proofs.
    record: bool,
    /// Arguments for `deepwell-emulate`.
    rest: Vec<OsString>,
}

pub(crate) fn run(shell: &Shell, root: &Path, arguments: &[OsString]) -> Result<ExitCode> {
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let options = Options::parse(arguments)?;
    let folders = match &options.what {
        What::Files(files) => files.clone(),
        What::Kernel(kernel) => {
            recorded(shell, root, &options, Some(kernel.trim_end_matches(".cu")))?
        }
        What::All | What::Unproven => recorded(shell, root, &options, None)?,
    };
    if folders.is_empty() {
        println!("every kernel was proven before, and none ran");
        return Ok(ExitCode::SUCCESS);
    }
    let command = ("deepwell-kernels/emulator", "bin", "deepwell-emulate");
    let binary = build(shell, root, "command", command)?;
    let mut command = Command::new(binary);
    command.arg(match (&options.what, options.mutate) {
        (What::All | What::Unproven, _) => "survey",
        (_, true) => "mutate",
        (_, false) if options.cycles => "cycles",
        (_, false) => "run",
    });
    let is_survey = matches!(options.what, What::All | What::Unproven);
    if options.mutate || is_survey {
        // Comments in the sources may say why a mistake goes unnoticed.
        command.arg("--sources").arg(root);
    }
    command.args(folders).args(&options.rest).args(options.proofs()).current_dir(root);
    if !options.record {
        return hand_over(command);
    }
    std::fs::create_dir_all(root.join(rows::ROWS).with_file_name(""))?;
    let status = command.status().context("cannot start `deepwell-emulate`")?;
    if !status.success() {
        bail!("not everything is right: the table of rows stays as it was");
    }
    rows::write(root)?;
    eprintln!("wrote {}", rows::ROWS);
    Ok(ExitCode::SUCCESS)
}

impl Options {
    fn parse(arguments: &[OsString]) -> Result<Options> {
        let mut positional = Vec::new();
        let mut mutate = false;
        let mut cycles = false;
        let mut keep = false;
        let mut all = None;
        let mut record = false;
        let mut architectures = Vec::new();
        let mut rest = Vec::new();
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let text = argument.to_string_lossy();
            match &*text {
                "--mutate" => mutate = true,
                "--cycles" => cycles = true,
                "--keep" => keep = true,
                "--record" => record = true,
                "--all" if all.is_none() => all = Some(What::All),
                "--unproven" if all.is_none() => all = Some(What::Unproven),
                "--all" | "--unproven" => bail!("expected one of `--all` and `--unproven`, once"),
                "--arch" => {
                    let value = arguments.next().context("`--arch` takes a value, got nothing")?;
                    architectures.extend(kernels::architectures(&value.to_string_lossy())?);
                }
                flag if flag.starts_with("--arch=") => {
                    architectures.extend(kernels::architectures(&flag["--arch=".len()..])?);
                }
                flag if flag.starts_with('-') => {
                    rest.push(argument.clone());
                    // The flag's value, if the flag takes a value.
                    let takes = ["--json", "--verbose", "--every", "--skip-eager"];
                    if !takes.contains(&flag) && !flag.contains('=') {
                        rest.extend(arguments.next().cloned());
                    }
                }
                _ => positional.push(PathBuf::from(argument)),
            }
        }
        let is_file = |path: &PathBuf| {
            path.extension().is_some_and(|extension| extension == "toml") || path.is_dir()
        };
        let what = match (all, positional.as_slice()) {
            (Some(all), []) => all,
            (Some(_), [first, ..]) => {
                bail!("expected `--all` or a kernel, got both: `{}`", first.display())
            }
            (None, []) => bail!(
                "expected a kernel, a launch file or `--all`\n\
                 hint: `cargo xtask emulate --help` has examples"
            ),
            (None, files) if files.iter().all(is_file) => What::Files(positional),
            (None, [kernel]) => What::Kernel(kernel.to_string_lossy().into_owned()),
            (None, several) => bail!("expected one kernel, got {}", several.len()),
        };
        if let (What::Files(_), Some(name)) = (&what, architectures.first()) {
            bail!("`--arch {name}` is for kernels: a launch file names its PTX");
        }
        let is_survey = matches!(what, What::All | What::Unproven);
        if is_survey && mutate {
            bail!("`--all` mutates the GEMMs by itself: leave `--mutate` out");
        }
        if cycles && (is_survey || mutate) {
            bail!("`--cycles` is for a kernel or launch files, without `--all` and `--mutate`");
        }
        if record && (!is_survey || keep || !architectures.is_empty()) {
            bail!("`--record` is for `--all` without `--keep` and `--arch`: the tables are of all");
        }
        if what == What::Unproven && !architectures.is_empty() {
            bail!("`--arch` is for `--all`: proofs are of the architecture of each row");
        }
        Ok(Options { what, architectures, mutate, cycles, keep, record, rest })
    }

    /// Flags of a survey that takes proofs into account, or writes them.
    fn proofs(&self) -> Vec<OsString> {
        let mut flags = Vec::new();
        if self.record || self.what == What::Unproven {
            flags.extend(["--mutations", "once", "--skip-eager", "--proofs", rows::KERNELS]);
        }
        if self.record && self.what == What::All {
            flags.push("--record");
        }
        let mut flags: Vec<OsString> = flags.into_iter().map(OsString::from).collect();
        let draw = std::env::var_os(record::DRAW_VARIABLE).filter(|word| !word.is_empty());
        if let Some(word) = draw.filter(|_| self.what == What::Unproven) {
            flags.extend(["--draw".into(), word]);
        }
        flags
    }
}

/// Records launches and returns the folders of the launches.
fn recorded(
    shell: &Shell,
    root: &Path,
    options: &Options,
    kernel: Option<&str>,
) -> Result<Vec<PathBuf>> {
    let architecture = match options.architectures.as_slice() {
        [] => None,
        [one] => Some(*one),
        several => bail!("expected one architecture, got {}", several.join(", ")),
    };
    let unproven = options.what == What::Unproven;
    let which = Which { kernel, architecture, unproven };
    if let Some(kernel) = kernel {
        let sources = kernels::unit::sources(root)?;
        let Some(source) = sources.iter().find(|source| source.stem == kernel) else {
            let names: Vec<_> = sources.iter().map(|source| &*source.stem).collect();
            bail!("no kernel `{kernel}`\nhint: there are {}", names.join(", "));
        };
        let served = source.architectures.clone().map_err(anyhow::Error::msg)?;
        if let Some(one) = architecture.filter(|one| !served.contains(one)) {
            bail!("`{kernel}` is for {}, not for {one}", served.join(", "));
        }
    }
    if !options.keep {
        // `survey` mutates GEMMs.
        let is_mutated = |stem: &str| options.mutate || kernel.is_none() && stem.contains("gemm");
        record::run(shell, root, &which, is_mutated)?;
    }
    let folders = record::recorded(root, &which)?;
    if folders.is_empty() && !unproven {
        bail!(
            "no launch is recorded in {}\n\
             hint: deepwell-kernels/tests/cuda/emulated.rs has a row for each kernel",
            record::FOLDER
        );
    }
    Ok(folders)
}

/// Builds the integration tests `test` with the options of `cargo test --workspace`, so that
/// neither command rebuilds for the other. Returns the executable with the given folder, kind and
/// name.
fn build(
    shell: &Shell,
    root: &Path,
    test: &str,
    (folder, kind, name): (&str, &str, &str),
) -> Result<PathBuf> {
    let cargo = cargo();
    let messages = cmd!(
        shell,
        "{cargo} test --workspace --no-run --test {test}
         --message-format json-render-diagnostics"
    )
    .quiet()
    .read()
    .with_context(|| format!("`{name}` does not build; cargo's message is above"))?;
    let executable = cargo_messages::executable(&messages, &root.join(folder), kind, name);
    executable.with_context(|| format!("cargo built `{name}` and did not say where"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options> {
        let arguments: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        Options::parse(&arguments)
    }

    #[test]
    fn what_is_asked_for() {
        let check =
            |line: &str, what: What, flags: (&[&'static str], bool, bool), rest: &[&str]| {
                let options = parse(line).unwrap();
                let (architectures, mutate, keep) = flags;
                let expected = Options {
                    what,
                    architectures: architectures.to_vec(),
                    mutate,
                    cycles: line.contains("--cycles"),
                    keep,
                    record: line.contains("--record"),
                    rest: rest.iter().map(OsString::from).collect(),
                };
                assert_eq!(options, expected, "{line}");
            };
        let kernel = |name: &str| What::Kernel(name.to_string());
        let files = |names: &[&str]| What::Files(names.iter().map(PathBuf::from).collect());
        check("add", kernel("add"), (&[], false, false), &[]);
        check("add --mutate --keep", kernel("add"), (&[], true, true), &[]);
        check("add --arch sm_90a", kernel("add"), (&["sm_90a"], false, false), &[]);
        check("--arch=sm_90a add", kernel("add"), (&["sm_90a"], false, false), &[]);
        check("add --seed 1,2", kernel("add"), (&[], false, false), &["--seed", "1,2"]);
        check("--json add --seed=1", kernel("add"), (&[], false, false), &["--json", "--seed=1"]);
        check("a.toml b.toml", files(&["a.toml", "b.toml"]), (&[], false, false), &[]);
        check("a.toml --mutate", files(&["a.toml"]), (&[], true, false), &[]);
        let rest = ["--timeline", "folder"];
        check("add --cycles --timeline folder", kernel("add"), (&[], false, false), &rest);
        check("--all --json", What::All, (&[], false, false), &["--json"]);
        check("--unproven", What::Unproven, (&[], false, false), &[]);
        check("--all --record", What::All, (&[], false, false), &[]);
        let skipped = "--all --skip-eager --mutations once";
        let rest = ["--skip-eager", "--mutations", "once"];
        check(skipped, What::All, (&[], false, false), &rest);
    }

    #[test]
    fn what_is_refused() {
        let check = |line: &str, expected: &str| {
            let error = format!("{:#}", parse(line).unwrap_err());
            assert!(error.contains(expected), "{line}: expected `{expected}` in `{error}`");
        };
        check("", "expected a kernel, a launch file or `--all`");
        check("--all add", "got both: `add`");
        check("--all --cycles", "`--cycles` is for a kernel or launch files");
        check("add --cycles --mutate", "`--cycles` is for a kernel or launch files");
        check("add gelu", "expected one kernel, got 2");
        check("add --arch", "takes a value");
        check("add --arch sm_80", "does not know `sm_80`");
        check("a.toml --arch sm_90a", "a launch file names its PTX");
        check("--all --mutate", "leave `--mutate` out");
        check("--all --unproven", "expected one of `--all` and `--unproven`");
        check("add --record", "`--record` is for `--all`");
        check("--all --keep --record", "`--record` is for `--all`");
        check("--unproven --arch sm_90a", "proofs are of the architecture of each row");
    }
}
