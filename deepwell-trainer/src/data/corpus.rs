//! The documents that inputs come to.

use std::path::{Path, PathBuf};

use super::records::Fields;
use super::skip::Skipped;
use super::source::{self, Document};
use super::{DataError, Progress, workspace};

/// Documents of one or more inputs, each looked at once.
pub(crate) struct Corpus {
    /// At least one.
    pub(crate) documents: Vec<Document>,
    /// The inputs, for people.
    pub(crate) source: String,
    pub(crate) skipped: Skipped,
}

impl Corpus {
    /// Reads `inputs`, or the default corpus of `workspace` if there are none. `needs_utf8`: what
    /// is no UTF-8 is passed over.
    ///
    /// `heldout` is held out whole.
    pub(crate) fn open(
        inputs: &[PathBuf],
        heldout: &[PathBuf],
        workspace: &Path,
        needs_utf8: bool,
        fields: &Fields,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, DataError> {
        let mut skipped = Skipped::default();
        let is_default = inputs.is_empty();
        let (candidates, source) = if is_default {
            let (mut candidates, packages) = workspace::list(workspace, &mut skipped)?;
            candidates.extend(source::list(&[], heldout, &mut skipped)?);
            (candidates, format!("default corpus: Rust sources of {packages} locked packages"))
        } else {
            (source::list(inputs, heldout, &mut skipped)?, list_inputs(inputs))
        };
        let documents =
            source::scan(candidates, needs_utf8, fields, is_default, &mut skipped, progress)?;
        if documents.is_empty() {
            return Err(DataError::Empty { inputs: source, skipped: skipped.to_string() });
        }
        Ok(Self { documents, source, skipped })
    }
}

fn list_inputs(inputs: &[PathBuf]) -> String {
    let names: Vec<String> = inputs.iter().map(|path| format!("`{}`", path.display())).collect();
    names.join(", ")
}
