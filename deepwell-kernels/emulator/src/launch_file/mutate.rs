//! Mutation testing of launches: finds small mistakes in a kernel that no check notices.

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

/// Options of mutation testing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MutationOptions {
    /// Number of SMs, overriding the documents.
    pub sm_count: Option<u32>,
    /// Instruction limit of a mutant, as a multiple of the original's instructions. A mutant beyond
    /// the limit counts as hung.
    pub step_factor: u64,
}

impl Default for MutationOptions {
    fn default() -> MutationOptions {
        MutationOptions { sm_count: None, step_factor: 4 }
    }
}

/// Instructions that a mutant may run in addition to [`MutationOptions::step_factor`].
const STEPS_MORE: u64 = 100_000;

/// Result of one mutation.
#[derive(Clone, Debug, PartialEq)]
pub struct Mutant {
    /// Class of the mistake.
    pub class: Class,
    /// The deleted instruction, or its changed part.
    pub what: &'static str,
    /// PTX line of the instruction.
    pub ptx_line: u32,
    /// Source line of the instruction, and the calls through which it was inlined.
    pub lines: Vec<SourceLine>,
    /// Outcome of the mutant.
    pub end: MutantEnd,
}

/// Outcomes of a mutant.
#[derive(Clone, Debug, PartialEq)]
pub enum MutantEnd {
    /// A check noticed the mistake; holds a one-line description.
    Noticed(String),
    /// No check noticed the mistake, for a documented reason.
    Redundant(String),
    /// No launch ran the instruction in a way that the mistake could affect.
    NotRun,
    /// No check noticed the mistake.
    Unnoticed,
}

/// All mutants of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct MutationSummary {
    /// Name of the kernel.
    pub kernel: String,
    /// Mutants in PTX order.
    pub mutants: Vec<Mutant>,
    /// Reasons for mistakes that were noticed or do not exist.
    pub reasons_unused: Vec<Redundant>,
}

impl MutationSummary {
    /// Counts the mutants with a given outcome.
    pub fn count(&self, is: impl Fn(&MutantEnd) -> bool) -> usize {
        self.mutants.iter().filter(|mutant| is(&mutant.end)).count()
    }

    /// Whether every mistake was noticed or has a reason.
    pub fn is_right(&self) -> bool {
        self.count(|end| matches!(end, MutantEnd::NotRun | MutantEnd::Unnoticed)) == 0
    }
}

/// The unmodified launch.
struct Baseline<'a> {
    launch: &'a PreparedLaunch,
    counts: Counts,
    warnings: HashSet<Finding>,
    settings: Settings,
    device: Emulator,
}

/// The parts of a hazard that do not depend on the schedule.
type Finding = (HazardKind, u32, u32);

fn finding(hazard: &Hazard) -> Finding {
    (hazard.kind, hazard.earlier.site.ptx_line, hazard.later.site.ptx_line)
}

/// Requirement on every wait with a variable parity: launches must have tested both parities.
/// Otherwise the launches are too small to reach the wait's second phase, and the synchronization
/// of that phase is not checked.
const BOTH_PARITIES: &str = "both parities of mbarrier.wait";

/// Runs launches of one kernel with each of `mistakes`, on all processors. The launches run in
/// order until one shows a difference: the launch fails, results differ, or the tracker reports a
/// hazard. `done` is called after each mutant.
///
/// # Errors
/// The outcome of the first launch that fails without a mistake.
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
        // A parity that was never tested is reported once per wait, not for each mistake.
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

/// Returns waits with a variable parity: the first PTX line, the source lines, and the parities
/// that launches tested. Unrolled copies are merged.
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
    let (outcome, device) = launch.run_program(&settings, None, None);
    match &outcome.result {
        Ok(report) if outcome.is_right() => Ok(Baseline {
            launch,
            counts: report.counts.clone(),
            warnings: report.hazards.iter().map(finding).collect(),
            settings: Settings {
                step_limit: report.counts.instructions * options.step_factor + STEPS_MORE,
                // The first finding suffices, unless the kernel itself has findings.
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
    /// Returns a difference between the mutant and the kernel, if there is any.
    fn notices(&self, mutation: &Mutation) -> Option<String> {
        let program = self.launch.program()?;
        let mutant = mutant(program, mutation);
        let (outcome, device) = self.launch.run_program(&self.settings, Some(mutant), None);
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
        // Without expectations, compare with the results of the unmodified kernel.
        let differs = |(_, address, bytes): &&(String, u64, u64)| {
            let bytes = *bytes as usize;
            device.read(*address, bytes).ok() != self.device.read(*address, bytes).ok()
        };
        let (name, ..) = self.launch.buffers.iter().find(differs)?;
        Some(format!("other bytes in `{name}`"))
    }
}
