//! Folders of training runs: read, compared on one page, exported, checked by recipes.
//!
//! # Brief overview
//!
//! [`read_runs`] reads the folders that `deepwell train` writes, also of runs that are not
//! finished, that were killed, or that another version began: a [`Run`] has curves, facts and
//! notes on what is missing. [`RunRow`] is a run as a row of a table, [`dashboard`] makes a page
//! over many runs, [`markdown`] a table. [`mlflow`] writes runs for MLflow's file store.
//! [`recipe`] compares a run with expected figures.
//!
//! ```
//! # fn main() -> Result<(), deepwell_runs::RunsError> {
//! # let folder = tempfile::tempdir().unwrap();
//! # std::fs::write(folder.path().join("metrics.jsonl"), "{\"step\":1,\"loss\":5.5}\n").unwrap();
//! # let paths = [folder.path().to_path_buf()];
//! let runs = deepwell_runs::read_runs(&paths)?;
//! let page = deepwell_runs::dashboard(&runs, "Learning rates", None).to_html();
//! assert!(page.starts_with("<!DOCTYPE html>"));
//! println!("{}", deepwell_runs::markdown(&runs));
//! # Ok(())
//! # }
//! ```

mod details;
mod error;
mod facts;
mod find;
mod line;
pub mod mlflow;
mod page;
mod read;
pub mod recipe;
mod row;
mod run;
mod settings;
mod units;

pub use error::RunsError;
pub use facts::Facts;
pub use find::find_runs;
pub use page::{dashboard, markdown};
pub use read::{read_run, read_runs};
pub use row::RunRow;
pub use run::{Event, Metric, Points, Run, RunState};
