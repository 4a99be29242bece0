//! Means with their intervals, row by row, as SVG.

use std::fmt::Write as _;

use super::axis::{Axis, Scale};
use super::escape;
use super::path::tenths;

const WIDTH: f64 = 720.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 44.0;
/// Height of one interval, and of the gap between rows.
const LINE: f64 = 16.0;
const GAP: f64 = 8.0;

/// A value with half the width of its interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The value.
    pub value: f64,
    /// Half the width; none if unknown.
    pub half_width: Option<f64>,
}

/// A row of a chart: an interval for each of the chart's names.
#[derive(Clone, Debug, PartialEq)]
pub struct IntervalRow {
    /// Label to the left of the row.
    pub label: String,
    /// The intervals, from top to bottom.
    pub intervals: Vec<Interval>,
}

/// Rows of intervals over one axis, with a line at zero.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IntervalChart {
    /// Heading of the chart.
    pub title: String,
    /// Label of the axis, with its unit.
    pub x_label: String,
    /// Legend: names of the first, second … interval of each row.
    pub names: Vec<String>,
    /// The rows from top to bottom.
    pub rows: Vec<IntervalRow>,
    /// A value to compare with.
    pub reference: Option<f64>,
}

impl IntervalChart {
    /// Returns the chart as one `svg` element. Colours come from the page's style sheet.
    pub fn to_svg(&self) -> String {
        let row_height = LINE * self.names.len() as f64 + GAP;
        let bottom = TOP + row_height * self.rows.len() as f64;
        let height = bottom + BOTTOM;
        let axis = self.axis();
        let mut body = String::new();
        self.push_legend(&mut body);
        self.push_axis(&mut body, &axis, bottom);
        for (index, row) in self.rows.iter().enumerate() {
            let top = TOP + row_height * index as f64;
            let y = tenths(top + row_height / 2.0 + 2.0);
            let label = escape(&row.label);
            let x = LEFT - 8.0;
            let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"end\">{label}</text>");
            for (color, interval) in row.intervals.iter().enumerate() {
                let y = top + GAP / 2.0 + LINE * (color as f64 + 0.5);
                push_interval(&mut body, &axis, y, color, interval);
            }
        }
        let hash = blake3::hash(format!("{}\n{body}", self.title).as_bytes()).to_hex();
        let id = &hash[..12];
        format!(
            "<svg class=\"chart\" xmlns=\"http://www.w3.org/2000/svg\" \
             viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-labelledby=\"t{id} d{id}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<title id=\"t{id}\">{}</title>\n\
             <desc id=\"d{id}\">{}</desc>\n{body}</svg>\n",
            escape(&self.title),
            escape(&self.described()),
        )
    }

    fn axis(&self) -> Axis {
        let of_rows = self.rows.iter().flat_map(|row| &row.intervals).flat_map(|interval| {
            let half_width = interval.half_width.unwrap_or(0.0);
            [interval.value - half_width, interval.value + half_width]
        });
        let values = of_rows.chain([0.0]).chain(self.reference);
        Axis::new(Scale::Linear, values, 0.04, LEFT, WIDTH - RIGHT)
    }

    fn described(&self) -> String {
        let row = |row: &IntervalRow| {
            let values = row.intervals.iter().zip(&self.names).map(|(interval, name)| {
                let half_width =
                    interval.half_width.map_or_else(String::new, |half| format!(" ± {half:.4}"));
                format!("{name} {:.4}{half_width}", interval.value)
            });
            format!("{}: {}", row.label, values.collect::<Vec<_>>().join(", "))
        };
        self.rows.iter().map(row).collect::<Vec<_>>().join("; ")
    }

    fn push_legend(&self, body: &mut String) {
        let mut x = LEFT;
        for (color, name) in self.names.iter().enumerate() {
            let _ = writeln!(
                body,
                "<path class=\"series s{color}\" d=\"M{} 16h22\" fill=\"none\" \
                 stroke=\"currentColor\" stroke-width=\"1.8\"/><text x=\"{}\" y=\"20\">{}</text>",
                tenths(x),
                tenths(x + 28.0),
                escape(name)
            );
            x += 44.0 + 6.6 * name.chars().count() as f64;
        }
    }

    fn push_axis(&self, body: &mut String, axis: &Axis, bottom: f64) {
        let right = WIDTH - RIGHT;
        for (value, label) in axis.ticks(8) {
            let (x, y) = (tenths(axis.pixel(value)), bottom + 17.0);
            let _ = writeln!(
                body,
                "<path d=\"M{x} {TOP}V{bottom}\" stroke=\"currentColor\" stroke-opacity=\"0.15\"/>\
                 <text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>"
            );
        }
        let lines = [(Some(0.0), ""), (self.reference, " stroke-dasharray=\"2 4\"")];
        for (value, dashes) in lines {
            let Some(value) = value else { continue };
            let x = tenths(axis.pixel(value));
            let _ =
                writeln!(body, "<path d=\"M{x} {TOP}V{bottom}\" stroke=\"currentColor\"{dashes}/>");
        }
        let (x, y) = ((LEFT + right) / 2.0, bottom + 36.0);
        let label = escape(&self.x_label);
        let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>");
    }
}

fn push_interval(body: &mut String, axis: &Axis, y: f64, color: usize, interval: &Interval) {
    if !interval.value.is_finite() {
        return;
    }
    let (middle, y) = (tenths(axis.pixel(interval.value)), tenths(y));
    let dot = format!("M{middle} {y}h0");
    let line = interval.half_width.filter(|half| half.is_finite()).map(|half| {
        let start = axis.pixel(interval.value - half);
        let end = axis.pixel(interval.value + half);
        format!("M{} {y}H{}", tenths(start), tenths(end))
    });
    for (data, width) in [(line, 1.8), (Some(dot), 7.0)] {
        let Some(data) = data else { continue };
        let _ = writeln!(
            body,
            "<path class=\"series s{color}\" d=\"{data}\" fill=\"none\" stroke=\"currentColor\" \
             stroke-linecap=\"round\" stroke-width=\"{width}\"/>"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::assert_well_formed;
    use super::*;

    #[test]
    fn rows_with_and_without_intervals() {
        let interval = |value, half_width| Interval { value, half_width };
        let row = |label: &str, intervals| IntervalRow { label: label.to_owned(), intervals };
        let chart = IntervalChart {
            title: "Cost <1>".to_owned(),
            x_label: "%".to_owned(),
            names: vec!["alone".to_owned(), "without".to_owned()],
            rows: vec![
                row("v & o", vec![interval(0.2, Some(0.1)), interval(-0.1, None)]),
                row("odd", vec![interval(f64::NAN, None), interval(1.0, Some(f64::INFINITY))]),
            ],
            reference: Some(0.3),
        };
        let svg = chart.to_svg();
        assert_well_formed(&svg);
        assert!(!svg.contains("d=\"MNaN"), "{svg}");
        for part in ["v &amp; o", "alone 0.2000 ± 0.1000, without -0.1000", ">alone<"] {
            assert!(svg.contains(part), "{part} in {svg}");
        }
        // One interval line; dots of all three finite values.
        let lines = svg.lines().filter(|line| line.contains("class=\"series s0\" d=\"M"));
        assert_eq!(lines.filter(|line| line.contains("h0\"")).count(), 1);
        assert_well_formed(&IntervalChart::default().to_svg());
    }
}
