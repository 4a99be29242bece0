//! The largest magnitude of a tensor, which determines its f32 scale.

use super::whole_groups;
use crate::error::{QuantizeError, Shape};
use crate::hadamard::POINTS;
use crate::simd::{Kernel, Level};
use crate::source::Values;
use crate::threads::{ELEMENTS_PER_TASK, join};
use crate::{Hadamard16, QuantFormat, Source};

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

/// The amax of a row-major [rows, cols] matrix that [`super::quantize_rows`] quantizes in `format`:
/// [`amax()`], of the transformed matrix if the format has a transform.
///
/// # Errors
///
/// [`QuantizeError::Length`] when `src` does not fit the shape, [`QuantizeError::Multiple`] when a
/// transform does not divide the rows into groups of 16.
pub fn amax_of_rows<S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    format: &QuantFormat,
) -> Result<f32, QuantizeError> {
    Shape::new(rows, cols)?.expect("src", rows * cols, src.len())?;
    whole_groups(format.hadamard, cols)?;
    // A group lies in one row, and 16 elements are a matrix of one column.
    Ok(format.hadamard.map_or_else(|| amax(src), |transform| transformed(src, 1, transform)))
}

/// As [`amax_of_rows`], of a matrix that [`super::quantize_columns`] quantizes.
///
/// # Errors
///
/// As [`amax_of_rows`], for the columns.
pub fn amax_of_columns<S: Source>(
    src: &[S],
    rows: usize,
    cols: usize,
    format: &QuantFormat,
) -> Result<f32, QuantizeError> {
    Shape::new(rows, cols)?.expect("src", rows * cols, src.len())?;
    whole_groups(format.hadamard, rows)?;
    Ok(format.hadamard.map_or_else(|| amax(src), |transform| transformed(src, cols, transform)))
}

/// The largest finite magnitude after a transform of groups of 16 rows.
fn transformed<S: Source>(src: &[S], cols: usize, transform: Hadamard16) -> f32 {
    let band = POINTS * cols;
    if src.len() > ELEMENTS_PER_TASK && src.len() > band {
        let (left, right) = src.split_at((src.len() / 2).next_multiple_of(band));
        let (left, right) =
            join(|| transformed(left, cols, transform), || transformed(right, cols, transform));
        return left.max(right);
    }
    Level::Native.run(Transformed { src, cols, transform })
}

struct Transformed<'a, S> {
    src: &'a [S],
    cols: usize,
    transform: Hadamard16,
}

impl<S: Source> Kernel for Transformed<'_, S> {
    type Output = f32;

    #[inline(always)]
    fn call(self) -> f32 {
        let mut largest = 0.0_f32;
        for band in self.src.chunks_exact((POINTS * self.cols).max(1)) {
            for col in 0..self.cols {
                let mut group: [f32; POINTS] =
                    core::array::from_fn(|row| band[row * self.cols + col].to_f32());
                self.transform.forward_bf16(&mut group);
                let finite = group.iter().filter(|x| x.is_finite());
                largest = finite.fold(largest, |largest, x| largest.max(x.abs()));
            }
        }
        largest
    }
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
