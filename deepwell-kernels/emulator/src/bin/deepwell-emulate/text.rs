//! Text output of a run.

use std::collections::BTreeMap;
use std::fmt::Write;

use deepwell_emulator::error::EmulatorError;
use deepwell_emulator::hazard::{Access, Hazard, Severity};
use deepwell_emulator::launch::{Counts, Report, Settings};
use deepwell_emulator::launch_file::{Comparison, Outcome, PreparedLaunch, SourceLines};

use crate::modes::{completion_name, results_name};
use crate::output::grouped;

/// Number of waits shown.
const WAITS: usize = 12;
/// Number of hazards shown.
const HAZARDS: usize = 20;

/// Formats the outcome of a launch, in full.
pub(crate) fn outcome(launch: &PreparedLaunch, settings: &Settings, outcome: &Outcome) -> String {
    let mut text = String::new();
    let verdict = outcome.status().name();
    let _ = writeln!(text, "{}: {verdict}", launch.file().kernel);
    row(&mut text, "file", launch.name());
    let tracker = if settings.tracker { "on" } else { "off" };
    row(
        &mut text,
        "mode",
        &format!(
            "{}, results {}, tracker {tracker}, {} SMs",
            completion_name(settings.completion),
            results_name(settings.results),
            settings.sm_count
        ),
    );
    for comparison in &outcome.comparisons {
        row(&mut text, "result", &compared(comparison));
    }
    match &outcome.result {
        Ok(report) => report_text(&mut text, launch, report, settings),
        Err(error) => text.push_str(&failure(error, launch.lines())),
    }
    row(&mut text, "took", &format!("{:.3} s", outcome.took.as_secs_f64()));
    text
}

fn row(text: &mut String, name: &str, value: &str) {
    // Always one space, even after a long name. Writing to a `String` cannot fail.
    let _ = writeln!(text, "  {name:<13} {value}");
}

fn compared(comparison: &Comparison) -> String {
    let Comparison { name, elements, wrong, first, compared } = comparison;
    let elements = grouped(*elements as u64);
    match first {
        _ if !compared => format!("`{name}`: {elements} elements, not compared in this mode"),
        None => format!("`{name}`: {elements} elements as expected"),
        Some(first) => format!(
            "`{name}`: {} of {elements} elements are wrong, the first is {}: expected {} ({}), \
             got {} ({})",
            grouped(*wrong as u64),
            first.element,
            first.expected,
            first.bits[1],
            first.got,
            first.bits[0]
        ),
    }
}

/// Formats the source lines of a PTX line, with a leading separator; empty without line
/// information.
pub(crate) fn source_of(lines: &SourceLines, ptx_line: u32) -> String {
    let chain: Vec<String> = lines.chain(ptx_line).iter().map(ToString::to_string).collect();
    if chain.is_empty() { String::new() } else { format!(", {}", chain.join(" in ")) }
}

fn access(access: &Access, lines: &SourceLines) -> String {
    let verb = if access.write { "write" } else { "read" };
    let line = access.site.ptx_line;
    format!("{verb} by {}, PTX line {line}{}", access.actor, source_of(lines, line))
}

fn hazard_text(text: &mut String, hazard: &Hazard, lines: &SourceLines) {
    let Hazard { kind, missing, earlier, later, place, count } = hazard;
    let severity = match kind.severity() {
        Severity::Error => "hazard",
        Severity::Warning => "warning",
    };
    let times = if *count > 1 { format!(", {} times", grouped(*count)) } else { String::new() };
    let _ = writeln!(text, "  {severity}: {}{times}", kind.name());
    row(text, "  this", &access(later, lines));
    row(text, "  not after", &access(earlier, lines));
    if let Some(place) = place {
        row(text, "  at", &place.to_string());
    }
    row(text, "  hint", missing);
}

fn report_text(text: &mut String, launch: &PreparedLaunch, report: &Report, settings: &Settings) {
    let lines = launch.lines();
    for hazard in report.hazards.iter().take(HAZARDS) {
        hazard_text(text, hazard, lines);
    }
    if report.hazards.len() > HAZARDS {
        let _ = writeln!(text, "  and {} more hazards", report.hazards.len() - HAZARDS);
    }
    for read in &report.unwritten {
        let source = source_of(lines, read.ptx_line);
        let _ = writeln!(text, "  read of what nobody wrote: {}", read.what);
        row(text, "  at", &format!("PTX line {}{source}", read.ptx_line));
    }
    if settings.tracker && report.hazards.is_empty() {
        row(text, "hazards", "none");
    }
    counts_text(text, launch, &report.counts);
    for record in &report.trace.records {
        let _ = writeln!(text, "  {record}{}", source_of(lines, record.ptx_line));
    }
    if report.trace.is_cut {
        let _ = writeln!(text, "  and so on: `--trace N` prints N instructions");
    }
}

/// Counts instructions by family, most frequent first.
pub(crate) fn families(launch: &PreparedLaunch, counts: &Counts) -> Vec<(&'static str, u64)> {
    let mut families: BTreeMap<&'static str, u64> = BTreeMap::new();
    let steps = launch.program().map(|program| program.steps.as_slice()).unwrap_or_default();
    for (step, count) in steps.iter().zip(&counts.executed) {
        if *count > 0 {
            *families.entry(step.instruction.family()).or_default() += count;
        }
    }
    let mut families: Vec<_> = families.into_iter().collect();
    families.sort_by_key(|(name, count)| (std::cmp::Reverse(*count), *name));
    families
}

/// Bytes by memory: name, read, written.
pub(crate) fn levels(counts: &Counts) -> [(&'static str, u64, u64); 6] {
    let bytes = &counts.bytes;
    [
        ("device memory, threads", bytes.global_read, bytes.global_written),
        ("device memory, copies", bytes.copied_to_shared, bytes.copied_from_shared),
        ("shared memory, threads", bytes.shared_read, bytes.shared_written),
        ("tensor memory, threads", bytes.tensor_read, bytes.tensor_written),
        ("local memory", bytes.local_read, bytes.local_written),
        ("parameters", bytes.parameter_read, 0),
    ]
}

fn counts_text(text: &mut String, launch: &PreparedLaunch, counts: &Counts) {
    row(
        text,
        "instructions",
        &format!("{} of warps, {} CTAs", grouped(counts.instructions), grouped(counts.ctas)),
    );
    for (name, count) in families(launch, counts) {
        let _ = writeln!(text, "    {name:<26}{:>16}", grouped(count));
    }
    let _ = writeln!(text, "  {:<28}{:>16}{:>16}", "bytes", "read", "written");
    for (name, read, written) in levels(counts) {
        if read + written > 0 {
            let (read, written) = (grouped(read), grouped(written));
            let _ = writeln!(text, "    {name:<26}{read:>16}{written:>16}");
        }
    }
    if counts.mmas > 0 {
        row(
            text,
            "tensor cores",
            &format!(
                "{} instructions, {} multiply-adds",
                grouped(counts.mmas),
                grouped(counts.multiply_adds)
            ),
        );
    }
    if counts.bulk_copies > 0 {
        row(text, "bulk copies", &grouped(counts.bulk_copies));
    }
    waits_text(text, launch, counts);
}

fn waits_text(text: &mut String, launch: &PreparedLaunch, counts: &Counts) {
    let mut waits: Vec<_> = counts.waits.iter().collect();
    waits.sort_by_key(|(warp, waited)| (std::cmp::Reverse(waited.instructions), **warp));
    if waits.is_empty() {
        return;
    }
    let title = "waits, longest first";
    let _ = writeln!(text, "  {title:<28}{:>8}{:>12}  {:<8}where", "times", "length", "share");
    let ctas = counts.ctas.max(1);
    for (waiting, waited) in waits.iter().take(WAITS) {
        // A wait is measured in instructions of all warps; the share is per CTA.
        let length = waited.instructions;
        let share = length as f64 / (counts.instructions.max(1) * ctas) as f64;
        let what = launch
            .program()
            .and_then(|program| program.steps.iter().find(|step| step.ptx_line == waiting.ptx_line))
            .map_or("", |step| step.instruction.family());
        let _ = writeln!(
            text,
            "    {:<26}{:>8}{:>12}  {:<8}PTX line {}{}",
            format!("warp {} at {what}", waiting.warp),
            grouped(waited.times),
            grouped(length),
            format!("{:.1} %", 100.0 * share),
            waiting.ptx_line,
            source_of(launch.lines(), waiting.ptx_line)
        );
    }
    if waits.len() > WAITS {
        let _ = writeln!(text, "    and {} more", waits.len() - WAITS);
    }
}

/// Formats the reason for an unfinished launch, with source lines.
pub(crate) fn failure(error: &EmulatorError, lines: &SourceLines) -> String {
    let mut text = String::new();
    let mut waiting = |title: String, waiters: &[deepwell_emulator::error::Waiter]| {
        let _ = writeln!(text, "  {title}; who waits for what:");
        for waiter in waiters.iter().take(HAZARDS) {
            let line = waiter.ptx_line;
            let _ = writeln!(
                text,
                "    CTA {:?} warp {} lanes {:#010x}: {}, PTX line {line}{}",
                waiter.cta,
                waiter.warp,
                waiter.lanes,
                waiter.what,
                source_of(lines, line)
            );
        }
        if waiters.len() > HAZARDS {
            let _ = writeln!(text, "    and {} more", waiters.len() - HAZARDS);
        }
    };
    match error {
        EmulatorError::Deadlock { waiters } => waiting("deadlock".to_owned(), waiters),
        EmulatorError::Hang { instructions, waiters } => {
            waiting(format!("nothing changed for {} instructions", grouped(*instructions)), waiters)
        }
        EmulatorError::StepLimit { limit, waiters } => {
            waiting(format!("more than {} instructions", grouped(*limit)), waiters);
        }
        EmulatorError::Fault(report) => {
            let _ = writeln!(text, "  fault: {}", report.fault);
            let source = source_of(lines, report.ptx_line);
            let who = match report.thread {
                Some(thread) => format!("thread {thread:?}"),
                None => "an asynchronous operation".to_owned(),
            };
            row(&mut text, "  at", &format!("PTX line {}{source}", report.ptx_line));
            row(&mut text, "  who", &format!("{who} of CTA {:?}", report.cta));
        }
        other => {
            let _ = writeln!(text, "  {other}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use deepwell_emulator::hazard::{Actor, HazardKind, Site, Unit};

    use super::*;

    #[test]
    fn a_value_never_touches_its_name() {
        let check = |name: &str, expected: &str| {
            let mut text = String::new();
            row(&mut text, name, "value");
            assert_eq!(text, expected);
        };
        check("at", "  at            value\n");
        check("123456789_123", "  123456789_123 value\n");
        check("123456789_1234", "  123456789_1234 value\n");
        check("123456789_123456789", "  123456789_123456789 value\n");
    }

    #[test]
    fn both_accesses_of_a_hazard_stand_apart_from_their_names() {
        let access = |ptx_line: u32, write: bool| Access {
            site: Site { ptx_line, source: None },
            actor: Actor { cluster: 0, rank: 0, warp: 3, lanes: 1 << 5, unit: Unit::Thread },
            write,
        };
        let hazard = Hazard {
            kind: HazardKind::MissingSynchronization,
            missing: "a barrier between them".to_string(),
            earlier: access(17, false),
            later: access(21, true),
            place: None,
            count: 2,
        };
        let mut text = String::new();
        hazard_text(&mut text, &hazard, &SourceLines::default());
        let expected = [
            "    this        write by thread of cluster 0 CTA 0 warp 3 lane 5, PTX line 21",
            "    not after   read by thread of cluster 0 CTA 0 warp 3 lane 5, PTX line 17",
            "    hint        a barrier between them",
        ];
        assert_eq!(text.lines().skip(1).collect::<Vec<_>>(), expected);
    }
}
