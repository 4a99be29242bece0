//! Small generators for initial weights, data order, benchmarks and tests. Stochastic rounding uses
//! [`philox`](crate::philox).
//!
//! The generators must not change: their numbers determine every loss of a run.

/// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64 bits in which every
/// input bit flips about half of the output bits. Applied to a counter, it is a stateless
/// generator.
///
/// ```
/// use deepwell_precision::random::split_mix64;
///
/// assert_eq!(split_mix64(0), 0xe220_a839_7b1d_cdaf);
/// ```
#[must_use]
pub const fn split_mix64(mut z: u64) -> u64 {
    z = z.wrapping_add(SPLIT_MIX64_STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Increment of the state of SplitMix64: 2^64 over the golden ratio.
const SPLIT_MIX64_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64, with its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// The next number.
    pub const fn draw(&mut self) -> u64 {
        let number = split_mix64(self.0);
        self.0 = self.0.wrapping_add(SPLIT_MIX64_STEP);
        number
    }
}

/// Marsaglia's xorshift with shifts of 13, 7 and 17 (2003), with its state, which must not be 0.
///
/// ```
/// use deepwell_precision::random::XorShift64;
///
/// let mut random = XorShift64(1);
/// assert_eq!((random.draw(), random.draw()), (0x4082_2041, 0x1000_4106_0c01_1441));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XorShift64(pub u64);

impl XorShift64 {
    /// The next number.
    pub const fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sequence of Vigna's `splitmix64.c` from the state 1234567.
    #[test]
    fn a_state_gives_the_published_sequence() {
        let mut random = SplitMix64(1_234_567);
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(expected.map(|_| random.draw()), expected);
    }
}
