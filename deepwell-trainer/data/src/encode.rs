//! Documents to tokens, in order, some megabytes at a time on all cores.

use std::borrow::Cow;
use std::io;

use rayon::prelude::*;

use super::chat::{Chat, Encoded as Tokens};
use super::compressed::Content;
use super::cuts::Cuts;
use super::records::{self, Conversation, Fields, Record, Turn};
use super::source::{Document, Format, read_full};
use super::{DataError, Progress, Stage, Tokenizer, bin};

/// Approximate size of a piece. A longer text is cut into pieces, each tokenized by itself, where
/// [`Cuts`] proves that this does not change the tokens. Without such a cut a piece is longer.
const PIECE_BYTES: usize = 1 << 20;

/// Bytes of text in memory at once, unless a piece is longer.
const GROUP_BYTES: usize = 8 << 20;

/// An event from the encoder to its sink, in document order.
pub(crate) enum Encoded<'a> {
    /// The next tokens of the current document.
    Tokens(&'a Tokens),
    /// The current document is complete; `counts` says whether its end is a target.
    EndOfDocument { counts: bool },
}

/// A stretch of one document.
pub(crate) struct Segment<'a> {
    pub(crate) document: &'a Document,
    /// Text, or the tokens of a token file.
    pub(crate) data: Vec<u8>,
    /// A conversation for the chat template, in place of text.
    pub(crate) chat: Option<Box<Conversation>>,
    pub(crate) ends_document: bool,
}

/// Encodes documents as tokens.
#[derive(Clone, Copy)]
pub(crate) struct Encoder<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    /// Only for corpora with conversations.
    pub(crate) chat: Option<&'a Chat>,
    pub(crate) fields: &'a Fields,
}

impl Encoder<'_> {
    /// Encodes `documents` in order. `bytes_done` and `bytes_total` are for the progress.
    ///
    /// Every file is hashed again while reading: [`DataError::Changed`] if it has changed since the
    /// scan.
    pub(crate) fn encode(
        self,
        documents: &[&Document],
        bytes_done: &mut u64,
        bytes_total: u64,
        progress: &mut dyn FnMut(Progress),
        sink: &mut dyn FnMut(Encoded<'_>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        for_each_group(documents, self.tokenizer.cuts(), self.fields, &mut |group| {
            let tokens: Vec<Result<Tokens, DataError>> =
                group.par_iter().map(|segment| self.tokens(segment)).collect();
            for (segment, tokens) in group.iter().zip(tokens) {
                sink(Encoded::Tokens(&tokens?))?;
                if segment.ends_document {
                    sink(Encoded::EndOfDocument { counts: segment.chat.is_none() })?;
                }
                *bytes_done += segment.bytes() as u64;
            }
            progress(Progress { stage: Stage::Tokenize, bytes_done: *bytes_done, bytes_total });
            Ok(())
        })
    }

    fn tokens(self, segment: &Segment<'_>) -> Result<Tokens, DataError> {
        let path = || segment.document.path.clone();
        if let Some(conversation) = &segment.chat {
            let Some(chat) = self.chat else { return Err(DataError::Changed { path: path() }) };
            return chat.encode(&segment.document.path, conversation);
        }
        let tokens = match segment.document.format {
            Format::Text | Format::Records(_) => {
                self.tokenizer.encode(&segment.document.name, &segment.data)?
            }
            Format::Tokens(header) => {
                let tokens = bin::decode(&segment.data, header.width);
                if let Some(&token) = tokens.iter().find(|&&token| token > i32::MAX as u32) {
                    return Err(DataError::BinToken { path: path(), token });
                }
                tokens
            }
        };
        Ok(Tokens { tokens, counts: None })
    }
}

impl Segment<'_> {
    /// The text; for a conversation the concatenated texts of its messages.
    pub(crate) fn text(&self) -> Cow<'_, [u8]> {
        match &self.chat {
            None => Cow::Borrowed(&self.data),
            Some(chat) => {
                Cow::Owned(chat.turns.iter().map(Turn::text).collect::<String>().into_bytes())
            }
        }
    }

    /// Bytes of text.
    fn bytes(&self) -> usize {
        match &self.chat {
            None => self.data.len(),
            Some(chat) => chat.turns.iter().map(|turn| turn.bytes() as usize).sum(),
        }
    }
}

/// Reads `documents` in order and passes on groups of pieces, some megabytes at a time, for work on
/// all cores. The last group may be empty.
pub(crate) fn for_each_group<'a>(
    documents: &[&'a Document],
    cuts: Cuts,
    fields: &Fields,
    work: &mut dyn FnMut(&[Segment<'a>]) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut group: Vec<Segment<'a>> = Vec::new();
    let mut group_bytes = 0;
    for &document in documents {
        for_each_piece(document, cuts, fields, &mut |segment| {
            // A constant for the overhead of a record.
            group_bytes += segment.bytes() + 64;
            group.push(segment);
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

/// Reads one file in pieces.
fn for_each_piece<'a>(
    document: &'a Document,
    cuts: Cuts,
    fields: &Fields,
    work: &mut dyn FnMut(Segment<'a>) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let Format::Records(format) = document.format else {
        let cuts = match document.format {
            Format::Tokens(_) => Cuts::Anywhere,
            _ => cuts,
        };
        return for_each_text(document, cuts, &mut |data, ends_document| {
            work(Segment { document, data, chat: None, ends_document })
        });
    };
    let mut records = 0;
    let mut of_record = |record: Record| {
        records += 1;
        let text = match record {
            Record::Text(text) => text.into_bytes(),
            Record::Chat(chat) => {
                let chat = Some(chat);
                return work(Segment { document, data: Vec::new(), chat, ends_document: true });
            }
        };
        let mut rest = text;
        while rest.len() >= 2 * PIECE_BYTES {
            let Some(cut) = cuts.last(&rest[..PIECE_BYTES], 1) else { break };
            let after = rest.split_off(cut.start);
            rest.truncate(cut.end);
            work(Segment { document, data: rest, chat: None, ends_document: false })?;
            rest = after;
        }
        work(Segment { document, data: rest, chat: None, ends_document: true })
    };
    let hash =
        records::for_each(&document.path, document.compression, format, fields, &mut of_record)?;
    match hash == document.hash && records == document.records {
        true => Ok(()),
        false => Err(DataError::Changed { path: document.path.clone() }),
    }
}

/// Reads the text or the tokens of a file in pieces; the flag marks the last piece.
fn for_each_text(
    document: &Document,
    cuts: Cuts,
    work: &mut dyn FnMut(Vec<u8>, bool) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let fail = |source: io::Error| DataError::Read { path: document.path.clone(), source };
    let changed = || DataError::Changed { path: document.path.clone() };
    let mut file = Content::open_as(&document.path, document.compression).map_err(fail)?;
    let mut bytes_left = document.bytes;
    if let Format::Tokens(_) = document.format {
        let mut header = [0; bin::HEADER_BYTES as usize];
        read_full(&mut file, &mut header).map_err(fail)?;
    }
    let mut data: Vec<u8> = Vec::new();
    while bytes_left > 0 {
        // No cut exists before `start`, except in the few bytes that a cut left behind.
        let start = data.len();
        let room = if start < PIECE_BYTES { PIECE_BYTES - start } else { PIECE_BYTES / 4 };
        let more = room.min(bytes_left as usize);
        data.resize(start + more, 0);
        if read_full(&mut file, &mut data[start..]).map_err(fail)? < more {
            return Err(changed());
        }
        bytes_left -= more as u64;
        if bytes_left == 0 {
            break;
        }
        if let Some(cut) = cuts.last(&data, start.saturating_sub(8)) {
            let after = data.split_off(cut.start);
            data.truncate(cut.end);
            work(std::mem::replace(&mut data, after), false)?;
        }
    }
    // A file that grew or was rewritten must not be accepted as complete.
    let more = read_full(&mut file, &mut [0]).map_err(fail)?;
    if more > 0 || file.hash().map_err(fail)? != document.hash {
        return Err(changed());
    }
    work(data, true)
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
            compression: super::super::compressed::Compression::None,
            records: 1,
            chats: 0,
            is_heldout: false,
            bytes: text.len() as u64,
            hash: blake3::hash(text),
        }
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
        let mut segments = Vec::new();
        for_each_text(&document, Cuts::Lines, &mut |data, is_last| {
            assert!(data.len() <= PIECE_BYTES);
            assert!(str::from_utf8(&data).is_ok());
            segments.push((data, is_last));
            Ok(())
        })
        .unwrap();
        assert!(segments.len() > 3, "{}", segments.len());
        assert!(segments.iter().rev().skip(1).all(|(_, is_last)| !is_last));
        assert!(segments.last().unwrap().1);
        let joined: Vec<u8> = segments.into_iter().flat_map(|(data, _)| data).collect();
        assert!(joined == text);

        let mut tokens = 0;
        let mut ends = 0;
        let mut bytes_done = 0;
        let (tokenizer, fields) = (Tokenizer::bytes(), Fields::default());
        let encoder = Encoder { tokenizer: &tokenizer, chat: None, fields: &fields };
        let documents = [&document, &document];
        let bytes = 2 * document.bytes;
        let mut sink = |encoded: Encoded<'_>| {
            match encoded {
                Encoded::Tokens(more) => tokens += more.tokens.len(),
                Encoded::EndOfDocument { counts } => ends += usize::from(counts),
            }
            Ok(())
        };
        encoder.encode(&documents, &mut bytes_done, bytes, &mut |_| {}, &mut sink).unwrap();
        assert_eq!((tokens, ends, bytes_done), (2 * text.len(), 2, 2 * document.bytes));
    }

    #[test]
    fn a_file_that_changed_since_the_scan_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        for changed in ["deep wall", "deep wel", "deep wells"] {
            let document = document(&path, b"deep well");
            std::fs::write(&path, changed).unwrap();
            let error = for_each_text(&document, Cuts::Lines, &mut |_, _| Ok(())).unwrap_err();
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
