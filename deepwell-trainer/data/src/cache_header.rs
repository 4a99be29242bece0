//! The header of a token file.
//!
//! ```text
//! byte 0    magic "DWTOKENS"
//!      8    u32  format version
//!     12    u32  bytes a token: 2 or 4
//!     16    u64  number of tokens
//!     24    u32  largest token
//!     28    u32  part: 0 training, 1 held-out
//!     32    key: blake3 of everything that the tokens depend on
//!     64    blake3 of what follows the header
//!     96    u64  number of documents
//!    104    u64  number of tokens that count as targets
//!    112    zeros
//!    124    u32  CRC-32C of bytes 0 to 124
//!    128    tokens, little endian; where not all count, a bit for each that says whether it does
//! ```

use super::Split;

/// Names a data set: blake3 of content, tokenizer, split and format version.
pub type Key = [u8; 32];

/// Raised whenever the same input would give different files.
pub(crate) const FORMAT_VERSION: u32 = 2;

const MAGIC: [u8; 8] = *b"DWTOKENS";
/// Bytes before the tokens.
pub(crate) const HEADER_BYTES: usize = 128;
const CRC_AT: usize = 124;

const _: () = assert!(HEADER_BYTES.is_multiple_of(4) && CRC_AT + 4 == HEADER_BYTES);

/// Contents of the header; see the format above.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) width: u8,
    pub(crate) tokens: u64,
    pub(crate) token_max: u32,
    pub(crate) split: Split,
    pub(crate) key: Key,
    pub(crate) payload_hash: [u8; 32],
    pub(crate) documents: u64,
    pub(crate) counted: u64,
}

impl Header {
    /// Number of bytes after the header.
    pub(crate) fn payload_bytes(&self) -> u64 {
        let bits = if self.counted < self.tokens { self.tokens.div_ceil(8) } else { 0 };
        self.tokens.saturating_mul(u64::from(self.width)).saturating_add(bits)
    }

    pub(crate) fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &MAGIC);
        put(8, &FORMAT_VERSION.to_le_bytes());
        put(12, &u32::from(self.width).to_le_bytes());
        put(16, &self.tokens.to_le_bytes());
        put(24, &self.token_max.to_le_bytes());
        put(28, &u32::from(self.split == Split::Heldout).to_le_bytes());
        put(32, &self.key);
        put(64, &self.payload_hash);
        put(96, &self.documents.to_le_bytes());
        put(104, &self.counted.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, &'static str> {
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let hash_at = |at: usize| {
            let mut hash = [0; 32];
            hash.copy_from_slice(&bytes[at..at + 32]);
            hash
        };
        if bytes[..8] != MAGIC {
            return Err("not a token file");
        }
        if u32_at(CRC_AT) != crc32c::crc32c(&bytes[..CRC_AT]) {
            return Err("header does not match its checksum");
        }
        if u32_at(8) != FORMAT_VERSION {
            return Err("of another format version");
        }
        let width = match u32_at(12) {
            2 => 2,
            4 => 4,
            _ => return Err("of an unknown token width"),
        };
        let split = match u32_at(28) {
            0 => Split::Train,
            1 => Split::Heldout,
            _ => return Err("of an unknown part"),
        };
        Ok(Self {
            width,
            tokens: u64_at(16),
            token_max: u32_at(24),
            split,
            key: hash_at(32),
            payload_hash: hash_at(64),
            documents: u64_at(96),
            counted: u64_at(104),
        })
    }
}
