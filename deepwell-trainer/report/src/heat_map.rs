//! Heat map as SVG: a ratio for each row and column, coloured by distance from 1.

use std::fmt::Write as _;

use super::escape;
use super::path::tenths;

const WIDTH: f64 = 720.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 44.0;
/// Height of all rows together, and the limits for a single row.
const ROWS_HEIGHT: f64 = 420.0;
const ROW_MAX: f64 = 16.0;
const ROW_MIN: f64 = 2.0;
/// Gap between two bands.
const GAP: f64 = 6.0;
/// Number of levels, with the style classes `h0`, `h1`, …
pub(crate) const LEVELS: usize = BOUNDS.len() + 1;
/// Upper bounds of the levels; zero has the first level to itself.
const BOUNDS: [f64; 7] = [f64::MIN_POSITIVE, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0];
/// Names of the levels in the legend.
const NAMES: [&str; LEVELS] = ["none", "< 1/4", "< 1/2", "< 0.8", "even", "> 1.25", "> 2", "> 4"];

/// Rows of a layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeatBand {
    /// Label to the left of the rows.
    pub label: String,
    /// Values of each row, one for each column; 1 is even. A value that is not finite has no cell.
    pub rows: Vec<Vec<f64>>,
}

/// Bands of rows over columns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeatMap {
    /// Heading of the chart, and its name for screen readers.
    pub title: String,
    /// Description for screen readers.
    pub description: String,
    /// Label of the horizontal axis.
    pub x_label: String,
    /// The first and the last value of the horizontal axis.
    pub x_range: (f64, f64),
    /// The bands from top to bottom.
    pub bands: Vec<HeatBand>,
}

impl HeatMap {
    /// Returns the map as one `svg` element. Colours come from the page's style sheet.
    pub fn to_svg(&self) -> String {
        let rows: usize = self.bands.iter().map(|band| band.rows.len()).sum();
        let row_height = (ROWS_HEIGHT / rows.max(1) as f64).clamp(ROW_MIN, ROW_MAX);
        let mut body = String::new();
        push_legend(&mut body);
        let mut paths: [String; LEVELS] = Default::default();
        let mut top = TOP;
        for band in &self.bands {
            let height = row_height * band.rows.len() as f64;
            let (x, y) = (LEFT - 8.0, tenths(top + height / 2.0 + 4.0));
            let label = escape(&band.label);
            let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"end\">{label}</text>");
            for (index, row) in band.rows.iter().enumerate() {
                push_row(&mut paths, row, top + row_height * index as f64, row_height);
            }
            top += height + GAP;
        }
        for (level, data) in paths.iter().enumerate().filter(|(_, data)| !data.is_empty()) {
            let _ = writeln!(
                body,
                "<path class=\"heat h{level}\" d=\"{data}\" fill=\"currentColor\"/>"
            );
        }
        let bottom = top - if self.bands.is_empty() { 0.0 } else { GAP };
        self.push_axis(&mut body, bottom);
        let height = tenths(bottom + BOTTOM);
        let hash = blake3::hash(format!("{}\n{body}", self.title).as_bytes()).to_hex();
        let id = &hash[..12];
        format!(
            "<svg class=\"chart\" xmlns=\"http://www.w3.org/2000/svg\" \
             viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-labelledby=\"t{id} d{id}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<title id=\"t{id}\">{}</title>\n\
             <desc id=\"d{id}\">{}</desc>\n{body}</svg>\n",
            escape(&self.title),
            escape(&self.description),
        )
    }

    fn push_axis(&self, body: &mut String, bottom: f64) {
        let (right, (low, high)) = (WIDTH - RIGHT, self.x_range);
        let y = tenths(bottom + 17.0);
        for (x, value, anchor) in [(LEFT, low, "start"), (right, high, "end")] {
            if value.is_finite() {
                let _ = writeln!(
                    body,
                    "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{value}</text>"
                );
            }
        }
        let (x, y) = ((LEFT + right) / 2.0, tenths(bottom + 36.0));
        let label = escape(&self.x_label);
        let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>");
    }
}

/// The level of a value, if finite.
fn level(value: f64) -> Option<usize> {
    value.is_finite().then(|| BOUNDS.iter().take_while(|&&bound| value >= bound).count())
}

/// Adds a row's cells to the paths of their levels; neighbors of equal level are one rectangle.
fn push_row(paths: &mut [String; LEVELS], row: &[f64], top: f64, height: f64) {
    let cell = (WIDTH - RIGHT - LEFT) / row.len().max(1) as f64;
    let levels: Vec<Option<usize>> = row.iter().map(|&value| level(value)).collect();
    let mut first = 0;
    for run in levels.chunk_by(|a, b| a == b) {
        if let Some(level) = run[0] {
            let x = LEFT + cell * first as f64;
            let width = cell * run.len() as f64;
            let [x, y, width, height] = [x, top, width, height].map(tenths);
            let _ = write!(paths[level], "M{x} {y}h{width}v{height}h-{width}z");
        }
        first += run.len();
    }
}

fn push_legend(body: &mut String) {
    let step = (WIDTH - RIGHT - LEFT) / LEVELS as f64;
    for (level, name) in NAMES.iter().enumerate() {
        let x = LEFT + step * level as f64;
        let (at, text, name) = (tenths(x), tenths(x + 18.0), escape(name));
        let _ = writeln!(
            body,
            "<path class=\"heat h{level}\" d=\"M{at} 8h12v12h-12z\" fill=\"currentColor\"/>\
             <text x=\"{text}\" y=\"18\">{name}</text>"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::assert_well_formed;
    use super::*;

    #[test]
    fn levels_by_ratio() {
        for (value, expected) in [
            (0.0, Some(0)),
            (0.1, Some(1)),
            (0.25, Some(2)),
            (0.79, Some(3)),
            (1.0, Some(4)),
            (1.25, Some(5)),
            (3.9, Some(6)),
            (64.0, Some(7)),
            (f64::NAN, None),
            (f64::INFINITY, None),
        ] {
            assert_eq!(level(value), expected, "{value}");
        }
    }

    #[test]
    fn a_map_has_all_its_cells() {
        let map = HeatMap {
            title: "Load <1>".to_owned(),
            description: "two & three".to_owned(),
            x_label: "step".to_owned(),
            x_range: (1.0, 30.0),
            bands: vec![
                HeatBand {
                    label: "0".to_owned(),
                    rows: vec![vec![1.0, 1.0, 0.0], vec![f64::NAN, 1.0, 5.0]],
                },
                HeatBand { label: "1".to_owned(), rows: vec![vec![]] },
            ],
        };
        let svg = map.to_svg();
        assert_well_formed(&svg);
        assert!(!svg.contains("NaN"), "{svg}");
        // Two even cells together, and a single one in the second row; 216 pixels per column.
        let cells = |class: &str| {
            let path =
                svg.lines().find(|line| line.starts_with(&format!("<path class=\"heat {class}")));
            let line = svg.lines().rev().find(|line| {
                line.starts_with(&format!("<path class=\"heat {class}\""))
                    && !line.contains("h12v12")
            });
            assert!(path.is_some(), "{class} is in the legend");
            line.map(str::to_owned)
        };
        assert_eq!(
            cells("h4").unwrap(),
            "<path class=\"heat h4\" d=\"M58 34h432v16h-432zM274 50h216v16h-216z\" \
             fill=\"currentColor\"/>"
        );
        assert!(cells("h0").unwrap().contains("M490 34h216v16h-216z"));
        assert!(cells("h7").unwrap().contains("M490 50h216v16h-216z"));
        assert_eq!(cells("h1"), None);
        for part in [">Load &lt;1&gt;</title>", ">two &amp; three</desc>", ">30</text>"] {
            assert!(svg.contains(part), "{part} in\n{svg}");
        }
        assert_well_formed(&HeatMap::default().to_svg());
    }
}
