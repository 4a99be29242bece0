//! Which small mistakes in a kernel nobody notices.

use std::collections::HashSet;

use rayon::prelude::*;

use super::file::Redundant;
use super::lines::SourceLine;
use super::prepare::PreparedLaunch;
use super::replay::{Outcome, ReplayStatus};
use crate::hazard::{Hazard, HazardKind};
use crate::launch::{Completion, Counts, Emulator, Settings};
use crate::mutation::{Class, Mutation, mutant, mutations};
use crate::numerics::ResultMode;

/// How mutants are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MutationOptions {
    /// SMs of the device, instead of those of the documents.
    pub sm_count: Option<u32>,
    /// A mutant may run so many times as many instructions as the kernel does before it counts as
    /// hung.
    pub step_factor: u64,
}

impl Default for MutationOptions {
    fn default() -> MutationOptions {
        MutationOptions { sm_count: None, step_factor: 4 }
    }
}

/// Instructions that a mutant may run beside those of [`MutationOptions::step_factor`].
const STEPS_MORE: u64 = 100_000;

/// What became of one mistake.
#[derive(Clone, Debug, PartialEq)]
pub struct Mutant {
    /// What kind of mistake it is.
    pub class: Class,
    /// The instruction that was deleted, or what of it was wrong.
    pub what: &'static str,
    /// Its line in the PTX.
    pub ptx_line: u32,
    /// Its line in the source, and the calls that it was inlined through.
    pub lines: Vec<SourceLine>,
    /// How it ended.
    pub end: MutantEnd,
}

/// How a mutant ended.
#[derive(Clone, Debug, PartialEq)]
pub enum MutantEnd {
    /// Somebody noticed: who, in a line.
    Noticed(String),
    /// Nobody did, and the reason why that is right was given.
    Redundant(String),
    /// None of the launches ran the instruction, or none in a way that the mistake could change.
    NotRun,
    /// Nobody did.
    Unnoticed,
}

/// All mistakes in one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct MutationSummary {
    /// The kernel.
    pub kernel: String,
    /// In the order of the PTX.
    pub mutants: Vec<Mutant>,
    /// Reasons that were given for mistakes that were noticed, or are of no instruction.
    pub reasons_unused: Vec<Redundant>,
}

impl MutationSummary {
    /// Mutants that ended in a way.
    pub fn count(&self, is: impl Fn(&MutantEnd) -> bool) -> usize {
        self.mutants.iter().filter(|mutant| is(&mutant.end)).count()
    }

    /// Whether every mistake was noticed or has a reason.
    pub fn is_right(&self) -> bool {
        self.count(|end| matches!(end, MutantEnd::NotRun | MutantEnd::Unnoticed)) == 0
    }
}

/// A launch as it is without a mistake.
struct Baseline<'a> {
    launch: &'a PreparedLaunch,
    counts: Counts,
    warnings: HashSet<Finding>,
    settings: Settings,
    device: Emulator,
}

/// A hazard by what does not depend on the schedule.
type Finding = (HazardKind, u32, u32);

fn finding(hazard: &Hazard) -> Finding {
    (hazard.kind, hazard.earlier.site.ptx_line, hazard.later.site.ptx_line)
}

/// What is asked of every wait whose parity changes: that launches tested both. Else they are too
/// small to come to its second phase, and what it waits for there is not watched.
const BOTH_PARITIES: &str = "both parities of mbarrier.wait";

/// Runs launches of one kernel with each of some mistakes, on all processors. A mutant is tried on
/// the launches in their order until one notices: it fails, other values come out, or the tracker
/// reports something. `done` is called after each mutant.
///
/// # Errors
/// The outcome of the first launch that is not right as it is.
pub fn mutate(
    launches: &[PreparedLaunch],
    options: &MutationOptions,
    mistakes: &[Mutation],
    done: impl Fn() + Sync,
) -> Result<MutationSummary, Box<Outcome>> {
    let Some(first) = launches.first() else {
        return Ok(MutationSummary {
            kernel: String::new(),
            mutants: Vec::new(),
            reasons_unused: Vec::new(),
        });
    };
    let baselines: Vec<Baseline<'_>> =
        launches.par_iter().map(|launch| baseline(launch, options)).collect::<Result<_, _>>()?;
    let reasons: Vec<Redundant> = {
        let mut reasons: Vec<Redundant> =
            launches.iter().flat_map(|launch| launch.redundant.iter().cloned()).collect();
        reasons.dedup();
        reasons
    };
    let sources = super::redundant::Sources::new(first.sources.as_deref());
    let explained = |end: MutantEnd, what: &str, ptx_line: u32, lines: &[SourceLine]| {
        if matches!(end, MutantEnd::Noticed(_)) {
            return end;
        }
        let reason = super::redundant::listed(&reasons, what, ptx_line, lines)
            .map(|redundant| redundant.reason.clone())
            .or_else(|| sources.reason(what, lines));
        reason.map_or(end, MutantEnd::Redundant)
    };
    let tried = mistakes.par_iter().filter_map(|mutation| {
        let Mutation { class, what, ptx_line, .. } = *mutation;
        let lines = first.lines.chain(ptx_line);
        let end = try_launches(&baselines, mutation);
        done();
        // Of a parity that was never tested the wait is told, not each of its mistakes.
        let is_told = end == MutantEnd::NotRun && mutation.tests_parity();
        let end = explained(end, what, ptx_line, &lines);
        (!is_told).then_some(Mutant { class, what, ptx_line, lines, end })
    });
    let mut mutants: Vec<Mutant> = tried.collect();
    mutants.extend(waits(first, &baselines).map(|(ptx_line, lines, tested)| {
        let end = match tested {
            3 => MutantEnd::Noticed("both were tested".to_owned()),
            _ => MutantEnd::NotRun,
        };
        let (class, what) = (Class::Parity, BOTH_PARITIES);
        let end = explained(end, what, ptx_line, &lines);
        Mutant { class, what, ptx_line, lines, end }
    }));
    let is_used = |redundant: &Redundant| {
        mutants.iter().any(|mutant| {
            matches!(mutant.end, MutantEnd::Redundant(_))
                && super::redundant::is_of(redundant, mutant.what, mutant.ptx_line, &mutant.lines)
        })
    };
    let reasons_unused = reasons.iter().filter(|reason| !is_used(reason)).cloned().collect();
    Ok(MutationSummary { kernel: first.spec.kernel.clone(), mutants, reasons_unused })
}

/// Waits of the source whose parity changes: the first line of the PTX, the lines of the source,
/// and the parities that launches tested. Copies that unrolling makes are one.
fn waits(
    first: &PreparedLaunch,
    baselines: &[Baseline<'_>],
) -> impl Iterator<Item = (u32, Vec<SourceLine>, u8)> {
    let found = first.program().map(mutations).unwrap_or_default();
    let mut waits: Vec<(u32, Vec<SourceLine>, u8)> = Vec::new();
    for wait in found.iter().filter(|wait| wait.is_parity_0()) {
        let tested = baselines.iter().fold(0, |all, one| all | wait.parities(&one.counts));
        let lines = first.lines.chain(wait.ptx_line);
        let known = waits.iter_mut().find(|known| !lines.is_empty() && known.1 == lines);
        match known {
            Some((.., parities)) => *parities |= tested,
            None => waits.push((wait.ptx_line, lines, tested)),
        }
    }
    waits.into_iter()
}

fn baseline<'a>(
    launch: &'a PreparedLaunch,
    options: &MutationOptions,
) -> Result<Baseline<'a>, Box<Outcome>> {
    let settings = launch.settings(Settings {
        completion: Completion::Eager,
        results: ResultMode::Hardware,
        tracker: true,
        ..Settings::default()
    });
    let sm_count = options.sm_count.unwrap_or(settings.sm_count);
    let settings = Settings { sm_count, ..settings };
    let (outcome, device) = launch.run_program(&settings, None);
    match &outcome.result {
        Ok(report) if outcome.is_right() => Ok(Baseline {
            launch,
            counts: report.counts.clone(),
            warnings: report.hazards.iter().map(finding).collect(),
            settings: Settings {
                step_limit: report.counts.instructions * options.step_factor + STEPS_MORE,
                // What comes after the first finding tells nothing more, unless it is one of the
                // kernel itself.
                stop_at_hazard: report.hazards.is_empty(),
                ..settings
            },
            device,
        }),
        _ => Err(Box::new(outcome)),
    }
}

fn try_launches(baselines: &[Baseline<'_>], mutation: &Mutation) -> MutantEnd {
    let mut end = MutantEnd::NotRun;
    for baseline in baselines.iter().filter(|baseline| mutation.ran(&baseline.counts)) {
        if let Some(noticed) = baseline.notices(mutation) {
            return MutantEnd::Noticed(noticed);
        }
        end = MutantEnd::Unnoticed;
    }
    end
}

impl Baseline<'_> {
    /// What tells the kernel with a mistake from the kernel, if anything does.
    fn notices(&self, mutation: &Mutation) -> Option<String> {
        let program = self.launch.program()?;
        let mutant = mutant(program, mutation);
        let (outcome, device) = self.launch.run_program(&self.settings, Some(mutant));
        let report = match &outcome.result {
            Err(error) => return error.to_string().lines().next().map(str::to_owned),
            Ok(report) => report,
        };
        let is_new = |hazard: &&Hazard| !self.warnings.contains(&finding(hazard));
        if let Some(hazard) = report.hazards.iter().find(is_new) {
            let (earlier, later) = (hazard.earlier.site.ptx_line, hazard.later.site.ptx_line);
            let name = hazard.kind.name();
            return Some(format!("{name}, PTX line {later} after {earlier}"));
        }
        if let Some(read) = report.unwritten.first() {
            return Some(format!("read of what nobody wrote, PTX line {}", read.ptx_line));
        }
        if outcome.status() == ReplayStatus::Wrong {
            let wrong = outcome.comparisons.iter().find(|comparison| comparison.wrong > 0)?;
            return Some(format!(
                "`{}`: {} of {} elements are wrong",
                wrong.name, wrong.wrong, wrong.elements
            ));
        }
        if !self.launch.expectations.is_empty() {
            return None;
        }
        // Without expectations, what the kernel itself does is right.
        let differs = |(_, address, bytes): &&(String, u64, u64)| {
            let bytes = *bytes as usize;
            device.read(*address, bytes).ok() != self.device.read(*address, bytes).ok()
        };
        let (name, ..) = self.launch.buffers.iter().find(differs)?;
        Some(format!("other bytes in `{name}`"))
    }
}
