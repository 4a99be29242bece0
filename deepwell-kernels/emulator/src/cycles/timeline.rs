//! Timelines in Chrome's trace format, which <https://ui.perfetto.dev> shows.

use std::fmt::Write as _;

use super::summary::Cycles;
use crate::decode::Program;

/// A row of the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// MMAs.
    TensorCores,
    /// Bulk and tensor copies, from issue to arrival.
    Copies,
    /// Waits of a warp.
    Warp(u32),
}

/// A span of time on an SM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The SM.
    pub sm: u32,
    /// Number of the cluster.
    pub cluster: u64,
    /// Rank of the CTA.
    pub rank: u32,
    /// The row.
    pub track: Track,
    /// Position of the instruction.
    pub pc: u32,
    /// First clock.
    pub start: f64,
    /// Last clock.
    pub end: f64,
}

/// Most spans of a timeline; the first in time are kept.
const SPANS_MAX: usize = 200_000;

/// Returns a timeline as a JSON document. A clock is a microsecond. Processes are SMs; threads are
/// the tensor cores, the copies and the waits of each warp, named by PTX line.
pub fn timeline(cycles: &Cycles, program: &Program) -> String {
    let mut spans: Vec<&Span> = cycles.spans.iter().collect();
    spans.sort_by(|a, b| a.start.total_cmp(&b.start));
    spans.truncate(SPANS_MAX);
    let mut text = String::from("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n");
    let mut rows: Vec<(u32, Track, u32)> =
        spans.iter().map(|span| (span.sm, span.track, span.rank)).collect();
    rows.sort_unstable();
    rows.dedup();
    for (sm, track, _) in &rows {
        let (thread, name) = match track {
            Track::TensorCores => (0, "tensor cores".to_owned()),
            Track::Copies => (1, "copies".to_owned()),
            Track::Warp(warp) => (2 + warp, format!("waits of warp {warp}")),
        };
        let _ = writeln!(
            text,
            "{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{sm},\"tid\":{thread},\
             \"args\":{{\"name\":\"{name}\"}}}},\n\
             {{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{sm},\
             \"args\":{{\"name\":\"SM {sm}\"}}}},"
        );
    }
    for (at, span) in spans.iter().enumerate() {
        let step = program.steps.get(span.pc as usize);
        let line = step.map_or(0, |step| step.ptx_line);
        let family = step.map_or("", |step| step.instruction.family());
        let thread = match span.track {
            Track::TensorCores => 0,
            Track::Copies => 1,
            Track::Warp(warp) => 2 + warp,
        };
        let comma = if at + 1 == spans.len() { "" } else { "," };
        let _ = writeln!(
            text,
            "{{\"ph\":\"X\",\"name\":\"{family} line {line}\",\"pid\":{},\"tid\":{thread},\
             \"ts\":{:.0},\"dur\":{:.0},\"args\":{{\"cluster\":{},\"rank\":{}}}}}{comma}",
            span.sm,
            span.start,
            (span.end - span.start).max(1.0),
            span.cluster,
            span.rank
        );
    }
    text.push_str("]}\n");
    text
}
