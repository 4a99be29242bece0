//! Errors of reading and exporting runs.

use std::io;
use std::path::PathBuf;

/// An error of a run's folder, an export or a recipe.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunsError {
    /// A path that does not exist.
    #[error(
        "no run at `{}`: expected the output folder of `deepwell train`, or a folder above such \
         folders\nhint: `deepwell train --out DIR` makes one", path.display()
    )]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// A folder without a run.
    #[error(
        "no run in `{}`: expected `run.json` or `metrics.jsonl` there or at most {depth} folders \
         below, got neither\nhint: name the folder that `--out` named", path.display()
    )]
    NoRun {
        /// The folder.
        path: PathBuf,
        /// Depth of the search.
        depth: usize,
    },
    /// A file or a folder that cannot be read.
    #[error("cannot read `{}`: {source}", path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file or a folder that cannot be written.
    #[error("cannot write `{}`: {source}", path.display())]
    Write {
        /// The path.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// An export that is already there.
    #[error(
        "`{}` is there already: expected a run that the store lacks\nhint: delete the folder to \
         export the run again", path.display()
    )]
    Exported {
        /// The folder of the run in the store.
        path: PathBuf,
    },
    /// A store of another form.
    #[error(
        "`{}`: expected an experiment of MLflow's file store, got {got}\nhint: choose another \
         folder with `--to`", path.display()
    )]
    Store {
        /// The file.
        path: PathBuf,
        /// Description of the content.
        got: String,
    },
    /// An unknown recipe.
    #[error("no recipe `{name}`: expected one of {known}, or the path of a recipe file")]
    NoRecipe {
        /// The name.
        name: String,
        /// Known names.
        known: String,
    },
    /// An invalid recipe file.
    #[error("recipe `{name}`: {what}")]
    Recipe {
        /// Name or path of the recipe.
        name: String,
        /// Description of the error.
        what: String,
    },
}

impl RunsError {
    /// Makes errors of reading `path`.
    pub(crate) fn read(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> RunsError {
        let path = path.into();
        move |source| RunsError::Read { path, source }
    }

    /// Makes errors of writing `path`.
    pub(crate) fn write(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> RunsError {
        let path = path.into();
        move |source| RunsError::Write { path, source }
    }
}
