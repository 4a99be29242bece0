//! Counter-based random bits: Philox 4x32-10, the generator of stochastic rounding.
//!
//! A block of four words is a function of key and counter alone, so element i of a tensor gets the
//! same bits on every backend and in any order of threads. Source: Salmon, Moraes, Dror, Shaw,
//! "Parallel random numbers: as easy as 1, 2, 3" (SC11).

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// The four words of a counter under a key.
///
/// ```
/// let words = deepwell_precision::philox::block([0; 4], [0; 2]);
/// assert_eq!(words, [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
/// ```
#[must_use]
pub const fn block(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut counter, mut key) = (counter, key);
    let mut round = 0;
    while round < ROUNDS {
        counter = one_round(counter, key);
        key = next_key(key);
        round += 1;
    }
    counter
}

/// One of the ten rounds.
#[inline(always)]
const fn one_round([a, b, c, d]: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let product_0 = MULTIPLIERS[0] as u64 * a as u64;
    let product_1 = MULTIPLIERS[1] as u64 * c as u64;
    [
        (product_1 >> 32) as u32 ^ b ^ key[0],
        product_1 as u32,
        (product_0 >> 32) as u32 ^ d ^ key[1],
        product_0 as u32,
    ]
}

/// The key of the next round.
#[inline(always)]
const fn next_key(key: [u32; 2]) -> [u32; 2] {
    [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])]
}

/// A stream of random words addressed by index: the word of index i is word i % 4 of a block. The
/// block's counter is i / 4 (low word first) followed by the stream (low word first); its key is
/// the seed (low word first).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Philox {
    /// Seed of a run.
    pub seed: u64,
    /// Distinguishes tensors and steps of one run.
    pub stream: u64,
}

/// Blocks that are computed at a time, in the lanes of two AVX-512 registers.
const LANES: usize = 16;
/// Words that [`Philox::fill`] computes at a time.
const WORDS: usize = 4 * LANES;

impl Philox {
    /// The word at `index`.
    #[must_use]
    pub const fn word(&self, index: u64) -> u32 {
        block(self.counter(index / 4), self.key())[(index % 4) as usize]
    }

    /// Fills `words` with the words from index `start` on. Index 0 follows the largest index.
    ///
    /// ```
    /// use deepwell_precision::Philox;
    /// let stream = Philox { seed: 1, stream: 2 };
    /// let mut words = [0; 3];
    /// stream.fill(6, &mut words);
    /// assert_eq!(words, [stream.word(6), stream.word(7), stream.word(8)]);
    /// ```
    #[inline(always)]
    pub fn fill(&self, start: u64, words: &mut [u32]) {
        let mut at = start / 4;
        let mut skip = (start % 4) as usize;
        let mut rest = words;
        while !rest.is_empty() {
            let made = self.blocks(at);
            let len = rest.len().min(WORDS - skip);
            let (now, later) = rest.split_at_mut(len);
            now.copy_from_slice(&made[skip..skip + len]);
            rest = later;
            skip = 0;
            at = at.wrapping_add(LANES as u64);
        }
    }

    const fn counter(&self, at: u64) -> [u32; 4] {
        // Indices end at 2^64, so blocks are counted up to 2^62.
        let at = at & (u64::MAX >> 2);
        [at as u32, (at >> 32) as u32, self.stream as u32, (self.stream >> 32) as u32]
    }

    const fn key(&self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }

    /// The words of [`LANES`] blocks, one per lane.
    #[inline(always)]
    fn blocks(&self, first: u64) -> [u32; WORDS] {
        let mut counters: [[u32; LANES]; 4] = [[0; LANES]; 4];
        for lane in 0..LANES {
            let counter = self.counter(first.wrapping_add(lane as u64));
            for (word, counters) in counters.iter_mut().enumerate() {
                counters[lane] = counter[word];
            }
        }
        let mut key = self.key();
        for _ in 0..ROUNDS {
            for lane in 0..LANES {
                let [a, b, c, d] = &mut counters;
                let next = one_round([a[lane], b[lane], c[lane], d[lane]], key);
                [a[lane], b[lane], c[lane], d[lane]] = next;
            }
            key = next_key(key);
        }
        let mut words = [0; WORDS];
        for (lane, words) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *words = [counters[0][lane], counters[1][lane], counters[2][lane], counters[3][lane]];
        }
        words
    }
}
