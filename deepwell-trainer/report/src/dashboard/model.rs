//! The content of a page over many runs.

use crate::Block;

/// A page over many runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dashboard {
    /// Title of the page.
    pub title: String,
    /// Paragraphs below the title.
    pub remarks: Vec<String>,
    /// Columns of the table of runs.
    pub columns: Vec<Column>,
    /// The charts.
    pub charts: Vec<DashboardChart>,
    /// The runs.
    pub runs: Vec<DashboardRun>,
    /// Seconds after which a browser loads the page again; none for a page that stays.
    pub refresh_s: Option<u64>,
}

/// A column of the table of runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Column {
    /// Heading, with the unit.
    pub title: String,
    /// Definition of the values, shown as a tooltip.
    pub help: String,
}

/// A chart with a curve of each run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DashboardChart {
    /// Heading.
    pub title: String,
    /// Label of the vertical axis, with the unit.
    pub y_label: String,
    /// Definition of the values, shown below the chart.
    pub help: String,
    /// Whether the values are noisy, so that smoothing applies.
    pub is_noisy: bool,
}

/// A cell of the table of runs.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// Text.
    Text(String),
    /// A number, sorted by its value.
    Number {
        /// The value.
        value: f64,
        /// The printed value.
        text: String,
    },
    /// No value, with the reason.
    Missing(String),
}

/// A curve of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Curve {
    /// The run has no such values.
    #[default]
    None,
    /// Points (step, value) with steps rising. A value that is not finite breaks the line.
    Points(Vec<(f64, f64)>),
    /// The curve of an earlier chart, times a factor.
    Scaled {
        /// Index of the chart.
        chart: usize,
        /// The factor.
        factor: f64,
    },
}

/// A run of a [`Dashboard`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DashboardRun {
    /// Name, unique on the page.
    pub name: String,
    /// Cells of the table, one for each column.
    pub cells: Vec<Cell>,
    /// Settings by key.
    pub settings: Vec<(String, String)>,
    /// Tokens of a step, if known: the axis of tokens needs them.
    pub tokens_per_step: Option<f64>,
    /// Points (step, seconds since the start of the run), rising: for the axis of time.
    pub times: Vec<(f64, f64)>,
    /// Curves, one for each chart.
    pub curves: Vec<Curve>,
    /// Steps of events, marked on the axis of each chart.
    pub event_steps: Vec<f64>,
    /// Further blocks, shown on request.
    pub details: Vec<Block>,
}

impl Curve {
    /// Number of points of its own.
    pub(super) fn len(&self) -> usize {
        match self {
            Curve::Points(points) => points.len(),
            Curve::None | Curve::Scaled { .. } => 0,
        }
    }
}
