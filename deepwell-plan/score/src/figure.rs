//! Scores for the documentation: a figure of all rows, and a table of all files.

use std::fmt::Write;

use svg::Document;
use svg::node::element::{Circle, Group, Line, Path, Rectangle, Text, Title};

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
    let background = Rectangle::new().set("width", width).set("height", height);
    let mut document = Document::new()
        .set("viewBox", (0, 0, width, height))
        .set("font-family", "sans-serif")
        .set("font-size", 11)
        .add(background.set("fill", "#ffffff"));
    for (index, table) in tables.iter().enumerate() {
        let place = (PANEL * (index % COLUMNS) as f64, PANEL * (index / COLUMNS) as f64);
        document = document.add(panel(table, place));
    }
    format!("{document}\n")
}

/// A value as a coordinate: the logarithm, or the value for tables with absolute errors.
fn scaled(table: &Scored, value: f64) -> f64 {
    if table.absolute { value } else { value.log10() }
}

/// A coordinate with one decimal.
fn tenths(coordinate: f64) -> String {
    format!("{coordinate:.1}")
}

/// A label at a place.
fn label(text: impl Into<String>, x: f64, y: f64) -> Text {
    Text::new(text).set("x", tenths(x)).set("y", tenths(y))
}

fn panel(table: &Scored, (x0, y0): (f64, f64)) -> Group {
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
    let mut group = Group::new()
        .add(Title::new(file))
        .add(label(file, left, y0 + 14.0).set("font-weight", "bold"))
        .add(label(format!("{}, {error}", table.unit), left, y0 + 28.0).set("fill", "#555555"));
    // The band around the diagonal, clipped at the frame.
    let shift = match table.absolute {
        true => 0.01 / (to - from) * PLOT,
        false => 1.1_f64.log10() / (to - from) * PLOT,
    }
    .min(PLOT);
    group = frame(group, (left, bottom), shift);
    for row in &rows {
        let fill = if row.unmodelled.is_some() { "none" } else { "#4e79a7" };
        group = group.add(
            Circle::new()
                .set("cx", tenths(left + at(row.measured)))
                .set("cy", tenths(bottom - at(row.predicted)))
                .set("r", 2.6)
                .set("fill", fill)
                .set("fill-opacity", 0.7)
                .set("stroke", "#4e79a7")
                .set("stroke-width", 0.8),
        );
    }
    for value in [least, most] {
        let value = if table.absolute { value } else { 10.0_f64.powf(value) };
        let text = number(value);
        let (x, y) = (left + at(value), bottom - at(value));
        let below = label(text.as_str(), x, bottom + 14.0).set("text-anchor", "middle");
        group = group.add(below);
        group = group.add(label(text, left - 4.0, y + 4.0).set("text-anchor", "end"));
    }
    axes(group, (left, bottom))
}

/// Adds the frame of a plot, the band of the given half-width and the diagonal.
fn frame(group: Group, (left, bottom): (f64, f64), shift: f64) -> Group {
    let (right, top) = (left + PLOT, bottom - PLOT);
    let far = PLOT - shift;
    let band = format!(
        "M{left:.1} {bottom:.1} h{shift:.1} L{right:.1} {:.1} v-{shift:.1} h-{shift:.1} \
         L{left:.1} {:.1} Z",
        bottom - far,
        bottom - shift
    );
    group
        .add(
            Rectangle::new()
                .set("x", left)
                .set("y", top)
                .set("width", PLOT)
                .set("height", PLOT)
                .set("fill", "none")
                .set("stroke", "#999999"),
        )
        .add(Path::new().set("d", band).set("fill", "#4e79a7").set("fill-opacity", 0.12))
        .add(
            Line::new()
                .set("x1", tenths(left))
                .set("y1", tenths(bottom))
                .set("x2", tenths(right))
                .set("y2", tenths(top))
                .set("stroke", "#999999"),
        )
}

/// Adds the names of the axes.
fn axes(group: Group, (left, bottom): (f64, f64)) -> Group {
    let measured = label("measured", left + PLOT / 2.0, bottom + 14.0);
    let turned = format!("translate({:.1} {:.1}) rotate(-90)", left - 8.0, bottom - PLOT / 2.0);
    let predicted = Text::new("predicted").set("transform", turned);
    group
        .add(measured.set("text-anchor", "middle").set("fill", "#555555"))
        .add(predicted.set("text-anchor", "middle").set("fill", "#555555"))
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
