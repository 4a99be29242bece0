//! Writing the token cache of a corpus.

use super::cache_header::Key;
use super::cache_writer::TokenWriter;
use super::chat::Chat;
use super::encode::{Encoded, Encoder};
use super::records::Fields;
use super::source::{Document, Format};
use super::split::{Choice, HELDOUT_ONE_IN, HeldoutBytes, total};
use super::{DataError, DataOptions, Progress, Split, Tokenizer};

/// Minimum number of tokens for a split: an input and a target in each part.
const TOKENS_MIN: u64 = 4;

/// Inputs of the cache of a corpus.
pub(crate) struct Build<'a> {
    pub(crate) documents: &'a [Document],
    pub(crate) choice: &'a Choice,
    /// Only for corpora with conversations.
    pub(crate) chat: Option<&'a Chat>,
    pub(crate) fields: &'a Fields,
    pub(crate) options: &'a DataOptions,
    pub(crate) key: &'a Key,
}

impl Build<'_> {
    /// Writes both parts of the cache.
    pub(crate) fn run(&self, progress: &mut dyn FnMut(Progress)) -> Result<(), DataError> {
        let mut train = self.writer()?;
        let mut heldout = self.writer()?;
        let mut bytes_done = 0;
        let mut write = |documents: &[&Document], writer: &mut TokenWriter| {
            self.write(documents, writer, &mut bytes_done, &mut |_| {}, progress)
        };
        let documents = self.documents;
        let has_records = documents.iter().any(|it| matches!(it.format, Format::Records(_)));
        let mut is_heldout = vec![false; documents.len()];
        match self.choice {
            Choice::Named(named) => {
                for &i in named {
                    is_heldout[i] = true;
                    write(&[&documents[i]], &mut heldout)?;
                }
            }
            _ if has_records => return self.by_record(train, heldout, progress),
            Choice::Position => {}
            Choice::Ranked(ranked) => {
                let mut bytes = HeldoutBytes::new(total(documents));
                for &i in ranked {
                    if bytes.has_share() && heldout.tokens() >= self.options.heldout_tokens_min {
                        break;
                    }
                    if bytes.take_if_it_fits(documents[i].bytes) {
                        is_heldout[i] = true;
                        write(&[&documents[i]], &mut heldout)?;
                    }
                }
            }
        }
        let rest: Vec<&Document> =
            documents.iter().zip(&is_heldout).filter(|(_, held)| !**held).map(|(d, _)| d).collect();
        write(&rest, &mut train)?;
        if *self.choice == Choice::Position {
            return self.by_position(train, heldout);
        }
        self.finish(train, heldout)
    }

    /// Holds out whole records, in an order derived from their files' names and their indices,
    /// until the held-out part has 5 % of the tokens and the requested number of tokens. At most
    /// half of the tokens are held out.
    fn by_record(
        &self,
        mut train: TokenWriter,
        mut heldout: TokenWriter,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), DataError> {
        let mut spool = self.writer()?;
        // The rank hash of a record, and the end of its tokens.
        let mut records: Vec<([u8; 8], u64)> = Vec::new();
        let mut bytes_done = 0;
        for document in self.documents {
            let mut number = 0u64;
            let mut ended = |tokens| {
                let mut hasher = blake3::Hasher::new();
                hasher.update(document.split_key.as_bytes()).update(&number.to_le_bytes());
                let mut rank = [0; 8];
                rank.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
                records.push((rank, tokens));
                number += 1;
            };
            self.write(&[document], &mut spool, &mut bytes_done, &mut ended, progress)?;
        }
        let tokens_total = spool.tokens();
        let wanted = (tokens_total / HELDOUT_ONE_IN).max(self.options.heldout_tokens_min);
        let tokens_of = |i: usize| {
            let start = if i == 0 { 0 } else { records[i - 1].1 };
            start..records[i].1
        };
        let mut ranked: Vec<usize> = (0..records.len()).collect();
        ranked.sort_unstable_by_key(|&i| (records[i].0, i));
        let mut is_heldout = vec![false; records.len()];
        let mut taken = 0;
        for i in ranked {
            let tokens = tokens_of(i).end - tokens_of(i).start;
            if taken >= wanted {
                break;
            }
            if taken + tokens <= tokens_total / 2 {
                is_heldout[i] = true;
                taken += tokens;
            }
        }
        if taken < 2 {
            return self.by_position(spool, heldout);
        }
        let written = spool.into_reader()?;
        for (i, held) in is_heldout.into_iter().enumerate() {
            let part = if held { &mut heldout } else { &mut train };
            written.copy(tokens_of(i), part)?;
            part.end_document();
        }
        self.finish(train, heldout)
    }

    /// Holds the last tokens out.
    fn by_position(&self, all: TokenWriter, mut heldout: TokenWriter) -> Result<(), DataError> {
        let found = all.tokens();
        self.check_size(found)?;
        let wanted = (found / HELDOUT_ONE_IN).max(self.options.heldout_tokens_min);
        let tail = wanted.clamp(2, found / 2);
        let train = all.move_tail(found - tail, &mut heldout)?;
        self.finish(train, heldout)
    }

    fn finish(&self, train: TokenWriter, heldout: TokenWriter) -> Result<(), DataError> {
        self.check_size(train.tokens() + heldout.tokens())?;
        let train = train.finish(self.key, Split::Train)?;
        heldout.finish(self.key, Split::Heldout)?.publish()?;
        train.publish()
    }

    fn check_size(&self, found: u64) -> Result<(), DataError> {
        match self.options.holds_out_all {
            true if found < 2 => Err(DataError::TooShort {
                split: Split::Heldout,
                found,
                what: "one prediction".to_owned(),
                needed: 2,
                smaller: "seq_len",
            }),
            false if found < TOKENS_MIN => {
                Err(DataError::CannotSplit { found, needed: TOKENS_MIN })
            }
            _ => Ok(()),
        }
    }

    fn writer(&self) -> Result<TokenWriter, DataError> {
        let vocab = stored_vocab(self.documents, &self.options.tokenizer);
        TokenWriter::new(&self.options.cache_dir, vocab)
    }

    /// Adds documents to a part. After each document, `ended` receives the part's number of tokens.
    fn write(
        &self,
        documents: &[&Document],
        writer: &mut TokenWriter,
        bytes_done: &mut u64,
        ended: &mut dyn FnMut(u64),
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), DataError> {
        let tokenizer = &self.options.tokenizer;
        let records: u64 = self.documents.iter().map(|document| document.records).sum();
        let is_text = !matches!(self.documents[0].format, Format::Tokens(_));
        let separator = tokenizer.separator().filter(|_| is_text && records > 1);
        let mut last = None;
        let mut sink = |encoded: Encoded<'_>| match encoded {
            Encoded::Tokens(encoded) => {
                last = encoded.tokens.last().copied().or(last);
                match &encoded.counts {
                    None => writer.push(&encoded.tokens),
                    Some(counts) => writer.push_counted(&encoded.tokens, counts.iter().copied()),
                }
            }
            Encoded::EndOfDocument { counts } => {
                writer.end_document();
                // A template may already have ended the text with the separator.
                let is_there = !counts && last == separator;
                let end = separator.filter(|_| !is_there);
                match counts {
                    true => writer.push(end.as_slice())?,
                    false => writer.push_counted(end.as_slice(), [false])?,
                }
                last = None;
                ended(writer.tokens());
                Ok(())
            }
        };
        let encoder = Encoder { tokenizer, chat: self.chat, fields: self.fields };
        encoder.encode(documents, bytes_done, total(self.documents), progress, &mut sink)
    }
}

/// A vocabulary size, at most 2^31, that determines the width of stored tokens.
fn stored_vocab(documents: &[Document], tokenizer: &Tokenizer) -> u32 {
    let width = |document: &Document| match document.format {
        Format::Text | Format::Records(_) => None,
        Format::Tokens(header) => Some(header.width),
    };
    match documents.iter().filter_map(width).max() {
        None => tokenizer.vocab_size(),
        Some(2) => 1 << 16,
        Some(_) => 1 << 31,
    }
}
