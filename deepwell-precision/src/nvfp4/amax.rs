//! The largest magnitude of a tensor, which determines its f32 scale.

use crate::Source;
use crate::simd::{Kernel, Level};
use crate::source::Values;
use crate::threads::{ELEMENTS_PER_TASK, join};

/// Lanes of the maximum: four AVX-512 registers.
const LANES: usize = 64;
const INFINITY_BITS: u32 = 0x7F80_0000;

/// The largest finite magnitude of `src`, 0 if there is none. Large slices are split over the
/// threads of the current rayon pool.
///
/// ```
/// use deepwell_precision::nvfp4;
/// assert_eq!(nvfp4::amax(&[1.0_f32, -7.0, f32::NAN, f32::NEG_INFINITY]), 7.0);
/// ```
#[must_use]
pub fn amax<S: Source>(src: &[S]) -> f32 {
    f32::from_bits(amax_of(S::values(src)))
}

fn amax_of(values: Values<'_>) -> u32 {
    match values {
        Values::F32(src) => amax_bits(src),
        Values::Bf16(src) => amax_bits(src),
    }
}

fn amax_bits<S: Source>(src: &[S]) -> u32 {
    if src.len() <= ELEMENTS_PER_TASK {
        return Level::Native.run(Task(src));
    }
    let (left, right) = src.split_at(src.len() / 2 / LANES * LANES);
    let (left, right) = join(|| amax_bits(left), || amax_bits(right));
    left.max(right)
}

struct Task<'a, S>(&'a [S]);

impl<S: Source> Kernel for Task<'_, S> {
    type Output = u32;

    #[inline(always)]
    fn call(self) -> u32 {
        let finite = |x: S| {
            let bits = x.to_f32().to_bits() & 0x7FFF_FFFF;
            if bits < INFINITY_BITS { bits } else { 0 }
        };
        let mut largest = [0; LANES];
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        for chunk in chunks {
            for lane in 0..LANES {
                largest[lane] = largest[lane].max(finite(chunk[lane]));
            }
        }
        let of_rest = rest.iter().fold(0, |largest: u32, &x| largest.max(finite(x)));
        largest.iter().fold(of_rest, |a, &b| a.max(b))
    }
}
