//! The fixed batches of an evaluation.

use std::sync::Arc;

use deepwell_ir::ops::IGNORED_TARGET;

use super::loader::check_shape;
use super::{Batch, DataError, Split, TokenCache};

/// Windows of the held-out part in order, in whole batches: the same for every model, precision and
/// step. The windows do not overlap. If they do not cover the whole part, they are spread evenly
/// over it, because its start is only a few files.
///
/// ```
/// use std::sync::Arc;
/// use deepwell_data::{HeldoutWindows, TokenCache};
/// # fn main() -> Result<(), deepwell_data::DataError> {
/// let tokens = Arc::new(TokenCache::in_memory(&[], &[0, 1, 2, 3, 4, 5, 6, 7, 8]));
/// let windows = HeldoutWindows::new(tokens, 2, 2, None)?;
/// let mut batch = windows.buffer();
/// windows.fill(1, &mut batch);
/// assert_eq!((windows.len(), windows.tokens()), (2, 8));
/// assert_eq!((batch.inputs, batch.targets), (vec![4, 5, 6, 7], vec![5, 6, 7, 8]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct HeldoutWindows {
    tokens: Arc<TokenCache>,
    rows: usize,
    seq: usize,
    batches: u64,
    /// Number of windows that fit the whole part; if all are read, the last may be cut short.
    windows_all: u64,
    /// All windows are read; places of a batch without a window are not predicted.
    is_whole: bool,
}

impl HeldoutWindows {
    /// Batches of `rows` windows of `seq` tokens: the fewest that cover `tokens_min` predicted
    /// tokens, or all that fit.
    ///
    /// # Errors
    ///
    /// [`DataError::BatchShape`] for a zero; [`DataError::TooShort`] if the held-out part does not
    /// fill one batch, or has fewer than `tokens_min` tokens to predict.
    pub fn new(
        tokens: Arc<TokenCache>,
        rows: usize,
        seq: usize,
        tokens_min: Option<u64>,
    ) -> Result<Self, DataError> {
        check_shape(rows, seq)?;
        let token_count = tokens.len(Split::Heldout);
        let tokens_per_batch = rows as u64 * seq as u64;
        let batches = match tokens_min {
            Some(tokens_min) => tokens_min.div_ceil(tokens_per_batch).max(1),
            None => (token_count.saturating_sub(1) / tokens_per_batch).max(1),
        };
        let needed = batches.saturating_mul(tokens_per_batch).saturating_add(1);
        if token_count < needed {
            let plural = if batches == 1 { "" } else { "es" };
            return Err(DataError::TooShort {
                split: Split::Heldout,
                found: token_count,
                what: format!("an evaluation on {batches} batch{plural} of {rows} x {seq} tokens"),
                needed,
                smaller: if batches == 1 { "batch_size" } else { "eval_tokens" },
            });
        }
        let windows_all = (token_count - 1) / seq as u64;
        Ok(Self { tokens, rows, seq, batches, windows_all, is_whole: false })
    }

    /// Batches of `rows` windows of `seq` tokens that predict each token of the part except the
    /// first. The last window may be shorter, and the last batch may have fewer windows: the rest
    /// is filled with targets that do not count.
    ///
    /// # Errors
    ///
    /// [`DataError::BatchShape`] for a zero; [`DataError::TooShort`] for fewer than two tokens.
    pub fn whole(tokens: Arc<TokenCache>, rows: usize, seq: usize) -> Result<Self, DataError> {
        check_shape(rows, seq)?;
        let found = tokens.len(Split::Heldout);
        if found < 2 {
            return Err(DataError::TooShort {
                split: Split::Heldout,
                found,
                what: "one prediction".to_owned(),
                needed: 2,
                smaller: "seq_len",
            });
        }
        let windows_all = (found - 1).div_ceil(seq as u64);
        let batches = windows_all.div_ceil(rows as u64);
        Ok(Self { tokens, rows, seq, batches, windows_all, is_whole: true })
    }

    /// [`Self::new`], or [`Self::whole`] if the part has fewer than `tokens_min` tokens to predict.
    ///
    /// # Errors
    ///
    /// As [`Self::whole`].
    pub fn at_most(
        tokens: Arc<TokenCache>,
        rows: usize,
        seq: usize,
        tokens_min: u64,
    ) -> Result<Self, DataError> {
        match Self::new(Arc::clone(&tokens), rows, seq, Some(tokens_min)) {
            Err(DataError::TooShort { .. }) => Self::whole(tokens, rows, seq),
            windows => windows,
        }
    }

    /// Whether every token of the part is predicted.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Checks that the batches have a target. `end` is as in [`Self::counts`].
    ///
    /// # Errors
    ///
    /// [`DataError::NothingToPredict`].
    pub fn check_targets(&self, end: Option<i32>) -> Result<(), DataError> {
        if self.counts_all() && end.is_none() {
            return Ok(());
        }
        let mut batch = self.buffer();
        let has_any = (0..self.batches).any(|index| {
            self.fill(index, &mut batch);
            batch.counted(end) > 0
        });
        if has_any {
            return Ok(());
        }
        Err(DataError::NothingToPredict {
            split: Split::Heldout,
            tokens: self.tokens.len(Split::Heldout),
            windows: self.windows_all.min(self.batches * self.rows as u64),
            seq: self.seq,
            why: match end {
                Some(_) => "each token begins a document, or counts in no loss",
                None => "no token counts in the loss",
            },
        })
    }

    /// Whether every place of every batch is a target that counts.
    fn counts_all(&self) -> bool {
        let part = Split::Heldout;
        !self.is_whole && self.tokens.counted(part) == self.tokens.len(part)
    }

    /// Number of batches, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> u64 {
        self.batches
    }

    /// Places of all batches.
    pub fn tokens(&self) -> u64 {
        self.batches * self.rows as u64 * self.seq as u64
    }

    /// Number of counted targets of each batch; if documents are masked, targets after an `end`
    /// token do not count.
    pub fn counts(&self, end: Option<i32>) -> Vec<u64> {
        if self.counts_all() && end.is_none() {
            return vec![self.rows as u64 * self.seq as u64; self.batches as usize];
        }
        let mut batch = self.buffer();
        let of_batch = |index| {
            self.fill(index, &mut batch);
            batch.counted(end)
        };
        (0..self.batches).map(of_batch).collect()
    }

    /// Positions of the predicted tokens in the held-out part, in order.
    pub fn predictions(&self) -> impl Iterator<Item = usize> {
        let windows = (self.batches * self.rows as u64).min(self.windows_all);
        let found = self.tokens.len(Split::Heldout) as usize;
        let of_window = move |window| {
            let start = self.start(window) as usize;
            start + 1..=(start + self.seq).min(found - 1)
        };
        let counts = |&index: &usize| self.tokens.counts(Split::Heldout, index);
        (0..windows).flat_map(of_window).filter(counts)
    }

    /// First token of a window.
    fn start(&self, window: u64) -> u64 {
        if self.is_whole {
            return window * self.seq as u64;
        }
        let windows = u128::from(self.batches) * self.rows as u128;
        let place = u128::from(window) * u128::from(self.windows_all) / windows;
        place as u64 * self.seq as u64
    }

    /// A batch of the right size for [`Self::fill`].
    pub fn buffer(&self) -> Batch {
        Batch::zeros(self.rows, self.seq)
    }

    /// Writes batch `index` into a batch from [`Self::buffer`].
    ///
    /// # Panics
    ///
    /// If `index` is not below [`Self::len`], or the size of `batch` differs.
    pub fn fill(&self, index: u64, batch: &mut Batch) {
        assert!(index < self.batches, "batch {index} of {}", self.batches);
        batch.index = index;
        for row in 0..self.rows {
            let start = self.start(index * self.rows as u64 + row as u64);
            let left = self.tokens.len(Split::Heldout).saturating_sub(start + 1);
            let seq = (self.seq as u64).min(left) as usize;
            if seq == self.seq {
                batch.set_row(row, self.seq, &self.tokens, Split::Heldout, start);
                continue;
            }
            let place = row * self.seq..(row + 1) * self.seq;
            let inputs = &mut batch.inputs[place.clone()];
            let targets = &mut batch.targets[place];
            inputs.fill(0);
            targets.fill(IGNORED_TARGET);
            if seq > 0 {
                self.tokens.copy_i32(Split::Heldout, start, &mut inputs[..seq]);
                self.tokens.copy_targets(Split::Heldout, start + 1, &mut targets[..seq]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counting(heldout: u32) -> Arc<TokenCache> {
        Arc::new(TokenCache::in_memory(&[], &(0..heldout).collect::<Vec<_>>()))
    }

    #[test]
    fn windows_follow_each_other() {
        let windows = HeldoutWindows::new(counting(100), 3, 4, None).unwrap();
        assert_eq!(windows.len(), 8);
        let mut batch = windows.buffer();
        let mut inputs = Vec::new();
        let mut targets = Vec::new();
        for index in 0..windows.len() {
            windows.fill(index, &mut batch);
            inputs.extend_from_slice(&batch.inputs);
            targets.extend_from_slice(&batch.targets);
        }
        assert!(inputs.into_iter().eq(0..96));
        assert!(targets.into_iter().eq(1..97));
    }

    #[test]
    fn few_windows_are_spread_over_the_whole_part() {
        let windows = HeldoutWindows::new(counting(1001), 2, 10, Some(60)).unwrap();
        let mut batch = windows.buffer();
        let mut starts = Vec::new();
        let mut targets = Vec::new();
        for index in 0..windows.len() {
            windows.fill(index, &mut batch);
            starts.extend(batch.inputs.iter().step_by(10).copied());
            targets.extend(batch.targets.iter().map(|&target| target as usize));
        }
        // 100 windows fit; 6 are wanted.
        assert_eq!(starts, [0, 160, 330, 500, 660, 830]);
        assert!(windows.predictions().eq(targets), "each token is its own position");
    }

    #[test]
    fn the_whole_part_is_predicted_once() {
        for (found, rows, seq) in [(2, 1, 8), (9, 2, 4), (10, 2, 4), (17, 3, 4), (40, 3, 5)] {
            let windows = HeldoutWindows::whole(counting(found), rows, seq).unwrap();
            let mut batch = windows.buffer();
            let mut pairs = Vec::new();
            for index in 0..windows.len() {
                windows.fill(index, &mut batch);
                let of_batch = batch.inputs.iter().zip(&batch.targets);
                pairs.extend(of_batch.filter(|(_, target)| **target >= 0).map(|(a, b)| (*a, *b)));
            }
            assert!(pairs.into_iter().eq((1..found as i32).map(|target| (target - 1, target))));
            assert!(windows.predictions().eq(1..found as usize));
            assert_eq!(windows.counts(None).iter().sum::<u64>(), u64::from(found) - 1);
            // Token 0 ends a document: the token after it is no target.
            assert_eq!(windows.counts(Some(0)).iter().sum::<u64>(), u64::from(found) - 2);
        }
        assert!(HeldoutWindows::whole(counting(1), 1, 4).is_err());
        assert!(HeldoutWindows::at_most(counting(20), 2, 4, 1000).unwrap().is_whole());
        assert!(!HeldoutWindows::at_most(counting(20), 2, 4, 8).unwrap().is_whole());
    }

    /// An evaluation of nothing had a loss of 0 and a perplexity of 1.
    #[test]
    fn issue_31_windows_with_nothing_to_predict_are_refused() {
        let tokens = TokenCache::in_memory_counted((&[], &[]), (&[0; 9], &[true; 9]));
        let windows = HeldoutWindows::new(Arc::new(tokens), 2, 4, None).unwrap();
        assert!(windows.check_targets(None).is_ok());
        assert_eq!(
            windows.check_targets(Some(0)).unwrap_err().to_string(),
            "the held-out part has 9 tokens, and nothing to predict in the 2 windows of 4 tokens \
             that an evaluation reads: each token begins a document, or counts in no loss\nhint: \
             give other data to evaluate on with `--eval-data`, or a larger `eval_tokens`"
        );
        let mut counts = [false; 9];
        let check = |counts: &[bool], expected: u64| {
            let tokens = TokenCache::in_memory_counted((&[], &[]), (&[5; 9], counts));
            let windows = HeldoutWindows::new(Arc::new(tokens), 2, 4, None).unwrap();
            assert_eq!(windows.check_targets(None).is_ok(), expected > 0);
            assert_eq!(windows.counts(None).iter().sum::<u64>(), expected);
            assert_eq!(windows.predictions().count() as u64, expected);
        };
        check(&counts, 0);
        // The first token is never a target.
        counts[0] = true;
        check(&counts, 0);
        counts[8] = true;
        check(&counts, 1);
    }

    #[test]
    fn as_few_batches_as_cover_the_tokens() {
        let check = |tokens_min, expected: u64| {
            let windows = HeldoutWindows::new(counting(100), 2, 4, Some(tokens_min)).unwrap();
            assert_eq!((windows.len(), windows.tokens()), (expected, 8 * expected));
        };
        check(0, 1);
        check(8, 1);
        check(9, 2);
        check(96, 12);
    }

    #[test]
    fn short_data_is_an_error() {
        let check = |heldout, tokens_min, expected: &str| {
            let error = HeldoutWindows::new(counting(heldout), 2, 4, tokens_min).unwrap_err();
            assert_eq!(error.to_string(), expected);
        };
        check(
            8,
            None,
            "the held-out part has 8 tokens; an evaluation on 1 batch of 2 x 4 tokens needs \
             9\nhint: give more data, or a smaller `batch_size`",
        );
        check(
            0,
            None,
            "the held-out part has 0 tokens; an evaluation on 1 batch of 2 x 4 tokens needs \
             9\nhint: give more data, or a smaller `batch_size`",
        );
        check(
            80,
            Some(80),
            "the held-out part has 80 tokens; an evaluation on 10 batches of 2 x 4 tokens needs \
             81\nhint: give more data, or a smaller `eval_tokens`",
        );
    }
}
