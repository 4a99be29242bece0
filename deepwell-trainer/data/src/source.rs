//! Finds the files of a corpus and scans each once.

use std::collections::HashSet;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::compressed::Compression;
use super::look::look_at;
use super::records::{Fields, RecordFormat};
use super::skip::{SkipReason, Skipped};
use super::{DataError, Progress, Stage, bin, glob};

/// A possible file of the corpus.
#[derive(Debug)]
pub(crate) struct Candidate {
    /// Name with `/` between folders, relative to the input that contains the file, so that the
    /// name does not depend on the input's location.
    pub(crate) name: String,
    /// Key that assigns the file to the training or the held-out part.
    pub(crate) split_key: String,
    pub(crate) path: PathBuf,
    /// Size when found, for the progress only.
    pub(crate) bytes: u64,
    pub(crate) found: Found,
    /// Whether the file was given as held-out data.
    pub(crate) is_heldout: bool,
}

/// How the input referred to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Given by name.
    Named,
    /// Matched by a pattern.
    Matched,
    /// In a folder.
    InFolder,
}

/// Format of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    Tokens(bin::BinHeader),
    Records(RecordFormat),
}

/// One file of the corpus.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    pub(crate) name: String,
    pub(crate) split_key: String,
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
    pub(crate) compression: Compression,
    /// Number of documents in the file: 1, except for files of records.
    pub(crate) records: u64,
    /// Number of these documents that are conversations.
    pub(crate) chats: u64,
    /// Whether the file was given as held-out data.
    pub(crate) is_heldout: bool,
    /// Bytes of the text, or of the tokens without the header.
    pub(crate) bytes: u64,
    /// Hash of the whole file.
    pub(crate) hash: blake3::Hash,
}

/// Lists the files of `inputs`: files, folders with everything below them, and patterns, each
/// matching path treated like an input. Sorted by name. Hidden entries of folders, links to folders
/// and special files are skipped.
pub(crate) fn list(
    inputs: &[PathBuf],
    heldout: &[PathBuf],
    skipped: &mut Skipped,
) -> Result<Vec<Candidate>, DataError> {
    let mut candidates = Vec::new();
    let of = |is_heldout| move |input| (input, is_heldout);
    // Held-out inputs come first, so that a file given twice stays held out.
    for (input, is_heldout) in heldout.iter().map(of(true)).chain(inputs.iter().map(of(false))) {
        // An existing file whose name looks like a pattern is not expanded.
        let matches = if input.exists() { None } else { glob::expand(input)? };
        let how = if matches.is_none() { Found::Named } else { Found::Matched };
        for path in matches.as_deref().unwrap_or(std::slice::from_ref(input)) {
            list_input(path, how, is_heldout, &mut candidates, skipped)?;
        }
    }
    candidates.sort_by(|a, b| {
        let order = |it: &Candidate| (it.name.clone(), it.path.clone(), !it.is_heldout);
        order(a).cmp(&order(b))
    });

    let mut seen = HashSet::new();
    let mut unique: Vec<Candidate> = Vec::with_capacity(candidates.len());
    for candidate in candidates {
        let real = candidate
            .path
            .canonicalize()
            .map_err(|source| DataError::Read { path: candidate.path.clone(), source })?;
        if seen.insert(real) {
            unique.push(candidate);
        } else {
            skipped.add(SkipReason::NamedTwice, candidate.name);
        }
    }
    Ok(unique)
}

fn list_input(
    input: &Path,
    how: Found,
    is_heldout: bool,
    candidates: &mut Vec<Candidate>,
    skipped: &mut Skipped,
) -> Result<(), DataError> {
    let metadata = std::fs::metadata(input).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => DataError::Missing { path: input.to_owned() },
        _ => DataError::Read { path: input.to_owned(), source },
    })?;
    let name = file_name(input)?;
    if metadata.is_dir() {
        let before = candidates.len();
        walk(input, &name, candidates, skipped)?;
        candidates[before..].iter_mut().for_each(|candidate| candidate.is_heldout = is_heldout);
    } else if metadata.is_file() {
        let candidate = candidate(name, input.to_owned(), metadata.len(), how);
        candidates.push(Candidate { is_heldout, ..candidate });
    } else {
        skipped.add(SkipReason::NotRegular, name);
    }
    Ok(())
}

fn candidate(name: String, path: PathBuf, bytes: u64, found: Found) -> Candidate {
    Candidate { split_key: name.clone(), name, path, bytes, found, is_heldout: false }
}

/// The last component of a path, also for `.` and `a/..`.
fn file_name(input: &Path) -> Result<String, DataError> {
    let name = match input.file_name() {
        Some(name) => name.to_string_lossy().into_owned(),
        None => input
            .canonicalize()
            .map_err(|source| DataError::Read { path: input.to_owned(), source })?
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default(),
    };
    Ok(name)
}

fn walk(
    folder: &Path,
    prefix: &str,
    candidates: &mut Vec<Candidate>,
    skipped: &mut Skipped,
) -> Result<(), DataError> {
    let fail = |path: &Path| {
        let path = path.to_owned();
        move |source| DataError::Read { path, source }
    };
    for entry in std::fs::read_dir(folder).map_err(fail(folder))? {
        let entry = entry.map_err(fail(folder))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_hidden = name.starts_with('.');
        let name = format!("{prefix}/{name}");
        if is_hidden {
            skipped.add(SkipReason::Hidden, name);
            continue;
        }
        let path = entry.path();
        let is_link = entry.file_type().map_err(fail(&path))?.is_symlink();
        let metadata = std::fs::metadata(&path).map_err(fail(&path))?;
        if metadata.is_dir() {
            if is_link {
                skipped.add(SkipReason::LinkToFolder, name);
            } else {
                walk(&path, &name, candidates, skipped)?;
            }
        } else if metadata.is_file() {
            candidates.push(candidate(name, path, metadata.len(), Found::InFolder));
        } else {
            skipped.add(SkipReason::NotRegular, name);
        }
    }
    Ok(())
}

/// Reads every candidate once: skips files that are not text, and hashes the others.
pub(crate) fn scan(
    candidates: Vec<Candidate>,
    needs_utf8: bool,
    fields: &Fields,
    drop_copies: bool,
    skipped: &mut Skipped,
    progress: &mut dyn FnMut(Progress),
) -> Result<Vec<Document>, DataError> {
    let bytes_total = candidates.iter().map(|candidate| candidate.bytes).sum();
    let mut bytes_done = 0;
    let mut documents: Vec<Document> = Vec::with_capacity(candidates.len());
    let mut hashes = HashSet::new();
    for candidate in candidates {
        progress(Progress { stage: Stage::Scan, bytes_done, bytes_total });
        bytes_done += candidate.bytes;
        let name = candidate.name.clone();
        match look_at(candidate, needs_utf8, fields)? {
            Ok(document) if drop_copies && !hashes.insert(document.hash) => {
                skipped.add(SkipReason::Copy, name);
            }
            Ok(document) => documents.push(document),
            Err(reason) => skipped.add(reason, name),
        }
    }
    progress(Progress { stage: Stage::Scan, bytes_done, bytes_total });

    let is_text = |document: &&Document| !matches!(document.format, Format::Tokens(_));
    let text = documents.iter().find(is_text);
    let tokens = documents.iter().find(|document| !is_text(document));
    if let (Some(text), Some(tokens)) = (text, tokens) {
        return Err(DataError::MixedInputs {
            tokens: tokens.path.clone(),
            text: text.path.clone(),
        });
    }
    Ok(documents)
}

/// Reads until `block` is full or the file ends.
pub(crate) fn read_full(file: &mut impl Read, block: &mut [u8]) -> io::Result<usize> {
    let mut count = 0;
    while count < block.len() {
        match file.read(&mut block[count..]) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_listed_in_name_order_whatever_the_system_gives() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        for name in ["b/z.txt", "b/a.txt", "a.txt", ".git/config", "b/.hidden", "b-c.txt"] {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name).unwrap();
        }
        let mut skipped = Skipped::default();
        let inputs = [root.clone(), root.join("b/a.txt"), root.join("b/.hidden")];
        let candidates = list(&inputs, &[], &mut skipped).unwrap();
        let names: Vec<_> = candidates.iter().map(|candidate| candidate.name.as_str()).collect();
        assert_eq!(
            names,
            [".hidden", "a.txt", "root/a.txt", "root/b-c.txt", "root/b/z.txt"],
            "a hidden file is taken when it is named itself; a.txt is reached twice, kept once"
        );
        assert_eq!(
            skipped.to_string(),
            "2 hidden (`root/.git`, `root/b/.hidden`), 1 named twice (`root/b/a.txt`)"
        );

        // A pattern gives the same files as its expansion by a shell.
        let names = |inputs: &[PathBuf]| -> Vec<String> {
            let candidates = list(inputs, &[], &mut Skipped::default()).unwrap();
            candidates.into_iter().map(|candidate| candidate.name).collect()
        };
        let pattern = names(&[root.join("*")]);
        assert_eq!(pattern, names(&["a.txt", "b", "b-c.txt"].map(|name| root.join(name))));
        assert_eq!(pattern, ["a.txt", "b-c.txt", "b/a.txt", "b/z.txt"]);
        std::fs::write(root.join("[a].txt"), "x").unwrap();
        assert_eq!(names(&[root.join("[a].txt")]), ["[a].txt"], "a file of that very name");
    }

    #[cfg(unix)]
    #[test]
    fn links_to_folders_and_pipes_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        std::fs::create_dir(&root).unwrap();
        std::os::unix::fs::symlink(&root, root.join("circle")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
        let mut skipped = Skipped::default();
        assert!(list(&[root], &[], &mut skipped).unwrap().is_empty());
        assert_eq!(
            skipped.to_string(),
            "1 not a regular file (`root/socket`), 1 link to a folder (`root/circle`)"
        );
    }
}
