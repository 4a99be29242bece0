//! Reports as one HTML file, without external resources, in light and dark mode.
//!
//! # Brief overview
//!
//! A page is a title and [`Section`]s; a section is a heading and [`Block`]s: a [`VerdictBlock`], a
//! [`Table`], a [`KeyValueTable`], a [`BarTable`], a [`LineChart`], an [`IntervalChart`], a
//! [`HeatMap`] or text. Every block escapes its text. Charts are inline SVG with a title and a
//! description for screen readers; colours come from style sheet classes and follow the reader's
//! choice of light or dark. [`Dashboard`] is a page over many runs; it alone has a script.
//!
//! ```
//! use deepwell_report::{Block, LineChart, Section, Series, html_page};
//! let chart = LineChart {
//!     title: "Training loss".to_owned(),
//!     y_label: "nats per token".to_owned(),
//!     series: vec![Series::new("BF16", vec![(1.0, 5.5), (2.0, 4.1)])],
//!     ..LineChart::default()
//! };
//! let section = Section { heading: "Loss".to_owned(), blocks: vec![Block::Chart(chart)] };
//! let page = html_page("Parity", &[section]);
//! assert!(page.starts_with("<!DOCTYPE html>") && page.contains("<svg"));
//! ```

mod axis;
mod chart;
#[cfg(test)]
mod check;
mod dashboard;
mod escape;
mod heat_map;
mod intervals;
mod page;
mod path;
mod table;

pub use axis::Scale;
pub use chart::{LineChart, Marker, ReferenceLine, Series, Stroke};
pub use dashboard::{Cell, Column, Curve, Dashboard, DashboardChart, DashboardRun, thin};
pub use escape::escape;
pub use heat_map::{HeatBand, HeatMap};
pub use intervals::{Interval, IntervalChart, IntervalRow};
pub use page::{Block, Outcome, Section, VerdictBlock, html_page};
pub use table::{Bar, BarTable, KeyValueTable, Table};
