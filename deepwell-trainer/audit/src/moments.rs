//! Moments in FP32, decoded if they are stored in eight bits, and the error that storage allows.

use std::borrow::Cow;

use deepwell_ir::ops::MomentFormat;
use deepwell_precision::moments::{self, BLOCK, BLOCK_BYTES, Moment};

use super::view::View;

/// A moment of one parameter.
pub(super) struct StoredMoment<'a> {
    stored: View<'a>,
    /// The FP32 elements.
    bytes: Cow<'a, [u8]>,
    shape: &'a [usize],
    format: MomentFormat,
    moment: Moment,
}

impl<'a> StoredMoment<'a> {
    /// `shape` is the parameter's.
    pub(super) fn new(
        stored: View<'a>,
        shape: &'a [usize],
        format: MomentFormat,
        moment: Moment,
    ) -> StoredMoment<'a> {
        let bytes = match format {
            MomentFormat::Fp32 => Cow::Borrowed(stored.bytes),
            MomentFormat::Fp8 => {
                let mut values = [0.0; BLOCK];
                let blocks = stored.bytes.as_chunks::<BLOCK_BYTES>().0;
                let decode = |block| {
                    moments::decode(block, moment, &mut values);
                    values.map(f32::to_le_bytes)
                };
                Cow::Owned(blocks.iter().flat_map(decode).flatten().collect())
            }
        };
        StoredMoment { stored, bytes, shape, format, moment }
    }

    /// The elements in FP32.
    pub(super) fn view(&self) -> View<'_> {
        let (name, shape) = (self.stored.name, self.shape);
        View { name, shape, dtype: deepwell_ir::DType::F32, bytes: &self.bytes }
    }

    /// Largest error of an element due to its storage: the distance of two codes, an eighth of the
    /// number, or the smallest code.
    pub(super) fn storage_error(&self, index: usize, expected: f64) -> f64 {
        if self.format == MomentFormat::Fp32 {
            return 0.0;
        }
        let block = &self.stored.bytes[index / BLOCK * BLOCK_BYTES..][..BLOCK_BYTES];
        let [.., a, b, c, d] = *block else { return 0.0 };
        let smallest = f64::from(f32::from_le_bytes([a, b, c, d])) / 512.0;
        match self.moment {
            Moment::First => expected.abs() / 8.0 + smallest,
            // Of a root r by e: 2 r e + e^2.
            Moment::Second => {
                let root = expected.sqrt();
                let error = root / 8.0 + smallest;
                (2.0 * root + error) * error
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::DType;

    use super::*;

    /// Every element of an encoded block is within the error, and not within a quarter of it.
    #[test]
    fn the_error_is_that_of_the_storage() {
        let values: [f32; BLOCK] = std::array::from_fn(|i| (i as f32 + 0.5).powi(2) * 1e-5);
        for moment in [Moment::First, Moment::Second] {
            let mut worst = 0f64;
            for random in [0, u32::MAX] {
                let mut block = [0; BLOCK_BYTES];
                moments::encode(&values, moment, &[random; BLOCK], &mut block);
                let shape = [1, BLOCK_BYTES];
                let stored = View { name: "m", shape: &shape, dtype: DType::E4m3, bytes: &block };
                let stored = StoredMoment::new(stored, &[BLOCK], MomentFormat::Fp8, moment);
                for (index, &value) in values.iter().enumerate() {
                    let error = f64::from(stored.view().float(index) - value).abs();
                    worst = worst.max(error / stored.storage_error(index, value.into()));
                }
            }
            assert!((0.25..=1.0).contains(&worst), "{moment:?}: {worst}");
        }
    }
}
