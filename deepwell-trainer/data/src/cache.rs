//! Token files on disk, mapped into memory.
//!
//! Each part has a file, `<key>.train.tokens` and `<key>.heldout.tokens`: a header (see
//! `cache_header`), then the tokens.
//!
//! A file is written under a temporary name in the same folder, flushed to the disk, renamed, and
//! never written again. Other programs must not write to the file either, because it is
//! memory-mapped. To remove the cache, delete its folder.

use std::io;
use std::path::{Path, PathBuf};

use deepwell_ir::ops::IGNORED_TARGET;

use super::bits::{self, Bits};
use super::cache_header::{HEADER_BYTES, Header, Key};
use super::map::ReadMap;
use super::{DataError, Split};

/// Both parts of a tokenized data set, memory-mapped or held in memory.
///
/// ```
/// use deepwell_data::{Split, TokenCache};
/// let tokens = TokenCache::in_memory(&[1, 2, 3, 70_000], &[9, 8]);
/// let mut window = [0i32; 2];
/// tokens.copy_i32(Split::Train, 2, &mut window);
/// assert_eq!(window, [3, 70_000]);
/// assert_eq!(tokens.len(Split::Heldout), 2);
/// ```
#[derive(Debug)]
pub struct TokenCache {
    train: CachedSplit,
    heldout: CachedSplit,
}

#[derive(Debug)]
struct CachedSplit {
    store: Store,
    tokens: u64,
    token_max: u32,
    documents: u64,
    /// Number of tokens that count as targets.
    counted: u64,
    /// Hash of the tokens as stored, and of the target bits.
    hash: [u8; 32],
}

#[derive(Debug)]
enum Store {
    Mapped { map: ReadMap, width: u8 },
    Memory(Vec<u32>, Bits),
}

/// The stored tokens of one part.
#[derive(Clone, Copy, Debug)]
pub enum Tokens<'a> {
    /// Little-endian u16 on every machine.
    U16(&'a [u16]),
    /// Little-endian u32 on every machine.
    U32(&'a [u32]),
    /// u32 in the byte order of the machine.
    Native(&'a [u32]),
}

impl Tokens<'_> {
    /// The token at `index`; panics past the end.
    #[inline]
    pub fn get(&self, index: usize) -> u32 {
        match self {
            Tokens::U16(tokens) => u32::from(u16::from_le(tokens[index])),
            Tokens::U32(tokens) => u32::from_le(tokens[index]),
            Tokens::Native(tokens) => tokens[index],
        }
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        match self {
            Tokens::U16(tokens) => tokens.len(),
            Tokens::U32(tokens) | Tokens::Native(tokens) => tokens.len(),
        }
    }
}

impl TokenCache {
    /// A data set in memory, for tests and for tokens made by another program.
    pub fn in_memory(train: &[u32], heldout: &[u32]) -> Self {
        let all = |tokens: &[u32]| vec![true; tokens.len()];
        Self::in_memory_counted((train, &all(train)), (heldout, &all(heldout)))
    }

    /// A data set in memory; for each token of a part a flag says whether the token is a target.
    pub fn in_memory_counted(train: (&[u32], &[bool]), heldout: (&[u32], &[bool])) -> Self {
        let cached = |(tokens, counts): (&[u32], &[bool])| {
            let mut bits = Bits::default();
            counts.iter().for_each(|&counts| bits.push(counts));
            CachedSplit {
                tokens: tokens.len() as u64,
                token_max: tokens.iter().copied().max().unwrap_or(0),
                documents: 1,
                counted: bits.count(),
                hash: *blake3::hash(bytemuck::cast_slice(tokens)).as_bytes(),
                store: Store::Memory(tokens.to_vec(), bits),
            }
        };
        Self { train: cached(train), heldout: cached(heldout) }
    }

    /// Opens both files of `key` in a cache folder and checks every byte of them.
    ///
    /// # Errors
    /// A file is missing, or differs from what was written.
    pub fn open(folder: &Path, key: &Key) -> Result<Self, Unusable> {
        Ok(Self {
            train: CachedSplit::open(folder, key, Split::Train)?,
            heldout: CachedSplit::open(folder, key, Split::Heldout)?,
        })
    }

    /// Number of tokens of one part.
    pub fn len(&self, split: Split) -> u64 {
        self.cached(split).tokens
    }

    /// True if neither part has a token.
    pub fn is_empty(&self) -> bool {
        self.train.tokens == 0 && self.heldout.tokens == 0
    }

    /// The largest token of one part; 0 if it is empty.
    pub fn token_max(&self, split: Split) -> u32 {
        self.cached(split).token_max
    }

    /// Number of documents of one part.
    pub fn documents(&self, split: Split) -> u64 {
        self.cached(split).documents
    }

    /// Number of tokens of one part that count as targets: all tokens except in conversations.
    pub fn counted(&self, split: Split) -> u64 {
        self.cached(split).counted
    }

    /// Hash of the tokens of both parts, computed when they were written or opened.
    pub fn content_hash(&self) -> String {
        let hash = blake3::hash(&[self.train.hash, self.heldout.hash].concat());
        hash.to_hex().to_string()
    }

    /// Copies the tokens from `start` on into `out`.
    ///
    /// # Panics
    ///
    /// If the part ends before `out` is full: the caller must respect [`Self::len`].
    pub fn copy_i32(&self, split: Split, start: u64, out: &mut [i32]) {
        let tokens = self.tokens(split);
        let start = start as usize;
        for (i, out) in out.iter_mut().enumerate() {
            // Tokens are below 2^31: checked at writing.
            *out = tokens.get(start + i) as i32;
        }
    }

    /// Copies the tokens from `start` on into `out` as targets: tokens that do not count become
    /// [`IGNORED_TARGET`].
    ///
    /// # Panics
    ///
    /// As [`Self::copy_i32`].
    pub fn copy_targets(&self, split: Split, start: u64, out: &mut [i32]) {
        self.copy_i32(split, start, out);
        if self.counted(split) == self.len(split) {
            return;
        }
        for (i, out) in out.iter_mut().enumerate() {
            if !self.counts(split, start as usize + i) {
                *out = IGNORED_TARGET;
            }
        }
    }

    /// Whether a token counts as a target.
    pub fn counts(&self, split: Split, index: usize) -> bool {
        let cached = self.cached(split);
        match &cached.store {
            _ if cached.counted == cached.tokens => true,
            Store::Memory(_, counts) => counts.get(index as u64),
            Store::Mapped { map, width } => {
                let start = HEADER_BYTES + cached.tokens as usize * usize::from(*width);
                bits::is_set(&map.bytes()[start..], index)
            }
        }
    }

    /// Checks that every token is below `vocab`, the model's vocabulary size.
    ///
    /// # Errors
    ///
    /// [`DataError::TokenOutsideVocab`] names the first token out of range.
    pub fn check_vocab(&self, vocab: u64) -> Result<(), DataError> {
        let vocab_needed = u64::from(self.train.token_max.max(self.heldout.token_max)) + 1;
        if vocab_needed <= vocab {
            return Ok(());
        }
        for split in [Split::Train, Split::Heldout] {
            let tokens = self.tokens(split);
            for position in 0..tokens.len() {
                let token = tokens.get(position);
                if u64::from(token) >= vocab {
                    let position = position as u64;
                    return Err(DataError::TokenOutsideVocab {
                        token,
                        position,
                        split,
                        vocab,
                        vocab_needed,
                    });
                }
            }
        }
        Ok(())
    }

    /// The tokens of a part.
    pub fn tokens(&self, split: Split) -> Tokens<'_> {
        let cached = self.cached(split);
        // The map starts on a page and the header is a multiple of 4: the casts cannot fail.
        match &cached.store {
            Store::Memory(tokens, _) => Tokens::Native(tokens),
            Store::Mapped { map, width } => {
                let bytes = cached.tokens as usize * usize::from(*width);
                let bytes = &map.bytes()[HEADER_BYTES..HEADER_BYTES + bytes];
                match width {
                    2 => Tokens::U16(bytemuck::cast_slice(bytes)),
                    _ => Tokens::U32(bytemuck::cast_slice(bytes)),
                }
            }
        }
    }

    fn cached(&self, split: Split) -> &CachedSplit {
        match split {
            Split::Train => &self.train,
            Split::Heldout => &self.heldout,
        }
    }
}

/// Reason why a file of the cache is rebuilt.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// The file does not exist.
    #[error("not in the cache")]
    Absent,
    /// The file differs from what was written.
    #[error("damaged: {0}")]
    Damaged(String),
}

impl CachedSplit {
    fn open(folder: &Path, key: &Key, split: Split) -> Result<Self, Unusable> {
        let map =
            ReadMap::open(&file_path(folder, key, split)).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => Unusable::Absent,
                _ => Unusable::Damaged(error.to_string()),
            })?;
        let damaged = |what: &str| Err(Unusable::Damaged(what.to_owned()));
        let bytes = map.bytes();
        let Some((header, payload)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return damaged("shorter than its header");
        };
        let header = match Header::parse(header) {
            Ok(header) => header,
            Err(what) => return damaged(what),
        };
        if header.key != *key || header.split != split {
            return damaged("made for other data");
        }
        if payload.len() as u64 != header.payload_bytes() {
            return damaged("not as long as its header says");
        }
        if *blake3::hash(payload).as_bytes() != header.payload_hash {
            return damaged("tokens do not match their checksum");
        }
        let Header { tokens, token_max, documents, counted, width, .. } = header;
        let (store, hash) = (Store::Mapped { map, width }, header.payload_hash);
        Ok(Self { store, tokens, token_max, documents, counted, hash })
    }
}

/// Path of a part's file.
pub(crate) fn file_path(folder: &Path, key: &Key, split: Split) -> PathBuf {
    let part = match split {
        Split::Train => "train",
        Split::Heldout => "heldout",
    };
    let key = blake3::Hash::from_bytes(*key).to_hex();
    folder.join(format!("{}.{part}.tokens", &key[..24]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache_writer::TokenWriter;

    const KEY: Key = [7; 32];

    fn write(folder: &Path, vocab: u32, split: Split, tokens: &[u32]) {
        let mut writer = TokenWriter::new(folder, vocab).unwrap();
        writer.push(tokens).unwrap();
        writer.end_document();
        writer.finish(&KEY, split).unwrap().publish().unwrap();
    }

    fn read(tokens: Tokens<'_>) -> Vec<u32> {
        (0..tokens.len()).map(|i| tokens.get(i)).collect()
    }

    #[test]
    fn files_read_back_in_both_widths() {
        for (vocab, train, bytes) in [
            (256, vec![0, 255, 3], HEADER_BYTES + 6),
            (65_536, vec![65_535], HEADER_BYTES + 2),
            (65_537, vec![65_536, 1], HEADER_BYTES + 8),
            (1 << 31, vec![(1 << 31) - 1], HEADER_BYTES + 4),
        ] {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), vocab, Split::Train, &train);
            assert_eq!(TokenCache::open(folder.path(), &KEY).unwrap_err(), Unusable::Absent);
            write(folder.path(), vocab, Split::Heldout, &[]);
            let cache = TokenCache::open(folder.path(), &KEY).unwrap();
            assert_eq!(read(cache.tokens(Split::Train)), train);
            assert_eq!(Some(cache.token_max(Split::Train)), train.iter().copied().max());
            assert_eq!((cache.len(Split::Heldout), cache.documents(Split::Train)), (0, 1));
            let path = file_path(folder.path(), &KEY, Split::Train);
            assert_eq!(std::fs::metadata(path).unwrap().len(), bytes as u64);
            let left = std::fs::read_dir(folder.path()).unwrap().count();
            assert_eq!(left, 2, "no temporary file is left");
        }
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = TokenWriter::new(folder.path(), 256).unwrap();
        writer.push_counted(&[1, 2, 3], [true, false, true]).unwrap();
        writer.finish(&KEY, Split::Train).unwrap().publish().unwrap();
        write(folder.path(), 256, Split::Heldout, &[4]);
        let path = file_path(folder.path(), &KEY, Split::Train);
        let good = std::fs::read(&path).unwrap();
        let check = |bytes: &[u8], what: String| {
            std::fs::write(&path, bytes).unwrap();
            let opened = TokenCache::open(folder.path(), &KEY);
            assert!(matches!(opened, Err(Unusable::Damaged(_))), "{what}: {opened:?}");
        };
        for bit in 0..8 * good.len() {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            check(&bad, format!("bit {bit}"));
        }
        for length in 0..good.len() {
            check(&good[..length], format!("{length} bytes"));
        }
        check(&[good.as_slice(), b"12"].concat(), "two bytes more".to_owned());
        std::fs::write(&path, &good).unwrap();
        assert!(TokenCache::open(folder.path(), &KEY).is_ok());
    }

    #[test]
    fn tokens_that_do_not_count_are_ignored_targets() {
        let folder = tempfile::tempdir().unwrap();
        for vocab in [256, 70_000] {
            let mut writer = TokenWriter::new(folder.path(), vocab).unwrap();
            writer.push(&[1, 2, 3]).unwrap();
            writer.push_counted(&[4, 5, 6], [false, true, false]).unwrap();
            writer.push(&[7]).unwrap();
            let mut heldout = TokenWriter::new(folder.path(), vocab).unwrap();
            let train = writer.move_tail(5, &mut heldout).unwrap();
            train.finish(&KEY, Split::Train).unwrap().publish().unwrap();
            heldout.finish(&KEY, Split::Heldout).unwrap().publish().unwrap();
            let cache = TokenCache::open(folder.path(), &KEY).unwrap();
            let of = |split, start, count| {
                let (mut tokens, mut targets) = (vec![0; count], vec![0; count]);
                cache.copy_i32(split, start, &mut tokens);
                cache.copy_targets(split, start, &mut targets);
                (tokens, targets, cache.counted(split))
            };
            let ignored = IGNORED_TARGET;
            assert_eq!(of(Split::Train, 1, 4), (vec![2, 3, 4, 5], vec![2, 3, ignored, 5], 4));
            assert_eq!(of(Split::Heldout, 0, 2), (vec![6, 7], vec![ignored, 7], 1));
        }
    }

    #[test]
    fn a_file_of_the_other_part_or_of_another_key_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), 256, Split::Train, &[1, 2, 3]);
        let train = file_path(folder.path(), &KEY, Split::Train);
        let wrong = Unusable::Damaged("made for other data".to_owned());
        std::fs::copy(&train, file_path(folder.path(), &KEY, Split::Heldout)).unwrap();
        assert_eq!(TokenCache::open(folder.path(), &KEY).unwrap_err(), wrong);
        std::fs::copy(&train, file_path(folder.path(), &[8; 32], Split::Train)).unwrap();
        assert_eq!(TokenCache::open(folder.path(), &[8; 32]).unwrap_err(), wrong);
    }

    #[test]
    fn tokens_outside_the_vocabulary_are_named() {
        let cache = TokenCache::in_memory(&[1, 2, 3], &[4, 9, 12]);
        assert!(cache.check_vocab(13).is_ok());
        let check = |vocab, expected: &str| {
            assert_eq!(cache.check_vocab(vocab).unwrap_err().to_string(), expected);
        };
        check(
            12,
            "token 12 at position 2 of the held-out part is outside the model's vocabulary of \
             12\nhint: the model needs a `vocab_size` of at least 13, or the data another \
             tokenizer",
        );
        check(
            2,
            "token 2 at position 1 of the training part is outside the model's vocabulary of \
             2\nhint: the model needs a `vocab_size` of at least 13, or the data another \
             tokenizer",
        );
    }
}
