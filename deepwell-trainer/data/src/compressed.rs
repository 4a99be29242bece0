//! Files read through a decompressor, with the hash of the bytes on disk.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

/// Compression of a file, detected from its first bytes rather than its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// Compression of a file with this start.
    pub(crate) fn of(start: &[u8]) -> Compression {
        match start {
            [0x1f, 0x8b, 8, ..] => Compression::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Compression::Zstd,
            _ => Compression::None,
        }
    }

    /// The name without the suffix of the compression.
    pub(crate) fn stem(self, name: &str) -> &str {
        let endings: &[&str] = match self {
            Compression::None => &[],
            Compression::Gzip => &[".gz", ".gzip"],
            Compression::Zstd => &[".zst", ".zstd"],
        };
        endings.iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(name)
    }
}

/// A file under its decompressor.
pub(crate) enum Content {
    Plain(Box<Hashed>),
    Gzip(Box<MultiGzDecoder<BufReader<Hashed>>>),
    Zstd(Box<zstd::Decoder<'static, BufReader<Hashed>>>),
}

/// A file hashed during reading.
pub(crate) struct Hashed {
    file: File,
    hasher: blake3::Hasher,
}

impl Content {
    /// Opens a file and looks at its first bytes.
    pub(crate) fn open(path: &Path) -> io::Result<(Content, Compression)> {
        let mut start = Vec::new();
        File::open(path)?.take(4).read_to_end(&mut start)?;
        let compression = Compression::of(&start);
        Ok((Content::open_as(path, compression)?, compression))
    }

    /// Opens a file of known compression.
    pub(crate) fn open_as(path: &Path, compression: Compression) -> io::Result<Content> {
        let hashed = Hashed { file: File::open(path)?, hasher: blake3::Hasher::new() };
        let buffered = |hashed| BufReader::with_capacity(1 << 18, hashed);
        Ok(match compression {
            Compression::None => Content::Plain(Box::new(hashed)),
            Compression::Gzip => Content::Gzip(Box::new(MultiGzDecoder::new(buffered(hashed)))),
            Compression::Zstd => {
                Content::Zstd(Box::new(zstd::Decoder::with_buffer(buffered(hashed))?))
            }
        })
    }

    /// Reads the rest of the file, and returns the hash of all bytes on disk.
    pub(crate) fn hash(self) -> io::Result<blake3::Hash> {
        let mut hashed = match self {
            Content::Plain(hashed) => *hashed,
            Content::Gzip(decoder) => decoder.into_inner().into_inner(),
            Content::Zstd(decoder) => decoder.finish().into_inner(),
        };
        io::copy(&mut hashed, &mut io::sink())?;
        Ok(hashed.hasher.finalize())
    }
}

impl Read for Content {
    fn read(&mut self, block: &mut [u8]) -> io::Result<usize> {
        match self {
            Content::Plain(hashed) => hashed.read(block),
            Content::Gzip(decoder) => decoder.read(block),
            Content::Zstd(decoder) => decoder.read(block),
        }
    }
}

impl Read for Hashed {
    fn read(&mut self, block: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(block)?;
        self.hasher.update(&block[..count]);
        Ok(count)
    }
}
