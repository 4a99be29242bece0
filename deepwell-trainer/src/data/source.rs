//! Finding the files of a corpus and looking at each of them once.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::skip::{SkipReason, Skipped};
use super::{DataError, Progress, Stage, bin, glob};

/// A file that may become part of the corpus.
#[derive(Debug)]
pub(crate) struct Candidate {
    /// Name with `/` between folders, starting at the input it was found in, so that it does not
    /// depend on where the input lies.
    pub(crate) name: String,
    /// What decides between training and held-out part.
    pub(crate) split_key: String,
    pub(crate) path: PathBuf,
    /// Size when it was found, for the progress only.
    pub(crate) bytes: u64,
    /// Given by its own name, not found in a folder.
    pub(crate) is_named: bool,
}

/// What a document is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    Tokens(bin::BinHeader),
}

/// One file of the corpus.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    pub(crate) name: String,
    pub(crate) split_key: String,
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
    /// Bytes of the text, or of the tokens without the header.
    pub(crate) bytes: u64,
    /// Of the whole file.
    pub(crate) hash: blake3::Hash,
}

/// Lists the files of `inputs`: files as they are, folders with everything below them, patterns as
/// if each path that matches had been given, sorted by name. Hidden entries of folders, links to
/// folders and special files are passed over.
pub(crate) fn list(inputs: &[PathBuf], skipped: &mut Skipped) -> Result<Vec<Candidate>, DataError> {
    let mut found = Vec::new();
    for input in inputs {
        // A file whose own name looks like a pattern is meant by its name.
        let matches = if input.exists() { None } else { glob::expand(input)? };
        for path in matches.as_deref().unwrap_or(std::slice::from_ref(input)) {
            list_input(path, &mut found, skipped)?;
        }
    }
    found.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));

    let mut seen = HashSet::new();
    let mut unique = Vec::with_capacity(found.len());
    for candidate in found {
        let real = candidate
            .path
            .canonicalize()
            .map_err(|source| DataError::Read { path: candidate.path.clone(), source })?;
        if seen.insert(real) {
            unique.push(candidate);
        } else {
            skipped.add(SkipReason::NamedTwice);
        }
    }
    Ok(unique)
}

fn list_input(
    input: &Path,
    found: &mut Vec<Candidate>,
    skipped: &mut Skipped,
) -> Result<(), DataError> {
    let metadata = std::fs::metadata(input).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => DataError::Missing { path: input.to_owned() },
        _ => DataError::Read { path: input.to_owned(), source },
    })?;
    let name = file_name(input)?;
    if metadata.is_dir() {
        walk(input, &name, found, skipped)?;
    } else if metadata.is_file() {
        found.push(candidate(name, input.to_owned(), metadata.len(), true));
    } else {
        skipped.add(SkipReason::NotRegular);
    }
    Ok(())
}

fn candidate(name: String, path: PathBuf, bytes: u64, is_named: bool) -> Candidate {
    Candidate { split_key: name.clone(), name, path, bytes, is_named }
}

/// The last part of a path, also of `.` and `a/..`.
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
    found: &mut Vec<Candidate>,
    skipped: &mut Skipped,
) -> Result<(), DataError> {
    let fail = |path: &Path| {
        let path = path.to_owned();
        move |source| DataError::Read { path, source }
    };
    for entry in std::fs::read_dir(folder).map_err(fail(folder))? {
        let entry = entry.map_err(fail(folder))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') {
            skipped.add(SkipReason::Hidden);
            continue;
        }
        let path = entry.path();
        let name = format!("{prefix}/{name}");
        let is_link = entry.file_type().map_err(fail(&path))?.is_symlink();
        let metadata = std::fs::metadata(&path).map_err(fail(&path))?;
        if metadata.is_dir() {
            if is_link {
                skipped.add(SkipReason::LinkToFolder);
            } else {
                walk(&path, &name, found, skipped)?;
            }
        } else if metadata.is_file() {
            found.push(candidate(name, path, metadata.len(), false));
        } else {
            skipped.add(SkipReason::NotRegular);
        }
    }
    Ok(())
}

/// Reads every candidate once: sorts out what is no text, and hashes the rest.
pub(crate) fn scan(
    candidates: Vec<Candidate>,
    needs_utf8: bool,
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
        match look_at(candidate, needs_utf8)? {
            Ok(document) if drop_copies && !hashes.insert(document.hash) => {
                skipped.add(SkipReason::Copy);
            }
            Ok(document) => documents.push(document),
            Err(reason) => skipped.add(reason),
        }
    }
    progress(Progress { stage: Stage::Scan, bytes_done, bytes_total });

    let is_text = |document: &&Document| document.format == Format::Text;
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

/// A file that is read from front to back, with its hash.
fn look_at(
    candidate: Candidate,
    needs_utf8: bool,
) -> Result<Result<Document, SkipReason>, DataError> {
    let Candidate { name, split_key, path, is_named, .. } = candidate;
    let fail = |source| DataError::Read { path: path.clone(), source };
    let mut file = File::open(&path).map_err(fail)?;
    let mut block = vec![0; 1 << 20];
    let mut hasher = blake3::Hasher::new();
    let mut utf8 = Utf8Check::default();
    let mut bytes = 0;
    let mut format = Format::Text;
    loop {
        let count = read_full(&mut file, &mut block).map_err(fail)?;
        let data = &block[..count];
        // A folder of text may hold other `.bin` files: those are judged like any file.
        if bytes == 0
            && path.extension().is_some_and(|extension| extension == "bin")
            && (is_named || bin::has_magic(data))
        {
            let bytes_file = file.metadata().map_err(fail)?.len();
            format = Format::Tokens(bin::parse_header(&path, data, bytes_file)?);
        }
        if count == 0 {
            break;
        }
        bytes += count as u64;
        hasher.update(data);
        if format == Format::Text {
            if data.contains(&0) {
                return Ok(Err(SkipReason::Binary));
            }
            if needs_utf8 && !utf8.push(data) {
                return Ok(Err(SkipReason::NotUtf8));
            }
        }
    }
    if needs_utf8 && !utf8.is_complete() {
        return Ok(Err(SkipReason::NotUtf8));
    }
    if let Format::Tokens(_) = format {
        bytes -= bin::HEADER_BYTES;
    }
    if bytes == 0 {
        return Ok(Err(SkipReason::Empty));
    }
    Ok(Ok(Document { name, split_key, format, bytes, hash: hasher.finalize(), path }))
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

/// UTF-8 validation of a text that comes in blocks: keeps the 0 to 3 bytes of a character that a
/// block boundary cuts.
#[derive(Default)]
struct Utf8Check {
    tail: Vec<u8>,
}

impl Utf8Check {
    fn push(&mut self, mut data: &[u8]) -> bool {
        while !self.tail.is_empty() && !data.is_empty() {
            self.tail.push(data[0]);
            data = &data[1..];
            match str::from_utf8(&self.tail) {
                Ok(_) => self.tail.clear(),
                Err(error) if error.error_len().is_some() => return false,
                Err(_) => {}
            }
        }
        match str::from_utf8(data) {
            Ok(_) => true,
            Err(error) if error.error_len().is_some() => false,
            Err(error) => {
                self.tail.extend_from_slice(&data[error.valid_up_to()..]);
                true
            }
        }
    }

    fn is_complete(&self) -> bool {
        self.tail.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utf8_is_judged_alike_wherever_the_blocks_are_cut() {
        let texts: [(&[u8], bool); 7] = [
            (b"plain", true),
            ("Tiefe Brunnen \u{1f4a7} \u{e9}\u{20ac}".as_bytes(), true),
            (b"\xff", false),
            (b"ab\xc3", false),
            (b"\xf0\x9f\x92", false),
            (b"\xed\xa0\x80", false),
            (b"", true),
        ];
        for (text, expected) in texts {
            for first in 0..=text.len() {
                for second in first..=text.len() {
                    let mut check = Utf8Check::default();
                    let parts = [&text[..first], &text[first..second], &text[second..]];
                    let valid = parts.iter().all(|part| check.push(part)) && check.is_complete();
                    assert_eq!(valid, expected, "{text:?} cut at {first} and {second}");
                }
            }
        }
    }

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
        let found = list(&inputs, &mut skipped).unwrap();
        let names: Vec<_> = found.iter().map(|candidate| candidate.name.as_str()).collect();
        assert_eq!(
            names,
            [".hidden", "a.txt", "root/a.txt", "root/b-c.txt", "root/b/z.txt"],
            "a hidden file is taken when it is named itself; a.txt is reached twice, kept once"
        );
        assert_eq!(skipped.to_string(), "2 hidden, 1 named twice");

        // A pattern stands for the paths that a shell would put in its place.
        let names = |inputs: &[PathBuf]| -> Vec<String> {
            let found = list(inputs, &mut Skipped::default()).unwrap();
            found.into_iter().map(|candidate| candidate.name).collect()
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
        assert!(list(&[root], &mut skipped).unwrap().is_empty());
        assert_eq!(skipped.to_string(), "1 not a regular file, 1 link to a folder");
    }
}
