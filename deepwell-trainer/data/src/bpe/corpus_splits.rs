//! Selects the text that a tokenizer learns from, and the text to measure it on.

use super::super::DataError;
use super::super::cuts::Cuts;
use super::super::encode::{Segment, for_each_group};
use super::super::records::Fields;
use super::super::source::Document;
use super::super::split::{Choice, HELDOUT_ONE_IN, HeldoutBytes, choose, total};

/// The two parts of a corpus. Each part is the bytes `start..end` of its concatenated documents,
/// with `start` and `end` moved forward to the next line.
pub(super) struct CorpusSplits<'a> {
    pub(super) train: CorpusSlice<'a>,
    pub(super) heldout: CorpusSlice<'a>,
}

pub(super) struct CorpusSlice<'a> {
    documents: Vec<&'a Document>,
    fields: &'a Fields,
    start: u64,
    end: u64,
}

/// Files and bytes read from a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) files: u64,
    pub(super) bytes: u64,
}

impl<'a> CorpusSplits<'a> {
    /// Splits the corpus like a data set: held out are the documents that are first in the data
    /// set's held-out order, up to 5 % of the bytes. A text that cannot be split by document is
    /// split by position. A data set of the same inputs holds out these documents too, and more if
    /// 5 % are too few tokens.
    pub(super) fn new(
        documents: &'a [Document],
        fields: &'a Fields,
        bytes_max: Option<u64>,
    ) -> Self {
        let bytes_total = total(documents);
        let bytes_max = bytes_max.unwrap_or(u64::MAX);
        let ranked = match choose(documents) {
            Choice::Ranked(ranked) => ranked,
            // Named parts exist only for token files, which were rejected before.
            Choice::Position | Choice::Named(_) => {
                let cut = bytes_total - bytes_total / HELDOUT_ONE_IN;
                let documents: Vec<&Document> = documents.iter().collect();
                let heldout =
                    CorpusSlice { documents: documents.clone(), fields, start: cut, end: u64::MAX };
                let train = CorpusSlice { documents, fields, start: 0, end: cut.min(bytes_max) };
                return Self { train, heldout };
            }
        };
        let mut bytes = HeldoutBytes::new(bytes_total);
        let (mut train, mut heldout) = (Vec::new(), Vec::new());
        for index in ranked {
            let document = &documents[index];
            if !bytes.has_share() && bytes.take_if_it_fits(document.bytes) {
                heldout.push(document);
            } else {
                train.push(document);
            }
        }
        Self {
            train: CorpusSlice { documents: train, fields, start: 0, end: bytes_max },
            heldout: CorpusSlice { documents: heldout, fields, start: 0, end: u64::MAX },
        }
    }
}

impl<'a> CorpusSlice<'a> {
    /// The first `bytes` of this part, extended to the end of a line.
    pub(super) fn up_to(&self, bytes: u64) -> Self {
        let end = self.end.min(self.start.saturating_add(bytes));
        Self { documents: self.documents.clone(), end, ..*self }
    }

    /// Approximate number of bytes, up to a line at each end.
    pub(super) fn bytes(&self) -> u64 {
        let all: u64 = self.documents.iter().map(|document| document.bytes).sum();
        self.end.min(all) - self.start.min(all)
    }

    /// Reads this part in order, as groups of pieces that are cut at line ends if possible.
    pub(super) fn read(
        &self,
        work: &mut dyn FnMut(&[Segment<'a>]) -> Result<(), DataError>,
    ) -> Result<Extent, DataError> {
        let mut needed = Vec::new();
        let (mut offset, mut skipped) = (0, 0);
        for &document in &self.documents {
            let begins = offset;
            offset += document.bytes;
            if offset <= self.start {
                skipped = offset;
            } else if begins < self.end {
                needed.push(document);
            }
        }
        let mut offset = skipped;
        let mut extent = Extent::default();
        let mut last: Option<&Document> = None;
        for_each_group(&needed, Cuts::Lines, self.fields, &mut |group| {
            let mut inside = Vec::with_capacity(group.len());
            for segment in group {
                let text = segment.text();
                let start = line_after(&text, self.start.saturating_sub(offset));
                let end = line_after(&text, self.end.saturating_sub(offset));
                offset += text.len() as u64;
                if start < end {
                    let data = text[start..end].to_vec();
                    let Segment { document, ends_document, .. } = *segment;
                    extent.bytes += data.len() as u64;
                    extent.files +=
                        u64::from(last.is_none_or(|last| !std::ptr::eq(last, document)));
                    last = Some(document);
                    inside.push(Segment { document, data, chat: None, ends_document });
                }
            }
            work(&inside)
        })?;
        Ok(extent)
    }
}

/// Returns the first start of a line at or after `offset`, otherwise of a character; the end if
/// none.
fn line_after(data: &[u8], offset: u64) -> usize {
    let mut offset = match usize::try_from(offset) {
        Ok(0) => return 0,
        Ok(offset) if offset < data.len() => offset,
        _ => return data.len(),
    };
    if let Some(newline) = data[offset - 1..].iter().position(|&byte| byte == b'\n') {
        return offset + newline;
    }
    while offset < data.len() && data[offset] & 0xc0 == 0x80 {
        offset += 1;
    }
    offset
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_at_lines_else_at_characters() {
        let check = |text: &str, expected: &[usize]| {
            let found: Vec<usize> = (0..=text.len() as u64 + 1)
                .map(|offset| line_after(text.as_bytes(), offset))
                .collect();
            assert_eq!(found, expected, "{text:?}");
        };
        check("", &[0, 0]);
        check("a\nb\n", &[0, 2, 2, 4, 4, 4]);
        check("abc", &[0, 1, 2, 3, 3]);
        check("x\nab", &[0, 2, 2, 3, 4, 4]);
        check("a\u{20ac}b", &[0, 1, 4, 4, 4, 5, 5]);
    }
}
