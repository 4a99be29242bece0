//! `cargo xtask kernels`: compiles every CUDA kernel for the architectures named in its source.
//!
//! nvcc writes `target/kernels/<architecture>/<file>.ptx`, ptxas writes the `.cubin` from this PTX
//! without line information, and a `.json` file records the results and the hash of the content.
//! Unchanged content is not compiled again. `manifest.json` contains all records.

pub(crate) mod compile;
mod flags;
mod lines;
pub(crate) mod manifest;
mod progress;
mod proofs;
mod record;
mod resources;
mod sass;
mod sass_rules;
mod toolchain;
pub(crate) mod unit;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::arguments::{Takes, flags, list};
use compile::{Job, Sass};
use flags::{NVCC_FLAGS, PTXAS_FLAGS};
use manifest::{Compiled, Failed, Manifest, grouped};
use progress::Progress;
use proofs::SassProofs;
use toolchain::{Toolchain, below};
use unit::{ARCHITECTURES, Source};

const HELP: &str = "\
Compile the CUDA kernels into target/kernels/

Usage: cargo xtask kernels [FLAGS]

Flags:
  --arch LIST   only for these architectures: sm_90a, sm_100a, sm_103a, sm_120a
  --only LIST   only these files, without `.cu`
  --ptx         only PTX, no SASS
  --unproven    no SASS for PTX in the table of proofs, and no PTX for sm_103a, which no test
                runs, of sources in the table; but for a tenth that the word in
                DEEPWELL_PROOF_DRAW chooses, if it is set
  --record      write the table of proofs: all PTX whose SASS has no fault
  --force       compile also what is up to date
  --if-present  do nothing where there is no compiler yet, rather than install one
  --json        the manifest on standard output instead of a table

The compiler is an nvcc of 12.9 or newer in CUDA_HOME or on the path; without one, NVIDIA's wheels
from PyPI are installed in target/cuda-toolchain. It exits with 1 if a kernel does not compile, if
it uses tensor cores and spills registers, or if its SASS lacks the instructions that it is
written for.
";

/// Options of the command.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// Empty for all architectures.
    pub(crate) architectures: Vec<&'static str>,
    /// Names of files without `.cu`; empty for all.
    pub(crate) only: Vec<String>,
    pub(crate) ptx_only: bool,
    /// No SASS for the PTX in the table of proofs.
    pub(crate) unproven: bool,
    /// Writes the table of proofs.
    pub(crate) record: bool,
    pub(crate) force: bool,
    /// Installs nothing; without a compiler, does nothing.
    pub(crate) if_present: bool,
    pub(crate) json: bool,
}

pub(crate) fn run(root: &Path, arguments: &[OsString]) -> Result<ExitCode> {
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let options = Options::parse(arguments)?;
    if options.if_present && !Toolchain::is_present(root) {
        eprintln!("nothing compiled: no compiler is here; without `--if-present` it is installed");
        return Ok(ExitCode::SUCCESS);
    }
    let manifest = build(root, &options)?;
    if options.json {
        println!("{:#}", manifest.to_json());
    } else {
        print!("{}", manifest.table());
    }
    for failed in &manifest.failed {
        let architecture = failed.architecture.as_deref().map(|name| format!(" for {name}"));
        let architecture = architecture.unwrap_or_default();
        eprintln!("\nerror: {}.cu{architecture}: {}", failed.stem, failed.message);
    }
    Ok(if manifest.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Options {
    /// What is compiled to SASS.
    fn sass<'a>(&self, proofs: &'a SassProofs) -> Sass<'a> {
        match self {
            Options { ptx_only: true, .. } => Sass::None,
            Options { unproven: true, .. } => Sass::Unproven(proofs),
            _ => Sass::All,
        }
    }

    fn parse(arguments: &[OsString]) -> Result<Options> {
        let known = [
            ("--arch", Takes::Value),
            ("--only", Takes::Value),
            ("--ptx", Takes::Nothing),
            ("--unproven", Takes::Nothing),
            ("--record", Takes::Nothing),
            ("--force", Takes::Nothing),
            ("--if-present", Takes::Nothing),
            ("--json", Takes::Nothing),
        ];
        let mut options = Options::default();
        for (flag, value) in flags("kernels", arguments, &known)? {
            match flag {
                "--arch" => options.architectures.extend(architectures(&value)?),
                "--only" => options
                    .only
                    .extend(list(&value).map(|name| name.trim_end_matches(".cu").to_string())),
                "--ptx" => options.ptx_only = true,
                "--unproven" => options.unproven = true,
                "--record" => options.record = true,
                "--force" => options.force = true,
                "--if-present" => options.if_present = true,
                _ => options.json = true,
            }
        }
        Ok(options)
    }
}

/// Parses a value of `--arch`.
pub(crate) fn architectures(value: &str) -> Result<Vec<&'static str>> {
    list(value)
        .map(|name| {
            let known = ARCHITECTURES.into_iter().find(|known| *known == name);
            known.with_context(|| {
                let all = ARCHITECTURES.join(", ");
                format!("`--arch` does not know `{name}`\nhint: there are {all}")
            })
        })
        .collect()
}

/// Returns the folder of the compiled kernels.
pub(crate) fn folder(root: &Path) -> PathBuf {
    root.join("target/kernels")
}

/// Compiles the requested kernels that are not up to date. The result contains the requested
/// kernels; the manifest on disk contains everything that is up to date, also from earlier runs.
pub(crate) fn build(root: &Path, options: &Options) -> Result<Manifest> {
    let begun = Instant::now();
    let sources = unit::sources(root)?;
    refuse_unknown(&sources, &options.only)?;
    let toolchain = Toolchain::find(root)?;
    let out = folder(root);
    let mut jobs = Vec::new();
    let mut result = Manifest {
        compiler: toolchain.version.clone(),
        flags: NVCC_FLAGS.iter().chain(&PTXAS_FLAGS).map(ToString::to_string).collect(),
        ..Manifest::default()
    };
    // All kernels, requested or not.
    let mut whole = result.clone();
    for source in &sources {
        let is_asked_for = options.only.is_empty() || options.only.contains(&source.stem);
        match &source.architectures {
            Err(message) if is_asked_for => result.failed.push(failed(source, None, message)),
            Err(message) => whole.failed.push(failed(source, None, message)),
            Ok(names) => jobs.extend(names.iter().map(|&architecture| {
                let is_asked_for = is_asked_for
                    && (options.architectures.is_empty()
                        || options.architectures.contains(&architecture));
                (Job::new(source, architecture, &toolchain.version), is_asked_for)
            })),
        }
    }
    let proofs = SassProofs::read(root);
    let sass = options.sass(&proofs);
    let (mut open, mut spared) = (Vec::new(), 0);
    for (job, is_asked_for) in &jobs {
        let compiled = job.up_to_date(&out, if *is_asked_for { sass } else { Sass::None });
        match (compiled, *is_asked_for) {
            (Some(compiled), true) if !options.force => result.compiled.push(compiled),
            (_, true) if sass.spares_ptx_of(job) => spared += 1,
            (_, true) => open.push(job),
            (Some(compiled), false) => whole.compiled.push(compiled),
            (None, false) => {}
        }
    }
    let up_to_date = result.compiled.len();
    if !open.is_empty() {
        toolchain::check_host_compiler()?;
        eprintln!("compiling with {} ({})", toolchain.origin, first_words(&toolchain.version));
    }
    for (job, compiled) in open.iter().zip(compile_all(&open, &toolchain, root, &out, sass)?) {
        add_compiled(&mut result, job, compiled);
    }
    // Faults of kernels from earlier runs are in the manifest, but do not fail this run.
    add_faults(&mut whole);
    add_faults(&mut result);
    sort(&mut result);
    whole.compiled.extend(result.compiled.iter().cloned());
    whole.failed.extend(result.failed.iter().cloned());
    sort(&mut whole);
    write_manifest(&out, &whole)?;
    if options.record {
        let jobs = jobs.iter().map(|(job, _)| job);
        record::record(&proofs, root, jobs, &whole, &out)?;
    }
    let folder = below(root, &out).display().to_string();
    print_totals(&result, (up_to_date, spared), &folder, begun);
    Ok(result)
}

/// Prints a line about all requested kernels.
fn print_totals(
    result: &Manifest,
    (up_to_date, spared): (usize, usize),
    folder: &str,
    begun: Instant,
) {
    eprintln!(
        "{} compiled, {up_to_date} up to date, {spared} left out, {} with errors; {} bytes of SASS \
         in {}; {:.1} s",
        result.compiled.len() - up_to_date,
        result.failed.len(),
        grouped(result.compiled.iter().filter_map(|c| Some(c.cubin.as_ref()?.bytes)).sum()),
        folder,
        begun.elapsed().as_secs_f64()
    );
}

/// Returns an error if a name in `only` is no source.
fn refuse_unknown(sources: &[Source], only: &[String]) -> Result<()> {
    let is_known = |name: &String| sources.iter().any(|source| source.stem == *name);
    let Some(name) = only.iter().find(|name| !is_known(name)) else { return Ok(()) };
    let names: Vec<_> = sources.iter().map(|source| &*source.stem).collect();
    bail!("no kernel `{name}`\nhint: there are {}", names.join(", "))
}

/// Adds the result of a job, and prints the compiler's warnings.
fn add_compiled(manifest: &mut Manifest, job: &Job<'_>, compiled: Result<Compiled>) {
    match compiled {
        Ok(compiled) => {
            print_warnings(&compiled);
            manifest.compiled.push(compiled);
        }
        Err(error) => {
            let message = format!("{error:#}");
            manifest.failed.push(failed(job.source, Some(job.architecture), &message));
        }
    }
}

fn failed(source: &Source, architecture: Option<&str>, message: &str) -> Failed {
    Failed {
        stem: source.stem.clone(),
        architecture: architecture.map(str::to_string),
        message: message.to_string(),
    }
}

/// Adds kernels that compiled but break a rule. The files stay for inspection.
fn add_faults(manifest: &mut Manifest) {
    let faults = manifest.compiled.iter().filter_map(|compiled| {
        let architecture = Some(compiled.architecture.clone());
        Some(Failed { stem: compiled.stem.clone(), architecture, message: compiled.fault()? })
    });
    manifest.failed.extend(faults.collect::<Vec<_>>());
}

fn sort(manifest: &mut Manifest) {
    let rank = |name: &str| ARCHITECTURES.iter().position(|known| *known == name);
    manifest
        .compiled
        .sort_by_cached_key(|compiled| (compiled.stem.clone(), rank(&compiled.architecture)));
    manifest.failed.sort_by_cached_key(|failed| {
        (failed.stem.clone(), failed.architecture.as_deref().and_then(rank))
    });
}

fn write_manifest(out: &Path, manifest: &Manifest) -> Result<()> {
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let temporary = out.join(format!(".manifest.{}.json", std::process::id()));
    let path = out.join("manifest.json");
    fs::write(&temporary, format!("{:#}\n", manifest.to_json()))
        .and_then(|()| fs::rename(&temporary, &path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Runs the jobs on all cores; returns results in the order of the jobs.
fn compile_all(
    jobs: &[&Job<'_>],
    toolchain: &Toolchain,
    root: &Path,
    out: &Path,
    sass: Sass<'_>,
) -> Result<Vec<Result<Compiled>>> {
    for job in jobs {
        let folder = out.join(job.architecture);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let progress = Progress::new(jobs.len());
    let next = AtomicUsize::new(0);
    let results = Mutex::new((0..jobs.len()).map(|_| None).collect::<Vec<_>>());
    let workers = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((index, job)) = {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    jobs.get(index).map(|job| (index, job))
                } {
                    let compiled = job.compile(toolchain, root, out, sass);
                    progress.step(&format!("{} {}", job.architecture, job.source.stem));
                    results.lock().expect("no worker panics")[index] = Some(compiled);
                }
            });
        }
    });
    let results = results.into_inner().expect("no worker panics");
    Ok(results.into_iter().flatten().collect())
}

fn print_warnings(compiled: &Compiled) {
    for warning in compiled.cubin.iter().flat_map(|cubin| &cubin.warnings) {
        eprintln!("warning: {}.cu for {}: {warning}", compiled.stem, compiled.architecture);
    }
}

/// Returns the part `release 13.0, V13.0.88` of the compiler's version text.
fn first_words(version: &str) -> &str {
    let line = version.split(';').next().unwrap_or_default();
    line.find("release ").map_or(line, |at| &line[at..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_the_command() {
        let parse = |arguments: &[&str]| {
            let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
            Options::parse(&arguments)
        };
        let options = parse(&["--arch", "sm_90a,sm_120a", "--only=add.cu,rope", "--ptx"]).unwrap();
        assert!(parse(&["--if-present"]).unwrap().if_present && !options.if_present);
        assert_eq!(options.architectures, ["sm_90a", "sm_120a"]);
        assert_eq!(options.only, ["add", "rope"]);
        assert!(options.ptx_only && !options.force && !options.json);
        let error = parse(&["--arch", "sm_80"]).unwrap_err().to_string();
        assert!(
            error.contains("does not know `sm_80`\nhint: there are sm_90a, sm_100a"),
            "{error}"
        );
    }

    #[test]
    fn what_the_compiler_says_of_itself_in_short() {
        let check = |text: &str, expected: &str| assert_eq!(first_words(text), expected);
        check(
            "Cuda compilation tools, release 13.0, V13.0.88; Build cuda_13.0.r13.0/compiler.3",
            "release 13.0, V13.0.88",
        );
        check("", "");
    }
}
