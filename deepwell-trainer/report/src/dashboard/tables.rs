//! Tables of a page over many runs.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::model::{Cell, Dashboard, DashboardRun};
use crate::escape;

/// Longest printed value of a setting, in characters; the tooltip has the whole value.
const VALUE_MAX: usize = 40;

/// Writes the table of runs: a box to show or hide each, then the cells.
pub(super) fn push_runs(out: &mut String, page: &Dashboard) {
    out.push_str(
        "<div class=\"scroll tall\"><table class=\"runs\"><thead><tr><th scope=\"col\" \
         class=\"pick\"><input type=\"checkbox\" class=\"all\" checked=\"checked\" \
         aria-label=\"show all runs\"/></th><th scope=\"col\"><button>run</button></th>",
    );
    for column in &page.columns {
        let (title, help) = (escape(&column.title), escape(&column.help));
        let _ = write!(out, "<th scope=\"col\" title=\"{help}\"><button>{title}</button></th>");
    }
    out.push_str("</tr></thead><tbody>\n");
    for (index, run) in page.runs.iter().enumerate() {
        let name = escape(&run.name);
        let _ = write!(
            out,
            "<tr data-run=\"{index}\"><td class=\"pick\"><input type=\"checkbox\" \
             checked=\"checked\" aria-label=\"show {name}\"/><span class=\"swatch\"></span></td>\
             <th scope=\"row\"><a href=\"#run-{index}\">{name}</a></th>"
        );
        for cell in &run.cells {
            push_cell(out, cell);
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}

fn push_cell(out: &mut String, cell: &Cell) {
    let _ = match cell {
        Cell::Text(text) => write!(out, "<td>{}</td>", escape(text)),
        Cell::Number { value, text } => {
            write!(out, "<td class=\"number\" data-value=\"{value}\">{}</td>", escape(text))
        }
        Cell::Missing(reason) => {
            write!(out, "<td class=\"missing\" title=\"{}\">not recorded</td>", escape(reason))
        }
    };
}

/// Writes the settings that differ as a table, and the common settings as a list.
pub(super) fn push_settings(out: &mut String, runs: &[DashboardRun]) {
    let of_runs: Vec<BTreeMap<&str, &str>> = runs
        .iter()
        .map(|run| run.settings.iter().map(|(key, value)| (&key[..], &value[..])).collect())
        .collect();
    let mut keys: Vec<&str> =
        of_runs.iter().flat_map(|settings| settings.keys().copied()).collect();
    keys.sort_unstable();
    keys.dedup();
    let values = |key: &str| -> Vec<Option<&str>> {
        of_runs.iter().map(|settings| settings.get(key).copied()).collect()
    };
    let (common, different): (Vec<&str>, Vec<&str>) =
        keys.into_iter().partition(|key| values(key).windows(2).all(|pair| pair[0] == pair[1]));
    match (different.is_empty(), runs.len()) {
        (true, 0 | 1) => out.push_str("<p>One run has nothing to differ from.</p>\n"),
        (true, _) => out.push_str("<p>All recorded settings are equal.</p>\n"),
        (false, _) => push_different(out, runs, &different, &values),
    }
    if !common.is_empty() {
        let count = common.len();
        let _ = writeln!(
            out,
            "<details><summary>{count} settings that are equal in all runs</summary>\
             <div class=\"scroll\"><table class=\"pairs\"><tbody>"
        );
        for key in common {
            let value = values(key).into_iter().flatten().next().unwrap_or("none");
            let (key, value) = (escape(key), escape(value));
            let _ = writeln!(out, "<tr><th scope=\"row\">{key}</th><td>{value}</td></tr>");
        }
        out.push_str("</tbody></table></div></details>\n");
    }
}

fn push_different<'a>(
    out: &mut String,
    runs: &[DashboardRun],
    keys: &[&str],
    values: &dyn Fn(&str) -> Vec<Option<&'a str>>,
) {
    out.push_str(
        "<p>Marked values differ from the most frequent value of their column.</p>\n\
         <div class=\"scroll tall\"><table class=\"settings\"><thead><tr><th scope=\"col\">run\
         </th>",
    );
    for key in keys {
        let _ = write!(out, "<th scope=\"col\">{}</th>", escape(key));
    }
    out.push_str("</tr></thead><tbody>\n");
    let columns: Vec<Vec<Option<&str>>> = keys.iter().map(|key| values(key)).collect();
    let usual: Vec<_> = columns.iter().map(|column| most_frequent(column)).collect();
    for (index, run) in runs.iter().enumerate() {
        let name = escape(&run.name);
        let _ = write!(out, "<tr data-run=\"{index}\"><th scope=\"row\">{name}</th>");
        for (column, usual) in columns.iter().zip(&usual) {
            let value = column[index];
            let is_usual = usual.is_none_or(|usual| value == usual);
            let class = if is_usual { "" } else { " class=\"differs\"" };
            let text = value.unwrap_or("none");
            let (whole, short) = (escape(text), shortened(text));
            let _ = write!(out, "<td{class} title=\"{whole}\">{}</td>", escape(&short));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}

/// The most frequent value; none if no value occurs twice.
fn most_frequent<'a>(column: &[Option<&'a str>]) -> Option<Option<&'a str>> {
    let mut counts: BTreeMap<Option<&str>, usize> = BTreeMap::new();
    for value in column {
        *counts.entry(*value).or_default() += 1;
    }
    let most = counts.values().copied().max().filter(|most| *most > 1 || column.len() == 2)?;
    column.iter().copied().find(|value| counts[value] == most)
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(VALUE_MAX) {
        Some((at, _)) => format!("{}\u{2026}", &text[..at]),
        None => text.to_owned(),
    }
}
