//! The documents of the inputs.

use std::path::{Path, PathBuf};

use super::records::Fields;
use super::skip::Skipped;
use super::source::{self, Document};
use super::{DataError, Progress, workspace};

/// Documents of one or more inputs, each scanned once.
pub(crate) struct Corpus {
    /// Not empty.
    pub(crate) documents: Vec<Document>,
    /// The inputs, as readable text.
    pub(crate) source: String,
    pub(crate) skipped: Skipped,
}

impl Corpus {
    /// Reads `inputs`, or the default corpus of `workspace` if `inputs` is empty. With
    /// `needs_utf8`, files that are not UTF-8 are skipped.
    ///
    /// `heldout` is held out entirely.
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
