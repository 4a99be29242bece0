//! Reports as text: for a terminal and as Markdown.

use std::fmt::Write as _;

use super::report::Report;
use super::row::{PeerTime, Row, geometric_mean};
use super::section::Section;

/// Description of the method, for records.
pub(super) const METHOD: [&str; 10] = [
    "Kernels: a call of the program that training would run, with the kernel that its catalog \
     chooses. The operands are copied as often as it takes to pass the last-level cache twice, 2 \
     to 512 times (not at all where one call moves 8 times the cache), and the calls take turns \
     over them.",
    "On a GPU all these calls are recorded as one graph, of 32 nodes or more where they are short, \
     of 10 ms where they are long; a sample replays it for 10 ms or more between two events; time \
     is that of the sample over its calls. On a processor calls are timed by the wall clock.",
    "Warm-up: 100 ms of replays on a GPU, two calls on a processor. The time is the median of the \
     samples, the spread their tenth and ninetieth percentile.",
    "Fill: uniform random numbers in [-1, 1); E4M3 elements of uniform numbers in [-448, 448), as \
     block quantization leaves them, for peers too; scales of 1/16 to 8, peers' all 1.",
    "Copy: 1 GiB to another on a GPU, by the driver's copy in a stream, each between two events; \
     bytes read and written, median of 20.",
    "Roofline: the larger of FLOPs over the datasheet's dense peak of the unit that does them and \
     bytes (each operand once) over the bandwidth of a copy measured in the same run. Calls that \
     read more than they write can pass it by some percent. `of roofline` is roofline time over \
     time; in `memory` it is predicted over measured bytes.",
    "Moe: a layer between an embedding and an output head is lowered as a training step; of that \
     the layer's calls of both passes run, each value at a place of its own. Elements of tokens \
     are their logits, so that the load of each expert is as asked, which is checked. Time of the \
     layer: all calls as one recording; of a call: behind those before it, alone between two \
     marks. TFLOP/s and roofline of the layer's GEMMs count pairs, not padding. Weights are made \
     into their formats once a step, which is no part of it, while a peer in FP8 does so in each \
     pass. The dense layer is as wide as the experts of a token together. Peers sort rows by \
     expert and have gate and up projection in one GEMM, gates on the experts' outputs.",
    "Transformer: one step, call by call with the device's own clock. Train: median time from \
     the end of a step to the end of the next, with two steps in flight on a GPU; its roofline \
     time is the predicted time of a step. Host time: what the host spends to start a step and \
     to read its result when there is nothing to wait for.",
    "Peers: PyTorch on the same shapes after ours in the same run, with the same rotation, graph \
     replay and events; the number is its time over ours, above 1 it is slower. FP8 GEMMs have \
     the scales that PyTorch offers, in `torch FP8 1x128` those of mxfp8-128, and write BF16. \
     Gradients of weights are BF16 there and FP32 here. torch eager is the fused AdamW, \
     torch.compile the compiled one over lists. Training: Hugging Face's llama, BF16 weights, \
     gradients and moments, steps put one behind the other without waiting; torchao converts all \
     linear layers but the last to FP8 and compiles.",
    "Memory: what the device holds in use while compiling and training, less what it held before, \
     sampled each 10 ms. Peers: the peak of what PyTorch allocated, over ours; its context and \
     what it keeps in reserve are not counted.",
];

/// Headings of the columns before the peers'.
pub(super) const COLUMNS: [&str; 9] =
    ["op", "shape", "dtype", "kernel", "us", "rate", "unit", "roofline us", "of roofline"];

/// The sections of the rows, in the order of [`Section::ALL`].
pub(super) fn sections(rows: &[Row]) -> Vec<Section> {
    let is_there = |section: &Section| rows.iter().any(|row| row.section == *section);
    Section::ALL.into_iter().filter(is_there).collect()
}

/// Names of all peers of a section, in the order of their first answer.
pub(super) fn peer_names(rows: &[&Row]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for peer in rows.iter().flat_map(|row| &row.peers) {
        if !names.contains(&peer.name) {
            names.push(peer.name.clone());
        }
    }
    names
}

/// Formats with three or four significant digits.
pub(super) fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 1000.0 {
        format!("{value:.0}")
    } else if size >= 100.0 {
        format!("{value:.1}")
    } else if size >= 1.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.3}")
    }
}

fn optional(value: Option<f64>, format: impl Fn(f64) -> String) -> String {
    value.map_or_else(String::new, format)
}

/// Formats a peer's ratio, or its time or failure if no ratio exists.
fn peer_cell(peer: Option<&PeerTime>) -> String {
    match peer {
        None => String::new(),
        Some(PeerTime { ratio: Some(ratio), .. }) => format!("{ratio:.2}x"),
        Some(PeerTime { time_s: Some(time_s), .. }) => format!("{} us", number(time_s * 1e6)),
        Some(_) => "failed".to_string(),
    }
}

/// The cells of a row: [`COLUMNS`], then `peers`.
pub(super) fn cells(row: &Row, peers: &[String]) -> Vec<String> {
    let mut cells = vec![
        row.what.clone(),
        row.shape.clone(),
        row.dtype.clone(),
        match row.failure {
            Some(_) => "failed".to_string(),
            None => row.kernel.clone(),
        },
        optional(row.time_s, |time_s| number(time_s * 1e6)),
        optional(row.rate, number),
        row.rate_unit.clone(),
        optional(row.roofline_s, |roofline_s| number(roofline_s * 1e6)),
        optional(row.roofline_share, |share| format!("{:.1}%", share * 100.0)),
    ];
    for name in peers {
        cells.push(peer_cell(row.peers.iter().find(|peer| peer.name == *name)));
    }
    cells
}

/// Summary of a section: mean roofline share, and mean ratios of the peers.
pub(super) fn summary(rows: &[&Row]) -> String {
    let failed = rows.iter().filter(|row| row.failure.is_some()).count();
    let mut text = format!("{} rows", rows.len());
    if failed > 0 {
        let _ = write!(text, ", {failed} failed");
    }
    let shares = geometric_mean(rows.iter().filter_map(|row| row.roofline_share));
    if let Some(share) = shares {
        let _ = write!(text, "; {:.1} % of the roofline", share * 100.0);
    }
    for name in peer_names(rows) {
        let of_peer = rows.iter().flat_map(|row| &row.peers).filter(|peer| peer.name == name);
        if let Some(ratio) = geometric_mean(of_peer.filter_map(|peer| peer.ratio)) {
            let takes = match rows.first().map(|row| row.section) {
                Some(Section::Memory) => format!("takes {ratio:.2} times as much"),
                _ => format!("takes {ratio:.2} times as long"),
            };
            let _ = write!(text, "; {name} {takes}");
        }
    }
    if shares.is_some() { text + " (geometric means)" } else { text }
}

/// Failures of rows and of peers with their reasons, and details of rows of whole models.
pub(super) fn remarks(rows: &[&Row]) -> Vec<String> {
    let mut remarks = Vec::new();
    for row in rows {
        let name = [row.what.as_str(), &row.shape, &row.dtype]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join(" ");
        if let Some(failure) = &row.failure {
            remarks.push(format!("{name}: failed: {}", failure.replace('\n', "; ")));
        }
        let is_whole = match row.section {
            Section::Forward | Section::Train | Section::Memory => true,
            Section::Moe => row.what.ends_with("layer"),
            _ => false,
        };
        if is_whole && !row.details.is_empty() {
            let details: Vec<String> =
                row.details.iter().map(|(name, value)| format!("{name} {value}")).collect();
            remarks.push(format!("{name}: {}", details.join(", ")));
        }
        for peer in &row.peers {
            if let Some(note) = &peer.note {
                let has_answer = peer.time_s.is_some() || peer.ratio.is_some();
                let how = if has_answer { "" } else { "failed: " };
                remarks.push(format!("{name}: {}: {how}{note}", peer.name));
            }
        }
    }
    // Libraries give the same remark for every shape.
    let mut once: Vec<String> = Vec::new();
    for remark in remarks {
        if !once.contains(&remark) {
            once.push(remark);
        }
    }
    once
}

/// All rows as aligned columns, section by section.
pub(super) fn table(rows: &[Row]) -> String {
    let mut text = String::new();
    for section in sections(rows) {
        let of_section: Vec<&Row> = rows.iter().filter(|row| row.section == section).collect();
        let peers = peer_names(&of_section);
        let head = COLUMNS.iter().map(|&name| name.to_string()).chain(peers.iter().cloned());
        let mut lines = vec![head.collect::<Vec<String>>()];
        lines.extend(of_section.iter().map(|row| cells(row, &peers)));
        let width = |column: usize| {
            lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..lines[0].len()).map(width).collect();
        let _ = writeln!(text, "{}: {}", section.name(), summary(&of_section));
        for line in &lines {
            let mut out = String::from(" ");
            for (column, (cell, &width)) in line.iter().zip(&widths).enumerate() {
                // Names to the left, numbers to the right.
                let _ = match column < 4 || column == 6 {
                    true => write!(out, " {cell:<width$} "),
                    false => write!(out, " {cell:>width$} "),
                };
            }
            let _ = writeln!(text, "{}", out.trim_end());
        }
        for remark in remarks(&of_section) {
            let _ = writeln!(text, "  {remark}");
        }
        text.push('\n');
    }
    text
}

/// A record of a run.
pub(super) fn markdown(report: &Report) -> String {
    let settings = &report.settings;
    let mut text = format!("# Benchmark on {}, {}\n\n", report.machine.name, report.began);
    let _ = writeln!(
        text,
        "`--device {} --model {} --precision {} --batch-size {} --seq-len {} --iterations {}`; {} \
         rows, {} failed.\n",
        settings.device,
        settings.model,
        settings.precision,
        settings.batch_size,
        settings.seq_len,
        settings.iterations,
        report.rows.len(),
        report.failures()
    );
    text.push_str("## Machine\n\n");
    for (name, value) in &report.machine.facts {
        let _ = writeln!(text, "- {name}: {value}");
    }
    text.push_str("\n## Method\n\n");
    for line in METHOD {
        let _ = writeln!(text, "- {line}");
    }
    for section in sections(&report.rows) {
        let rows: Vec<&Row> = report.rows.iter().filter(|row| row.section == section).collect();
        let peers = peer_names(&rows);
        let _ = writeln!(text, "\n## {}\n\n{}.\n", section.name(), summary(&rows));
        let head: Vec<&str> = COLUMNS.into_iter().chain(peers.iter().map(String::as_str)).collect();
        let _ = writeln!(text, "| {} |", head.join(" | "));
        let _ = writeln!(text, "|{}", "---|".repeat(head.len()));
        for row in &rows {
            let cells: Vec<String> =
                cells(row, &peers).iter().map(|cell| cell.replace('|', "\\|")).collect();
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        }
        let remarks = remarks(&rows);
        if !remarks.is_empty() {
            text.push('\n');
        }
        for remark in remarks {
            let _ = writeln!(text, "- {remark}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Row> {
        let mut measured = Row {
            shape: "64,96,32".to_string(),
            kernel: "cpu_linear".to_string(),
            time_s: Some(2e-6),
            rate: Some(0.5),
            rate_unit: "TFLOP/s".to_string(),
            roofline_s: Some(1e-6),
            roofline_share: Some(0.5),
            ..Row::new(Section::Gemm, "linear")
        };
        measured.add_peer("torch eager", Some(4e-6), None);
        measured.add_peer("torch.compile", None, Some("no compiler".to_string()));
        vec![measured, Row::failed(Section::Gemm, "scaled_gemm", "no kernel\n  why")]
    }

    #[test]
    fn a_table_says_what_was_measured_and_what_failed() {
        let text = table(&rows());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "gemm: 2 rows, 1 failed; 50.0 % of the roofline; torch eager takes 2.00 times as long \
             (geometric means)"
        );
        let words: Vec<&str> = lines[2].split_whitespace().collect();
        assert_eq!(words[2..8], ["cpu_linear", "2.00", "0.500", "TFLOP/s", "1.00", "50.0%"]);
        assert_eq!(words[8..], ["2.00x", "failed"]);
        assert_eq!(lines[4], "  linear 64,96,32: torch.compile: failed: no compiler");
        assert_eq!(lines[5], "  scaled_gemm: failed: no kernel;   why");
    }

    #[test]
    fn numbers() {
        let check = |value: f64, expected: &str| assert_eq!(number(value), expected);
        check(60565.4, "60565");
        check(724.31, "724.3");
        check(12.345, "12.35");
        check(0.0123, "0.012");
    }
}
