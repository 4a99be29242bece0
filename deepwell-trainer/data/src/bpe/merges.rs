//! From counted words to a vocabulary.

use std::collections::HashMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Model, ProgressFormat};

use super::super::DataError;
use super::END_OF_TEXT;
use super::words::{WordCounts, byte_level};

/// A vocabulary, as a file and in numbers.
pub(super) struct Learned {
    /// The text of the `tokenizer.json`.
    pub(super) json: String,
    pub(super) vocab_size: u32,
    pub(super) merges: u32,
}

/// Learns merges until the vocabulary has `vocab_size` tokens or no pair occurs `min_frequency`
/// times. [`END_OF_TEXT`] is token 0, followed by the bytes and the merged tokens.
pub(super) fn learn(
    words: WordCounts,
    vocab_size: u32,
    min_frequency: u64,
) -> Result<Learned, DataError> {
    check_counts(&words)?;
    let fail = |error: tokenizers::Error| DataError::Merges { message: error.to_string() };
    let trainer = BpeTrainer::builder()
        .vocab_size(vocab_size as usize)
        .min_frequency(min_frequency)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        // Every byte has a token, whether or not the byte occurs in the text.
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .show_progress(false)
        .progress_format(ProgressFormat::Silent)
        .build();
    let words = words.into_iter().map(|(word, count)| (word.into(), count)).collect();
    let mut model = BPE::default();
    let special = trainer.do_train(&words, &mut model).map_err(fail)?;
    let vocab_size = model.get_vocab_size() as u32;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(byte_level()));
    tokenizer.with_decoder(Some(byte_level()));
    tokenizer.add_special_tokens(special).map_err(fail)?;
    let json = tokenizer.to_string(true).map_err(fail)? + "\n";
    let file: File = serde_json::from_str(&json).map_err(|error| fail(error.into()))?;
    let merges = file.model.merges.len() as u32;
    Ok(Learned { json, vocab_size, merges })
}

/// The counted parts of a `tokenizer.json`.
#[derive(Deserialize)]
struct File {
    model: FileModel,
}

#[derive(Deserialize)]
struct FileModel {
    merges: Vec<IgnoredAny>,
}

/// Checks that pair counts fit the 32 bits that the crate uses. A pair of tokens occurs at most as
/// often as the two bytes where the tokens meet, so counting byte pairs is enough.
fn check_counts(words: &WordCounts) -> Result<(), DataError> {
    let mut pairs: HashMap<(char, char), u64> = HashMap::new();
    for (word, &count) in words {
        for (first, second) in word.chars().zip(word.chars().skip(1)) {
            *pairs.entry((first, second)).or_default() += count;
        }
    }
    match pairs.into_values().max() {
        Some(found) if found > i32::MAX as u64 => Err(DataError::TooMuchText { found }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(counts: &[(&str, u64)]) -> WordCounts {
        counts.iter().map(|&(word, count)| (word.to_owned(), count)).collect()
    }

    #[test]
    fn merges_are_learned_in_order_of_their_counts() {
        // Worked by hand: `ll` occurs 12 times, `we` 7, `well` then 7, and `fall` 5 in two steps:
        // `fa` before `fall`, because `al` is `a` + `ll` by then, and as frequent.
        let learned = learn(words(&[("well", 7), ("fall", 5), ("x", 90)]), 300, 2).unwrap();
        let file: serde_json::Value = serde_json::from_str(&learned.json).unwrap();
        assert_eq!(
            file["model"]["merges"],
            serde_json::json!([["l", "l"], ["e", "ll"], ["w", "ell"], ["a", "ll"], ["f", "all"]])
        );
        assert_eq!((learned.vocab_size, learned.merges), (262, 5));
        assert_eq!(file["model"]["vocab"][END_OF_TEXT], 0);
        assert_eq!(file["model"]["vocab"]["!"], 1);
        assert_eq!(file["model"]["vocab"]["fall"], 261);
        assert_eq!(file["added_tokens"][0]["special"], true);

        let merges = |vocab_size, min_frequency| {
            let words = words(&[("well", 7), ("fall", 5), ("x", 90)]);
            learn(words, vocab_size, min_frequency).unwrap().merges
        };
        assert_eq!([merges(300, 6), merges(300, 8), merges(300, 13)], [3, 1, 0]);
        assert_eq!([merges(257, 2), merges(259, 2)], [0, 2]);
    }

    #[test]
    fn text_beyond_32_bit_counts_is_refused() {
        let check =
            |counts: &[(&str, u64)], expected: Option<u64>| match check_counts(&words(counts)) {
                Ok(()) => assert_eq!(expected, None),
                Err(DataError::TooMuchText { found }) => assert_eq!(Some(found), expected),
                Err(error) => panic!("{error}"),
            };
        let most = i32::MAX as u64;
        check(&[("ab", most), ("x", u64::MAX)], None);
        check(&[("ab", most), ("abc", 1)], Some(most + 1));
        check(&[("aaa", most / 2 + 1)], Some(most + 1));
    }
}
