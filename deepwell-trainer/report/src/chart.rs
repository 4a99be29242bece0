//! Line charts as SVG.
//!
//! The SVG is written here rather than by a plotting library, because a page with light and dark
//! modes needs style classes instead of fixed colours, and text for screen readers.

use std::fmt::Write as _;

use super::axis::{Axis, Scale};
use super::escape;
use super::path::{path_data, tenths};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const BOTTOM: f64 = 44.0;
const ROW: f64 = 18.0;
/// Mean width of a character of 12 pixels; sans-serif fonts are between 6 and 7.
const CHARACTER: f64 = 6.6;
/// Number of colours in the style sheet; more series begin again at the first.
pub(crate) const COLORS: usize = 6;
/// Charts with more markers show their labels only as tooltips.
const MARKER_TEXTS_MAX: usize = 6;

/// Style of a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stroke {
    /// A full line.
    #[default]
    Solid,
    /// A dashed line.
    Dashed,
    /// A thin, pale line, for background values.
    Faint,
    /// Dots without a line.
    Dots,
}

/// One line of a chart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Name in the legend; unnamed lines are not in the legend.
    pub name: String,
    /// Points (x, y) with x rising. A y that is not finite breaks the line.
    pub points: Vec<(f64, f64)>,
    /// Style of the line.
    pub stroke: Stroke,
    /// Index of the colour in the palette, from 0; `None` for the next colour. Related lines can
    /// share a colour.
    pub color: Option<usize>,
}

impl Series {
    /// A full line of the next colour.
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), points, ..Self::default() }
    }
}

/// A horizontal line with a label, for a value to compare with.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceLine {
    /// Text above the line.
    pub label: String,
    /// Vertical position.
    pub y: f64,
}

/// A vertical line for an event.
#[derive(Clone, Debug, PartialEq)]
pub struct Marker {
    /// Label at the top and in the tooltip.
    pub label: String,
    /// Horizontal position.
    pub x: f64,
}

/// A chart of lines over one axis.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LineChart {
    /// Heading of the chart, and its name for screen readers.
    pub title: String,
    /// Description for screen readers; a list of the series if empty.
    pub description: String,
    /// Label of the horizontal axis.
    pub x_label: String,
    /// Label of the vertical axis, with its unit.
    pub y_label: String,
    /// Layout of the vertical axis.
    pub y_scale: Scale,
    /// The lines.
    pub series: Vec<Series>,
    /// Horizontal lines; the range of the axis includes them.
    pub references: Vec<ReferenceLine>,
    /// Vertical lines; lines outside the data are omitted.
    pub markers: Vec<Marker>,
}

/// The frame of the data.
struct Frame {
    top: f64,
    bottom: f64,
    x: Axis,
    y: Axis,
    x_range: (f64, f64),
}

impl LineChart {
    /// Returns the chart as one `svg` element. Colours come from the page's style sheet; without it
    /// the lines are black.
    pub fn to_svg(&self) -> String {
        let mut body = String::new();
        let top = 8.0 + ROW * self.push_legend(&mut body) as f64 + 8.0;
        let frame = self.frame(top);
        self.push_grid(&mut body, &frame);
        self.push_references(&mut body, &frame);
        self.push_markers(&mut body, &frame);
        for (i, series) in self.series.iter().enumerate() {
            self.push_series(&mut body, &frame, i, series);
        }

        // Unique on the page, and the same for the same chart.
        let hash = blake3::hash(format!("{}\n{body}", self.title).as_bytes()).to_hex();
        let id = &hash[..12];
        format!(
            "<svg class=\"chart\" xmlns=\"http://www.w3.org/2000/svg\" \
             viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-labelledby=\"t{id} d{id}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<title id=\"t{id}\">{}</title>\n\
             <desc id=\"d{id}\">{}</desc>\n{body}</svg>\n",
            escape(&self.title),
            escape(&self.described()),
        )
    }

    /// True if a point has a place in the chart.
    fn shows(&self, (x, y): (f64, f64)) -> bool {
        x.is_finite() && self.y_scale.shows(y)
    }

    fn described(&self) -> String {
        if !self.description.is_empty() {
            return self.description.clone();
        }
        let mut parts = Vec::new();
        for series in &self.series {
            let mut shown = series.points.iter().filter(|&&point| self.shows(point));
            parts.push(match (shown.next(), shown.next_back()) {
                (None, _) => format!("{}: no values", series.name),
                (Some(first), None) => format!("{}: {:.4} at {}", series.name, first.1, first.0),
                (Some(first), Some(last)) => format!(
                    "{}: from {:.4} at {} to {:.4} at {}",
                    series.name, first.1, first.0, last.1, last.0
                ),
            });
        }
        for line in &self.references {
            parts.push(format!("{}: {:.4}", line.label, line.y));
        }
        parts.join("; ")
    }

    fn frame(&self, top: f64) -> Frame {
        let shown = || {
            self.series.iter().flat_map(|series| &series.points).filter(|&&point| self.shows(point))
        };
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let x = Axis::new(Scale::Linear, shown().map(|point| point.0), 0.0, LEFT, right);
        let values = shown().map(|point| point.1).chain(self.references.iter().map(|line| line.y));
        let y = Axis::new(self.y_scale, values, 0.06, bottom, top);
        let x_range = shown().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), point| {
            (low.min(point.0), high.max(point.0))
        });
        Frame { top, bottom, x, y, x_range }
    }

    fn color(&self, index: usize, series: &Series) -> usize {
        series.color.unwrap_or(index) % COLORS
    }

    /// Writes the legend and returns its number of rows.
    fn push_legend(&self, body: &mut String) -> usize {
        let is_named = |series: &Series| !series.name.is_empty();
        if !self.series.iter().any(is_named) {
            return 0;
        }
        let (mut x, mut rows) = (LEFT, 1);
        for (i, series) in self.series.iter().enumerate().filter(|(_, series)| is_named(series)) {
            let width = 28.0 + CHARACTER * series.name.chars().count() as f64 + 16.0;
            if x > LEFT && x + width > WIDTH - RIGHT {
                (x, rows) = (LEFT, rows + 1);
            }
            let y = 8.0 + ROW * (rows as f64 - 0.5);
            let data = match series.stroke {
                Stroke::Dots => format!("M{} {}h0", tenths(x + 11.0), tenths(y)),
                _ => format!("M{} {}h22", tenths(x), tenths(y)),
            };
            push_path(body, &data, series.stroke, self.color(i, series));
            let (x_text, y_text) = (tenths(x + 28.0), tenths(y + 4.0));
            let name = escape(&series.name);
            let _ = writeln!(body, "<text x=\"{x_text}\" y=\"{y_text}\">{name}</text>");
            x += width;
        }
        rows
    }

    fn push_grid(&self, body: &mut String, frame: &Frame) {
        let Frame { top, bottom, .. } = *frame;
        let right = WIDTH - RIGHT;
        body.push_str("<g class=\"grid\" stroke=\"currentColor\" stroke-opacity=\"0.15\">\n");
        let y_ticks = frame.y.ticks(5);
        for (value, _) in &y_ticks {
            let y = tenths(frame.y.pixel(*value));
            let _ = writeln!(body, "<path d=\"M{LEFT} {y}H{right}\"/>");
        }
        body.push_str("</g>\n<g class=\"axis\">\n");
        for (value, label) in y_ticks {
            let y = tenths(frame.y.pixel(value) + 4.0);
            let x = LEFT - 8.0;
            let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"end\">{label}</text>");
        }
        for (value, label) in frame.x.ticks(8) {
            let x = tenths(frame.x.pixel(value));
            let y = bottom + 17.0;
            let _ =
                writeln!(body, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>");
        }
        let _ = writeln!(
            body,
            "<path d=\"M{LEFT} {bottom}H{right}\" stroke=\"currentColor\" fill=\"none\"/>"
        );
        let (x, y) = ((LEFT + right) / 2.0, HEIGHT - 8.0);
        let label = escape(&self.x_label);
        let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>");
        let y = tenths((top + bottom) / 2.0);
        let label = escape(&self.y_label);
        let _ = writeln!(
            body,
            "<text transform=\"translate(13 {y}) rotate(-90)\" \
             text-anchor=\"middle\">{label}</text>"
        );
        body.push_str("</g>\n");
    }

    fn push_references(&self, body: &mut String, frame: &Frame) {
        let mut lines: Vec<(f64, &str)> = self
            .references
            .iter()
            .filter(|line| self.y_scale.shows(line.y))
            .map(|line| (frame.y.pixel(line.y), line.label.as_str()))
            .collect();
        lines.sort_by(|a, b| a.0.total_cmp(&b.0));
        let right = WIDTH - RIGHT;
        let mut free_from = frame.top;
        for (y, label) in lines {
            let path = format!("M{LEFT} {}H{right}", tenths(y));
            // Labels of nearly touching lines are moved down, one below the other.
            let y_text = (y - 5.0).max(free_from + 11.0);
            free_from = y_text + 2.0;
            let x = right - 4.0;
            let y_text = tenths(y_text);
            let label = escape(label);
            let _ = writeln!(
                body,
                "<g class=\"reference\"><path d=\"{path}\" fill=\"none\" stroke=\"currentColor\" \
                 stroke-dasharray=\"2 4\"/><text x=\"{x}\" y=\"{y_text}\" \
                 text-anchor=\"end\">{label}</text></g>"
            );
        }
    }

    fn push_markers(&self, body: &mut String, frame: &Frame) {
        let (low, high) = frame.x_range;
        let markers: Vec<&Marker> =
            self.markers.iter().filter(|marker| (low..=high).contains(&marker.x)).collect();
        let has_texts = markers.len() <= MARKER_TEXTS_MAX;
        for (i, marker) in markers.iter().enumerate() {
            let x = frame.x.pixel(marker.x);
            let (top, bottom) = (frame.top, frame.bottom);
            let label = escape(&marker.label);
            let _ = write!(
                body,
                "<g class=\"marker\"><title>{label}</title><path d=\"M{} {top}V{bottom}\" \
                 fill=\"none\" stroke=\"currentColor\"/>",
                tenths(x)
            );
            if has_texts {
                // Two rows in turn, and to the left of the line in the right half of the chart.
                let is_left = x > WIDTH / 2.0;
                let anchor = if is_left { "end" } else { "start" };
                let x = tenths(if is_left { x - 4.0 } else { x + 4.0 });
                let y = tenths(top + 11.0 + ROW * (i % 2) as f64);
                let _ = write!(
                    body,
                    "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{label}</text>"
                );
            }
            body.push_str("</g>\n");
        }
    }

    fn push_series(&self, body: &mut String, frame: &Frame, index: usize, series: &Series) {
        let pixel =
            |&(x, y): &(f64, f64)| self.shows((x, y)).then(|| (frame.x.pixel(x), frame.y.pixel(y)));
        let pixels = series.points.iter().map(pixel);
        let data = match series.stroke {
            // A break after each point leaves dots.
            Stroke::Dots => path_data(pixels.flat_map(|pixel| [pixel, None])),
            _ => path_data(pixels),
        };
        if !data.is_empty() {
            push_path(body, &data, series.stroke, self.color(index, series));
        }
    }
}

fn push_path(body: &mut String, data: &str, stroke: Stroke, color: usize) {
    let (class, attributes) = match stroke {
        Stroke::Solid => ("", "stroke-width=\"1.8\""),
        Stroke::Dashed => ("", "stroke-width=\"1.8\" stroke-dasharray=\"7 4\""),
        Stroke::Faint => (" faint", "stroke-width=\"1\""),
        Stroke::Dots => ("", "stroke-width=\"5\""),
    };
    let _ = writeln!(
        body,
        "<path class=\"series s{color}{class}\" d=\"{data}\" fill=\"none\" stroke=\"currentColor\" \
         stroke-linejoin=\"round\" stroke-linecap=\"round\" {attributes}/>"
    );
}

#[cfg(test)]
mod tests {
    use super::super::check::assert_well_formed;
    use super::*;

    fn two_series() -> LineChart {
        LineChart {
            title: "Loss <1>".to_owned(),
            x_label: "step".to_owned(),
            y_label: "nats & more".to_owned(),
            series: vec![
                Series::new("BF16", vec![(0.0, 5.0), (10.0, 3.0), (20.0, 2.0)]),
                Series {
                    stroke: Stroke::Dashed,
                    ..Series::new("MXFP8", vec![(0.0, 5.0), (10.0, f64::NAN), (20.0, 2.1)])
                },
            ],
            references: vec![
                ReferenceLine { label: "bigram".to_owned(), y: 2.5 },
                ReferenceLine { label: "unigram".to_owned(), y: 2.51 },
            ],
            markers: vec![
                Marker { label: "GEMM \"3\" fell back".to_owned(), x: 10.0 },
                Marker { label: "outside".to_owned(), x: 30.0 },
            ],
            ..LineChart::default()
        }
    }

    #[test]
    fn a_chart_has_all_its_parts() {
        let svg = two_series().to_svg();
        assert_well_formed(&svg);
        for part in [
            "role=\"img\"",
            ">Loss &lt;1&gt;</title>",
            "BF16: from 5.0000 at 0 to 2.0000 at 20; MXFP8: from 5.0000 at 0 to 2.1000 at 20; \
             bigram: 2.5000; unigram: 2.5100</desc>",
            ">nats &amp; more</text>",
            ">GEMM &quot;3&quot; fell back</title>",
            ">bigram</text>",
            "class=\"series s0\"",
            "class=\"series s1\"",
        ] {
            assert!(svg.contains(part), "{part} in\n{svg}");
        }
        assert!(!svg.contains("outside"), "a marker beyond the data is left out");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn curves_stay_in_their_frame() {
        for y_scale in [Scale::Linear, Scale::Log] {
            let svg = LineChart { y_scale, ..two_series() }.to_svg();
            let curves = svg.lines().filter(|line| line.contains("class=\"series"));
            let mut count = 0;
            for curve in curves {
                let data = curve.split(" d=\"").nth(1).unwrap().split('"').next().unwrap();
                for point in data.split(['M', 'L']).filter(|point| point.contains(' ')) {
                    let point = point.split('h').next().unwrap();
                    let (x, y) = point.split_once(' ').unwrap();
                    let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
                    assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{x}");
                    assert!((8.0..=HEIGHT - BOTTOM).contains(&y), "{y}");
                    count += 1;
                }
            }
            // Two legend strokes, three points, and two points around a break.
            assert_eq!(count, 2 + 3 + 2);
        }
    }

    #[test]
    fn labels_of_close_reference_lines_do_not_overlap() {
        let svg = two_series().to_svg();
        let heights: Vec<f64> = svg
            .lines()
            .filter(|line| line.starts_with("<g class=\"reference\""))
            .map(|line| line.rsplit(" y=\"").next().unwrap().split('"').next().unwrap())
            .map(|y| y.parse().unwrap())
            .collect();
        assert_eq!(heights.len(), 2);
        assert!(heights[1] - heights[0] >= 12.0, "{heights:?}");
    }

    #[test]
    fn empty_and_odd_data_make_valid_charts() {
        let odd = [
            vec![],
            vec![(1.0, 1.0)],
            vec![(f64::NAN, 1.0), (1.0, f64::INFINITY)],
            vec![(0.0, -1.0), (1.0, 0.0)],
            vec![(0.0, 1e-300), (1.0, 1e300)],
        ];
        for points in odd {
            for y_scale in [Scale::Linear, Scale::Log] {
                let series = vec![Series::new("a", points.clone())];
                let svg = LineChart { y_scale, series, ..LineChart::default() }.to_svg();
                assert_well_formed(&svg);
                assert!(!svg.contains("NaN"), "{points:?} {y_scale:?}\n{svg}");
            }
        }
        assert_well_formed(&LineChart::default().to_svg());
    }
}
