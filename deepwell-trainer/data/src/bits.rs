//! A bit for each token: whether the token counts as a target.

/// A sequence of bits, the first bit in the lowest place of the first byte.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bits {
    bytes: Vec<u8>,
    len: u64,
    ones: u64,
}

impl Bits {
    /// Returns `len` ones.
    pub(crate) fn ones(len: u64) -> Self {
        let mut bytes = vec![0xff; len.div_ceil(8) as usize];
        if let Some(last) = bytes.last_mut().filter(|_| !len.is_multiple_of(8)) {
            *last = (1 << (len % 8)) - 1;
        }
        Self { bytes, len, ones: len }
    }

    pub(crate) fn push(&mut self, bit: bool) {
        if self.len.is_multiple_of(8) {
            self.bytes.push(0);
        }
        if let Some(last) = self.bytes.last_mut().filter(|_| bit) {
            *last |= 1 << (self.len % 8);
            self.ones += 1;
        }
        self.len += 1;
    }

    /// Number of set bits.
    pub(crate) fn count(&self) -> u64 {
        self.ones
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn get(&self, index: u64) -> bool {
        is_set(&self.bytes, index as usize)
    }
}

/// Returns bit `index` of bytes in the layout of [`Bits`].
pub(crate) fn is_set(bytes: &[u8], index: usize) -> bool {
    bytes[index / 8] >> (index % 8) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_read_back() {
        for len in [0, 1, 7, 8, 9, 17] {
            let mut bits = Bits::ones(len);
            assert_eq!((bits.count(), bits.bytes().len() as u64), (len, len.div_ceil(8)));
            for index in 0..20 {
                bits.push(index % 3 == 0);
            }
            assert_eq!(bits.count(), len + 7);
            let expected = |index: u64| index < len || (index - len).is_multiple_of(3);
            assert!((0..len + 20).all(|index| bits.get(index) == expected(index)), "{len}");
        }
    }
}
