//! Token files in the format of llm.c and modded-nanogpt.
//!
//! ```text
//! byte 0     256 x i32, little endian: [0] magic, [1] version, [2] number of tokens, rest 0
//! byte 1024  tokens, little endian
//!
//! magic     version  tokens
//! 20240520  1        u16, of GPT-2
//! 20240801  7        u32, of Llama 3; version 1 is read as well
//! ```
//!
//! The constants are `HEADERS_INFO` of `dev/data/data_common.py` in karpathy/llm.c.

use std::path::Path;

use super::DataError;

/// Bytes of the header.
pub const HEADER_BYTES: u64 = 1024;

const MAGIC_U16: i32 = 20_240_520;
const MAGIC_U32: i32 = 20_240_801;

/// Magic numbers of llm.c's other file types.
const OTHERS: [(i32, &str); 4] = [
    (20_240_326, "this is a model of llm.c"),
    (20_240_327, "this is a state of llm.c's optimizer"),
    (20_240_328, "this is a tokenizer of llm.c"),
    (20_240_522, "this is a set of questions of llm.c, such as HellaSwag"),
];

/// Hint for a file of unknown type.
const NO_HEADER: &str = "nanoGPT's files have no header: write 256 i32 before the tokens, which \
     are 20240520, 1, the number of tokens, and zeros; text files must not end in `.bin`";

/// Text of the versions supported for a magic number.
pub(crate) fn versions(magic: i32) -> &'static str {
    if magic == MAGIC_U32 { "7 or 1" } else { "1" }
}

/// Contents of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BinHeader {
    /// Bytes a token: 2 or 4.
    pub width: u8,
    /// Tokens after the header.
    pub tokens: u64,
}

/// Returns whether a file with this start is a token file.
pub fn has_magic(start: &[u8]) -> bool {
    start
        .first_chunk::<4>()
        .is_some_and(|magic| [MAGIC_U16, MAGIC_U32].contains(&i32::from_le_bytes(*magic)))
}

/// Reads and checks the header; `start` is the start of the file, `bytes_file` its length in bytes.
/// Errors name `path`.
///
/// # Errors
/// [`DataError::BinHeader`], [`DataError::BinMagic`], [`DataError::BinVersion`] and
/// [`DataError::BinLength`].
pub fn parse_header(path: &Path, start: &[u8], bytes_file: u64) -> Result<BinHeader, DataError> {
    let path = path.to_owned();
    if start.len() < HEADER_BYTES as usize {
        return Err(DataError::BinHeader { path, found: bytes_file });
    }
    let field = |i: usize| {
        i32::from_le_bytes([start[4 * i], start[4 * i + 1], start[4 * i + 2], start[4 * i + 3]])
    };
    let width: u8 = match field(0) {
        MAGIC_U16 => 2,
        MAGIC_U32 => 4,
        magic => {
            let other = OTHERS.iter().find(|(other, _)| *other == magic);
            let hint = other.map_or(NO_HEADER, |(_, hint)| hint);
            return Err(DataError::BinMagic { path, magic, hint });
        }
    };
    let (magic, version) = (field(0), field(1));
    if version != 1 && (magic, version) != (MAGIC_U32, 7) {
        return Err(DataError::BinVersion { path, magic, version });
    }
    // Read as unsigned, so that files of 2^31 to 2^32 tokens can be read too.
    let tokens = u64::from(field(2) as u32);
    let expected = HEADER_BYTES + tokens * u64::from(width);
    if bytes_file != expected {
        return Err(DataError::BinLength {
            path,
            tokens,
            width: u64::from(width),
            expected,
            found: bytes_file,
        });
    }
    Ok(BinHeader { width, tokens })
}

/// Decodes a block of tokens whose length is a multiple of `width`.
pub fn decode(block: &[u8], width: u8) -> Vec<u32> {
    match width {
        2 => block
            .chunks_exact(2)
            .map(|bytes| u32::from(u16::from_le_bytes([bytes[0], bytes[1]])))
            .collect(),
        _ => block
            .chunks_exact(4)
            .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A token file in memory.
    pub(crate) fn build(magic: i32, version: i32, tokens: i32, body: &[u8]) -> Vec<u8> {
        let mut file = vec![0; HEADER_BYTES as usize];
        for (i, value) in [magic, version, tokens].into_iter().enumerate() {
            file[4 * i..4 * i + 4].copy_from_slice(&value.to_le_bytes());
        }
        file.extend_from_slice(body);
        file
    }

    #[test]
    fn headers() {
        let check = |file: &[u8], expected: Result<(u8, u64), &str>| {
            let parsed = parse_header(Path::new("a.bin"), file, file.len() as u64);
            let parsed = parsed.map(|header| (header.width, header.tokens));
            assert_eq!(parsed.map_err(|error| error.to_string()), expected.map_err(str::to_owned));
        };
        check(&build(20_240_520, 1, 2, &[1, 0, 2, 0]), Ok((2, 2)));
        check(&build(20_240_801, 7, 1, &[1, 0, 2, 0]), Ok((4, 1)));
        check(&build(20_240_801, 1, 1, &[1, 0, 2, 0]), Ok((4, 1)));
        check(
            b"Once upon a time",
            Err("token file `a.bin`: expected a header of 1024 bytes, got a file of 16 bytes"),
        );
        check(
            &build(20_240_521, 1, 2, &[1, 0, 2, 0]),
            Err("token file `a.bin`: expected magic number 20240520 (u16 tokens) or 20240801 \
                 (u32 tokens), got 20240521\nhint: nanoGPT's files have no header: write 256 i32 \
                 before the tokens, which are 20240520, 1, the number of tokens, and zeros; text \
                 files must not end in `.bin`"),
        );
        check(
            &build(20_240_522, 1, 2, &[1, 0, 2, 0]),
            Err("token file `a.bin`: expected magic number 20240520 (u16 tokens) or 20240801 \
                 (u32 tokens), got 20240522\nhint: this is a set of questions of llm.c, such as \
                 HellaSwag"),
        );
        check(
            &build(20_240_520, 7, 2, &[1, 0, 2, 0]),
            Err("token file `a.bin`: expected version 1 with magic number 20240520, got 7"),
        );
        check(
            &build(20_240_801, 2, 1, &[1, 0, 2, 0]),
            Err("token file `a.bin`: expected version 7 or 1 with magic number 20240801, got 2"),
        );
        check(
            &build(20_240_520, 1, 3, &[1, 0, 2, 0]),
            Err("token file `a.bin`: the header says 3 tokens of 2 bytes, so 1030 bytes in all, \
                 but the file has 1028\nhint: the file is cut short or damaged; write it again"),
        );
        check(
            &build(20_240_801, 1, 0, &[7]),
            Err("token file `a.bin`: the header says 0 tokens of 4 bytes, so 1024 bytes in all, \
                 but the file has 1025\nhint: the file is cut short or damaged; write it again"),
        );
    }

    #[test]
    fn bodies() {
        assert_eq!(decode(&[1, 2, 0xff, 0xff], 2), [0x0201, 0xffff]);
        assert_eq!(decode(&[1, 2, 3, 4], 4), [0x0403_0201]);
    }
}
