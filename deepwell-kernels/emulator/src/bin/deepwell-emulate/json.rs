//! One run as JSON.

use deepwell_emulator::error::EmulatorError;
use deepwell_emulator::hazard::{Access, Severity};
use deepwell_emulator::launch::{Report, Settings};
use deepwell_emulator::launch_file::{Outcome, PreparedLaunch, SourceLines};
use serde_json::{Map, Value, json};

use crate::modes::settings_json;
use crate::text::{families, levels};

/// Converts the outcome of a launch to JSON, in full.
pub(crate) fn outcome(launch: &PreparedLaunch, settings: &Settings, outcome: &Outcome) -> Value {
    let results: Vec<Value> = outcome
        .comparisons
        .iter()
        .map(|comparison| {
            json!({
                "name": comparison.name,
                "elements": comparison.elements,
                "wrong": comparison.wrong,
                "compared": comparison.compared,
                "first_wrong": comparison.first.as_ref().map(|first| json!({
                    "element": first.element,
                    "expected_bits": first.bits[1],
                    "got_bits": first.bits[0],
                })),
            })
        })
        .collect();
    let mut document = json!({
        "kernel": launch.file().kernel,
        "file": launch.name(),
        "verdict": outcome.status().name(),
        "mode": settings_json(settings),
        "results": results,
        "took_s": outcome.took.as_secs_f64(),
    });
    let more = match &outcome.result {
        Ok(report) => report_json(launch, report),
        Err(error) => failure(error, launch.lines()),
    };
    if let Some(document) = document.as_object_mut() {
        document.extend(more);
    }
    document
}

/// Source lines of a PTX line, innermost first.
pub(crate) fn source(lines: &SourceLines, ptx_line: u32) -> Value {
    lines.chain(ptx_line).iter().map(ToString::to_string).collect()
}

fn access(access: &Access, lines: &SourceLines) -> Value {
    json!({
        "write": access.write,
        "who": access.actor.to_string(),
        "ptx_line": access.site.ptx_line,
        "source": source(lines, access.site.ptx_line),
    })
}

fn report_json(launch: &PreparedLaunch, report: &Report) -> Map<String, Value> {
    let lines = launch.lines();
    let counts = &report.counts;
    let hazards: Vec<Value> = report
        .hazards
        .iter()
        .map(|hazard| {
            json!({
                "kind": hazard.kind.name(),
                "warning": hazard.kind.severity() == Severity::Warning,
                "earlier": access(&hazard.earlier, lines),
                "later": access(&hazard.later, lines),
                "place": hazard.place.map(|place| place.to_string()),
                "count": hazard.count,
                "missing": hazard.missing,
            })
        })
        .collect();
    let unwritten: Vec<Value> = report
        .unwritten
        .iter()
        .map(|read| {
            json!({
                "ptx_line": read.ptx_line,
                "source": source(lines, read.ptx_line),
                "what": read.what,
            })
        })
        .collect();
    let by_family: Map<String, Value> = families(launch, counts)
        .into_iter()
        .map(|(name, count)| (name.to_owned(), count.into()))
        .collect();
    let bytes: Map<String, Value> = levels(counts)
        .into_iter()
        .map(|(name, read, written)| (name.to_owned(), json!({ "read": read, "written": written })))
        .collect();
    let waits: Vec<Value> = counts
        .waits
        .iter()
        .map(|(waiting, waited)| {
            json!({
                "warp": waiting.warp,
                "ptx_line": waiting.ptx_line,
                "source": source(lines, waiting.ptx_line),
                "times": waited.times,
                "instructions": waited.instructions,
            })
        })
        .collect();
    let trace: Vec<Value> =
        report.trace.records.iter().map(|record| record.to_string().into()).collect();
    let document = json!({
        "hazards": hazards,
        "unwritten": unwritten,
        "counts": {
            "instructions": counts.instructions,
            "by_family": by_family,
            "ctas": counts.ctas,
            "bytes": bytes,
            "atomics": counts.atomics,
            "bulk_copies": counts.bulk_copies,
            "tensor_instructions": counts.mmas,
            "multiply_adds": counts.multiply_adds,
        },
        "waits": waits,
        "trace": trace,
    });
    document.as_object().cloned().unwrap_or_default()
}

/// Converts the reason for an unfinished launch to JSON.
fn failure(error: &EmulatorError, lines: &SourceLines) -> Map<String, Value> {
    let waiters = match error {
        EmulatorError::Deadlock { waiters }
        | EmulatorError::Hang { waiters, .. }
        | EmulatorError::StepLimit { waiters, .. } => waiters.as_slice(),
        _ => &[],
    };
    let waiters: Vec<Value> = waiters
        .iter()
        .map(|waiter| {
            json!({
                "cta": waiter.cta,
                "warp": waiter.warp,
                "lanes": waiter.lanes,
                "ptx_line": waiter.ptx_line,
                "source": source(lines, waiter.ptx_line),
                "what": waiter.what,
            })
        })
        .collect();
    let (rule, ptx_line) = match error {
        EmulatorError::Fault(report) => (Some(report.fault.rule), Some(report.ptx_line)),
        _ => (None, None),
    };
    let document = json!({
        "error": error.to_string(),
        "rule": rule,
        "ptx_line": ptx_line,
        "source": ptx_line.map(|line| source(lines, line)),
        "waiters": waiters,
    });
    document.as_object().cloned().unwrap_or_default()
}
