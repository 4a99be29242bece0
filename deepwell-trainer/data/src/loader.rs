//! Training batches in a fixed pseudo-random order, prefetched by a thread.
//!
//! Order. One part of the data is cut into windows of `seq` tokens that do not overlap; an epoch
//! visits each window once in the order of a [`Permutation`], and every epoch has another offset
//! and permutation. Row *r* of batch *i* is sample `i * batch + r` of the endless sequence of
//! epochs, so a batch is a function of (seed, *i*).
//!
//! Protocol. Two buffers circulate between the caller and the thread:
//!
//! ```text
//!            empty channel (room for 2)
//!   caller ────────────────────────────▶ thread: fills the buffer with the next batch
//!     ▲                                    │
//!     └──────────── full channel (room for 2)
//! ```
//!
//! A buffer belongs to the side that received it from a channel. The caller keeps the last batch,
//! and returns it through the empty channel when it requests the next batch. Sending never blocks,
//! because each channel has room for both buffers. The thread ends when the caller drops its ends
//! of the channels; after both buffers have circulated once, nothing is allocated.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use deepwell_ir::ops::IGNORED_TARGET;
use deepwell_precision::random::split_mix64 as mix;

use super::permute::Permutation;
use super::{DataError, Split, TokenCache};

/// One batch: `rows` windows of `seq` tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Index of the batch.
    pub index: u64,
    /// Inputs of the model, `[rows * seq]`, row by row.
    pub inputs: Vec<i32>,
    /// The token after each input, `[rows * seq]`; `IGNORED_TARGET` of `deepwell_ir` if the token
    /// does not count in the loss.
    pub targets: Vec<i32>,
}

impl Batch {
    /// A batch of zeros.
    pub fn zeros(rows: usize, seq: usize) -> Self {
        Self { index: 0, inputs: vec![0; rows * seq], targets: vec![0; rows * seq] }
    }

    /// Number of counted targets: all except ignored targets and, if documents are masked, targets
    /// after an `end` token.
    pub fn counted(&self, end: Option<i32>) -> u64 {
        let pairs = self.inputs.iter().zip(&self.targets);
        let counts =
            |(input, target): &(&i32, &i32)| **target != IGNORED_TARGET && Some(**input) != end;
        pairs.filter(counts).count() as u64
    }

    /// Copies a window and its targets into row `row`.
    pub(crate) fn set_row(
        &mut self,
        row: usize,
        seq: usize,
        tokens: &TokenCache,
        split: Split,
        start: u64,
    ) {
        let range = row * seq..(row + 1) * seq;
        tokens.copy_i32(split, start, &mut self.inputs[range.clone()]);
        tokens.copy_targets(split, start + 1, &mut self.targets[range]);
    }
}

/// Draws training batches, prefetched by a separate thread.
///
/// One part of the data is cut into windows of `seq` tokens that do not overlap. An epoch visits
/// each window once in a pseudo-random order; every epoch has another offset and order. Row *r* of
/// batch *i* is sample `i * rows + r` of the endless sequence of epochs, so a batch is a function
/// of only the seed and *i*.
#[derive(Debug)]
pub struct Loader {
    sampler: Sampler,
    next_index: u64,
    current: Option<Batch>,
    worker: Option<Worker>,
}

#[derive(Debug)]
struct Worker {
    full: Receiver<Batch>,
    empty: SyncSender<Batch>,
    thread: JoinHandle<()>,
}

/// Knows the tokens of every batch.
#[derive(Clone, Debug)]
struct Sampler {
    tokens: Arc<TokenCache>,
    split: Split,
    rows: usize,
    seq: usize,
    seed: u64,
    windows_per_epoch: u64,
    /// Possible offsets of an epoch's first window: `0..offsets`.
    offsets: u64,
}

impl Loader {
    /// Batches of `rows` windows of `seq` tokens from one part.
    ///
    /// # Errors
    ///
    /// [`DataError::BatchShape`] for a zero; [`DataError::TooShort`] if the part has fewer than
    /// `seq + 1` tokens.
    pub fn new(
        tokens: Arc<TokenCache>,
        split: Split,
        rows: usize,
        seq: usize,
        seed: u64,
    ) -> Result<Self, DataError> {
        check_shape(rows, seq)?;
        let found = tokens.len(split);
        let window = seq as u64;
        if found < window + 1 {
            return Err(DataError::TooShort {
                split,
                found,
                what: format!("a window of {seq} tokens and its target"),
                needed: window + 1,
                smaller: "seq_len",
            });
        }
        // The number of windows that fit after every offset, so that all epochs have the same
        // length.
        let windows_per_epoch = ((found - window) / window).max(1);
        let offsets = (found - windows_per_epoch * window).min(window);
        let sampler = Sampler { tokens, split, rows, seq, seed, windows_per_epoch, offsets };
        Ok(Self { sampler, next_index: 0, current: None, worker: None })
    }

    /// Makes the next call of [`Self::next_batch`] return batch `batch_index`, as if all earlier
    /// batches had been drawn.
    pub fn start_at(&mut self, batch_index: u64) {
        self.stop();
        self.next_index = batch_index;
    }

    /// Number of the batch that the next call of [`Self::next_batch`] returns: the loader's only
    /// state in a checkpoint.
    pub fn next_index(&self) -> u64 {
        self.next_index
    }

    /// Windows in one epoch.
    pub fn windows_per_epoch(&self) -> u64 {
        self.sampler.windows_per_epoch
    }

    /// The next batch. The first call starts the thread.
    ///
    /// # Errors
    ///
    /// [`DataError::LoaderStopped`] if the thread could not be started or ended early.
    pub fn next_batch(&mut self) -> Result<&Batch, DataError> {
        let stopped = DataError::LoaderStopped { batch_index: self.next_index };
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None => match self.sampler.spawn(self.next_index) {
                Ok(worker) => worker,
                Err(_) => return Err(stopped),
            },
        };
        if let Some(used) = self.current.take()
            && worker.empty.send(used).is_err()
        {
            return Err(stopped);
        }
        let Ok(batch) = worker.full.recv() else { return Err(stopped) };
        debug_assert_eq!(batch.index, self.next_index);
        self.next_index += 1;
        self.worker = Some(worker);
        Ok(self.current.insert(batch))
    }

    fn stop(&mut self) {
        self.current = None;
        if let Some(Worker { full, empty, thread }) = self.worker.take() {
            drop((full, empty));
            // A panic of the thread was reported by `next_batch`, or its batch is not needed.
            let _ = thread.join();
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.stop();
    }
}

pub(crate) fn check_shape(rows: usize, seq: usize) -> Result<(), DataError> {
    match rows.checked_mul(seq) {
        Some(1..) => Ok(()),
        _ => Err(DataError::BatchShape { batch: rows, seq }),
    }
}

impl Sampler {
    fn fill(&self, index: u64, batch: &mut Batch) {
        batch.index = index;
        for row in 0..self.rows {
            let sample = u128::from(index) * self.rows as u128 + row as u128;
            let windows = u128::from(self.windows_per_epoch);
            // An epoch number above 2^64 would take longer than the universe has existed.
            let epoch = (sample / windows) as u64;
            let window = (sample % windows) as u64;
            let epoch_seed = mix(mix(self.seed).wrapping_add(epoch));
            let offset = mix(epoch_seed ^ 0x6f66_6673_6574) % self.offsets;
            let window = Permutation::new(self.windows_per_epoch, epoch_seed).get(window);
            let start = offset + window * self.seq as u64;
            batch.set_row(row, self.seq, &self.tokens, self.split, start);
        }
    }

    fn spawn(&self, first_index: u64) -> std::io::Result<Worker> {
        let (empty, empty_from_caller) = sync_channel::<Batch>(2);
        let (full_to_caller, full) = sync_channel::<Batch>(2);
        let sampler = self.clone();
        for _ in 0..2 {
            // The channel has room for two, and the other end still exists.
            let _ = empty.send(Batch::zeros(self.rows, self.seq));
        }
        let thread = std::thread::Builder::new().name("batches".to_owned()).spawn(move || {
            for index in first_index.. {
                let Ok(mut batch) = empty_from_caller.recv() else { return };
                sampler.fill(index, &mut batch);
                if full_to_caller.send(batch).is_err() {
                    return;
                }
            }
        })?;
        Ok(Worker { full, empty, thread })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Tokens equal to their position.
    fn counting(train: u32) -> Arc<TokenCache> {
        let train: Vec<u32> = (0..train).collect();
        Arc::new(TokenCache::in_memory(&train, &[]))
    }

    fn take(loader: &mut Loader, count: usize) -> Vec<Batch> {
        (0..count).map(|_| loader.next_batch().unwrap().clone()).collect()
    }

    #[test]
    fn targets_are_the_next_tokens() {
        let mut loader = Loader::new(counting(1000), Split::Train, 3, 7, 5).unwrap();
        for batch in take(&mut loader, 200) {
            for (row, (inputs, targets)) in
                batch.inputs.chunks(7).zip(batch.targets.chunks(7)).enumerate()
            {
                let first = inputs[0];
                assert!(inputs.iter().copied().eq(first..first + 7), "row {row}");
                assert!(targets.iter().copied().eq(first + 1..first + 8), "row {row}");
            }
        }
    }

    #[test]
    fn an_epoch_visits_every_window_once_and_the_next_one_cuts_elsewhere() {
        for (tokens, seq, windows) in [(1000, 7, 141), (15, 7, 1), (8, 7, 1), (2, 1, 1), (64, 8, 7)]
        {
            let mut loader = Loader::new(counting(tokens), Split::Train, 1, seq, 9).unwrap();
            assert_eq!(loader.windows_per_epoch(), windows, "{tokens} {seq}");
            let mut offsets = HashSet::new();
            for _ in 0..20 {
                let epoch = take(&mut loader, windows as usize);
                let mut starts: Vec<usize> =
                    epoch.iter().map(|batch| batch.inputs[0] as usize).collect();
                starts.sort_unstable();
                let offset = starts[0];
                offsets.insert(offset);
                let expected = (0..windows as usize).map(|i| offset + i * seq);
                assert!(starts.iter().copied().eq(expected), "{tokens} {seq} {starts:?}");
                assert!(starts.last().unwrap() + seq < tokens as usize);
            }
            let possible = (tokens as usize - windows as usize * seq).min(seq);
            assert!(offsets.len() > 1 || possible == 1, "{tokens} {seq} {offsets:?}");
        }
    }

    #[test]
    fn a_batch_is_a_function_of_seed_and_index() {
        let tokens = counting(500);
        let mut loader = Loader::new(tokens.clone(), Split::Train, 4, 8, 1).unwrap();
        let all = take(&mut loader, 100);
        for start in [0, 1, 14, 15, 16, 57, 99] {
            let mut resumed = Loader::new(tokens.clone(), Split::Train, 4, 8, 1).unwrap();
            resumed.start_at(start);
            assert_eq!(resumed.next_index(), start);
            assert_eq!(take(&mut resumed, 100 - start as usize), all[start as usize..]);
        }
        loader.start_at(3);
        assert_eq!(take(&mut loader, 5), all[3..8]);
        let other = take(&mut Loader::new(tokens, Split::Train, 4, 8, 2).unwrap(), 100);
        assert_ne!(all, other);
        let far = u64::MAX - 1;
        loader.start_at(far);
        assert_eq!(loader.next_batch().unwrap().index, far);
    }

    #[test]
    fn the_order_is_pinned() {
        // A change here changes every run: it must be intended, and listed in the change log.
        let mut loader = Loader::new(counting(1000), Split::Train, 2, 4, 42).unwrap();
        let firsts: Vec<[i32; 2]> = take(&mut loader, 3)
            .into_iter()
            .map(|batch| [batch.inputs[0], batch.inputs[4]])
            .collect();
        assert_eq!(firsts, PINNED);
    }
    const PINNED: [[i32; 2]; 3] = [[132, 456], [616, 584], [588, 100]];

    #[test]
    fn two_buffers_go_round() {
        let mut loader = Loader::new(counting(1000), Split::Train, 2, 8, 3).unwrap();
        let buffers: HashSet<*const i32> = (0..50)
            .map(|_| {
                let batch = loader.next_batch().unwrap();
                assert_eq!((batch.inputs.capacity(), batch.targets.capacity()), (16, 16));
                batch.inputs.as_ptr()
            })
            .collect();
        assert_eq!(buffers.len(), 2);
    }

    #[test]
    fn bad_shapes_and_short_data_are_errors() {
        let check = |tokens, rows, seq, expected: &str| {
            let error = Loader::new(counting(tokens), Split::Train, rows, seq, 0).unwrap_err();
            assert_eq!(error.to_string(), expected);
        };
        check(
            1,
            8,
            128,
            "the training part has 1 tokens; a window of 128 tokens and its target needs \
             129\nhint: give more data, or a smaller `seq_len`",
        );
        check(
            128,
            8,
            128,
            "the training part has 128 tokens; a window of 128 tokens and its target needs \
             129\nhint: give more data, or a smaller `seq_len`",
        );
        check(9, 0, 4, "a batch needs at least one row and one token a row, got 0 x 4");
        check(9, 4, 0, "a batch needs at least one row and one token a row, got 4 x 0");
    }
}
