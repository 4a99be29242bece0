//! `deepwell-emulate mutate`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use deepwell_emulator::launch_file::{
    LaunchFile, Mutant, MutantEnd, MutationOptions, MutationSummary, PreparedLaunch, mutate,
};
use deepwell_emulator::mutation::{Class, mutations};
use deepwell_emulator::proof::ptx_digest;
use serde_json::{Value, json};

use crate::output::{launch_files, print, print_json, progress, say};
use crate::text::failure;

/// Test the checks: make one mistake at a time in a kernel, and list unnoticed mistakes
///
/// Mistakes are: each wait, fence, commit, arrival or barrier deleted; wrong parities, counts,
/// bytes, orders, masks, coordinates, descriptors and groups. Each mutated kernel runs in eager
/// mode with the tracker on up to 16 of its launches, smallest first, until a launch fails, a
/// hazard is reported, or results differ. An allowed unnoticed mistake is listed under
/// `[[redundant]]` in the launch file, or by a comment `// redundant WHAT: REASON` on its source
/// line.
#[derive(Debug, Args)]
pub(crate) struct MutateArgs {
    /// Launch files, or folders of launch files
    #[arg(required = true, value_name = "FILE.toml")]
    files: Vec<PathBuf>,
    /// Number of SMs [default: from the launch file, else 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    sm_count: Option<u32>,
    /// Folder of the source files in the PTX's `.file` directives [default: from the launch file]
    #[arg(long, value_name = "DIR")]
    sources: Option<PathBuf>,
    /// Make only mistakes of these classes [default: all]
    #[arg(long, value_name = "CLASS", value_delimiter = ',', value_parser = class)]
    classes: Vec<Class>,
    /// Also list noticed mistakes, with the check that noticed each
    #[arg(long)]
    verbose: bool,
    /// Print one JSON document instead of text
    #[arg(long)]
    json: bool,
}

/// Parses the name of a class.
pub(crate) fn class(name: &str) -> Result<Class, String> {
    Class::ALL.into_iter().find(|class| class.name() == name).ok_or_else(|| {
        let known: Vec<&str> = Class::ALL.iter().map(|class| class.name()).collect();
        format!("expected one of {}", known.join(", "))
    })
}

/// Whether a class was requested. An empty list requests all classes.
pub(crate) fn is_asked(classes: &[Class], class: Class) -> bool {
    classes.is_empty() || classes.contains(&class)
}

/// Launches of one kernel in one PTX file, smallest first. Buffers are not read until a launch
/// runs, because there may be hundreds of launches.
pub(crate) struct Group {
    pub(crate) kernel: String,
    documents: Vec<(PathBuf, LaunchFile)>,
    sources: Option<PathBuf>,
}

/// Most launches on which a mutant is tried.
const LAUNCHES: usize = 16;

impl Group {
    /// Number of launches.
    pub(crate) fn len(&self) -> usize {
        self.documents.len()
    }

    /// Whether the name of the kernel or of its source contains a word.
    pub(crate) fn has_in_names(&self, word: &str) -> bool {
        let source = self.documents.first().and_then(|(_, file)| file.recorded.as_ref());
        self.kernel.contains(word) || source.is_some_and(|known| known.source.contains(word))
    }

    /// Number of launches before the first one with too many instructions, at least one.
    fn up_to(&self, instructions: u64) -> usize {
        let fits = |(_, file): &&(PathBuf, LaunchFile)| {
            file.recorded.as_ref().is_none_or(|known| known.instructions <= instructions)
        };
        self.documents.iter().take_while(fits).count().max(1)
    }

    /// Returns the largest launch within the instruction limit, or the smallest launch.
    pub(crate) fn largest(&self, instructions: u64) -> Result<PreparedLaunch> {
        self.prepare(self.up_to(instructions) - 1)
    }

    /// Returns the smallest launch.
    pub(crate) fn smallest(&self) -> Result<PreparedLaunch> {
        self.prepare(0)
    }

    /// Number of instructions of the smallest launch.
    pub(crate) fn fewest_instructions(&self) -> u64 {
        let known = self.documents.first().and_then(|(_, file)| file.recorded.as_ref());
        known.map_or(0, |known| known.instructions)
    }

    /// Returns launches for mutants: the smallest, the largest within the instruction limit, and
    /// some launches between.
    pub(crate) fn spread(&self, instructions: u64) -> Result<Vec<PreparedLaunch>> {
        let count = self.up_to(instructions);
        let taken = count.min(LAUNCHES);
        let position = |at: usize| match taken {
            1 => 0,
            _ => at * (count - 1) / (taken - 1),
        };
        (0..taken).map(|at| self.prepare(position(at))).collect()
    }

    /// Name of the source that the launches were recorded with, or of the PTX.
    pub(crate) fn source(&self) -> String {
        let Some((_, file)) = self.documents.first() else { return String::new() };
        let recorded = file.recorded.as_ref().map(|known| known.source.clone());
        recorded.unwrap_or_else(|| file.ptx.clone())
    }

    /// Adds to a digest what the launches are made of: the PTX, the documents without its name,
    /// and all bytes of the files that they name. Returns the target of the PTX.
    pub(crate) fn add_to(&self, hasher: &mut blake3::Hasher) -> Result<String> {
        let mut ptx = None;
        for (path, file) in &self.documents {
            let folder = path.parent().unwrap_or(Path::new(""));
            let read = |name: &str| {
                let path = folder.join(name);
                std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
            };
            if ptx.is_none() {
                let text = String::from_utf8_lossy(&read(&file.ptx)?).into_owned();
                hasher.update(ptx_digest(&text).as_bytes());
                ptx = Some(text);
            }
            let named = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            for line in named.lines().filter(|line| !line.starts_with("ptx = ")) {
                hasher.update(line.as_bytes());
            }
            let inputs = file.buffers.iter().filter_map(|buffer| buffer.file.as_ref());
            let outputs = file.expectations.iter().map(|expectation| &expectation.file);
            for name in inputs.chain(outputs) {
                hasher.update(&read(name)?);
            }
        }
        let text = ptx.unwrap_or_default();
        if let Some(sources) = &self.sources {
            add_reasons(&text, sources, hasher);
        }
        let target = text.lines().find_map(|line| line.trim().strip_prefix(".target "));
        Ok(target.unwrap_or_default().trim().to_string())
    }

    fn prepare(&self, at: usize) -> Result<PreparedLaunch> {
        let mut launch = PreparedLaunch::read(&self.documents[at].0)?;
        if let Some(sources) = &self.sources {
            launch.set_sources(sources);
        }
        Ok(launch)
    }
}

/// Adds the comments that name redundant instructions in the sources of `ptx` to a digest.
fn add_reasons(ptx: &str, sources: &Path, hasher: &mut blake3::Hasher) {
    for line in ptx.lines().filter(|line| line.trim_start().starts_with(".file")) {
        let Some(name) = line.split('"').nth(1) else { continue };
        // Headers of the CUDA toolkit are missing here, and have no such comments.
        let text = std::fs::read_to_string(sources.join(name)).unwrap_or_default();
        for line in text.lines().filter(|line| line.contains("// redundant ")) {
            hasher.update(line.trim().as_bytes());
        }
    }
}

/// Reads launch files and groups them by kernel.
pub(crate) fn groups(paths: &[PathBuf], sources: Option<&Path>) -> Result<Vec<Group>> {
    let mut groups: BTreeMap<(String, PathBuf), Vec<(PathBuf, LaunchFile)>> = BTreeMap::new();
    for path in launch_files(paths)? {
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let file = LaunchFile::parse(&text, &path.display().to_string())?;
        let ptx = path.parent().unwrap_or(Path::new("")).join(&file.ptx);
        groups.entry((file.kernel.clone(), canonical(&ptx))).or_default().push((path, file));
    }
    let instructions =
        |(_, file): &(PathBuf, LaunchFile)| file.recorded.as_ref().map(|known| known.instructions);
    Ok(groups
        .into_iter()
        .map(|((kernel, _), mut documents)| {
            documents.sort_by_key(instructions);
            Group { kernel, documents, sources: sources.map(Path::to_owned) }
        })
        .collect())
}

fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Mutates every kernel. Returns whether all mistakes were noticed or have a reason.
pub(crate) fn run(args: &MutateArgs) -> Result<bool> {
    let options = MutationOptions { sm_count: args.sm_count, ..MutationOptions::default() };
    let mut all_right = true;
    let mut documents = Vec::new();
    for group in groups(&args.files, args.sources.as_deref())? {
        let launches = group.spread(u64::MAX)?;
        let of_kernel = launches.first().and_then(PreparedLaunch::program).map(mutations);
        let mut mistakes = of_kernel.unwrap_or_default();
        mistakes.retain(|mistake| is_asked(&args.classes, mistake.class));
        let bar = progress(mistakes.len());
        bar.set_message(group.kernel.clone());
        let summary = mutate(&launches, &options, &mistakes, || bar.inc(1));
        bar.finish_and_clear();
        match summary {
            Ok(summary) => {
                all_right &= summary.is_right();
                match args.json {
                    true => documents.push(summary_json(&summary)),
                    false => print(&summary_text(&summary, args.verbose))?,
                }
            }
            Err(outcome) => {
                all_right = false;
                let verdict = outcome.status().name();
                say(format_args!("{}: {verdict} without any mistake", group.kernel));
                if let (Err(error), Some(launch)) = (&outcome.result, launches.first()) {
                    say(failure(error, launch.lines()).trim_end());
                }
                say("hint: `deepwell-emulate run` says more");
                documents.push(json!({ "kernel": group.kernel, "verdict": verdict }));
            }
        }
    }
    if args.json {
        print_json(&json!({ "right": all_right, "kernels": documents }))?;
    }
    Ok(all_right)
}

pub(crate) fn word(end: &MutantEnd) -> &'static str {
    match end {
        MutantEnd::Noticed(_) => "noticed",
        MutantEnd::Redundant(_) => "redundant",
        MutantEnd::NotRun => "not run",
        MutantEnd::Unnoticed => "unnoticed",
    }
}

/// Formats a summary. Unrolled copies of an instruction with the same outcome share a line.
pub(crate) fn summary_text(summary: &MutationSummary, verbose: bool) -> String {
    let count = |name: &str| summary.count(|end| word(end) == name);
    let mut text = format!(
        "{}: {} mistakes: {} noticed, {} redundant, {} not run, {} unnoticed\n",
        summary.kernel,
        summary.mutants.len(),
        count("noticed"),
        count("redundant"),
        count("not run"),
        count("unnoticed")
    );
    for name in ["unnoticed", "not run", "redundant", "noticed"] {
        if name == "noticed" && !verbose {
            continue;
        }
        let mut alike: BTreeMap<(String, String), Vec<&Mutant>> = BTreeMap::new();
        for mutant in summary.mutants.iter().filter(|mutant| word(&mutant.end) == name) {
            let detail = match &mutant.end {
                MutantEnd::Noticed(detail) | MutantEnd::Redundant(detail) => detail.clone(),
                MutantEnd::NotRun | MutantEnd::Unnoticed => String::new(),
            };
            let chain: Vec<String> = mutant.lines.iter().map(ToString::to_string).collect();
            let place = match (chain.is_empty(), name) {
                (true, _) | (_, "noticed") => format!("{}", mutant.ptx_line),
                _ => chain.join(" in "),
            };
            alike.entry((place, format!("{}\n{detail}", mutant.what))).or_default().push(mutant);
        }
        let mut alike: Vec<_> = alike.into_values().collect();
        alike.sort_by_key(|mutants| mutants[0].ptx_line);
        for mutants in alike {
            let first = mutants[0];
            let lines: Vec<String> =
                mutants.iter().map(|mutant| mutant.ptx_line.to_string()).collect();
            let chain: Vec<String> = first.lines.iter().map(ToString::to_string).collect();
            let place = if chain.is_empty() { String::new() } else { chain.join(" in ") };
            let _ = writeln!(text, "  {name:<10}{}", first.what);
            let plural = if lines.len() > 1 { "lines" } else { "line" };
            let separator = if place.is_empty() { "" } else { ", " };
            let _ =
                writeln!(text, "            PTX {plural} {}{separator}{place}", shortened(&lines));
            match &first.end {
                MutantEnd::Redundant(reason) => {
                    let _ = writeln!(text, "            because {reason}");
                }
                MutantEnd::Noticed(how) => {
                    let _ = writeln!(text, "            by {how}");
                }
                MutantEnd::NotRun | MutantEnd::Unnoticed => {}
            }
        }
    }
    for reason in &summary.reasons_unused {
        let _ = writeln!(
            text,
            "  note: `[[redundant]]` names {} at {}, which is noticed, or is not there",
            reason.what, reason.at
        );
    }
    text
}

fn shortened(lines: &[String]) -> String {
    const SHOWN: usize = 6;
    let mut text = lines[..lines.len().min(SHOWN)].join(", ");
    if lines.len() > SHOWN {
        let _ = write!(text, " and {} more", lines.len() - SHOWN);
    }
    text
}

pub(crate) fn summary_json(summary: &MutationSummary) -> Value {
    let mutants: Vec<Value> = summary
        .mutants
        .iter()
        .map(|mutant| {
            let detail = match &mutant.end {
                MutantEnd::Noticed(detail) | MutantEnd::Redundant(detail) => Some(detail),
                MutantEnd::NotRun | MutantEnd::Unnoticed => None,
            };
            json!({
                "class": mutant.class.name(),
                "what": mutant.what,
                "ptx_line": mutant.ptx_line,
                "source": mutant.lines.iter().map(ToString::to_string).collect::<Vec<_>>(),
                "end": word(&mutant.end),
                "detail": detail,
            })
        })
        .collect();
    json!({ "kernel": summary.kernel, "right": summary.is_right(), "mutants": mutants })
}
