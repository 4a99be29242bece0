//! The page: head, style sheet, sections.

use std::fmt::Write as _;

use super::{BarTable, HeatMap, IntervalChart, KeyValueTable, LineChart, Table, escape};

/// Outcome of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything is within tolerance.
    Pass,
    /// A value is out of tolerance.
    Fail,
    /// No verdict is possible, for example because the run was stopped.
    Open,
}

/// The answer to the report's question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerdictBlock {
    /// Outcome of the verdict.
    pub outcome: Outcome,
    /// The answer in one line.
    pub headline: String,
    /// Reasons, each a line.
    pub reasons: Vec<String>,
}

/// A block of a section.
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// A banner.
    Verdict(VerdictBlock),
    /// A paragraph.
    Text(String),
    /// Names and values.
    KeyValues(KeyValueTable),
    /// Columns with headings.
    Table(Table),
    /// Names, bars and values.
    Bars(BarTable),
    /// A chart, with its title as a heading.
    Chart(LineChart),
    /// A chart of intervals, with its title as a heading.
    Intervals(IntervalChart),
    /// A map of rows and columns, with its title as a heading.
    Heat(HeatMap),
}

/// A heading with its blocks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// The heading; omitted if empty.
    pub heading: String,
    /// The content.
    pub blocks: Vec<Block>,
}

/// Returns a page as one file, without external references or scripts.
pub fn html_page(title: &str, sections: &[Section]) -> String {
    let mut out = String::new();
    push_head(&mut out, title, "", None);
    for section in sections {
        out.push_str("<section>\n");
        if !section.heading.is_empty() {
            let _ = writeln!(out, "<h2>{}</h2>", escape(&section.heading));
        }
        push_blocks(&mut out, &section.blocks);
        out.push_str("</section>\n");
    }
    push_end(&mut out);
    out
}

/// Writes the page up to its heading. A browser loads the page again after `refresh_s`.
pub(crate) fn push_head(out: &mut String, title: &str, style: &str, refresh_s: Option<u64>) {
    let title = escape(title);
    out.push_str(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n",
    );
    if let Some(seconds) = refresh_s {
        let _ = writeln!(out, "<meta http-equiv=\"refresh\" content=\"{seconds}\"/>");
    }
    let _ = write!(
        out,
        "<title>{title}</title>\n<style>\n{STYLE}{style}</style>\n</head>\n<body>\n<main>\n\
         <h1>{title}</h1>\n"
    );
}

/// Writes the end of a page.
pub(crate) fn push_end(out: &mut String) {
    out.push_str("</main>\n</body>\n</html>\n");
}

/// Writes blocks; consecutive charts are side by side if the window is wide enough.
pub(crate) fn push_blocks(out: &mut String, blocks: &[Block]) {
    let is_chart =
        |block: &Block| matches!(block, Block::Chart(_) | Block::Intervals(_) | Block::Heat(_));
    for group in blocks.chunk_by(|a, b| is_chart(a) && is_chart(b)) {
        let has_charts = group.iter().any(is_chart);
        if has_charts {
            out.push_str("<div class=\"charts\">\n");
        }
        for block in group {
            push_block(out, block);
        }
        if has_charts {
            out.push_str("</div>\n");
        }
    }
}

fn push_block(out: &mut String, block: &Block) {
    match block {
        Block::Verdict(verdict) => push_verdict(out, verdict),
        Block::Text(text) => {
            let _ = writeln!(out, "<p>{}</p>", escape(text));
        }
        Block::KeyValues(table) => table.push_html(out),
        Block::Table(table) => table.push_html(out),
        Block::Bars(table) => table.push_html(out),
        Block::Chart(chart) => push_figure(out, &chart.title, &chart.to_svg()),
        Block::Intervals(chart) => push_figure(out, &chart.title, &chart.to_svg()),
        Block::Heat(map) => push_figure(out, &map.title, &map.to_svg()),
    }
}

fn push_figure(out: &mut String, title: &str, svg: &str) {
    let title = escape(title);
    let _ = write!(out, "<figure>\n<figcaption>{title}</figcaption>\n{svg}</figure>\n");
}

fn push_verdict(out: &mut String, verdict: &VerdictBlock) {
    let (class, word) = match verdict.outcome {
        Outcome::Pass => ("pass", "Pass"),
        Outcome::Fail => ("fail", "Fail"),
        Outcome::Open => ("open", "Open"),
    };
    let headline = escape(&verdict.headline);
    let _ =
        writeln!(out, "<div class=\"verdict {class}\"><p><strong>{word}</strong> {headline}</p>");
    if !verdict.reasons.is_empty() {
        out.push_str("<ul>\n");
        for reason in &verdict.reasons {
            let _ = writeln!(out, "<li>{}</li>", escape(reason));
        }
        out.push_str("</ul>");
    }
    out.push_str("</div>\n");
}

/// The colours of the series are those of Okabe and Ito, chosen to be distinguishable with any
/// colour vision; yellow and sky blue are darker on white than the originals, and all are lighter
/// on black.
const STYLE: &str = "\
:root {
  color-scheme: light dark;
  --back: #ffffff; --text: #1c1f23; --soft: #5c636b; --line: #d9dde2; --shade: #f5f6f8;
  --pass: #0b7a4b; --fail: #b3261e; --open: #8a6100;
  --s0: #0072b2; --s1: #d55e00; --s2: #00845f; --s3: #b8508d; --s4: #946b00; --s5: #5c636b;
  --h0: #b8508d; --h1: #2f7fc0; --h2: #8fbbe0; --h3: #cfe0ef; --h4: #eef0f2; --h5: #f6dcc6;
  --h6: #eba46c; --h7: #d55e00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14171a; --text: #e6e8eb; --soft: #a0a7af; --line: #343a41; --shade: #1d2125;
    --pass: #4cc38a; --fail: #ff8a80; --open: #e3b341;
    --s0: #56b4e9; --s1: #ff9a4d; --s2: #3fcf9f; --s3: #e79ac6; --s4: #e3b341; --s5: #a0a7af;
    --h0: #e79ac6; --h1: #2f6fa8; --h2: #3d5f7e; --h3: #3a4753; --h4: #2a2f35; --h5: #5a4632;
    --h6: #a8692f; --h7: #ff9a4d;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 1.6rem; margin: 0 0 16px; }
h2 { font-size: 1.15rem; margin: 32px 0 10px; padding-bottom: 4px;
  border-bottom: 1px solid var(--line); }
p { margin: 8px 0; max-width: 75ch; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr));
  gap: 20px; margin: 12px 0; }
figure { margin: 0; }
figcaption { font-weight: 600; margin-bottom: 4px; }
.chart { display: block; width: 100%; height: auto; color: var(--soft); }
.chart text { fill: var(--soft); }
.chart .marker { color: var(--open); }
.chart .marker text { fill: var(--open); }
.faint { opacity: 0.4; }
.s0 { color: var(--s0); } .s1 { color: var(--s1); } .s2 { color: var(--s2); }
.s3 { color: var(--s3); } .s4 { color: var(--s4); } .s5 { color: var(--s5); }
.h0 { color: var(--h0); } .h1 { color: var(--h1); } .h2 { color: var(--h2); }
.h3 { color: var(--h3); } .h4 { color: var(--h4); } .h5 { color: var(--h5); }
.h6 { color: var(--h6); } .h7 { color: var(--h7); }
.scroll { overflow-x: auto; margin: 12px 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
th[scope=row] { font-weight: 400; color: var(--soft); white-space: nowrap; }
td.number { text-align: right; white-space: nowrap; }
.bars { width: 100%; max-width: 720px; }
.bars .bar { width: 100%; vertical-align: middle; }
.bars .bar span { display: block; height: 12px; min-width: 1px; background: currentColor; }
.verdict { border-left: 6px solid; background: var(--shade); padding: 10px 16px; margin: 12px 0; }
.verdict p { font-size: 1.1rem; margin: 0; }
.verdict ul { color: var(--text); margin: 6px 0 0; padding-left: 20px; }
.verdict p { color: var(--text); }
.verdict strong { margin-right: 6px; }
.pass { border-color: var(--pass); } .pass strong { color: var(--pass); }
.fail { border-color: var(--fail); } .fail strong { color: var(--fail); }
.open { border-color: var(--open); } .open strong { color: var(--open); }
@media print { main { max-width: none; } figure, table { break-inside: avoid; } }
";

#[cfg(test)]
mod tests {
    use super::super::check::assert_well_formed;
    use super::super::{Bar, Marker, ReferenceLine, Scale, Series, Stroke};
    use super::*;

    /// A page with every kind of block, with numbers like those of a run.
    fn sample() -> String {
        let curve = |shift: f64| -> Vec<(f64, f64)> {
            (0..1000)
                .map(|step| {
                    let noise = ((step * 7919) % 101) as f64 / 1000.0;
                    (step as f64, 1.9 + shift + noise + 3.6 * (-(step as f64) / 140.0).exp())
                })
                .collect()
        };
        let evaluations = |shift: f64| -> Vec<(f64, f64)> {
            curve(shift).into_iter().step_by(100).map(|(x, y)| (x, y + 0.03)).collect()
        };
        let loss = LineChart {
            title: "Loss".to_owned(),
            x_label: "step".to_owned(),
            y_label: "nats per token".to_owned(),
            y_scale: Scale::Log,
            series: vec![
                Series { stroke: Stroke::Faint, ..Series::new("BF16 training", curve(0.0)) },
                Series { stroke: Stroke::Faint, ..Series::new("MXFP8 training", curve(0.01)) },
                Series { color: Some(0), ..Series::new("BF16 held-out", evaluations(0.0)) },
                Series {
                    color: Some(1),
                    stroke: Stroke::Dashed,
                    ..Series::new("MXFP8 held-out", evaluations(0.01))
                },
            ],
            references: vec![
                ReferenceLine { label: "unigram 3.31".to_owned(), y: 3.31 },
                ReferenceLine { label: "bigram 2.46".to_owned(), y: 2.46 },
            ],
            markers: vec![
                Marker { label: "layers.2.wq back to BF16".to_owned(), x: 240.0 },
                Marker { label: "loss spike".to_owned(), x: 712.0 },
            ],
            ..LineChart::default()
        };
        let gap = LineChart {
            title: "Held-out gap, MXFP8 less BF16".to_owned(),
            x_label: "step".to_owned(),
            y_label: "%".to_owned(),
            series: vec![Series {
                stroke: Stroke::Dots,
                ..Series::new("gap", (1..=10).map(|i| (i as f64 * 100.0, 0.4 / i as f64)).collect())
            }],
            references: vec![
                ReferenceLine { label: "+0.5 %".to_owned(), y: 0.5 },
                ReferenceLine { label: "\u{2212}0.5 %".to_owned(), y: -0.5 },
            ],
            ..LineChart::default()
        };
        let bar = |name: &str, value: f64, color| Bar {
            name: name.to_owned(),
            value,
            text: format!("{value:.1} MiB"),
            color,
        };
        let sections = [
            Section {
                heading: String::new(),
                blocks: vec![
                    Block::Verdict(VerdictBlock {
                        outcome: Outcome::Pass,
                        headline: "MXFP8 holds BF16's loss".to_owned(),
                        reasons: vec!["mean gap +0.12 %, tolerance \u{b1}0.5 %".to_owned()],
                    }),
                    Block::KeyValues(
                        KeyValueTable::default()
                            .row("steps", "1,000")
                            .row("device", "CPU <2 cores>"),
                    ),
                ],
            },
            Section {
                heading: "Loss".to_owned(),
                blocks: vec![
                    Block::Text("Both runs see the same batches.".to_owned()),
                    Block::Chart(loss),
                    Block::Chart(gap),
                ],
            },
            Section {
                heading: "Memory & guards".to_owned(),
                blocks: vec![
                    Block::Bars(BarTable {
                        bars: vec![bar("weights", 11.8, 0), bar("activations", 48.2, 1)],
                    }),
                    Block::Table(Table {
                        columns: vec!["layer".to_owned(), "underflows".to_owned()],
                        rows: vec![vec!["layers.0.wq".to_owned(), "12".to_owned()]],
                    }),
                ],
            },
        ];
        html_page("Parity <test>", &sections)
    }

    #[test]
    fn a_page_is_well_formed_and_refers_to_nothing_outside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.html");
        std::fs::write(&path, sample()).unwrap();
        let page = std::fs::read_to_string(&path).unwrap();
        let body = page.strip_prefix("<!DOCTYPE html>\n").unwrap();
        assert_well_formed(body);
        // The name of the SVG language looks like an address but is never fetched.
        let without_name = body.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
        for outside in ["http:", "https:", "//", "src=", "href=", "url(", "@import", "<script"] {
            assert!(!without_name.contains(outside), "{outside}");
        }
        for part in [
            "<h1>Parity &lt;test&gt;</h1>",
            "<h2>Memory &amp; guards</h2>",
            "<div class=\"verdict pass\"><p><strong>Pass</strong> MXFP8 holds BF16&#39;s loss</p>",
            "prefers-color-scheme: dark",
        ] {
            assert!(page.contains(part), "{part}");
        }
        assert_eq!(page.matches("<svg").count(), 2);
        assert_eq!(page.matches("<div class=\"charts\">").count(), 1, "charts share a row");
        assert_eq!(page.matches("<h2>").count(), 2, "an empty heading is left out");
        assert!(page.len() < 100_000, "{} bytes", page.len());
    }

    #[test]
    fn every_id_is_there_once() {
        let page = sample();
        let mut ids: Vec<&str> =
            page.split(" id=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!((ids.len(), count), (4, 4));
    }

    #[test]
    fn every_class_of_a_colour_is_in_the_style_sheet() {
        for level in 0..super::super::heat_map::LEVELS {
            assert!(STYLE.contains(&format!(".h{level} {{ color: var(--h{level}); }}")));
            assert_eq!(STYLE.matches(&format!("--h{level}: #")).count(), 2, "light and dark");
        }
        for color in 0..super::super::chart::COLORS {
            assert!(STYLE.contains(&format!(".s{color} {{ color: var(--s{color}); }}")));
            assert_eq!(STYLE.matches(&format!("--s{color}: #")).count(), 2, "light and dark");
        }
    }
}
