//! Counts the words of a text.

use std::collections::HashMap;

use rayon::prelude::*;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::utils::SysRegex;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::super::{DataError, Progress, Stage};
use super::corpus_splits::{CorpusSlice, Extent};

/// Counts of words, with each byte mapped to one character of the byte-level alphabet.
pub(super) type WordCounts = HashMap<String, u64>;

/// Longer words, such as a megabyte of base64, are counted in stretches of this many bytes, because
/// the cost of a merge is quadratic in the word length. Only pairs across such a cut are not
/// counted.
const WORD_BYTES_MAX: usize = 256;

/// GPT-2's word pattern without the rule that the last of several spaces belongs to the next word.
/// This rule needs look-ahead, which makes the search several times slower; [`Splitter`] applies
/// the rule.
const WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";

/// Pre-tokenizer that splits text into words, the limits of merges: GPT-2's rules, without a space
/// before a text.
pub(super) fn byte_level() -> ByteLevel {
    ByteLevel::new(false, false, true)
}

/// Counts the words of `slice`.
pub(super) fn count(
    slice: &CorpusSlice<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<(WordCounts, Extent), DataError> {
    let splitter = Splitter::new()?;
    let mut counts: HashMap<String, u64> = HashMap::new();
    let bytes_total = slice.bytes();
    let mut bytes_done = 0;
    let extent = slice.read(&mut |group| {
        progress(Progress { stage: Stage::Count, bytes_done, bytes_total });
        let counted: Vec<Result<HashMap<&str, u64>, DataError>> = group
            .par_iter()
            .map(|piece| match str::from_utf8(&piece.data) {
                Ok(text) => Ok(splitter.count(text)),
                Err(error) => {
                    let name = piece.document.name.clone();
                    let message = error.to_string();
                    Err(DataError::Encode { name, message })
                }
            })
            .collect();
        for piece in counted {
            for (word, count) in piece? {
                match counts.get_mut(word) {
                    Some(sum) => *sum += count,
                    None => {
                        counts.insert(word.to_owned(), count);
                    }
                }
            }
        }
        bytes_done += group.iter().map(|piece| piece.data.len() as u64).sum::<u64>();
        Ok(())
    })?;
    progress(Progress { stage: Stage::Count, bytes_done, bytes_total });
    Ok((in_alphabet(counts)?, extent))
}

/// Splits text like [`byte_level`], but faster: counting does not need the offset of each byte.
struct Splitter {
    words: SysRegex,
}

impl Splitter {
    fn new() -> Result<Self, DataError> {
        let fail = |error: tokenizers::Error| DataError::Merges { message: error.to_string() };
        Ok(Self { words: SysRegex::new(WORDS).map_err(fail)? })
    }

    fn count<'a>(&self, text: &'a str) -> HashMap<&'a str, u64> {
        let mut counts = HashMap::new();
        self.for_each(text, |word| *counts.entry(word).or_default() += 1);
        counts
    }

    fn for_each<'a>(&self, text: &'a str, mut work: impl FnMut(&'a str)) {
        let mut rest = text;
        'restart: loop {
            for (start, end) in self.words.find_iter(rest) {
                let word = &rest[start..end];
                let mut characters = word.chars();
                let last = characters.next_back();
                // Only a whitespace match ends in whitespace, and the next match starts with
                // another character.
                if end < rest.len() && last.is_some_and(char::is_whitespace) {
                    let before = characters.as_str();
                    if !before.is_empty() {
                        work(before);
                        rest = &rest[start + before.len()..];
                        continue 'restart;
                    }
                }
                work(word);
            }
            return;
        }
    }
}

/// The same counts with each byte as a character, as the merges are learned.
fn in_alphabet(counts: HashMap<String, u64>) -> Result<WordCounts, DataError> {
    let alphabet = byte_level().use_regex(false);
    let mut words = WordCounts::with_capacity(counts.len());
    for (word, count) in counts {
        let mut split = PreTokenizedString::from(word);
        alphabet
            .pre_tokenize(&mut split)
            .map_err(|error| DataError::Merges { message: error.to_string() })?;
        for (word, _, _) in split.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            for stretch in stretches(word) {
                *words.entry(stretch.to_owned()).or_default() += count;
            }
        }
    }
    Ok(words)
}

/// Splits a word into stretches of at most [`WORD_BYTES_MAX`] characters, each a byte.
fn stretches(word: &str) -> impl Iterator<Item = &str> {
    let mut rest = word;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        // A character takes one or two bytes: most words need no character count.
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

    fn words(text: &str) -> Vec<&str> {
        let mut words = Vec::new();
        Splitter::new().unwrap().for_each(text, |word| words.push(word));
        words
    }

    #[test]
    fn words_of_a_text() {
        let check = |text: &str, expected: &[&str]| assert_eq!(words(text), expected, "{text:?}");
        check("", &[]);
        check("deep well, deep", &["deep", " well", ",", " deep"]);
        check("a\n\n  b", &["a", "\n\n ", " b"]);
        check("a  ", &["a", "  "]);
        check("it's 's  's", &["it", "'s", " '", "s", " ", " '", "s"]);
        check("x12\u{e9}\t\ty", &["x", "12", "\u{e9}", "\t", "\t", "y"]);
    }

    proptest::proptest! {
        /// The written tokenizer's pre-tokenizer splits the text in the same way.
        #[test]
        fn words_are_those_of_the_pre_tokenizer(
            text in "([ \n\t\u{a0}\u{3000}\u{85}]{0,3}\
                ('s|'ll|'|a|\u{e9}|7|\u{661}|\u{301}|\u{200b}|\u{1f4a7}|-)){0,12}[ \n]{0,3}",
        ) {
            let mut split = PreTokenizedString::from(text.as_str());
            byte_level().pre_tokenize(&mut split).unwrap();
            let splits = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
            let expected: Vec<&str> =
                splits.iter().map(|(_, (start, end), _)| &text[*start..*end]).collect();
            let mut counts = WordCounts::new();
            for (word, _, _) in &splits {
                *counts.entry(word.to_string()).or_default() += 1;
            }
            proptest::prop_assert_eq!(words(&text), expected);
            let raw = Splitter::new().unwrap().count(&text);
            let raw = raw.into_iter().map(|(word, count)| (word.to_owned(), count)).collect();
            proptest::prop_assert_eq!(in_alphabet(raw).unwrap(), counts);
        }
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
