//! Scores for the documentation: a figure of all rows, and a table of all files.

use std::fmt::Write;

use super::{Scored, ScoredRow, UNFITTED};

const COLUMNS: usize = 4;
const PANEL: f64 = 250.0;
const PLOT: f64 = 176.0;
const LEFT: f64 = 46.0;
const TOP: f64 = 34.0;

/// An SVG of predictions over measurements with a panel for each table. The diagonal is a perfect
/// prediction, the band is 10 % (0.01 for bubble rates). Rows with an unmodelled feature are
/// hollow.
pub fn figure(tables: &[Scored]) -> String {
    let rows = tables.len().div_ceil(COLUMNS).max(1);
    let (width, height) = (PANEL * COLUMNS as f64, PANEL * rows as f64);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{width}\" \
         height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (index, table) in tables.iter().enumerate() {
        let place = (PANEL * (index % COLUMNS) as f64, PANEL * (index / COLUMNS) as f64);
        // Writing to a string does not fail.
        let _ = panel(&mut text, table, place);
    }
    text += "</svg>\n";
    text
}

/// A value as a coordinate: the logarithm, or the value for tables with absolute errors.
fn scaled(table: &Scored, value: f64) -> f64 {
    if table.absolute { value } else { value.log10() }
}

fn panel(text: &mut String, table: &Scored, (x0, y0): (f64, f64)) -> std::fmt::Result {
    let usable = |row: &&ScoredRow| table.absolute || (row.predicted > 0.0 && row.measured > 0.0);
    let rows: Vec<&ScoredRow> = table.rows.iter().filter(usable).collect();
    let values = || rows.iter().flat_map(|row| [row.predicted, row.measured]);
    let least = values().map(|value| scaled(table, value)).fold(f64::INFINITY, f64::min);
    let most = values().map(|value| scaled(table, value)).fold(f64::NEG_INFINITY, f64::max);
    let margin = 0.06 * (most - least).max(1e-9);
    let (from, to) = (least - margin, most + margin);
    let at = |value: f64| (scaled(table, value) - from) / (to - from) * PLOT;
    let (left, bottom) = (x0 + LEFT, y0 + TOP + PLOT);
    let file = table.file.trim_end_matches(".csv");
    let error = match table.absolute {
        true => format!("{:.4} on average", table.mean_error()),
        false => format!("{:.1} % on average", 100.0 * table.mean_error()),
    };
    writeln!(
        text,
        "<g><title>{file}</title>\n<text x=\"{left}\" y=\"{}\" font-weight=\"bold\">{file}</text>\n\
         <text x=\"{left}\" y=\"{}\" fill=\"#555555\">{}, {error}</text>",
        y0 + 14.0,
        y0 + 28.0,
        table.unit
    )?;
    writeln!(
        text,
        "<rect x=\"{left}\" y=\"{}\" width=\"{PLOT}\" height=\"{PLOT}\" fill=\"none\" \
         stroke=\"#999999\"/>",
        bottom - PLOT
    )?;
    // The band around the diagonal, clipped at the frame.
    let shift = match table.absolute {
        true => 0.01 / (to - from) * PLOT,
        false => 1.1_f64.log10() / (to - from) * PLOT,
    }
    .min(PLOT);
    let far = PLOT - shift;
    writeln!(
        text,
        "<path d=\"M{left:.1} {bottom:.1} h{shift:.1} L{:.1} {:.1} v-{shift:.1} h-{shift:.1} \
         L{left:.1} {:.1} Z\" fill=\"#4e79a7\" fill-opacity=\"0.12\"/>\n<line x1=\"{left:.1}\" \
         y1=\"{bottom:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#999999\"/>",
        left + PLOT,
        bottom - far,
        bottom - shift,
        left + PLOT,
        bottom - PLOT
    )?;
    for row in &rows {
        let (x, y) = (left + at(row.measured), bottom - at(row.predicted));
        let fill = if row.unmodelled.is_some() { "none" } else { "#4e79a7" };
        writeln!(
            text,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\" fill=\"{fill}\" fill-opacity=\"0.7\" \
             stroke=\"#4e79a7\" stroke-width=\"0.8\"/>"
        )?;
    }
    for value in [least, most] {
        let value = if table.absolute { value } else { 10.0_f64.powf(value) };
        let label = number(value);
        let (x, y) = (left + at(value), bottom - at(value));
        writeln!(
            text,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            bottom + 14.0,
            left - 4.0,
            y + 4.0
        )?;
    }
    writeln!(
        text,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555555\">measured</text>\n\
         <text transform=\"translate({:.1} {:.1}) rotate(-90)\" text-anchor=\"middle\" \
         fill=\"#555555\">predicted</text>\n</g>",
        left + PLOT / 2.0,
        bottom + 14.0,
        left - 8.0,
        bottom - PLOT / 2.0
    )
}

/// Formats two or three significant digits.
fn number(value: f64) -> String {
    match value.abs() {
        large if large >= 1e9 => format!("{:.1}G", value / 1e9),
        large if large >= 1e6 => format!("{:.0}M", value / 1e6),
        large if large >= 1e4 => format!("{:.0}k", value / 1e3),
        large if large >= 10.0 => format!("{value:.0}"),
        large if large >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// The table of the documentation: for each file its error, its ranking, and the best published
/// result.
pub fn docs_table(tables: &[Scored]) -> String {
    let mut text = "| table | rows | error, average | 90 % of rows | largest | ranking: regret, \
                    Kendall's tau | best published elsewhere |\n|---|---|---|---|---|---|---|\n"
        .to_string();
    let mut row = |name: &str, table: &Scored| {
        let of = |error: f64| match table.absolute {
            true => format!("{error:.4}"),
            false => format!("{:.2} %", 100.0 * error),
        };
        let groups: Vec<String> = table
            .groups()
            .iter()
            .map(|group| {
                let regret = 100.0 * group.regret;
                format!("{}: {regret:.2} %, {:.2}", group.group, group.tau)
            })
            .collect();
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "| {name} | {} | {} | {} | {} | {} | {} |",
            table.rows.len(),
            of(table.mean_error()),
            of(table.error_quantile(0.9)),
            of(table.error_quantile(1.0)),
            groups.join("; "),
            table.published
        );
    };
    for table in tables {
        let mark = if UNFITTED.contains(&table.file.as_str()) { " †" } else { "" };
        row(&format!("`{}`{mark}", table.file), table);
        for (group, name) in [("time", "times of steps"), ("mixtures", "mixtures")] {
            let mut part = table.clone();
            part.rows.retain(|row| row.group == group);
            if !part.rows.is_empty() && part.rows.len() < table.rows.len() {
                row(&format!("of these, {name}"), &part);
            }
        }
        let mut modelled = table.clone();
        modelled.rows.retain(|row| row.unmodelled.is_none());
        if modelled.rows.len() < table.rows.len() {
            modelled.published = "";
            row("of these, modelled features", &modelled);
        }
    }
    text
}
