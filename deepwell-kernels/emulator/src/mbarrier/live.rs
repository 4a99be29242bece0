//! Bit set of the 8-byte words of a CTA's shared memory that hold a live mbarrier.

/// One bit per 8-byte word, with bounds on the words that are set.
#[derive(Clone, Debug, Default)]
pub(super) struct LiveWords {
    bits: Vec<u64>,
    /// Offset before which no object is live.
    start: u32,
    /// Offset from which on no object is live; 0 if there is none.
    end: u32,
}

impl LiveWords {
    pub(super) fn set(&mut self, offset: u32) {
        let word = (offset / 8) as usize;
        if self.bits.len() <= word / 64 {
            self.bits.resize(word / 64 + 1, 0);
        }
        self.bits[word / 64] |= 1 << (word % 64);
        self.start = if self.end == 0 { offset } else { self.start.min(offset) };
        self.end = self.end.max(offset + 8);
    }

    pub(super) fn clear(&mut self, offset: u32) {
        let word = (offset / 8) as usize;
        if let Some(bits) = self.bits.get_mut(word / 64) {
            *bits &= !(1 << (word % 64));
        }
    }

    pub(super) fn reset(&mut self) {
        *self = LiveWords::default();
    }

    /// Returns the first live object that overlaps the `bytes` bytes at `offset`.
    #[inline]
    pub(super) fn first_in(&self, offset: u32, bytes: u32) -> Option<u32> {
        let last = offset.saturating_add(bytes);
        if offset >= self.end || last <= self.start {
            return None;
        }
        self.search(offset.max(self.start), last.min(self.end))
    }

    fn search(&self, offset: u32, end: u32) -> Option<u32> {
        (offset / 8..end.div_ceil(8))
            .find(|word| {
                let bits = self.bits.get((word / 64) as usize).copied().unwrap_or(0);
                bits >> (word % 64) & 1 == 1
            })
            .map(|word| word * 8)
    }
}
