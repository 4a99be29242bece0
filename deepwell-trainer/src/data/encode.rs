//! Documents to tokens, in order, some megabytes at a time on all cores.

use std::fs::File;
use std::io;

use rayon::prelude::*;

use super::source::{Document, Format, read_full};
use super::{DataError, Progress, Stage, Tokenizer, bin};

/// A longer text is cut after a newline into pieces of at most this size, each tokenized by
/// itself. Byte-level tokens do not notice; a tokenizer that merges across newlines may give one
/// other token a megabyte.
const PIECE_BYTES: usize = 1 << 20;

/// Text that is in memory at once.
const GROUP_BYTES: usize = 8 << 20;

/// Something the encoder tells its sink, in document order.
pub(crate) enum Encoded<'a> {
    /// The next tokens of the current document.
    Tokens(&'a [u32]),
    /// The current document is complete.
    EndOfDocument,
}

/// A stretch of one document.
pub(crate) struct Piece<'a> {
    pub(crate) document: &'a Document,
    pub(crate) data: Vec<u8>,
    pub(crate) ends_document: bool,
}

/// Encodes `documents` in order. `bytes_done` and `bytes_total` are for the progress.
///
/// Every file is hashed again while it is read: [`DataError::Changed`] if it is not what the scan
/// saw.
pub(crate) fn encode(
    documents: &[&Document],
    tokenizer: &Tokenizer,
    bytes_done: &mut u64,
    bytes_total: u64,
    progress: &mut dyn FnMut(Progress),
    sink: &mut dyn FnMut(Encoded<'_>) -> Result<(), DataError>,
) -> Result<(), DataError> {
    for_each_group(documents, &mut |group| {
        let tokens: Vec<Result<Vec<u32>, DataError>> = group
            .par_iter()
            .map(|piece| match piece.document.format {
                Format::Text => tokenizer.encode(&piece.document.name, &piece.data),
                Format::Tokens(header) => {
                    let tokens = bin::decode(&piece.data, header.width);
                    match tokens.iter().find(|&&token| token > i32::MAX as u32) {
                        None => Ok(tokens),
                        Some(&token) => {
                            Err(DataError::BinToken { path: piece.document.path.clone(), token })
                        }
                    }
                }
            })
            .collect();
        for (piece, tokens) in group.iter().zip(tokens) {
            sink(Encoded::Tokens(&tokens?))?;
            if piece.ends_document {
                sink(Encoded::EndOfDocument)?;
            }
            *bytes_done += piece.data.len() as u64;
        }
        progress(Progress { stage: Stage::Tokenize, bytes_done: *bytes_done, bytes_total });
        Ok(())
    })
}

/// Reads `documents` in order and hands them out in groups of pieces, some megabytes at a time, for
/// work on all cores. The last group may be empty.
pub(crate) fn for_each_group<'a>(
    documents: &[&'a Document],
    work: &mut dyn FnMut(&[Piece<'a>]) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut group: Vec<Piece<'a>> = Vec::new();
    let mut group_bytes = 0;
    for &document in documents {
        for_each_piece(document, |data, ends_document| {
            group_bytes += data.len();
            group.push(Piece { document, data, ends_document });
            if group_bytes >= GROUP_BYTES {
                work(&group)?;
                group_bytes = 0;
                group.clear();
            }
            Ok(())
        })?;
    }
    work(&group)
}

/// Reads one document piece by piece; the flag marks its last piece.
fn for_each_piece(
    document: &Document,
    mut f: impl FnMut(Vec<u8>, bool) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let fail = |source: io::Error| DataError::Read { path: document.path.clone(), source };
    let changed = || DataError::Changed { path: document.path.clone() };
    let mut file = File::open(&document.path).map_err(fail)?;
    let mut hasher = blake3::Hasher::new();
    let mut bytes_left = document.bytes;
    if let Format::Tokens(_) = document.format {
        let mut header = [0; bin::HEADER_BYTES as usize];
        read_full(&mut file, &mut header).map_err(fail)?;
        hasher.update(&header);
    }
    let mut carry: Vec<u8> = Vec::new();
    while bytes_left > 0 {
        let mut data = carry;
        let start = data.len();
        let wanted = PIECE_BYTES.min(start + bytes_left as usize);
        data.resize(wanted, 0);
        if read_full(&mut file, &mut data[start..]).map_err(fail)? < wanted - start {
            return Err(changed());
        }
        hasher.update(&data[start..]);
        bytes_left -= (wanted - start) as u64;
        let is_last = bytes_left == 0;
        if is_last {
            // Nothing may be handed out from a file that grew or was rewritten.
            let more = read_full(&mut file, &mut [0]).map_err(fail)?;
            if more > 0 || hasher.finalize() != document.hash {
                return Err(changed());
            }
        }
        let cut = match document.format {
            Format::Text if !is_last => cut_after_newline(&data),
            _ => data.len(),
        };
        carry = data.split_off(cut);
        f(data, is_last)?;
    }
    Ok(())
}

/// Where to cut a full piece: after its last newline, else before its last character.
fn cut_after_newline(data: &[u8]) -> usize {
    if let Some(newline) = data.iter().rposition(|&byte| byte == b'\n') {
        return newline + 1;
    }
    let is_start = |byte: &u8| byte & 0xc0 != 0x80;
    match data.iter().rposition(is_start) {
        Some(start) if start > 0 && data.len() - start <= 4 => start,
        _ => data.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(path: &std::path::Path, text: &[u8]) -> Document {
        std::fs::write(path, text).unwrap();
        Document {
            name: "a".to_owned(),
            split_key: "a".to_owned(),
            path: path.to_owned(),
            format: Format::Text,
            bytes: text.len() as u64,
            hash: blake3::hash(text),
        }
    }

    #[test]
    fn cuts() {
        let check = |data: &[u8], expected| assert_eq!(cut_after_newline(data), expected);
        check(b"ab\ncd\nef", 6);
        check(b"abcd", 3);
        check("ab\u{20ac}".as_bytes(), 2);
        check("ab\u{20ac}".as_bytes().split_last().unwrap().1, 2);
        check(&[0x80; 9], 9);
        check(b"a", 1);
    }

    #[test]
    fn pieces_put_together_are_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        // Lines of changing length, then a long stretch without a newline in 3-byte characters.
        let mut text: Vec<u8> = (0..90_000).flat_map(|i| vec![b'x'; i % 37 + 1]).collect();
        for end in (0..text.len()).step_by(113) {
            text[end] = b'\n';
        }
        text.extend("\u{20ac}".repeat(PIECE_BYTES / 2).as_bytes());
        let document = document(&path, &text);
        let mut pieces = Vec::new();
        for_each_piece(&document, |data, is_last| {
            assert!(data.len() <= PIECE_BYTES);
            assert!(str::from_utf8(&data).is_ok());
            pieces.push((data, is_last));
            Ok(())
        })
        .unwrap();
        assert!(pieces.len() > 3, "{}", pieces.len());
        assert!(pieces.iter().rev().skip(1).all(|(_, is_last)| !is_last));
        assert!(pieces.last().unwrap().1);
        let joined: Vec<u8> = pieces.into_iter().flat_map(|(data, _)| data).collect();
        assert!(joined == text);

        let mut tokens = 0;
        let mut ends = 0;
        let mut bytes_done = 0;
        encode(
            &[&document, &document],
            &Tokenizer::bytes(),
            &mut bytes_done,
            2 * document.bytes,
            &mut |_| {},
            &mut |encoded| {
                match encoded {
                    Encoded::Tokens(more) => tokens += more.len(),
                    Encoded::EndOfDocument => ends += 1,
                }
                Ok(())
            },
        )
        .unwrap();
        assert_eq!((tokens, ends, bytes_done), (2 * text.len(), 2, 2 * document.bytes));
    }

    #[test]
    fn a_file_that_changed_since_the_scan_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        for changed in ["deep wall", "deep wel", "deep wells"] {
            let document = document(&path, b"deep well");
            std::fs::write(&path, changed).unwrap();
            let error = for_each_piece(&document, |_, _| Ok(())).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "`{}` changed while it was read\nhint: start again when nobody writes to it",
                    path.display()
                )
            );
        }
    }
}
