//! Two baselines for a transformer: unigram and add-one bigram.
//!
//! Both are fitted on the training part by counting, with 1 added to every count (Laplace), and
//! scored on the held-out part in nats per token: on the predictions of an evaluation, or on every
//! token except the first.
//!
//! ```text
//! unigram  p(b)     = (count(b) + 1) / (N + V)
//! bigram   p(b | a) = (count(ab) + 1) / (count(a·) + V)
//! ```
//!
//! `N` is the number of training tokens, `V` the vocabulary, `count(a·)` the number of occurrences
//! of `a` followed by any token.
//!
//! ```
//! use deepwell_trainer::data::TokenCache;
//! use deepwell_trainer::baselines::baseline_entropies;
//! # fn main() -> Result<(), deepwell_trainer::data::DataError> {
//! let tokens = TokenCache::in_memory(&[0, 1, 0, 1, 0], &[0, 1]);
//! let entropies = baseline_entropies(&tokens, 2, None)?;
//! // 1 was seen 2 times in 5, and followed each of the 2 zeros that something followed.
//! assert!((entropies.unigram - -(3.0f64 / 7.0).ln()).abs() < 1e-12);
//! assert!((entropies.bigram - -(3.0f64 / 4.0).ln()).abs() < 1e-12);
//! # Ok(())
//! # }
//! ```

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::data::{DataError, HeldoutWindows, Split, TokenCache, Tokens};

/// Held-out cross-entropy of both models, in nats per token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BaselineEntropies {
    /// Cross-entropy of the unigram model.
    pub unigram: f64,
    /// Cross-entropy of the add-one bigram model.
    pub bigram: f64,
    /// Number of predicted held-out tokens.
    pub tokens: u64,
}

/// Up to this vocabulary the bigram counts are one table of `vocab`² counts (at most 128 MiB).
/// Above it only the needed pairs are counted; the result is the same.
const DENSE_VOCAB_MAX: u64 = 4096;

/// Fits both models on the training part of `tokens` and scores them on the predictions of
/// `windows`, made from the same tokens, or on the whole held-out part.
///
/// # Errors
///
/// [`DataError::TokenOutsideVocab`]; [`DataError::TooShort`] if the held-out part has nothing to
/// predict.
pub fn baseline_entropies(
    tokens: &TokenCache,
    vocab: u64,
    windows: Option<&HeldoutWindows>,
) -> Result<BaselineEntropies, DataError> {
    tokens.check_vocab(vocab)?;
    let train = tokens.tokens(Split::Train);
    let heldout = tokens.tokens(Split::Heldout);
    let asked: Vec<(u32, u32)> = match windows {
        Some(windows) => {
            windows.predictions().map(|b| (heldout.get(b - 1), heldout.get(b))).collect()
        }
        None => pairs_of(&heldout).collect(),
    };
    if asked.is_empty() {
        return Err(DataError::TooShort {
            split: Split::Heldout,
            found: heldout.len() as u64,
            what: "one prediction".to_owned(),
            needed: 2,
            smaller: "eval_tokens",
        });
    }

    let mut counts = Counts::new(vocab);
    for i in 0..train.len() {
        counts.add(train.get(i));
    }
    let mut pairs =
        if vocab <= DENSE_VOCAB_MAX { Pairs::dense(vocab) } else { Pairs::sparse(&asked) };
    for (a, b) in pairs_of(&train) {
        pairs.add(a, b);
    }
    let last = train.len().checked_sub(1).map(|i| train.get(i));

    let mut unigram = 0.0;
    let mut bigram = 0.0;
    let unigram_total = (train.len() as u64 + vocab) as f64;
    for &(a, b) in &asked {
        unigram -= ((counts.get(b) + 1) as f64 / unigram_total).ln();
        // The last training token has no follower.
        let followed = counts.get(a) - u64::from(last == Some(a));
        bigram -= ((pairs.get(a, b) + 1) as f64 / (followed + vocab) as f64).ln();
    }
    Ok(BaselineEntropies {
        unigram: unigram / asked.len() as f64,
        bigram: bigram / asked.len() as f64,
        tokens: asked.len() as u64,
    })
}

/// Each token with its successor.
fn pairs_of(tokens: &Tokens<'_>) -> impl Iterator<Item = (u32, u32)> {
    let tokens = *tokens;
    (0..tokens.len().saturating_sub(1)).map(move |i| (tokens.get(i), tokens.get(i + 1)))
}

/// Number of occurrences of each token and pair.
struct Counts {
    counts: Vec<u64>,
}

impl Counts {
    fn new(vocab: u64) -> Self {
        Self { counts: vec![0; vocab as usize] }
    }

    fn add(&mut self, token: u32) {
        self.counts[token as usize] += 1;
    }

    fn get(&self, token: u32) -> u64 {
        self.counts[token as usize]
    }
}

/// Number of occurrences of each pair.
enum Pairs {
    Dense { vocab: usize, counts: Vec<u64> },
    Sparse(HashMap<(u32, u32), u64>),
}

impl Pairs {
    fn dense(vocab: u64) -> Self {
        let vocab = vocab as usize;
        Pairs::Dense { vocab, counts: vec![0; vocab * vocab] }
    }

    fn sparse(asked: &[(u32, u32)]) -> Self {
        Pairs::Sparse(asked.iter().map(|&pair| (pair, 0)).collect())
    }

    fn add(&mut self, a: u32, b: u32) {
        match self {
            Pairs::Dense { vocab, counts } => counts[a as usize * *vocab + b as usize] += 1,
            Pairs::Sparse(counts) => {
                if let Some(count) = counts.get_mut(&(a, b)) {
                    *count += 1;
                }
            }
        }
    }

    fn get(&self, a: u32, b: u32) -> u64 {
        match self {
            Pairs::Dense { vocab, counts } => counts[a as usize * vocab + b as usize],
            Pairs::Sparse(counts) => counts.get(&(a, b)).copied().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Pseudo-random numbers with a preference for small ones.
    fn skewed(count: usize, vocab: u32, seed: u32) -> Vec<u32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % vocab
        };
        (0..count).map(|_| next().min(next())).collect()
    }

    fn windows(tokens: &Arc<TokenCache>, predictions: u64) -> HeldoutWindows {
        HeldoutWindows::new(tokens.clone(), 2, 10, Some(predictions)).unwrap()
    }

    #[test]
    fn both_ways_of_counting_agree() {
        let tokens = Arc::new(TokenCache::in_memory(&skewed(20_000, 50, 1), &skewed(3000, 50, 2)));
        let train = tokens.tokens(Split::Train);
        let heldout = tokens.tokens(Split::Heldout);
        let asked: Vec<(u32, u32)> = pairs_of(&heldout).collect();
        let mut sparse = Pairs::sparse(&asked);
        let mut table = Pairs::dense(50);
        for (a, b) in pairs_of(&train) {
            sparse.add(a, b);
            table.add(a, b);
        }
        assert!(asked.iter().all(|&(a, b)| sparse.get(a, b) == table.get(a, b)));
        // The vocabulary selects the method. One more token in the vocabulary changes either
        // entropy by less than one part in a thousand.
        let windows = windows(&tokens, 2000);
        let dense = baseline_entropies(&tokens, 4096, Some(&windows)).unwrap();
        let above = baseline_entropies(&tokens, 4097, Some(&windows)).unwrap();
        assert!((above.bigram / dense.bigram - 1.0).abs() < 1e-3, "{above:?} {dense:?}");
        assert!(above.bigram > dense.bigram && above.unigram > dense.unigram);
        assert_eq!(dense.tokens, 2000);
    }

    #[test]
    fn the_windows_decide_what_is_scored() {
        // Zeros in training; zeros in the first half of the held-out part, ones in the second.
        let heldout: Vec<u32> = (0..401).map(|i| u32::from(i > 200)).collect();
        let tokens = Arc::new(TokenCache::in_memory(&[0; 98], &heldout));
        let score = |predictions| {
            baseline_entropies(&tokens, 2, Some(&windows(&tokens, predictions))).unwrap()
        };
        // p(0) = 99 / 100 and p(1) = 1 / 100, and each is asked for equally often.
        let expected = -(0.99f64.ln() + 0.01f64.ln()) / 2.0;
        assert!((score(400).unigram - expected).abs() < 1e-12);
        assert!((score(40).unigram - expected).abs() < 1e-12);
    }

    #[test]
    fn probabilities_sum_to_one() {
        let train = skewed(5000, 40, 3);
        let (mut unigram, mut bigram) = (0.0, 0.0);
        for b in 0..40 {
            let tokens = TokenCache::in_memory(&train, &[train[4999], b]);
            let entropies = baseline_entropies(&tokens, 40, None).unwrap();
            unigram += (-entropies.unigram).exp();
            bigram += (-entropies.bigram).exp();
        }
        // 40 sums of f64 exponentials: a few units in the last place each.
        assert!((unigram - 1.0).abs() < 1e-12, "{unigram}");
        assert!((bigram - 1.0).abs() < 1e-12, "{bigram}");
    }

    #[test]
    fn no_training_text_gives_the_uniform_model() {
        let entropies =
            baseline_entropies(&TokenCache::in_memory(&[], &[1, 2, 3]), 256, None).unwrap();
        assert!((entropies.unigram - 256f64.ln()).abs() < 1e-12);
        assert!((entropies.bigram - 256f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn bad_data_is_an_error() {
        let check = |heldout: &[u32], expected: &str| {
            let tokens = TokenCache::in_memory(&[1, 2], heldout);
            let error = baseline_entropies(&tokens, 5, None).unwrap_err();
            assert_eq!(error.to_string(), expected);
        };
        check(
            &[1],
            "the held-out part has 1 tokens; one prediction needs 2\nhint: give more data, or a \
             smaller `eval_tokens`",
        );
        check(
            &[5],
            "token 5 at position 0 of the held-out part is outside the model's vocabulary of \
             5\nhint: the model needs a `vocab_size` of at least 6, or the data another tokenizer",
        );
    }
}
