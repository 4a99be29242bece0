//! `deepwell-emulate survey`: runs many kernels in all modes and prints one table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use deepwell_emulator::hazard::Rules;
use deepwell_emulator::launch::{Completion, Settings};
use deepwell_emulator::launch_file::{
    MutantEnd, MutationOptions, MutationSummary, Outcome, PreparedLaunch, ReplayStatus, mutate,
};
use deepwell_emulator::mutation::{Class, Mutation};
use deepwell_emulator::numerics::ResultMode;
use deepwell_emulator::proof::{is_drawn, short};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::modes::{Mode, WarningsWord, completion_name, results_name};
use crate::mutate::{Group, class, groups, summary_json, summary_text, word};
use crate::output::{print, print_json, progress};
use crate::proofs::{Proof, Proofs};
use crate::sample::{Mutations, choose};
use crate::{json, text};

/// Run every kernel of recorded launches in all modes, mutate some, and print one table
///
/// Runs the largest launch of each kernel within `--largest` in eager mode, in lazy mode with two
/// seeds and in demand mode, each with the tracker. Kernels with tensor core instructions also run
/// in eager mode with exact and with fuzzed sums, without the tracker, whose reports would be the
/// same.
#[derive(Debug, Args)]
pub(crate) struct SurveyArgs {
    /// Folders of launch files, or launch files
    #[arg(required = true, value_name = "DIR")]
    files: Vec<PathBuf>,
    /// Mutate kernels whose name or source file name contains one of these words; `none` mutates no
    /// kernel
    #[arg(long, value_name = "WORD", value_delimiter = ',', default_value = "gemm")]
    mutate: Vec<String>,
    /// Mistakes to make in mutated kernels
    #[arg(long, value_enum, default_value_t = Mutations::Sampled)]
    mutations: Mutations,
    /// Make only mistakes of these classes [default: all]
    #[arg(long, value_name = "CLASS", value_delimiter = ',', value_parser = class)]
    classes: Vec<Class>,
    /// Maximum number of warp instructions of a launch; a kernel's smallest launch always qualifies
    #[arg(long, value_name = "N", default_value_t = 20_000_000)]
    largest: u64,
    /// Maximum number of warp instructions of a launch that tests mistakes; a kernel's smallest
    /// launch always qualifies
    #[arg(long, value_name = "N", default_value_t = 4_000_000)]
    largest_mutated: u64,
    /// Skip eager mode with hardware sums, in which recorded launches have already run
    #[arg(long)]
    skip_eager: bool,
    /// Folder of the source files in the PTX's `.file` directives [default: from the launch files]
    #[arg(long, value_name = "DIR")]
    sources: Option<PathBuf>,
    /// Table of proofs: skip kernels whose PTX, launches and emulator have an entry
    #[arg(long, value_name = "FILE")]
    proofs: Option<PathBuf>,
    /// Run a tenth of the proven kernels again, selected by this word
    #[arg(long, value_name = "SEED", requires = "proofs")]
    draw: Option<String>,
    /// Run every kernel, and write the table of proofs
    #[arg(long, requires = "proofs", conflicts_with = "draw")]
    record: bool,
    /// Whether warnings fail a launch
    #[arg(long, value_name = "WORD", default_value = "report")]
    warnings: WarningsWord,
    /// Print one JSON document instead of text
    #[arg(long)]
    json: bool,
}

/// Columns of the table.
const MODES: [Mode; 7] = [
    Mode { completion: Completion::Eager, results: ResultMode::Hardware },
    Mode { completion: Completion::Lazy { seed: 1 }, results: ResultMode::Hardware },
    Mode { completion: Completion::Lazy { seed: 2 }, results: ResultMode::Hardware },
    Mode { completion: Completion::Demand, results: ResultMode::Hardware },
    Mode { completion: Completion::LateCopies, results: ResultMode::Hardware },
    Mode { completion: Completion::Eager, results: ResultMode::Exact },
    Mode { completion: Completion::Eager, results: ResultMode::Fuzz(1) },
];

/// A kernel's place in the table of proofs.
struct Entry {
    /// Target, source and kernel.
    name: String,
    digest: String,
}

/// Results of one kernel.
struct Row {
    kernel: String,
    entry: Option<Entry>,
    target: String,
    launches: usize,
    instructions: u64,
    runs: Vec<Option<Run>>,
    mutation: Option<Result<MutationSummary, Box<Outcome>>>,
}

struct Run {
    verdict: ReplayStatus,
    text: String,
    json: Value,
}

/// Runs the survey. Returns whether all results are right.
pub(crate) fn run(args: &SurveyArgs) -> Result<bool> {
    let begun = Instant::now();
    let mut proofs = args.proofs.as_deref().map(Proofs::read).transpose()?;
    let groups = groups(&args.files, args.sources.as_deref())?;
    let found = groups.len();
    let (groups, entries) = unproven(groups, args, proofs.as_ref())?;
    let proven = found - groups.len();
    let mutated: Vec<bool> = groups.iter().map(|group| is_mutated(group, args)).collect();
    let chosen = choose(&groups, &mutated, args.mutations, &args.classes)?;
    let bar = progress(groups.len() * MODES.len() + mutated.iter().filter(|is| **is).count());
    let rows = groups
        .into_par_iter()
        .zip(mutated)
        .zip(chosen)
        .zip(entries)
        .map(|(((group, is_mutated), chosen), entry)| {
            bar.set_message(group.kernel.clone());
            let row = survey(group, is_mutated.then_some(chosen), args, &|| bar.inc(1));
            bar.tick();
            row.map(|row| Row { entry, ..row })
        })
        .collect::<Result<Vec<Row>>>()?;
    bar.finish_and_clear();
    let all_right = rows.iter().all(Row::is_right);
    if let (Some(proofs), Some(path), true) = (&mut proofs, &args.proofs, args.record) {
        for row in rows.iter().filter(|row| row.is_right()) {
            if let Some(Entry { name, digest }) = &row.entry {
                proofs.enter(name.clone(), row.proof(digest));
            }
        }
        proofs.write(path)?;
    }
    if args.json {
        let kernels: Vec<Value> = rows.iter().map(Row::to_json).collect();
        print_json(&json!({
            "right": all_right,
            "took_s": begun.elapsed().as_secs_f64(),
            "proven": proven,
            "kernels": kernels,
        }))?;
    } else {
        if !rows.is_empty() {
            print(&table(&rows))?;
            print(&details(&rows))?;
            print(&classes(&rows))?;
        }
        if proven > 0 {
            print(&format_args!("{proven} kernels were proven before and did not run\n"))?;
        }
        let count = rows.iter().filter(|row| row.is_right()).count();
        print(&format_args!(
            "{count} of {} kernels are right; {:.0} s\n",
            rows.len(),
            begun.elapsed().as_secs_f64()
        ))?;
    }
    Ok(all_right)
}

fn is_mutated(group: &Group, args: &SurveyArgs) -> bool {
    args.mutate.iter().any(|word| word != "none" && group.has_in_names(word))
}

/// The kernels that have to run, with their places in the table of proofs if there is one.
fn unproven(
    groups: Vec<Group>,
    args: &SurveyArgs,
    proofs: Option<&Proofs>,
) -> Result<(Vec<Group>, Vec<Option<Entry>>)> {
    let Some(proofs) = proofs else {
        let entries = groups.iter().map(|_| None).collect();
        return Ok((groups, entries));
    };
    let entries =
        groups.par_iter().map(|group| entry(group, args)).collect::<Result<Vec<Entry>>>()?;
    let has_to_run = |(group, entry): &(Group, Entry)| {
        let is_drawn = args.draw.as_ref().is_some_and(|seed| is_drawn(seed, &group.source()));
        args.record || is_drawn || !proofs.has(&entry.name, &entry.digest)
    };
    let kept = groups.into_iter().zip(entries).filter(has_to_run);
    Ok(kept.map(|(group, entry)| (group, Some(entry))).unzip())
}

/// A kernel's name in the table of proofs, and the digest of all that its verdict depends on.
fn entry(group: &Group, args: &SurveyArgs) -> Result<Entry> {
    let mut hasher = blake3::Hasher::new();
    let how = (args.largest, args.largest_mutated, args.skip_eager, args.mutations);
    let mutated = is_mutated(group, args).then_some(&args.classes);
    hasher.update(format!("{how:?} {mutated:?}").as_bytes());
    let target = group.add_to(&mut hasher)?;
    let name = format!("{target} {} {}", group.source(), group.kernel);
    Ok(Entry { name, digest: short(&hasher) })
}

fn instructions(launch: &PreparedLaunch) -> u64 {
    launch.file().recorded.as_ref().map_or(0, |known| known.instructions)
}

fn survey(
    group: Group,
    chosen: Option<Vec<Mutation>>,
    args: &SurveyArgs,
    done: &(dyn Fn() + Sync),
) -> Result<Row> {
    let launch = &group.largest(args.largest)?;
    let program = launch.program();
    let multiplies = program.is_some_and(|program| {
        let families = ["mma.sync", "wgmma", "tcgen05"];
        program.steps.iter().any(|step| families.contains(&step.instruction.family()))
    });
    let runs = MODES
        .par_iter()
        .map(|mode| {
            let of_machine = mode.results == ResultMode::Hardware;
            let is_recorded = of_machine && mode.completion == Completion::Eager;
            let is_run = (of_machine || multiplies) && !(is_recorded && args.skip_eager);
            let run = is_run.then(|| {
                let settings = launch.settings(Settings {
                    completion: mode.completion,
                    results: mode.results,
                    tracker: of_machine,
                    rules: Rules {
                        warnings_fail: args.warnings == WarningsWord::Fail,
                        ..Rules::default()
                    },
                    ..Settings::default()
                });
                let outcome = launch.run(&settings);
                let verdict = outcome.status();
                let text = match verdict {
                    ReplayStatus::Right => String::new(),
                    _ => text::outcome(launch, &settings, &outcome),
                };
                Run { verdict, text, json: json::outcome(launch, &settings, &outcome) }
            });
            done();
            run
        })
        .collect();
    let instructions = instructions(launch);
    let target = program.map(|program| program.target.clone()).unwrap_or_default();
    let mutation = match chosen {
        Some(chosen) => {
            let tried = group.spread(args.largest_mutated)?;
            let summary = mutate(&tried, &MutationOptions::default(), &chosen, || {});
            done();
            Some(summary)
        }
        None => None,
    };
    let launches = group.len();
    Ok(Row { kernel: group.kernel, entry: None, target, launches, instructions, runs, mutation })
}

impl Row {
    fn is_right(&self) -> bool {
        let runs = self.runs.iter().flatten().all(|run| run.verdict == ReplayStatus::Right);
        let mutation = self
            .mutation
            .as_ref()
            .is_none_or(|mutation| mutation.as_ref().is_ok_and(MutationSummary::is_right));
        runs && mutation
    }

    /// What is entered of a kernel that is right.
    fn proof(&self, digest: &str) -> Proof {
        let summary = self.mutation.as_ref().and_then(|mutation| mutation.as_ref().ok());
        Proof {
            digest: digest.to_string(),
            modes: self.runs.iter().flatten().count(),
            mutants: summary.map_or(0, |summary| summary.mutants.len()),
        }
    }

    fn to_json(&self) -> Value {
        let runs: Vec<&Value> = self.runs.iter().flatten().map(|run| &run.json).collect();
        let mutation = self.mutation.as_ref().map(|mutation| match mutation {
            Ok(summary) => summary_json(summary),
            Err(outcome) => json!({ "right": false, "verdict": outcome.status().name() }),
        });
        json!({
            "kernel": self.kernel,
            "target": self.target,
            "launches": self.launches,
            "right": self.is_right(),
            "runs": runs,
            "mutation": mutation,
        })
    }
}

fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.kernel.len()).max().unwrap_or(6).max(6);
    let heads = ["eager", "lazy 1", "lazy 2", "demand", "exact", "fuzz"];
    let mut text = format!("{:<width$}  {:<8}{:>13}", "kernel", "target", "instructions");
    for head in heads {
        let _ = write!(text, "  {head:<7}");
    }
    text.push_str("  mutants\n");
    for row in rows {
        let instructions = crate::output::grouped(row.instructions);
        let _ = write!(text, "{:<width$}  {:<8}{instructions:>13}", row.kernel, row.target);
        for run in &row.runs {
            let word = run.as_ref().map_or("-", |run| run.verdict.name());
            let _ = write!(text, "  {word:<7}");
        }
        let mutation = match &row.mutation {
            None => "-".to_owned(),
            Some(Err(_)) => "not right without any".to_owned(),
            Some(Ok(summary)) => {
                let unnoticed =
                    summary.count(|end| matches!(end, MutantEnd::Unnoticed | MutantEnd::NotRun));
                let redundant = summary.count(|end| matches!(end, MutantEnd::Redundant(_)));
                let total = summary.mutants.len();
                format!("{total}, {redundant} redundant, {unnoticed} unnoticed")
            }
        };
        let _ = writeln!(text, "  {mutation}");
    }
    text
}

/// Formats the mutants of all kernels by class.
fn classes(rows: &[Row]) -> String {
    let summaries: Vec<&MutationSummary> =
        rows.iter().filter_map(|row| row.mutation.as_ref()?.as_ref().ok()).collect();
    if summaries.is_empty() {
        return String::new();
    }
    let ends = ["noticed", "redundant", "not run", "unnoticed"];
    let mut text = format!("{:<11}{:>8}", "class", "mutants");
    for end in ends {
        let _ = write!(text, "{end:>11}");
    }
    text.push('\n');
    for class in Class::ALL {
        let of_class = || summaries.iter().flat_map(|summary| &summary.mutants);
        let of_class = || of_class().filter(|mutant| mutant.class == class);
        let _ = write!(text, "{:<11}{:>8}", class.name(), of_class().count());
        for end in ends {
            let count = of_class().filter(|mutant| word(&mutant.end) == end).count();
            let _ = write!(text, "{count:>11}");
        }
        text.push('\n');
    }
    text.push('\n');
    text
}

/// Formats all failures in full.
fn details(rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows {
        for (run, mode) in row.runs.iter().zip(MODES) {
            if let Some(run) = run.as_ref().filter(|run| !run.text.is_empty()) {
                let completion = completion_name(mode.completion);
                let results = results_name(mode.results);
                let _ = write!(text, "\n{completion}, {results}: {}", run.text);
            }
        }
        if let Some(Ok(summary)) = &row.mutation
            && !summary.is_right()
        {
            let _ = write!(text, "\n{}", summary_text(summary, false));
        }
    }
    text.push_str(&survivors(rows));
    if !text.is_empty() {
        text.push('\n');
    }
    text
}

/// Formats unnoticed mistakes by source lines. Kernels of one template, whose lines differ only in
/// the outermost call, share an entry.
fn survivors(rows: &[Row]) -> String {
    let mut alike: BTreeMap<(&str, &str, String, &str), BTreeSet<&str>> = BTreeMap::new();
    for row in rows {
        let Some(Ok(summary)) = &row.mutation else { continue };
        for mutant in &summary.mutants {
            let reason = match &mutant.end {
                MutantEnd::Noticed(_) => continue,
                MutantEnd::Redundant(reason) => reason.as_str(),
                MutantEnd::NotRun | MutantEnd::Unnoticed => "",
            };
            let place = match mutant.lines.as_slice() {
                [] => format!("PTX line {}", mutant.ptx_line),
                [only] => only.to_string(),
                [inner @ .., _] => {
                    let lines: Vec<String> = inner.iter().map(ToString::to_string).collect();
                    lines.join(" in ")
                }
            };
            let key = (word(&mutant.end), mutant.what, place, reason);
            alike.entry(key).or_default().insert(&row.kernel);
        }
    }
    let mut text = String::new();
    for ((end, what, place, reason), kernels) in alike {
        let first = kernels.first().copied().unwrap_or_default();
        let of = match kernels.len() {
            1 => first.to_owned(),
            count => format!("{first} and {} more kernels", count - 1),
        };
        let _ = write!(text, "\n{end}: {what}\n    {place}\n    of {of}\n");
        if !reason.is_empty() {
            let _ = writeln!(text, "    because {reason}");
        }
    }
    text
}
