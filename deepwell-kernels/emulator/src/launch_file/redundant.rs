//! Reasons for unnoticed mistakes, from the document or from comments in the source.
//!
//! A comment has the form `// redundant WHAT: REASON`. It follows the statement or is in the
//! comment block before the line, at any of the lines through which the instruction was inlined.
//! `WHAT` may be a list with commas.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::file::Redundant;
use super::lines::SourceLine;

/// Returns the document's first reason for a mistake.
pub(super) fn listed<'a>(
    reasons: &'a [Redundant],
    what: &str,
    ptx_line: u32,
    lines: &[SourceLine],
) -> Option<&'a Redundant> {
    reasons.iter().find(|reason| is_of(reason, what, ptx_line, lines))
}

/// Whether a reason applies to a mistake.
pub(super) fn is_of(reason: &Redundant, what: &str, ptx_line: u32, lines: &[SourceLine]) -> bool {
    if reason.what != what {
        return false;
    }
    match reason.at.rsplit_once(':') {
        None => reason.at.parse() == Ok(ptx_line),
        Some((file, line)) => lines
            .iter()
            .any(|known| Path::new(&known.file).ends_with(file) && line.parse() == Ok(known.line)),
    }
}

/// Source files, each read once.
pub(super) struct Sources {
    folder: Option<PathBuf>,
    files: Mutex<HashMap<String, Vec<String>>>,
}

impl Sources {
    pub(super) fn new(folder: Option<&Path>) -> Sources {
        Sources { folder: folder.map(Path::to_owned), files: Mutex::default() }
    }

    /// Returns the reason in a comment at one of the lines.
    pub(super) fn reason(&self, what: &str, lines: &[SourceLine]) -> Option<String> {
        lines.iter().find_map(|line| self.reason_at(what, line))
    }

    fn reason_at(&self, what: &str, at: &SourceLine) -> Option<String> {
        let folder = self.folder.as_ref()?;
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let text = files.entry(at.file.clone()).or_insert_with(|| {
            // Missing files, such as headers of the toolkit, have no comments.
            let text = std::fs::read_to_string(folder.join(&at.file)).unwrap_or_default();
            text.lines().map(str::to_owned).collect()
        });
        let line = |number: u32| text.get((number as usize).checked_sub(1)?).map(String::as_str);
        let own = line(at.line).and_then(|text| reason_in(text, what));
        let before = || (1..at.line).rev().map_while(line);
        let comments = || before().take_while(|text| text.trim_start().starts_with("//"));
        own.or_else(|| comments().find_map(|text| reason_in(text, what)))
    }
}

/// Returns the reason for a mistake in a line's comment.
pub(super) fn reason_in(line: &str, what: &str) -> Option<String> {
    let (_, comment) = line.split_once("// redundant ")?;
    let named = |reason: &(usize, &str)| comment[..reason.0].split(", ").any(|name| name == what);
    let (at, separator) = comment.match_indices(": ").find(named)?;
    let reason = comment[at + separator.len()..].trim();
    (!reason.is_empty()).then(|| reason.to_owned())
}
