//! The default corpus as a folder: for a machine without cargo.

use std::fs;
use std::path::Path;

use serde::Serialize;

use super::skip::Skipped;
use super::{DataError, workspace};

/// Size of an exported corpus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CorpusFolder {
    /// Number of files.
    pub files: usize,
    /// Bytes of text.
    pub text_bytes: u64,
}

/// Copies the default corpus of a Cargo workspace into `folder`, each file under its name in the
/// corpus. Files that are not UTF-8 are skipped.
///
/// # Errors
/// The workspace has no locked dependencies, or a file cannot be read or written.
pub fn export_default_corpus(workspace: &Path, folder: &Path) -> Result<CorpusFolder, DataError> {
    let (candidates, _) = workspace::list(workspace, &mut Skipped::default())?;
    let mut made = CorpusFolder::default();
    for candidate in candidates {
        let text = fs::read(&candidate.path)
            .map_err(|source| DataError::Read { path: candidate.path.clone(), source })?;
        if std::str::from_utf8(&text).is_err() {
            continue;
        }
        let target = folder.join(&candidate.name);
        let fail = |source| DataError::WriteCorpus { path: target.clone(), source };
        target.parent().map_or(Ok(()), fs::create_dir_all).map_err(fail)?;
        fs::write(&target, &text).map_err(fail)?;
        made.files += 1;
        made.text_bytes += text.len() as u64;
    }
    Ok(made)
}
