//! Random bits by counting: Philox 4x32-10, the generator behind stochastic rounding.
//!
//! A block of four words is a function of key and counter and of nothing else, so element i of a
//! tensor gets the same bits on every backend and in any order of threads. Source: Salmon, Moraes,
//! Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11).

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// The four words of one counter under one key.
///
/// ```
/// let words = deepwell_precision::philox::block([0; 4], [0; 2]);
/// assert_eq!(words, [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
/// ```
#[must_use]
pub const fn block(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut key_0, mut key_1]) = (counter, key);
    let mut round = 0;
    while round < ROUNDS {
        let product_0 = MULTIPLIERS[0] as u64 * a as u64;
        let product_1 = MULTIPLIERS[1] as u64 * c as u64;
        a = (product_1 >> 32) as u32 ^ b ^ key_0;
        c = (product_0 >> 32) as u32 ^ d ^ key_1;
        b = product_1 as u32;
        d = product_0 as u32;
        key_0 = key_0.wrapping_add(KEY_STEPS[0]);
        key_1 = key_1.wrapping_add(KEY_STEPS[1]);
        round += 1;
    }
    [a, b, c, d]
}

/// A stream of random words addressed by index: the word of index i is word i % 4 of the block
/// whose counter is i / 4 (low word first) followed by the stream (low word first), and whose key
/// is the seed (low word first).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Philox {
    /// Seed of a run.
    pub seed: u64,
    /// What tells tensors and steps of one run apart.
    pub stream: u64,
}

impl Philox {
    /// The word at `index`.
    #[must_use]
    pub const fn word(&self, index: u64) -> u32 {
        let at = index / 4;
        let counter =
            [at as u32, (at >> 32) as u32, self.stream as u32, (self.stream >> 32) as u32];
        block(counter, [self.seed as u32, (self.seed >> 32) as u32])[(index % 4) as usize]
    }
}
