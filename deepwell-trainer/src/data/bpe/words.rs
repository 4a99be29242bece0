//! The words of a text with how often each comes.

use std::collections::HashMap;

use rayon::prelude::*;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::super::{DataError, Progress, Stage};
use super::parts::{Extent, Part};

/// Words, each byte as one character of the byte-level alphabet.
pub(super) type WordCounts = HashMap<String, u64>;

/// Longer words, such as a megabyte of base64, are counted in stretches of this many bytes: a merge
/// costs the square of a word's length. Only pairs across such a cut go uncounted.
const WORD_BYTES_MAX: usize = 256;

/// What splits text into words, within which merges stay: GPT-2's rules, and no space put in
/// front of a text.
pub(super) fn byte_level() -> ByteLevel {
    ByteLevel::new(false, false, true)
}

/// Counts the words of `part`.
pub(super) fn count(
    part: &Part<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<(WordCounts, Extent), DataError> {
    let mut words = WordCounts::new();
    let bytes_total = part.bytes();
    let mut bytes_done = 0;
    let extent = part.read(&mut |group| {
        progress(Progress { stage: Stage::Count, bytes_done, bytes_total });
        let counted: Vec<Result<WordCounts, DataError>> =
            group.par_iter().map(|piece| count_text(&piece.document.name, &piece.data)).collect();
        for counts in counted {
            for (word, count) in counts? {
                *words.entry(word).or_default() += count;
            }
        }
        bytes_done += group.iter().map(|piece| piece.data.len() as u64).sum::<u64>();
        Ok(())
    })?;
    progress(Progress { stage: Stage::Count, bytes_done, bytes_total });
    Ok((words, extent))
}

/// Counts the words of one text. `name` is for the error.
fn count_text(name: &str, text: &[u8]) -> Result<WordCounts, DataError> {
    let fail = |message: String| DataError::Encode { name: name.to_owned(), message };
    let text = str::from_utf8(text).map_err(|error| fail(error.to_string()))?;
    let mut split = PreTokenizedString::from(text);
    byte_level().pre_tokenize(&mut split).map_err(|error| fail(error.to_string()))?;
    let mut words = WordCounts::new();
    for (word, _, _) in split.get_splits(OffsetReferential::Normalized, OffsetType::None) {
        for stretch in stretches(word) {
            match words.get_mut(stretch) {
                Some(count) => *count += 1,
                None => {
                    words.insert(stretch.to_owned(), 1);
                }
            }
        }
    }
    Ok(words)
}

/// A word in stretches of at most [`WORD_BYTES_MAX`] characters, each of which is a byte.
fn stretches(word: &str) -> impl Iterator<Item = &str> {
    let mut rest = word;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        // A character takes one byte or two: most words need no walk.
        let end = if rest.len() <= WORD_BYTES_MAX {
            rest.len()
        } else {
            rest.char_indices().nth(WORD_BYTES_MAX).map_or(rest.len(), |(index, _)| index)
        };
        let (stretch, after) = rest.split_at(end);
        rest = after;
        Some(stretch)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_counted_as_the_pre_tokenizer_splits_them() {
        let counts = count_text("x", "deep well, deep\n\n  well é".as_bytes()).unwrap();
        let mut counts: Vec<(&str, u64)> =
            counts.iter().map(|(word, &count)| (word.as_str(), count)).collect();
        counts.sort_unstable();
        assert_eq!(
            counts,
            [
                (",", 1),
                ("deep", 1),
                ("\u{10a}\u{10a}\u{120}", 1),
                ("\u{120}deep", 1),
                ("\u{120}well", 2),
                ("\u{120}\u{c3}\u{a9}", 1),
            ]
        );
    }

    #[test]
    fn long_words_are_counted_in_stretches() {
        let check = |word: &str, expected: &[usize]| {
            let lengths: Vec<usize> = stretches(word).map(|part| part.chars().count()).collect();
            assert_eq!(lengths, expected);
            assert_eq!(stretches(word).collect::<String>(), word);
        };
        check("", &[]);
        check(&"a".repeat(256), &[256]);
        check(&"a".repeat(257), &[256, 1]);
        check(&"\u{120}".repeat(200), &[200]);
        check(&"\u{120}".repeat(600), &[256, 256, 88]);
    }
}
