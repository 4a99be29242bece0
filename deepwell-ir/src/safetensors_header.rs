//! The header of a safetensors file: eight bytes of length, then JSON, then the tensors.
//!
//! The `safetensors` crate parses the JSON. It checks that sizes fit shapes and types and that the
//! tensors are contiguous from the first byte on, so that a few bytes cannot describe a large
//! model. This module checks the rest: the header lies within the file, and the last tensor ends at
//! the end of the file. No tensor is read.

use std::fs::File;
use std::io::Read;

use ::safetensors::tensor::Metadata;
use thiserror::Error;

/// Longest accepted header in bytes: the limit of the safetensors format.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes of the length before the header, a 64-bit number.
const LENGTH_BYTES: u64 = 8;

/// Contents of a file's header.
#[derive(Debug)]
pub struct SafetensorsHeader {
    /// The tensors, with offsets relative to [`SafetensorsHeader::data_begin`].
    pub metadata: Metadata,
    /// File offset of the first tensor.
    pub data_begin: u64,
}

/// Why a file is not a complete safetensors file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The file is too short for the length of the header.
    #[error("expected a safetensors file, got {got} bytes")]
    TooShort {
        /// Bytes of the file.
        got: u64,
    },
    /// The header would be longer than the file or than the format's limit.
    #[error("expected a safetensors header, got a length of {got} bytes in a file of {file_bytes}")]
    HeaderLength {
        /// Length of the header that the file states.
        got: u64,
        /// Bytes of the file.
        file_bytes: u64,
    },
    /// The header is not JSON of the expected form, or its tensors are not contiguous.
    #[error("broken safetensors header: {0}")]
    Header(#[from] serde_json::Error),
    /// The tensors end before or after the end of the file.
    #[error("expected {expected} bytes from its header, got {got}")]
    Length {
        /// Bytes that the header calls for.
        expected: u64,
        /// Bytes of the file.
        got: u64,
    },
}

impl SafetensorsHeader {
    /// Reads and checks a header from the file's current position, which must be the beginning.
    ///
    /// # Errors
    /// A file that cannot be read, is not a safetensors file, is truncated or is too long.
    pub fn read(mut file: &File) -> Result<SafetensorsHeader, SafetensorsError> {
        let file_bytes = file.metadata()?.len();
        if file_bytes < LENGTH_BYTES {
            return Err(SafetensorsError::TooShort { got: file_bytes });
        }
        let mut length = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut length)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > HEADER_BYTES_MAX || header_bytes > file_bytes - LENGTH_BYTES {
            return Err(SafetensorsError::HeaderLength { got: header_bytes, file_bytes });
        }
        let mut json = vec![0; header_bytes as usize];
        file.read_exact(&mut json)?;
        let metadata: Metadata = serde_json::from_slice(&json)?;
        let data_begin = LENGTH_BYTES + header_bytes;
        let expected = data_begin.saturating_add(metadata.data_len() as u64);
        if expected != file_bytes {
            return Err(SafetensorsError::Length { expected, got: file_bytes });
        }
        Ok(SafetensorsHeader { metadata, data_begin })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use serde_json::{Value, json};

    use super::*;

    fn read(bytes: &[u8]) -> Result<usize, String> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.rewind().unwrap();
        let header = SafetensorsHeader::read(&file).map_err(|error| error.to_string())?;
        Ok(header.metadata.tensors().len())
    }

    fn file(header: &str, data_bytes: usize) -> Vec<u8> {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        file.resize(file.len() + data_bytes, 0);
        file
    }

    fn check(bytes: &[u8], expected: Result<usize, &str>) {
        match (read(bytes), expected) {
            (Ok(got), Ok(expected)) => assert_eq!(got, expected),
            (Err(error), Err(words)) => assert!(error.contains(words), "`{words}` in `{error}`"),
            (got, expected) => panic!("expected {expected:?}, got {got:?}"),
        }
    }

    /// Overlaps and gaps between tensors would let a small file describe a large model.
    #[test]
    fn tensors_lie_one_behind_the_other() {
        let entry = |begin: u64, end: u64| {
            let (shape, offsets) = ([end - begin], [begin, end]);
            json!({ "dtype": "U8", "shape": shape, "data_offsets": offsets })
        };
        for (entries, bytes, expected) in [
            ([entry(0, 4), entry(4, 6)], 6, Ok(2)),
            ([entry(2, 2), entry(0, 2)], 2, Ok(2)),
            ([entry(0, 4), entry(0, 4)], 4, Err("broken safetensors header: invalid offset")),
            ([entry(0, 4), entry(5, 6)], 6, Err("broken safetensors header: invalid offset")),
            ([entry(1, 4), entry(4, 6)], 6, Err("broken safetensors header: invalid offset")),
            ([entry(0, 4), entry(4, 6)], 7, Err("bytes from its header, got")),
            ([entry(0, 4), entry(4, 6)], 5, Err("bytes from its header, got")),
        ] {
            let [a, b] = &entries;
            check(&file(&json!({ "a": a, "b": b }).to_string(), bytes), expected);
        }
    }

    #[test]
    fn headers_that_say_more_than_there_is() {
        let tensor = |dtype: &str, shape: Value, offsets: [u64; 2]| {
            json!({ "t": { "dtype": dtype, "shape": shape, "data_offsets": offsets } }).to_string()
        };
        let max = u64::MAX;
        for (header, bytes, expected) in [
            (tensor("F32", json!([2, 3]), [0, 24]), 24, Ok(1)),
            (tensor("F32", json!([2, 3]), [0, 20]), 20, Err("broken safetensors header")),
            (tensor("F32", json!([max, max]), [0, 4]), 4, Err("broken safetensors header")),
            (tensor("F33", json!([1]), [0, 4]), 4, Err("unknown variant `F33`")),
            (tensor("U8", json!([4]), [4, 0]), 4, Err("broken safetensors header")),
            (tensor("U8", json!([0]), [max, max]), 0, Err("broken safetensors header")),
            ("[]".to_string(), 0, Err("broken safetensors header")),
            ("{".to_string(), 0, Err("broken safetensors header")),
            ("{}".to_string(), 0, Ok(0)),
        ] {
            check(&file(&header, bytes), expected);
        }
        check(b"", Err("expected a safetensors file, got 0 bytes"));
        check(&[1; 7], Err("expected a safetensors file, got 7 bytes"));
        check(
            &u64::MAX.to_le_bytes(),
            Err("a length of 18446744073709551615 bytes in a file of 8"),
        );
        check(&100_000_001_u64.to_le_bytes(), Err("a length of 100000001 bytes in a file of 8"));
        check(&file("{}", 0)[..9], Err("a length of 2 bytes in a file of 9"));
    }
}
