//! Reads a file once to determine its format, bytes of text, and hash.

use super::DataError;
use super::bin;
use super::compressed::{Compression, Content};
use super::container;
use super::records::{self, Fields, Record, RecordFormat};
use super::skip::SkipReason;
use super::source::{Candidate, Document, Format, Found, read_full};

/// Scans a file. A file without text is skipped if it was found in a folder, and an error if it was
/// given by name.
pub(crate) fn look_at(
    candidate: Candidate,
    needs_utf8: bool,
    fields: &Fields,
) -> Result<Result<Document, SkipReason>, DataError> {
    let Candidate { name, split_key, path, found, is_heldout, .. } = candidate;
    let fail = |source| DataError::Read { path: path.clone(), source };
    let refuse = |reason, what: String, hint: &str| match found {
        Found::Named => Err(DataError::NotText { path: path.clone(), what, hint: hint.to_owned() }),
        Found::Matched | Found::InFolder => Ok(Err(reason)),
    };
    let (mut content, compression) = Content::open(&path).map_err(fail)?;
    let mut block = vec![0; 1 << 20];
    let mut count = read_full(&mut content, &mut block).map_err(fail)?;
    let start = &block[..count];
    let lower = name.to_lowercase();
    let stem = compression.stem(&lower);
    let document = Document {
        name,
        split_key,
        path: path.clone(),
        format: Format::Text,
        compression,
        records: 1,
        chats: 0,
        is_heldout,
        bytes: 0,
        hash: blake3::hash(b""),
    };

    // A folder of text may contain other `.bin` files: treat them like any file.
    let is_plain = compression == Compression::None;
    let is_bin = is_plain && path.extension().is_some_and(|ending| ending == "bin");
    let is_tokens = is_bin && (found != Found::InFolder || bin::has_magic(start));
    if count > 0 && is_tokens {
        let bytes_file = std::fs::metadata(&path).map_err(fail)?.len();
        let header = bin::parse_header(&path, start, bytes_file)?;
        let hash = content.hash().map_err(fail)?;
        if header.tokens == 0 {
            return Ok(Err(SkipReason::Empty));
        }
        let bytes = header.tokens * u64::from(header.width);
        return Ok(Ok(Document { format: Format::Tokens(header), bytes, hash, ..document }));
    }
    // In a folder, a `.json` file is one text among many; data sets of records are given by name.
    let is_records = |format: &RecordFormat| {
        count > 0 && (*format != RecordFormat::Json || found != Found::InFolder)
    };
    if let Some(format) = RecordFormat::of(stem, start).filter(is_records) {
        if format == RecordFormat::Parquet && !is_plain {
            let what = "Parquet in a compressed file".to_owned();
            return refuse(SkipReason::Binary, what, "Parquet is compressed inside: decompress it");
        }
        return look_at_records(Document { format: Format::Records(format), ..document }, fields);
    }
    if let Some((format, hint)) = container::known(stem, start) {
        return refuse(SkipReason::Container(format), format.to_owned(), hint);
    }
    let mut utf8 = Utf8Check::default();
    let mut bytes = 0;
    while count > 0 {
        let data = &block[..count];
        if let Some(zero_offset) = data.iter().position(|&byte| byte == 0) {
            let what =
                format!("not text: it holds a byte 0 at offset {}", bytes + zero_offset as u64);
            return refuse(SkipReason::Binary, what, TEXT_HINT);
        }
        if needs_utf8 && !utf8.push(data) {
            break;
        }
        bytes += count as u64;
        count = read_full(&mut content, &mut block).map_err(fail)?;
    }
    if needs_utf8 && (count > 0 || !utf8.is_complete()) {
        let what =
            format!("not UTF-8, which the tokenizer needs: see the byte at offset {}", utf8.done);
        return refuse(SkipReason::NotUtf8, what, "`iconv -t utf-8` converts a text");
    }
    if bytes == 0 {
        return Ok(Err(SkipReason::Empty));
    }
    Ok(Ok(Document { bytes, hash: content.hash().map_err(fail)?, ..document }))
}

const TEXT_HINT: &str = "text, `.jsonl`, `.parquet` and token files (`.bin`) are read";

fn look_at_records(
    document: Document,
    fields: &Fields,
) -> Result<Result<Document, SkipReason>, DataError> {
    let Format::Records(format) = document.format else { return Ok(Ok(document)) };
    let (mut records, mut chats, mut bytes) = (0, 0, 0);
    let mut count = |record: Record| {
        records += 1;
        chats += u64::from(matches!(record, Record::Chat(_)));
        bytes += record.bytes();
        Ok(())
    };
    let hash = records::for_each(&document.path, document.compression, format, fields, &mut count)?;
    match records {
        0 => Ok(Err(SkipReason::Empty)),
        _ => Ok(Ok(Document { records, chats, bytes, hash, ..document })),
    }
}

/// UTF-8 validation of a text in blocks: keeps the 0 to 3 bytes of a character cut by a block
/// boundary.
#[derive(Default)]
struct Utf8Check {
    tail: Vec<u8>,
    /// Number of validated bytes, without `tail`.
    done: u64,
}

impl Utf8Check {
    fn push(&mut self, mut data: &[u8]) -> bool {
        while !self.tail.is_empty() && !data.is_empty() {
            self.tail.push(data[0]);
            data = &data[1..];
            match str::from_utf8(&self.tail) {
                Ok(_) => {
                    self.done += self.tail.len() as u64;
                    self.tail.clear();
                }
                Err(error) if error.error_len().is_some() => return false,
                Err(_) => {}
            }
        }
        match str::from_utf8(data) {
            Ok(_) => {
                self.done += data.len() as u64;
                true
            }
            Err(error) if error.error_len().is_some() => {
                self.done += error.valid_up_to() as u64;
                false
            }
            Err(error) => {
                self.done += error.valid_up_to() as u64;
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
                    let place = str::from_utf8(text).map_or_else(|e| e.valid_up_to(), str::len);
                    assert_eq!(check.done, place as u64, "{text:?} cut at {first} and {second}");
                }
            }
        }
    }
}
