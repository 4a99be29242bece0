//! A page over many runs, with a small script: charts over a common axis, a filter, zoom.
//!
//! The page is one file and loads nothing. Tables and details are plain HTML, so that they can be
//! read without scripts; the script draws the charts from curves that the page contains as JSON.
//! Long curves are thinned: of each interval of steps the lowest and the highest value stay.

mod data;
mod model;
mod page;
mod tables;
#[cfg(test)]
mod tests;
mod thin;

pub use model::{Cell, Column, Curve, Dashboard, DashboardChart, DashboardRun};
pub use thin::thin;
