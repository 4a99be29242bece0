//! Writing the files of the token cache.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::bin;
use super::cache::{Key, file_path};
use super::cache_header::{HEADER_BYTES, Header};
use super::map::ReadMap;
use super::{DataError, Split};

/// Writes one file of the cache aside. Nothing shows under the final name before
/// [`FinishedTokens::publish`]; dropped before that, it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct TokenWriter {
    file: BufWriter<NamedTempFile>,
    hasher: blake3::Hasher,
    folder: PathBuf,
    width: u8,
    tokens: u64,
    token_max: u32,
    documents: u64,
    bytes: Vec<u8>,
}

impl TokenWriter {
    /// `vocab` is the number of tokens, at most 2^31: 2 bytes a token serve up to 65,536.
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
            bytes: Vec::new(),
        })
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Adds tokens, each below the `vocab` given to [`Self::new`].
    pub(crate) fn push(&mut self, tokens: &[u32]) -> Result<(), DataError> {
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
    pub(crate) fn move_tail(mut self, start: u64, other: &mut Self) -> Result<Self, DataError> {
        let mut head = Self { documents: 1, ..Self::new(&self.folder, self.vocab())? };
        other.documents = 1;
        self.file.flush().map_err(|source| self.fail(source))?;
        let map = ReadMap::open(self.file.get_ref().path()).map_err(|source| self.fail(source))?;
        let width = self.width;
        let payload = &map.bytes()[HEADER_BYTES..];
        let (first, second) = payload.split_at(start as usize * usize::from(width));
        for (part, writer) in [(first, &mut head), (second, other)] {
            for block in part.chunks(1 << 20) {
                writer.push(&bin::decode(block, width))?;
            }
        }
        Ok(head)
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
        let header = Header {
            width: self.width,
            tokens: self.tokens,
            token_max: self.token_max,
            split,
            key: *key,
            payload_hash: *self.hasher.finalize().as_bytes(),
            documents: self.documents,
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
        // Nothing is left in the buffer: it was flushed.
        let (file, _) = self.file.into_parts();
        Ok(FinishedTokens { file, path, folder: self.folder })
    }
}

/// A complete file of the cache that still waits for its name.
#[derive(Debug)]
pub(crate) struct FinishedTokens {
    file: NamedTempFile,
    path: PathBuf,
    folder: PathBuf,
}

impl FinishedTokens {
    /// Gives the file its name, in place of any file that had it.
    pub(crate) fn publish(self) -> Result<(), DataError> {
        let fail =
            |source| DataError::WriteCache { path: self.folder.clone(), bytes_needed: 0, source };
        self.file.persist(&self.path).map_err(|error| fail(error.error))?;
        // The name itself is on the disk once its folder is. Only Unix can sync a folder.
        if cfg!(unix) {
            File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(fail)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::TokenCache;

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
