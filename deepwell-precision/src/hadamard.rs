//! The 16-point random Hadamard transform: signs, then an orthogonal butterfly.
//!
//! `y = H (s * x) / 4` with the Walsh-Hadamard matrix H of natural order and a sign `s` per
//! position. Both operands of a GEMM that contracts over the transformed axis get the same signs,
//! so the result of the GEMM does not change; outliers are spread over their group of 16 before
//! quantization. NVFP4 training applies it to both operands of the weight gradient, and rounds the
//! result to BF16 ([`Hadamard16::forward_bf16`]) before scales are computed.
//!
//! Additions run in one fixed order (distance 1, 2, 4, 8) and the division by 4 is exact unless it
//! underflows, so the bits are the same everywhere.

use serde::{Deserialize, Serialize};

use crate::Philox;
use crate::error::{QuantizeError, Shape};
use crate::simd::{Kernel, Level};
use crate::threads::{ELEMENTS_PER_TASK, join};

/// Elements of one transform.
pub const POINTS: usize = 16;

/// The transform with one vector of signs. A file holds the number of [`Hadamard16::negative`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Hadamard16 {
    /// Bit i set: the sign of element i is flipped. Zero is the plain transform.
    pub negative: u16,
}

impl Hadamard16 {
    /// The transform of training: the signs `+++-+------+-+--`, the same for all layers, steps and
    /// ranks. Transformer Engine uses these signs.
    pub const TRAINING: Self = Self { negative: 0xD7E8 };

    /// Signs from the low half of the first word of stream 0 of [`Philox`] with this seed.
    #[must_use]
    pub const fn from_seed(seed: u64) -> Self {
        Self { negative: Philox { seed, stream: 0 }.word(0) as u16 }
    }

    /// Transforms one group in place.
    ///
    /// ```
    /// use deepwell_precision::hadamard::Hadamard16;
    /// let transform = Hadamard16::from_seed(1);
    /// let mut x = [0.0; 16];
    /// x[3] = 8.0;
    /// transform.forward(&mut x);
    /// assert!(x.iter().all(|x| x.abs() == 2.0)); // the outlier is spread
    /// transform.inverse(&mut x);
    /// assert_eq!((x[3], x[4]), (8.0, 0.0));
    /// ```
    #[inline(always)]
    pub fn forward(&self, x: &mut [f32; POINTS]) {
        self.change_signs(x);
        butterfly(x);
    }

    /// Transforms one group in place and rounds each element to BF16, to nearest even. A sum beyond
    /// the largest BF16 becomes infinite; a sum of zeros is positive, as in an accumulator.
    #[inline(always)]
    pub fn forward_bf16(&self, x: &mut [f32; POINTS]) {
        self.forward(x);
        x.iter_mut().for_each(|x| *x = half::bf16::from_f32(*x + 0.0).to_f32());
    }

    /// Undoes [`Hadamard16::forward`], up to rounding.
    #[inline(always)]
    pub fn inverse(&self, x: &mut [f32; POINTS]) {
        butterfly(x);
        self.change_signs(x);
    }

    /// Transforms every group of 16 along the rows of a row-major [rows, cols] matrix in place.
    ///
    /// # Errors
    ///
    /// [`QuantizeError::Length`] when `x` does not fit the shape, [`QuantizeError::Multiple`] when
    /// `cols` is not a multiple of 16; nothing is written in these cases.
    pub fn forward_rows(
        &self,
        x: &mut [f32],
        rows: usize,
        cols: usize,
    ) -> Result<(), QuantizeError> {
        Rows { transform: *self, inverse: false, x: groups(x, rows, cols)? }.run();
        Ok(())
    }

    /// Undoes [`Hadamard16::forward_rows`], up to rounding.
    ///
    /// # Errors
    ///
    /// As [`Hadamard16::forward_rows`].
    pub fn inverse_rows(
        &self,
        x: &mut [f32],
        rows: usize,
        cols: usize,
    ) -> Result<(), QuantizeError> {
        Rows { transform: *self, inverse: true, x: groups(x, rows, cols)? }.run();
        Ok(())
    }

    #[inline(always)]
    fn change_signs(self, x: &mut [f32; POINTS]) {
        for (i, x) in x.iter_mut().enumerate() {
            *x = f32::from_bits(x.to_bits() ^ (u32::from(self.negative >> i & 1) << 31));
        }
    }
}

/// The orthogonal transform without signs; its own inverse.
#[inline(always)]
fn butterfly(x: &mut [f32; POINTS]) {
    for distance in [1, 2, 4, 8] {
        for i in 0..POINTS {
            if i & distance == 0 {
                let (a, b) = (x[i], x[i + distance]);
                (x[i], x[i + distance]) = (a + b, a - b);
            }
        }
    }
    x.iter_mut().for_each(|x| *x *= 0.25);
}

/// Splits a matrix into groups.
fn groups(x: &mut [f32], rows: usize, cols: usize) -> Result<&mut [[f32; 16]], QuantizeError> {
    Shape::new(rows, cols)?.expect("x", rows * cols, x.len())?;
    match cols.is_multiple_of(POINTS) {
        true => Ok(x.as_chunks_mut().0),
        false => Err(QuantizeError::Multiple { cols, multiple: POINTS }),
    }
}

/// Groups to transform.
struct Rows<'a> {
    transform: Hadamard16,
    inverse: bool,
    x: &'a mut [[f32; POINTS]],
}

impl Rows<'_> {
    /// Halves the groups until tasks are small, then runs the kernel.
    fn run(self) {
        let Self { transform, inverse, x } = self;
        if x.len() <= ELEMENTS_PER_TASK / POINTS {
            return Level::Native.run(Rows { transform, inverse, x });
        }
        let (left, right) = x.split_at_mut(x.len() / 2);
        join(
            || Rows { transform, inverse, x: left }.run(),
            || Rows { transform, inverse, x: right }.run(),
        );
    }
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { transform, inverse, x } = self;
        if inverse {
            x.iter_mut().for_each(|group| transform.inverse(group));
        } else {
            x.iter_mut().for_each(|group| transform.forward(group));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entry (row, column) of H is (-1)^n, with n the number of bits set in both indices.
    #[test]
    fn transform_is_the_matrix() {
        for negative in [0, 1, 0x8001, 0xBEEF, u16::MAX] {
            let transform = Hadamard16 { negative };
            // Small integers, so that every sum is exact.
            let x: [f32; 16] = core::array::from_fn(|i| (i * i % 23) as f32 - 7.0);
            let mut got = x;
            transform.forward(&mut got);
            for (row, got) in got.iter().enumerate() {
                let expected: f32 = (0..16)
                    .map(|column: usize| {
                        let is_even = (row & column).count_ones().is_multiple_of(2);
                        let entry = if is_even { 1.0 } else { -1.0 };
                        let sign = if negative >> column & 1 == 0 { 1.0 } else { -1.0 };
                        entry * sign * x[column] / 4.0
                    })
                    .sum();
                assert_eq!(*got, expected, "{negative:#x} {row}");
            }
            transform.inverse(&mut got);
            assert_eq!(got, x, "{negative:#x}");
        }
    }

    /// Dot products over the transformed axis are preserved, exactly for integers.
    #[test]
    fn products_stay() {
        let (rows, cols) = (5000, 48);
        let transform = Hadamard16::from_seed(11);
        let a: Vec<f32> = (0..rows * cols).map(|i| (i % 17) as f32 - 8.0).collect();
        let b: Vec<f32> = (0..rows * cols).map(|i| (i % 29) as f32 - 14.0).collect();
        let (mut a_t, mut b_t) = (a.clone(), b.clone());
        transform.forward_rows(&mut a_t, rows, cols).unwrap();
        transform.forward_rows(&mut b_t, rows, cols).unwrap();
        let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f32>();
        for row in (0..rows * cols).step_by(cols) {
            let row = row..row + cols;
            assert_eq!(dot(&a_t[row.clone()], &b_t[row.clone()]), dot(&a[row.clone()], &b[row]));
        }
        transform.inverse_rows(&mut a_t, rows, cols).unwrap();
        assert_eq!(a_t, a);
    }

    #[test]
    fn refusals() {
        let transform = Hadamard16::default();
        for (len, rows, cols, expected) in [
            (31, 1, 32, "`x` of a 1 x 32 matrix: expected 32 elements, got 31"),
            (24, 1, 24, "expected rows of a multiple of 16 elements, got 24"),
        ] {
            let error = transform.forward_rows(&mut vec![0.0; len], rows, cols).unwrap_err();
            assert_eq!(error.to_string(), expected);
        }
    }
}
