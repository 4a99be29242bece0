//! The report as an HTML page.

use super::report::Report;
use super::row::Row;
use super::text::{COLUMNS, METHOD, cells, number, peer_names, remarks, sections, summary};
use deepwell_report::{
    Bar, BarTable, Block, KeyValueTable, Outcome, Section as PageSection, Table, VerdictBlock,
    html_page,
};

/// Colour of Deepwell's own values, and of the shares of the roofline.
const OWN_COLOR: usize = 0;

pub(super) fn html(report: &Report) -> String {
    let failures = report.failures();
    let verdict = VerdictBlock {
        outcome: if failures == 0 { Outcome::Pass } else { Outcome::Fail },
        headline: format!("{} measurements, {failures} failed", report.rows.len()),
        reasons: Vec::new(),
    };
    let settings = &report.settings;
    let mut asked = KeyValueTable::default()
        .row("began", &report.began)
        .row("model", &settings.model)
        .row("precision", settings.precisions().join(" and "))
        .row("batch", format!("{} x {} tokens", settings.batch_size, settings.seq_len))
        .row("iterations", settings.iterations.to_string());
    for (name, value) in &report.machine.facts {
        asked = asked.row(name, value);
    }
    let mut page = vec![PageSection {
        heading: String::new(),
        blocks: vec![Block::Verdict(verdict), Block::KeyValues(asked)],
    }];
    for section in sections(&report.rows) {
        let rows: Vec<&Row> = report.rows.iter().filter(|row| row.section == section).collect();
        page.push(PageSection { heading: section.name().to_string(), blocks: blocks(&rows) });
    }
    let method = METHOD.iter().map(|line| Block::Text((*line).to_string())).collect();
    page.push(PageSection { heading: "Method".to_string(), blocks: method });
    html_page(&format!("Benchmark on {}", report.machine.name), &page)
}

fn blocks(rows: &[&Row]) -> Vec<Block> {
    let peers = peer_names(rows);
    let mut blocks = vec![Block::Text(format!("{}.", summary(rows)))];
    let shares = shares(rows);
    if !shares.bars.is_empty() {
        blocks.push(Block::Text("Share of the roofline:".to_string()));
        blocks.push(Block::Bars(shares));
    }
    let times = times(rows, &peers);
    if !times.bars.is_empty() {
        blocks.push(Block::Text("Time beside the peers', ours as 1:".to_string()));
        blocks.push(Block::Bars(times));
    }
    let columns = COLUMNS.iter().map(|&name| name.to_string()).chain(peers.iter().cloned());
    blocks.push(Block::Table(Table {
        columns: columns.collect(),
        rows: rows.iter().map(|row| cells(row, &peers)).collect(),
    }));
    blocks.extend(remarks(rows).into_iter().map(Block::Text));
    blocks
}

fn name(row: &Row) -> String {
    format!("{} {} {}", row.what, row.shape, row.dtype).trim().to_string()
}

fn shares(rows: &[&Row]) -> BarTable {
    let bar = |row: &&Row| {
        let share = row.roofline_share?;
        let rate = row
            .rate
            .map_or_else(String::new, |rate| format!(" ({} {})", number(rate), row.rate_unit));
        let text = format!("{:.1}%{rate}", share * 100.0);
        Some(Bar { name: name(row), value: share, text, color: OWN_COLOR })
    };
    BarTable { bars: rows.iter().filter_map(bar).collect() }
}

fn times(rows: &[&Row], peers: &[String]) -> BarTable {
    let mut bars = Vec::new();
    for row in rows {
        if row.peers.iter().all(|peer| peer.ratio.is_none()) {
            continue;
        }
        let own = row.time_s.map_or_else(String::new, |time_s| number(time_s * 1e6) + " us");
        bars.push(Bar { name: name(row), value: 1.0, text: own, color: OWN_COLOR });
        for peer in &row.peers {
            let Some(ratio) = peer.ratio else { continue };
            let index = peers.iter().position(|known| *known == peer.name).unwrap_or(0);
            bars.push(Bar {
                name: format!("\u{a0}\u{a0}{}", peer.name),
                value: ratio,
                text: format!("{ratio:.2}x"),
                color: OWN_COLOR + 1 + index,
            });
        }
    }
    BarTable { bars }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Machine, Section, Settings};
    use deepwell_trainer::Device;

    #[test]
    fn a_page_has_every_row_and_every_peer() {
        let mut row = Row {
            time_s: Some(1e-3),
            roofline_share: Some(0.8),
            ..Row::new(Section::Norms, "rms_norm<T>")
        };
        row.add_peer("torch eager", Some(2e-3), None);
        let report = Report {
            began: "2026-01-02T03:04:05Z".to_string(),
            settings: Settings {
                device: Device::Cpu,
                model: "llama-micro".to_string(),
                precision: "mxfp8".to_string(),
                beside_bf16: true,
                batch_size: 2,
                seq_len: 64,
                iterations: 3,
                copy_gbps: None,
                kernels: Vec::new(),
                mixtures: Vec::new(),
                mixture_tokens: 0,
            },
            machine: Machine::default(),
            rows: vec![row, Row::failed(Section::Norms, "swiglu", "no kernel")],
        };
        let page = report.to_html();
        for expected in
            ["rms_norm&lt;T&gt;", "torch eager", "2.00x", "80.0%", "swiglu: failed: no kernel"]
        {
            assert!(page.contains(expected), "{expected}");
        }
    }
}
