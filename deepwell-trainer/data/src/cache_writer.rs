//! Writing the files of the token cache.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::bin;
use super::bits::Bits;
use super::cache::file_path;
use super::cache_header::{HEADER_BYTES, Header, Key};
use super::map::ReadMap;
use super::{DataError, Split};

/// Writes one file of the cache under a temporary name. [`FinishedTokens::publish`] renames the
/// file; if dropped earlier, the file is deleted.
#[derive(Debug)]
pub(crate) struct TokenWriter {
    file: BufWriter<NamedTempFile>,
    hasher: blake3::Hasher,
    folder: PathBuf,
    width: u8,
    tokens: u64,
    token_max: u32,
    documents: u64,
    /// Target bits of all tokens; none until tokens with flags are added.
    counts: Option<Bits>,
    bytes: Vec<u8>,
}

impl TokenWriter {
    /// `vocab` is the vocabulary size, at most 2^31; up to 65,536 a token takes 2 bytes.
    pub(crate) fn new(folder: &Path, vocab: u32) -> Result<Self, DataError> {
        let open = || {
            std::fs::create_dir_all(folder)?;
            let mut file = NamedTempFile::with_prefix_in(".tokens-", folder)?;
            file.write_all(&[0; HEADER_BYTES])?;
            Ok(file)
        };
        let fail = |source| DataError::WriteCache {
            path: folder.to_owned(),
            bytes_needed: HEADER_BYTES as u64,
            source,
        };
        Ok(Self {
            file: BufWriter::with_capacity(1 << 20, open().map_err(fail)?),
            hasher: blake3::Hasher::new(),
            folder: folder.to_owned(),
            width: if vocab <= 1 << 16 { 2 } else { 4 },
            tokens: 0,
            token_max: 0,
            documents: 0,
            counts: None,
            bytes: Vec::new(),
        })
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Adds tokens, each below the `vocab` given to [`Self::new`]. All count as targets.
    pub(crate) fn push(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        if let Some(counts) = &mut self.counts {
            tokens.iter().for_each(|_| counts.push(true));
        }
        self.write(tokens)
    }

    /// Adds tokens with target flags.
    pub(crate) fn push_counted(
        &mut self,
        tokens: &[u32],
        counts: impl IntoIterator<Item = bool>,
    ) -> Result<(), DataError> {
        let before = self.tokens;
        let bits = self.counts.get_or_insert_with(|| Bits::ones(before));
        counts.into_iter().take(tokens.len()).for_each(|counts| bits.push(counts));
        self.write(tokens)
    }

    fn write(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        self.bytes.clear();
        for &token in tokens {
            self.token_max = self.token_max.max(token);
            match self.width {
                2 => self.bytes.extend_from_slice(&(token as u16).to_le_bytes()),
                _ => self.bytes.extend_from_slice(&token.to_le_bytes()),
            }
        }
        self.tokens += tokens.len() as u64;
        self.hasher.update(&self.bytes);
        let written = self.file.write_all(&self.bytes);
        written.map_err(|source| self.fail(source))
    }

    pub(crate) fn end_document(&mut self) {
        self.documents += 1;
    }

    /// Moves the tokens from `start` on to the end of `other`, reading them back from the disk.
    pub(crate) fn move_tail(self, start: u64, other: &mut Self) -> Result<Self, DataError> {
        let mut head = Self { documents: 1, ..Self::new(&self.folder, self.vocab())? };
        other.documents = 1;
        let written = self.into_reader()?;
        written.copy(0..start, &mut head)?;
        written.copy(start..written.tokens, other)?;
        Ok(head)
    }

    /// Returns a reader of the tokens written so far.
    pub(crate) fn into_reader(mut self) -> Result<Written, DataError> {
        self.file.flush().map_err(|source| self.fail(source))?;
        let map = ReadMap::open(self.file.get_ref().path()).map_err(|source| self.fail(source))?;
        let Self { file, width, tokens, counts, .. } = self;
        Ok(Written { map, width, tokens, counts, _file: file })
    }

    fn vocab(&self) -> u32 {
        if self.width == 2 { 1 << 16 } else { 1 << 31 }
    }

    fn fail(&self, source: io::Error) -> DataError {
        let bytes_needed = HEADER_BYTES as u64 + self.tokens * u64::from(self.width);
        DataError::WriteCache { path: self.folder.clone(), bytes_needed, source }
    }

    /// Writes the header and brings everything to the disk.
    pub(crate) fn finish(mut self, key: &Key, split: Split) -> Result<FinishedTokens, DataError> {
        let counts = self.counts.take().filter(|counts| counts.count() < self.tokens);
        if let Some(counts) = &counts {
            self.hasher.update(counts.bytes());
            let written = self.file.write_all(counts.bytes());
            written.map_err(|source| self.fail(source))?;
        }
        let header = Header {
            width: self.width,
            tokens: self.tokens,
            token_max: self.token_max,
            split,
            key: *key,
            payload_hash: *self.hasher.finalize().as_bytes(),
            documents: self.documents,
            counted: counts.map_or(self.tokens, |counts| counts.count()),
        };
        let write = |file: &mut BufWriter<NamedTempFile>| {
            file.flush()?;
            let file = file.get_mut().as_file_mut();
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&header.to_bytes())?;
            file.sync_all()
        };
        write(&mut self.file).map_err(|source| self.fail(source))?;
        let path = file_path(&self.folder, key, split);
        // The buffer is empty: it was flushed.
        let (file, _) = self.file.into_parts();
        Ok(FinishedTokens { file, path, folder: self.folder })
    }
}

/// Tokens read back from a temporary file.
#[derive(Debug)]
pub(crate) struct Written {
    map: ReadMap,
    width: u8,
    tokens: u64,
    counts: Option<Bits>,
    _file: BufWriter<NamedTempFile>,
}

impl Written {
    /// Copies the tokens of a range, with their target flags, to another file.
    pub(crate) fn copy(&self, range: Range<u64>, to: &mut TokenWriter) -> Result<(), DataError> {
        let width = u64::from(self.width);
        let payload = &self.map.bytes()[HEADER_BYTES..];
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at + (1 << 18));
            let tokens =
                bin::decode(&payload[(at * width) as usize..(end * width) as usize], self.width);
            match &self.counts {
                None => to.push(&tokens)?,
                Some(counts) => to.push_counted(&tokens, (at..end).map(|i| counts.get(i)))?,
            }
            at = end;
        }
        Ok(())
    }
}

/// A complete file of the cache before its renaming.
#[derive(Debug)]
pub(crate) struct FinishedTokens {
    file: NamedTempFile,
    path: PathBuf,
    folder: PathBuf,
}

impl FinishedTokens {
    /// Renames the file, and replaces an older file.
    pub(crate) fn publish(self) -> Result<(), DataError> {
        let fail =
            |source| DataError::WriteCache { path: self.folder.clone(), bytes_needed: 0, source };
        self.file.persist(&self.path).map_err(|error| fail(error.error))?;
        // The new name is durable after a sync of the folder. Only Unix can sync a folder.
        if cfg!(unix) {
            File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(fail)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenCache;

    const KEY: Key = [7; 32];

    #[test]
    fn a_tail_moves() {
        let folder = tempfile::tempdir().unwrap();
        let tokens: Vec<u32> = (0..300_000).map(|i| i % 70_000).collect();
        let mut whole = TokenWriter::new(folder.path(), 70_000).unwrap();
        whole.push(&tokens).unwrap();
        let mut heldout = TokenWriter::new(folder.path(), 70_000).unwrap();
        let train = whole.move_tail(299_000, &mut heldout).unwrap();
        train.finish(&KEY, Split::Train).unwrap().publish().unwrap();
        heldout.finish(&KEY, Split::Heldout).unwrap().publish().unwrap();
        let cache = TokenCache::open(folder.path(), &KEY).unwrap();
        let read = |split| {
            let part = cache.tokens(split);
            (0..part.len()).map(|i| part.get(i)).collect::<Vec<u32>>()
        };
        assert!(read(Split::Train) == tokens[..299_000]);
        assert!(read(Split::Heldout) == tokens[299_000..]);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_folder_that_cannot_be_made_is_one_clear_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "x").unwrap();
        let error = TokenWriter::new(&file.join("cache"), 256).unwrap_err().to_string();
        let expected = format!(
            "cannot write the token cache `{}`: Not a directory (os error 20)\nhint: it needs \
             about 128 bytes; choose another folder for it",
            file.join("cache").display()
        );
        assert_eq!(error, expected);
    }
}
