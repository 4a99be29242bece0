//! Tables.

use std::fmt::Write as _;

use super::escape;

/// Names and values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyValueTable {
    /// Name and value of each row.
    pub rows: Vec<(String, String)>,
}

impl KeyValueTable {
    /// Adds a row.
    pub fn row(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.rows.push((key.into(), value.into()));
        self
    }

    pub(crate) fn push_html(&self, out: &mut String) {
        out.push_str("<div class=\"scroll\"><table class=\"pairs\"><tbody>\n");
        for (key, value) in &self.rows {
            let (key, value) = (escape(key), escape(value));
            let _ = writeln!(out, "<tr><th scope=\"row\">{key}</th><td>{value}</td></tr>");
        }
        out.push_str("</tbody></table></div>\n");
    }
}

/// Columns with headings. Cells that begin with a digit or a sign are right-aligned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Headings.
    pub columns: Vec<String>,
    /// Cells, row by row; a short row is filled up with empty cells.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn push_html(&self, out: &mut String) {
        out.push_str("<div class=\"scroll\"><table><thead><tr>");
        for column in &self.columns {
            let _ = write!(out, "<th scope=\"col\">{}</th>", escape(column));
        }
        out.push_str("</tr></thead><tbody>\n");
        let width = self.rows.iter().map(Vec::len).chain([self.columns.len()]).max().unwrap_or(0);
        for row in &self.rows {
            out.push_str("<tr>");
            for i in 0..width {
                let cell = row.get(i).map_or("", String::as_str);
                let class = if is_number(cell) { " class=\"number\"" } else { "" };
                let _ = write!(out, "<td{class}>{}</td>", escape(cell));
            }
            out.push_str("</tr>\n");
        }
        out.push_str("</tbody></table></div>\n");
    }
}

fn is_number(cell: &str) -> bool {
    let rest = cell.trim_start_matches(['+', '-', '\u{2212}', '\u{b1}']);
    rest.starts_with(|c: char| c.is_ascii_digit())
}

/// One row of a [`BarTable`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bar {
    /// Name of the row.
    pub name: String,
    /// Length of the bar.
    pub value: f64,
    /// The printed value, with its unit.
    pub text: String,
    /// Index of the colour in the palette, from 0.
    pub color: usize,
}

/// Names, bars of comparable length, and values: for memory or time by kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BarTable {
    /// The rows. The largest value fills the width; negative and non-finite values have no bar.
    pub bars: Vec<Bar>,
}

/// Length of a bar; negative and non-finite values have no bar.
fn bar_length(value: f64) -> f64 {
    if value.is_finite() { value.max(0.0) } else { 0.0 }
}

impl BarTable {
    pub(crate) fn push_html(&self, out: &mut String) {
        let longest = self.bars.iter().map(|bar| bar_length(bar.value)).fold(0.0, f64::max);
        out.push_str("<div class=\"scroll\"><table class=\"bars\"><tbody>\n");
        for bar in &self.bars {
            let share = if longest > 0.0 { 100.0 * bar_length(bar.value) / longest } else { 0.0 };
            let color = bar.color % super::chart::COLORS;
            let (name, text) = (escape(&bar.name), escape(&bar.text));
            let _ = writeln!(
                out,
                "<tr><th scope=\"row\">{name}</th><td class=\"bar\"><span class=\"s{color}\" \
                 style=\"width:{share:.1}%\"></span></td><td class=\"number\">{text}</td></tr>"
            );
        }
        out.push_str("</tbody></table></div>\n");
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::assert_well_formed;
    use super::*;

    #[test]
    fn pairs() {
        let mut out = String::new();
        KeyValueTable::default().row("steps", "1000").row("a<b", "c&d").push_html(&mut out);
        assert_well_formed(&out);
        assert!(out.contains("<th scope=\"row\">steps</th><td>1000</td>"));
        assert!(out.contains("<th scope=\"row\">a&lt;b</th><td>c&amp;d</td>"));
    }

    #[test]
    fn columns_with_short_rows() {
        let mut out = String::new();
        let table = Table {
            columns: vec!["layer".to_owned(), "events".to_owned()],
            rows: vec![
                vec!["layers.0".to_owned(), "+3".to_owned()],
                vec!["\u{2212}1.5 %".to_owned()],
            ],
        };
        table.push_html(&mut out);
        assert_well_formed(&out);
        assert!(out.contains("<tr><td>layers.0</td><td class=\"number\">+3</td></tr>"), "{out}");
        assert!(out.contains("<tr><td class=\"number\">\u{2212}1.5 %</td><td></td></tr>"), "{out}");
    }

    #[test]
    fn the_longest_bar_fills_the_width() {
        let bar = |value| Bar { name: "a".to_owned(), value, text: "b".to_owned(), color: 7 };
        for (values, expected) in [
            (&[1.0, 4.0, 2.0][..], &["25.0%", "100.0%", "50.0%"][..]),
            (&[0.0, 0.0], &["0.0%", "0.0%"]),
            (&[-1.0, f64::NAN, f64::INFINITY, 3.0], &["0.0%", "0.0%", "0.0%", "100.0%"]),
        ] {
            let mut out = String::new();
            BarTable { bars: values.iter().map(|&value| bar(value)).collect() }.push_html(&mut out);
            assert_well_formed(&out);
            let widths: Vec<&str> =
                out.split("width:").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
            assert_eq!(widths, expected);
            assert!(out.contains("class=\"s1\""), "colours begin again");
        }
    }
}
